"""Rules between fields of a specification. Everything here is decided before a file is opened."""

from __future__ import annotations

import typing
from collections.abc import Iterator

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.execution import Acquisition, Feedback
from areno_fn.contracts.optim import groups_of
from areno_fn.contracts.spec import (
    COLDEST,
    DPO,
    EMA,
    GRPO,
    GSPO,
    PPO,
    AdamW8bitSpec,
    Batch,
    Denoising,
    FlowGrouped,
    FlowReferred,
    FlowTaught,
    FlowTDMR1,
    Grouped,
    HFModel,
    Log,
    Lora,
    OptimizerSpec,
    Phase,
    Repeated,
    RunSpec,
    Sampled,
    Sampling,
    Schedule,
    SGDSpec,
    copies_of,
    folders_of,
    refers,
)
from areno_fn.engine.addresses import address_problems
from areno_fn.engine.flow_rules import flow_problems, uses_average
from areno_fn.engine.number_rules import range_problems, size_problems
from areno_fn.engine.repeat_rules import repeat_problems
from areno_fn.engine.sources import source_problems
from areno_fn.engine.taught_rules import taught_problems

_KINDS = tuple(str(kind.__struct_config__.tag) for kind in typing.get_args(OptimizerSpec))


def check_composition(spec: RunSpec) -> None:
    """Refuses a specification whose parts do not fit together.

    Raises:
        SpecError: one line per problem, each naming the field.
    """
    # what is no number in 32 bits is nothing that other rules could be about
    problems = [*range_problems(spec)] or [
        *_names(spec),
        *_finetune(spec),
        *(p for phase in spec.phases for p in _phase(spec, phase)),
        *_evaluation(spec),
        *_export(spec),
        *_log(spec.log),
        *_consistency(spec),
        *source_problems(spec),
        *address_problems(spec),
        *size_problems(spec),
        *repeat_problems(spec),
    ]
    if problems:
        raise SpecError("\n".join(problems))


def _names(spec: RunSpec) -> Iterator[str]:
    names = [phase.name for phase in spec.phases]
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield f"phases: two phases are named {name!r}; names must differ"


def _finetune(spec: RunSpec) -> Iterator[str]:
    given = spec.finetune
    if isinstance(given, Lora) and given.adapter:
        for name in ("rank", "alpha", "targets", "rslora"):
            if getattr(given, name) != getattr(Lora(), name):
                yield f"finetune.{name}: an adapter that is trained on has its own; remove this, or `adapter`"
    if isinstance(given, Lora) and not all(given.targets):
        yield "finetune.targets: a name is empty; leave the list empty to adapt every linear map of the layers"


def _consistency(spec: RunSpec) -> Iterator[str]:
    if spec.consistency == "ordinary":
        return
    if not any(isinstance(phase.algorithm, Sampled) for phase in spec.phases):
        yield "consistency: 'bitwise' is about completions that are drawn to be trained on, and no phase draws any; remove this"
    if isinstance(spec.finetune, Lora) and spec.finetune.merge_rollouts:
        yield (
            "consistency: 'bitwise' and finetune.merge_rollouts exclude each other, because merged weights are rounded once "
            "more; remove one of them"
        )
    if not isinstance(spec.model, HFModel):
        yield (
            "consistency: 'bitwise' is for parameters in bfloat16 or float16, and a model from scratch has float32; "
            "use a folder with dtype = 'bfloat16'"
        )


