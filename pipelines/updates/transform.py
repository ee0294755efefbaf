"""`kiln.frames` to records of `kiln.updates`: the first good copy of each UPDATE, with its separator.

Where blocks can be fetched, what asks for one goes to `kiln.wanted`: an update whose separator only its genesis can
tell, which waits there; each batch that somebody else announced; and a copy of each update that goes on under a
separator which is only claimed (decision 20).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple, Protocol

import pyarrow as pa
from pyspark.sql import DataFrame

from kiln.pipelines.decode.decoder import (
    DecodeConfig,
    DecodedMessage,
    FrameDecoder,
    RejectedMessage,
    compute_fault_identity,
    compute_identities,
    get_signer,
    reject_failed,
)
from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS
from kiln.pipelines.delta.arrow_rows import RowBuffer
from kiln.pipelines.runtime.dedup_store import DedupStoreConfig, filter_new_copies
from kiln.pipelines.runtime.epoch import get_task_epoch
from kiln.pipelines.runtime.micro_batch_clock import get_batch_time, with_dedup_watermark
from kiln.pipelines.updates.known_streams import StreamsTopic, open_known_streams
from kiln.schemas.kafka.records import (
    Coordinates,
    Epoch,
    QuarantineRecord,
    SeparatorRecord,
    SeparatorSource,
    UpdateRecord,
    WaitedTip,
    WantedRecord,
    encode,
    quarantine_key,
    quarantine_records,
    update_key,
)
from kiln.schemas.wire.cid import cid_text
from kiln.schemas.wire.claims import CONTRADICTS, Claims, contradiction
from kiln.schemas.wire.streamid import StreamID
from kiln.schemas.wire.topics import Separator, parse_separator_text, separator_text

_Batches = Iterator[pa.RecordBatch]


class KnownSeparators(Protocol):
    """What the verified genesis says, by (network, StreamID); None: no separator. A dict will do."""

    def get(self, stream: tuple[str, str], default: SeparatorRecord | None, /) -> SeparatorRecord | None: ...


class WaitedUpdate(Protocol):
    """Whether an update waited for the genesis of its stream (network, StreamID), and is in `kiln.updates` since."""

    def __call__(self, stream: tuple[str, str], tip: WaitedTip, /) -> bool: ...


_UNKNOWN: Final = SeparatorRecord("-", "-")

_NEW = pa.schema([("topic", pa.string()), ("key", pa.binary()), ("value", pa.binary()), ("heard_at", pa.int64())])
_NEW_COLUMNS = "topic string, key binary, value binary, heard_at bigint"
_COPIES = pa.schema([("identity", pa.binary()), *_NEW, ("seen_at", pa.timestamp("us", tz="UTC"))])
_COPIES_COLUMNS = f"identity binary, {_NEW_COLUMNS}, seen_at timestamp"


@dataclass(frozen=True)
class SeparatorConfig:
    """`streams`: where the verified separators are, None: nowhere. `fetch`: whether blocks can be asked for.
    `believe`: whether a claim counts before it is verified, where it can be."""

    streams: StreamsTopic | None = None
    fetch: bool = False
    believe: bool = True


class UpdateRow(NamedTuple):
    """What is new once. `identity`: the same for all that say the same; `place`: of this copy; `topic` of Kafka,
    without prefix; `heard_at`: µs."""

    identity: bytes
    position: str
    topic: str
    key: bytes
    value: bytes
    heard_at: int

    @property
    def identities(self) -> tuple[bytes, ...]:
        return (self.identity,)

    @property
    def size(self) -> int:
        return len(self.value)


def select_first_updates(
    records: DataFrame,
    how: DecodeConfig,
    separating: SeparatorConfig,
    remembered: DedupStoreConfig,
    first: Epoch | None = None,
) -> DataFrame:
    """Columns partition, offset, stamp, value in; topic, key, value, heard_at out, once for each identity: what the
    good copies have to say. `first`: the epoch of the first micro-batch; None: that of its query."""

    def rows(batches: _Batches) -> _Batches:
        said = decode_records(batches, how, separating, _get_epoch(first), every_copy=True)
        buffer = RowBuffer(_NEW)
        for row in filter_new_copies(said, remembered, get_batch_time(), get_task_epoch()):
            if buffer.add((row.topic, row.key, row.value, row.heard_at), row.size):
                yield from buffer.drain()
        yield from buffer.drain()

    return _select_columns(records).mapInArrow(rows, _NEW_COLUMNS)


def decode_updates(
    records: DataFrame, how: DecodeConfig, separating: SeparatorConfig, first: Epoch | None = None
) -> DataFrame:
    """As `select_first_updates`, for each copy, with identity and seen_at."""

    def rows(batches: _Batches) -> _Batches:
        return write_copies(decode_records(batches, how, separating, _get_epoch(first)), get_batch_time())

    return _select_columns(records).mapInArrow(rows, _COPIES_COLUMNS)


def deduplicate_updates(rows: DataFrame, remembered: int) -> DataFrame:
    """What `decode_updates` gave in; topic, key, value, heard_at out, once for each identity. `remembered`: µs.

    As in `archive`, no row is ever late.
    """
    new = with_dedup_watermark(rows, remembered).dropDuplicatesWithinWatermark(["identity"])
    return new.select("topic", "key", "value", "heard_at")


def _select_columns(records: DataFrame) -> DataFrame:
    return records.select("partition", "offset", "stamp", "value")


def sort_by_capture_time(rows: DataFrame) -> DataFrame:
    """Rows of one micro-batch, topic, key, value, heard_at in; topic, key, value out, in the order in which they were
    heard: a window takes its times from the records as they stand in the log (decision 1).

    One task writes them: what is new in a micro-batch is little, and a shuffle by key costs more than it spreads.
    """
    return rows.coalesce(1).sortWithinPartitions("heard_at", "value").select("topic", "key", "value")


class SeparatedUpdate(NamedTuple):
    """The separator of an update; where it is known from, None: nowhere; and the claim that the genesis contradicts."""

    separator: Separator | None
    source: SeparatorSource | None
    contradicted: Separator | None = None


def resolve_separator(
    claims: Claims, stream: tuple[str, str], known: KnownSeparators, how: SeparatorConfig
) -> SeparatedUpdate:
    """The separator of an update (decision 4): what the verified genesis says, else the topic's, else `model`.

    `stream`: network and StreamID. A genesis without a separator contradicts no claim, and is believed all the same.
    Where the genesis can be asked for, claims that disagree count for nothing.
    """
    verified = known.get(stream, _UNKNOWN)
    if verified is None:
        return SeparatedUpdate(None, "genesis")
    if verified is not _UNKNOWN:
        separator = Separator(verified.key, verified.value)
        return SeparatedUpdate(separator, "genesis", claims.contradicted(separator))
    if claims.first is None or (how.fetch and (claims.disagree or not how.believe)):
        return SeparatedUpdate(None, None)
    return SeparatedUpdate(claims.first, "topic" if claims.topic is not None else "model")


def build_claims(topic: Separator | None, model: str | None) -> Claims:
    """What an UPDATE claims: the separator of its topic, and its field `model`."""
    return Claims(topic, None if model is None else Separator("model", model))


def build_false_claim(claimed: Separator, separator: Separator, data: bytes, observed_at: int) -> QuarantineRecord:
    """What quarantine says of an UPDATE whose claim the genesis contradicts; `data`: of the message."""
    return QuarantineRecord(
        stage="separator",
        reason=CONTRADICTS,
        detail=contradiction(claimed, separator),
        data=data,
        observed_at=observed_at,
    )


def write_copies(rows: Iterable[UpdateRow], get_batch_time: int) -> _Batches:
    """What `decode_updates` gives, as Arrow. `get_batch_time`: the time of the micro-batch, µs."""
    buffer = RowBuffer(_COPIES)
    for row in rows:
        if buffer.add((row.identity, row.topic, row.key, row.value, row.heard_at, get_batch_time), row.size):
            yield from buffer.drain()
    yield from buffer.drain()


def decode_records(
    batches: _Batches, how: DecodeConfig, separating: SeparatorConfig, epoch: Epoch, *, every_copy: bool = False
) -> Iterator[UpdateRow]:
    """Records of a task in; what their good copies have to say out, each identity once. `every_copy`: once for each
    copy, as in `archive`."""
    passing: set[tuple[bytes, str]] = set()  # what this task let through: the rest would be dropped anyway
    decoder = FrameDecoder(how)
    known: KnownSeparators = {}
    has_waited: WaitedUpdate = _nothing_waited
    if separating.streams is not None:
        known = streams = open_known_streams(separating.streams)
        has_waited = streams.has_waited
        streams.refresh()
    for batch in batches:
        for partition, offset, stamp, value in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            for item in decoder.decode(value, partition, offset, stamp):
                if isinstance(item, RejectedMessage):
                    continue
                for row in _build_rows(item, epoch, how, known, has_waited, separating):
                    key = (row.identity, row.position if every_copy else "")
                    if key not in passing:
                        passing.add(key)
                        yield row


def _build_rows(
    item: DecodedMessage,
    epoch: Epoch,
    how: DecodeConfig,
    known: KnownSeparators,
    has_waited: WaitedUpdate,
    separating: SeparatorConfig,
) -> list[UpdateRow]:
    """What a message has to say. Where this fails, the message is a fault."""
    try:
        if item.content.type == "UPDATE":
            return list(_build_update_rows(item, epoch, how, known, has_waited, separating))
        if item.content.type == "BATCH_UPDATE" and separating.fetch:
            return list(_build_wanted_batches(item))
    except PROCESSING_ERRORS as error:  # `known` and `has_waited` raise sqlite3.Error alone; all else is pure
        data = item.envelope.SerializeToString()
        fault = reject_failed("updates", error, item.ref, data, item.observed_at)
        key, identity = quarantine_key(*item.ref), compute_fault_identity(fault)
        records = quarantine_records(fault.stage, fault.reason, fault.detail, fault.data, fault.observed_at)
        return [
            UpdateRow(identity + bytes((part,)), item.ref.text, "quarantine", key, encode(record), item.observed_at)
            for part, record in enumerate(records)
        ]
    return []


def _get_epoch(first: Epoch | None) -> Epoch:
    """Of the micro-batch that this task is of (decision 7)."""
    own = get_task_epoch()
    return own if first is None else Epoch(first.query, first.batch + own.batch)


def _compute_update_identity(item: DecodedMessage, separator: Separator | None) -> bytes:
    """The identity of an update: whoever announces it, however often and on whichever topic (decision 4).

    The separator is part of it: an announcement under a false separator must not mask the true one.
    """
    content = item.content
    where = separator_text(separator) if separator else ""
    parts = (item.origin, item.network, where, content.stream or "", content.tip or "")
    return blake2b("\n".join(parts).encode(), digest_size=16).digest()


def _nothing_waited(stream: tuple[str, str], tip: WaitedTip, /) -> bool:
    return False


def _build_update_rows(
    item: DecodedMessage,
    epoch: Epoch,
    how: DecodeConfig,
    known: KnownSeparators,
    has_waited: WaitedUpdate,
    separating: SeparatorConfig,
) -> Iterator[UpdateRow]:
    content = item.content
    stream, tip = content.stream or "", content.tip or ""
    claims = build_claims(item.separator, content.model)
    found = resolve_separator(claims, (item.network, stream), known, separating)
    named = _build_separator_record(found.separator)
    record = UpdateRecord(
        network=item.network,
        origin=item.origin,
        separator=named,
        separator_source=found.source,
        stream=stream,
        tip=tip,
        from_=get_signer(item),
        message=item.message,
        epoch=epoch,
        frame=Coordinates(item.ref.partition, item.ref.offset, item.ref.position or 0),
        observed_at=item.observed_at,
    )
    identity, place = _compute_update_identity(item, found.separator), item.ref.text
    waits = found.source is None and separating.fetch
    again = found.source == "genesis" and has_waited((item.network, stream), WaitedTip(item.origin, tip))
    if not waits and not again:
        key = update_key(item.network, named, stream)
        yield UpdateRow(identity, place, "updates", key, encode(record), item.observed_at)
    if found.source != "genesis" and separating.fetch:
        genesis = cid_text(StreamID.parse(stream).genesis)
        wanted = WantedRecord(
            item.network,
            genesis,
            "genesis" if waits else "claim",
            item.observed_at,
            message=item.message,
            update=record,
            topic=_build_separator_record(claims.topic),
            model=_build_separator_record(claims.model),
        )
        asks = identity if waits else identity + b"?"  # a claim is beside the update that goes on
        yield UpdateRow(asks, place, "wanted", genesis.encode(), encode(wanted), item.observed_at)
    if found.contradicted is not None and found.separator is not None:
        fault = build_false_claim(found.contradicted, found.separator, item.envelope.data, item.observed_at)
        message, _ = compute_identities(item, item.origin, how.unsigned_horizon)
        yield UpdateRow(message + b"!", place, "quarantine", quarantine_key(*item.ref), encode(fault), item.observed_at)


def _build_separator_record(separator: Separator | None) -> SeparatorRecord | None:
    return None if separator is None else SeparatorRecord(*separator)


def _build_wanted_batches(item: DecodedMessage) -> Iterator[UpdateRow]:
    """The batches that a BATCH_UPDATE of somebody else names. The batch that a message announces is wanted at each
    announcement: the fetcher may have given the batch up, or followed another interest then. Those before it are wanted
    once, whoever names them."""
    content = item.content
    if item.own or content.sep is None or content.batch is None:
        return
    separator = SeparatorRecord(*parse_separator_text(content.sep))
    for cid in (content.batch, *item.previous):
        announced = item.message if cid == content.batch else ""
        named = f"{item.origin}\n{item.network}\n{content.sep}\n{cid}\n{announced}".encode()
        wanted = WantedRecord(item.network, cid, "batch", item.observed_at, separator, item.message)
        identity = blake2b(named, digest_size=16).digest()
        yield UpdateRow(identity, item.ref.text, "wanted", cid.encode(), encode(wanted), item.observed_at)
