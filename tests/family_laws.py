"""What every token family's layout must obey, for one configuration, one form of its file and one number of ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import strategies as st
from parity.reference_layouts import leaves, text_of
from parity.reference_ranks import part, servable

from areno_fn.ckpt.folder import open_folder
from areno_fn.ckpt.load import load
from areno_fn.ckpt.save import save
from areno_fn.contracts.errors import LayoutError
from areno_fn.contracts.key import Key
from areno_fn.contracts.layout import Iso
from areno_fn.contracts.placement import place, rank_name
from areno_fn.models.layouts import LAYOUTS, TokenLayout
from areno_fn.models.table import HEAD
from areno_fn.testing.checkpoints import state_dict
from areno_fn.testing.elements import raw
from areno_fn.testing.plain_files import read_folder, write_folder

RANKS = (1, 2, 3, 4, 8)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@attrs.frozen
class Case:
    """A file of a family, and how it is read.

    Attributes:
        hf: its config.json.
        names: the tensors in it.
        ranks: how many ranks share the model.
        shards: in how many files it is.
        key: names the bits in it.
    """

    hf: dict[str, Any]
    names: frozenset[str]
    ranks: int
    shards: int
    key: Key

    @property
    def family(self) -> TokenLayout:
        """Of the configuration."""
        return LAYOUTS[self.hf["model_type"]]

    @property
    def layout(self) -> Iso:
        """From the file to the leaves."""
        return self.family.layout(self.family.config_from_hf(self.hf), self.names)

    @property
    def placed(self) -> Iso:
        """From the file to what the ranks hold."""
        placements = self.family.placements(self.family.config_from_hf(self.hf), self.names)
        return self.layout >> place(self.layout.target, placements, self.ranks)


@st.composite
def cases(draw: Callable[..., Any], name: str, *, served: bool = False) -> Case:
    """Any file of a family, with any number of ranks, or only with those that can share it."""
    family = LAYOUTS[name]
    hf = draw(st.sampled_from([*family.variants.values(), None, None, None]))
    hf = hf or family.random_config(lambda options: draw(st.sampled_from(list(options))))
    names = draw(st.sampled_from(family.forms(family.config_from_hf(hf))))
    key = Key.of(draw(st.integers(0, 2**32 - 1)))
    ranks = [ranks for ranks in RANKS if not served or servable(hf, ranks)]
    return Case(hf, names, draw(st.sampled_from(ranks)), draw(st.sampled_from((1, 3))), key)


def require_meaning(case: Case) -> None:
    """The layout claims exactly the file, and every element goes where the reference says, on every rank, and back."""
    assert frozenset(case.layout.source) == case.names
    if not servable(case.hf, case.ranks):
        with pytest.raises(LayoutError, match=f"cannot be dealt to {case.ranks} ranks"):
            case.placed  # noqa: B018
        return
    file = numbered(case)
    whole = leaves(case.hf, file)
    require_same_bits(case.layout(file), whole)
    held = case.placed(file)
    expected = {
        rank_name(rank, name): part(case.hf, name, tensor, rank, case.ranks)
        for name, tensor in whole.items()
        for rank in range(case.ranks)
    }
    require_same_bits(held, expected)
    require_same_bits(case.placed.inverse(held), file)


def require_files(case: Case) -> None:
    """Load, then save, is the same folder, and save, then load, the same leaves: bit for bit, on any ranks."""
    placed = case.placed
    given = state_dict(placed, dtypes=DTYPES, key=case.key)
    limit = 1 << 30 if case.shards == 1 else 1000
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_folder(folder / "given", given, case.hf, files=case.shards, metadata={"format": "pt"}, index={})
        opened = open_folder(folder / "given")
        held = load(opened, placed)
        save(folder / "saved", held, placed, opened.config, source=opened, shard_bytes=limit)
        require_same_bits(read_folder(folder / "saved").tensors, given)
        require_same_bits(load(open_folder(folder / "saved"), placed), held)


def numbered(case: Case) -> dict[str, torch.Tensor]:
    """The tensors of the file, every element another number; those of a tied head are the embedding's."""
    tensors = numbered_tensors(case.layout)
    if text_of(case.hf)["tied"] and HEAD in tensors:
        embed = next(name for name in tensors if "embed" in name and "per_layer" not in name)
        tensors[HEAD] = tensors[embed].clone()
    return tensors


def numbered_tensors(layout: Iso) -> dict[str, torch.Tensor]:
    """What a layout takes, every element another number."""
    tensors, start = {}, 0
    for name, spec in layout.source.items():
        tensors[name] = torch.arange(start, start + spec.numel).reshape(spec.shape)
        start += spec.numel
    return tensors


def require_same_bits(received: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """The same names, shapes, dtypes and bits."""
    assert received.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (received[name].dtype, received[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(raw(received[name]), raw(tensor)), name
