"""`kiln maintain`, and the care that `kiln run` lets a child process take: what a user sees of it."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest

from kiln.conf.process.state_folder import lock_state
from kiln.conf.settings.model import Maintenance, Settings
from kiln.deploy.cli.app import run_command
from kiln.deploy.ops.maintenance import build_policy
from kiln.deploy.ops.recover import Recovery
from kiln.deploy.run.children import MaintenanceProcess, PeriodicProcess
from kiln.pipelines.backfill.run_log import append_event, read_runs
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.tables import TABLES
from kit.awaiting import wait_until

Capture = pytest.CaptureFixture[str]
TABLE = "tips"


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in list(os.environ):
        if name.startswith("KILN_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("KILN_STATE", str(tmp_path))
    return tmp_path


def fill(state: Path, times: int = 10, *, days_ago: int = 0) -> Lake:
    lake = Lake(str(state / "lake"))
    lake.create([TABLE])
    commits = DeltaRsCommits(lake)
    at = time.time_ns() // 1_000 - days_ago * 86_400_000_000
    for number in range(times):
        out = TableFiles(lake, TABLE)
        out.add(tuple(at + number if column.type == "timestamp" else "x" for column in TABLES[TABLE].columns))
        assert commits.commit(TABLE, out.close(), WriteId(f"{days_ago} days ago", number))
    return lake


def files(lake: Lake) -> int:
    return len(lake.open(TABLE).file_uris())


def count(lake: Lake) -> int:
    return len(lake.open(TABLE).to_pyarrow_table()["tip"].to_pylist())


def test_a_dry_run_says_what_would_be_done_and_the_command_does_it(state: Path, capsys: Capture) -> None:
    lake = fill(state)
    assert run_command(["maintain", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "10 → 1" in said
    assert "tips: compact: 10 files" in said
    assert files(lake) == 10
    assert run_command(["maintain"]) == 0
    assert "10 → 1" in capsys.readouterr().out
    assert (files(lake), count(lake)) == (1, 10)


def test_json_has_an_object_for_each_table(state: Path, capsys: Capture) -> None:
    fill(state)
    assert run_command(["maintain", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["table"], told["files_before"], told["files_after"], told["error"]) == (TABLE, 10, 1, "")
    assert told["rewritten_bytes"] > 0


def test_rows_go_by_age_only_where_the_settings_say_so(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    lake = fill(state, days_ago=40)
    fill(state)
    assert run_command(["maintain"]) == 0
    assert count(lake) == 20
    monkeypatch.setenv("KILN_LAKE__RETENTION", json.dumps({TABLE: "30d"}))
    assert run_command(["maintain"]) == 0
    assert count(lake) == 10
    for wrong, words in (
        ({"streams": "30d"}, "streams: retention applies only to frames"),
        ({TABLE: "1h"}, "tips: expected at least 1d"),
    ):
        monkeypatch.setenv("KILN_LAKE__RETENTION", json.dumps(wrong))
        assert run_command(["maintain"]) == 2
        assert words in capsys.readouterr().err


def test_what_a_run_or_its_swap_reads_stays_until_it_is_done(state: Path) -> None:
    lake = fill(state)
    settings = Settings(state=state)
    details = {"inputs": {"live": {TABLE: 4}}}
    append_event(lake, "november", "begun", 1, range_from=0, range_to=1, details=details)
    append_event(
        lake, "later", "begun", 2, range_from=0, range_to=1, details={"inputs": {"live": {TABLE: 7, "frames": 0}}}
    )
    assert build_policy(settings, TABLE, read_runs(lake)).pinned == 4
    append_event(lake, "november", "done", 3)
    assert build_policy(settings, TABLE, read_runs(lake)).pinned == 7
    append_event(lake, "later", "dropped", 4)
    assert build_policy(settings, TABLE, read_runs(lake)).pinned is None
    append_event(lake, "november", "swapping", 5, details={TABLE: 9, "by": "host:/state"})
    assert build_policy(settings, TABLE, read_runs(lake)).pinned == 9
    append_event(lake, "november", "swapped", 6)
    assert build_policy(settings, TABLE, read_runs(lake)).pinned is None


def test_two_at_once_are_refused_in_words(state: Path, capsys: Capture) -> None:
    lake = fill(state)
    with lock_state(state, "maintain"):
        assert run_command(["maintain"]) == 1
        said = capsys.readouterr().err
        assert f"cannot lock maintain: process {os.getpid()} holds this lock of the state folder {state}." in said
        assert run_command(["maintain", "--dry-run"]) == 0, "which changes nothing"
        assert run_command(["recover"]) == 1, "tables do not go back while they are cared for"
    assert files(lake) == 10
    with Recovery(Settings(state=state), lambda _: None):
        assert run_command(["maintain"]) == 1


def test_a_table_that_cannot_be_read_does_not_keep_the_others_from_care(state: Path, capsys: Capture) -> None:
    lake = fill(state)
    torn = state / "lake" / "frames" / "_delta_log"
    torn.mkdir(parents=True)
    (torn / f"{0:020}.json").write_text("{")
    assert run_command(["maintain"]) == 1
    assert "table frames in" in capsys.readouterr().out
    assert files(lake) == 1


def ended(child: PeriodicProcess) -> None:
    def no_more() -> bool:
        child.check()
        return child._process is None

    wait_until(no_more, "the child's end", 60)


def test_kiln_run_cares_for_the_tables_in_a_child_process(state: Path) -> None:
    lake = fill(state)
    clock = [0.0]
    care = MaintenanceProcess(Settings(state=state), lambda: clock[0])
    care.check()
    assert care._process is None, "not before its time"
    clock[0] += 600
    care.check()
    ended(care)
    assert (care.errors, files(lake), count(lake)) == ([], 1, 10)
    with lock_state(state, "maintain"):
        clock[0] += 600
        care.check()
        ended(care)
    assert "cannot lock maintain: process " in care.errors[0]
    clock[0] += 600
    care.check()
    care.stop()
    assert care._process is None


def test_nobody_cares_where_the_settings_say_never(state: Path) -> None:
    fill(state)
    clock = [0.0]
    care = MaintenanceProcess(Settings(state=state, maintenance=Maintenance(interval=timedelta())), lambda: clock[0])
    clock[0] += 1e9
    care.check()
    assert care._process is None
