"""A state folder that was copied with other file times, and one in which a table, a checkpoint or a topic of yesterday
was put back: each command is right, or refuses in words. `kept/README.md` describes the folder."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from conftest import free_ports
from kiln.conf.process.location import parse_location
from kiln.conf.process.state_folder import STATE_VERSION
from kiln.deploy.cli.app import run_command
from kiln.deploy.stack.kafka_broker import start_broker
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.checkpoint import Checkpoint
from kiln.pipelines.runtime.table_ages import TABLES_FILE
from kiln.schemas.queries import QUERIES
from kit.kiln_process import Kiln

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

PACKED = Path(__file__).with_name("kept") / f"state_of_version_{STATE_VERSION}.tar.xz"


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kept folder. Its queries have noted what their tables have, which the Kiln that wrote it did not."""
    folder = tmp_path_factory.mktemp("today")
    with tarfile.open(PACKED) as packed:
        packed.extractall(folder, filter="data")
    lake = Lake(str(folder / "state" / "lake"))
    for query in ("archive", "sink"):
        checkpoint = folder / "state" / "checkpoints" / query
        query_id = Checkpoint(parse_location(checkpoint)).query_id
        app_ids = {table: WriteId(query_id, 0).app_id(table) for table in QUERIES[query].tables if lake.has(table)}
        newest = {app_id: lake.open(table).transaction_version(app_id) for table, app_id in app_ids.items()}
        writes = {app_id: [at] for app_id, at in newest.items() if at is not None}
        assert writes
        (checkpoint / TABLES_FILE).write_text(json.dumps(writes))
    return folder / "state"


def copy_state(today: Path, state: Path) -> Kiln:
    shutil.copytree(today, state)
    return Kiln(state, free_ports(2), {"KILN_KAFKA__RETENTION": "36500d", "KILN_DEDUPE__SIGNED_TTL": "3650d"})


class Copy:
    """A copy of the folder, and the commands on it."""

    def __init__(self, kiln: Kiln, capsys: pytest.CaptureFixture[str]) -> None:
        self.kiln, self._capsys = kiln, capsys

    def ask(self, *arguments: str) -> tuple[int, str]:
        """The exit code of a command, and what it printed, in one line."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.kiln.environment.items():
                patch.setenv(name, value)
            code = run_command(list(arguments))
        printed = self._capsys.readouterr()
        return code, " ".join(f"{printed.out} {printed.err}".split())

    def contents(self) -> dict[str, bytes]:
        """Tables and checkpoints, without the deduplication files, which SQLite tidies up when they are read."""
        paths = (path for name in ("lake", "checkpoints") for path in (self.kiln.state / name).rglob("*"))
        return {str(path): path.read_bytes() for path in paths if path.is_file() and "dedup" not in path.name}

    def refused(self, commands: Sequence[Sequence[str]], *words: str) -> None:
        """Each of these commands refuses in these words, and changes no table and no checkpoint."""
        before = self.contents()
        for command in commands:
            code, said = self.ask(*command)
            assert code in (1, 3), (command, said)
            assert not [each for each in words if each not in said], (command, said)
            assert "Traceback" not in said, command
        assert self.contents() == before


@pytest.fixture
def copy(today: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Copy:
    return Copy(copy_state(today, tmp_path / "state"), capsys)


@pytest.fixture(scope="module")
def served(today: Path, broker_classpath: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kiln]:
    """A copy whose broker runs, so that none of its commands starts one."""
    kiln = copy_state(today, tmp_path_factory.mktemp("served") / "state")
    with start_broker(kiln.settings(), print):
        yield kiln


@pytest.fixture
def served_copy(today: Path, served: Kiln, capsys: pytest.CaptureFixture[str]) -> Copy:
    """The copy of `served`, with tables and checkpoints as in the original."""
    for name in ("lake", "checkpoints"):
        shutil.rmtree(served.state / name)
        shutil.copytree(today / name, served.state / name)
    return Copy(served, capsys)


@pytest.mark.parametrize("at", [None, 0], ids=["new times", "times of 1970"])
def test_a_copy_with_other_file_times_is_as_the_original(copy: Copy, at: int | None) -> None:
    for path in (copy.kiln.state, *copy.kiln.state.rglob("*")):
        os.utime(path, None if at is None else (at, at))
    rows = {table: copy.kiln.count(table) for table in ("frames", "messages", "updates", "batches")}
    checks = {each["name"]: each["level"] for each in json.loads(copy.ask("doctor", "--json")[1])}
    assert (checks["table ages"], checks["checkpoints"], checks["lake"]) == ("ok", "ok", "ok")
    for command in ("recover", "maintain"):
        code, said = copy.ask(command)
        assert code == 0, said
    assert {table: copy.kiln.count(table) for table in rows} == rows


@pytest.mark.parametrize(("table", "query"), [("messages", "archive"), ("frames", "archive"), ("tips", "sink")])
def test_a_table_of_yesterday_is_refused(served_copy: Copy, table: str, query: str) -> None:
    copy = served_copy
    log = copy.kiln.lake / table / "_delta_log"
    newest = max(path for path in log.glob("*.json") if '"txn"' in path.read_text())
    for path in log.glob("*.json"):
        if path >= newest:
            path.unlink()
    times = ("--from", "2026-01-01", "--to", "2027-01-01")
    commands = (("run", "--catch-up"), ("job", query), ("doctor",), ("recover",), ("recover", "--yes"), ("quality",))
    words = (f"the table {table} in", f"is older than the checkpoint of {query} in")
    copy.refused((*commands, ("backfill", "run", *times, "--run", "again")), *words)
    rows = copy.kiln.count(table)
    assert copy.ask("maintain")[0] == 0
    assert copy.kiln.count(table) == rows, "a table is read as it is"
    copy.refused(commands[:1], *words)


def test_a_checkpoint_of_yesterday_is_refused(served_copy: Copy) -> None:
    copy = served_copy
    folder = copy.kiln.state / "checkpoints" / "archive"
    newest = max(int(path.name) for path in (folder / "commits").glob("[0-9]*"))
    for name in ("offsets", "commits"):
        for path in (folder / name).glob(f"*{newest}*"):
            path.unlink()
    copy.refused([("run", "--catch-up"), ("job", "archive"), ("recover",)], "the checkpoint of archive in", "is older")


@pytest.mark.parametrize(("topic", "more"), [("frames", [("run", "--catch-up")]), ("updates", [])])
def test_a_topic_of_yesterday_is_refused_before_anything_is_written_to_it(
    copy: Copy, topic: str, more: Sequence[Sequence[str]], broker_classpath: list[Path]
) -> None:
    """`run` checks topics as `replay` does, so it need not refuse each topic."""
    partition = copy.kiln.state / "broker" / "data" / f"kiln.{topic}-0"
    for path in partition.iterdir():
        if path.suffix in (".log", ".index", ".timeindex", ".snapshot"):
            path.unlink()
    capture = str(copy.kiln.state.parent / "more.rpc.gz")
    assert copy.ask("generate", capture, "--for", "1s")[0] == 0
    copy.refused((("replay", capture), *more, ("recover",)), f"kiln.{topic}-0 ends at the offset", "was read up to")
