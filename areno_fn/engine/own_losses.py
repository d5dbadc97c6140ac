"""What of an algorithm only its own loss or its own advantages read, and none in their place: decided before a file is opened."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from areno_fn.contracts.calls import received
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.spec import (
    DPO,
    GRPO,
    GSPO,
    PPO,
    SFT,
    AlgorithmSpec,
    FlowAWM,
    FlowCRD,
    FlowDGPO,
    FlowDistill,
    FlowDPO,
    FlowDPPO,
    FlowGrouped,
    FlowGRPO,
    FlowGRPOGuard,
    FlowNFT,
    FlowOnlineDPO,
    FlowSFT,
    FlowTDM,
    FlowTDMR1,
    Grouped,
    RunSpec,
    Sampled,
)
from areno_fn.engine.composition import check_composition
from areno_fn.steps.advantages import Compare
from areno_fn.steps.recipes import ACTOR, CRITIC, FAKE, SURROGATE, Losses

_COMPARED = ("baseline", "scale", "combine")
_CLIPPED = ("clip_low", "clip_high", "aggregation", "dual_clip", "entropy_coef", "kl_estimator")
READ_BY_LOSS: Mapping[type[AlgorithmSpec], Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        SFT: {ACTOR: ("aggregation",)},
        DPO: {ACTOR: ("beta", "loss", "label_smoothing")},
        GRPO: {ACTOR: _CLIPPED},
        GSPO: {ACTOR: ("clip_low", "clip_high", "entropy_coef", "kl_estimator")},
        PPO: {ACTOR: _CLIPPED, CRITIC: ("critic.clip", "critic.coef")},
        FlowSFT: {ACTOR: ("weighting",)},
        FlowDPO: {ACTOR: ("beta",)},
        FlowGRPO: {ACTOR: ("clip_low", "clip_high", "kl_space")},
        FlowGRPOGuard: {ACTOR: ("clip_low", "clip_high", "guard_step_reweight", "kl_space")},
        FlowDPPO: {ACTOR: ("threshold", "mask_space", "kl_space")},
        FlowNFT: {ACTOR: ("beta",)},
        FlowAWM: {ACTOR: ("weighting", "clip_low", "clip_high")},
        FlowDGPO: {ACTOR: ("beta", "kl_coef")},
        FlowCRD: {ACTOR: ("beta", "loss", "temperature", "kl_floor")},
        FlowOnlineDPO: {ACTOR: ("beta",)},
        FlowTDM: {ACTOR: ("huber",), FAKE: ("snr_cap",)},
        FlowTDMR1: {
            ACTOR: ("mixture", "guidance_reward", "huber"),
            FAKE: ("snr_cap",),
            SURROGATE: ("beta", "trust", "runaway", "anchor"),
        },
        FlowDistill: {ACTOR: ("space", "normalised")},
    }
)
"""By algorithm and role, the fields that do nothing beside a loss of one's own.

What stands in no row still acts: most `kl_coef`, `importance_cap` and `clip` of DGPO, for example, say that frozen parameters
are asked, and what these say is in the record that a loss takes.
"""


def loss_problems(spec: RunSpec, losses: Mapping[str, Losses]) -> Iterator[str]:
    """A sentence for every field that says something which is not its default, and which the loss in use does not read.

    A default that other rules refuse there is not asked for.

    Args:
        spec: one that `check_composition` has passed.
        losses: by phase, losses of one's own.
    """
    for place, phase in enumerate(spec.phases):
        if phase.name not in losses:
            continue
        given = losses[phase.name]
        for role in given if isinstance(given, Mapping) else (ACTOR,):
            for name in _unread(spec, place, fields_of_loss(phase.algorithm, role)):
                yield (
                    f"phases.{phase.name}.algorithm.{name}: it belongs to the algorithm's own loss of the {role}, and a loss of "
                    f"your own stands in its place; remove this, and say it in your loss"
                )


def advantage_problems(spec: RunSpec, advantages: Mapping[str, Compare]) -> Iterator[str]:
    """A sentence for every phase that compares no samples, and for every field that advantages of one's own do not read.

    Args:
        spec: one that `check_composition` has passed.
        advantages: by phase, functions of one's own.
    """
    for place, phase in enumerate(spec.phases):
        if phase.name not in advantages:
            continue
        where, given = f"phases.{phase.name}.algorithm", advantages[phase.name]
        if not isinstance(phase.algorithm, Grouped | FlowGrouped | FlowTDMR1):
            kind = phase.algorithm.__struct_config__.tag
            yield f"{where}: {kind} compares no samples of a prompt, and advantages of your own have no place in it"
            continue
        if not _takes_two(given):
            yield f"{where}: its advantages are {received(given)}; give a function (rewards [B], groups [B]) -> [B]"
        for name in _unread(spec, place, [name for name in _COMPARED if hasattr(phase.algorithm, name)]):
            yield (
                f"{where}.{name}: it belongs to the algorithm's own advantages, and a function of your own stands in their "
                f"place; remove this, and say it in your function"
            )


def _takes_two(function: object) -> bool:
    """Whether it can be called with two arguments; True of what does not say."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(None, None)
    except ValueError:  # a function without a signature, as some of C are
        return True
    except TypeError:
        return False
    return True


def fields_of_loss(algorithm: AlgorithmSpec, role: str) -> tuple[str, ...]:
    """The fields of an algorithm that its own loss of a role reads and nothing else does."""
    found = READ_BY_LOSS.get(type(algorithm), {}).get(role, ())
    if isinstance(algorithm, Sampled) and algorithm.kl_in == "reward":
        return tuple(name for name in found if name != "kl_estimator")
    return found


def _unread(spec: RunSpec, place: int, names: Iterable[str]) -> list[str]:
    """Which of these fields of a phase's algorithm say something that is not their default, and need not."""
    own = spec.phases[place].algorithm
    usual = type(own)()
    said = [name for name in names if _value(own, name) != _value(usual, name)]
    return [name for name in said if _may_be_left_out(spec, place, name)]


def _may_be_left_out(spec: RunSpec, place: int, name: str) -> bool:
    """Whether the specification is sound with the default in the place of a field."""
    phase = spec.phases[place]
    plain = _usual(phase.algorithm, type(phase.algorithm)(), name.split("."))
    phases = [*spec.phases[:place], msgspec.structs.replace(phase, algorithm=plain), *spec.phases[place + 1 :]]
    try:
        check_composition(msgspec.structs.replace(spec, phases=phases))
    except SpecError:
        return False
    return True


def _value(record: Any, name: str) -> Any:
    for part in name.split("."):
        record = getattr(record, part)
    return record


def _usual(record: Any, usual: Any, way: list[str]) -> Any:
    """A record with the field at the end of the way as it usually is."""
    name, *rest = way
    default = getattr(usual, name)
    return msgspec.structs.replace(record, **{name: _usual(getattr(record, name), default, rest) if rest else default})
