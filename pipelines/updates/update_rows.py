"""Rows of the query `updates` on their way from the task that decodes them to the one that selects some of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa

from kiln.pipelines.decode.decoder import MessageRef
from kiln.pipelines.delta.arrow_rows import RowBuffer
from kiln.pipelines.updates.repeats import Announcement

ROWS: Final = pa.schema(
    [("topic", pa.string()), ("key", pa.binary()), ("value", pa.binary()), ("observed_at", pa.int64())]
)
ROWS_DDL: Final = "topic string, key binary, value binary, observed_at bigint"
"""Records for Kafka"""

_COPIES: Final = pa.schema(
    [
        ("stream", pa.binary()),
        ("identity", pa.binary()),
        ("announcement", pa.binary()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("index", pa.int32()),
        *ROWS,
        ("batch_time", pa.int64()),
    ]
)
COPIES_DDL: Final = (
    "stream binary, identity binary, announcement binary, partition int, offset bigint, index int, "
    f"{ROWS_DDL}, batch_time bigint"
)
"""An `UpdateRow` and the time of the micro-batch, µs"""
COPY_COLUMNS: Final[tuple[str, ...]] = tuple(_COPIES.names[:-1])
"""Columns of an `UpdateRow`, as `read_copies` takes them"""

_CopyColumns = tuple[bytes, bytes, bytes | None, int, int, int, str, bytes, bytes, int]
_NO_INDEX: Final = -1


class UpdateRow(NamedTuple):
    """A row that is emitted once per identity, or if its announcement is an update.

    Attributes:
        stream: Digest of the stream, or the identity of a row that belongs to none.
        identity: Digest that identifies the row.
        ref: Position of this copy.
        topic: Topic of Kafka, without prefix.
        key: Key of the record.
        value: Value of the record.
        observed_at: Capture time, µs.
        announcement: Of an update; None for any other row.
    """

    stream: bytes
    identity: bytes
    ref: MessageRef
    topic: str
    key: bytes
    value: bytes
    observed_at: int
    announcement: Announcement | None = None

    @property
    def identities(self) -> tuple[bytes, ...]:
        return (self.identity,)

    @property
    def position(self) -> str:
        return self.ref.text

    @property
    def size(self) -> int:
        return len(self.value)


def write_copies(rows: Iterable[UpdateRow], batch_time: int) -> Iterator[pa.RecordBatch]:
    """Write rows as Arrow, in the columns of COPIES_DDL. `batch_time`: the time of the micro-batch, µs."""
    buffer = RowBuffer(_COPIES)
    for row in rows:
        announcement = None if row.announcement is None else msgspec.msgpack.encode(row.announcement)
        ref = (row.ref.partition, row.ref.offset, _NO_INDEX if row.ref.position is None else row.ref.position)
        copy = (row.stream, row.identity, announcement, *ref, row.topic, row.key, row.value, row.observed_at)
        if buffer.add((*copy, batch_time), row.size):
            yield from buffer.drain()
    yield from buffer.drain()


def read_copies(copies: Iterable[_CopyColumns]) -> Iterator[UpdateRow]:
    """Read what `write_copies` wrote. `copies`: the values of COPY_COLUMNS."""
    for stream, identity, packed, partition, offset, index, topic, key, value, observed_at in copies:
        ref = MessageRef(partition, offset, None if index == _NO_INDEX else index)
        announcement = None if packed is None else msgspec.msgpack.decode(packed, type=Announcement)
        yield UpdateRow(stream, identity, ref, topic, key, value, observed_at, announcement)
