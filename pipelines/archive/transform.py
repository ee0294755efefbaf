"""`kiln.frames` to the tables `frames`, `copies` and `messages`, and to what goes to quarantine: one decode for all.

Two stages stand around what lets the first copy of each message through (decisions 5, 10 and 18). The first decodes,
and writes `frames` and `copies` into files where it stands. The second writes `messages`. Where the digests are in a
file, one task does it all; where they are in Spark's state, its operators stand between the stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame

from kiln.pipelines.decode.breaker import AuthorTally
from kiln.pipelines.decode.decoder import (
    DecodeConfig,
    DecodedMessage,
    FrameDecoder,
    MessageRef,
    RejectedMessage,
    compute_fault_identity,
    compute_identities,
    get_signer,
    is_lasting,
    reject_failed,
    reject_unreadable,
)
from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS
from kiln.pipelines.delta.arrow_rows import RowBuffer, select_columns
from kiln.pipelines.delta.files import DataFile, TableFiles
from kiln.pipelines.delta.frame_ranges import FrameRangeFilter
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.dedup_store import DedupStoreConfig, filter_new_copies
from kiln.pipelines.runtime.epoch import get_task_epoch
from kiln.pipelines.runtime.micro_batch_clock import get_batch_time, with_dedup_watermark
from kiln.pipelines.runtime.row_packing import (
    PackedRow,
    UniqueRow,
    build_packed_ddl,
    pack,
    pack_rows,
    unpack_rows,
    unwrap_rows,
)
from kiln.schemas.delta.tables import TABLES, Column
from kiln.schemas.kafka.frames import BEP50, DIRECTIONS, ORIGINS, read_frame
from kiln.schemas.kafka.records import MAX_QUARANTINED, QuarantineRecord, encode, quarantine_key, quarantine_records
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.identity import Verdict, peer_text, raw_peer

_Batches = Iterator[pa.RecordBatch]
_Row = tuple[object, ...]

FRAMES = select_columns(TABLES["frames"])
COPIES = select_columns(TABLES["copies"])
MESSAGES = select_columns(TABLES["messages"])
_TYPE, _AUTHOR, _TIPS, _VERDICT = (
    next(place for place, column in enumerate(MESSAGES) if column.name == name)
    for name in ("type", "from_peer", "tips", "verdict")
)

IDENTITIES = ("early", "late")
"""The digests by which copies of a message are known (decision 5)."""

OUTPUT_DDL = "kind string, key binary, value binary"
FAULT = "fault"
DECODE_RESULT = "decode_result"
ARCHIVE_OUTPUT = "archive_output"
"""Kinds of rows beside those of `messages`: a record for quarantine, a `DecodeResult`, a `ArchiveOutput`."""


class DecodeResult(msgspec.Struct, frozen=True, array_like=True):
    """What a task of the first stage made of its records.

    `spans`: partition to first and last offset. `taken`: the frames in the files, as `held_frames.HeldFrames`.
    `good`: copies of good messages.
    """

    spans: dict[int, tuple[int, int]]
    taken: dict[bytes, list[tuple[int, int]]]
    frames: list[DataFile]
    copies: list[DataFile]
    good: int = 0


class ArchiveOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a task of the second stage made of its rows. `counts`: rows by type or, of faults, by reason."""

    messages: list[DataFile]
    counts: dict[str, int]
    faults: int
    tallies: list[AuthorTally]


def archive_frames(records: DataFrame, how: DecodeConfig, lake: Lake, remembered: DedupStoreConfig) -> DataFrame:
    """Columns partition, offset, stamp, value in; WRITTEN out: records for quarantine, a `DecodeResult` and a
    `ArchiveOutput` a task, which name the files with the rows of `frames` and `copies`, and of `messages`.

    The same frame twice in one task is written once. What an earlier micro-batch wrote, the driver takes out again.
    """

    def rows(batches: _Batches) -> _Batches:
        items = decode_records(batches, how, lake, _compute_task_digest(), every_copy=True)
        new = filter_new_copies(items, remembered, get_batch_time(), get_task_epoch())
        return write_rows(unwrap_rows(build_message_rows(new)), lake)

    return _select_columns(records).mapInArrow(rows, OUTPUT_DDL)


def decode_frames(records: DataFrame, how: DecodeConfig, lake: Lake) -> DataFrame:
    """The first stage of `archive_frames`. Columns partition, offset, stamp, value in; packed rows out: each copy of a
    message and each fault, and one `DecodeResult` a task."""

    def rows(batches: _Batches) -> _Batches:
        return pack_rows(
            build_message_rows(decode_records(batches, how, lake, _compute_task_digest())), IDENTITIES, get_batch_time()
        )

    return _select_columns(records).mapInArrow(rows, build_packed_ddl(IDENTITIES))


