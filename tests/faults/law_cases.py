"""Planted mistakes in the parts of a user, which the public laws must notice."""

from __future__ import annotations

import random as stdlib_random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from faults.case import Case
from toy_policy import Bigram

from areno_fn import tree
from areno_fn.contracts.actions import Actions, Scores, Sums
from areno_fn.contracts.batch import Experience
from areno_fn.contracts.key import Key
from areno_fn.contracts.optim import OptimizerGroup, OptimizerLayout
from areno_fn.contracts.record import replace
from areno_fn.contracts.roles import Role, RoleLayout
from areno_fn.contracts.spec import AdamWSpec, Sampling
from areno_fn.contracts.state import Counters, Cursor, TrainState
from areno_fn.steps.compose import pipeline, train_step
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.cross_entropy import cross_entropy
from areno_fn.steps.optimizers import adamw
from areno_fn.steps.reduce import aggregate, mean_of, peak_of
from areno_fn.steps.token.score import act, score
from areno_fn.testing import laws, strategies

POLICY = Bigram(vocab_size=17)
PARAMS = POLICY.init()
_SIZES = (5, 2, 7, 3, 4, 6, 2, 5)


def packed() -> Any:
    """Eight documents, all of whose decisions count."""
    rows = []
    for number, size in enumerate(_SIZES):
        tokens = tuple((3 * number + 5 * place) % 17 for place in range(size))
        rows.append((tokens, (1.0,) * (size - 1)))
    return strategies.packed(rows)


def experience() -> Experience:
    made = packed()
    lanes = torch.arange(made.targets.shape[0])
    return Experience(packed=made, old=-1 - (0.3 * lanes).sin(), advantage=(1.7 * lanes).cos())


# ------------------------------------------------------------------------------------------------ splits


def keeps_its_split(stage: Callable[[Scores], Sums]) -> None:
    laws.accumulation_invariant(pipeline(score(POLICY, Sampling()), stage), PARAMS, packed())


def split_stage(fault: str | None) -> Callable[[Scores], Sums]:
    def stage(scores: Scores) -> Sums:
        loss, count = -(scores.logp * scores.weight).sum(), scores.weight.sum()
        stats = {"entropy": torch.stack([(scores.entropy * scores.weight).sum(), count])}
        if fault == "mean for sum":
            return Sums(total=loss / count, weight=torch.ones(()), stats=stats, peaks={})
        if fault == "mean with its weight":
            return Sums(total=loss / count, weight=count, stats=stats, peaks={})
        if fault == "gradient is divided":
            return Sums(total=loss.detach() + (loss - loss.detach()) / count, weight=count, stats=stats, peaks={})
        if fault == "mean of a statistic":
            stats = {"entropy": scores.entropy.mean(0, keepdim=True)}
        if fault == "a name for every length":
            stats = {f"tokens of {len(scores.logp)}": count.reshape(1)}
        if fault == "always nan":
            loss = loss * float("nan")
        peaks = {"total_max": loss.detach()} if fault == "maximum of a total" else {}
        return Sums(total=loss, weight=count, stats=stats, peaks=peaks)

    return stage


# ------------------------------------------------------------------------------------------------ order


def keeps_its_order(stage: Callable[[Actions], Sums]) -> None:
    laws.permutation_invariant(pipeline(act(POLICY, Sampling()), stage), PARAMS, experience())


def order_stage(fault: str | None) -> Callable[[Actions], Sums]:
    def stage(a: Actions) -> Sums:
        advantage, weight = a.advantage, a.weight
        if fault == "advantage of the decision before":
            advantage = advantage.roll(1)
        if fault == "first document left out":
            weight = torch.where(a.segments == 0, 0.0, weight)
        if fault == "later documents count less":
            weight = weight / (1 + a.segments)
        if fault == "documents in pairs":
            advantage = advantage * torch.where(a.segments % 2 == 0, 1.0, -1.0)
        if fault == "running mean subtracted":
            advantage = advantage - advantage.cumsum(0) / torch.arange(1, len(advantage) + 1)
        values = -(a.logp - a.old).exp() * advantage / (0.0 if fault == "always nan" else 1.0)
        total, count = aggregate(values, weight, a.segments, a.documents, "token_mean")
        return Sums(total=total, weight=count, stats={}, peaks={})

    return stage


# ------------------------------------------------------------------------------------------------ masks


def is_blind(stage: Callable[[Actions], Sums]) -> None:
    """As a stage, and in an objective."""
    objective = pipeline(act(POLICY, Sampling()), stage)
    batch = experience()
    laws.mask_blind(stage, act(POLICY, Sampling())(PARAMS, batch))
    laws.mask_blind(objective, PARAMS, batch)


