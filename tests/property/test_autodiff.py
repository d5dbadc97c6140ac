"""Derivatives of functions on trees: against torch.func, autograd and jax's law of checkpointing, on random programs.

Dynamo cannot trace what typeguard watches, so that compilation is checked in a fresh interpreter: `python test_autodiff.py`.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from areno_fn import random, tree
from areno_fn.autodiff import custom_vjp, donate, remat, value_and_grad
from areno_fn.contracts.errors import DonatedError
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import record, static

# ---------------------------------------------------------------------------------------- random programs

SIDE = 3


def numbers(name: str, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return random.normal(Key.of(0).fold(name), torch.arange(count)).reshape(shape)


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


scaled = custom_vjp(_scaled, lambda cotangents, inputs, outputs: (cotangents[0] * inputs[1], None), keep_outputs=False)
softmax = custom_vjp(
    lambda x: x.softmax(-1),
    lambda cotangents, inputs, outputs: (
        outputs[0] * (cotangents[0] - (cotangents[0] * outputs[0]).sum(-1, keepdim=True)),
    ),
)

UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "square": torch.square,
    "turn": lambda x: x.t(),
    "rows": lambda x: x.sum(0, keepdim=True).expand(SIDE, SIDE),
    "shift": lambda x: torch.cat((x[1:], x[:1])),
    "custom": lambda x: scaled(x, 0.5),
    "softmax": softmax,
    "half": lambda x: x.to(torch.bfloat16).to(x.dtype),
    "remat": remat(lambda x: torch.sin(x) * torch.cos(x @ x)),
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "matmul": torch.matmul,
    "where": lambda x, y: torch.where(x > 0, x, y),
}

Program = list[tuple[str, int, int]]


def programs() -> st.SearchStrategy[Program]:
    operation = st.sampled_from([*UNARY, *BINARY])
    return st.lists(st.tuples(operation, st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=8)


def trees() -> st.SearchStrategy[Any]:
    """Nestings with at least one matrix; integers, flags and numbers may stand beside it."""
    other = st.sampled_from([torch.tensor(3), torch.tensor([True, False]), 7])
    matrix = st.integers(0, 9).map(lambda i: numbers(f"leaf {i}", SIDE, SIDE))
    nested = st.recursive(
        matrix | other,
        lambda children: st.dictionaries(st.sampled_from("abc"), children, max_size=3) | st.tuples(children, children),
        max_leaves=5,
    )
    return st.tuples(matrix, nested).map(lambda pair: {"first": pair[0], "rest": pair[1]})


def run(program: Program, leaves: list[Any]) -> torch.Tensor:
    """A scalar: every instruction appends a matrix made of earlier ones."""
    values = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
    for name, i, j in program:
        x, y = values[i % len(values)], values[j % len(values)]
        values.append(UNARY[name](x) if name in UNARY else BINARY[name](x, y))
    return values[-1].tanh().sum() + values[len(values) // 2].square().mean()


def by_autograd(function: Callable[[Any], torch.Tensor], params: Any) -> tuple[torch.Tensor, Any]:
    leaves, spec = pytree.tree_flatten(params)
    given = [x.detach().requires_grad_() if _moves(x) else x for x in leaves]
    value = function(pytree.tree_unflatten(given, spec))
    moving = [x for x in given if _moves(x)]
    pulled = iter(torch.autograd.grad(value, moving, materialize_grads=True))
    gradient = [next(pulled) if _moves(x) else _nothing(x) for x in leaves]
    return value.detach(), pytree.tree_unflatten(gradient, spec)


def _moves(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _nothing(x: Any) -> Any:
    return torch.zeros_like(x) if isinstance(x, torch.Tensor) else 0


@given(programs(), trees())
def test_value_and_grad_is_autograd_bit_for_bit(program: Program, params: Any) -> None:
    def function(params: Any) -> torch.Tensor:
        return run(program, tree.leaves(params))

    assert tree.first_difference(value_and_grad(function)(params), by_autograd(function, params)) is None


@given(programs(), trees())
def test_value_and_grad_is_the_one_of_torch_func(program: Program, params: Any) -> None:
    moving = [x for x in tree.leaves(params) if _moves(x)]
    gradients, value = torch.func.grad_and_value(lambda *xs: run(program, list(xs)), tuple(range(len(moving))))(*moving)
    got, gradient = value_and_grad(lambda p: run(program, tree.leaves(p)))(params)
    assert (
        tree.first_difference((value, list(gradients)), (got, [g for g, x in _both(gradient, params) if _moves(x)]))
        is None
    )


def _both(first: Any, second: Any) -> list[tuple[Any, Any]]:
    return list(zip(tree.leaves(first), tree.leaves(second), strict=True))


@given(programs(), trees())
def test_a_gradient_has_the_structure_and_the_zeros_of_its_tree(program: Program, params: Any) -> None:
    _, gradient = value_and_grad(lambda p: run(program, tree.leaves(p)))(params)
    assert pytree.tree_structure(gradient) == pytree.tree_structure(params)
    for g, x in _both(gradient, params):
        if _moves(x):
            assert (g.shape, g.dtype) == (x.shape, x.dtype)
        else:
            assert tree.equal(g, _nothing(x))


@given(programs(), trees())
def test_remat_changes_no_bit(program: Program, params: Any) -> None:
    def plain(params: Any) -> dict[str, Any]:
        return {"value": run(program, tree.leaves(params)), "count": torch.tensor(len(program))}

    def recomputed(params: Any) -> torch.Tensor:
        result = remat(plain)(params)
        assert result["count"] == len(program)
        return result["value"]

    want = value_and_grad(lambda p: plain(p)["value"])(params)
    assert tree.first_difference(value_and_grad(recomputed)(params), want) is None
    assert tree.first_difference(by_autograd(recomputed, params), want) is None


# ---------------------------------------------------------------------------------------- value_and_grad


def test_auxiliary_results_come_back_untouched() -> None:
    x = numbers("x", 4)
    (value, aux), gradient = value_and_grad(lambda x: (x.square().sum(), {"double": 2 * x}), has_aux=True)(x)
    assert value.item() == pytest.approx(x.square().sum().item())
    assert torch.equal(aux["double"], 2 * x)
    assert torch.equal(gradient, 2 * x)
    assert not aux["double"].requires_grad and not value.requires_grad


def test_further_arguments_are_passed_on_and_have_no_gradient() -> None:
    value, gradient = value_and_grad(lambda x, y, *, power: (x * y**power).sum())(
        torch.ones(2), torch.tensor([3.0, 4.0]), power=2
    )
    assert value == 25
    assert torch.equal(gradient, torch.tensor([9.0, 16.0]))


def test_a_record_has_a_record_of_gradients() -> None:
    weights = Weights(w=numbers("w", 3), step=torch.tensor(5), name="a")
    _, gradient = value_and_grad(lambda p: (p.w * p.step).sum())(weights)
    assert isinstance(gradient, Weights)
    assert torch.equal(gradient.w, torch.full((3,), 5.0))
    assert gradient.step == 0 and gradient.bias is None and gradient.name == "a"


def test_a_value_that_is_no_scalar_is_refused() -> None:
    with pytest.raises(ValueError, match=r"value_and_grad needs a scalar, but the function returned shape \(3,\)"):
        value_and_grad(lambda x: x * 2)(torch.ones(3))


def test_a_tree_without_a_floating_tensor_is_refused() -> None:
    with pytest.raises(
        ValueError, match="value_and_grad needs a floating tensor in its first argument, but found none"
    ):
        value_and_grad(lambda x: torch.ones(()))({"a": torch.tensor(3), "b": 1})


# ---------------------------------------------------------------------------------------- memory


class LiveBytes(TorchDispatchMode):
    """The bytes of all storages made under it that are still alive, and the most there ever were.

    Every operation's results pass through here below autograd and torch.func; a storage counts from then
    until nothing holds it, whether that is Python or a graph. No allocator, clock or process is asked, so
    two runs give one number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = function(*args, **(kwargs or {}))
        given = {
            x.untyped_storage().data_ptr() for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        for x in pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self._count(x.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, size: int) -> None:
        self.live -= size


def peak_of(function: Callable[[], Any]) -> int:
    with LiveBytes() as live:
        result = function()
    del result
    return live.peak


WIDTH, DEPTH = 32, 8
LAYERS = [
    {"up": numbers(f"up {i}", WIDTH, 4 * WIDTH) / 8, "down": numbers(f"down {i}", 4 * WIDTH, WIDTH) / 16}
    for i in range(DEPTH)
]
ROWS = numbers("rows", 400, WIDTH)


def layer(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh((x @ p["up"]).sin()) @ p["down"]


def network(layers: list[Any], wrap: Callable[[Any], Any]) -> torch.Tensor:
    x = ROWS
    for p in layers:
        x = wrap(layer)(p, x)
    return x.square().mean()


def plain_network(layers: list[Any]) -> torch.Tensor:
    return network(layers, lambda f: f)


def remat_network(layers: list[Any]) -> torch.Tensor:
    return network(layers, remat)


def test_the_meter_counts_what_is_alive() -> None:
    def chain() -> torch.Tensor:
        x = torch.zeros(1000)
        for _ in range(5):
            x = x + 1
        return x.view(10, 100)

    assert peak_of(chain) == 2 * 4000
    assert peak_of(lambda: [torch.zeros(1000).sin() for _ in range(5)]) == 6 * 4000
    assert peak_of(lambda: by_autograd(lambda x: x.sin().sin().sin().sum(), torch.zeros(1000))) >= 4 * 4000


def test_peak_memory_is_within_a_tenth_of_autograds() -> None:
    ours, theirs = (
        peak_of(lambda: value_and_grad(plain_network)(LAYERS)),
        peak_of(lambda: by_autograd(plain_network, LAYERS)),
    )
    assert ours <= 1.1 * theirs, (ours, theirs)


def test_the_backward_of_torch_funcs_own_gradient_would_not_pass() -> None:
    theirs = peak_of(lambda: by_autograd(plain_network, LAYERS))
    kept = peak_of(lambda: torch.func.grad_and_value(plain_network)(LAYERS))
    assert kept > 1.1 * theirs, (kept, theirs)


def test_remat_needs_less_memory() -> None:
    plain, recomputed = (
        peak_of(lambda: value_and_grad(plain_network)(LAYERS)),
        peak_of(lambda: value_and_grad(remat_network)(LAYERS)),
    )
    # of each layer its input stays, a quarter of what stays otherwise twice over; one layer is alive at a time
    assert recomputed < 0.5 * plain, (recomputed, plain)


def test_remat_under_autograd_needs_less_memory() -> None:
    plain, recomputed = (
        peak_of(lambda: by_autograd(plain_network, LAYERS)),
        peak_of(lambda: by_autograd(remat_network, LAYERS)),
    )
    assert recomputed < 0.5 * plain, (recomputed, plain)


def test_dropped_inputs_and_outputs_are_not_held() -> None:
    def held(**options: Any) -> int:
        doubled = custom_vjp(lambda x: x * 2, lambda cotangents, inputs, outputs: (cotangents[0] * 2,), **options)
        with LiveBytes() as live:
            value, pull = torch.func.vjp(
                lambda x: doubled(doubled(doubled(x.sin()).relu()).relu()).sum(), torch.ones(1000)
            )
            alive = live.live
        del value, pull
        return alive

    everything, nothing = held(), held(drop_inputs=(0,), keep_outputs=False)
    assert everything - nothing >= 2 * 4000, (everything, nothing)


# ---------------------------------------------------------------------------------------- custom_vjp


def test_both_sides_see_plain_tensors_with_real_pointers() -> None:
    seen = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.data_ptr())
        return torch.from_numpy(x.detach().numpy() ** 2)

    def backward(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        seen.extend((cotangents[0].data_ptr(), inputs[0].data_ptr(), outputs[0].data_ptr()))
        return (torch.from_numpy(2 * cotangents[0].numpy() * inputs[0].detach().numpy()),)

    square = custom_vjp(forward, backward)
    x = numbers("x", 5)
    _, gradient = value_and_grad(lambda x: square(x * 3).sum())(x)
    torch.testing.assert_close(gradient, 18 * x)
    torch.testing.assert_close(by_autograd(lambda x: square(x * 3).sum(), x)[1], 18 * x)
    assert len(seen) == 8 and all(seen)


@given(st.integers(0, 9), st.booleans())
def test_a_saved_pull_gives_the_same_twice_and_writes_nothing(seed: int, recompute: bool) -> None:
    x, y = numbers(f"x {seed}", 4, 5), numbers(f"y {seed}", 5, 3)
    before = (x.clone(), y.clone())
    function = (
        remat(lambda x, y: softmax(scaled(x, 3.0) @ y)) if recompute else lambda x, y: softmax(scaled(x, 3.0) @ y)
    )
    value, pull = torch.func.vjp(function, x, y)
    kept = value.clone()
    cotangent = numbers(f"cotangent {seed}", 4, 3)
    first, second = pull(cotangent), pull(cotangent)
    assert tree.first_difference(first, second) is None
    assert tree.first_difference((x, y, value), (*before, kept)) is None


def test_the_declared_derivative_is_used_everywhere() -> None:
    odd = custom_vjp(lambda x: x * 2, lambda cotangents, inputs, outputs: (cotangents[0] * 100,))
    x = torch.ones(3)
    assert torch.equal(value_and_grad(lambda x: odd(x).sum())(x)[1], torch.full((3,), 100.0))
    assert torch.equal(by_autograd(lambda x: odd(x).sum(), x)[1], torch.full((3,), 100.0))
    assert torch.equal(torch.func.grad(lambda x: odd(x).sum())(x), torch.full((3,), 100.0))


def test_arguments_that_are_no_tensors_reach_both_sides() -> None:
    seen = []

    def backward(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        seen.append(inputs[1:])
        return cotangents[0] * inputs[1], None, None

    times = custom_vjp(lambda x, factor, name: x * factor, backward)
    gradient = value_and_grad(lambda x: times(x, 4.0, "name").sum())(torch.ones(2))[1]
    assert torch.equal(gradient, torch.full((2,), 4.0))
    assert seen == [(4.0, "name")]


def test_an_absent_cotangent_is_zero_and_integers_have_none() -> None:
    pick = custom_vjp(
        lambda x, index, y: (x[index], index + 1),
        lambda cotangents, inputs, outputs: (
            torch.zeros_like(inputs[0]).index_put((inputs[1],), cotangents[0]),
            None,
            None,
        ),
    )

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        chosen, following = pick(x, torch.tensor([2, 0]), y)
        assert following.tolist() == [3, 1]
        return (chosen * torch.tensor([1.0, 5.0])).sum()

    _, pull = torch.func.vjp(function, torch.ones(3), torch.ones(2))
    dx, dy = pull(torch.ones(()))
    assert dx.tolist() == [5, 0, 1] and dy.tolist() == [0, 0]


def test_a_constant_output_has_no_gradient() -> None:
    parts = custom_vjp(
        lambda x: (x * 2, x.sum()), lambda cotangents, inputs, outputs: (cotangents[0] * 2,), constant_outputs=(1,)
    )
    x = torch.ones(3, requires_grad=True)
    doubled, total = parts(x)
    assert doubled.requires_grad and not total.requires_grad
    assert torch.equal(torch.func.grad(lambda x: parts(x)[1] * 3)(torch.ones(3)), torch.zeros(3))


def test_a_frozen_input_costs_no_cotangent() -> None:
    product = custom_vjp(lambda x, y: x * y, lambda cotangents, inputs, outputs: (cotangents[0] * inputs[1], None))
    with LiveBytes() as live:
        value_and_grad(lambda x: product(x, torch.ones(100000)).sum())(torch.ones(1))
    # the second factor, the product, its gradient and the gradient in x spread: no zeros for the frozen one
    assert live.peak < 4.1 * 400000, live.peak


def test_a_wrong_number_of_cotangents_is_refused() -> None:
    wrong = custom_vjp(lambda x, y: x * y, lambda cotangents, inputs, outputs: (cotangents[0],))
    with pytest.raises(ValueError, match="the backward of a custom_vjp must return 2 cotangents, received 1"):
        value_and_grad(lambda x: wrong(x, x).sum())(torch.ones(2))


def test_a_second_derivative_is_refused_in_words() -> None:
    words = "custom_vjp is differentiable once; write the backward of the backward as a second custom_vjp"
    with pytest.raises(RuntimeError, match=words):
        torch.func.grad(lambda x: torch.func.grad(lambda x: softmax(x).square().sum())(x).sum())(torch.ones(3))
    x = torch.ones(3, requires_grad=True)
    (first,) = torch.autograd.grad(softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=words):
        first.sum().backward()
    with pytest.raises(RuntimeError, match=words):
        torch.func.grad(lambda x: torch.func.grad(lambda x: remat(torch.sin)(x).sum())(x).sum())(torch.ones(3))


# ---------------------------------------------------------------------------------------- remat


def test_remat_takes_and_returns_trees_and_other_values() -> None:
    def function(params: Weights, pair: tuple[torch.Tensor, int], index: torch.Tensor) -> dict[str, Any]:
        x, power = pair
        return {"y": (params.w * x[index]) ** power, "none": None, "same": index, "also": x, "view": x[1:]}

    weights = Weights(w=torch.tensor([2.0, 3.0]), step=torch.tensor(0), name="a")
    x, index = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 0])
    result = remat(function)(weights, (x, 2), index)
    assert result["y"].tolist() == [64, 9] and result["none"] is None and torch.equal(result["same"], index)
    _, gradient = value_and_grad(lambda p: remat(function)(p, (x, 2), index)["y"].sum())(weights)
    assert gradient.w.tolist() == [2 * 8 * 4, 2 * 3 * 1]

    def passing(x: torch.Tensor) -> torch.Tensor:
        result = remat(function)(weights, (x, 2), index)
        return (result["also"] * 10).sum() + (result["view"] * 100).sum()

    assert value_and_grad(passing)(x)[1].tolist() == [10, 110, 110]
    assert by_autograd(passing, x)[1].tolist() == [10, 110, 110]


def test_remat_runs_the_function_once_forward_and_once_backward() -> None:
    calls = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return x.sin()

    value_and_grad(lambda x: remat(function)(x).sum())(torch.ones(3))
    assert len(calls) == 2


def test_remat_nests() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ x)

    def nested(x: torch.Tensor) -> torch.Tensor:
        return remat(lambda x: remat(inner)(remat(inner)(x)))(x).sum()

    x = numbers("nest", 3, 3)
    assert tree.first_difference(value_and_grad(nested)(x), value_and_grad(lambda x: inner(inner(x)).sum())(x)) is None


