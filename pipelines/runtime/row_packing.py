"""Rows before and after deduplication. For Spark's operator they are packed into one binary column, so that it shuffles
a digest and bytes instead of the columns of a table (decisions 10 and 18)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import pyarrow as pa

from kiln.pipelines.delta.arrow_rows import RowBuffer

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[object])


class PackedRow(NamedTuple):
    """A row before or after deduplication; from Spark's operator it comes without identities and position."""

    kind: str
    """name of a table, or one that the next stage defines"""
    identities: tuple[bytes, ...]
    """digests that identify the row, checked in turn"""
    position: str
    """position of the source of the row"""
    row: Sequence[object]
    size: int
    """approximate size of the payload, bytes"""


def pack(row: object) -> bytes:
    """Pack a row into bytes."""
    return _encoder.encode(row)


def unpack(data: bytes) -> list[object]:
    """Unpack a row. Tuples become lists, and maps become lists of pairs."""
    return _decoder.decode(data)


def pack_rows(items: Iterable[PackedRow], identities: Sequence[str], seen_at: int) -> Iterator[pa.RecordBatch]:
    """Pack rows for Spark's operators.

    Args:
        items: Rows; each may have only one digest.
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


def unpack_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[PackedRow]:
    """Unpack the rows that Spark's operator has accepted, from the columns kind and data."""
    for batch in batches:
        for kind, data in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            yield PackedRow(kind, (), "", unpack(data), len(data))


def build_packed_ddl(identities: Sequence[str]) -> str:
    """Build Spark's schema of the columns of `pack_rows`, as for `mapInArrow`."""
    return ", ".join(["kind string", *(f"{name} binary" for name in identities), "data binary", "seen_at timestamp"])
