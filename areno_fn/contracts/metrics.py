"""The one table of metric names.

Means over tokens are over response tokens alone, by their weight, and are exact over micro-batches and ranks. Where a step
makes several updates, a count is their sum, a name that ends in `_max` their maximum, and any other their mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

METRICS: Mapping[str, str] = MappingProxyType(
    {
        "rollout/reward_mean": "mean reward of the samples: completions or pictures",
        "rollout/reward_std": "population standard deviation of the rewards",
        "rollout/reward_min": "smallest reward",
        "rollout/reward_max": "largest reward",
        "rollout/advantage_mean": "mean advantage of the samples, for ppo of their tokens",
        "rollout/advantage_std": "population standard deviation of these",
        "rollout/response_len_mean": "mean tokens drawn per completion",
        "rollout/prompt_len_mean": "mean tokens per prompt",
        "rollout/truncated_fraction": "fraction of completions cut off by the length limit",
        "rollout/zero_std_groups": "fraction of the groups of several samples whose rewards are all equal, and compare to nothing",
        "rollout/kl": "mean KL estimate of a completion against the reference, summed over its tokens, where it is in the reward",
        "rollout/kl_coef": "coefficient of that KL",
        "rollout/tokens_per_s": "tokens drawn per second",
        "train/loss": "total / weight over all micro-batches and ranks, the quantity that is minimised",
        "train/policy_loss": "the loss without its KL term, under the same aggregation",
        "train/kl": "mean KL estimate per token against the reference, before its coefficient",
        "train/entropy": "mean entropy per token of the distribution the tokens were scored under, or of a denoising step",
        "train/ratio_mean": "mean of exp(logp - old), for gspo over completions",
        "train/ratio_std": "population standard deviation of it",
        "train/ratio_max": "largest exp(logp - old)",
        "train/clip_fraction": "fraction of tokens, completions (gspo) or denoising steps whose gradient a bound removes",
        "train/clip_fraction_low": "fraction of them whose gradient the lower bound removes",
        "train/importance_mean": "mean of exp(logp in training - that of the rollout); without a cap, updates move it too",
        "train/importance_max": "largest exp(logp in training - that of the rollout)",
        "train/logp_diff_mean": "mean of |logp - what the rollout recorded|, the distance of training from the rollout",
        "train/logp_diff_max": "largest |logp - what the rollout recorded|",
        "train/grad_norm": "global norm of the gradient before clipping",
        "train/lr": "learning rate",
        "train/tokens": "response tokens trained on, in all updates",
        "dpo/accuracy": "fraction of pairs whose chosen reward is the larger",
        "dpo/margin": "mean of chosen minus rejected reward",
        "dpo/chosen_reward": "mean implicit reward of the chosen answers",
        "dpo/rejected_reward": "mean implicit reward of the rejected answers",
        "critic/loss": "value loss, total / weight over all micro-batches and ranks",
        "critic/grad_norm": "global norm of the critic's gradient before clipping",
        "critic/lr": "the critic's learning rate",
        "critic/tokens": "response tokens that the critic was trained on, in all updates",
        "critic/clip_fraction": "fraction of tokens at which the clipped value error is the larger",
        "critic/explained_variance": "1 - variance of (return - value) / variance of the return, over a rollout",
        "flow/pictures_per_s": "pictures drawn per second",
        "flow/steps": "denoising steps trained on, in all updates",
        "flow/error": "mean squared velocity error per element against noise minus data",
        "flow/kl": "mean squared distance per element from the reference or the teacher, in the space the loss measures it",
        "flow/kept_fraction": "fraction of terms that a trust region leaves a gradient",
        "flow/group_weight": "mean weight of the groups' preferences, 1/2 at the reference",
        "flow/reward": "mean implicit reward against the policy that sampled",
        "flow/gap": "mean squared distance per element between the clean latents that teacher and follower see",
        "fake/loss": "loss of the fake, total / weight over all micro-batches, mean over its updates of an iteration",
        "fake/error": "mean squared velocity error per element of the fake on what the generator makes",
        "fake/grad_norm": "global norm of the fake's gradient before clipping",
        "fake/lr": "the fake's learning rate",
        "surrogate/loss": "preference loss of the surrogate, total / weight over all micro-batches",
        "surrogate/error": "mean squared velocity error per element of the surrogate on the states of the rollout",
        "surrogate/kl": "mean squared distance per element between the velocities of surrogate and teacher",
        "surrogate/group_weight": "mean weight of the groups' preferences, 1/2 at the teacher",
        "surrogate/kept_fraction": "fraction of the rows that its trust region leaves a gradient",
        "surrogate/grad_norm": "global norm of the surrogate's gradient before clipping",
        "surrogate/lr": "the surrogate's learning rate",
        "time/rollout": "seconds spent drawing samples",
        "time/reward": "seconds spent judging them",
        "time/score": "seconds spent on log-probabilities and values of what frozen and current parameters say, before the updates",
        "time/train": "seconds spent on updates",
        "time/checkpoint": "seconds that saving held up the training between the step before and this one",
        "time/step": "seconds of the whole step",
        "time/evaluation": "seconds of an evaluation, and of that of an average; 0 where it is that of the phase before",
    }
)
"""What every metric of the library means. A stage of a user's own may report other names."""

NAMED_METRICS: Mapping[str, str] = MappingProxyType(
    {
        "reward/": "mean of one training reward over the samples that it judged, under the reward's name",
        "eval/": "mean of one evaluation reward over the held-out rows it judged; eval/score is the weighted sum, over all rows, "
        "and eval/diversity, of pictures, the root mean square difference of two of one class",
        "eval_ema/": "the same of the average that a phase with `ema` keeps of the actor",
    }
)
"""What the metrics mean whose names a specification chooses, by the family in front of the name."""


def meaning(name: str) -> str | None:
    """What a metric means, or None when it is not one of the library's."""
    families = [family for family in NAMED_METRICS if name.startswith(family)]
    return NAMED_METRICS[families[0]] if families else METRICS.get(name)
