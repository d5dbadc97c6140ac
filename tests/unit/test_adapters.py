"""Adapters as values: where they go, what they compute, how they are merged, and that nothing else is trained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.adapter import Adapted, LowRank
from areno_fn.contracts.batch import PackedTokens, Prompts
from areno_fn.contracts.errors import ModelError, RecordError
from areno_fn.contracts.key import Key
from areno_fn.contracts.layout import Iso, TensorSpec, concat, deinterleave, product, rename, stack, tie, transpose
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import AdamWSpec, Sampling
from areno_fn.contracts.state import Counters, Cursor, TrainState
from areno_fn.kernels.linear import linear
from areno_fn.models import FAMILIES
from areno_fn.models.adapter_sites import chosen, shortest_targets, sites_of
from areno_fn.models.adapters import adapt, init, merge, shapes, unmerge
from areno_fn.models.decoder import Decoder
from areno_fn.models.flow_layouts import FLOW_LAYOUTS
from areno_fn.models.layouts import LAYOUTS
from areno_fn.steps.compose import pipeline, train_step
from areno_fn.steps.objectives.cross_entropy import cross_entropy
from areno_fn.steps.optimizers.adamw import adamw
from areno_fn.steps.token.head import decision_log_probs
from areno_fn.steps.token.score import score
from areno_fn.testing import laws

HF = {
    "model_type": "qwen3", "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "initializer_range": 0.15,
}  # fmt: skip
FAMILY = FAMILIES["qwen3"]
CONFIG = FAMILY.config_from_hf(HF)
LAYOUT = FAMILY.layout(CONFIG, head_in_file=True)
POLICY = FAMILY.policy(CONFIG)
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def noise(like: Any, size: float = 0.1, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return tree.map(lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype) * size, like)


def adapters_of(*targets: str, rank: int = 3, scale: float = 0.5) -> tuple[Any, Any]:
    """Sites, and random adapters for them, neither A nor B zero."""
    sites = chosen(LAYOUT, targets)
    return sites, noise(init(shapes(sites, lambda _: rank, lambda _: scale), Key.of(1)), seed=rank)


def base() -> Decoder:
    made: Decoder = FAMILY.init(CONFIG, Key.of(0))
    return made


# ------------------------------------------------------------------------------------------------------- sites


def test_sites_are_the_rows_of_the_leaves_that_the_layout_says() -> None:
    file = {name: torch.randn(spec.shape) for name, spec in LAYOUT.source.items()}
    leaves = LAYOUT(file)
    sites = sites_of(LAYOUT)
    for site in sites:
        ((leaf, start, count),) = site.runs
        rows = leaves[leaf][start : start + count]
        assert torch.equal(rows, file[f"{site.module}.weight"])
        assert rows.shape == (site.rows, site.columns)
    matrices = [name for name, spec in LAYOUT.source.items() if len(spec.shape) == 2]
    assert {f"{site.module}.weight" for site in sites} == set(matrices) - {"model.embed_tokens.weight"}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_all_linear_maps_of_the_layers_are_the_default(family: str) -> None:
    config = FAMILIES[family].config_from_hf({**HF, "model_type": family, "num_hidden_layers": 12})
    layout = FAMILIES[family].layout(config, head_in_file=True)
    sites = chosen(layout)
    wanted = {f"model.layers.{i}.self_attn.{name}" for i in range(12) for name in EVERY[:4]}
    wanted |= {f"model.layers.{i}.mlp.{name}" for i in range(12) for name in EVERY[4:]}
    assert {site.module for site in sites} == wanted and len(sites) == 84
    assert sorted(shortest_targets(sites, layout)) == sorted(EVERY)
    layers = [int(site.module.split(".")[2]) for site in sites]
    assert layers == sorted(layers)  # layer 10 behind layer 9


def test_targets_name_modules_by_their_ends() -> None:
    assert {site.name for site in chosen(LAYOUT, ("q_proj", "v_proj"))} == {"q_proj", "v_proj"}
    (one,) = chosen(LAYOUT, ("model.layers.1.mlp.up_proj",))
    assert (one.runs, one.rows, one.columns) == ((("layers.1.gate_up", 80, 80),), 80, 48)
    assert shortest_targets((one,), LAYOUT) == ("model.layers.1.mlp.up_proj",)  # "up_proj" would name layer 0's too
    assert [site.runs for site in chosen(LAYOUT, ("lm_head",))] == [(("head", 0, 97),)]


def test_a_map_that_is_named_by_a_number_is_shown_with_what_stands_before_it() -> None:
    """Of a transformer of diffusers, whose sequences number their parts."""
    family = FLOW_LAYOUTS["sd3"]
    layout = family.layout(family.config_from_hf(next(iter(family.tiny().values()))))
    names = {site.name for site in sites_of(layout)}
    assert {"to_out.0", "net.2", "to_q"} <= names and not [name for name in names if name[0].isdigit()]
    modules = {name: {site.module for site in chosen(layout, (name,))} for name in ("to_out.0", "net.2")}
    assert all(found and all(module.endswith(f".{name}") for module in found) for name, found in modules.items())
    assert "to_out.0" in shortest_targets(chosen(layout, ("to_out.0",)), layout)
    with pytest.raises(ModelError, match=r"no module 'q_proj'; its linear maps are .*\bto_out\.0, ") as caught:
        chosen(layout, ("q_proj",))
    assert not re.search(r" \d+,| \d+$", str(caught.value))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("qproj", "the model has no module 'qproj'; its linear maps are lm_head, "),
        ("proj", "the model has no module 'proj'"),
        (
            "embed_tokens",
            "'embed_tokens' names 'model.embed_tokens', which cannot be adapted: routers and routed experts, ",
        ),
        ("q_norm", "'q_norm' names 'model.layers.0.self_attn.q_norm', which cannot be adapted"),
    ],
)
def test_a_target_that_is_no_linear_map_is_refused(target: str, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        chosen(LAYOUT, ("q_proj", target))
    assert str(caught.value).startswith(words)


def test_weights_that_are_no_rows_of_matrices_are_no_sites() -> None:
    square, tall = TensorSpec((4, 4)), TensorSpec((8, 4))
    experts = [f"layers.0.experts.{i}.w.weight" for i in range(3)]
    layout: Iso = product(
        [
            stack(experts, "layers.0.experts", square),
            transpose("layers.0.conv1d.weight", "layers.0.turned", square),
            tie("layers.0.twice", ["layers.0.one.weight", "layers.0.other.weight"], square),
            rename("layers.0.gate.weight", "layers.0.router", square),
            rename("layers.0.plain.weight", "layers.0.plain", tall),
            rename("layers.0.plain.bias", "layers.0.plain_bias", TensorSpec((8,))),
        ]
    )
    assert [site.module for site in chosen(layout)] == ["layers.0.plain"]
    for target in ("w", "conv1d", "one", "gate"):
        with pytest.raises(ModelError, match="cannot be adapted"):
            chosen(layout, (target,))
    with pytest.raises(ModelError, match="no linear map in its layers that can be adapted"):
        chosen(rename("layers.0.norm.weight", "layers.0.norm", TensorSpec((8,))))


def test_rows_that_a_layout_deals_out_by_heads_are_followed() -> None:
    halves = {"q": TensorSpec((4, 3)), "gate": TensorSpec((4, 3))}
    dealt = deinterleave("layers.0.q_gate.weight", halves, blocks=2)
    (apart,) = chosen(dealt)
    assert apart.runs == (("q", 0, 2), ("gate", 0, 2), ("q", 2, 2), ("gate", 2, 2))
    (joined,) = chosen(dealt >> concat(halves, "layers.0.qg"))
    assert joined.runs == tuple(("layers.0.qg", start, 2) for start in (0, 4, 2, 6))


VARIANTS = [(name, variant) for name, family in LAYOUTS.items() for variant in family.variants]


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_an_adapted_tree_is_the_tree_of_the_adapted_file_in_every_family(name: str, variant: str) -> None:
    family = LAYOUTS[name]
    layout = family.layout(family.config_from_hf(dict(family.variants[variant])))
    generator = torch.Generator().manual_seed(0)
    file = {n: torch.randint(-9, 9, spec.shape, generator=generator).float() for n, spec in layout.source.items()}
    sites = chosen(layout)
    adapters = tree.map(
        lambda x: torch.randint(-3, 3, x.shape, generator=generator).float(), shapes(sites, lambda _: 2, lambda _: 2.0)
    )
    changed = dict(file)
    for module, part in adapters.items():
        changed[f"{module}.weight"] = file[f"{module}.weight"] + 2.0 * part.b @ part.a
    merged = merge(adapt(layout(file), adapters, sites))
    for path, leaf in layout(changed).items():
        assert torch.equal(merged[path], leaf), path


# ------------------------------------------------------------------------------------------------- computation


def explicit(site_weight: torch.Tensor, part: LowRank) -> torch.Tensor:
    return site_weight.double() + part.scale * part.b.double() @ part.a.double()


@pytest.mark.parametrize("targets", [EVERY, ("q_proj", "v_proj"), ("k_proj",), ("up_proj",), ("lm_head", "gate_proj")])
def test_an_adapted_model_is_the_model_of_the_sums(targets: tuple[str, ...]) -> None:
    sites, adapters = adapters_of(*targets)
    params = base()
    file = LAYOUT.inverse(dict(tree.leaves_with_path(params)))
    wide = {name: tensor.double() for name, tensor in file.items()}
    for site in sites:
        wide[f"{site.module}.weight"] = explicit(file[f"{site.module}.weight"], adapters[site.module])
    leaves = LAYOUT(wide)
    expected = tree.unflatten(params, [leaves[path] for path, _ in tree.leaves_with_path(params)])
    tokens = torch.arange(20)
    places, segments = torch.arange(20), torch.zeros(20, dtype=torch.int64)
    view = adapt(params, adapters, sites)
    received = POLICY.logits(view, POLICY.hidden(view, tokens, places, segments))
    merged = merge(view, torch.float64)
    plain = POLICY.logits(expected, POLICY.hidden(expected, tokens, places, segments))
    torch.testing.assert_close(received.double(), plain, atol=3e-5, rtol=0)
    for (path, one), (_, other) in zip(tree.leaves_with_path(merged), tree.leaves_with_path(expected), strict=True):
        torch.testing.assert_close(one.double(), other, atol=2e-7, rtol=0, msg=path)
    unadapted = POLICY.logits(params, POLICY.hidden(params, tokens, places, segments))
    assert float((received - unadapted).abs().max()) > 0.05


def test_only_weights_with_adapters_are_replaced_and_none_is_copied() -> None:
    sites, adapters = adapters_of("v_proj", "down_proj")
    params = base()
    view = adapt(params, adapters, sites)
    layer = view.layers[0]
    assert isinstance(layer.qkv, Adapted) and layer.qkv.weight is params.layers[0].qkv
    assert isinstance(layer.down, Adapted) and not isinstance(layer.gate_up, Adapted)
    assert view.embed is params.embed and layer.o is params.layers[0].o
    q_and_k = (6 + 2) * 16
    assert not layer.qkv.b[:q_and_k].any() and layer.qkv.b[q_and_k:].all()
    with pytest.raises(ModelError, match=r"one of them lacks model\.layers\.0\.mlp\.down_proj, model\.layers\.1"):
        adapt(params, {name: part for name, part in adapters.items() if "down" not in name}, sites)


def test_linear_of_an_adapted_weight_has_the_gradients_of_the_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, a, b, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 7), (6, 7), (2, 7), (6, 2), (6,))
    )
    for moved, function in {
        "a": lambda value: linear(x, Adapted(weight=w, a=value, b=b), bias).sin().sum(),
        "b": lambda value: linear(x, Adapted(weight=w, a=a, b=value), bias).sin().sum(),
        "x": lambda value: linear(value, Adapted(weight=w, a=a, b=b), bias).sin().sum(),
    }.items():
        laws.gradient(function, {"a": a, "b": b, "x": x}[moved])
    torch.testing.assert_close(linear(x, Adapted(weight=w, a=a, b=b), bias), x @ (w + b @ a).T + bias)


@pytest.mark.parametrize("rank", [1, 2, 3, 8])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_an_adapted_map_have_the_same_bits_alone_and_in_company(rank: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(rank)
        w, a, b = (torch.randn(shape, generator=generator) for shape in ((48, 64), (rank, 64), (48, rank)))
        x = torch.randn(150, 64, generator=generator)
        whole = linear(x, Adapted(weight=w, a=a, b=b))
        for rows in (1, 2, 3, 4, 5, 31, 64, 65, 66, 67, 129):
            alone = linear(x[:rows], Adapted(weight=w, a=a, b=b))
            torch.testing.assert_close(alone, whole[:rows], atol=1e-4, rtol=0)
            plain = torch.equal(linear(x[:rows], w), linear(x, w)[:rows])  # as this machine's BLAS allows
            assert torch.equal(alone, whole[:rows]) or not plain, rows
    finally:
        torch.set_num_threads(before)


def test_half_precision_multiplies_in_half_and_merges_in_single() -> None:
    sites, adapters = adapters_of()
    params = tree.map(lambda x: x.bfloat16(), base())
    view, exact = adapt(params, adapters, sites), adapt(params, adapters, sites, torch.float32)
    assert view.layers[0].qkv.a.dtype == torch.bfloat16 and exact.layers[0].qkv.a.dtype == torch.float32
    assert linear(torch.ones(4, 48, dtype=torch.bfloat16), view.layers[0].qkv).dtype == torch.bfloat16
    whole = params.layers[0].down.double() + 0.5 * (
        adapters["model.layers.0.mlp.down_proj"].b.double() @ adapters["model.layers.0.mlp.down_proj"].a.double()
    )
    merged = merge(exact).layers[0].down
    assert merged.dtype == torch.bfloat16
    once = whole.bfloat16()
    assert float((merged != once).float().mean()) < 0.01  # a tie may fall to either side; never further
    torch.testing.assert_close(merged.float(), whole.float(), rtol=2**-8, atol=0)


# --------------------------------------------------------------------------------------------- merge and unmerge


def test_K22_merge_and_unmerge_by_hand() -> None:
    part = LowRank(a=torch.tensor([[1.0, 1.0]]), b=torch.tensor([[1.0], [0.0]]), scale=2.0)
    adapted = Adapted(weight=torch.eye(2), a=part.a, b=part.b * part.scale)
    merged = merge(adapted)
    assert torch.equal(merged, torch.tensor([[3.0, 2.0], [0.0, 1.0]]))
    assert torch.equal(unmerge(merged, adapted), torch.eye(2))
    layout = rename("layers.0.w.weight", "w", TensorSpec((2, 2)))
    view = adapt({"w": torch.eye(2)}, {"layers.0.w": part}, chosen(layout))
    assert torch.equal(merge(view)["w"], torch.tensor([[3.0, 2.0], [0.0, 1.0]]))


def test_K22_integers_come_back_bit_for_bit_and_a_merge_is_no_silent_nothing() -> None:
    sites, adapters = adapters_of(scale=2.0)
    params = tree.map(lambda x: (x * 200).round() + 0.0, base())  # no -0.0, which a sum cannot give back
    whole = adapt(params, tree.map(lambda x: (x * 30).round(), adapters), sites)
    merged = merge(whole)
    assert tree.equal(unmerge(merged, whole), params)
    before = dict(tree.leaves_with_path(params))
    changed = [path for path, x in tree.leaves_with_path(merged) if not torch.equal(x, before[path])]
    assert sorted(changed) == sorted({leaf for site in sites for leaf, _, _ in site.runs})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unmerge_is_off_by_the_roundings_that_are_stated(dtype: torch.dtype) -> None:
    sites, adapters = adapters_of(rank=8, scale=1.7)
    params = tree.map(lambda x: x.to(dtype), base())
    whole = adapt(params, adapters, sites, torch.float32)
    merged = merge(whole)
    back = unmerge(merged, whole)
    ulp = torch.finfo(dtype).eps
    worst = 0.0
    for w, m, r in zip(tree.leaves(params), tree.leaves(merged), tree.leaves(back), strict=True):
        assert m.dtype == r.dtype == dtype
        bound = ulp * (m.double().abs() + r.double().abs()) + torch.finfo(dtype).tiny
        off = (r.double() - w.double()).abs()
        assert bool((off <= bound).all())
        worst = max(worst, float((off / bound).max()))
    assert worst > 0.2  # the statement is not idle


# ------------------------------------------------------------------------------------------------------ training


def packed(length: int = 24) -> PackedTokens:
    tokens = torch.arange(length) % 7 + 3
    return PackedTokens(
        tokens=tokens, positions=torch.arange(length), segments=torch.zeros(length, dtype=torch.int64),
        index=torch.arange(length - 1), targets=tokens[1:], weight=torch.ones(length - 1), documents=1, longest=length,
    )  # fmt: skip


def begun(params: Decoder, adapters: Any, sites: Any) -> tuple[Any, TrainState]:
    """A step of supervised training of the adapters, and the state before it."""
    optimizer = adamw(AdamWSpec(lr=1e-2, weight_decay=0.0), 10)
    objective = pipeline(score(POLICY, Sampling()), cross_entropy())
    step = train_step(objective, optimizer, view=lambda roles: adapt(roles["base"], roles["actor"], sites))
    state = TrainState(
        params={"actor": adapters, "base": params}, optim={"actor": optimizer.init(adapters)}, snapshots={},
        counters=Counters(), key=Key.of(0), cursor=Cursor(),
    )  # fmt: skip
    return step, state


def test_a_step_moves_the_adapters_and_hands_the_base_on_as_it_is() -> None:
    sites = chosen(LAYOUT, ("q_proj", "down_proj"))
    adapters = init(shapes(sites, lambda _: 3, lambda _: 0.5), Key.of(1))
    params = base()
    step, state = begun(params, adapters, sites)
    first, metrics = laws.pure(step, state, (packed(),))
    assert metrics["train/grad_norm"] > 0
    second, _ = step(first, (packed(),))
    assert tree.equal(first.params["base"], params) and second.params["base"] is first.params["base"]
    start = dict(tree.leaves_with_path(adapters))
    for path, x in tree.leaves_with_path(first.params["actor"]):
        # while B is zero A has no gradient, so in the first step only B moves
        assert torch.equal(x, start[path]) == path.endswith(".a"), path
    assert not any(torch.equal(x, start[path]) for path, x in tree.leaves_with_path(second.params["actor"]))
    moments = [leaf for leaf in tree.leaves(second.optim["actor"]) if leaf.ndim == 2]
    assert len(moments) == 2 * len(start)  # of the adapters alone


@contextmanager
def shapes_made() -> Iterator[set[tuple[int, ...]]]:
    """The shapes of all floating tensors that are allocated within it."""
    seen: set[tuple[int, ...]] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = {
                x.untyped_storage()._cdata for x in tree.leaves([args, kwargs or {}]) if isinstance(x, torch.Tensor)
            }
            result = function(*args, **(kwargs or {}))
            for x in tree.leaves(result):
                if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                    seen.add(tuple(x.shape))
            return result

    with Watch():
        yield seen


@pytest.mark.parametrize("max_logits", [1 << 20, 300])
def test_no_gradient_of_a_frozen_matrix_is_ever_made(max_logits: int) -> None:
    sites, adapters = adapters_of()
    params, batch = base(), packed()

    def loss(own: Any, frozen: Any) -> torch.Tensor:
        view = adapt(frozen, own, sites)
        hidden = POLICY.hidden(view, batch.tokens, batch.positions, batch.segments)[batch.index]
        logp, _ = decision_log_probs(POLICY, Sampling(), view, hidden, batch.targets, max_logits=max_logits)
        return -logp.sum()

    frozen = {tuple(x.shape) for x in tree.leaves(params) if x.ndim == 2}
    with shapes_made() as seen:
        value_and_grad(loss)(adapters, params)
    flipped = {shape[::-1] for shape in frozen}
    assert seen and not seen & (frozen | flipped)
    with shapes_made() as seen:
        value_and_grad(lambda whole: loss(adapters, whole))(params)
    assert seen & frozen == frozen  # which a gradient of the whole model does make


def test_rollouts_agree_with_training_before_and_after_updates() -> None:
    sites, adapters = adapters_of(scale=1.0)
    prompts = Prompts(
        tokens=torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]]), lengths=torch.tensor([4, 2]), ids=torch.tensor([0, 1])
    )
    params = base()
    for steps in (0, 3):
        step, state = begun(params, adapters, sites)
        for _ in range(steps):
            state, _ = step(state, (packed(),))
        assert all(part.b.any() for part in state.params["actor"].values())
        view = adapt(state.params["base"], state.params["actor"], sites)
        sampling = Sampling(max_tokens=8, temperature=0.8, top_p=0.9)
        laws.rollout_matches_training(POLICY, view, prompts, Key.of(7), sampling, tolerance=1e-5)


@pytest.mark.traced
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it itself
def test_an_adapted_model_and_its_gradient_compile_without_a_graph_break() -> None:
    config = FAMILY.config_from_hf({**HF, "num_hidden_layers": 1})
    policy, sites = FAMILY.policy(config), chosen(FAMILY.layout(config, head_in_file=True), ("v_proj", "gate_proj"))
    params, batch = FAMILY.init(config, Key.of(0)), packed()
    adapters = noise(init(shapes(sites, lambda _: 2, lambda _: 0.5), Key.of(1)))

    def loss(own: Any, frozen: Any) -> torch.Tensor:
        view = adapt(frozen, own, sites)
        hidden = policy.hidden(view, batch.tokens, batch.positions, batch.segments, bounds=(1, 24))
        return policy.logits(view, hidden).sin().sum()

    value, gradient = value_and_grad(loss)(adapters, params)
    again, compiled = torch.compile(value_and_grad(loss), fullgraph=True, backend="aot_eager")(adapters, params)
    torch.testing.assert_close(again, value)
    for a, b in zip(tree.leaves(compiled), tree.leaves(gradient), strict=True):
        torch.testing.assert_close(a, b)


# ------------------------------------------------------------------------------------------------------- records


def test_records_refuse_matrices_that_do_not_go_together() -> None:
    a, b = torch.zeros(2, 5), torch.zeros(6, 2)
    with pytest.raises(RecordError, match=r"a must be \[r, D\] and b \[E, r\]"):
        LowRank(a=a, b=torch.zeros(6, 3), scale=1.0)
    with pytest.raises(RecordError, match="of one floating dtype"):
        LowRank(a=a, b=b.double(), scale=1.0)
    with pytest.raises(RecordError, match="finite"):
        LowRank(a=a, b=b, scale=float("nan"))
    with pytest.raises(RecordError, match="must have the shape of the weight"):
        Adapted(weight=torch.zeros(5, 6), a=a, b=b)
    assert replace(LowRank(a=a, b=b, scale=1.0), scale=2.0).scale == 2.0
