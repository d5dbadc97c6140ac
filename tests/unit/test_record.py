"""`@record`: construction, structure, immutability, compilation, donation."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import attrs
import pytest
import torch
import torch.utils._pytree as pytree

from areno_fn import random, tree
from areno_fn.contracts.errors import DonatedError, ImmutableError, RecordError
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import donate, field_names, is_record, record, replace, static
from areno_fn.contracts.state import Counters, Cursor, TrainState


@record
class Linear:
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    name: str = static(default="linear")


@record
class Net:
    layers: tuple[Linear, ...]
    extra: dict[str, torch.Tensor] = attrs.field(factory=dict)
    width: int = static()


@record
class Positive:
    value: int

    def __check__(self) -> None:
        if self.value <= 0:
            raise RecordError(f"Positive.value must be positive, received {self.value}")


@record
class Empty:
    pass


def linear(**changes: Any) -> Linear:
    return Linear(**{"weight": torch.ones(2, 3), **changes})


def test_only_keywords_are_accepted() -> None:
    with pytest.raises(TypeError, match="positional"):
        Linear(torch.ones(1))  # type: ignore[misc]


def test_missing_and_unknown_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="width"):
        Net(layers=())  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="wieght"):
        Linear(wieght=torch.ones(1))  # type: ignore[call-arg]


def test_fields_cannot_be_written_deleted_or_added() -> None:
    value = linear()
    with pytest.raises(ImmutableError):
        value.weight = torch.zeros(1)  # type: ignore[misc]
    with pytest.raises(ImmutableError):
        del value.weight
    with pytest.raises(ImmutableError):
        value.other = 1  # type: ignore[attr-defined]


def test_defaults_and_factories_are_fresh_for_every_record() -> None:
    first, second = Net(layers=(), width=1), Net(layers=(), width=1)
    assert first.extra == {} and first.extra is not second.extra
    assert linear().bias is None and linear().name == "linear"


def test_a_required_field_may_follow_a_default() -> None:
    assert Net(layers=(), width=3).width == 3


def test_an_empty_record_is_a_node_without_leaves() -> None:
    assert pytree.tree_leaves(Empty()) == [] and is_record(Empty())


def test_static_fields_are_structure() -> None:
    leaves, spec = pytree.tree_flatten(linear(name="a"))
    assert len(leaves) == 1
    assert spec == pytree.tree_structure(linear(name="a"))
    assert spec != pytree.tree_structure(linear(name="b"))


def test_none_is_structure_and_not_a_leaf() -> None:
    with_bias, without = linear(bias=torch.zeros(2)), linear()
    assert len(pytree.tree_leaves(with_bias)) == 2 and len(pytree.tree_leaves(without)) == 1
    assert pytree.tree_structure(with_bias) != pytree.tree_structure(without)
    assert pytree.tree_map(lambda x: x * 2, without).bias is None


def test_paths_name_the_fields() -> None:
    net = Net(layers=(linear(bias=torch.zeros(2)),), extra={"x": torch.ones(1)}, width=3)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(net)[0]]
    assert paths == [".layers[0].weight", ".layers[0].bias", ".extra['x']"]


def test_flatten_then_unflatten_is_the_same_record() -> None:
    net = Net(layers=(linear(), linear(bias=torch.zeros(2), name="b")), extra={"x": torch.ones(1)}, width=3)
    leaves, spec = pytree.tree_flatten(net)
    again = pytree.tree_unflatten(leaves, spec)
    assert type(again) is Net and again.width == 3 and again.layers[1].name == "b" and again.layers[0].bias is None
    assert all(a is b for a, b in zip(leaves, pytree.tree_leaves(again), strict=True))


def test_checks_run_at_construction_and_not_when_a_transform_rebuilds() -> None:
    with pytest.raises(RecordError, match=r"Positive\.value must be positive, received -1"):
        Positive(value=-1)
    assert pytree.tree_map(lambda x: -x, Positive(value=1)).value == -1
    assert pytree.tree_map(lambda _: "placeholder", Positive(value=1)).value == "placeholder"


def test_types_are_checked_with_the_name_of_the_field() -> None:
    with pytest.raises(RecordError, match=r"Linear\.weight: .*list.*"):
        Linear(weight=[1.0])  # type: ignore[arg-type]
    with pytest.raises(RecordError, match=r"Net\.width"):
        Net(layers=(), width="3")  # type: ignore[arg-type]


def test_every_item_of_a_container_is_checked_not_only_the_first() -> None:
    with pytest.raises(RecordError, match=r"Net\.layers: item 1"):
        Net(layers=(linear(), "not a layer"), width=1)  # type: ignore[arg-type]
    with pytest.raises(RecordError, match=r"Net\.extra"):
        Net(layers=(), extra={"a": torch.ones(1), "b": 3}, width=1)  # type: ignore[dict-item]


def test_equality_is_identity_and_records_are_hashable() -> None:
    value = linear()
    assert value == value and value != linear(weight=value.weight)
    assert {value: 1}[value] == 1


def test_replace_changes_fields_and_runs_the_checks() -> None:
    value = linear()
    changed = replace(value, name="other")
    assert changed.name == "other" and changed.weight is value.weight and value.name == "linear"
    assert replace(Positive(value=1), value=2).value == 2
    with pytest.raises(RecordError, match="must be positive"):
        replace(Positive(value=1), value=0)


def test_replace_refuses_an_unknown_field_by_name() -> None:
    with pytest.raises(RecordError, match=r"Linear has no field 'scale'; it has weight, bias, name"):
        replace(linear(), scale=1)


def test_replace_needs_a_record() -> None:
    with pytest.raises(RecordError, match="int is not a record"):
        replace(3, x=1)


def test_field_names_follow_the_declaration() -> None:
    assert field_names(Net(layers=(), width=1)) == ("layers", "extra", "width")


def test_the_text_of_a_record_shows_types_and_shapes() -> None:
    assert repr(linear()) == "Linear(weight=f32[2,3], bias=None, name='linear')"
    half = linear(weight=torch.ones(4, dtype=torch.bfloat16), bias=torch.tensor(0))
    assert repr(half) == "Linear(weight=bf16[4], bias=i64[], name='linear')"


def test_a_stack_of_equal_layers_is_shown_once() -> None:
    text = repr(Net(layers=tuple(linear() for _ in range(24)), width=1))
    assert text == "Net(layers=(24 x Linear(weight=f32[2,3], bias=None, name='linear')), extra={}, width=1)"


def test_a_long_record_is_shown_with_one_field_a_line() -> None:
    net = Net(layers=(linear(), linear(name="second")), extra={"norm": torch.ones(3)}, width=3)
    assert repr(net).splitlines() == [
        "Net(",
        "  layers=(",
        "    Linear(weight=f32[2,3], bias=None, name='linear'),",
        "    Linear(weight=f32[2,3], bias=None, name='second'),",
        "  ),",
        "  extra={'norm': f32[3]},",
        "  width=3,",
        ")",
    ]


def test_a_placeholder_does_not_break_the_text() -> None:
    assert repr(pytree.tree_map(lambda _: object, linear())).startswith("Linear(weight=<class 'object'>")


def test_a_donated_record_cannot_be_read_and_says_where_and_what_to_write() -> None:
    old = linear()
    weight = old.weight
    new = donate(old)
    assert new.weight is weight and new.name == "linear"
    with pytest.raises(DonatedError) as caught:
        _ = old.weight
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("Linear.weight was read after this record was donated at ")
    assert "test_record.py:" in lines[0]
    assert lines[1].strip() == "instead of   new = step(old)   which leaves `old` unreadable,"
    assert lines[2].strip() == "write        old = step(old)   and go on with what the call returned"


def test_the_place_of_donation_is_the_line_of_the_call() -> None:
    old = linear()
    frame = sys._getframe()
    donate(old)
    line = frame.f_lineno - 1
    with pytest.raises(DonatedError, match=rf"test_record\.py:{line}\b"):
        _ = old.bias


def test_a_donated_record_cannot_be_used_in_any_other_way() -> None:
    old = linear()
    donate(old)
    with pytest.raises(DonatedError):
        pytree.tree_leaves(old)
    with pytest.raises(DonatedError):
        replace(old, name="x")
    with pytest.raises(DonatedError):
        donate(old)
    assert "donated at" in repr(old)


def test_a_donated_record_inside_another_is_shown_as_such() -> None:
    inner = linear()
    net = Net(layers=(inner,), width=1)
    donate(inner)
    assert "Linear(<donated at " in repr(net)


def test_only_fields_are_answered_on_a_donated_record() -> None:
    old = linear()
    donate(old)
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = old.other  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = linear().other  # type: ignore[attr-defined]


def test_donate_needs_a_record() -> None:
    with pytest.raises(RecordError, match="list is not a record"):
        donate([1])


def test_copies_keep_the_fields() -> None:
    value = linear(bias=torch.zeros(2))
    deep = copy.deepcopy(value)
    assert deep.bias is not value.bias and torch.equal(deep.bias, value.bias) and deep.name == value.name
    assert copy.copy(value).weight is value.weight


def test_pickling_is_refused_because_checkpoints_hold_no_code() -> None:
    with pytest.raises(TypeError, match="Linear cannot be pickled; save its leaves with areno_fn.ckpt"):
        pickle.dumps(linear())


def test_methods_properties_and_subclass_checks_survive_the_decorator() -> None:
    @record
    class Circle:
        radius: float

        @property
        def area(self) -> float:
            return 3.0 * self.radius**2

        @staticmethod
        def unit() -> Circle:
            return Circle(radius=1.0)

    assert Circle.unit().area == 3.0
    assert Circle.__name__ == "Circle" and Circle.__init__.__qualname__.endswith("Circle.__init__")


def test_the_constructor_carries_annotations() -> None:
    assert set(Linear.__init__.__annotations__) == {"weight", "bias", "name", "return"}


def test_func_vjp_sees_through_records() -> None:
    value = linear(bias=torch.full((2,), 2.0))
    loss, pull = torch.func.vjp(lambda m: (m.weight.sum(1) * m.bias).sum(), value)
    (gradient,) = pull(torch.ones_like(loss))
    assert type(gradient) is Linear and gradient.name == "linear"
    assert torch.equal(gradient.weight, torch.full((2, 3), 2.0)) and torch.equal(gradient.bias, torch.full((2,), 3.0))


def apply(net: Net, x: torch.Tensor) -> torch.Tensor:
    for layer in net.layers:
        x = torch.tanh(x @ layer.weight)
        x = x if layer.bias is None else x + layer.bias
    return (x * net.extra["head"] * net.width).sum()


def step(state: TrainState, x: torch.Tensor) -> tuple[TrainState, torch.Tensor]:
    """An update by gradient descent, written the way steps are."""
    net = state.params["actor"]
    value, pull = torch.func.vjp(lambda n: apply(n, x), net)
    (gradient,) = pull(torch.ones_like(value))
    moved = tree.map(lambda p, g: p - 0.1 * g, net, gradient)
    noise = random.normal(state.key.fold("noise"), torch.arange(3))
    counters = state.counters.advance_optimizer()
    changed = replace(state, params={"actor": moved}, key=state.key.advance(), counters=counters)
    return changed, value + noise.sum()


@pytest.mark.traced
def test_a_step_with_records_in_and_out_compiles_whole() -> None:
    layers = (Linear(weight=torch.eye(3), bias=torch.ones(3)), Linear(weight=torch.eye(3)))
    net = Net(layers=layers, extra={"head": torch.ones(3)}, width=2)
    start = TrainState(
        params={"actor": net}, optim={}, snapshots={}, counters=Counters(), key=Key.of(1), cursor=Cursor()
    )
    x = torch.arange(6.0).reshape(2, 3)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    plain = traced = start
    for _ in range(4):
        (plain, a), (traced, b) = step(plain, x), compiled(traced, x)
        torch.testing.assert_close(a, b)
    assert type(traced) is TrainState and type(traced.params["actor"].layers[0]) is Linear
    assert traced.counters.optimizer_step == 4 and traced.params["actor"].layers[1].bias is None
    for left, right in zip(tree.leaves(plain), tree.leaves(traced), strict=True):
        torch.testing.assert_close(left, right)


def test_records_are_final() -> None:
    with pytest.raises(TypeError, match="Wide extends a record; records are final"):

        class Wide(Linear):
            pass
