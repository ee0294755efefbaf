"""The status of a bridge, collected from its parts."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from msgspec import structs

from kiln.bridge.app.wiring import BridgeComponents
from kiln.bridge.bep50.carrier import TRANSPORT
from kiln.bridge.gossipsub.effects import PolicyConflict
from kiln.bridge.libp2p.view import NodeView
from kiln.bridge.publisher.publisher import Publisher
from kiln.bridge.publisher.transition import describe_unreached_peers
from kiln.conf.process.bridge_status import BridgeStatus, FetcherStatus, OverlayStatus, PublisherStatus
from kiln.conf.settings.model import Settings

_MAX_TOPICS = 3  # named in an error


def build_status(
    parts: BridgeComponents, settings: Settings, view: NodeView, interests: tuple[str, ...], at: float
) -> BridgeStatus:
    """Build the status of a bridge.

    Args:
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
        peers=view.peers,
        frames_in=view.frames_in,
        frames_out=view.frames_out,
        bytes_in=view.bytes_in,
        bytes_out=view.bytes_out,
        spool=parts.sink.status(),
        publisher=_publisher_status(parts.publisher, "publish.enabled"),
        counters=dict(view.counters),
        errors=tuple(_errors(parts, settings, view)),
        bep50=_overlay_status(parts),
        fetcher=_fetcher_status(parts, settings),
        ipfs=parts.blocks.describe(),
        ipfs_node=parts.blocks.status(),
        transition=parts.publishing.describe(),
        kept_out=view.kept_out,
        topics_refused=parts.topic_selector.refused,
        topic_refusals=parts.topic_selector.refusals,
        sharing=structs.replace(parts.membership.status(), topics_left=len(parts.shares.left)),
    )


def describe_bootstrap(view: NodeView, configured: Sequence[str]) -> Iterator[str]:
    """Describe each peer of `bridge.bootstrap` that is not connected as a gossip peer, with the reason."""
    for bootstrap in view.bootstrap:
        if bootstrap.error and bootstrap.connected:
            yield f"bootstrap peer {bootstrap.addresses[0]}: {bootstrap.error}"
        elif bootstrap.error:
            yield f"cannot reach bootstrap peer {bootstrap.error}"
    if configured and not view.bootstrap and not view.peers:
        yield f"bridge.bootstrap contains only this bridge itself ({view.peer}). Add the addresses of other peers."


def describe_policy_conflicts(conflicts: Iterable[PolicyConflict]) -> Iterator[str]:
    """Describe conflicts between the signature policies of the bridge and of its peers, and the settings to change.

    The bridge rejects messages of such peers, or does not send its own messages to them.
    """
    topics_of: defaultdict[tuple[bool, bool], list[str]] = defaultdict(list)
    for conflict in conflicts:
        topics_of[conflict.withheld, conflict.signed].append(conflict.topic)
    for signed, kind, policy in ((True, "with", "none"), (False, "without", "strict")):
        if topics := topics_of[False, signed]:
            yield (
                f"peers send messages {kind} a signature on {_list_topics(topics)}. The bridge rejects these "
                f'messages: the policy is "{policy}". Set policy.topics or policy.networks if the network accepts them.'
            )
    if topics := topics_of[True, True]:
        yield (
            f"peers on {_list_topics(topics)} seem to reject messages with a signature, so batches are not sent "
            'to them. Set policy.topics to "none" for a topic on which no node signs.'
        )


def _list_topics(topics: Sequence[str]) -> str:
    more = len(topics) - _MAX_TOPICS
    return ", ".join(topics[:_MAX_TOPICS]) + (f" and {more} more topics" if more > 0 else "")


def _publisher_status(publisher: Publisher | None, setting: str) -> PublisherStatus:
    if publisher is None:
        return PublisherStatus(f"off: set {setting} = true to announce batches")
    return publisher.status()


def _fetcher_status(parts: BridgeComponents, settings: Settings) -> FetcherStatus:
    if parts.fetcher is not None:
        return parts.fetcher.status()
    return FetcherStatus("off: ipfs.fetch is false" if settings.ipfs.api else "off: ipfs.api is empty")


def _overlay_status(parts: BridgeComponents) -> OverlayStatus | None:
    if parts.carrier is None:
        return None
    return parts.carrier.status(_publisher_status(parts.announcer, "bep50.publish"))


def _errors(parts: BridgeComponents, settings: Settings, view: NodeView) -> Iterator[str]:
    yield from describe_bootstrap(view, settings.bridge.bootstrap)
    if refused := parts.topic_selector.refused:
        yield (
            f"{refused} topics of the interests are not joined. If this remains, raise bridge.max_topics or "
            "bridge.max_topics_per_peer, or narrow the interests."
        )
    if parts.publisher is not None:
        topics = (peer.topics for peer in parts.node.router.peers.values())
        if group := describe_unreached_peers(parts.publishing.publishing_scheme(), settings.network.name, topics):
            yield group
    yield from describe_policy_conflicts(view.policy_conflicts)
    for peer in sorted(parts.shares.others - {peer.peer for peer in view.peers}):
        yield (
            f"this bridge has no gossip connection to bridge {peer}, so the two cannot divide topics. Add the address "
            f"of bridge {peer} to bridge.bootstrap."
        )
    if throttled := sum(peer.held_back for peer in view.peers):
        limits = "bridge.max_peer_bytes_per_hour or bridge.max_bytes_per_hour"
        yield (
            f"{throttled} peers send more than {limits} allow, so the bridge reads from them slowly. If the traffic is "
            "legitimate, raise the limit."
        )
    if throttled := sum(peer.sent_slowly for peer in view.peers):
        limits = "bridge.max_peer_bytes_per_hour_out or bridge.max_bytes_per_hour_out"
        yield (
            f"the traffic to {throttled} peers would exceed {limits}, so the bridge sends to them slowly. If the "
            "traffic is legitimate, raise the limit."
        )
    errors = [parts.sink.status().error, parts.interests.error, parts.publishing.error]
    errors += [part.error for part in (parts.membership, parts.publisher, parts.fetcher) if part is not None]
    yield from filter(None, errors)
    if parts.carrier is not None:
        if parts.announcer is not None and parts.announcer.error:
            yield f"{TRANSPORT}: {parts.announcer.error}"
        yield from parts.carrier.errors
        if parts.quarantine.error:
            yield f"{TRANSPORT}: {parts.quarantine.error}"
