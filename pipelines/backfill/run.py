"""A run from its beginning to its end, chunk by chunk: what tasks wrote becomes part of the run's tables, and the
account says how far the run is. Stopped or killed anywhere, a run goes on with the chunk that it was at.

A chunk reads the run's own tables as they were when the chunk before was done, and live tables as they were when the
run began. So a chunk gives the same rows whenever it is made, and however often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from kiln.conf.process.errors import KilnError
from kiln.conf.process.kafka_topics import describe_replaced
from kiln.pipelines.backfill import batches, frames, messages, publishing, updates
from kiln.pipelines.backfill.account import (
    RUN_TABLES,
    BackfillRun,
    RunEvent,
    check_name,
    find_run,
    leaving_in_words,
    tell,
)
from kiln.pipelines.backfill.chunks import UPDATES_AT_ONCE, TimeRange, cut, pieces, reach
from kiln.pipelines.backfill.frames import FilePart, FrameFilter
from kiln.pipelines.backfill.grouped import StageOutput, among, in_groups
from kiln.pipelines.backfill.messages import TOLD, RunTarget
from kiln.pipelines.backfill.terms import RunTerms, differences
from kiln.pipelines.batch.batching import BatchConfig
from kiln.pipelines.delta.commits import Commits, WriteId
from kiln.pipelines.delta.files import DataFile, discard
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.delta.tables import TimeBounds, no_rows, read_rows
from kiln.pipelines.runtime.kafka import Broker, read_range, write_topic
from kiln.pipelines.updates.transform import SeparatorConfig

LIVE: Final = ("frames", "messages", "updates", "batches", "streams")
"""Live tables that a run reads."""
BEYOND: Final = ("frames", "messages", "updates")
"""Tables of what lies beyond the edges of a run's range: read by the run, and part of no range."""

_DECIMALS = 0.01


class RunError(KilnError):
    """A run cannot do what it was asked for; the message says why, and what to do."""


class StoppedError(KilnError):
    """Somebody asked the run to stop. What is done is in the run's tables."""

    exit_code = 130


@dataclass(frozen=True)
class RunInputs:
    """What a run reads, as of its beginning. `kafka`: first offset and end by partition of `kiln.frames`."""

    live: Mapping[str, int]
    """versions of the live tables; `streams` is missing where nothing was known"""
    at_once: int = 8
    """parts of files that are read at once"""
    kafka: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    topic_id: str = ""
    """Kafka's id of `kiln.frames`, of which the offsets in `kafka` are"""
    files: Sequence[FilePart] = ()
    gone: Sequence[str] = ()
    """in words, what of the range the source no longer has"""


@dataclass(frozen=True)
class RunProgress:
    """How far a run is. `step`: reading, decoding, batching or publishing."""

    step: str
    done: int
    of: int
    upto: int | None = None
    """µs: up to when the range is done, where the step goes by time"""
    frames: int = 0
    """read in this step by this process"""
    rows: int = 0
    """written by this process"""


@dataclass(frozen=True)
class RunOutcome:
    """What the call of a run did."""

    name: str
    rows: Mapping[str, int]
    """by table, of the whole run"""
    wrote: int
    """rows, by this call"""
    frames: int
    """read by this call"""
    published: int = 0
    """batches handed to the bridge, by this call"""
    gone: Sequence[str] = ()
    """in words, what of the range the source no longer had when the run began"""


@dataclass(frozen=True)
class RunResources:
    """What a run works with."""

    spark: SparkSession
    lake: Lake
    commits: Callable[[Lake], Commits]
    broker: Broker
    now: Callable[[], int]
    """the time, µs"""
    version: str
    """of Kiln's code"""
    topic_id: Callable[[], str] = lambda: ""
    """Kafka's id of `kiln.frames` now, empty if the broker does not tell it"""
    stopped: Callable[[], bool] = lambda: False
    report: Callable[[RunProgress], None] = lambda _: None


