"""Rows that the query `updates` builds from a decoded message: an update with its separator, requests for blocks, and
quarantine records.

If blocks can be fetched, `kiln.wanted` has three kinds of requests. An update whose separator is unknown waits in this
topic for the genesis of its stream. An update whose separator is only claimed is emitted, and its genesis is requested
to check the claim (decision 20). Batches that other nodes announced are requested.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Final, NamedTuple, Protocol

import msgspec
import pyarrow as pa

from kiln.pipelines.decode.decoder import DecodeConfig, DecodedMessage, MessageRef, get_signer, reject_failed
from kiln.pipelines.decode.identities import compute_fault_identity, compute_identities, is_lasting
from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS
from kiln.pipelines.delta.arrow_rows import RowBuffer
from kiln.pipelines.updates.repeats import Announcement
from kiln.pipelines.updates.separators import (
    KnownSeparators,
    SeparatorConfig,
    build_claims,
    build_false_claim,
    resolve_separator,
)
from kiln.schemas.kafka.records import (
    Coordinates,
    Epoch,
    QuarantineRecord,
    SeparatorRecord,
    UpdateRecord,
    WaitedTip,
    WantedRecord,
    build_quarantine_key,
    build_quarantine_records,
    build_update_key,
    encode,
)
from kiln.schemas.wire.cid import cid_text
from kiln.schemas.wire.genesis import CONTRADICTS_TOPIC, Claims
from kiln.schemas.wire.streamid import StreamID
from kiln.schemas.wire.topics import Separator, format_separator, parse_separator

ROWS: Final = pa.schema(
    [("topic", pa.string()), ("key", pa.binary()), ("value", pa.binary()), ("observed_at", pa.int64())]
)
ROWS_DDL: Final = "topic string, key binary, value binary, observed_at bigint"
"""Columns of the records for Kafka, and the capture time in µs"""

_COPIES: Final = pa.schema(
    [
        ("stream", pa.binary()),
        ("identity", pa.binary()),
        ("announcement", pa.binary()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("index", pa.int32()),
        *ROWS,
        ("batch_time", pa.int64()),
    ]
)
COPIES_DDL: Final = (
    "stream binary, identity binary, announcement binary, partition int, offset bigint, index int, "
    f"{ROWS_DDL}, batch_time bigint"
)
"""Columns of an `UpdateRow`, and the time of the micro-batch in µs"""
COPY_COLUMNS: Final[tuple[str, ...]] = tuple(_COPIES.names[:-1])
"""Columns of an `UpdateRow`, in the order in which `read_copies` takes them"""

_CopyColumns = tuple[bytes, bytes, bytes | None, int, int, int, str, bytes, bytes, int]
_NO_INDEX: Final = -1


class UpdateRow(NamedTuple):
    """A copy of a row for Kafka. The row is emitted once per identity. An announcement is emitted if it is an update.

    Attributes:
        stream: Digest of the stream; for a row that belongs to no stream, its identity.
        identity: Digest that identifies the row.
        ref: Position of this copy.
        topic: Kafka topic, without prefix.
        key: Key of the record.
        value: Value of the record.
        observed_at: Capture time, µs.
        announcement: Announcement of an update; None for any other row.
    """

    stream: bytes
    identity: bytes
    ref: MessageRef
    topic: str
    key: bytes
    value: bytes
    observed_at: int
    announcement: Announcement | None = None

    @property
    def identities(self) -> tuple[bytes, ...]:
        return (self.identity,)

    @property
    def position(self) -> str:
        return self.ref.text

    @property
    def size(self) -> int:
        return len(self.value)


def write_copies(rows: Iterable[UpdateRow], batch_time: int) -> Iterator[pa.RecordBatch]:
    """Write rows as record batches with the columns COPIES_DDL. `batch_time`: time of the micro-batch, µs."""
    buffer = RowBuffer(_COPIES)
    for row in rows:
        announcement = None if row.announcement is None else msgspec.msgpack.encode(row.announcement)
        ref = (row.ref.partition, row.ref.offset, _NO_INDEX if row.ref.position is None else row.ref.position)
        copy = (row.stream, row.identity, announcement, *ref, row.topic, row.key, row.value, row.observed_at)
        if buffer.add((*copy, batch_time), row.size):
            yield from buffer.drain()
    yield from buffer.drain()


def read_copies(copies: Iterable[_CopyColumns]) -> Iterator[UpdateRow]:
    """Build rows from the values that `write_copies` wrote. `copies`: values of the columns COPY_COLUMNS."""
    for stream, identity, packed, partition, offset, index, topic, key, value, observed_at in copies:
        ref = MessageRef(partition, offset, None if index == _NO_INDEX else index)
        announcement = None if packed is None else msgspec.msgpack.decode(packed, type=Announcement)
        yield UpdateRow(stream, identity, ref, topic, key, value, observed_at, announcement)


_CLAIM_CHECK: Final = b"?"
_FALSE_CLAIM: Final = b"!"
"""Suffixes of the identities of a message's further rows: "?" for the request for a genesis that checks a claim, "!"
for the quarantine record about a claim that contradicts the genesis or the topic."""


class StreamStates(KnownSeparators, Protocol):
    """Separators of streams whose geneses were verified, and the tips that waited for these geneses."""

    def has_waited(self, stream: tuple[str, str], tip: WaitedTip, /) -> bool:
        """Return true if an update to this tip waited for the genesis, and was then written to `kiln.updates`.
        `stream`: network and StreamID."""
        ...


class NoStreams:
    """`StreamStates` without any stream, for a Kiln that verifies no geneses."""

    def get(self, stream: tuple[str, str], default: SeparatorRecord | None, /) -> SeparatorRecord | None:
        return default

    def has_waited(self, stream: tuple[str, str], tip: WaitedTip, /) -> bool:
        return False


class RowBuilder:
    """Builder of the rows of messages, for one task."""

    def __init__(self, config: DecodeConfig, separating: SeparatorConfig, streams: StreamStates, epoch: Epoch) -> None:
        """Create the builder. `epoch`: epoch for the updates (decision 7)."""
        self._horizon = config.unsigned_horizon
        self._separating = separating
        self._streams = streams
        self._epoch = epoch

    def build(self, item: DecodedMessage) -> list[UpdateRow]:
        """Build the rows of a message. If Kiln's own code raises an error, reject the message."""
        try:
            if item.content.type == "UPDATE":
                return list(self._build_update(item))
            if item.content.type == "BATCH_UPDATE":
                wanted = _build_wanted_batches(item) if self._separating.fetch else ()
                return [*self._build_misplaced_batch(item), *wanted]
        except PROCESSING_ERRORS as error:  # `_streams` raises only sqlite3.Error; all else is pure
            return list(_build_faults(item, error))
        return []

    def _build_update(self, item: DecodedMessage) -> Iterator[UpdateRow]:
        content, fetch = item.content, self._separating.fetch
        stream, tip = content.stream or "", content.tip or ""
        name = item.network, stream
        claims = build_claims(item.separator, content.model)
        separated = resolve_separator(claims, name, self._streams, self._separating)
        has_waited = separated.source == "genesis" and self._streams.has_waited(name, WaitedTip(item.origin, tip))
        is_waiting = separated.source is None and fetch
        update = UpdateRecord(
            network=item.network,
            origin=item.origin,
            separator=_build_separator_record(separated.separator),
            separator_source=separated.source,
            stream=stream,
            tip=tip,
            from_=get_signer(item.envelope, item.verdict),
            message_id=item.message_id,
            epoch=self._epoch,
            frame=Coordinates(item.ref.partition, item.ref.offset, item.ref.position or 0),
            observed_at=item.observed_at,
        )
        group = _digest(item.origin, item.network, stream)
        # an announcement that waits for its genesis is no repeat of one with a separator, which may be false
        announcement = _build_announcement(
            update, group, is_lasting=is_lasting(item.message_id, True), may_wait=fetch, has_waited=has_waited
        )
        if not is_waiting:
            yield UpdateRow(
                stream=group,
                identity=announcement.update,
                ref=item.ref,
                topic="updates",
                key=build_update_key(item.network, update.separator, stream),
                value=encode(update),
                observed_at=item.observed_at,
                announcement=announcement,
            )
        if separated.source != "genesis" and fetch:
            wanted = _build_wanted_genesis(item, update, claims)
            yield UpdateRow(
                stream=group,
                identity=announcement.update if is_waiting else announcement.update + _CLAIM_CHECK,
                ref=item.ref,
                topic="wanted",
                key=wanted.cid.encode(),
                value=encode(wanted),
                observed_at=item.observed_at,
                announcement=announcement if is_waiting else None,  # a claim is in addition to the emitted update
            )
        if separated.contradicted is not None and separated.separator is not None:
            data = item.envelope.data
            fault = build_false_claim(separated.contradicted, separated.separator, data, item.observed_at)
            yield self._build_false_claim_row(item, fault, group)

    def _build_misplaced_batch(self, item: DecodedMessage) -> Iterator[UpdateRow]:
        """Build the quarantine row of a BATCH_UPDATE that was received on the topic of another separator.

        CIP-123 requires that a batch is announced on the topic of its own separator. The block is fetched nevertheless:
        the geneses of its streams decide which of its tips are accepted.
        """
        content, topic = item.content, item.separator
        if topic is None or content.sep is None or parse_separator(content.sep) == topic:
            return
        fault = QuarantineRecord(
            stage="separator",
            reason=CONTRADICTS_TOPIC,
            detail=f"the batch is for {content.sep}, but was received on the topic of {format_separator(topic)}",
            data=item.envelope.data,
            observed_at=item.observed_at,
        )
        yield self._build_false_claim_row(item, fault)

    def _build_false_claim_row(self, item: DecodedMessage, fault: QuarantineRecord, group: bytes = b"") -> UpdateRow:
        message, *_ = compute_identities(item, item.origin, self._horizon)
        return UpdateRow(
            stream=group or message,
            identity=message + _FALSE_CLAIM,
            ref=item.ref,
            topic="quarantine",
            key=build_quarantine_key(*item.ref),
            value=encode(fault),
            observed_at=item.observed_at,
        )