_COUNTS: dict[str | None, Callable[[Actions], torch.Tensor]] = {
    "counts every decision": lambda a: torch.tensor(float(a.weight.numel())),
    "counts every document": lambda a: torch.tensor(float(a.documents)),
    "counts one where there is nothing": lambda a: a.weight.sum().clamp(min=1),
    "always nan": lambda a: torch.tensor(float("nan")),
}


def mask_stage(fault: str | None) -> Callable[[Actions], Sums]:
    def stage(a: Actions) -> Sums:
        live = a.weight != 0
        clean = {name: torch.where(live, getattr(a, name), 0.0) for name in ("logp", "old", "advantage", "entropy")}
        if fault == "multiplies by the mask":
            clean["logp"] = a.logp * a.weight
        if fault == "clamps before it multiplies":
            clean["logp"] = a.logp.clamp(-20, 0) * a.weight
        if fault == "selects the ratio alone":
            values = torch.where(live, (a.logp - a.old).exp(), 0.0) * clean["advantage"]
        else:
            values = (clean["logp"] - clean["old"]).exp() * clean["advantage"]
        if fault == "advantages centred over everything":
            values = (clean["logp"] - clean["old"]).exp() * (clean["advantage"] - a.advantage.nan_to_num().mean())
        if fault == "a term of everything":
            values = values + 1e-3 * a.logp.nan_to_num(0, 0, 0).mean()
        entropy = a.entropy if fault == "a statistic of everything" else clean["entropy"]
        measured = a.weight + 1 if fault == "a statistic of everything" else a.weight
        peak = a.logp.detach().amax() if fault == "a maximum of everything" else peak_of(a.logp, a.weight)
        total, count = aggregate(-values, a.weight, a.segments, a.documents, "token_mean")
        if fault in _COUNTS:
            count = _COUNTS[fault](a)
        if fault == "lengths of everything":
            lengths = torch.bincount(a.segments, minlength=a.documents)[a.segments]
            total = (torch.where(live, -values, 0.0) / lengths).sum()
        return Sums(total=total, weight=count, stats={"entropy": mean_of(entropy, measured)}, peaks={"logp_max": peak})

    return stage


# ------------------------------------------------------------------------------------------------ steps

Step = Callable[[TrainState, Sequence[Any]], tuple[TrainState, dict[str, float]]]
_OPTIMIZER = adamw(AdamWSpec(lr=1e-2), 10)
_ACTOR = train_step(pipeline(score(POLICY, Sampling()), cross_entropy()), _OPTIMIZER)


def state() -> TrainState:
    actor, other = POLICY.init(), POLICY.init(1)
    return TrainState(
        params={"actor": actor, "critic": other, "judge": POLICY.init(2)},
        optim={"actor": _OPTIMIZER.init(actor), "critic": _OPTIMIZER.init(other)},
        snapshots={"reference": actor},
        counters=Counters(data_epoch=2),
        key=Key.of(5),
        cursor=Cursor(),
        controls={"kl": 0.1},
    )


def step_keeps_to_itself(step: Step) -> None:
    laws.step_is_pure(step, state(), (packed(),))


def _more(value: Any) -> Any:
    return tree.map(lambda x: x + 1 if isinstance(x, torch.Tensor) and x.is_floating_point() else x, value)


def _changed(after: TrainState, before: TrainState, part: str, **named: Any) -> TrainState:
    return replace(after, **{part: {**getattr(after, part), **named}})


_CHANGES: dict[str, Callable[[TrainState, TrainState], TrainState]] = {
    "moves the critic too": lambda after, s: _changed(after, s, "params", critic=_more(s.params["critic"])),
    "moves a frozen role": lambda after, s: _changed(after, s, "params", judge=_more(s.params["judge"])),
    "moves moments of the critic": lambda after, s: _changed(after, s, "optim", critic=_more(s.optim["critic"])),
    "moments for a frozen role": lambda after, s: _changed(after, s, "optim", judge=s.optim["actor"]),
    "forgets moments of the critic": lambda after, s: replace(after, optim={"actor": after.optim["actor"]}),
    "forgets a role": lambda after, s: replace(after, params={"actor": after.params["actor"]}),
    "snapshot follows the role": lambda after, s: replace(after, snapshots={"reference": after.params["actor"]}),
    "snapshot dropped": lambda after, s: replace(after, snapshots={}),
    "key advanced": lambda after, s: replace(after, key=after.key.fold(1)),
    "clock forgotten": lambda after, s: replace(after, counters=s.counters),
    "another clock set back": lambda after, s: replace(after, counters=replace(after.counters, data_epoch=0)),
    "cursor moved": lambda after, s: replace(after, cursor=replace(s.cursor, step=s.cursor.step + 1)),
    "control set": lambda after, s: replace(after, controls={"kl": 0.2}),
    "control added": lambda after, s: replace(after, controls={**s.controls, "more": 1}),
    "control forgotten": lambda after, s: replace(after, controls={}),
    "nothing moves": lambda after, s: replace(after, params=s.params),
    "another dtype": lambda after, s: _changed(
        after, s, "params", actor=tree.map(lambda x: x.double(), after.params["actor"])
    ),
    "moments made anew in another dtype": lambda after, s: _changed(
        after, s, "optim", actor=tree.map(lambda x: x.to(torch.float64), after.optim["actor"])
    ),
}


