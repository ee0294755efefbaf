"""Transforms of the query `archive`: decode each frame of `kiln.frames` once, for its tables and for quarantine.

Two stages do this, and deduplication selects the first copy of each message between them (decisions 5, 10 and 18). The
first stage decodes, and its tasks write the files of `frames` and of the tables in `PARTS`. The second stage writes
`messages`. If the digests of messages are in a file, one task runs both stages. If they are in Spark's state, Spark's
operators deduplicate between the stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import DataFrame

from kiln.pipelines.archive.control_rows import (
    CONTROLS,
    ENTRY_ROW_BYTES,
    NO_CONTROL_ROWS,
    SUBSCRIPTIONS,
    ControlRows,
    build_control_rows,
    estimate_size,
    read_control_rpc,
)
from kiln.pipelines.decode.breaker import AuthorTally
from kiln.pipelines.decode.decoder import (
    DecodeConfig,
    DecodedMessage,
    FrameDecoder,
    MessageRef,
    RejectedMessage,
    build_frame_key,
    compute_fault_identity,
    compute_identities,
    get_signer,
    is_lasting,
    reject_failed,
    reject_unreadable,
)
from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS
from kiln.pipelines.decode.user_decoder import STAGE as DECODER_STAGE
from kiln.pipelines.decode.user_decoder import MessageDecoder
from kiln.pipelines.delta.arrow_rows import RowBuffer, select_columns
from kiln.pipelines.delta.files import DataFile, TableFiles
from kiln.pipelines.delta.frame_ranges import FrameRangeFilter
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.dedup_store import CHUNK_BYTES, CHUNK_ROWS, DedupStoreConfig, filter_new_copies
from kiln.pipelines.runtime.epoch import get_task_epoch
from kiln.pipelines.runtime.kafka_ranges import ArrowTask
from kiln.pipelines.runtime.micro_batch_clock import get_batch_time, with_dedup_watermark
from kiln.pipelines.runtime.row_packing import (
    PackedRow,
    build_packed_ddl,
    pack_rows,
    unpack_rows,
)
from kiln.schemas.delta.tables import TABLES, Column
from kiln.schemas.kafka.frames import BEP50, DIRECTIONS, ORIGINS, RPC_TOO_COSTLY, read_frame
from kiln.schemas.kafka.records import (
    MAX_QUARANTINED,
    QuarantineRecord,
    build_quarantine_key,
    build_quarantine_records,
    encode,
)
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.identity import VERDICT_NAMES, Verdict, peer_text

_Batches = Iterator[pa.RecordBatch]
_Row = tuple[object, ...]
_RejectRow = Callable[[tuple[Column, ...], Sequence[object], Exception], None]
"""Receives the columns of a table, a row that the table cannot store, and the error."""

FRAMES = select_columns(TABLES["frames"])
COPIES = select_columns(TABLES["copies"])
MESSAGES = select_columns(TABLES["messages"])
_TYPE, _AUTHOR, _TIPS, _DATA, _VERDICT, _OBSERVED, _PARTITION, _OFFSET, _INDEX, _DECODED = (
    next(index for index, column in enumerate(MESSAGES) if column.name == name)
    for name in (
        "type",
        "from_peer",
        "tips",
        "data",
        "verdict",
        "observed_at",
        "kafka_partition",
        "kafka_offset",
        "message_index",
        "decoded",
    )
)
_SUBSCRIBE = next(index for index, column in enumerate(SUBSCRIPTIONS) if column.name == "subscribe")
_KIND = next(index for index, column in enumerate(CONTROLS) if column.name == "kind")
_VALID = VERDICT_NAMES[Verdict.VALID]

PARTS = ("copies", "subscriptions", "controls")
"""Tables whose rows are parts of a frame, at its position."""

IDENTITIES = ("early", "late")
"""Columns of the digests that identify copies of a message (decision 5)."""

DECODED_DDL = build_packed_ddl(IDENTITIES)
OUTPUT_DDL = "kind string, key binary, value binary"
FAULT = "fault"
DECODE_RESULT = "decode_result"
ARCHIVE_OUTPUT = "archive_output"
"""Kinds of rows in addition to those of `messages`: a quarantine record, a `DecodeResult`, an `ArchiveOutput`."""


class DecodeResult(msgspec.Struct, frozen=True, array_like=True):
    """Result of one decode task."""

    spans: dict[int, tuple[int, int]]
    """first and last offset, by partition"""
    frame_ranges: dict[bytes, list[tuple[int, int]]]
    """the frames in the files, as `kiln.pipelines.delta.frame_ranges.FrameRanges`"""
    frames: list[DataFile]
    parts: list[DataFile]
    """files of the tables in PARTS"""
    valid_copies: int = 0
    """copies of valid messages"""
    entries: dict[str, int] = {}
    """subscriptions and control entries by kind"""
    core_differences: int = 0
    """records that the native core and Python decoded into other rows"""


class ArchiveOutput(msgspec.Struct, frozen=True, array_like=True):
    """Result of one task of the second stage. `counts`: messages by type, and faults by reason."""

    messages: list[DataFile]
    counts: dict[str, int]
    faults: int
    tallies: list[AuthorTally]


def build_python_task(config: DecodeConfig, lake: Lake, dedup: DedupStoreConfig) -> ArrowTask:
    """Build the task that decodes records, and writes the rows of each table to files. RECORDS in; OUTPUT_DDL out. The
    output has the quarantine records, and for each task a `DecodeResult` with the files of `frames` and its parts, and
    an `ArchiveOutput` with the files of `messages`.

    A frame that comes twice in one task is written once. The driver removes frames of earlier micro-batches.
    """

    def archive(batches: _Batches) -> _Batches:
        output = OutputWriter(config, lake)
        chunks = decode_records(batches, config, lake, compute_task_digest(), every_copy=True)
        for new in filter_new_copies(chunks, dedup, get_batch_time(), get_task_epoch()):
            yield from output.write(new)
        yield from output.finish()

    return archive


def build_decode_task(config: DecodeConfig, lake: Lake) -> ArrowTask:
    """Build the task that runs the first stage of `build_python_task`. RECORDS in; DECODED_DDL out: each copy of a
    message, each fault, and one `DecodeResult` per task."""

    def decode(batches: _Batches) -> _Batches:
        chunks = decode_records(batches, config, lake, compute_task_digest())
        packed = (row for chunk in chunks for copy in chunk for row in build_message_rows(copy))
        return pack_rows(packed, IDENTITIES, get_batch_time())

    return decode


def deduplicate_messages(rows: DataFrame, retention: int) -> DataFrame:
    """Keep one valid copy of each message, and every fault. Packed rows in; kind, data out. `retention`: µs.

    The watermark follows the time of the micro-batch (`MicroBatchClock`), so that no row is ever late:
    `dropDuplicatesWithinWatermark` drops late rows silently, and after an outage Spark reads partitions at different
    speeds.
    """
    rows = with_dedup_watermark(rows, retention)
    return rows.dropDuplicatesWithinWatermark(["early"]).dropDuplicatesWithinWatermark(["late"]).select("kind", "data")


def write_messages(rows: DataFrame, config: DecodeConfig, lake: Lake) -> DataFrame:
    """Run the second stage of `build_python_task`. Columns kind, data in; OUTPUT_DDL out."""

    def write(batches: _Batches) -> _Batches:
        output = OutputWriter(config, lake)
        yield from output.write(unpack_message_rows(batches))
        yield from output.finish()

    return rows.select("kind", "data").mapInArrow(write, OUTPUT_DDL)


# ---------------------------------------------------------------- the first stage


def decode_records(
    batches: _Batches, config: DecodeConfig, lake: Lake, task: bytes, *, every_copy: bool = False
) -> Iterator[list[PackedRow]]:
    """Decode the records of a task, and write the rows of `frames` and of the tables in PARTS into files.

    Args:
        batches: Columns partition, offset, stamp and value of RECORDS.
        config: How to decode.
        lake: The lake of the files.
        task: Digest that each attempt of the task shares, and no other task.
        every_copy: If false, only the first copy of each message in the task is yielded, to save Spark's operators
            work. With a deduplication file every copy is needed, because the file may have accepted a later copy of
            this task already.

    Yields:
        In chunks for `filter_new_copies`: copies of messages, each with its `DecodedMessage` as row; faults; and the
        task's `DecodeResult`.
    """
    rejected: list[RejectedMessage] = []
    frames = TableFiles(lake, "frames", refuse=partial(record_rejection, rejected, FRAMES))
    parts = PartFiles(lake, partial(record_rejection, rejected))
    decoder = FrameDecoder(config)
    frame_filter = FrameRangeFilter({})
    lasting: dict[tuple[str, str], tuple[bytes, ...]] = {}  # digests that do not depend on the time, by message
    emitted: set[tuple[bytes, ...]] = set()  # the other digests
    spans: dict[int, tuple[int, int]] = {}
    valid_copies = 0
    chunk: list[PackedRow] = []
    chunk_bytes = 0
    for batch in batches:
        columns = (batch.column(name).to_pylist() for name in ("partition", "offset", "stamp", "value"))
        for partition, offset, stamp, value in zip(*columns, strict=True):
            spans[partition] = (spans.get(partition, (offset,))[0], offset)
            decoded = decode_record(decoder, partition, offset, stamp, value)
            frame = decoded.frame
            if frame is not None and frame_filter.accept(frame.connection, frame.direction, frame.sequence):
                frames.add(decoded.row, len(value))
                parts.add(decoded)
            for item in decoded.items:
                if isinstance(item, RejectedMessage):
                    chunk += pack_faults(item)
                    continue
                valid_copies += item.copy is not None or not item.own  # a copy is received
                if is_lasting(item.message_id, item.verdict is Verdict.VALID):
                    name = item.network, item.message_id
                    identities = lasting.get(name)
                    is_repeated = identities is not None
                    if identities is None:
                        identities = lasting[name] = compute_identities(item, "", config.unsigned_horizon)[:1]
                else:
                    identities = compute_identities(item, "", config.unsigned_horizon)
                    is_repeated = identities in emitted
                    emitted.add(identities)
                if every_copy or not is_repeated:
                    chunk.append(PackedRow("messages", identities, item.ref.text, item, 0))
            if decoded.items:
                chunk_bytes += len(value or b"") + _ROW_OVERHEAD * len(decoded.items)
                if len(chunk) >= CHUNK_ROWS or chunk_bytes >= CHUNK_BYTES:
                    yield chunk
                    chunk, chunk_bytes = [], 0
    files = frames.close(), parts.close()
    for fault in rejected:
        chunk += pack_faults(fault)
    if spans:
        result = msgspec.msgpack.encode(DecodeResult(spans, frame_filter.accepted, *files, valid_copies, parts.entries))
        chunk.append(PackedRow(DECODE_RESULT, (task,), task.hex(), (result,), len(result)))
    if chunk:
        yield chunk


_ROW_OVERHEAD: Final = 500
"""approximate bytes of a message or of its row, in addition to its data"""


class DecodedRecord(NamedTuple):
    """A decoded record of `kiln.frames`, and the rows of its parts."""

    items: list[DecodedMessage | RejectedMessage]
    copies: Sequence[_Row] = ()
    control: ControlRows = NO_CONTROL_ROWS
    frame: Frame | None = None
    """`None` if the record is not a Frame, or has no row"""
    row: _Row = ()
    """of `frames`"""


def decode_record(decoder: FrameDecoder, partition: int, offset: int, stamp: int, value: bytes | None) -> DecodedRecord:
    """Decode one record. If this fails, the record is a fault of the stage `archive`, and stays in `frames` if it has a
    row there."""
    frame: Frame | None = None
    row: _Row = ()
    try:
        read = read_frame(value)
        if isinstance(read, Rejected):
            return DecodedRecord([reject_unreadable(read, value, partition, offset, stamp)])
        row, frame = build_frame_row(partition, offset, stamp, read), read
        return decode_parts(decoder, frame, partition, offset, row)
    except PROCESSING_ERRORS as error:  # all of the above is pure: the record alone has caused this
        fault = reject_failed("archive", error, MessageRef(partition, offset, None), value or b"", stamp)
        return DecodedRecord([fault], frame=frame, row=row)


def decode_parts(decoder: FrameDecoder, frame: Frame, partition: int, offset: int, row: _Row = ()) -> DecodedRecord:
    """Decode a frame into the rows of its parts. Its messages are decoded even if its control part cannot be read."""
    rpc = read_control_rpc(frame)  # parsed once for its messages and its control part
    items = decoder.decode_frame(frame, partition, offset, rpc)
    copies = [build_copy_row(item, frame) for item in items if item.copy is not None]
    control = NO_CONTROL_ROWS
    try:
        if rpc is not None:
            control = build_control_rows(frame, rpc, decoder.config, partition, offset)
        if control.unread:
            items.append(reject_unread(control, frame, partition, offset))
    except PROCESSING_ERRORS as error:  # pure: the frame alone has caused this
        ref, at = MessageRef(partition, offset, None), frame.observed_at // 1000
        items.append(reject_failed("archive", error, ref, frame.payload, at, build_frame_key(frame)))
    return DecodedRecord(items, copies, control, frame, row)


class PartFiles:
    """Writer of the rows of the tables in PARTS."""

    def __init__(self, lake: Lake, reject: _RejectRow | None = None) -> None:
        """`reject`: called with each row that its table cannot store; by default `add` or `close` raises."""
        self._copies, self._subscriptions, self._controls = (
            TableFiles(lake, table, refuse=reject and partial(reject, select_columns(TABLES[table]))) for table in PARTS
        )
        self.entries = Counter[str]()
        """subscriptions and control entries by kind"""

    def add(self, record: DecodedRecord) -> None:
        """Add the rows of a record."""
        for row in record.copies:
            self._copies.add(row, _ROW_OVERHEAD)
        for row in record.control.subscriptions:
            self._subscriptions.add(row, ENTRY_ROW_BYTES)
            self.entries["SUBSCRIBE" if row[_SUBSCRIBE] else "UNSUBSCRIBE"] += 1
        for row in record.control.controls:
            self._controls.add(row, estimate_size(row))
            self.entries[str(row[_KIND])] += 1

    def gather(self, parts: Mapping[str, pa.RecordBatch]) -> None:
        """Add record batches by table."""
        self._copies.gather(parts["copies"])
        self._subscriptions.gather(parts["subscriptions"])
        self._controls.gather(parts["controls"])
        for subscribe, count in count_values(parts["subscriptions"].column("subscribe")):
            self.entries["SUBSCRIBE" if subscribe else "UNSUBSCRIBE"] += count
        for kind, count in count_values(parts["controls"].column("kind")):
            self.entries[str(kind)] += count

    def close(self) -> list[DataFile]:
        """Close and return all files."""
        return [file for table in (self._copies, self._subscriptions, self._controls) for file in table.close()]


def count_values(column: pa.Array) -> Iterator[tuple[object, int]]:
    """Count the rows of each value."""
    for counted in pc.value_counts(column).to_pylist():
        yield counted["values"], counted["counts"]


def reject_unread(control: ControlRows, frame: Frame, partition: int, offset: int) -> RejectedMessage:
    """Build the fault of a frame with more entries than the limit for one RPC. The frame has their bytes."""
    read = len(control.subscriptions) + len(control.controls)
    detail = f"{read + control.unread} subscriptions and control entries, of which the first {read} are read"
    ref, at = MessageRef(partition, offset, None), frame.observed_at // 1000
    return RejectedMessage(ref, "rpc", RPC_TOO_COSTLY, detail, b"", at, build_frame_key(frame))


def record_rejection(
    faults: list[RejectedMessage], columns: tuple[Column, ...], row: Sequence[object], error: Exception
) -> None:
    """Record a row that its table cannot store."""
    faults.append(reject_row(columns, row, error))


def reject_row(columns: tuple[Column, ...], row: Sequence[object], error: Exception) -> RejectedMessage:
    """Build the fault of a row, in the order of `columns`, that its table cannot store. Its data is the payload of the
    frame or the data of the message; a row of `copies` has none."""
    named = {column.name: value for column, value in zip(columns, row, strict=True)}
    partition, offset, index = (named.get(name) for name in ("kafka_partition", "kafka_offset", "message_index"))
    data, at = named.get("payload", named.get("data")), named["observed_at"]
    assert isinstance(partition, int)
    assert isinstance(offset, int)
    ref = MessageRef(partition, offset, index if isinstance(index, int) else None)
    return reject_failed(
        "archive", error, ref, data if isinstance(data, bytes) else b"", at if isinstance(at, int) else 0
    )


def build_message_rows(item: PackedRow) -> list[PackedRow]:
    """Build the row of `messages` of a copy that `decode_records` yields; anything else stays as it is. Call it after
    deduplication, because rows are expensive to build."""
    message = item.row
    if not isinstance(message, DecodedMessage):
        return [item]
    try:
        row = build_message_row(message)
    except PROCESSING_ERRORS as error:  # pure: the message alone has caused this
        data = message.envelope.SerializeToString()
        return pack_faults(reject_failed("archive", error, message.ref, data, message.observed_at))
    size = len(message.envelope.data) + len(message.message_id) + len(message.topic) + _ROW_OVERHEAD
    return [PackedRow(item.kind, item.identities, item.position, row, size)]


def decode_data(row: Sequence[object], decoder: MessageDecoder) -> tuple[Sequence[object], RejectedMessage | None]:
    """Fill the column `decoded` of a row in the order of MESSAGES.

    Returns:
        The row, and `None`; or the row as it was, and the fault, with the data of the message.
    """
    data, observed_at, partition, offset = row[_DATA], row[_OBSERVED], row[_PARTITION], row[_OFFSET]
    assert isinstance(data, bytes)
    assert isinstance(observed_at, int)
    assert isinstance(partition, int)
    assert isinstance(offset, int)
    decoded = decoder.decode(data)
    if isinstance(decoded, str):
        return (*row[:_DECODED], decoded, *row[_DECODED + 1 :]), None
    index = row[_INDEX]
    ref = MessageRef(partition, offset, index if isinstance(index, int) else None)
    return row, RejectedMessage(ref, DECODER_STAGE, decoded.reason, decoded.detail, data, observed_at)


def pack_message(item: DecodedMessage, config: DecodeConfig) -> PackedRow:
    """Pack a copy of a message with its digests. `build_message_rows` builds its row."""
    identities = compute_identities(item, "", config.unsigned_horizon)
    lasting = is_lasting(item.message_id, item.verdict is Verdict.VALID)
    return PackedRow("messages", identities[:1] if lasting else identities, item.ref.text, item, 0)


def pack_faults(item: RejectedMessage) -> list[PackedRow]:
    """Build the rows of a fault for quarantine."""
    position = item.ref.text
    return [PackedRow(FAULT, (identity,), position, row, len(row[-1])) for identity, row in build_fault_rows(item)]


def compute_task_digest() -> bytes:
    """Compute a digest that all attempts of a task share, so that only one attempt counts."""
    epoch, context = get_task_epoch(), TaskContext.get()
    partition = 0 if context is None else context.partitionId()
    return blake2b(f"{epoch.query}/{epoch.batch}/{partition}".encode(), digest_size=16).digest()


def build_frame_row(partition: int, offset: int, stamp: int, frame: Frame) -> _Row:
    """Build the row of a frame, in the order of FRAMES. `stamp`: the broker's, µs."""
    protocol, payload = frame.protocol, frame.payload
    return (
        frame.network,
        frame.connection,
        DIRECTIONS[frame.direction],
        _format_peer(frame.local_peer, protocol),
        _format_peer(frame.remote_peer, protocol),
        protocol,
        frame.observed_at // 1000,
        frame.sequence,
        payload,
        frame.hello_in,
        frame.hello_out,
        frame.verdicts,
        ORIGINS[frame.origin],
        frame.remote_address,
        frame.declared_length,
        partition,
        offset,
        stamp,
        *(_NO_RECORD if payload or not frame.HasField("dialled") else _read_connection_record(frame)),
    )


