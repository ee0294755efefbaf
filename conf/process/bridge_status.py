"""Status that a bridge writes each second to `status.json` in its folder, for the screen, `kiln status` and scripts.

The parts of the bridge return these structs themselves. docs/METRICS.md describes each number.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct, structs

from kiln.conf.process.files import read_small_file

SavingDirection = Literal["received", "sent"]


class SavingStatus(Struct):
    """Number of references to a topic by index in one direction, the bytes that they took as indices, and the bytes
    that they would have taken as names. Bytes include the tag and length of the field.

    The router keeps counting in this object, so copy it to keep its values.
    """

    topic: str
    direction: SavingDirection
    references: int = 0
    as_names: int = 0
    as_indices: int = 0

    def add(self, more: SavingStatus) -> None:
        """Add the counts of another object."""
        self.references += more.references
        self.as_names += more.as_names
        self.as_indices += more.as_indices


class PeerStatus(Struct, frozen=True):
    """A pubsub peer of the node."""

    peer: str
    agent: str
    protocol: str
    address: str
    outbound: bool
    """true if the node dialled the peer"""
    score: float
    frames_in: int
    frames_out: int
    dropped: int
    savings: tuple[SavingStatus, ...] = ()
    """savings since the stream opened"""
    topics: int = 0
    queued: int = 0
    """bytes in the send queue of the peer"""
    bytes_in: int = 0
    """bytes of captured frames that the peer sent"""
    held_back: bool = False
    """true while reading is paused, because the peer is over its receive budget"""
    bytes_out: int = 0
    """bytes of captured frames that were sent to the peer"""
    sent_slowly: bool = False
    """true while sending is paused, because the peer is over its send budget"""


class SpoolStatus(Struct, frozen=True):
    """Frames on their way to Kafka, since the bridge started."""

    put: int
    """frames taken"""
    acknowledged: int
    """frames that Kafka has, including the frames of an earlier run's spool"""
    memory_bytes: int
    disk_bytes: int
    """bytes of the spool's files now"""
    full: bool
    error: str | None = None
    waiting: int = 0
    """frames that Kafka does not have yet"""
    spooled: int = 0
    """frames written to the spool"""
    torn_bytes: int = 0
    """bytes of the spool that could not be read back"""
    free_bytes: int = 0
    """bytes free on the disk of the spool"""


class PublisherStatus(Struct, frozen=True):
    """Progress of publishing batches; `state` describes it in words."""

    state: str
    published: int = 0
    failed: int = 0
    lost: int = 0
    """records that Kafka expired before the publisher read them"""


class FetcherStatus(Struct, frozen=True):
    """Progress of fetching blocks from IPFS.

    Attributes:
        state: Description of the progress in words.
        waiting: Number of waiting records.
        fetching: Number of blocks being fetched.
        counts: Number of records by result, since the start.
        claimed: Number of geneses that are still to be compared with claims.
    """

    state: str
    waiting: int = 0
    fetching: int = 0
    counts: dict[str, int] = {}
    places_lost: int = 0
    """number of times that Kafka had lost the fetcher's committed offset"""
    claimed: int = 0
    unanswered_streams: int = 0
    """streams whose genesis no peer had in at least one attempt"""
    unanswered_updates: int = 0
    """updates that wait for the geneses of `unanswered_streams`"""

    @property
    def is_on(self) -> bool:
        return not self.state.startswith("off")


class IpfsStatus(Struct, frozen=True):
    """Connections of the IPFS node, and the number of announced blocks. If the bridge is itself the IPFS node, also the
    blocks sent and received."""

    connections: int = 0
    """number of connected peers of any kind"""
    gossip_peers: int = 0
    """gossip peers that speak bitswap"""
    gossip_connected: int = 0
    """number of `gossip_peers` that the node is connected to"""
    gossip_left_out: int = 0
    """number of `gossip_peers` beyond the limit"""
    provided: int = 0
    unprovided: int = 0
    """blocks that were left out, or could not be announced"""
    blocks_sent: int = 0
    bytes_sent: int = 0
    blocks_received: int = 0
    """blocks that were wanted"""


class OverlayTopicStatus(Struct, frozen=True):
    """A topic of BEP 50. `sequence` is the number of the newest item, `None` before the first item."""

    target: str
    publisher: str
    separator: str
    contacts: int
    sequence: int | None


class OverlayStatus(Struct, frozen=True):
    """The BEP 50 overlay. `key`: the publisher's key, hex; `contacts`: number of contacts over all `joined` topics;
    `topics`: the topics with most contacts; `dropped`, `unsent`: datagrams, by reason."""

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
    """The bridges of the network, known from their Kafka group, by peer id."""

    leads: bool
    """true if this bridge fetches for all"""
    leader: str = ""
    bridges: tuple[str, ...] = ()
    """live bridges including this one; empty before Kafka reports them"""
    round: int = 0
    """generation of the Kafka group, which changes with its members"""
    topics_left: int = 0
    """topics of the interests that another bridge follows"""


class BridgeStatus(Struct, frozen=True):
    """Counts since the bridge started. `at`: unix seconds; `mesh`: peers by topic; `ipfs`, `transition`:
    descriptions."""

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
    """peers that are not accepted because they are graylisted"""
    topics_refused: int = 0
    """topics of the interests that are not joined because of a limit"""
    topic_refusals: int = 0
    sharing: SharingStatus = SharingStatus(False)


def write_status(path: Path, status: BridgeStatus) -> None:
    """Replace the file atomically.

    On a full disk, overwrite the old file in place, with a status whose size does not depend on peers and topics.

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
        _write_over(path, msgspec.json.encode(structs.replace(status, topics=(), mesh={}, peers=(), savings=())))


def _write_over(path: Path, data: bytes) -> None:
    """Overwrite the file in one write, padded with spaces to its old length, so that it is always valid JSON."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.pwrite(file, data.ljust(os.fstat(file).st_size), 0)
    finally:
        os.close(file)


def read_status(path: Path) -> BridgeStatus | None:
    """Read the newest status; `None` if there is no status, or another version of Kiln wrote it."""
    try:
        return msgspec.json.decode(read_small_file(path, 64 << 20), type=BridgeStatus)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None