def planted_step(fault: str | None) -> Step:
    calls: list[int] = []

    def step(value: TrainState, batches: Sequence[Any]) -> tuple[TrainState, dict[str, float]]:
        calls.append(1)
        table = value.params["actor"].table
        if fault == "writes to its batch":
            batches[0].weight.mul_(0.5)
        if fault == "draws globally":
            stdlib_random.random()
        after, metrics = _ACTOR(value, batches)
        if fault == "writes to parameters":
            table.copy_(after.params["actor"].table)
        if fault == "writes to moments":
            after = replace(after, optim=value.optim)
            tree.map(lambda x: x.add_(1) if isinstance(x, torch.Tensor) else x, value.optim["actor"])
        if fault == "writes to a snapshot":
            value.snapshots["reference"].head.zero_()
        if fault == "depends on calls":
            metrics = {**metrics, "train/loss": metrics["train/loss"] + len(calls)}
        return (_CHANGES[fault](after, value) if fault in _CHANGES else after), metrics

    return step


STEP_FAULTS = (
    "writes to its batch",
    "draws globally",
    "writes to parameters",
    "writes to moments",
    "writes to a snapshot",
    "depends on calls",
    *_CHANGES,
)


_GIVING = train_step(pipeline(score(POLICY, Sampling()), cross_entropy()), _OPTIMIZER, donate=True)


def giving_is_pure(step: Step) -> None:
    began = state()
    began = replace(began, snapshots={"reference": tree.map(torch.clone, began.params["actor"])})
    laws.donation_agrees(_ACTOR, step, began, [(packed(),), (packed(), packed())])


def planted_giving(fault: str | None) -> Step:
    calls: list[int] = []

    def step(value: TrainState, batches: Sequence[Any]) -> tuple[TrainState, dict[str, float]]:
        calls.append(1)
        if fault == "writes to its batch":
            batches[0].weight.mul_(1.0).index_fill_(0, torch.zeros(1, dtype=torch.int64), 0.5)
        if fault == "writes to a frozen role":
            value.params["judge"].head.add_(1.0)
        if fault == "writes to a snapshot":
            value.snapshots["reference"].head.add_(1.0)
        if fault == "leaves the old state readable":
            return _ACTOR(value, batches)
        after, metrics = _GIVING(value, batches)
        if fault == "another number":
            after.params["actor"].head.view(-1)[0] += 1e-3
        if fault == "a second step on what the first was given" and len(calls) == 2:
            after = replace(after, counters=replace(after.counters, optimizer_step=1))
        if fault == "other metrics":
            metrics = {**metrics, "train/loss": metrics["train/loss"] * 2}
        return after, metrics

    return step


GIVING_FAULTS = (
    "writes to its batch",
    "writes to a frozen role",
    "writes to a snapshot",
    "leaves the old state readable",
    "another number",
    "a second step on what the first was given",
    "other metrics",
)


# ------------------------------------------------------------------------------------------------ roles

_ROLES = RoleLayout(roles=(Role(name="actor"), Role(name="critic"), Role(name="judge", trainable=False)))
_LEAVES = ("table", "head")


def shares_nothing(value: TrainState) -> None:
    laws.no_alias(_ROLES, value)
    begun = value.params["actor"]
    apart = {name: tree.map(torch.clone, kept) if kept is begun else kept for name, kept in value.snapshots.items()}
    laws.no_alias(_ROLES, replace(value, snapshots=apart), in_place=("actor",))


