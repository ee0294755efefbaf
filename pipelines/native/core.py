"""Binding of the core's functions by ctypes, and record batches through Arrow's C data interface."""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from kiln.pipelines.decode.decoder import DecodeConfig, check_signature
from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS
from kiln.pipelines.native.library import TABLES_OF_CORE, load_library, log_panic
from kiln.schemas.kafka.frames import read_frame
from kiln.schemas.proto.gossipsub.rpc_pb2 import Message
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.identity import Verdict
from kiln.schemas.wire.message_id import AUTHOR_SEQNO
from kiln.schemas.wire.topic_table import negotiate_table

MIN_RECORDS: Final = 100
"""Records of a task below which Python is as fast: the core takes some 3 ms more for each task"""

SAMPLE_ONE_IN = 1_000
"""One record of so many is also decoded by Python"""

_RECORD_COLUMNS: Final = pa.schema(
    [
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("stamp", pa.int64(), nullable=False),
        pa.field("value", pa.binary()),
    ]
)
"""Columns that the core reads. It takes their types for granted."""
_ARRAY_BYTES, _SCHEMA_BYTES = 80, 72  # sizes of the structs of the C data interface
_PANICKED = 1  # cause for which a record is left; else 0
_MAX_TABLES: Final = 1_024  # topic tables that the core learns
_LEFT_AT_ONCE: Final = 1_000  # records of a call that failed


_DEFAULTS: Final = DecodeConfig()


class RecordRow(NamedTuple):
    """A record of a batch of RECORDS, with its row."""

    row: int
    partition: int
    offset: int
    stamp: int
    value: bytes | None


class CoreRows(NamedTuple):
    """Rows of some consecutive records, from row `first` to `end`."""

    first: int
    end: int
    tables: Sequence[pa.RecordBatch]
    """the record batches of the call; none if the core left all records"""
    left: Sequence[int]
    """rows of the records that Python must decode"""
    samples: Sequence[int] = ()
    """rows of records that Python also decodes"""


def can_decode(config: DecodeConfig, records: int) -> bool:
    """Return true if the core decodes a task of so many records."""
    if not config.native_core or config.decoder or config.message_ids.text != AUTHOR_SEQNO:
        return False
    return is_worth_it(records)


def is_worth_it(records: int) -> bool:
    """Return true if there is a core, and it is faster than Python for a task of so many records."""
    return records >= MIN_RECORDS and load_library() is not None


