"""Reading with a cache: prefill and decode against the packed forward pass, donation, and what is refused."""

from __future__ import annotations

import pytest
import torch

from areno_fn import tree
from areno_fn.contracts.errors import DonatedError, ModelError
from areno_fn.contracts.key import Key
from areno_fn.contracts.policy import Cache
from areno_fn.kernels.attention import cached_attention
from areno_fn.models.decoder import Decoder, DecoderConfig, init
from areno_fn.models.decoder_cache import decode_in_place
from areno_fn.models.decoder_forward import forward
from areno_fn.models.decoder_policy import DecoderPolicy

CONFIGS = {
    "grouped": DecoderConfig(
        vocab_size=23, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
        qk_norm=True, tie_embeddings=True, initializer_range=0.5,
    ),
    "biased": DecoderConfig(
        vocab_size=23, hidden_size=12, intermediate_size=24, num_layers=3, num_heads=3, num_kv_heads=3, head_dim=6,
        qkv_bias=True, o_bias=True, mlp_bias=True, initializer_range=0.5,
    ),
}  # fmt: skip
CONFIG = CONFIGS["grouped"]
PARAMS = init(CONFIG, Key.of(3))
POLICY = DecoderPolicy(CONFIG)
LENGTHS = (3, 1, 5, 2)


def rows(lengths: tuple[int, ...], width: int, filler: int = 0) -> torch.Tensor:
    """Right-padded tokens."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 23, (len(lengths), width), generator=generator)
    past = torch.arange(width) >= torch.tensor(lengths)[:, None]
    return tokens.masked_fill(past, filler)


def one_shot(params: Decoder, config: DecoderConfig, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [n, V] of one document."""
    n = tokens.shape[0]
    return forward(params, config, tokens, torch.arange(n), torch.zeros(n, dtype=torch.int64))


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_and_decode_equal_the_one_shot_forward(name: str) -> None:
    config = CONFIGS[name]
    params, policy = init(config, Key.of(1)), DecoderPolicy(config)
    steps = 6
    tokens = rows(tuple(n + steps for n in LENGTHS), max(LENGTHS) + steps)
    lengths = torch.tensor(LENGTHS)
    got, cache = policy.prefill(params, tokens[:, : max(LENGTHS)], lengths, max(LENGTHS) + steps)
    logits = [got]
    for step in range(steps):
        got, cache = policy.decode(params, tokens[torch.arange(4), lengths + step], cache)
        logits.append(got)
    assert cache.lengths.tolist() == [n + steps for n in LENGTHS]
    for row, n in enumerate(LENGTHS):
        wanted = one_shot(params, config, tokens[row, : n + steps])[n - 1 :]
        torch.testing.assert_close(torch.stack([x[row] for x in logits]), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("filler", [0, 7, -1, 10**9])
def test_what_stands_past_a_prompt_is_never_read(filler: int) -> None:
    lengths = torch.tensor(LENGTHS)
    logits, cache = POLICY.prefill(PARAMS, rows(LENGTHS, 5, filler), lengths, 8)
    wanted, wanted_cache = POLICY.prefill(PARAMS, rows(LENGTHS, 5), lengths, 8)
    assert torch.equal(logits, wanted)
    assert tree.equal(cache, wanted_cache)


def test_R3_after_an_update_a_new_cache_gives_the_fresh_logits() -> None:
    tokens, lengths = rows((4,), 4), torch.tensor([4])
    _, stale = POLICY.prefill(PARAMS, tokens, lengths, 6)
    updated = tree.map(lambda x: x * 1.5, PARAMS)
    fresh = one_shot(updated, CONFIG, torch.cat([tokens[0], torch.tensor([2])]))
    _, cache = POLICY.prefill(updated, tokens, lengths, 6)
    got, _ = POLICY.decode(updated, torch.tensor([2]), cache)
    torch.testing.assert_close(got[0], fresh[-1], atol=1e-5, rtol=1e-5)
    wrong, _ = POLICY.decode(updated, torch.tensor([2]), stale)
    assert (wrong[0] - fresh[-1]).abs().max() > 1e-2  # a kept cache would have shown


def test_R5_padding_and_a_shift_of_all_positions_change_nothing() -> None:
    document = torch.tensor([4, 9, 2, 11])
    wanted = one_shot(PARAMS, CONFIG, document)
    padded = torch.cat([document, torch.zeros(2, dtype=torch.int64)])[None]
    logits, _ = POLICY.prefill(PARAMS, padded, torch.tensor([4]), 6)
    torch.testing.assert_close(logits[0], wanted[-1], atol=1e-6, rtol=1e-6)
    shifted = forward(PARAMS, CONFIG, document, torch.arange(4) + 2, torch.zeros(4, dtype=torch.int64))
    torch.testing.assert_close(shifted, wanted, atol=1e-5, rtol=1e-5)
    uneven = forward(PARAMS, CONFIG, document, torch.tensor([0, 0, 0, 1]), torch.zeros(4, dtype=torch.int64))
    assert (uneven[-1] - wanted[-1]).abs().max() > 1e-3  # positions do matter


def test_a_row_does_not_depend_on_its_batch() -> None:
    tokens, lengths = rows(LENGTHS, 5), torch.tensor(LENGTHS)
    together, cache = POLICY.prefill(PARAMS, tokens, lengths, 9)
    drawn = torch.tensor([1, 2, 3, 4])
    after, _ = POLICY.decode(PARAMS, drawn, cache)
    for row, n in enumerate(LENGTHS):
        alone, own = POLICY.prefill(PARAMS, tokens[row : row + 1, :n], lengths[row : row + 1], n + 1)
        torch.testing.assert_close(alone[0], together[row], atol=1e-5, rtol=1e-5)
        alone, _ = POLICY.decode(PARAMS, drawn[row : row + 1], own)
        torch.testing.assert_close(alone[0], after[row], atol=1e-5, rtol=1e-5)


def test_decode_takes_the_cache_over_and_writes_it_in_place() -> None:
    lengths = torch.tensor([2, 1])
    _, cache = POLICY.prefill(PARAMS, rows((2, 1), 2), lengths, 4)
    before = [x.clone() for x in cache.keys]
    storage = cache.keys[0].data_ptr()
    assert cache.lengths.data_ptr() != lengths.data_ptr()  # what is donated later is the cache's own
    _, after = POLICY.decode(PARAMS, torch.tensor([5, 6]), cache)
    assert after.keys[0].data_ptr() == storage
    assert lengths.tolist() == [2, 1]
    for old, new in zip(before, after.keys, strict=True):
        changed = (old != new).any(-1).any(-1)
        assert changed.nonzero().tolist() == [[0, 2], [1, 1]]
    with pytest.raises(DonatedError, match=r"Cache.keys was read after this record was donated"):
        _ = cache.keys


@pytest.mark.traced
def test_decoding_compiles_without_a_graph_break() -> None:
    tokens, lengths = rows(LENGTHS, 5), torch.tensor(LENGTHS)
    drawn = torch.tensor([1, 2, 3, 4])

    def step(params: Decoder, tokens: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, Cache]:
        return decode_in_place(params, CONFIG, tokens, cache, span=8)

    _, cache = POLICY.prefill(PARAMS, tokens, lengths, 8)
    _, twin = POLICY.prefill(PARAMS, tokens, lengths, 8)
    got, cache = torch.compile(step, fullgraph=True, backend="aot_eager")(PARAMS, drawn, cache)
    wanted, twin = POLICY.decode(PARAMS, drawn, twin)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)
    for a, b in zip(tree.leaves(cache), tree.leaves(twin), strict=True):
        torch.testing.assert_close(a, b)


