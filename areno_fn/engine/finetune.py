"""What of a model is trained: all of it, or adapters beside it. Roles, their parameters, and what the policy sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from areno_fn import tree
from areno_fn.ckpt import hf
from areno_fn.ckpt.peft import AdapterConfig
from areno_fn.contracts.key import Key
from areno_fn.contracts.placement import Placement
from areno_fn.contracts.roles import Role, RoleLayout
from areno_fn.contracts.spec import HFModel, Lora, RunSpec
from areno_fn.engine.adapter_files import adapter_folder, load_adapter, plan_adapter
from areno_fn.engine.model import ModelPlan
from areno_fn.engine.place import at
from areno_fn.engine.weights import own_part
from areno_fn.models import adapters
from areno_fn.models.adapter_sites import Site, chosen, shortest_targets, sites_of
from areno_fn.steps.recipes import ACTOR, actor

BASE = "base"
"""The role of the frozen parameters beside adapters."""


@attrs.frozen(kw_only=True)
class FullPlan:
    """Every parameter is trained: the actor is the whole model, but for tables that are stored beside parameters."""

    model: ModelPlan

    @property
    def roles(self) -> RoleLayout:
        """The actor alone, or the actor and what is fixed."""
        if not self.model.fixed:
            return RoleLayout(roles=(Role(name=ACTOR),))
        return RoleLayout(roles=(Role(name=ACTOR, trunk=BASE), Role(name=BASE, trainable=False)))

    @property
    def placements(self) -> Mapping[str, Placement]:
        """How ranks share each leaf of the actor."""
        fixed = self.model.fixed
        return {path: how for path, how in self.model.placements.items() if path not in fixed}

    def describe(self) -> str:
        """What is trained, in words."""
        return f"all {count(self.shapes()[ACTOR]):,} parameters{of_transformers(self.model)}"

    def shapes(self) -> dict[str, Any]:
        """The parameters of each role as meta tensors."""
        return self._by_role(self.model.shapes())

    def load(self, key: Key, device: torch.device, progress: hf.Progress | None = None) -> dict[str, Any]:
        """The parameters of each role: read, or drawn with the run's key."""
        return self._by_role(self.model.load(key.fold("init"), device, progress))

    def view(self, params: Mapping[str, Any]) -> Any:
        """What the policy takes."""
        return {**params[BASE], **actor(params)} if BASE in params else actor(params)

    def merged(self, params: Mapping[str, Any], dtype: Callable[[str], torch.dtype]) -> Any:
        """The trained model as one parameter tree."""
        del dtype
        return self.view(params)

    def _by_role(self, params: Any) -> dict[str, Any]:
        fixed = self.model.fixed
        if not fixed:
            return {ACTOR: params}
        own = {path: leaf for path, leaf in params.items() if path not in fixed}
        return {ACTOR: own, BASE: {path: leaf for path, leaf in params.items() if path in fixed}}


