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

from pipelines.lake.files import DataFile, TableFiles
from pipelines.lake.lake import Lake
from pipelines.logic.breaker import Tally
from pipelines.logic.decode import (
    Decoded,
    Decoder,
    Decoding,
    Faulty,
    Place,
    author,
    failed,
    identities,
    is_lasting,
    own_identity,
    unreadable,
)
from pipelines.logic.held_frames import Sieve
from pipelines.logic.processing import PROCESSING_ERRORS
from pipelines.spark.batch_clock import remembering, seen_at
from pipelines.spark.epoch import epoch_of_task
from pipelines.spark.remembered import Remembered, new_copies
from pipelines.spark.rows import RowBuffer, columns_of
from pipelines.transforms.packed import Item, Loose, loose, pack, packed, packed_ddl, unpacked
from schemas.frames import BEP50, DIRECTIONS, ORIGINS, read_frame
from schemas.identity import Verdict, peer_text, raw_peer
from schemas.proto.kiln.frame_pb2 import Frame
from schemas.records import MAX_QUARANTINED, QuarantineRecord, encode, quarantine_key, quarantine_records
from schemas.reject import Rejected
from schemas.tables import TABLES, Column

_Batches = Iterator[pa.RecordBatch]
_Row = tuple[object, ...]

FRAMES = columns_of(TABLES["frames"])
COPIES = columns_of(TABLES["copies"])
MESSAGES = columns_of(TABLES["messages"])
_TYPE, _AUTHOR, _TIPS, _VERDICT = (
    next(place for place, column in enumerate(MESSAGES) if column.name == name)
    for name in ("type", "from_peer", "tips", "verdict")
)

IDENTITIES = ("early", "late")
"""The digests by which copies of a message are known (decision 5)."""

WRITTEN = "kind string, key binary, value binary"
FAULT, PASSED, WROTE = "fault", "passed", "wrote"
"""Kinds of rows beside those of `messages`: a record for quarantine, a `Passed`, a `Wrote`."""


class Passed(msgspec.Struct, frozen=True, array_like=True):
    """What a task of the first stage made of its records.

    `spans`: partition to first and last offset. `taken`: the frames in the files, as `held_frames.HeldFrames`.
    `good`: copies of good messages.
    """

    spans: dict[int, tuple[int, int]]
    taken: dict[bytes, list[tuple[int, int]]]
    frames: list[DataFile]
    copies: list[DataFile]
    good: int = 0


class Wrote(msgspec.Struct, frozen=True, array_like=True):
    """What a task of the second stage made of its rows. `counts`: rows by type or, of faults, by reason."""

    messages: list[DataFile]
    counts: dict[str, int]
    faults: int
    tallies: list[Tally]


def archived(records: DataFrame, how: Decoding, lake: Lake, remembered: Remembered) -> DataFrame:
    """Columns partition, offset, stamp, value in; WRITTEN out: records for quarantine, a `Passed` and a `Wrote` a task,
    which name the files with the rows of `frames` and `copies`, and of `messages`.

    The same frame twice in one task is written once. What an earlier micro-batch wrote, the driver takes out again.
    """

    def rows(batches: _Batches) -> _Batches:
        items = items_of(batches, how, lake, _task_digest(), every_copy=True)
        new = new_copies(items, remembered, seen_at(), epoch_of_task())
        return written_rows(loose(with_rows(new)), lake)

    return _source(records).mapInArrow(rows, WRITTEN)


def decoded(records: DataFrame, how: Decoding, lake: Lake) -> DataFrame:
    """The first stage of `archived`. Columns partition, offset, stamp, value in; packed rows out: each copy of a
    message and each fault, and one `Passed` a task."""

    def rows(batches: _Batches) -> _Batches:
        return packed(with_rows(items_of(batches, how, lake, _task_digest())), IDENTITIES, seen_at())

    return _source(records).mapInArrow(rows, packed_ddl(IDENTITIES))


def first_copies(rows: DataFrame, remembered: int) -> DataFrame:
    """Packed rows in; kind, data out: one good copy of each message, and every fault. `remembered`: µs.

    Event time is the time of the micro-batch (`batch_clock`), so that no row is ever late.
    `dropDuplicatesWithinWatermark` drops late rows in silence, and after an outage Spark reads partitions at different
    speeds.
    """
    seen = remembering(rows, remembered)
    return seen.dropDuplicatesWithinWatermark(["early"]).dropDuplicatesWithinWatermark(["late"]).select("kind", "data")


def written(rows: DataFrame, lake: Lake) -> DataFrame:
    """The second stage of `archived`: kind, data in; WRITTEN out."""

    def made(batches: _Batches) -> _Batches:
        return written_rows(unpacked(batches), lake)

    return rows.select("kind", "data").mapInArrow(made, WRITTEN)


def _source(records: DataFrame) -> DataFrame:
    return records.select("partition", "offset", "stamp", "value")


# ---------------------------------------------------------------- the first stage


