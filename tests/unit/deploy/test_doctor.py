"""kiln.deploy.ops.doctor and kiln.deploy.ops.status: what is found without Spark, and what to do about it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Never

import pyarrow as pa
import pytest
from deltalake import Field, write_deltalake
from deltalake.schema import PrimitiveType
from msgspec import structs
from packaging.requirements import Requirement
from rich.console import Console

from conftest import free_ports
from kiln.conf.process.bridge_status import BridgeStatus, FetcherStatus, PublisherStatus, SpoolStatus, write_status
from kiln.conf.process.location import parse_location
from kiln.conf.process.state_folder import lock_state
from kiln.conf.settings.model import Bep50, Checkpoints, Ipfs, Kafka, Settings, Spark
from kiln.conf.settings.model import Lake as SettingsLake
from kiln.deploy.cli.doctor import render_checks
from kiln.deploy.cli.status import encode_status, format_age, render_status
from kiln.deploy.ops.doctor import run_checks
from kiln.deploy.ops.doctor_checks import (
    DoctorCheck,
    Level,
    Listener,
    check_bridge,
    check_broker,
    check_checkpoints,
    check_disk,
    check_engine,
    check_geneses,
    check_ipfs,
    check_java,
    check_lake,
    check_memory,
    check_open_files,
    check_packages,
    check_port,
    check_python,
    check_state,
    check_updates_partitions,
    parse_memory,
)
from kiln.deploy.ops.status import (
    BrokerStatus,
    TopicStatus,
    compute_lag,
    read_broker_status,
    read_checkpoint,
    read_lake_status,
    read_query_status,
    read_status,
)
from kiln.deploy.stack.java import Java, JavaError
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.native.library import Engine
from kiln.pipelines.runtime.checkpoint import CheckpointError, parse_offsets, save_topic_ids
from kiln.pipelines.runtime.spark_environment import find_foreign_variables
from kit.kiln_table import append_rows

OFFSETS = 'v1\n{{"batchWatermarkMs":0,"batchTimestampMs":1}}\n{{"kiln.frames":{{"0":{zero},"1":{one}}}}}'

BRIDGE = BridgeStatus(
    at=100.0,
    pid=1,
    peer="12D3Koo",
    network="clay",
    addresses=(),
    interests=("*",),
    topics=("/ceramic/clay",),
    mesh={},
    peers=(),
    frames_in=0,
    frames_out=0,
    bytes_in=0,
    bytes_out=0,
    spool=SpoolStatus(put=0, acknowledged=0, memory_bytes=0, disk_bytes=0, full=False),
    publisher=PublisherStatus("waiting for batches"),
    counters={},
)


def write_checkpoint(folder: Path, batches: int, commits: int) -> None:
    for name in ("offsets", "commits"):
        (folder / name).mkdir(parents=True)
    for batch in range(batches):
        (folder / "offsets" / str(batch)).write_text(OFFSETS.format(zero=10 * batch, one=20 * batch))
        (folder / "offsets" / f".{batch}.crc").write_bytes(b"crc")
    for batch in range(commits):
        path = folder / "commits" / str(batch)
        path.write_text('v1\n{"nextBatchWatermarkMs":0}')
        os.utime(path, (1_700_000_000 + batch, 1_700_000_000 + batch))


# ---------------------------------------------------------------- checkpoints


def test_progress_is_that_of_the_newest_finished_micro_batch(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, batches=12, commits=11)  # the last one was planned and not done
    found = read_checkpoint(parse_location(tmp_path))
    assert found.batch == 10
    assert found.offsets == {"kiln.frames": {0: 100, 1: 200}}
    assert found.committed_at == datetime.fromtimestamp(1_700_000_010, UTC)


def test_a_query_that_never_ran_or_never_committed_has_no_progress(tmp_path: Path) -> None:
    assert read_checkpoint(parse_location(tmp_path / "none")).batch is None
    write_checkpoint(tmp_path, batches=1, commits=0)
    assert read_checkpoint(parse_location(tmp_path)).batch is None


def test_sources_are_taken_together_and_an_empty_one_is_skipped() -> None:
    text = 'v1\n{}\n{"kiln.updates":{"0":5},"kiln.batches":{"0":7}}\n-\n{"kiln.quarantine":{"0":1}}'
    assert parse_offsets(text) == {"kiln.updates": {0: 5}, "kiln.batches": {0: 7}, "kiln.quarantine": {0: 1}}


@pytest.mark.parametrize("text", ["", "v9\n{}\n{}", "v1\n{}\nrubbish", 'v1\n{}\n{"a": 1}', "v1\n{}\n[1]"])
def test_a_file_that_is_no_offset_log_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError):
        parse_offsets(text)


def test_a_bad_checkpoint_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, batches=1, commits=1)
    (tmp_path / "offsets" / "0").write_text("v7\n")
    with pytest.raises(CheckpointError, match="offsets/0: Spark's offset log has the version 'v7'"):
        read_checkpoint(parse_location(tmp_path))


def test_lag_counts_what_is_held_and_not_committed() -> None:
    topics = {"kiln.frames": TopicStatus("kiln.frames", {0: 0, 1: 50, 2: 3}, {0: 110, 1: 60, 2: 9})}
    # 10 behind; older than what is held, so all 10 held; never read, so all 6 held
    assert compute_lag({"kiln.frames": {0: 100, 1: 20}}, topics) == 10 + 10 + 6
    assert compute_lag({"kiln.frames": {0: 110, 1: 60, 2: 9}}, topics) == 0
    assert compute_lag({"kiln.other": {0: 0}}, topics) is None
    assert compute_lag({}, topics) is None


def test_a_query_whose_topic_is_another_says_so_and_has_no_lag(tmp_path: Path) -> None:
    """Neither is its offset one of this topic."""
    write_checkpoint(tmp_path, batches=3, commits=3)
    topics = {"kiln.frames": TopicStatus("kiln.frames", {0: 0, 1: 0}, {0: 900, 1: 900}, "new")}
    assert read_query_status("archive", parse_location(tmp_path), topics).lag == 900 - 20 + 900 - 40
    save_topic_ids(parse_location(tmp_path), {"kiln.frames": "old"})
    found = read_query_status("archive", parse_location(tmp_path), topics)
    assert (found.batch, found.lag) == (2, None)
    assert found.problem.startswith("kiln.frames is not the topic that was read before")
    assert is_bad(check_checkpoints([found]), "archive: kiln.frames is not the topic", "kiln recover")
    away = read_query_status("archive", parse_location(tmp_path), {})
    assert (away.problem, away.lag) == ("", None)


# ---------------------------------------------------------------- status


def closed_port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def state(tmp_path: Path) -> Settings:
    write_checkpoint(tmp_path / "checkpoints" / "archive", 3, 3)
    lake = tmp_path / "lake"
    for number in range(2):
        rows = pa.table({"stream": [f"s{number}", "s"]})
        append_rows(lake / "tips", rows)
    append_rows(lake / "batches", pa.table({"batch_cid": ["a", "b", "c"]}))
    return Settings(state=tmp_path, kafka=Kafka(embedded_port=closed_port()))


def test_the_status_of_a_stopped_kiln(state: Settings) -> None:
    found = json.loads(encode_status(read_status(state)))
    assert found["broker"]["reachable"] is False
    assert found["broker"]["problem"] == "nothing listens there"
    archive = next(query for query in found["queries"] if query["name"] == "archive")
    assert (archive["batch"], archive["lag"]) == (2, None)
    assert archive["offsets"] == {"kiln.frames": {"0": 20, "1": 40}}
    assert archive["committed_at"] == "2023-11-14T22:13:22Z"
    assert [(table["name"], table["rows"], table["files"]) for table in found["tables"]] == [
        ("batches", 3, 1),
        ("tips", 4, 2),
    ]


def test_the_status_on_the_screen(state: Settings) -> None:
    console = Console(file=StringIO(), width=100)
    console.print(render_status(read_status(state), datetime.fromtimestamp(1_700_000_062, UTC)))
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "does not answer: nothing listens there" in text
    assert [row.split() for row in text.splitlines() if row.startswith("archive")] == [
        ["archive", "│", "3", "│", "60", "s", "ago", "│", "-"]
    ]


def test_a_table_that_cannot_be_read_does_not_hide_the_others(state: Settings) -> None:
    for log in (state.state / "lake" / "tips" / "_delta_log").iterdir():
        log.write_text("rubbish", encoding="utf-8")
    batches, tips = read_lake_status(Lake.from_location(state.lake_root))
    assert batches.rows == 3
    assert "tips" in tips.problem
    assert check_lake([batches, tips]).level == "fail"


@pytest.fixture
def deaf_server() -> Iterator[int]:
    """A port that accepts connections and never answers: not a broker."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_table_with_other_columns_is_told(tmp_path: Path) -> None:
    settings = Settings(state=tmp_path)
    lake = Lake.from_location(settings.lake_root)
    lake.create(("tips", "batches"))
    found = {check.name: check for check in run_checks(settings)}
    assert found["columns"].level == "ok"
    lake.open("tips").alter.add_columns([Field("note", PrimitiveType("string"))])  # which harms nobody
    rows = lake.open("tips").to_pyarrow_table()
    names = ["tip_cid" if name == "tip" else name for name in rows.column_names]
    write_deltalake(lake.table("tips"), rows.rename_columns(names), mode="overwrite", schema_mode="overwrite")
    found = {check.name: check for check in run_checks(settings)}
    assert found["columns"].level == "fail"
    assert found["columns"].found == (
        "tips: the column tip is missing, and Kiln does not know the column note, tip_cid"
    )