def run(terms: RunTerms, means: RunResources, inputs: Callable[[], RunInputs], publish: bool = False) -> RunOutcome:
    """Begins a run, or goes on with the run of this name. `inputs` is asked where the run begins. `publish`: also hands
    its batches to the bridge, unless that was done.

    RunError: there is a run of this name with other terms. StoppedError.
    """
    means.lake.create(("runs", *LIVE))
    found = begun(terms, means.lake)
    if found is None:
        read = inputs()
        kept = msgspec.to_builtins(_SavedInputs.of(read, terms))
        details = terms.told() | {"inputs": kept, "version": means.version}
        low, high = terms.span
        tell(means.lake, terms.name, "begun", means.now(), range_from=low, range_to=high, details=details)
        found = find_run(means.lake, terms.name)
        assert found is not None
    return _ChunkRunner(found, terms, means).go(publish)


def begun(terms: RunTerms, lake: Lake) -> BackfillRun | None:
    """The run of these terms; None: it was not begun yet. RunError: there is a run of this name with other terms.
    RunNameError: no run can have the name."""
    found = find_run(lake, check_name(terms.name))
    if found is None:
        return None
    if found.leaving:
        raise RunError(leaving_in_words(terms.name))
    others = differences(found.details, TimeRange(found.range_from, found.range_to), terms)
    if others:
        raise RunError(
            f"there is a run {terms.name} already, and {'; '.join(others)}. Take another name, or remove that run "
            f"first: kiln backfill drop {terms.name}"
        )
    return found


def rows_of(chunks: Iterable[RunEvent]) -> dict[str, int]:
    """How many rows chunks of a run wrote, by table."""
    rows: Counter[str] = Counter()
    for each in chunks:
        found = each.details["rows"]
        if isinstance(found, dict):
            rows.update(found)
    return dict(rows)


class _SavedInputs(msgspec.Struct, frozen=True):
    """`RunInputs` as the account keeps them, and how they are cut: a run goes on by the cut with which it began."""

    live: dict[str, int]
    chunk: int
    at_once: int
    kafka: dict[str, tuple[int, int]] = {}
    files: list[str] = []
    gone: list[str] = []
    topic_id: str = ""

    @classmethod
    def of(cls, inputs: RunInputs, terms: RunTerms) -> _SavedInputs:
        packed = [msgspec.json.encode(each).decode() for each in inputs.files]
        live, kafka, gone = dict(inputs.live), dict(inputs.kafka), list(inputs.gone)
        return cls(live, terms.chunk, inputs.at_once, kafka, packed, gone, inputs.topic_id)

    @property
    def parts(self) -> list[FilePart]:
        return [msgspec.json.decode(each, type=FilePart) for each in self.files]


