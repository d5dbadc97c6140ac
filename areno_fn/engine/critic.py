"""The critic of a run: a role of its own, with parameters of its own, that a value-based algorithm trains."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from areno_fn import tree
from areno_fn.contracts.errors import ModelError, SpecError
from areno_fn.contracts.layout import Iso
from areno_fn.contracts.placement import Placement
from areno_fn.contracts.policy import TokenPolicy
from areno_fn.contracts.record import replace
from areno_fn.contracts.roles import Role
from areno_fn.contracts.spec import PPO, HFModel, HFTokenizer, RunSpec
from areno_fn.contracts.valued import Valued
from areno_fn.engine.finetune import BASE, FinetunePlan, LoraPlan
from areno_fn.engine.model import ModelPlan
from areno_fn.engine.place import at
from areno_fn.engine.valued_folder import ValuedFolder, open_valued
from areno_fn.models import adapters, valued
from areno_fn.models.adapter_sites import Site
from areno_fn.models.layouts import LAYOUTS
from areno_fn.steps.recipes import ACTOR, CRITIC, critic
from areno_fn.world import tokenizer as tokenizers
from areno_fn.world.tokenizer import Tokenizer

Params = Mapping[str, Any]
"""Parameters by role."""

_MATRIX = "head"
"""Leaf of a model that its critic does not have."""


@attrs.frozen(kw_only=True)
class FullCritic:
    """A critic all of whose parameters are trained.

    Attributes:
        model: the model of the actor.
        source: the folder that it comes from; None where it begins every phase as a copy of the actor.
    """

    model: ModelPlan
    source: ValuedFolder | None

    role = Role(name=CRITIC, exported=False)

    @property
    def policy(self) -> TokenPolicy:
        """The functions of its trunk."""
        return self.model.token_policy if self.source is None else self.source.policy

    @property
    def hf_config(self) -> Mapping[str, Any]:
        """The content of its config.json."""
        return valued.config_to_hf(self.model.hf_config) if self.source is None else self.source.folder.config

    @property
    def layout(self) -> Iso:
        """From the tensors of a classification folder to its parameters."""
        return valued.layout(self.model.text_family, self.model.config) if self.source is None else self.source.layout

    @property
    def placements(self) -> Mapping[str, Placement]:
        """How ranks share each leaf."""
        trunk = self.model if self.source is None else self.source
        names = [name for name in self.layout.source if name != valued.SCORE]
        return valued.placements(LAYOUTS[trunk.family.name].placements(valued.headless(trunk.config), names))

    def shapes(self) -> Any:
        """The parameters as meta tensors."""
        return valued.begin(self.model.shapes()) if self.source is None else self.source.shapes()

    def load(self, params: Params, device: torch.device) -> Any:
        """The parameters that a run begins with: read from the folder, or made from the actor's."""
        return valued.begin(params[ACTOR]) if self.source is None else self.source.load(device)

    @property
    def begin(self) -> Callable[[Params], Any] | None:
        """From the parameters of all roles to those that a phase begins with; None where it goes on with its own."""
        return None if self.source else lambda params: valued.begin(params[ACTOR])

    def view(self, params: Params) -> Valued:
        """What gives values."""
        own: Valued = critic(params)
        return own

    def merged(self, params: Params) -> Valued:
        """The trained critic as one parameter tree."""
        return self.view(params)


