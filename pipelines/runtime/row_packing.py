"""Rows on their way to deduplication: unchanged, to a file on the disk of the task's machine; or, to Spark's operator,
packed into one binary column, so that the operator shuffles a digest and bytes, and not the columns of a table
(decisions 10 and 18)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import pyarrow as pa

from kiln.pipelines.delta.arrow_rows import RowBuffer

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[object])


class PackedRow(NamedTuple):
    """A row. `kind`: a table's name, or a name that the stage after this knows. `identities`: digests that tell rows
    apart, in turn; `position`: of what the row was made of; `size`: bytes of payload, about."""

    kind: str
    identities: tuple[bytes, ...]
    position: str
    row: Sequence[object]
    size: int


class UniqueRow(NamedTuple):
    """The rest of a `PackedRow` that has passed."""

    kind: str
    row: Sequence[object]
    size: int


def pack(row: object) -> bytes:
    """Pack a row into bytes."""
    return _encoder.encode(row)


def unpack(data: bytes) -> list[object]:
    """Unpack a row: a list where there was a tuple, a list of pairs where there was a map."""
    return _decoder.decode(data)


def unwrap_rows(items: Iterable[PackedRow]) -> Iterator[UniqueRow]:
    """Drop what only deduplication needs."""
    return (UniqueRow(item.kind, item.row, item.size) for item in items)


def pack_rows(items: Iterable[PackedRow], identities: Sequence[str], seen_at: int) -> Iterator[pa.RecordBatch]:
    """Pack rows for Spark's operators. `identities`: names of the digest columns; an item may have only one digest.
    `seen_at`: µs."""
    names = [("kind", pa.string()), *((name, pa.binary()) for name in identities), ("data", pa.binary())]
    buffer = RowBuffer(pa.schema([*names, ("seen_at", pa.timestamp("us", tz="UTC"))]))
    for item in items:
        data = pack(item.row)
        digests = item.identities * (len(identities) // len(item.identities))
        if buffer.add((item.kind, *digests, data, seen_at), len(data)):
            yield from buffer.drain()
    yield from buffer.drain()


def unpack_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[UniqueRow]:
    """Unpack the rows that passed Spark's operator. Columns kind, data in."""
    for batch in batches:
        for kind, data in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            yield UniqueRow(kind, unpack(data), len(data))


def build_packed_ddl(identities: Sequence[str]) -> str:
    """Build Spark's schema of the columns of `pack_rows`, as for `mapInArrow`."""
    return ", ".join(["kind string", *(f"{name} binary" for name in identities), "data binary", "seen_at timestamp"])
