"""The parts of one bridge, made from the settings and wired up."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from heapq import nlargest

import trio

from bridge.bep50.carrier import TRANSPORT, Carrier, CarrierOptions, publisher_key
from bridge.capture.spool import FrameSink
from bridge.fetching.fetcher import Fetcher
from bridge.fetching.pending import FetchingOptions
from bridge.gossip.options import RouterOptions
from bridge.ipfs import Blocks, open_blocks
from bridge.kafka.producers import StoppableKafkaProducer
from bridge.kafka.quarantine import Quarantine
from bridge.node.discovery import Discovery, DiscoveryOptions
from bridge.node.host import Node
from bridge.node.keys import load_or_create
from bridge.node.options import NodeOptions
from bridge.node.seqno import Seqno, SeqnoError
from bridge.node.view import NodeView, TopicSaving
from bridge.process.interests import InterestsFile, wanted_topics
from bridge.publishing.outbox import PublishError, PublishingOptions
from bridge.publishing.pins import Pins
from bridge.publishing.publisher import Publisher
from bridge.publishing.transition import HeightWatch, Topics, Transition
from bridge.status import (
    BridgeStatus,
    FetcherStatus,
    PeerStatus,
    PublisherStatus,
    SavingStatus,
    SpoolStatus,
    write_status,
)
from conf.settings.durations import micros
from conf.settings.model import Settings
from schemas.dht.announcement import parse_source
from schemas.topic_table import Bundles
from schemas.topics import parse_interest, separator_text, topic_name

_EVERY = 1.0  # s between two looks at interests and statuses


_PATIENCE = 4.0  # s that frames still on their way get at the end; what is left is in the spool


_LOOK_AGAIN = 100_000  # µs between looks whether others have what was announced: it is sent first, acknowledged later


_MOST_SAVINGS = 50  # topics, and topics of each peer, whose savings are told


class Bridge:
    """The parts of one bridge, wired up; `stack` takes them down again, the newest first."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        folder = settings.bridge_dir
        self._settings = settings
        self._interests = InterestsFile(folder / "interests.json", settings.bridge.interests)
        self._sink = stack.enter_context(_sink(settings))
        seqno = stack.enter_context(Seqno(folder / "seqno", time.time_ns))
        options = NodeOptions(
            network=settings.network,
            listen=settings.bridge.listen,
            bootstrap=settings.bridge.bootstrap,
            gossip=RouterOptions(policy=settings.policy.of(settings.network)),
            bundles=Bundles(settings.topic_table.bundles),
            send_indices=settings.topic_table.send,
            agent="kiln/0.1.0",
        )
        self.node = Node(options, load_or_create(folder / "key"), seqno, self._sink)
        self.discovery = _discovery(settings, self.node, options.gossip.D) if settings.discovery.enabled else None
        self._publisher: Publisher | None = None
        self._quarantine = _quarantine(settings)
        self._quarantine.start()
        stack.callback(self._quarantine.stop)
        self.carrier = _carrier(settings, self._sink, self._quarantine) if settings.bep50.enabled else None
        self._announcer: Publisher | None = None
        self._blocks = stack.enter_context(_blocks(settings))
        self._fetcher: Fetcher | None = None
        self._transition = _transition(settings)
        self._height = _height(settings) if settings.transition.height else None
        if self._height is not None:
            self._height.start()
            stack.callback(self._height.stop)

    def start_publisher(self, token: trio.lowlevel.TrioToken) -> Publisher | None:
        """Its thread hands messages to the node in this one. None where nothing is to be published."""
        settings = self._settings
        if not settings.publishes:
            return None

        def publish(topic: str, data: bytes) -> int:
            try:
                return trio.from_thread.run_sync(self.node.publish, topic, data, trio_token=token)
            except (trio.RunFinishedError, SeqnoError) as error:
                raise PublishError(str(error) or "the bridge is stopping") from error

        self._publisher = Publisher(
            settings.kafka.server_list(),
            settings.kafka.security_options(),
            settings.kafka.prefix,
            PublishingOptions(settings.network, micros(settings.publish.timeout), batch_typ=settings.batch.typ),
            publish,
            lambda: None,
            self._pins(),
            self._published_on,
        )
        self._publisher.start()
        return self._publisher

    def start_announcer(self, token: trio.lowlevel.TrioToken) -> Publisher | None:
        """As `start_publisher`, for BEP 50. An outbox of its own: what one transport waits for is not the other's."""
        settings, carrier = self._settings, self.carrier
        if carrier is None or not settings.announces:
            return None

        def announce(topic: str, data: bytes) -> int:
            try:
                return trio.from_thread.run(carrier.announce, topic, data, trio_token=token)
            except (trio.RunFinishedError, trio.Cancelled) as error:
                raise PublishError("the bridge is stopping") from error

        timeout, typ = micros(settings.publish.timeout), settings.batch.typ
        self._announcer = Publisher(
            settings.kafka.server_list(),
            settings.kafka.security_options(),
            settings.kafka.prefix,
            PublishingOptions(
                settings.network,
                timeout,
                retry_every=_LOOK_AGAIN,
                batch_typ=typ,
                transport=TRANSPORT,
                target=carrier.target,
            ),
            announce,
            lambda: carrier.stopped,
            self._pins(),
            group=f"{settings.kafka.prefix}{TRANSPORT}.{settings.network}",
        )
        self._announcer.start()
        return self._announcer

    def _pins(self) -> Pins:
        settings = self._settings
        return Pins(self._blocks, settings.bridge_dir / "pins.sqlite", micros(settings.ipfs.pin_for))

    def _published_on(self) -> Topics:
        return self._transition.published_on(time.time_ns() // 1_000, self._reached_at())

    def _reached_at(self) -> int | None:
        """When the transition's height was, µs; None: not yet, or there is none."""
        return None if self._height is None else self._height.reached_at

    def start_fetcher(self) -> Fetcher | None:
        """None where there is no IPFS node to ask."""
        settings = self._settings
        if not settings.ipfs.api:
            return None
        file = InterestsFile(settings.bridge_dir / "interests.json", settings.bridge.interests)
        followed = settings.bep50.follow if settings.bep50.enabled else ()
        also = [separator_text(parse_source(text).separator) for text in followed]
        self._fetcher = Fetcher(
            settings.kafka.server_list(),
            settings.kafka.security_options(),
            settings.kafka.prefix,
            FetchingOptions(
                settings.network,
                at_most=settings.ipfs.at_most,
                timeout=micros(settings.ipfs.timeout),
                give_up=micros(settings.ipfs.give_up),
                forget=micros(settings.ipfs.forget),
                check_genesis=settings.receive.check_genesis,
                check_for=micros(settings.receive.check_for),
                implied_separator=settings.receive.implied_separator or None,
            ),
            self._blocks,
            lambda: (*file.read(), *also),
        )
        self._fetcher.start()
        return self._fetcher

    async def look_after(self) -> None:
        """Follows the interests and says how it goes, once a second."""
        path = self._settings.bridge_dir / "status.json"
        while True:
            view = self.node.view()
            interests = self._interests.read()
            seen = {topic for peer in self.node.router.peers.values() for topic in peer.topics}
            wanted = wanted_topics(self._settings.network, map(parse_interest, interests), seen)
            if not self._transition.hears_network(time.time_ns() // 1_000, self._reached_at()):
                wanted.discard(topic_name(self._settings.network, None))
            for topic in sorted(wanted - set(view.topics)):
                self.node.join(topic)
            for topic in sorted(set(view.topics) - wanted):
                self.node.leave(topic)
            write_status(path, self._status(view, interests))
            await trio.sleep(_EVERY)

    def _status(self, view: NodeView, interests: tuple[str, ...]) -> BridgeStatus:
        spool = self._sink.status()
        errors = [f"{each.addresses[0]}: {each.error}" for each in view.bootstrap if each.error and not each.connected]
        errors += [text for text in (spool.error, self._interests.error) if text]
        if self._height is not None and self._height.error is not None:
            errors.append(self._height.error)
        off = "publish.enabled is false" if self._settings.publish.enabled is False else "ipfs.api is empty"
        publisher = PublisherStatus(f"off: {off}")
        if self._publisher is not None:
            publisher = PublisherStatus(self._publisher.state, self._publisher.published, self._publisher.failed)
            errors += [self._publisher.error] if self._publisher.error else []
        fetcher = FetcherStatus("off: ipfs.api is empty")
        if (fetching := self._fetcher) is not None:
            fetcher = FetcherStatus(fetching.state, fetching.waiting, fetching.under_way, dict(fetching.counts))
            errors += [fetching.error] if fetching.error else []
        overlay = None
        if self.carrier is not None:
            off = "bep50.publish is false" if self._settings.bep50.publish is False else "ipfs.api is empty"
            announcer = PublisherStatus(f"off: {off}")
            if self._announcer is not None:
                announcer = PublisherStatus(self._announcer.state, self._announcer.published, self._announcer.failed)
                errors += [f"{TRANSPORT}: {self._announcer.error}"] if self._announcer.error else []
            overlay = self.carrier.status(announcer)
            errors += self.carrier.errors
            errors += [f"{TRANSPORT}: {self._quarantine.error}"] if self._quarantine.error else []
        return BridgeStatus(
            at=time.time(),
            pid=os.getpid(),
            peer=view.peer,
            network=self._settings.network,
            addresses=view.addresses,
            interests=interests,
            topics=view.topics,
            mesh={topic: len(peers) for topic, peers in view.mesh.items()},
            peers=tuple(
                PeerStatus(
                    each.peer,
                    each.agent,
                    each.protocol,
                    each.address,
                    each.outbound,
                    each.score,
                    each.frames_in,
                    each.frames_out,
                    each.dropped,
                    _savings(each.savings),
                )
                for each in view.peers
            ),
            frames_in=view.frames_in,
            frames_out=view.frames_out,
            bytes_in=view.bytes_in,
            bytes_out=view.bytes_out,
            spool=SpoolStatus(
                spool.put, spool.acknowledged, spool.memory_bytes, spool.spooled_bytes, spool.full, spool.error
            ),
            publisher=publisher,
            counters=dict(view.counters),
            savings=_savings(view.savings),
            errors=tuple(errors),
            bep50=overlay,
            fetcher=fetcher,
            ipfs=self._blocks.about(),
            transition=self._transition.in_words(time.time_ns() // 1_000, self._reached_at()),
        )


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


def _discovery(settings: Settings, node: Node, mesh: int) -> Discovery:
    told = settings.discovery
    options = DiscoveryOptions(
        prefix=told.prefix,
        serve=told.serve,
        announce=told.announce,
        renew=told.renew.total_seconds(),
        every=told.every.total_seconds(),
    )
    return Discovery(node, options, random.Random(), mesh)


def _savings(savings: Iterable[TopicSaving]) -> tuple[SavingStatus, ...]:
    """Those of most use, so that the status stays small with many peers on many topics."""
    most = nlargest(_MOST_SAVINGS, savings, key=lambda each: each.as_names - each.as_indices)
    return tuple(
        SavingStatus(each.topic, each.direction, each.references, each.as_names, each.as_indices) for each in most
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


def _transition(settings: Settings) -> Transition:
    told = settings.transition
    return Transition(told.mode, told.at_us, told.height or None, micros(told.phase_out))


def _height(settings: Settings) -> HeightWatch:
    told, path = settings.transition, settings.bridge_dir / "transition.json"
    return HeightWatch(told.rpc_url.get_secret_value(), told.height, path, lambda: time.time_ns() // 1_000)


def _quarantine(settings: Settings) -> Quarantine:
    kafka = settings.kafka
    return Quarantine(
        lambda: StoppableKafkaProducer(kafka.server_list(), kafka.security_options()), kafka.topic("quarantine")
    )


@contextmanager
def _sink(settings: Settings) -> Iterator[FrameSink]:
    kafka = settings.kafka
    sink = FrameSink(
        lambda: StoppableKafkaProducer(kafka.server_list(), kafka.security_options()),
        kafka.topic("frames"),
        settings.bridge_dir / "spool",
        settings.bridge.spool_bytes,
        settings.bridge.memory_bytes,
    )
    try:
        yield sink
    finally:
        sink.close(_PATIENCE)