def items_of(batches: _Batches, how: Decoding, lake: Lake, task: bytes, *, every_copy: bool = False) -> Iterator[Item]:
    """Records of a task in; the copies of messages, each with its `Decoded` as row, faults, and the task's `Passed`
    out. The rows of `frames` and `copies` go into files. `task`: the same for each attempt of the task, and for no
    other task.

    `every_copy`: else the first one of each message in the task, which spares Spark's operators the rest. A file is to
    be asked for every copy: the one that passed before may be a later one of this task.
    """
    sieve = Sieve({})
    refused: list[Faulty] = []
    refuse = partial(_refuse, refused)
    frames = TableFiles(lake, "frames", refuse=partial(refuse, FRAMES))
    copies = TableFiles(lake, "copies", refuse=partial(refuse, COPIES))
    decoder = Decoder(how)
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
            for item, copy in record.items:
                if new and copy is not None:
                    copies.add(copy, _BESIDE)
                if isinstance(item, Faulty):
                    yield from _faulty(item)
                    continue
                good += 1
                is_signed = item.verdict is Verdict.GOOD
                signed = (item.network, item.message) if is_signed else None
                if signed in passing and not every_copy:
                    continue
                known_by = identities(item, "", how.unsigned_horizon)
                if every_copy or known_by not in passing:
                    passing.add(signed or known_by)  # of a signed message the digests are all of what is signed
                    digests = known_by[:1] if is_lasting(item.message, is_signed) else known_by
                    yield Item("messages", digests, item.place.text, item, held + _BESIDE)
                    held = 0
    files = frames.close(), copies.close()
    for fault in refused:
        yield from _faulty(fault)
    if spans:
        told = msgspec.msgpack.encode(Passed(spans, sieve.taken, *files, good))
        yield Item(PASSED, (task,), task.hex(), (told,), len(told))


_BESIDE: Final = 500
"""bytes of a message, or of its row, about, beside its data"""


class RecordRows(NamedTuple):
    """The rows of one record of `kiln.frames`."""

    items: list[tuple[Decoded | Faulty, _Row | None]]
    """each with its row of `copies`"""
    frame: Frame | None = None
    """`None`: the record is no Frame, or has no row"""
    row: _Row = ()
    """of `frames`"""


def read_record(decoder: Decoder, partition: int, offset: int, stamp: int, value: bytes | None) -> RecordRows:
    """Everything that one record gives, and nothing of any other. Where this fails, the record is a fault of the stage
    `archive`, and stays in `frames` if it has a row there."""
    frame: Frame | Rejected | None = None
    row: _Row = ()
    try:
        frame = read_frame(value)
        if isinstance(frame, Rejected):
            return RecordRows([(unreadable(frame, value, partition, offset, stamp), None)])
        row = frame_row(partition, offset, stamp, frame)
        items = [
            (item, None if item.copy is None else copy_row(item, frame))
            for item in decoder.decode_frame(frame, partition, offset)
        ]
    except PROCESSING_ERRORS as error:  # all of the above is pure: the record alone has caused this
        fault = failed("archive", error, Place(partition, offset, None), value or b"", stamp)
        return RecordRows([(fault, None)], frame if row and isinstance(frame, Frame) else None, row)
    return RecordRows(items, frame, row)


def _refuse(faults: list[Faulty], columns: tuple[Column, ...], row: Sequence[object], error: Exception) -> None:
    """Takes a row that its table cannot hold."""
    faults.append(refused_row(columns, row, error))


def refused_row(columns: tuple[Column, ...], row: Sequence[object], error: Exception) -> Faulty:
    """The fault of a row, in the order of `columns`, that its table cannot hold. The bytes are the payload of the frame
    or the data of the message; a row of `copies` has none."""
    named = {column.name: value for column, value in zip(columns, row, strict=True)}
    partition, offset, index = (named.get(name) for name in ("kafka_partition", "kafka_offset", "message_index"))
    data, at = named.get("payload", named.get("data")), named["observed_at"]
    assert isinstance(partition, int)
    assert isinstance(offset, int)
    place = Place(partition, offset, index if isinstance(index, int) else None)
    return failed("archive", error, place, data if isinstance(data, bytes) else b"", at if isinstance(at, int) else 0)


def with_rows(items: Iterable[Item]) -> Iterator[Item]:
    """Items of `items_of` in; out with rows of `messages`. To be called where most copies are gone: a row is dear."""
    for item in items:
        if not isinstance(item.row, Decoded):
            yield item
            continue
        message = item.row
        try:
            row = message_row(message)
        except PROCESSING_ERRORS as error:  # pure: the message alone has caused this
            data = message.envelope.SerializeToString()
            yield from _faulty(failed("archive", error, message.place, data, message.observed_at))
            continue
        size = len(message.envelope.data) + len(message.message) + len(message.topic) + _BESIDE
        yield Item(item.kind, item.identities, item.place, row, size)


def _faulty(item: Faulty) -> Iterator[Item]:
    for identity, row in fault_rows(item):
        yield Item(FAULT, (identity,), item.place.text, row, len(row[-1]))


