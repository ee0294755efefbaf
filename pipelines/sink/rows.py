"""Rows of the tables that `sink` writes, built from Kafka records, each with the values that identify the row.

Values have the order and the types of the tables' columns. Times are µs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Final, NamedTuple

import pyarrow as pa

from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS, PROCESSING_FAILED, describe
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.delta.lake import read_rows as read_stored_rows
from kiln.schemas.delta.tables import Column
from kiln.schemas.kafka.records import (
    MAX_DETAIL,
    UNREADABLE,
    BatchRecord,
    decode_batch,
    decode_block,
    decode_publication,
    decode_quarantine,
    decode_stream,
    decode_update,
    parse_quarantine_key,
)
from kiln.schemas.wire.batch_block import BlockError, read_block, read_foreign_block

RECEIVED_ROWS: Final = "received"
LOG_TIME: Final = "log_time"
"""Kinds of rows that belong to no table: a `ReceivedTip`, and a `LogTimeRow`."""


class UpdatesRow(NamedTuple):
    """A row of the table `updates`."""

    network: str
    origin: str
    message_id: str
    from_peer: str | None
    separator_key: str | None
    separator_value: str | None
    separator_source: str | None
    stream: str
    tip: str
    observed_at: int
    log_time: int
    log_partition: int
    log_offset: int


class TipsRow(NamedTuple):
    """A row of the table `tips`."""

    network: str
    stream: str
    tip: str
    source: str
    batch_cid: str | None
    observed_at: int


class BatchesRow(NamedTuple):
    """A row of the table `batches`."""

    batch_cid: str
    network: str
    origin: str
    separator_key: str
    separator_value: str
    opened_at: int
    closed_at: int
    emitted_at: int
    stream_count: int
    tip_count: int
    block_bytes: int
    block: bytes


class BatchTipsRow(NamedTuple):
    """A row of the table `batch_tips`."""

    batch_cid: str
    stream: str
    tip: str


class PublicationsRow(NamedTuple):
    """A row of the table `publications`."""

    batch_cid: str
    transport: str
    topic: str | None
    target: str | None
    peer_count: int | None
    published_at: int
    error: str | None


class StreamsRow(NamedTuple):
    """A row of the table `streams`."""

    network: str
    stream: str
    separator_key: str | None
    separator_value: str | None
    source: str


class QuarantineRow(NamedTuple):
    """A row of the table `quarantine`."""

    kafka_partition: int | None
    kafka_offset: int | None
    message_index: int | None
    cid: str | None
    stage: str
    reason: str
    detail: str | None
    data: bytes
    observed_at: int


class ReceivedTip(NamedTuple):
    """A tip in the batch of another node. It becomes a row of a table only after the separator in the batch's
    announcement was compared with the stream's verified separator."""

    network: str
    stream: str
    tip: str
    batch_cid: str
    observed_at: int
    separator_key: str
    separator_value: str


class LogTimeRow(NamedTuple):
    """Log time of a partition of `kiln.updates` after the last record that a task read, µs."""

    partition: int
    log_time: int


RECEIVED_COLUMNS: Final = (
    Column("network", "string", "Ceramic network"),
    Column("stream", "string", "StreamID, base36"),
    Column("tip", "string", "CID of the tip"),
    Column("batch_cid", "string", "CID of the batch that has the tip"),
    Column("observed_at", "timestamp", "time when the block was fetched"),
    Column("separator_key", "string", "key of the separator that the batch was announced under"),
    Column("separator_value", "string", "value of this separator"),
)
"""Columns of a `ReceivedTip`"""

ROW_TYPES: Final[dict[str, type[tuple[object, ...]]]] = {
    "updates": UpdatesRow,
    "tips": TipsRow,
    "batches": BatchesRow,
    "batch_tips": BatchTipsRow,
    "publications": PublicationsRow,
    "streams": StreamsRow,
    "quarantine": QuarantineRow,
    RECEIVED_ROWS: ReceivedTip,
    LOG_TIME: LogTimeRow,
}


