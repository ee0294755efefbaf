"""The parts of one bridge: each is made from the settings by a function of its own, and `wire` connects them."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bridge.bep50.carrier import TRANSPORT, Carrier, CarrierOptions, publisher_key
from bridge.capture.spool import FrameSink
from bridge.fetching.fetcher import Fetcher
from bridge.fetching.pending import FetchingOptions
from bridge.gossip.options import RouterOptions
from bridge.gossip.parts import MessageTooLargeError, RpcLimits
from bridge.ipfs import Blocks, open_blocks
from bridge.kafka.librdkafka import LibrdkafkaProducer
from bridge.kafka.producers import StoppableKafkaProducer
from bridge.kafka.quarantine import Quarantine
from bridge.kafka.topic_notes import notes_of
from bridge.node.discovery import Discovery, DiscoveryOptions
from bridge.node.host import Node
from bridge.node.keys import load_or_create
from bridge.node.options import NodeOptions
from bridge.node.seqno import Seqno, SeqnoError
from bridge.process.interests import InterestsFile
from bridge.process.joining import Joining
from bridge.publishing.ledger import Ledger
from bridge.publishing.outbox import PublishError, PublishingOptions
from bridge.publishing.pace import Pace
from bridge.publishing.pins import Pins
from bridge.publishing.publisher import Publisher
from bridge.publishing.transition import HeightWatch, Topics, Transition
from bridge.sharing.group import Member, interests_digest
from bridge.sharing.membership import Membership
from bridge.sharing.topics import TopicShares
from bridge.status import IpfsStatus
from conf.errors import KilnError
from conf.settings.durations import micros
from conf.settings.model import Settings
from schemas.dht.announcement import parse_source
from schemas.identity import peer_of, peer_text
from schemas.topic_table import Bundles
from schemas.topics import separator_text

_PATIENCE = 4.0  # s that frames on their way to Kafka get when the bridge ends; the spool keeps the rest
_LOOK_AGAIN = 100_000  # µs between looks whether others have an announced item: they acknowledge it after it is sent


class FramesLostError(KilnError):
    """At its end the bridge had frames that neither Kafka nor the spool took: says how many, and why."""


@dataclass(frozen=True)
class Parts:
    """What a bridge is made of. None: the settings turn that part off."""

    interests: InterestsFile
    shares: TopicShares
    joining: Joining
    sink: FrameSink
    node: Node
    discovery: Discovery | None
    quarantine: Quarantine
    carrier: Carrier | None
    blocks: Blocks
    membership: Membership
    publishing: PublishingTopics
    publisher: Publisher | None
    """to gossipsub"""
    announcer: Publisher | None
    """to BEP 50. It has an outbox of its own, so that neither transport waits for the other."""
    fetcher: Fetcher | None

    @property
    def threads(self) -> tuple[Publisher | Fetcher, ...]:
        """The parts that work in a thread of their own and use the others. They start last and stop first."""
        return tuple(each for each in (self.publisher, self.announcer, self.fetcher) if each is not None)


def wire(settings: Settings, stack: ExitStack, token: trio.lowlevel.TrioToken) -> Parts:
    """The parts, connected. `stack` takes them down again, the newest first. FramesLostError.

    The threads of publisher and announcer hand messages to the trio thread of `token`. Whoever calls this starts node,
    discovery, carrier and threads.
    """
    sink = stack.enter_context(_sink(settings))
    seqno = stack.enter_context(Seqno(settings.bridge_dir / "seqno", time.time_ns))
    key = load_or_create(settings.bridge_dir / "key")
    shares = TopicShares(peer_text(peer_of(key)))
    joining = Joining(settings.bridge.max_topics, settings.bridge.max_topics_of_peer, shares)
    node = _node(settings, key, seqno, sink, joining)
    quarantine = _quarantine(settings)
    quarantine.start()
    stack.callback(quarantine.stop)
    carrier = _carrier(settings, sink, quarantine) if settings.bep50.enabled else None
    blocks = stack.enter_context(_blocks(settings))
    publishing = PublishingTopics(settings)
    publishing.start()
    stack.callback(publishing.stop)
    interests = _interests(settings)
    membership = _membership(settings, node, interests, carrier)
    membership.start()
    stack.callback(membership.stop)
    return Parts(
        interests=interests,
        shares=shares,
        joining=joining,
        sink=sink,
        node=node,
        discovery=_discovery(settings, node) if settings.discovery.enabled else None,
        quarantine=quarantine,
        carrier=carrier,
        blocks=blocks,
        membership=membership,
        publishing=publishing,
        publisher=_publisher(settings, node, blocks, publishing, membership, token) if settings.publishes else None,
        announcer=_announcer(settings, carrier, blocks, membership, token) if carrier and settings.announces else None,
        fetcher=_fetcher(settings, blocks, membership) if settings.ipfs.api else None,
    )


class PublishingTopics:
    """On which topics a batch goes out at this moment, and whether the topic of the network is heard (CIP-120)."""

    def __init__(self, settings: Settings) -> None:
        told = settings.transition
        self._transition = Transition(told.mode, told.at_us, told.height or None, micros(told.phase_out))
        self._height: HeightWatch | None = None
        if told.height:
            path = settings.bridge_dir / "transition.json"
            self._height = HeightWatch(told.rpc_url.get_secret_value(), told.height, path, _now_us)

    def start(self) -> None:
        """Begins to ask for the block height, where the settings name one."""
        if self._height is not None:
            self._height.start()

    def stop(self) -> None:
        """Ends that."""
        if self._height is not None:
            self._height.stop()

    def published_on(self) -> Topics:
        """The topics on which a batch goes out now."""
        return self._transition.published_on(_now_us(), self._reached_at)

    def hears_network(self) -> bool:
        """Whether the node is to be on the topic of the network now."""
        return self._transition.hears_network(_now_us(), self._reached_at)

    def in_words(self) -> str:
        """What is published where; empty where there is no transition."""
        return self._transition.in_words(_now_us(), self._reached_at)

    @property
    def error(self) -> str | None:
        """Why the block height is not known now."""
        return None if self._height is None else self._height.error

    @property
    def _reached_at(self) -> int | None:
        """When the chain reached the height of the settings, µs; None: not yet, or the settings name none."""
        return None if self._height is None else self._height.reached_at


def _now_us() -> int:
    return time.time_ns() // 1_000


# ---------------------------------------------------------------- network


def _node(settings: Settings, key: Ed25519PrivateKey, seqno: Seqno, sink: FrameSink, joining: Joining) -> Node:
    options = NodeOptions(
        network=settings.network,
        listen=settings.bridge.listen,
        bootstrap=settings.bridge.bootstrap,
        gossip=RouterOptions(
            policy=settings.policy.of(settings.network), rpc_limits=RpcLimits(settings.bridge.max_rpc_out)
        ),
        bundles=Bundles(settings.topic_table.bundles),
        send_indices=settings.topic_table.send,
        agent="kiln/0.1.0",
        max_rpc=settings.bridge.max_rpc,
        peer_bytes=settings.bridge.peer_bytes,
        all_bytes=settings.bridge.all_bytes,
        peer_bytes_out=settings.bridge.peer_bytes_out,
        all_bytes_out=settings.bridge.all_bytes_out,
        ban=settings.bridge.ban.total_seconds(),
    )
    return Node(options, key, seqno, sink, joining.heard, authors=settings.publish.keys)


def _discovery(settings: Settings, node: Node) -> Discovery:
    told = settings.discovery
    options = DiscoveryOptions(
        prefix=told.prefix,
        serve=told.serve,
        announce=told.announce,
        renew=told.renew.total_seconds(),
        every=told.every.total_seconds(),
    )
    return Discovery(node, options, random.Random(), RouterOptions().D)


def _carrier(settings: Settings, sink: FrameSink, quarantine: Quarantine) -> Carrier:
    told, folder = settings.bep50, settings.bridge_dir
    options = CarrierOptions(
        network=settings.network,
        listen=told.listen,
        bootstrap=told.bootstrap,
        contacts=told.contacts,
        follow=tuple(map(parse_source, told.follow)),
        most_topics=told.topics,
        batch_typ=settings.batch.typ,
    )
    return Carrier(options, publisher_key(folder), folder / "bep50", sink, quarantine=quarantine.put)


def _interests(settings: Settings) -> InterestsFile:
    """For one thread: the file remembers what it has read."""
    return InterestsFile(settings.bridge_dir / "interests.json", settings.bridge.interests)


# ---------------------------------------------------------------- Kafka and IPFS


@contextmanager
def _sink(settings: Settings) -> Iterator[FrameSink]:
    kafka = settings.broker
    topic = kafka.topic("frames")
    sink = FrameSink(
        lambda: LibrdkafkaProducer(kafka.client_options(), topic),
        topic,
        settings.bridge_dir / "spool",
        settings.bridge.spool_bytes,
        settings.bridge.memory_bytes,
        durable=settings.durability == "power",
        floor=settings.bridge.min_free,
    )
    try:
        yield sink
    finally:
        lost = sink.close(_PATIENCE)
        if lost:
            raise FramesLostError(
                f"{lost} frames are lost: Kafka did not take them before the bridge ended, and the spool in "
                f"{settings.bridge_dir} had no room for them (bridge.spool_bytes, or the disk)"
            )


def _quarantine(settings: Settings) -> Quarantine:
    kafka = settings.broker
    return Quarantine(
        lambda: StoppableKafkaProducer(kafka.server_list(), kafka.security_options()), kafka.topic("quarantine")
    )


@contextmanager
def _blocks(settings: Settings) -> Iterator[Blocks]:
    ipfs = settings.ipfs
    blocks = open_blocks(
        ipfs.api,
        settings.state,
        auth=ipfs.api_auth.get_secret_value(),
        listen=ipfs.listen,
        peers=ipfs.peers,
        at_most=ipfs.at_most,
    )
    try:
        yield blocks
    finally:
        blocks.close()


def _pins(settings: Settings, blocks: Blocks) -> Pins:
    """For one thread, as SQLite's connections are."""
    return Pins(blocks, settings.bridge_dir / "pins.sqlite", micros(settings.ipfs.pin_for))


