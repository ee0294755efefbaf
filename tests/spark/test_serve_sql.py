"""kiln serve-sql by a client of another make: beeline, over JDBC, as BI tools connect."""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import free_ports
from deltalake import DeltaTable, write_deltalake
from kit.awaiting import wait_until
from kit.kiln_process import Kiln
from kit.traced_lake import BATCH, make_lake

from deploy.embedded.java import find_java
from deploy.sql.ask import ask
from pipelines.lake.lake import Lake
from schemas.tables import TABLES
from schemas.views import views

pytestmark = pytest.mark.spark

REFUSED = """
INSERT INTO tips SELECT * FROM tips
INSERT OVERWRITE tips SELECT * FROM tips
DELETE FROM tips
UPDATE tips SET tip = 'x'
MERGE INTO tips USING tips AS s ON tips.tip = s.tip WHEN MATCHED THEN DELETE
TRUNCATE TABLE tips
DROP TABLE tips
DROP VIEW latest_tips
ALTER TABLE tips SET TBLPROPERTIES ('a' = 'b')
OPTIMIZE tips
VACUUM tips
RESTORE TABLE tips TO VERSION AS OF 0
CREATE TABLE made (a INT) USING delta
CREATE TABLE made USING parquet AS SELECT 1 AS a
CREATE VIEW made AS SELECT 1 AS a
CREATE TEMPORARY VIEW made USING text OPTIONS (path '/etc/hostname')
INSERT OVERWRITE DIRECTORY '{elsewhere}' USING csv SELECT 1
CACHE TABLE tips
ADD JAR '/tmp/none.jar'
SET spark.sql.runSQLOnFiles=true
SELECT TRANSFORM (a) USING 'cat' FROM (SELECT 1 AS a)
SELECT reflect('java.lang.System', 'getProperty', 'user.dir')
SELECT (SELECT java_method('java.lang.System', 'getProperty', 'user.dir'))
EXECUTE IMMEDIATE 'DROP TABLE tips'
"""
UNKNOWN = """
SELECT * FROM delta.`{lake}/tips`
SELECT * FROM text.`/etc/hostname`
"""


@dataclass(frozen=True)
class Server:
    """A server that takes clients."""

    kiln: Kiln
    port: int

    def ask(
        self, *statements: str, user: str = "kiln", password: str | None = None, options: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Runs statements in one connection, and goes on after one that fails."""
        script = self.kiln.state / "statements.sql"
        script.write_text("".join(f"{statement};\n" for statement in statements), encoding="utf-8")
        if password is None:
            password = (self.kiln.state / "sql-password").read_text(encoding="ascii").strip()
        spec = find_spec("pyspark")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        jars = f"{spec.submodule_search_locations[0]}/jars/*"
        address = f"jdbc:hive2://127.0.0.1:{self.port}/default{options}"
        client = [
            str(find_java().executable),
            "-XX:TieredStopAtLevel=1",
            "-cp",
            jars,
            "org.apache.hive.beeline.BeeLine",
        ]
        how = ["--silent=true", "--force=true", "--outputformat=csv2", "--nullemptystring=true"]
        return subprocess.run(
            [*client, "-u", address, "-n", user, "-p", password, *how, "-f", str(script)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("serve")
    make_lake(state / "lake")
    *ports, port = free_ports(3)
    kiln = Kiln(state, ports)
    process = kiln.start("serve-sql", "--port", str(port))
    said = state / "started.out"
    try:

        def ready() -> bool:
            return process.poll() is not None or "jdbc:hive2://" in said.read_text("utf-8")

        wait_until(ready, lambda: f"an address in {said.read_text('utf-8')!r}", seconds=240)
        assert process.poll() is None, said.read_text("utf-8")
        yield Server(kiln, port)
        process.terminate()
        assert process.wait(60) == 0, said.read_text("utf-8")
    finally:
        process.kill()


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("Error: ")]


def test_a_client_reads_every_table_and_view(server: Server) -> None:
    names = [*TABLES, *views()]
    counted = [f"SELECT '{name}', count(*) FROM `{name}`" for name in names]
    together = [" UNION ALL ".join(counted[at : at + 8]) for at in range(0, len(counted), 8)]  # fewer jobs
    done = server.ask(*together, "SHOW TABLES", "DESCRIBE tips")
    assert not errors(done), done.stderr
    counts = {row[0]: int(row[1]) for row in csv.reader(done.stdout.splitlines()) if len(row) == 2 and row[1].isdigit()}
    lake = Lake(str(server.kiln.lake))
    assert counts == {name: next(ask(lake, f"SELECT count(*) FROM {name}").rows())[0] for name in names}
    assert counts["messages"] > 0
    shown = {row[1] for row in csv.reader(done.stdout.splitlines()) if len(row) == 3 and row[0] == "default"}
    assert shown == set(names)


def test_rows_that_come_later_are_in_the_next_answer(server: Server) -> None:
    question = f"SELECT count(*) AS n FROM publications WHERE cid = '{BATCH}'"
    assert server.ask(question).stdout.split() == ["n", "1"]
    place = str(server.kiln.lake / "publications")
    write_deltalake(place, DeltaTable(place).to_pyarrow_table().slice(0, 1), mode="append")
    assert server.ask(question).stdout.split() == ["n", "2"]


def test_whatever_is_no_question_is_refused_and_changes_nothing(server: Server, tmp_path: Path) -> None:
    lake = Lake(str(server.kiln.lake))
    before = {path: path.stat().st_mtime_ns for path in Path(lake.path).rglob("*")}
    elsewhere = tmp_path / "elsewhere"
    refused = REFUSED.format(elsewhere=elsewhere).strip().splitlines()
    unknown = UNKNOWN.format(lake=lake.path).strip().splitlines()
    done = server.ask(*refused, *unknown)
    told = errors(done)
    assert [line for line in told if "the lake is read only here" not in line] == told[len(refused) :]
    assert len(told) == len(refused) + len(unknown), done.stderr
    assert all("runSQLOnFiles" in line or "UNSUPPORTED" in line or "NOT_FOUND" in line for line in told[len(refused) :])
    assert {path: path.stat().st_mtime_ns for path in Path(lake.path).rglob("*")} == before
    assert not elsewhere.exists()


def test_settings_that_a_client_brings_open_no_other_files(server: Server) -> None:
    for option in ("spark.sql.runSQLOnFiles=true", "spark.sql.catalog.other=org.example.Catalog"):
        done = server.ask("SELECT * FROM text.`/etc/hostname`", "SELECT 'came', 'through'", options=f"?{option}")
        assert "no client sets" in done.stderr
        assert not done.stdout.strip()


@pytest.mark.parametrize("wrong", [{"password": "wrong"}, {"user": "root"}])
def test_a_wrong_password_or_user_is_refused(server: Server, wrong: dict[str, str]) -> None:
    done = server.ask("SELECT 'came', 'through'", **wrong)
    assert "Error validating the login" in done.stderr
    assert not done.stdout.strip()
