"""What a bridge says of itself each second: `status.json` in its folder, for the screen, `kiln status` and scripts.

The parts of the bridge give out these structs themselves. docs/METRICS.md says what each number counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

SavingDirection = Literal["received", "sent"]


class SavingStatus(Struct):
    """References to a topic by index, in one direction: how many, and the bytes on the wire that they took as indices
    and would have taken as names. Bytes of the field alone: tag, length and value.

    The router counts in it, so it changes until it is copied.
    """

    topic: str
    direction: SavingDirection
    references: int = 0
    as_names: int = 0
    as_indices: int = 0

    def add(self, more: SavingStatus) -> None:
        """Adds the counts of another one."""
        self.references += more.references
        self.as_names += more.as_names
        self.as_indices += more.as_indices


class PeerStatus(Struct, frozen=True):
    """A peer with which the node speaks pubsub."""

    peer: str
    agent: str
    protocol: str
    address: str
    outbound: bool
    """the node dialled"""
    score: float
    frames_in: int
    frames_out: int
    dropped: int
    savings: tuple[SavingStatus, ...] = ()
    """since the stream opened"""
    topics: int = 0
    queued: int = 0
    """bytes that wait to be sent to the peer"""


class SpoolStatus(Struct, frozen=True):
    """Frames on their way to Kafka, since the bridge started."""

    put: int
    """frames taken"""
    acknowledged: int
    """frames that Kafka has, with those of an earlier run's spool"""
    memory_bytes: int
    disk_bytes: int
    """bytes of the spool's files now"""
    full: bool
    error: str | None = None
    waiting: int = 0
    """frames that Kafka does not have yet (of a spool from an earlier run: at most)"""
    spooled: int = 0
    """frames written to the spool"""
    torn_bytes: int = 0
    """bytes of the spool that could not be read back"""


class PublisherStatus(Struct, frozen=True):
    """Batches on their way to the network; `state` in words."""

    state: str
    published: int = 0
    failed: int = 0


class FetcherStatus(Struct, frozen=True):
    """What the bridge wants out of IPFS. `state` in words; `waiting`: records; `fetching`: blocks; `counts`: what
    became of records since the start, by kind."""

    state: str
    waiting: int = 0
    fetching: int = 0
    counts: dict[str, int] = {}


class OverlayTopicStatus(Struct, frozen=True):
    """A topic of BEP 50; `sequence`: of the newest item, None: none yet."""

    target: str
    publisher: str
    separator: str
    contacts: int
    sequence: int | None


class OverlayStatus(Struct, frozen=True):
    """The BEP 50 overlay. `key`: the publisher's, hex; `contacts`: of all `joined` topics; `topics`: the topics with
    most contacts; `dropped`, `unsent`: datagrams, by reason."""

    key: str
    node: str
    addresses: tuple[str, ...]
    joined: int
    contacts: int
    topics: tuple[OverlayTopicStatus, ...]
    publisher: PublisherStatus
    items: int
    stored: int
    frames_in: int
    frames_out: int
    dropped: dict[str, int]
    unsent: dict[str, int]
    gaps: int = 0


class BridgeStatus(Struct, frozen=True):
    """Counts since the bridge started. `at`: unix seconds; `mesh`: peers by topic; `ipfs`, `transition`: in words."""

    at: float
    pid: int
    peer: str
    network: str
    addresses: tuple[str, ...]
    interests: tuple[str, ...]
    topics: tuple[str, ...]
    mesh: dict[str, int]
    peers: tuple[PeerStatus, ...]
    frames_in: int
    frames_out: int
    bytes_in: int
    bytes_out: int
    spool: SpoolStatus
    publisher: PublisherStatus
    counters: dict[str, int]
    errors: tuple[str, ...] = ()
    savings: tuple[SavingStatus, ...] = ()
    bep50: OverlayStatus | None = None
    fetcher: FetcherStatus | None = None
    ipfs: str = ""
    transition: str = ""


def write_status(path: Path, status: BridgeStatus) -> None:
    """Replaces the file in one step, so that a reader never sees half of it."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(status))
    fresh.replace(path)


def read_status(path: Path) -> BridgeStatus | None:
    """The newest status; None where there is none, or one of another version."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=BridgeStatus)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