def _build_faults(item: DecodedMessage, error: Exception) -> Iterator[UpdateRow]:
    fault = reject_failed("updates", error, item.ref, item.envelope.SerializeToString(), item.observed_at)
    identity = compute_fault_identity(fault)
    records = build_quarantine_records(fault.stage, fault.reason, fault.detail, fault.data, fault.observed_at)
    for part, record in enumerate(records):
        yield UpdateRow(
            stream=identity,
            identity=identity + bytes((part,)),
            ref=item.ref,
            topic="quarantine",
            key=build_quarantine_key(*item.ref),
            value=encode(record),
            observed_at=item.observed_at,
        )


def _build_announcement(
    update: UpdateRecord, group: bytes, *, is_lasting: bool, may_wait: bool, has_waited: bool
) -> Announcement:
    """Build the announcement of an UPDATE. `group`: digest of the update's stream.

    Args:
        is_lasting: True if copies of the message are recognised for as long as digests are stored.
        may_wait: True if updates without separator wait for the genesis of their stream.
        has_waited: True if the tip waited, and became an update when the genesis arrived.
    """
    separator = update.separator
    where = format_separator(Separator(separator.key, separator.value)) if separator else ""
    tip = update.tip

    def compute_update(where: str) -> bytes:
        """Compute the digest of the stream, the tip and a separator, which all announcements of the tip under this
        separator share (decision 5). It includes the separator, so that an announcement under a false separator does
        not hide one under the true separator."""
        return _digest(update.origin, update.network, where, update.stream, tip)

    is_known = update.from_ is not None and is_lasting
    return Announcement(
        update=compute_update(where),
        tip=_digest(tip),
        at=update.observed_at,
        message=blake2b(group + update.message_id.encode(), digest_size=16).digest() if is_known else None,
        author=blake2b(group + (update.from_ or "").encode(), digest_size=16).digest() if is_known else None,
        bare=None if separator is None or (may_wait and not has_waited) else compute_update(""),
        has_waited=has_waited,
    )


