"""What the log, the tables and the ledger must say when all is quiet, whatever faults came before."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from multiformats import CID

from chaos.whole_kiln import PATIENCE, Stack, files_below
from kafka import KafkaConsumer, TopicPartition
from kiln.deploy.ops.status import QueryStatus, TopicStatus, compute_lag, read_status
from kiln.deploy.query.ask import query_lake
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.quality.column_checks import identity_columns
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.kafka.frames import DIRECTIONS, read_frame, read_rpc
from kiln.schemas.kafka.records import PublicationRecord, decode_publication, decode_wanted
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.queries import QUERIES
from kiln.schemas.wire.identity import Verdict, message_id
from kiln.schemas.wire.identity import check as check_signature
from kiln.schemas.wire.pubsub import PubsubMessage, read_message
from kit.awaiting import awaited
from kit.log_model import (
    UNFOUNDED_REPEATS,
    Emitted,
    Update,
    block_of,
    cid_of,
    emitted_of,
    update_of,
    windows_of,
    without_repeats,
)

WINDOW = 1_000_000  # µs
READ = ("frames", "updates", "batches", "publications", "wanted")


UNHEARD = "message said and not in messages"
REPEATED = "batch announced more often than it was closed"
REMOVED = "batch removed before it was published"


class Record(NamedTuple):
    """A record of the log: the broker's stamp in µs."""

    stamp: int
    value: bytes


class Problem(NamedTuple):
    """Something that should not be; `at`: unix µs of the record that it is about."""

    what: str
    about: Hashable
    at: int


