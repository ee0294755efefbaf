"""The prompt of `kiln sql`: questions one after the other, history, and completion of names."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from kiln.deploy.cli.sql_prompt import SqlNames, converse, is_whole
from kiln.deploy.query.ask import SqlError, query_lake, read_view_columns
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.views import views
from kit.small_lake import append

LEAVE = "\x04"


def lake_in(folder: Path) -> Lake:
    lake = Lake(str(folder / "lake"))
    lake.create(["tips", "batches"])
    append(lake, "tips", [{"stream": "k1", "tip": "b1", "source": "update"}])
    return lake


def typed(lake: Lake, keys: str, history: Path) -> list[str]:
    """What the prompt asks when these keys are typed; a question of something that is not there fails."""
    asked: list[str] = []

    def show(question: str) -> None:
        asked.append(question)
        list(query_lake(lake, question).rows())

    with create_pipe_input() as terminal:
        terminal.send_text(keys + LEAVE)
        converse(lake, history, show, read=terminal, write=DummyOutput())
    return asked


def test_a_question_ends_with_a_semicolon_or_an_empty_line(tmp_path: Path) -> None:
    keys = "SELECT 1;\rSELECT\r2\r\r\r"
    assert typed(lake_in(tmp_path), keys, tmp_path / "history") == ["SELECT 1", "SELECT\n2"]
    assert not is_whole("SELECT 1\nFROM")
    assert all(map(is_whole, ("SELECT 1 ; ", "SELECT 1\n", "quit", r"\d batches", "")))


def test_an_error_leaves_the_prompt_and_what_it_says_is_harmless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = "SELECT error('no' || chr(27) || 'where');\rSELECT 2;\r"
    assert typed(lake_in(tmp_path), keys, tmp_path / "history")[-1] == "SELECT 2"
    said = capsys.readouterr().out
    assert "no\\u001bwhere" in said
    assert "no\x1bwhere" not in said


def test_what_there_is_can_be_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed(lake_in(tmp_path), "\\d\r\\d lateness\r\\d tips\r\\d nope\r", tmp_path / "history") == []
    said = capsys.readouterr().out
    assert all(name in said for name in ("tips", "batches", *views(), "late_p99_seconds", "observed_at"))
    assert "there is no table or view nope" in said


def test_history_is_kept_for_its_user_alone(tmp_path: Path) -> None:
    history = tmp_path / "state" / "sql_history"
    lake = lake_in(tmp_path)
    typed(lake, "SELECT 42;\r", history)
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert typed(lake, "\x1b[A\r", history) == ["SELECT 42"]  # the arrow up


def completed(text: str, cursor: int | None = None) -> list[str]:
    names = SqlNames({"tips": ("stream", "tip"), "batches": ("batch_cid", "stream_count"), **read_view_columns()})
    document = Document(text, len(text) if cursor is None else cursor)
    return [each.text for each in names.get_completions(document, CompleteEvent())]


def test_tables_views_and_columns_are_completed() -> None:
    assert "latest_tips" in completed("SELECT * FROM lat")
    assert completed("SELECT  FROM tips", 7)[:2] == ["stream", "tip"]
    assert completed("SELECT * FROM batches AS b WHERE b.st") == ["stream_count"]
    assert completed("SELECT batches.ba") == ["batch_cid"]
    assert "late_p50_seconds" in completed("SELECT late_p")
    assert completed("sel") == ["SELECT"]


def test_the_columns_of_views_are_those_of_their_answers(tmp_path: Path) -> None:
    lake = lake_in(tmp_path)
    columns = {name: tuple(types) for name, types in read_view_columns().items()}
    assert {name: query_lake(lake, f"SELECT * FROM {name}").columns for name in views()} == columns
    with pytest.raises(SqlError):
        query_lake(lake, "SELECT * FROM no_view")
