"""Values and keys of the Kafka topics with JSON values (docs/design/contracts.md, Kafka topics).

The records are msgspec Structs for the contracts in schemas/kafka/<topic>.schema.json. Times are integer µs since the
epoch, bytes are base64, and optional keys have a default. `encode` always writes all keys.

The decode_* functions refuse fields that contradict each other, and unknown fields, so that a misspelt optional field
is not taken for an absent one. They raise msgspec.DecodeError for a value that is not JSON, and its subclass
msgspec.ValidationError for JSON that is not such a record. Readers of a topic send values that they cannot decode to
quarantine. Creating a record with contradictory fields raises ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from kiln.schemas.kafka.topics import MAX_TOPIC
from kiln.schemas.times import MAX_MICROS, MIN_MICROS, clamp_micros
from kiln.schemas.wire import cid, streamid

Origin = Literal["LIVE", "REPLAY"]
SeparatorSource = Literal["genesis", "topic", "model"]
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Micros = Annotated[int, Meta(ge=MIN_MICROS, le=MAX_MICROS)]
"""time in µs since the epoch, in the years 2000 to 2099"""

# Each text has a limit, because some are repeated in the row of each tip of a block.
Code = Annotated[str, Meta(min_length=1, max_length=256)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_TOPIC)]
Part = Annotated[str, Meta(min_length=1, max_length=1024)]
"""Key or value of a separator (kiln.schemas.wire.topics)."""
CidText = Annotated[str, Meta(min_length=1, max_length=cid.MAX_TEXT)]
StreamText = Annotated[str, Meta(min_length=1, max_length=streamid.MAX_TEXT)]
MessageId = Annotated[str, Meta(min_length=1, max_length=8192)]
Author = Annotated[str, Meta(max_length=8192)]
TopicText = Annotated[str, Meta(max_length=MAX_TOPIC)]
Words = Annotated[str, Meta(max_length=64 * 1024)]

# Value of a tick: a record of kiln.updates that only advances log time, and has no key (decision 1).
TICK: Final = b""


class Coordinates(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Position of a message: its record in `kiln.frames`, and its index among the messages of the RPC, from 0."""

    partition: Natural
    offset: Natural
    index: Natural


