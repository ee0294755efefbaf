"""Rows before and after deduplication. For Spark's operator they are packed into one binary column, so that the
operator shuffles a digest and bytes instead of the columns of a table (decisions 10 and 18)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec
import pyarrow as pa

from kiln.pipelines.delta.arrow_rows import RowBuffer

_Row = TypeVar("_Row", covariant=True)


class UniqueRow(NamedTuple, Generic[_Row]):
    """A row of which one copy is accepted. After Spark's operator, it has no identities and no position."""

    kind: str
    """name of a table, or another kind that the query defines"""
    identities: tuple[bytes, ...]
    """digests that identify the row, checked in turn"""
    position: str
    """Kafka position from which the row comes"""
    row: _Row
    size: int
    """approximate size of the payload, in bytes"""


def pack(row: object) -> bytes:
    """Pack a row into bytes: a NamedTuple or an array-like struct becomes a list of its fields."""
    return _encoder.encode(row)


def pack_rows(items: Iterable[UniqueRow[object]], identities: Sequence[str], seen_at: int) -> Iterator[pa.RecordBatch]:
    """Pack rows for Spark's operators.

    Args:
        items: Rows. A single digest goes into all digest columns.
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
    """Unpack the rows that Spark's operator has accepted, from the columns kind and data.

    `types`: type of a row, by kind.
    """
    decoders = {kind: msgspec.msgpack.Decoder(row_type) for kind, row_type in types.items()}
    for batch in batches:
        for kind, data in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            yield UniqueRow(kind, (), "", decoders[kind].decode(data), len(data))


def build_packed_ddl(identities: Sequence[str]) -> str:
    """Build Spark's schema of the columns of `pack_rows`, as for `mapInArrow`."""
    return ", ".join(["kind string", *(f"{name} binary" for name in identities), "data binary", "seen_at timestamp"])


_encoder: Final = msgspec.msgpack.Encoder()
