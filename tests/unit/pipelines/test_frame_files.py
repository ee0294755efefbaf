"""kiln.pipelines.backfill.frame_files: each row of the files is read by one task, if it is in the range."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kiln.conf.process.location import parse_location
from kiln.pipelines.backfill.frame_files import FrameTasks, plan_tasks
from kiln.pipelines.backfill.terms import TimeRange
from kiln.pipelines.decode.frame_row import FrameRow
from kiln.pipelines.delta.arrow_rows import build_arrow_schema
from kiln.pipelines.delta.tables import PlainFile
from kiln.schemas.delta.tables import TABLES

SCHEMA = build_arrow_schema(TABLES["frames"].columns)
ADDED_LATER = ["agent", "end_reason", "dialled"]


def build_row(number: int) -> FrameRow:
    network = "ours" if number % 3 else "theirs"
    return FrameRow(
        network=network,
        connection=b"c",
        direction="IN",
        local_peer="",
        remote_peer="",
        protocol="/meshsub/1.1.0",
        observed_at=1_000 + number,
        sequence=number,
        payload=b"p" * number,
        hello_in=b"",
        hello_out=b"",
        verdicts=b"",
        origin="LIVE",
        remote_address=b"",
        declared_length=0,
        kafka_partition=1,
        kafka_offset=7,
        kafka_timestamp=number,
    )


def write_file(path: Path, rows: range, size: int) -> PlainFile:
    """Write rows in row groups of 7. `size`: as the log of the table has it."""
    columns = zip(*map(build_row, rows), strict=True)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)]
    table = pa.Table.from_arrays(arrays, schema=SCHEMA)
    pq.write_table(table.drop_columns(ADDED_LATER) if rows.start else table, path, row_group_size=7)
    return PlainFile(parse_location(path), size)


@pytest.fixture
def files(tmp_path: Path) -> list[PlainFile]:
    """A large file, and a small one that has fewer columns."""
    return [
        write_file(tmp_path / "large.parquet", range(60), 100 << 20),
        write_file(tmp_path / "small.parquet", range(60, 90), 1 << 10),
    ]


def read(reading: FrameTasks) -> list[list[FrameRow]]:
    tasks = [list(reading.read(task)) for task in range(len(reading.tasks))]
    return [
        [FrameRow._make(row) for batch in task for row in zip(*map(pa.Array.to_pylist, batch.columns), strict=True)]
        for task in tasks
    ]


@pytest.mark.parametrize("at_least", [1, 3, 100])
def test_each_row_in_the_range_is_read_by_one_task(files: list[PlainFile], at_least: int) -> None:
    span = TimeRange(1_003, 1_080)
    tasks = read(plan_tasks(files, at_least, span, None))
    assert [row for task in tasks for row in task] == [build_row(number) for number in range(3, 80)]
    assert len(tasks) == {1: 1, 3: 3, 100: 8}[at_least]


def test_rows_of_one_network_are_read(files: list[PlainFile]) -> None:
    (rows,) = read(plan_tasks(files, 1, TimeRange(0, 2_000), "theirs"))
    assert [row.sequence for row in rows] == list(range(0, 90, 3))


def test_no_files_are_no_tasks() -> None:
    assert plan_tasks([], 8, TimeRange(0, 1), None).tasks == []
