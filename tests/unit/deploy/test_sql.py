"""kiln.deploy.query.ask: questions to Delta tables without Spark."""

from __future__ import annotations

import io
import json
import os
import shutil
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from rich.console import Console

from kiln.deploy.cli.app import run_command
from kiln.deploy.query.answer import encode_value, format_cell, make_distinct, print_table, write_json
from kiln.deploy.query.ask import SqlError, query_lake
from kiln.pipelines.delta.lake import Lake, LakeError
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.delta.views import views
from kit.kiln_table import append_rows

AT = datetime(2025, 3, 1, 12, 0, 0, 250, tzinfo=UTC)


def make_lake(folder: Path) -> Path:
    lake = folder / "lake"
    messages = pa.table(
        {
            "message_id": [f"m{number}" for number in range(10)],
            "data": [bytes([number, 0xFF]) for number in range(10)],
            "observed_at": pa.array(
                [AT + timedelta(seconds=number) for number in range(10)], pa.timestamp("us", tz="UTC")
            ),
            "tips": pa.array([[("k1", "b1")]] * 10, pa.map_(pa.string(), pa.string())),
            "size": pa.array(range(10), pa.int64()),
        }
    )
    append_rows(lake / "messages", messages)
    append_rows(lake / "updates", pa.table({"stream": ["s1", "s2"], "message_id": ["m1", "m2"]}))
    return lake


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_lake(tmp_path_factory.mktemp("sql"))


def as_json(lake: Path, sql: str) -> list[dict[str, object]]:
    out = io.StringIO()
    write_json(query_lake(Lake(str(lake)), sql), out)
    rows: list[dict[str, object]] = json.loads(out.getvalue())
    return rows


def test_json_has_times_in_utc_binary_as_hex_and_maps_as_objects(lake: Path) -> None:
    assert as_json(lake, "SELECT * FROM messages WHERE message_id = 'm3'") == [
        {
            "message_id": "m3",
            "data": "03ff",
            "observed_at": "2025-03-01T12:00:03.000250Z",
            "tips": {"k1": "b1"},
            "size": 3,
        }
    ]


def test_hex_reads_back_in_a_query(lake: Path) -> None:
    assert as_json(lake, "SELECT message_id FROM messages WHERE data = unhex('07ff')") == [{"message_id": "m7"}]


def test_tables_join_and_add_up(lake: Path) -> None:
    rows = as_json(lake, "SELECT sum(size) AS size, count(*) AS n FROM messages JOIN updates USING (message_id)")
    assert rows == [{"size": 3, "n": 2}]


def test_no_rows_are_an_empty_array(lake: Path) -> None:
    assert as_json(lake, "SELECT * FROM messages WHERE false") == []


def test_columns_of_one_name_are_all_kept(lake: Path) -> None:
    assert as_json(lake, "SELECT 1 AS a, 2 AS a") == [{"a": 1, "a_2": 2}]
    assert make_distinct(["a", "a", "a_2"]) == ("a", "a_2", "a_2_2")


def test_values_outside_json_have_a_form() -> None:
    assert encode_value(float("nan")) is None
    assert encode_value(Decimal(2**100)) == 2**100
    assert encode_value(Decimal("1.25")) == 1.25
    assert encode_value([b"\x00", {"a": AT}]) == ["00", {"a": "2025-03-01T12:00:00.000250Z"}]


def test_intervals_are_iso_durations(lake: Path) -> None:
    assert as_json(lake, "SELECT max(observed_at) - min(observed_at) AS d FROM messages") == [{"d": "PT9S"}]
    exact = "SELECT TIMESTAMP '2026-03-01' - TIMESTAMP '2020-01-01 00:00:00.000001' AS d"
    assert as_json(lake, exact) == [{"d": "PT194486399.999999S"}]
    assert as_json(lake, "SELECT INTERVAL '-3 hours' AS d, [NULL, INTERVAL '1 s'] AS l") == [
        {"d": "PT-10800S", "l": [None, "PT1S"]}
    ]
    assert as_json(lake, "SELECT INTERVAL '1 month 2 days 250 ms' AS d") == [{"d": "PT2764800.25S"}]