def deduplicate_messages(rows: DataFrame, remembered: int) -> DataFrame:
    """Packed rows in; kind, data out: one good copy of each message, and every fault. `remembered`: µs.

    Event time is the time of the micro-batch (`batch_clock`), so that no row is ever late.
    `dropDuplicatesWithinWatermark` drops late rows in silence, and after an outage Spark reads partitions at different
    speeds.
    """
    seen = with_dedup_watermark(rows, remembered)
    return seen.dropDuplicatesWithinWatermark(["early"]).dropDuplicatesWithinWatermark(["late"]).select("kind", "data")


def write_messages(rows: DataFrame, lake: Lake) -> DataFrame:
    """The second stage of `archive_frames`: kind, data in; WRITTEN out."""

    def made(batches: _Batches) -> _Batches:
        return write_rows(unpack_rows(batches), lake)

    return rows.select("kind", "data").mapInArrow(made, OUTPUT_DDL)


def _select_columns(records: DataFrame) -> DataFrame:
    return records.select("partition", "offset", "stamp", "value")


# ---------------------------------------------------------------- the first stage


def decode_records(
    batches: _Batches, how: DecodeConfig, lake: Lake, task: bytes, *, every_copy: bool = False
) -> Iterator[PackedRow]:
    """Records of a task in; the copies of messages, each with its `DecodedMessage` as row, faults, and the task's
    `DecodeResult` out. The rows of `frames` and `copies` go into files. `task`: the same for each attempt of the task,
    and for no other task.

    `every_copy`: else the first one of each message in the task, which spares Spark's operators the rest. A file is to
    be asked for every copy: the one that passed before may be a later one of this task.
    """
    sieve = FrameRangeFilter({})
    refused: list[RejectedMessage] = []
    refuse = partial(_record_rejection, refused)
    frames = TableFiles(lake, "frames", refuse=partial(refuse, FRAMES))
    copies = TableFiles(lake, "copies", refuse=partial(refuse, COPIES))
    decoder = FrameDecoder(how)
    passing: set[tuple[object, ...]] = set()  # what this task let through: the rest would be dropped anyway
    spans: dict[int, tuple[int, int]] = {}
    good = 0
    for batch in batches:
        for partition, offset, stamp, value in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            spans[partition] = (spans.get(partition, (offset,))[0], offset)
            record = read_record(decoder, partition, offset, stamp, value)
            new = False
            if record.frame is not None:
                new = sieve.passes(record.frame.connection, record.frame.direction, record.frame.sequence)
                if new:
                    frames.add(record.row, len(value))
            held = len(value or b"")  # by the messages of a frame, all together, for as long as there is one
            for item, copy in zip(record.items, record.copies, strict=True):
                if new and copy is not None:
                    copies.add(copy, _ROW_OVERHEAD)
                if isinstance(item, RejectedMessage):
                    yield from _pack_faults(item)
                    continue
                good += 1
                is_signed = item.verdict is Verdict.GOOD
                signed = (item.network, item.message) if is_signed else None
                if signed in passing and not every_copy:
                    continue
                known_by = compute_identities(item, "", how.unsigned_horizon)
                if every_copy or known_by not in passing:
                    passing.add(signed or known_by)  # of a signed message the digests are all of what is signed
                    digests = known_by[:1] if is_lasting(item.message, is_signed) else known_by
                    yield PackedRow("messages", digests, item.ref.text, item, held + _ROW_OVERHEAD)
                    held = 0
    files = frames.close(), copies.close()
    for fault in refused:
        yield from _pack_faults(fault)
    if spans:
        told = msgspec.msgpack.encode(DecodeResult(spans, sieve.taken, *files, good))
        yield PackedRow(DECODE_RESULT, (task,), task.hex(), (told,), len(told))


_ROW_OVERHEAD: Final = 500
"""bytes of a message, or of its row, about, beside its data"""


class RecordRows(NamedTuple):
    """The rows of one record of `kiln.frames`."""

    items: list[DecodedMessage | RejectedMessage]
    copies: list[_Row | None]
    """the row of `copies` of each item"""
    frame: Frame | None = None
    """`None`: the record is no Frame, or has no row"""
    row: _Row = ()
    """of `frames`"""