def test_something_that_is_no_broker_is_given_up_in_time(deaf_server: int) -> None:
    found = read_broker_status(Kafka(bootstrap=f"127.0.0.1:{deaf_server}"), patience=1.0)
    assert not found.reachable
    assert found.problem


def test_ago() -> None:
    now = datetime(2025, 1, 2, tzinfo=UTC)
    assert format_age(None, now) == "-"
    assert format_age(datetime(2025, 1, 1, 23, 59, 1, tzinfo=UTC), now) == "59 s ago"
    assert format_age(datetime(2025, 1, 1, 23, 30, tzinfo=UTC), now) == "30 min ago"
    assert format_age(datetime(2024, 12, 1, tzinfo=UTC), now) == "32 d ago"


# ---------------------------------------------------------------- checks


def is_bad(check: DoctorCheck, *words: str) -> bool:
    """A failed check has to say what to do."""
    return check.level == "fail" and bool(check.what_to_do) and all(word in str(check) for word in words)


def test_the_engine_and_what_to_do_for_the_native_core() -> None:
    assert check_engine(Engine(True)) == DoctorCheck("native core", "ok", "decodes frames")
    stale = check_engine(Engine(False, "the native core was built from other sources. Run make native"))
    assert (stale.level, stale.what_to_do) == ("warn", "make native")
    assert check_engine(Engine(False, "this installation has no native core")).level == "ok"


