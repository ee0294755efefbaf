"""A lake in an object store: asked, checked, cared for, swapped and looked at as one on a disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kiln.conf.process.location import parse_location
from kiln.deploy.cli.app import run_command
from kiln.deploy.ops.doctor import probe_store
from kiln.deploy.ops.doctor_checks import check_store
from kiln.deploy.query.ask import SqlError, query_lake
from kiln.deploy.query.trace import trace_subject
from kiln.deploy.query.trace_ids import parse_id
from kiln.pipelines.backfill.run_diff import diff_run
from kiln.pipelines.backfill.run_log import find_run, read_events
from kiln.pipelines.backfill.swap import FileSwap
from kiln.pipelines.backfill.swap_runs import swap_run
from kiln.pipelines.delta.commits import BatchProgress, WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.delta.lake import Lake, locate_log
from kiln.pipelines.maintenance.plan import MaintenancePolicy
from kiln.pipelines.maintenance.steps import maintain_table
from kiln.pipelines.recovery import DamageLocation, examine, recover_tables
from kiln.pipelines.runtime.checkpoint import Checkpoint
from kiln.pipelines.runtime.topics import TopicState
from kiln.schemas.delta.tables import TABLES
from kit.object_store import ObjectStore
from kit.quality_lake import made_up_rows, write_rows
from kit.run_tables import TO, begin, fill, history, tip

pytest_plugins = ["kit.object_store"]

_HOUR = 3_600_000_000


@pytest.fixture
def lake(object_store: ObjectStore) -> Lake:
    return object_store.lake()


@pytest.fixture
def kiln(object_store: ObjectStore, lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of a Kiln with that lake: its credentials come from the environment, too."""
    monkeypatch.setenv("KILN_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("KILN_LAKE__URI", lake.path)
    for key, value in object_store.address.items():
        monkeypatch.setenv(f"KILN_LAKE__STORAGE_OPTIONS__{key.upper()}", value)
    for key, value in object_store.credentials.items():
        monkeypatch.setenv(key, value)
    return monkeypatch


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert run_command(list(arguments)) == code, capsys.readouterr()
    return capsys.readouterr().out


def test_questions_are_answered_as_over_a_disk(lake: Lake, tmp_path: Path) -> None:
    local = Lake(str(tmp_path / "lake"))
    rows = made_up_rows(300)
    for each in (lake, local):
        write_rows(each, rows)
    for question in (
        "SELECT * FROM messages ORDER BY ALL",
        "SELECT separator_value, count(*), max(emitted_at) FROM batches GROUP BY ALL ORDER BY ALL",
        "SELECT * FROM batch_savings ORDER BY ALL",
        "SHOW TABLES",
    ):
        assert list(query_lake(lake, question).rows()) == list(query_lake(local, question).rows()), question
    cid = str(next(iter(query_lake(lake, "SELECT min(batch_cid) FROM batches").rows()))[0])
    traces = [trace_subject(each, parse_id(cid)) for each in (lake, local)]
    assert [step.cells for step in traces[0].steps] == [step.cells for step in traces[1].steps]


def test_a_question_reads_the_tables_alone(lake: Lake) -> None:
    write_rows(lake, made_up_rows(20))
    (lake.root / "other.parquet").write([b"PAR1"])
    for question in (
        f"SELECT * FROM '{lake.path}/other.parquet'",
        f"SELECT * FROM read_text('{lake.path}/tips/_delta_log/00000000000000000000.json')",
        "SELECT * FROM '/etc/passwd'",
    ):
        with pytest.raises(SqlError):
            list(query_lake(lake, question).rows())


def test_commands_work_with_credentials_of_the_environment(
    lake: Lake, kiln: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(lake, made_up_rows(60))
    tables = {each["name"]: each for each in json.loads(said(capsys, "status", "--json"))["tables"]}
    assert set(tables) == set(TABLES)
    assert tables["messages"]["rows"] > 20
    assert json.loads(said(capsys, "sql", "--json", "SELECT count(*) AS n FROM messages")) == [
        {"n": tables["messages"]["rows"]}
    ]
    cared = json.loads(said(capsys, "maintain", "--json"))
    assert {each["table"] for each in cared} == set(TABLES)
    assert not any(each["error"] or each["left_alone"] for each in cared)
    checked = json.loads(said(capsys, "quality", "--json"))
    assert len(checked) > 20
    before = len(list(query_lake(lake, "SELECT * FROM quality_results").rows()))
    assert before == len(checked)
    said(capsys, "quality")  # from what it remembers on
    assert len(list(query_lake(lake, "SELECT * FROM quality_results").rows())) > before
    assert json.loads(said(capsys, "backfill", "list", "--json")) == []


def test_neither_settings_nor_errors_show_credentials(
    object_store: ObjectStore, lake: Lake, kiln: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kiln.setenv("KILN_LAKE__STORAGE_OPTIONS__AWS_ACCESS_KEY_ID", object_store.key)
    kiln.setenv("KILN_LAKE__STORAGE_OPTIONS__AWS_SECRET_ACCESS_KEY", "a wrong one that nobody may see")
    shown = said(capsys, "config", "show")
    assert object_store.endpoint in shown
    assert run_command(["status", "--json"]) != 0
    shown += "".join(capsys.readouterr())
    assert lake.path in shown
    assert object_store.key not in shown
    assert "nobody may see" not in shown


def test_care_makes_one_file_of_many_shortens_the_log_and_removes_what_nobody_needs(lake: Lake) -> None:
    lake.create(["tips"])
    commits = DeltaRsCommits(lake)

    def appended(numbers: range) -> None:
        for number in numbers:
            files = TableFiles(lake, "tips")
            files.add(tuple(tip(number, TO + number)[column.name] for column in TABLES["tips"].columns))
            assert commits.commit("tips", files.close(), WriteId("q", number))

    appended(range(40))
    out = TableFiles(lake, "tips")
    out.add(tuple(tip(0, TO)[column.name] for column in TABLES["tips"].columns))
    (left,) = out.close()  # and no commit
    rows = sorted(map(str, query_lake(lake, "SELECT * FROM tips").rows()))
    now = max(found.modified for found in lake.folder("tips").files()) + 13 * _HOUR
    done = maintain_table(lake, "tips", MaintenancePolicy(128 << 20, _HOUR, unnamed=_HOUR), now, lambda words: None)
    assert done.files == (40, 1)
    assert sorted(map(str, query_lake(lake, "SELECT * FROM tips").rows())) == rows
    appended(range(40, 150))  # so many that a checkpoint is older than the newest 100 entries, which stay
    done = maintain_table(lake, "tips", MaintenancePolicy(128 << 20, _HOUR, unnamed=_HOUR), now, lambda words: None)
    assert done.garbage[0] >= 40
    assert done.entries[1] < done.entries[0]
    begins = min(found.name for found in locate_log(lake.folder("tips")).files() if found.name.endswith(".json"))
    assert int(begins[:20]) > 0
    assert lake.open("tips").to_pyarrow_table().num_rows == 150
    assert left.name in {found.name for found in lake.folder("tips").files()}, "its query may be about to name it"


def test_a_query_with_checkpoints_on_a_disk_is_recovered_from_its_tables(lake: Lake, tmp_path: Path) -> None:
    """Killed in its micro-batch 2, between its two tables."""
    tables, commits = ("tips", "batch_tips"), DeltaRsCommits(lake)
    lake.create(tables)
    for batch, table in ((0, "tips"), (0, "batch_tips"), (1, "tips"), (1, "batch_tips"), (2, "tips")):
        files = TableFiles(lake, table)
        files.add(tuple(f"row {batch}" if each.type == "string" else batch for each in TABLES[table].columns))
        progress = BatchProgress(
            query_id="q",
            batch=batch,
            writes=[f"{each}:append" for each in tables],
            starts={"kiln.batches": {0: 10 * batch}},
            ends={"kiln.batches": {0: 10 * batch + 10}},
        )
        assert commits.commit(table, files.close(), WriteId("q", batch), progress)
    location = DamageLocation(tmp_path, parse_location(tmp_path / "checkpoints"), lake)
    (damage,) = examine(location, ["sink"])
    assert damage.is_restorable
    topics = {"kiln.batches": TopicState("id", {0: 0}, {0: 30})}
    recover_tables(location, "sink", topics, lambda lake: iter(()), 5, durable=True)
    assert [lake.open(table).to_pyarrow_table().num_rows for table in tables] == [2, 2]
    assert Checkpoint(parse_location(tmp_path / "checkpoints" / "sink")).first_offsets == {"kiln.batches": {0: 20}}
    assert examine(location, ["sink"]) == []


def test_a_run_is_listed_compared_swapped_in_and_dropped(
    lake: Lake, kiln: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lake.create(TABLES)
    fill(lake, history(range(40)))
    run = begin(lake)
    tables = history(range(5, 50))
    fill(lake.locate_run("r"), tables)
    assert not all(each.is_equal for each in diff_run(lake, run, lambda words: None))
    assert swap_run(lake, run, FileSwap(lake, durable=True), lambda: TO + 10, lambda words: None)
    swapped = find_run(lake, "r")
    assert swapped is not None
    assert all(each.is_equal for each in diff_run(lake, swapped, lambda words: None))
    updates = [str(row[0]) for row in query_lake(lake, "SELECT message_id FROM updates").rows()]
    assert sorted(updates) == sorted(f"m{number}" for number in range(5, 50))
    assert [each["state"] for each in json.loads(said(capsys, "backfill", "list", "--json"))] == ["swapped"]
    said(capsys, "backfill", "drop", "r")
    assert list(lake.locate_run("r").root.folders()) == []
    assert [each.event for each in read_events(lake)][-2:] == ["dropping", "dropped"]


def test_doctor_tries_whether_the_store_refuses_a_second_write(lake: Lake) -> None:
    assert check_store(lake.path, probe_store(lake)).level == "ok"
    assert list(lake.root.folders()) == []
    nowhere = Lake("s3://no-such-bucket/lake", lake.options)
    found = check_store(nowhere.path, probe_store(nowhere))
    assert found.level == "fail"
    assert "s3://no-such-bucket/lake" in found.found
