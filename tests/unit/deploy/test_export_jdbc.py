"""An export of the lake as BI tools open it: with DuckDB's JDBC driver."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from py4j.java_gateway import GatewayParameters, JavaGateway, JavaObject, launch_gateway
from py4j.protocol import get_return_value

from kiln.deploy.query.ask import query_lake
from kiln.deploy.query.export import export_lake
from kiln.deploy.stack.java import JavaError, find_java
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.spark_environment import find_spark_home
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.delta.views import views
from kit import jdbc_driver
from kit.small_lake import small_lake

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def driver() -> Path:
    """The driver's jar."""
    try:
        find_java()
    except JavaError as error:
        pytest.skip(f"no Java: {error}")
    if not jdbc_driver.is_fetched():
        pytest.skip("no JDBC driver of DuckDB: run `make tools`")
    return jdbc_driver.jar()


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return small_lake(str(tmp_path_factory.mktemp("lake")), 600)


@pytest.fixture(scope="module")
def connection(driver: Path, lake: Lake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaObject]:
    """A connection to an export.

    PySpark replaces py4j's `get_return_value` for the whole process with one that describes each Java exception by
    Spark's JVM. The original is put back meanwhile.
    """
    file = tmp_path_factory.mktemp("export") / "lake.duckdb"
    export_lake(lake, file, lambda _: None)
    (py4j,) = (find_spark_home() / "jars").glob("py4j-*.jar")
    port = launch_gateway(
        jarpath=str(py4j),
        classpath=str(driver),
        die_on_exit=True,
        javaopts=["-XX:TieredStopAtLevel=1"],
        java_path=str(find_java().executable),
    )
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port))
    try:
        with patch("py4j.java_gateway.get_return_value", get_return_value):
            options = gateway.jvm.java.util.Properties()
            options.setProperty("duckdb.read_only", "true")
            yield gateway.jvm.java.sql.DriverManager.getConnection(f"jdbc:duckdb:{file}", options)
    finally:
        gateway.shutdown()


def fetch(connection: JavaObject, sql: str) -> list[str]:
    """The first column of all rows, as text."""
    statement = connection.createStatement()
    result = statement.executeQuery(sql)
    rows = []
    while result.next():
        rows.append(str(result.getString(1)))
    statement.close()
    return rows


def build_text(column: str, kind: str) -> str:
    """A column as text. A sum of floats depends on the order of rows in its last digits."""
    forms = {"DOUBLE": "format('{{:.10e}}', {})", "TIMESTAMP WITH TIME ZONE": "epoch_us({})", "BLOB": "hex({})"}
    return f"CAST({forms.get(kind, '{}').format(column)} AS VARCHAR)"


@pytest.mark.parametrize("view", views())
def test_a_view_answers_as_kiln_sql_does(view: str, connection: JavaObject, lake: Lake) -> None:
    columns = query_lake(lake, f"SELECT column_name, column_type FROM (DESCRIBE {view})").rows()
    texts = ", ".join(build_text(f'"{name}"', str(kind)) for name, kind in columns)
    sql = f"SELECT to_json([{texts}]) FROM {view}"
    expected = [str(text) for (text,) in query_lake(lake, sql).rows()]
    assert expected
    assert sorted(fetch(connection, sql)) == sorted(expected)


def test_metadata_lists_tables_views_and_columns(connection: JavaObject) -> None:
    about = connection.getMetaData()
    listed, tables = [], about.getTables("lake", "main", "%", None)
    while tables.next():
        listed.append(tables.getString("TABLE_NAME"))
    assert set(listed) == {*TABLES, *views(), "kiln_export"}
    columns, names = about.getColumns("lake", "main", "tips", "%"), []
    while columns.next():
        names.append(columns.getString("COLUMN_NAME"))
    assert names == [column.name for column in TABLES["tips"].columns]
    assert json.loads(fetch(connection, "SELECT to_json(max(rows)) FROM kiln_export")[0]) > 0
