"""kiln.pipelines.app.supervisor: failed queries start again after a pause, and not for ever. Queries and clock are made
up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import cast

import pytest
from kafka.errors import KafkaConnectionError
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from kiln.conf.process.kafka_topics import TopicIdentity
from kiln.conf.process.location import parse_location
from kiln.conf.process.state_folder import claim_state_folder
from kiln.conf.settings.model import JobName, Settings
from kiln.pipelines.app import supervisor
from kiln.pipelines.app.supervisor import RestartsExhaustedError, Supervisor, describe_failure
from kiln.pipelines.batch.ticker import Ticker
from kiln.pipelines.decode.breaker import DecodingBrokenError
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.checkpoint import read_topic_ids
from kiln.pipelines.runtime.dedup_store import FILE_NAME, DedupStore, DedupStoreConfig
from kiln.pipelines.runtime.progress import ProgressListener, QueryProgress
from kiln.pipelines.runtime.topics import TopicState
from kiln.schemas.kafka.records import Epoch

NAME = "archive"


class FakeQuery:
    """A streaming query that runs until it is told to fail."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    @property
    def isActive(self) -> bool:  # noqa: N802 - as Spark calls it
        return self.error is None

    @property
    def status(self) -> dict[str, bool]:
        return {"isTriggerActive": False}

    def exception(self) -> Exception | None:
        return self.error

    def stop(self) -> None:
        self.error = self.error or RuntimeError("stopped")


class FakeTopics:
    """Topics of a broker, by full name: id, and the end of the one partition. `away`: no broker answers."""

    def __init__(self, **found: tuple[str, int]) -> None:
        self.found = {f"kiln.{name}": topic for name, topic in found.items()}
        self.partitions = 1
        self.away = False

    def read_states(self, topics: Iterable[str]) -> Mapping[str, TopicState]:
        return {name: TopicState(self.found[name][0], {0: 0}, {0: self.found[name][1]}) for name in self._there(topics)}

    def read_identities(self, topics: Iterable[str]) -> Mapping[str, TopicIdentity]:
        return {name: TopicIdentity(self.found[name][0], self.partitions) for name in self._there(topics)}

    def _there(self, topics: Iterable[str]) -> list[str]:
        if self.away:
            raise KafkaConnectionError("away")
        return [name for name in topics if name in self.found]

    def close(self) -> None: ...


class World:
    """A supervisor, its clock, and the queries that it started."""

    def __init__(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch, names: tuple[JobName, ...] = (NAME,)
    ) -> None:
        self.now = 100.0
        self.queries: list[FakeQuery] = []
        self.refusal: Exception | None = None
        self.time = 1_800_000_000_000_000
        self.topics = FakeTopics(frames=("one", 100), updates=("two", 100), streams=("three", 0))
        monkeypatch.setattr(supervisor, "launch", self._launch)
        self.supervisor = Supervisor(
            cast(SparkSession, None),
            settings,
            names,
            now=lambda: self.now,
            clock=lambda: self.time,
            topics=self.topics,
        )

    def _launch(
        self,
        name: JobName,
        spark: SparkSession,
        settings: Settings,
        listener: ProgressListener,
        report: Callable[..., None],
    ) -> StreamingQuery:
        if self.refusal is not None:
            raise self.refusal
        self.queries.append(FakeQuery())
        self.listener = listener
        return cast(StreamingQuery, self.queries[-1])

    def fail(self, error: Exception) -> None:
        self.queries[-1].error = error
        self.supervisor.check()

    def finish_batch(self, number: int) -> None:
        self.listener._queries[NAME] = QueryProgress(NAME, {}, batch_id=number)

    def pause(self) -> float:
        """Lets the time pass until the query starts again; the seconds."""
        began, started = self.now, len(self.queries)
        while len(self.queries) == started:
            self.now += 0.5
            self.supervisor.check()
        return self.now - began


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    settings = Settings.model_validate({"state": tmp_path, "jobs": {"max_restarts": 3}})
    made = World(settings, monkeypatch)
    made.supervisor.start()
    return made


