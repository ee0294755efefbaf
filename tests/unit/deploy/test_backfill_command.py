"""`kiln backfill run`: what its options must be, and what it says of its run (decision 21)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kiln.deploy.cli.app import run_command
from kiln.deploy.cli.options import USAGE
from kiln.deploy.run.backfill import ProgressFormatter, describe_outcome
from kiln.pipelines.backfill.merged_rows import OutsideFrames
from kiln.pipelines.backfill.run import RunOutcome, RunProgress, encode_outcome

RANGE = ("--from", "2026-11-01", "--to", "2026-11-03")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--from", "soon", "--to", "2026-11-03"), "--from soon: expected a time such as 2026-11-01"),
        (("--from", "2026-11-03", "--to", "2026-11-03"), "the range is empty, because --to is exclusive"),
        (("--from", "2026-11-03", "--to", "2026-11-02"), "the range ends before it starts"),
        ((*RANGE, "--source", "kafak"), "kafak: no such file or folder; did you mean kafka?"),
        (
            (*RANGE, "--source", "kafka", "a.log"),
            "--source kafka a.log: frames, kafka and files cannot be combined",
        ),
        ((*RANGE, "--source", "nothing.log"), "nothing.log: no such file or folder"),
        ((*RANGE, "--window", "0s"), "--window 0s: the duration must be greater than zero"),
        ((*RANGE, "--window", "5"), "--window 5: expected a duration"),
        ((*RANGE, "--as-of", "then"), "--as-of then: expected a time"),
    ],
)
def test_a_command_line_that_makes_no_sense(
    arguments: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["backfill", "run", "--run", "a", "--state", str(tmp_path), *arguments]) == USAGE
    assert words in capsys.readouterr().err


def test_a_name_that_no_run_can_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["backfill", "run", "--run", "../a", "--state", str(tmp_path), *RANGE]) == USAGE
    assert "'../a' is not a valid name of a backfill run" in capsys.readouterr().err
    assert not (tmp_path / "lake").exists()


def test_no_run_is_taken_for_the_live_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`kiln backfill diff live` compares live and the run."""
    assert run_command(["backfill", "run", "--run", "live", "--state", str(tmp_path), *RANGE]) == USAGE
    assert "a backfill run cannot have the name 'live', which stands for the live tables" in capsys.readouterr().err
    assert not (tmp_path / "lake").exists()


def test_the_pace_of_a_run_is_that_of_its_step() -> None:
    times = iter([100.0, 110.0, 120.0, 200.0])
    pace = ProgressFormatter(lambda: next(times))
    day = 1_793_491_200_000_000  # 2026-11-01
    assert pace.format(RunProgress("decoding", 0, 4, day)) == "decoding: 0 of 4, up to 2026-11-01 00:00:00"
    half = pace.format(RunProgress("decoding", 2, 4, day, frames=5_000, rows=7_000))
    assert half == "decoding: 2 of 4, up to 2026-11-01 00:00:00, 7,000 rows, 500 frames/s, 0:00:10 left in this step"
    assert pace.format(RunProgress("decoding", 4, 4, frames=10_000, rows=9_000)).endswith("9,000 rows, 500 frames/s")
    assert pace.format(RunProgress("batching", 0, 1, frames=10_000, rows=9_000)) == "batching: 0 of 1, 9,000 rows"


def test_a_run_whose_rows_are_all_outside_its_range_says_where_they_are() -> None:
    july = 1_626_355_473_000_000  # 2021-07-15 13:24:33
    outside = OutsideFrames(1_952, july, july + 3_600_000_000)
    outcome = RunOutcome("november", {}, 0, 1_952, outside=outside)
    assert describe_outcome(outcome) == (
        "run november is done: no rows; 1,952 frames of the files are outside the range and not in the run. Their "
        "times are 2021-07-15 13:24:33 to 2021-07-15 14:24:33 UTC: to include them, start a run whose --from "
        "and --to enclose these times"
    )
    assert encode_outcome(outcome)["outside"] == {"frames": 1_952, "first_at": july, "last_at": july + 3_600_000_000}


def test_the_end_of_a_run_in_words_and_as_json() -> None:
    outcome = RunOutcome("november", {"updates": 2_000, "batches": 7}, 2_007, 10)
    assert describe_outcome(outcome) == "run november is done: 7 batches, 2,000 updates"
    assert (
        describe_outcome(RunOutcome("november", outcome.rows, 0, 0, is_repeated=True))
        == "run november was already done: nothing was written"
    )
    nowhere = {"frames": 0, "first_at": 0, "last_at": 0}
    said = {"run": "november", "wrote": 2_007, "frames": 10, "rows": outcome.rows, "gone": []}
    said["outside"] = nowhere
    assert encode_outcome(outcome) == said
    lacking = replace(outcome, lost=["kiln.frames, partition 0: all 9 records were removed"])
    assert describe_outcome(lacking) == (
        "run november is done: 7 batches, 2,000 updates; records that Kafka had removed before the run are missing: "
        "kiln.frames, partition 0: all 9 records were removed"
    )
    assert encode_outcome(lacking) == {**said, "gone": list(lacking.lost)}
