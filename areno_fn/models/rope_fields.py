"""The rotary part of a Hugging Face configuration, old and new, read into `Rope` and written back."""

from __future__ import annotations

import attrs

from areno_fn.models.fields import Fields
from areno_fn.models.rope import TYPES, Rope


def rope_from_hf(fields: Fields, max_positions: int) -> Rope:
    """Reads `rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` (older) from a configuration.

    Raises:
        ModelError: a type that is not supported, an unknown or missing field, or two places that disagree.
    """
    outer = fields.number("rope_theta", default=None, above=1)
    new, old = fields.table("rope_parameters"), fields.table("rope_scaling")
    if new and old and new != old:
        raise fields.error("rope_parameters and rope_scaling are both given and differ; keep one of them")
    inner = Fields(new or old or {}, f"{fields.where}, {'rope_parameters' if new else 'rope_scaling'}")
    rope = _read_type(inner, max_positions)
    theta = inner.number("rope_theta", default=None, above=1)
    if outer is not None and theta is not None and outer != theta:
        raise fields.error(f"rope_theta is {outer} here and {theta} in {inner.where}; keep one of them")
    inner.expect("partial_rotary_factor", 1, 1.0)
    inner.finish()
    given = outer if theta is None else theta
    return rope if given is None else attrs.evolve(rope, theta=given)


def _read_type(fields: Fields, max_positions: int) -> Rope:
    older, kind = fields.text("type", default=None), fields.text("rope_type", default=None)
    if older and kind and older != kind:
        raise fields.error(f"type is {older!r} and rope_type is {kind!r}; keep one of them")
    kind = kind or older or "default"
    if kind not in TYPES:
        raise fields.error(f"rope_type {kind!r} is not supported; the supported ones are {', '.join(TYPES)}")
    if kind == "default":
        return Rope()
    factor = fields.number("factor", above=0)
    if kind == "linear":
        return Rope(type=kind, factor=factor)
    original = fields.integer("original_max_position_embeddings", default=max_positions)
    if kind == "yarn":
        return _read_yarn(fields, factor, original)
    low, high = fields.number("low_freq_factor", above=0), fields.number("high_freq_factor", above=0)
    if high <= low:
        raise fields.error(f"high_freq_factor is {high}, but it must be above low_freq_factor, which is {low}")
    return Rope(type=kind, factor=factor, original_positions=original, low_freq_factor=low, high_freq_factor=high)


def _read_yarn(fields: Fields, factor: float, original: int) -> Rope:
    fast = fields.number("beta_fast", default=None, above=0)
    slow = fields.number("beta_slow", default=None, above=0)
    return Rope(
        type="yarn",
        factor=factor,
        original_positions=original,
        beta_fast=32.0 if fast is None else fast,
        beta_slow=1.0 if slow is None else slow,
        attention_factor=fields.number("attention_factor", default=None, above=0),
        mscale=fields.number("mscale", default=None),
        mscale_all_dim=fields.number("mscale_all_dim", default=None),
        truncate=fields.boolean("truncate", default=True),
    )


def rope_to_hf(rope: Rope) -> dict[str, object]:
    """The `rope_parameters` of a transformers 5 configuration that `rope_from_hf` reads back as `rope`."""
    written: dict[str, object] = {"rope_type": rope.type, "rope_theta": rope.theta}
    if rope.type == "default":
        return written
    written["factor"] = rope.factor
    if rope.type == "linear":
        return written
    written["original_max_position_embeddings"] = rope.original_positions
    if rope.type == "llama3":
        return written | {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    optional = {"attention_factor": rope.attention_factor, "mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    written |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    return written | {name: value for name, value in optional.items() if value is not None}
