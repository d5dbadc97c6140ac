"""TRL's own losses and estimates without its trainers: methods run on stand-ins that hold just what they read.

Nothing of them is written again here. A stand-in answers for one process on the CPU; what a trainer would have made
(log-probabilities, completions, rewards, values) is given.
"""

from __future__ import annotations

import importlib
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
PAD, EOS = 0, 1


class OneProcess(SimpleNamespace):
    """What `accelerate.Accelerator` does where there is one process: nothing."""

    device = torch.device("cpu")
    num_processes = 1
    process_index = 0
    sync_gradients = True

    def __init__(self) -> None:
        super().__init__(losses=[])

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    gather_for_metrics = gather

    def reduce(self, x: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        return x

    def unwrap_model(self, model: Any) -> Any:
        return model

    def accumulate(self, model: Any) -> Any:
        del model
        return nullcontext()

    def print(self, *words: object) -> None:
        del words

    def backward(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.item())
        loss.backward()


def _stand_in(**fields: Any) -> SimpleNamespace:
    metrics = {"train": defaultdict(list)}
    common = {"model": SimpleNamespace(training=True), "accelerator": OneProcess(), "_metrics": metrics}
    return SimpleNamespace(**common, **fields)


def _reported(trainer: SimpleNamespace) -> dict[str, float]:
    return {name: values[-1] for name, values in trainer._metrics["train"].items()}


def preference_loss(
    logits: torch.Tensor,
    reference: torch.Tensor,
    tokens: torch.Tensor,
    answer: torch.Tensor,
    *,
    loss: str,
    beta: float,
    smoothing: float = 0.0,
) -> tuple[torch.Tensor, dict[str, float]]:
    """`DPOTrainer._compute_loss` on logits [2P, L, V]: the chosen documents of P pairs, then the rejected ones."""
    from trl import DPOTrainer

    trainer = _stand_in(
        beta=beta,
        loss_types=[loss],
        loss_weights=[1.0],
        label_smoothing=smoothing,
        f_divergence_type="reverse_kl",
        aux_loss_enabled=False,
        use_weighting=False,
        ld_alpha=None,
        precompute_ref_logps=False,
        ref_model=lambda **_: SimpleNamespace(logits=reference),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "completion_mask": answer}
    module = importlib.import_module("trl.trainer.dpo_trainer")
    plain = {"disable_gradient_checkpointing": lambda *_: nullcontext(), "is_peft_model": lambda _: False}
    with mock.patch.multiple(module, **plain):
        value = DPOTrainer._compute_loss(trainer, lambda **_: SimpleNamespace(logits=logits), inputs, False)
    return value, _reported(trainer)


def surrogate_loss(
    logp: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    loss: str,
    level: str = "token",
    low: float = 0.2,
    high: float = 0.2,
    delta: float | None = None,
    beta: float = 0.0,
    reference: torch.Tensor | None = None,
    length: int = 0,
    importance: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    entropy_coef: float = 0.0,
) -> tuple[torch.Tensor, dict[str, float]]:
    """`GRPOTrainer._compute_loss` on log-probabilities [B, T], and entropies, with a mask of ones and zeros."""
    from trl import GRPOTrainer

    entropies = torch.zeros_like(logp.detach()) if entropy is None else entropy

    trainer = _stand_in(
        loss_type=loss,
        importance_sampling_level=level,
        epsilon_low=low,
        epsilon_high=high,
        beta=beta,
        max_completion_length=length,
        current_gradient_accumulation_steps=1,
        args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=importance is not None,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=entropy is not None,
        use_adaptive_entropy=False,
        entropy_coef=entropy_coef,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, entropies, None),
    )
    inputs = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": importance,
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs), _reported(trainer)


def drawn_logp(
    model: Any, tokens: torch.Tensor, seen: torch.Tensor, *, length: int, temperature: float
) -> torch.Tensor:
    """`GRPOTrainer._get_per_token_logps_and_entropies` of a transformers model: of the last `length` tokens, [B, length]."""
    from trl import GRPOTrainer

    trainer = _stand_in(temperature=temperature, model_kwarg_keys={"logits_to_keep"}, _entropy_bonus_enabled=False)
    logp, _, _ = GRPOTrainer._get_per_token_logps_and_entropies.__wrapped__(trainer, model, tokens, seen, length)
    return logp