def _phase(spec: RunSpec, phase: Phase) -> Iterator[str]:
    where, contract = f"phases.{phase.name}", phase.algorithm.execution
    kind = type(phase.algorithm).__struct_config__.tag
    if contract.acquisition is Acquisition.GENERATION and phase.epochs:
        yield f"{where}.epochs: {kind} generates its data, so its length is given by `steps` (rollout iterations), not by epochs"
    elif contract.acquisition is Acquisition.GENERATION and not phase.steps:
        yield f"{where}.steps: it must be at least 1; {kind} generates its data, and a step is a rollout iteration"
    elif bool(phase.steps) == bool(phase.epochs):
        said = "both are given" if phase.steps else "neither is given"
        yield f"{where}: exactly one of `steps` and `epochs` must be at least 1, but {said}"
    if phase.stop_at > 0 and (spec.evaluation is None or not spec.evaluation.every):
        yield f"{where}.stop_at: a phase can only stop at a score when `evaluation.every` is at least 1"
    if phase.denoising is not None and spec.evaluation is None:
        yield f"{where}.denoising: it is how evaluations draw, and there is none; give an `evaluation`, or remove this"
    if contract.feedback is Feedback.NONE and phase.rewards:
        yield (
            f"{where}.rewards: {kind} is {contract.acquisition} + none, so no reward is ever asked; "
            f"remove the rewards, or put them under `evaluation`"
        )
    if contract.feedback is Feedback.RUNTIME_REWARD and not phase.rewards:
        yield (
            f"{where}.rewards: {kind} learns from runtime rewards and needs at least one, "
            f"for example {{ kind = 'function', function = 'package.module:function' }}"
        )
    if contract.acquisition is Acquisition.GENERATION and phase.batch.overlong != Batch().overlong:
        yield f"{where}.batch.overlong: it is for rows with answers to train on, and {kind} draws its answers; remove this"
    if not phase.data:
        yield f"{where}.data: a phase needs at least one data source"
    yield from _optimizers(phase, where)
    yield from _capture(phase, where)
    yield from _snapshots(spec, phase, where)
    if isinstance(phase.algorithm, DPO) and phase.algorithm.label_smoothing and phase.algorithm.loss != "sigmoid":
        yield f"{where}.algorithm.label_smoothing: it belongs to the loss 'sigmoid'; remove it, or `loss`"
    if isinstance(phase.algorithm, GRPO | GSPO | PPO) and phase.algorithm.clip_high >= 1:
        yield (
            f"{where}.algorithm.clip_high: the ratio is clipped at 1 + clip_high, which would be "
            f"{1 + phase.algorithm.clip_high:g}; give how far above 1 that is, a number below 1, for example "
            f"{type(phase.algorithm)().clip_high:g}"
        )
    if isinstance(phase.algorithm, GRPO | PPO) and 0 < phase.algorithm.dual_clip <= 1:
        yield f"{where}.algorithm.dual_clip: {phase.algorithm.dual_clip} is not above 1; use a number above 1, or 0 for no bound"
    if isinstance(phase.algorithm, Sampled):
        yield from _sampled(phase, phase.algorithm, where)
    if isinstance(phase.algorithm, FlowReferred):
        yield from flow_problems(spec, phase, phase.algorithm)
    if isinstance(phase.algorithm, FlowTaught):
        yield from taught_problems(phase, phase.algorithm)
    if isinstance(phase.algorithm, Repeated):
        yield from _minibatches(phase, phase.algorithm, where)
    if isinstance(phase.algorithm, PPO):
        yield from _ppo(phase, phase.algorithm, f"{where}.algorithm")


def _kl(algorithm: Sampled, where: str) -> Iterator[str]:
    usual = type(algorithm)()
    for name in ("kl_in", "kl_estimator") if not algorithm.kl_coef else ():
        if getattr(algorithm, name) != getattr(usual, name):
            yield f"{where}.{name}: without kl_coef no KL is taken from the loss or the reward; give kl_coef, or remove this"
    if algorithm.kl_coef and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        yield (
            f"{where}.kl_estimator: the gradient of 'k1' in the loss does not depend on the reference, and holds nothing near it; "
            f"use 'k3' or 'k2', or kl_in = 'reward'"
        )


def _ppo(phase: Phase, algorithm: PPO, where: str) -> Iterator[str]:
    if algorithm.kl_horizon != PPO().kl_horizon and not algorithm.kl_target:
        yield f"{where}.kl_horizon: without kl_target no coefficient moves; give kl_target, or remove this"
    if not algorithm.gamma and algorithm.lam != PPO().lam:
        yield f"{where}.lam: with gamma = 0 nothing that is later counts, by whatever share; give gamma, or remove this"
    if algorithm.kl_target and not (algorithm.kl_coef and algorithm.kl_in == "reward"):
        yield f"{where}.kl_target: it moves the coefficient of the KL in the reward; give kl_coef, and kl_in = 'reward'"
    if phase.steps and algorithm.critic.warmup >= phase.steps:
        yield (
            f"{where}.critic.warmup: the critic would be trained alone for all {phase.steps} steps of the phase; "
            f"use fewer than that"
        )


