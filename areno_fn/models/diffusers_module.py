"""A module of diffusers as a function of a parameter tree, whose leaves have the names of the file."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import Any

from areno_fn.contracts.errors import ModelError
from areno_fn.models.module_function import ModuleFunction


def diffusers_module(
    class_name: str, config: Mapping[str, Any], *, compiled: bool = False, unread: Collection[str] = ()
) -> ModuleFunction:
    """The forward of a module.

    Args:
        class_name: its class in diffusers.
        config: its config.json.
        compiled: whether its blocks are compiled.
        unread: fields that published files have and the class does not.

    Raises:
        ModelError: diffusers is not installed, has no such class, or does not take the configuration.
    """
    kind = diffusers_class(class_name)
    given = {name: value for name, value in config.items() if not name.startswith("_") and name not in unread}
    try:
        return ModuleFunction(lambda: kind(**given), compiled=compiled)
    except (TypeError, ValueError) as error:
        raise ModelError(f"diffusers makes no {class_name} of this configuration: {error}") from error


def diffusers_class(name: str) -> Any:
    """A class of diffusers by its name.

    Raises:
        ModelError: diffusers is not installed, or has no such class.
    """
    try:
        library = importlib.import_module("diffusers")
    except ModuleNotFoundError as error:
        raise ModelError(
            f"{name} is a module of diffusers, which is not installed; pip install 'areno-fn[flow]'"
        ) from error
    kind = getattr(library, name, None)
    if kind is None:
        raise ModelError(f"this version of diffusers has no {name}; pip install 'areno-fn[flow]' for one that has")
    return kind
