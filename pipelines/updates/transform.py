"""Transforms of the query `updates`: emit the first valid copy of each UPDATE of `kiln.frames`, with its separator.

If blocks can be fetched, the query requests three kinds in `kiln.wanted`: the genesis of an update whose separator is
otherwise unknown, and which waits in that topic; each batch that another node announced; and the genesis of an update
that is emitted under a separator which is only claimed (decision 20).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Final, NamedTuple, Protocol

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kiln.pipelines.decode.decoder import (
    DecodeConfig,
    DecodedMessage,
    compute_fault_identity,
    compute_identities,
    get_signer,
    is_lasting,
    reject_failed,
)
from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS
from kiln.pipelines.delta.arrow_rows import RowBuffer
from kiln.pipelines.runtime.dedup_store import DedupRule, DedupStoreConfig, chunk_copies, filter_new_copies
from kiln.pipelines.runtime.epoch import get_task_epoch
from kiln.pipelines.runtime.kafka_ranges import ArrowTask
from kiln.pipelines.runtime.micro_batch_clock import get_batch_time, with_dedup_watermark
from kiln.pipelines.updates.known_streams import StreamsTopic, open_known_streams
from kiln.pipelines.updates.message_reader import MessageReader
from kiln.pipelines.updates.processor import UpdateProcessor
from kiln.pipelines.updates.repeats import Announcement, list_keys, select_updates
from kiln.pipelines.updates.update_rows import COPY_COLUMNS, ROWS, ROWS_DDL, UpdateRow, read_copies, write_copies
from kiln.schemas.kafka.records import (
    Coordinates,
    Epoch,
    QuarantineRecord,
    SeparatorRecord,
    SeparatorSource,
    UpdateRecord,
    WaitedTip,
    WantedRecord,
    build_quarantine_key,
    build_quarantine_records,
    build_update_key,
    encode,
)
from kiln.schemas.wire.cid import cid_text
from kiln.schemas.wire.claims import CONTRADICTS, CONTRADICTS_TOPIC, Claims, describe_contradiction
from kiln.schemas.wire.streamid import StreamID
from kiln.schemas.wire.topics import Separator, format_separator, parse_separator

_Batches = Iterator[pa.RecordBatch]


class KnownSeparators(Protocol):
    """Separators of verified geneses, by (network, StreamID), such as a dict; None for a genesis without one."""

    def get(self, stream: tuple[str, str], default: SeparatorRecord | None, /) -> SeparatorRecord | None: ...


class WaitedUpdate(Protocol):
    """Returns true if an update waited for the genesis of its stream (network, StreamID), and has since been written to
    `kiln.updates`."""

    def __call__(self, stream: tuple[str, str], tip: WaitedTip, /) -> bool: ...


_UNKNOWN: Final = SeparatorRecord("-", "-")


@dataclass(frozen=True)
class SeparatorConfig:
    """Configuration of separators.

    Attributes:
        streams: Topic of the verified separators, if any.
        fetch: True if blocks can be fetched.
        believe: True to accept a claim before it is verified, even if it can be verified.
    """

    streams: StreamsTopic | None = None
    fetch: bool = False
    believe: bool = True


def ignore_difference(records: int) -> None:
    """Ignore records that the native core and Python decoded differently."""


def build_decode_task(
    config: DecodeConfig,
    separating: SeparatorConfig,
    first_epoch: Epoch | None = None,
    count_difference: Callable[[int], None] = ignore_difference,
) -> ArrowTask:
    """Build the task that decodes copies. RECORDS in; COPIES_DDL out, once per message and Kafka partition.

    Args:
        config: How to decode.
        separating: How to find separators.
        first_epoch: Epoch of the first micro-batch; None for that of its query.
        count_difference: Receives the number of records that the native core and Python decoded differently.
    """

    def decode(batches: _Batches) -> _Batches:
        rows = decode_records(batches, config, separating, _get_epoch(first_epoch), count_difference)
        return write_copies(rows, get_batch_time())

    return decode


def build_select_task(dedup: DedupStoreConfig, prefix: str = "") -> ArrowTask:
    """Build the task that selects the rows to emit by the deduplication file. COPIES_DDL in, sorted; ROWS_DDL out.

    Args:
        dedup: The deduplication file.
        prefix: Prefix of the topics in the rows.
    """

    def select(batches: _Batches) -> _Batches:
        buffer = RowBuffer(ROWS)
        columns = ((batch.column(name).to_pylist() for name in COPY_COLUMNS) for batch in batches)
        copies = chain.from_iterable(read_copies(zip(*column, strict=True)) for column in columns)
        for chunk in filter_new_copies(chunk_copies(copies), dedup, get_batch_time(), get_task_epoch(), UPDATE_RULE):
            for row in chunk:
                if buffer.add((prefix + row.topic, row.key, row.value, row.observed_at), row.size):
                    yield from buffer.drain()
        yield from buffer.drain()

    return select


UPDATE_RULE: Final[DedupRule[UpdateRow]] = DedupRule(list_keys, select_updates)


def deduplicate_updates(copies: DataFrame, retention: int, prefix: str = "") -> DataFrame:
    """Select the rows to emit by Spark's state. COPIES_DDL in; ROWS_DDL out. `retention`: µs."""
    rows = with_dedup_watermark(copies.withColumn("seen_at", F.timestamp_micros("batch_time")), retention)
    new = rows.groupBy("stream").transformWithStateInPandas(
        UpdateProcessor(retention), outputStructType=ROWS_DDL, outputMode="Append", timeMode="EventTime"
    )
    return new.withColumn("topic", F.concat(F.lit(prefix), "topic"))


