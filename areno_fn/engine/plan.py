"""From a specification to a plan: every refusal that can come before a weight is read comes from here.

Order: types, composition, device, model configuration and checkpoint headers, tokenizer, data, rewards.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from areno_fn.ckpt import hf
from areno_fn.contracts.calls import received
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.flow_adapter import EVEN
from areno_fn.contracts.identity import RunIdentity
from areno_fn.contracts.key import Key
from areno_fn.contracts.roles import RoleLayout
from areno_fn.contracts.spec import ByteTokenizer, Evaluation, HFModel, HFTokenizer, Lora, RunSpec
from areno_fn.engine.cast import Cast, plan_cast
from areno_fn.engine.composition import check_composition
from areno_fn.engine.conditions import ConditionCache
from areno_fn.engine.consistency import consistent
from areno_fn.engine.critic import CriticPlan, plan_critic, require_same_tokens
from areno_fn.engine.derived import Derived
from areno_fn.engine.evaluate import TOTAL, EvaluationPlan
from areno_fn.engine.finetune import FinetunePlan, plan_finetune
from areno_fn.engine.flow_medium import DIVERSITY
from areno_fn.engine.identity import identity_of
from areno_fn.engine.media import check_medium
from areno_fn.engine.medium import Medium
from areno_fn.engine.model import ModelPlan, plan_model
from areno_fn.engine.number_rules import vocabulary_problems
from areno_fn.engine.optimizers import Mover, Trained, trained
from areno_fn.engine.own_losses import advantage_problems, loss_problems
from areno_fn.engine.phases import PhasePlan, plan_phase
from areno_fn.engine.picture_medium import Pictures
from areno_fn.engine.pipeline_rules import check_pipeline, check_steps
from areno_fn.engine.place import at
from areno_fn.engine.prompted_medium import PromptedPictures
from areno_fn.engine.rewards import Loaded, load_all
from areno_fn.engine.specfile import check
from areno_fn.engine.text_medium import Text
from areno_fn.engine.uncollected import uncollected
from areno_fn.models import Family, adapters
from areno_fn.models.flow_families import FlowFamily
from areno_fn.steps.advantages import Compare
from areno_fn.steps.recipes import CRITIC, Losses
from areno_fn.steps.recipes.flow_drawing import drawing
from areno_fn.steps.token.rollout import sampler
from areno_fn.world import tokenizer as tokenizers
from areno_fn.world.data import read_all
from areno_fn.world.rewards import Reward
from areno_fn.world.tokenizer import Tokenizer
from areno_fn.world.tokenizer_bytes import ByteTokenizer as ByteTokens

_PROBE = "12 + 34 = é"


@attrs.frozen(kw_only=True)
class Plan:
    """A run that can start: whatever could be refused without weights has been looked at.

    Attributes:
        spec: what was asked for.
        device: where parameters live.
        model: family, configuration, layout, and the folder the weights come from.
        finetune: which of its parameters are trained, and how the policy sees them.
        critic: the role that estimates values; None where no phase has one.
        cast: the roles that learn from the actor, and its teacher.
        trained: the trained parameters of each role, as optimizers see them.
        medium: how rows become batches, and how samples are drawn, judged and shown.
        tokenizer: text to tokens and back; None of a model without tokens.
        phases: in order.
        evaluation: None when the run has none.
        merged: holds merged weights to draw with; None where the policy draws with what it trains.
        roles: who owns which parameters.
        identity: what a checkpoint must have in common with this run to continue it.
        own: which arguments of `plan` replaced parts of the algorithms, which no specification tells.
    """

    spec: RunSpec
    device: torch.device
    model: ModelPlan
    finetune: FinetunePlan
    critic: CriticPlan | None
    cast: Cast
    trained: Trained
    medium: Medium
    tokenizer: Tokenizer | None
    phases: tuple[PhasePlan, ...]
    evaluation: EvaluationPlan | None
    roles: RoleLayout
    identity: RunIdentity
    merged: Derived[Any] | None = None
    own: tuple[str, ...] = ()

    def drawn_with(self, params: Mapping[str, Any]) -> Any:
        """What the policy takes to draw completions."""
        return self.finetune.view(params) if self.merged is None else self.merged.of(params)

    @property
    def rewards(self) -> tuple[Reward, ...]:
        """Those of all phases, then those of the evaluation."""
        own = tuple(reward for phase in self.phases for reward in phase.rewards)
        return own if self.evaluation is None else own + self.evaluation.rewards

    def shapes(self) -> dict[str, Any]:
        """The parameters of each role as meta tensors."""
        critic = {} if self.critic is None else {CRITIC: self.critic.shapes()}
        return self.finetune.shapes() | critic | self.cast.shapes()

    def load(self, key: Key, progress: hf.Progress | None = None) -> dict[str, Any]:
        """The parameters of each role: read, or drawn with the run's key."""
        params = self.finetune.load(key, self.device, progress)
        return params | self.beside(params, progress)

    def beside(self, params: Mapping[str, Any], progress: hf.Progress | None = None) -> dict[str, Any]:
        """The parameters that the roles beside the actor and its base begin with."""
        critic = {} if self.critic is None else {CRITIC: self.critic.load(params, self.device)}
        return critic | self.cast.load(params, self.device, progress)