def test_a_query_that_fails_starts_again_after_a_pause_that_doubles(world: World) -> None:
    pauses = []
    for failures in (1, 2, 3):
        world.fail(RuntimeError("the disk is full"))
        assert world.supervisor.errors == {NAME: "the disk is full"}
        assert world.supervisor.restarts == {NAME: failures}
        pauses.append(world.pause())
        assert world.supervisor.errors == {}
    assert pauses == [1.0, 2.0, 4.0]
    with pytest.raises(RestartsExhaustedError, match=r"^the query archive stopped: the disk is full$"):
        world.fail(RuntimeError("the disk is full"))


def test_a_micro_batch_in_between_makes_the_next_failure_the_first(world: World) -> None:
    for number in range(6):  # twice as many as the settings allow in a row
        world.finish_batch(number)
        world.fail(RuntimeError("the disk is full"))
        assert world.supervisor.restarts == {NAME: number + 1}  # a query that fails again and again raises an alert
        assert world.pause() == 1.0


def test_a_failure_counts_until_the_query_has_finished_a_micro_batch_or_found_nothing_to_read(world: World) -> None:
    assert world.supervisor.failures == {}
    world.fail(RuntimeError("the disk is full"))
    assert world.supervisor.failures == {NAME: "the disk is full"}
    world.pause()
    assert world.supervisor.errors == {}  # it runs again, and has done nothing yet
    assert world.supervisor.failures == {NAME: "the disk is full"}
    world.finish_batch(0)
    assert world.supervisor.failures == {}
    world.fail(RuntimeError("the disk is full"))
    world.pause()
    assert world.supervisor.failures == {NAME: "the disk is full"}
    world.listener._queries[NAME] = QueryProgress(NAME, {}, batch_id=0, idle=True)
    assert world.supervisor.failures == {}


def test_a_machine_too_busy_to_start_a_worker_costs_more_than_the_restarts_of_a_fault(world: World) -> None:
    busy = RuntimeError("org.apache.spark.SparkException: Python worker failed to connect back.\nat Java")
    for _ in range(12):  # four times those of the settings
        world.fail(busy)
        assert world.supervisor.errors[NAME].startswith(
            "Python worker failed to connect back within 10 s: this machine is too busy."
        )
        world.pause()
    with pytest.raises(RestartsExhaustedError, match="this machine is too busy"):
        world.fail(busy)


def test_what_a_query_has_not_read_is_counted_and_unknown_while_it_waits_for_its_restart(world: World) -> None:
    ends = {"kiln.frames": {0: 10, 1: 5}}
    assert world.supervisor.count_unread(ends) == {NAME: None}
    world.listener._queries[NAME] = QueryProgress(NAME, {"kiln.frames": {0: 10, 1: 2}}, batch_id=3)
    assert world.supervisor.count_unread(ends) == {NAME: 3}
    assert not world.supervisor.has_caught_up(ends)
    world.listener._queries[NAME] = QueryProgress(NAME, {"kiln.frames": {0: 10, 1: 5}}, batch_id=4)
    assert world.supervisor.count_unread(ends) == {}
    assert world.supervisor.has_caught_up(ends)
    world.fail(RuntimeError("the disk is full"))
    assert world.supervisor.count_unread(ends) == {NAME: None}


@pytest.mark.parametrize(("window", "waits"), [("1s", True), ("50s", True), ("1h", False), ("1d", False)])
def test_a_run_that_catches_up_does_not_wait_for_the_end_of_long_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: str, waits: bool
) -> None:
    settings = Settings.model_validate({"state": tmp_path, "batch": {"window": window}})
    world = World(settings, monkeypatch, ("batch",))
    world.supervisor._runs["batch"] = supervisor._QueryRun(cast(StreamingQuery, FakeQuery()))
    world.supervisor.ticker = Ticker({}, "kiln.updates", interval=0.1, window=1)  # not started: it writes no tick
    world.supervisor._listener._queries["batch"] = QueryProgress("batch", {"kiln.updates": {0: 3}}, batch_id=1)
    assert world.supervisor.leaves_windows_open is not waits
    assert world.supervisor.has_caught_up({"kiln.updates": {0: 3}}) is not waits
    assert not world.supervisor.has_caught_up({"kiln.updates": {0: 4}})
    world.supervisor.ticker.quiet_ends = {0: 2}  # since the ticker looked, an update has opened a window
    assert world.supervisor.has_caught_up({"kiln.updates": {0: 3}}) is not waits
    world.supervisor.ticker.quiet_ends = {0: 3}
    assert world.supervisor.has_caught_up({"kiln.updates": {0: 3}})
    assert not world.supervisor.has_caught_up({"kiln.updates": {0: 4}})