def sort_copies(copies: DataFrame) -> DataFrame:
    """Sort the copies of one micro-batch by capture time, because repeats (decision 5) and windows (decision 1) depend
    on the order. COPIES_DDL in, in one partition; COPIES_DDL out."""
    return copies.sortWithinPartitions("observed_at", "partition", "offset", "index")


def sort_by_capture_time(rows: DataFrame) -> DataFrame:
    """Sort rows as `sort_copies` does. ROWS_DDL in, in one partition; ROWS_DDL out."""
    return rows.sortWithinPartitions("observed_at", "value")


class SeparatedUpdate(NamedTuple):
    """The separator of an update, its source, and the claim that the genesis contradicts."""

    separator: Separator | None
    source: SeparatorSource | None
    contradicted: Separator | None = None


def resolve_separator(
    claims: Claims, stream: tuple[str, str], known: KnownSeparators, separating: SeparatorConfig
) -> SeparatedUpdate:
    """Resolve the separator of an update (decision 4): from the verified genesis, else from the topic, else from
    `model`.

    A genesis without a separator contradicts no claim, but still takes precedence. If the genesis can be fetched,
    claims that contradict each other are ignored.

    Args:
        claims: Claims of the update.
        stream: Network and StreamID.
        known: Verified separators.
        separating: The configuration, which decides which claims are accepted.
    """
    verified = known.get(stream, _UNKNOWN)
    if verified is None:
        return SeparatedUpdate(None, "genesis")
    if verified is not _UNKNOWN:
        separator = Separator(verified.key, verified.value)
        return SeparatedUpdate(separator, "genesis", claims.find_contradicted(separator))
    if claims.first is None or (separating.fetch and (claims.disagree or not separating.believe)):
        return SeparatedUpdate(None, None)
    return SeparatedUpdate(claims.first, "topic" if claims.topic is not None else "model")


def build_claims(topic: Separator | None, model: str | None) -> Claims:
    """Build the claims of an UPDATE: the separator of its topic, and its field `model`."""
    return Claims(topic, None if model is None else Separator("model", model))


def build_false_claim(claimed: Separator, separator: Separator, data: bytes, observed_at: int) -> QuarantineRecord:
    """Build the quarantine record of an UPDATE whose claim the genesis contradicts. `data`: of the message."""
    return QuarantineRecord(
        stage="separator",
        reason=CONTRADICTS,
        detail=describe_contradiction(claimed, separator),
        data=data,
        observed_at=observed_at,
    )


