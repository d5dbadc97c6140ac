"""One phase made ready: its rows read and tokenised, its rewards imported, its algorithm composed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from areno_fn.contracts.batch import Example, Pair
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.flow_adapter import EVEN, NoiseLevels
from areno_fn.contracts.flow_policy import FlowPolicy
from areno_fn.contracts.policy import ComputesAgain, TokenPolicy
from areno_fn.contracts.spec import FlowWhole, Phase, Repeated
from areno_fn.contracts.state import TrainState
from areno_fn.engine.captures import graphs_of
from areno_fn.engine.cast import Cast
from areno_fn.engine.critic import CriticPlan
from areno_fn.engine.medium import Medium
from areno_fn.engine.optimizers import Mover, Trained, plan_optimizers, steps_of
from areno_fn.engine.place import at
from areno_fn.engine.residency import Residency
from areno_fn.engine.rewards import Loaded, load_all
from areno_fn.steps import recipes
from areno_fn.steps.advantages import Compare
from areno_fn.steps.capture import Graphs
from areno_fn.steps.compose import View
from areno_fn.steps.variants import AVERAGE, ema_params
from areno_fn.world.data import read_all, source_names
from areno_fn.world.data_row import Row
from areno_fn.world.order import Mixture, batches_per_epoch, mixture
from areno_fn.world.pictures import PairRow, PictureRow
from areno_fn.world.prompted import PromptedRow
from areno_fn.world.rewards import Reward

MOST_STEPS = 1_000_000_000
"""Of a phase, as a specification can ask for in steps."""
_CPU = torch.device("cpu")


@attrs.frozen(kw_only=True)
class PhasePlan:
    """A phase that can start without any further refusal.

    Attributes:
        spec: what was asked for.
        algorithm: the composed pure functions.
        steps: optimizer steps, or rollout iterations.
        rows: the data rows, as the rewards see them.
        examples: encoded rows of a data-set algorithm, else empty.
        pairs: tokenised rows of an algorithm that compares two answers, else empty.
        prompts: encoded prompts of a generating algorithm, else None.
        rewards: judges of the training samples, empty for feedback none.
        mixed: how often an epoch reads each data set, where they have weights.
        residency: where its snapshots lie.
        graphs: where its captured updates are kept; None where none are captured.
    """

    spec: Phase
    algorithm: recipes.Algorithm
    steps: int
    rows: Sequence[Row]
    examples: tuple[Any, ...]
    prompts: tuple[Any, ...] | None
    rewards: tuple[Reward, ...]
    residency: Residency
    mixed: Mixture = ()
    pairs: tuple[Pair, ...] = ()
    graphs: Graphs | None = None

    @property
    def size(self) -> int:
        """Rows in one epoch."""
        return len(self.pairs or self.examples) if self.prompts is None else len(self.prompts)

    def averaged(self, state: TrainState, *, wide: bool = False) -> dict[str, Any]:
        """The parameters of all roles with the average in the actor's place.

        Args:
            state: one of this phase, which keeps an average.
            wide: the average stays in the dtype that it is kept in.
        """
        average = self.residency.shelves[AVERAGE].take(state.snapshots[AVERAGE])
        own = state.params[recipes.ACTOR]
        return {**state.params, recipes.ACTOR: average if wide else ema_params(average, own)}

    def remarks(self) -> list[str]:
        """What there is to say of its batches before a run."""
        rows = self.spec.batch.rows
        if rows <= self.size:
            return []
        there = f"the data have {self.size} rows, so that every batch is all of them"
        return [f"batch.rows is {rows}, but {'the data have 1 row, which is every batch' if self.size == 1 else there}"]

    @property
    def documents(self) -> tuple[Example | PictureRow | PairRow | PromptedRow, ...]:
        """All that is trained on, in the order of the rows; empty for a generating algorithm."""
        return self.examples + tuple(document for pair in self.pairs for document in pair.documents)


def plan_phase(
    spec: Phase,
    policy: TokenPolicy | FlowPolicy,
    medium: Medium,
    stop: tuple[int, ...],
    moved: Trained,
    loss: recipes.Losses | None,
    view: View,
    loaded: Loaded,
    mover: Mover | Mapping[str, Mover] | None = None,
    critic: CriticPlan | None = None,
    cast: Cast | None = None,
    device: torch.device = _CPU,
    drawn_with: View | None = None,
    levels: NoiseLevels = EVEN,
    compare: Compare | None = None,
) -> PhasePlan:
    """Reads, encodes and composes one phase.

    Args:
        spec: the phase.
        policy: the model's functions, and `medium`, what they make.
        stop: tokens that end a completion; none where there are no tokens.
        moved: the trained parameters.
        loss: a stage that takes the place of the algorithm's own, or such by role.
        view: from the parameters of all roles to what the policy takes.
        loaded: what rewards are made with, shared by all phases and the evaluation.
        mover: `(init, update)` that takes the place of the phase's optimizers, or some by role.
        critic: the critic of the run, and `cast`, its other roles.
        device: where the policy computes.
        drawn_with: what rollouts use in the place of `view`.
        levels: how the scheduler of a flow model spaces noise levels; evenly when omitted.
        compare: says advantages in the place of the algorithm.

    Raises:
        DataError: a row cannot be used. RewardError: a reward cannot be had, or cannot judge a row. SpecError: lengths do not fit.
    """
    where = f"phases.{spec.name}"
    policy, graphs = _computing_again(policy, spec, where), graphs_of(spec, device)
    with at(f"{where}.rewards"):
        rewards = load_all(spec.rewards, loaded)
    medium.require_fit(spec, where)
    with at(f"{where}.data"):
        rows = read_all(spec.data)
        found = medium.encode(spec, rows)
        used = [pair.chosen.row for pair in found.pairs] or [example.row for example in found.examples]
        mixed = _mixture(spec, rows, used if found.prompts is None else range(len(rows)))
    with at(f"{where}.rewards"):
        medium.require_judged(rewards, rows, found.prompts or (), spec)
    size = found.size
    _check_smallest_batch(spec, size, where)
    steps = spec.steps or spec.epochs * batches_per_epoch(size, spec.batch.rows)
    _check_lengths(spec, steps, where)
    with at(f"{where}.optimizers"):
        optimizers = plan_optimizers(spec, moved, steps, mover)
    residency = Residency(spec.offload, device, hold=bool(found.pairs))
    materials = recipes.Materials(
        policy=policy,
        optimizers=optimizers,
        stop=stop,
        micro_tokens=spec.batch.micro_tokens,
        micro_rows=spec.batch.micro_rows,
        max_length=spec.batch.max_length,
        view=view,
        drawn_with=drawn_with,
        ema=spec.ema,
        shelves=residency.shelves,
        donate=True,  # as the loop does, which keeps no state beside the one that a step returns
        graphs=graphs,
        levels=levels,
        compare=compare,
        teachers={} if cast is None else cast.teaching,
        sources=tuple(row.source for row in rows),
        **_critic(spec, critic),
    )
    with at(where):
        algorithm = recipes.build(spec.algorithm, materials, loss)
    return PhasePlan(
        spec=spec,
        algorithm=algorithm,
        steps=steps,
        rows=rows,
        examples=found.examples,
        pairs=found.pairs,
        prompts=found.prompts,
        rewards=rewards,
        residency=residency,
        graphs=graphs,
        mixed=mixed,
    )


def _computing_again(policy: Any, spec: Phase, where: str) -> Any:
    """The policy with the layers that its backward pass computes again."""
    if not spec.remat:
        return policy
    if not isinstance(policy, ComputesAgain):
        raise SpecError(f"{where}.remat: the layers of this model cannot be computed again one by one; remove it")
    return policy.computing_again(spec.remat)


def _mixture(spec: Phase, rows: Sequence[Row], used: Sequence[int]) -> Mixture:
    """How the data sets of a phase are mixed, from the rows of them that are used; nothing where none has a weight."""
    weights = [source.weight for source in spec.data]
    if not any(weights):
        return ()
    sizes = Counter(rows[row].source for row in used)
    return mixture([sizes[name] for name in source_names(spec.data)], weights)


def _check_smallest_batch(spec: Phase, size: int, where: str) -> None:
    """The last batch of an epoch may be smaller than the others, and must still give a row to every mini-batch."""
    if not isinstance(spec.algorithm, Repeated):
        return
    rows = size % spec.batch.rows or spec.batch.rows
    if isinstance(spec.algorithm, FlowWhole) and rows < spec.algorithm.minibatches <= spec.batch.rows:
        raise SpecError(
            f"{where}.algorithm.minibatches: {spec.algorithm.minibatches} mini-batches of whole groups cannot be cut from the "
            f"last batch of an epoch, which has {rows} prompts ({size} in batches of {spec.batch.rows}); change it or batch.rows"
        )
    if rows * spec.algorithm.samples < spec.algorithm.minibatches:
        raise SpecError(
            f"{where}.algorithm.minibatches: {spec.algorithm.minibatches} mini-batches cannot be cut from the last batch of "
            f"an epoch, which has {rows} prompts x {spec.algorithm.samples} samples ({size} prompts in batches of "
            f"{spec.batch.rows}); change batch.rows, samples or minibatches"
        )


def _check_lengths(spec: Phase, steps: int, where: str) -> None:
    """What begins after some optimizer steps must begin within the phase, or it would be there for nothing."""
    if steps > MOST_STEPS:
        raise SpecError(
            f"{where}.epochs: {spec.epochs:,} epochs are {steps:,} steps, and a phase has at most {MOST_STEPS:,}; lower it"
        )
    if spec.ema is not None:
        made, every = steps_of(spec, recipes.ACTOR, steps), spec.ema.every
        if made // every * every <= spec.ema.start:
            raise SpecError(
                f"{where}.ema.{'every' if every > made else 'start'}: the average would be no more than a copy, because the actor "
                f"makes {made} optimizer steps in this phase; lower it, or remove `ema`"
            )
    for optimizer in spec.optimizers:
        schedule, made = optimizer.schedule, steps_of(spec, optimizer.role, steps)
        begins = schedule.warmup_steps + schedule.stable_steps
        if schedule.kind == "wsd" and not schedule.decay_steps and begins >= made:
            raise SpecError(
                f"{where}.optimizers.{optimizer.role}.schedule: the decay would begin after {begins} optimizer steps, but the "
                f"role makes {made} in this phase; lower stable_steps or warmup_steps"
            )


def _critic(spec: Phase, critic: CriticPlan | None) -> dict[str, Any]:
    """The materials of a phase that trains the critic."""
    if critic is None or recipes.CRITIC not in spec.algorithm.roles:
        return {}
    if spec.batch.max_length > critic.policy.max_positions:
        raise SpecError(
            f"phases.{spec.name}.batch.max_length: {spec.batch.max_length} is beyond the critic's context of "
            f"{critic.policy.max_positions} positions; lower it to that or less"
        )
    judging = _computing_again(critic.policy, spec, f"phases.{spec.name}")
    return {"critic_policy": judging, "critic_view": critic.view, "begin_critic": critic.begin}