class IdentifiedRow(NamedTuple):
    """A row, and the values that identify it among the rows of its kind. `kind`: a key of ROW_TYPES, such as a
    table."""

    kind: str
    identity: tuple[object, ...]
    row: tuple[object, ...]


_Rows = Iterator[IdentifiedRow]


def compute_digest(*parts: object) -> bytes:
    """Compute the digest that identifies a row in deduplication. `parts`: the row's kind, and the values that identify
    it."""
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def read_record(topic: str, partition: int, offset: int, now: int, key: bytes, value: bytes) -> list[IdentifiedRow]:
    """Build the rows of a Kafka record. A record that cannot be decoded becomes a row of `quarantine`. `now`: log time
    of the record's partition, µs."""
    try:
        return list(_READERS[topic](partition, offset, now, key, value))
    except (*UNREADABLE, BlockError) as error:
        reason, detail = "record_malformed", str(error)
    except PROCESSING_ERRORS as error:  # reading is pure: the record alone has caused this
        reason, detail = PROCESSING_FAILED, describe(error)
    return [_reject_value(f"record {partition}/{offset} of {topic}: {detail}"[:MAX_DETAIL], reason, value, now)]


def _reject_value(detail: str, reason: str, data: bytes, at: int) -> IdentifiedRow:
    row = QuarantineRow(None, None, None, None, "sink", reason, detail, data, at)
    return IdentifiedRow("quarantine", (detail,), row)


def _read_update(partition: int, offset: int, now: int, key: bytes, value: bytes) -> _Rows:
    update = decode_update(value)
    separator = update.separator
    row = UpdatesRow(
        network=update.network,
        origin=update.origin,
        message_id=update.message_id,
        from_peer=update.from_,
        separator_key=separator.key if separator else None,
        separator_value=separator.value if separator else None,
        separator_source=update.separator_source,
        stream=update.stream,
        tip=update.tip,
        observed_at=update.observed_at,
        log_time=now,
        log_partition=partition,
        log_offset=offset,
    )
    yield IdentifiedRow("updates", (row.network, row.origin, row.message_id), row)
    tip = TipsRow(update.network, update.stream, update.tip, "update", None, update.observed_at)
    yield IdentifiedRow("tips", (tip.network, tip.stream, tip.tip, tip.source), tip)


def _read_batch(partition: int, offset: int, now: int, key: bytes, value: bytes) -> _Rows:
    return build_batch_rows(decode_batch(value), now)


def build_batch_rows(batch: BatchRecord, emitted_at: int) -> _Rows:
    """Build the rows of a batch and of its tips. `emitted_at`: time at which the batch was written to Kafka, µs.

    Raises:
        BlockError: The block of the batch is malformed.
    """
    tips = read_block(batch.block)
    row = BatchesRow(
        batch_cid=batch.batch_cid,
        network=batch.network,
        origin=batch.origin,
        separator_key=batch.separator.key,
        separator_value=batch.separator.value,
        opened_at=batch.opened_at,
        closed_at=batch.closed_at,
        emitted_at=emitted_at,
        stream_count=len(tips),
        tip_count=sum(map(len, tips.values())),
        block_bytes=len(batch.block),
        block=batch.block,
    )
    owner = (row.network, row.origin, row.separator_key, row.separator_value)
    yield IdentifiedRow("batches", (*owner, row.opened_at, row.batch_cid), row)
    for stream, links in tips.items():
        for tip in links:
            link = BatchTipsRow(batch.batch_cid, stream, tip)
            yield IdentifiedRow("batch_tips", link, link)


