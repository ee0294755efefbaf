"""Views over the Delta tables: answers that take more than one table, or some thought. A file for each, beside this.

A file `NAME.sql` begins with a comment: a sentence that says what the view has, then a line `Grain:` and what one row
stands for. Below stands one SELECT over tables of `kiln.schemas.delta.tables` and over other views, in words that
DuckDB and Spark both take. Where there are no such words, `NAME.spark.sql` says the same in Spark's, and `NAME.sql` in
DuckDB's: DuckDB calls the microseconds of a timestamp `epoch_us`, Spark `unix_micros`. The same where DuckDB answers in
good time only with words of its own. Sessions of both run in UTC.
"""

from __future__ import annotations

import re
from functools import cache
from graphlib import TopologicalSorter
from importlib.resources import files
from typing import Final, NamedTuple

from kiln.schemas.delta.tables import TABLES

_SPARK: Final = ".spark"
_HEAD: Final = re.compile(r"\A((?:--.*\n)+?)-- Grain: (.*)\n")
_READS: Final = re.compile(r"\b(?:FROM|JOIN)\s+(\w+)")
_COMMENT: Final = re.compile(r"--.*$", re.MULTILINE)


class View(NamedTuple):
    """A view, and its SELECT for either engine."""

    name: str
    sentence: str
    grain: str
    """what one row stands for: "a message", as in "one row for a message" """
    tables: tuple[str, ...]
    """that the view reads on either engine, itself or through other views; sorted"""
    views: tuple[str, ...]
    """that the view itself reads on either engine; sorted"""
    duckdb: str
    spark: str

    def duckdb_sql(self) -> str:
        """The SELECT in DuckDB's words."""
        return self.duckdb

    def spark_sql(self) -> str:
        """The SELECT in Spark's words."""
        return self.spark


@cache
def views() -> dict[str, View]:
    """Every view by name, each after the views that it reads. ValueError: a file has no sentence or no grain."""
    texts = {
        each.name.removesuffix(".sql"): each.read_text("utf-8")
        for each in files(__package__).iterdir()
        if each.name.endswith(".sql")
    }
    # what either engine's text reads: a view is there for both, or for neither
    read: dict[str, set[str]] = {}
    for name, text in texts.items():
        read.setdefault(name.removesuffix(_SPARK), set()).update(_reads(text, texts))
    found: dict[str, View] = {}
    for name in TopologicalSorter({name: sorted(read[name] - TABLES.keys()) for name in sorted(read)}).static_order():
        sentence, grain, select = _parts(name, texts[name])
        inner = read[name] - TABLES.keys()
        tables = (read[name] & TABLES.keys()).union(*(found[each].tables for each in inner))
        spark = _parts(name, texts[name + _SPARK])[2] if name + _SPARK in texts else select
        found[name] = View(name, sentence, grain, tuple(sorted(tables)), tuple(sorted(inner)), select, spark)
    return found


def markdown() -> str:
    """The views as a table for people, which docs/SQL.md has."""
    lines = ["| view | a row for | what it has |", "| --- | --- | --- |"]
    lines += [f"| `{each.name}` | {each.grain} | {each.sentence} |" for _, each in sorted(views().items())]
    return "\n".join(lines)


def _reads(text: str, names: dict[str, str]) -> set[str]:
    """The tables and views that a SELECT names; not its own WITH queries."""
    return {name for name in _READS.findall(_COMMENT.sub("", text)) if name in TABLES or name in names}


def _parts(name: str, text: str) -> tuple[str, str, str]:
    """Sentence, grain and SELECT of a file."""
    head = _HEAD.match(text)
    if head is None:
        raise ValueError(f"view {name}: the file does not begin with a sentence and a line `-- Grain: …`")
    sentence = " ".join(line.removeprefix("--").strip() for line in head[1].splitlines())
    return sentence, head[2].removesuffix("."), text[head.end() :].strip()