_NO_RECORD: Final = (None, None, None)


def _read_connection_record(frame: Frame) -> tuple[str | None, str | None, bool]:
    return frame.agent or None, frame.end_reason or None, frame.dialled


def build_copy_row(item: DecodedMessage | RejectedMessage, frame: Frame) -> _Row:
    """Build the row, in the order of COPIES, of a received message, valid or not.

    The network is that of the topic, given by name or by index, as in the table `messages`, and without a topic that of
    the frame.

    Raises:
        ValueError: The item is no copy.
    """
    if item.copy is None:
        raise ValueError("a fault of a whole frame, or an announcement in the DHT, is not a copy of a message")
    remote = item.remote_peer if isinstance(item, DecodedMessage) else peer_text(frame.remote_peer)
    network, message_id, verdict = item.copy
    return network, message_id, remote, item.observed_at, verdict, *item.ref


def _format_peer(raw: bytes, protocol: str) -> str:
    """Format a peer id as text. The only text form of a node id of the BitTorrent DHT is hex."""
    return raw.hex() if protocol == BEP50 else peer_text(raw)


def build_message_row(item: DecodedMessage) -> _Row:
    """Build the row of a valid message, in the order of MESSAGES."""
    content, envelope = item.content, item.envelope
    signer = get_signer(item)
    return (
        item.message_id,
        item.network,
        item.origin,
        item.topic,
        item.topic_source,
        content.type,
        signer,
        envelope.seqno if signer else None,
        content.stream,
        content.tip,
        content.model,
        content.sep,
        content.batch,
        content.query_id,
        list(content.tips.items()) if content.tips is not None else None,
        content.ts,
        content.ver,
        content.ipfs_ver,
        envelope.data,
        VERDICT_NAMES[item.verdict],
        item.remote_peer,
        item.observed_at,
        *item.ref,
        None,  # decoded: `decode_data`, after deduplication
    )


