"""`kiln status`: what it says of a breaker that tripped, and which queries it names."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

from rich.console import Console

from conftest import free_ports
from kiln.conf.settings.model import Settings
from kiln.deploy.ops.status import read_status
from kiln.deploy.screens.status import encode_status, render_status
from kiln.pipelines.decode.breaker_state import BreakerState, clear_breaker_state, save_breaker_state

AT = datetime(2026, 11, 23, 5, 7, tzinfo=UTC)


def test_status_says_that_the_breaker_tripped_why_and_how_to_go_on(tmp_path: Path) -> None:
    settings = Settings.model_validate({"state": tmp_path, "kafka": {"embedded_port": free_ports(1)[0]}})
    assert read_status(settings).trip is None
    save_breaker_state(tmp_path, BreakerState("archive", "9 of 12 authors stopped", AT))
    found = read_status(settings)
    console = Console(file=StringIO(), width=600)
    console.print(render_status(found, AT))
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    assert "archive: the breaker tripped at 2026-11-23 05:07 UTC: 9 of 12 authors stopped. Fix the build" in shown
    assert "start Kiln again" in shown
    told = json.loads(encode_status(found))["trip"]
    assert told == {"query": "archive", "why": "9 of 12 authors stopped", "at": "2026-11-23T05:07:00Z"}
    clear_breaker_state(tmp_path, "sink")
    assert read_status(settings).trip is not None
    clear_breaker_state(tmp_path, "archive")
    assert read_status(settings).trip is None


def test_status_names_the_queries_that_the_network_has_and_those_that_ran(tmp_path: Path) -> None:
    port = {"embedded_port": free_ports(1)[0]}
    ceramic = Settings.model_validate({"state": tmp_path, "kafka": port})
    other = Settings.model_validate({"state": tmp_path, "kafka": port, "network": {"kind": "gossip"}})
    assert [query.name for query in read_status(ceramic).queries] == ["archive", "updates", "batch", "sink"]
    assert [query.name for query in read_status(other).queries] == ["archive", "sink"]
    (tmp_path / "checkpoints" / "updates").mkdir(parents=True)
    assert [query.name for query in read_status(other).queries] == ["archive", "sink", "updates"]
