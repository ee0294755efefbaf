"""Values and keys of the JSON topics in Kafka (docs/design/contracts.md, Kafka topics).

The contract is schemas/kafka/<topic>.schema.json; these are the same records as msgspec Structs. Times are integer µs
since the epoch, bytes are base64, and optional keys have a default. Every value that `encode` writes contains every
key.

The decode_* functions are strict: they refuse an unknown field at any depth and fields that contradict each other, so
that a misspelt optional field never counts as an absent one. They raise msgspec.ValidationError (valid JSON, but not
such a record; the message names the path) and msgspec.DecodeError (not JSON). The first is a subclass of the second.
The readers of a topic send a value that they cannot decode to quarantine. Creating a record with contradictory fields
raises ValueError.
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
"""time in the range of `kiln.schemas.times`"""

# Some of these repeat in the row of each tip of a block, so each has a limit.
Code = Annotated[str, Meta(min_length=1, max_length=256)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_TOPIC)]
Part = Annotated[str, Meta(min_length=1, max_length=1024)]
"""A key or a value of a separator (kiln.schemas.wire.topics)."""
CidText = Annotated[str, Meta(min_length=1, max_length=cid.MAX_TEXT)]
StreamText = Annotated[str, Meta(min_length=1, max_length=streamid.MAX_TEXT)]
MessageId = Annotated[str, Meta(min_length=1, max_length=8192)]
Author = Annotated[str, Meta(max_length=8192)]
TopicText = Annotated[str, Meta(max_length=MAX_TOPIC)]
Words = Annotated[str, Meta(max_length=64 * 1024)]

# A tick on kiln.updates, which advances log time: no key, an empty value (decision 1).
TICK: Final = b""


class Coordinates(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Origin of a message: the record of `kiln.frames` and the message's position in the frame's RPC."""

    partition: Natural
    offset: Natural
    index: Natural


