"""Bitwise consistency on a CUDA device: rows in any company, rollouts against training, gradients, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from e2e import tiny

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.adapter import Adapted
from areno_fn.contracts.batch import Prompts, Rollout
from areno_fn.contracts.errors import KernelError, ModelError
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import Sampling
from areno_fn.kernels import add_rms_norm, gated_silu, norm_rotary, ordered_attention
from areno_fn.kernels.attention import equal_documents, fused, packed_layout
from areno_fn.kernels.ordered_attention import over_pages, packed
from areno_fn.kernels.ordered_linear import ordered_linear
from areno_fn.kernels.rms_norm import rms_norm
from areno_fn.kernels.token_logp import token_logp
from areno_fn.models import FAMILIES
from areno_fn.steps.token.experience import experience
from areno_fn.steps.token.paged_rollout import PagedSampler
from areno_fn.steps.token.score import act
from areno_fn.testing import laws

pytestmark = pytest.mark.gpu
DEVICE, LOW = torch.device("cuda"), torch.bfloat16
SIZES = (1, 7, 64, 256, 513)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = LOW) -> torch.Tensor:
    source = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, device=DEVICE, generator=source).to(dtype)


# ---------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("columns", "depth", "dtype"),
    [(1024, 2048, LOW), (6144, 1024, LOW), (1000, 1100, LOW), (48, 16, torch.float16), (5003, 64, LOW)],
)
def test_rows_of_a_product_do_not_depend_on_their_number(columns: int, depth: int, dtype: torch.dtype) -> None:
    weight, bias = normal(columns, depth, seed=1, dtype=dtype), normal(columns, seed=2, dtype=dtype)
    x = normal(2000, depth, dtype=dtype)
    laws.batch_invariant(lambda x: ordered_linear(x, weight, bias), x, sizes=SIZES)
    small = Adapted(weight=weight, a=normal(12, depth, seed=3), b=normal(columns, 12, seed=4))
    laws.batch_invariant(lambda x: ordered_linear(x, small), x, sizes=SIZES)


@pytest.mark.parametrize("width", [1024, 1000])
def test_rows_of_everything_beside_the_products_do_not_depend_on_their_number(width: int) -> None:
    weight, half = normal(width, seed=2), normal(64, seed=5)
    x, r = normal(2000, width), normal(2000, width, seed=1)
    laws.batch_invariant(lambda x, r: add_rms_norm.forward(x, r, weight, 1e-6), x, r, sizes=SIZES)
    laws.batch_invariant(lambda x: rms_norm(x, weight, 1e-6), x, sizes=SIZES)
    laws.batch_invariant(lambda x: gated_silu.forward(x), x, sizes=SIZES)
    qkv, cos, sin = normal(2000, 8, 64), normal(2000, 32, seed=3), normal(2000, 32, seed=4)
    heads = lambda x, cos, sin: norm_rotary.forward(x, half, half, cos, sin, 4, 1e-6)  # noqa: E731
    laws.batch_invariant(heads, qkv, cos, sin, sizes=SIZES)


@pytest.mark.parametrize("size", [151936, 5003, 1000])
@pytest.mark.parametrize("dtype", [LOW, torch.float32])
def test_log_probabilities_of_rows_do_not_depend_on_their_number(size: int, dtype: torch.dtype) -> None:
    logits = 3 * normal(300, size, dtype=dtype)
    targets = torch.arange(300, device=DEVICE) * 3
    laws.batch_invariant(lambda x, t: token_logp(x, t), logits, targets, sizes=SIZES)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(16, 8, 128), (4, 4, 64), (9, 1, 96)])
@pytest.mark.parametrize("page", [16, 32, 5])
def test_a_query_has_the_same_bits_in_documents_and_in_pages(heads: int, kv_heads: int, size: int, page: int) -> None:
    lengths = [1, 2, 63, 64, 65, 127, 128, 129, 300, 700]
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(DEVICE)
    place = torch.cat([torch.arange(length) for length in lengths]).to(DEVICE)
    q = normal(len(rows), heads, size)
    k, v = normal(len(rows), 2 * kv_heads, size, seed=1).split(kv_heads, 1)
    scale = size**-0.5
    whole = packed(q, k, v, packed_layout(rows), scale)
    starts = torch.tensor(list(itertools.accumulate(lengths, initial=0))[:-1])
    for start, length in zip(starts.tolist(), lengths, strict=True):
        own = slice(start, start + length)
        assert torch.equal(packed(q[own], k[own], v[own], equal_documents(1, length), scale), whole[own])
    width = -(-max(lengths) // page)
    table = (
        (1 + torch.randperm(len(lengths) * width, generator=torch.Generator().manual_seed(0)))
        .view(-1, width)
        .to(DEVICE)
    )
    shape = (1 + table.numel(), kv_heads, page, size)
    keys, values = (torch.full(shape, 9.0, device=DEVICE, dtype=LOW).transpose(1, 2) for _ in "kv")
    if page == 16:  # the way they lie in memory does not matter
        keys, values = keys.contiguous(), values.contiguous()
    for cache, given in ((keys, k), (values, v)):
        cache[table[rows, place // page], place % page] = given
    for cut in range(8):
        seen = torch.tensor([max(1, length - cut * cut) for length in lengths])
        at = (starts + seen - 1).to(DEVICE)
        got = over_pages(q[at], keys, values, table, seen.to(DEVICE), scale)
        assert torch.equal(got, whole[at])


@pytest.mark.parametrize("lengths", [[256] * 8, [1, 70, 300, 129], [40] * 5], ids=["equal", "ragged", "short"])
@pytest.mark.parametrize("size", [64, 128])
def test_attention_and_its_gradients_are_those_of_the_ordinary_kernels(lengths: list[int], size: int) -> None:
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(DEVICE)
    layout = packed_layout(rows, (len(lengths), max(lengths)))
    q, k, v, dout = (normal(len(rows), n, size, seed=n) for n in (4, 2, 2, 4))
    kept = ordered_attention.forward(q, k, v, layout, size**-0.5)
    usual = fused.forward(q, k, v, layout, size**-0.5)
    exact = [x.double() for x in (kept[0], usual[0], kept[1], usual[1])]
    assert float((exact[0] - exact[1]).norm()) <= 0.01 * float(exact[1].norm())
    torch.testing.assert_close(exact[2], exact[3], rtol=1e-4, atol=1e-4)
    ours, theirs = (fused.backward(dout, q, k, v, x, layout, size**-0.5) for x in (kept, usual))
    for a, b in zip(ours, theirs, strict=True):
        assert float((a.double() - b.double()).norm()) <= 0.02 * float(b.double().norm())
    again = fused.backward(dout, q, k, v, kept, layout, size**-0.5)
    assert all(torch.equal(a, b) for a, b in zip(ours[1:], again[1:], strict=True))


# ---------------------------------------------------------------------------------------- models


def model(family: str = "qwen3", **changes: Any) -> tuple[Any, Any]:
    """A model in bfloat16 with weights that make it choose."""
    made = FAMILIES[family]
    sizes = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512}
    fields = {"model_type": family, **sizes, **heads, "tie_word_embeddings": True, "initializer_range": 0.1, **changes}
    config = made.config_from_hf(fields)
    params = made.init(config, Key.of(0), dtype=LOW, device=DEVICE)
    return attrs.evolve(made.policy(config), consistency="bitwise"), params


def prompts(count: int = 24) -> Prompts:
    source = torch.Generator().manual_seed(0)
    made = Prompts(
        tokens=torch.randint(0, 4096, (count, 90), generator=source),
        lengths=1 + torch.randint(0, 90, (count,), generator=source),
        ids=torch.arange(count) * 7,
    )
    return tree.map(lambda x: x.to(DEVICE), made)


def largest(policy: Any, params: Any, drawn: Rollout, sampling: Sampling, micro: int) -> float:
    """Of the differences between recorded and recomputed log-probabilities."""
    off = []
    with torch.no_grad():
        for batch in experience(drawn, torch.zeros(len(drawn.lengths), device=DEVICE), micro_tokens=micro):
            off.append((act(policy, sampling)(params, batch).logp - batch.old).abs().max())
    return float(torch.stack(off).max())


SAMPLINGS = [
    Sampling(max_tokens=90),
    Sampling(max_tokens=40, temperature=0.7),
    Sampling(max_tokens=40, temperature=1.2, top_k=50, top_p=0.95, min_p=0.001),
]


def adapted(params: Any) -> Any:
    def low(weight: torch.Tensor, seed: int) -> Adapted:
        a, b = normal(6, weight.shape[1], seed=seed), 0.1 * normal(weight.shape[0], 6, seed=seed + 1)
        return Adapted(weight=weight, a=a.float(), b=b.float())

    names = ("qkv", "o", "gate_up", "down")
    layers = tuple(
        replace(layer, **{name: low(getattr(layer, name), i) for i, name in enumerate(names)})
        for layer in params.layers
    )
    return replace(params, layers=layers)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "cold", "cut"])
@pytest.mark.parametrize(
    ("made", "change"),
    [
        (lambda: model(), None),
        (lambda: model("llama", attention_bias=True, mlp_bias=True), None),
        (lambda: model(vocab_size=4099, tie_word_embeddings=False, num_key_value_heads=8), None),
        (lambda: model(), adapted),
    ],
    ids=["qwen3", "llama with biases", "own head", "adapted"],
)
def test_R2_a_rollout_records_what_training_recomputes_to_the_bit(
    sampling: Sampling, made: Callable[[], tuple[Any, Any]], change: Callable[[Any], Any] | None
) -> None:
    policy, params = made()
    params = params if change is None else change(params)
    results = []
    for rows, page, capture, budget in (
        (None, 32, True, 1 << 15),
        (7, 16, True, 50),
        (3, 32, False, 1 << 15),
        (5, 32, True, 7),
    ):
        rollout = PagedSampler(policy, (7,), page_size=page, capture=capture, read_tokens=budget)
        results.append(rollout(params, prompts(), Key.of(1), sampling, samples=2, max_rows=rows))
    for other in results[1:]:
        assert torch.equal(other.tokens, results[0].tokens) and torch.equal(other.logp, results[0].logp)
    for micro in (1 << 14, 1000, 200):
        assert largest(policy, params, results[0], sampling, micro) == 0.0
    usual = attrs.evolve(policy, consistency="ordinary")
    assert 0 < largest(usual, params, results[0], sampling, 1000) < 1, "the ordinary kernels round otherwise"


def test_the_gradient_is_the_ordinary_one_up_to_roundings_also_where_layers_are_computed_again() -> None:
    policy, params = model()
    sampling = Sampling(max_tokens=60)
    drawn = PagedSampler(policy, ())(params, prompts(), Key.of(1), sampling)
    (batch,) = experience(drawn, torch.ones(24, device=DEVICE), micro_tokens=1 << 14)

    def gradient(policy: Any) -> Any:
        return value_and_grad(lambda p: act(policy, sampling)(p, batch).logp.mean())(params)[1]

    ours, usual = gradient(policy), gradient(attrs.evolve(policy, consistency="ordinary"))
    for (path, a), b in zip(tree.leaves_with_path(ours), tree.leaves(usual), strict=True):
        assert float((a.double() - b.double()).norm()) <= 0.15 * float(b.double().norm()), path
    light = gradient(attrs.evolve(policy, remat=True))
    for (path, a), b in zip(tree.leaves_with_path(light), tree.leaves(ours), strict=True):
        assert float((a.double() - b.double()).norm()) <= 0.01 * float(b.double().norm()), path


def test_after_an_update_both_sides_have_moved_alike() -> None:
    policy, params = model()
    sampling, rollout = Sampling(max_tokens=30), PagedSampler(policy, ())
    for factor in (1.0, 1.05, 0.9):
        moved = tree.map(lambda x, by=factor: x * by, params)
        drawn = rollout(moved, prompts(), Key.of(3), sampling)
        assert largest(policy, moved, drawn, sampling, 500) == 0.0


def test_what_it_is_not_for_is_refused() -> None:
    policy, params = model()
    wide = tree.map(torch.Tensor.float, params)
    tokens = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ModelError, match="consistency 'bitwise' is for parameters in bfloat16 or float16"):
        policy.hidden(wide, tokens, torch.arange(4, device=DEVICE), tokens)
    with pytest.raises(ModelError, match="a plain cache on a GPU has not the bits of training"):
        policy.prefill(params, tokens[None], torch.tensor([4], device=DEVICE), 9)
    with pytest.raises(KernelError, match="on the GPU x must be bfloat16 or float16"):
        ordered_linear(normal(3, 8, dtype=torch.float32), normal(5, 8, dtype=torch.float32))
    q = normal(4, 2, 64, dtype=torch.float32)
    for wrong in (q, normal(4, 2, 256)):
        with pytest.raises(
            KernelError, match="on the GPU queries must be bfloat16 or float16, with heads of at most 128"
        ):
            packed(wrong, wrong, wrong, equal_documents(1, 4), 0.1)


def test_a_whole_run_reports_that_training_computes_what_was_drawn(tmp_path: Path) -> None:
    assert tiny.run(tiny.write_spec(tmp_path), tmp_path / "first", export__dtype="bfloat16").code == 0
    model, sft, grpo = (
        tiny.SPEC.index(word) for word in ("[model]", '[[phases]]\nname = "sft"', '[[phases]]\nname = "grpo"')
    )
    folder = f'[model]\nkind = "hf"\npath = "{tmp_path / "first/export"}"\ndtype = "bfloat16"\n\n'
    text = tiny.SPEC[:model] + 'consistency = "bitwise"\n' + folder + tiny.SPEC[grpo:]
    assert model < sft < grpo
    changes = {"device": "cuda", "phases__grpo__algorithm__minibatches": 1}
    done = tiny.run(tiny.write_spec(tmp_path, text, "bitwise.toml"), tmp_path / "out", **changes)
    assert done.code == 0, done.err
    steps = [line for line in tiny.lines(tmp_path / "out/metrics.jsonl") if "train/logp_diff_max" in line]
    assert len(steps) == 4
    for line in steps:
        assert line["train/logp_diff_max"] == 0.0 and line["train/ratio_max"] == 1.0
