"""Permanent removal of rows of the table `quarantine`, after they are recorded in the table `quarantine_dropped`.

The record is on the disk before a row is removed. If the command ends in between, recorded rows are still in the table:
the next drop of these rows removes them, and records none of them twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from hashlib import sha256
from typing import Final, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import write_deltalake
from deltalake.exceptions import DeltaError

from kiln.conf.process.location import Location, find_os_error, shorten_error
from kiln.deploy.ops.quarantine.picking import QuarantineError, QuarantineFilter, QuarantineRows
from kiln.pipelines.delta.arrow_rows import build_arrow_schema
from kiln.pipelines.delta.duckdb_tables import create_newest_views
from kiln.pipelines.delta.files import DataFile, TableFiles, delete_files
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.maintenance.plan import TableFile
from kiln.pipelines.maintenance.state import describe_unsupported, list_files
from kiln.pipelines.maintenance.steps import replace_files
from kiln.schemas.delta.tables import TABLES

_TRIES: Final = 20
"""attempts while other writers keep rewriting the table's files"""
_ROWS_AT_ONCE: Final = 100
"""rows in memory, each of up to 5 MiB"""
_RECORD: Final = "quarantine_dropped"
_KEPT: Final = ("kafka_partition", "kafka_offset", "message_index", "cid", "stage", "reason", "detail")
_SAME: Final = ("kafka_partition", "kafka_offset", "message_index", "cid", "stage", "reason", "sha256", "observed_at")
"""Columns in which a row of `quarantine_dropped` and its row of `quarantine` are equal."""


class DropResult(NamedTuple):
    """`rows` is the number of rows removed under the id `drop_id`; an interrupted command had already recorded `known`
    of them."""

    drop_id: str
    rows: int
    known: int = 0


def drop_rows(lake: Lake, wanted: QuarantineFilter, why: str, drop_id: str, now: datetime) -> DropResult:
    """Remove the rows of a selection from the table.

    Raises:
        QuarantineError: The rows cannot be found, the tables cannot be written, or other writers keep rewriting them.
        LakeError: The table cannot be read.
    """
    for _ in range(_TRIES):
        with QuarantineRows(lake, wanted) as picked:
            if reason := describe_unsupported(lake, "quarantine", picked.table):
                raise QuarantineError(f"Kiln must not write the table quarantine: {reason}")
            places, table = picked.by_file(), picked.table
        if not places:
            return DropResult(drop_id, 0)
        files = [file for file in list_files(table, "observed_at") if file.path in places]
        try:
            known = _record_rows(lake, files, places, {"drop_id": drop_id, "dropped_at": now, "why": why})
            new = _write_remaining_rows(lake, files, places)
        except FileNotFoundError:
            continue  # the files of this version are gone: read the next version
        except (DeltaError, OSError) as error:
            cause = find_os_error(error) or shorten_error(error)
            raise QuarantineError(f"cannot write to {lake.path} ({cause}). No row was dropped") from error
        rows = sum(map(len, places.values()))
        if replace_files(lake, "quarantine", table, files, new, f"{rows:,} rows dropped, {drop_id}", removes_rows=True):
            lake.sync_commits("quarantine", table.version(), table.version())
            return DropResult(drop_id, rows, known)
        delete_files(lake, new)
    raise QuarantineError("other processes keep rewriting the table quarantine. Try again")


def _record_rows(
    lake: Lake, files: Sequence[TableFile], places: Mapping[str, Sequence[int]], told: dict[str, object]
) -> int:
    """Append the rows to `quarantine_dropped`, except rows already recorded there. Return the number of these."""
    lake.create([_RECORD])
    schema = build_arrow_schema(TABLES[_RECORD].columns, strict=True)
    rows = [
        {**told, **row, "came": file.modified}
        for file in files
        for row in _read_rows(lake.folder("quarantine") / file.path, places[file.path])
    ]
    every = pa.Table.from_pylist(rows, schema=schema.append(pa.field("came", pa.int64())))
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        create_newest_views(connection, lake, [_RECORD])
        connection.register("every", every)
        same = " AND ".join(f"d.{name} IS NOT DISTINCT FROM every.{name}" for name in _SAME)
        # A row that was written after such a record is a new one, as after a backfill.
        new = connection.sql(
            f"SELECT * EXCLUDE (came) FROM every WHERE NOT EXISTS "
            f"(SELECT 1 FROM {_RECORD} d "
            f"WHERE {same} AND (d.drop_id = every.drop_id OR epoch_us(d.dropped_at) >= came))"
        ).to_arrow_table()
    if new.num_rows:
        write_deltalake(lake.table(_RECORD), new.cast(schema), mode="append", storage_options=lake.storage_options)
        version = lake.open(_RECORD).version()
        lake.sync_commits(_RECORD, version, version)
    return int(every.num_rows - new.num_rows)


def _read_rows(path: Location, numbers: Sequence[int]) -> Iterator[dict[str, object]]:
    for batch, first in _read_batches(path):
        mine = pa.array([number - first for number in numbers if first <= number < first + batch.num_rows], pa.int64())
        for row in batch.take(mine).to_pylist():
            data = row["data"]
            yield {name: row.get(name) for name in _KEPT} | {
                "reason": row["reason"],
                "bytes": len(data),
                "sha256": sha256(data).hexdigest(),
                "observed_at": row["observed_at"],
            }


def _write_remaining_rows(
    lake: Lake, files: Sequence[TableFile], places: Mapping[str, Sequence[int]]
) -> list[DataFile]:
    """Write the other rows of these files to new files, without a commit."""
    out = TableFiles(lake, "quarantine")
    schema = build_arrow_schema(TABLES["quarantine"].columns, strict=True)
    try:
        for file in files:
            gone = set(places[file.path])
            for batch, first in _read_batches(lake.folder("quarantine") / file.path):
                stays = pa.array([number not in gone for number in range(first, first + batch.num_rows)])
                left = batch.filter(stays)
                if left.num_rows:
                    out.add_batch(
                        pa.RecordBatch.from_arrays(
                            [left.column(field.name).cast(field.type) for field in schema], schema=schema
                        )
                    )
    except BaseException:  # whatever it is: raised again
        with suppress(OSError):
            delete_files(lake, out.close())
        raise
    return out.close()


def _read_batches(path: Location) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Read the rows of a file in record batches, each with the number of its first row."""
    first = 0
    with path.open() as opened, pq.ParquetFile(opened) as file:
        for batch in file.iter_batches(_ROWS_AT_ONCE):
            yield batch, first
            first += batch.num_rows
