"""kiln.deploy.run.application: how a bounded run ends. Broker, queries and bridge are made up; the loop is the real
one."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
from pyspark.sql import SparkSession

from kiln.conf.process.stop_signal import StopSignal
from kiln.conf.settings.model import Ipfs, Settings
from kiln.deploy.ops.run_monitor import Monitor
from kiln.deploy.ops.snapshot import Snapshot
from kiln.deploy.ops.snapshot_builder import TopicCounts
from kiln.deploy.run import application
from kiln.deploy.run.application import RunOutcome
from kiln.deploy.run.network import LiveNetwork, build_demo_settings
from kiln.deploy.run.screen import View
from kiln.deploy.run.summary import describe_unread
from kiln.deploy.stack.kafka_broker import LaunchedBroker
from kiln.deploy.stack.spark import JvmEndedError
from kiln.pipelines.runtime.passed_versions import CAUGHT_UP_FILE
from kiln.pipelines.runtime.progress import QueryProgress

Offsets = Mapping[str, Mapping[int, int]]
Execute = Callable[..., RunOutcome]


class World:
    """A run with frames that come until its input ends. The queries read one record at each look at the topics."""

    def __init__(self, *, behind: int = 0, source: str = "network", failures: Mapping[str, str] | None = None) -> None:
        self.end = 10
        self.read_to = 10 - behind
        self.counted_to = 0
        self.source = source
        self.done: list[str] = []
        self.shown: list[Snapshot] = []
        self.said: list[str] = []
        self.failures = dict(failures or {})
        self.input_ended = False
        # as the supervisor, the watch and the monitor have them
        self.held_queries: set[str] = set()
        self.errors: Mapping[str, str] = {}
        self.restarts: Counter[str] = Counter()
        self.progress: Mapping[str, QueryProgress] = {}
        self.counts = TopicCounts()
        self.open_windows: tuple[()] = ()
        self.first_batch = threading.Event()
        self.state = None
        self.error = ""
        self.last_check = None
        self.warnings: list[str] = []

    # ---- topics

    @property
    def ends(self) -> Offsets:
        return {"kiln.frames": {0: self.end}}

    def read(self) -> Offsets:
        if not self.input_ended:
            self.end += 1
            self.read_to += 1
        else:
            self.read_to = min(self.read_to + 1, self.end)
        self.counted_to = self.read_to
        return {"kiln.frames": {0: self.end}}

    # ---- queries and watch

    def count_unread(self, ends: Offsets) -> dict[str, int | None]:
        unread = ends["kiln.frames"][0] - self.read_to
        return {"archive": unread} if unread > 0 else {}

    def has_caught_up(self, ends: Offsets) -> bool:
        return not self.count_unread(ends)

    def describe_open_windows(self, ends: Offsets) -> str:
        return ""

    leaves_windows_open = False

    def has_read(self, ends: Offsets) -> bool:
        return self.counted_to >= ends["kiln.frames"][0]

    def count(self, query: str, counts: Mapping[str, int]) -> None: ...

    # ---- bridge

    def end_input(self) -> None:
        self.done.append("the input ends")
        self.input_ended = self.source != "none"

    @property
    def has_ended_input(self) -> bool:
        return "the input ends" in self.done

    def mute(self) -> None:
        self.done.append("mute")

    # ---- all of them

    def start(self) -> None: ...

    def stop(self) -> None:
        self.done.append("stop")

    def close(self) -> None: ...

    def check(self) -> None: ...

    def show(self, snapshot: Snapshot) -> None:
        self.shown.append(snapshot)

    def see(self, snapshot: object) -> None: ...

    def say(self, words: str) -> None:
        self.said.append(words)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Execute:
    monkeypatch.setattr(application, "_CHECK_EVERY", 0.001)
    monkeypatch.setattr(application, "_SHOW_EVERY", 0.0)
    monkeypatch.setattr(application, "check_jvm", lambda *_: None)

    def execute(
        world: World, drain: str = "60s", stop: StopSignal | None = None, *, catch_up: bool = False
    ) -> RunOutcome:
        def start_spark() -> SparkSession:
            world.done.append("another JVM")
            return cast(SparkSession, None)

        for name in ("TopicWatch", "TopicEnds", "Supervisor"):
            monkeypatch.setattr(application, name, lambda *_: world)
        settings = Settings.model_validate(
            {"state": tmp_path, "kafka": {"bootstrap": "127.0.0.1:9"}, "run": {"drain": drain}}
        )
        made = application._Run(
            settings,
            cast(View, world),
            cast(SparkSession, None),
            start_spark,
            ("archive",),
            None if catch_up else timedelta(milliseconds=20),
            catch_up,
            cast(LaunchedBroker, world),
            cast(LiveNetwork, world),
            cast(Monitor, world),
            (),
            time.monotonic(),
        )
        return made.execute(StopSignal() if stop is None else stop)

    return execute


def test_a_bounded_run_takes_nothing_new_and_reads_all_that_there_is(run: Execute) -> None:
    world = World(behind=40)
    outcome = run(world)
    assert world.done[0] == "the input ends"
    assert world.read_to == world.end, "the queries went on until they had read it all"
    assert world.counted_to == world.end, "and so did the counts of the summary"
    assert (outcome.error, outcome.unread) == ("", {})
    assert [snapshot.mode for snapshot in world.shown][-1] == "draining"
    assert any(words.startswith("draining: no new frames are captured") for words in world.said)


def test_what_is_left_after_the_longest_drain_is_told(run: Execute) -> None:
    world = World(behind=1_000_000)
    outcome = run(world, drain="50ms")
    assert outcome.error == ""
    assert outcome.unread == {"archive": world.end - world.read_to}
    assert f"by query: archive {outcome.unread['archive']:,} records. " in describe_unread(outcome.unread)


def test_a_run_without_a_drain_and_one_that_is_stopped_end_at_once(run: Execute) -> None:
    world = World(behind=1_000_000)
    assert run(world, drain="0s").unread == {}
    assert "the input ends" not in world.done
    stopped, world = StopSignal(), World(behind=1_000_000)
    stopped.set()
    assert run(world, stop=stopped).unread == {}
    assert "the input ends" not in world.done


def test_where_others_go_on_writing_it_reads_what_there_was_when_its_time_was_over(run: Execute) -> None:
    world = World(behind=30, source="none")
    assert run(world, drain="1h").unread == {}
    assert world.read_to == world.end - 30, "the records since then are of the next run"


def test_a_query_that_is_down_at_the_end_is_the_error_of_the_run(run: Execute) -> None:
    outcome = run(World(failures={"batch": "Python worker failed to connect back"}))
    assert outcome.error == "batch: Python worker failed to connect back"


def test_errors_of_the_network_are_shown(run: Execute) -> None:
    world = World(behind=5)  # it is shown at least while it drains
    world.errors = {"the demo network exited with code -9": ""}
    run(world)
    assert "the demo network exited with code -9" in world.shown[0].errors


class DyingWorld(World):
    """A world whose JVM ends some times. `progress`: a micro-batch was finished each time before."""

    def __init__(self, ends: int, *, progress: bool) -> None:
        super().__init__(behind=5)
        self.left = ends
        if progress:
            self.progress = {"archive": QueryProgress("archive", {})}

    def check(self) -> None:
        if self.left:
            self.left -= 1
            raise ConnectionRefusedError


@pytest.mark.parametrize(("ends", "progress", "started"), [(5, False, 5), (7, True, 7), (6, False, 5)])
def test_the_jvm_starts_again_up_to_a_number_of_times_in_a_row(
    ends: int, progress: bool, started: int, run: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "pause_after", lambda *_: 0.0)
    monkeypatch.setattr(application, "check_jvm", lambda *_: JvmEndedError("the JVM of Spark exited with code -9"))
    world = DyingWorld(ends, progress=progress)
    error = run(world).error
    assert world.done.count("another JVM") == started
    assert error == ("" if started == ends else "the JVM of Spark exited with code -9")
    assert "the JVM of Spark exited with code -9. Kiln starts the JVM again" in world.said


class CountedWorld(DyingWorld):
    """A world whose JVM ends once, and whose second supervisor begins to count restarts at zero."""

    generations = Counter({"archive": 2}), Counter[str]()

    @property
    def restarts(self) -> Counter[str]:
        return self.generations[self.done.count("another JVM")]

    @restarts.setter
    def restarts(self, _: Counter[str]) -> None: ...


def test_restarts_before_the_end_of_a_jvm_count_after_it(run: Execute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "pause_after", lambda *_: 0.0)
    monkeypatch.setattr(application, "check_jvm", lambda *_: JvmEndedError("the JVM of Spark exited with code -9"))
    world = CountedWorld(1, progress=True)
    run(world)
    assert [query.restarts for query in world.shown[-1].queries] == [2]


def test_a_call_that_fails_although_the_jvm_runs_is_raised(run: Execute) -> None:
    with pytest.raises(ConnectionRefusedError):
        run(DyingWorld(1, progress=False))


@pytest.mark.parametrize(("queries", "marks"), [(["archive"], {"id of archive": 3}), (["archive", "sink"], None)])
def test_a_run_that_has_caught_up_notes_what_all_queries_have_read(
    queries: list[str], marks: Mapping[str, int] | None, run: Execute, tmp_path: Path
) -> None:
    """It runs `archive` alone, so nothing is noted where `sink` has a checkpoint. It ends all the same."""
    checkpoints = Path(Settings(state=tmp_path).checkpoints_root.folder or "")
    for name in queries:
        (checkpoints / name / "commits").mkdir(parents=True)
        (checkpoints / name / "metadata").write_text(json.dumps({"id": f"id of {name}"}))
        (checkpoints / name / "commits" / "3").write_text("v1\n{}")
    world = World(behind=5)
    world.input_ended = True
    assert run(world, catch_up=True).error == ""
    file = checkpoints / CAUGHT_UP_FILE
    assert (json.loads(file.read_text()) if file.exists() else None) == marks


def test_the_queries_of_a_run_that_catches_up_pause_for_two_seconds_at_most() -> None:
    """The last micro-batches of `archive` and `sink` would wait ten seconds. Where the settings say less, it stays."""
    settings = Settings.model_validate({"jobs": {"archive": {"trigger": "1s", "max_offsets_per_trigger": 7}}})
    jobs = application.shorten_triggers(settings, ("archive", "batch", "sink")).jobs
    seconds = {name: jobs.of(name).trigger.total_seconds() for name in jobs.queries}
    assert seconds == {"archive": 1, "updates": 0.9, "batch": 0.5, "sink": 2}
    assert jobs.of("archive").max_offsets_per_trigger == 7
    assert settings.jobs.of("sink").trigger.total_seconds() == 10, "other runs keep theirs"


@pytest.mark.parametrize(("api", "fetches"), [("self", False), ("http://127.0.0.1:5001", True)])
def test_on_the_demo_network_batches_are_announced_and_no_geneses_are_fetched(api: str, fetches: bool) -> None:
    """Also in the bridge, whose settings name the demo's nodes as bootstrap peers: it fetches what the queries want."""
    settings = Settings(ipfs=Ipfs(api=api))
    assert not settings.publishes
    assert not settings.announces
    peer = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWM68GyFKBT9JsuTRB6CYkF61PtMuSkynUauSQEGBX51JW"
    of_bridge = build_demo_settings(settings, (peer,), ("127.0.0.1:1",), ())
    assert of_bridge.publishes
    assert of_bridge.announces
    assert settings.fetches == of_bridge.fetches == fetches
