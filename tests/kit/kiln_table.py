"""Delta tables with any columns, in a table version that Kiln reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, Schema, write_deltalake

from kiln.schemas.delta.tables import TABLES_VERSION


def append_rows(place: Path, rows: pa.Table, partition_by: Sequence[str] = ()) -> None:
    """Append rows to the table in this folder. If there is no table, create it first, as version 0."""
    DeltaTable.create(
        str(place),
        Schema.from_arrow(rows.schema),
        mode="ignore",
        partition_by=list(partition_by),
        configuration={"kiln.version": str(TABLES_VERSION)},
        raise_if_key_not_exists=False,
    )
    write_deltalake(str(place), rows, mode="append")
