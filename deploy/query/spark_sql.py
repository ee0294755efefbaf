"""Read-only SQL over the lake with Spark.

Spark has no option that forbids a session to write, or a query to open files. So a query is parsed first, and rejected
before analysis if it contains a plan node that `ReadOnly.scala` does not list. `compile_classes` compiles
`ReadOnly.scala` for the JVM with the Scala compiler that ships in pyspark, so that no JDK is needed.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from kiln.conf.process.errors import PrerequisiteError
from kiln.conf.settings.keys import suggest_key
from kiln.deploy.query.ask import Answer, AsOf, SqlError, describe_absence, find_named_tables, open_table, read_batches
from kiln.deploy.stack.jars import default_root
from kiln.deploy.stack.java import find_java
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.spark_environment import find_spark_home
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.delta.views import views

_MISSING: Final = re.compile(r"^\[TABLE_OR_VIEW_NOT_FOUND\].*?`(\w+)`")
_SETTINGS: Final = {
    "spark.sql.runSQLOnFiles": "false",
    # ${env:NAME} in a query would be replaced by an environment variable
    "spark.sql.variable.substitute": "false",
    "spark.sql.session.timeZone": "UTC",
}


def query_spark(
    spark: SparkSession,
    lake: Lake,
    sql: str,
    as_of: AsOf | None = None,
    *,
    most: int | None = None,
    partitions: int = 2,
) -> Answer:
    """Run a query with Spark over the tables of a lake, and load the result into memory.

    Args:
        as_of: Version or time of the tables, by default the newest.
        most: Maximum number of rows to load; by default all.
        partitions: Number of shuffle partitions.

    Raises:
        SqlError: The text is not one read-only query, or the query fails.
        LakeError: A table cannot be read.
        NoSuchVersionError: A table does not have that version.
    """
    session = spark.newSession()
    for key, value in {**_SETTINGS, "spark.sql.shuffle.partitions": str(partitions)}.items():
        session.conf.set(key, value)
    check_read_only(session, sql)
    names, wanted = find_named_tables(sql, lake.tables())
    if not (names or wanted):
        names, wanted = lake.tables(), tuple(views().values())
    there = {name for name in names if _create_view(session, lake, name, as_of)}
    for name in {table for view in wanted for table in view.tables} - there:
        session.createDataFrame([], TABLES[name].ddl).createOrReplaceTempView(name)
    try:
        for view in wanted:
            session.sql(view.spark).createOrReplaceTempView(view.name)
        frame = session.sql(sql)
        table = (frame if most is None else frame.limit(most)).toArrow()
    except (PySparkException, Py4JJavaError) as error:
        line = _first_line(error)
        missing = _MISSING.search(line)
        if missing and (absence := describe_absence(lake, missing[1], as_of)):
            raise SqlError(absence) from error
        near = "" if missing is None else suggest_key(missing[1], (*lake.tables(), *views()))
        raise SqlError(f"{line}{near}") from error
    return Answer(table.column_names, read_batches(table.to_batches()))


def _create_view(session: SparkSession, lake: Lake, name: str, as_of: AsOf | None) -> bool:
    """Create a view of a table; return false if the table did not exist at `as_of`."""
    table = open_table(lake, name, as_of)
    if table is None:
        return False
    reader = session.read.format("delta")
    if as_of is not None:
        reader = reader.option("versionAsOf", table.version())
    frame: DataFrame = reader.load(lake.folder(name).spark_uri)
    frame.createOrReplaceTempView(name)
    return True


def check_read_only(session: SparkSession, sql: str) -> None:
    """Check that the text is one read-only query or listing.

    Raises:
        SqlError: The text is something else.
    """
    jvm = session._jvm
    assert jvm is not None  # a classic session has a JVM
    try:
        jvm.kiln.ReadOnly.check(session._jsparkSession.sessionState().sqlParser().parsePlan(sql))
    except (PySparkException, Py4JJavaError) as error:
        raise SqlError(_first_line(error).removeprefix("[KILN_READ_ONLY] ")) from error


def _first_line(error: Exception) -> str:
    words = str(error).strip().split("\n")[0]
    return words or type(error).__name__


SOURCES = sorted(Path(__file__).parent.glob("*.scala"))
FUNCTIONS = Path(__file__).with_name("functions.txt")
"""list of allowed functions, which `ReadOnly.scala` loads from the class path"""
_PATIENCE = 300.0  # seconds


def compile_classes(progress: Callable[[str], None]) -> Path:
    """Compile `ReadOnly.scala` for the JVM, unless this version of it was already compiled for this pyspark.

    Args:
        progress: Called with progress messages.

    Returns:
        The folder of the classes.

    Raises:
        PrerequisiteError: The compilation fails.
        JavaError: There is no usable Java.
    """
    jars = find_spark_home() / "jars"
    texts = b"".join(path.read_bytes() for path in (*SOURCES, FUNCTIONS))
    digest = hashlib.sha256(texts + str(sorted(jar.name for jar in jars.glob("spark-sql_*"))).encode())
    parent = default_root() / "guard"
    folder = parent / digest.hexdigest()[:16]
    if folder.is_dir():
        return folder
    progress("compiling the guard that keeps Spark SQL read-only (once per version) …")
    parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix="compiling-", dir=parent))
    try:
        _compile(jars, fresh)
        shutil.copy(FUNCTIONS, fresh)
        try:
            fresh.rename(folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def _compile(jars: Path, into: Path) -> None:
    command = [str(find_java().executable), "-XX:TieredStopAtLevel=1", "-cp", f"{jars}/*", "scala.tools.nsc.Main"]
    try:
        done = subprocess.run(
            [*command, "-usejavacp", "-nowarn", "-d", str(into), *map(str, SOURCES)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PrerequisiteError(
            "cannot compile the guard that keeps Spark SQL read-only: the compiler took more than "
            f"{_PATIENCE:.0f} s. Retry"
        ) from None
    if done.returncode != 0:
        raise PrerequisiteError(
            "cannot compile the guard that keeps Spark SQL read-only with this pyspark. Install the version in "
            f"requirements.lock. Output of the compiler:\n{(done.stdout + done.stderr)[:2000]}"
        )
