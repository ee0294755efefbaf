"""Faults of a run, one at a time: the alert that docs/quality.md names fires, no other of severity error does, and
after the repair none is left.

`/metrics` is rendered every half minute out of snapshots, as the monitor does it; promtool holds Kiln's rules against
what was rendered. What alerts cannot see, expectations do: test_quality_faults.py.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families
from ruamel.yaml import YAML
from test_screen import STATUS

from kiln.conf.process.bridge_status import BridgeStatus, SpoolStatus
from kiln.conf.process.exporter import render_metrics
from kiln.deploy.ops.metric_families import MonitorInputs, build_families
from kiln.deploy.ops.snapshot import BATCH_DELAY_BUCKETS, BridgeInRun, Snapshot
from kiln.deploy.ops.status import TableStatus
from kiln.pipelines.runtime.query_status import QueryState
from kiln.schemas.queries import QUERIES

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "deploy/packaging/prometheus/kiln.rules.yml"
SEVERITY = {rule["alert"]: rule["labels"]["severity"] for rule in YAML(typ="safe").load(RULES)["groups"][0]["rules"]}
STEP = 30  # s between two scrapes
BEGINS, ENDS, LASTS = 40, 100, 160
"""scrapes: the fault is there from one to the next; so long a time is told"""
HELD = 2
"""scrapes after the first at which Kafka is away"""


class Moment(NamedTuple):
    """What one scrape sees; None: nobody answers."""

    snapshot: Snapshot | None
    committed: int
    """the scrape before which the tables had their last commit"""


def well(scrape: int) -> Moment:
    """A run in which nothing is wrong, after so many scrapes: 50 frames/s."""
    frames = 50 * STEP * scrape
    bridge = structs.replace(STATUS, frames_in=frames, frames_out=scrape, spool=spool(5))
    seen = Snapshot(
        "local-demo",
        "demo network",
        timedelta(seconds=STEP * scrape),
        frames=frames,
        messages={"UPDATE": frames // 2},
        quarantine={("message", "invalid_json"): scrape},
        late_by_bucket=[0, 0, 0, 0, frames // 50, *[0] * (len(BATCH_DELAY_BUCKETS) - 4)],
        queries=[QueryState(name, "running", scrape, 5, lag_seconds=1.0) for name in QUERIES],
        bridge=BridgeInRun(bridge),
    )
    return Moment(seen, scrape)


def spool(waiting: int, *, full: bool = False) -> SpoolStatus:
    return structs.replace(STATUS.spool, waiting=waiting, full=full, free_bytes=80 << 30)


def with_bridge(moment: Moment, change: Callable[[BridgeStatus], BridgeStatus]) -> Moment:
    assert moment.snapshot is not None
    assert moment.snapshot.bridge is not None
    assert moment.snapshot.bridge.status is not None
    bridge = BridgeInRun(change(moment.snapshot.bridge.status))
    return moment._replace(snapshot=replace(moment.snapshot, bridge=bridge))


def _silent(scrape: int) -> Moment:
    heard = 50 * STEP * BEGINS
    quiet = with_bridge(well(scrape), lambda status: structs.replace(status, frames_in=heard))
    assert quiet.snapshot is not None
    return quiet._replace(snapshot=replace(quiet.snapshot, frames=heard))


def _stuck(scrape: int) -> Moment:
    moment = well(scrape)
    assert moment.snapshot is not None
    late = float(STEP * (scrape - BEGINS))
    lines = [replace(each, lag_seconds=late) if each.name == "batch" else each for each in moment.snapshot.queries]
    return moment._replace(snapshot=replace(moment.snapshot, queries=lines))


def _full(scrape: int) -> Moment:
    return with_bridge(well(scrape), lambda status: structs.replace(status, spool=spool(500, full=True)))


def _kafka_away(scrape: int) -> Moment:
    moment = well(scrape)
    assert moment.snapshot is not None
    if scrape > BEGINS + HELD:
        return moment
    return moment._replace(snapshot=replace(moment.snapshot, broker="the broker does not answer"))


def _cannot_decode(scrape: int) -> Moment:
    """The breaker trips, and holds two queries: so the tables have no commits."""
    moment = well(scrape)
    assert moment.snapshot is not None
    late = float(STEP * (scrape - BEGINS))
    lines = [
        replace(each, phase="tripped", lag_seconds=late) if each.name in ("archive", "updates") else each
        for each in moment.snapshot.queries
    ]
    return Moment(replace(moment.snapshot, queries=lines), BEGINS)


def _killed(scrape: int) -> Moment:
    return Moment(None, scrape)


def _not_fresh(scrape: int) -> Moment:
    return well(scrape)._replace(committed=BEGINS)


class Fault(NamedTuple):
    """A fault as docs/quality.md tells it: what scrapes see while the fault is there, and a label or word that the
    alert names."""

    words: str
    alert: str
    at: Callable[[int], Moment]
    names: str


FAULTS = (
    Fault("a silent peer", "KilnNoFramesReceived", _silent, "The bridge has received no frame"),
    Fault(
        "a build that cannot decode",
        "KilnBreakerTripped",
        _cannot_decode,
        "The query archive was stopped by its breaker",
    ),
    Fault("Kiln killed", "KilnDown", _killed, "Kiln has stopped"),
    Fault("a stuck query", "KilnQueryLagging", _stuck, "The query batch is"),
    Fault("a full spool", "KilnSpoolFull", _full, "The spool of the bridge is full"),
    Fault("Kafka away for a minute", "KilnKafkaDown", _kafka_away, "The Kafka broker does not answer"),
    Fault("a table without commits", "KilnTableStale", _not_fresh, "The table frames had no commit"),
)


def series(moments: Iterable[Moment]) -> dict[str, list[float | None]]:
    """What Prometheus would have scraped, by series."""
    found: dict[str, list[float | None]] = {}
    for scrape, moment in enumerate(moments):
        now = 1e9 + STEP * scrape
        values: Mapping[str, float] = {}
        if moment.snapshot is not None:
            committed = datetime.fromtimestamp(1e9 + STEP * moment.committed, UTC)
            tables = tuple(TableStatus(name, 1, 1, 1, 1, committed, "") for name in ("frames", "messages"))
            values = _samples(
                render_metrics(build_families(MonitorInputs(moment.snapshot, now, now, "1", tables))).decode()
            )
        values = {'up{job="kiln", instance="k"}': float(moment.snapshot is not None), **values}
        for name in values.keys() - found.keys():
            found[name] = [None] * scrape
        for name, told in found.items():
            told.append(values.get(name))
    return found


def _samples(text: str) -> dict[str, float]:
    return {
        f"{sample.name}{_labels({**sample.labels, 'instance': 'k'})}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{name}={json.dumps(value)}" for name, value in labels.items()) + "}"


def fired(folder: Path, told: Mapping[str, list[float | None]], scrapes: Iterable[int]) -> dict[int, dict[str, str]]:
    """The alerts that fire at these scrapes, each with what promtool says of it. promtool tells only what it did not
    expect, so nothing is expected."""
    cases = [
        {"eval_time": f"{STEP * each}s", "alertname": alert, "exp_alerts": []} for each in scrapes for alert in SEVERITY
    ]
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": f"{STEP}s",
        "tests": [
            {
                "interval": f"{STEP}s",
                "input_series": [
                    {"series": name, "values": " ".join("_" if each is None else f"{each:g}" for each in values)}
                    for name, values in told.items()
                    if re.match(r"up\{|kiln_", name)
                ],
                "alert_rule_test": cases,
            }
        ],
    }
    (folder / "test.yml").write_text(json.dumps(test))
    done = subprocess.run(
        ["promtool", "test", "rules", str(folder / "test.yml")], capture_output=True, text=True, check=False
    )
    found: dict[int, dict[str, str]] = {}
    said = done.stdout + done.stderr
    for alert, time, rest in re.findall(r"alertname: (\w+), time: (\w+),(.*?)(?=alertname: |\Z)", said, re.DOTALL):
        found.setdefault(_seconds(time) // STEP, {})[alert] = rest
    assert done.returncode == (1 if found else 0), said
    return found


def _seconds(text: str) -> int:
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([hms])", text))


needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not there"
)


@pytest.mark.slow
@needs_promtool
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.words)
def test_a_fault_fires_its_alert_and_no_other_and_clears_after_the_repair(fault: Fault, tmp_path: Path) -> None:
    told = series((fault.at if BEGINS <= scrape < ENDS else well)(scrape) for scrape in range(LASTS))
    looked = [BEGINS - 1, BEGINS + HELD, ENDS - 1, LASTS - 1]
    alerts = fired(tmp_path, told, looked)
    assert BEGINS - 1 not in alerts, "nothing fires before"
    assert LASTS - 1 not in alerts, "nothing is left after the repair"
    found = {name: words for each in alerts.values() for name, words in each.items()}
    assert fault.alert in found
    assert fault.names in found[fault.alert]
    assert [name for name in found if SEVERITY[name] == "error" and name != fault.alert] == []


def test_the_faults_are_in_the_documentation() -> None:
    page = (ROOT / "docs" / "quality.md").read_text()
    rows = re.findall(r"^\| (.+) \| alert \| `(\w+)` \| (\w+) \|$", page, re.MULTILINE)
    assert rows == [(fault.words, fault.alert, SEVERITY[fault.alert]) for fault in FAULTS]