# ---------------------------------------------------------------- threads


def _membership(settings: Settings, node: Node, interests: InterestsFile, carrier: Carrier | None) -> Membership:
    kafka = settings.broker
    duties = (settings.publishes, carrier is not None and settings.announces, bool(settings.ipfs.api))
    member = Member(
        node.authors[0], socket.gethostname(), interests_digest(interests.read()), sum(duties), authors=node.authors
    )
    return Membership(kafka.server_list(), kafka.security_options(), kafka.prefix, settings.network, member)


def _publisher(
    settings: Settings,
    node: Node,
    blocks: Blocks,
    topics: PublishingTopics,
    membership: Membership,
    token: trio.lowlevel.TrioToken,
) -> Publisher:
    pace = Pace(micros(settings.publish.gap), settings.publish.keys)

    def publish(topic: str, data: bytes) -> int:
        try:
            return trio.from_thread.run_sync(node.publish, topic, data, pace.author(topic), trio_token=token)
        except (trio.RunFinishedError, SeqnoError, MessageTooLargeError) as error:
            raise PublishError(str(error) or "the bridge is stopping") from error

    return Publisher(
        settings.kafka.server_list(),
        settings.broker.security_options(),
        settings.kafka.prefix,
        PublishingOptions(settings.network, micros(settings.publish.timeout), batch_typ=settings.batch.typ),
        publish,
        lambda: held_back(settings, blocks.status()),
        _pins(settings, blocks),
        topics.published_on,
        pace=pace,
        ledger=_ledger(settings, "gossipsub"),
        leadership=membership,
        notes=notes_of(settings.bridge_dir, "publisher"),
    )


