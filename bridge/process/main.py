"""The bridge process: gossipsub node, capture into Kafka, publisher. `kiln bridge` runs it, `kiln run` starts it.

Layout of its folder, STATE/bridge: `key` (identity, 0600), `seqno`, `spool/`, `interests.json`, `status.json`; of
BEP 50 `bep50.key` (the publisher's, 0600) and `bep50/`; `pins.sqlite` (blocks of ours that IPFS holds) and
`transition.json` (that its block height is reached).
"""

from __future__ import annotations

import logging
import signal
import sys
from contextlib import ExitStack

import trio

from bridge.bep50.carrier import CarrierError
from bridge.capture.spool import SinkError
from bridge.fetching.fetcher import Fetcher
from bridge.node.addresses import NodeError
from bridge.node.keys import KeyFileError
from bridge.node.seqno import SeqnoError
from bridge.process.wiring import Bridge
from bridge.publishing.publisher import Publisher
from conf.errors import KilnError, PrerequisiteError
from conf.locks import locked
from conf.settings.model import Settings
from conf.settings.reading import load_settings


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
        logging.getLogger("libp2p").setLevel(logging.CRITICAL)  # a peer that cannot be dialled is an error to it
        logging.getLogger("kafka").setLevel(logging.CRITICAL)  # that the broker is away is said once, in the status
        bridge = Bridge(settings, stack)
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with trio.open_nursery() as nursery:
                await nursery.start(bridge.node.run)
                if bridge.carrier is not None:
                    await nursery.start(bridge.carrier.run)
                if bridge.discovery is not None:
                    nursery.start_soon(bridge.discovery.run)
                nursery.start_soon(bridge.look_after)
                token = trio.lowlevel.current_trio_token()
                threads: list[Publisher | Fetcher | None]
                threads = [bridge.start_publisher(token), bridge.start_announcer(token), bridge.start_fetcher()]
                async for _ in signals:
                    break
                for thread in threads:
                    if thread is not None:  # in one more thread, as they wait for this one while they publish
                        await trio.to_thread.run_sync(thread.stop)
                nursery.cancel_scope.cancel()


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