def test_python() -> None:
    assert check_python((3, 11)).level == "ok"
    assert is_bad(check_python((3, 10)), "3.10", "make setup")
    assert is_bad(check_python((3, 14)), "3.14")


def test_java() -> None:
    assert check_java(Java(Path("/usr/bin/java"), 17)).level == "ok"
    assert check_java(Java(Path("/usr/bin/java"), 25)).level == "warn"
    missing = check_java(JavaError("Java 17 is needed. To install it:\n    apt-get install openjdk"))
    assert is_bad(missing, "Java 17 is needed", "apt-get install openjdk")


def test_packages() -> None:
    required = list(map(Requirement, ("pyspark==4.2.0", "pandas<3", "Delta_Spark>=4")))
    good = {"pyspark": "4.2.0", "pandas": "2.3.3", "delta-spark": "4.4.0"}
    assert check_packages(required, good) == DoctorCheck("packages", "ok", "all 3 requirements are satisfied")
    assert is_bad(check_packages(required, {**good, "pyspark": "4.1.0"}), "pyspark is 4.1.0, not ==4.2.0", "make setup")
    assert is_bad(check_packages(required, {"pyspark": "4.2.0", "pandas": "2.3.3"}), "Delta_Spark is missing")


def test_disk_and_memory() -> None:
    assert [check_disk(gigabytes * 10**9).level for gigabytes in (50, 3)] == ["ok", "warn"]
    assert is_bad(check_disk(10**8), "0.1 GB")
    assert parse_memory("2g") == 2 * 1024**3
    assert parse_memory("384m") == 384 * 1024**2
    assert check_memory(10**9, 3 * 10**9).level == "warn"
    assert check_memory(4 * 10**9, 3 * 10**9).level == "ok"


