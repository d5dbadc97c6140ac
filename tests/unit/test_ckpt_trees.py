"""Trees in files: bit for bit what was saved, and the first difference when it is something else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
from ckpt_toys import random_bits, write_raw
from hypothesis import given
from safetensors import safe_open

from areno_fn import tree
from areno_fn.ckpt.trees import flatten, load_record, load_tree, save_tree
from areno_fn.contracts.batch import Prompts, Rollout
from areno_fn.contracts.errors import CheckpointError, RecordError
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import record, replace, static
from areno_fn.contracts.state import Counters


@record
class Moments:
    mu: torch.Tensor
    nu: torch.Tensor | None = None
    count: int = 0
    name: str = static(default="adam")


@record
class Nested:
    moments: Moments
    other: Moments | None = None
    scale: float = 1.0
    flag: bool = False


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


def some_tree() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "moments": Moments(mu=random_bits((2, 3), torch.bfloat16, generator), count=7),
        "layers": (torch.arange(3), [torch.tensor(True), torch.zeros(0, 2)]),
        "pair": Pair(torch.ones(()), -3),
        "key": Key.of(2**64 - 5),
        "nothing": {},
        3: "text \n ü",
        "float": -0.0,
        "none": None,
    }


def rollout(rows: int = 2) -> Rollout:
    prompts = Prompts(tokens=torch.tensor([[5, 6, 0]] * rows), lengths=torch.tensor([2] * rows), ids=torch.arange(rows))
    return Rollout(
        prompts=prompts,
        groups=torch.zeros(rows, dtype=torch.int64),
        ids=torch.arange(rows),
        tokens=torch.tensor([[7, 2]] * rows),
        lengths=torch.tensor([2] * rows),
        logp=torch.rand(rows, 2),
        finished=torch.tensor([True] * rows),
    )


def refuse(call: Any, *words: str, kind: type[Exception] = CheckpointError) -> None:
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)


# --------------------------------------------------------------------------------------------------- inverse


def test_a_tree_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = save_tree(tmp_path / "t", some_tree())
    assert path.is_file() and [p.name for p in tmp_path.iterdir()] == ["t"]
    back = load_tree(path, some_tree())
    assert tree.first_difference(back, some_tree()) is None
    assert type(back["pair"]) is Pair and math.copysign(1, back["float"]) == -1 and list(back) == list(some_tree())


def test_meta_tensors_say_what_to_expect(tmp_path: Path) -> None:
    path = save_tree(tmp_path / "t", some_tree())
    like = tree.map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, some_tree())
    assert tree.equal(load_tree(path, like), some_tree())


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=5)
SHAPES = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def drawn_trees(draw: st.DrawFn) -> Any:
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8])

    def tensor(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
        return random_bits(tuple(shape), dtype, torch.Generator().manual_seed(seed))

    leaf = SCALARS | st.builds(tensor, SHAPES, dtypes, st.integers(0, 99))
    names = st.text("abcd", min_size=1, max_size=3)
    inner = lambda x: st.lists(x, max_size=3) | st.dictionaries(names, x, max_size=3) | st.tuples(x, x)  # noqa: E731
    return draw(st.recursive(leaf, inner, max_leaves=8))


@given(drawn_trees())
def test_any_tree_comes_back(value: Any) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        back = load_tree(save_tree(Path(folder) / "t", value), value)
    assert tree.first_difference(back, value) is None


def test_tensors_stand_under_their_paths(tmp_path: Path) -> None:
    save_tree(tmp_path / "t", some_tree(), {"note": "mine"})
    with safe_open(str(tmp_path / "t"), "pt") as file:
        assert set(file.keys()) == {
            "moments.mu", "layers.0", "layers.1.0", "layers.1.1", "pair.0", "key.seed", "key.counter",
        }  # fmt: skip
        metadata = file.metadata()
    assert metadata["format"] == "pt" and metadata["note"] == "mine"
    scalars = json.loads(metadata["areno_fn.tree"])["scalars"]
    assert scalars["moments.count"] == 7 and scalars["moments.name"] == "adam" and scalars["moments.nu"] is None


def test_K5_one_tensor_in_two_places_is_stored_once(tmp_path: Path) -> None:
    shared, alike = torch.rand(3), torch.rand(3)
    value = {
        "a": shared,
        "b": [shared.view(3), alike],
        "c": alike.clone(),
        "half": shared[:2],
        "turned": shared[None].t(),
    }
    save_tree(tmp_path / "t", value)
    assert set(safetensors.torch.load_file(tmp_path / "t")) == {"a", "b.1", "c", "half", "turned"}
    back = load_tree(tmp_path / "t", value)
    assert tree.equal(back, value)
    assert back["a"] is back["b"][0] and back["c"] is not back["b"][1]


def test_K15_strides_are_not_stored(tmp_path: Path) -> None:
    value = {"a": torch.arange(6).view(2, 3).t()}
    assert load_tree(save_tree(tmp_path / "t", value), value)["a"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_file_is_replaced(tmp_path: Path) -> None:
    save_tree(tmp_path / "t", {"a": 1})
    save_tree(tmp_path / "t", {"a": 2})
    assert load_tree(tmp_path / "t", {"a": 0}) == {"a": 2}
    (tmp_path / "d").mkdir()
    refuse(lambda: save_tree(tmp_path / "d", {"a": 1}), "is a folder, where a file is to be written")


# --------------------------------------------------------------------------------------------------- records


def test_a_rollout_is_read_without_another_one(tmp_path: Path) -> None:
    value = rollout()
    save_tree(tmp_path / "r", value)
    back = load_record(tmp_path / "r", Rollout)
    assert type(back) is Rollout and tree.first_difference(back, value) is None


def test_records_in_records_with_static_and_absent_fields(tmp_path: Path) -> None:
    inner = Moments(mu=torch.ones(2), nu=torch.zeros(1), count=3, name="lion")
    for value in (Nested(moments=inner, scale=float("inf"), flag=True), Nested(moments=inner, other=inner)):
        save_tree(tmp_path / "r", value)
        back = load_record(tmp_path / "r", Nested)
        assert tree.first_difference(back, value) is None and back.moments.name == "lion"


def test_a_record_of_another_class(tmp_path: Path) -> None:
    save_tree(tmp_path / "r", rollout())
    refuse(lambda: load_record(tmp_path / "r", Prompts), "holds 'groups', which Prompts has not")
    save_tree(tmp_path / "p", rollout().prompts)
    refuse(lambda: load_record(tmp_path / "p", Rollout), "has no 'prompts.tokens', which Prompts needs")


def test_a_record_keeps_its_contract(tmp_path: Path) -> None:
    values = {name: getattr(rollout().prompts, name) for name in ("tokens", "lengths", "ids")}
    save_tree(tmp_path / "r", {**values, "ids": torch.arange(5)})
    refuse(lambda: load_record(tmp_path / "r", Prompts), "these must be vectors of one length", kind=RecordError)
    save_tree(tmp_path / "c", {"optimizer_step": -1, "rollout_iteration": 0, "data_epoch": 0})
    refuse(lambda: load_record(tmp_path / "c", Counters), "must be an integer of at least 0", kind=RecordError)


# -------------------------------------------------------------------------------------------------- refusals

A = {"a": torch.zeros(2), "n": 1, "m": Moments(mu=torch.zeros(1))}
OTHERS: dict[str, tuple[Any, str]] = {
    "shape": ({**A, "a": torch.zeros(3)}, "'a' is float32 [2], it should be float32 [3]"),
    "dtype": ({**A, "a": torch.zeros(2, dtype=torch.float64)}, "'a' is float32 [2], it should be float64 [2]"),
    "type": ({**A, "n": 1.0}, "'n' is the int 1, it should be the float 1.0"),
    "bool for int": ({**A, "n": True}, "'n' is the int 1, it should be the bool True"),
    "tensor for number": ({**A, "n": torch.tensor(1)}, "'n' is the int 1, it should be int64 []"),
    "number for tensor": ({**A, "a": 1}, "'a' is float32 [2], it should be the int 1"),
    "absent": ({**A, "m": replace(A["m"], nu=torch.ones(1))}, "'m.nu' is None, it should be float32 [1]"),
    "static": ({**A, "m": replace(A["m"], name="lion")}, "'m.name' is the str 'adam', it should be 'lion'"),
    "missing": ({**A, "z": 1}, "'z' is missing, it should be the int 1"),
    "unknown": ({k: v for k, v in A.items() if k != "n"}, "'n' is not expected"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_first_difference_is_named(name: str, tmp_path: Path) -> None:
    like, words = OTHERS[name]
    save_tree(tmp_path / "t", A)
    refuse(lambda: load_tree(tmp_path / "t", like), str(tmp_path / "t"), words)


def test_what_cannot_be_stored(tmp_path: Path) -> None:
    for value, words in (
        ({"a": {"b": object()}}, "'a.b' is a object; only tensors, ints, floats, bools, strings and None"),
        ({"a": torch.float32}, "'a' is a dtype"),
        ({"a": 2**63}, "'a' is 9223372036854775808, which does not fit in 64 bits"),
        ({"a": {"b": 1}, "a.b": 2}, "two leaves of the tree have the path 'a.b'"),
        ({1: 0, "1": 0}, "two leaves of the tree have the path '1'"),
        ({"a": torch.zeros(1, device="meta")}, "'a' was to be written as float32 [1], but it is float32 [1] on meta"),
        ({"a": torch.eye(2).to_sparse()}, "'a' is a torch.sparse_coo tensor"),
    ):
        refuse(lambda value=value: save_tree(tmp_path / "t", value), words)
        assert not list(tmp_path.iterdir())


def test_files_that_are_no_trees(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "t")
    refuse(lambda: load_tree(tmp_path / "t", {}), "is not a stored tree: its header has no 'areno_fn.tree'")
    for text, words in (
        ("{", "is not valid JSON"),
        ('{"scalars": {"a": [1]}}', "is damaged"),
        ('{"unknown": 1}', "is damaged"),
        ('{"version": 2}', "has version 2, this library reads version 1"),
        ('{"aliases": {"b": "none"}}', "'b' is stored as 'none', which is not there"),
    ):
        write_raw(tmp_path / "t", {"__metadata__": {"areno_fn.tree": text}})
        refuse(lambda: load_tree(tmp_path / "t", {"b": torch.ones(1)}), words)
        refuse(lambda: load_record(tmp_path / "t", Prompts), str(tmp_path / "t"))
    refuse(lambda: load_tree(tmp_path / "none", {}), "cannot be read")


def test_aliases_of_equal_tensors_are_found_by_memory_alone() -> None:
    empty = torch.zeros(0)
    flat = flatten({"a": empty, "b": torch.zeros(0), "c": empty})
    assert set(flat.tensors) == {"a", "b"} and flat.values.aliases == {"c": "a"}


def test_every_difference_is_named_up_to_twenty(tmp_path: Path) -> None:
    save_tree(tmp_path / "t", A)
    like = {"a": torch.zeros(3), "m": A["m"], "z": 1}
    refuse(
        lambda: load_tree(tmp_path / "t", like),
        "'a' is float32 [2], it should be float32 [3]; 'z' is missing, it should be the int 1; 'n' is not expected",
    )
    many = {**A, **{f"x{place:02}": 1 for place in range(25)}}
    refuse(lambda: load_tree(tmp_path / "t", many), "'x19' is missing, it should be the int 1; and 5 more")