def held_back(settings: Settings, ipfs: IpfsStatus) -> str | None:
    """Why no batch goes out now although there is an IPFS node, and what to set; None: batches go out."""
    if not settings.needs_neighbours or ipfs.gossip_peers or ipfs.connections:
        return None
    return (
        "nobody could fetch the blocks from Helia: no gossip peer speaks bitswap, and nobody is connected to Helia. "
        "Set ipfs.peers, or publish.enabled = true"
    )


def _announcer(
    settings: Settings, carrier: Carrier, blocks: Blocks, membership: Membership, token: trio.lowlevel.TrioToken
) -> Publisher:
    def announce(topic: str, data: bytes) -> int:
        try:
            return trio.from_thread.run(carrier.announce, topic, data, trio_token=token)
        except (trio.RunFinishedError, trio.Cancelled) as error:
            raise PublishError("the bridge is stopping") from error

    options = PublishingOptions(
        settings.network,
        micros(settings.publish.timeout),
        retry_every=_LOOK_AGAIN,
        batch_typ=settings.batch.typ,
        transport=TRANSPORT,
        target=carrier.target,
    )
    return Publisher(
        settings.kafka.server_list(),
        settings.broker.security_options(),
        settings.kafka.prefix,
        options,
        announce,
        lambda: carrier.stopped,
        _pins(settings, blocks),
        group=f"{settings.kafka.prefix}{TRANSPORT}.{settings.network}",
        ledger=_ledger(settings, TRANSPORT),
        leadership=membership,
        notes=notes_of(settings.bridge_dir, TRANSPORT),
    )


def _ledger(settings: Settings, transport: str) -> Ledger:
    return Ledger(settings.bridge_dir / f"handed-over-{transport}.sqlite")


def _fetcher(settings: Settings, blocks: Blocks, membership: Membership) -> Fetcher:
    file = _interests(settings)
    followed = settings.bep50.follow if settings.bep50.enabled else ()
    also = [separator_text(parse_source(text).separator) for text in followed]
    options = FetchingOptions(
        settings.network,
        at_most=settings.ipfs.at_most,
        timeout=micros(settings.ipfs.timeout),
        give_up=micros(settings.ipfs.give_up),
        forget=micros(settings.ipfs.forget),
        check_genesis=settings.receive.check_genesis,
        check_for=micros(settings.receive.check_for),
        implied_separator=settings.receive.implied_separator or None,
        authors=lambda: membership.authors,
    )
    return Fetcher(
        settings.kafka.server_list(),
        settings.broker.security_options(),
        settings.kafka.prefix,
        options,
        blocks,
        lambda: (*file.read(), *also),
        place_file=settings.bridge_dir / "fetcher.json",
        leadership=membership,
        notes=notes_of(settings.bridge_dir, "fetcher"),
    )