def decode_records(
    batches: _Batches,
    config: DecodeConfig,
    separating: SeparatorConfig,
    epoch: Epoch,
    count_difference: Callable[[int], None] = ignore_difference,
) -> Iterator[UpdateRow]:
    """Decode the records of a task into rows of their valid copies, each row once per Kafka partition.

    The copy of a row that was emitted before is the first one in its partition, so that a repeated micro-batch has it,
    however it is divided into tasks (decision 10).
    """
    emitted: set[tuple[bytes, int]] = set()
    reader = MessageReader(config, count_difference)
    known: KnownSeparators = {}
    has_waited: WaitedUpdate = _has_not_waited
    if separating.streams is not None:
        known = streams = open_known_streams(separating.streams)
        has_waited = streams.has_waited
        streams.refresh()
    for batch in batches:
        for item, copy_key in reader.read(batch):
            rows = _build_rows(item, epoch, config, known, has_waited, separating)
            # a fault has an identity of its own in each copy
            if copy_key is not None and all(row.topic != "quarantine" for row in rows):
                reader.finish(copy_key)
            for row in rows:
                message = None if row.announcement is None else row.announcement.message
                key = (message or row.identity, item.ref.partition)
                if key not in emitted:
                    emitted.add(key)
                    yield row


def _build_rows(
    item: DecodedMessage,
    epoch: Epoch,
    config: DecodeConfig,
    known: KnownSeparators,
    has_waited: WaitedUpdate,
    separating: SeparatorConfig,
) -> list[UpdateRow]:
    """Build the rows of a message. If this fails, the message is a fault."""
    try:
        if item.content.type == "UPDATE":
            return list(_build_update_rows(item, epoch, config, known, has_waited, separating))
        if item.content.type == "BATCH_UPDATE":
            wanted = _build_wanted_batches(item) if separating.fetch else ()
            return [*_build_misplaced_batch(item, config), *wanted]
    except PROCESSING_ERRORS as error:  # `known` and `has_waited` raise sqlite3.Error alone; all else is pure
        data = item.envelope.SerializeToString()
        fault = reject_failed("updates", error, item.ref, data, item.observed_at)
        key, identity = build_quarantine_key(*item.ref), compute_fault_identity(fault)
        records = build_quarantine_records(fault.stage, fault.reason, fault.detail, fault.data, fault.observed_at)
        return [
            UpdateRow(
                identity, identity + bytes((part,)), item.ref, "quarantine", key, encode(record), item.observed_at
            )
            for part, record in enumerate(records)
        ]
    return []


def _get_epoch(first_epoch: Epoch | None) -> Epoch:
    """Return the epoch of this task's micro-batch (decision 7)."""
    own = get_task_epoch()
    return own if first_epoch is None else Epoch(first_epoch.query, first_epoch.batch + own.batch)


def _compute_update_identity(item: DecodedMessage, separator: Separator | None) -> bytes:
    """Compute the identity of an update: the same for every announcement, on every topic (decision 5).

    It includes the separator, so that an announcement under a false separator does not hide the true one.
    """
    content = item.content
    where = format_separator(separator) if separator else ""
    return _digest(item.origin, item.network, where, content.stream or "", content.tip or "")


def _build_announcement(
    item: DecodedMessage, separator: Separator | None, stream: bytes, *, fetch: bool, has_waited: bool
) -> Announcement:
    """Build the announcement that an UPDATE is.

    If geneses are fetched, an announcement without separator waits for its genesis, and so is no repeat of one that has
    a separator, which may be false.
    """
    update, tip = _compute_update_identity(item, separator), item.content.tip or ""
    author = get_signer(item)
    is_known = author is not None and is_lasting(item.message_id, True)
    bare = None if separator is None or (fetch and not has_waited) else _compute_update_identity(item, None)
    return Announcement(
        update=update,
        tip=_digest(tip),
        at=item.observed_at,
        message=blake2b(stream + item.message_id.encode(), digest_size=16).digest() if is_known else None,
        author=blake2b(stream + (author or "").encode(), digest_size=16).digest() if is_known else None,
        bare=bare,
        has_waited=has_waited,
    )


def _digest(*parts: str) -> bytes:
    return blake2b("\n".join(parts).encode(), digest_size=16).digest()


def _has_not_waited(stream: tuple[str, str], tip: WaitedTip, /) -> bool:
    return False


