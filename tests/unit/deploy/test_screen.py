"""kiln.deploy.run.screen and kiln.deploy.run.summary: what is shown, and that it fits."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kiln.conf.process.bridge_status import (
    BridgeStatus,
    FetcherStatus,
    OverlayStatus,
    PeerStatus,
    PublisherStatus,
    SpoolStatus,
)
from kiln.deploy.ops.formatting import (
    compute_copies_per_message,
    format_clock,
    format_count,
    format_rate,
    format_seconds,
    format_separator,
    shorten,
    take_top,
)
from kiln.deploy.ops.snapshot import BatchLine, BridgeInRun, Snapshot
from kiln.deploy.query.ask import query_lake
from kiln.deploy.run.application import RunOutcome
from kiln.deploy.run.screen import LineView, LiveView, SnapshotScreen, format_line, open_view
from kiln.deploy.run.summary import read_row_counts, render_summary, suggest_queries
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.query_status import QueryPhase, QueryState
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.queries import QUERIES
from kit.kiln_table import append_rows

VALUE = "k2t6wyfsu4pg0t2n4j8ms3s33xsgqjhtto04mvq8w5a2v5xo48idyz38l7ydki"
CID = "bafyreigh2akiscaildcqabsyg3dfr6chu3fgpregiymsck7e7aqa4s52zy"
PHASES: tuple[QueryPhase, ...] = ("running", "idle", "restarting", "tripped", "starting")
NAMES = ("quality", *QUERIES)  # as many as there are phases

FULL = Snapshot(
    network="local-demo",
    mode="made-up traffic",
    elapsed=timedelta(seconds=37),
    duration=timedelta(seconds=60),
    frames=22_914,
    frames_rate=604.2,
    messages={"UPDATE": 4_790, "RESPONSE": 1_310, "QUERY": 1_002, "KEEPALIVE": 388, "BATCH_UPDATE": 231},
    copies=23_163,
    control_entries={"IHAVE": 720, "GRAFT": 6, "SUBSCRIBE": 9},
    control_rates={"IHAVE": 12.0, "GRAFT": 0.1, "SUBSCRIBE": 0.15},
    open_separators=17,
    batches=211,
    newest_batches=[BatchLine("model", VALUE, 3 + n, 9 + n, CID[:-1] + str(n), 0.3 + n / 10) for n in range(8)],
    late_p50=0.38,
    late_p99=0.81,
    quarantine={("message", f"reason_{n}"): 90 - n for n in range(9)},
    queries=[QueryState(name, phase, 31, 212, 0.84, 610, 5_200) for name, phase in zip(NAMES, PHASES, strict=True)],
    errors=["batch: the broker went away. " * 12, "sink: disk is full"],
)


STATUS = BridgeStatus(
    at=1_735_689_600.0,
    pid=4711,
    peer="12D3KooWbridge",
    network="local-demo",
    addresses=("/ip4/127.0.0.1/tcp/4001",),
    interests=("*",),
    topics=("/ceramic/local-demo", "/ceramic/local-demo/sep/model/k2"),
    mesh={"/ceramic/local-demo": 3, "/ceramic/local-demo/sep/model/k2": 2},
    peers=tuple(
        PeerStatus(f"12D3KooW{number}", "kubo", "/meshsub/1.1.0", "/ip4/127.0.0.1/tcp/1", True, 0.0, 1, 1, 0)
        for number in range(3)
    ),
    frames_in=12_345,
    frames_out=678,
    bytes_in=0,
    bytes_out=0,
    spool=SpoolStatus(put=0, acknowledged=0, memory_bytes=0, disk_bytes=0, full=False),
    publisher=PublisherStatus("waiting for batches", 211),
    counters={},
)
OVERLAY = OverlayStatus(
    key="",
    node="",
    addresses=(),
    joined=12,
    contacts=24,
    topics=(),
    publisher=PublisherStatus("waiting for batches", 211),
    items=242,
    stored=0,
    frames_in=0,
    frames_out=0,
    dropped={"not_krpc": 2, "refused_203": 1},
    unsent={},
)


def picture(snapshot: Snapshot, width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(SnapshotScreen(snapshot), end="")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().split("\n")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 60), (40, 10)])
@pytest.mark.parametrize("errors", [[], FULL.errors])
def test_the_picture_never_outgrows_the_terminal(width: int, height: int, errors: list[str]) -> None:
    lines = picture(replace(FULL, errors=errors), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30)])
def test_everything_a_user_asks_for_is_in_the_picture(width: int, height: int) -> None:
    text = "\n".join(picture(FULL, width, height))
    for expected in (
        "local-demo",
        "0:37 of 1:00",
        "604",
        "22,914",
        "UPDATE",
        "4,790",
        "BATCH_UPDATE",
        "3.0",  # copies each
        "17",  # open windows
        "211",  # batches
        "380 ms / 810 ms",
        "reason_0",
        "others",
        "model/k2t6",
        "ydki",
        "bafyr…",
        "400 ms",  # lateness of one batch
        "restarting",
        "tripped",
        "840 ms",
        "5,200",
        "sink: disk is full",
        "the broker went away",
    ):
        assert expected in text, expected


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
def test_nothing_of_batches_is_shown_where_a_network_has_none(width: int, height: int) -> None:
    other = replace(FULL, is_ceramic=False, messages={"DATA": 4_790}, newest_batches=(), bridge=BridgeInRun(STATUS))
    lines = picture(other, width, height)
    assert len(lines) <= height
    text = "\n".join([*lines, format_line(other)])
    for absent in ("batches", "open windows", "| open", "delay", "published"):
        assert absent not in text, absent
    for expected in ("DATA", "4,790", "duplicates", "GRAFT", "restarting", "sink: disk is full"):
        assert expected in text, expected


def test_lateness_is_said_to_be_from_event_time_where_there_is_room() -> None:
    assert "batch delay, p50 / p99" in "".join(picture(FULL, 120, 30))


def test_a_batch_of_a_replayed_capture_is_not_late() -> None:
    replayed = BatchLine("model", VALUE, 3, 9, CID, None)
    (shown,) = [text for text in picture(replace(FULL, newest_batches=[replayed]), 120, 30) if "bafyr" in text]
    assert shown.split()[3] == "-"


def test_bep_50_has_a_line_where_it_runs() -> None:
    bridge = BridgeInRun(msgspec.structs.replace(STATUS, bep50=OVERLAY))
    lines = picture(replace(FULL, bridge=bridge), 80, 24)
    assert len(lines) <= 24
    (shown,) = [text for text in lines if "BEP 50" in text]
    assert "topics 12  contacts 24  items 242  dropped 3  announced 211  waiting" in shown
    without = BridgeInRun(STATUS)
    assert len(picture(replace(FULL, bridge=without), 80, 24)) == len(lines)
    assert "BEP 50" not in "".join(picture(replace(FULL, bridge=without), 80, 24))
    assert "BEP 50 announced 211" in format_line(replace(FULL, bridge=bridge))


def test_what_is_fetched_out_of_ipfs_has_a_line_where_there_is_a_node() -> None:
    fetcher = FetcherStatus("fetching", 12, 3, {"blocks": 40, "released": 7, "quarantined": 1})
    node = "kubo 0.43.0 at http://127.0.0.1:5001"
    bridge = BridgeInRun(msgspec.structs.replace(STATUS, fetcher=fetcher, ipfs=node))
    (shown,) = [text for text in picture(replace(FULL, bridge=bridge), 120, 24) if "IPFS" in text]
    assert "wanted 12  fetching 3  blocks 40  updates released 7  given up 1  kubo 0.43.0" in shown
    assert "blocks fetched 40, records waiting for blocks 12" in format_line(replace(FULL, bridge=bridge))
    counts = {"quarantined": 9, "contradicts_genesis": 8}
    bridge = BridgeInRun(msgspec.structs.replace(STATUS, fetcher=FetcherStatus("fetching", 0, 0, counts, claimed=5)))
    (shown,) = [text for text in picture(replace(FULL, bridge=bridge), 120, 24) if "IPFS" in text]
    assert "given up 1  claims to check 5" in shown, "a false claim is given up by nobody"


def test_the_bridge_is_shown_as_it_tells_of_itself() -> None:
    text = "\n".join(picture(replace(FULL, bridge=BridgeInRun(STATUS, {"kubo": 40}, {"kubo": 38})), 100, 30))
    assert "listening /ip4/127.0.0.1/tcp/4001" in text
    assert "in 12,345  out 678  topics 2  mesh 2-3  spool empty  published 211  fetched by kubo 38 of 40" in text
    assert "→ 12D3KooW0 /meshsub/1.1.0 kubo" in text
    assert "duplicates 67%  per s: IHAVE 12  IWANT 0  IDONTWANT 0  GRAFT 0.1  PRUNE 0 " in text
    full = msgspec.structs.replace(STATUS, spool=SpoolStatus(0, 0, 0, 2_000_000, full=True))
    text = "\n".join(picture(replace(FULL, bridge=BridgeInRun(full)), 100, 30))
    assert "not reading: the spool is full" in text
    assert "spool 2.0 MB  published 211  waiting for batches" in text
    off = msgspec.structs.replace(STATUS, fetcher=FetcherStatus("off: no node"))
    assert "IPFS" not in "\n".join(picture(replace(FULL, bridge=BridgeInRun(off)), 100, 30))


def test_a_bridge_that_has_said_nothing_is_starting() -> None:
    text = "\n".join(picture(replace(FULL, bridge=BridgeInRun()), 100, 30))
    assert "network  starting" in text
    assert "in 0  out 0  topics 0  mesh 0  spool empty  published 0" in text
    line = format_line(replace(FULL, bridge=BridgeInRun()))
    assert "topics 0 mesh 0 frames in 0 out 0 | control entries 12/s duplicates 67% | published 0" in line


def test_more_room_shows_more_batches() -> None:
    small = replace(FULL, errors=[])
    assert sum(CID[:5] in text for text in picture(small, 80, 24)) < sum(
        CID[:5] in text for text in picture(small, 80, 40)
    )
    assert sum(CID[:5] in text for text in picture(small, 80, 40)) == 8


def test_nothing_known_yet_is_shown_as_such() -> None:
    empty = Snapshot("mainnet", "no traffic", timedelta(), queries=[QueryState("batch", "starting")])
    text = "\n".join(picture(empty, 80, 24))
    assert "none yet" in text
    assert "starting" in text
    assert "nan" not in text.lower()


def test_the_line_has_it_all_in_one_line() -> None:
    text = format_line(FULL)
    assert "\n" not in text
    for expected in (
        "0:37",
        "frames 22,914 (604/s)",
        "messages 7,721 (3.0 copies each)",
        "batches 211",
        "p50 380 ms p99 810 ms",
        "archive 212",
        "updates restarting",
        "batch tripped",
        "error: sink: disk is full",
    ):
        assert expected in text
    assert "lag: none" in format_line(replace(FULL, queries=[QueryState("batch", "idle", lag=0)]))


def test_without_a_terminal_there_is_a_line_every_five_seconds_and_each_error_at_once() -> None:
    console = Console(file=io.StringIO(), width=80)
    with open_view(console) as view:
        assert isinstance(view, LineView)
        for tenth in range(120):
            errors = ["sink: disk is full"] if tenth > 60 else []
            view.show(replace(FULL, elapsed=timedelta(seconds=tenth / 10), errors=errors))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [text.split(" | ")[0] for text in lines] == ["0:00", "0:05", "error: sink: disk is full", "0:10"]


def test_the_live_screen_leaves_the_terminal_as_it_was() -> None:
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True, _environ={"TERM": "xterm"})
    with contextlib.suppress(ZeroDivisionError), open_view(console) as view:
        assert isinstance(view, LiveView)
        view.say("starting the broker")
        view.show(FULL)
        raise ZeroDivisionError
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "starting the broker" in text
    assert "local-demo" in text
    assert text.index("\x1b[?1049h") < text.index("\x1b[?1049l")
    assert text.rindex("\x1b[?25h") > text.index("\x1b[?25l")


# ---------------------------------------------------------------- words and numbers


@given(st.floats(0, 1e12))
def test_a_count_fits_its_column(number: float) -> None:
    assert len(format_count(number)) <= 7


def test_numbers_in_words() -> None:
    assert [format_count(number) for number in (None, 0, 999, 12_345, 123_456, 1_234_567, 2.5e9)] == [
        "-",
        "0",
        "999",
        "12,345",
        "123 k",
        "1.2 M",
        "2.5 G",
    ]
    assert [format_rate(number) for number in (None, 0, 0.25, 604.2)] == ["-", "0", "0.2", "604"]
    assert [format_seconds(value) for value in (None, 0.0849, 1.254, 42.1, 600)] == [
        "-",
        "85 ms",
        "1.25 s",
        "42 s",
        "10 min",
    ]
    assert [format_clock(timedelta(seconds=value)) for value in (0, 61, 3_723)] == ["0:00", "1:01", "1:02:03"]
    assert compute_copies_per_message(replace(FULL, messages={})) is None


@given(st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=90), st.integers(1, 90))
def test_a_shortened_id_fits_and_keeps_its_end(text: str, width: int) -> None:
    out = shorten(text, width)
    assert len(out) <= width
    if len(text) <= width:
        assert out == text
    elif width >= 3:
        assert out.endswith(text[-1])


@given(st.text(min_size=1, max_size=60), st.integers(20, 60))
def test_a_shortened_separator_fits(key: str, width: int) -> None:
    assert len(format_separator(key, VALUE, width)) <= width


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=12), st.integers(1, 8))
def test_what_does_not_fit_is_summed_up(counts: dict[str, int], rows: int) -> None:
    shown = take_top(counts, rows)
    assert len(shown) <= rows
    assert sum(number for _, number in shown) == sum(counts.values())


# ---------------------------------------------------------------- summary


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    at = pa.timestamp("us", tz="UTC")
    now = datetime(2025, 1, 1, tzinfo=UTC)
    columns = {
        "string": pa.string(),
        "timestamp": at,
        "int": pa.int32(),
        "bigint": pa.int64(),
        "binary": pa.binary(),
    }
    for name in ("batches", "batch_tips", "messages", "copies", "tips", "quarantine"):
        table = TABLES[name]
        fields = [
            pa.field(column.name, columns.get(column.type, pa.map_(pa.string(), pa.string())))
            for column in table.columns
        ]
        values = {pa.string(): "x", at: now, pa.int32(): 1, pa.int64(): 1, pa.binary(): b"x"}
        rows = pa.Table.from_pylist([{f.name: values.get(f.type, []) for f in fields}] * 3, schema=pa.schema(fields))
        append_rows(tmp_path / "lake" / name, rows)
    return tmp_path / "lake"


def summary_text(lake: Path, before: dict[str, int], error: str = "") -> str:
    outcome = RunOutcome(seconds=61, first_batch=14, batches=3, late_p50=0.4, late_p99=0.8, error=error)
    console = Console(width=100, file=io.StringIO())
    console.print(render_summary(outcome, Lake(str(lake)), before), soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_summary_tells_totals_what_came_in_this_run_and_how_late_batches_were(lake: Path) -> None:
    text = summary_text(lake, {"batches": 1}, "sink: disk is full")
    assert "first batch after 14 s" in text
    assert "batch delay 400 ms (p50), 800 ms (p99)" in text
    assert [row.split() for row in text.splitlines() if row.startswith("batches ")] == [["batches", "│", "3", "│", "2"]]
    assert "error: sink: disk is full" in text
    assert read_row_counts(Lake(str(lake)))["quarantine"] == 3


def test_the_summary_of_a_network_without_batches_has_nothing_of_them(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "lake"))
    lake.create(("messages", "copies", "batches", "batch_tips", "tips"))
    console = Console(width=100, file=io.StringIO())
    console.print(render_summary(RunOutcome(seconds=61), lake, {}, is_ceramic=False), soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "ran 1:01\n" in text
    assert "no batch" not in text
    assert "kiln sql" not in text  # there are no rows to query


def test_every_line_of_sql_in_the_summary_can_be_asked(lake: Path) -> None:
    lines = [text for text in summary_text(lake, {}).splitlines() if text.startswith("kiln sql ")]
    assert len(lines) == 6
    for text in lines:
        sql = text.removeprefix('kiln sql "').removesuffix('"')
        assert '"' not in sql
        assert "$" not in sql
        assert list(query_lake(Lake(str(lake)), sql).rows()), sql


def test_only_tables_that_are_there_are_asked_about() -> None:
    assert [what for what, _ in suggest_queries(["batch_tips", "quarantine"], "kiln sql")] == [
        "quarantined records by reason"
    ]


def test_a_run_without_a_lake_has_a_summary(tmp_path: Path) -> None:
    text = summary_text(tmp_path / "lake", {})
    assert "kiln sql" not in text
