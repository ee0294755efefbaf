"""Whatever a peer sends, no command prints anything that a terminal obeys."""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from rich.text import Text

from conftest import free_ports
from kiln.conf.process.bridge_status import (
    BridgeStatus,
    PeerStatus,
    PublisherStatus,
    SpoolStatus,
    write_status,
)
from kiln.conf.process.state_folder import claim_state_folder
from kiln.deploy.cli.app import run_command
from kiln.deploy.cli.console import PlainConsole, escape_text
from kiln.deploy.cli.options import answers
from kiln.deploy.cli.status import render_status
from kiln.deploy.ops.snapshot import BatchLine, BridgeInRun, Snapshot
from kiln.deploy.ops.status import BridgeMember, BrokerStatus, KilnStatus, TopicStatus
from kiln.deploy.run.application import RunOutcome
from kiln.deploy.run.screen import LineView, format_line, open_view
from kiln.deploy.run.summary import render_summary
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.streamid import StreamID
from kit.kiln_table import append_rows

EVIL = "kiln\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\u202egpj.exe\u200b\r\nforged line [bold]not markup[/] :smile:"
"""An agent that sets the title, clears the screen, turns letters round, and ends its line."""
SHOWN = (
    r"kiln\u001b]0;owned\u0007\u001b[2J\u009b31m\u007f\u202egpj.exe\u200b\r\nforged line [bold]not markup[/] :smile:"
)
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
OF_KILN = re.compile(r"\x1b\[\??[\d;]*[mHhlJ]")
"""What Kiln itself tells a terminal: colours, the place of the cursor, the other screen."""
AT = datetime(2025, 3, 1, 12, tzinfo=UTC)

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder in which every text is what a peer chose."""
    state = tmp_path_factory.mktemp("hostile") / "state"
    place: dict[str, list[object]] = {"network": [EVIL], "origin": ["LIVE"], "message_id": [EVIL], "observed_at": [AT]}
    stream, tip = StreamID(3, compute_cid(b"a")).text, cid_text(compute_cid(b"tip", 0x85))
    update: dict[str, list[object]] = {"stream": [stream], "tip": [tip]}
    tables: dict[str, dict[str, list[object]]] = {
        "messages": {**place, **update, "type": [EVIL], "data": [EVIL.encode()], "about": [{EVIL: EVIL}]},
        "quarantine": {
            "stage": [EVIL],
            "reason": [EVIL],
            "detail": [EVIL],
            "observed_at": [AT],
            "kafka_partition": [0],
            "kafka_offset": [0],
            "message_index": [0],
        },
        "updates": {
            **place,
            **update,
            "separator_key": [EVIL],
            "separator_value": ["k2t6"],
            "separator_source": ["topic"],
            "log_partition": [0],
            "log_offset": [0],
            "log_time": [AT],
        },
    }
    for name, columns in tables.items():
        append_rows(state / "lake" / name, pa.table(columns))
    claim_state_folder(state)
    (state / "bridge").mkdir()
    write_status(state / "bridge" / "status.json", bridge_status())
    return state


@pytest.fixture(autouse=True)
def _hostile_state(monkeypatch: pytest.MonkeyPatch, state: Path) -> None:
    for name in list(os.environ):
        if name.startswith("KILN_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("KILN_STATE", str(state))
    monkeypatch.setenv("KILN_KAFKA__EMBEDDED_PORT", str(free_ports(1)[0]))  # where no broker answers
    monkeypatch.setenv("KILN_SPARK__MASTER", "local\x1b[2J")
    monkeypatch.setenv("COLUMNS", "600")


def bridge_status() -> BridgeStatus:
    peer = PeerStatus("12D3peer", EVIL, EVIL, EVIL, True, 0.0, 0, 0, 0)
    return BridgeStatus(
        at=1_700_000_000.0,
        pid=1,
        peer=EVIL,
        network=EVIL,
        addresses=(EVIL,),
        interests=(EVIL,),
        topics=(EVIL,),
        mesh={EVIL: 1},
        peers=(peer,),
        frames_in=0,
        frames_out=0,
        bytes_in=0,
        bytes_out=0,
        spool=SpoolStatus(0, 0, 0, 0, False),
        publisher=PublisherStatus(EVIL),
        counters={},
    )


def snapshot() -> Snapshot:
    return Snapshot(
        network=EVIL,
        mode="live",
        window=timedelta(seconds=1),
        elapsed=timedelta(seconds=61),
        duration=None,
        frames=1,
        frames_rate=1.0,
        messages={EVIL: 2},
        copies=None,
        open_separators=1,
        batches=1,
        newest_batches=[BatchLine(EVIL, EVIL, 1, 1, EVIL, 0.5)],
        late_p50=None,
        late_p99=None,
        quarantine={(EVIL, EVIL): 1},
        queries=[],
        errors=[EVIL],
        bridge=BridgeInRun(bridge_status(), {EVIL: 1}),
    )


def safe(text: str) -> str:
    """The text, in which there is nothing to obey but what Kiln itself says."""
    plain = OF_KILN.sub("", text)
    assert not OBEYED.search(plain), repr(plain)
    assert "\nforged line" not in plain
    return plain


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize(
    ("arguments", "shows"),
    [
        (("sql", "SELECT * FROM messages"), SHOWN),
        (("sql", f'SELECT message_id AS "{EVIL}" FROM messages'), SHOWN),
        (("sql", "SELECT message_id, repeat(type, 9) FROM messages"), SHOWN),  # too wide: a row is a list
        (("sql", f"SELECT error('{EVIL}')"), r"\u001b]0;owned"),
        (("sql", f'SELECT * FROM "{EVIL}"'), r"\u001b]0;owned"),
        (("estimate",), SHOWN),
        (("quarantine", "list"), SHOWN),
        (("status",), "updates"),
        (("doctor",), "state folder"),
        (("interests",), "*"),
        (("interests", "--remove", EVIL), SHOWN.partition(r"\n")[0]),
        (("config", "show"), r"local\u001b[2J"),
        (("config", "check", EVIL), r"\u001b]0;owned"),
    ],
)
def test_no_command_prints_what_a_terminal_obeys(arguments: tuple[str, ...], shows: str, capsys: Capture) -> None:
    run_command(arguments)
    said = capsys.readouterr()
    assert shows in safe(said.out) + safe(said.err)


def test_the_status_obeys_no_other_bridge(capsys: Capture) -> None:
    broker = BrokerStatus("127.0.0.1:1", True, "", (TopicStatus(EVIL, {}, {}),))
    bridges = (BridgeMember(EVIL, EVIL, EVIL, True, 1),)
    answers().print(render_status(KilnStatus("state", broker, (), (), bridges=bridges), AT))
    assert r"kiln\u001b]0;owned" in safe(capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments",
    [
        ("sql", "SELECT * FROM messages"),
        ("estimate",),
        ("quarantine", "list"),
        ("status",),
        ("doctor",),
        ("interests",),
    ],
)
def test_json_stays_json_and_has_nothing_to_obey(arguments: tuple[str, ...], capsys: Capture) -> None:
    run_command([*arguments, "--json"])
    said = capsys.readouterr().out
    found = json.loads(safe(said))
    if arguments[0] == "sql":
        assert found[0]["message_id"] == EVIL


# ---------------------------------------------------------------- the screen


def console_on(out: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> PlainConsole:
    monkeypatch.setenv("TERM", "xterm")
    console = PlainConsole()
    console.file = out
    console._force_terminal = console.is_interactive = True
    return console


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_the_screen_obeys_no_peer(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = console_on(out, monkeypatch)
    console.size = size
    with open_view(console) as view:
        view.say(EVIL)
        view.show(snapshot())
    shown = safe(out.getvalue())
    assert r"\u001b]0;o" in shown
    assert max(map(len, shown.splitlines())) <= 2 * size[0]  # no line grew by what was escaped


def test_lines_and_the_summary_obey_no_peer(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = console_on(out, monkeypatch)
    LineView(console).show(snapshot())
    console.print(render_summary(RunOutcome(error=EVIL, warnings=[EVIL]), Lake(str(state / "lake")), {}))
    assert r"kiln\u001b]0;owned" in safe(out.getvalue())


def test_a_console_of_a_command_is_plain_also_for_text_that_nobody_thought_of(capsys: Capture) -> None:
    answers().print(EVIL)
    answers().print(Text(EVIL, "bold"))
    said = capsys.readouterr().out
    assert not OBEYED.search(said)
    assert "[bold]not markup[/] :smile:" in said


def test_styles_stay_where_they_were() -> None:
    text = Text.assemble(("a\x1bb", "red"), ("c", "bold"))
    found = escape_text(text)
    assert found.plain == r"a\u001bbc"
    console = PlainConsole()
    assert found.get_style_at_offset(console, 0).color is not None
    assert found.get_style_at_offset(console, 7).color is not None
    assert found.get_style_at_offset(console, 8).bold
    assert escape_text(Text("plain")).plain == "plain"


def test_one_line_has_no_newline() -> None:
    assert "\n" not in format_line(replace(snapshot(), errors=["one\ntwo"]))
