"""The bridge process: gossipsub node, capture into Kafka, publisher and fetcher. `kiln bridge` and `kiln run` start it.

Its folder STATE/bridge contains:

- `key`: the private key of the node, mode 0600
- `seqno`: the sequence numbers of published messages
- `spool/`: frames that Kafka has not acknowledged
- `interests.json`, `status.json`
- `transition.json`: the time at which the chain reached `transition.height`
- `bep50.key`, `bep50/`: the key of our announcements over BEP 50, mode 0600, and the state of the overlay
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress

import trio

from kiln.bridge.app.interests import TopicRule, build_topic_rule
from kiln.bridge.app.neighbours import select_bitswap_peers
from kiln.bridge.app.reporting import build_status
from kiln.bridge.app.wiring import BridgeComponents
from kiln.bridge.bep50.carrier import CarrierError
from kiln.bridge.capture.spool import SpoolError
from kiln.bridge.gossipsub.effects import PeerView
from kiln.bridge.libp2p.addresses import NodeError
from kiln.bridge.libp2p.keys import KeyFileError
from kiln.bridge.libp2p.seqno import SeqnoError
from kiln.conf.process.bridge_status import write_status
from kiln.conf.process.errors import KilnError, PrerequisiteError
from kiln.conf.process.files import ensure_password
from kiln.conf.process.logs import Level, ProblemLog, configure_logs, log_event
from kiln.conf.process.state_folder import lock_state
from kiln.conf.settings.model import Settings
from kiln.conf.settings.reading import load_settings
from kiln.schemas.printable import printable_lines
from kiln.schemas.wire.identity import peer_text

_LOG = logging.getLogger("kiln.bridge.app")
_UPDATE_INTERVAL = 1.0  # s


class BridgeError(PrerequisiteError):
    """The bridge cannot run. The message gives the reason and the remedy."""


def run(settings: Settings) -> None:
    """Run the bridge until SIGTERM or SIGINT. On SIGUSR1 it stops capturing frames, but continues to publish.

    Raises:
        BridgeError, StateInUseError: The bridge cannot run.
        FramesLostError: Frames were lost when the bridge ended.
    """
    with lock_state(settings.state, "bridge"):
        settings.bridge_dir.mkdir(parents=True, exist_ok=True)
        if settings.kafka.embedded:
            ensure_password(settings.broker_dir)  # the broker may start later
        try:
            trio.run(_run, settings)
        except* (NodeError, KeyFileError, SeqnoError, SpoolError, CarrierError) as group:
            raise BridgeError(str(_first_error(group))) from group


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _run(settings: Settings) -> None:
    with ExitStack() as stack:
        # libp2p logs each failed dial as an error; the status reports once that the broker is unavailable
        levels: dict[str, Level] = {"libp2p": "critical", "kafka": "critical"}
        configure_logs(settings.log.format, settings.log.level, levels | settings.log.levels)
        parts = BridgeComponents(settings, stack, trio.lowlevel.current_trio_token())
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) as signals:
            async with trio.open_nursery() as nursery:
                await nursery.start(parts.node.run)
                if parts.carrier is not None:
                    await nursery.start(parts.carrier.run)
                if parts.discovery is not None:
                    nursery.start_soon(parts.discovery.run)
                if parts.exchange is not None:
                    await nursery.start(parts.exchange.run)
                nursery.start_soon(_update_every_second, parts, settings)
                for thread in parts.threads:
                    thread.start()
                async for number in signals:
                    if number != signal.SIGUSR1:
                        break
                    log_event(_LOG, "capture stopped by SIGUSR1")
                    parts.sink.end_input()
                log_event(_LOG, "bridge stopping")
                for thread in parts.threads:
                    # in another thread, since a publisher waits for the trio thread while it publishes
                    await trio.to_thread.run_sync(thread.stop)
                nursery.cancel_scope.cancel()


async def _update_every_second(parts: BridgeComponents, settings: Settings) -> None:
    """Update topics, IPFS neighbours and the status file every second."""
    path = settings.bridge_dir / "status.json"
    problems = ProblemLog(_LOG)
    log_event(_LOG, "bridge started", peer=peer_text(parts.node.peer), network=settings.network.name)
    while True:
        view = parts.node.view()
        interests = parts.interests.read()
        peers = parts.node.router.peers
        parts.membership.update(interests, leads=parts.fetcher is not None and parts.fetcher.leads)
        parts.shares.set_bridges(parts.membership.bridges)
        rule = build_topic_rule(settings.network.name, interests, is_ceramic=settings.is_ceramic)
        await _update_topics(parts, rule, peers, view.topics)
        if parts.kubo is not None:
            parts.kubo.connect_gossip_peers(select_bitswap_peers(parts.node, peers))
        status = build_status(parts, settings, view, interests, time.time())
        problems.see(status.errors)
        with suppress(OSError):  # the bridge continues; readers see that the status is old
            write_status(path, status)
        await trio.sleep(_UPDATE_INTERVAL)


async def _update_topics(
    parts: BridgeComponents, rule: TopicRule, peers: Mapping[bytes, PeerView], joined: Collection[str]
) -> None:
    """Join and leave topics to match the interests. Other tasks run in between, as there may be thousands of topics."""
    selected = parts.topic_selector.select(rule, peers, joined)
    if not parts.publishing.joins_network_topic():
        selected.difference_update(rule.shared)
    for topic in sorted(selected.difference(joined)):
        parts.node.join(topic)
        await trio.lowlevel.checkpoint()
    for topic in sorted(set(joined) - selected):
        parts.node.leave(topic)
        await trio.lowlevel.checkpoint()


def main() -> int:
    """Run the bridge with the settings from file and environment, and return the exit status."""
    try:
        run(load_settings())
    except KilnError as error:
        print(printable_lines(str(error)), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
