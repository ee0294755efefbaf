"""Bridge of a run, and the demo network if the run uses one."""

from __future__ import annotations

import time
from typing import Literal

from kiln.conf.process.bridge_status import BridgeStatus
from kiln.conf.settings.model import Settings
from kiln.deploy.demo.process import DemoNetwork
from kiln.deploy.ops.snapshot import BridgeInRun
from kiln.deploy.stack.child_process import BridgeProcess

_LAST_TRAFFIC = 1.0  # longest time in seconds that a message takes from the demo network to the bridge

Source = Literal["demo", "network", "none"]
"""Source of frames: a demo network on this machine; the network of `bridge.bootstrap`; or none, if the run
reads only records that are in Kafka."""


class LiveNetwork:
    """Starts, supervises and stops the bridge and the demo network of a run.

    Call `launch`, then `start` once the broker answers, then `check` often. At the end call `mute` and `stop`. If the
    queries are to read all captured frames first, call `end_input` before `mute`.
    """

    def __init__(self, settings: Settings, source: Source) -> None:
        self._settings = settings
        self._demo = DemoNetwork(settings) if source == "demo" else None
        self._bridge: BridgeProcess | None = None
        self._addresses: tuple[str, ...] = ()  # of the demo network, as the bridge knows them
        self.source = source
        self._traffic_started = False
        self._input_ends_at: float | None = None
        self._input_ended_at: float | None = None
        self.status: BridgeStatus | None = None
        """newest status of the bridge; `None` if the bridge does not report one"""

    def launch(self) -> None:
        """Start the demo network, which needs no broker, and return at once."""
        if self._demo is not None:
            self._demo.launch()

    def start(self) -> None:
        """Start the bridge, with the addresses of the demo network if there is one.

        Raises:
            PrerequisiteError: The demo network has not started.
        """
        if self.source == "none":
            return
        settings = self._settings
        if self._demo is not None:
            self._addresses = self._demo.addresses()
            settings = build_demo_settings(settings, self._addresses, self._demo.contacts, self._demo.follow)
        self._bridge = BridgeProcess(settings)
        self._bridge.start()
        self._traffic_started = False

    def check(self) -> None:
        """Restart processes that have ended. Start the demo network's traffic once the bridge has peers."""
        if self._bridge is None:
            return
        if self._input_ends_at is not None:  # from here on, no process is restarted
            self._check_input(time.time())
            return
        if self._demo is not None:
            self._demo.check()
            if self._demo.listens and self._demo.addresses() != self._addresses:
                self._bridge.stop()  # this bridge would dial the addresses of the previous network
                self.start()
        self._bridge.check()
        self.status = self._bridge.status(time.time())
        if self._demo is not None and not self._traffic_started and self.status is not None and self.status.peers:
            self._demo.go()
            self._traffic_started = True

    @property
    def state(self) -> BridgeInRun | None:
        """State of bridge and demo network; `None` if this run has no bridge."""
        if self.source == "none":
            return None
        if self._demo is None:
            return BridgeInRun(self.status)
        return BridgeInRun(self.status, self._demo.received, self._demo.fetched)

    @property
    def errors(self) -> tuple[str, ...]:
        """Current errors of the bridge and the demo network."""
        bridge = (self._bridge.error,) if self._bridge is not None and self._bridge.error else ()
        return (*bridge, *(self.status.errors if self.status else ()), *(self._demo.errors if self._demo else ()))

    def end_input(self) -> None:
        """Stop the traffic of the demo network, and let the bridge stop capturing a second later.

        In this second, the last messages of the demo network arrive. The bridge keeps publishing.
        """
        self.mute()
        self._input_ends_at = time.time() + (_LAST_TRAFFIC if self._demo is not None else 0.0)

    @property
    def has_ended_input(self) -> bool:
        """True if this run's bridge has stopped capturing, and all its frames are in Kafka."""
        if self._bridge is None:
            return True
        if self._input_ended_at is None:
            return False
        return self.status is None or (self.status.at > self._input_ended_at and not self.status.spool.waiting)

    def _check_input(self, now: float) -> None:
        assert self._bridge is not None
        if self._input_ended_at is None and self._input_ends_at is not None and now >= self._input_ends_at:
            self._bridge.end_capture()
            self._input_ended_at = time.time()
        self.status = self._bridge.status(now)

    def mute(self) -> None:
        """Stop the traffic of the demo network. Its nodes still receive batches."""
        if self._demo is not None:
            self._demo.mute()

    def stop(self) -> None:
        """End the demo network first, then the bridge, so that the bridge receives all traffic."""
        if self._demo is not None:
            self._demo.stop()
        if self._bridge is not None:
            self._bridge.stop()


def build_demo_settings(
    settings: Settings, addresses: tuple[str, ...], contacts: tuple[str, ...], follow: tuple[str, ...]
) -> Settings:
    """Build the settings of a bridge that joins the demo network, and publishes there whatever the settings are.

    Args:
        settings: Settings of the run.
        addresses: Multiaddrs of the demo network's libp2p nodes.
        contacts: Addresses of its BEP 50 nodes.
        follow: Sources that the first BEP 50 node announces, in the form of `bep50.follow`.
    """
    return settings.model_copy(
        update={
            "bridge": settings.bridge.model_copy(update={"bootstrap": addresses}),
            "discovery": settings.discovery.model_copy(update={"enabled": False}),  # the demo nodes have no DHT
            "publish": settings.publish.model_copy(update={"enabled": True}),
            "ipfs": settings.ipfs.model_copy(update={"fetch": settings.fetches}),
            "bep50": settings.bep50.model_copy(
                update={
                    "enabled": True,
                    "listen": ("127.0.0.1:0",),
                    "contacts": contacts,
                    "follow": follow,
                    "publish": True,
                }
            ),
        }
    )
