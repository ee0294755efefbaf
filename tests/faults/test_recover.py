"""A checkpoint put back from before its tables or its records, and files as a power cut leaves them: after `kiln
recover`, or a start alone, and a run, every frame, message and update of the log is there once."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from kiln.conf.process.location import parse_location
from kiln.conf.settings.model import JobName, Settings
from kiln.conf.settings.reading import load_settings
from kiln.deploy.cli.app import run_command
from kiln.deploy.demo.traffic import Traffic, TrafficOptions
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.pipelines.app.launch import decode_config
from kiln.pipelines.app.supervisor import RestartsExhaustedError, Supervisor
from kiln.pipelines.decode.decoder import DecodedMessage, FrameDecoder
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.lake import Lake, locate_commit
from kiln.pipelines.runtime.checkpoint import Checkpoint
from kiln.pipelines.runtime.dedup_store import FILE_NAME
from kiln.pipelines.runtime.topics import ProgressMarker
from kit.awaiting import wait_until
from kit.log_feed import frames_producer, kiln_beside
from kit.log_model import read_records, update_of

pytest_plugins = ["kit.local_spark"]
pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.timeout(400)]


class Stack:
    """One query on the session's broker. `feed` and `run` may be called again and again."""

    def __init__(self, spark: SparkSession, settings: Settings, address: str, query: JobName) -> None:
        self.spark, self.settings, self.address, self.query = spark, settings, address, query
        self.lake = Lake.from_location(settings.lake_root)
        self.checkpoint = settings.state / "checkpoints" / query
        options = TrafficOptions(seed=3, network="local-recover", garbage=0.0, forged=0.0, impostors=0.0, copies=3)
        self._frames = Traffic(options, time.time_ns(), 1_000, keep_ledger=False).frames()

    def feed(self, number: int = 150) -> None:
        with frames_producer(self.address, self.settings.kafka.prefix) as producer:
            for _ in range(number):
                frame = next(self._frames)
                producer.send_record(frame.key, frame.value)
            producer.flush()

    def log(self) -> dict[str, dict[int, int]]:
        """The end offsets."""
        topic = self.settings.kafka.topic("frames")
        return {topic: {part: len(found) for part, found in read_records(self.address, topic).items()}}

    def run(self) -> list[str]:
        """Until nothing is left to read; what was mended at the start."""
        ends = self.log()
        queries = Supervisor(self.spark, self.settings, [self.query])
        queries.start()
        try:

            def done() -> bool:
                queries.check()
                return queries.has_caught_up(ends)

            wait_until(done, lambda: f"{self.query} caught up; errors: {queries.errors}")
        finally:
            queries.stop()
        return queries.repairs

    def announced(self) -> Counter[tuple[str, str]]:
        """How often each tip of a stream is in `kiln.updates`."""
        records = read_records(self.address, self.settings.kafka.topic("updates"))
        found = [update_of(value) for part in records.values() for _, _, value in part if value]
        return Counter((each.stream, each.tip) for each in found if each is not None)

    def epochs(self) -> Counter[tuple[str, str]]:
        """Under how many epochs each tip of a stream is in `kiln.updates`."""
        records = read_records(self.address, self.settings.kafka.topic("updates"))
        found = [update_of(value) for part in records.values() for _, _, value in part if value]
        told = {(each.stream, each.tip, each.epoch) for each in found if each is not None}
        return Counter((stream, tip) for stream, tip, _ in told)

    def repeated(self) -> set[tuple[str, str]]:
        """Tips that are in `kiln.updates` more than once, although no author went back to them (decision 5)."""
        last: dict[tuple[str, str | None], str | None] = {}
        gone_back_to = set[tuple[str, str]]()
        copies = sorted(self._decode_updates(), key=lambda item: item.observed_at, reverse=True)
        for item in reversed({item.message_id: item for item in copies}.values()):
            author, _, _ = item.message_id.partition("/")
            stream, tip = item.content.stream, item.content.tip
            if last.get((author, stream), tip) != tip:
                gone_back_to.add((stream or "", tip or ""))
            last[author, stream] = tip
        return {tip for tip, count in self.announced().items() if count > 1} - gone_back_to

    def updates(self) -> set[tuple[str, str]]:
        """The tips that the frames announce, of streams with a separator."""
        return {
            (item.content.stream or "", item.content.tip or "")
            for item in self._decode_updates()
            if item.separator is not None or item.content.model is not None
        }

    def _decode_updates(self) -> list[DecodedMessage]:
        decoder = FrameDecoder(decode_config(self.settings))
        records = read_records(self.address, self.settings.kafka.topic("frames"))
        items = (
            item
            for part, found in records.items()
            for at, (stamp, _, value) in enumerate(found)
            for item in decoder.decode(value, part, at, stamp)
        )
        return [item for item in items if isinstance(item, DecodedMessage) and item.content.type == "UPDATE"]

    def places(self, table: str) -> Counter[tuple[int, int]]:
        """How many rows there are of each record of the log."""
        rows = self.lake.open(table).to_pyarrow_table(columns=["kafka_partition", "kafka_offset"])
        return Counter(zip(rows["kafka_partition"].to_pylist(), rows["kafka_offset"].to_pylist(), strict=True))

    def check(self) -> None:
        """Every frame once, every copy and every message once, and no message without its frame."""
        (ends,) = self.log().values()
        assert self.places("frames") == Counter((part, at) for part, end in ends.items() for at in range(end))
        for table, key in (("messages", ["network", "message_id"]), ("copies", ["kafka_partition", "kafka_offset"])):
            columns = [*key, "message_index"] if table == "copies" else key
            rows = self.lake.open(table).to_pyarrow_table(columns=columns)
            found = Counter(tuple(row.values()) for row in rows.to_pylist())
            assert found
            assert max(found.values()) == 1, table
        copies = self.lake.open("copies").to_pyarrow_table(columns=["message_id"])["message_id"].to_pylist()
        messages = self.lake.open("messages").to_pyarrow_table(columns=["message_id"])["message_id"].to_pylist()
        assert set(copies) == set(messages)


