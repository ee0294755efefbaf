"""What indices saved: from the node's view to the status file and `kiln status`."""

from __future__ import annotations

import json
import socket
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

from rich.console import Console

from kiln.bridge.app.reporting import select_largest
from kiln.conf.process.bridge_status import (
    BridgeStatus,
    PeerStatus,
    PublisherStatus,
    SavingStatus,
    SpoolStatus,
    write_status,
)
from kiln.conf.settings.model import Kafka, Settings
from kiln.deploy.cli.status import encode_status, render_status
from kiln.deploy.ops.status import WireSavings, read_status

CLAY = "/ceramic/testnet-clay"


def settings(folder: Path) -> Settings:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Settings(state=folder, kafka=Kafka(embedded_port=probe.getsockname()[1]))


def said(folder: Path, *savings: SavingStatus) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    peer = PeerStatus("12D3peer", "kiln/0.1.0", "/meshsub/1.3.0", "", True, 0.0, 0, 0, 0, savings)
    status = BridgeStatus(
        at=1_700_000_000.0,
        pid=1,
        peer="12D3own",
        network="testnet-clay",
        addresses=(),
        interests=(),
        topics=(),
        mesh={},
        peers=(peer,),
        frames_in=0,
        frames_out=0,
        bytes_in=0,
        bytes_out=0,
        spool=SpoolStatus(0, 0, 0, 0, False),
        publisher=PublisherStatus("off"),
        counters={},
        savings=savings,
    )
    write_status(folder / "status.json", status)


def test_kiln_status_tells_by_topic_and_by_peer(tmp_path: Path) -> None:
    kiln = settings(tmp_path)
    said(
        kiln.bridge_dir,
        SavingStatus(CLAY, "received", 1000, 23_000, 2_000),
        SavingStatus("/ceramic/mainnet", "received", 10, 180, 20),
    )
    status = read_status(kiln)
    assert status.savings is not None
    assert status.savings.by_peer == (WireSavings("12D3peer", "received", 1010, 23_180, 2_020),)
    assert [each["name"] for each in json.loads(encode_status(status))["savings"]["by_topic"]] == [
        CLAY,
        "/ceramic/mainnet",
    ]
    console = Console(file=StringIO(), width=120)
    console.print(render_status(status, datetime.fromtimestamp(1_700_000_030, UTC)))
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert [row.replace("│", "").split() for row in text.splitlines() if row.startswith((CLAY, "12D3peer"))] == [
        [CLAY, "received", "1,000", "23.0", "kB", "2.0", "kB"],
        ["12D3peer", "received", "1,010", "23.2", "kB", "2.0", "kB"],
    ]
    assert "30 s ago" in text


def test_where_no_topic_went_by_index_nothing_is_told(tmp_path: Path) -> None:
    kiln = settings(tmp_path)
    assert read_status(kiln).savings is None
    said(kiln.bridge_dir)
    assert read_status(kiln).savings is None


def test_only_the_greatest_savings_are_in_the_status() -> None:
    many = [SavingStatus(f"/ceramic/{number}", "sent", 1, number, 2) for number in range(1000)]
    told = select_largest(many)
    assert len(told) == 50
    assert told[0] == SavingStatus("/ceramic/999", "sent", 1, 999, 2)