def snapshots_of(phase: Phase) -> list[str]:
    """The names of the snapshots that a phase keeps."""
    algorithm = phase.algorithm
    compared = isinstance(algorithm, DPO) or (isinstance(algorithm, Sampled) and algorithm.kl_coef > 0)
    if isinstance(algorithm, FlowReferred):
        compared = refers(algorithm) and algorithm.reference == "start"
    if isinstance(algorithm, FlowTaught):
        compared = not folders_of(algorithm)
    copies = copies_of(algorithm) if isinstance(algorithm, FlowGrouped) else {}
    slow = ["slow"] * isinstance(algorithm, FlowTDMR1)
    return ["reference"] * compared + ["ema"] * (phase.ema is not None) + [*copies, *slow]


def _snapshots(spec: RunSpec, phase: Phase, where: str) -> Iterator[str]:
    algorithm, kept = phase.algorithm, snapshots_of(phase)
    if isinstance(algorithm, Sampled) and algorithm.reference_every and not algorithm.kl_coef:
        yield f"{where}.algorithm.reference_every: without kl_coef there is no reference to renew; give kl_coef, or remove this"
    if phase.ema is not None:
        yield from _average(spec, phase, phase.ema, f"{where}.ema")
    for name in dict.fromkeys(phase.offload):
        if name not in kept:
            yield f"{where}.offload: this phase keeps no {name!r}; it keeps {' and '.join(map(repr, kept)) or 'no snapshot'}"


def _average(spec: RunSpec, phase: Phase, ema: EMA, where: str) -> Iterator[str]:
    if (ema.schedule == "linear") != bool(ema.ramp):
        yield f"{where}.ramp: the schedule 'linear', and no other, needs a ramp of at least 1 update"
    if ema.export and phase is not spec.phases[-1]:
        yield f"{where}.export: an average ends with its phase, and only the last one's is there to export; set export = false"
    drawn = isinstance(phase.algorithm, FlowGrouped) and uses_average(phase.algorithm)
    if not (ema.export or drawn or (ema.evaluate and spec.evaluation)):
        yield f"{where}: it is neither exported nor evaluated; set `export`, or `evaluate` with an `evaluation`, or remove this"


def _optimizers(phase: Phase, where: str) -> Iterator[str]:
    given, needed = [o.role for o in phase.optimizers], phase.algorithm.roles
    if sorted(given) != sorted(needed):
        yield (
            f"{where}.optimizers: there must be exactly one for each trained role ({', '.join(needed)}), "
            f"received {', '.join(given) or 'none'}"
        )
    for optimizer in phase.optimizers:
        at = f"{where}.optimizers.{optimizer.role}"
        if isinstance(optimizer, SGDSpec) and optimizer.nesterov and not optimizer.momentum:
            yield f"{at}.nesterov: there is no momentum to look ahead along; set momentum above 0, or nesterov to false"
        yield from _schedule(optimizer.schedule, f"{at}.schedule")
        names = [group.name for group in groups_of(optimizer)]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"{at}.groups: two groups are named {name!r}; names must differ"
        for name in sorted(set(names) & set(_KINDS)):
            yield f"{at}.groups: {name!r} is what an optimizer calls the parameters of no group; name the group differently"


def _capture(phase: Phase, where: str) -> Iterator[str]:
    for optimizer in phase.optimizers if phase.capture else ():
        if isinstance(optimizer, AdamW8bitSpec):
            yield (
                f"{where}.capture: adamw8bit, which moves the {optimizer.role}, rounds by keys that the host sends with every "
                f"update, and a graph has no host; use adamw, or remove this"
            )


def _schedule(schedule: Schedule, where: str) -> Iterator[str]:
    """Settings that belong to another kind, and a decay that would end before it begins."""
    kind = schedule.kind
    for name in ("min_lr", "decay_steps") if kind == "constant" else ():
        if getattr(schedule, name):
            yield f"{where}.{name}: the kind 'constant' does not decay; set kind to 'linear', 'cosine' or 'wsd', or remove this"
    if kind != "wsd" and schedule.stable_steps:
        yield f"{where}.stable_steps: it belongs to the kind 'wsd'; set that, or remove this"
    begins = schedule.warmup_steps + (schedule.stable_steps if kind == "wsd" else 0)
    if kind != "constant" and 0 < schedule.decay_steps <= begins:
        yield (
            f"{where}.decay_steps: the decay is at its end after {schedule.decay_steps} steps, counted from the first of the "
            f"phase, but begins after {begins}; use more than that"
        )


