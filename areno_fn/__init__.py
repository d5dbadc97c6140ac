"""Post-training as pure functions: a step maps a state and a batch to a state and metrics.

The public names, each loaded from its module when it is first used, so that `import areno_fn` costs nothing.
`areno_fn.testing` is public too; every other name is an implementation detail.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areno_fn import random as random
    from areno_fn import tree as tree
    from areno_fn.autodiff import custom_vjp as custom_vjp
    from areno_fn.autodiff import remat as remat
    from areno_fn.autodiff import value_and_grad as value_and_grad
    from areno_fn.contracts.actions import Actions as Actions
    from areno_fn.contracts.actions import Comparisons as Comparisons
    from areno_fn.contracts.actions import Estimates as Estimates
    from areno_fn.contracts.actions import Scores as Scores
    from areno_fn.contracts.actions import Sums as Sums
    from areno_fn.contracts.batch import Example as Example
    from areno_fn.contracts.batch import Experience as Experience
    from areno_fn.contracts.batch import JudgedRollout as JudgedRollout
    from areno_fn.contracts.batch import PackedTokens as PackedTokens
    from areno_fn.contracts.batch import Pair as Pair
    from areno_fn.contracts.batch import Pairs as Pairs
    from areno_fn.contracts.batch import Prompts as Prompts
    from areno_fn.contracts.batch import Rollout as Rollout
    from areno_fn.contracts.key import Key as Key
    from areno_fn.contracts.optim import Optimizer as Optimizer
    from areno_fn.contracts.optim import Transform as Transform
    from areno_fn.contracts.policy import TokenPolicy as TokenPolicy
    from areno_fn.contracts.record import donate as donate
    from areno_fn.contracts.record import record as record
    from areno_fn.contracts.record import replace as replace
    from areno_fn.contracts.record import static as static
    from areno_fn.contracts.spec import RunSpec as RunSpec
    from areno_fn.contracts.spec import Sampling as Sampling
    from areno_fn.contracts.state import Counters as Counters
    from areno_fn.contracts.state import Cursor as Cursor
    from areno_fn.contracts.state import TrainState as TrainState
    from areno_fn.contracts.valued import Valued as Valued
    from areno_fn.engine.hf import load_hf as load_hf
    from areno_fn.engine.hf import save_hf as save_hf
    from areno_fn.engine.plan import Plan as Plan
    from areno_fn.engine.plan import plan as plan
    from areno_fn.engine.residency import offload as offload
    from areno_fn.engine.residency import onload as onload
    from areno_fn.engine.session import run as train  # noqa: F401
    from areno_fn.engine.specfile import read as read_spec  # noqa: F401
    from areno_fn.models import FAMILIES as FAMILIES
    from areno_fn.models.adapters import merge as merge
    from areno_fn.models.adapters import unmerge as unmerge
    from areno_fn.steps.advantages import group_advantages as group_advantages
    from areno_fn.steps.compose import accumulate as accumulate
    from areno_fn.steps.compose import pipeline as pipeline
    from areno_fn.steps.compose import train_step as train_step
    from areno_fn.steps.objectives.clipped import clipped as clipped
    from areno_fn.steps.objectives.cross_entropy import cross_entropy as cross_entropy
    from areno_fn.steps.objectives.preference import preference as preference
    from areno_fn.steps.objectives.sequence import sequence_clipped as sequence_clipped
    from areno_fn.steps.objectives.value import value_clipped as value_clipped
    from areno_fn.steps.optimizers.adam8bit import adamw8bit as adamw8bit
    from areno_fn.steps.optimizers.adamw import adamw as adamw
    from areno_fn.steps.optimizers.chain import chain as chain
    from areno_fn.steps.optimizers.muon import muon as muon
    from areno_fn.steps.optimizers.partition import partition as partition
    from areno_fn.steps.optimizers.sgd import sgd as sgd
    from areno_fn.steps.reduce import aggregate as aggregate
    from areno_fn.steps.returns import gae as gae
    from areno_fn.steps.returns import terminal_rewards as terminal_rewards
    from areno_fn.steps.returns import whiten as whiten
    from areno_fn.steps.token.experience import experience as experience
    from areno_fn.steps.token.pack import pack as pack
    from areno_fn.steps.token.pairs import pair_batches as pair_batches
    from areno_fn.steps.token.rollout import sampler as sampler
    from areno_fn.steps.token.score import act as act
    from areno_fn.steps.token.score import compare as compare
    from areno_fn.steps.token.score import score as score
    from areno_fn.steps.token.value import estimate as estimate
    from areno_fn.steps.turns import Turn as Turn
    from areno_fn.steps.turns import in_turns as in_turns
    from areno_fn.steps.variants import ema_begin as ema_begin
    from areno_fn.steps.variants import ema_update as ema_update
    from areno_fn.steps.variants import snapshot as snapshot

_HOMES = {
    "random": "random",
    "tree": "tree",
    "custom_vjp": "autodiff:custom_vjp",
    "remat": "autodiff:remat",
    "value_and_grad": "autodiff:value_and_grad",
    "Actions": "contracts.actions:Actions",
    "Comparisons": "contracts.actions:Comparisons",
    "Estimates": "contracts.actions:Estimates",
    "Scores": "contracts.actions:Scores",
    "Sums": "contracts.actions:Sums",
    "Example": "contracts.batch:Example",
    "Experience": "contracts.batch:Experience",
    "JudgedRollout": "contracts.batch:JudgedRollout",
    "PackedTokens": "contracts.batch:PackedTokens",
    "Pair": "contracts.batch:Pair",
    "Pairs": "contracts.batch:Pairs",
    "Prompts": "contracts.batch:Prompts",
    "Rollout": "contracts.batch:Rollout",
    "Key": "contracts.key:Key",
    "Optimizer": "contracts.optim:Optimizer",
    "Transform": "contracts.optim:Transform",
    "TokenPolicy": "contracts.policy:TokenPolicy",
    "donate": "contracts.record:donate",
    "record": "contracts.record:record",
    "replace": "contracts.record:replace",
    "static": "contracts.record:static",
    "RunSpec": "contracts.spec:RunSpec",
    "Sampling": "contracts.spec:Sampling",
    "Counters": "contracts.state:Counters",
    "Cursor": "contracts.state:Cursor",
    "TrainState": "contracts.state:TrainState",
    "Valued": "contracts.valued:Valued",
    "load_hf": "engine.hf:load_hf",
    "save_hf": "engine.hf:save_hf",
    "Plan": "engine.plan:Plan",
    "plan": "engine.plan:plan",
    "offload": "engine.residency:offload",
    "onload": "engine.residency:onload",
    "train": "engine.session:run",
    "read_spec": "engine.specfile:read",
    "FAMILIES": "models:FAMILIES",
    "merge": "models.adapters:merge",
    "unmerge": "models.adapters:unmerge",
    "group_advantages": "steps.advantages:group_advantages",
    "accumulate": "steps.compose:accumulate",
    "pipeline": "steps.compose:pipeline",
    "train_step": "steps.compose:train_step",
    "clipped": "steps.objectives.clipped:clipped",
    "cross_entropy": "steps.objectives.cross_entropy:cross_entropy",
    "preference": "steps.objectives.preference:preference",
    "sequence_clipped": "steps.objectives.sequence:sequence_clipped",
    "value_clipped": "steps.objectives.value:value_clipped",
    "adamw": "steps.optimizers.adamw:adamw",
    "adamw8bit": "steps.optimizers.adam8bit:adamw8bit",
    "chain": "steps.optimizers.chain:chain",
    "muon": "steps.optimizers.muon:muon",
    "partition": "steps.optimizers.partition:partition",
    "sgd": "steps.optimizers.sgd:sgd",
    "aggregate": "steps.reduce:aggregate",
    "gae": "steps.returns:gae",
    "terminal_rewards": "steps.returns:terminal_rewards",
    "whiten": "steps.returns:whiten",
    "experience": "steps.token.experience:experience",
    "pack": "steps.token.pack:pack",
    "pair_batches": "steps.token.pairs:pair_batches",
    "sampler": "steps.token.rollout:sampler",
    "act": "steps.token.score:act",
    "compare": "steps.token.score:compare",
    "score": "steps.token.score:score",
    "estimate": "steps.token.value:estimate",
    "Turn": "steps.turns:Turn",
    "in_turns": "steps.turns:in_turns",
    "ema_begin": "steps.variants:ema_begin",
    "ema_update": "steps.variants:ema_update",
    "snapshot": "steps.variants:snapshot",
}
"""Public name -> module, or module:name in it."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'areno_fn' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    value = importlib.import_module(f"areno_fn.{module}")
    globals()[name] = getattr(value, attribute) if attribute else value
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
