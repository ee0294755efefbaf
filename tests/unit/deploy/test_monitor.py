"""kiln.deploy.ops.run_monitor: metrics, readiness and the status page of a run, over HTTP."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_console import EVIL
from test_screen import STATUS

from kiln.conf.process.bridge_status import (
    BridgeStatus,
    FetcherStatus,
    OverlayStatus,
    PeerStatus,
    PublisherStatus,
    write_status,
)
from kiln.conf.process.exporter import HostNames, render_metrics
from kiln.deploy.ops.bridge_monitor import BridgeMonitor
from kiln.deploy.ops.metric_families import MonitorInputs, build_families
from kiln.deploy.ops.run_monitor import Monitor, RunHistory, build_plot, render_page
from kiln.deploy.ops.snapshot import BATCH_DELAY_BUCKETS, BridgeInRun, QualityInRun, Snapshot
from kiln.deploy.ops.status import read_lake_status
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.query_status import QueryBacklog, QueryState
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.faults import FAULTS
from kiln.schemas.metrics import FAMILIES

LATE = [0] * (len(BATCH_DELAY_BUCKETS) + 1)
LATE[3], LATE[-1] = 2, 1
OVERLAY = OverlayStatus("k", "n", (), 3, 4, (), PublisherStatus("on", 5), 6, 7, 8, 9, {"not_asked_for": 2}, {}, 1)


def full(status: BridgeStatus = STATUS) -> BridgeStatus:
    fetcher = FetcherStatus("on", 4, 3, {"blocks": 2}, 0, 1)
    counters = {"rpc_malformed": 7}
    return msgspec.structs.replace(status, bep50=OVERLAY, fetcher=fetcher, counters=counters, mesh={"a": 0, "b": 8})


SNAPSHOT = Snapshot(
    network="local-demo",
    mode="demo network",
    elapsed=timedelta(seconds=90),
    frames=1_000,
    frames_rate=12.5,
    messages={"UPDATE": 40, "QUERY": 2},
    copies=99,
    control_entries={"GRAFT": 3, "IHAVE": 20, "SUBSCRIBE": 2},
    control_rates={"GRAFT": 0.3, "IHAVE": 2.0, "SUBSCRIBE": 0.2},
    open_separators=3,
    batches=3,
    late_p50=1.2,
    late_p99=61.0,
    late_by_bucket=LATE,
    late_sum=64.0,
    tips=17,
    quarantine={("message", "invalid_json"): 5},
    queries=[
        QueryState(
            "archive",
            "running",
            3,
            10,
            0.5,
            lag_seconds=2.5,
            records=77,
            phases={"addBatch": 400, "triggerExecution": 600},
        ),
        QueryState("batch", "restarting", error="it broke"),
    ],
    bridge=BridgeInRun(full()),
    quality=QualityInRun(70.0, {("messages", "passed"): 9, ("messages", "warn"): 1}),
)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lake = Lake(str(tmp_path_factory.mktemp("lake")))
    lake.create(["messages", "batches"])
    return lake


@pytest.fixture
def monitor(lake: Lake) -> Iterator[Monitor]:
    with Monitor(("127.0.0.1", 0), lake, "1.2.3") as monitor:
        yield monitor


def facts_of(snapshot: Snapshot, lake: Lake) -> MonitorInputs:
    return MonitorInputs(snapshot, 100.0, 101.0, "1.2.3", read_lake_status(lake))


def exposed_of(facts: MonitorInputs) -> bytes:
    return render_metrics(build_families(facts))


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_every_declared_family_is_there_and_no_other(lake: Lake) -> None:
    found = text_string_to_metric_families(exposed_of(facts_of(SNAPSHOT, lake)).decode())
    assert {family.name: family.type for family in found} == {name: each.type for name, each in FAMILIES.items()}


def test_the_values_are_those_of_the_snapshot(lake: Lake) -> None:
    seen = samples(exposed_of(facts_of(SNAPSHOT, lake)))
    assert seen["kiln_messages_total", (("type", "UPDATE"),)] == 40
    assert seen["kiln_quarantined_records_total", (("reason", "invalid_json"), ("stage", "message"))] == 5
    assert seen["kiln_query_lag_seconds", (("query", "archive"),)] == 2.5
    assert seen["kiln_query_up", (("query", "batch"),)] == 0
    assert seen["kiln_query_phase_duration_seconds", (("phase", "addBatch"), ("query", "archive"))] == 0.4
    assert seen["kiln_batch_delay_seconds_bucket", (("le", "1.5"),)] == 2
    assert seen["kiln_batch_delay_seconds_bucket", (("le", "60.0"),)] == 2
    assert seen["kiln_batch_delay_seconds_count", ()] == 3
    assert seen["kiln_publications_total", (("result", "published"), ("transport", "bep50"))] == 5
    assert seen["kiln_bridge_meshes", (("peers", "0"),)] == 1
    assert seen["kiln_bridge_meshes", (("peers", "6-12"),)] == 1
    assert seen["kiln_table_rows", (("table", "messages"),)] == 0
    assert seen["kiln_bridge_events_total", (("event", "rpc_malformed"),)] == 7
    assert seen["kiln_quality_expectations", (("result", "warn"), ("table", "messages"))] == 1
    assert seen["kiln_quality_check_age_seconds", ()] == 31


@pytest.mark.parametrize(
    ("host", "answered"),
    [
        ("localhost", True),
        ("LOCALHOST:4814", True),
        ("127.0.0.1:4814", True),
        ("127.9.9.9", True),
        ("[::1]:4814", True),
        ("attacker.example:4814", False),
        ("localhost.attacker.example", False),
        ("127.0.0.1.attacker.example:4814", False),
        ("192.168.0.7", False),
        ("[::1", False),
        ("", False),
    ],
)
def test_on_loopback_only_names_of_loopback_are_answered(monitor: Monitor, host: str, answered: bool) -> None:
    """A web page reaches a server on loopback by a name of its own, and would read what it answers."""
    for path in ("/", "/metrics", "/health", "/ready"):
        code = httpx.get(f"http://{monitor.address}{path}", headers={"Host": host}).status_code
        assert (code != 421) is answered, path


def test_other_names_are_answered_where_they_are_configured(lake: Lake) -> None:
    for hosts, known, unknown in (
        (["kiln.example"], ["kiln.example", "KILN.example:443", "localhost"], ["attacker.example"]),
        (["*"], ["attacker.example"], []),
    ):
        with Monitor(("127.0.0.1", 0), lake, "1", hosts) as monitor:
            codes = {
                host: httpx.get(f"http://{monitor.address}/health", headers={"Host": host}).status_code
                for host in (*known, *unknown)
            }
        assert codes == dict.fromkeys(known, 200) | dict.fromkeys(unknown, 421)


def test_off_loopback_any_name_is_answered_unless_some_are_configured() -> None:
    assert HostNames("0.0.0.0", ()).accept("kiln.namespace.svc:4814")
    assert not HostNames("0.0.0.0", ("kiln.example",)).accept("attacker.example")


def test_a_bridge_is_not_ready_while_no_broker_answers(tmp_path: Path) -> None:
    """Also without frames that would wait for it. No broker listens at the port, and the next one hangs."""
    write_status(tmp_path / "status.json", msgspec.structs.replace(STATUS, at=time.time() + 60))
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        for servers in (["127.0.0.1:9"], [f"127.0.0.1:{hangs.getsockname()[1]}"]):
            options = {"bootstrap_servers": servers, "security_protocol": "PLAINTEXT"}
            bridge = BridgeMonitor(tmp_path / "status.json", "n", "1", partial(dict, options))
            (reason,) = bridge.why_not_ready()
            assert reason.startswith("the broker does not answer: ")
            assert bridge.why_dead() == []


def test_labels_stay_few_with_ten_thousand_peers_and_a_hundred_thousand_separators(lake: Lake) -> None:
    peers = [
        PeerStatus(f"peer {n}", f"agent-{n}/1.{n}{EVIL}", f"/meshsub/9.{n}", "", False, float(n - 50), n, n, 0)
        for n in range(10_000)
    ]
    status = msgspec.structs.replace(
        full(), peers=tuple(peers), mesh={f"topic {n}": n % 20 for n in range(100_000)}, topics=("t",) * 100_000
    )
    reasons = {(fault.stage, fault.reason): 1 for fault in FAULTS}
    crowded = replace(SNAPSHOT, bridge=BridgeInRun(status), quarantine=reasons)
    text = exposed_of(facts_of(crowded, lake))
    seen = samples(text)
    assert len(seen) < 150 + len(reasons) + 5 * len(TABLES)
    assert sum(value for (name, _), value in seen.items() if name == "kiln_bridge_peers") == 10_000
    assert sum(value for (name, _), value in seen.items() if name == "kiln_bridge_meshes") == 100_000


def test_what_is_served(monitor: Monitor) -> None:
    url = f"http://{monitor.address}"
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/ready").json() == {"ok": False, "reasons": ["starting"]}
    assert "starting" in httpx.get(url).text
    monitor.see(SNAPSHOT)
    metrics = httpx.get(f"{url}/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=")
    assert samples(metrics.content)["kiln_frames_total", ()] == 1_000
    ready = httpx.get(f"{url}/ready")
    assert (ready.status_code, ready.json()["reasons"]) == (503, ["the query batch is restarting"])
    well = replace(SNAPSHOT, queries=[replace(line, phase="idle") for line in SNAPSHOT.queries])
    monitor.see(well)
    assert httpx.get(f"{url}/ready").json() == {"ok": True, "reasons": []}
    page = httpx.get(url)
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert ">OK<" in page.text
    assert httpx.get(f"{url}/secret").status_code == 404
    assert httpx.post(url).status_code == 501


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (replace(SNAPSHOT, broker="the broker does not answer"), "the broker does not answer"),
        (
            replace(SNAPSHOT, bridge=BridgeInRun(None)),
            "the bridge does not report its status. See its log (with kiln run: logs/bridge.log)",
        ),
    ],
)
def test_why_a_run_is_not_ready(monitor: Monitor, changed: Snapshot, reason: str) -> None:
    monitor.see(changed)
    assert reason in httpx.get(f"http://{monitor.address}/ready").json()["reasons"]


def test_a_run_that_hangs_is_not_alive(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor.see(SNAPSHOT)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 31)
    answer = httpx.get(f"http://{monitor.address}/health")
    assert (answer.status_code, json.loads(answer.text)["ok"]) == (503, False)


def test_a_taken_port_is_said_and_nothing_else_fails(monitor: Monitor, tmp_path: Path) -> None:
    host, _, port = monitor.address.rpartition(":")
    with Monitor((host, int(port)), Lake(str(tmp_path)), "1") as second:
        second.see(SNAPSHOT)
        assert second.error == (
            f"cannot serve metrics at {monitor.address} (Address already in use). Set another monitor.listen"
        )
    with Monitor(None, Lake(str(tmp_path)), "1") as nowhere:
        assert (nowhere.address, nowhere.error) == ("", "")


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("href", "src")]


def test_the_page_shows_what_strangers_say_and_obeys_nothing_of_it(lake: Lake) -> None:
    evil = f"<script>alert(1)</script>{EVIL}"
    peer = PeerStatus(evil, evil, evil, evil, False, 1.0, 1, 1, 0)
    status = msgspec.structs.replace(full(), peers=(peer,))
    page = render_page(
        facts_of(replace(SNAPSHOT, bridge=BridgeInRun(status, {evil: 1}), errors=[evil]), lake), RunHistory().plots()
    )
    tags = _Tags()
    tags.feed(page)
    assert "script" not in tags.tags
    assert "&lt;script&gt;alert(1)" in page
    assert not set(page) & set(EVIL) - set("\n" + "".join(map(chr, range(32, 127))))
    assert {link for link in tags.links if link} == {"/metrics", "/ready", "/health"}


def test_the_page_says_that_the_breaker_tripped_and_how_to_go_on_and_what_the_last_check_found(lake: Lake) -> None:
    problem = "the breaker tripped at 2026-11-23 05:00 UTC: 9 of 12 authors stopped. Start Kiln again"
    line = QueryState("archive", "tripped", error=problem)
    page = render_page(facts_of(replace(SNAPSHOT, queries=[line], errors=[f"archive: {problem}"]), lake), [])
    assert problem in page
    assert "the query archive is tripped" in page
    assert "<h2>Quality, 0:31 ago</h2>" in page
    assert '<tr><td>messages<td class="n">9<td class="n">1<td class="n">0</tr>' in page


def test_the_page_shows_mesh_control_rates_and_duplicates(lake: Lake) -> None:
    page = render_page(facts_of(SNAPSHOT, lake), [])
    assert "<p>mesh 0-8 peers · 58 % of copies are duplicates</p>" in page
    for row in ("IHAVE,2.0,20", "GRAFT,0.3,3", "IWANT,0,0", "SUBSCRIBE,0.2,2"):
        assert '<tr><td>{}<td class="n">{}<td class="n">{}</tr>'.format(*row.split(",")) in page
    page = render_page(facts_of(replace(SNAPSHOT, copies=None, bridge=BridgeInRun(None)), lake), [])
    assert "<p>mesh – peers · no copies yet</p>" in page
    assert "<h2>Gossip</h2>" not in render_page(facts_of(replace(SNAPSHOT, bridge=None), lake), [])


def test_how_long_the_oldest_unread_record_has_been_there() -> None:
    waits = QueryBacklog()
    assert waits.observe(0.0, 100, 0) == 0
    assert waits.observe(10.0, 150, 50) == 0  # came since the last look
    assert waits.observe(14.0, 180, 60) == 4  # of those that were there at 10 s, 30 are left
    assert waits.observe(15.0, 180, 30) == 1
    assert waits.observe(16.0, 180, 0) == 0


def test_a_plot_ends_at_the_right_edge_and_fits_its_height() -> None:
    drawn = build_plot("Frames", "/s", [0.0, None, 5.0, 10.0])
    points = [tuple(map(float, pair.split(","))) for pair in drawn.lines[0].split()]
    assert (len(points), points[-1], drawn.now, drawn.most) == (3, (300.0, 0.0), 10.0, 10.0)
    assert all(0 <= y <= 60 for _, y in points)
    assert build_plot("Nothing", "s", []).now is None