# ---------------------------------------------------------------------------------------- donation


@record
class Weights:
    w: torch.Tensor
    step: torch.Tensor
    bias: torch.Tensor | None = None
    name: str = static()


def test_a_donated_record_cannot_be_read_again() -> None:
    old = Weights(w=torch.ones(2), step=torch.tensor(1), name="a")
    kept = old.w
    new = donate(old)
    assert new.w is kept and new.name == "a"
    for name in ("w", "step", "bias", "name"):
        with pytest.raises(
            DonatedError, match=rf"Weights\.{name} was read after this record was donated at .*test_autodiff\.py:\d+"
        ):
            getattr(old, name)
    with pytest.raises(DonatedError):
        value_and_grad(lambda p: p.w.sum())(old)


# ---------------------------------------------------------------------------------------- under torch.compile


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def check_remat() -> None:
    layers = LAYERS[:2]
    want = value_and_grad(plain_network)(layers)
    assert tree.first_difference(compiled(value_and_grad(plain_network))(layers), want) is None
    assert tree.first_difference(compiled(value_and_grad(remat_network))(layers), want) is None
    assert tree.first_difference(compiled(remat_network)(layers), want[0]) is None
    assert tree.first_difference(by_autograd(compiled(remat_network), layers), want) is None


def check_remat_of_records() -> None:
    def loss(params: Weights) -> torch.Tensor:
        square = remat(lambda p, x: {"y": (p.w * x).sin().square(), "at": x.argmax()})
        result = square(params, params.w.cos())
        return result["y"].sum() * result["at"]

    weights = Weights(w=numbers("w", 5), step=torch.tensor(3), name="a")
    assert tree.first_difference(compiled(value_and_grad(loss))(weights), value_and_grad(loss)(weights)) is None