def leave_one_out_loss(
    logp: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """`RLOOTrainer._compute_loss` on log-probabilities [B, T]."""
    from trl import RLOOTrainer

    trainer = _stand_in(
        epsilon_low=0.2,
        epsilon_high=0.2,
        aux_loss_enabled=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp.detach()), None),
    )
    inputs = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": advantages,
        "old_logps": (old * mask).sum(1),
    }
    return RLOOTrainer._compute_loss(trainer, None, inputs)


def judged(
    algorithm: str,
    rewards: torch.Tensor,
    lengths: Sequence[int],
    *,
    samples: int,
    old: torch.Tensor,
    reference: torch.Tensor | None = None,
    drawn: torch.Tensor | None = None,
    beta: float = 0.0,
    **options: Any,
) -> Mapping[str, torch.Tensor]:
    """`_generate_and_score_completions` of the GRPO or RLOO trainer, from completions to advantages.

    Args:
        algorithm: "grpo" or "rloo".
        rewards: [B], rows of one prompt side by side.
        lengths: tokens of every completion.
        samples: completions a prompt.
        old: [B, T], what the model says of the completions; the reference says `reference`.
        drawn: [B, T], what was recorded while sampling, which switches the importance correction on.
        beta: weight of the KL.
        options: further fields of the stand-in.
    """
    module = importlib.import_module(f"trl.trainer.{algorithm}_trainer")
    trainer_class = {"grpo": "GRPOTrainer", "rloo": "RLOOTrainer"}[algorithm]
    completions = [[2] * length for length in lengths]
    said = iter([old, reference])
    recorded = None if drawn is None else [row[:n].tolist() for row, n in zip(drawn, lengths, strict=True)]
    generated: tuple[Any, ...] = ([[3]] * len(lengths), completions, completions)
    if algorithm == "grpo":
        generated = ([[3]] * len(lengths), completions, None, completions, recorded, {}, None, None)
    trainer = _stand_in(
        **{
            "_generate": lambda prompts: generated,
            "_get_per_token_logps_and_entropies": lambda *_, **__: (next(said), None, None),
            "_calculate_rewards": lambda *_: rewards[:, None],
            "_tokenizer": SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS),
            "processing_class": SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
            "args": SimpleNamespace(
                per_device_train_batch_size=99,
                gradient_checkpointing_kwargs=None,
                steps_per_generation=1,
                gradient_accumulation_steps=1,
            ),
            "ref_model": "the reference",
            "beta": beta,
            "num_generations": samples,
            "reward_weights": torch.ones(1, dtype=rewards.dtype),
            "reward_func_names": ["reward"],
            "reward_clip_range": None,
            "normalize_advantages": False,
            "mask_truncated_completions": False,
            "pad_to_multiple_of": None,
            "num_iterations": 1,
            "environment_factories": None,
            "environments": None,
            "tools": None,
            "multi_objective_aggregation": "sum_then_normalize",
            "use_vllm": drawn is not None,
            "vllm_importance_sampling_correction": drawn is not None,
            "vllm_importance_sampling_clip_min": None,
            "log_multimodal": False,
            "_pending_extra_logs": {},
            "_pending_metrics": {},
            "_logs": {name: [] for name in ("prompt", "completion", "advantages")} | {"rewards": defaultdict(list)},
            **options,
        }
    )
    with (
        mock.patch.object(module, "disable_gradient_checkpointing", lambda *_: nullcontext()),
        mock.patch.object(module, "gather_object", lambda x: x),
        mock.patch.object(module, "gather", lambda x: x, create=True),
    ):
        inputs = [{"prompt": "p"} for _ in lengths]
        output = getattr(module, trainer_class)._generate_and_score_completions(trainer, inputs)
    return {**output, "reported": _reported(trainer)}


