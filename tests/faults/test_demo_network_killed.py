"""SIGKILL to the demo network: `kiln run` says so, starts it again, and listens to the new one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from conftest import free_ports
from kiln.conf.process.bridge_status import BridgeStatus, read_status
from kiln.deploy.stack.embedded_broker import stop_running
from kit.awaiting import wait_until
from kit.kiln_process import Kiln, kill_all

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.network, pytest.mark.crash, pytest.mark.timeout(600)]


def test_a_killed_demo_network_comes_back(broker_classpath: list[Path], tmp_path: Path) -> None:
    settings = {"KILN_BRIDGE__LISTEN": "/ip4/127.0.0.1/tcp/0", "KILN_JOBS__QUERIES": "updates"}
    kiln = Kiln(tmp_path / "state", free_ports(2), settings)
    process = kiln.start("run")

    def said() -> str:
        return (kiln.state / "started.out").read_text()

    def status() -> BridgeStatus | None:
        return read_status(kiln.state / "bridge" / "status.json")

    def flows(*not_of: int) -> bool:
        assert process.poll() is None, said()
        told = status()
        return told is not None and told.pid not in not_of and len(told.peers) > 1 and told.frames_in > 50

    try:
        wait_until(flows, said, 120)
        before = status()
        assert before is not None
        os.kill(int((kiln.state / "demo" / "locks" / "network").read_text()), signal.SIGKILL)
        wait_until(lambda: flows(before.pid), said, 120)  # the bridge dials where the new one listens
        wait_until(lambda: "the demo network exited with code -9" in said(), said)
        process.terminate()
        assert process.wait(timeout=90) == 0, said()
    finally:
        if process.poll() is None:
            kill_all(process)
        stop_running(kiln.state)
