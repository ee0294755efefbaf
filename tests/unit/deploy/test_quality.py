"""Suites, the command and what surrounds a check: faults in YAML are named, a user's suite works, nothing leaves."""

from __future__ import annotations

import json
import os
import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd
import pytest
from deltalake import DeltaTable
from great_expectations.expectations.registry import get_expectation_impl

from kiln.conf.process.errors import SettingsError
from kiln.conf.settings.model import Network, Settings
from kiln.deploy.cli.app import run_command
from kiln.deploy.run.children import QualityChecks
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.quality import column_checks as checking
from kiln.pipelines.quality.check import check_lake
from kiln.pipelines.quality.data_docs import write_docs
from kiln.pipelines.quality.expectations import ExpectationOutcome, RowValidator
from kiln.pipelines.quality.results import CheckResult
from kiln.pipelines.quality.suites import EXPECTATIONS, FOLDER, Expectation, SuiteCheck, insert_lists, read_suites
from kiln.schemas.delta.tables import TABLES
from kit.awaiting import wait_until
from kit.checkpoint_files import commit, plan
from kit.quality_lake import append, made_up_rows, write_rows

ROOT = Path(__file__).resolve().parents[3]

OWN = """\
table: messages
owner: me
expectations:
  - expect: expect_column_values_to_be_in_set
    column: network
    value_set: [mainnet]
    level: warn
    hint: "another network"
  - expect: expect_rows_to_hold
    rule: "octet_length(data) < 3"
    level: error
    hint: "large"
"""

OWN_SQL = """\
-- No message has more than two bytes.
-- grain: a message
-- level: warn
-- hint: ask the author
SELECT network, message_id, observed_at AS seen_at, 'large' AS words FROM new_messages WHERE octet_length(data) > 2
"""


CHECKS = read_suites([FOLDER])


def lake_of(tmp_path: Path) -> Lake:
    lake = Lake(str(tmp_path / "state" / "lake"))
    write_rows(lake, made_up_rows(60))
    return lake


def is_on_rows(check: SuiteCheck) -> bool:
    """Is it for Great Expectations?"""
    return not check.sql and check.kind.rows


def suite(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "own.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("wrong", "right", "line", "words"),
    [
        (
            "expect_column_values_to_be_in_set",
            "expect_column_value_to_be_in_set",
            4,
            "expect_column_values_to_be_in_set?",
        ),
        ("column: network", "column: netwrok", 5, "did you mean network?"),
        ("table: messages", "table: mesages", 1, "did you mean messages?"),
        ("level: error", "level: fatal", 11, "expected warn or error"),
        ("rule:", "rul:", 10, "did you mean rule?"),
        ("    value_set: [mainnet]\n", "", 4, "value_set is missing"),
        ("value_set: [mainnet]", "value_set: mainnet", 6, "expected a list"),
        ("owner: me\n", "", 3, "owner is missing"),
        ("owner: me", "owner: [me", 3, ""),
    ],
)
def test_what_is_wrong_in_a_suite_is_named_with_its_line(
    wrong: str, right: str, line: int, words: str, tmp_path: Path
) -> None:
    file = suite(tmp_path, OWN.replace(wrong, right, 1))
    with pytest.raises(SettingsError) as error:
        read_suites([file])
    assert any(each.startswith(f"{file}:{line}: ") and words in each for each in str(error.value).splitlines()), (
        error.value
    )


def test_config_check_reads_the_suites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KILN_QUALITY__SUITES", str(suite(tmp_path, OWN)))
    assert run_command(["config", "check"]) == 0
    suite(tmp_path, OWN.replace("column: network", "column: netwrok"))
    assert run_command(["config", "check"]) == 2
    assert f"{tmp_path / 'own.yaml'}:5: column: netwrok" in capsys.readouterr().err