class Actor(torch.nn.Module):
    """A policy and a critic that are a table of what they say of the responses."""

    def __init__(self, logits: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.logits, self.values = torch.nn.Parameter(logits.clone()), torch.nn.Parameter(values.clone())
        self.policy, self.value_model = "the policy", "the critic"


def ppo_update(
    actor: Actor,
    responses: torch.Tensor,
    *,
    drawn: torch.Tensor,
    reference: torch.Tensor,
    old_values: torch.Tensor,
    scores: torch.Tensor,
    **options: Any,
) -> dict[str, Any]:
    """One update by `PPOTrainer.train`, with all rows in one mini-batch.

    Args:
        actor: what is updated; its gradient is left in `.grad`.
        responses: int64 [B, T], `PAD` behind each response.
        drawn, reference: logits [B, T, V] that sampled, and those of the reference.
        old_values: [B, T].
        scores: [B], of the reward model.
        options: fields of the arguments: gamma, lam, kl_coef, kl_estimator, cliprange, cliprange_value, vf_coef.

    Returns:
        What TRL computed on the way: `loss`, `advantages` before whitening, `mask`, `whitened`, and its metrics.
    """
    ppo = importlib.import_module("trl.experimental.ppo.ppo_trainer")
    queries, rows = torch.full((len(responses), 2), 5), len(responses)
    everything, order = torch.cat([queries, responses], 1), []
    accelerator, found, genuine = OneProcess(), {}, ppo.masked_whiten

    def in_context(x: torch.Tensor) -> torch.Tensor:
        """What is said of [query, response]: position t - 1 speaks of token t."""
        before, behind = x.new_zeros(rows, 1, *x.shape[2:]), x.new_zeros(rows, 1, *x.shape[2:])
        return torch.cat([before, x, behind], 1)

    def forward(model: Any, tokens: torch.Tensor, pad: int) -> Any:
        if model == "the reference":
            return SimpleNamespace(logits=in_context(reference.clone()))
        order.append([everything.tolist().index(row) for row in tokens.tolist()])
        place = torch.tensor(order[-1])
        return SimpleNamespace(logits=in_context(model.logits)[place]), in_context(model.values)[place][..., None]

    def get_reward(model: Any, tokens: torch.Tensor, pad: int, context: int) -> tuple[Any, Any, Any]:
        return in_context(old_values)[..., None], scores.clone(), None

    def whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
        found.update(advantages=values, mask=mask, whitened=genuine(values, mask, shift_mean))
        return found["whitened"]

    arguments = {
        "response_length": responses.shape[1],
        "temperature": 1.0 - 1e-7,
        "num_ppo_epochs": 1,
        "num_mini_batches": 1,
        "gradient_accumulation_steps": 1,
        "num_total_batches": 1,
        "total_episodes": rows,
        "batch_size": rows,
        "local_batch_size": rows,
        "local_mini_batch_size": rows,
        "per_device_train_batch_size": rows,
        "local_rollout_forward_batch_size": rows,
        "logging_steps": None,
        "eval_steps": None,
        "save_steps": None,
        "ds3_gather_for_generation": False,
        "missing_eos_penalty": None,
        "whiten_rewards": False,
        "num_sample_generations": 0,
    }
    control = SimpleNamespace(should_save=False)
    handler = SimpleNamespace(**{f"on_{name}": lambda *_: control for name in ("train_begin", "step_end", "train_end")})
    trainer = SimpleNamespace(
        args=SimpleNamespace(**arguments, **options),
        accelerator=accelerator,
        optimizer=SimpleNamespace(step=lambda: None, zero_grad=lambda: None),
        lr_scheduler=SimpleNamespace(step=lambda: None, get_last_lr=lambda: [0.0]),
        model=actor,
        ref_model="the reference",
        reward_model="the judge",
        processing_class=SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS),
        dataloader=[{"input_ids": queries}],
        state=SimpleNamespace(),
        control=control,
        callback_handler=handler,
        train_dataset_len=rows,
        is_deepspeed_enabled=False,
        stop_token_id=None,
        log=found.update,
    )
    with mock.patch.multiple(
        ppo,
        unwrap_model_for_generation=lambda *_, **__: nullcontext(actor),
        batch_generation=lambda *_: (everything, drawn),
        forward=forward,
        get_reward=get_reward,
        masked_whiten=whiten,
        empty_cache=lambda: None,
    ):
        ppo.PPOTrainer.train(trainer)
    return {"loss": accelerator.losses[-1], **found}
