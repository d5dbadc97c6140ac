"""A classification folder with one label, opened: a critic to start from, or a reward model."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from areno_fn.ckpt import hf
from areno_fn.contracts.layout import Iso
from areno_fn.contracts.policy import TokenPolicy
from areno_fn.contracts.valued import Valued
from areno_fn.engine.model import require_computable
from areno_fn.engine.place import at
from areno_fn.engine.weights import as_loaded
from areno_fn.models import Family, valued


@attrs.frozen(kw_only=True)
class ValuedFolder:
    """A folder whose headers have been checked; no weight has been read.

    Attributes:
        folder: what was opened.
        family, config: of the trunk.
        dtype: what floating parameters become in memory.
    """

    folder: hf.HFFolder
    family: Family
    config: Any
    dtype: hf.DtypePolicy

    @property
    def policy(self) -> TokenPolicy:
        """The functions of the trunk."""
        return self.family.policy(valued.headless(self.config))

    @property
    def layout(self) -> Iso:
        """From the tensors of the folder to the parameters."""
        return valued.layout(self.family, self.config)

    def shapes(self) -> Valued:
        """The parameters as meta tensors, in the dtypes that `load` gives them."""
        return as_loaded(valued.shapes(self.family, self.config), self.folder, self.layout, self.dtype)

    def load(self, device: torch.device, progress: hf.Progress | None = None) -> Valued:
        """The parameters, read."""
        like = valued.shapes(self.family, self.config)
        found: Valued = hf.load(self.folder, self.layout, like=like, dtype=self.dtype, device=device, progress=progress)
        return found


def open_valued(path: str, dtype: hf.DtypePolicy) -> ValuedFolder:
    """Opens a folder and checks its headers.

    Raises:
        ModelError: it is not one of a model with one number a text.
        CheckpointError: it is damaged or incomplete.
    """
    folder = hf.open_folder(path)
    with at(str(folder.path)):
        family, config = valued.config_from_hf(folder.config)
    opened = ValuedFolder(folder=folder, family=family, config=config, dtype=dtype)
    hf.require_fit(folder, opened.layout, dtype)
    require_computable(folder, dtype)
    return opened
