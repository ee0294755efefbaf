"""Calls of the native core by ctypes, with record batches passed through Arrow's C data interface."""

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
"""Number of records in a task from which the native core is faster. The core has a fixed cost of some 3 ms a task."""

SAMPLE_ONE_IN = 1_000
"""One record in this many is also decoded in Python, to compare the results."""

_RECORD_COLUMNS: Final = pa.schema(
    [
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("stamp", pa.int64(), nullable=False),
        pa.field("value", pa.binary()),
    ]
)
"""Columns of a Kafka record that the core reads. It does not check their types."""
_ARRAY_BYTES, _SCHEMA_BYTES = 80, 72  # sizes of the structs of the C data interface
_PANICKED = 1  # in the column `cause` of a record that the core leaves to Python; else 0
_MAX_TABLES: Final = 1_024  # topic tables that the core learns in one call
_LEFT_AT_ONCE: Final = 1_000  # records that a result without tables leaves to Python

_DEFAULTS: Final = DecodeConfig()
_CoreFunction = Callable[[int, int, int, int, int], int]
"""Function of the library. Arguments: the core, a record batch, index of the first record, and memory for results."""


class RecordRow(NamedTuple):
    """A Kafka record, and its index in an Arrow record batch."""

    row: int
    partition: int
    offset: int
    stamp: int
    value: bytes | None


class CoreRows(NamedTuple):
    """Result of one call of the native core, for the records at the indexes from `first` to before `end`."""

    first: int
    end: int
    tables: Sequence[pa.RecordBatch]
    """tables that the core built from the records; empty if it left all records to Python"""
    left: Sequence[int]
    """indexes of the records that Python must decode"""
    samples: Sequence[int] = ()
    """indexes of the records that Python also decodes, to compare the results"""


def can_decode(config: DecodeConfig, records: int) -> bool:
    """Return true if the native core can decode with this configuration, and is faster than Python for this
    number of records."""
    if not config.native_core or config.decoder or config.message_ids.text != AUTHOR_SEQNO:
        return False
    return is_worth_it(records)


def is_worth_it(records: int) -> bool:
    """Return true if there is a native core, and it is faster than Python for a task with this number of records."""
    return records >= MIN_RECORDS and load_library() is not None


