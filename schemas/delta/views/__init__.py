"""Views over the Delta tables, one SQL file each.

`NAME.sql` begins with a comment: a description of the view, then a line `Grain:` with the meaning of a row. Then comes
one SELECT over tables and other views, in SQL that both DuckDB and Spark accept. If a view needs different SQL for each
engine, `NAME.spark.sql` is for Spark, and `NAME.sql` for DuckDB. Sessions of both engines use UTC.
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
    """A view, with its SELECT for DuckDB and for Spark."""

    name: str
    sentence: str
    """description of the view, of one or more sentences"""
    grain: str
    """meaning of a row, such as "a message\""""
    tables: tuple[str, ...]
    """tables that the view reads on either engine, directly or through other views, in alphabetical order"""
    views: tuple[str, ...]
    """other views that the view reads directly on either engine, in alphabetical order"""
    duckdb: str
    spark: str


@cache
def views() -> dict[str, View]:
    """Read the files of all views, by name. Each view comes after the views that it reads.

    Raises:
        ValueError: A file lacks the description or the line `Grain:`.
    """
    texts = {
        file.name.removesuffix(".sql"): file.read_text("utf-8")
        for file in files(__package__).iterdir()
        if file.name.endswith(".sql")
    }
    # tables and views that the SELECT of either engine reads, so that a view exists on both engines or on neither
    read: dict[str, set[str]] = {}
    for name, text in texts.items():
        found = _READS.findall(_COMMENT.sub("", text))
        sources = [source for source in found if source in TABLES or source in texts]
        read.setdefault(name.removesuffix(_SPARK), set()).update(sources)  # without the names of its WITH clauses
    result: dict[str, View] = {}
    for name in TopologicalSorter({name: sorted(read[name] - TABLES.keys()) for name in sorted(read)}).static_order():
        sentence, grain, select = _split_file(name, texts[name])
        inner = read[name] - TABLES.keys()
        tables = (read[name] & TABLES.keys()).union(*(result[view].tables for view in inner))
        spark = _split_file(name, texts[name + _SPARK])[2] if name + _SPARK in texts else select
        result[name] = View(name, sentence, grain, tuple(sorted(tables)), tuple(sorted(inner)), select, spark)
    return result


def markdown() -> str:
    """Build the table of views in docs/SQL.md, with the first sentence of each description."""
    lines = ["| view | one row per | content |", "| --- | --- | --- |"]
    for name, view in sorted(views().items()):
        first = view.sentence.partition(". ")[0].removesuffix(".")
        lines.append(f"| [`{name}`](../schemas/delta/views/{name}.sql) | {view.grain} | {first} |")
    return "\n".join(lines)


def _split_file(name: str, text: str) -> tuple[str, str, str]:
    head = _HEAD.match(text)
    if head is None:
        raise ValueError(f"{name}.sql: the file must begin with comment lines: a description, then `-- Grain: …`")
    sentence = " ".join(line.removeprefix("--").strip() for line in head[1].splitlines())
    return sentence, head[2].removesuffix("."), text[head.end() :].strip()
