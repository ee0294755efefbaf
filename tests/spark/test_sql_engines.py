"""DuckDB and Spark answer alike: each view, and each question of docs/SQL.md, over one small lake."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from kiln.deploy.query.ask import Answer, SqlError, query_lake
from kiln.deploy.query.sample import copy_sample
from kiln.deploy.query.spark_sql import query_spark
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.views import views
from kit.doc_examples import PYTHON_PAGE, examples
from kit.questions import QUESTIONS, Question
from kit.row_values import in_any_order, values_of
from kit.small_lake import small_lake

LIMIT = re.compile(r"\s+LIMIT \d+$")

pytest_plugins = ["kit.local_spark"]
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return small_lake(str(tmp_path_factory.mktemp("lake")))


def rows_of(answer: Answer) -> list[tuple[object, ...]]:
    return values_of(answer.rows())


@pytest.mark.parametrize("view", views())
def test_a_view_has_the_same_rows_on_both_engines(view: str, spark: SparkSession, lake: Lake) -> None:
    here = query_lake(lake, f"SELECT * FROM {view}")
    there = query_spark(spark, lake, f"SELECT * FROM {view}")
    assert here.columns == there.columns
    rows = in_any_order(rows_of(here))
    assert rows, "a view without rows says nothing of two engines"
    assert rows == in_any_order(rows_of(there))


def test_there_are_questions_enough_for_both_engines() -> None:
    assert sum(each.both for each in QUESTIONS) >= 15


@pytest.mark.parametrize("question", [each for each in QUESTIONS if each.both], ids=lambda each: each.title)
def test_a_question_has_the_same_answer_on_both_engines(question: Question, spark: SparkSession, lake: Lake) -> None:
    sql = LIMIT.sub("", question.sql)  # of rows that stand alike, a limit takes any
    here, there = query_lake(lake, sql), query_spark(spark, lake, sql)
    assert here.columns == there.columns
    rows = in_any_order(rows_of(here))
    assert rows, "an answer without rows says nothing of two engines"
    assert rows == in_any_order(rows_of(there))


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM batches",
        "INSERT INTO batches SELECT * FROM batches",
        "WITH b AS (SELECT * FROM batches) INSERT INTO batches SELECT * FROM b",
        "CREATE TABLE x AS SELECT 1",
        "DROP VIEW lateness",
        "SET spark.sql.runSQLOnFiles = true",
        "SELECT TRANSFORM (batch_cid) USING 'cat' AS (c STRING) FROM batches",
        "SELECT * FROM (SELECT TRANSFORM (batch_cid) USING 'cat' AS (c STRING) FROM batches)",
        "SELECT reflect('java.lang.System', 'getenv', 'HOME')",
        "SELECT java_method ('java.lang.System', 'exit', 1)",
        "EXECUTE IMMEDIATE 'DROP VIEW lateness'",
        "BEGIN SELECT 1; END",
        "SELECT IDENTIFIER('ref' || 'lect')('java.lang.System', 'getenv', 'HOME')",
        "SELECT from_xml('<a>1</a>', 'a INT', map('rowValidationXSDPath', '/etc/hostname'))",
        "SELECT schema_of_xml('<a/>', map('rowValidationXSDPath', '/etc/hostname'))",
        "SELECT * FROM table_changes_by_path('/tmp', 0)",
        "SELECT input_file_name() FROM batches",
        "EXPLAIN SELECT * FROM text.`/etc/hostname`",
        "SELECT 1; SELECT 2",
        "",
        "SELECT * FROM text.`/etc/hostname`",
        "SELECT * FROM delta.`/tmp`",
        "SELECT nothing FROM batches",
        "SELECT * FROM no_table",
        "SELECT assert_true(false)",
    ],
)
def test_spark_refuses_what_is_no_reading_query_of_the_lake(sql: str, spark: SparkSession, lake: Lake) -> None:
    with pytest.raises(SqlError):
        list(query_spark(spark, lake, sql).rows())


def test_spark_puts_no_variable_of_the_environment_into_a_query(spark: SparkSession, lake: Lake) -> None:
    assert list(query_spark(spark, lake, "SELECT '${env:PATH}' AS path").rows()) == [("${env:PATH}",)]


@pytest.mark.parametrize("as_of", [0, 1, datetime(2020, 1, 1, tzinfo=UTC)])
def test_both_engines_travel_in_time(as_of: int | datetime, spark: SparkSession, lake: Lake) -> None:
    sql = "SELECT count(*) AS n, count(tip_count) AS held FROM batch_times"
    here = rows_of(query_lake(lake, sql, as_of))
    assert here == rows_of(query_spark(spark, lake, sql, as_of))
    assert (here[0][0] == 0.0) == (as_of != 1)


def test_spark_lists_tables_and_views(spark: SparkSession, lake: Lake) -> None:
    listed = {row[1] for row in query_spark(spark, lake, "SHOW TABLES").rows()}
    assert listed == {*lake.tables(), *views()}


def test_spark_takes_no_more_rows_than_are_shown(spark: SparkSession, lake: Lake) -> None:
    assert len(rows_of(query_spark(spark, lake, "SELECT * FROM messages ORDER BY message_id", most=3))) == 3


def test_the_command_asks_spark(lake: Lake, tmp_path: Path, root: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "lake").symlink_to(lake.path)
    sql = "SELECT date_trunc('hour', max(observed_at)) AS hour, max_by(hex(data), message_id) AS hex FROM messages"
    command = [
        sys.executable,
        "-m",
        "kiln.deploy.cli",
        "sql",
        "--spark",
        "--csv",
        "--state",
        str(tmp_path / "state"),
        sql,
    ]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    (hour, data) = next(iter(query_lake(lake, sql).rows()))
    assert isinstance(hour, datetime)
    assert done.stdout.splitlines() == ["hour,hex", f"{hour:%Y-%m-%dT%H:%M:%S}.000000Z,{data}"]
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["lake"]  # its logs are not those of Kiln


def test_the_example_of_spark_on_the_page_of_python_prints_what_the_page_shows(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_sample(tmp_path / "sample")
    (example,) = (each for each in examples(PYTHON_PAGE) if each.heading == "Spark")
    exec(example.code.replace("file:///SAMPLE", (tmp_path / "sample").as_uri()), {})
    assert example.output == capsys.readouterr().out
