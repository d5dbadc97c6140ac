"""Numbers, durations and completions as short text, the same in every display."""

from __future__ import annotations

from collections.abc import Mapping

from areno_fn.world.samples import Sample

_FIGURES = (
    ("loss", "train/loss", ".4f"),
    ("reward", "rollout/reward_mean", ".3f"),
    ("accuracy", "dpo/accuracy", ".3f"),
    ("kl", "train/kl", ".5f"),
    ("entropy", "train/entropy", ".3f"),
    ("length", "rollout/response_len_mean", ".1f"),
    ("grad_norm", "train/grad_norm", ".3f"),
    ("lr", "train/lr", ".2e"),
)


def figures(metrics: Mapping[str, float]) -> dict[str, str]:
    """The metrics that are shown, under short names, in a fixed order."""
    found = {short: _shown(metrics[name], spec) for short, name, spec in _FIGURES if name in metrics}
    speeds = {"pictures_per_s": metrics.get("flow/pictures_per_s")}
    if speeds["pictures_per_s"] is None:
        speeds = {"tokens_per_s": _tokens_per_second(metrics)}
    return found | {name: format(speed, ".0f") for name, speed in speeds.items() if speed is not None}


def evaluation_figures(metrics: Mapping[str, float]) -> dict[str, str]:
    """Evaluation results without their prefix; the total is left out where it says nothing new."""
    shown: dict[str, str] = {}
    for family, before in (("eval/", ""), ("eval_ema/", "ema ")):
        found = {name.removeprefix(family): value for name, value in metrics.items() if name.startswith(family)}
        judged = {name: value for name, value in found.items() if name != "diversity"}
        if len(judged) == 2 and len(set(judged.values())) == 1:
            found.pop("score", None)
        shown |= {before + name: format(value, ".4f") for name, value in found.items()}
    return shown


def duration(seconds: float) -> str:
    """`8s`, `3m20s`, `2h05m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


def sample_line(sample: Sample) -> str:
    """One completion on one line; the end of a long prompt and the start of a long completion stay."""
    prompt = sample.prompt if len(sample.prompt) <= 60 else "…" + sample.prompt[-59:]
    completion = sample.completion if len(sample.completion) <= 160 else sample.completion[:159] + "…"
    expected = "" if sample.answer is None else f" (answer {sample.answer!r})"
    return f"reward={sample.reward:.3f} {prompt!r} -> {completion!r}{expected}"


def _shown(value: float, spec: str) -> str:
    """A number as `spec` formats it, or by its first digits where that would make a 0 of it."""
    text = format(value, spec)
    return text if value == 0 or text.strip("-0.") else format(value, ".1e")


def _tokens_per_second(metrics: Mapping[str, float]) -> float | None:
    if "rollout/tokens_per_s" in metrics:
        return metrics["rollout/tokens_per_s"]
    tokens, seconds = metrics.get("train/tokens"), metrics.get("time/step")
    return tokens / seconds if tokens is not None and seconds else None