def test_columns_and_filters_are_pushed_into_the_scan(lake: Path) -> None:
    plan = as_json(lake, "EXPLAIN SELECT message_id FROM messages WHERE size > 7")[0]["explain_value"]
    assert isinstance(plan, str)
    assert "size" in plan.split("Filters")[1]
    assert "data" not in plan


def test_rows_written_later_are_seen_by_the_next_question(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    append_rows(lake / "updates", pa.table({"stream": ["s3"], "message_id": ["m3"]}))
    assert as_json(lake, "SELECT count(*) AS n FROM updates") == [{"n": 3}]


def test_a_table_that_is_not_written_yet_is_named_with_those_there_are(lake: Path) -> None:
    with pytest.raises(SqlError, match=r"there is no table batches in .* yet\. Tables and views: messages, updates"):
        query_lake(Lake(str(lake)), "SELECT * FROM batches")


def test_a_table_that_will_never_be_is_told_apart(lake: Path) -> None:
    with pytest.raises(SqlError, match=r"there is no table mesages .*Tables and views: messages, updates"):
        query_lake(Lake(str(lake)), "SELECT * FROM mesages")


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("SELECT * FROM mesages", "; did you mean messages? Tables and views: "),
        ("SELECT * FROM latest_tip", "; did you mean latest_tips? Tables and views: "),
        ("SELECT * FROM nothing_like_it", "nothing_like_it in "),
    ],
)
def test_a_misspelt_table_or_view_is_told_with_the_one_that_is_meant(lake: Path, sql: str, words: str) -> None:
    with pytest.raises(SqlError) as caught:
        query_lake(Lake(str(lake)), sql)
    assert words in str(caught.value)
    assert ("did you mean" in str(caught.value)) is ("did you mean" in words)


def test_names_are_listed_by_a_query_as_at_the_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lake = Lake(str(tmp_path / "lake"))
    lake.create(["tips"])

    def told(*arguments: str, code: int = 0) -> str:
        assert run_command(["sql", "--state", str(tmp_path), *arguments]) == code
        said = capsys.readouterr()
        return said.err if code else said.out

    listed = json.loads(told("\\d", "--json"))
    assert [each["name"] for each in listed] == ["tips", *views()]
    assert {each["kind"] for each in listed} == {"table", "view"}
    assert all(each["description"] for each in listed)
    columns = json.loads(told("\\d tips", "--json"))
    assert [(each["column"], each["type"]) for each in columns] == [
        (column.name, column.type) for column in TABLES["tips"].columns
    ]
    assert columns[0]["description"] == TABLES["tips"].columns[0].comment
    assert told("\\d tips", "--csv").splitlines()[0] == "column,type,description"
    text = told("\\d")
    assert [line.split()[0] for line in text.splitlines()] == ["tips", *views()]
    assert "late_p99_seconds" in told("\\d lateness")
    assert "there is no table or view tisp; did you mean tips?; \\d lists all tables and views" in told(
        "\\d tisp", code=1
    )
    assert "there is no command \\x. \\d lists the tables and views" in told("\\x", code=1)


def test_an_empty_lake_says_so(tmp_path: Path) -> None:
    with pytest.raises(SqlError, match="no tables yet"):
        query_lake(Lake(str(tmp_path / "lake")), "SELECT * FROM frames")


def test_a_view_over_a_table_of_other_columns_says_so(lake: Path) -> None:
    with pytest.raises(
        SqlError, match=r"cannot create the view latest_tips over tips and updates: .*column \"network\" not found"
    ):
        query_lake(Lake(str(lake)), "SELECT * FROM latest_tips")