@attrs.frozen(kw_only=True)
class LoraCritic:
    """A critic of adapters and a head, on the frozen base that the actor's adapters stand on too.

    Attributes:
        finetune: the adapters of the actor, which those of the critic begin as copies of.
    """

    finetune: LoraPlan

    role = Role(name=CRITIC, exported=False, trunk=BASE)

    @property
    def policy(self) -> TokenPolicy:
        """The functions of its trunk."""
        return self.finetune.model.token_policy

    @property
    def hf_config(self) -> Mapping[str, Any]:
        """The content of its config.json."""
        return valued.config_to_hf(self.finetune.model.hf_config)

    @property
    def layout(self) -> Iso:
        """From the tensors of a classification folder to its merged parameters."""
        return valued.layout(self.finetune.model.text_family, self.finetune.model.config)

    @property
    def placements(self) -> Mapping[str, Placement]:
        """How ranks share each leaf: nothing is fused in an adapter."""
        return {}

    @property
    def _sites(self) -> tuple[Site, ...]:
        return tuple(site for site in self.finetune.sites if site.runs[0][0] != _MATRIX)

    def shapes(self) -> Any:
        """The parameters as meta tensors."""
        return self._begun(self.finetune.shapes())

    def load(self, params: Params, device: torch.device) -> Any:
        """The parameters that a run begins with."""
        del device
        return self._begun(params)

    @property
    def begin(self) -> Callable[[Params], Any]:
        """From the parameters of all roles to those that a phase begins with."""
        return self._begun

    def _begun(self, params: Params) -> Any:
        kept = {site.module: params[ACTOR][site.module] for site in self._sites}
        norm = params[BASE].norm
        head = torch.zeros((1, norm.shape[0]), dtype=torch.float32, device=norm.device)
        return {"adapters": tree.map(torch.clone, kept), "head": head}

    def view(self, params: Params) -> Valued:
        """What gives values: the base without its output matrix, adapted."""
        own = critic(params)
        trunk = adapters.adapt(replace(params[BASE], head=None), own["adapters"], self._sites)
        return Valued(trunk=trunk, head=own["head"])

    def merged(self, params: Params) -> Valued:
        """The trained critic as one parameter tree."""
        own = self.view(params)
        return replace(own, trunk=adapters.merge(own.trunk))


CriticPlan = FullCritic | LoraCritic


def require_same_tokens(critic: CriticPlan | None, tokenizer: Tokenizer) -> None:
    """Refuses a critic whose folder has a tokenizer that means other texts by the actor's tokens; it may have none.

    Raises:
        SpecError: names the folder.
    """
    if not isinstance(critic, FullCritic) or critic.source is None:
        return
    folder = critic.source.folder.path
    if not (folder / "tokenizer.json").exists():
        return
    # with transformers, which takes seconds to import, and a run without such a folder may not need
    from areno_fn.world.tokenizer_same import same_vocabulary

    if not same_vocabulary(tokenizers.load(HFTokenizer(path=str(folder))), tokenizer):
        raise SpecError(
            f"{folder} has another tokenizer than the run, so the critic would read the actor's tokens as other texts; "
            f"start from a critic of the same tokens, or from none"
        )


def plan_critic(spec: RunSpec, model: ModelPlan, finetune: FinetunePlan) -> CriticPlan | None:
    """The critic of a run; None where no phase has one.

    Raises:
        SpecError: two phases name different folders, or one is named beside adapters.
        ModelError: a folder is not one of a model with one number a text.
        CheckpointError: it is damaged or incomplete.
    """
    using = [phase for phase in spec.phases if isinstance(phase.algorithm, PPO)]
    if not using:
        return None
    named = [(phase.algorithm.critic.path, phase.name) for phase in using if isinstance(phase.algorithm, PPO)]
    path, phase = named[0]
    for other, second in named:
        if _place(other) != _place(path):
            raise SpecError(
                f"phases.{second}.algorithm.critic.path: {other!r} is another critic than {path!r} of "
                f"phases.{phase}; a run has one critic, so give all phases the same path"
            )
    if isinstance(finetune, LoraPlan):
        if path:
            raise SpecError(
                f"phases.{phase}.algorithm.critic.path: with finetune = 'lora' the critic stands on the same frozen model "
                f"as the actor; remove the path, or train in full"
            )
        return LoraCritic(finetune=finetune)
    if not path:
        return FullCritic(model=model, source=None)
    with at(f"phases.{phase}.algorithm.critic.path"):
        return _from_folder(path, spec, model)


def _place(path: str) -> str:
    """The folder that a path leads to, however it is written; what can be no path is refused where it is opened."""
    return os.path.realpath(path) if path and "\0" not in path else path


def _from_folder(path: str, spec: RunSpec, model: ModelPlan) -> FullCritic:
    dtype = spec.model.dtype if isinstance(spec.model, HFModel) else "source"
    source = open_valued(path, dtype)
    if source.policy.vocab_size < model.token_policy.vocab_size:
        raise ModelError(
            f"{path} embeds {source.policy.vocab_size} tokens, but the actor {model.token_policy.vocab_size}; "
            f"a critic reads the actor's tokens"
        )
    return FullCritic(model=model, source=source)
