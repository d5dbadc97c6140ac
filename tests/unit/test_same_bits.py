"""On the CPU a token's logits have the same bits alone and in company, read at once and one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from areno_fn.contracts.batch import Prompts
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import Sampling
from areno_fn.kernels.attention import key_places
from areno_fn.kernels.linear import linear
from areno_fn.models.decoder import DecoderConfig, init
from areno_fn.models.decoder_forward import forward
from areno_fn.models.decoder_policy import DecoderPolicy
from areno_fn.steps.token.experience import experience
from areno_fn.steps.token.rollout import sampler
from areno_fn.steps.token.score import reference_logp

CPU = torch.device("cpu")
CONFIG = DecoderConfig(
    vocab_size=97, hidden_size=48, intermediate_size=80, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=16,
    tie_embeddings=True, initializer_range=0.15,
)  # fmt: skip
PARAMS, POLICY = init(CONFIG, Key.of(1)), DecoderPolicy(CONFIG)


def _cut_alike() -> bool:
    """Whether the BLAS of this machine adds up as `places.py` and `linear.py` say, asked of plain torch."""
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(300, 96, generator=generator), torch.randn(48, 96, generator=generator)
    if any(not torch.equal(F.linear(x[:rows], w), F.linear(x, w)[:rows]) for rows in (4, 8, 64)):
        return False
    p, v = torch.randn(300, 1024, generator=generator), torch.randn(1024, 16, generator=generator)
    for keys in (16, 48, 192, 384, 400):
        short, whole = p[:, :keys], F.pad(p[:, :keys], (0, 512 - keys))
        if any(not torch.equal(short[:rows] @ v[:keys], (whole @ v[:512])[:rows]) for rows in (4, 32)):
            return False
    return True


CUT_ALIKE = _cut_alike()


def same(got: torch.Tensor, wanted: torch.Tensor, about: object = None) -> None:
    """Within a rounding on every machine, and to the bit where the BLAS is one that allows it."""
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0, msg=lambda m: f"{about}: {m}")
    assert not CUT_ALIKE or torch.equal(got, wanted), about


def document(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, CONFIG.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


def alone(tokens: torch.Tensor) -> torch.Tensor:
    return forward(PARAMS, CONFIG, tokens, torch.arange(len(tokens)), torch.zeros_like(tokens))


@pytest.mark.parametrize("length", [*range(1, 200), 383, 384, 385, 511, 512, 513, 704, 705, 895, 896, 1000])
def test_key_places_hold_the_length_and_stay_what_they_are(length: int) -> None:
    places = key_places(length, CPU)
    assert places >= length and places % 16 == 0
    assert key_places(places, CPU) == places
    assert places <= key_places(length + 1, CPU)
    assert not 192 < places % 512 < 384
    assert places - length < (16 if length % 512 <= 192 or length % 512 >= 384 else 192)
    assert key_places(length, torch.device("cuda")) == length


def test_linear_is_the_affine_map_of_any_shape_with_its_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((7,), (1, 7), (3, 7), (4, 7), (5, 7), (2, 3, 7), (70, 7), (0, 7)):
        x, w, b = (torch.randn(s, generator=generator).double().requires_grad_() for s in (shape, (5, 7), (5,)))
        got = linear(x, w, b)
        torch.testing.assert_close(got, x @ w.T + b)
        for ours, theirs in zip(
            torch.autograd.grad(got.sin().sum(), (x, w, b)),
            torch.autograd.grad((x @ w.T + b).sin().sum(), (x, w, b)),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs)


def test_a_row_of_linear_has_the_same_bits_among_any_number_of_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(300, 96, generator=generator), torch.randn(61, 96, generator=generator)
    whole = linear(x, w)
    for rows in (1, 2, 3, 4, 5, 6, 7, 9, 13, 63, 64, 65, 299):
        same(linear(x[:rows], w), whole[:rows], rows)


def test_a_document_has_the_same_bits_whatever_its_length_and_its_company() -> None:
    tokens = document(700)
    whole = alone(tokens)
    for length in (1, 2, 3, 15, 16, 17, 100, 191, 192, 193, 200, 300, 383, 384, 511, 513, 600):
        same(alone(tokens[:length]), whole[:length], length)
    others = [document(5, 1), tokens[:230], document(1, 2), document(90, 3)]
    lengths = torch.tensor([len(x) for x in others])
    segments = torch.repeat_interleave(torch.arange(4), lengths)
    positions = torch.cat([torch.arange(len(x)) for x in others])
    together = forward(PARAMS, CONFIG, torch.cat(others), positions, segments)
    same(together[5:235], whole[:230])


@pytest.mark.parametrize("start", [1, 14, 185, 370, 505])
def test_reading_token_by_token_gives_the_bits_of_reading_at_once(start: int) -> None:
    tokens = document(start + 20)
    whole = alone(tokens)
    logits, cache = POLICY.prefill(PARAMS, tokens[None, :start], torch.tensor([start]), start + 20)
    for place in range(start, start + 20):
        same(logits[0], whole[place - 1], place)
        logits, cache = POLICY.decode(PARAMS, tokens[place : place + 1], cache)


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=40), Sampling(max_tokens=40, temperature=0.7, top_p=0.9)])
def test_what_a_rollout_records_is_what_training_computes_to_the_bit(sampling: Sampling) -> None:
    lengths = torch.tensor([3, 170, 11])
    tokens = torch.stack([document(170, seed) for seed in range(3)])
    prompts = Prompts(tokens=tokens, lengths=lengths, ids=torch.arange(3))
    rollout = sampler(POLICY, (0, 5))
    drawn = rollout(PARAMS, prompts, Key.of(7), sampling, samples=3)
    score = reference_logp(POLICY, sampling)
    for micro_tokens in (1, 150, 10_000):
        for batch in experience(drawn, torch.zeros(9), micro_tokens=micro_tokens):
            same(score(PARAMS, batch.packed), batch.old, micro_tokens)
    for rows in (1, 2, 5):
        again = rollout(PARAMS, prompts, Key.of(7), sampling, samples=3, max_rows=rows)
        assert torch.equal(again.tokens, drawn.tokens)
        same(again.logp, drawn.logp, rows)
