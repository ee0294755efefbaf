"""`kiln bridge` alone: its metrics over HTTP, and its log as JSON."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from conftest import free_ports
from kiln.schemas.metrics import FAMILIES
from kit.awaiting import wait_until
from kit.bridge_alone import BridgeAlone
from kit.node_town import OPTIONS, TOPIC, Town, in_town

pytestmark = pytest.mark.network


def answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(url).status_code == 200
    return False


def test_a_bridge_alone_serves_what_it_knows_and_logs_who_came_and_went(tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    bridge = BridgeAlone(
        tmp_path / "state",
        command=(sys.executable, "-m", "kiln.deploy.cli", "bridge"),
        KILN_MONITOR__LISTEN=listen,
        KILN_LOG__FORMAT="json",
        KILN_LOG__LEVEL="info",
    )
    try:
        wait_until(lambda: answers(f"http://{listen}/metrics"), "the monitor listens")
        address = bridge.until(lambda status: bool(status.addresses), "the bridge listens").addresses[0]

        def is_heard() -> None:
            bridge.until(lambda status: status.frames_in > 0, "the visitor is heard")

        async def visit(town: Town) -> None:
            node = await town.node(replace(OPTIONS, bootstrap=(address,)))
            node.node.join(TOPIC)
            await town.bell.until(lambda: len(node.node.view().peers) == 1)
            await trio.to_thread.run_sync(is_heard)

        in_town(tmp_path, visit)
        bridge.until(lambda status: not status.peers, "the visitor has gone")
        text = httpx.get(f"http://{listen}/metrics").text
        families = {each.name: each for each in text_string_to_metric_families(text)}
        assert families.keys() <= FAMILIES.keys()
        assert families["kiln_bridge_up"].samples[0].value == 1
        assert families["kiln_bridge_frames"].samples[0].value > 0
        assert families["kiln_info"].samples[0].labels["mode"] == "bridge"
        assert httpx.get(f"http://{listen}/").status_code == 404
        assert httpx.get(f"http://{listen}/health").status_code == 200
        ready = httpx.get(f"http://{listen}/ready")
        assert ready.status_code == 503, "its broker is away"
        assert [reason.partition(":")[0] for reason in ready.json()["reasons"]] == ["the broker does not answer"]
    finally:
        code, said = bridge.stop()
    assert code == 0, said
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    events = [line["event"] for line in lines]
    assert events[0] == "bridge started"
    assert events[-1] == "bridge stopping"
    connected = next(line for line in lines if line["event"] == "peer connected")
    disconnected = next(line for line in lines if line["event"] == "peer disconnected")
    assert connected["peer"] == disconnected["peer"]
    assert disconnected["reason"] in ("stream closed by the peer", "connection closed", "stream reset by the peer")
