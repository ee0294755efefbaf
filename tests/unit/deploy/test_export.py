"""kiln.deploy.query.export: a lake in one DuckDB file, opened without Kiln."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import pytest
from deltalake import DeltaTable

from kiln.conf.process.errors import KilnError
from kiln.deploy.cli.app import run_command
from kiln.deploy.query.ask import query_lake
from kiln.deploy.query.export import ExportError, export_lake
from kiln.pipelines.delta.lake import Lake, MissingFilesError
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.delta.views import views
from kit.row_values import in_any_order, values_of
from kit.small_lake import AT, append, small_lake

PLAIN = """
import duckdb, pickle, sys
assert not [name for name in sys.modules if name.startswith("kiln")]
with duckdb.connect(sys.argv[1], read_only=True) as connection:
    names = [row[0] for row in connection.execute("SHOW TABLES").fetchall()]
    answers = {name: (connection.table(name).columns, connection.table(name).fetchall()) for name in names}
sys.stdout.buffer.write(pickle.dumps(answers))
"""
Answers = dict[str, tuple[list[str], list[tuple[object, ...]]]]


def open_plain(file: Path) -> Answers:
    """All tables and views of a file, read by plain DuckDB in a fresh process where clocks are half an hour off."""
    environment = {"PATH": os.environ["PATH"], "TZ": "Asia/Kolkata"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", PLAIN, str(file)],
        cwd=file.parent,
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    answers: Answers = pickle.loads(done.stdout)
    return answers


def be_quiet(_: str) -> None:
    """No progress."""


def read(file: Path, sql: str) -> list[tuple[object, ...]]:
    with duckdb.connect(str(file), read_only=True) as connection:
        rows: list[tuple[object, ...]] = connection.execute(sql).fetchall()
        return rows


def check_equal(answers: Answers, name: str, lake: Lake) -> None:
    columns, rows = answers[name]
    answer = query_lake(lake, f"SELECT * FROM {name}")
    assert tuple(columns) == answer.columns
    assert in_any_order(values_of(rows)) == in_any_order(values_of(answer.rows()))


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return small_lake(str(tmp_path_factory.mktemp("lake")), 600)


@pytest.fixture(scope="module")
def answers(lake: Lake, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Those of an export under another name than it was written with."""
    file = tmp_path_factory.mktemp("export") / "it's new.duckdb"
    export_lake(lake, file, be_quiet)
    return open_plain(file.rename(file.with_name("moved.duckdb")))


@pytest.mark.parametrize("name", [*TABLES, *views()])
def test_plain_duckdb_answers_as_kiln_does(name: str, answers: Answers, lake: Lake) -> None:
    assert answers[name][1] or name in TABLES, "a view without rows says nothing"
    check_equal(answers, name, lake)


def test_the_file_has_nothing_else(answers: Answers) -> None:
    assert set(answers) == {*TABLES, *views(), "kiln_export"}


def test_views_over_tables_that_do_not_exist_yet_answer_too(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "lake"))
    lake.create(("messages",))
    append(lake, "messages", [{"message_id": "m", "type": "UPDATE", "stream": "s", "observed_at": AT}])
    export_lake(lake, tmp_path / "e.duckdb", be_quiet)
    answers = open_plain(tmp_path / "e.duckdb")
    assert set(answers) == {"messages", "kiln_export", *views()}
    assert answers["traffic"][1]
    for name in views():
        check_equal(answers, name, lake)


def test_the_file_records_versions_rows_and_comments(lake: Lake, tmp_path: Path) -> None:
    file, before = tmp_path / "e.duckdb", datetime.now(UTC)
    record = export_lake(lake, file, be_quiet)
    expected = {
        name: (lake.open(name).version(), len(DeltaTable(lake.table(name)).to_pyarrow_table())) for name in TABLES
    }
    rows = read(file, "SELECT * FROM kiln_export")
    assert {str(name): (version, count) for name, version, count, _, _ in rows} == expected
    assert {since for *_, since, _ in rows} == {None}
    assert all(isinstance(at, datetime) and before <= at <= datetime.now(UTC) for *_, at in rows)
    assert values_of(rows) == values_of(record.rows())
    (commented,) = read(file, "SELECT comment FROM duckdb_columns() WHERE table_name = 'tips' AND column_name = 'tip'")
    assert commented == (next(column.comment for column in TABLES["tips"].columns if column.name == "tip"),)
    assert read(file, "SELECT comment FROM duckdb_views() WHERE view_name = 'traffic'") == [
        (views()["traffic"].sentence,)
    ]