@uncollected()
def plan(
    spec: RunSpec,
    losses: Mapping[str, Losses] | None = None,
    optimizers: Mapping[str, Mover | Mapping[str, Mover]] | None = None,
    advantages: Mapping[str, Compare] | None = None,
) -> Plan:
    """Makes a plan, or refuses in one sentence per problem.

    Args:
        spec: what to do.
        losses: by phase name, a stage that takes the place of the algorithm's own loss: `Actions -> Sums` in a GRPO, GSPO or
            PPO phase, `Comparisons -> Sums` in a DPO phase, `Scores -> Sums` in an SFT phase, `Moves -> Sums` where recorded steps
            of a flow model are trained on, `Matched -> Sums` for a generator of few steps, `Velocities -> Sums` in its other
            phases; or such by role, `Estimates -> Sums` for the critic, `Velocities -> Sums` for a fake or a surrogate.
        optimizers: by phase name, a `Transform` or a pair `(init, update)` that takes the place of all that the phase's
            `optimizers` say, or such by role; its updates are added to the parameters.
        advantages: by phase name, a function `(rewards [B], groups int64 [B]) -> [B]` in the place of `group_advantages`, where
            samples of a prompt are compared: in a GRPO or GSPO phase, and in their kin of flow models. A KL in the reward is taken
            off before it, and `max_advantage` clips what it says.

    Raises:
        ArenoError: the specification cannot be carried out; nothing has been changed.
    """
    spec, losses, optimizers, advantages = check(spec), losses or {}, optimizers or {}, advantages or {}
    check_composition(spec)
    _check_phases(spec, "losses", losses)
    _check_phases(spec, "optimizers", optimizers)
    _check_phases(spec, "advantages", advantages)
    if unread := [*loss_problems(spec, losses), *advantage_problems(spec, advantages)]:
        raise SpecError("\n".join(unread))
    device = _device(spec)
    with at("model"):
        model = plan_model(spec)
    _check_medium(spec, model)
    if model.pipeline is not None:
        check_pipeline(spec, model.pipeline.contract)
        check_steps(spec, model.adapter.levels)
    model = consistent(spec, model, device)
    finetune = plan_finetune(spec, model)
    critic, cast = plan_critic(spec, model, finetune), plan_cast(spec, model, finetune)
    moved = trained(finetune, critic, cast)
    stop: tuple[int, ...] = ()
    tokenizer: Tokenizer | None = None
    medium: Medium
    if not isinstance(model.family, Family):
        medium = _pictures(model, device)
        loaded = Loaded(device=device)
    else:
        tokenizer = _tokenizer(spec, model)
        require_same_tokens(critic, tokenizer)
        if problems := [*vocabulary_problems(spec, model.token_policy.vocab_size)]:
            raise SpecError("\n".join(problems))
        stop = tuple(token for token in tokenizer.eos_ids if token < model.token_policy.vocab_size)
        loaded = Loaded(device=device, tokenizer=tokenizer, vocab_size=model.token_policy.vocab_size)
        medium = Text(
            tokenizer=tokenizer, rollout=sampler(model.token_policy, stop), positions=model.token_policy.max_positions
        )
    merged = _merged(spec, finetune)
    phases = tuple(
        plan_phase(
            phase,
            model.policy,
            medium,
            stop,
            moved,
            losses.get(phase.name),
            finetune.view,
            loaded,
            optimizers.get(phase.name),
            critic,
            cast,
            device,
            None if merged is None else merged.of,
            EVEN if model.pipeline is None else model.adapter.levels,
            advantages.get(phase.name),
        )
        for phase in spec.phases
    )
    evaluation = None if spec.evaluation is None else _evaluation(spec.evaluation, medium, loaded)
    ending = evaluation.rewards if evaluation is not None and any(phase.stop_at for phase in spec.phases) else ()
    return Plan(
        spec=spec,
        device=device,
        model=model,
        finetune=finetune,
        critic=critic,
        cast=cast,
        trained=moved,
        medium=medium,
        tokenizer=tokenizer,
        phases=phases,
        evaluation=evaluation,
        roles=RoleLayout(roles=(*finetune.roles.roles, *([critic.role] if critic else []), *cast.roles)),
        identity=identity_of(spec, model, phases, losses, stop, optimizers, critic, ending, cast, advantages),
        own=tuple(
            name
            for name, given in (("losses", losses), ("optimizers", optimizers), ("advantages", advantages))
            if given
        ),
        merged=merged,
    )


def _check_medium(spec: RunSpec, model: ModelPlan) -> None:
    outputs = () if model.pipeline is None else model.pipeline.contract.outputs
    videos = any(output.type == "video" for output in outputs)
    check_medium(spec, model.family.name, model.medium, prompted=model.pipeline is not None, videos=videos)


