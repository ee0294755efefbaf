"""Rows before and after deduplication by Spark's `dropDuplicatesWithinWatermark`.

Each row is packed into one binary column, next to the columns of its digests. So Spark shuffles these few columns
instead of all columns of a table (decisions 10 and 18).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec
import pyarrow as pa

from kiln.pipelines.delta.arrow_rows import RowBuffer

_Row = TypeVar("_Row", covariant=True)


class UniqueRow(NamedTuple, Generic[_Row]):
    """A row that deduplication accepts once. After Spark's operators, `identities` and `position` are empty."""

    kind: str
    """name of a table, or another kind that the query defines"""
    identities: tuple[bytes, ...]
    """digests that identify the row; if one of them was seen before, the row is a duplicate"""
    position: str
    """partition and offset of the Kafka record that contains the row"""
    row: _Row
    size: int
    """approximate size of the payload, in bytes"""


def pack(row: object) -> bytes:
    """Encode a row as MessagePack. A NamedTuple or an array-like struct becomes a list of its fields."""
    return _encoder.encode(row)


def pack_rows(items: Iterable[UniqueRow[object]], identities: Sequence[str], seen_at: int) -> Iterator[pa.RecordBatch]:
    """Pack rows into record batches for `dropDuplicatesWithinWatermark`.

    Args:
        items: The rows. If a row has one digest, all digest columns get it.
        identities: Names of the digest columns.
        seen_at: Time of the micro-batch, µs.
    """
    names = [("kind", pa.string()), *((name, pa.binary()) for name in identities), ("data", pa.binary())]
    buffer = RowBuffer(pa.schema([*names, ("seen_at", pa.timestamp("us", tz="UTC"))]))
    for item in items:
        data = pack(item.row)
        digests = item.identities * (len(identities) // len(item.identities))
        if buffer.add((item.kind, *digests, data, seen_at), len(data)):
            yield from buffer.drain()
    yield from buffer.drain()


def unpack_rows(batches: Iterable[pa.RecordBatch], types: Mapping[str, type[object]]) -> Iterator[UniqueRow[object]]:
    """Unpack the rows that `dropDuplicatesWithinWatermark` has accepted.

    Args:
        batches: Record batches with the columns kind and data.
        types: Python type of a row, by kind.
    """
    decoders = {kind: msgspec.msgpack.Decoder(row_type) for kind, row_type in types.items()}
    for batch in batches:
        for kind, data in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            yield UniqueRow(kind, (), "", decoders[kind].decode(data), len(data))


def build_packed_ddl(identities: Sequence[str]) -> str:
    """Build the schema of the output of `pack_rows`, as a DDL string for `mapInArrow`."""
    return ", ".join(["kind string", *(f"{name} binary" for name in identities), "data binary", "seen_at timestamp"])


_encoder: Final = msgspec.msgpack.Encoder()