def read_record(decoder: FrameDecoder, partition: int, offset: int, stamp: int, value: bytes | None) -> RecordRows:
    """Everything that one record gives, and nothing of any other. Where this fails, the record is a fault of the stage
    `archive`, and stays in `frames` if it has a row there."""
    frame: Frame | Rejected | None = None
    row: _Row = ()
    try:
        frame = read_frame(value)
        if isinstance(frame, Rejected):
            return RecordRows([reject_unreadable(frame, value, partition, offset, stamp)], [None])
        row = build_frame_row(partition, offset, stamp, frame)
        items = list(decoder.decode_frame(frame, partition, offset))
        copies = [None if item.copy is None else build_copy_row(item, frame) for item in items]
    except PROCESSING_ERRORS as error:  # all of the above is pure: the record alone has caused this
        fault = reject_failed("archive", error, MessageRef(partition, offset, None), value or b"", stamp)
        return RecordRows([fault], [None], frame if row and isinstance(frame, Frame) else None, row)
    return RecordRows(items, copies, frame, row)


def _record_rejection(
    faults: list[RejectedMessage], columns: tuple[Column, ...], row: Sequence[object], error: Exception
) -> None:
    """Takes a row that its table cannot hold."""
    faults.append(reject_row(columns, row, error))


def reject_row(columns: tuple[Column, ...], row: Sequence[object], error: Exception) -> RejectedMessage:
    """The fault of a row, in the order of `columns`, that its table cannot hold. The bytes are the payload of the frame
    or the data of the message; a row of `copies` has none."""
    named = {column.name: value for column, value in zip(columns, row, strict=True)}
    partition, offset, index = (named.get(name) for name in ("kafka_partition", "kafka_offset", "message_index"))
    data, at = named.get("payload", named.get("data")), named["observed_at"]
    assert isinstance(partition, int)
    assert isinstance(offset, int)
    place = MessageRef(partition, offset, index if isinstance(index, int) else None)
    return reject_failed(
        "archive", error, place, data if isinstance(data, bytes) else b"", at if isinstance(at, int) else 0
    )


def build_message_rows(items: Iterable[PackedRow]) -> Iterator[PackedRow]:
    """Items of `decode_records` in; out with rows of `messages`. To be called where most copies are gone: a row is dear."""
    for item in items:
        if not isinstance(item.row, DecodedMessage):
            yield item
            continue
        message = item.row
        try:
            row = build_message_row(message)
        except PROCESSING_ERRORS as error:  # pure: the message alone has caused this
            data = message.envelope.SerializeToString()
            yield from _pack_faults(reject_failed("archive", error, message.ref, data, message.observed_at))
            continue
        size = len(message.envelope.data) + len(message.message) + len(message.topic) + _ROW_OVERHEAD
        yield PackedRow(item.kind, item.identities, item.position, row, size)


def _pack_faults(item: RejectedMessage) -> Iterator[PackedRow]:
    for identity, row in build_fault_rows(item):
        yield PackedRow(FAULT, (identity,), item.ref.text, row, len(row[-1]))


def _compute_task_digest() -> bytes:
    """The same for each attempt of a task, so that one attempt of the task counts."""
    epoch, context = get_task_epoch(), TaskContext.get()
    partition = 0 if context is None else context.partitionId()
    return blake2b(f"{epoch.query}/{epoch.batch}/{partition}".encode(), digest_size=16).digest()


def build_frame_row(partition: int, offset: int, stamp: int, frame: Frame) -> _Row:
    """The row of a frame in the order of FRAMES; `stamp`: the broker's, µs."""
    protocol = frame.protocol
    return (
        frame.network,
        frame.connection,
        DIRECTIONS[frame.direction],
        _format_peer(frame.local_peer, protocol),
        _format_peer(frame.remote_peer, protocol),
        protocol,
        frame.observed_at // 1000,
        frame.sequence,
        frame.payload,
        frame.hello_in,
        frame.hello_out,
        frame.verdicts,
        ORIGINS[frame.origin],
        frame.remote_address,
        frame.declared_length,
        partition,
        offset,
        stamp,
    )


class FrameRow(NamedTuple):
    """A row of the table `frames`, in the order of FRAMES. Times are µs."""

    network: str
    connection: bytes
    direction: str
    local_peer: str
    remote_peer: str
    protocol: str
    observed_at: int
    sequence: int
    payload: bytes
    hello_in: bytes
    hello_out: bytes
    verdicts: bytes
    origin: str
    remote_address: bytes
    declared_length: int
    kafka_partition: int
    kafka_offset: int
    kafka_timestamp: int