def _task_digest() -> bytes:
    """The same for each attempt of a task, so that one attempt of the task counts."""
    epoch, context = epoch_of_task(), TaskContext.get()
    partition = 0 if context is None else context.partitionId()
    return blake2b(f"{epoch.query}/{epoch.batch}/{partition}".encode(), digest_size=16).digest()


def frame_row(partition: int, offset: int, stamp: int, frame: Frame) -> _Row:
    """The row of a frame in the order of FRAMES; `stamp`: the broker's, µs."""
    protocol = frame.protocol
    return (
        frame.network,
        frame.connection,
        DIRECTIONS[frame.direction],
        _peer(frame.local_peer, protocol),
        _peer(frame.remote_peer, protocol),
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


FrameRow = tuple[
    *tuple[str, bytes, str, str, str, str, int, int],
    *tuple[bytes, bytes, bytes, bytes, str, bytes, int, int, int, int],
]
"""A row in the order of FRAMES, times in µs."""


def frame_of(row: FrameRow) -> Frame:
    """The Frame of a row, to the µs: the reverse of `frame_row`."""
    network, connection, direction, local, remote, protocol, observed_at, sequence = row[:8]
    payload, hello_in, hello_out, verdicts, origin, address, declared_length = row[8:15]
    return Frame(
        network=network,
        connection=connection,
        direction=Frame.IN if direction == DIRECTIONS[Frame.IN] else Frame.OUT,
        local_peer=_raw(local, protocol),
        remote_peer=_raw(remote, protocol),
        protocol=protocol,
        observed_at=observed_at * 1000,
        sequence=sequence,
        payload=payload,
        hello_in=hello_in,
        hello_out=hello_out,
        verdicts=verdicts,
        origin=Frame.LIVE if origin == ORIGINS[Frame.LIVE] else Frame.REPLAY,
        remote_address=address,
        declared_length=declared_length,
    )


def copy_row(item: Decoded | Faulty, frame: Frame) -> _Row:
    """The row, in the order of COPIES, of a message that came IN, good or not. ValueError: the item is no copy.

    The network is the topic's, whether the topic goes by name or by index, as in the table `messages`; else the
    frame's.
    """
    if item.copy is None:
        raise ValueError("a fault of a whole frame, or an announcement in the DHT, is no copy of a message")
    remote = item.remote_peer if isinstance(item, Decoded) else peer_text(frame.remote_peer)
    network, message, verdict = item.copy
    return network, message, remote, item.observed_at, verdict, *item.place


def _peer(raw: bytes, protocol: str) -> str:
    """A peer id as text. A node id of the BitTorrent DHT has no other text than hex."""
    return raw.hex() if protocol == BEP50 else peer_text(raw)


def _raw(text: str, protocol: str) -> bytes:
    return bytes.fromhex(text) if protocol == BEP50 else raw_peer(text)


def message_row(item: Decoded) -> _Row:
    """The row of a good message, in the order of MESSAGES."""
    content, envelope = item.content, item.envelope
    signer = author(item)
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
        *item.place,
    )


def fault_rows(item: Faulty) -> Iterator[tuple[bytes, tuple[str, str, bytes, bytes]]]:
    """Identity and reason, author, key, value of the quarantine record. More than one where the bytes are too many for
    one record; each then holds a part, and says which."""
    own = own_identity(item)
    for number, record in enumerate(fault_records(item)):
        identity = blake2b(own + (number * MAX_QUARANTINED).to_bytes(8), digest_size=16).digest() if number else own
        yield identity, (item.reason, item.author, quarantine_key(*item.place), encode(record))


def fault_records(item: Faulty) -> Iterator[QuarantineRecord]:
    """What quarantine says of a fault, part after part."""
    return quarantine_records(item.stage, item.reason, item.detail, item.data, item.observed_at)


# ---------------------------------------------------------------- the second stage


def written_rows(rows: Iterable[Loose], lake: Lake) -> _Batches:
    """What has passed in; WRITTEN out. The rows of `messages` go into files."""
    refused: list[Faulty] = []
    files = TableFiles(lake, "messages", refuse=partial(_refuse, refused, MESSAGES))
    out = RowBuffer(pa.schema([("kind", pa.string()), ("key", pa.binary()), ("value", pa.binary())]))
    counts, good, bad = Counter[str](), Counter[str](), Counter[str]()
    for kind, row, size in rows:
        if kind == "messages":
            files.add(with_pairs(row), size)
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
        for _, (reason, by, key, value) in fault_rows(fault):
            counts[reason] += 1
            bad[by] += 1
            if out.add((FAULT, key, value), len(value)):
                yield from out.drain()
    faults = bad.total()
    del bad[""]  # signed by nobody
    tallies = [Tally(name, good[name], bad[name]) for name in good.keys() | bad.keys()]
    out.add((WROTE, None, pack(Wrote(written, counts, faults, tallies))))
    yield from out.drain()


def with_pairs(row: Sequence[object]) -> Sequence[object]:
    """A map as Arrow takes one: a list of tuples, which packing makes lists."""
    pairs = row[_TIPS]
    if isinstance(pairs, list) and isinstance(row, list):
        row[_TIPS] = [tuple(pair) for pair in pairs]
    return row