def test_cached_attention_is_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64)
    keys, values = (torch.randn(2, 5, 3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    lengths = torch.tensor([2, 5])
    got = cached_attention(q, keys, values, lengths, 0.7)
    for row, n in enumerate(lengths.tolist()):
        for head in range(6):
            weights = torch.softmax(0.7 * keys[row, :n, head // 2] @ q[row, head], 0)
            torch.testing.assert_close(got[row, head], weights @ values[row, :n, head // 2])


@pytest.mark.parametrize(
    ("tokens", "lengths", "capacity", "words"),
    [
        (torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 4, "with at least one token"),
        (torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 4, "with at least one token"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3]), 4, "lengths [B], received [2, 3] and [1]"),
        (torch.zeros(1, 3, dtype=torch.int64), torch.tensor([3]), 2, "capacity 2 is below the prompts' width 3"),
        (torch.zeros(1, 3, dtype=torch.int64), torch.tensor([0]), 4, "lengths must lie in [1, 3], received [0]"),
        (torch.zeros(1, 3, dtype=torch.int64), torch.tensor([4]), 4, "lengths must lie in [1, 3], received [4]"),
        (torch.tensor([[1, 99, 2]]), torch.tensor([2]), 4, "token 99 is outside the vocabulary of 23"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(
    tokens: torch.Tensor, lengths: torch.Tensor, capacity: int, words: str
) -> None:
    with pytest.raises(ModelError) as refusal:
        POLICY.prefill(PARAMS, tokens, lengths, capacity)
    assert words in str(refusal.value)


def test_a_full_row_and_another_batch_are_refused_and_the_cache_stays_readable() -> None:
    _, cache = POLICY.prefill(PARAMS, rows((16, 1), 16), torch.tensor([16, 1]), 16)
    with pytest.raises(ModelError, match="a row of the cache is full, it has 16 places"):
        POLICY.decode(PARAMS, torch.tensor([1, 1]), cache)
    with pytest.raises(ModelError, match=r"decode: tokens must be \[2\] like the cache, received \[3\]"):
        POLICY.decode(PARAMS, torch.tensor([1, 1, 1]), cache)
    assert cache.lengths.tolist() == [16, 1]


def test_a_policy_is_its_configuration() -> None:
    assert (POLICY.vocab_size, POLICY.max_positions) == (23, 2048)
    assert DecoderPolicy(CONFIG) == POLICY
    assert hash(DecoderPolicy(CONFIG)) == hash(POLICY)