@attrs.frozen(kw_only=True)
class LoraPlan:
    """Adapters are trained: they are the actor, and the model is the base, which no optimizer knows.

    Attributes:
        model: the model.
        sites: where it is adapted.
        configs: ranks and scales, as PEFT says them: of all modules, or of those of each transformer that is trained, by
            what the names of its modules begin with.
        folder: the PEFT folder that the run starts from, or that of the folders of several transformers; empty for new
            adapters.
    """

    model: ModelPlan
    sites: tuple[Site, ...]
    configs: Mapping[str, AdapterConfig]
    folder: str = ""

    @property
    def roles(self) -> RoleLayout:
        """The adapters as actor, and the base."""
        return RoleLayout(roles=(Role(name=ACTOR, trunk=BASE), Role(name=BASE, trainable=False)))

    @property
    def placements(self) -> Mapping[str, Placement]:
        """How ranks share each leaf of the actor: nothing is fused in an adapter."""
        return {}

    def describe(self) -> str:
        """What is trained, in words."""
        own, frozen = (count(params) for params in self.shapes().values())
        where = of_transformers(self.model)
        return f"adapters of {len(self.sites)} linear maps{where}, {own:,} parameters beside {frozen:,} that are frozen"

    def shapes(self) -> dict[str, Any]:
        """The parameters of each role as meta tensors."""
        return {ACTOR: self._adapters(), BASE: self.model.shapes()}

    def load(self, key: Key, device: torch.device, progress: hf.Progress | None = None) -> dict[str, Any]:
        """The parameters of each role: read, or drawn with the run's key."""
        base = self.model.load(key.fold("init"), device, progress)
        if self.folder:
            return {ACTOR: self._read(device), BASE: base}
        return {ACTOR: adapters.init(self._adapters(), key.fold("adapters"), device), BASE: base}

    def view(self, params: Mapping[str, Any]) -> Any:
        """What the policy takes: the base, adapted."""
        return adapters.adapt(params[BASE], params[ACTOR], self.sites)

    def merged(self, params: Mapping[str, Any], dtype: Callable[[str], torch.dtype]) -> Any:
        """The trained model as one parameter tree; adapted weights are rounded once, to the dtype of their path."""
        own = next(iter(params[ACTOR].values())).a.dtype
        return adapters.merge(adapters.adapt(params[BASE], params[ACTOR], self.sites, own), dtype)

    def _read(self, device: torch.device) -> adapters.Adapters:
        like = self._adapters()
        found: adapters.Adapters = {}
        for prefix in self.configs:
            own = own_part(like, prefix)
            read = load_adapter(adapter_folder(self.folder, prefix), own, device)
            found |= {prefix + module: part for module, part in read.items()}
        return found

    def _adapters(self) -> adapters.Adapters:
        made: adapters.Adapters = {}
        for prefix, config in self.configs.items():
            own = [attrs.evolve(site, module=site.module.removeprefix(prefix)) for site in self._of(prefix)]
            found = adapters.shapes(own, config.rank, config.scale)
            made |= {prefix + module: part for module, part in found.items()}
        return made

    def _of(self, prefix: str) -> list[Site]:
        return [site for site in self.sites if site.module.startswith(prefix)]


FinetunePlan = FullPlan | LoraPlan


def count(params: Any) -> int:
    """How many numbers a parameter tree holds."""
    return sum(leaf.numel() for leaf in tree.leaves(params))


def of_transformers(model: ModelPlan) -> str:
    """Of which of several transformers, in words; nothing where there is one."""
    if model.pipeline is None or len(model.pipeline.transformers) < 2:
        return ""
    return f" of {' and '.join(model.pipeline.trained)}"


def plan_finetune(spec: RunSpec, model: ModelPlan) -> FinetunePlan:
    """Which parameters a run trains.

    Raises:
        ModelError: a target names nothing that can be adapted.
        CheckpointError: the adapter to start from is damaged, or does not belong to the model.
    """
    if not isinstance(spec.finetune, Lora):
        return FullPlan(model=model)
    if spec.finetune.adapter:
        with at("finetune.adapter"):
            return _adapted_already(spec.finetune.adapter, model)
    with at("finetune.targets"):
        sites = chosen(model.adaptable, spec.finetune.targets)
    config = AdapterConfig(
        r=spec.finetune.rank,
        lora_alpha=spec.finetune.alpha,
        target_modules=tuple(spec.finetune.targets) or shortest_targets(sites, model.adaptable),
        use_rslora=spec.finetune.rslora,
        base_model_name_or_path=spec.model.path if isinstance(spec.model, HFModel) else None,
        task_type="CAUSAL_LM" if model.medium == "text" else None,
    )
    adapted = [prefix for prefix in _prefixes(model) if any(site.module.startswith(prefix) for site in sites)]
    configs = {prefix: _within(config, prefix) for prefix in adapted}
    return LoraPlan(model=model, sites=sites, configs=configs)


def _within(config: AdapterConfig, prefix: str) -> AdapterConfig:
    """The configuration with targets as they are called within one transformer."""
    return attrs.evolve(config, target_modules=tuple(name.removeprefix(prefix) for name in config.target_modules))


def _adapted_already(folder: str, model: ModelPlan) -> LoraPlan:
    """The adapters of a folder, or those of the folders in it of every transformer that is trained."""
    every = {site.module: site for site in sites_of(model.adaptable)}
    configs, sites = {}, list[Site]()
    for prefix in _prefixes(model):
        own = {module: attrs.evolve(site, module=module) for module, site in own_part(every, prefix).items()}
        configs[prefix], found = plan_adapter(adapter_folder(folder, prefix), own)
        sites += [every[prefix + site.module] for site in found]
    return LoraPlan(model=model, sites=tuple(sites), configs=configs, folder=folder)


def _prefixes(model: ModelPlan) -> tuple[str, ...]:
    """What the modules of each folder that is trained begin with; nothing where there is one."""
    return tuple(part.prefix for part in model.weights if part.trained) or ("",)
