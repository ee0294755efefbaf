"""Checkpoints and commits as the queries leave them, written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
from deltalake import CommitProperties, Transaction, write_deltalake

from kiln.pipelines.delta.arrow_rows import build_arrow_schema
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.tables import TABLES


def plan(checkpoints: Path, query: str, batch: int, planned_at: int, ends: Mapping[str, int]) -> None:
    """Write the checkpoint files of a finished micro-batch that was planned at `planned_at` (ms). The query's name is
    also its id."""
    folder = checkpoints / query
    for name in ("offsets", "commits"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "metadata").write_text(json.dumps({"id": query}))
    metadata = {"batchWatermarkMs": 0, "batchTimestampMs": planned_at, "conf": {}}
    line = json.dumps({f"kiln.{topic}": {"0": end} for topic, end in ends.items()})
    (folder / "offsets" / str(batch)).write_text(f"v1\n{json.dumps(metadata)}\n{line}")
    (folder / "commits" / str(batch)).write_text("v1\n{}")


def commit(lake: Lake, table: str, query: str, batch: int, rows: Sequence[Mapping[str, object]] = ()) -> int:
    """Commit rows as a query's micro-batch does, and return the new version of the table."""
    schema = build_arrow_schema(TABLES[table].columns, strict=True)
    properties = CommitProperties(app_transactions=[Transaction(f"{query}:{table}:append", batch)])
    told = pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
    write_deltalake(lake.table(table), told, mode="append", commit_properties=properties)
    return lake.open(table).version()
