"""Decoding of one record of `kiln.frames` in Python into rows: messages, copies, control entries, quarantine records.

The native core must decode a record into the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from kiln.pipelines.decode.decoder import (
    DecodeConfig,
    DecodedMessage,
    FrameDecoder,
    MessageRef,
    RejectedMessage,
    build_frame_key,
    get_signer,
    reject_failed,
    reject_unreadable,
)
from kiln.pipelines.decode.frame_row import FrameRow, build_frame_row
from kiln.pipelines.decode.identities import compute_fault_identity
from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS
from kiln.pipelines.decode.user_decoder import STAGE as DECODER_STAGE
from kiln.pipelines.decode.user_decoder import MessageDecoder
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.kafka.frames import BEP50, DIRECTIONS, ORIGINS, RPC_TOO_COSTLY, read_frame
from kiln.schemas.kafka.records import (
    MAX_QUARANTINED,
    Origin,
    QuarantineRecord,
    build_quarantine_key,
    build_quarantine_records,
    encode,
)
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.control import has_control_part, list_control_entries, parse_control_rpc
from kiln.schemas.wire.identity import VERDICT_NAMES, peer_text
from kiln.schemas.wire.topic_table import TopicSource, negotiate_table

ENTRY_ROW_BYTES: Final = 500
"""approximate bytes of a subscription or control entry in memory, without its message ids"""


class SubscriptionRow(NamedTuple):
    """A row of the table `subscriptions`, in the order of its columns. Times are µs."""

    network: str
    origin: str
    connection: bytes
    direction: str
    local_peer: str
    remote_peer: str
    observed_at: int
    subscribe: bool
    topic: str | None
    topic_source: TopicSource | None
    topic_index: int | None
    raw: bytes | None
    wire_bytes: int
    kafka_partition: int
    kafka_offset: int
    entry_index: int


class ControlRow(NamedTuple):
    """A row of the table `controls`, in the order of its columns. Times are µs."""

    network: str
    origin: str
    connection: bytes
    direction: str
    local_peer: str
    remote_peer: str
    observed_at: int
    kind: str
    topic: str | None
    topic_source: TopicSource | None
    topic_index: int | None
    message_ids: list[str] | None
    message_id_count: int | None
    peer_count: int | None
    backoff: int | None
    raw: bytes | None
    wire_bytes: int
    kafka_partition: int
    kafka_offset: int
    entry_index: int


class ControlRows(NamedTuple):
    """Rows of `subscriptions` and `controls` from one frame."""

    subscriptions: Sequence[SubscriptionRow] = ()
    controls: Sequence[ControlRow] = ()
    unread: int = 0
    """number of subscriptions and control entries that were not read, because they exceed the limit for one RPC"""


NO_CONTROL_ROWS: Final = ControlRows()


def read_control_rpc(frame: Frame) -> RPC | None:
    """Parse the RPC of a frame if it has subscriptions or control entries.

    Returns:
        None if it has neither, or if the payload is not a complete gossipsub RPC, which `FrameDecoder` reports.
    """
    payload = frame.payload
    if not has_control_part(payload) or frame.declared_length or frame.protocol == BEP50:
        return None
    rpc = parse_control_rpc(payload)
    return None if isinstance(rpc, Rejected) else rpc


def build_control_rows(frame: Frame, rpc: RPC, config: DecodeConfig, partition: int, offset: int) -> ControlRows:
    """Build the rows of the subscriptions and control entries in a frame, whose parsed payload is `rpc`.

    The network of a row is the one that its topic names, as in the table `messages`, or else the frame's.
    """
    table = negotiate_table(frame.hello_in, frame.hello_out, config.bundles).table
    part = list_control_entries(rpc, table, config.message_ids.format)
    network, connection = frame.network, frame.connection
    origin, direction = ORIGINS[frame.origin], DIRECTIONS[frame.direction]
    local_peer, remote_peer, observed_at = peer_text(frame.local_peer), peer_text(frame.remote_peer), frame.observed_at
    subscriptions = [
        SubscriptionRow(
            network=config.find_network(entry.topic.topic, network),
            origin=origin,
            connection=connection,
            direction=direction,
            local_peer=local_peer,
            remote_peer=remote_peer,
            observed_at=observed_at // 1000,
            subscribe=entry.subscribe,
            topic=entry.topic.topic,
            topic_source=entry.topic.source,
            topic_index=entry.topic.number,
            raw=entry.raw,
            wire_bytes=entry.size,
            kafka_partition=partition,
            kafka_offset=offset,
            entry_index=index,
        )
        for index, entry in enumerate(part.subscriptions)
    ]
    controls = [
        ControlRow(
            network=config.find_network(entry.topic.topic, network),
            origin=origin,
            connection=connection,
            direction=direction,
            local_peer=local_peer,
            remote_peer=remote_peer,
            observed_at=observed_at // 1000,
            kind=entry.kind,
            topic=entry.topic.topic,
            topic_source=entry.topic.source,
            topic_index=entry.topic.number,
            message_ids=entry.message_ids,
            message_id_count=entry.message_id_count,
            peer_count=entry.peer_count,
            backoff=entry.backoff,
            raw=entry.raw,
            wire_bytes=entry.size,
            kafka_partition=partition,
            kafka_offset=offset,
            entry_index=index,
        )
        for index, entry in enumerate(part.controls)
    ]
    return ControlRows(subscriptions, controls, part.unread)


def estimate_size(row: ControlRow) -> int:
    """Estimate the bytes of a row in memory."""
    return ENTRY_ROW_BYTES + 100 * len(row.message_ids or ())


ROW_BYTES = 500
"""approximate bytes of a message or its row in memory, without its data"""


class MessageRow(NamedTuple):
    """A row of the table `messages`, in the order of its columns. Times are µs."""

    message_id: str
    network: str
    origin: Origin
    topic: str
    topic_source: str
    type: str
    from_peer: str | None
    seqno: bytes | None
    stream: str | None
    tip: str | None
    model: str | None
    sep: str | None
    batch_cid: str | None
    query_id: str | None
    tips: list[tuple[str, str]] | None
    ts: int | None
    ver: str | None
    ipfs_ver: str | None
    data: bytes
    verdict: str
    remote_peer: str
    observed_at: int
    kafka_partition: int
    kafka_offset: int
    message_index: int | None
    decoded: str | None = None
    """JSON from the user's decoder, which `decode_data` adds after deduplication"""


