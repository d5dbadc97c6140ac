"""Pipelines: what joins, what is refused, and in which words."""

from __future__ import annotations

import functools
import inspect
import runpy
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from areno_fn.contracts.actions import Actions, Scores, Sums
from areno_fn.contracts.errors import JoinError
from areno_fn.contracts.record import record
from areno_fn.steps.compose import Pipeline, pipeline
from areno_fn.steps.joins import fits
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.cross_entropy import cross_entropy

Params = dict[str, torch.Tensor]


def score(params: Params, batch: torch.Tensor) -> Scores:
    logp = params["w"] * batch
    return Scores(
        logp=logp,
        weight=torch.ones_like(logp),
        segments=torch.zeros_like(logp, dtype=torch.int64),
        entropy=torch.zeros_like(logp),
        documents=1,
    )


def act(params: Params, batch: torch.Tensor) -> Actions:
    s = score(params, batch)
    zeros = torch.zeros_like(batch)
    return Actions(
        logp=s.logp,
        weight=s.weight,
        segments=s.segments,
        entropy=s.entropy,
        documents=1,
        old=zeros,
        advantage=zeros + 1,
    )


def make_score(factor: float) -> Callable[..., Scores]:
    def stage(params: Params, batch: torch.Tensor) -> Scores:
        return score(params, factor * batch)

    return stage


def double(scores: Scores) -> Scores:
    return Scores(
        logp=2 * scores.logp,
        weight=scores.weight,
        segments=scores.segments,
        entropy=scores.entropy,
        documents=scores.documents,
    )


PARAMS, BATCH = {"w": torch.tensor(2.0)}, torch.tensor([-1.0, -3.0])


def refusal(*stages: Any) -> str:
    with pytest.raises(JoinError) as caught:
        pipeline(*stages)
    message = str(caught.value)
    assert "\n" not in message and ". " not in message
    return message


def test_runs_the_stages_in_order() -> None:
    sums = pipeline(score, double, cross_entropy())(PARAMS, BATCH)
    assert sums.total.item() == 16.0 and sums.weight.item() == 2.0


def test_a_wrong_join_names_both_stages_and_both_types() -> None:
    assert refusal(score, clipped()).startswith("score returns Scores, but clipped takes Actions; ")
    assert refusal(act, cross_entropy()).startswith("act returns Actions, but cross_entropy takes Scores; ")
    assert refusal(make_score(2.0), clipped()).startswith("make_score returns Scores, but clipped takes Actions; ")


def test_a_join_is_checked_at_every_place() -> None:
    assert refusal(score, double, double, clipped()).startswith("double returns Scores, but clipped takes Actions; ")


def test_refusal_needs_no_call() -> None:
    def explode(params: Params, batch: torch.Tensor) -> Scores:
        raise AssertionError("was called")

    refusal(explode, clipped())
    pipeline(explode, cross_entropy())


def test_a_missing_annotation_is_refused() -> None:
    def silent(scores):  # type: ignore[no-untyped-def]
        return scores

    def mute(scores: Scores):  # type: ignore[no-untyped-def]
        return scores

    def blank(params, batch: torch.Tensor) -> Scores:  # type: ignore[no-untyped-def]
        return score(params, batch)

    assert refusal(score, silent).startswith(
        "score returns Scores, but silent does not say what its parameter 'scores' takes; "
    )
    assert refusal(score, mute).startswith("score returns Scores, but mute does not say what it returns; ")
    assert refusal(blank, cross_entropy()).startswith("blank does not say what its parameter 'params' takes; ")


def test_a_wrong_number_of_arguments_is_refused() -> None:
    def two(scores: Scores, more: Scores) -> Scores:
        return scores

    assert "but two takes 2 arguments (scores, more); here it must be callable with the one record" in refusal(
        score, two
    )
    assert (
        "cross_entropy takes 1 argument (scores); here it must be callable with the parameters and a batch"
        in refusal(cross_entropy())
    )
    assert "score takes 2 arguments" in refusal(score, score)


def test_arguments_with_defaults_do_not_count() -> None:
    def scaled(scores: Scores, factor: float = 3.0, *, sign: float = 1.0) -> Scores:
        return scores

    assert repr(pipeline(score, scaled)).count("scaled: Scores -> Scores") == 1


def test_what_is_no_stage_is_refused() -> None:
    assert (
        refusal(score, 3) == "score returns Scores, but 3 is no stage; a stage is a function or an object with __call__"
    )
    assert "has no signature" in refusal(score, torch.exp)
    assert "was given no stage" in refusal()


def test_an_annotation_that_names_nothing_is_refused() -> None:
    def lost(scores: Scoers) -> Scores:  # type: ignore[name-defined]  # noqa: F821
        return scores

    message = refusal(score, lost)
    assert message.startswith(
        "score returns Scores, but lost annotates its parameter 'scores' with 'Scoers', where 'Scoers' names nothing"
    )


def test_records_defined_inside_a_function() -> None:
    @record
    class Local:
        value: torch.Tensor

    @record
    class Other:
        value: torch.Tensor

    def first(params: Params, batch: torch.Tensor) -> Local:
        return Local(value=batch)

    def last(local: Local) -> Sums:
        return Sums(total=local.value.sum(), weight=local.value.sum(), stats={}, peaks={})

    def other(value: Other) -> Sums:
        raise NotImplementedError

    assert pipeline(first, last)(PARAMS, BATCH).total.item() == -4.0
    assert refusal(first, other).startswith("first returns Local, but other takes Other; ")