def test_a_taken_port_names_the_setting_and_the_variable() -> None:
    listener, in_use = Listener("kafka.embedded_port", "127.0.0.1", 29092), OSError(errno.EADDRINUSE, "in use")
    assert check_port(listener, None, ours=False).level == "ok"
    assert check_port(listener, in_use, ours=True).level == "ok"
    taken = check_port(listener, in_use, ours=False)
    assert is_bad(taken, "29092", "in use by another program", "kafka.embedded_port", "KILN_KAFKA__EMBEDDED_PORT")
    denied = check_port(listener, OSError(errno.EACCES, "Permission denied"), ours=False)
    assert is_bad(denied, "cannot be used on 127.0.0.1 (Permission denied)")


def test_the_broker_must_answer_unless_it_is_ours_and_not_started() -> None:
    away = BrokerStatus("a:1", False, "nothing listens there", ())
    assert check_broker(away, embedded=True, runs=False).level == "ok"
    assert is_bad(check_broker(away, embedded=True, runs=True), "broker.log")
    assert is_bad(check_broker(away, embedded=False, runs=False), "a:1", "nothing listens there", "kafka.bootstrap")


def test_the_partition_count_of_updates_is_for_life() -> None:
    broker = BrokerStatus("a:1", True, "", (TopicStatus("kiln.updates", {0: 0, 1: 0}, {0: 5, 1: 5}),))
    assert check_updates_partitions(broker, "kiln.updates", 2).level == "ok"
    assert check_updates_partitions(broker, "other.updates", 9).level == "ok"
    assert is_bad(check_updates_partitions(broker, "kiln.updates", 4), "has 2", "have 4", "updates_partitions = 2")


def test_the_bridge_serves_blocks_unless_ipfs_api_is_empty(tmp_path: Path) -> None:
    check = ipfs_check(Settings(state=tmp_path, kafka=nowhere()))
    assert (check.level, str(tmp_path / "blocks") in check.found) == ("ok", True)
    check = ipfs_check(Settings(state=tmp_path, kafka=nowhere(), ipfs=Ipfs(api="")))
    assert check.level == "warn"
    assert "peers cannot fetch the blocks of batches" in check.found
    assert str(tmp_path / "blocks") in check.found
    assert "ipfs.api" in check.what_to_do


