"""kiln serve-sql by clients of another make: beeline, and JDBC and Thrift as BI tools speak them."""

from __future__ import annotations

import csv
import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import psutil
import pytest
from deltalake import DeltaTable, write_deltalake
from py4j.java_gateway import JavaObject

from conftest import free_ports
from kiln.deploy.query.ask import query_lake, read_view_columns
from kiln.deploy.query.serve.sandbox import read_landlock_version
from kiln.deploy.stack.java import find_java
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.delta.views import views
from kit.awaiting import wait_until
from kit.doc_examples import PYTHON_PAGE, examples
from kit.hive_client import BAD, COMPLETE, START, HiveClient, HiveError, answer, hive_gateway, log_in, query, rows
from kit.kiln_process import Kiln
from kit.questions import QUESTIONS, Question
from kit.traced_lake import BATCH, make_lake

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]  # a cold JVM takes over a minute to plan all views

SECRET = "hunter2-of-the-broker"
FUNCTIONS = Path("deploy/query/serve/functions.txt")
MOST_NEW, MOST_CLIENTS = 100, 100  # of Door.scala

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


@dataclass(frozen=True)
class Server:
    """A server that takes clients."""

    kiln: Kiln
    port: int
    pid: int

    @property
    def password(self) -> str:
        return (self.kiln.state / "sql-password").read_text(encoding="ascii").strip()

    def jvm(self) -> psutil.Process:
        (child,) = psutil.Process(self.pid).children()
        return child

    def beeline(self, *statements: str) -> subprocess.CompletedProcess[str]:
        """Runs statements in one connection, and goes on after one that fails."""
        script = self.kiln.state / "statements.sql"
        script.write_text("".join(f"{statement};\n" for statement in statements), encoding="utf-8")
        spec = find_spec("pyspark")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        jars = f"{spec.submodule_search_locations[0]}/jars/*"
        address = f"jdbc:hive2://127.0.0.1:{self.port}/default"
        client = [
            str(find_java().executable),
            "-XX:TieredStopAtLevel=1",
            "-cp",
            jars,
            "org.apache.hive.beeline.BeeLine",
        ]
        how = ["--silent=true", "--force=true", "--outputformat=csv2", "--nullemptystring=true"]
        return subprocess.run(
            [*client, "-u", address, "-n", "kiln", "-p", self.password, *how, "-f", str(script)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("serve")
    make_lake(state / "lake")
    (state / "secret").write_text(f"{SECRET}\n", encoding="ascii")
    *ports, port = free_ports(3)
    kiln = Kiln(state, ports, {"SECRET_OF_TESTS": SECRET})
    process = kiln.start("serve-sql", "--port", str(port))
    said = state / "started.out"
    try:

        def ready() -> bool:
            return process.poll() is not None or "jdbc:hive2://" in said.read_text("utf-8")

        wait_until(ready, lambda: f"an address in {said.read_text('utf-8')!r}", seconds=240)
        assert process.poll() is None, said.read_text("utf-8")
        yield Server(kiln, port, process.pid)
        process.terminate()
        assert process.wait(60) == 0, said.read_text("utf-8")
    finally:
        process.kill()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[HiveClient]:
    with hive_gateway() as gateway:
        yield HiveClient(gateway, server.port, "kiln", server.password)


@pytest.fixture(scope="module")
def connection(client: HiveClient) -> Iterator[JavaObject]:
    with client.connect() as connection:
        yield connection


def files_of(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("Error: ")]


def test_a_client_reads_every_table_and_view(server: Server) -> None:
    names = [*TABLES, *views()]
    counted = [f"SELECT '{name}', count(*) FROM `{name}`" for name in names]
    together = [" UNION ALL ".join(counted[at : at + 8]) for at in range(0, len(counted), 8)]  # fewer jobs
    done = server.beeline(*together, "SHOW TABLES", "DESCRIBE tips")
    assert not errors(done), done.stderr
    counts = {row[0]: int(row[1]) for row in csv.reader(done.stdout.splitlines()) if len(row) == 2 and row[1].isdigit()}
    lake = Lake(str(server.kiln.lake))
    assert counts == {name: next(query_lake(lake, f"SELECT count(*) FROM {name}").rows())[0] for name in names}
    assert counts["messages"] > 0
    shown = {row[1] for row in csv.reader(done.stdout.splitlines()) if len(row) == 3 and row[0] == "default"}
    assert shown == set(names)


def test_the_clients_on_the_page_of_python_are_answered(server: Server, tmp_path: Path) -> None:
    """beeline, on the lake of these tests."""
    (tmp_path / "sample").symlink_to(server.kiln.state)
    path = f"{Path(sys.executable).parent}{os.pathsep}{find_java().executable.parent}{os.pathsep}{os.environ['PATH']}"
    clients = [each for each in examples(PYTHON_PAGE) if "10000" in each.code]
    assert len(clients) == 1
    for each in clients:
        code = each.code.replace("10000", str(server.port))
        printed = each._replace(code=code).run(tmp_path, {"PATH": path})
        assert printed.strip().endswith("type,messages\nBATCH_UPDATE,2\nUPDATE,3")


def test_rows_that_come_later_are_in_the_next_answer(server: Server) -> None:
    question = f"SELECT count(*) AS n FROM publications WHERE batch_cid = '{BATCH}'"
    assert server.beeline(question).stdout.split() == ["n", "1"]
    place = str(server.kiln.lake / "publications")
    write_deltalake(place, DeltaTable(place).to_pyarrow_table().slice(0, 1), mode="append")
    assert server.beeline(question).stdout.split() == ["n", "2"]


@pytest.mark.parametrize("statement", REFUSED)
def test_what_is_not_on_the_lists_is_refused_and_changes_nothing(
    statement: str, server: Server, connection: JavaObject, tmp_path: Path
) -> None:
    state, elsewhere = server.kiln.state, tmp_path / "elsewhere"
    before = files_of(server.kiln.lake)
    with pytest.raises(HiveError) as refused:
        query(connection, statement.format(lake=server.kiln.lake, secret=state / "secret", elsewhere=elsewhere))
    text = str(refused.value)
    assert "the lake is read-only" in text
    assert SECRET not in text
    assert files_of(server.kiln.lake) == before
    assert not elsewhere.exists()


@pytest.mark.parametrize("statement", ALLOWED)
def test_queries_and_listings_of_bi_tools_are_answered(statement: str, connection: JavaObject) -> None:
    query(connection, statement)


@pytest.mark.parametrize("question", [each for each in QUESTIONS if each.both], ids=lambda each: each.title)
def test_questions_of_the_documents_are_answered(question: Question, connection: JavaObject) -> None:
    query(connection, question.sql)


def test_a_function_is_on_the_list_or_refused(connection: JavaObject) -> None:
    lines = FUNCTIONS.read_text("ascii").splitlines()
    listed = {name.split("/")[0] for line in lines if not line.startswith("#") for name in line.split()}
    there = {name for (name,) in query(connection, "SHOW ALL FUNCTIONS") if name and name[0].isalpha()}
    assert len(listed) > 300
    assert {"from_xml", "table_changes_by_path", "reflect"} <= there - listed
    assert listed <= there
    refused = {name for name in there if is_refused(name, "SELECT `{}`()", connection)}
    assert refused == there - listed
    assert all(is_refused(name, "SELECT * FROM `{}`()", connection) for name in refused)


def is_refused(function: str, call: str, connection: JavaObject) -> bool:
    try:
        query(connection, f"EXPLAIN {call.format(function)}")
    except HiveError as error:
        return f"the function {function} is not possible" in str(error)
    return False


def test_an_error_quotes_no_file_that_a_schema_names(server: Server, connection: JavaObject) -> None:
    """The schema, which the attacker serves, has the file as an entity, and Xerces quotes text that is no element."""
    schema = (
        f'<!DOCTYPE s [<!ENTITY f SYSTEM "file://{server.kiln.state}/secret">]>'
        '<xs:schema xmlns:xs="http://www.w3.org/2001/XMLSchema">&f;</xs:schema>'
    )
    fetched = []

    class Schemas(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fetched.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(schema.encode())

    with HTTPServer(("127.0.0.1", 0), Schemas) as attacker:
        Thread(target=attacker.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{attacker.server_port}/s.xsd"
        sql = f"SELECT from_xml('<a>1</a>', 'a INT', map('rowValidationXSDPath', '{place}'))"
        with pytest.raises(HiveError) as refused:
            query(connection, sql)
        attacker.shutdown()
    assert SECRET not in str(refused.value)
    assert not fetched


def test_a_query_sees_no_variable_of_the_environment_or_the_jvm(server: Server, connection: JavaObject) -> None:
    told = ("${env:SECRET_OF_TESTS}", "${system:user.dir}", "${spark.app.name}", "${hiveconf:a}")
    assert query(connection, f"SELECT {', '.join(map(repr, told))}") == [told]
    environment = server.jvm().environ()
    assert "PATH" in environment
    assert not [name for name in environment if name.startswith("KILN_") or name == "SECRET_OF_TESTS"]
    assert SECRET not in " ".join(server.jvm().cmdline())
    assert server.password not in " ".join(server.jvm().cmdline())


@pytest.mark.skipif(not read_landlock_version(), reason="this kernel has no Landlock")
def test_the_jvm_opens_no_file_outside_the_lake(server: Server, client: HiveClient) -> None:
    """A table's file that is a link out of the lake stands for whatever way around the lists there may be."""
    (relative, *_) = DeltaTable(str(server.kiln.lake / "publications")).file_uris()
    inside = Path(relative.removeprefix("file://"))
    outside = server.kiln.state / "outside.parquet"
    inside.rename(outside)
    inside.symlink_to(outside)
    try:
        with client.connect() as connection, pytest.raises(HiveError) as refused:
            query(connection, "SELECT * FROM publications")
    finally:
        inside.unlink()
        outside.rename(inside)
    text = str(refused.value)
    assert "The server's log says why" in text
    assert str(server.kiln.state) not in text
    assert "Permission denied" in (server.kiln.state / "logs" / "sql" / "spark.log").read_text("utf-8")
    with client.connect() as connection:
        query(connection, "SELECT * FROM publications")


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELECT 1 / 0", "[DIVIDE_BY_ZERO]"),
        ("SELECT CAST('x' AS INT)", "[CAST_INVALID_INPUT]"),
        ("SELECT nothing FROM tips", "[UNRESOLVED_COLUMN"),
        ("SELECT * FROM nothing", "[TABLE_OR_VIEW_NOT_FOUND]"),
        ("SELECT 1 +", "[PARSE_SYNTAX_ERROR]"),
    ],
)
def test_an_error_of_the_query_is_told_without_the_stack(sql: str, said: str, connection: JavaObject) -> None:
    with pytest.raises(HiveError) as refused:
        query(connection, sql)
    assert said in str(refused.value)
    assert "\tat " not in str(refused.value)
    assert "org.apache" not in str(refused.value).splitlines()[0]


@pytest.mark.parametrize(
    "key",
    [
        "set:system:kiln.sql.user",
        "set:env:PATH",
        "set:hiveconf:spark.sql.runSQLOnFiles",
        "set:hivevar:spark.sql.runSQLOnFiles",
        "set:metaconf:hive.metastore.uris",
        "set:spark.sql.catalog.other",
        "spark.sql.variable.substitute",
        "hive.server2.proxy.user",
        "use:other",
    ],
)
def test_a_client_brings_no_settings(key: str, client: HiveClient) -> None:
    with client.thrift() as calls:
        answered = client.open_session(calls, {key: "true"})
        assert f"no client sets {key}" in answered.getStatus().getErrorMessage()
        assert answered.getSessionHandle() is None


@pytest.mark.parametrize("options", ["?spark.sql.runSQLOnFiles=true", "?a=b", "#spark.sql.runSQLOnFiles=true"])
def test_an_address_brings_no_settings(options: str, client: HiveClient) -> None:
    with pytest.raises(HiveError, match="no client sets"), client.connect(options):
        pass


def test_a_connection_opens_the_database_of_the_tables_alone(client: HiveClient) -> None:
    with client.thrift() as calls:
        assert client.open_session(calls, {"use:database": "default"}).getSessionHandle() is not None
        answered = client.open_session(calls, {"use:database": "delta"})
        assert "no client sets use:database" in answered.getStatus().getErrorMessage()


def test_settings_of_one_statement_are_ignored(client: HiveClient) -> None:
    thrift = client.gateway.jvm.org.apache.hive.service.rpc.thrift
    with client.thrift() as calls:
        session = client.open_session(calls, {}).getSessionHandle()
        request = thrift.TExecuteStatementReq(session, "SET spark.sql.variable.substitute")
        request.setConfOverlay({"spark.sql.variable.substitute": "true"})
        operation = calls.ExecuteStatement(request).getOperationHandle()
        fetch = thrift.TFetchResultsReq(operation, thrift.TFetchOrientation.FETCH_NEXT, 10)
        (_, value) = calls.FetchResults(fetch).getResults().getColumns()
        assert list(value.getStringVal().getValues()) == ["false"]


def test_metadata_of_jdbc(connection: JavaObject) -> None:
    about = connection.getMetaData()
    assert {row[2] for row in rows(about.getTables(None, "default", "%", None))} == {*TABLES, *views()}
    # of tables Spark says none: Delta keeps them out of the catalog
    columns = tuple(row[3] for row in rows(about.getColumns(None, "default", "latest_tips", "%")))
    assert columns == read_view_columns()["latest_tips"]
    assert ("default",) in [row[:1] for row in rows(about.getSchemas())]
    assert rows(about.getTableTypes())
    assert rows(about.getTypeInfo())
    assert rows(about.getFunctions(None, None, "%"))
    rows(about.getCatalogs())
    assert about.getDatabaseProductName() == "Spark SQL"
    assert about.getDatabaseProductVersion().startswith("4.")


def test_large_answers_come_whole(connection: JavaObject) -> None:
    """Spark fetches the result of a task beyond 1 MB from itself over TCP, which the sandbox must let it do."""
    texts = query(connection, "SELECT randstr(2000, 1) FROM range(0, 2000, 1, 2)")
    assert [len(text or "") for (text,) in texts] == [2000] * 2000


@pytest.mark.parametrize(
    ("user", "password"), [("kiln", "wrong"), ("root", None), ("kiln", ""), ("", ""), (None, None)]
)
def test_a_wrong_password_or_user_is_refused(server: Server, user: str | None, password: str | None) -> None:
    word = server.password if password is None else password
    with log_in(server.port, user or "kiln\0x", word) as connection:
        assert answer(connection) == (BAD, "Error validating the login")


def test_a_new_password_holds_without_a_new_start(server: Server) -> None:
    before = server.password
    path = server.kiln.state / "sql-password"

    def admits(password: str) -> bool:
        with log_in(server.port, "kiln", password) as connection:
            return answer(connection)[0] == COMPLETE

    try:
        path.write_text("another\n", encoding="ascii")
        wait_until(lambda: admits("another"), "the new password")
        assert not admits(before)
    finally:
        path.write_text(f"{before}\n", encoding="ascii")
    wait_until(lambda: admits(before), "the old password again")


def test_wrong_passwords_are_answered_late_and_lock_nobody_out(server: Server) -> None:
    with ExitStack() as stack:
        wrong = [stack.enter_context(log_in(server.port, "kiln", f"wrong {number}")) for number in range(60)]
        with log_in(server.port, "kiln", server.password) as right:
            assert answer(right) == (COMPLETE, "")
        answered, _, _ = select.select(wrong, (), (), 0)
        assert len(answered) < 10, "most wait while the right password is answered"
        assert [answer(each) for each in wrong] == [(BAD, "Error validating the login")] * 60


def test_a_guess_costs_its_place_even_when_the_guesser_goes(server: Server) -> None:
    for number in range(200):
        log_in(server.port, "kiln", f"wrong {number}").close()

    def is_flooded() -> bool:
        with log_in(server.port, "kiln", "wrong") as connection:
            return "too many wrong passwords" in answer(connection)[1]

    assert is_flooded()

    def admits() -> bool:
        with log_in(server.port, "kiln", server.password) as connection:
            return answer(connection)[0] == COMPLETE

    wait_until(admits, "the right password after some seconds")


def test_connections_that_say_nothing_lock_nobody_out(server: Server, client: HiveClient) -> None:
    before = server.jvm().num_threads()
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(700)]
        for each in silent[::7]:
            each.sendall(struct.pack(">BI", START, 5))  # and no more
        with client.connect() as connection:
            assert query(connection, "SELECT 1") == [("1",)]
        closed, _, _ = select.select(silent, (), (), 0)
        assert len(silent) - len(closed) <= MOST_NEW
        assert server.jvm().num_threads() < before + 2 * MOST_NEW
        wait_until(lambda: len(select.select(silent, (), (), 0)[0]) == 700, "the end of each after the time to log in")


def test_a_login_of_100_mb_takes_no_memory(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(struct.pack(">BI", START, 100 << 20))
        assert connection.recv(1) == b""


def test_clients_are_bounded(server: Server) -> None:
    with ExitStack() as stack:
        before: list[socket.socket] = []
        while True:
            connection = stack.enter_context(log_in(server.port, "kiln", server.password))
            status, said = answer(connection)
            if status == BAD:
                break
            before.append(connection)
        assert said == f"there are {MOST_CLIENTS} clients already: close one"
        assert MOST_CLIENTS - 10 < len(before) <= MOST_CLIENTS  # with those of this module


def test_calls_that_no_bi_tool_needs_are_refused(client: HiveClient) -> None:
    thrift = client.gateway.jvm.org.apache.hive.service.rpc.thrift
    with client.thrift() as calls:
        session = client.open_session(calls, {}).getSessionHandle()
        token = calls.GetDelegationToken(thrift.TGetDelegationTokenReq(session, "kiln", "kiln"))
        assert token.getStatus().getStatusCode().toString() == "ERROR_STATUS"
        log = thrift.TFetchResultsReq(
            calls.ExecuteStatement(thrift.TExecuteStatementReq(session, "SELECT 1")).getOperationHandle(),
            thrift.TFetchOrientation.FETCH_NEXT,
            10,
        )
        log.setFetchType(1)
        assert calls.FetchResults(log).getStatus().getStatusCode().toString() == "ERROR_STATUS"