class Core:
    """Decoder of the records of one task."""

    def __init__(self, config: DecodeConfig = _DEFAULTS) -> None:
        """Create the decoder. `can_decode` must be true; for `batch`, which needs no configuration, `is_worth_it`."""
        library = load_library()
        assert library is not None
        self._library, self._config = library, config
        seed = secrets.randbits(64)  # no peer can choose which records are compared
        self._core = library.kiln_new(config.batch_typ, config.unsigned_horizon, config.ceramic, seed, SAMPLE_ONE_IN)

    def __del__(self) -> None:
        self._library.kiln_free(self._core)

    def archive(self, batch: pa.RecordBatch) -> Iterator[CoreRows]:
        """Decode a batch of RECORDS for `archive`: TABLES_OF_CORE, keys of frames and identities of messages."""
        return self._decode(self._library.kiln_archive, len(TABLES_OF_CORE) + 2, batch, self._prepare)

    def updates(self, batch: pa.RecordBatch) -> Iterator[CoreRows]:
        """Decode a batch of RECORDS for `updates`: one table of messages."""
        return self._decode(self._library.kiln_updates, 1, batch, self._prepare)

    def batch(self, batch: pa.RecordBatch) -> Iterator[CoreRows]:
        """Decode a batch of RECORDS of `kiln.updates` for `batch`: records, owners of their windows, and epochs."""
        return self._decode(self._library.kiln_batch, 3, batch, None)

    def _decode(
        self, function: Callable[..., int], tables: int, batch: pa.RecordBatch, prepare: _Prepare | None
    ) -> Iterator[CoreRows]:
        with _ExportedBatch(batch.select(_RECORD_COLUMNS.names).cast(_RECORD_COLUMNS)) as exported:
            first = 0
            while first < batch.num_rows:
                if prepare is not None:
                    prepare(batch, exported, first)
                rows, causes = self._call(function, tables, exported, first)
                for row, cause in zip(rows.left, causes, strict=True):
                    if cause == _PANICKED:
                        log_panic(batch.column("partition")[row].as_py(), batch.column("offset")[row].as_py())
                first = rows.end
                yield rows

    def _prepare(self, batch: pa.RecordBatch, exported: _ExportedBatch, first: int) -> None:
        """Pass the core what it needs for the frames of its next call: topic tables, and checked signatures."""
        unknown = (ctypes.c_int32 * _MAX_TABLES)()
        count = self._library.kiln_unknown_tables(self._core, exported.array, first, unknown, _MAX_TABLES)
        for row in unknown[: max(count, 0)]:
            self._learn(batch.column("value")[row].as_py())
        self._check_signatures(exported, first)

    def _call(
        self, function: Callable[..., int], tables: int, exported: _ExportedBatch, first: int
    ) -> tuple[CoreRows, list[int]]:
        """Decode the records from `first` on, as many as one call takes."""
        out = _ImportedBatches(tables + 2)
        end = function(self._core, exported.array, first, out.arrays, out.schemas)
        if end < 0:  # the core panicked
            end = min(first + _LEFT_AT_ONCE, exported.rows)
            left = list(range(first, end))
            return CoreRows(first, end, (), left), [_PANICKED] + [0] * (len(left) - 1)
        *made, remaining, samples = out.take()
        left, causes = (column.to_pylist() for column in remaining.columns)
        return CoreRows(first, end, made, left, samples.column(0).to_pylist()), causes

    def _learn(self, value: bytes) -> None:
        """Negotiate the topic table of a frame, and pass it to the core."""
        frame = read_frame(value)
        if isinstance(frame, Rejected):
            return
        hello_in, hello_out = frame.hello_in, frame.hello_out
        agreed = negotiate_table(hello_in, hello_out, self._config.bundles)
        topics = [str(agreed.table.resolve(index)).encode() for index in range(1, len(agreed.table) + 1)]
        ends, size = (ctypes.c_uint32 * len(topics))(), 0
        for index, topic in enumerate(topics):
            ends[index] = size = size + len(topic)
        count = -1 if agreed.refused else len(topics)
        self._library.kiln_learn(
            self._core, hello_in, len(hello_in), hello_out, len(hello_out), b"".join(topics), ends, count
        )

    def _check_signatures(self, exported: _ExportedBatch, first: int) -> None:
        """Check each signature that the bridge has not checked once, and pass the results to the core."""
        out = _ImportedBatches(1)
        if self._library.kiln_unchecked(self._core, exported.array, first, out.arrays, out.schemas) < 0:
            return  # the core panicked: Python decodes these records
        (unchecked,) = out.take()
        columns = (column.to_pylist() for column in unchecked.columns)
        for key, envelope, network, origin, topic in zip(*columns, strict=True):
            policy = self._config.policy(network, origin, topic)
            try:
                judgement = check_signature(Message.FromString(envelope), topic, Verdict.NOT_CHECKED, policy)
            except PROCESSING_ERRORS:
                continue  # Python decodes the record, and reports it
            self._library.kiln_learn_signature(self._core, key, len(key), judgement.verdict is Verdict.VALID)


def take_records(batch: pa.RecordBatch, rows: Sequence[int]) -> Iterator[RecordRow]:
    """Take records out of a batch of RECORDS."""
    if rows:
        taken = batch.select(_RECORD_COLUMNS.names).take(pa.array(rows, pa.int32()))
        for row, *record in zip(rows, *(column.to_pylist() for column in taken.columns), strict=True):
            yield RecordRow(row, *record)


def leave_all(batch: pa.RecordBatch, first: int = 0, end: int | None = None) -> Iterator[CoreRows]:
    """Leave records to Python, at most 1,000 in one result."""
    end = batch.num_rows if end is None else end
    for start in range(first, end, _LEFT_AT_ONCE):
        stop = min(start + _LEFT_AT_ONCE, end)
        yield CoreRows(start, stop, (), range(start, stop))


class _ExportedBatch:
    """A record batch as C structs, for as long as the context lasts."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch
        self._memory = ctypes.create_string_buffer(_ARRAY_BYTES + _SCHEMA_BYTES)
        self.array = ctypes.addressof(self._memory)
        self.rows: int = batch.num_rows

    def __enter__(self) -> _ExportedBatch:
        self._batch._export_to_c(self.array, self.array + _ARRAY_BYTES)
        return self

    def __exit__(self, *_: object) -> None:
        pa.RecordBatch._import_from_c(self.array, self.array + _ARRAY_BYTES)  # which releases it


class _ImportedBatches:
    """Memory for the C structs of record batches that the core builds."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._memory = ctypes.create_string_buffer(count * (_ARRAY_BYTES + _SCHEMA_BYTES))
        self.arrays = ctypes.addressof(self._memory)
        self.schemas = self.arrays + count * _ARRAY_BYTES

    def take(self) -> list[pa.RecordBatch]:
        """Take the record batches over, which then own their memory."""
        return [
            pa.RecordBatch._import_from_c(self.arrays + at * _ARRAY_BYTES, self.schemas + at * _SCHEMA_BYTES)
            for at in range(self._count)
        ]


_Prepare = Callable[[pa.RecordBatch, _ExportedBatch, int], None]
