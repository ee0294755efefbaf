"""Spark's JVM as Kiln starts it: with the classes that `make setup` keeps (deploy/run/spark_classes.py), and without a
secret of the settings on a command line, in a log or open to a stranger on the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any  # values of JSON
from unittest import mock

import pytest

from kiln.conf.settings.model import Spark
from kiln.deploy.stack import spark
from kiln.deploy.stack.java import find_java
from kiln.pipelines.runtime.session import format_properties
from kiln.pipelines.runtime.spark_environment import find_spark_home

pytestmark = pytest.mark.spark

ODD = ' two blanks,  a tab\t, back\\slash, "quotes" $HOME = : # ! é 😀 and\na line'
EXTRA = {
    "spark.hadoop.fs.s3a.secret.key": "hunter2-s3",
    "spark.hadoop.fs.azure.account.key.lake": "hunter2-azure",
    "spark.kiln.odd": ODD,
    "spark.redaction.string.regex": "hunter2",
}

RUN = """
import json, os, socket, struct, sys, threading
from pathlib import Path
from kiln.deploy.stack.jars import list_jars
from kiln.pipelines.runtime.session import create_session

folder, java_options, extra = Path(sys.argv[1]), sys.argv[2], json.loads(sys.stdin.read())
lines, ended = set(), threading.Event()

def list_processes():
    return {name for name in os.listdir("/proc") if name.isdecimal()}

def look():  # at the command line of every process that this one starts, from the first to the last
    strangers = before
    while not ended.wait(0.005):
        there = list_processes()
        strangers = strangers & there
        for process in (Path("/proc", name) for name in there - strangers):
            try:
                if f"OWNER={os.getpid()}.".encode() in (process / "environ").read_bytes():
                    lines.add((process / "cmdline").read_text())
            except OSError:
                continue

before = list_processes()
os.environ["OWNER"] = str(os.getpid()) + "."
looking = threading.Thread(target=look, daemon=True)
looking.start()
spark = create_session(
    "secrets", master="local[1]", driver_memory="768m", java_options=java_options, jars=list_jars("spark"),
    scratch=folder, logs=folder, log4j=Path("conf/log4j2-spark.properties").absolute(), extra=extra,
)
rows = spark.range(7).repartition(2).count()
ended.set()
looking.join()
context = spark.sparkContext

def ask(port):  # an RPC of Spark's transport, without a word of who asks: a frame, type 3, id, length, body
    body = b"no word of who asks"
    frame = struct.pack(">BqI", 3, 7, len(body)) + body
    with socket.create_connection(("127.0.0.1", port), timeout=20) as peer:
        peer.sendall(struct.pack(">Q", 8 + len(frame)) + frame)
        said = b""
        while part := peer.recv(65536):
            said += part
            if len(said) > 8 and len(said) >= struct.unpack(">Q", said[:8])[0]:
                break
    return said.decode(errors="replace")

log = context._jvm.org.apache.logging.log4j.LogManager.getLogger("peer")
log.warn("agent \\x1b]0;owned\\x07\\x9b2J\\u202egpj\\nnext")
print(json.dumps({
    "rows": rows,
    "lines": sorted(lines),
    "kept": {key: context.getConf().get(key) for key in extra},
    "memory": context.getConf().get("spark.driver.memory"),
    "secret": context._jsc.sc().env().securityManager().getSecretKey(),
    "environment": Path("/proc", str(context._gateway.proc.pid), "environ").read_bytes().decode(errors="replace"),
    "set": {row.key: row.value for row in spark.sql("SET").collect()},
    "said": ask(int(context.getConf().get("spark.driver.port"))),
}))
"""

Found = dict[str, Any]  # values of JSON, of several types


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scratch folder of the JVM, with its log; the JVM notes where each class came from in `loaded`."""
    return tmp_path_factory.mktemp("start")


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """The findings of a program with a Spark session."""
    options = f'{Spark().java_options} {spark._build_archive_option()} "-Xlog:class+load:file={folder / "loaded"}"'
    run = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), options],
        input=json.dumps(EXTRA),
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    printed: Found = json.loads(run.stdout.splitlines()[-1])
    assert printed["rows"] == 7
    return printed


def test_what_may_be_secret_is_on_no_command_line_and_the_rpc_refuses_strangers(found: Found, folder: Path) -> None:
    assert (found["kept"], found["memory"]) == (EXTRA, "768m")
    assert found["set"]["spark.hadoop.fs.azure.account.key.lake"] == "*********(redacted)"
    # what was looked at is what runs: the launcher, and the JVM with its memory and class path
    assert any("org.apache.spark.deploy.SparkSubmit" in line and "-Xmx768m" in line for line in found["lines"])
    assert not [line for line in found["lines"] if "hunter2" in line]
    assert "hunter2" not in found["environment"]
    # the secret of the RPC is made by Spark, and stands nowhere
    assert len(found["secret"]) >= 32
    assert not [line for line in found["lines"] if found["secret"] in line]
    assert found["secret"] not in found["environment"]
    assert "SaslMessage" in found["said"] or "auth" in found["said"].lower(), found["said"]
    log = (folder / "spark.log").read_text()
    assert "agent ?]0;owned??2J?gpj\nnext" in log
    assert "hunter2" not in log
    assert not list(folder.glob("kiln-*.properties"))


@pytest.mark.usefixtures("found")
def test_classes_that_were_kept_are_not_read_from_jars_again(folder: Path) -> None:
    loaded = (folder / "loaded").read_text().splitlines()
    kept = [line for line in loaded if "shared objects file (top)" in line]
    for name in ("org.apache.spark.SparkContext ", "org.apache.spark.sql.classic.SparkSession "):
        assert any(f" {name}" in line for line in kept), name
    assert sum(".jar" in line for line in loaded) < len(kept) / 10


def test_a_file_of_classes_that_does_not_fit_costs_time_only(tmp_path: Path) -> None:
    """The JVM that Spark starts runs without it."""
    other = tmp_path / "classes.jsa"
    other.write_bytes(b"of another JVM" * 1000)
    with mock.patch.object(spark, "spark_archive_path", return_value=other):
        option = spark._build_archive_option().strip('"')
    assert str(other) in option
    jars = f"{find_spark_home()}/jars/*"
    command = [str(find_java().executable), option, "-cp", jars, "org.apache.spark.deploy.SparkSubmit", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert "Welcome to" in done.stderr


def test_a_properties_file_is_ascii_and_has_a_line_for_each_key() -> None:
    text = format_properties({"a b": ODD, "c": ""})
    assert text.isascii()
    assert text.splitlines()[1] == "c="
    assert text.startswith("a\\ b=\\u0020two blanks,  a tab\\u0009, back\\\\slash")
    assert len(text.splitlines()) == 2
