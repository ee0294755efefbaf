"""The Python API: `kiln.open`, and what its lakes answer."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

import kiln
from kiln.deploy.query.reader import LakeReader
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.delta.views import views
from kit.traced_lake import BATCH, make_lake

COUNT = "SELECT count(*) AS n FROM messages"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = tmp_path_factory.mktemp("reader")
    make_lake(state / "lake")
    return state


@pytest.fixture
def lake(state: Path) -> LakeReader:
    return kiln.open(state)


def test_a_lake_is_opened_by_state_folder_tables_folder_or_settings(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(state)
    monkeypatch.setenv("KILN_STATE", str(state))
    for place in (str(state), state, state / "lake", ".", "lake", None):
        assert kiln.open(place).sql(COUNT).rows() == [(5,)]
    assert kiln.open(state).uri == str(state / "lake")


@pytest.mark.parametrize("place", ["nowhere", "empty"])
def test_a_folder_without_a_lake_is_named(place: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(kiln.KilnError, match=rf"there are no Delta tables in .*/{place}\. Pass a state folder"):
        kiln.open(tmp_path / place)


def test_a_state_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()
    (tmp_path / "version").write_text("99\n")
    with pytest.raises(kiln.KilnError, match="has version 99, and this Kiln reads version"):
        kiln.open(tmp_path)


def test_a_result_is_read_by_each_library_and_again(lake: LakeReader) -> None:
    result = lake.sql(
        "SELECT type, count(*) AS n, min(observed_at) AS at, min(data) AS data FROM messages GROUP BY 1 ORDER BY 1"
    )
    assert result.columns == ("type", "n", "at", "data")
    rows = result.rows()
    assert [row[:2] for row in rows] == [("BATCH_UPDATE", 2), ("UPDATE", 3)]
    assert rows[0][2] == datetime(2026, 11, 1, 12, 0, 5, tzinfo=UTC)
    assert result.arrow().to_pydict()["n"] == [2, 3]
    assert result.arrow().column("data").to_pylist() == [row[3] for row in rows]
    frame = result.pandas()
    assert list(frame["n"]) == [2, 3]
    assert str(frame["at"].dt.tz) == "UTC"
    assert result.polars()["n"].to_list() == [2, 3]
    assert result.rows() == rows
    assert repr(result).splitlines()[0].split() == ["type", "┃", "n", "┃", "at", "┃", "data"]
    assert repr(result).endswith("(2 rows)")


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    lake: LakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kiln.deploy.query.reader.find_spec", lambda name: None)
    for read in (lake.sql(COUNT).arrow, lake.sql(COUNT).pandas, lake.sql(COUNT).polars):
        with pytest.raises(kiln.KilnError, match=r"is not installed. Install it: pip install p"):
            read()


def test_tables_and_views_are_listed_and_read(lake: LakeReader) -> None:
    assert lake.tables() == tuple(sorted(TABLES))
    assert lake.views() == tuple(sorted(views()))
    for name in ("messages", "latest_tips"):
        assert lake.table(name).rows()
    with pytest.raises(kiln.KilnError, match=r"there is no table or view message in .*; did you mean messages\?"):
        lake.table("message")


def test_an_earlier_version_is_read(lake: LakeReader) -> None:
    assert lake.sql(COUNT, as_of=0).rows() == [(0,)]
    assert lake.table("tips", as_of="0").rows() == []
    assert lake.sql(COUNT, as_of=datetime.now(UTC)).rows() == [(5,)]
    for wrong in ("yesterday", datetime(2026, 1, 1)):  # noqa: DTZ001 - a time without a zone is what is refused
        with pytest.raises(ValueError, match=r"as_of = .*: expected a"):
            lake.sql(COUNT, as_of=wrong)
    with pytest.raises(kiln.KilnError, match="table messages has no version 99"):
        lake.sql(COUNT, as_of=99)


def test_a_lake_is_only_read(lake: LakeReader) -> None:
    for sql in ("DROP VIEW messages", "COPY (SELECT 1) TO 'out.csv'", "SELECT * FROM read_csv('/etc/passwd')"):
        with pytest.raises(kiln.KilnError):
            lake.sql(sql).rows()
    with pytest.raises(kiln.KilnError, match=r"there is no table mesages in .*; did you mean messages\?"):
        lake.sql("SELECT * FROM mesages")
    with pytest.raises(kiln.KilnError, match="Could not convert string"):
        lake.sql("SELECT CAST(type AS INT) FROM messages").arrow()


def test_a_batch_is_traced(lake: LakeReader) -> None:
    report = lake.trace(BATCH)
    assert (report.id, report.kind) == (BATCH, "batch")
    assert [row["peer_count"] for row in report.steps["publications"]] == [3]
    with pytest.raises(kiln.KilnError, match="is not an id"):
        lake.trace("nothing")


def test_to_import_kiln_imports_nothing_slow() -> None:
    code = "import sys, kiln; print(*{name.split('.')[0] for name in sys.modules})"
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    slow = {"deltalake", "duckdb", "numpy", "pandas", "pyarrow", "pydantic", "pyspark", "rich", "typer"}
    assert not slow & set(done.stdout.split())