def test_all_tables_are_listed(lake: Path) -> None:
    assert {row["name"] for row in as_json(lake, "SHOW TABLES")} - views().keys() == {"messages", "updates"}


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("DELETE FROM messages", "read-only"),
        ("CREATE TABLE x AS SELECT 1", "read-only"),
        ("COPY messages TO 'x.csv'", "read-only"),
        ("SET enable_external_access = true", "read-only"),
        ("SELECT 1; SELECT 2", "Pass one query"),
        ("", "Pass one query"),
        ("SELEC 1", "syntax error"),
        ("SELECT nothing FROM messages", "nothing"),
        ("SELECT * FROM read_text('/etc/hostname')", "disabled"),
    ],
)
def test_what_is_no_reading_query_of_the_lake_is_refused(sql: str, expected: str, lake: Path) -> None:
    with pytest.raises(SqlError, match=expected):
        query_lake(Lake(str(lake)), sql)


def test_a_query_that_fails_while_it_runs_says_why(lake: Path) -> None:
    with pytest.raises(SqlError, match="Could not convert string"):
        list(query_lake(Lake(str(lake)), "SELECT CAST(message_id AS INTEGER) FROM messages").rows())


def test_a_broken_table_is_named(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    for log in (lake / "messages" / "_delta_log").iterdir():
        log.write_text("rubbish", encoding="utf-8")
    with pytest.raises(LakeError, match=r"cannot read table messages in"):
        query_lake(Lake(str(lake)), "SELECT * FROM messages")


def printed(lake: Path, sql: str, width: int, limit: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    print_table(query_lake(Lake(str(lake)), sql), console, limit)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_shows_rows_and_says_when_there_are_more(lake: Path) -> None:
    text = printed(lake, "SELECT message_id, size FROM messages ORDER BY size", 80, limit=3)
    assert "m2" in text
    assert "m3" not in text
    assert "first 3 rows; --json prints all" in text
    assert "(10 rows)" in printed(lake, "SELECT message_id FROM messages", 80)


def test_a_row_too_wide_for_the_terminal_is_printed_column_by_column(lake: Path) -> None:
    text = printed(lake, f"SELECT '{'x' * 59}' AS batch_cid, '{'y' * 63}' AS stream", 80)
    assert "x" * 59 in text
    assert "y" * 63 in text
    assert max(map(len, text.splitlines())) <= 80


def test_cells() -> None:
    assert format_cell(None) == "-"
    assert format_cell(AT) == "2025-03-01 12:00:00.000"
    assert format_cell(b"\x00" * 40) == "00" * 16 + "… (40 B)"
    assert format_cell(0.5) == "0.5"
    assert format_cell([1, b"\xff"]) == '[1, "ff"]'


# ---------------------------------------------------------------- as they were, CSV, stdin


def state_of(folder: Path) -> tuple[Path, datetime]:
    """A state folder whose table `updates` has four versions; a time between the third and the fourth."""
    lake = make_lake(folder)
    append_rows(lake / "updates", pa.table({"stream": ["s3"], "message_id": ["m3"]}))
    between = datetime.now(UTC)
    while datetime.now(UTC) - between < timedelta(milliseconds=2):  # Delta's times are whole milliseconds
        pass
    append_rows(lake / "updates", pa.table({"stream": ["s4"], "message_id": ["m4"]}))
    return folder, between


def run(capsys: pytest.CaptureFixture[str], state: Path, *arguments: str) -> str:
    assert run_command(["sql", "--state", str(state), *arguments]) == 0
    return capsys.readouterr().out


def test_tables_are_asked_as_they_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, between = state_of(tmp_path)
    count = "SELECT count(*) AS n FROM updates"
    found = [
        json.loads(run(capsys, state, "--json", *as_of, count))[0]["n"]
        for as_of in ([], ["--as-of", "1"], ["--as-of", "2"], ["--as-of", between.isoformat()])
    ]
    assert found == [4, 2, 3, 3]


@pytest.mark.parametrize("modified", [0, 4_000_000_000])
def test_a_copied_lake_is_asked_as_it_was(modified: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files of a copy, a download or a restored backup have other times than the commits in them."""
    state, between = state_of(tmp_path / "state")
    copy = shutil.copytree(state, tmp_path / "copy")
    for file in copy.rglob("*"):
        os.utime(file, (modified, modified))
    count = "SELECT count(*) AS n FROM updates"
    assert json.loads(run(capsys, copy, "--json", "--as-of", between.isoformat(), count)) == [{"n": 3}]
    opened = DeltaTable(str(copy / "lake" / "updates")).history()[-1]["timestamp"]
    first = datetime.fromtimestamp(opened / 1_000, UTC).isoformat()
    assert json.loads(run(capsys, copy, "--json", "--as-of", first, count)) == [{"n": 0}]


def test_a_version_has_the_in_commit_time_where_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With in-commit timestamps, `timestamp` may be any time: the clock of the writer."""
    state, _ = state_of(tmp_path)
    for version in range(4):
        file = state / "lake" / "updates" / "_delta_log" / f"{version:020}.json"
        actions = [json.loads(line) for line in file.read_text().splitlines()]
        for action in actions:
            if "commitInfo" in action:
                action["commitInfo"]["inCommitTimestamp"] = 1_700_000_000_000 + version * 1_000
        file.write_text("".join(f"{json.dumps(action)}\n" for action in actions))
    count = "SELECT count(*) AS n FROM updates"
    assert json.loads(run(capsys, state, "--json", "--as-of", "2023-11-14T22:13:22.5Z", count)) == [{"n": 3}]


def test_a_time_before_what_the_log_still_has_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, _ = state_of(tmp_path)
    table = DeltaTable(str(state / "lake" / "updates"))
    table.create_checkpoint()
    for version in range(3):
        (state / "lake" / "updates" / "_delta_log" / f"{version:020}.json").unlink()
    assert run_command(["sql", "--state", str(state), "--as-of", "2023-01-01", "SELECT * FROM updates"]) == 1
    assert "cannot read table updates as of 2023-01-01T00:00:00+00:00: its log begins with version 3, from 2" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("as_of", "code", "said"),
    [
        ("4", 1, "table updates has no version 4. Its newest version is 3"),
        ("2020-01-01", 1, "table updates did not exist at 2020-01-01T00:00:00+00:00: its first version is from 20"),
        ("soon", 2, "--as-of soon: expected a version"),
    ],
)
def test_a_table_that_was_not_there_is_named(
    as_of: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, _ = state_of(tmp_path)
    assert run_command(["sql", "--state", str(state), "--as-of", as_of, "SELECT * FROM updates"]) == code
    assert said in capsys.readouterr().err


def test_csv_has_a_header_times_in_utc_and_nothing_that_a_terminal_obeys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_lake(tmp_path)
    text = '\'a, "b"\n\' || chr(27) AS "te,xt"'
    sql = f"SELECT message_id, data, observed_at, tips, {text}, NULL AS none, 0.5::DOUBLE AS half"
    out = run(capsys, tmp_path, "--csv", f"{sql} FROM messages WHERE size = 3")
    header, row, end = out.split("\r\n")
    assert header == 'message_id,data,observed_at,tips,"te,xt",none,half'
    assert row == 'm3,03ff,2025-03-01T12:00:03.000250Z,"{""k1"": ""b1""}","a, ""b""\\n\\u001b",,0.5'
    assert end == ""


def test_a_question_comes_from_stdin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_lake(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("SELECT count(*) AS n\nFROM messages\n"))
    assert run(capsys, tmp_path, "--csv") == "n\r\n10\r\n"


def test_an_answer_has_one_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["sql", "--state", str(tmp_path), "--json", "--csv", "SELECT 1"]) == 2
    assert "--json and --csv" in capsys.readouterr().err