NewStack = Callable[[JobName], Stack]


@pytest.fixture
def new_stack(
    spark: SparkSession, broker: EmbeddedBroker, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> NewStack:
    def made(query: JobName) -> Stack:
        kiln = kiln_beside(broker.address, prefix, tmp_path, {f"KILN_JOBS__{query.upper()}__TRIGGER": "0s"})
        for name, value in kiln.environment.items():
            monkeypatch.setenv(name, value)
        stack = Stack(spark, load_settings(), broker.address, query)
        stack.feed()
        stack.run()
        return stack

    return made


@pytest.fixture
def stack(new_stack: NewStack) -> Stack:
    return new_stack("archive")


def test_a_checkpoint_that_is_older_than_its_tables(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(stack.checkpoint, tmp_path / "copy")
    stack.feed()
    stack.run()
    stack.check()
    before = stack.places("frames")
    shutil.rmtree(stack.checkpoint)
    shutil.copytree(tmp_path / "copy", stack.checkpoint)
    with pytest.raises(
        RestartsExhaustedError, match=r"is older than the table .* Run kiln recover, which lists the repairs"
    ):
        stack.run()
    assert run_command(["recover", "--json"]) == 1
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["query"], told["can"], told["done"]) == ("archive", True, False)
    assert run_command(["recover", "archive"]) == 0
    assert "Repaired" in capsys.readouterr().out
    assert stack.places("frames") == before, "the tables have everything that they say they have"
    assert run_command(["recover"]) == 0
    stack.feed()
    assert stack.run() == []
    stack.check()


def test_archive_killed_between_any_two_commits(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its checkpoint is gone each time."""
    commit = DeltaRsCommits.commit
    monkeypatch.setenv("KILN_JOBS__MAX_RESTARTS", "0")
    stack.settings = load_settings()
    kills: list[int] = []
    for commits in range(5):
        left = iter([True] * commits)

        def killed(*arguments: object, left: Iterator[bool] = left) -> bool:
            if not next(left, False):
                kills.append(1)
                raise RuntimeError("killed")
            return commit(*arguments)  # type: ignore[arg-type]  # passes them on

        stack.feed(40)
        with monkeypatch.context() as patch:
            patch.setattr(DeltaRsCommits, "commit", killed)
            with suppress(RestartsExhaustedError):  # a micro-batch may have no row for the last tables
                stack.run()
        shutil.rmtree(stack.checkpoint)
        assert run_command(["recover", "archive"]) == 0
        stack.run()
        stack.check()
    assert len(kills) >= 3


def test_files_that_a_power_cut_left_empty(stack: Stack) -> None:
    """Of the last micro-batch: Spark's note, and the commit to `frames`, but not those to the others."""
    stack.feed()
    stack.run()
    newest = max(int(path.name) for path in (stack.checkpoint / "commits").glob("[0-9]*"))
    torn = [
        stack.checkpoint / "commits" / str(newest),
        Path(locate_commit(stack.lake.folder("frames"), stack.lake.open("frames").version()).uri),
    ]
    for path in torn:
        path.write_bytes(b"")
    (words,) = stack.run()
    assert str(torn[1]) in words
    stack.feed()
    assert stack.run() == []
    stack.check()


@pytest.mark.parametrize("older", [False, True])
def test_updates_that_has_lost_what_it_remembers(
    older: bool, new_stack: NewStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = new_stack("updates")
    shutil.copytree(stack.checkpoint, tmp_path / "copy")
    stack.feed()
    stack.run()
    for left in stack.checkpoint.glob(f"{FILE_NAME}*"):
        left.unlink()
    if older:
        for kept in (tmp_path / "copy").glob(f"{FILE_NAME}*"):
            shutil.copy(kept, stack.checkpoint)
    words = "ends with micro-batch" if older else "is missing"
    with pytest.raises(RestartsExhaustedError, match=rf"{FILE_NAME} {words}.* Run kiln recover"):
        stack.run()
    assert run_command(["recover", "--yes"]) == 0
    assert "Repaired" in capsys.readouterr().out
    stack.feed()
    assert stack.run() == []
    assert stack.repeated() == set()
    assert set(stack.announced()) == stack.updates()


def test_a_lost_deduplication_file_of_archive_is_rebuilt_from_its_tables(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    for left in stack.checkpoint.glob(f"{FILE_NAME}*"):
        left.unlink()
    with pytest.raises(RestartsExhaustedError, match=rf"{FILE_NAME} is missing.* Run kiln recover"):
        stack.run()
    assert run_command(["recover", "--yes"]) == 0
    assert "Repaired" in capsys.readouterr().out
    assert run_command(["recover"]) == 0
    stack.feed()
    stack.run()
    stack.check()


@pytest.mark.parametrize("killed", [False, True])
def test_a_checkpoint_of_updates_that_is_older_than_its_records(
    killed: bool, new_stack: NewStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = new_stack("updates")
    shutil.copytree(stack.checkpoint, tmp_path / "copy")
    for _ in range(2):
        stack.feed()
        stack.run()
    if killed:  # after the last micro-batch had written its records, and before it told Kafka
        checkpoint = Checkpoint(parse_location(stack.checkpoint))
        kafka, before = stack.settings.broker, checkpoint.committed - 1
        with ProgressMarker(kafka.client_options(), kafka.topic("updates")) as marker:
            marker.commit(checkpoint.query_id, before, checkpoint.ends(before))
    announced = stack.announced()
    shutil.rmtree(stack.checkpoint)
    shutil.copytree(tmp_path / "copy", stack.checkpoint)
    with pytest.raises(RestartsExhaustedError, match=r"is older than the query's output in Kafka.* Run kiln recover"):
        stack.run()
    assert run_command(["recover", "--json"]) == 1
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["query"], told["can"], told["done"]) == ("updates", True, False)
    assert run_command(["recover", "--yes"]) == 0
    assert "Repaired" in capsys.readouterr().out
    assert run_command(["recover"]) == 0
    stack.feed()
    assert stack.run() == []
    after = stack.announced()
    assert len(after) > len(announced)
    assert bool(stack.repeated()) == killed
    again = {tip for tip, count in stack.epochs().items() if count > 1}
    assert not again & stack.repeated(), "the batcher would take a repeat for another update"
    assert set(after) == stack.updates()


def test_a_lost_checkpoint_of_updates(new_stack: NewStack) -> None:
    stack = new_stack("updates")
    stack.checkpoint.rename(stack.checkpoint.with_name("updates.new"))  # as `kiln recover` leaves it when interrupted
    words = r"the checkpoint .* does not exist, but updates has written .* Run kiln recover"
    with pytest.raises(RestartsExhaustedError, match=words):
        stack.run()
    assert run_command(["recover"]) == 1
    assert run_command(["recover", "updates"]) == 0
    assert run_command(["recover"]) == 0
    stack.feed()
    stack.run()
    assert stack.repeated() == set()
    assert set(stack.announced()) == stack.updates()
    shutil.rmtree(stack.checkpoint)
    assert run_command(["recover"]) == 1, "where no checkpoint is left, Kafka is asked too"
