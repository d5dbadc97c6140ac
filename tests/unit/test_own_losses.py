"""Beside a loss of one's own every field still does something, or is refused in a sentence; what acts is not refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import flow_field_runs
import msgspec
import pytest
import token_field_runs
import torch
from field_sweep import Sweep
from unit import test_flow_every_field as flows
from unit import test_token_every_field as tokens

import areno_fn as af
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.flow_batch import Moves, Velocities
from areno_fn.contracts.flow_match import Matched
from areno_fn.contracts.spec import FlowAlgorithm, FlowCoupled, FlowMatched, FlowTaught
from areno_fn.engine.own_losses import READ_BY_LOSS, fields_of_loss, loss_problems
from areno_fn.steps.recipes import Losses

KINDS = tokens.KINDS | flows.KINDS
BASES = tokens.BASES | flows.BASES


def summed(values: torch.Tensor, weight: torch.Tensor) -> af.Sums:
    return af.Sums(total=(values * weight).sum(), weight=weight.sum(), stats={}, peaks={})


def of_scores(scores: af.Scores) -> af.Sums:
    return summed(-scores.logp.tanh(), scores.weight)


def of_pairs(pairs: af.Comparisons) -> af.Sums:
    return summed(pairs.logp.exp(), pairs.weight)


def of_actions(actions: af.Actions) -> af.Sums:
    """Everything that there is of a decision is in it."""
    values = -actions.advantage * (actions.logp - actions.old).exp()
    for other in (actions.reference, actions.rollout):
        values = values if other is None else values + 0.1 * (actions.logp - other).square()
    return summed(values, actions.weight)


def of_values(estimates: af.Estimates) -> af.Sums:
    errors = (estimates.value - estimates.returns).abs() + 0.1 * (estimates.value - estimates.old).square()
    return summed(errors, estimates.weight)


def of_moves(moves: Moves) -> af.Sums:
    values = moves.now.velocity.square().mean(1) * 0.1
    if moves.actions is not None:
        values = values - moves.actions.advantage * (moves.actions.logp - moves.actions.old).exp()
    for other in (moves.batch.before, moves.batch.reference):
        values = values if other is None else values + (moves.now.velocity - other.velocity).square().mean(1)
    return summed(values, moves.batch.weight)


def of_velocities(found: Velocities) -> af.Sums:
    batch = found.batch
    values = (found.velocity - batch.target).square().mean(1)
    values = values if batch.advantage is None else values * (1 + batch.advantage)
    values = values if batch.factor is None else values * batch.factor
    for other in (batch.old, batch.reference, batch.average):
        values = values if other is None else values + 0.1 * (found.velocity - other).square().mean(1)
    return summed(values, batch.weight)


def of_matched(found: Matched) -> af.Sums:
    values = (found.generated - found.real + found.fake.tanh()).square()
    for other in (found.plain, found.surrogate):
        values = values if other is None else values + 0.1 * (found.generated - other).square()
    return summed(values.mean(1), found.weight)


def own(kind: str, role: str) -> Losses:
    """A loss of a role that reads all that it is given."""
    algorithm = KINDS[kind]
    if not issubclass(algorithm, FlowAlgorithm):
        named = {"sft": of_scores, "dpo": of_pairs}
        return {role: of_values if role == "critic" else named.get(kind, of_actions)}
    if role != "actor" or not issubclass(algorithm, FlowCoupled | FlowTaught):
        return {role: of_velocities}
    return {role: of_matched if issubclass(algorithm, FlowMatched) else of_moves}


def judged(kind: str, role: str, algorithm: Any, *, held: bool = True) -> bytes:
    """What is left of a run with a loss of one's own, under the rules of all runs, and those of such losses where it is held."""
    part, runs = (flows, flow_field_runs) if kind in flows.KINDS else (tokens, token_field_runs)
    given = own(kind, role)
    if held and (problems := [*loss_problems(part.run_of(algorithm), {"it": given})]):
        raise SpecError("\n".join(problems))
    part.check(algorithm)
    found: bytes = runs.told(algorithm, given)
    return found