def planted_memory(fault: str | None) -> TrainState:
    made = state()
    table = made.params["actor"].table
    moment = torch.zeros_like(table)
    if fault == "critic begins as the actor":
        return _changed(made, made, "params", critic=made.params["actor"])
    if fault == "critic holds a row of the actor":
        return _changed(made, made, "params", critic=replace(made.params["critic"], table=table[3:4]))
    if fault == "one tensor at two paths":
        return _changed(made, made, "params", actor=replace(made.params["actor"], head=table))
    if fault == "a leaf within another":
        return _changed(made, made, "params", actor=replace(made.params["actor"], head=table[2]))
    if fault == "a frozen role is a part of the actor":
        return _changed(made, made, "params", judge=replace(made.params["judge"], table=table.t()))
    if fault == "a snapshot is a part of the actor":
        return replace(made, snapshots={"reference": {"table": table[1:]}})
    if fault == "a frozen role stays behind a role moved in place":
        return _changed(made, made, "params", judge=made.params["actor"])
    if fault == "a moment is one of another role":
        return _changed(made, made, "optim", actor={"mu": moment}, critic={"mu": moment})
    if fault == "a moment is a snapshot":
        return replace(_changed(made, made, "optim", actor={"mu": moment}), snapshots={"reference": {"table": moment}})
    if fault == "a moment is a parameter of another role":
        return _changed(made, made, "optim", actor={"mu": made.params["critic"].table})
    if fault == "elements of a leaf are one":
        return _changed(made, made, "params", actor=replace(made.params["actor"], table=table[:1].expand(17, -1)))
    if fault == "moments stay behind a role moved in place":
        return _changed(made, made, "optim", actor={"slow": table})
    return made


def is_divided(given: tuple[TrainState, OptimizerLayout]) -> None:
    value, groups = given
    laws.roles_disjoint_exhaustive(_ROLES, value.params, groups, value.optim)


def planted_groups(fault: str | None) -> tuple[TrainState, OptimizerLayout]:
    made = state()
    groups = [OptimizerGroup(role=role, name="all", paths=_LEAVES) for role in ("actor", "critic")]
    more = {
        "a leaf in two groups": OptimizerGroup(role="actor", name="more", paths=("head",)),
        "a leaf that is not there": OptimizerGroup(role="critic", name="more", paths=("bias",)),
        "a frozen leaf": OptimizerGroup(role="judge", name="more", paths=("head",)),
        "a group twice": OptimizerGroup(role="actor", name="all", paths=()),
    }
    if fault == "a leaf in no group":
        groups[0] = OptimizerGroup(role="actor", name="all", paths=("table",))
    if fault == "a role without groups":
        groups.pop()
    if fault == "moments of a frozen role":
        made = _changed(made, made, "optim", judge=made.optim["actor"])
    if fault == "a role that is not declared":
        made = _changed(made, made, "params", teacher=made.params["judge"])
    if fault in more:
        groups.append(more[fault])
    return made, OptimizerLayout(groups=tuple(groups))


CASES: dict[str, Case] = {
    "accumulation_invariant": (
        keeps_its_split,
        cross_entropy(),
        split_stage,
        (
            "mean for sum",
            "mean with its weight",
            "gradient is divided",
            "mean of a statistic",
            "a name for every length",
            "maximum of a total",
            "always nan",
        ),
    ),
    "permutation_invariant": (
        keeps_its_order,
        clipped(),
        order_stage,
        (
            "advantage of the decision before",
            "first document left out",
            "later documents count less",
            "documents in pairs",
            "running mean subtracted",
            "always nan",
        ),
    ),
    "mask_blind": (
        is_blind,
        clipped(),
        mask_stage,
        (
            "multiplies by the mask",
            "clamps before it multiplies",
            "selects the ratio alone",
            "advantages centred over everything",
            "a term of everything",
            "a statistic of everything",
            "a maximum of everything",
            "counts every decision",
            "counts every document",
            "counts one where there is nothing",
            "always nan",
            "lengths of everything",
        ),
    ),
    "step_is_pure": (step_keeps_to_itself, _ACTOR, planted_step, STEP_FAULTS),
    "donation_agrees": (giving_is_pure, _GIVING, planted_giving, GIVING_FAULTS),
    "no_alias": (
        shares_nothing,
        state(),
        planted_memory,
        (
            "critic begins as the actor",
            "critic holds a row of the actor",
            "one tensor at two paths",
            "a leaf within another",
            "a frozen role is a part of the actor",
            "a snapshot is a part of the actor",
            "a frozen role stays behind a role moved in place",
            "moments stay behind a role moved in place",
            "a moment is one of another role",
            "a moment is a snapshot",
            "a moment is a parameter of another role",
            "elements of a leaf are one",
        ),
    ),
    "roles_disjoint_exhaustive": (
        is_divided,
        planted_groups(None),
        planted_groups,
        (
            "a leaf in no group",
            "a leaf in two groups",
            "a leaf that is not there",
            "a frozen leaf",
            "a group twice",
            "a role without groups",
            "moments of a frozen role",
            "a role that is not declared",
        ),
    ),
}