def test_records_of_a_maker_that_has_returned() -> None:
    def maker() -> tuple[Callable[..., Any], Callable[..., Any]]:
        @record
        class Hidden:
            value: torch.Tensor

        def first(params: Params, batch: torch.Tensor) -> Hidden:
            return Hidden(value=batch)

        def last(hidden: Hidden) -> Scores:
            assert isinstance(hidden, Hidden)
            return score(PARAMS, hidden.value)

        return first, last

    assert isinstance(pipeline(*maker())(PARAMS, BATCH), Scores)


def test_partials_methods_and_callable_objects() -> None:
    class Loss:
        def __call__(self, scores: Scores) -> Sums:
            return cross_entropy()(scores)

        def method(self, scores: Scores) -> Sums:
            return cross_entropy()(scores)

    def tempered(params: Params, batch: torch.Tensor, temperature: float) -> Scores:
        return score(params, batch / temperature)

    first = functools.partial(tempered, temperature=2.0)
    for last in (Loss(), Loss().method):
        assert pipeline(first, last)(PARAMS, BATCH).total.item() == 4.0
    assert refusal(first, clipped()).startswith("tempered returns Scores, but clipped takes Actions; ")
    assert refusal(act, Loss()).startswith("act returns Actions, but Loss takes Scores; ")
    bound = functools.partial(lambda scores, more: more, None)
    assert "<lambda> does not say" in refusal(score, bound)


def test_wrapped_functions_keep_their_meaning() -> None:
    @functools.wraps(score)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return score(*args, **kwargs)

    assert refusal(watched, clipped()).startswith("score returns Scores, but clipped takes Actions; ")


def test_unions_accept_members_and_refuse_others() -> None:
    def either(value: Scores | Actions) -> Sums:
        raise NotImplementedError

    def maybe(value: typing.Optional[Scores]) -> Sums:  # noqa: UP045
        raise NotImplementedError

    def unsure(params: Params, batch: torch.Tensor) -> Scores | None:
        return None

    pipeline(score, either), pipeline(act, either), pipeline(score, maybe), pipeline(unsure, maybe)
    assert refusal(act, maybe).startswith("act returns Actions, but maybe takes Scores | None; ")
    assert refusal(unsure, either).startswith("unsure returns Scores | None, but either takes Scores | Actions; ")


class Base:
    pass


class Derived(Base):
    pass


@pytest.mark.parametrize(
    ("given", "taken", "answer"),
    [
        (Derived, Base, True),
        (Base, Derived, False),
        (Base, Any, True),
        (Any, Base, False),
        (Base, object, True),
        (None, Base | None, True),
        (Base | None, Base, False),
        (Derived | None, None | Base, True),
        (dict[str, int], dict, True),
        (dict, dict[str, int], False),
        (dict[str, int], dict[str, float], False),
        (dict[str, Derived], dict[str, Base], True),
        (tuple[Derived, ...], tuple[Base, ...], True),
        (tuple[Derived, ...], tuple[Base, Base], False),
        (list[int], typing.Sequence[int], True),
        (typing.Annotated[Derived, "why"], Base, True),
        (typing.Literal["a"], typing.Literal["a"], True),
        (typing.Literal["a"], typing.Literal["b"], False),
    ],
)
def test_fits(given: Any, taken: Any, answer: bool) -> None:
    assert fits(given, taken) is answer


def test_types_of_one_name_are_told_apart() -> None:
    def impostor() -> Callable[..., Any]:
        class Scores:
            pass

        def stage(value: Scores) -> Sums:
            assert isinstance(value, Scores)
            raise NotImplementedError

        return stage

    message = refusal(score, impostor())
    assert "areno_fn.contracts.actions.Scores" in message and f"{__name__}.Scores" in message


def test_pipelines_compose_and_carry_annotations() -> None:
    inner = pipeline(score, double)
    assert isinstance(inner, Pipeline)
    assert typing.get_type_hints(inner) == {"params": Params, "batch": torch.Tensor, "return": Scores}
    assert inspect.signature(inner).return_annotation is Scores
    assert pipeline(inner, cross_entropy())(PARAMS, BATCH).total.item() == 16.0
    assert refusal(inner, clipped()).startswith("pipeline(score, double) returns Scores, but clipped takes Actions; ")


def test_repr_reads_like_the_flow() -> None:
    lines = repr(pipeline(act, clipped())).splitlines()
    assert lines == [
        "pipeline(",
        "  act: (dict[str, torch.Tensor], Tensor) -> Actions,",
        "  clipped: Actions -> Sums,",
        ")",
    ]


def test_a_program_run_as_main(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        "from __future__ import annotations\n"
        "import torch\n"
        "from areno_fn.contracts.record import record\n"
        "from areno_fn.contracts.errors import JoinError\n"
        "from areno_fn.steps.compose import pipeline\n"
        "class Thing: pass\n"
        "class Other: pass\n"
        "def make():\n"
        "    def first(params: dict, batch: int) -> Thing: return Thing()\n"
        "    return first\n"
        "def last(thing: Thing) -> int: return 7\n"
        "def wrong(other: Other) -> int: return 8\n"
        "answer = pipeline(make(), last)({}, 1)\n"
        "try: pipeline(make(), wrong)\n"
        "except JoinError as error: message = str(error)\n"
    )
    found = runpy.run_path(str(path), run_name="__main__")
    assert found["answer"] == 7 and found["message"].startswith("first returns Thing, but wrong takes Other; ")
