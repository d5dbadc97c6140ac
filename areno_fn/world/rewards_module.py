"""Where the module of a reward is found: in the current folder first, whatever else Python would look through."""

from __future__ import annotations

import importlib
import os
import sys
from importlib import machinery
from types import ModuleType

from areno_fn.contracts.errors import RewardError
from areno_fn.world.rewards_call import described, same_folder

_LOADERS = (
    (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
    (machinery.SourceFileLoader, machinery.SOURCE_SUFFIXES),
    (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
)


def import_reward(module_name: str, reward: str) -> ModuleType:
    """The module of a reward; the current folder stays the first that modules are looked for in.

    Raises:
        RewardError: it cannot be imported, or the current folder has a module of this name and Python has another.
    """
    here = os.getcwd()
    sys.path[:] = [here, *(folder for folder in sys.path if folder != here)]
    importlib.invalidate_caches()
    try:
        with same_folder():
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        raise RewardError(
            f"the reward {reward!r} does not import ({described(error)}); it is looked for in the current folder first, "
            f"then among installed packages"
        ) from error
    _require_own(module, module_name, reward, here)
    return module


def _require_own(module: ModuleType, module_name: str, reward: str, here: str) -> None:
    """What was imported before, or is part of Python, comes before every folder; the library itself is what runs."""
    if module_name.partition(".")[0] == __name__.partition(".")[0]:
        return
    own, given = _file_of(module_name, here), getattr(module, "__file__", None)
    if own is not None and (given is None or os.path.realpath(given) != os.path.realpath(own)):
        raise RewardError(
            f"the reward {reward!r} would be taken from {given or 'Python itself'}, which Python has under the name "
            f"{module_name!r} already, and not from {own}; give that file another name"
        )


def _file_of(module_name: str, folder: str) -> str | None:
    """The file in a folder, or in folders within it, that a module of this name would be read from."""
    name, places = "", [folder]
    origin = None
    for part in module_name.split("."):
        name = f"{name}.{part}".lstrip(".")
        specs = [machinery.FileFinder(place, *_LOADERS).find_spec(name) for place in places]
        found = next((spec for spec in specs if spec is not None), None)
        if found is None:
            return None
        origin, places = found.origin, list(found.submodule_search_locations or ())
    return origin
