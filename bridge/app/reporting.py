"""The status of a bridge, collected from its parts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from heapq import nlargest

from msgspec import structs

from kiln.bridge.app.wiring import BridgeComponents, describe_hold
from kiln.bridge.bep50.carrier import TRANSPORT
from kiln.bridge.libp2p.view import NodeView
from kiln.bridge.publisher.publisher import Publisher
from kiln.bridge.publisher.transition import describe_unreached_peers
from kiln.conf.process.bridge_status import BridgeStatus, FetcherStatus, OverlayStatus, PublisherStatus, SavingStatus
from kiln.conf.settings.model import Settings

_MAX_SAVINGS = 50  # topics, and topics of each peer, with savings in the status
_NO_IPFS = "ipfs.api is empty"


def build_status(
    parts: BridgeComponents, settings: Settings, view: NodeView, interests: tuple[str, ...], at: float
) -> BridgeStatus:
    """Build the status of a bridge.

    Args:
        view: The view of its node.
        interests: The current interests.
        at: Unix time in s.
    """
    return BridgeStatus(
        at=at,
        pid=os.getpid(),
        peer=view.peer,
        network=settings.network.name,
        addresses=view.addresses,
        interests=interests,
        topics=view.topics,
        mesh={topic: len(peers) for topic, peers in view.mesh.items()},
        peers=tuple(structs.replace(peer, savings=select_largest(peer.savings)) for peer in view.peers),
        frames_in=view.frames_in,
        frames_out=view.frames_out,
        bytes_in=view.bytes_in,
        bytes_out=view.bytes_out,
        spool=parts.sink.status(),
        publisher=_publisher_status(parts.publisher, settings.publish.enabled is False, "publish.enabled"),
        counters=dict(view.counters),
        savings=select_largest(view.savings),
        errors=tuple(_errors(parts, settings, view)),
        bep50=_overlay_status(parts, settings),
        fetcher=FetcherStatus(f"off: {_NO_IPFS}") if parts.fetcher is None else parts.fetcher.status(),
        ipfs=parts.blocks.describe(),
        ipfs_node=parts.blocks.status(),
        transition=parts.publishing.describe(),
        kept_out=view.kept_out,
        topics_refused=parts.topic_selector.refused,
        topic_refusals=parts.topic_selector.refusals,
        sharing=structs.replace(parts.membership.status(), topics_left=len(parts.shares.left)),
    )


def select_largest(savings: Iterable[SavingStatus]) -> tuple[SavingStatus, ...]:
    """Select the largest savings, so that the status stays small with many peers on many topics."""
    return tuple(nlargest(_MAX_SAVINGS, savings, key=lambda each: each.as_names - each.as_indices))


def _publisher_status(publisher: Publisher | None, turned_off: bool, setting: str) -> PublisherStatus:
    if publisher is None:
        return PublisherStatus(f"off: {setting} is false" if turned_off else f"off: {_NO_IPFS}")
    return publisher.status()


def _overlay_status(parts: BridgeComponents, settings: Settings) -> OverlayStatus | None:
    if parts.carrier is None:
        return None
    return parts.carrier.status(
        _publisher_status(parts.announcer, settings.bep50.publish is False, "bep50.publish"),
    )


def _errors(parts: BridgeComponents, settings: Settings, view: NodeView) -> Iterator[str]:
    for each in view.bootstrap:
        if each.error and not each.connected:
            yield f"cannot reach bootstrap peer {each.addresses[0]}: {each.error}"
    if refused := parts.topic_selector.refused:
        yield f"{refused} topics of peers are not joined: raise bridge.max_topics or bridge.max_topics_per_peer"
    if parts.publisher is not None:
        topics = (peer.topics for peer in parts.node.router.peers.values())
        if group := describe_unreached_peers(parts.publishing.publishing_scheme(), settings.network.name, topics):
            yield group
        if reason := describe_hold(settings, parts.blocks.status()):
            yield f"batches are held back: {reason}"
    for peer in sorted(parts.shares.others - {peer.peer for peer in view.peers}):
        yield f"bridge {peer} is no gossip peer of this one, so both receive everything. Add it to bridge.bootstrap."
    if throttled := sum(peer.held_back for peer in view.peers):
        limits = "bridge.max_peer_bytes_per_hour or bridge.max_bytes_per_hour"
        yield f"{throttled} peers send more than {limits} allow; reading from them is throttled"
    if throttled := sum(peer.sent_slowly for peer in view.peers):
        limits = "bridge.max_peer_bytes_per_hour_out or bridge.max_bytes_per_hour_out"
        yield f"{throttled} peers are sent more than {limits} allow; sending to them is throttled"
    errors = [parts.sink.status().error, parts.interests.error, parts.publishing.error]
    errors += [part.error for part in (parts.membership, parts.publisher, parts.fetcher) if part is not None]
    yield from filter(None, errors)
    if parts.carrier is not None:
        if parts.announcer is not None and parts.announcer.error:
            yield f"{TRANSPORT}: {parts.announcer.error}"
        yield from parts.carrier.errors
        if parts.quarantine.error:
            yield f"{TRANSPORT}: {parts.quarantine.error}"
