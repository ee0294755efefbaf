"""Construction of a bridge: a function for each component, and `BridgeComponents`, which connects them."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kiln.bridge.app.interests import InterestsFile, open_interests
from kiln.bridge.app.neighbours import select_bitswap_peers
from kiln.bridge.app.topic_selector import TopicSelector
from kiln.bridge.bep50.carrier import TRANSPORT, Carrier, CarrierOptions, publisher_key
from kiln.bridge.capture.sink import FrameSink
from kiln.bridge.capture.spool import Spool
from kiln.bridge.cluster.group import Member, interests_digest
from kiln.bridge.cluster.membership import Membership
from kiln.bridge.cluster.topics import TopicShares
from kiln.bridge.fetcher.fetcher import Fetcher
from kiln.bridge.fetcher.pending import FetchingOptions
from kiln.bridge.gossipsub.effects import Deliver
from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.protocols import select_versions
from kiln.bridge.gossipsub.rpc_parts import MessageTooLargeError, RpcLimits
from kiln.bridge.ipfs import BlockStore
from kiln.bridge.ipfs.bitswap.exchange import BlockExchange, ExchangeOptions
from kiln.bridge.ipfs.bitswap.store import BitswapBlockStore
from kiln.bridge.ipfs.folder import FolderBlockStore
from kiln.bridge.ipfs.kubo import Kubo
from kiln.bridge.ipfs.node import KuboBlockStore
from kiln.bridge.kafka.producers import ONLY_REFUSALS, open_producer
from kiln.bridge.kafka.quarantine import QuarantineWriter
from kiln.bridge.kafka.session_thread import KafkaConfig, now_us
from kiln.bridge.libp2p.discovery import Discovery, DiscoveryOptions
from kiln.bridge.libp2p.host import Node
from kiln.bridge.libp2p.keys import load_or_create_key
from kiln.bridge.libp2p.options import NodeOptions
from kiln.bridge.libp2p.seqno import Seqno, SeqnoError
from kiln.bridge.publisher.batches import PublishError, PublishingOptions
from kiln.bridge.publisher.pace import AuthorPacer
from kiln.bridge.publisher.publisher import Publisher
from kiln.bridge.publisher.transition import HeightWatch, Transition
from kiln.conf.process.errors import KilnError
from kiln.conf.settings.durations import micros
from kiln.conf.settings.model import Settings
from kiln.schemas.dht.announcement import parse_source
from kiln.schemas.wire.identity import compute_peer_id, peer_text
from kiln.schemas.wire.message_id import parse_message_id_rule
from kiln.schemas.wire.topic_table import BundleSet
from kiln.schemas.wire.topics import format_separator

_CLOSE_TIMEOUT = 4.0  # s for Kafka to acknowledge the frames in flight when the bridge ends; the spool gets the rest
_ACKNOWLEDGEMENT_INTERVAL = 100_000  # µs between checks for contacts that acknowledge an announced item


class FramesLostError(KilnError):
    """The bridge ended with frames that neither Kafka nor the spool has stored. The message gives their number."""


class BridgeComponents:
    """The parts of a bridge. A part that the settings turn off is `None`."""

    def __init__(self, settings: Settings, stack: ExitStack, token: trio.lowlevel.TrioToken) -> None:
        """Create and connect the parts. The caller starts `node`, `discovery`, `exchange`, `carrier` and `threads`.

        Args:
            stack: closes the parts, newest first, and may raise `FramesLostError`.
            token: trio token of the thread that runs the node; other threads call the node through it.
        """
        key = load_or_create_key(settings.bridge_dir / "key")
        self.interests = open_interests(settings)
        self.shares = TopicShares(peer_text(compute_peer_id(key)))
        bridge = settings.bridge
        self.topic_selector = TopicSelector(bridge.max_topics, bridge.max_topics_per_peer, self.shares)

        # frames, from peers to Kafka
        self.sink = stack.enter_context(_open_sink(settings))
        seqno = stack.enter_context(Seqno(settings.bridge_dir / "seqno", time.time_ns))
        self.node = node = _create_node(settings, key, seqno, self.sink, self.topic_selector.record_message)
        self.discovery = discovery = _create_discovery(settings, node) if settings.discovery.enabled else None
        self.quarantine = _run_until_closed(stack, QuarantineWriter(_kafka_config(settings)))
        self.carrier = _create_carrier(settings, self.sink, self.quarantine) if settings.bep50.enabled else None

        # blocks, by our own bitswap, by a Kubo, or only in a folder
        folder = FolderBlockStore(settings.state / "blocks")
        bitswaps = settings.speaks_bitswap
        self.exchange = _create_exchange(settings, node, folder, discovery) if bitswaps else None
        self.kubo = _open_kubo(settings, folder) if settings.uses_kubo else None
        """block store of the Kubo, which can also connect to given peers; `None` if no Kubo is used"""
        self.blocks: BlockStore = self.kubo or folder
        if self.exchange is not None:
            self.blocks = _create_bitswap_store(node, folder, self.exchange, discovery, token)
        blocks = self.blocks
        stack.callback(blocks.close)

        # batches and updates, between Kafka and peers
        self.publishing = _create_transition(settings)
        if self.publishing.height is not None:
            _run_until_closed(stack, self.publishing.height)
        self.membership = _run_until_closed(stack, _create_membership(settings, node, self.interests))
        publishes, announces = settings.publishes, settings.announces
        self.publisher = _create_publisher(settings, node, blocks, self.publishing, token) if publishes else None
        """publishes batches to gossipsub"""
        carrier = self.carrier
        self.announcer = _create_announcer(settings, node, carrier, blocks, token) if carrier and announces else None
        """publishes batches to BEP 50, in a consumer group of its own, so that neither transport waits for the other"""
        self.fetcher = _create_fetcher(settings, node, blocks, self.membership) if settings.fetches else None

    @property
    def threads(self) -> tuple[Publisher | Fetcher, ...]:
        """Threads that use the other parts, so they start last and stop first."""
        return tuple(worker for worker in (self.publisher, self.announcer, self.fetcher) if worker is not None)


_Thread = TypeVar("_Thread", QuarantineWriter, HeightWatch, Membership)


def _run_until_closed(stack: ExitStack, thread: _Thread) -> _Thread:
    thread.start()
    stack.callback(thread.stop)
    return thread


# ---------------------------------------------------------------- network


def _create_node(
    settings: Settings,
    key: Ed25519PrivateKey,
    seqno: Seqno,
    sink: FrameSink,
    record_message: Callable[[Deliver], None],
) -> Node:
    peers = settings.ipfs.peers if settings.speaks_bitswap else ()
    options = NodeOptions(
        network=settings.network.name,
        listen=settings.bridge.listen,
        bootstrap=(*settings.bridge.bootstrap, *peers),
        gossip=RouterOptions(
            policy=settings.policy.of(settings.network.name),
            topic_policies=settings.policy.topics,
            protocols=select_versions(settings.network.protocols),
            message_id=parse_message_id_rule(settings.network.message_id),
            max_message_bytes=settings.network.max_message_bytes,
            rpc_limits=RpcLimits(settings.bridge.max_rpc_bytes_out),
        ),
        bundles=BundleSet(settings.topic_table.bundles),
        send_indices=settings.topic_table.send,
        agent="kiln/0.1.0",
        max_rpc_bytes=settings.bridge.max_rpc_bytes,
        max_peer_bytes_per_hour=settings.bridge.max_peer_bytes_per_hour,
        max_bytes_per_hour=settings.bridge.max_bytes_per_hour,
        max_peer_bytes_per_hour_out=settings.bridge.max_peer_bytes_per_hour_out,
        max_bytes_per_hour_out=settings.bridge.max_bytes_per_hour_out,
        ban=settings.bridge.ban.total_seconds(),
    )
    return Node(options, key, seqno, sink, record_message, authors=settings.publish.author_keys)


def _create_discovery(settings: Settings, node: Node) -> Discovery:
    group = settings.discovery
    options = DiscoveryOptions(
        prefix=group.protocol_prefix,
        serve=group.server_mode,
        announce=group.announce,
        reprovide_interval=group.reprovide_interval.total_seconds(),
        lookup_interval=group.lookup_interval.total_seconds(),
    )
    return Discovery(node, options, random.Random(), RouterOptions().D)


def _create_carrier(settings: Settings, sink: FrameSink, quarantine: QuarantineWriter) -> Carrier:
    group, folder = settings.bep50, settings.bridge_dir
    options = CarrierOptions(
        network=settings.network.name,
        listen=group.listen,
        bootstrap=group.bootstrap,
        contacts=group.contacts,
        follow=tuple(map(parse_source, group.follow)),
        max_topics=group.max_topics,
        batch_typ=settings.batch.typ,
    )
    return Carrier(options, publisher_key(folder), folder / "bep50", sink, quarantine=quarantine.put)


# ---------------------------------------------------------------- Kafka and IPFS


@contextmanager
def _open_sink(settings: Settings) -> Iterator[FrameSink]:
    kafka = settings.broker
    topic = kafka.topic("frames")
    spool = Spool(
        settings.bridge_dir / "spool",
        settings.bridge.spool_bytes,
        settings.bridge.min_free_bytes,
        durable=settings.durability == "power",
    )
    sink = FrameSink(
        lambda: open_producer(kafka.client_options(), (topic,), ONLY_REFUSALS),
        topic,
        spool,
        settings.bridge.memory_bytes,
    )
    try:
        yield sink
    finally:
        lost = sink.close(_CLOSE_TIMEOUT)
        if lost:
            raise FramesLostError(
                f"{lost} frames are lost: Kafka did not acknowledge them before the bridge ended, and the spool in "
                f"{settings.bridge_dir} is full. Raise bridge.spool_bytes, or free some space on this disk."
            )


def _open_kubo(settings: Settings, marks: FolderBlockStore) -> KuboBlockStore:
    ipfs = settings.ipfs
    kubo = Kubo(ipfs.api, ipfs.api_auth.get_secret_value(), ipfs.max_concurrent_fetches)
    return KuboBlockStore(kubo, marks, ipfs.peers)


def _create_bitswap_store(
    node: Node,
    folder: FolderBlockStore,
    exchange: BlockExchange,
    discovery: Discovery | None,
    token: trio.lowlevel.TrioToken,
) -> BitswapBlockStore:
    def count_gossip_peers() -> int:
        return len(select_bitswap_peers(node, node.router.peers))

    return BitswapBlockStore(folder, exchange, discovery, token, node.counters, count_gossip_peers)


def _create_exchange(
    settings: Settings,
    node: Node,
    folder: FolderBlockStore,
    discovery: Discovery | None,
) -> BlockExchange:
    options = ExchangeOptions(max_bytes_per_second=settings.ipfs.max_bytes_per_second)
    search = None if discovery is None else discovery.connect_providers
    return BlockExchange(node, folder, options, search)


# ---------------------------------------------------------------- threads


def _create_membership(settings: Settings, node: Node, interests: InterestsFile) -> Membership:
    member = Member(
        _bridge_id(node),
        socket.gethostname(),
        interests_digest(interests.read()),
        settings.fetches,
        authors=node.authors,
    )
    return Membership(_kafka_config(settings), settings.network.name, member)


def _bridge_id(node: Node) -> str:
    """Return the id of the bridge in Kafka's groups: its peer id."""
    return node.authors[0]