def check_remat_saves_memory() -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def peak(function: Callable[..., Any]) -> int:
        peaks = []

        def compile_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            def run(*args: Any) -> Any:
                with LiveBytes() as live:
                    result = torch.fx.Interpreter(graph).run(*args)
                peaks.append(live.peak)
                return result

            return make_boxed_func(run)

        torch._dynamo.reset()
        torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=compile_graph))(LAYERS[:4])
        (only,) = peaks
        return only

    plain, recomputed = peak(value_and_grad(plain_network)), peak(value_and_grad(remat_network))
    eager = peak_of(lambda: value_and_grad(plain_network)(LAYERS[:4]))
    assert recomputed < 0.8 * plain, (recomputed, plain)
    assert plain <= 1.1 * eager, (plain, eager)


def check_custom_vjp() -> None:
    odd = custom_vjp(
        lambda x, y, k: (x * y * k, x.sum()), lambda c, i, o: (c[0] * i[1] * 100, None, None), constant_outputs=(1,)
    )

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        product, total = odd(x, y, 2)
        return product.sum() + odd(x * 1, x * 1, 3)[0].sum() + total.detach() + odd(y, y, 1)[1]

    x, y = numbers("x", 4), numbers("y", 4)
    want = value_and_grad(loss)(x, y)
    torch.testing.assert_close(want[1], 100 * y + 100 * x)
    assert tree.first_difference(compiled(value_and_grad(loss))(x, y), want) is None
    assert tree.first_difference(by_autograd(lambda x: compiled(loss)(x, y), x), want) is None
    assert tree.first_difference(compiled(torch.func.grad(loss))(x, y), want[1]) is None
    with torch.no_grad():
        assert torch.equal(compiled(loss)(x, y), want[0])


