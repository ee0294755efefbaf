"""A quixstreams application with a sink that appends to Delta tables.

    python -m bench.peers.quix SERVERS TOPIC RECORDS LAKE

Runs in an environment of its own (`quix.lock`), as quixstreams wants other versions than Kiln. Copies are known by a
set in memory: quixstreams keeps state by the record's key, which is the connection, and copies of a message come over
several connections. A crash between two appends doubles rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from quixstreams import Application, message_context  # type: ignore[import-not-found, unused-ignore]  # not in Kiln's environment
from quixstreams.sinks import BatchingSink, SinkBatch  # type: ignore[import-not-found, unused-ignore]

from bench.peers.by_hand import Row, Rows, read

TABLES = ("frames", "copies", "messages", "quarantine")
CHUNK = 20_000
"""Records of one append, so that files are not too small."""


class DeltaSink(BatchingSink):  # type: ignore[misc, unused-ignore]
    """Appends what came since the last commit of offsets."""

    def __init__(self, lake: Path) -> None:
        super().__init__()
        self._lake = lake
        self._schemas = {name: pa.schema(DeltaTable(str(lake / name)).schema().to_arrow()) for name in TABLES}
        self._seen: set[str] = set()

    def write(self, batch: SinkBatch) -> None:
        """Called by quixstreams before it commits offsets."""
        rows: dict[str, list[Row]] = {name: [] for name in TABLES}
        found: Rows
        for found in self._values(batch):
            rows["frames"] += found.frames
            rows["copies"] += found.copies
            rows["quarantine"] += found.quarantine
            for known_as, row in found.messages:
                if known_as not in self._seen:
                    self._seen.add(known_as)
                    rows["messages"].append(row)
        for name, schema in self._schemas.items():
            if rows[name]:
                columns = [
                    pa.array(column, field.type)
                    for column, field in zip(zip(*rows[name], strict=True), schema, strict=True)
                ]
                write_deltalake(str(self._lake / name), pa.Table.from_arrays(columns, schema=schema), mode="append")

    @staticmethod
    def _values(batch: SinkBatch) -> Iterable[Rows]:
        return (item.value for item in batch)


def _rows(value: bytes, key: bytes, stamp: int, headers: object) -> Rows:
    context = message_context()
    return read(value, context.partition, context.offset, stamp * 1000)


def main(servers: str, topic: str, records: str, lake: str) -> None:
    """Reads so many records from the beginning of a topic."""
    application = Application(
        broker_address=servers,
        consumer_group=f"quix-{Path(lake).name}",
        auto_offset_reset="earliest",
        commit_every=CHUNK,
        commit_interval=60.0,
        loglevel="WARNING",
    )
    frames = application.topic(topic, value_deserializer="bytes", key_deserializer="bytes")
    data = application.dataframe(frames)
    data = data.apply(_rows, metadata=True)
    data.sink(DeltaSink(Path(lake)))
    application.run(count=int(records))


if __name__ == "__main__":
    main(*sys.argv[1:])
