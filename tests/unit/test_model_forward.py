"""The packed forward pass: isolation of documents, order, tied leaves, compilation, and what it refuses."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.errors import KernelError, ModelError
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.kernels.attention import packed_attention, packed_layout
from areno_fn.models.decoder import Decoder, DecoderConfig, init, shapes
from areno_fn.models.decoder_forward import forward, hidden
from areno_fn.models.decoder_layer import logits

CONFIG = DecoderConfig(
    vocab_size=23, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
    qk_norm=True, qkv_bias=True, tie_embeddings=True, initializer_range=0.5,
)  # fmt: skip
PARAMS = init(CONFIG, Key.of(3))


def packed(documents: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and segments of documents."""
    lengths = torch.tensor([len(d) for d in documents])
    tokens = torch.tensor([token for d in documents for token in d])
    positions = torch.cat([torch.arange(len(d)) for d in documents])
    return tokens, positions, torch.repeat_interleave(torch.arange(len(documents)), lengths)


def run(documents: list[list[int]], params: Decoder = PARAMS, bounds: tuple[int, int] | None = None) -> torch.Tensor:
    return forward(params, CONFIG, *packed(documents), bounds=bounds)


def test_D9_a_changed_token_does_not_move_a_bit_of_another_document() -> None:
    assert packed([[1, 2], [3, 4]])[1].tolist() == [0, 1, 0, 1]
    before, after = run([[1, 2], [3, 4]]), run([[9, 2], [3, 4]])
    assert torch.equal(tree.bits(before[2:]), tree.bits(after[2:]))
    assert not torch.equal(before[:2], after[:2])


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_D9_isolation_is_exact_for_uneven_documents_in_values_and_gradients(changed: int) -> None:
    documents = [[1, 2, 3, 4, 5], [6], [7, 8, 9]]
    other = [[*d[:-1], 20] if i == changed else d for i, d in enumerate(documents)]
    kept = torch.cat([torch.full((len(d),), i != changed) for i, d in enumerate(documents)])

    def gradient_of_kept(documents: list[list[int]]) -> tuple[torch.Tensor, Decoder]:
        return value_and_grad(lambda p: run(documents, p)[kept].square().sum())(PARAMS)

    assert torch.equal(tree.bits(run(documents)[kept]), tree.bits(run(other)[kept]))
    assert tree.equal(gradient_of_kept(documents), gradient_of_kept(other))


def test_D9_not_even_a_nan_leaks() -> None:
    q = torch.arange(9 * 2 * 4, dtype=torch.float32).reshape(9, 2, 4).sin()
    segments = torch.tensor([0, 0, 0, 0, 0, 1, 2, 2, 2])
    layout = packed_layout(segments)
    clean = packed_attention(q, q, q, layout, 0.5)
    for document in range(3):
        poisoned = q.masked_fill((segments == document)[:, None, None], math.nan)
        out = packed_attention(poisoned, poisoned, poisoned, layout, 0.5)
        assert torch.equal(out[segments != document], clean[segments != document])
        assert out[segments == document].isnan().all()


def test_D9_the_packed_loss_is_the_sum_of_the_separate_losses() -> None:
    documents = [[1, 2, 3], [4], [5, 6, 7, 8]]

    def loss(documents: list[list[int]]) -> torch.Tensor:
        tokens, positions, _ = packed(documents)
        logp = run(documents).log_softmax(-1)
        inner = positions[1:] > 0
        return -logp[:-1].gather(1, tokens[1:, None])[inner].sum()

    assert float(loss(documents)) == pytest.approx(sum(float(loss([d])) for d in documents), abs=1e-5)