def build_fault_rows(item: RejectedMessage) -> Iterator[tuple[bytes, tuple[str, str, bytes, bytes]]]:
    """Build identity, reason, author, key and value of the quarantine record. Bytes that are too many for one record
    give several, each with a numbered part."""
    own = compute_fault_identity(item)
    for number, record in enumerate(build_fault_records(item)):
        identity = blake2b(own + (number * MAX_QUARANTINED).to_bytes(8), digest_size=16).digest() if number else own
        yield identity, (item.reason, item.author, build_quarantine_key(*item.ref), encode(record))


def build_fault_records(item: RejectedMessage) -> Iterator[QuarantineRecord]:
    """Build the quarantine records of a fault, part by part."""
    return build_quarantine_records(item.stage, item.reason, item.detail, item.data, item.observed_at)


# ---------------------------------------------------------------- the second stage


class OutputWriter:
    """Second stage: writes `messages` into files, and builds OUTPUT_DDL rows."""

    def __init__(self, config: DecodeConfig, lake: Lake) -> None:
        self._decoder = MessageDecoder(config.decoder) if config.decoder else None
        self._rejected: list[RejectedMessage] = []
        self._messages = TableFiles(lake, "messages", refuse=partial(record_rejection, self._rejected, MESSAGES))
        self._out = RowBuffer(pa.schema([("kind", pa.string()), ("key", pa.binary()), ("value", pa.binary())]))
        self._counts, self._valid, self._failed = Counter[str](), Counter[str](), Counter[str]()

    def write(self, rows: Iterable[PackedRow]) -> _Batches:
        """Write deduplicated rows."""
        for item in rows:
            for kind, _, _, row, size in build_message_rows(item):
                if kind == "messages":
                    if self._decoder is not None:  # after deduplication: the decoder is the user's, and may be slow
                        row, fault = decode_data(row, self._decoder)
                        if fault is not None:
                            yield from self._add_faults(fault)
                    decoded = row[_DECODED]
                    self._messages.add(row, size + (len(decoded) if isinstance(decoded, str) else 0))
                    self._counts[str(row[_TYPE])] += 1
                    if row[_VERDICT] == _VALID:
                        self._valid[str(row[_AUTHOR])] += 1
                elif kind == FAULT:
                    yield from self._add_fault(row, size)
                elif self._out.add((kind, None, row[0]), size):
                    yield from self._out.drain()

    def write_batch(self, messages: pa.RecordBatch) -> None:
        """Write deduplicated rows of `messages` as the native core builds them."""
        if messages.num_rows:
            self._messages.gather(messages)
            for kind, count in count_values(messages.column("type")):
                self._counts[str(kind)] += count
            is_valid = pc.equal(messages.column("verdict"), _VALID)
            for author, count in count_values(messages.column("from_peer").filter(is_valid)):
                self._valid[str(author)] += count

    def finish(self) -> _Batches:
        """Close the files, and yield the last rows with the `ArchiveOutput`."""
        files = self._messages.close()
        for fault in self._rejected:
            yield from self._add_faults(fault)
        faults = self._failed.total()
        del self._failed[""]  # not signed
        names = self._valid.keys() | self._failed.keys()
        tallies = [AuthorTally(name, self._valid[name], self._failed[name]) for name in names]
        output = msgspec.msgpack.encode(ArchiveOutput(files, self._counts, faults, tallies))
        self._out.add((ARCHIVE_OUTPUT, None, output))
        yield from self._out.drain()

    def _add_faults(self, fault: RejectedMessage) -> _Batches:
        for packed in pack_faults(fault):
            yield from self._add_fault(packed.row, packed.size)

    def _add_fault(self, row: Sequence[object], size: int) -> _Batches:
        reason, author, key, value = row
        self._counts[str(reason)] += 1
        self._failed[str(author)] += 1
        if self._out.add((FAULT, key, value), size):
            yield from self._out.drain()


def unpack_message_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[PackedRow]:
    """Unpack the rows that Spark's operators have accepted, from the columns kind and data."""
    for item in unpack_rows(batches):
        yield item._replace(row=restore_tip_pairs(item.row)) if item.kind == "messages" else item


def restore_tip_pairs(row: Sequence[object]) -> Sequence[object]:
    """Turn the pairs of a map into tuples, which Arrow expects. Packing makes them lists."""
    pairs = row[_TIPS]
    if isinstance(pairs, list) and isinstance(row, list):
        row[_TIPS] = [tuple(pair) for pair in pairs]
    return row
