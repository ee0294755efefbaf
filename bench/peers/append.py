"""Writer of Delta tables with the library deltalake, which writes only the first copy of each message to `messages`."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from bench.peers.by_hand import TABLES, Row, Rows

CHUNK = 20_000
"""Number of records per append, so that files are not too small."""


class Tables:
    """The tables of a lake to append to. The ids of all messages since the start of the program are in memory."""

    def __init__(self, lake: str) -> None:
        self._paths = {name: f"{lake}/{name}" for name in TABLES}
        self._schemas = {name: pa.schema(DeltaTable(path).schema().to_arrow()) for name, path in self._paths.items()}
        self._seen: set[tuple[object, object]] = set()

    def append(self, records: Iterable[Rows]) -> None:
        """Append rows, with one commit per table."""
        rows: Rows = {name: [] for name in TABLES}
        for found in records:
            for name in TABLES:
                rows[name] += filter(self._first, found[name]) if name == "messages" else found[name]
        for name, schema in self._schemas.items():
            if rows[name]:
                write_deltalake(self._paths[name], pa.Table.from_pylist(rows[name], schema=schema), mode="append")

    def _first(self, row: Row) -> bool:
        key = (row["network"], row["message_id"])
        if key in self._seen:
            return False
        self._seen.add(key)
        return True
