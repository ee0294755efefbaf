"""`kiln run` live: nodes of two implementations talk, frames flow, and batches go back out to the network."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import shutil
import signal
import time
from collections import Counter
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from statistics import quantiles

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from conftest import free_ports
from kiln.conf.settings.durations import parse_duration
from kiln.conf.settings.model import Settings
from kiln.deploy.stack.kafka_broker import start_broker
from kiln.schemas.metrics import CHECKS, FETCHES, GROUPS
from kiln.schemas.wire.pubsub import write_batch_update
from kiln.schemas.wire.topics import parse_topic
from kit.kiln_process import Kiln
from kit.log_model import expected_batches, read_batches, read_log
from kit.prometheus import Prometheus, dashboard_questions, needs_prometheus, rule_questions

pytestmark = [
    pytest.mark.main_path,
    pytest.mark.spark,
    pytest.mark.kafka,
    pytest.mark.network,
    pytest.mark.timeout(1_200),
]

LENGTH = parse_duration(os.environ.get("KILN_TEST_LIVE_FOR", "30s"))
PATIENCE = timedelta(minutes=5)
"""until the first batch is out: on a machine with other work, queries take long to start"""
RATE = os.environ.get("KILN_TEST_LIVE_RATE", "30")
SEPARATORS = os.environ.get("KILN_TEST_LIVE_SEPARATORS", "10")


SCRAPED: dict[str, httpx.Response] = {}
"""The last answer for each path of the monitor while the run went on."""
TOOK: list[float] = []
"""s that each answer of /metrics took."""
FIRED: set[str] = set()
"""Alerts that fired while the run went on."""
SILENT: list[str] = []
"""Expressions of the dashboards and the alert rules that gave no data at the end of the run."""
DAEMONS: list[int] = []
"""Number of worker daemons, once a second during the run."""
UNPACKED: set[str] = set()
"""Native libraries that JVMs had unpacked and loaded at the end of the run."""


def _counted(name: str) -> bool:
    """Whether the last answer of /metrics counts any."""
    families = text_string_to_metric_families(SCRAPED["/metrics"].text)
    return any(sample.value > 0 for each in families if each.name == f"kiln_{name}" for sample in each.samples)


def _count_daemons(run: int) -> int:
    """Count the worker daemons of a run: children of Spark's JVM. A worker is a child of a daemon."""
    count = 0
    with suppress(psutil.NoSuchProcess):
        for each in psutil.Process(run).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                parent = each.parent()
                count += (
                    "kiln.pipelines.app.worker_daemon" in each.cmdline()
                    and parent is not None
                    and parent.name() == "java"
                )
    return count


def _find_unpacked_libraries(run: int) -> set[str]:
    """Find the native libraries that JVMs of a run have unpacked and loaded."""
    jvms = [each for each in psutil.Process(run).children(recursive=True) if each.name() == "java"]
    loaded = {each.path for jvm in jvms for each in jvm.memory_maps()}
    return {path for path in loaded if re.search(r"rocksdbjni|lz4-java|snappyjava|zstd-jni", path)}


def shadowing(folder: Path, *names: str) -> Path:
    """A folder with modules of the names of ours or of the standard library, which nothing of Kiln may import."""
    folder.mkdir(parents=True)
    for name in names:
        (folder / f"{name}.py").write_text(f'raise ImportError("imported {name} of the user")\n')
    return folder


