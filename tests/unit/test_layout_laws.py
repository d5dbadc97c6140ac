"""The laws of layouts on layouts of one move: what each catches, in its own words, and what it lets pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.layout import Iso, Part, Tensors, TensorSpec, bijection, concat, identity, pad, rename, tie
from areno_fn.contracts.placement import Replicated, Split, Vocabulary, place
from areno_fn.models.layouts import layout_of
from areno_fn.testing import laws, strategies
from areno_fn.testing.checkpoints import state_dict
from areno_fn.testing.elements import Numbering, moved
from areno_fn.testing.plain_files import read_folder, write_folder

A = TensorSpec((2, 3))
B = TensorSpec((4, 3))
EXAMPLES = settings.get_profile("layouts")


def one(there: Callable[[torch.Tensor], torch.Tensor], back: Callable[[torch.Tensor], torch.Tensor]) -> Iso:
    """A layout of one tensor, 'a' to 'b', whatever the two functions do."""
    return bijection({"a": A}, {"b": A}, lambda d: {"b": there(d["a"])}, lambda d: {"a": back(d["b"])})


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def through_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().to(x.dtype) if x.dtype is torch.float32 else x


def writing(x: torch.Tensor) -> torch.Tensor:
    if not x.is_meta:
        x.view(torch.uint8).bitwise_not_()
    return x


def reading(x: torch.Tensor) -> torch.Tensor:
    return x if x.flatten()[0] == x.flatten()[0] else x.flip(0)


def with_needs(iso: Iso, **needs: tuple[str, ...]) -> Iso:
    (part,) = iso.parts
    return Iso(
        (
            Part(
                source=part.source,
                target=part.target,
                needs={**part.needs, **needs},
                forward=part.forward,
                backward=part.backward,
                move=part.move,
                undo=part.undo,
            ),
        )
    )


def loose_tie(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {"x": tensors["a"]}


LOOSE = Iso(
    (
        Part(
            source={"a": A, "b": A},
            target={"x": A},
            needs={"x": ("a", "b")},
            forward=loose_tie,
            backward=lambda d: {"a": d["x"], "b": d["x"]},
            move="own",
            undo="own",
        ),
    )
)
TWO = bijection(
    {"a": A, "b": A},
    {"c": A, "d": A},
    lambda t: {"c": t["a"], "d": t["b"]},
    lambda t: {"a": t["c"], "b": t["d"]},
)

BROKEN: dict[str, tuple[Iso, str]] = {
    "computes": (
        one(lambda x: x + 1, lambda x: x - 1),
        "forward, element [0, 0] of 'b' is a number that none of the tensors given holds; a layout moves elements and "
        "computes nothing",
    ),
    "computes on the way back": (
        one(same, lambda x: 2 * x),
        "forward and back, a number that stands nowhere stands where element [0, 0] of 'a' was",
    ),
    "converts": (one(lambda x: x.bfloat16(), lambda x: x.float()), "'b' is bfloat16 [2, 3], declared float32 [2, 3]"),
    "rounds floats only": (
        one(through_bfloat16, same),
        "bits that went there and back: element [0, 0] of 'a' has other bits",
    ),
    "makes another shape": (
        one(lambda x: x.t(), lambda x: x.t()),
        "'b' is float32 [3, 2], declared float32 [2, 3]",
    ),
    "is not undone": (
        one(lambda x: x.flip(0), same),
        "forward and back, element [1, 0] of 'a' stands where element [0, 0] of 'a' was",
    ),
    "drops": (
        one(lambda x: x[:1].expand(2, 3), same),
        "forward, element [1, 0] of 'a' arrives nowhere, whatever its value: it is lost",
    ),
    "invents": (
        one(lambda x: torch.zeros_like(x), same),
        "forward, element [0, 0] of 'a' arrives nowhere, whatever its value: it is lost",
    ),
    "ties what it does not compare": (
        LOOSE,
        "forward, element [0, 0] of 'b' arrives nowhere, whatever its value: it is lost",
    ),
    "looks at values": (one(reading, same), "does not take tensors that are as it declares them"),
    "writes": (one(writing, same), "the layout writes to the tensors that it is given"),
    "hides a source": (
        with_needs(TWO, c=("b",), d=("b",)),
        "forward, 'c' holds elements of 'a', but declares to be made of b",
    ),
    "declares a source that it does not need": (
        with_needs(TWO, c=("a", "b"), d=("b",)),
        "forward, 'c' declares to be made of 'b', but holds none of its elements",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_bijection_is_caught(name: str) -> None:
    iso, words = BROKEN[name]
    with pytest.raises(AssertionError, match=re.escape(words)) as caught:
        laws.iso_roundtrip(iso)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_layouts_of_declared_dtypes_obey_too(dtype: torch.dtype | None) -> None:
    spec = TensorSpec((2, 3), dtype)
    laws.iso_roundtrip(concat({"a": spec, "b": spec}, "c", 1))
    laws.iso_roundtrip(tie("x", ("a", "b"), spec) | pad("c", "d", spec, 4))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_numbers_arrive_whole_through_any_dtype(dtype: torch.dtype) -> None:
    spec = TensorSpec((2, 3), dtype)
    numbering = Numbering.of({"a": spec, "b": spec})
    made = moved(concat({"a": spec, "b": spec}, "c"), numbering.tensors)
    assert torch.equal(made["c"].flatten(), numbering.flat)
    assert numbering.name(int(made["c"][3, 2])) == "element [1, 2] of 'b'"


def test_needing_more_than_is_held_may_be_allowed() -> None:
    iso, _ = BROKEN["declares a source that it does not need"]
    laws.iso_roundtrip(iso, exact_sources=False)


def test_an_empty_tensor_is_no_trouble() -> None:
    empty = TensorSpec((0, 3))
    laws.iso_roundtrip(concat({"a": empty, "b": A}, "c") | identity({"d": empty}))


# ------------------------------------------------------------------------------------------------ meaning


def test_agreement_names_the_element_that_stands_there_and_the_right_one() -> None:
    iso = concat({"up": A, "gate": A}, "gate_up")
    words = "element [0, 0] of 'gate_up' is element [0, 0] of 'up', it should be element [0, 0] of 'gate'"
    with pytest.raises(AssertionError, match=re.escape(words)):
        laws.layout_agrees(iso, lambda t: {"gate_up": torch.cat([t["gate"], t["up"]])})
    laws.layout_agrees(iso, lambda t: {"gate_up": torch.cat([t["up"], t["gate"]])})


def test_agreement_wants_the_leaves_of_the_reference_and_no_others() -> None:
    iso = identity({"a": A, "b": A})
    with pytest.raises(AssertionError, match="the leaves lack 'c'; the leaves have 'b', which should not be"):
        laws.layout_agrees(iso, lambda t: {"a": t["a"], "c": t["b"]})
    with pytest.raises(AssertionError, match=re.escape("'a' is [2, 3], it should be [3, 2]")):
        laws.layout_agrees(iso, lambda t: {"a": t["a"].t(), "b": t["b"]})


def test_agreement_compares_what_is_claimed_with_the_file() -> None:
    file = {"a": A, "b": B, "c": A}
    with pytest.raises(AssertionError, match="'c' is in the file, and the layout does not claim it"):
        laws.layout_agrees(identity({"a": A, "b": B}), dict, file=file)
    with pytest.raises(AssertionError, match="the layout claims 'd', which is not in the file"):
        laws.layout_agrees(identity({**file, "d": A}), dict, file=file)
    with pytest.raises(AssertionError, match=re.escape("the layout claims 'b' as [2, 3], in the file it is [4, 3]")):
        laws.layout_agrees(identity({**file, "b": A}), dict, file=file)


def test_a_tied_leaf_agrees_with_either_of_its_names() -> None:
    iso = tie("x", ("a", "b"), A)
    laws.layout_agrees(iso, lambda t: {"x": t["a"]})
    laws.layout_agrees(iso, lambda t: {"x": t["b"]})


def test_ranks_are_compared_one_by_one() -> None:
    leaves = {"down": TensorSpec((2, 4)), "norm": TensorSpec((2,))}
    iso = place(leaves, {"down": Split(1), "norm": Replicated()}, 2)

    def sliced(tensors: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        return {"down": tensors["down"][:, 2 * rank : 2 * rank + 2], "norm": tensors["norm"]}

    def strided(tensors: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        return {"down": tensors["down"][:, rank::2], "norm": tensors["norm"]}

    laws.shards_agree(iso, sliced, 2)
    words = "element [0, 1] of '0/down' is element [0, 1] of 'down', it should be element [0, 2] of 'down'"
    with pytest.raises(AssertionError, match=re.escape(words)):
        laws.shards_agree(iso, strided, 2)


def test_placements_are_those_of_the_leaves_and_fit_one_rank() -> None:
    with pytest.raises(AssertionError, match="every leaf needs a placement .* not so for 'b'"):
        laws.placements_agree({"a": A, "b": A}, {"a": Split(0)})
    with pytest.raises(AssertionError, match="one rank holds every leaf whole, but this is refused: .*no dimension 2"):
        laws.placements_agree({"a": A}, {"a": Split(2)})
    assert laws.placements_agree({"a": A}, {"a": Split(1)}) == (1, 3)
    assert laws.placements_agree({"a": A}, {"a": Vocabulary()}) == (1, 2, 3, 4, 8)


# -------------------------------------------------------------------------------------------------- files


def test_a_checkpoint_goes_through_files_and_ranks(tmp_path: Path) -> None:
    iso = tie("x", ("a", "b"), A) | concat({"c": A, "d": A}, "cd") | rename("e", "f", B)
    placements = {"x": Vocabulary(), "cd": Split(0), "f": Replicated()}
    assert laws.checkpoint_roundtrip(iso, placements=placements, folder=tmp_path) == (1, 2, 4)
    assert list(tmp_path.iterdir()) == []
    assert laws.checkpoint_roundtrip(iso) == ()


def test_a_checkpoint_that_holds_more_is_not_the_layouts() -> None:
    state = state_dict(identity({"a": A, "b": A}))
    with pytest.raises(
        AssertionError, match="1 file: a file that holds 2 tensors is not loaded: CheckpointError: .*'b'"
    ):
        laws.checkpoint_roundtrip(identity({"a": A}), state=state)


def test_what_is_left_out_is_declared_and_still_there() -> None:
    state = state_dict(identity({"a": A, "model.visual.b": B}))
    laws.checkpoint_roundtrip(identity({"a": A}), state=state, left_out=("model.visual.*",))
    file = {name: TensorSpec(tuple(tensor.shape)) for name, tensor in state.items()}
    laws.layout_agrees(identity({"a": A}), dict, file=file, left_out=("model.visual.*",))
    with pytest.raises(AssertionError, match="'model.visual.b' is in the file, and the layout does not claim it"):
        laws.layout_agrees(identity({"a": A}), dict, file=file, left_out=("visual.*",))


def test_a_checkpoint_through_a_layout_that_computes_is_not_the_same() -> None:
    with pytest.raises(AssertionError, match="1 file: loaded and saved: element .* of 'a' has other bits"):
        laws.checkpoint_roundtrip(one(same, through_bfloat16), dtypes=(torch.float32,))


def test_state_dicts_have_one_dtype_a_part_and_several_in_all() -> None:
    iso = (
        tie("x", ("a", "b"), A)
        | identity({f"{i}": A for i in range(8)})
        | rename("h", "i", TensorSpec((2,), torch.int8))
    )
    state = state_dict(iso)
    assert list(state) == list(iso.source)
    assert state["a"].dtype == state["b"].dtype and state["h"].dtype == torch.int8
    assert len({tensor.dtype for tensor in state.values()}) > 2
    assert torch.equal(state["a"].view(torch.uint8), state["b"].view(torch.uint8))


def test_plain_files_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = state_dict(identity({"a": A, "b": B, "c": TensorSpec(()), "d": TensorSpec((0, 2))}))
    ours = write_folder(tmp_path / "ours", state, {}, metadata={"format": "pt"}, index={})
    theirs = load_file(ours / "model.safetensors")
    (tmp_path / "theirs").mkdir()
    save_file(state, tmp_path / "theirs/model.safetensors", metadata={"format": "pt"})
    read = read_folder(tmp_path / "theirs")
    for name, tensor in state.items():
        for other in (theirs[name], read.tensors[name]):
            assert other.dtype == tensor.dtype and other.shape == tensor.shape
            assert torch.equal(other.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert read.metadata == {"model.safetensors": {"format": "pt"}} and read.index is None


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), "the index names other tensors"),
        (
            lambda f: (f / "extra.safetensors").write_bytes((f / "model-00001-of-00002.safetensors").read_bytes()),
            "'a' stands in extra.safetensors and in model-00001-of-00002.safetensors",
        ),
        (lambda f: (f / "model.safetensors.index.json").unlink(), "without an index"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                (f / "model.safetensors.index.json").read_text().replace('"total_size": ', '"total_size": 1')
            ),
            "the index says total_size 1",
        ),
    ],
)
def test_a_folder_that_says_two_things_is_not_read(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    state = state_dict(identity({"a": A, "b": B}))
    folder = write_folder(tmp_path / "f", state, {}, files=2, metadata={}, index={})
    assert read_folder(folder).tensors.keys() == state.keys()
    damage(folder)
    with pytest.raises(AssertionError, match=words):
        read_folder(folder)


# ------------------------------------------------------------------------------------------------ families


@pytest.mark.parametrize("family", strategies.families())
def test_configurations_of_a_family_are_drawn(family: str) -> None:
    seen = []

    @settings(EXAMPLES, max_examples=5, database=None)
    @given(strategies.configs(family))
    def draw(config: dict[str, object]) -> None:
        seen.append(config)
        assert "_class_name" in config or layout_of(config).name == family

    draw()
    assert len(seen) > 1


@pytest.mark.parametrize("family", strategies.families())
def test_layouts_of_a_family_are_drawn_with_their_placements(family: str) -> None:
    @settings(EXAMPLES, max_examples=2, database=None)
    @given(strategies.layouts(family))
    def draw(drawn: tuple[Iso, dict[str, object]]) -> None:
        iso, placements = drawn
        laws.iso_roundtrip(iso)
        assert placements.keys() == iso.target.keys()

    draw()


def test_a_family_that_is_not_there_is_refused_by_name() -> None:
    @settings(EXAMPLES, max_examples=1, database=None)
    @given(strategies.configs("gpt2"))
    def draw(config: dict[str, object]) -> None:
        del config

    with pytest.raises(ModelError, match="there is no family 'gpt2'; those with a layout are llama, "):
        draw()


def test_a_reference_that_reads_what_is_not_claimed_is_named() -> None:
    with pytest.raises(AssertionError, match="the reference reads 'c', which the layout does not claim"):
        laws.layout_agrees(identity({"a": A}), lambda tensors: {"a": tensors["c"]})


LEAVES = {"w": TensorSpec((3, 2))}
NOTHING: list[tuple[str, Callable[[], object]]] = [
    ("dtypes name none", lambda: laws.iso_roundtrip(identity(LEAVES), dtypes=())),
    ("dtypes name none", lambda: laws.checkpoint_roundtrip(identity(LEAVES), dtypes=())),
    ("ranks=0 hold nothing", lambda: laws.shards_agree(identity(LEAVES), lambda tensors, rank: tensors, 0)),
    ("ranks name no number", lambda: laws.placements_agree(LEAVES, {"w": Split(0)}, ())),
]


@pytest.mark.parametrize(("sentence", "call"), NOTHING)
def test_nothing_to_compare_is_no_pass(sentence: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}, so that nothing would be compared; give"):
        call()
