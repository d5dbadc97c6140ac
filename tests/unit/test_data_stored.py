"""Parquet files and folders of `datasets`, written by the libraries that own the formats."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from areno_fn.contracts.errors import DataError
from areno_fn.contracts.spec import HFData, ParquetData
from areno_fn.world.data import read
from areno_fn.world.data_schema import messages

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", "name": "b"}]
ROWS: list[dict[str, Any]] = [{"prompt": f"{i}+1=", "answer": i + 1, "tags": ["a", "b"][: i % 3]} for i in range(7)]


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as files

    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_table(arrow.Table.from_pylist(rows), path, row_group_size=3)
    return path


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def folder(root: Path, split: str = "") -> HFData:
    return HFData(path=str(root), split=split)


def test_parquet_rows_are_plain_values_with_their_place(tmp_path: Path) -> None:
    path = parquet(tmp_path / "rows.parquet", ROWS)
    rows = read(ParquetData(path=str(path)))
    assert rows == ROWS
    assert [row.where for row in rows[::3]] == [f"{path}:1", f"{path}:4", f"{path}:7"]


def test_limit_and_columns(tmp_path: Path) -> None:
    path = parquet(tmp_path / "rows.parquet", [{"ask": "a", "text": "t"}, {"ask": "b", "text": "u"}])
    assert read(ParquetData(path=str(path), limit=1, columns={"prompt": "ask"})) == [{"prompt": "a", "text": "t"}]


def test_a_null_is_a_key_that_is_not_there(tmp_path: Path) -> None:
    rows = [{"messages": TALK, "text": None}, {"messages": TALK[:1], "text": "x"}]
    found = read(ParquetData(path=str(parquet(tmp_path / "talk.parquet", rows))))
    assert found[0] == {"messages": TALK}
    assert messages(found[0], "messages") == tuple(TALK)
    assert found[1] == {"messages": TALK[:1], "text": "x"}


def test_files_that_are_no_parquet(tmp_path: Path) -> None:
    path = parquet(tmp_path / "rows.parquet", ROWS)
    data = path.read_bytes()
    for broken in (b"", b"PAR1", data[:-1], data[: len(data) // 2], b"{}\n" * 9):
        path.write_bytes(broken)
        with pytest.raises(
            DataError, match=r"rows.parquet cannot be read behind its row 0 .*; give a whole Parquet file"
        ) as caught:
            read(ParquetData(path=str(path)))
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"nothing.parquet cannot be read behind its row 0"):
        read(ParquetData(path=str(tmp_path / "nothing.parquet")))
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(DataError, match=r"pipe.parquet cannot be read .*\(.*it is no regular file\)"):
        read(ParquetData(path=str(tmp_path / "pipe.parquet")))


def test_a_parquet_row_that_fits_no_schema_is_shown(tmp_path: Path) -> None:
    path = parquet(tmp_path / "rows.parquet", [{"text": "a", "other": None}, {"text": None, "other": b"\x00"}])
    with pytest.raises(DataError, match=r"rows.parquet:2: .*keys other has no known shape; .*the row is .*other"):
        read(ParquetData(path=str(path)))


def test_without_pyarrow_there_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"rows.parquet needs pyarrow to be read .*pip install 'areno-fn\[data\]'"):
        read(ParquetData(path=str(tmp_path / "rows.parquet")))


@pytest.mark.filterwarnings("ignore")  # what happens inside datasets is not ours
def test_what_datasets_saved_is_read_in_its_order(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(str(tmp_path / "one"), num_shards=3)
    assert read(folder(tmp_path / "one")) == ROWS
    kept = datasets.Dataset.from_list([ROWS[5], ROWS[0], ROWS[2]], split="test")
    kept.save_to_disk(str(tmp_path / "kept"))
    assert read(folder(tmp_path / "kept")) == [ROWS[5], ROWS[0], ROWS[2]]
    both = datasets.DatasetDict({"train": whole, "test": kept})
    both.save_to_disk(str(tmp_path / "both"))
    assert read(folder(tmp_path / "both")) == ROWS
    assert read(folder(tmp_path / "both", "test")) == [ROWS[5], ROWS[0], ROWS[2]]
    with pytest.raises(DataError, match=r"both has no split 'validation'; its splits are test, train"):
        read(folder(tmp_path / "both", "validation"))
    with pytest.raises(DataError, match=r"holds the split 'test', not 'train'; leave `split` empty"):
        read(folder(tmp_path / "both" / "test", "train"))


def saved(root: Path, **state: Any) -> HFData:
    """A folder like one of `save_to_disk`, with an Arrow file of two rows."""
    arrow = pytest.importorskip("pyarrow")
    root.mkdir()
    table = arrow.Table.from_pylist(ROWS[:2])
    with arrow.OSFile(str(root / "data.arrow"), "wb") as file, arrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}], "_split": None} | state))
    return folder(root)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"_data_files": [{"filename": "../data.arrow"}]}, r"an .arrow file of that folder, received '../data.arrow'"),
        ({"_data_files": ["data.arrow"]}, r"an .arrow file of that folder, received None"),
        ({"_data_files": None}, r"state.json: '_data_files' must be a list, received NoneType"),
        ({"_data_files": []}, r"the data folder .* is empty; it needs at least one row"),
        ({"_indices_files": [{"filename": "i.arrow"}]}, r"with indices beside its rows; save it after flatten_indices"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, r"gone.arrow cannot be read behind its row 0"),
    ],
)
def test_saved_folders_that_cannot_be_used(tmp_path: Path, state: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        read(saved(tmp_path / "d", **state))


def test_a_saved_folder_with_a_cut_file_says_behind_which_row(tmp_path: Path) -> None:
    spec = saved(tmp_path / "d")
    assert read(spec) == ROWS[:2]
    file = tmp_path / "d" / "data.arrow"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"data.arrow cannot be read behind its row \d .*give a whole Arrow file"):
        read(spec)
    (tmp_path / "d" / "state.json").write_text("{")
    with pytest.raises(DataError, match=r"state.json cannot be read .*save the data set again"):
        read(spec)


def test_a_folder_of_files_is_split_by_their_names(tmp_path: Path) -> None:
    parquet(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:3])
    parquet(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[3:5])
    parquet(tmp_path / "data" / "test_sft-00000-of-00001.parquet", ROWS[5:])
    jsonl(tmp_path / "validation" / "part.jsonl", ROWS[6:])
    (tmp_path / ".cache").mkdir()
    jsonl(tmp_path / ".cache" / "train.jsonl", ROWS)
    (tmp_path / "README.md").write_text("about")
    assert read(folder(tmp_path)) == ROWS[:5]
    assert read(folder(tmp_path, "test_sft")) == ROWS[5:]
    assert read(folder(tmp_path, "validation")) == ROWS[6:]
    with pytest.raises(DataError, match=r"has no split 'dev'; its splits are test_sft, train, validation"):
        read(folder(tmp_path, "dev"))


def test_jsonl_folders_need_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    jsonl(tmp_path / "a" / "b.jsonl", ROWS[2:])
    jsonl(tmp_path / "a" / "a.jsonl", ROWS[:2])
    assert read(folder(tmp_path / "a")) == ROWS
    assert read(folder(tmp_path / "a", "train")) == ROWS
    jsonl(tmp_path / "dev" / "rows_dev.jsonl", ROWS)
    assert read(folder(tmp_path / "dev")) == ROWS, "the only split there is"


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone does not exist; give a folder that `datasets` saved"):
        read(folder(tmp_path / "gone"))
    with pytest.raises(DataError, match=r"has no Parquet or JSONL file in it"):
        read(folder(tmp_path))
    with pytest.raises(DataError, match=r"cannot be read|does not exist"):
        read(HFData(path="a\0b"))
    jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"Parquet and JSONL files side by side"):
        read(folder(tmp_path))


@pytest.mark.parametrize("splits", [{"splits": ["../x"]}, {"splits": "train"}, {}, []])
def test_a_dictionary_of_splits_leads_nowhere_else(tmp_path: Path, splits: Any) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps(splits))
    with pytest.raises(DataError, match=r"has no split|must be a list|must hold a JSON object"):
        read(folder(tmp_path))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_damaged_files_are_read_or_refused_in_one_sentence(kind: str, tmp_path: Path) -> None:
    spec = ParquetData(path=str(parquet(tmp_path / "r.parquet", ROWS))) if kind == "parquet" else saved(tmp_path / "d")
    path = tmp_path / ("r.parquet" if kind == "parquet" else "d/data.arrow")
    good, draw = path.read_bytes(), random.Random(5)
    refused = 0
    for _ in range(200):
        damaged = bytearray(good[: draw.randrange(len(good)) if draw.random() < 0.2 else len(good)])
        for _ in range(draw.choice([1, 2, 8])):
            place = draw.randrange(len(damaged) + 1)
            damaged[place : place + 1] = bytes([draw.randrange(256)])
        path.write_bytes(damaged)
        try:
            read(spec)
        except DataError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 20