class Epoch(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The micro-batch of the query `updates`, or the release of the bridge's fetcher, that wrote the record.

    A record that is written again after a crash has the same epoch (decision 7).
    """

    query: Code
    batch: Natural


class SeparatorRecord(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A separator: header key and base36 multibase text of its value, as in the topic name (CIP-120)."""

    key: Part
    value: Part


class UpdateRecord(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """`kiln.updates`: a stream has a new tip."""

    network: Name
    origin: Origin
    separator: SeparatorRecord | None
    separator_source: SeparatorSource | None
    """source of the separator; `None` if it is not known yet. "genesis" without a separator means that the stream has
    no separator (decision 4)"""
    stream: StreamText
    tip: CidText
    from_: Author | None = msgspec.field(name="from")
    """peer id of the author; `None` if the message is unsigned"""
    message_id: MessageId
    epoch: Epoch
    frame: Coordinates
    observed_at: Micros


class BatchRecord(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """`kiln.batches`: a CIP-123 block of one separator's window."""

    network: Name
    origin: Origin
    separator: SeparatorRecord
    batch_cid: CidText
    block: bytes
    opened_at: Micros
    closed_at: Micros


class PublicationRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """`kiln.publications`: the result of publishing a batch on a topic, a number of peers that got it or an error."""

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
    """Tip of an update that waited for the genesis, and is now in `kiln.updates`."""

    origin: Origin
    tip: CidText


class StreamRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """`kiln.streams`: the separator in a verified genesis, or the reason (`without`) why it has none.

    `waited`: tips that have waited for the genesis. A later announcement of such a tip is no new update (decision 20).
    """

    network: Name
    stream: StreamText
    separator: SeparatorRecord | None
    observed_at: Micros
    source: Code = "genesis"
    without: Code | None = None
    waited: tuple[WaitedTip, ...] = ()

    def __post_init__(self) -> None:
        if (self.separator is None) == (self.without is None):
            raise ValueError("a stream needs either `separator` or `without`, the reason for having none, and not both")


class QuarantineRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """`kiln.quarantine`: bytes that could not be used, and the reason; the key is their origin."""

    stage: Code
    reason: Code
    detail: Words
    data: bytes
    observed_at: Micros


MAX_QUARANTINED: Final = 5 * 1024 * 1024
"""Maximum bytes in one record of quarantine: in base64 they become four thirds as many, and a topic accepts records of
8 MiB."""
MAX_DETAIL: Final = 1024
"""Maximum characters of `detail`: JSON may need six bytes for each."""


def build_quarantine_records(
    stage: str, reason: str, detail: str, data: bytes, observed_at: int
) -> Iterator[QuarantineRecord]:
    """Build the records that hold `data`. If there are several, the `detail` of each names its part of `data`."""
    size, observed_at = len(data), clamp_micros(observed_at)
    for start in range(0, size or 1, MAX_QUARANTINED):
        part = data[start : start + MAX_QUARANTINED]
        prefix = "" if size <= MAX_QUARANTINED else f"bytes {start} to {start + len(part)} of {size}: "
        yield QuarantineRecord(stage, reason, (prefix + detail)[:MAX_DETAIL], part, observed_at)


class WantedRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """`kiln.wanted`: a CID to fetch and the reason: `batch` (announced in a BATCH_UPDATE), `genesis` (of a stream), or
    `claim` (a genesis to check a claim).

    A `batch` comes with the separator that the batch was announced under. A `genesis` comes with the update that has no
    separator: the update waits in this record, and goes to `kiln.updates` with the result. A `claim` comes with the
    update that was sent on under the separator that it claims (decision 20). `topic`, `model`: the separators that the
    update's topic and its field `model` claim. `peer`: the peer that sent the message, which need not be its author.
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
                raise ValueError("a wanted batch must have a separator, and neither an update nor a claim")
        elif self.separator is not None or self.update is None:
            raise ValueError("a wanted genesis must have an update, and no separator of a batch")
        elif (self.update.separator is None) != (self.reason == "genesis"):
            raise ValueError("the update must have no separator if the reason is genesis, and one if it is claim")


class BlockRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """`kiln.blocks`: the block of another node's batch, verified against its CID, or the reason why it is missing.

    `separator`: the separator that the batch was announced under.
    """

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
    """Encode a record as a Kafka value: UTF-8 JSON."""
    return _ENCODER.encode(record)


# Errors of the decoders. Text that is not UTF-8 raises Python's own error.
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError)

decode_update: Final = msgspec.json.Decoder(UpdateRecord).decode
decode_batch: Final = msgspec.json.Decoder(BatchRecord).decode
decode_publication: Final = msgspec.json.Decoder(PublicationRecord).decode
decode_stream: Final = msgspec.json.Decoder(StreamRecord).decode
decode_quarantine: Final = msgspec.json.Decoder(QuarantineRecord).decode
decode_wanted: Final = msgspec.json.Decoder(WantedRecord).decode
decode_block: Final = msgspec.json.Decoder(BlockRecord).decode


def build_update_key(network: str, separator: SeparatorRecord | None, stream: str) -> bytes:
    """Build the key on kiln.updates: "network/key/value", or the stream if `separator` is `None`."""
    return stream.encode() if separator is None else build_batch_key(network, separator)


def build_batch_key(network: str, separator: SeparatorRecord) -> bytes:
    """Build the key on kiln.batches: "network/key/value", the key of the updates in the batch."""
    return f"{network}/{separator.key}/{separator.value}".encode()


_COORDINATES = re.compile("([0-9]{1,10})/([0-9]{1,19})(?:/([0-9]{1,10}))?")


class QuarantineKey(NamedTuple):
    """Subject of a quarantined record: a message or a frame of kiln.frames, or a CID."""

    partition: int | None
    offset: int | None
    message_index: int | None
    cid: str | None


def build_quarantine_key(partition: int, offset: int, message_index: int | None = None) -> bytes:
    """Build the key on kiln.quarantine: "partition/offset/index" of a message, "partition/offset" of a whole frame.

    The key of a CID's fault is the text of the CID.
    """
    return (f"{partition}/{offset}" if message_index is None else f"{partition}/{offset}/{message_index}").encode()


def build_quarantine_record_key(topic: str, partition: int, offset: int) -> bytes:
    """Build the key on kiln.quarantine of a record of another topic: "topic/partition/offset", without prefix."""
    return f"{topic}/{partition}/{offset}".encode()


def parse_quarantine_key(key: bytes) -> QuarantineKey:
    """Parse a key on kiln.quarantine.

    A key is either coordinates in `kiln.frames`, or a CID. The key of another topic's record, or one longer than any
    CID, gives an empty subject.

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
