"""The guard of `kiln sql --spark`: statements, relations and functions that are not on its lists are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from kiln.deploy.query.ask import SqlError
from kiln.deploy.query.spark_sql import FUNCTIONS, check_read_only, query_spark
from kiln.pipelines.delta.lake import Lake
from kit.traced_lake import make_lake

pytest_plugins = ["kit.local_spark"]
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

SECRET = "hunter2-of-the-broker"

REFUSED = """
SELECT from_xml('<a>1</a>', 'a INT', map('rowValidationXSDPath', '{secret}'))
SELECT * FROM VALUES (from_xml('<a>1</a>', 'a INT', map('rowValidationXSDPath', '{secret}'))) AS t(a)
SELECT from_xml('<a/>', schema_of_xml('<a/>', map('rowValidationXSDPath', '{secret}')))
SELECT schema_of_xml('<a/>', map('rowValidationXSDPath', '{secret}'))
SELECT to_xml(named_struct('a', 1))
SELECT xpath_string('<!DOCTYPE a [<!ENTITY b SYSTEM "file://{secret}">]><a>&b;</a>', 'a')
SELECT from_avro(X'00', '{{}}', map('avroSchemaUrl', '{secret}'))
SELECT from_protobuf(X'00', 'M', '{secret}')
SELECT from_csv('a', 'a STRING', map('mode', 'FAILFAST'))
SELECT from_json('{{', 'a INT', map('columnNameOfCorruptRecord', 'a'))
SELECT to_json(named_struct('a', 1), map('timestampFormat', 'yyyy'))
SELECT schema_of_json('{{}}', map('mode', 'FAILFAST'))
SELECT * FROM table_changes_by_path('{lake}/tips', 0)
SELECT * FROM table_changes('tips', 0)
SELECT * FROM read_files('{secret}')
SELECT * FROM python_worker_logs()
SELECT reflect('java.lang.System', 'getProperty', 'user.dir')
SELECT try_reflect('java.lang.System', 'getProperty', 'user.dir')
SELECT (SELECT java_method('java.lang.System', 'getProperty', 'user.dir'))
SELECT builtin.reflect('java.lang.System', 'getProperty', 'user.dir')
SELECT IDENTIFIER('ref' || 'lect')('java.lang.System', 'getProperty', 'user.dir')
SELECT * FROM VALUES (java_method('java.lang.System', 'getProperty', 'user.dir')) AS t(a)
SELECT 1 LIMIT CAST(reflect('java.lang.Integer', 'valueOf', '1') AS INT)
SELECT * FROM tips TIMESTAMP AS OF reflect('java.time.Instant', 'now')
SELECT * FROM tips LATERAL VIEW reflect('java.lang.System', 'getProperty', 'user.dir') t AS a
SELECT /*+ REPARTITION(reflect('a', 'b')) */ * FROM tips
WITH t AS (SELECT reflect('a', 'b')) SELECT 1
SELECT input_file_name(), input_file_block_start(), input_file_block_length() FROM tips
SELECT * FROM delta.`{lake}/tips`
SELECT * FROM text.`{secret}`
SELECT * FROM parquet.`{lake}/tips`
SELECT * FROM IDENTIFIER('text.`{secret}`')
SELECT * FROM IDENTIFIER('text.' || '`{secret}`')
SELECT * FROM tips WITH (path = '{secret}')
SELECT * FROM STREAM tips
SELECT TRANSFORM (a) USING 'cat' FROM (SELECT 1 AS a)
FROM (FROM tips SELECT tip) MAP tip USING 'cat'
EXECUTE IMMEDIATE 'SELECT 1'
BEGIN SELECT 1; END
BEGIN DECLARE x INT DEFAULT 1; SELECT x; END
DECLARE VARIABLE x INT DEFAULT 1
SET VARIABLE x = 1
INSERT INTO tips SELECT * FROM tips
INSERT OVERWRITE tips SELECT * FROM tips
INSERT OVERWRITE DIRECTORY '{elsewhere}' USING csv SELECT 1
INSERT OVERWRITE LOCAL DIRECTORY '{elsewhere}' USING csv SELECT 1
FROM tips INSERT INTO tips SELECT *
DELETE FROM tips
UPDATE tips SET tip = 'x'
MERGE INTO tips USING tips AS s ON tips.tip = s.tip WHEN MATCHED THEN DELETE
TRUNCATE TABLE tips
DROP TABLE tips
DROP VIEW latest_tips
ALTER TABLE tips SET TBLPROPERTIES ('a' = 'b')
ALTER VIEW latest_tips AS SELECT 1
OPTIMIZE tips
VACUUM tips
VACUUM '{lake}/tips'
RESTORE TABLE tips TO VERSION AS OF 0
GENERATE symlink_format_manifest FOR TABLE delta.`{lake}/tips`
CONVERT TO DELTA parquet.`{lake}/tips`
DESCRIBE DETAIL delta.`{lake}/tips`
DESCRIBE DETAIL '{lake}/tips'
DESCRIBE HISTORY delta.`{lake}/tips`
DESCRIBE TABLE delta.`{lake}/tips`
DESCRIBE TABLE text.`{secret}`
SHOW TBLPROPERTIES delta.`{lake}/tips`
SHOW COLUMNS IN delta.`{lake}/tips`
SHOW TABLES IN global_temp
SHOW PARTITIONS delta.`{lake}/tips`
REORG TABLE tips APPLY (PURGE)
CREATE TABLE made SHALLOW CLONE tips
CREATE TABLE made SHALLOW CLONE delta.`{lake}/tips` LOCATION '{elsewhere}'
CREATE TABLE made (a INT) USING delta
CREATE TABLE made USING delta LOCATION '{lake}/tips'
CREATE TABLE made USING text OPTIONS (path '{secret}')
CREATE TABLE made USING parquet AS SELECT 1 AS a
CREATE TABLE made LIKE tips LOCATION '{elsewhere}'
CREATE VIEW made AS SELECT 1 AS a
CREATE TEMPORARY VIEW made AS SELECT 1 AS a
CREATE TEMPORARY VIEW made USING text OPTIONS (path '{secret}')
CREATE TEMPORARY VIEW made USING jdbc OPTIONS (url 'jdbc:hive2://127.0.0.1:9', dbtable 'x')
CREATE FUNCTION made AS 'org.example.Made' USING JAR '{secret}'
CREATE TEMPORARY FUNCTION made AS 'org.apache.hadoop.hive.ql.udf.UDFLength'
CREATE FUNCTION made(x INT) RETURNS INT RETURN x + 1
CREATE TEMPORARY FUNCTION made(x INT) RETURNS INT LANGUAGE SQL RETURN x
CREATE DATABASE made LOCATION '{elsewhere}'
DROP DATABASE default CASCADE
USE made
USE system.builtin
SET CATALOG system
CALL system.made()
CACHE TABLE tips
CACHE LAZY TABLE made AS SELECT 1
UNCACHE TABLE tips
CLEAR CACHE
REFRESH TABLE tips
REFRESH '{lake}'
REFRESH FUNCTION upper
ANALYZE TABLE tips COMPUTE STATISTICS
MSCK REPAIR TABLE tips
LOAD DATA LOCAL INPATH '{secret}' INTO TABLE tips
COMMENT ON TABLE tips IS 'x'
ADD JAR '{secret}'
ADD FILE '{secret}'
ADD ARCHIVE '{secret}'
LIST FILES
LIST JARS
SET
SET spark.sql.runSQLOnFiles=true
SET spark.sql.variable.substitute=true
SET spark.hadoop.fs.s3a.secret.key
SET TIME ZONE 'UTC'
RESET
RESET spark.sql.runSQLOnFiles
EXPLAIN DROP TABLE tips
EXPLAIN SELECT reflect('java.lang.System', 'getProperty', 'user.dir')
EXPLAIN EXTENDED SELECT * FROM text.`{secret}`
DESCRIBE QUERY SELECT * FROM text.`{secret}`
""".strip().splitlines()

ALLOWED = """
SHOW TABLES
SHOW TABLES IN default LIKE 't*'
SHOW TABLE EXTENDED IN `default` LIKE 'tips'
SHOW SCHEMAS
SHOW DATABASES LIKE 'd*'
SHOW CATALOGS
SHOW VIEWS
SHOW COLUMNS IN `default`.`tips`
SHOW FUNCTIONS
SHOW TBLPROPERTIES tips
DESCRIBE tips
DESCRIBE EXTENDED `default`.`tips`
DESC FORMATTED tips
DESCRIBE tips tip
DESCRIBE DATABASE default
DESCRIBE QUERY SELECT 1 AS a
DESCRIBE FUNCTION EXTENDED upper
EXPLAIN FORMATTED SELECT count(*) FROM tips
USE default
USE `default`
SET -v
SET spark.sql.ansi.enabled
SELECT current_database(), current_catalog(), version()
TABLE tips
VALUES (1, 'a'), (2, upper('b'))
SELECT * FROM spark_catalog.default.tips TABLESAMPLE (50 PERCENT) REPEATABLE (1)
SELECT * FROM tips VERSION AS OF 0
SELECT count(*) FILTER (WHERE tip IS NOT NULL), percentile_cont(0.5) WITHIN GROUP (ORDER BY length(tip)) FROM tips
SELECT *, row_number() OVER (PARTITION BY stream ORDER BY tip) AS n FROM tips QUALIFY n = 1
SELECT a.k, x.col FROM (SELECT 1 AS k, array(1, 2) AS l) a LATERAL VIEW explode(l) x AS col
SELECT * FROM (SELECT 1 AS a, 'x' AS b) PIVOT (sum(a) FOR b IN ('x', 'y'))
SELECT * FROM (SELECT 1 AS a, 2 AS b) UNPIVOT (v FOR n IN (a, b))
WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t WHERE n < 3) SELECT * FROM t
SELECT stream, grouping_id() FROM tips GROUP BY CUBE (stream) HAVING count(*) >= 0 ORDER BY 1 NULLS LAST LIMIT 5
SELECT /*+ BROADCAST(b) */ * FROM tips a JOIN tips b USING (tip) WHERE EXISTS (SELECT 1 FROM streams)
SELECT transform(array(1, 2), x -> x + 1), from_json('{"a": 1}', 'a INT').a, to_json(named_struct('a', 1))
SELECT CAST('1' AS INT) % 2, '2'::INT, TRY_CAST('x' AS INT), INTERVAL 1 DAY, DATE '2026-01-01', extract(year FROM now())
FROM tips |> WHERE tip IS NOT NULL |> AGGREGATE count(*) AS n GROUP BY stream |> ORDER BY n |> LIMIT 1
SELECT * FROM range(3) CROSS JOIN LATERAL (SELECT id + 1 AS b)
(SELECT 1 UNION SELECT 2) INTERSECT SELECT 2 EXCEPT SELECT 3
""".strip().splitlines()


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guard") / "lake"
    make_lake(folder)
    (folder.parent / "secret").write_text(f"{SECRET}\n", encoding="ascii")
    return folder


def files_of(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("statement", REFUSED)
def test_what_is_not_on_the_lists_is_refused_and_changes_nothing(
    statement: str, spark: SparkSession, lake: Path, tmp_path: Path
) -> None:
    before, elsewhere = files_of(lake), tmp_path / "elsewhere"
    sql = statement.format(lake=lake, secret=lake.parent / "secret", elsewhere=elsewhere)
    with pytest.raises(SqlError, match="the lake is read-only") as refused:
        query_spark(spark, Lake(str(lake)), sql)
    assert SECRET not in str(refused.value)
    assert files_of(lake) == before
    assert not elsewhere.exists()


@pytest.mark.parametrize("statement", ALLOWED)
def test_queries_and_listings_are_let_through(statement: str, spark: SparkSession) -> None:
    check_read_only(spark, statement)


def test_a_function_is_on_the_list_or_refused(spark: SparkSession) -> None:
    lines = FUNCTIONS.read_text("ascii").splitlines()
    listed = {name.split("/")[0] for line in lines if not line.startswith("#") for name in line.split()}
    there = {row[0] for row in spark.sql("SHOW ALL FUNCTIONS").collect() if row[0] and row[0][0].isalpha()}
    assert len(listed) > 300
    assert {"from_xml", "table_changes_by_path", "reflect"} <= there - listed
    assert listed <= there
    refused = {name for name in there if is_refused(name, "SELECT `{}`()", spark)}
    assert refused == there - listed
    assert all(is_refused(name, "SELECT * FROM `{}`()", spark) for name in refused)


def is_refused(function: str, call: str, spark: SparkSession) -> bool:
    try:
        check_read_only(spark, f"EXPLAIN {call.format(function)}")
    except SqlError as error:
        return f"the function {function} is not allowed" in str(error)
    return False