class CopyRow(NamedTuple):
    """A row of the table `copies`, in the order of its columns. Times are µs."""

    network: str
    message_id: str
    remote_peer: str
    observed_at: int
    verdict: str
    kafka_partition: int
    kafka_offset: int
    message_index: int | None


class FaultRow(NamedTuple):
    """A record for `kiln.quarantine`. `author`: signer of the message if the signature is valid, else ""."""

    reason: str
    author: str
    key: bytes
    value: bytes


class DecodedRecord(NamedTuple):
    """Result of decoding one record of `kiln.frames`."""

    items: list[DecodedMessage | RejectedMessage]
    copies: Sequence[CopyRow] = ()
    control: ControlRows = NO_CONTROL_ROWS
    row: FrameRow | None = None
    """row of the table `frames`; None if the record is not a Frame, or if its row was not built"""


def decode_record(
    decoder: FrameDecoder, partition: int, offset: int, stamp: int, value: bytes | None, *, with_row: bool = True
) -> DecodedRecord:
    """Decode one record of `kiln.frames`. It raises nothing: what cannot be decoded is rejected.

    A frame whose messages cannot be decoded keeps its row of `frames`. A frame whose control part cannot be decoded
    also keeps its messages. `stamp`: the broker's timestamp, µs; `with_row`: false to build no row of `frames`.
    """
    row: FrameRow | None = None
    try:
        frame = read_frame(value)
        if isinstance(frame, Rejected):
            return DecodedRecord([reject_unreadable(frame, value, partition, offset, stamp)])
        row = build_frame_row(partition, offset, stamp, frame) if with_row else None
        rpc = read_control_rpc(frame)  # parsed once for the messages and the control part
        items = decoder.decode_frame(frame, partition, offset, rpc)
        copies = [build_copy_row(item, frame) for item in items if item.copy is not None]
    except PROCESSING_ERRORS as error:  # all of the above is pure: the record alone has caused this
        fault = reject_failed("archive", error, MessageRef(partition, offset, None), value or b"", stamp)
        return DecodedRecord([fault], row=row)
    control = NO_CONTROL_ROWS
    ref, observed_at = MessageRef(partition, offset, None), frame.observed_at // 1000
    try:
        if rpc is not None:
            control = build_control_rows(frame, rpc, decoder.config, partition, offset)
        if control.unread:
            read = len(control.subscriptions) + len(control.controls)
            detail = f"{read + control.unread} subscriptions and control entries, of which the first {read} are read"
            key = build_frame_key(frame)  # the table `frames` has the bytes
            items.append(RejectedMessage(ref, "rpc", RPC_TOO_COSTLY, detail, b"", observed_at, key))
    except PROCESSING_ERRORS as error:  # pure: the frame alone has caused this
        items.append(reject_failed("archive", error, ref, frame.payload, observed_at, build_frame_key(frame)))
    return DecodedRecord(items, copies, control, row)


