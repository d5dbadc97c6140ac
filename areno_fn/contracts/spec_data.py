"""Data sets of text, as a specification names them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from areno_fn.contracts.spec_base import Natural, Place, Rate, Spec


class StoredData(Spec, frozen=True, kw_only=True):
    """Rows on a disk: the first `limit` of them (0: all), with `columns` renamed, written as `{wanted: theirs}`.

    Without weights an epoch reads every row of all data sets once. With them it has as many places as there are rows,
    shared out by weight, and every data set is read in rounds of its own, which go on from one epoch to the next.
    Rewards refer to a data set by its name.
    """

    path: Place
    columns: dict[str, str] = field(default_factory=dict)
    limit: Natural = 0
    name: str = ""
    weight: Rate = 0.0


class JsonlData(StoredData, frozen=True, kw_only=True, tag="jsonl", tag_field="kind"):
    """A file with one JSON object a line, recognised by its keys."""


class ParquetData(StoredData, frozen=True, kw_only=True, tag="parquet", tag_field="kind"):
    """A Parquet file. A null is a key that the row does not have."""


class HFData(StoredData, frozen=True, kw_only=True, tag="hf", tag_field="kind"):
    """A folder that `datasets` saved, or one of Parquet or JSONL files named after their splits.

    `split` may be left empty where there is one split only, or one called train.
    """

    split: str = ""


class ArithmeticData(Spec, frozen=True, kw_only=True, tag="arithmetic", tag_field="kind"):
    """Sums `a+b=` of two numbers with exactly `digits` digits, split by a hash into train and held-out pairs."""

    digits: Annotated[int, Meta(ge=1, le=6)] = 2
    count: Annotated[int, Meta(ge=1, le=1_000_000)] = 4096
    split: Literal["train", "heldout"] = "train"
    seed: int = 0
    name: str = ""
    weight: Rate = 0.0
