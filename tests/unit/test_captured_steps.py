"""Captured updates: which graphs are made, kept and found again, and what of a specification is refused or foreseen.

Where there is no GPU, what stands for a graph calls its update again at every replay, as a graph does with kernels.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import attrs
import msgspec
import pytest
import torch
from e2e import tiny, tiny_flow

from areno_fn import tree
from areno_fn.contracts.errors import KernelError, SpecError
from areno_fn.contracts.record import record, replace, static
from areno_fn.contracts.spec import RunSpec
from areno_fn.engine import captures, loop, phases, session
from areno_fn.engine.foreseen import foreseen
from areno_fn.engine.plan import Plan, plan
from areno_fn.engine.start import initial_state
from areno_fn.steps import capture
from areno_fn.steps.capture import Graphs, captured

State = dict[str, torch.Tensor]


class Recorded:
    """Stands for a CUDA graph."""

    made: ClassVar[list[Recorded]] = []
    pools: ClassVar[list[Any]] = []
    under_way: ClassVar[list[Recorded]] = []

    def __init__(self) -> None:
        self.again: Callable[[], None] = lambda: None
        self.replays = 0
        Recorded.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        self.again()

    def pool(self) -> str:
        return "memory"


@pytest.fixture(autouse=True)
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    @contextmanager
    def recorded(graph: Recorded, *, pool: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        Recorded.pools.append(pool)
        Recorded.under_way.append(graph)
        try:
            yield
        finally:
            Recorded.under_way.clear()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", recorded)
    monkeypatch.setattr(capture, "captures", lambda held, read: True)
    yield
    Recorded.made.clear()
    Recorded.pools.clear()


def pure(moved: State, frozen: State, given: tuple[torch.Tensor, ...]) -> tuple[State, State]:
    """A step of descent on a sum of squares, with a count beside the weights; nothing is written to."""
    slope = sum(x.T @ (x @ moved["w"]) for x in given) + frozen["pull"] * moved["w"]
    after = {"w": moved["w"] - 0.01 * slope, "count": moved["count"] + 1}
    return after, {"loss": sum((x @ moved["w"]).square().sum() for x in given), "count": after["count"]}


def move(moved: State, frozen: State, given: tuple[torch.Tensor, ...]) -> tuple[State, State]:
    """`pure`; under a capture nothing is computed yet."""
    if not Recorded.under_way:
        return pure(moved, frozen, given)
    told = {"loss": torch.zeros(()), "count": torch.zeros((), dtype=torch.int64)}

    def again() -> None:
        after, now = pure(moved, frozen, given)
        for name in after:
            moved[name].copy_(after[name])
        for name, value in now.items():
            told[name].copy_(value)

    Recorded.under_way[0].again = again
    return moved, told


def begun() -> tuple[State, State]:
    return {"w": torch.arange(4.0), "count": torch.tensor(0)}, {"pull": torch.tensor(0.5)}


def batch(number: int, *lengths: int) -> tuple[torch.Tensor, ...]:
    source = torch.Generator().manual_seed(number)
    return tuple(torch.randn(length, 4, generator=source) for length in lengths)


def replays() -> list[int]:
    return [graph.replays for graph in Recorded.made]


def test_shapes_take_turns_and_a_new_one_disturbs_none() -> None:
    """The first of a shape runs as it is, the second is captured, the others are replayed, of any number of micro-batches."""
    step, (moved, frozen), (want, _) = captured(move), begun(), begun()
    lengths = [(3,), (5,), (3,), (5,), (3, 2), (3,), (5,), (3, 2), (3, 2), (3,)]
    for number, own in enumerate(lengths):
        moved, told = step(moved, frozen, batch(number, *own))
        want, also = pure(want, frozen, batch(number, *own))
        assert tree.first_difference(want, moved) is None, number
        assert tree.equal(also, told)
    assert replays() == [3, 2, 2]
    assert Recorded.pools == [None, "memory", "memory"]


def test_what_is_moved_stays_where_it_is() -> None:
    step, (moved, frozen) = captured(move), begun()
    places = [leaf.data_ptr() for leaf in tree.leaves(moved)]
    for number in range(4):
        moved, _ = step(moved, frozen, batch(number, 3))
        version = moved["w"]._version
        assert [leaf.data_ptr() for leaf in tree.leaves(moved)] == places
    moved, _ = step(moved, frozen, batch(9, 3))
    assert moved["w"]._version > version, "who derives something from them sees that they were written to"


@pytest.mark.parametrize("other", [0, 1])
def test_other_leaves_are_captured_anew(other: int) -> None:
    step, given = captured(move), list(begun())
    for number in range(3):
        given[0], _ = step(*given, batch(number, 3))
    assert replays() == [2]
    given[other] = tree.map(torch.clone, given[other])
    want, _ = pure(*given, batch(3, 3))
    given[0], _ = step(*given, batch(3, 3))
    assert replays() == [2, 1] and tree.equal(want, given[0])


@record
class Pulled:
    """What pulls, and how hard: of the structure, not a leaf."""

    pull: torch.Tensor
    times: float = static(default=1.0)


def test_another_static_field_is_captured_anew() -> None:
    def pulled(moved: State, frozen: dict[str, Pulled], given: Any) -> tuple[State, State]:
        return move(moved, {"pull": frozen["by"].pull * frozen["by"].times}, given)

    step, (moved, frozen) = captured(pulled), begun()
    one = Pulled(pull=frozen["pull"])
    for times in (1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 1.0):
        own = {"by": replace(one, times=times)}
        want, _ = pure(moved, {"pull": one.pull * times}, batch(7, 3))
        moved, _ = step(moved, own, batch(7, 3))
        assert tree.equal(want, moved)
    assert replays() == [3, 2]


def test_a_leaf_or_a_name_that_changes_in_place_is_captured_anew() -> None:
    def named(moved: State, frozen: State, given: Any) -> tuple[State, State]:
        return move(moved, {"pull": frozen["pull"] if "pull" in frozen else -frozen["push"]}, given)

    step, (moved, frozen) = captured(named), begun()
    for number in range(3):
        moved, _ = step(moved, frozen, batch(number, 3))
    frozen["pull"] = torch.tensor(4.0)
    want, _ = pure(moved, frozen, batch(3, 3))
    moved, _ = step(moved, frozen, batch(3, 3))
    assert tree.equal(want, moved)
    frozen["push"] = frozen.pop("pull")
    want, _ = pure(moved, {"pull": -frozen["push"]}, batch(4, 3))
    moved, _ = step(moved, frozen, batch(4, 3))
    assert tree.equal(want, moved)


def test_the_shape_that_was_not_used_for_longest_gives_way() -> None:
    graphs = Graphs(most=2)
    step, (moved, frozen) = captured(move, graphs), begun()
    for length in (2, 2, 3, 3, 2, 4, 2, 3):
        moved, _ = step(moved, frozen, batch(length, length))
    # 4 came in the place of 3, which therefore is a new shape again
    assert replays() == [3, 1] and graphs.count == 1
    with pytest.raises(SpecError, match="Graphs needs most of at least 1, received 0"):
        Graphs(most=0)


def test_moves_share_graphs_without_taking_each_other_s() -> None:
    graphs = Graphs()
    actor, critic = captured(move, graphs), captured(move, graphs)
    (one, frozen), (two, _) = begun(), begun()
    for number in range(3):
        one, _ = actor(one, frozen, batch(number, 3))
        two, _ = critic(two, frozen, batch(number, 3))
    assert replays() == [2, 2] and graphs.count == 2 and Recorded.pools == [None, "memory"]
    graphs.clear()
    assert graphs.count == 0 and graphs.memory is None and not graphs.last, "no moments of a phase are kept in the next"
    one, _ = actor(one, frozen, batch(3, 3))
    assert replays() == [2, 2], "it runs as it is again"


def test_what_cannot_be_captured_is_said() -> None:
    def waits(moved: State, frozen: State, given: Any) -> tuple[State, State]:
        if Recorded.under_way:
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        return pure(moved, frozen, given)

    def starves(moved: State, frozen: State, given: Any) -> tuple[State, State]:
        if Recorded.under_way:
            raise torch.OutOfMemoryError("no memory")
        return pure(moved, frozen, given)

    match = (
        r"an update cannot be captured as a graph, because something in it waits for the device or is not for one "
        r"\(operation not permitted when stream is capturing\); do without that, or without capture"
    )
    for made, error, words in ((waits, KernelError, match), (starves, torch.OutOfMemoryError, "no memory")):
        step, (moved, frozen) = captured(made), begun()
        step(moved, frozen, batch(0, 3))
        with pytest.raises(error, match=words):
            step(moved, frozen, batch(1, 3))


def test_a_leaf_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(KernelError, match="takes trees of tensors, and was given 3; make it a static field"):
        captured(move)(*begun(), (3,))


# ------------------------------------------------------------------------------------------ specifications


def table(**phase: Any) -> dict[str, Any]:
    made = tomllib.loads(tiny.SPEC)
    for own in made["phases"]:
        own |= {"capture": True, **phase}
    return made


def planned(given: dict[str, Any]) -> Plan:
    return plan(msgspec.convert(given, RunSpec))


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A phase that is captured is planned for a CPU, where its updates run as they are, on padded batches."""
    monkeypatch.setattr(phases, "graphs_of", lambda spec, device: Graphs() if spec.capture else None)
    monkeypatch.setattr(capture, "captures", lambda held, read: False)