class Epoch(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Writer of a record, and number of the writer's epoch (kiln.schemas.kafka.epoch_guard).

    A record that is written again after a crash has the same epoch, so that readers recognize it (decision 7).
    """

    query: Code
    batch: Natural


class SeparatorRecord(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A separator (CIP-120): its key, and its value as base36 multibase text, as in the topic name."""

    key: Part
    value: Part


class UpdateRecord(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Record of `kiln.updates`: a new tip of a stream."""

    network: Name
    origin: Origin
    separator: SeparatorRecord | None
    separator_source: SeparatorSource | None
    """source of the separator; `None` if the separator is not known yet. If the source is "genesis" and `separator` is
    `None`, the stream has no separator (decision 4)"""
    stream: StreamText
    tip: CidText
    from_: Author | None = msgspec.field(name="from")
    """peer id of the author; `None` if the message is unsigned"""
    message_id: MessageId
    epoch: Epoch
    frame: Coordinates
    observed_at: Micros


class BatchRecord(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Record of `kiln.batches`: a CIP-123 batch block, with the tips of a window of one separator."""

    network: Name
    origin: Origin
    separator: SeparatorRecord
    batch_cid: CidText
    block: bytes
    opened_at: Micros
    closed_at: Micros


class PublicationRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """Record of `kiln.publications`: the number of peers to which a batch was sent, or the error of publishing it."""

    batch_cid: CidText
    transport: Code
    published_at: Micros
    topic: TopicText | None = None
    target: TopicText | None = None
    peer_count: Natural | None = None
    error: Words | None = None

    def __post_init__(self) -> None:
        if (self.error is None) != bool(self.peer_count):
            raise ValueError("a publication has either a peer_count or an error")


class WaitedTip(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Tip of an update that waited for the genesis of its stream, and is now in `kiln.updates`."""

    origin: Origin
    tip: CidText


class StreamRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """Record of `kiln.streams`: the separator in a stream's verified genesis, or the reason why it has none."""

    network: Name
    stream: StreamText
    separator: SeparatorRecord | None
    observed_at: Micros
    source: Code = "genesis"
    without: Code | None = None
    """reason why the genesis has no separator"""
    waited: tuple[WaitedTip, ...] = ()
    """tips of updates that waited for the genesis; announcing such a tip again is no new update (decision 20)"""

    def __post_init__(self) -> None:
        if (self.separator is None) == (self.without is None):
            raise ValueError("a stream needs either `separator` or `without`, the reason for having none, and not both")


class QuarantineRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """Record of `kiln.quarantine`: rejected bytes, and the reason. The record's key states the bytes' source."""

    stage: Code
    reason: Code
    detail: Words
    data: bytes
    observed_at: Micros


MAX_QUARANTINED: Final = 5 * 1024 * 1024
"""Maximum number of bytes in one record of `kiln.quarantine`. Base64 makes them a third longer, and Kafka accepts
records of up to 8 MiB."""
MAX_DETAIL: Final = 1024
"""Maximum number of characters in `detail` of a quarantine record. JSON may need six bytes for each."""


def build_quarantine_records(
    stage: str, reason: str, detail: str, data: bytes, observed_at: int
) -> Iterator[QuarantineRecord]:
    """Build the quarantine records for rejected bytes. Long bytes are split, and each `detail` then names its part."""
    size, observed_at = len(data), clamp_micros(observed_at)
    for start in range(0, size or 1, MAX_QUARANTINED):
        part = data[start : start + MAX_QUARANTINED]
        prefix = "" if size <= MAX_QUARANTINED else f"bytes {start} to {start + len(part)} of {size}: "
        yield QuarantineRecord(stage, reason, (prefix + detail)[:MAX_DETAIL], part, observed_at)


class WantedRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """Record of `kiln.wanted`: a block for the bridge to fetch.

    Attributes:
        cid: CID of the block.
        reason: `batch`: the block of a batch that another node announced. `genesis`: the genesis of a stream whose
            separator is not known; the update in this record waits for it. `claim`: the genesis of a stream, to verify
            the separator that `update` claims; the update is in `kiln.updates` already (decision 20).
        separator: Separator of the announced batch; only for `batch`.
        message_id: Id of the message that announced the batch or the update.
        update: The update; only for `genesis` and `claim`.
        topic: Separator that the topic of the update's message claims.
        model: Separator that the field `model` of the update's message claims.
        peer: Peer that sent the message, which need not be the author.
    """

    network: Name
    cid: CidText
    reason: Literal["batch", "genesis", "claim"]
    observed_at: Micros
    separator: SeparatorRecord | None = None
    message_id: Author | None = None
    update: UpdateRecord | None = None
    topic: SeparatorRecord | None = None
    model: SeparatorRecord | None = None
    peer: Author | None = None

    def __post_init__(self) -> None:
        if self.reason == "batch":
            if self.separator is None or any((self.update, self.topic, self.model)):
                raise ValueError(
                    "a record that requests a batch must have a separator, and neither an update nor a claim"
                )
        elif self.separator is not None or self.update is None:
            raise ValueError("a record that requests a genesis must have an update, and no separator of a batch")
        elif (self.update.separator is None) != (self.reason == "genesis"):
            raise ValueError("the update must have no separator if the reason is genesis, and one if it is claim")


class BlockRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """Record of `kiln.blocks`: the block of another node's batch, verified against its CID, or the reason why it could
    not be fetched. `separator` is the one under which the batch was announced."""

    network: Name
    batch_cid: CidText
    observed_at: Micros
    separator: SeparatorRecord
    block: bytes | None = None
    reason: Code | None = None

    def __post_init__(self) -> None:
        if (self.block is None) == (self.reason is None):
            raise ValueError("a block record has either the block or the reason why it is missing")


Record = UpdateRecord | BatchRecord | PublicationRecord | StreamRecord | QuarantineRecord | WantedRecord | BlockRecord

_ENCODER: Final = msgspec.json.Encoder()


def encode(record: Record) -> bytes:
    """Encode a record as a Kafka value, UTF-8 JSON."""
    return _ENCODER.encode(record)


# Errors that the decode_* functions raise; text that is not UTF-8 raises UnicodeDecodeError.
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError)

decode_update: Final = msgspec.json.Decoder(UpdateRecord).decode
decode_batch: Final = msgspec.json.Decoder(BatchRecord).decode
decode_publication: Final = msgspec.json.Decoder(PublicationRecord).decode
decode_stream: Final = msgspec.json.Decoder(StreamRecord).decode
decode_quarantine: Final = msgspec.json.Decoder(QuarantineRecord).decode
decode_wanted: Final = msgspec.json.Decoder(WantedRecord).decode
decode_block: Final = msgspec.json.Decoder(BlockRecord).decode


def build_update_key(network: str, separator: SeparatorRecord | None, stream: str) -> bytes:
    """Build the key of a record of `kiln.updates`: "NETWORK/KEY/VALUE", or the stream if `separator` is `None`."""
    return stream.encode() if separator is None else build_batch_key(network, separator)


def build_batch_key(network: str, separator: SeparatorRecord) -> bytes:
    """Build the key of a record of `kiln.batches`: "NETWORK/KEY/VALUE" of the separator, as for the batch's updates."""
    return f"{network}/{separator.key}/{separator.value}".encode()


_COORDINATES = re.compile("([0-9]{1,10})/([0-9]{1,19})(?:/([0-9]{1,10}))?")


class QuarantineKey(NamedTuple):
    """Origin of quarantined bytes: a message or frame of `kiln.frames`, or a block. Unset fields are `None`."""

    partition: int | None
    offset: int | None
    message_index: int | None
    cid: str | None


def build_quarantine_key(partition: int, offset: int, message_index: int | None = None) -> bytes:
    """Build the key of a `kiln.quarantine` record for a message or a frame: "PARTITION/OFFSET/INDEX", without index if
    the record is about a whole frame.

    Bytes of a block have another key: the text of the block's CID.
    """
    return (f"{partition}/{offset}" if message_index is None else f"{partition}/{offset}/{message_index}").encode()


def build_quarantine_record_key(topic: str, partition: int, offset: int) -> bytes:
    """Build the key of a `kiln.quarantine` record for a record of another topic: "TOPIC/PARTITION/OFFSET"."""
    return f"{topic}/{partition}/{offset}".encode()


def parse_quarantine_key(key: bytes) -> QuarantineKey:
    """Parse the key of a record of `kiln.quarantine`.

    All fields of the result are `None` if the key is for a record of another topic, or longer than any CID.

    Raises:
        ValueError: The key is not UTF-8.
    """
    if len(key) > cid.MAX_TEXT:
        return QuarantineKey(None, None, None, None)
    text = key.decode()
    match = _COORDINATES.fullmatch(text)
    if match:
        partition, offset, index = (None if part is None else int(part) for part in match.groups())
        if (partition or 0) < 2**31 and (offset or 0) < 2**63 and (index or 0) < 2**31:
            return QuarantineKey(partition, offset, index, None)
    return QuarantineKey(None, None, None, None if "/" in text else text)