def _sampled(phase: Phase, algorithm: Sampled, where: str) -> Iterator[str]:
    if algorithm.sampling.temperature == 0:
        yield f"{where}.algorithm.sampling.temperature: 0 is greedy decoding, which explores nothing; use a temperature above 0"
    yield from _cold(algorithm.sampling, f"{where}.algorithm.sampling")
    yield from _kl(algorithm, f"{where}.algorithm")
    if isinstance(algorithm, Grouped):
        yield from _grouped(algorithm, f"{where}.algorithm")
    if algorithm.sampling.max_tokens >= phase.batch.max_length:
        yield (
            f"{where}.batch.max_length: {phase.batch.max_length} leaves no room for a prompt beside "
            f"sampling.max_tokens = {algorithm.sampling.max_tokens}"
        )


def _minibatches(phase: Phase, algorithm: Repeated, where: str) -> Iterator[str]:
    if algorithm.minibatches > phase.batch.rows * algorithm.samples:
        yield (
            f"{where}.algorithm.minibatches: {algorithm.minibatches} mini-batches cannot be cut from "
            f"{phase.batch.rows} prompts x {algorithm.samples} samples"
        )


def _grouped(algorithm: Grouped, where: str) -> Iterator[str]:
    if algorithm.samples == 1 and algorithm.baseline == "leave_one_out":
        yield f"{where}.samples: a group of 1 has no others to be compared with; use at least 2"
    elif algorithm.samples == 1 and algorithm.baseline == "group":
        yield f"{where}.samples: a group of 1 is its own mean, so every advantage would be 0; use at least 2"
    if algorithm.baseline == "batch" and algorithm.scale == "group":
        yield (
            f"{where}.scale: a deviation from the mean of the batch cannot be divided by that of its group, which is 0 where its "
            f"rewards are equal; use 'batch' or 'none'"
        )


def _evaluation(spec: RunSpec) -> Iterator[str]:
    if spec.evaluation is not None:
        if not spec.evaluation.data:
            yield "evaluation.data: an evaluation needs at least one data source"
        if not spec.evaluation.rewards:
            yield "evaluation.rewards: an evaluation needs at least one reward"
        yield from _cold(spec.evaluation.sampling, "evaluation.sampling")
        yield from _greedy(spec.evaluation.sampling, "evaluation.sampling")
        if spec.evaluation.denoising != Denoising() and all(phase.denoising is not None for phase in spec.phases):
            yield "evaluation.denoising: every phase says itself how its evaluations draw; remove this, or that of a phase"


def _greedy(sampling: Sampling, where: str) -> Iterator[str]:
    for name in ("top_k", "top_p", "min_p") if not sampling.temperature else ():
        if getattr(sampling, name) != getattr(Sampling(), name):
            yield f"{where}.{name}: at a temperature of 0 the likeliest token is taken, whatever else is left out; remove this"


def _log(log: Log) -> Iterator[str]:
    if not log.samples and log.samples_every != Log().samples_every:
        yield "log.samples_every: with samples = 0 none is kept; give samples, or remove this"


def _export(spec: RunSpec) -> Iterator[str]:
    trained = dict.fromkeys(role for phase in spec.phases for role in phase.algorithm.roles)
    others = [role for role in trained if role != "actor"]
    for place, role in enumerate(spec.export.roles):
        if role not in others:
            yield (
                f"export.roles.{place}: beside the actor, which is always written, this run trains "
                f"{' and '.join(others) or 'no role'}; remove {role!r}"
            )


def _cold(sampling: Sampling, where: str) -> Iterator[str]:
    if 0 < sampling.temperature < COLDEST:
        yield (
            f"{where}.temperature: {sampling.temperature} is so close to 0 that logits divided by it overflow; "
            f"use at least {COLDEST:g}, or 0 for greedy decoding"
        )
