"""What the configurations of diffusers' transformers have in common, read strictly."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from areno_fn.models.fields import Fields


def flow_fields(
    hf: Mapping[str, Any], class_name: str, *, nullable: Collection[str] = (), function: Collection[str] = ()
) -> Fields:
    """The fields of a transformer's config.json from which its tensors follow, ready to be taken.

    Args:
        hf: the contents of config.json.
        class_name: what `_class_name` has to be.
        nullable: fields in which null means something of its own; in any other it is refused, because diffusers
            would not read it as the default.
        function: fields that change what is computed, but not which tensors there are.

    Raises:
        ModelError: another class, a field that is null, or quantised weights.
    """
    fields = Fields(hf, f"{class_name} configuration")
    found = fields.text("_class_name")
    if found != class_name:
        raise fields.error(f"_class_name is {found!r}, it must be {class_name!r}")
    fields.expect("quantization_config")
    fields.skip(function)
    for name, value in hf.items():
        if value is None and not name.startswith("_") and name not in (*nullable, *function, "quantization_config"):
            raise fields.error(f"{name} is null, which says nothing; give a value or remove the field")
    return fields


def out_channels(fields: Fields, hf: Mapping[str, Any], in_channels: int, default: int | None) -> int:
    """`out_channels`: null means as many as go in, an absent field means `default`."""
    absent = in_channels if default is None or "out_channels" in hf else default
    channels: int = fields.integer("out_channels", default=absent)
    return channels