def build_message_row(item: DecodedMessage) -> MessageRow:
    """Build the row of `messages` of a valid message."""
    content, envelope = item.content, item.envelope
    signer = get_signer(envelope, item.verdict)
    return MessageRow(
        message_id=item.message_id,
        network=item.network,
        origin=item.origin,
        topic=item.topic,
        topic_source=item.topic_source,
        type=content.type,
        from_peer=signer,
        seqno=envelope.seqno if signer else None,
        stream=content.stream,
        tip=content.tip,
        model=content.model,
        sep=content.sep,
        batch_cid=content.batch,
        query_id=content.query_id,
        tips=list(content.tips.items()) if content.tips is not None else None,
        ts=content.ts,
        ver=content.ver,
        ipfs_ver=content.ipfs_ver,
        data=envelope.data,
        verdict=VERDICT_NAMES[item.verdict],
        remote_peer=item.remote_peer,
        observed_at=item.observed_at,
        kafka_partition=item.ref.partition,
        kafka_offset=item.ref.offset,
        message_index=item.ref.position,
    )


def build_copy_row(item: DecodedMessage | RejectedMessage, frame: Frame) -> CopyRow:
    """Build the row of `copies` of a received message, valid or not.

    Raises:
        ValueError: The item is an announcement in the DHT, or a rejected frame.
    """
    copy, ref = item.copy, item.ref
    if copy is None:
        raise ValueError(f"{ref.text} is an announcement in the DHT or a rejected frame, not a message")
    remote = item.remote_peer if isinstance(item, DecodedMessage) else peer_text(frame.remote_peer)
    return CopyRow(copy.network, copy.message_id, remote, item.observed_at, copy.verdict, *ref)


def decode_data(row: MessageRow, decoder: MessageDecoder) -> MessageRow | RejectedMessage:
    """Call the user's decoder to fill the column `decoded`. If it fails, reject the data of the message."""
    decoded = decoder.decode(row.data)
    if isinstance(decoded, str):
        return row._replace(decoded=decoded)
    ref = MessageRef(row.kafka_partition, row.kafka_offset, row.message_index)
    return RejectedMessage(ref, DECODER_STAGE, decoded.reason, decoded.detail, row.data, row.observed_at)


def reject_message(item: DecodedMessage, error: Exception) -> RejectedMessage:
    """Reject a message whose row could not be built because of `error`."""
    return reject_failed("archive", error, item.ref, item.envelope.SerializeToString(), item.observed_at)


def reject_row(table: str, row: Sequence[object], error: Exception) -> RejectedMessage:
    """Reject a row that its table cannot store.

    The bytes of the result are the payload of a row of `frames`, the data of a row of `messages`, or else empty.
    """
    values = {column.name: value for column, value in zip(TABLES[table].columns, row, strict=True)}
    partition, offset, index = (values.get(name) for name in ("kafka_partition", "kafka_offset", "message_index"))
    data, at = values.get("payload", values.get("data")), values["observed_at"]
    assert isinstance(partition, int)
    assert isinstance(offset, int)
    ref = MessageRef(partition, offset, index if isinstance(index, int) else None)
    return reject_failed(
        "archive", error, ref, data if isinstance(data, bytes) else b"", at if isinstance(at, int) else 0
    )


def build_fault_rows(item: RejectedMessage) -> Iterator[tuple[bytes, FaultRow]]:
    """Yield the rows of a rejected message for `kiln.quarantine`, each with the digest that identifies the row.

    There are several rows, with numbered parts of the bytes, if the bytes do not fit into one Kafka record.
    """
    own = compute_fault_identity(item)
    for number, record in enumerate(build_fault_records(item)):
        identity = blake2b(own + (number * MAX_QUARANTINED).to_bytes(8), digest_size=16).digest() if number else own
        yield identity, FaultRow(item.reason, item.author, build_quarantine_key(*item.ref), encode(record))


def build_fault_records(item: RejectedMessage) -> Iterator[QuarantineRecord]:
    """Build the records of a rejected message for `kiln.quarantine`: several if its bytes do not fit into one."""
    return build_quarantine_records(item.stage, item.reason, item.detail, item.data, item.observed_at)
