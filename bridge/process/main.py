"""The bridge process: gossipsub node, capture into Kafka, publisher. `kiln bridge` runs it, `kiln run` starts it.

Layout of its folder, STATE/bridge: `key` (identity, 0600), `seqno`, `spool/`, `interests.json`, `status.json`; of
BEP 50 `bep50.key` (the publisher's, 0600) and `bep50/`; `pins.sqlite` (blocks of ours that IPFS holds) and
`transition.json` (that its block height is reached).
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack

import trio

from bridge.bep50.carrier import CarrierError
from bridge.capture.spool import SinkError
from bridge.node.addresses import NodeError
from bridge.node.keys import KeyFileError
from bridge.node.seqno import SeqnoError
from bridge.process.interests import wanted_topics
from bridge.process.reporting import status_of
from bridge.process.wiring import Parts, wire
from bridge.status import write_status
from conf.errors import KilnError, PrerequisiteError
from conf.locks import locked
from conf.settings.model import Settings
from conf.settings.reading import load_settings
from schemas.topics import parse_interest, topic_name

_EVERY = 1.0  # s between two looks at interests and statuses


class BridgeError(PrerequisiteError):
    """The bridge cannot run; the text says why and what to do."""


def run(settings: Settings) -> None:
    """Runs the bridge until SIGTERM or SIGINT. BridgeError, StateInUseError."""
    with locked(settings.state, "bridge"):
        settings.bridge_dir.mkdir(parents=True, exist_ok=True)
        try:
            trio.run(_run, settings)
        except* (NodeError, KeyFileError, SeqnoError, SinkError, CarrierError) as failed:
            raise BridgeError(str(_first(failed))) from failed


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _run(settings: Settings) -> None:
    with ExitStack() as stack:
        logging.basicConfig(level=logging.ERROR)  # libp2p would, at the level of its own liking
        logging.getLogger("libp2p").setLevel(logging.CRITICAL)  # a peer that cannot be dialled is an error to libp2p
        logging.getLogger("kafka").setLevel(logging.CRITICAL)  # the status says once that the broker is away
        parts = wire(settings, stack, trio.lowlevel.current_trio_token())
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with trio.open_nursery() as nursery:
                await nursery.start(parts.node.run)
                if parts.carrier is not None:
                    await nursery.start(parts.carrier.run)
                if parts.discovery is not None:
                    nursery.start_soon(parts.discovery.run)
                nursery.start_soon(_look_after, parts, settings)
                for thread in parts.threads:
                    thread.start()
                async for _ in signals:
                    break
                for thread in parts.threads:
                    # in one more thread: a publisher waits for this one while it publishes
                    await trio.to_thread.run_sync(thread.stop)
                nursery.cancel_scope.cancel()


async def _look_after(parts: Parts, settings: Settings) -> None:
    """Once a second: puts the node on the topics of the interests, and writes the status."""
    path = settings.bridge_dir / "status.json"
    while True:
        view = parts.node.view()
        interests = parts.interests.read()
        _follow(parts, settings.network, interests, view.topics)
        write_status(path, status_of(parts, settings, view, interests, time.time()))
        await trio.sleep(_EVERY)


def _follow(parts: Parts, network: str, interests: Iterable[str], joined: Iterable[str]) -> None:
    """Joins and leaves topics, so that the node is on those of the interests."""
    seen = {topic for peer in parts.node.router.peers.values() for topic in peer.topics}
    wanted = wanted_topics(network, map(parse_interest, interests), seen)
    if not parts.publishing.hears_network():
        wanted.discard(topic_name(network, None))
    for topic in sorted(wanted.difference(joined)):
        parts.node.join(topic)
    for topic in sorted(set(joined) - wanted):
        parts.node.leave(topic)


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
