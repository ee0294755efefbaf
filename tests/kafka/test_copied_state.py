"""A state folder that was copied with other file times, and one in which a table, a checkpoint or a topic of yesterday
was put back: each command is right, or refuses in words."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from conftest import free_ports
from kiln.deploy.cli.app import run_command
from kit.kiln_process import Kiln

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.timeout(900)]

CAPTURES = {"first": "8s", "second": "20s", "third": "12s"}
RUN = "again"
"""Name of a backfill run of all frames."""


class Kept(NamedTuple):
    """A state folder of today, which is at rest, and one of yesterday; two captures are in the former."""

    today: Path
    yesterday: Path
    third: Path
    """capture that no Kiln has read"""
    frames: int
    """of today"""
    old_frames: int


def kiln_of(state: Path) -> Kiln:
    partitions = {f"KILN_KAFKA__{name}_PARTITIONS": "1" for name in ("FRAMES", "UPDATES", "OTHER")}
    return Kiln(state, free_ports(2), {**partitions, "KILN_BRIDGE__LISTEN": '["/ip4/127.0.0.1/tcp/0"]'})


@pytest.fixture(scope="module")
def kept(broker_classpath: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Kept:
    folder = tmp_path_factory.mktemp("kept")
    kiln = kiln_of(folder / "state")
    for seed, (name, length) in enumerate(CAPTURES.items()):
        kiln.run("generate", str(folder / f"{name}.rpc.gz"), "--for", length, "--rate", "15", "--seed", str(seed))
    kiln.run("replay", str(folder / "first.rpc.gz"))
    kiln.run("run", "--catch-up")
    old_frames = kiln.count("frames")
    shutil.copytree(kiln.state, folder / "yesterday")
    kiln.run("replay", str(folder / "second.rpc.gz"))
    kiln.run("run", "--catch-up")
    (row,) = kiln.sql("SELECT min(observed_at) AS low, max(observed_at) + INTERVAL 1 SECOND AS high FROM frames")
    kiln.run("backfill", "run", "--from", str(row["low"]), "--to", str(row["high"]), "--run", RUN)
    return Kept(kiln.state, folder / "yesterday", folder / "third.rpc.gz", kiln.count("frames"), old_frames)


Answer = tuple[int, str]


class Copy:
    """A copy of today's state folder."""

    def __init__(self, kept: Kept, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.kiln, self.kept, self._capsys = kiln_of(state), kept, capsys
        shutil.copytree(kept.today, state)

    def ask(self, *arguments: str) -> Answer:
        """The exit code of a command, and what it printed, in one line."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.kiln.environment.items():
                patch.setenv(name, value)
            code = run_command(list(arguments))
        printed = self._capsys.readouterr()
        return code, " ".join(f"{printed.out} {printed.err}".split())

    def put_back(self, *names: str) -> None:
        """Put a folder of yesterday in the place of today's."""
        folder = self.kiln.state.joinpath(*names)
        shutil.rmtree(folder)
        shutil.copytree(self.kept.yesterday.joinpath(*names), folder)

    def contents(self, *folders: str) -> dict[str, bytes]:
        paths = (path for name in folders for path in (self.kiln.state / name).rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in paths if path.suffix != ".sqlite-shm"}  # of any reader

    def refused(self, commands: Sequence[Sequence[str]], *words: str) -> None:
        """Each of these commands refuses in these words, and changes no table and no checkpoint."""
        before = self.contents("lake", "checkpoints")
        for command in commands:
            code, said = self.ask(*command)
            assert code in (1, 3), (command, said)
            assert not [each for each in words if each not in said], (command, said)
            assert "Traceback" not in said, command
        assert self.contents("lake", "checkpoints") == before


@pytest.fixture
def copy(kept: Kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Copy:
    return Copy(kept, tmp_path / "state", capsys)


@pytest.mark.parametrize("at", [None, 0], ids=["new times", "times of 1970"])
def test_a_copy_with_other_file_times_is_as_the_original(copy: Copy, at: int | None) -> None:
    for path in (copy.kiln.state, *copy.kiln.state.rglob("*")):
        os.utime(path, None if at is None else (at, at))
    assert '"table ages", "level": "ok"' in copy.ask("doctor", "--json")[1]
    assert copy.ask("recover")[0] == 0
    assert copy.ask("quality")[0] == 0
    assert copy.ask("backfill", "diff", RUN)[0] == 0
    assert copy.ask("backfill", "swap", RUN)[0] == 0
    assert copy.ask("maintain")[0] == 0
    assert copy.kiln.count("frames") == copy.kept.frames
    copy.kiln.run("replay", str(copy.kept.third))
    copy.kiln.run("run", "--catch-up")
    assert copy.kiln.count("frames") > copy.kept.frames
    copy.kiln.check_tables_hold_each_thing_once()
    copy.kiln.check_updates_are_new_once()
    assert copy.ask("recover")[0] == 0


@pytest.mark.parametrize(("table", "query"), [("messages", "archive"), ("frames", "archive"), ("tips", "sink")])
def test_a_table_of_yesterday_is_refused(copy: Copy, table: str, query: str) -> None:
    copy.put_back("lake", table)
    commands = (("run", "--catch-up"), ("job", query), ("doctor",), ("recover",), ("recover", "--yes"))
    more = (("quality",), ("backfill", "swap", RUN), ("backfill", "run", *_RANGE, "--run", "more"))
    copy.refused((*commands, *more), f"the table {table} in", f"is older than the checkpoint of {query} in")
    rows = copy.kiln.count(table)
    assert copy.ask("maintain")[0] == 0
    assert copy.kiln.count(table) == rows, "a table is read as it is"
    copy.refused(commands[:1], f"the table {table} in")


_RANGE = ("--from", "2026-01-01", "--to", "2027-01-01")


def test_tables_of_a_run_of_yesterday_are_refused(copy: Copy) -> None:
    folder = copy.kiln.lake / "backfill" / RUN / "messages"
    newest = max((folder / "_delta_log").glob("*.json"))
    newest.unlink()
    copy.refused([("backfill", "swap", RUN)], f"the table messages in {folder.parent} is older than run {RUN}")


@pytest.mark.parametrize("query", ["archive", "sink", "updates"])
def test_a_checkpoint_of_yesterday_is_refused(copy: Copy, query: str) -> None:
    copy.put_back("checkpoints", query)
    copy.refused([("recover",)], f"the checkpoint of {query} in", "is older than")
    if query != "updates":  # which Kafka tells, once Spark has started
        copy.refused([("run", "--catch-up"), ("job", query)], f"{query} cannot start: the checkpoint of {query} in")
    assert copy.ask("quality")[0] == 0
    assert copy.kiln.count("frames") == copy.kept.frames


@pytest.mark.parametrize("topic", ["frames", "updates"])
def test_a_topic_of_yesterday_is_refused_before_anything_is_written_to_it(copy: Copy, topic: str) -> None:
    copy.put_back("broker", "data", f"kiln.{topic}-0")
    commands = (("run", "--catch-up"), ("replay", str(copy.kept.third)), ("run", "--catch-up"), ("recover",))
    copy.refused(commands, f"kiln.{topic}-0 ends at the offset", "and was read up to")
    for command in (("quality",), ("backfill", "diff", RUN), ("backfill", "swap", RUN)):
        assert copy.ask(*command)[0] == 0
    assert copy.kiln.count("frames") == copy.kept.frames