def _pictures(model: ModelPlan, device: torch.device) -> Medium:
    policy = model.flow_policy
    if isinstance(model.family, FlowFamily):
        draw, classes = drawing(policy, EVEN), model.family.classes(model.config)
        return Pictures(drawing=draw, shape=policy.latent_shape, classes=classes)
    assert model.pipeline is not None, "its family is that of a pipeline"
    with at("model"):
        model.pipeline.require_parts()
    adapter, parts = model.adapter, model.pipeline.parts(device)
    return PromptedPictures(
        drawing=drawing(adapter, adapter.levels),
        adapter=adapter,
        parts=parts,
        conditions=ConditionCache(adapter, parts),
        device=device,
    )


def _merged(spec: RunSpec, finetune: FinetunePlan) -> Derived[Any] | None:
    if not isinstance(spec.finetune, Lora) or not spec.finetune.merge_rollouts:
        return None
    return Derived(lambda params: adapters.merge(finetune.view(params)))


def _check_phases(spec: RunSpec, what: str, given: Mapping[str, Any]) -> None:
    names = [phase.name for phase in spec.phases]
    if not isinstance(given, Mapping):
        raise SpecError(f"{what} come by phase, {what}={{{names[0]!r}: ...}}, received {received(given)}")
    for name in given:
        if name not in names:
            raise SpecError(f"{what}: there is no phase {name!r}; the phases are {', '.join(names)}")
        if given[name] is None:
            raise SpecError(f"{what}: what replaces those of the phase {name} is None; leave the phase out")


def _device(spec: RunSpec) -> torch.device:
    if spec.device == "cuda" and not torch.cuda.is_available():
        raise SpecError("device: 'cuda' was asked for, but torch sees no CUDA device; use 'cpu' or 'auto'")
    name = ("cuda" if torch.cuda.is_available() else "cpu") if spec.device == "auto" else spec.device
    return torch.device(name)


def _tokenizer(spec: RunSpec, model: ModelPlan) -> Tokenizer:
    named = spec.tokenizer or (
        HFTokenizer(path=spec.model.path) if isinstance(spec.model, HFModel) else ByteTokenizer()
    )
    with at("tokenizer"):
        tokenizer = tokenizers.load(named, extra_eos=model.declared_eos)
        if isinstance(spec.tokenizer, ByteTokenizer) and isinstance(spec.model, HFModel):
            _require_bytes(spec.model.path)
    if tokenizer.vocab_size > model.token_policy.vocab_size:
        raise SpecError(
            f"tokenizer: it has {tokenizer.vocab_size} tokens, but the model embeds {model.token_policy.vocab_size}; "
            f"use the model's own tokenizer, or a larger vocab_size"
        )
    if not tokenizer.eos_ids:
        raise SpecError(
            "tokenizer: neither it nor the model's configuration names an end token, so no completion could end"
        )
    return tokenizer


def _require_bytes(folder: str) -> None:
    """A model that has a tokenizer was made for it; bytes would train another language, and take its place at the end."""
    if not any((Path(folder) / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return
    own = tokenizers.load(HFTokenizer(path=folder))
    if own.encode(_PROBE) != ByteTokens().encode(_PROBE):
        raise SpecError(
            f"kind 'byte' would take the place of the tokenizer in {folder}; leave `tokenizer` out to use that one"
        )


def _evaluation(spec: Evaluation, medium: Medium, loaded: Loaded) -> EvaluationPlan:
    sampling = spec.sampling if isinstance(medium, Text) else spec.denoising
    if isinstance(medium, Text) and medium.positions <= spec.sampling.max_tokens:
        raise SpecError(
            f"evaluation.sampling.max_tokens: {spec.sampling.max_tokens} leaves no room for a prompt in the model's "
            f"context of {medium.positions} positions"
        )
    with at("evaluation.rewards"):
        rewards = load_all(spec.rewards, loaded)
    if len(rewards) > 1 and TOTAL in {reward.name for reward in rewards}:
        raise SpecError(
            f"evaluation.rewards: {TOTAL!r} is what the sum of several rewards is called; give that reward another `name`"
        )
    if not isinstance(medium, Text) and DIVERSITY in {reward.name for reward in rewards}:
        raise SpecError(
            f"evaluation.rewards: {DIVERSITY!r} is what the distance of pictures is called; give that reward another `name`"
        )
    with at("evaluation.data"):
        rows = read_all(spec.data)
        rows = rows[: spec.limit] if spec.limit else rows
        prompts = medium.encode_prompts(rows, sampling)
    with at("evaluation.rewards"):
        medium.require_judged(rewards, rows, prompts, sampling)
    return EvaluationPlan(
        rows=rows,
        prompts=prompts,
        rewards=rewards,
        sampling=sampling,
        every=spec.every,
        batch=spec.batch,
    )