def test_a_kubo_that_does_not_answer_and_one_that_does(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    away = ipfs_check(Settings(state=tmp_path, kafka=nowhere(), ipfs=Ipfs(api=url)))
    assert is_bad(away, url, "does not answer", "start Kubo", "KILN_IPFS__API")
    assert check_ipfs(url, f"kubo 0.44.0 at {url}", "") == DoctorCheck("ipfs", "ok", f"kubo 0.44.0 at {url}")


def nowhere() -> Kafka:
    """A broker that is not there."""
    return Kafka(embedded_port=closed_port(), embedded_controller_port=closed_port())


def ipfs_check(settings: Settings) -> DoctorCheck:
    return next(check for check in run_checks(settings) if check.name == "ipfs")


def test_a_checkpoint_of_another_spark(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoints" / "batch", 1, 1)
    (tmp_path / "checkpoints" / "batch" / "offsets" / "0").write_text("v7\n")
    checks = check_checkpoints(read_status(Settings(state=tmp_path, kafka=Kafka(embedded_port=closed_port()))).queries)
    assert is_bad(checks, "batch", "v7", "requirements.lock")


def test_a_state_folder_that_cannot_be_made_is_found_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x", encoding="utf-8")
    kafka = Kafka(embedded_port=closed_port(), embedded_controller_port=closed_port())
    state = {check.name: check for check in run_checks(Settings(state=file / "state", kafka=kafka))}["state folder"]
    assert is_bad(state, "is not a folder", "--state")
    fine = {check.name: check for check in run_checks(Settings(state=tmp_path / "new", kafka=kafka))}["state folder"]
    assert fine.level == "ok"
    assert not (tmp_path / "new").exists()
    assert check_state(tmp_path, "").level == "ok"


def test_the_doctor_finds_no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("java") is None
    checks = run_checks(Settings(state=tmp_path, kafka=Kafka(embedded_port=closed_port())))
    java = next(check for check in checks if check.name == "java")
    assert is_bad(java, "no java on PATH")
    assert any(check.level == "fail" for check in checks)


@pytest.mark.parametrize(
    "setting",
    ["kafka.embedded_port", "kafka.embedded_controller_port", "bridge.listen", "monitor.listen"],
)
def test_a_port_in_use_is_found(tmp_path: Path, deaf_server: int, setting: str) -> None:
    section, _, key = setting.partition(".")
    value = {"kafka": deaf_server, "monitor": f"127.0.0.1:{deaf_server}"}.get(
        section, f"/ip4/127.0.0.1/tcp/{deaf_server}"
    )
    given: dict[str, dict[str, object]] = {"kafka": {"embedded_port": closed_port()}}
    given[section] = {**given.get(section, {}), key: (value,) if section == "bridge" else value}
    settings = Settings.model_validate({"state": tmp_path, **given})
    found = next(check for check in run_checks(settings) if check.name == f"port {deaf_server}")
    assert is_bad(found, f"in use by process {os.getpid()}", f"set {setting}")
    with lock_state(tmp_path, "bridge"):  # as while Kiln itself runs in this process
        found = next(check for check in run_checks(settings) if check.name == f"port {deaf_server}")
        assert found.level == ("fail" if section == "kafka" else "ok")


def test_a_port_of_the_overlay_in_use_is_found(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        bep50 = Bep50(enabled=True, listen=(f"127.0.0.1:{port}",))
        checks = run_checks(Settings(state=tmp_path, kafka=nowhere(), bep50=bep50))
    assert is_bad(next(check for check in checks if check.name == f"port {port}"), "in use", "bep50.listen")


def test_a_state_folder_of_another_version_is_found(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("99\n", encoding="ascii")
    state = next(
        check for check in run_checks(Settings(state=tmp_path, kafka=nowhere())) if check.name == "state folder"
    )
    assert is_bad(state, "has version 99", "--state")


def test_a_state_folder_of_another_user_is_found(tmp_path: Path) -> None:
    found = check_state(tmp_path, "", owner="kiln")
    assert (found.level, found.found) == ("warn", f"{tmp_path}: belongs to the user kiln")
    if os.geteuid() == 0:
        os.chown(tmp_path, 12_345, 12_345)
        checks = run_checks(Settings(state=tmp_path, kafka=nowhere()))
        state = next(check for check in checks if check.name == "state folder")
        assert (state.level, state.found) == ("warn", f"{tmp_path}: belongs to the user 12345")


def test_a_store_that_does_not_answer_is_one_row(tmp_path: Path) -> None:
    options = {"endpoint_url": f"http://127.0.0.1:{closed_port()}", "region": "us-east-1", "access_key_id": "a"}
    lake = SettingsLake(
        uri="s3://nowhere/lake", storage_options={**options, "secret_access_key": "b", "max_retries": "0"}
    )
    settings = Settings(state=tmp_path, kafka=nowhere(), lake=lake, checkpoints=Checkpoints(uri="s3://nowhere/checks"))
    checks = {check.name: check for check in run_checks(settings)}
    assert is_bad(checks["object store"], "s3://nowhere/lake", "docs/object-store.md")
    assert {"ipfs", "bridge", "memory"} <= checks.keys()
    assert not {"lake", "checkpoints"} & checks.keys()


def test_a_check_that_fails_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> Never:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr("kiln.deploy.ops.doctor.check_state_version", fail)
    checks = {check.name: check for check in run_checks(Settings(state=tmp_path, kafka=nowhere()))}
    assert is_bad(checks["state folder"], "Permission denied", "kiln doctor")
    assert {"ipfs", "memory"} <= checks.keys()


def test_variables_of_another_spark_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in find_foreign_variables(os.environ):
        monkeypatch.delenv(name)
    settings = Settings(state=tmp_path, kafka=nowhere())
    assert "ignored" not in next(check for check in run_checks(settings) if check.name == "spark").found
    for name in ("SPARK_HOME", "HADOOP_CONF_DIR", "PYSPARK_PYTHON"):
        monkeypatch.setenv(name, "/nowhere")
    spark = next(check for check in run_checks(settings) if check.name == "spark")
    assert spark.level == "ok"
    assert spark.found.endswith("; ignored variables: HADOOP_CONF_DIR, PYSPARK_PYTHON, SPARK_HOME")
    on_a_cluster = settings.model_copy(update={"spark": Spark(master="spark://master:7077")})
    assert not any(check.name == "spark" for check in run_checks(on_a_cluster))


def test_what_the_bridge_says_is_wrong_is_told_while_it_runs(tmp_path: Path) -> None:
    status = structs.replace(BRIDGE, errors=("2 of 3 peers hear no batch",))
    assert check_bridge(status, 101.0).level == "warn"
    assert "2 of 3 peers" in check_bridge(status, 101.0).found
    assert check_bridge(structs.replace(status, errors=()), 101.0).level == "ok"
    assert check_bridge(status, 200.0).found == check_bridge(None, 0.0).found == "not running"
    (tmp_path / "bridge").mkdir()
    write_status(tmp_path / "bridge" / "status.json", structs.replace(status, at=time.time()))
    checks = run_checks(Settings(state=tmp_path, kafka=Kafka(embedded_port=closed_port())))
    (told,) = [check for check in checks if check.name == "bridge"]
    assert (told.level, told.found) == ("warn", "2 of 3 peers hear no batch")


def test_updates_that_wait_for_geneses_that_no_peer_has_are_counted_with_what_to_do() -> None:
    fetcher = FetcherStatus("fetching 9", waiting=200, unanswered_streams=9, unanswered_updates=193)
    (check,) = check_geneses(structs.replace(BRIDGE, fetcher=fetcher), 101.0)
    assert check.level == "warn"
    assert check.found == "193 updates of 9 streams wait for the streams' first events, which no peer has sent"
    assert "ipfs.peers" in check.what_to_do
    assert check_geneses(structs.replace(BRIDGE, fetcher=fetcher), 200.0) == []
    assert check_geneses(structs.replace(BRIDGE, fetcher=FetcherStatus("fetching 9", waiting=7)), 101.0) == []


@pytest.mark.parametrize(
    ("levels", "last"),
    [
        (("ok", "ok"), "no problems"),
        (("ok", "warn"), "1 warning"),
        (("fail", "warn", "warn"), "1 problem, 2 warnings"),
        (("fail", "fail"), "2 problems"),
    ],
)
def test_the_last_line_counts_warnings_too(levels: tuple[Level, ...], last: str) -> None:
    console = Console(file=StringIO(), width=100)
    console.print(render_checks([DoctorCheck("x", level, "y") for level in levels]))
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue().splitlines()[-1] == last


def test_the_screen_says_what_to_do_and_how_it_stands() -> None:
    console = Console(file=StringIO(), width=100)
    console.print(
        render_checks([DoctorCheck("java", "fail", "none", "install it"), DoctorCheck("disk", "ok", "50 GB")])
    )
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "→ install it" in text
    assert "1 problem" in text


def test_a_low_limit_of_open_files_is_a_warning() -> None:
    assert check_open_files(1_024).level == "ok"
    low = check_open_files(256)
    assert (low.level, low.found) == ("warn", "a process may open at most 256 files and sockets")
    assert "ulimit -n 4096" in low.what_to_do
