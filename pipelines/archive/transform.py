"""Stages of the query `archive`, between which deduplication selects one copy of each message (decisions 5, 10 and
18).

The first stage, `decode_records`, decodes frames, and writes the files of `frames` and of the tables in PARTS. The
second stage, `OutputWriter`, writes the files of `messages`. Both pass on the rejected messages for quarantine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from kiln.pipelines.archive.record_decoder import (
    DECODE_RESULT,
    FAULT,
    MESSAGE,
    CopyChunk,
    DecodeResult,
    compute_task_digest,
    count_values,
    decode_records,
    pack_faults,
)
from kiln.pipelines.archive.rows import (
    ROW_BYTES,
    FaultRow,
    MessageRow,
    build_fault_rows,
    build_message_row,
    decode_data,
    reject_message,
    reject_row,
)
from kiln.pipelines.decode.breaker import AuthorTally
from kiln.pipelines.decode.decoder import DecodeConfig, DecodedMessage, RejectedMessage
from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS
from kiln.pipelines.decode.user_decoder import MessageDecoder
from kiln.pipelines.delta.arrow_rows import RowBuffer
from kiln.pipelines.delta.files import DataFile, TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.clocks import get_batch_time
from kiln.pipelines.runtime.dedup_store import DedupStoreConfig, open_dedup_store
from kiln.pipelines.runtime.deduplication import UniqueStages
from kiln.pipelines.runtime.epoch import get_task_epoch
from kiln.pipelines.runtime.kafka_ranges import ArrowTask
from kiln.pipelines.runtime.row_packing import UniqueRow, unpack_rows
from kiln.schemas.wire.identity import VERDICT_NAMES, Verdict

_Batches = Iterator[pa.RecordBatch]

IDENTITIES: Final = ("early", "late")
"""Columns of the two digests that identify the copies of a message (decision 5)"""

OUTPUT_DDL: Final = "kind string, key binary, value binary"
"""Columns of the rows that the tasks return to the driver: a quarantine record, a `DecodeResult` or an
`ArchiveOutput`"""
ARCHIVE_OUTPUT: Final = "archive_output"
"""Value of the column `kind` in the row of an `ArchiveOutput`"""

_OUTPUT: Final = pa.schema([("kind", pa.string()), ("key", pa.binary()), ("value", pa.binary())])
PACKED_TYPES: Final = {MESSAGE: MessageRow, FAULT: FaultRow, DECODE_RESULT: DecodeResult}
_VALID: Final = VERDICT_NAMES[Verdict.VALID]


class ArchiveOutput(msgspec.Struct, frozen=True, array_like=True):
    """Result of one task of the second stage. `counts`: number of messages by type, and of rejected ones by reason."""

    messages: list[DataFile]
    counts: dict[str, int]
    faults: int
    tallies: list[AuthorTally]


def build_stages(config: DecodeConfig, lake: Lake) -> UniqueStages:
    """Build the two stages: from Kafka records to rows with the columns OUTPUT_DDL.

    The output has the quarantine records; for each task of the first stage, a `DecodeResult` with the files of `frames`
    and its parts; and for each task of the second stage, an `ArchiveOutput` with the files of `messages`.

    A frame that comes twice in one task is written once. The driver drops frames that an earlier task or micro-batch
    has written. The native core is used only where both stages run in one task.
    """

    def decode(batches: _Batches) -> Iterator[UniqueRow[object]]:
        chunks = decode_records(batches, config, lake, compute_task_digest(), native_core=False)
        return _pack_messages(chunks)

    def write(batches: _Batches) -> _Batches:
        output = OutputWriter(config, lake)
        yield from output.write(unpack_rows(batches, PACKED_TYPES))
        yield from output.finish()

    def in_one_task(dedup: DedupStoreConfig) -> ArrowTask:
        return build_archive_task(config, lake, dedup)

    return UniqueStages(decode, IDENTITIES, write, OUTPUT_DDL, in_one_task)


def build_archive_task(config: DecodeConfig, lake: Lake, dedup: DedupStoreConfig) -> ArrowTask:
    """Build the task that runs both stages, with the deduplication file between them: from Kafka records to rows with
    the columns OUTPUT_DDL."""

    def archive(batches: _Batches) -> _Batches:
        output, store, now = OutputWriter(config, lake), open_dedup_store(dedup), get_batch_time()
        for chunk in decode_records(batches, config, lake, compute_task_digest()):
            accepted = store.select_new(chunk.identities, chunk.positions, chunk.order, now)
            from_core = chunk.messages.num_rows
            output.write_batch(chunk.messages.filter(pa.array(accepted[:from_core], pa.bool_())))
            yield from output.write(compress(chunk.items, accepted[from_core:]))
        store.mark(get_task_epoch(), now)
        yield from output.finish()

    return archive


def _pack_messages(chunks: Iterable[CopyChunk]) -> Iterator[UniqueRow[object]]:
    """Yield the rows for Spark's deduplication operators. Only the first copy of a message in the task is among them,
    to save work."""
    emitted: set[tuple[bytes, ...]] = set()
    for chunk in chunks:
        for item in chunk.items:
            if not isinstance(item.row, DecodedMessage):
                yield item
            elif item.identities not in emitted:
                emitted.add(item.identities)
                row = build_row(item.row)
                yield from pack_faults(row) if isinstance(row, RejectedMessage) else (item._replace(row=row),)


def build_row(message: DecodedMessage) -> MessageRow | RejectedMessage:
    """Build the row of `messages` of a copy. If that fails, reject the message."""
    try:
        return build_message_row(message)
    except PROCESSING_ERRORS as error:  # pure: the message alone has caused this
        return reject_message(message, error)


class OutputWriter:
    """Second stage: writes the files of `messages`, and builds the rows that the task returns."""

    def __init__(self, config: DecodeConfig, lake: Lake) -> None:
        self._decoder = MessageDecoder(config.decoder) if config.decoder else None
        self._rejected: list[RejectedMessage] = []
        self._messages = TableFiles(
            lake, "messages", refuse=lambda row, error: self._rejected.append(reject_row("messages", row, error))
        )
        self._out = RowBuffer(_OUTPUT)
        self._counts, self._valid, self._failed = Counter[str](), Counter[str](), Counter[str]()

    def write(self, items: Iterable[UniqueRow[object]]) -> _Batches:
        """Write the messages among the accepted rows to files, and yield the rows for the driver."""
        for item in items:
            row = build_row(item.row) if isinstance(item.row, DecodedMessage) else item.row
            if isinstance(row, MessageRow):
                if self._decoder is not None:  # after deduplication: the decoder is the user's, and may be slow
                    decoded = decode_data(row, self._decoder)
                    if isinstance(decoded, RejectedMessage):
                        yield from self._add_faults(decoded)
                    else:
                        row = decoded
                size = len(row.data) + len(row.message_id) + len(row.topic) + len(row.decoded or "")
                self._messages.add(row, ROW_BYTES + size)
                self._counts[row.type] += 1
                if row.verdict == _VALID:
                    self._valid[str(row.from_peer)] += 1
            elif isinstance(row, RejectedMessage):
                yield from self._add_faults(row)
            elif isinstance(row, FaultRow):
                yield from self._add_fault(row)
            elif self._out.add((item.kind, None, msgspec.msgpack.encode(row)), item.size):
                yield from self._out.drain()

    def write_batch(self, messages: pa.RecordBatch) -> None:
        """Write rows of `messages` that the native core built and deduplication has accepted."""
        if messages.num_rows:
            self._messages.gather(messages)
            for kind, count in count_values(messages.column("type")):
                self._counts[str(kind)] += count
            is_valid = pc.equal(messages.column("verdict"), _VALID)
            for author, count in count_values(messages.column("from_peer").filter(is_valid)):
                self._valid[str(author)] += count

    def finish(self) -> _Batches:
        """Close the files, and yield the last rows and the `ArchiveOutput`."""
        files = self._messages.close()
        for fault in self._rejected:
            yield from self._add_faults(fault)
        faults = self._failed.total()
        del self._failed[""]  # the faults of unsigned messages
        names = self._valid.keys() | self._failed.keys()
        tallies = [AuthorTally(name, self._valid[name], self._failed[name]) for name in names]
        output = msgspec.msgpack.encode(ArchiveOutput(files, self._counts, faults, tallies))
        self._out.add((ARCHIVE_OUTPUT, None, output))
        yield from self._out.drain()

    def _add_faults(self, fault: RejectedMessage) -> _Batches:
        for _, row in build_fault_rows(fault):
            yield from self._add_fault(row)

    def _add_fault(self, row: FaultRow) -> _Batches:
        self._counts[row.reason] += 1
        self._failed[row.author] += 1
        if self._out.add((FAULT, row.key, row.value), len(row.value)):
            yield from self._out.drain()
