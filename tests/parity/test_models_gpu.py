"""The dense decoder on a CUDA device against the CPU: forward, gradient, prefill and decode."""

from __future__ import annotations

import attrs
import pytest
import torch

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.key import Key
from areno_fn.models.decoder import Decoder, DecoderConfig, init
from areno_fn.models.decoder_forward import forward
from areno_fn.models.decoder_policy import DecoderPolicy

pytestmark = pytest.mark.gpu

CONFIG = DecoderConfig(
    vocab_size=259, hidden_size=128, intermediate_size=256, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32,
    qk_norm=True, qkv_bias=True, tie_embeddings=True, initializer_range=0.1,
)  # fmt: skip
LENGTHS = (5, 1, 33, 2, 64)


def packed(lengths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, CONFIG.vocab_size, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    return tokens, positions, torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def on_gpu(value: object) -> object:
    return tree.map(lambda x: x.cuda(), value)


@pytest.mark.parametrize("lengths", [LENGTHS, (16, 16, 16)], ids=["uneven", "even"])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_logits_and_gradients_are_those_of_the_cpu(lengths: tuple[int, ...], qk_norm: bool) -> None:
    config = attrs.evolve(CONFIG, qk_norm=qk_norm)
    params = init(config, Key.of(0))
    bounds = (len(lengths), max(lengths))

    def loss(params: Decoder, *batch: torch.Tensor) -> torch.Tensor:
        return forward(params, config, *batch, bounds=bounds).log_softmax(-1)[:, 7].mean()

    batch = packed(lengths)
    given, moved = on_gpu(params), on_gpu(batch)
    torch.testing.assert_close(
        forward(given, config, *moved).cpu(), forward(params, config, *batch), atol=1e-4, rtol=1e-4
    )
    value, gradient = value_and_grad(loss)(params, *batch)
    gpu_value, gpu_gradient = value_and_grad(loss)(given, *moved)
    torch.testing.assert_close(gpu_value.cpu(), value, atol=1e-5, rtol=1e-5)
    for (path, a), b in zip(tree.leaves_with_path(gpu_gradient), tree.leaves(gradient), strict=True):
        assert (a.cpu() - b).abs().max() < 1e-3 * b.abs().max(), path
    again = value_and_grad(loss)(given, *moved)
    assert tree.equal(again, (gpu_value, gpu_gradient)), tree.first_difference(again, (gpu_value, gpu_gradient))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_and_decode_are_the_packed_forward(dtype: torch.dtype) -> None:
    params = on_gpu(init(CONFIG, Key.of(0), dtype))
    policy = DecoderPolicy(CONFIG)
    steps, lengths = 5, torch.tensor(LENGTHS, device="cuda")
    tokens = packed((sum(LENGTHS) + 5 * len(LENGTHS),))[0].cuda()
    documents = tokens.split([n + steps for n in LENGTHS])
    padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    got, cache = policy.prefill(params, padded[:, : max(LENGTHS)], lengths, max(LENGTHS) + steps)
    logits = [got]
    for step in range(steps):
        got, cache = policy.decode(params, padded[torch.arange(len(LENGTHS), device="cuda"), lengths + step], cache)
        logits.append(got)
    bound = 1e-4 if dtype == torch.float32 else 6e-2
    for row, n in enumerate(LENGTHS):
        _, positions, segments = packed((n + steps,))
        wanted = forward(params, CONFIG, documents[row], positions.cuda(), segments.cuda())[n - 1 :].float()
        got = torch.stack([x[row] for x in logits]).float()
        assert (got - wanted).norm() < bound * wanted.norm()


def test_a_changed_token_does_not_move_a_bit_of_another_document() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        params = on_gpu(init(CONFIG, Key.of(0), dtype))
        tokens, positions, segments = on_gpu(packed(LENGTHS))
        other = tokens.clone()
        other[0] = (other[0] + 1) % CONFIG.vocab_size
        before, after = (forward(params, CONFIG, t, positions, segments) for t in (tokens, other))
        assert torch.equal(tree.bits(before[segments > 0]), tree.bits(after[segments > 0]))
        assert not torch.equal(before[segments == 0], after[segments == 0])


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # inductor's advice; the comparison wants float32
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # the bound below is float32's
def test_forward_compiles_with_inductor() -> None:
    params = on_gpu(init(CONFIG, Key.of(0)))
    batch = on_gpu(packed(LENGTHS))

    def run(params: Decoder, *batch: torch.Tensor) -> torch.Tensor:
        return forward(params, CONFIG, *batch, bounds=(len(LENGTHS), max(LENGTHS)))

    compiled = torch.compile(run, fullgraph=True)(params, *batch)
    torch.testing.assert_close(compiled, run(params, *batch), atol=1e-4, rtol=1e-4)
