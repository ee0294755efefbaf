"""Rows of a table by delta-rs alone."""

from __future__ import annotations

from pathlib import Path

import deltalake.fs
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from kiln.pipelines.delta.lake import Lake, LakeError, read_rows


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    rows = pa.table({"day": ["mon", "mon", "tue"], "number": [1, 2, 3], "beside": [b"x", b"y", b"z"]})
    write_deltalake(str(tmp_path / "days"), rows, partition_by=["day"])
    return Lake(str(tmp_path))


@pytest.fixture
def no_files_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("Arrow's threads would read through Python")

    monkeypatch.setattr(deltalake.fs.DeltaStorageHandler, "from_table", opened)


def test_columns_of_the_rows_that_are_wanted(lake: Lake, no_files_of_python: None) -> None:
    wanted = pa.Table.from_batches(read_rows(lake.open("days"), ["number", "day"], "number BETWEEN 2 AND 9"))
    assert wanted.column_names == ["number", "day"]
    assert sorted(zip(*wanted.to_pydict().values(), strict=True)) == [(2, "mon"), (3, "tue")]


def test_a_file_that_is_gone_is_an_error(lake: Lake) -> None:
    table = lake.open("days")
    for file in Path(lake.table("days")).glob("day=*/*.parquet"):
        file.unlink()
    with pytest.raises(LakeError, match=r"cannot read the table .*days/: .*part-00000"):
        list(read_rows(table, ["number"]))