class Core:
    """A decoder of the native core, for the records of one task."""

    def __init__(self, config: DecodeConfig = _DEFAULTS) -> None:
        """Create the decoder. Check `can_decode` first. For `batch`, which needs no configuration, check
        `is_worth_it`."""
        library = load_library()
        assert library is not None
        self._library, self._config = library, config
        seed = secrets.randbits(64)  # no peer can choose which records are compared
        self._core = library.kiln_new(config.batch_typ, config.unsigned_horizon, config.ceramic, seed, SAMPLE_ONE_IN)

    def __del__(self) -> None:
        self._library.kiln_free(self._core)

    def archive(self, batch: pa.RecordBatch) -> Iterator[CoreRows]:
        """Decode Kafka records of `kiln.frames` for the query `archive`.

        Each result has TABLES_OF_CORE, then the deduplication keys of the frames, then those of the messages.
        """
        return self._decode(self._library.kiln_archive, len(TABLES_OF_CORE) + 2, batch)

    def updates(self, batch: pa.RecordBatch) -> Iterator[CoreRows]:
        """Decode Kafka records of `kiln.frames` for the query `updates`. Each result has one table, of messages."""
        return self._decode(self._library.kiln_updates, 1, batch)

    def batch(self, batch: pa.RecordBatch) -> Iterator[CoreRows]:
        """Decode Kafka records of `kiln.updates` for the query `batch`.

        Each result has three tables: the records, the keys of their windows (`WindowKey`), and the epochs of their
        writers (`WriterEpoch`).
        """
        return self._decode(self._library.kiln_batch, 3, batch, are_frames=False)

    def _decode(
        self, function: _CoreFunction, tables: int, batch: pa.RecordBatch, *, are_frames: bool = True
    ) -> Iterator[CoreRows]:
        """Decode a record batch by as many calls of a function as it takes. `tables`: number of tables that the
        function returns; `are_frames`: true for records of `kiln.frames`, which may have topic tables and unchecked
        signatures."""
        memory = ctypes.create_string_buffer(_ARRAY_BYTES + _SCHEMA_BYTES)
        array = ctypes.addressof(memory)
        batch.select(_RECORD_COLUMNS.names).cast(_RECORD_COLUMNS)._export_to_c(array, array + _ARRAY_BYTES)
        try:
            first = 0
            while first < batch.num_rows:
                if are_frames:
                    for row in self._find_unknown_tables(array, first):
                        self._learn(batch.column("value")[row].as_py())
                    self._check_signatures(array, first)
                end, made = self._call(function, tables + 2, array, first)
                if end < 0:  # the core panicked
                    end = min(first + _LEFT_AT_ONCE, batch.num_rows)
                    log_panic(batch.column("partition")[first].as_py(), batch.column("offset")[first].as_py())
                    yield CoreRows(first, end, (), range(first, end))
                else:
                    *made, remaining, samples = made
                    left, causes = (column.to_pylist() for column in remaining.columns)
                    for row, cause in zip(left, causes, strict=True):
                        if cause == _PANICKED:
                            log_panic(batch.column("partition")[row].as_py(), batch.column("offset")[row].as_py())
                    yield CoreRows(first, end, made, left, samples.column(0).to_pylist())
                first = end
        finally:
            pa.RecordBatch._import_from_c(array, array + _ARRAY_BYTES)  # releases what the core has read

    def _call(self, function: _CoreFunction, tables: int, array: int, first: int) -> tuple[int, list[pa.RecordBatch]]:
        """Call a function for the records from the index `first` on, as many as one call takes.

        Returns:
            The index after these records, and the tables that the core built. If the core panicked, a negative number
            and no tables.
        """
        memory = ctypes.create_string_buffer(tables * (_ARRAY_BYTES + _SCHEMA_BYTES))
        arrays = ctypes.addressof(memory)
        schemas = arrays + tables * _ARRAY_BYTES
        end = function(self._core, array, first, arrays, schemas)
        places = [(arrays + at * _ARRAY_BYTES, schemas + at * _SCHEMA_BYTES) for at in range(tables)]
        return end, [pa.RecordBatch._import_from_c(*place) for place in places] if end >= 0 else []

    def _find_unknown_tables(self, array: int, first: int) -> list[int]:
        """Return the indexes of the next call's frames whose topic tables the core does not know."""
        unknown = (ctypes.c_int32 * _MAX_TABLES)()
        count: int = self._library.kiln_unknown_tables(self._core, array, first, unknown, _MAX_TABLES)
        return list(unknown[: max(count, 0)])

    def _learn(self, value: bytes) -> None:
        """Pass to the core the topic table that the two sides of a connection have agreed on. `value`: a frame with
        their hellos."""
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

    def _check_signatures(self, array: int, first: int) -> None:
        """Check the signatures that the bridge has not checked, and pass the verdicts to the core. A signature is
        checked only once, however many copies the message has."""
        end, made = self._call(self._library.kiln_unchecked, 1, array, first)
        if end < 0:
            return  # the core panicked: Python decodes these records
        columns = (column.to_pylist() for column in made[0].columns)
        for key, envelope, network, origin, topic in zip(*columns, strict=True):
            policy = self._config.policy(network, origin, topic)
            try:
                judgement = check_signature(Message.FromString(envelope), topic, Verdict.NOT_CHECKED, policy)
            except PROCESSING_ERRORS:
                continue  # Python decodes the record, and reports it
            self._library.kiln_learn_signature(self._core, key, len(key), judgement.verdict is Verdict.VALID)


def take_records(batch: pa.RecordBatch, rows: Sequence[int]) -> Iterator[RecordRow]:
    """Read the records at some indexes of a record batch."""
    if rows:
        taken = batch.select(_RECORD_COLUMNS.names).take(pa.array(rows, pa.int32()))
        for row, *record in zip(rows, *(column.to_pylist() for column in taken.columns), strict=True):
            yield RecordRow(row, *record)


def leave_all(batch: pa.RecordBatch, first: int) -> Iterator[CoreRows]:
    """Build results that leave the records from the index `first` on to Python, at most 1,000 in each."""
    for start in range(first, batch.num_rows, _LEFT_AT_ONCE):
        end = min(start + _LEFT_AT_ONCE, batch.num_rows)
        yield CoreRows(start, end, (), range(start, end))