def _kafka_config(settings: Settings) -> KafkaConfig:
    kafka = settings.broker
    return KafkaConfig(kafka.client_options(), kafka.prefix)


def _create_transition(settings: Settings) -> Transition:
    group = settings.transition
    height: HeightWatch | None = None
    if group.height:
        path = settings.bridge_dir / "transition.json"
        height = HeightWatch(group.rpc_url.get_secret_value(), group.height, path, now_us)
    return Transition(now_us, group.mode, group.at_us, height, micros(group.phase_out))


def _create_publisher(
    settings: Settings,
    node: Node,
    blocks: BlockStore,
    transition: Transition,
    token: trio.lowlevel.TrioToken,
) -> Publisher:
    pace = AuthorPacer(micros(settings.publish.min_interval), settings.publish.author_keys)

    def publish(topic: str, data: bytes) -> int:
        try:
            peers = trio.from_thread.run_sync(node.publish, topic, data, pace.author_index, trio_token=token)
        except (trio.RunFinishedError, SeqnoError, MessageTooLargeError) as error:
            raise PublishError(str(error) or "the bridge is stopping") from error
        if peers:
            pace.record_message(now_us())
        return peers

    def find_subscribers(names: Collection[str]) -> dict[str, list[bytes]]:
        subscribers = node.router.subscribers
        return {topic: list(peers) for topic in names if (peers := subscribers(topic))}

    def subscribers(names: Collection[str]) -> dict[str, list[bytes]]:
        with suppress(trio.RunFinishedError):
            return trio.from_thread.run_sync(find_subscribers, names, trio_token=token)
        return {}  # the bridge is stopping: nothing can be sent

    return Publisher(
        _kafka_config(settings),
        PublishingOptions(
            settings.network.name,
            micros(settings.publish.timeout),
            batch_typ=settings.batch.typ,
            pin_duration=micros(settings.ipfs.pin_duration),
        ),
        publish,
        lambda: None,
        blocks,
        transition.publishing_scheme,
        pace=pace,
        instance=_bridge_id(node),
        subscribers=subscribers,
    )


