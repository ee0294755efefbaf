"""kiln.schemas.queries: each query is declared once, and all that the declaration promises is there."""

from __future__ import annotations

import ast
import inspect
import tomllib
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

from kiln.conf.settings.keys import list_keys
from kiln.conf.settings.model import Kafka
from kiln.conf.settings.reading import DEFAULT_FILE
from kiln.pipelines.runtime.query_context import QueryContext
from kiln.pipelines.sink.rows import _READERS
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.kafka.topics import TOPICS, Partitions
from kiln.schemas.queries import QUERIES, QuerySpec

ROOT = Path(__file__).resolve().parents[3]


def modules(folder: str) -> set[str]:
    return {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}


def test_queries_and_topics_go_by_their_own_names() -> None:
    assert list(QUERIES) == [query.name for query in QUERIES.values()]
    assert list(TOPICS) == [topic.name for topic in TOPICS.values()]


def test_each_query_has_a_module_and_a_script_and_no_other_has() -> None:
    assert {path.parent.name for path in (ROOT / "pipelines").glob("*/query.py")} == set(QUERIES)
    assert modules("pipelines/jobs") == set(QUERIES)


@pytest.mark.parametrize("name", QUERIES)
def test_the_module_of_a_query_starts_it_from_a_plan(name: str) -> None:
    start = import_module(f"kiln.pipelines.{name}.query").start
    context, *_ = inspect.signature(start, eval_str=True).parameters.values()
    assert (context.name, context.annotation) == ("context", QueryContext)


@pytest.mark.parametrize("name", QUERIES)
def test_the_script_of_a_query_runs_it(name: str) -> None:
    tree = ast.parse((ROOT / "pipelines/jobs" / f"{name}.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "main"]
    assert [ast.unparse(call) for call in calls] == [f"main({name!r})"]


def test_the_settings_file_has_a_section_for_each_query_and_runs_them_all() -> None:
    jobs = tomllib.loads(DEFAULT_FILE.read_text(encoding="utf-8"))["jobs"]
    assert {name for name, value in jobs.items() if isinstance(value, dict)} == set(QUERIES)
    assert jobs["queries"] == list(QUERIES)


@pytest.mark.parametrize("name", QUERIES)
def test_topics_and_tables_of_a_query_exist(name: str) -> None:
    query = QUERIES[name]
    assert set(query.reads) | set(query.topics) <= set(TOPICS)
    assert set(query.appends) <= set(query.tables) <= set(TABLES)
    assert query.reads


def test_no_table_has_two_writers() -> None:
    writers = Counter(table for query in QUERIES.values() for table in query.tables)
    assert {table for table in TABLES if writers[table] != 1} == {
        "quarantine_dropped",
        "quality_results",
        "backfill_runs",
    }
    assert writers["quality_results"] == 0  # no query checks the quality of tables yet


def test_every_topic_has_a_reader_and_no_query_reads_its_own() -> None:
    def reads_its_own(query: QuerySpec) -> bool:
        return bool(set(query.reads) & set(query.topics))

    # `wanted` is for the bridge
    assert {topic for query in QUERIES.values() for topic in query.reads} == set(TOPICS) - {"wanted"}
    assert not any(map(reads_its_own, QUERIES.values()))


def test_the_sink_can_read_the_topics_it_reads() -> None:
    assert set(_READERS) == set(QUERIES["sink"].reads)


@pytest.mark.parametrize("kind", get_args(Partitions))
def test_a_setting_counts_the_partitions_of_each_kind_of_topic(kind: Partitions) -> None:
    name = f"{kind}_partitions"
    assert ("kafka", name) in list_keys()
    assert Kafka.model_validate({name: 7}).partitions(kind) == 7
    assert {topic.partitions for topic in TOPICS.values()} == set(get_args(Partitions))