def test_drivers_older_than_this_duckdb_can_open_the_file(lake: Lake, tmp_path: Path) -> None:
    export_lake(lake, tmp_path / "e.duckdb", be_quiet, names=["tips"])
    with duckdb.connect() as connection:
        connection.execute(f"ATTACH '{tmp_path}/e.duckdb' AS e (READ_ONLY)")
        tags = connection.execute("SELECT tags FROM duckdb_databases() WHERE database_name = 'e'").fetchall()
    assert tags == [({"storage_version": "v1.0.0+"},)]


def test_since_leaves_older_rows_out(tmp_path: Path) -> None:
    lake, file, start = Lake(str(tmp_path / "lake")), tmp_path / "e.duckdb", AT + timedelta(hours=1)
    lake.create(("messages", "batches", "batch_tips", "streams"))
    old, new = AT, start
    append(lake, "messages", [{"message_id": name, "observed_at": at} for name, at in (("old", old), ("new", new))])
    append(lake, "batches", [{"batch_cid": name, "closed_at": at} for name, at in (("old", old), ("new", new))])
    append(lake, "batch_tips", [{"batch_cid": name, "tip": "t"} for name in ("old", "new")])
    append(lake, "streams", [{"stream": "s"}])
    expected = {"messages": 1, "batches": 1, "batch_tips": 1, "streams": 1}
    for names in ((), ("batch_tips",)):  # with the table that has the time, and without
        export_lake(lake, file, be_quiet, names=names, since=start)
        recorded = read(file, "SELECT table_name, rows FROM kiln_export ORDER BY ALL")
        assert recorded == [(name, expected[name]) for name in sorted(names or expected)]
        assert read(file, "SELECT batch_cid FROM batch_tips") == [("new",)]
    export_lake(lake, file, be_quiet, since=start)
    assert read(file, "SELECT message_id FROM messages") == [("new",)]
    assert read(file, "SELECT table_name FROM kiln_export WHERE since IS NULL") == [("streams",)]


def test_chosen_tables_bring_the_views_that_read_no_others(lake: Lake, tmp_path: Path) -> None:
    file = tmp_path / "e.duckdb"
    export_lake(lake, file, be_quiet, names=["messages", "latest_tips"])
    copied = {"messages", *views()["latest_tips"].tables}
    there = {str(name) for (name,) in read(file, "SHOW TABLES")}
    assert there == {*copied, "kiln_export", *(view.name for view in views().values() if set(view.tables) <= copied)}
    assert {"traffic", "latest_tips"} <= there
    assert "relays" not in there


def test_an_earlier_version_is_exported_as_it_is_queried(lake: Lake, tmp_path: Path) -> None:
    file = tmp_path / "e.duckdb"
    export_lake(lake, file, be_quiet, names=["batch_times"], as_of=1)
    assert read(file, "SELECT DISTINCT version FROM kiln_export") == [(1,)]
    sql = "SELECT count(*), count(tip_count) FROM batch_times"
    assert read(file, sql) == list(query_lake(lake, sql, 1).rows())
    with pytest.raises(ExportError, match="did not exist at"):
        export_lake(lake, file, be_quiet, as_of=datetime(2020, 1, 1, tzinfo=UTC))


def test_readers_have_the_old_export_or_the_new_one(tmp_path: Path) -> None:
    lake, file = Lake(str(tmp_path / "lake")), tmp_path / "e.duckdb"
    lake.create(("messages",))
    export_lake(lake, file, be_quiet)
    file.chmod(0o600)
    with duckdb.connect(str(file), read_only=True) as reader:
        append(lake, "messages", [{"message_id": "m"}])
        export_lake(lake, file, be_quiet)
        assert reader.execute("SELECT count(*) FROM messages").fetchall() == [(0,)]
    assert read(file, "SELECT count(*) FROM messages") == [(1,)]
    assert file.stat().st_mode & 0o777 == 0o600, "who could not read the old one cannot read the new one"


# ---------------------------------------------------------------- what is never replaced, and failures


def make_text(file: Path) -> None:
    file.write_text("no database", encoding="utf-8")


def make_empty(file: Path) -> None:
    file.touch()


def make_folder(file: Path) -> None:
    file.mkdir()


def make_other_database(file: Path) -> None:
    with duckdb.connect(str(file)) as connection:
        connection.execute("CREATE TABLE mine AS SELECT 1 AS a")