@pytest.fixture(scope="module")
def kiln(broker_classpath: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Kiln:
    """A live run on the demo network, scraped by a Prometheus where there is one, and what Kafka held at its end caught
    up. Modules of the names of Kiln's folders lie in the current folder and on PYTHONPATH."""
    *ports, monitor, prometheus_port = free_ports(4)
    environment = {
        "LC_ALL": "C",  # which cannot write the name of the state folder
        "KILN_DURABILITY": "power",  # as by default
        "KILN_MONITOR__LISTEN": f"127.0.0.1:{monitor}",
        "KILN_BRIDGE__LISTEN": "/ip4/127.0.0.1/tcp/0",
        "KILN_TRAFFIC__RATE": RATE,
        "KILN_TRAFFIC__SEPARATORS": SEPARATORS,
    }
    folder = tmp_path_factory.mktemp("live")
    kiln = Kiln(
        folder / "Straße ☃", ports, environment, shadowing(folder / "current", "conf", "deploy", "random", "types")
    )
    folders = [str(shadowing(folder / "path", "conf", "deploy", "bridge", "schemas", "pipelines"))]
    folders += filter(None, [os.environ.get("PYTHONPATH")])  # it decides which checkout is tested
    kiln.environment["PYTHONPATH"] = os.pathsep.join(folders)
    with ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{monitor}"))
        prometheus = None
        if shutil.which("prometheus"):
            seen_by = Prometheus(folder / "prometheus", prometheus_port, f"127.0.0.1:{monitor}")
            prometheus = stack.enter_context(seen_by)
        run = kiln.start("run", "--for", f"{(LENGTH + PATIENCE).total_seconds():.0f}s")
        out_at, is_ready = math.inf, False
        while run.poll() is None:
            if is_ready and time.monotonic() > out_at + LENGTH.total_seconds():
                UNPACKED.update(_find_unpacked_libraries(run.pid))
                run.send_signal(signal.SIGINT)
                run.wait()
                break
            if out_at == math.inf and "/metrics" in SCRAPED and all(map(_counted, ("messages", "publications"))):
                out_at = time.monotonic()
            for path in ("/metrics", "/ready", "/"):
                with suppress(httpx.TransportError):
                    answer = http.get(path)
                    if path == "/ready":  # on a busy machine, a query may have failed and be about to start again
                        is_ready = answer.status_code == 200
                    if answer.status_code == 200:
                        SCRAPED[path] = answer
                        TOOK.extend([answer.elapsed.total_seconds()] if path == "/metrics" else [])
            DAEMONS.append(_count_daemons(run.pid))
            time.sleep(1)  # the pace of a scrape
        if prometheus is not None:
            FIRED.update(prometheus.fired())
            SILENT.extend(prometheus.silent(dashboard_questions() + rule_questions()))
    assert run.returncode == 0, kiln.log()
    kiln.run("run", "--catch-up")
    return kiln


def test_the_monitor_shows_each_declared_family_and_the_run_was_ready(kiln: Kiln) -> None:
    assert SCRAPED["/ready"].json() == {"ok": True, "reasons": []}
    families = {each.name: each for each in text_string_to_metric_families(SCRAPED["/metrics"].text)}
    assert {name: each.type for name, each in families.items()} == {
        each.name: each.type for group in GROUPS if group.condition not in (FETCHES, CHECKS) for each in group.families
    }
    empty = {name for name, each in families.items() if not each.samples}
    assert empty <= {"kiln_quarantined_records", "kiln_bep50_dropped_datagrams"}, "what goes wrong may have no value"
    values = {each.name: sum(sample.value for sample in each.samples) for each in families.values()}
    for name in ("frames", "messages", "copies", "batches", "batch_tips", "table_rows", "bridge_peers", "publications"):
        assert values[f"kiln_{name}"] > 0, name
    assert "frames" in SCRAPED["/"].text


def test_one_daemon_forks_the_workers_of_all_queries(kiln: Kiln) -> None:
    """A second daemon would import all modules again, which takes a second of CPU and 130 MB."""
    assert max(DAEMONS) == 1


def test_jvms_unpack_their_libraries_into_the_state_folder(kiln: Kiln) -> None:
    """Where the next start removes them: a killed JVM leaves 15 MB."""
    assert {Path(path).is_relative_to(kiln.state / "scratch") for path in UNPACKED if "rocksdb" in path} == {True}
    assert [path for path in UNPACKED if not Path(path).is_relative_to(kiln.state)] == []


def test_metrics_come_in_less_than_fifty_milliseconds(kiln: Kiln) -> None:
    """A tenth of the answers: the machine may run other tests, and then who asks waits for a processor."""
    assert quantiles(TOOK, n=10)[0] < 0.05


@needs_prometheus
def test_every_expression_of_dashboards_and_rules_gave_data(kiln: Kiln) -> None:
    absent = {each.name for group in GROUPS if group.condition in (FETCHES, CHECKS) for each in group.families}
    may_be_silent = (*absent, "kiln_quarantined_records_total", "kiln_bep50_dropped_datagrams_total")
    assert [text for text in SILENT if not any(name in text for name in may_be_silent)] == []


@needs_prometheus
def test_no_alert_fired(kiln: Kiln) -> None:
    assert set() == FIRED


def test_every_table_of_a_live_network_has_rows(kiln: Kiln) -> None:
    tables = ("frames", "copies", "messages", "updates", "batches", "batch_tips", "tips", "publications")
    counts = {table: kiln.count(table) for table in tables}
    assert all(counts.values()), counts
    authors = kiln.sql("select distinct from_peer from messages where type <> 'BATCH_UPDATE'")
    assert len(authors) >= 3, authors  # Kubo and two nodes of ours


def test_the_frames_of_every_connection_are_without_a_gap(kiln: Kiln) -> None:
    gaps = kiln.sql(
        "select connection, direction, count(*) as n, max(sequence) as last from frames group by all having n <> last"
    )
    assert gaps == []
    ends = kiln.sql(
        "select connection, direction from frames group by all having octet_length(arg_max(payload, sequence)) > 0"
    )
    assert ends == []


def test_each_batch_has_a_receipt_and_is_heard_by_the_foreign_node_as_written(kiln: Kiln) -> None:
    receipts = kiln.sql("select batch_cid, topic, error from publications where error is null")
    sent = {(row["batch_cid"], row["topic"]) for row in receipts}
    # the catch-up closes the last windows, and has no bridge
    unsent = kiln.sql(
        "select batch_cid, emitted_at from batches where batch_cid not in (select batch_cid from publications) "
        "and emitted_at < (select max(published_at) - interval 1 second from publications)"
    )
    assert unsent == []
    heard = [json.loads(line) for line in (kiln.state / "demo" / "received.jsonl").read_text().splitlines()]
    assert heard
    for event in heard:
        topic = parse_topic(event["topic"])
        assert topic is not None
        assert topic.separator is not None
        data = base64.b64decode(event["data"])
        assert data == write_batch_update(topic.separator, json.loads(data)["batch"])
        assert (json.loads(data)["batch"], event["topic"]) in sent
    assert len({json.loads(base64.b64decode(event["data"]))["batch"] for event in heard}) >= 0.9 * len(sent)


def test_the_batches_are_those_of_the_model_and_our_own_are_not_batched_again(kiln: Kiln) -> None:
    settings = Settings(state=kiln.state)
    port = int(kiln.servers.rpartition(":")[2])
    kafka = settings.kafka.model_copy(update={"embedded_port": port, "embedded_controller_port": free_ports(1)[0]})
    with start_broker(settings.model_copy(update={"kafka": kafka}), lambda words: None) as servers:
        expected = expected_batches(read_log(servers, "kiln.updates"), 1_000_000)
        emitted = read_batches(servers, "kiln.batches")
    assert set(emitted) == expected
    rows = kiln.sql("select network, origin, separator_key, separator_value, batch_cid from batches")
    assert Counter(tuple(row.values()) for row in rows) == Counter((*each.owner, each.cid) for each in expected)
