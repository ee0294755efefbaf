"""Rows of a table, read by delta-rs alone.

`DeltaTable.to_pyarrow_table` reads through Python on Arrow's threads. Where Python ends while such a thread still lets
go of a file, the process ends in SIGABRT ("terminate called without an active exception"), with all its work done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError

from kiln.conf.process.location import words_of
from kiln.pipelines.delta.lake import LakeError

_AT_ONCE: Final = 65_536  # rows


def read_rows(table: DeltaTable, columns: Sequence[str], where: str = "true") -> Iterator[pa.RecordBatch]:
    """Columns of the rows for which `where`, an expression of SQL, holds, at the version that is open. Text comes as
    string_view. LakeError: a file cannot be read."""
    query = QueryBuilder({"datafusion.execution.batch_size": str(_AT_ONCE)}).register("t", table)
    names = ", ".join(f'"{name}"' for name in columns)
    try:
        yield from pa.RecordBatchReader.from_stream(query.execute(f"SELECT {names} FROM t WHERE {where}"))
    except (DeltaError, OSError, pa.ArrowInvalid) as error:
        raise LakeError(f"the table in {table.table_uri} cannot be read: {words_of(error)}") from error
