"""The state of a node at one moment, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kiln.bridge.gossipsub.effects import PolicyConflict
from kiln.bridge.gossipsub.router import Router
from kiln.bridge.libp2p.addresses import BootstrapPeer
from kiln.bridge.libp2p.links import PeerLink
from kiln.conf.process.bridge_status import PeerStatus
from kiln.schemas.wire.identity import peer_text


@dataclass(frozen=True)
class BootstrapState:
    """State of a peer of `bridge.bootstrap`."""

    peer: str
    addresses: tuple[str, ...]
    connected: bool
    error: str  # of the last attempt, or why a connected peer has no pubsub stream; empty if all is well


@dataclass(frozen=True)
class NodeView:
    """The state of a node at one moment."""

    peer: str
    addresses: tuple[str, ...]  # that the node listens on, each with /p2p/<peer id>
    peers: tuple[PeerStatus, ...]
    bootstrap: tuple[BootstrapState, ...]
    mesh: Mapping[str, tuple[str, ...]]
    topics: tuple[str, ...]
    frames_in: int
    frames_out: int
    bytes_in: int
    bytes_out: int
    counters: Mapping[str, int]  # the node's and the router's
    kept_out: int  # banned peers
    policy_conflicts: tuple[PolicyConflict, ...] = ()


def describe_peers(links: Iterable[PeerLink], router: Router) -> Iterator[PeerStatus]:
    """Yield the status of each peer that has a pubsub session."""
    views = router.peers
    for link in links:
        session = link.session
        if session is None:
            continue
        known = views.get(link.peer)
        yield PeerStatus(
            peer=peer_text(link.peer),
            agent=session.agent,
            protocol=session.protocol,
            address=session.address,
            outbound=session.dialled,
            score=known.score if known else 0.0,
            topics=len(known.topics) if known else 0,
            queued=session.queue.waiting_bytes,
            frames_in=session.frames_in,
            frames_out=session.frames_out,
            dropped=session.dropped,
            bytes_in=session.bytes_in,
            held_back=session.accounts.bytes_in.is_held,
            bytes_out=session.bytes_out,
            sent_slowly=session.accounts.bytes_out.is_held,
        )


def describe_bootstrap(targets: Iterable[BootstrapPeer], links: Mapping[bytes, PeerLink]) -> Iterator[BootstrapState]:
    """Yield the state of each peer of `bridge.bootstrap`, connected or not."""
    for target in targets:
        peer = target.id.to_bytes()
        link = links.get(peer)
        yield BootstrapState(
            peer=peer_text(peer),
            addresses=tuple(map(str, target.addresses)),
            connected=link is not None,
            error=target.error if link is None else link.error,
        )
