"""Parser of the ids that `kiln trace` accepts. The form of an id shows its kind."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, TypeAlias

from kiln.conf.process.errors import KilnError
from kiln.schemas.wire.cid import CidError, cid_bytes
from kiln.schemas.wire.streamid import StreamIdError, stream_text

FORMS: Final = (
    "a CID (of a batch or a tip), a StreamID (k2t6…, kjzl6…), a message id (AUTHOR/SEQNO, sha256/HASH, "
    "bep50/TARGET/SEQUENCE), or the position of a message in kiln.frames (PARTITION/OFFSET or PARTITION/OFFSET/INDEX)"
)

_POSITION: Final = re.compile("([0-9]{1,10})/([0-9]{1,19})(?:/([0-9]{1,10}))?")
_MESSAGE: Final = re.compile(
    "(?:[1-9A-HJ-NP-Za-km-z]{40,256}/[0-9a-f]{0,64}|(?:sha256|blake2b)/[0-9a-f]{8,64}|bep50/[0-9a-f]+/[0-9a-f]+)"
)


class IdError(KilnError):
    """The text does not have the form of an id."""

    exit_code = 2


@dataclass(frozen=True)
class CidRef:
    """CID of a batch or a tip. Both have the same form, so only the tables show which of them it is."""

    text: str


@dataclass(frozen=True)
class StreamRef:
    """A StreamID in base36."""

    text: str


@dataclass(frozen=True)
class MessageRef:
    """A message id (`kiln.schemas.wire.identity.message_id`)."""

    text: str


@dataclass(frozen=True)
class FrameRef:
    """Position of a frame in `kiln.frames`. `index` selects a message of the frame's RPC; `None` selects all."""

    partition: int
    offset: int
    index: int | None

    @property
    def text(self) -> str:
        """`PARTITION/OFFSET` or `PARTITION/OFFSET/INDEX`, as in the keys of `kiln.quarantine`."""
        return f"{self.partition}/{self.offset}" + ("" if self.index is None else f"/{self.index}")


Id: TypeAlias = CidRef | StreamRef | MessageRef | FrameRef


def parse_id(text: str) -> Id:
    """Parse an id, and normalize it to the spelling of the tables.

    Raises:
        IdError: The text is not an id; the message lists the forms.
    """
    text = text.strip()
    if match := _POSITION.fullmatch(text):
        partition, offset, index = (None if part is None else int(part) for part in match.groups())
        if (partition or 0) < 2**31 and (offset or 0) < 2**63 and (index or 0) < 2**31:
            return FrameRef(partition or 0, offset or 0, index)
    try:
        return StreamRef(stream_text(text))
    except StreamIdError as error:
        reason = f": {error}" if text.startswith("k") else ""
    try:
        cid_bytes(text)
        return CidRef(text)
    except CidError:
        pass
    if _MESSAGE.fullmatch(text):
        return MessageRef(text)
    raise IdError(f"{text[:200]!r} is not an id{reason}. Pass {FORMS}")