def test_a_suite_of_ones_own_works_from_its_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = lake_of(tmp_path)
    rows = DeltaTable(lake.table("messages")).to_pyarrow_table().num_rows
    monkeypatch.setenv("KILN_QUALITY__SUITES", str(suite(tmp_path, OWN)))
    monkeypatch.setenv("KILN_STATE", str(tmp_path / "state"))
    assert run_command(["quality", "--json", "--table", "messages"]) == 1
    told = json.loads(capsys.readouterr().out)
    failed = {each["expectation"]: each for each in told if not each["success"]}
    assert {name: each["level"] for name, each in failed.items()} == {
        "expect_column_values_to_be_in_set": "warn",
        "expect_rows_to_hold": "error",
    }
    assert failed["expect_column_values_to_be_in_set"]["observed"] == f"{rows:,} of {rows:,} rows"
    assert failed["expect_rows_to_hold"]["count"] == rows
    assert failed["expect_rows_to_hold"]["hint"] == "large"
    kept = DeltaTable(lake.table("quality_results")).to_pyarrow_table().to_pylist()
    assert len(kept) == len(told)
    assert sum(not row["success"] for row in kept) == 2

    (tmp_path / "own.yaml").unlink()
    monkeypatch.delenv("KILN_QUALITY__SUITES")
    assert run_command(["quality", "--table", "messages"]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--table", "mesages"], "did you mean messages?"), (["--since", "an hour"], "--since an hour: expected")],
)
def test_a_wrong_command_line_is_named(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["quality", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_check_reads_new_rows_alone_and_speaks_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = lake_of(tmp_path)
    settings = Settings(state=tmp_path / "state")
    validator, seen = RowValidator(), Counter[str]()
    rows_of = validator.validate_rows

    def counted(checks: Sequence[SuiteCheck], rows: pd.DataFrame, key: Sequence[str]) -> list[ExpectationOutcome]:
        seen[checks[0].table] += len(rows)
        return rows_of(checks, rows, key)

    def refused(*_: object) -> None:
        raise AssertionError("a check has tried to reach somebody")

    monkeypatch.setattr(validator, "validate_rows", counted)
    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.chdir(tmp_path / "state" / "lake")
    now = datetime.now(UTC) + timedelta(hours=1)
    looked = ("copies", "messages", "tips")

    def looked_at() -> set[tuple[str, str]]:
        """What is told of each check on rows."""
        results = check_lake(settings, lake, CHECKS, validator, now, tables=looked)
        return {(each.check.table, each.observed) for each in results if is_on_rows(each.check)}

    tables = {name: DeltaTable(lake.table(name)).to_pyarrow_table() for name in looked}
    rows = {name: table.num_rows for name, table in tables.items()}
    assert looked_at() == {(name, f"0 of {count} rows") for name, count in rows.items()}
    seen.clear()
    assert looked_at() == {(name, "0 of 0 rows") for name in rows}
    assert not seen
    append(lake, "copies", [tables["copies"].to_pylist()[0] | {"kafka_offset": 999_999}])
    assert looked_at() == {(name, f"0 of {int(name == 'copies')} rows") for name in rows}
    columns = {str(check.arguments["column"]) for check in CHECKS if check.table == "copies" and is_on_rows(check)}
    assert seen == {"copies": len(columns)}
    DeltaTable(lake.table("copies")).optimize.compact()
    assert looked_at() == {(name, "0 of 0 rows") for name in rows}
    assert seen == {"copies": len(columns)}
    assert {path.name for path in Path.cwd().iterdir()} == set(TABLES)
    assert not (Path.cwd() / "gx").exists()
    assert os.environ["GX_ANALYTICS_ENABLED"] == "False"


def test_what_is_at_fault_is_the_same_by_value_as_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Great Expectations sees each value once, and yet every row that has a wrong value is counted and named."""
    lake = lake_of(tmp_path)
    row = DeltaTable(lake.table("copies")).to_pyarrow_table().to_pylist()[0]
    wrong = [
        row | {"verdict": verdict, "remote_peer": peer, "kafka_offset": 900_000 + number}
        for number, (verdict, peer) in enumerate(
            [("good", "nobody"), ("good", row["remote_peer"]), ("bad", "nobody"), ("1", "none")]
        )
    ]
    append(lake, "copies", wrong)
    now = row["observed_at"] + timedelta(hours=1)

    def found(state: str) -> set[tuple[str, int, str]]:
        results = check_lake(Settings(state=tmp_path / state), lake, CHECKS, RowValidator(), now, tables=["copies"])
        named = [
            (each.check.name, each.count, sorted(zip(map(str, each.keys), each.words, strict=True)))
            for each in results
            if is_on_rows(each.check)
        ]
        return {(name, count, str(keys)) for name, count, keys in named}

    by_value = found("by value")
    monkeypatch.setattr(checking, "CHUNK_OF_VALUES", 2)
    monkeypatch.setattr(checking, "CHUNK", 40)
    assert found("a few values at once") == by_value
    monkeypatch.setattr(Expectation, "by_value", False)
    assert found("by row") == by_value
    counts = {name: count for name, count, _ in by_value}
    assert counts["expect_column_values_to_be_in_set(verdict)"] == 4
    assert counts["expect_column_values_to_be_peer_ids(remote_peer)"] == 3


def test_since_looks_at_late_rows_alone_and_remembers_nothing(tmp_path: Path) -> None:
    lake = lake_of(tmp_path)
    row = DeltaTable(lake.table("copies")).to_pyarrow_table().to_pylist()[0]
    append(lake, "copies", [row | {"verdict": "good", "message_index": 1_000}])
    settings, validator = Settings(state=tmp_path / "state"), RowValidator()

    def failed(since: timedelta) -> list[str]:
        results = check_lake(
            settings, lake, CHECKS, validator, row["observed_at"] + timedelta(hours=2), tables=["copies"], since=since
        )
        return [each.check.expectation for each in results if not each.success]

    assert failed(timedelta(hours=3)) == ["expect_column_values_to_be_in_set"]
    assert failed(timedelta(hours=1)) == []
    assert not (settings.quality_dir / "positions.json").exists()


def test_a_check_covers_what_all_queries_have_passed_by_their_checkpoints(tmp_path: Path) -> None:
    """A message in the newest micro-batch of `archive` waits until `updates`, and then `sink`, have gone by."""
    lake, settings = lake_of(tmp_path), Settings(state=tmp_path / "state")
    check_lake(settings, lake, CHECKS[:1], RowValidator(), datetime.now(UTC))  # makes the state folder
    checkpoints = Path(settings.checkpoints_root.folder or "")
    known = next(row for row in made_up_rows(60)["messages"] if row["type"] == "UPDATE" and row["model"])
    for batch, at in ((0, 1_000), (1, 2_000)):
        plan(checkpoints, "archive", batch, at, {"frames": 10 * batch + 10})
        plan(checkpoints, "updates", batch, at, {"frames": 10 * batch + 10})
        plan(checkpoints, "sink", batch, at + 20, {"updates": batch + 1})
    plan(checkpoints, "batch", 0, 1_000, {"updates": 100})
    commit(lake, "messages", "archive", 1, [known | {"message_id": "new", "tip": "another"}])
    names = {"expect_rows_in_tables(updates)", "expect_rows_in_tables(copies)"}
    checks = [check for check in CHECKS if check.table == "messages" and check.name in names]

    def check() -> set[tuple[str, bool, int]]:
        results = check_lake(settings, lake, checks, RowValidator(), datetime.now(UTC))
        return {(each.check.name, each.success, each.pending) for each in results}

    assert check() == {(name, True, 1) for name in names}
    plan(checkpoints, "sink", 2, 3_000, {"updates": 3})
    plan(checkpoints, "sink", 3, 4_000, {"updates": 4})
    assert check() == {(name, True, 1) for name in names}  # nothing says that `updates` has written what follows
    for query in ("archive", "updates"):
        plan(checkpoints, query, 2, 3_500, {"frames": 30})
    plan(checkpoints, "sink", 4, 5_000, {"updates": 5})
    assert check() == {("expect_rows_in_tables(updates)", False, 0), ("expect_rows_in_tables(copies)", True, 0)}


def test_each_expectation_of_the_catalogue_is_one_of_great_expectations() -> None:
    for name, each in EXPECTATIONS.items():
        if each.rows:
            impl = get_expectation_impl(name)
            fields: Mapping[str, object] = impl.__fields__
            assert each.arguments.keys() <= fields.keys(), name
            assert each.description or not name.startswith("kiln")


def test_the_lists_in_the_documentation_are_those_of_the_suites() -> None:
    page = (ROOT / "docs" / "quality.md").read_text()
    assert insert_lists(page) == page


def test_a_run_checks_when_the_pause_is_over_and_tells_what_is_not_met(tmp_path: Path) -> None:
    lake = lake_of(tmp_path)
    row = DeltaTable(lake.table("copies")).to_pyarrow_table().to_pylist()[0]
    append(lake, "copies", [row | {"verdict": "good", "message_index": 1_000}])
    clock = [0.0]
    checks = QualityChecks(Settings(state=tmp_path / "state"), lambda: clock[0])
    checks.check()
    assert checks._process is None
    clock[0] = 601.0

    def checked() -> bool:
        checks.check()
        return checks._process is None

    checks.check()
    assert checks._process is not None
    wait_until(checked, "the end of the check", 120)
    assert [words.split(":")[:3] for words in checks.errors] == [
        ["quality", " copies", " expect_column_values_to_be_in_set"]
    ]
    checks.stop()


def test_data_docs_name_what_failed_and_fetch_nothing(tmp_path: Path) -> None:
    results = [
        CheckResult(check, check.level == "warn", "<i>", 3, [{"message_id": "m"}], ["it <b>"]) for check in CHECKS
    ]
    pages = {page.stem: page.read_text() for page in write_docs(results, tmp_path).parent.glob("*.html")}
    assert pages.keys() == {"index", *(check.table for check in CHECKS)}
    for page in pages.values():
        assert "default-src 'none'" in page
        assert re.findall(r"<(?:script|link|img|iframe)\b", page) == []
        assert "<i>" not in page
        assert "it <b>" not in page  # peers choose some of the words
    assert "it &lt;b&gt;" in pages["messages"]
    assert "expect_keys_to_be_unique" in pages["messages"]


def test_all_suites_are_owned_and_say_what_to_do() -> None:
    for check in CHECKS:
        assert check.owner
        assert len(check.hint) > 20


TRIED = {
    "kiln backfill run {range} --run repair",  # tests/spark/test_backfill.py and test_backfill_swap.py
    "kiln backfill swap repair",
    "kiln backfill run {range} --source kafka --run repair",  # tests/kafka/test_backfill_live.py
    "kiln recover",  # tests/unit/pipelines/test_recovery.py: a checkpoint that is older than its tables
    "kiln status",
}


def test_hints_name_only_commands_that_were_tried() -> None:
    commands = {
        command.removesuffix(".").strip()
        for check in CHECKS
        for command in re.findall(r"(?<![\w.])kiln (?:backfill swap \w+|backfill run [^,]+|\w+)", check.hint)
    }
    assert commands == TRIED


def test_a_network_without_batches_is_not_checked_for_them(tmp_path: Path) -> None:
    lake = lake_of(tmp_path)
    other = Settings(state=tmp_path / "state", network=Network(kind="gossip"))
    now = datetime.now(UTC) + timedelta(hours=1)
    results = check_lake(other, lake, CHECKS, RowValidator(), now)
    tables = {each.check.table for each in results}
    assert {"frames", "copies", "messages", "controls", "subscriptions", "quarantine"} <= tables
    filled_elsewhere = {"updates", "tips", "batches", "batch_tips", "publications", "streams"}
    assert not any(filled_elsewhere & each.check.tables for each in results)
    assert check_lake(other, lake, CHECKS, RowValidator(), now, tables=["batches"]) == []


@pytest.mark.parametrize(
    ("name", "wrong", "right", "words"),
    [
        ("messages.no_large_ones", "level: warn", "level: fatal", "level fatal: expected warn or error"),
        ("messages.no_large_ones", "-- hint: ask", "-- tip: ask", "the comment `-- hint: …` is missing"),
        ("messages.no_large_ones", "SELECT", "SELEC", "Parser Error"),
        ("messages.no_large_ones", "SELECT", "DROP TABLE messages; SELECT", "expected exactly one SELECT"),
        ("mesages.no_large_ones", "", "", "did you mean messages?"),
    ],
)
def test_what_is_wrong_in_a_check_in_sql_is_named(
    name: str, wrong: str, right: str, words: str, tmp_path: Path
) -> None:
    file = tmp_path / f"{name}.sql"
    file.write_text(OWN_SQL.replace(wrong, right, 1))
    with pytest.raises(SettingsError) as error:
        read_suites([tmp_path])
    assert any(line.startswith(f"{file}: ") and words in line for line in str(error.value).splitlines()), error.value


def test_a_check_in_sql_of_ones_own_works_from_its_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lake_of(tmp_path)
    own = tmp_path / "own"
    own.mkdir()
    (own / "messages.no_large_ones.sql").write_text(OWN_SQL)
    monkeypatch.setenv("KILN_QUALITY__SUITES", str(own))
    monkeypatch.setenv("KILN_STATE", str(tmp_path / "state"))
    for _ in range(2):  # a warning is repeated
        assert run_command(["quality", "--json", "--table", "messages"]) == 0
        (failed,) = [each for each in json.loads(capsys.readouterr().out) if not each["success"]]
        assert (failed["expectation"], failed["level"], failed["hint"]) == ("no_large_ones", "warn", "ask the author")
        assert failed["keys"][0].keys() == {"network", "message_id"}
        assert failed["observed"] == f"{failed['count']} keys: large, …"