def _create_announcer(
    settings: Settings, node: Node, carrier: Carrier, blocks: BlockStore, token: trio.lowlevel.TrioToken
) -> Publisher:
    def announce(topic: str, data: bytes) -> int:
        try:
            return trio.from_thread.run(carrier.announce, topic, data, trio_token=token)
        except (trio.RunFinishedError, trio.Cancelled) as error:
            raise PublishError("the bridge is stopping") from error

    options = PublishingOptions(
        settings.network.name,
        micros(settings.publish.timeout),
        retry_every=_ACKNOWLEDGEMENT_INTERVAL,
        batch_typ=settings.batch.typ,
        pin_duration=micros(settings.ipfs.pin_duration),
        transport=TRANSPORT,
        target=carrier.target,
    )
    return Publisher(
        _kafka_config(settings),
        options,
        announce,
        lambda: carrier.stop_reason,
        blocks,
        group=f"{settings.kafka.prefix}{TRANSPORT}-publisher.{settings.network.name}",
        instance=_bridge_id(node),
    )


def _create_fetcher(settings: Settings, node: Node, blocks: BlockStore, membership: Membership) -> Fetcher:
    file = open_interests(settings)
    followed = settings.bep50.follow if settings.bep50.enabled else ()
    announced_interests = [format_separator(parse_source(text).separator) for text in followed]
    options = FetchingOptions(
        settings.network.name,
        max_concurrent=settings.ipfs.max_concurrent_fetches,
        timeout=micros(settings.ipfs.timeout),
        give_up_after=micros(settings.ipfs.give_up_after),
        retry_after=micros(settings.ipfs.retry_after),
        check_genesis=settings.receive.check_genesis,
        genesis_timeout=micros(settings.receive.genesis_timeout),
        implied_separator=settings.receive.implied_separator or None,
        authors=lambda: membership.authors,
    )
    return Fetcher(
        _kafka_config(settings),
        options,
        blocks,
        lambda: (*file.read(), *announced_interests),
        instance=_bridge_id(node),
    )