def test_a_run_on_the_cpu_is_refused() -> None:
    match = (
        "phases.sft.capture: updates are captured as graphs of a GPU, and this run is on the CPU; "
        "use device = 'cuda', or remove this"
    )
    with pytest.raises(SpecError, match=match):
        planned(table())


def test_an_optimizer_that_asks_the_host_is_refused() -> None:
    given = table(optimizers=[{"kind": "adamw8bit"}])
    match = (
        "phases.sft.capture: adamw8bit, which moves the actor, rounds by keys that the host sends with every update, and a graph "
        "has no host; use adamw, or remove this"
    )
    with pytest.raises(SpecError, match=match):
        planned(given)


def test_a_model_of_pictures_is_refused() -> None:
    given = tomllib.loads(tiny_flow.SPEC)
    given["phases"][0]["capture"] = True
    name = given["phases"][0]["name"]
    match = f"phases.{name}.capture: digits_dit makes pictures, and what its updates are made of may wait for the host; remove"
    with pytest.raises(SpecError, match=match):
        planned(given)


def test_all_roles_of_a_phase_keep_their_graphs_together() -> None:
    phase = planned(tomllib.loads(tiny.SPEC)).phases[0].spec
    assert captures.graphs_of(phase, torch.device("cuda")) is None
    chosen = msgspec.structs.replace(phase, capture=True)
    one, other = (captures.graphs_of(chosen, torch.device("cuda")) for _ in range(2))
    assert one is not None and one is not other, "phases have memory of their own, which is given back"