def bases(kind: str, role: str) -> dict[str, dict[str, Any]]:
    """Settings with which every field can show itself, without those that are refused."""
    # a reference that is renewed behind every update is as far from what draws as nothing
    plain = BASES[kind] | ({"reference_every": 0} if kind in tokens.KINDS and "reference_every" in BASES[kind] else {})
    for name in READ_BY_LOSS.get(KINDS[kind], {}).get(role, ()):
        if name.startswith("critic."):
            plain.pop("critic", None)
        plain.pop(name, None)
    return {kind: plain}


@cache
def sweep(kind: str, role: str, *, held: bool = True) -> Sweep:
    return Sweep(
        kinds=KINDS,
        bases=bases(kind, role) if held else BASES,
        others=flows.OTHERS,
        told=lambda algorithm: judged(kind, role, algorithm, held=held),
        elsewhere={"critic.path"},
    )


ROLES = [(kind, role) for kind, algorithm in KINDS.items() for role in algorithm.roles]


@pytest.mark.parametrize(("kind", "role"), ROLES)
def test_no_field_does_nothing_in_silence(kind: str, role: str) -> None:
    found = sweep(kind, role)
    assert found.silent(found.base(kind)) == []


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo", "flow_distill"])
def test_no_field_does_nothing_beside_another_choice(kind: str) -> None:
    found = sweep(kind, "actor")
    for name, plain in found.contexts(kind, None):
        assert found.silent(plain) == [], f"with {name}"


LEGAL: dict[str, dict[str, Any]] = {
    "dpo": {"label_smoothing": 0.0},
    "ppo": {"kl_in": "loss", "kl_estimator": "k3", "kl_target": 0.0, "kl_horizon": 10_000},
}
"""Beside which every field of a loss has more than one value that no other rule refuses."""


@pytest.mark.parametrize(("kind", "role"), [(kind, role) for kind, role in ROLES if KINDS[kind] in READ_BY_LOSS])
def test_what_is_refused_does_nothing(kind: str, role: str) -> None:
    free = sweep(kind, role, held=False)
    plain = free.base(kind) | LEGAL.get(kind, {})
    names = fields_of_loss(msgspec.convert(plain, KINDS[kind]), role)
    assert free.idle(plain, names) == set(names)


def refusals(algorithm: dict[str, Any], role: str = "actor") -> list[str]:
    kind = algorithm["kind"]
    part = flows if kind in flows.KINDS else tokens
    return [*loss_problems(part.run_of(msgspec.convert(algorithm, KINDS[kind])), {"it": own(kind, role)})]


def test_the_sentence_names_the_field_and_the_role() -> None:
    said = {"kind": "ppo", "dual_clip": 0.0, "clip_low": 0.2, "critic": {"coef": 1.0}}
    assert refusals(said) == [
        "phases.it.algorithm.dual_clip: it belongs to the algorithm's own loss of the actor, and a loss of your own stands in its "
        "place; remove this, and say it in your loss"
    ]
    (of_critic,) = refusals(said, "critic")
    assert of_critic.startswith(
        "phases.it.algorithm.critic.coef: it belongs to the algorithm's own loss of the critic, "
    )


def test_what_other_rules_ask_for_is_not_refused() -> None:
    assert refusals({"kind": "ppo", "kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k2"}) == []
    assert refusals({"kind": "ppo", "kl_coef": 0.1, "kl_estimator": "k2"}) == [], "it is of the KL in the reward"
    noisy = {"dynamics": "cps", "level": 0.7}
    assert refusals({"kind": "flow_distill", "teacher": "p", "denoising": noisy, "space": "gaussian"}) == []
    (refused,) = refusals({"kind": "flow_distill", "teacher": "p", "space": "data"})
    assert refused.startswith("phases.it.algorithm.space: ")


def test_a_plan_refuses_them_before_a_weight_is_read() -> None:
    changed = ["phases.grpo.algorithm.entropy_coef=0.01", "phases.grpo.algorithm.clip_high=0.28"]
    spec = af.read_spec("specs/quickstart.toml", changed)
    with pytest.raises(SpecError) as refused:
        af.plan(spec, losses={"grpo": of_actions})
    assert [line.partition(":")[0] for line in str(refused.value).splitlines()] == [
        "phases.grpo.algorithm.clip_high",
        "phases.grpo.algorithm.entropy_coef",
    ]
