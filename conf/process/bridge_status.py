"""The status that a bridge writes each second to STATE/bridge/status.json, for `kiln run`, `kiln status` and scripts.

docs/METRICS.md describes the numbers, with their units.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct, structs


class PeerStatus(Struct, frozen=True):
    """A pubsub peer of the bridge."""

    peer: str
    agent: str
    protocol: str
    address: str
    outbound: bool
    """true if the bridge dialled the peer"""
    score: float
    frames_in: int
    frames_out: int
    dropped: int
    topics: int = 0
    queued: int = 0
    bytes_in: int = 0
    held_back: bool = False
    """true while reading is paused, because the peer is over its receive budget"""
    bytes_out: int = 0
    sent_slowly: bool = False
    """true while sending is paused, because the peer is over its send budget"""


class SpoolStatus(Struct, frozen=True):
    """Frames on their way to Kafka. Counts are since the bridge started."""

    put: int
    acknowledged: int
    memory_bytes: int
    disk_bytes: int
    full: bool
    error: str | None = None
    waiting: int = 0
    spooled: int = 0
    torn_bytes: int = 0
    free_bytes: int = 0


class PublisherStatus(Struct, frozen=True):
    """Progress of publishing batches."""

    state: str
    """description for users"""
    published: int = 0
    failed: int = 0
    lost: int = 0


class FetcherStatus(Struct, frozen=True):
    """Progress of fetching blocks from IPFS."""

    state: str
    """description for users"""
    waiting: int = 0
    fetching: int = 0
    counts: dict[str, int] = {}
    places_lost: int = 0
    claimed: int = 0
    unanswered_streams: int = 0
    unanswered_updates: int = 0

    @property
    def is_on(self) -> bool:
        return not self.state.startswith("off")


class IpfsStatus(Struct, frozen=True):
    """Connections of the IPFS node, and its blocks since the start.

    Blocks and bytes sent and received are known only if the bridge itself is the IPFS node.
    """

    connections: int = 0
    gossip_peers: int = 0
    gossip_connected: int = 0
    gossip_left_out: int = 0
    provided: int = 0
    unprovided: int = 0
    blocks_sent: int = 0
    bytes_sent: int = 0
    blocks_received: int = 0


class OverlayTopicStatus(Struct, frozen=True):
    """A topic of BEP 50, for one separator of one publisher."""

    target: str
    publisher: str
    separator: str
    contacts: int
    sequence: int | None
    """sequence number of the newest item; `None` before the first item"""


class OverlayStatus(Struct, frozen=True):
    """The BEP 50 overlay of the bridge."""

    key: str
    """public key of the bridge's announcements, in hex"""
    node: str
    addresses: tuple[str, ...]
    joined: int
    contacts: int
    topics: tuple[OverlayTopicStatus, ...]
    """the topics with most contacts"""
    publisher: PublisherStatus
    items: int
    stored: int
    frames_in: int
    frames_out: int
    dropped: dict[str, int]
    unsent: dict[str, int]
    gaps: int = 0


class SharingStatus(Struct, frozen=True):
    """The bridges of the network, as their Kafka consumer group lists them."""

    leads: bool
    """true if this bridge fetches blocks for all bridges"""
    leader: str = ""
    """peer id of the bridge that fetches; empty if none does"""
    bridges: tuple[str, ...] = ()
    """peer ids of the live bridges, including this one; empty before Kafka reports them"""
    round: int = 0
    topics_left: int = 0


class BridgeStatus(Struct, frozen=True):
    """The status of a bridge. Counts are since the bridge started."""

    at: float
    """Unix time in s"""
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
    bep50: OverlayStatus | None = None
    fetcher: FetcherStatus | None = None
    ipfs: str = ""
    """description of the block store for users"""
    ipfs_node: IpfsStatus = IpfsStatus()
    transition: str = ""
    """description of the transition to separator topics for users; empty if there is none"""
    kept_out: int = 0
    topics_refused: int = 0
    topic_refusals: int = 0
    sharing: SharingStatus = SharingStatus(False)


def write_status(path: Path, status: BridgeStatus) -> None:
    """Replace the file of the status atomically.

    If the disk is full, overwrite the old file in place, with a short status without peers and topics.

    Raises:
        OSError: The file can be neither replaced nor overwritten.
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
        _write_over(path, msgspec.json.encode(structs.replace(status, topics=(), mesh={}, peers=())))


def _write_over(path: Path, data: bytes) -> None:
    """Overwrite a file in one write. Spaces fill it up to its old length, so that it is always valid JSON."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.pwrite(file, data.ljust(os.fstat(file).st_size), 0)
    finally:
        os.close(file)


def read_status(path: Path) -> BridgeStatus | None:
    """Read the newest status.

    Returns:
        `None` if there is no status file, or the file has another format, such as that of another version of Kiln.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=BridgeStatus)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None
