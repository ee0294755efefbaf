"""Views over the Delta tables, one SQL file each.

`NAME.sql` begins with a comment: a description of the view, then a line `Grain:` with the meaning of one row. One
SELECT follows, over tables of `kiln.schemas.delta.tables` and over other views, in SQL that both DuckDB and Spark
accept. If there is no such SQL, or DuckDB needs its own to be fast, `NAME.spark.sql` contains the Spark form, and
`NAME.sql` contains the DuckDB form. Sessions of both run in UTC.
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
    """A view and its SELECT for each engine."""

    name: str
    sentence: str
    grain: str
    """meaning of one row, such as "a message\""""
    tables: tuple[str, ...]
    """tables that the view reads on either engine, directly or through other views; sorted"""
    views: tuple[str, ...]
    """views that the view reads directly on either engine; sorted"""
    duckdb: str
    """the SELECT for DuckDB"""
    spark: str
    """the SELECT for Spark"""


@cache
def views() -> dict[str, View]:
    """Read all views, each after the views that it reads.

    Raises:
        ValueError: A file has no description or no grain.
    """
    texts = {
        file.name.removesuffix(".sql"): file.read_text("utf-8")
        for file in files(__package__).iterdir()
        if file.name.endswith(".sql")
    }
    # what either engine's SELECT reads, so that a view exists on both engines or on neither
    read: dict[str, set[str]] = {}
    for name, text in texts.items():
        found = _READS.findall(_COMMENT.sub("", text))
        sources = [source for source in found if source in TABLES or source in texts]
        read.setdefault(name.removesuffix(_SPARK), set()).update(sources)  # without its own WITH queries
    result: dict[str, View] = {}
    for name in TopologicalSorter({name: sorted(read[name] - TABLES.keys()) for name in sorted(read)}).static_order():
        sentence, grain, select = _split_file(name, texts[name])
        inner = read[name] - TABLES.keys()
        tables = (read[name] & TABLES.keys()).union(*(result[view].tables for view in inner))
        spark = _split_file(name, texts[name + _SPARK])[2] if name + _SPARK in texts else select
        result[name] = View(name, sentence, grain, tuple(sorted(tables)), tuple(sorted(inner)), select, spark)
    return result


def markdown() -> str:
    """Build the list of views in docs/SQL.md, with the first sentence of each description."""
    lines = ["| view | one row per | content |", "| --- | --- | --- |"]
    for name, view in sorted(views().items()):
        first = view.sentence.partition(". ")[0].removesuffix(".")
        lines.append(f"| [`{name}`](../schemas/delta/views/{name}.sql) | {view.grain} | {first} |")
    return "\n".join(lines)


def _split_file(name: str, text: str) -> tuple[str, str, str]:
    """Split a file into description, grain and SELECT."""
    head = _HEAD.match(text)
    if head is None:
        raise ValueError(f"view {name}: the file must begin with a description and a line `-- Grain: …`")
    sentence = " ".join(line.removeprefix("--").strip() for line in head[1].splitlines())
    return sentence, head[2].removesuffix("."), text[head.end() :].strip()
