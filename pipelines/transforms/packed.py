"""Rows on their way through a deduplicating operator: packed into one binary column, so that what the operator shuffles
is a digest and bytes, and not the columns of a table (decision 18)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import pyarrow as pa

from pipelines.spark.rows import RowBuffer

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[object])


def pack(row: object) -> bytes:
    """A row as bytes."""
    return _encoder.encode(row)


def unpack(data: bytes) -> list[object]:
    """The row again: a list where there was a tuple, a list of pairs where there was a map."""
    return _decoder.decode(data)


class PackedRows:
    """Rows of a task, by kind: a table's name, or a name that the stage after the operator knows."""

    def __init__(self, identities: Sequence[str], seen_at: int) -> None:
        """`identities`: names of the columns that tell rows apart, one or more. `seen_at`: µs."""
        names = [("kind", pa.string()), *((name, pa.binary()) for name in identities), ("data", pa.binary())]
        self._schema = pa.schema([*names, ("seen_at", pa.timestamp("us", tz="UTC"))])
        self._buffer = RowBuffer(self._schema)
        self._seen_at = seen_at

    def add(self, kind: str, identities: Iterable[bytes], row: Sequence[object]) -> bool:
        """Takes a row; True when it is time to `drain()`."""
        data = pack(row)
        return self._buffer.add((kind, *identities, data, self._seen_at), len(data))

    def drain(self) -> Iterator[pa.RecordBatch]:
        """The rows since the last `drain`."""
        yield from self._buffer.drain()


def packed_ddl(identities: Sequence[str]) -> str:
    """The columns of `PackedRows` as Spark takes the schema of a `mapInArrow`."""
    return ", ".join(["kind string", *(f"{name} binary" for name in identities), "data binary", "seen_at timestamp"])