class _ChunkRunner:
    def __init__(self, found: BackfillRun, terms: RunTerms, means: RunResources) -> None:
        self._found = found
        self._terms = terms
        self._means = means
        self._inputs = msgspec.convert(found.details["inputs"], _SavedInputs)
        self._lake = means.lake.run(terms.name)
        self._beyond = Lake(f"{self._lake.path}/beyond", self._lake.options)
        self._where = RunTarget(self._lake, self._beyond, terms.span)
        self._lakes = {lake.path: lake for lake in (self._lake, self._beyond)}
        self._commits = {path: means.commits(lake) for path, lake in self._lakes.items()}
        self._query = f"backfill:{terms.name}"
        self._done = {self._step(each): each for each in found.chunks}
        self._wrote = self._frames = 0

    def go(self, publish: bool) -> RunOutcome:
        """Does what is left to do."""
        if not self._found.done:
            self._lake.create(RUN_TABLES)
            self._beyond.create(BEYOND)
            if self._terms.source != "frames":
                self._read()
            self._decode()
            self._batch()
            tell(self._means.lake, self._terms.name, "done", self._means.now(), details={"rows": self._rows()})
        published = self._publish() if publish and not self._found.published else 0
        return RunOutcome(self._terms.name, self._rows(), self._wrote, self._frames, published, self._inputs.gone)

    @staticmethod
    def _step(told: RunEvent) -> tuple[str, int]:
        return str(told.details["step"]), int(str(told.details["number"]))

    def _rows(self) -> dict[str, int]:
        return rows_of(self._done.values())

    # ---------------------------------------------------------------- tables

    def _live(self, table: str, low: int | None = None, high: int | None = None, by: str = "observed_at") -> DataFrame:
        """A live table as of the run's beginning; with times, what of it lies between them."""
        version = self._inputs.live.get(table)
        if version is None:  # of streams: nothing was known
            return no_rows(self._means.spark, table)
        return read_rows(self._means.spark, self._means.lake, table, version, TimeBounds(by, low, high))

    def _own(self, table: str, versions: Mapping[str, int], low: int, high: int | None = None) -> DataFrame:
        """A table of the run and of what lies beyond its edges, from a time on."""
        times = TimeBounds("observed_at", low, high)
        both = [
            read_rows(self._means.spark, lake, table, versions.get(f"{place}{table}", 0), times)
            for place, lake in (("", self._lake), ("beyond/", self._beyond))
        ]
        return both[0].unionByName(both[1])

    def _versions(self) -> dict[str, int]:
        """Versions of all tables of the run, now."""
        return {name: self._lake.open(name).version() for name in RUN_TABLES} | {
            f"beyond/{name}": self._beyond.open(name).version() for name in BEYOND
        }

    def _versions_after(self, step: str, number: int) -> Mapping[str, int]:
        found = self._done[step, number].details["versions"]
        assert isinstance(found, dict)
        return found

    # ---------------------------------------------------------------- chunks

    def _commit(
        self,
        step: str,
        number: int,
        wrote: Iterable[StageOutput],
        span: TimeRange | None = None,
        more: Mapping[str, object] = {},
    ) -> None:
        """Makes the files of a chunk part of the run's tables, table by table, and tells the account last."""
        files: dict[tuple[str, str], list[DataFile]] = {}
        for each in wrote:
            for lake, found in ((self._lake, each.files), (self._beyond, each.beyond)):
                for file in found:
                    files.setdefault((lake.path, file.table), []).append(file)
            self._frames += each.frames
        rows = Counter[str]()
        order = {table: place for place, table in enumerate(RUN_TABLES)}  # tips of batches before the batches
        for (path, table), found in sorted(files.items(), key=lambda item: (order[item[0][1]], item[0][0])):
            if not self._commits[path].commit(table, found, WriteId(self._query, number, step)):
                discard(self._lakes[path], found)
            if path == self._lake.path:
                rows[table] += sum(file.rows for file in found)
        details = {"step": step, "number": number, "rows": rows, "versions": self._versions(), **more}
        at, name = self._means.now(), self._terms.name
        low, high = span or (None, None)
        tell(self._means.lake, name, "chunk", at, range_from=low, range_to=high, rows=rows.total(), details=details)
        self._done[step, number] = RunEvent(name, "chunk", at, low, high, rows.total(), details)
        self._wrote += rows.total()

    def _check(self) -> None:
        if self._means.stopped():
            raise stopped_in_words(self._terms.name)

    def _progress(self, step: str, done: int, of: int, upto: int | None = None) -> None:
        self._means.report(RunProgress(step, done, of, upto, self._frames, self._wrote))

    # ---------------------------------------------------------------- frames out of Kafka or files

    def _read(self) -> None:
        groups = self._groups_of_input()
        for number, group in enumerate(groups):
            self._progress("reading", number, len(groups))
            if ("reading", number) in self._done:
                continue
            self._check()
            self._read_group(number, group)

    def _groups_of_input(self) -> list[Callable[[], DataFrame]]:
        terms, spark = self._terms, self._means.spark
        if terms.source == "files":
            parts = self._inputs.parts
            at_once = self._inputs.at_once
            some = [parts[at : at + at_once] for at in range(0, len(parts), at_once)]
            of_files = FrameFilter(terms.reads)
            return [partial(frames.from_files, spark, few, of_files, self._where) for few in some]
        wanted = FrameFilter(terms.reads, terms.network)
        ranges = self._inputs.kafka
        longest = max((end - first for first, end in ranges.values()), default=0)
        each = max(1, self._inputs.chunk // max(1, len(ranges)))
        return [partial(self._from_kafka, at, each, wanted) for at in range(0, longest, each)]

    def _from_kafka(self, at: int, count: int, wanted: FrameFilter) -> DataFrame:
        """The frames of so many records of each partition, from so many records after the first on."""
        topic, ranges = self._means.broker.topic("frames"), self._inputs.kafka
        first = {int(part): min(low + at, high) for part, (low, high) in ranges.items()}
        ends = {int(part): min(low + at + count, high) for part, (low, high) in ranges.items()}
        records = read_range(self._means.spark, self._means.broker, "frames", {topic: first}, {topic: ends})
        return frames.from_kafka(records, wanted, self._where)

    def _read_group(self, number: int, group: Callable[[], DataFrame]) -> None:
        self._refuse_another_topic()
        rows = group().persist(StorageLevel.DISK_ONLY)
        try:
            known = rows
            if number:
                known = rows.unionByName(among(frames.held(self._held(number - 1)), rows))
            wrote = _tallies(frames.written(in_groups(known), self._where))
            self._refuse_another_topic()  # else the records were of another one
            self._commit("reading", number, wrote)
        finally:
            rows.unpersist()

    def _refuse_another_topic(self) -> None:
        noted = self._inputs.topic_id
        found = self._means.topic_id() if noted else ""
        if found and found != noted:
            name = self._terms.name
            words = describe_replaced(self._means.broker.topic("frames"), noted, found)
            raise RunError(
                f"{words}. The run {name} cannot read on: remove it (kiln backfill drop {name}) and begin another one, "
                "with --source frames for what the table keeps"
            )

    def _held(self, number: int) -> DataFrame:
        return self._own("frames", self._versions_after("reading", number), self._terms.reads.low)

    # ---------------------------------------------------------------- messages and updates

    def _frames_of(self, span: TimeRange) -> DataFrame:
        if self._terms.source == "frames":
            rows = self._live("frames", span.low, span.high)
            return rows if self._terms.network is None else rows.where(F.col("network") == self._terms.network)
        last = max((number for step, number in self._done if step == "reading"), default=None)
        versions = {} if last is None else self._versions_after("reading", last)
        return self._own("frames", versions, span.low, span.high)

    def _decode(self) -> None:
        chunks = self._chunks()
        for number, chunk in enumerate(chunks):
            self._progress("decoding", number, len(chunks), chunk.low)
            if ("decoding", number) in self._done:
                continue
            self._check()
            self._decode_chunk(number, chunk)

    def _chunks(self) -> list[TimeRange]:
        """The range, and what is read beyond its edges, in chunks of about as many frames each."""
        if ("planning", 0) not in self._done:
            inside = self._frames_of(self._terms.reads).select(F.unix_micros("observed_at").cast("double").alias("at"))
            count = pieces(inside.count(), self._inputs.chunk)
            inner = [number / count for number in range(1, count)]
            edges = [int(at) for at in inside.approxQuantile("at", inner, _DECIMALS)] if inner else []
            self._commit("planning", 0, (), more={"edges": edges})
        edges = msgspec.convert(self._done["planning", 0].details["edges"], list[int])
        return cut(self._terms.reads, edges)

    def _decode_chunk(self, number: int, chunk: TimeRange) -> None:
        terms, where, remembered = self._terms, self._where, self._terms.remembered
        before = self._versions_after("decoding", number - 1) if number else {}
        near = TimeRange(chunk.low - remembered, chunk.high + remembered)
        rows = messages.copies(self._frames_of(chunk), terms.decoding, where).persist(StorageLevel.DISK_ONLY)
        stamped = self._live("updates", near.low, near.high)
        marks = messages.kept_by_live(self._messages_of_live(near)).unionByName(messages.stamps(stamped))
        if number:
            own = [messages.kept(self._own("messages", before, near.low))]
            own.append(messages.updates_kept(self._own("updates", before, near.low)))
            marks = marks.unionByName(own[0]).unionByName(own[1])
        groups = in_groups(rows.unionByName(among(marks, rows)))
        told = messages.settled(groups, chunk, terms.decoding, remembered, where).persist(StorageLevel.DISK_ONLY)
        try:
            wrote = _tallies(told.where(F.col("kind") == TOLD).select("data"))
            wrote += self._updates(told, stamped, before, near)
            self._commit("decoding", number, wrote, chunk)
        finally:
            told.unpersist()
            rows.unpersist()

    def _messages_of_live(self, near: TimeRange) -> DataFrame:
        """Of a run that reads files, live's choice of copies within the range says nothing: live heard others."""
        found = self._live("messages", near.low, near.high)
        if self._terms.source == "files":
            within = TimeBounds("observed_at", self._terms.span.low, self._terms.span.high)
            found = found.where(~within.holds)
        return found

    def _updates(
        self, told: DataFrame, stamped: DataFrame, before: Mapping[str, int], near: TimeRange
    ) -> list[StageOutput]:
        known = updates.known_streams(self._live("streams"))
        rows = updates.separated(told, known, SeparatorConfig(fetch=self._terms.fetch, believe=self._believe))
        rows = rows.persist(StorageLevel.DISK_ONLY)
        try:
            marks = updates.taken(stamped, known)
            if before:
                marks = marks.unionByName(updates.taken_by_run(self._own("updates", before, near.low)))
            groups = in_groups(rows.unionByName(among(marks, rows)))
            return _tallies(updates.written(groups, self._terms.remembered, self._where))
        finally:
            rows.unpersist()

    @property
    def _believe(self) -> bool:
        return not self._terms.which.only_verified

    # ---------------------------------------------------------------- batches

    def _batch(self) -> None:
        terms = self._terms
        last = max(number for step, number in self._done if step == "decoding")
        versions = self._versions_after("decoding", last)
        far = reach(terms.window, terms.grace)
        found = self._own("updates", versions, terms.span.low - far, terms.span.high + far)
        rows = batches.log_of(found, terms.which)
        live = self._live("batches", terms.span.low - far, terms.span.high, by="opened_at")
        both = rows.unionByName(batches.made_by_live(live))
        count = pieces(self._rows().get("updates", 0), UPDATES_AT_ONCE)
        batching = BatchConfig(terms.window, terms.grace, terms.block_limit, terms.which)
        for number in range(count):
            self._progress("batching", number, count)
            if ("batching", number) in self._done:
                continue
            self._check()
            made = batches.batched(batches.piece(both, number, count), batching, terms.span, self._lake)
            self._commit("batching", number, _tallies(made), terms.span)
        self._progress("batching", count, count)

    # ---------------------------------------------------------------- publishing

    def _publish(self) -> int:
        """How many batches the bridge has to publish now. A call that is killed before it tells the account writes them
        to Kafka again when it is called again; the bridge passes over those that it has."""
        self._check()
        means = self._means
        means.lake.create(("publications",))
        made = read_rows(means.spark, self._lake, "batches")
        left = publishing.to_publish(made, read_rows(means.spark, means.lake, "publications"))
        found = publishing.records(left).persist(StorageLevel.DISK_ONLY)
        try:
            count = found.count()
            self._progress("publishing", 0, count)
            if count:
                write_topic(found, means.broker, "history")
            tell(means.lake, self._terms.name, "published", means.now(), rows=count)
            self._progress("publishing", count, count)
        finally:
            found.unpersist()
        return count


def stopped_in_words(name: str) -> StoppedError:
    """The error in words."""
    return StoppedError(f"the run {name} is stopped. What is done is kept: the same command goes on from there")


def _tallies(rows: DataFrame) -> list[StageOutput]:
    return [msgspec.msgpack.decode(bytes(row.data), type=StageOutput) for row in rows.collect()]