BROKEN = "Traceback:\npipelines.logic.breaker.DecodingBrokenError: their format is new"


def test_broken_decoding_is_not_tried_again(world: World) -> None:
    with pytest.raises(
        RestartsExhaustedError,
        match=r"^the query archive stopped: the breaker tripped at 2027-01-15 08:00 UTC: their format is new",
    ):
        world.fail(RuntimeError(BROKEN))


def test_a_trip_holds_what_decodes_and_nothing_else_until_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(state=tmp_path)
    names = ("archive", "updates", "sink")
    world = World(settings, monkeypatch, names)
    world.supervisor.start()
    running = dict(zip(("updates", "archive", "sink"), world.queries, strict=True))  # as they start
    running["archive"].error = RuntimeError(BROKEN)
    world.supervisor.check()
    assert world.supervisor.held_queries == {"archive", "updates"}
    assert {name for name, query in running.items() if query.isActive} == {"sink"}
    assert (
        world.supervisor.errors["updates"]
        == "the query updates is stopped, because the breaker of the query archive tripped"
    )
    world.now += 3_600
    world.supervisor.check()
    assert len(world.queries) == 3  # none started again
    assert "their format is new. If the messages are valid, install" in world.supervisor.errors["archive"]
    again = World(settings, monkeypatch, names).supervisor
    again.start()
    assert again.held_queries == set()


def test_a_second_driver_does_not_try_again(world: World) -> None:
    error = "kiln.pipelines.delta.commits.SecondWriterError: cannot commit to table x: another driver runs the query 1"
    with pytest.raises(RestartsExhaustedError, match=r"^the query archive stopped: .*another driver runs the query 1"):
        world.fail(RuntimeError(f"Traceback:\n{error}"))


def test_a_query_whose_table_has_other_columns_does_not_try_again(world: World) -> None:
    error = "kiln.pipelines.delta.lake.SchemaChangedError: cannot write to table tips in x: the column tip is missing"
    with pytest.raises(RestartsExhaustedError, match=r"^the query archive stopped: .*the column tip is missing"):
        world.fail(RuntimeError(f"Traceback:\n{error}"))


def test_broken_decoding_at_the_start_is_told_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(Settings(state=tmp_path), monkeypatch)
    world.refusal = DecodingBrokenError("a good UPDATE does not decode")
    with pytest.raises(RestartsExhaustedError, match=r"^the query archive stopped: a good UPDATE does not decode$"):
        world.supervisor.start()


def test_tables_without_their_checkpoint_are_not_written_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lake, "has_rows", lambda self, table: table == "messages")
    monkeypatch.setattr(supervisor, "launch", lambda *_: FakeQuery())
    settings = Settings(state=tmp_path)
    words = (
        r"^archive cannot start: the checkpoint .*/archive does not exist, but the tables messages .* Run kiln recover"
    )
    with pytest.raises(RestartsExhaustedError, match=words):
        Supervisor(cast(SparkSession, None), settings, ["archive"], topics=FakeTopics()).start()
    (settings.state / "checkpoints" / "archive").mkdir(parents=True)
    Supervisor(cast(SparkSession, None), settings, ["archive"], topics=FakeTopics()).start()