class Log:
    """The topics read on from where they were read last, so that what retention takes later is known."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._next: dict[TopicPartition, int] = {}
        self.records: dict[str, dict[int, list[Record]]] = {name: {} for name in READ}
        """By topic and partition, in offset order."""
        self.removed: set[str] = set()
        """CIDs of batches that were taken from the log before they had a receipt"""

    def read(self) -> None:
        """Reads all that is there now."""
        consumer = KafkaConsumer(**self._stack.client_options(), max_partition_fetch_bytes=16 << 20)
        try:
            for name in READ:
                self._read(consumer, name)
        finally:
            consumer.close()

    def _read(self, consumer: KafkaConsumer, name: str) -> None:
        topic = f"kiln.{name}"
        parts = [TopicPartition(topic, number) for number in sorted(consumer.partitions_for_topic(topic) or ())]
        consumer.assign(parts)
        ends = consumer.end_offsets(parts)
        for part in parts:
            consumer.seek(part, self._next.get(part, 0))
        while any(consumer.position(part) < ends[part] for part in parts):
            for part, records in consumer.poll(timeout_ms=200).items():
                into = self.records[name].setdefault(part.partition, [])
                into += [Record(record.timestamp * 1000, record.value or b"") for record in records]
        self._next |= {part: consumer.position(part) for part in parts}

    def without_receipt(self, partition: int, end: int) -> set[str]:
        """The batches of a partition before an offset that had no receipt when the log was read."""
        batches = self.records["batches"].get(partition, [])[:end]
        return {emitted_of(record.value).cid for record in batches} - self.receipted()

    def receipted(self) -> set[str]:
        """The CIDs that have a receipt."""
        return {receipt.batch_cid for receipt in _receipts(self)}

    def of(self, name: str) -> Iterator[Record]:
        """All records of a topic."""
        for records in self.records[name].values():
            yield from records


def quiet(stack: Stack, log: Log, seconds: float = PATIENCE) -> str:
    """Waits until no query lags, the spool is empty and each batch has a receipt. In words what never came.

    The bridge and its peers may still exchange control messages, for minutes if it leaves thousands of topics. So of
    frames, those of the first look must be in Kafka, and those that Kafka had then must be read.
    """
    waits = "all queries done"
    first: dict[str, TopicStatus] = {}
    put: dict[int, int] = {}  # frames of the bridge at the first look, by its process

    def lags(query: QueryStatus) -> bool:
        reads_frames = "frames" in QUERIES[query.name].reads
        return query.lag != 0 and not (reads_frames and compute_lag(query.offsets, first) == 0)

    def all_done() -> bool:
        nonlocal waits
        found = read_status(stack.settings)
        first.update({} if first else {topic.name: topic for topic in found.broker.topics})
        behind = [query.name for query in found.queries if query.name in QUERIES and lags(query)]
        if not found.broker.reachable or behind:
            waits = f"{', '.join(behind) or 'the broker'} is behind"
            return False
        status = stack.status()
        if (
            status is None
            or status.spool.disk_bytes
            or (status.spool.waiting and status.spool.acknowledged < put.setdefault(status.pid, status.spool.put))
        ):
            waits = "the bridge's spool is not empty"
            return False
        log.read()
        sent = log.receipted()
        model = set(_expected(log))
        unsent = {each.cid for each in _emitted(log)} - sent - log.removed
        waits = f"{len(unsent)} batches have no receipt; {len(model - set(_emitted(log)))} windows no batch"
        return not unsent and model <= set(_emitted(log))

    return "" if awaited(all_done, seconds) else waits


def check(stack: Stack, log: Log) -> list[Problem]:
    """All that is wrong now, but for what the peers said and nobody heard (`unheard`)."""
    log.read()
    lake = Lake(str(stack.kiln.lake))
    return [
        *_frames(log, lake),
        *_messages(log, lake),
        *_updates(log, lake),
        *_batches(log, lake),
        *_twice(lake),
        *_published(log),
        *_kept(stack, log),
    ]


def unheard(stack: Stack) -> Iterator[Problem]:
    """What the peers said while Kiln was there, and the tables do not have."""
    rows = query_lake(Lake(str(stack.kiln.lake)), "SELECT message_id FROM messages").rows()
    held = {str(row[0]) for row in rows}
    for entry in stack.ledger():
        if entry.said and entry.there and entry.said not in held:
            yield Problem(UNHEARD, entry.said, entry.at // 1000)


def _frames(log: Log, lake: Lake) -> Iterator[Problem]:
    logged: dict[Hashable, int] = {}
    for record in log.of("frames"):
        frame = _frame(record)
        logged.setdefault((frame.connection, DIRECTIONS[frame.direction], frame.sequence), record.stamp)
    rows = Counter(query_lake(lake, "SELECT connection, direction, sequence FROM frames").rows())
    yield from _once("frame", logged, rows)


def _messages(log: Log, lake: Lake) -> Iterator[Problem]:
    good: dict[Hashable, int] = {}
    for record in log.of("frames"):
        frame = _frame(record)
        rpc = read_rpc(frame.payload)
        if not isinstance(rpc, RPC):
            continue
        for index, message in enumerate(rpc.publish):
            if frame.direction == Frame.OUT and not any(frame.verdicts[index : index + 1]):
                continue  # relayed; of the bridge's own messages every one is a BATCH_UPDATE
            if check_signature(message, "strict").verdict is Verdict.VALID and isinstance(
                read_message(message.data), PubsubMessage
            ):
                good.setdefault((message_id(message),), record.stamp)
    yield from _once("message", good, Counter(query_lake(lake, "SELECT message_id FROM messages").rows()))


def _updates(log: Log, lake: Lake) -> Iterator[Problem]:
    stamps = {update.message: record.stamp for record in log.of("updates") if (update := _update(record)) is not None}
    announced = "SELECT network, stream, tip FROM messages WHERE type = 'UPDATE'"
    waiting = _waiting(log)
    for row in query_lake(lake, f"{announced} EXCEPT SELECT network, stream, tip FROM updates").rows():
        if row not in waiting:
            yield Problem("update announced and not in updates", row, 0)
    for row in query_lake(lake, UNFOUNDED_REPEATS).rows():
        yield Problem("update twice in updates", row, stamps.get(str(row[0]), 0))
    missed = (
        "SELECT any_value(message_id), stream, tip FROM updates WHERE separator_key IS NOT NULL "
        "AND (stream, tip) NOT IN (SELECT (stream, tip) FROM batch_tips) GROUP BY ALL"
    )
    for row in query_lake(lake, missed).rows():
        yield Problem("update in no batch", row, stamps.get(str(row[0]), 0))


def _waiting(log: Log) -> set[tuple[object, ...]]:
    """Updates that name no separator wait for the genesis of their stream, which nobody has: network, stream, tip."""
    wanted = (decode_wanted(record.value) for record in log.of("wanted"))
    return {
        (each.network, each.update.stream, each.update.tip)
        for each in wanted
        if each.reason == "genesis" and each.update
    }


def _batches(log: Log, lake: Lake) -> Iterator[Problem]:
    expected, emitted = _expected(log), _emitted(log)
    for each in expected.keys() - emitted.keys():
        yield Problem("window without its batch, or with other bytes", each, expected[each])
    for each in emitted.keys() - expected.keys():
        yield Problem("batch that the log does not give", each, emitted[each])
    # a batch of a tip that came back has the bytes of an earlier one, and another window
    times: dict[Hashable, int] = {(*each.owner, each.opened_at, each.cid): stamp for each, stamp in emitted.items()}
    written = "SELECT network, origin, separator_key, separator_value, epoch_us(opened_at), batch_cid FROM batches"
    yield from _once("batch", times, Counter(query_lake(lake, written).rows()))
    updates = (update for part in _parts(log) for _, update in without_repeats(part) if update is not None)
    announced: Counter[tuple[object, ...]] = Counter((each.owner, each.stream, each.tip) for each in updates)
    within: Counter[tuple[object, ...]] = Counter()
    for window in (window for part in _parts(log) for window in windows_of(without_repeats(part), WINDOW)):
        for tip in window.tips:
            within[(window.owner, *tip)] += 1
    for tip_of, count in within.items():
        if count > announced[tip_of]:
            yield Problem("update in two batches", tip_of, 0)


def _published(log: Log) -> Iterator[Problem]:
    batches = {each.cid: stamp for each, stamp in _emitted(log).items()}
    windows = Counter(each.cid for each in _emitted(log))
    values = {emitted_of(record.value).cid: record.value for record in log.of("batches")}
    receipts: dict[str, list[PublicationRecord]] = {}
    for receipt in _receipts(log):
        receipts.setdefault(receipt.batch_cid, []).append(receipt)
    for cid, stamp in batches.items():
        found = receipts.get(cid, [])
        if not found and cid in log.removed:
            yield Problem(REMOVED, cid, stamp)
        elif not any(receipt.error is None for receipt in found):
            said = ", ".join(str(receipt.error) for receipt in found)
            closed = json.loads(values[cid])["closed_at"]
            behind = f" (closed {(stamp - closed) / 1e6:.0f} s before its record)"
            yield Problem(f"batch not published: {said or 'no receipt'}{behind}", cid, stamp)
        elif len(found) > windows[cid]:
            yield Problem(REPEATED, cid, max(receipt.published_at for receipt in found))


def _kept(stack: Stack, log: Log) -> Iterator[Problem]:
    """Check that every announced block can be fetched: its file in the block folder has exactly its bytes."""
    kept = {hashlib.sha256(path.read_bytes()).digest() for path in files_below(stack.state / "blocks")}
    for receipt in _receipts(log):
        if receipt.error is None and CID.decode(receipt.batch_cid).raw_digest not in kept:
            yield Problem("published batch whose block nobody keeps", receipt.batch_cid, receipt.published_at)


def _once(thing: str, logged: dict[Hashable, int], rows: Counter[tuple[object, ...]]) -> Iterator[Problem]:
    for each in logged.keys() - rows.keys():
        yield Problem(f"{thing} not in the tables", each, logged[each])
    for each in rows.keys() - logged.keys():
        yield Problem(f"{thing} that was never in the log", each, 0)
    for row, count in rows.items():
        if count > 1:
            yield Problem(f"{thing} twice in the tables", row, logged.get(row, 0))


def _twice(lake: Lake) -> Iterator[Problem]:
    for name in TABLES:
        if lake.has(name):
            key = ", ".join(identity_columns(name))
            for row in query_lake(lake, f"SELECT {key} FROM {name} GROUP BY ALL HAVING count(*) > 1").rows():
                yield Problem(f"row twice in {name}", row, 0)


def _frame(record: Record) -> Frame:
    frame = read_frame(record.value)
    assert isinstance(frame, Frame)
    return frame


def _update(record: Record) -> Update | None:
    return update_of(record.value) if record.value else None


def _parts(log: Log) -> Sequence[list[tuple[int, Update | None]]]:
    return [[(record.stamp, _update(record)) for record in records] for records in log.records["updates"].values()]


def _expected(log: Log) -> dict[Emitted, int]:
    """The batches that the model makes of the log, and when their windows opened."""
    return {
        Emitted(window.owner, window.opened_at, cid_of(block_of(window.tips))): window.opened_at
        for part in _parts(log)
        for window in windows_of(without_repeats(part), WINDOW)
    }


def _emitted(log: Log) -> dict[Emitted, int]:
    found: dict[Emitted, int] = {}
    for record in log.of("batches"):
        found.setdefault(emitted_of(record.value), record.stamp)
    return found


def _receipts(log: Log) -> Iterable[PublicationRecord]:
    return (decode_publication(record.value) for record in log.of("publications"))


def told(problem: Problem) -> str:
    """In words."""
    return f"{problem.what}: {json.dumps(problem.about, default=lambda each: each.hex())}"
