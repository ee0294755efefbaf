"""Values and keys of the JSON topics in Kafka (docs/design/contracts.md, Kafka topics).

The contract is schemas/kafka/<topic>.schema.json; these are the same records as msgspec Structs. Times are integer µs
since the epoch, bytes are base64, and optional keys have a default. Every value that `encode` writes holds every key.

The decode_* functions are strict: they refuse an unknown field at any depth and fields that contradict each other, so
that a misspelt optional field is never taken for an absent one. They raise msgspec.ValidationError (valid JSON, but not
such a record; the message names the place) and msgspec.DecodeError (not JSON). The first is a subclass of the second.
The readers of a topic see to it that a value they cannot decode is in quarantine. A program that makes a record with
contradictory fields gets a ValueError.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

Origin = Literal["LIVE", "REPLAY"]
SeparatorSource = Literal["genesis", "topic", "model"]
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Micros = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Meta(min_length=1)]

# A tick of the log's clock on kiln.updates: no key, an empty value (decision 1).
TICK: Final = b""


class Coordinates(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Where a message came from: the record of `kiln.frames` and the message's position in the frame's RPC."""

    partition: Natural
    offset: Natural
    index: Natural


class Epoch(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The micro-batch of the `updates` query that wrote the record.

    Repeats after a crash carry the same one (decision 7).
    """

    query: Name
    batch: Natural


class SeparatorRecord(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A separator: header key and base36 multibase text of its value, as in the topic name (CIP-120)."""

    key: Name
    value: Name


class UpdateRecord(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """`kiln.updates`: a stream has a new tip."""

    network: Name
    origin: Origin
    separator: SeparatorRecord | None
    separator_source: SeparatorSource | None
    """Where the separator is known from; None: not known yet. "genesis" with no separator: it has none (decision 4)."""
    stream: Name
    tip: Name
    from_: str | None = msgspec.field(name="from")
    """Peer id of the author; None where the message is unsigned."""
    message: Name
    epoch: Epoch
    frame: Coordinates
    observed_at: Micros


class BatchRecord(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """`kiln.batches`: a CIP-123 block of one separator's window, to be published and stored."""

    network: Name
    origin: Origin
    separator: SeparatorRecord
    cid: Name
    block: bytes
    opened_at: Micros
    closed_at: Micros


class PublicationRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """`kiln.publications`: one attempt to publish a batch: a receipt with one peer or more, or the error."""

    cid: Name
    transport: Name
    published_at: Micros
    topic: str | None = None
    target: str | None = None
    peers: Natural | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        if (self.error is None) != bool(self.peers):
            raise ValueError("a publication has either peers or an error")


class WaitedTip(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The tip of an update that waited for the genesis, and is in `kiln.updates` since."""

    origin: Origin
    tip: Name


class StreamRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """`kiln.streams`: the separator that a verified genesis names, or in `without` why the genesis names none.

    `waited`: who announces these tips again announces nothing new (decision 20).
    """

    network: Name
    stream: Name
    separator: SeparatorRecord | None
    observed_at: Micros
    source: Name = "genesis"
    without: Name | None = None
    waited: tuple[WaitedTip, ...] = ()

    def __post_init__(self) -> None:
        if (self.separator is None) == (self.without is None):
            raise ValueError("a stream has either a separator or, in `without`, the reason why it has none")


class QuarantineRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """`kiln.quarantine`: bytes that could not be used, and why; the key says where they came from."""

    stage: Name
    reason: Name
    detail: str
    data: bytes
    observed_at: Micros


class WantedRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """`kiln.wanted`: a CID to fetch and why: `batch` (announced in a BATCH_UPDATE), `genesis` (of a stream), or `claim`
    (a genesis against which a claim is to be held).

    A `batch` comes with the separator that the batch was announced under. A `genesis` comes with the update that has no
    separator: the update waits in this record, and goes on to `kiln.updates` with the answer. A `claim` comes with the
    update that has gone on under the separator that it claims (decision 20). `topic`, `model`: the separators that the
    update's topic and its field `model` claim.
    """

    network: Name
    cid: Name
    reason: Literal["batch", "genesis", "claim"]
    observed_at: Micros
    separator: SeparatorRecord | None = None
    message: str | None = None
    update: UpdateRecord | None = None
    topic: SeparatorRecord | None = None
    model: SeparatorRecord | None = None

    def __post_init__(self) -> None:
        if self.reason == "batch":
            if self.separator is None or any((self.update, self.topic, self.model)):
                raise ValueError("a batch is wanted with its separator, and with no update and no claim")
        elif self.separator is not None or self.update is None:
            raise ValueError("a genesis is wanted with an update, and with no separator of a batch")
        elif (self.update.separator is None) != (self.reason == "genesis"):
            raise ValueError("an update waits for its genesis if it has no separator; a claim comes with one that has")


class BlockRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """`kiln.blocks`: the block of a batch of another node, verified against its CID, or why the block cannot be had.

    `separator`: the separator that the batch was announced under.
    """

    network: Name
    cid: Name
    observed_at: Micros
    separator: SeparatorRecord
    block: bytes | None = None
    reason: Name | None = None

    def __post_init__(self) -> None:
        if (self.block is None) == (self.reason is None):
            raise ValueError("either the block or the reason why it cannot be had is to be there")


Record = UpdateRecord | BatchRecord | PublicationRecord | StreamRecord | QuarantineRecord | WantedRecord | BlockRecord

_ENCODER: Final = msgspec.json.Encoder()


def encode(record: Record) -> bytes:
    """The record as a Kafka value: UTF-8 JSON."""
    return _ENCODER.encode(record)


# What the decoders raise on bytes that are no such record. Text that is not UTF-8 is reported by Python's own error.
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError)

decode_update: Final = msgspec.json.Decoder(UpdateRecord).decode
decode_batch: Final = msgspec.json.Decoder(BatchRecord).decode
decode_publication: Final = msgspec.json.Decoder(PublicationRecord).decode
decode_stream: Final = msgspec.json.Decoder(StreamRecord).decode
decode_quarantine: Final = msgspec.json.Decoder(QuarantineRecord).decode
decode_wanted: Final = msgspec.json.Decoder(WantedRecord).decode
decode_block: Final = msgspec.json.Decoder(BlockRecord).decode


def update_key(network: str, separator: SeparatorRecord | None, stream: str) -> bytes:
    """Key on kiln.updates: "network/key/value", or the stream where it has no separator."""
    return stream.encode() if separator is None else batch_key(network, separator)


def batch_key(network: str, separator: SeparatorRecord) -> bytes:
    """Key on kiln.batches: "network/key/value", the same as of the updates in the batch."""
    return f"{network}/{separator.key}/{separator.value}".encode()


_COORDINATES = re.compile("([0-9]{1,10})/([0-9]{1,19})(?:/([0-9]{1,10}))?")


class QuarantineKey(NamedTuple):
    """What a quarantined record is about: a message or a frame of kiln.frames, or a CID."""

    partition: int | None
    offset: int | None
    message_index: int | None
    cid: str | None


def quarantine_key(partition: int, offset: int, message_index: int | None = None) -> bytes:
    """Key on kiln.quarantine: "partition/offset/index" of a message, "partition/offset" of a whole frame.

    What is about a CID has the CID's text as its key.
    """
    return (f"{partition}/{offset}" if message_index is None else f"{partition}/{offset}/{message_index}").encode()


def quarantine_record_key(topic: str, partition: int, offset: int) -> bytes:
    """Key on kiln.quarantine of a record of another topic than kiln.frames: "topic/partition/offset", no prefix."""
    return f"{topic}/{partition}/{offset}".encode()


def parse_quarantine_key(key: bytes) -> QuarantineKey:
    """The reverse of quarantine_key. A key with a slash that is no coordinates of a frame (as a record of another topic
    has) is nothing; any other is taken as a CID. ValueError if the key is not UTF-8."""
    text = key.decode()
    match = _COORDINATES.fullmatch(text)
    if match:
        partition, offset, index = (None if part is None else int(part) for part in match.groups())
        if (partition or 0) < 2**31 and (offset or 0) < 2**63 and (index or 0) < 2**31:
            return QuarantineKey(partition, offset, index, None)
    return QuarantineKey(None, None, None, None if "/" in text else text)
