"""`kiln backfill list`, `diff`, `swap` and `drop`: what they print, their exit codes, and whom they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kiln.conf.process.state_folder import lock_state
from kiln.deploy.cli.app import run_command
from kiln.pipelines.backfill.run_log import append_event, read_events
from kiln.pipelines.backfill.runs import list_runs, lock_run
from kiln.pipelines.delta.lake import Lake
from kit.run_tables import FROM, TO, begin, fill, history


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KILN_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def lake(state: Path) -> Lake:
    """Live and a run `r` that lacks its last ten updates."""
    lake = Lake(str(state / "lake"))
    fill(lake, history(range(30)))
    begin(lake)
    fill(lake.locate_run("r"), history(range(20)))
    return lake


def states(lake: Lake, state: Path) -> dict[str, str]:
    return {each.run.name: each.state for each in list_runs(lake, state)}


def test_diff_swap_and_diff_again(lake: Lake, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["backfill", "diff", "r", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [found["batches"][name] for name in ("same", "only_live", "only_run")] == [2, 1, 0]
    assert run_command(["backfill", "diff", "r"]) == 1
    assert "2026-01-01 model/k1: 10 rows only live, 0 only in the run, 20 equal" in capsys.readouterr().out
    assert run_command(["backfill", "swap", "r"]) == 0
    assert run_command(["backfill", "diff", "r"]) == 0
    assert "the run equals the live tables" in capsys.readouterr().out
    assert run_command(["backfill", "swap", "r"]) == 0
    assert "nothing to do: the rows of run r are in the live tables already" in capsys.readouterr().err


def test_drop_deletes_what_was_saved_for_a_run_that_never_began(
    lake: Lake, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    streams = state / "backfill" / "z"
    streams.mkdir(parents=True)
    (streams / "partial").write_bytes(b"of a process that was killed")
    assert run_command(["backfill", "drop", "z"]) == 0
    assert "run z had not begun: deleted the input that was saved for it" in capsys.readouterr().err
    assert not streams.exists()
    assert run_command(["backfill", "drop", "z"]) == 1
    assert "there is no backfill run z" in capsys.readouterr().err


def test_list_shows_every_state(lake: Lake, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("half", "going", "cut", "in", "gone"):
        begin(lake, name, done=name not in ("half", "going"))
    append_event(lake, "cut", "swapping", TO + 5)
    for number, event in enumerate(("swapping", "swapped")):
        append_event(lake, "in", event, TO + 5 + number)  # type: ignore[arg-type]  # both are events
    append_event(lake, "gone", "dropped", TO + 5)
    with lock_run(state, "going"):
        assert run_command(["backfill", "list", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert {name: each["state"] for name, each in found.items()} == {
        "r": "done",
        "half": "interrupted",
        "going": "running",
        "cut": "swap interrupted",
        "in": "swapped",
        "gone": "dropped",
    }
    assert found["r"]["rows"]["updates"] == 20
    assert (found["r"]["from"], found["r"]["to"]) == ("2026-01-01T00:00:00.000000Z", "2026-01-02T00:00:00.000000Z")
    assert run_command(["backfill", "list"]) == 0
    shown = capsys.readouterr().out
    assert "r  done  2026-01-01 00:00:00 to 2026-01-02 00:00:00, from frames" in shown
    assert "updates 20" in shown


def test_list_writes_nothing_so_that_a_lake_that_is_read_only_is_listed(lake: Lake, state: Path) -> None:
    def files() -> set[Path]:
        return set(state.rglob("*"))

    before = files()
    assert list_runs(lake, state)
    assert files() == before


def test_drop_removes_the_tables_and_keeps_the_account(
    lake: Lake, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = lake.open("messages").version()
    assert run_command(["backfill", "drop", "r"]) == 0
    assert list(Path(lake.path, "backfill").iterdir()) == []
    assert [each.event for each in read_events(lake)] == ["begun", "done", "dropping", "dropped"]
    assert lake.open("messages").version() == before
    assert run_command(["backfill", "drop", "r"]) == 0
    assert "was dropped before" in capsys.readouterr().err
    assert run_command(["backfill", "diff", "r"]) == 1
    assert "run r was dropped, and its tables are gone" in capsys.readouterr().err
    begin(lake, at=TO + 10**15)  # a run of the same name is another
    assert states(lake, state) == {"r": "done"}
    assert [each.state for each in list_runs(lake, state)] == ["dropped", "done"]
    append_event(lake, "r", "dropping", TO + 10**15 + 5)
    capsys.readouterr()
    assert run_command(["backfill", "list"]) == 0
    assert "r  drop interrupted" in capsys.readouterr().out


def test_a_run_that_somebody_works_on_is_not_dropped_or_swapped(
    lake: Lake, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lock_run(state, "r"):
        for command in ("drop", "swap"):
            assert run_command(["backfill", command, "r"]) == 1
            assert "backfill-r" in capsys.readouterr().err
    with lock_state(state, "swap"):
        assert run_command(["backfill", "swap", "r"]) == 1
    append_event(lake, "r", "swapping", TO + 5)
    capsys.readouterr()
    assert run_command(["backfill", "drop", "r"]) == 1
    assert "First complete it: kiln backfill swap r" in " ".join(capsys.readouterr().err.split())
    assert lake.locate_run("r").has("messages")


def test_mistakes_are_told_in_words(state: Path, lake: Lake, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("diff", "swap", "drop"):
        assert run_command(["backfill", command, "other"]) == 1
        assert "there is no backfill run other in" in capsys.readouterr().err
        assert run_command(["backfill", command, "../x"]) == 2
    begin(lake, "half", done=False)
    assert run_command(["backfill", "swap", "half"]) == 1
    assert "run half is not done" in capsys.readouterr().err
    assert run_command(["backfill", "diff", "half"]) == 1
    assert (
        'run half is not complete: live rows that it has not rebuilt yet count as "only live"'
        in capsys.readouterr().err
    )


def test_a_lake_that_is_not_there_is_told(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["backfill", "list"]) == 1
    assert "there is no lake at" in capsys.readouterr().err
    assert run_command(["backfill", "diff", "r"]) == 1
    assert not state.exists()


def test_a_table_that_cannot_be_read_is_named(lake: Lake, capsys: pytest.CaptureFixture[str]) -> None:
    for path in Path(lake.locate_run("r").table("updates")).glob("*.parquet"):
        path.write_bytes(b"no table")
    assert run_command(["backfill", "diff", "r"]) == 1
    assert "or those of backfill run r: " in " ".join(capsys.readouterr().err.split())


def test_the_range_is_of_the_run(lake: Lake, state: Path) -> None:
    (only,) = list_runs(lake, state)
    assert (only.run.range_from, only.run.range_to, only.run.details["source"]) == (FROM, TO, "frames")