def _build_update_rows(
    item: DecodedMessage,
    epoch: Epoch,
    config: DecodeConfig,
    known: KnownSeparators,
    has_waited: WaitedUpdate,
    separating: SeparatorConfig,
) -> Iterator[UpdateRow]:
    content = item.content
    stream, tip = content.stream or "", content.tip or ""
    claims = build_claims(item.separator, content.model)
    separated = resolve_separator(claims, (item.network, stream), known, separating)
    named = _build_separator_record(separated.separator)
    record = UpdateRecord(
        network=item.network,
        origin=item.origin,
        separator=named,
        separator_source=separated.source,
        stream=stream,
        tip=tip,
        from_=get_signer(item),
        message_id=item.message_id,
        epoch=epoch,
        frame=Coordinates(item.ref.partition, item.ref.offset, item.ref.position or 0),
        observed_at=item.observed_at,
    )
    is_waiting = separated.source is None and separating.fetch
    has_come = separated.source == "genesis" and has_waited((item.network, stream), WaitedTip(item.origin, tip))
    group = _digest(item.origin, item.network, stream)
    announcement = _build_announcement(item, separated.separator, group, fetch=separating.fetch, has_waited=has_come)
    identity, ref, at = announcement.update, item.ref, item.observed_at
    if not is_waiting:
        key = build_update_key(item.network, named, stream)
        yield UpdateRow(group, identity, ref, "updates", key, encode(record), at, announcement)
    if separated.source != "genesis" and separating.fetch:
        genesis = cid_text(StreamID.parse(stream).genesis)
        wanted = WantedRecord(
            item.network,
            genesis,
            "genesis" if is_waiting else "claim",
            item.observed_at,
            message_id=item.message_id,
            update=record,
            topic=_build_separator_record(claims.topic),
            model=_build_separator_record(claims.model),
            peer=item.remote_peer,
        )
        # a claim is in addition to the update that is emitted
        request = (identity, announcement) if is_waiting else (identity + b"?", None)
        yield UpdateRow(group, request[0], ref, "wanted", genesis.encode(), encode(wanted), at, request[1])
    if separated.contradicted is not None and separated.separator is not None:
        fault = build_false_claim(separated.contradicted, separated.separator, item.envelope.data, item.observed_at)
        message, _ = compute_identities(item, item.origin, config.unsigned_horizon)
        yield UpdateRow(group, message + b"!", ref, "quarantine", build_quarantine_key(*ref), encode(fault), at)


def _build_separator_record(separator: Separator | None) -> SeparatorRecord | None:
    return None if separator is None else SeparatorRecord(*separator)


def _build_misplaced_batch(item: DecodedMessage, config: DecodeConfig) -> Iterator[UpdateRow]:
    """Build the quarantine row of a BATCH_UPDATE that was received on the topic of another separator.

    CIP-123 sends a batch on the topic of its separator. The block is fetched nevertheless, as its geneses decide.
    """
    content, topic = item.content, item.separator
    if topic is None or content.sep is None or parse_separator(content.sep) == topic:
        return
    fault = QuarantineRecord(
        stage="separator",
        reason=CONTRADICTS_TOPIC,
        detail=f"for {content.sep}, on the topic of {format_separator(topic)}",
        data=item.envelope.data,
        observed_at=item.observed_at,
    )
    message, _ = compute_identities(item, item.origin, config.unsigned_horizon)
    key = build_quarantine_key(*item.ref)
    yield UpdateRow(message, message + b"!", item.ref, "quarantine", key, encode(fault), item.observed_at)


def _build_wanted_batches(item: DecodedMessage) -> Iterator[UpdateRow]:
    """Build the requests for the batches that a BATCH_UPDATE of another node names. The announced batch is requested at
    each announcement, because the fetcher may have given it up earlier, or may not have followed its separator. Earlier
    batches that it names are requested once."""
    content = item.content
    if item.own or content.sep is None or content.batch is None:
        return
    separator = SeparatorRecord(*parse_separator(content.sep))
    for cid in (content.batch, *item.previous):
        announced = item.message_id if cid == content.batch else ""
        named = f"{item.origin}\n{item.network}\n{content.sep}\n{cid}\n{announced}".encode()
        wanted = WantedRecord(
            item.network, cid, "batch", item.observed_at, separator, item.message_id, peer=item.remote_peer
        )
        identity = blake2b(named, digest_size=16).digest()
        yield UpdateRow(identity, identity, item.ref, "wanted", cid.encode(), encode(wanted), item.observed_at)
