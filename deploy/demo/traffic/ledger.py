"""The ledger: a list of the messages and bad frames in synthetic traffic, with their expected results.

The generator makes each entry from the parts of which it builds a message. So the ledger does not depend on a decoder,
and tests compare the tables with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import IO, Literal

import msgspec

from kiln.schemas.kafka.records import SeparatorRecord

Outcome = Literal["message", "quarantine"]
SeparatorSource = Literal["topic", "model"]


class MessageEntry(msgspec.Struct, tag_field="entry", tag="message", kw_only=True):
    """A distinct gossip message with the counts of its copies in IN frames.

    The fields from `era` to `ts` are the content of the message, with ids in canonical form. They are `None` if the
    data cannot be decoded. `separator` is the separator of an UPDATE. It comes from the name of the topic or from the
    field `model`, as `separator_source` states.

    If `outcome` is "message" and a copy is valid, the table `messages` gets one row. Forged copies get rows in
    `quarantine`, with the stage "signature" and `forged_reason`. If `outcome` is "quarantine", every copy gets a row in
    `quarantine`, with `stage` and `reason`.
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
    """A frame that is rejected as a whole. A rejected message in a valid frame has a `MessageEntry` instead.

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
        """Return the message's entry in the ledger; if there is none, add `entry` and return it."""
        return self.messages.setdefault((entry.network, entry.message_id), entry)

    def add(self, other: Iterable[Entry]) -> None:
        """Add entries, such as those of another ledger. The copies of a message in both are summed up."""
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