def make_log_beside(file: Path) -> None:
    file.with_name(f"{file.name}.wal").write_bytes(b"changes")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (make_text, "it is not an export of Kiln"),
        (make_empty, "it is not an export of Kiln"),
        (make_folder, "it is not an export of Kiln"),
        (make_other_database, "it is not an export of Kiln"),
        (make_log_beside, "has changes of another program"),
    ],
)
def test_nothing_but_an_export_is_replaced(make: Callable[[Path], None], said: str, lake: Lake, tmp_path: Path) -> None:
    file = tmp_path / "e.duckdb"
    make(file)
    before = {path: path.is_dir() or path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ExportError, match=f"cannot replace {file}: .*{said}"):
        export_lake(lake, file, be_quiet)
    assert {path: path.is_dir() or path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_that_another_program_writes_to_is_not_replaced(lake: Lake, tmp_path: Path) -> None:
    file = tmp_path / "e.duckdb"
    export_lake(lake, file, be_quiet, names=["tips"])
    hold = "import duckdb, sys; c = duckdb.connect(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(ExportError, match=f"cannot replace {file}: .*lock.* Close the program"):
            export_lake(lake, file, be_quiet)
        other.communicate()
    export_lake(lake, file, be_quiet, names=["tips"])


def test_a_missing_folder_is_named(lake: Lake, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=f"there is no folder {tmp_path}/none"):
        export_lake(lake, tmp_path / "none" / "e.duckdb", be_quiet)


@pytest.fixture
def exported(lake: Lake, tmp_path: Path) -> Iterator[Path]:
    """An export that the test leaves as it is, with nothing beside it."""
    file = tmp_path / "exports" / "e.duckdb"
    file.parent.mkdir()
    export_lake(lake, file, be_quiet, names=["tips"])
    before = file.read_bytes()
    yield file
    assert list(file.parent.iterdir()) == [file]
    assert file.read_bytes() == before


def test_an_interrupted_export_leaves_the_old_one(lake: Lake, exported: Path) -> None:
    def interrupt(words: str) -> None:
        if words.startswith("messages"):
            assert len(list(exported.parent.iterdir())) == 2
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        export_lake(lake, exported, interrupt)


def test_a_signal_within_a_statement_is_an_interrupt(
    lake: Lake, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise RuntimeError("Query interrupted")  # DuckDB's exception for Ctrl-C and SIGTERM

    monkeypatch.setattr("kiln.deploy.query.export.create_views", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_lake(lake, exported, be_quiet)


def test_a_full_disk_is_reported_in_words(lake: Lake, exported: Path) -> None:
    """A limit of the size of a file stands for it."""
    state = exported.parents[1] / "state"
    state.mkdir()
    (state / "lake").symlink_to(lake.path)
    done = subprocess.run(
        [sys.executable, "-m", "kiln.deploy.cli", "sql", "--state", str(state), "--export", str(exported)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"kiln: cannot write {exported}: File too large. ")
    assert "Make room" in error


def test_a_missing_file_of_a_table_is_named(exported: Path, tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "lake"))
    lake.create(("messages",))
    append(lake, "messages", [{"message_id": "m"}])
    next((tmp_path / "lake" / "messages").glob("*.parquet")).unlink()
    with pytest.raises(MissingFilesError, match=r"cannot read table messages .* is missing"):
        export_lake(lake, exported, be_quiet)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mesages", "there is no table mesages in .*; did you mean messages"),
        ("nothing_like_it", r"there is no table nothing_like_it in .*\. Tables and views: "),
        ("", "there is no table  in "),
    ],
)
def test_an_unknown_table_is_named_with_the_nearest(name: str, said: str, lake: Lake, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=said):
        export_lake(lake, tmp_path / "e.duckdb", be_quiet, names=["tips", name])


def test_a_table_or_a_lake_that_is_not_there_yet_is_told_apart(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "lake"))
    with pytest.raises(KilnError, match=r"there are no tables to export in .*\. kiln run creates them"):
        export_lake(lake, tmp_path / "e.duckdb", be_quiet)
    lake.create(("tips",))
    with pytest.raises(ExportError, match=r"there is no table batches in .* yet\. Tables: tips"):
        export_lake(lake, tmp_path / "e.duckdb", be_quiet, names=["batches"])


# ---------------------------------------------------------------- the command


def test_the_command_exports_the_sample_lake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "e.duckdb"
    command = ["sql", "--sample", "--json", "--export", str(file), "--tables", "tips, batches", "--since", "2026-01-01"]
    assert run_command(command) == 0
    out, error = capsys.readouterr()
    rows = json.loads(out)
    assert [(row["table_name"], row["since"]) for row in rows] == [
        ("batches", "2026-01-01T00:00:00.000000Z"),
        ("tips", "2026-01-01T00:00:00.000000Z"),
    ]
    assert [(row["rows"],) for row in rows] == read(file, "SELECT rows FROM kiln_export ORDER BY table_name")
    assert "tips: copying version 1 (table 2 of 2) …" in error
    assert f"wrote {file} (" in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--since", "1h"], "need --export"),
        (["--tables", "tips"], "need --export"),
        (["--export", "e", "SELECT 1"], "copies tables without a query"),
        (["--export", "e", "--spark"], "copies tables without a query"),
        (["--export", "e", "--since", "soon"], "--since soon: expected a duration"),
        (["--export", ""], "a path is empty"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["sql", "--sample", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
