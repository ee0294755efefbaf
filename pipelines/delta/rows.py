"""Rows of a table, read with delta-rs and no other engine.

`DeltaTable.to_pyarrow_table` reads through Python on Arrow's threads. If Python exits while such a thread still closes
a file, the process ends in SIGABRT ("terminate called without an active exception"), although all its work is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError

from kiln.conf.process.location import shorten_error
from kiln.pipelines.delta.lake import LakeError

_BATCH_ROWS: Final = 65_536


def read_rows(table: DeltaTable, columns: Sequence[str], where: str = "true") -> Iterator[pa.RecordBatch]:
    """Read columns of the rows that match an SQL condition, at the open version. Text has type string_view.

    Raises:
        LakeError: A file cannot be read.
    """
    query = QueryBuilder({"datafusion.execution.batch_size": str(_BATCH_ROWS)}).register("t", table)
    names = ", ".join(f'"{name}"' for name in columns)
    try:
        yield from pa.RecordBatchReader.from_stream(query.execute(f"SELECT {names} FROM t WHERE {where}"))
    except (DeltaError, OSError, pa.ArrowInvalid) as error:
        raise LakeError(f"cannot read the table {table.table_uri}: {shorten_error(error)}") from error
