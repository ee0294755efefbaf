"""What a bridge says of itself each second: `status.json` in its folder, for the screen, `kiln status` and scripts.

The parts of the bridge give out these structs themselves. docs/METRICS.md says what each number counts.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct, structs

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
    bytes_in: int = 0
    """bytes of captured frames that the peer sent"""
    held_back: bool = False
    """over its budget: not read for a while"""
    bytes_out: int = 0
    """bytes of captured frames that were sent to the peer"""
    sent_slowly: bool = False
    """over its budget of what is sent: nothing is sent for a while"""


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
    free_bytes: int = 0
    """bytes free on the disk of the spool"""


class PublisherStatus(Struct, frozen=True):
    """Batches on their way to the network; `state` in words."""

    state: str
    published: int = 0
    failed: int = 0
    lost: int = 0
    """records that Kafka let go before the publisher read them"""
    places_lost: int = 0
    """how often Kafka had lost the place of the publisher"""


class FetcherStatus(Struct, frozen=True):
    """What the bridge wants out of IPFS. `state` in words; `waiting`: records; `fetching`: blocks; `counts`: what
    became of records since the start, by kind; `claimed`: geneses to be held against claims."""

    state: str
    waiting: int = 0
    fetching: int = 0
    counts: dict[str, int] = {}
    places_lost: int = 0
    """how often Kafka had lost the place of the fetcher"""
    claimed: int = 0

    @property
    def is_on(self) -> bool:
        return not self.state.startswith("off")


class IpfsStatus(Struct, frozen=True):
    """What the IPFS node is connected to, and which blocks of ours its routing was told of."""

    connections: int = 0
    """peers that the node is connected to, whoever they are"""
    gossip_peers: int = 0
    """gossip peers that speak bitswap"""
    gossip_connected: int = 0
    """of those, how many the node is connected to"""
    gossip_left_out: int = 0
    """of those, how many are too many"""
    provided: int = 0
    unprovided: int = 0
    """blocks that were left out, or could not be provided"""


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


class SharingStatus(Struct, frozen=True):
    """The bridges of the network, as this bridge knows them from Kafka. Peer ids."""

    leads: bool
    """whether this bridge publishes and fetches for all"""
    leader: str = ""
    bridges: tuple[str, ...] = ()
    """those that live, this bridge included; empty before Kafka has said so"""
    round: int = 0
    """how often the bridges that live have changed, as Kafka counts"""
    topics_left: int = 0
    """topics of the interests that another bridge hears"""


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
    ipfs_node: IpfsStatus = IpfsStatus()
    transition: str = ""
    kept_out: int = 0
    """peers that are kept out for their conduct"""
    topics_refused: int = 0
    """topics of the interests that are not joined now, for want of room"""
    topic_refusals: int = 0
    sharing: SharingStatus = SharingStatus(False)


def write_status(path: Path, status: BridgeStatus) -> None:
    """Replaces the file in one step, so that a reader never sees half of it.

    Where the disk has no room for that, the old file is written over where it stands, with what does not grow with
    peers and topics. OSError: not even that is possible.
    """
    fresh = path.with_suffix(".new")
    try:
        fresh.write_bytes(msgspec.json.encode(status))
        fresh.replace(path)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink()
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _write_over(path, msgspec.json.encode(structs.replace(status, topics=(), mesh={}, peers=(), savings=())))


def _write_over(path: Path, data: bytes) -> None:
    """In one write of at least the old length, spaces at the end: the file is whole JSON before and after."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.pwrite(file, data.ljust(os.fstat(file).st_size), 0)
    finally:
        os.close(file)


def read_status(path: Path) -> BridgeStatus | None:
    """The newest status; None where there is none, or one of another version."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=BridgeStatus)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None
