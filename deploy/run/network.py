"""The network side of a run: the bridge, and the demo network where there is no other."""

from __future__ import annotations

import time
from typing import Literal

from kiln.conf.process.bridge_status import BridgeStatus
from kiln.conf.settings.model import Settings
from kiln.deploy.demo.process import DemoNetwork
from kiln.deploy.ops.snapshot import BridgeInRun
from kiln.deploy.stack.bridge_process import BridgeProcess

Source = Literal["demo", "network", "none"]
"""Where frames come from: a network made on this machine, the network of `bridge.bootstrap`, or Kafka alone."""


class LiveNetwork:
    """`launch()`, `start()` once the broker is there, `check()` now and then, `mute()`, `stop()`."""

    def __init__(self, settings: Settings, source: Source) -> None:
        self._settings = settings
        self._demo = DemoNetwork(settings) if source == "demo" else None
        self._bridge: BridgeProcess | None = None
        self._addresses: tuple[str, ...] = ()  # of the demo network, as the bridge knows them
        self.source = source
        self._going = False
        self.status: BridgeStatus | None = None
        """What the bridge said last. None: nothing yet, or nothing for long."""

    def launch(self) -> None:
        """Starts what needs no broker, and returns at once."""
        if self._demo is not None:
            self._demo.launch()

    def start(self) -> None:
        """Starts the bridge. DemoNetworkError."""
        if self.source == "none":
            return
        settings = self._settings
        if self._demo is not None:
            self._addresses = self._demo.addresses()
            settings = build_demo_settings(settings, self._addresses, self._demo.contacts, self._demo.follow)
        self._bridge = BridgeProcess(settings)
        self._bridge.start()
        self._going = False

    def check(self) -> None:
        """Starts again what has died. Lets the demo network speak once the bridge listens."""
        if self._bridge is None:
            return
        if self._demo is not None:
            self._demo.check()
            if self._demo.listens and self._demo.addresses() != self._addresses:
                self._bridge.stop()  # the bridge dials where the dead network listened
                self.start()
        self._bridge.check()
        self.status = self._bridge.status(time.time())
        if self._demo is not None and not self._going and self.status is not None and self.status.peers:
            self._demo.go()
            self._going = True

    @property
    def seen(self) -> BridgeInRun | None:
        """What bridge and demo network told last; None: this run has no bridge."""
        if self.source == "none":
            return None
        return BridgeInRun(self.status, self._demo.heard if self._demo is not None else {})

    @property
    def errors(self) -> tuple[str, ...]:
        """In words."""
        bridge = (self._bridge.error,) if self._bridge is not None and self._bridge.error else ()
        return (*bridge, *(self.status.errors if self.status else ()), *(self._demo.errors if self._demo else ()))

    def mute(self) -> None:
        """Silences the demo network, which still listens."""
        if self._demo is not None:
            self._demo.mute()

    def stop(self) -> None:
        """Ends the demo network first, so that the bridge hears the network to its end, and then the bridge."""
        if self._demo is not None:
            self._demo.stop()
        if self._bridge is not None:
            self._bridge.stop()


def build_demo_settings(
    settings: Settings, addresses: tuple[str, ...], contacts: tuple[str, ...], follow: tuple[str, ...]
) -> Settings:
    """The settings of a bridge on the demo network, where the bridge publishes, since nobody else is there.

    `contacts`, `follow`: where the network's nodes of BEP 50 listen, and what they announce.
    """
    return settings.model_copy(
        update={
            "bridge": settings.bridge.model_copy(update={"bootstrap": addresses}),
            "discovery": settings.discovery.model_copy(update={"enabled": False}),  # its nodes have no DHT
            "publish": settings.publish.model_copy(update={"enabled": True}),
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