def check_auxiliary() -> None:
    def loss(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return x.square().sum(), {"double": 2 * x}

    step = value_and_grad(loss, has_aux=True)
    x = numbers("x", 4)
    assert tree.first_difference(compiled(step)(x), step(x)) is None


CHECKS = [check for name, check in globals().items() if name.startswith("check_")]


def test_what_compiles_whole() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == [check.__name__ for check in CHECKS]


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)  # Dynamo does it by itself
    for check in CHECKS:
        check()
        print(check.__name__)


@pytest.mark.parametrize("how", ["vjp", "autograd", "value_and_grad"])
def test_the_backward_of_a_custom_vjp_sees_plain_tensors(how: str) -> None:
    seen: list[bool] = []

    def backward(cotangents: Any, inputs: Any, outputs: Any) -> Any:
        given = (*cotangents, *inputs, *outputs)
        seen.extend(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in given)
        return (cotangents[0] * 2,)

    double = custom_vjp(lambda x: x * 2, backward)
    x = torch.ones(3)
    if how == "vjp":
        _, pull = torch.func.vjp(double, x)
        gradients = [pull(torch.ones(3))[0], pull(torch.ones(3))[0]]
    elif how == "autograd":
        x.requires_grad_()
        gradients = [torch.autograd.grad(double(x).sum(), x)[0]]
    else:
        gradients = [value_and_grad(lambda x: double(x).sum())(x)[1]]
    assert all(torch.equal(g, torch.full((3,), 2.0)) for g in gradients)
    assert seen and not any(seen)