def parse_frame_row(row: FrameRow) -> Frame:
    """The Frame of a row, to the µs: the reverse of `build_frame_row`."""
    return Frame(
        network=row.network,
        connection=row.connection,
        direction=Frame.IN if row.direction == DIRECTIONS[Frame.IN] else Frame.OUT,
        local_peer=_parse_peer(row.local_peer, row.protocol),
        remote_peer=_parse_peer(row.remote_peer, row.protocol),
        protocol=row.protocol,
        observed_at=row.observed_at * 1000,
        sequence=row.sequence,
        payload=row.payload,
        hello_in=row.hello_in,
        hello_out=row.hello_out,
        verdicts=row.verdicts,
        origin=Frame.LIVE if row.origin == ORIGINS[Frame.LIVE] else Frame.REPLAY,
        remote_address=row.remote_address,
        declared_length=row.declared_length,
    )


def build_copy_row(item: DecodedMessage | RejectedMessage, frame: Frame) -> _Row:
    """The row, in the order of COPIES, of a message that came IN, good or not. ValueError: the item is no copy.

    The network is the topic's, whether the topic goes by name or by index, as in the table `messages`; else the
    frame's.
    """
    if item.copy is None:
        raise ValueError("a fault of a whole frame, or an announcement in the DHT, is no copy of a message")
    remote = item.remote_peer if isinstance(item, DecodedMessage) else peer_text(frame.remote_peer)
    network, message, verdict = item.copy
    return network, message, remote, item.observed_at, verdict, *item.ref


def _format_peer(raw: bytes, protocol: str) -> str:
    """A peer id as text. A node id of the BitTorrent DHT has no other text than hex."""
    return raw.hex() if protocol == BEP50 else peer_text(raw)


def _parse_peer(text: str, protocol: str) -> bytes:
    return bytes.fromhex(text) if protocol == BEP50 else raw_peer(text)


def build_message_row(item: DecodedMessage) -> _Row:
    """The row of a good message, in the order of MESSAGES."""
    content, envelope = item.content, item.envelope
    signer = get_signer(item)
    return (
        item.message,
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
        int(item.verdict),
        item.remote_peer,
        item.observed_at,
        *item.ref,
    )


def build_fault_rows(item: RejectedMessage) -> Iterator[tuple[bytes, tuple[str, str, bytes, bytes]]]:
    """Identity and reason, author, key, value of the quarantine record. More than one where the bytes are too many for
    one record; each then holds a part, and says which."""
    own = compute_fault_identity(item)
    for number, record in enumerate(build_fault_records(item)):
        identity = blake2b(own + (number * MAX_QUARANTINED).to_bytes(8), digest_size=16).digest() if number else own
        yield identity, (item.reason, item.author, quarantine_key(*item.ref), encode(record))


def build_fault_records(item: RejectedMessage) -> Iterator[QuarantineRecord]:
    """What quarantine says of a fault, part after part."""
    return quarantine_records(item.stage, item.reason, item.detail, item.data, item.observed_at)


# ---------------------------------------------------------------- the second stage


def write_rows(rows: Iterable[UniqueRow], lake: Lake) -> _Batches:
    """What has passed in; WRITTEN out. The rows of `messages` go into files."""
    refused: list[RejectedMessage] = []
    files = TableFiles(lake, "messages", refuse=partial(_record_rejection, refused, MESSAGES))
    out = RowBuffer(pa.schema([("kind", pa.string()), ("key", pa.binary()), ("value", pa.binary())]))
    counts, good, bad = Counter[str](), Counter[str](), Counter[str]()
    for kind, row, size in rows:
        if kind == "messages":
            files.add(restore_tip_pairs(row), size)
            counts[str(row[_TYPE])] += 1
            if row[_VERDICT] == Verdict.GOOD:
                good[str(row[_AUTHOR])] += 1
        elif kind == FAULT:
            reason, by, key, value = row
            counts[str(reason)] += 1
            bad[str(by)] += 1
            if out.add((FAULT, key, value), size):
                yield from out.drain()
        elif out.add((kind, None, row[0]), size):
            yield from out.drain()
    written = files.close()
    for fault in refused:
        for _, (reason, by, key, value) in build_fault_rows(fault):
            counts[reason] += 1
            bad[by] += 1
            if out.add((FAULT, key, value), len(value)):
                yield from out.drain()
    faults = bad.total()
    del bad[""]  # signed by nobody
    tallies = [AuthorTally(name, good[name], bad[name]) for name in good.keys() | bad.keys()]
    out.add((ARCHIVE_OUTPUT, None, pack(ArchiveOutput(written, counts, faults, tallies))))
    yield from out.drain()


def restore_tip_pairs(row: Sequence[object]) -> Sequence[object]:
    """A map as Arrow takes one: a list of tuples, which packing makes lists."""
    pairs = row[_TIPS]
    if isinstance(pairs, list) and isinstance(row, list):
        row[_TIPS] = [tuple(pair) for pair in pairs]
    return row