def _read_publication(partition: int, offset: int, now: int, key: bytes, value: bytes) -> _Rows:
    receipt = decode_publication(value)
    row = PublicationsRow(
        batch_cid=receipt.batch_cid,
        transport=receipt.transport,
        topic=receipt.topic,
        target=receipt.target,
        peer_count=receipt.peer_count,
        published_at=receipt.published_at,
        error=receipt.error,
    )
    identity = (row.batch_cid, row.transport, row.topic, row.target, row.published_at)
    yield IdentifiedRow("publications", identity, row)


def _read_quarantined(partition: int, offset: int, now: int, key: bytes, value: bytes) -> _Rows:
    fault = decode_quarantine(value)
    known = (*parse_quarantine_key(key), fault.stage, fault.reason, fault.detail)
    row = QuarantineRow(*known, fault.data, fault.observed_at)
    # the bytes are included, because another record may be at the same offset of a topic that was created again
    yield IdentifiedRow("quarantine", (*known, compute_digest(fault.data)), row)


def _read_stream(partition: int, offset: int, now: int, key: bytes, value: bytes) -> _Rows:
    stream = decode_stream(value)
    separator = stream.separator
    row = StreamsRow(
        network=stream.network,
        stream=stream.stream,
        separator_key=separator.key if separator else None,
        separator_value=separator.value if separator else None,
        source=stream.source,
    )
    yield IdentifiedRow("streams", (row.network, row.stream), row)


def _read_block(partition: int, offset: int, now: int, key: bytes, value: bytes) -> _Rows:
    block = decode_block(value)
    if block.block is None:
        return  # the bridge has put the reason into quarantine
    read = read_foreign_block(block.block)
    for stream, links in read.tips.items():
        for tip in links:
            row = ReceivedTip(
                network=block.network,
                stream=stream,
                tip=tip,
                batch_cid=block.batch_cid,
                observed_at=block.observed_at,
                separator_key=block.separator.key,
                separator_value=block.separator.value,
            )
            yield IdentifiedRow(RECEIVED_ROWS, (row.network, row.stream, row.tip), row)
    for entry in read.invalid:
        yield _reject_value(f"block {block.batch_cid}: {entry.why}", "entry_malformed", entry.data, block.observed_at)


_READERS: Final[dict[str, Callable[[int, int, int, bytes, bytes], _Rows]]] = {
    "updates": _read_update,
    "batches": _read_batch,
    "publications": _read_publication,
    "quarantine": _read_quarantined,
    "streams": _read_stream,
    "blocks": _read_block,
}

_IDENTITY_COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "updates": ("network", "origin", "message_id"),
    "batches": ("network", "origin", "separator_key", "separator_value", "opened_at", "batch_cid"),
    "batch_tips": ("batch_cid", "stream", "tip"),
    "publications": ("batch_cid", "transport", "topic", "target", "published_at"),
    "streams": ("network", "stream"),
    "tips": ("network", "stream", "tip", "source"),
    "quarantine": (
        *("kafka_partition", "kafka_offset", "message_index", "cid", "stage", "reason", "detail"),
        "data",
    ),
}


def read_stored_identities(lake: Lake) -> Iterator[tuple[bytes, ...]]:
    """Read the digests of the rows in the tables, by which the query recognises repeated records."""
    for table, names in _IDENTITY_COLUMNS.items():
        for batch in read_stored_rows(lake.open(table), list(names)) if lake.has(table) else ():
            columns = (
                column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column for column in batch.columns
            )
            for values in zip(*(column.to_pylist() for column in columns), strict=True):
                match table:
                    case "tips":
                        network, stream, tip, source = values
                        if source == "batch":
                            yield (compute_digest(RECEIVED_ROWS, network, stream, tip),)
                        else:
                            yield (compute_digest(table, *values),)
                    case "quarantine":
                        *known, data = values
                        yield (compute_digest(table, *known, compute_digest(data)),)
                        yield (compute_digest(table, known[-1]),)  # if `sink` itself could not read the record
                    case _:
                        yield (compute_digest(table, *values),)