def test_it_is_a_part_of_what_a_run_is(on_a_cpu: None) -> None:
    """Padding changes roundings, so that a run does not go on bit for bit with it; without it nothing is said of it."""
    plain, chosen = planned(tomllib.loads(tiny.SPEC)), planned(table())
    assert set(plain.identity.differences(chosen.identity)) == {"phases"}
    assert planned(table(capture=False)).identity == plain.identity


def test_updates_of_a_phase_are_those_without_it(on_a_cpu: None) -> None:
    """Both phases, up to roundings: their micro-batches are padded."""
    ends = []
    for given in (tomllib.loads(tiny.SPEC), table()):
        made = planned(given)
        state, told = initial_state(made), []
        for number, phase in enumerate(made.phases):
            state = phase.algorithm.begin(state)
            if not number:
                batch = made.medium.batch(phase.examples, list(range(8)), phase.spec)
                assert (batch[0].longest == 64) is phase.spec.capture, "its bound is a size"
                state, metrics = phase.algorithm.step(state, batch)
            else:
                state, metrics, _ = loop._generation_step(made, phase, state)
            told.append({name: value for name, value in metrics.items() if name.startswith("train/")})
        ends.append((state.params, told))
    (params, told), (padded, also) = ends
    for one, other in zip(told, also, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    for one, other in zip(tree.leaves(params), tree.leaves(padded), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=2e-4)


def test_a_phase_that_ends_gives_the_memory_of_its_graphs_back(on_a_cpu: None) -> None:
    made = planned(table())
    for phase in made.phases:
        assert phase.graphs is not None
        phase.graphs.put("a shape", None)
    first, second = made.phases
    loop._let_graphs_go(first)
    assert first.graphs is not None and not first.graphs.seen("a shape")
    assert second.graphs is not None and second.graphs.seen("a shape")


def test_a_dry_run_tells_of_it(on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a step of a new size stands what graphs have set aside: all that a step takes and does not keep."""
    found = {}
    for name, given in (("plain", tomllib.loads(tiny.SPEC)), ("captured", table())):
        made = planned(given)
        low = {role: tree.map(lambda x: x.bfloat16(), own) for role, own in made.trained.params.items()}
        made = attrs.evolve(made, trained=attrs.evolve(made.trained, params=low))
        monkeypatch.setattr(session, "plan", lambda spec, made=made: made)
        found[name] = foreseen(made, made.phases[0].spec), session.describe(made.spec).splitlines()
    (plain, _), (whole, lines) = found["plain"], found["captured"]
    assert plain is not None and whole is not None and plain.parts["graphs"] == 0
    lasting = sum(whole.parts[name] for name in ("parameters", "masters", "moments"))
    assert whole.total == lasting + 2 * (whole.total - lasting - whole.parts["graphs"])
    assert whole.parts["graphs"] > 0 and f"    a step takes, on a GPU, at most {whole}" in lines
    assert "    updates are captured: at most 16 sizes at a time, in one memory" in lines