def test_attention_is_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, heads, 4, generator=generator, dtype=torch.float64) for heads in (6, 3, 3))
    segments = torch.tensor([0, 0, 1, 1, 1, 1, 2, 3, 3])
    got = packed_attention(q, k, v, packed_layout(segments), 0.7)
    for i in range(9):
        seen = [j for j in range(i + 1) if segments[j] == segments[i]]
        for head in range(6):
            weights = torch.softmax(torch.stack([0.7 * q[i, head] @ k[j, head // 2] for j in seen]), 0)
            wanted = sum(w * v[j, head // 2] for w, j in zip(weights, seen, strict=True))
            torch.testing.assert_close(got[i, head], wanted)


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6), data=st.data())
def test_the_order_of_packing_does_not_change_a_document(lengths: list[int], data: st.DataObject) -> None:
    documents = [[(7 * i + 3 * j) % CONFIG.vocab_size for j in range(n)] for i, n in enumerate(lengths)]
    order = data.draw(st.permutations(range(len(documents))))
    alone = [run([d]) for d in documents]
    together = run([documents[i] for i in order]).split([lengths[i] for i in order])
    for i, got in zip(order, together, strict=True):
        torch.testing.assert_close(got, alone[i], atol=1e-5, rtol=1e-5)


def test_bounds_change_nothing_and_may_be_loose() -> None:
    documents = [[1, 2, 3], [4], [5, 6]]
    assert torch.equal(run(documents), run(documents, bounds=(3, 3)))
    torch.testing.assert_close(run(documents), run(documents, bounds=(3, 8)), atol=1e-5, rtol=1e-5)
    even = [[1, 2], [3, 4]]
    torch.testing.assert_close(run(even), run(even, bounds=(2, 5)), atol=1e-5, rtol=1e-5)


def test_documents_of_one_length_need_no_index() -> None:
    layout = packed_layout(torch.tensor([0, 0, 1, 1]))
    assert (layout.source, layout.place, layout.documents, layout.longest) == (None, None, 2, 2)
    uneven = packed_layout(torch.tensor([0, 0, 1]))
    assert uneven.source.tolist() == [0, 1, 2, 2]  # the short document repeats its own last token
    assert uneven.place.tolist() == [0, 1, 2]


def test_N10_a_tied_matrix_is_one_leaf_and_its_gradient_is_the_sum() -> None:
    untied_config = attrs.evolve(CONFIG, tie_embeddings=False)
    untied = replace(PARAMS, head=PARAMS.embed.clone())
    assert len(tree.leaves(PARAMS)) == len(tree.leaves(untied)) - 1 == len(tree.leaves(shapes(CONFIG)))
    batch = packed([[1, 2, 3], [4, 5]])

    def loss(params: Decoder, config: DecoderConfig) -> torch.Tensor:
        return forward(params, config, *batch).log_softmax(-1)[:, 3].sum()

    _, tied_gradient = value_and_grad(lambda p: loss(p, CONFIG))(PARAMS)
    _, gradient = value_and_grad(lambda p: loss(p, untied_config))(untied)
    assert gradient.embed.abs().max() > 0.1
    assert gradient.head.abs().max() > 0.1
    torch.testing.assert_close(tied_gradient.embed, gradient.embed + gradient.head)


def test_forward_is_the_head_over_the_hidden_states() -> None:
    batch = packed([[1, 2, 3], [4]])
    states = hidden(PARAMS, CONFIG, *batch)
    assert states.shape == (4, CONFIG.hidden_size)
    torch.testing.assert_close(logits(PARAMS, states), states @ PARAMS.embed.T)
    assert torch.equal(logits(PARAMS, states), forward(PARAMS, CONFIG, *batch))


@pytest.mark.traced
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it by itself
@pytest.mark.parametrize("documents", [[[1, 2, 3], [4], [5, 6]], [[1, 2], [3, 4]]], ids=["uneven", "even"])
def test_forward_and_its_gradient_compile_without_a_graph_break(documents: list[list[int]]) -> None:
    bounds = (len(documents), max(len(d) for d in documents))
    batch = packed(documents)

    def step(
        params: Decoder, tokens: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor
    ) -> tuple[torch.Tensor, Decoder]:
        def loss(params: Decoder) -> torch.Tensor:
            return forward(params, CONFIG, *batch, bounds=bounds).log_softmax(-1)[:, 0].mean()

        return value_and_grad(loss)(params)

    value, gradient = step(PARAMS, *batch)
    compiled_value, compiled_gradient = torch.compile(step, fullgraph=True, backend="aot_eager")(PARAMS, *batch)
    torch.testing.assert_close(compiled_value, value)
    for a, b in zip(tree.leaves(compiled_gradient), tree.leaves(gradient), strict=True):
        torch.testing.assert_close(a, b)


def test_low_precision_stays_low_and_finite() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        params = tree.map(lambda x, to=dtype: x.to(to), PARAMS)
        value, gradient = value_and_grad(lambda p: run([[1, 2, 3], [4]], p).float().log_softmax(-1)[:, 0].mean())(
            params
        )
        assert run([[1, 2]], params).dtype == dtype
        assert value.isfinite()
        assert all(leaf.dtype == dtype and leaf.isfinite().all() for leaf in tree.leaves(gradient))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"tokens": torch.tensor([], dtype=torch.int64)}, ModelError, "must have one length"),
        ({"tokens": torch.tensor([1, 2, 23])}, ModelError, "token 23 is outside the vocabulary of 23"),
        ({"tokens": torch.tensor([1, -1, 2])}, ModelError, "token -1 is outside the vocabulary of 23"),
        ({"tokens": torch.tensor([1.0, 2.0, 3.0])}, ModelError, "tokens must be int64 with 1 dimension(s)"),
        ({"segments": torch.tensor([0, 0, 2])}, KernelError, "in order and without gaps"),
        ({"segments": torch.tensor([1, 1, 0])}, KernelError, "in order and without gaps"),
        ({"segments": torch.tensor([1, 1, 2])}, KernelError, "in order and without gaps"),
        ({"segments": torch.tensor([0, 0, 1], dtype=torch.int32)}, KernelError, "segments must be int64 [N]"),
        (
            {"bounds": (3, 2)},
            KernelError,
            "bounds say 3 documents of at most 2 tokens, but segments has 2 of at most 2",
        ),
        (
            {"bounds": (2, 1)},
            KernelError,
            "bounds say 2 documents of at most 1 tokens, but segments has 2 of at most 2",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(change: dict[str, object], error: type[Exception], words: str) -> None:
    given = dict(zip(("tokens", "positions", "segments"), packed([[1, 2], [3]]), strict=True)) | change
    with pytest.raises(error) as refusal:
        forward(PARAMS, CONFIG, **given)
    assert words in str(refusal.value)


def test_nothing_at_all_is_refused() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ModelError, match="at least one token, received int64"):
        forward(PARAMS, CONFIG, none, none, none)


def test_heads_that_do_not_fit_are_refused_by_the_kernel() -> None:
    layout = packed_layout(torch.tensor([0, 0, 1]))
    q, k = torch.zeros(3, 4, 8), torch.zeros(3, 3, 8)
    with pytest.raises(KernelError, match=r"with N = 3 and H a multiple of K, received float32 \[3, 4, 8\]"):
        packed_attention(q, k, k, layout, 1.0)
    with pytest.raises(KernelError, match="with N = 3"):
        packed_attention(q[:2], q[:2], q[:2], layout, 1.0)
