"""The ledger: content of synthetic traffic, with its expected results, recorded by the generator.

The ledger never reads frames: an entry comes from the parts of which a message was built, not from the result of a
decoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import IO, Literal

import msgspec

from kiln.schemas.kafka.records import SeparatorRecord

Outcome = Literal["message", "quarantine"]
SeparatorSource = Literal["topic", "model"]


class MessageEntry(msgspec.Struct, tag_field="entry", tag="message", kw_only=True):
    """A distinct gossip message with all its copies, except those of OUT frames.

    The fields from `era` to `ts` are the contents of the message, with ids in canonical form, and all `None` if the
    data cannot be decoded. `separator` is the separator of an UPDATE, from the topic's name or the field `model`, as
    `separator_source` says. If `outcome` is "message", the table `messages` gets the message once, provided that a
    copy is valid, and quarantine gets the forged copies with the stage "signature" and `forged_reason`. If `outcome`
    is "quarantine", quarantine gets every copy, with `stage` and `reason`.
    """

    message_id: str = ""
    network: str
    origin: str = ""
    topic: str
    author: str | None = None
    seqno: str | None = None
    sha256: str = ""
    outcome: Outcome = "message"
    stage: str | None = None
    reason: str | None = None
    era: str | None = None
    type: str | None = None
    stream: str | None = None
    tip: str | None = None
    model: str | None = None
    sep: str | None = None
    batch: str | None = None
    query_id: str | None = None
    tips: dict[str, str] | None = None
    ts: int | None = None
    separator: SeparatorRecord | None = None
    separator_source: SeparatorSource | None = None
    forged_reason: str | None = None
    good_copies: int = 0
    forged_copies: int = 0
    bad_copies: int = 0
    first_good_at: int | None = None  # unix ns of the first good copy


class FrameEntry(msgspec.Struct, tag_field="entry", tag="frame", frozen=True):
    """A frame that is bad as a whole, not because of one of its messages.

    `connection`, `direction` and `sequence` are `None` if the record's value is not a Frame. `sha256` is the hash of
    the bad bytes: the hello, the payload, or the record's whole value.
    """

    connection: str | None
    direction: Literal["IN", "OUT"] | None
    sequence: int | None
    sha256: str
    stage: str
    reason: str
    observed_at: int | None = None  # unix ns


Entry = MessageEntry | FrameEntry

_encoder = msgspec.json.Encoder()


class Ledger:
    """Entries of the messages and bad frames generated so far."""

    def __init__(self) -> None:
        self.messages: dict[tuple[str, str], MessageEntry] = {}  # by network and id
        self.frames: list[FrameEntry] = []

    def __iter__(self) -> Iterator[Entry]:
        yield from self.messages.values()
        yield from self.frames

    def __len__(self) -> int:
        return len(self.messages) + len(self.frames)

    def message(self, entry: MessageEntry) -> MessageEntry:
        """Return the entry of a message, after adding `entry` if the message is new."""
        return self.messages.setdefault((entry.network, entry.message_id), entry)

    def add(self, other: Iterable[Entry]) -> None:
        """Add entries, such as those of another ledger, and sum up the copies of known messages."""
        for entry in other:
            if isinstance(entry, FrameEntry):
                self.frames.append(entry)
                continue
            known = self.message(entry)
            if known is not entry:
                known.good_copies += entry.good_copies
                known.forged_copies += entry.forged_copies
                known.bad_copies += entry.bad_copies
                times = [at for at in (known.first_good_at, entry.first_good_at) if at is not None]
                known.first_good_at = min(times, default=None)

    def write(self, stream: IO[bytes]) -> None:
        """Write JSON lines: the messages in the order of their first copy, then the bad frames."""
        for entry in self:
            stream.write(_encoder.encode(entry))
            stream.write(b"\n")
