"""kiln.schemas.delta.views: the files of the views say what they are, and are part of what is installed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from kiln.schemas.delta.tables import TABLES
from kiln.schemas.delta.views import View, views
from kiln.schemas.wire.topics import MAX_KEY, MAX_VALUE

FOLDER = Path(__file__).resolve().parents[3] / "schemas" / "delta" / "views"


def test_each_file_is_a_view_or_the_other_text_of_one() -> None:
    assert {path.name.split(".")[0] for path in FOLDER.glob("*.sql")} == views().keys()
    other = {path.name.split(".")[0] for path in FOLDER.glob("*.spark.sql")}
    assert {view.name for view in views().values() if view.duckdb != view.spark} == other


@pytest.mark.parametrize("name", [path.name for path in FOLDER.glob("*.spark.sql")])
def test_both_texts_of_a_view_have_one_head(name: str) -> None:
    ours = (FOLDER / name.replace(".spark", "")).read_text("utf-8").partition("-- Grain: ")
    theirs = (FOLDER / name).read_text("utf-8").partition("-- Grain: ")
    assert ours[0] == theirs[0]
    assert ours[2].splitlines()[0] == theirs[2].splitlines()[0]


@pytest.mark.parametrize("view", views().values(), ids=list(views()))
def test_a_view_says_what_it_has_and_is_no_table(view: View) -> None:
    assert re.fullmatch(r"[A-Z].{20,}\.", view.sentence)
    assert re.fullmatch(r"an? [^.]{3,100}", view.grain)
    assert view.name not in TABLES
    assert view.tables
    assert set(view.tables) <= TABLES.keys()
    assert "\\" not in view.duckdb + view.spark, "Spark takes a backslash for an escape, DuckDB does not"


def test_a_view_comes_after_those_that_it_reads() -> None:
    order = list(views())
    for view in views().values():
        assert all(order.index(each) < order.index(view.name) for each in view.views)
        assert {table for each in view.views for table in views()[each].tables} <= set(view.tables)


def test_misplaced_knows_the_longest_key_and_value() -> None:
    assert re.findall(r"<= (\d+)", views()["misplaced"].duckdb) == [str(MAX_KEY), str(MAX_VALUE)]


def test_the_files_are_installed() -> None:
    project = tomllib.loads((FOLDER.parents[2] / "pyproject.toml").read_text("utf-8"))
    assert "delta/views/*.sql" in project["tool"]["setuptools"]["package-data"]["kiln.schemas"]
