"""SIGKILL to the demo network: the network of a run reports that, starts again, and the bridge joins the new one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kiln.conf.process.state_folder import claim_state_folder
from kiln.deploy.run.network import LiveNetwork
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kit.awaiting import wait_until
from kit.log_feed import kiln_beside

pytestmark = [pytest.mark.kafka, pytest.mark.network, pytest.mark.crash, pytest.mark.timeout(600)]


def test_a_killed_demo_network_comes_back(broker: EmbeddedBroker, prefix: str, tmp_path: Path) -> None:
    listen = {"KILN_BRIDGE__LISTEN": "/ip4/127.0.0.1/tcp/0"}
    settings = kiln_beside(broker.address, prefix, tmp_path / "state", listen).settings()
    claim_state_folder(settings.state)
    live = LiveNetwork(settings, "demo")

    def describe() -> str:
        return f"{live.errors}\n{live.status}"

    def flows(*not_of: int) -> bool:
        live.check()
        status = live.status
        return status is not None and status.pid not in not_of and len(status.peers) > 1 and status.frames_in > 50

    def is_reported() -> bool:
        live.check()
        return any("the demo network exited with code -9" in error for error in live.errors)

    try:
        live.launch()
        live.start()
        wait_until(flows, describe, 120)
        assert live.status is not None
        before = live.status.pid
        os.kill(int((settings.state / "demo" / "locks" / "network").read_text()), signal.SIGKILL)
        wait_until(is_reported, describe)
        wait_until(lambda: flows(before), describe, 120)  # the bridge dials where the new one listens
    finally:
        live.stop()