@pytest.mark.parametrize("table", ["frames", "copies", "messages"])
def test_a_checkpoint_from_before_its_tables_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    """The query would take the micro-batches 3 and 4 for those that the table has, and skip what they bring."""
    monkeypatch.setattr(supervisor, "launch", lambda *_: FakeQuery())
    settings = Settings(state=tmp_path)
    lake = Lake.from_location(settings.lake_root)
    lake.create((table,))
    commits = DeltaRsCommits(lake)
    for batch in (2, 4):
        commits.commit(table, [], WriteId("the query's id", batch))
    commits.commit(table, [], WriteId("another query's id", 99))
    claim_state_folder(settings.state)
    checkpoint = settings.state / "checkpoints" / "archive"
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "metadata").write_text('{"id":"the query\'s id"}')
    start = Supervisor(cast(SparkSession, None), settings, ["archive"], topics=FakeTopics()).start
    for begun in (0, 1, 2, 3):
        (checkpoint / "offsets" / str(begun)).write_text("v1\n{}\n{}")
        with pytest.raises(RestartsExhaustedError) as caught:
            start()
        assert str(caught.value) == (
            f"archive cannot start: the checkpoint of archive in {checkpoint} is older than the table {table}: the "
            f"checkpoint ends with micro-batch {begun}, and the table has micro-batch 4. The query would skip the "
            "records in between. Run kiln recover, which lists the repairs"
        )
    (checkpoint / "offsets" / "4").write_text("v1\n{}\n{}")  # begun, and committed to this table before the crash
    start()


SAVE = """[STREAM_FAILED] Query [id = 0, runId = 1] terminated with exception: An error occurred while calling o9.call.
Traceback (most recent call last):
  File "py4j/clientserver.py", line 641, in _call_proxy
    return_value = getattr(self.pool[obj_id], method)(*params)
py4j.protocol.Py4JJavaError: An error occurred while calling o1016.save.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 3 in stage 5.0 failed 4 times, most recent \
failure: Lost task 3.3 in stage 5.0 (TID 9) (10.0.0.7 executor 1): {task}
\tat org.apache.spark.scheduler.Task.run(Task.scala:1)

Driver stacktrace:
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:1)
{causes}"""
"""Spark's message of a micro-batch whose task failed on an executor."""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (None, "the query ended without an error"),
        (ValueError(), "ValueError"),
        (ValueError("[SOME_CODE] first\n at second"), "[SOME_CODE] first"),
        (
            ValueError('Traceback:\n  File "a.py"\nkafka.errors.NoBroker: gone\n\nat Java'),
            "kafka.errors.NoBroker: gone",
        ),
        (ValueError("first\n=== Streaming Query ===\nOther: word"), "first"),
        (
            ValueError(SAVE.format(task="java.io.IOException: No space left on device", causes="")),
            "java.io.IOException: No space left on device",
        ),
        (
            ValueError(
                SAVE.format(task="java.io.IOException: a", causes="Caused by: a.B: b\n\tat a\nCaused by: c.D: root\n")
            ),
            "c.D: root",
        ),
        (
            ValueError(
                SAVE.format(
                    task="ExecutorLostFailure (executor 1 exited) Reason: Command exited with code 137", causes=""
                )
            ),
            "ExecutorLostFailure (executor 1 exited) Reason: Command exited with code 137",
        ),
        (
            ValueError(
                SAVE.format(
                    task="org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
                    "  File \"kiln/pipelines/sink/transform.py\", line 3, in f\nKeyError: 'stream'\n",
                    causes="",
                )
            ),
            "KeyError: 'stream'",
        ),
        (
            ValueError(
                "[PYTHON_EXCEPTION] An exception was thrown: Traceback (most recent call last):\n"
                '  File "kiln/pipelines/runtime/kafka.py", line 3, in f\n'
                "kiln.pipelines.runtime.kafka_ranges.LostRecordsError: gone\n SQLSTATE: 38000\n"
            ),
            "kiln.pipelines.runtime.kafka_ranges.LostRecordsError: gone",
        ),
        (ValueError("x" * 400), "x" * 299 + "…"),
    ],
)
def test_what_ended_a_query_in_one_line(error: Exception | None, text: str) -> None:
    assert describe_failure(error) == text


# ---------------------------------------------------------------- topics


def read_up_to(settings: Settings, offset: int) -> Path:
    """The checkpoint of `archive` after a micro-batch that ends at an offset of `kiln.frames`."""
    claim_state_folder(settings.state)
    checkpoint = settings.state / "checkpoints" / NAME
    for name, text in {
        "metadata": '{"id":"the id"}',
        "offsets/0": f'v1\n{{"batchWatermarkMs":0}}\n{{"kiln.frames":{{"0":{offset}}}}}',
        "commits/0": "v1\n{}",
    }.items():
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_text(text)
    with DedupStore(DedupStoreConfig(str(checkpoint / FILE_NAME), 1_000)) as store:
        store.mark(Epoch("the id", 0), 0)
    return checkpoint


