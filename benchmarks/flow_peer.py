"""Flow-GRPO on SD3.5 as a user would write it: diffusers' transformer, PEFT's adapters, autograd, `torch.optim.AdamW`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import diffusers
import peft
import torch

SHAPES: dict[str, dict[str, Any]] = {
    "sd3.5-medium": {
        "num_layers": 24,
        "num_attention_heads": 24,
        "attention_head_dim": 64,
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 1536,
        "pooled_projection_dim": 2048,
        "sample_size": 128,
        "pos_embed_max_size": 384,
        "qk_norm": "rms_norm",
        "dual_attention_layers": tuple(range(13)),
    },
    "tiny": {
        "num_layers": 3,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "joint_attention_dim": 48,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 40,
        "sample_size": 8,
        "pos_embed_max_size": 64,
        "qk_norm": "rms_norm",
        "dual_attention_layers": (0, 1),
    },
}
TARGETS = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
)  # fmt: skip
"""What published runs of Flow-GRPO on SD3.5 adapt."""


@attrs.frozen(kw_only=True)
class Task:
    """What both sides do.

    Attributes:
        positive, negative: text [B, L, D] and pooled text [B, P], a row for each latent.
        sigmas: float32 [T + 1], falling to 0.
        level: eta of Flow-SDE in every step but the last.
        guidance: scale.
        micro: rows of a micro-batch of training.
        latent: shape of one latent.
    """

    positive: tuple[torch.Tensor, torch.Tensor]
    negative: tuple[torch.Tensor, torch.Tensor]
    sigmas: torch.Tensor
    level: float
    guidance: float
    micro: int
    latent: tuple[int, ...]

    @property
    def rows(self) -> int:
        """B."""
        return self.positive[0].shape[0]

    @property
    def steps(self) -> int:
        """T."""
        return self.sigmas.shape[0] - 1


class Plain:
    """One iteration of Flow-GRPO in eager mode: adapters in float32, everything else in the dtype of the model."""

    def __init__(self, config: Mapping[str, Any], rank: int, device: torch.device, dtype: torch.dtype) -> None:
        """Random weights; adapters as PEFT begins them."""
        with device:
            transformer = diffusers.SD3Transformer2DModel(**config).to(dtype).eval()
        transformer.requires_grad_(False)
        lora = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS))
        self.model = peft.get_peft_model(transformer, lora)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4)
        self.device, self.dtype = device, dtype

    def velocity(self, task: Task, rows: slice, state: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """The guided velocity."""
        text = torch.cat([task.negative[0][rows], task.positive[0][rows]])
        pooled = torch.cat([task.negative[1][rows], task.positive[1][rows]])
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            answer = self.model(
                hidden_states=torch.cat([state, state]).to(self.dtype),
                timestep=(1000 * sigma).expand(2 * state.shape[0]),
                encoder_hidden_states=text,
                pooled_projections=pooled,
                return_dict=False,
            )[0]
        away, towards = answer.float().chunk(2)
        return away + task.guidance * (towards - away)

    def sample(self, task: Task) -> list[torch.Tensor]:
        """The states of a rollout, noise in every step but the last."""
        states = [torch.randn(task.rows, *task.latent, device=self.device)]
        with torch.no_grad():
            for step in range(task.steps):
                velocity = self.velocity(task, slice(None), states[-1], task.sigmas[step])
                mean, std = _gaussian(task, states[-1], velocity, step)
                noise = torch.randn_like(mean) if step < task.steps - 1 else torch.zeros_like(mean)
                states.append(mean + std * noise)
        return states

    def train(self, task: Task, states: list[torch.Tensor], old: list[torch.Tensor], advantage: torch.Tensor) -> float:
        """One update on all noisy steps."""
        noisy, total = task.steps - 1, 0.0
        for step in range(noisy):
            for start in range(0, task.rows, task.micro):
                rows = slice(start, start + task.micro)
                velocity = self.velocity(task, rows, states[step][rows], task.sigmas[step])
                now = _log_prob(task, states[step][rows], states[step + 1][rows], velocity, step)
                ratio, a = torch.exp(now - old[step][rows]), advantage[rows]
                loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - 1e-4, 1 + 1e-4)).sum() / (noisy * task.rows)
                loss.backward()
                total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def recorded(self, task: Task, states: list[torch.Tensor]) -> list[torch.Tensor]:
        """Log-probabilities that a rollout would have recorded; so that only `train` is timed in `train`."""
        found = []
        with torch.no_grad():
            for step in range(task.steps - 1):
                velocity = self.velocity(task, slice(None), states[step], task.sigmas[step])
                found.append(_log_prob(task, states[step], states[step + 1], velocity, step))
        return found


def _gaussian(task: Task, state: torch.Tensor, velocity: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of Flow-SDE (arXiv 2505.05470)."""
    sigma, following = task.sigmas[step], task.sigmas[step + 1]
    dt = following - sigma
    if step == task.steps - 1:
        return state + velocity * dt, torch.zeros_like(sigma)
    ceiling = task.sigmas[1] if step == 0 else sigma
    g = task.level * torch.sqrt(sigma / (1 - ceiling))
    drift = velocity + g**2 / (2 * sigma) * (state + (1 - sigma) * velocity)
    return state + drift * dt, g * torch.sqrt(-dt)


def _log_prob(task: Task, state: torch.Tensor, taken: torch.Tensor, velocity: torch.Tensor, step: int) -> torch.Tensor:
    mean, std = _gaussian(task, state, velocity, step)
    each = -((taken - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
    return each.flatten(1).mean(1)
