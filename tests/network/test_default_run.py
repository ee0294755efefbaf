"""`kiln run` as a new user starts it, without a network but loopback, and the tutorial on what it recorded."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import StreamRequestHandler, UnixStreamServer
from threading import Thread
from typing import NamedTuple

import pytest

from conftest import free_ports
from kit import loopback
from kit.doc_examples import TUTORIAL, examples
from kit.kiln_process import Kiln

pytestmark = [
    pytest.mark.spark,
    pytest.mark.kafka,
    pytest.mark.timeout(1_800),
    pytest.mark.skipif(not loopback.available(), reason="no network namespace for this user"),
]

LENGTHS = (40, 80, 160, 320)
"""s of a run; the next one only if no batch came, as on a machine with other work"""


class Recorded(NamedTuple):
    kiln: Kiln
    batches: int
    """batches by the summary of the run"""
    packets: int
    """packets that had no way out"""
    said: str


@pytest.fixture(scope="module")
def recorded(broker_classpath: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The whole, by default: broker, demo network, bridge, queries."""
    settings = {"KILN_BRIDGE__LISTEN": "/ip4/127.0.0.1/tcp/0", "KILN_DURABILITY": "power"}  # which is the default
    kiln = Kiln(tmp_path_factory.mktemp("default") / "state", free_ports(2), settings)
    for length in LENGTHS:
        status, packets, said = loopback.run(kiln.command("run", "--for", f"{length}s"), kiln.environment)
        assert status == 0, said
        counted = re.search(r"([\d,]+) batches", said.partition("summary")[2])
        assert counted is not None, said
        if batches := int(counted[1].replace(",", "")):
            return Recorded(kiln, batches, packets, said)
    raise AssertionError(said)


def test_kiln_run_needs_no_other_network(recorded: Recorded) -> None:
    assert recorded.packets == 0, recorded.said


def test_at_its_end_a_run_drains(recorded: Recorded) -> None:
    """The summary agrees with the tables, and each update that has a separator is in a batch."""
    assert recorded.kiln.count("batches") == recorded.batches, recorded.said
    unbatched = (
        "SELECT stream, tip FROM updates WHERE separator_key IS NOT NULL EXCEPT SELECT stream, tip FROM batch_tips"
    )
    assert recorded.kiln.sql(unbatched) == [], recorded.said


PROGRAM = """#!{python} -IS
import json, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    server.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
    code, out, err = json.loads(server.makefile().read())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


@contextmanager
def kept_program(kiln: Kiln) -> Iterator[str]:
    """The folder of a program `kiln` that runs its commands as `Kiln.run_kept` does, without a new process for each."""

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            done = kiln.attempt_kept(*json.loads(self.rfile.readline()))
            self.wfile.write(json.dumps([done.returncode, done.stdout, done.stderr]).encode())

    with tempfile.TemporaryDirectory() as folder, UnixStreamServer(f"{folder}/socket", Handler) as server:
        program = Path(folder, "kiln")
        program.write_text(PROGRAM.format(python=sys.executable, address=server.server_address))
        program.chmod(0o700)
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield folder
        finally:
            server.shutdown()


def test_each_command_of_the_tutorial_runs_on_what_a_live_run_recorded(recorded: Recorded, tmp_path: Path) -> None:
    """All but its `kiln run`, which recorded the state of these tests."""
    (tmp_path / "state").symlink_to(recorded.kiln.state)
    tried = [each for each in examples(TUTORIAL) if each.code != "kiln run --for 60s\n"]
    assert len(tried) >= 10
    (variables,) = (each for each in tried if each.code.startswith("from="))
    with kept_program(recorded.kiln) as folder:
        path = os.pathsep.join([folder, str(Path(sys.executable).parent), os.environ["PATH"]])
        printed = {each.code: each.run(tmp_path, {"PATH": path}) for each in tried}
    assert "five-seconds  done" in printed[variables.code]
    silent = [code for code, words in printed.items() if not words]
    assert silent == ["kiln backfill drop five-seconds\n"]  # its words are on stderr