def test_a_checkpoint_that_has_noted_no_topic_notes_one_to_which_its_offsets_belong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(state=tmp_path)
    checkpoint = read_up_to(settings, 100)
    World(settings, monkeypatch).supervisor.start()
    assert read_topic_ids(parse_location(checkpoint)) == {"kiln.frames": "one"}


def test_a_checkpoint_that_has_noted_no_topic_and_has_read_more_than_there_is_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(state=tmp_path)
    read_up_to(settings, 101)
    with pytest.raises(
        RestartsExhaustedError,
        match=r"^archive cannot start: kiln.frames-0 ends at the offset 100, but was read up to 101: ",
    ):
        World(settings, monkeypatch).supervisor.start()


def test_another_topic_is_refused_however_long_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(state=tmp_path)
    read_up_to(settings, 50)
    World(settings, monkeypatch).supervisor.start()
    world = World(settings, monkeypatch)
    world.topics.found["kiln.frames"] = ("another", 100)
    with pytest.raises(
        RestartsExhaustedError, match=r"kiln.frames is not the topic .* is another, but .* is one.*kiln recover"
    ):
        world.supervisor.start()
    assert world.queries == []


def test_a_broker_that_tells_no_ids_is_taken_at_its_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka has topic ids since 2.8."""
    settings = Settings(state=tmp_path)
    checkpoint = read_up_to(settings, 50)
    for known in ("", "one", ""):
        world = World(settings, monkeypatch)
        world.topics.found["kiln.frames"] = (known, 100)
        world.supervisor.start()
    assert read_topic_ids(parse_location(checkpoint)) == {"kiln.frames": "one"}


@pytest.mark.parametrize("topic", ["frames", "streams"], ids=["read", "looked up"])
def test_a_topic_that_is_created_again_under_a_running_query_stops_it_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topic: str
) -> None:
    world = World(Settings(state=tmp_path), monkeypatch, ("updates",))
    world.supervisor.start()
    world.now += 60
    world.supervisor.check()
    world.topics.away = True  # which the queries report
    world.now += 60
    world.supervisor.check()
    world.topics.away = False
    kept = world.topics.found.pop(f"kiln.{topic}")
    world.now += 60
    world.supervisor.check()
    assert (
        world.supervisor.errors["topics"]
        == f"Kafka lacks topics that the queries need: kiln.{topic}. Start Kiln again: its bridge creates them"
    )
    world.topics.found[f"kiln.{topic}"] = kept
    world.now += 60
    world.supervisor.check()
    assert world.supervisor.errors == {}
    world.topics.found[f"kiln.{topic}"] = ("another", 1_000)
    world.now += 60
    with pytest.raises(
        RestartsExhaustedError, match=rf"^the queries stopped: kiln.{topic} is not the topic .*kiln recover"
    ):
        world.supervisor.check()


def test_a_query_that_fails_over_another_topic_says_so(world: World) -> None:
    world.topics.found["kiln.frames"] = ("another", 1)
    with pytest.raises(RestartsExhaustedError, match=r"kiln.frames is not the topic that was read before"):
        world.fail(RuntimeError("Partition kiln.frames-0's offset was changed from 100 to 1"))


def test_partitions_that_are_added_where_no_query_reads_them_stop_the_queries_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(Settings(state=tmp_path), monkeypatch, ("archive",))
    world.supervisor.start()
    world.topics.partitions = 2
    world.now += 60
    world.supervisor.check()  # of frames: Spark reads them
    queries: dict[JobName, str] = {
        "sink": r"kiln.updates had 1 partitions, and now has 2. This topic must keep its number",
        "updates": r"kiln.streams had 1 partitions, and now has 2. Start Kiln again",
    }
    for name, words in queries.items():
        world = World(Settings(state=tmp_path), monkeypatch, (name,))
        world.supervisor.start()
        world.topics.partitions = 2
        world.now += 60
        with pytest.raises(RestartsExhaustedError, match=words):
            world.supervisor.check()
