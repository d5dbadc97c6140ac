"""Hugging Face folders, in and out: `open_folder`, `require_fit`, `load`, `save`."""

from areno_fn.ckpt.dtypes import DtypePolicy, converted
from areno_fn.ckpt.folder import HFFolder, open_folder
from areno_fn.ckpt.load import Progress, load, require_fit
from areno_fn.ckpt.save import save

__all__ = ["DtypePolicy", "HFFolder", "Progress", "converted", "load", "open_folder", "require_fit", "save"]
