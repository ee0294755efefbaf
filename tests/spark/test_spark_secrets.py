"""No secret of Spark's settings is on a command line, in a log or open to a stranger on the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kiln.pipelines.runtime.session import format_properties

pytestmark = pytest.mark.spark

ODD = ' two blanks,  a tab\t, back\\slash, "quotes" $HOME = : # ! é 😀 and\na line'

RUN = """
import json, os, socket, struct, sys, threading
from pathlib import Path
from kiln.deploy.stack.jars import list_jars
from kiln.pipelines.runtime.session import create_session

folder, extra = Path(sys.argv[1]), json.loads(sys.stdin.read())
lines, ended = set(), threading.Event()

def look():  # at the command line of every process that this one starts, from the first to the last
    while not ended.wait(0.005):
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if f"OWNER={os.getpid()}.".encode() in (process / "environ").read_bytes():
                    lines.add((process / "cmdline").read_text())
            except OSError:
                continue

os.environ["OWNER"] = str(os.getpid()) + "."
looking = threading.Thread(target=look, daemon=True)
looking.start()
spark = create_session(
    "secrets", master="local[1]", driver_memory="512m", jars=list_jars("spark"), scratch=folder, logs=folder,
    log4j=Path("conf/log4j2-spark.properties").absolute(), extra=extra,
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


def test_what_may_be_secret_is_on_no_command_line_and_the_rpc_refuses_strangers(tmp_path: Path) -> None:
    extra = {
        "spark.hadoop.fs.s3a.secret.key": "hunter2-s3",
        "spark.hadoop.fs.azure.account.key.lake": "hunter2-azure",
        "spark.kiln.odd": ODD,
        "spark.redaction.string.regex": "hunter2",
    }
    run = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)],
        input=json.dumps(extra),
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["rows"] == 7
    assert (found["kept"], found["memory"]) == (extra, "512m")
    assert found["set"]["spark.hadoop.fs.azure.account.key.lake"] == "*********(redacted)"
    # what was looked at is what runs: the launcher, and the JVM with its memory and class path
    assert any("org.apache.spark.deploy.SparkSubmit" in line and "-Xmx512m" in line for line in found["lines"])
    assert not [line for line in found["lines"] if "hunter2" in line]
    assert "hunter2" not in found["environment"]
    # the secret of the RPC is made by Spark, and stands nowhere
    assert len(found["secret"]) >= 32
    assert not [line for line in found["lines"] if found["secret"] in line]
    assert found["secret"] not in found["environment"]
    assert "SaslMessage" in found["said"] or "auth" in found["said"].lower(), found["said"]
    log = (tmp_path / "spark.log").read_text()
    assert "agent ?]0;owned??2J?gpj\nnext" in log
    assert "hunter2" not in log
    assert not list(tmp_path.glob("kiln-*.properties"))


def test_a_properties_file_is_ascii_and_has_a_line_for_each_key() -> None:
    text = format_properties({"a b": ODD, "c": ""})
    assert text.isascii()
    assert text.splitlines()[1] == "c="
    assert text.startswith("a\\ b=\\u0020two blanks,  a tab\\u0009, back\\\\slash")
    assert len(text.splitlines()) == 2
