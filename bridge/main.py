"""The bridge process: gossipsub node, capture into Kafka, publisher. `kiln bridge` runs it, `kiln run` starts it.

Layout of its folder, STATE/bridge: `key` (identity, 0600), `seqno`, `spool/`, `interests.json`, `status.json`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from heapq import nlargest

import trio

from bridge.capture.spool import FrameSink, KafkaFrames, SinkError
from bridge.gossip.router import Options
from bridge.interests import InterestsFile, wanted_topics
from bridge.node.host import Node, NodeError, NodeOptions, NodeView, TopicSaving
from bridge.node.keys import KeyFileError, load_or_create
from bridge.node.seqno import Seqno, SeqnoError
from bridge.publisher import Options as Publishing
from bridge.publisher import Publisher, PublishError
from bridge.status import BridgeStatus, PeerStatus, PublisherStatus, SavingStatus, SpoolStatus, write_status
from conf import KilnError, PrerequisiteError
from conf.locks import held
from conf.settings import Settings, load_settings, micros
from schemas.topic_table import Bundles
from schemas.topics import parse_interest

_EVERY = 1.0  # s between two looks at interests and statuses
_PATIENCE = 4.0  # s that frames still on their way get at the end; what is left is in the spool
_MOST_SAVINGS = 50  # topics, and topics of each peer, whose savings are told


class BridgeError(PrerequisiteError):
    """The bridge cannot run; the text says why and what to do."""


def run(settings: Settings) -> None:
    """Runs the bridge until SIGTERM or SIGINT. BridgeError, StateInUseError."""
    with held(settings.state, "bridge"):
        settings.bridge_dir.mkdir(parents=True, exist_ok=True)
        try:
            trio.run(_run, settings)
        except* (NodeError, KeyFileError, SeqnoError, SinkError) as failed:
            raise BridgeError(str(_first(failed))) from failed


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _run(settings: Settings) -> None:
    with ExitStack() as stack:
        logging.basicConfig(level=logging.ERROR)  # libp2p would, at the level of its own liking
        logging.getLogger("kafka").setLevel(logging.CRITICAL)  # that the broker is away is said once, in the status
        bridge = _Bridge(settings, stack)
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with trio.open_nursery() as nursery:
                await nursery.start(bridge.node.run)
                nursery.start_soon(bridge.look_after)
                publisher = bridge.start_publisher(trio.lowlevel.current_trio_token())
                async for _ in signals:
                    break
                if publisher is not None:  # in a thread, as it waits for this one while it publishes
                    await trio.to_thread.run_sync(publisher.stop)
                nursery.cancel_scope.cancel()


class _Bridge:
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
            gossip=Options(policy=settings.policy.of(settings.network)),
            bundles=Bundles(settings.topic_table.bundles),
            send_indices=settings.topic_table.send,
            agent="kiln/0.1.0",
        )
        self.node = Node(options, load_or_create(folder / "key"), seqno, self._sink)
        self._publisher: Publisher | None = None

    def start_publisher(self, token: trio.lowlevel.TrioToken) -> Publisher | None:
        """Its thread hands messages to the node in this one. None where nothing is to be published."""
        settings = self._settings
        if not settings.publish.enabled:
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
            Publishing(settings.network, micros(settings.publish.timeout), batch_typ=settings.batch.typ),
            publish,
            lambda: None,
        )
        self._publisher.start()
        return self._publisher

    async def look_after(self) -> None:
        """Follows the interests and says how it goes, once a second."""
        path = self._settings.bridge_dir / "status.json"
        while True:
            view = self.node.view()
            interests = self._interests.read()
            seen = {topic for peer in self.node.router.peers.values() for topic in peer.topics}
            wanted = wanted_topics(self._settings.network, map(parse_interest, interests), seen)
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
        publisher = PublisherStatus("off: publish.enabled is false")
        if self._publisher is not None:
            publisher = PublisherStatus(self._publisher.state, self._publisher.published, self._publisher.failed)
            errors += [self._publisher.error] if self._publisher.error else []
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
        )


def _savings(savings: Iterable[TopicSaving]) -> tuple[SavingStatus, ...]:
    """Those of most use, so that the status stays small with many peers on many topics."""
    most = nlargest(_MOST_SAVINGS, savings, key=lambda each: each.as_names - each.as_indices)
    return tuple(
        SavingStatus(each.topic, each.direction, each.references, each.as_names, each.as_indices) for each in most
    )


@contextmanager
def _sink(settings: Settings) -> Iterator[FrameSink]:
    kafka = settings.kafka
    sink = FrameSink(
        lambda: KafkaFrames(kafka.server_list(), kafka.security_options()),
        kafka.topic("frames"),
        settings.bridge_dir / "spool",
        settings.bridge.spool_bytes,
        settings.bridge.memory_bytes,
    )
    try:
        yield sink
    finally:
        sink.close(_PATIENCE)


def main() -> int:
    """Settings from file and environment, as everywhere. The exit status."""
    try:
        run(load_settings())
    except KilnError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