def _build_wanted_genesis(item: DecodedMessage, update: UpdateRecord, claims: Claims) -> WantedRecord:
    """Build the request for the genesis that an update waits for, or that checks the update's claim."""
    return WantedRecord(
        network=item.network,
        cid=cid_text(StreamID.parse(update.stream).genesis),
        reason="genesis" if update.separator_source is None else "claim",
        observed_at=item.observed_at,
        message_id=item.message_id,
        update=update,
        topic=_build_separator_record(claims.topic),
        model=_build_separator_record(claims.model),
        peer=item.remote_peer,
    )


def _build_wanted_batches(item: DecodedMessage) -> Iterator[UpdateRow]:
    """Build the requests for the blocks of the batches that another node's BATCH_UPDATE names.

    The announced batch is requested at each announcement, because the fetcher may have given up the batch before, or
    may have ignored its separator. Earlier batches that the message names are requested once.
    """
    content = item.content
    if item.own or content.sep is None or content.batch is None:
        return
    separator = SeparatorRecord(*parse_separator(content.sep))
    for cid in (content.batch, *item.previous):
        identity = _digest(item.origin, item.network, content.sep, cid, item.message_id if cid == content.batch else "")
        wanted = WantedRecord(
            network=item.network,
            cid=cid,
            reason="batch",
            observed_at=item.observed_at,
            separator=separator,
            message_id=item.message_id,
            peer=item.remote_peer,
        )
        yield UpdateRow(
            stream=identity,
            identity=identity,
            ref=item.ref,
            topic="wanted",
            key=cid.encode(),
            value=encode(wanted),
            observed_at=item.observed_at,
        )


def _build_separator_record(separator: Separator | None) -> SeparatorRecord | None:
    return None if separator is None else SeparatorRecord(*separator)


def _digest(*parts: str) -> bytes:
    return blake2b("\n".join(parts).encode(), digest_size=16).digest()
