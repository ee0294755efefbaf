"""Execution of a backfill run, chunk by chunk: commits the rows of each chunk to the run's tables, and logs its
progress.

The steps of a run are reading (of Kafka or files), decoding, and batching; each is divided into chunks. A stopped or
killed run resumes with the chunk that was interrupted. A chunk reads the run's own tables as of the end of the previous
chunk, and the live tables as of the start of the run. So a chunk that is repeated gives the same rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from typing import Final

import msgspec
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from kiln.conf.process.errors import KilnError
from kiln.conf.process.kafka_topics import describe_replaced_topic
from kiln.pipelines.backfill import batches, copies, frames, messages, published_lines, updates
from kiln.pipelines.backfill.copies import RunTarget
from kiln.pipelines.backfill.frame_files import plan_tasks
from kiln.pipelines.backfill.frames import FrameFilter
from kiln.pipelines.backfill.merged_rows import OutsideFrames, StageOutput, group_rows, semi_join
from kiln.pipelines.backfill.run_log import (
    RUN_TABLES,
    BackfillRun,
    RunEvent,
    append_event,
    check_name,
    check_new_name,
    describe_unfinished_drop,
    find_run,
)
from kiln.pipelines.backfill.sources import FilePart
from kiln.pipelines.backfill.terms import (
    CHUNK,
    UPDATES_PER_STEP,
    RunTerms,
    TimeRange,
    count_pieces,
    describe_differences,
    split_range,
)
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import DataFile, delete_files
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.delta.tables import (
    PlainFile,
    build_condition,
    count_rows_at_most,
    create_empty,
    list_plain_files,
    read_rows,
)
from kiln.pipelines.delta.time_bounds import TimeBounds
from kiln.pipelines.runtime.kafka_ranges import ClientOptions, OffsetRange
from kiln.pipelines.updates.separators import SeparatorConfig

LIVE_TABLES: Final = ("frames", "messages", "updates", "batches", "streams")
"""Live tables that a backfill run reads"""
BEYOND_TABLES: Final = ("frames", "messages", "updates")
"""Tables of which a run also stores rows outside its time range, because it needs them near both ends of the range"""

_QUANTILE_ERROR = 0.01
_TableVersion = tuple[Lake, int]


class RunError(KilnError):
    """A backfill run cannot start or continue."""


class StoppedError(KilnError):
    """A signal stopped a backfill run. The rows of its finished chunks are stored."""

    exit_code = 130


class RunInputs(msgspec.Struct, frozen=True):
    """Inputs of a backfill run as of its start. Its log stores them, so that a resumed run has the same chunks."""

    live: dict[str, int]
    """versions of the live tables; without `streams` if that table did not exist at the time `as_of`"""
    parts_per_step: int = 8
    """number of parts of files that one chunk reads"""
    kafka: dict[str, tuple[int, int]] = {}
    """first offset and end offset in `kiln.frames`, by partition"""
    topic_id: str = ""
    """Kafka's id of `kiln.frames`"""
    files: list[FilePart] = []
    lost: list[str] = []
    """descriptions of records in the time range that Kafka has removed"""
    chunk: int = CHUNK
    """number of frames in a chunk"""


@dataclass(frozen=True)
class RunProgress:
    """Progress of a backfill run."""

    step: str
    """hashing (of files), reading, decoding or batching"""
    done: int
    """number of finished chunks of this step"""
    total: int
    done_until: int | None = None
    """time up to which the step is done, µs; `None` if the step does not advance in time"""
    frames: int = 0
    """number of frames that this process has read"""
    rows: int = 0
    """number of rows that this process has written"""


@dataclass(frozen=True)
class RunOutcome:
    """Result of executing a backfill run, or the rest of an interrupted one."""

    name: str
    rows: Mapping[str, int]
    """number of rows of the whole run, by table"""
    rows_written: int
    """number of rows that this process wrote"""
    frames: int
    """number of frames that this process read"""
    lost: Sequence[str] = ()
    """descriptions of records in the time range that Kafka had removed when the run began"""
    outside: OutsideFrames = field(default_factory=OutsideFrames)
    """frames in the input files outside the time range, in the whole run"""
    is_repeated: bool = False
    """true if the run was done already, so that nothing was executed"""


def encode_outcome(outcome: RunOutcome) -> dict[str, object]:
    """Convert the outcome of a backfill run to a dict for JSON."""
    return {
        "run": outcome.name,
        "wrote": outcome.rows_written,
        "frames": outcome.frames,
        "rows": dict(outcome.rows),
        "gone": list(outcome.lost),
        "outside": msgspec.structs.asdict(outcome.outside),
    }


@dataclass(frozen=True)
class RunResources:
    """Services that a backfill run uses, such as Spark and the lake, and callbacks."""

    spark: SparkSession
    lake: Lake
    topic: str
    """full name of `kiln.frames`"""
    now: Callable[[], int]
    """returns the time, µs"""
    version: str
    """version of Kiln"""
    topic_id: Callable[[], str] = lambda: ""
    """returns Kafka's current id of `kiln.frames`; empty if the broker does not report ids"""
    client_options: ClientOptions = field(default=(), repr=False)
    durable: bool = False
    """true to sync each commit to disk"""
    is_stopped: Callable[[], bool] = lambda: False
    """returns true as soon as the run must stop"""
    report: Callable[[RunProgress], None] = lambda _: None


def run(terms: RunTerms, resources: RunResources, inputs: Callable[[], RunInputs]) -> RunOutcome:
    """Execute a backfill run, or the rest of an interrupted one.

    Args:
        inputs: Reads the inputs. It is called only if the run has not begun yet.

    Raises:
        RunError: The run of this name has other terms or is being dropped, or this version of Kiln cannot continue it.
        StoppedError: A signal stopped the run.
    """
    lake = resources.lake
    lake.create(("backfill_runs", *LIVE_TABLES))
    backfill_run = find_matching_run(terms, lake)
    if backfill_run is None:
        saved = msgspec.to_builtins(msgspec.structs.replace(inputs(), chunk=terms.chunk))
        details = terms.to_details() | {"inputs": saved, "version": resources.version}
        low, high = terms.span
        append_event(lake, terms.name, "begun", resources.now(), range_from=low, range_to=high, details=details)
        backfill_run = find_run(lake, terms.name)
        assert backfill_run is not None
    if backfill_run.is_done:
        return build_repeated_outcome(backfill_run)
    return _ChunkRunner(backfill_run, terms, resources).run_to_end()


def find_matching_run(terms: RunTerms, lake: Lake) -> BackfillRun | None:
    """Find the backfill run of this name in the log of runs; `None` if it has not begun yet.

    Raises:
        RunError: The run has other terms, or is being dropped.
        RunNameError: The name is invalid or reserved.
    """
    backfill_run = find_run(lake, check_name(terms.name))
    if backfill_run is None:
        check_new_name(terms.name)
        return None
    if backfill_run.had("dropping"):
        raise RunError(describe_unfinished_drop(terms.name))
    span = TimeRange(backfill_run.range_from, backfill_run.range_to)
    differences = describe_differences(backfill_run.details, span, terms)
    if differences:
        raise RunError(
            f"there is already a backfill run {terms.name} with other options: {'; '.join(differences)}. Choose "
            f"another name, or drop that run first: kiln backfill drop {terms.name}"
        )
    return backfill_run


def build_repeated_outcome(run: BackfillRun) -> RunOutcome:
    """Build the outcome for a backfill run that is done already."""
    return RunOutcome(run.name, count_rows(run.chunks), 0, 0, outside=merge_outside(run.chunks), is_repeated=True)


def count_rows(chunks: Iterable[RunEvent]) -> dict[str, int]:
    """Add up, by table, the rows that chunks of a backfill run have written."""
    rows: Counter[str] = Counter()
    for chunk in chunks:
        counts = chunk.details["rows"]
        if isinstance(counts, dict):
            rows.update(counts)
    return dict(rows)


def merge_outside(chunks: Iterable[RunEvent]) -> OutsideFrames:
    """Add up the frames outside the time range that chunks of a backfill run have read."""
    outside = OutsideFrames()
    for chunk in chunks:
        outside = outside.merge(msgspec.convert(chunk.details.get("outside", []), OutsideFrames))
    return outside


def _decode_inputs(run: BackfillRun) -> RunInputs:
    try:
        return msgspec.convert(run.details["inputs"], RunInputs)
    except msgspec.ValidationError as error:
        raise RunError(
            f"cannot continue backfill run {run.name}: another version of Kiln began it, and stored its inputs in "
            f"another form ({error}). Drop the run, and start it again: kiln backfill drop {run.name}"
        ) from error


class _ChunkRunner:
    def __init__(self, run: BackfillRun, terms: RunTerms, resources: RunResources) -> None:
        self._terms, self._resources = terms, resources
        self._inputs = _decode_inputs(run)
        self._lake = resources.lake.locate_run(terms.name)
        self._beyond = Lake(f"{self._lake.path}/beyond", self._lake.options)
        self._target = RunTarget(self._lake, self._beyond, terms.span)
        self._commits = [(lake, DeltaRsCommits(lake, durable=resources.durable)) for lake in (self._lake, self._beyond)]
        self._query = f"backfill:{terms.name}"
        self._done = {(str(chunk.details["step"]), int(str(chunk.details["number"]))): chunk for chunk in run.chunks}
        self._rows_written = self._frames = 0

    def run_to_end(self) -> RunOutcome:
        self._lake.create(RUN_TABLES)
        self._beyond.create(BEYOND_TABLES)
        if self._terms.source != "frames":
            self._read_inputs()
        self._decode()
        self._batch()
        rows, outside = count_rows(self._done.values()), merge_outside(self._done.values())
        append_event(self._resources.lake, self._terms.name, "done", self._resources.now(), details={"rows": rows})
        return RunOutcome(self._terms.name, rows, self._rows_written, self._frames, self._inputs.lost, outside)

    # ---------------------------------------------------------------- tables

    def _find_live(self, table: str) -> list[_TableVersion]:
        """Return the version of a live table as of the start of the run; none for `streams` if no stream was known."""
        return [(self._resources.lake, version) for name, version in self._inputs.live.items() if name == table]

    def _find_own(self, table: str, step: str) -> list[_TableVersion]:
        """Return the versions, after the newest chunk of a step, of the run's table and of the table with the rows
        outside its time range."""
        done = [number for name, number in self._done if name == step]
        versions = self._done[step, max(done)].details["versions"] if done else {}
        assert isinstance(versions, dict)
        return [(self._lake, versions.get(table, 0)), (self._beyond, versions.get(f"beyond/{table}", 0))]

    def _find_frames(self) -> list[_TableVersion]:
        return self._find_live("frames") if self._terms.source == "frames" else self._find_own("frames", "reading")

    def _read(self, table: str, versions: Sequence[_TableVersion], times: TimeBounds) -> DataFrame:
        spark = self._resources.spark
        rows = [read_rows(spark, lake, table, version, times) for lake, version in versions]
        return reduce(DataFrame.unionByName, rows) if rows else create_empty(spark, table)

    def _read_versions(self) -> dict[str, int]:
        return {name: self._lake.open(name).version() for name in RUN_TABLES} | {
            f"beyond/{name}": self._beyond.open(name).version() for name in BEYOND_TABLES
        }

    # ---------------------------------------------------------------- chunks

    def _commit(
        self,
        step: str,
        number: int,
        outputs: Iterable[StageOutput],
        span: TimeRange | None = None,
        more_details: Mapping[str, object] = {},
    ) -> None:
        """Commit the data files of a chunk, table by table, and then append the chunk to the log of runs."""
        files: list[tuple[Lake, DataFile]] = []
        outside, rows = OutsideFrames(), Counter[str]()
        for output in outputs:
            files += [(self._lake, file) for file in output.files] + [(self._beyond, file) for file in output.beyond]
            for file in output.files:
                rows[file.table] += file.rows
            outside = outside.merge(output.outside)
            self._frames += output.frames
        for table in RUN_TABLES:  # tips of batches before the batches
            for lake, commits in self._commits:
                of_table = [file for of_lake, file in files if of_lake is lake and file.table == table]
                if of_table and not commits.commit(table, of_table, WriteId(self._query, number, step)):
                    delete_files(lake, of_table)
        details = {"step": step, "number": number, "rows": rows, "versions": self._read_versions(), **more_details}
        if outside.frames:
            details["outside"] = msgspec.to_builtins(outside)
        at, name = self._resources.now(), self._terms.name
        low, high = span or (None, None)
        append_event(
            self._resources.lake, name, "chunk", at, range_from=low, range_to=high, rows=rows.total(), details=details
        )
        self._done[step, number] = RunEvent(name, "chunk", at, low, high, rows.total(), details)
        self._rows_written += rows.total()

    def _list_pending(self, step: str, total: int, chunks: Sequence[TimeRange] = ()) -> Iterator[int]:
        """Yield the numbers of the chunks of a step that are not done yet, and report the progress."""
        for number in range(total):
            at = chunks[number].low if chunks else None
            self._resources.report(RunProgress(step, number, total, at, self._frames, self._rows_written))
            if (step, number) in self._done:
                continue
            if self._resources.is_stopped():
                raise build_stopped_error(self._terms.name)
            yield number

    # ---------------------------------------------------------------- frames out of Kafka or files

    def _read_inputs(self) -> None:
        readers, times = self._list_readers(), TimeBounds("observed_at", self._terms.read_span.low)
        for number in self._list_pending("reading", len(readers)):
            self._check_topic()
            marks = frames.mark_run_frames(self._read("frames", self._find_own("frames", "reading"), times))
            with _group_with_marks(readers[number](), marks, has_few_marks=not number) as groups:
                outputs = _collect_outputs(frames.write_frames(groups, self._target))
                self._check_topic()  # the records may be of a topic that was re-created meanwhile
                self._commit("reading", number, outputs)

    def _list_readers(self) -> list[Callable[[], DataFrame]]:
        terms, spark = self._terms, self._resources.spark
        if terms.source == "files":
            parts, size = self._inputs.files, self._inputs.parts_per_step
            steps = [parts[at : at + size] for at in range(0, len(parts), size)]
            wanted = FrameFilter(terms.read_span)
            return [partial(frames.read_file_frames, spark, step, wanted, self._target) for step in steps]
        wanted = FrameFilter(terms.read_span, terms.network)
        ranges = self._inputs.kafka
        longest = max((end - first for first, end in ranges.values()), default=0)
        size = max(1, self._inputs.chunk // max(1, len(ranges)))
        return [partial(self._read_kafka, at, size, wanted) for at in range(0, longest, size)]

    def _read_kafka(self, at: int, count: int, wanted: FrameFilter) -> DataFrame:
        """Read the frames in `count` records of each partition, beginning `at` records after the run's first record."""
        resources = self._resources
        ranges = [
            OffsetRange(resources.topic, int(part), low + at, min(low + at + count, high))
            for part, (low, high) in self._inputs.kafka.items()
            if low + at < high
        ]
        return frames.read_kafka_frames(resources.spark, ranges, resources.client_options, wanted, self._target)

    def _check_topic(self) -> None:
        saved_id = self._inputs.topic_id
        current_id = self._resources.topic_id() if saved_id else ""
        if current_id and current_id != saved_id:
            name = self._terms.name
            problem = describe_replaced_topic(self._resources.topic, saved_id, current_id)
            raise RunError(
                f"backfill run {name} cannot continue: {problem}. Drop the run (kiln backfill drop {name}), and begin "
                "another one with --source frames"
            )

    # ---------------------------------------------------------------- messages and updates

    @property
    def _network(self) -> str | None:
        """Network by which frames are selected; `None` if the run's own table `frames` has only the selected ones."""
        return self._terms.network if self._terms.source == "frames" else None

    def _read_frames(self, span: TimeRange) -> DataFrame:
        rows = self._read("frames", self._find_frames(), TimeBounds("observed_at", *span))
        return rows if self._network is None else rows.where(F.col("network") == self._network)

    def _list_frame_files(self, span: TimeRange) -> list[PlainFile] | None:
        """List the data files that contain the rows of `_read_frames`; `None` if only Spark can read the table."""
        times, listed = TimeBounds("observed_at", *span), list[PlainFile]()
        for lake, version in self._find_frames():
            files = list_plain_files(lake, "frames", version, times)
            if files is None:
                return None
            listed += files
        return listed

    def _decode(self) -> None:
        chunks = self._plan_chunks()
        for number in self._list_pending("decoding", len(chunks), chunks):
            self._decode_chunk(number, chunks[number])

    def _plan_chunks(self) -> list[TimeRange]:
        """Split the time range and its margins into chunks with about equal numbers of frames."""
        if ("planning", 0) not in self._done:
            edges: list[int] = []
            times = TimeBounds("observed_at", *self._terms.read_span)
            if _count_rows("frames", self._find_frames(), times) > self._inputs.chunk:
                inside = self._read_frames(self._terms.read_span).select(
                    F.unix_micros("observed_at").cast("double").alias("at")
                )
                count = count_pieces(inside.count(), self._inputs.chunk)
                quantiles = [number / count for number in range(1, count)]
                edges = [int(at) for at in inside.approxQuantile("at", quantiles, _QUANTILE_ERROR)] if quantiles else []
            self._commit("planning", 0, (), more_details={"edges": edges})
        edges = msgspec.convert(self._done["planning", 0].details["edges"], list[int])
        return split_range(self._terms.read_span, edges)

    def _decode_chunk(self, number: int, chunk: TimeRange) -> None:
        terms, target, signed_horizon = self._terms, self._target, self._terms.signed_horizon
        near = TimeBounds("observed_at", chunk.low - signed_horizon, chunk.high + signed_horizon)
        live_messages = self._read_live_messages(near)
        own_messages = self._read("messages", self._find_own("messages", "decoding"), near)
        live_updates = self._read("updates", self._find_live("updates"), near)
        own_updates = self._read("updates", self._find_own("updates", "decoding"), near)
        of_messages = (
            messages.mark_messages(live_messages, messages.LIVE_MESSAGE),
            messages.mark_messages(own_messages, messages.RUN_MESSAGE),
            messages.mark_updates(live_updates, messages.LIVE_UPDATE),
            messages.mark_updates(own_updates, messages.RUN_UPDATE),
        )
        of_streams = (
            updates.mark_known_streams(self._read("streams", self._find_live("streams"), TimeBounds())),
            updates.mark_updates(live_updates, updates.LIVE_UPDATE),
            updates.mark_updates(own_updates, updates.RUN_UPDATE),
            updates.mark_announcements(live_messages, chunk.low),
            updates.mark_announcements(own_messages, chunk.low),
        )
        separating = SeparatorConfig(fetch=terms.fetch, believe=not terms.batching.update_filter.only_verified)
        few = self._has_few_marks(near)
        with _group_with_marks(self._decode_frames(chunk), *of_messages, has_few_marks=few) as copies_and_marks:
            candidates = messages.select_messages(copies_and_marks, chunk, terms.decoding, signed_horizon, target)
            with _group_with_marks(candidates, *of_streams, has_few_marks=few) as streams:
                outputs = _collect_outputs(updates.write_updates(streams, separating, signed_horizon, target))
        self._commit("decoding", number, outputs, chunk)

    def _decode_frames(self, chunk: TimeRange) -> DataFrame:
        decoding, target, files = self._terms.decoding, self._target, self._list_frame_files(chunk)
        if files is None or self._has_log_lines:
            gap = published_lines.MAX_GAP
            with_edges = self._read_frames(TimeRange(chunk.low - gap, chunk.high + gap))
            return copies.decode_rows(
                published_lines.set_seqnos(self._read_frames(chunk), with_edges), decoding, target
            )
        spark = self._resources.spark
        tasks = plan_tasks(files, 2 * spark.sparkContext.defaultParallelism, chunk, self._network)
        return copies.decode_files(spark, tasks, decoding, target)

    @cached_property
    def _has_log_lines(self) -> bool:
        return published_lines.has_log_lines(self._read_frames(self._terms.read_span))

    def _has_few_marks(self, near: TimeBounds) -> bool:
        """Return true if the known streams, and the messages and updates near a chunk, are no more than a chunk's
        frames.

        It is then cheaper to shuffle all of them with the chunk than to select those that the chunk needs.
        """
        count = _count_rows("streams", self._find_live("streams"), TimeBounds())
        for table in ("messages", "updates"):
            count += _count_rows(table, self._find_live(table) + self._find_own(table, "decoding"), near)
        return count <= self._inputs.chunk

    def _read_live_messages(self, near: TimeBounds) -> DataFrame:
        """Read the live messages around a chunk.

        If the source is files, messages in the run's time range are omitted, because the live tables have other copies
        than the files.
        """
        live_messages = self._read("messages", self._find_live("messages"), near)
        if self._terms.source == "files":
            live_messages = live_messages.where(~build_condition(TimeBounds("observed_at", *self._terms.span)))
        return live_messages

    # ---------------------------------------------------------------- batches

    def _batch(self) -> None:
        terms, batching = self._terms, self._terms.batching
        begin, end = terms.span.low - terms.margin, terms.span.high + terms.margin
        own_updates = self._read(
            "updates", self._find_own("updates", "decoding"), TimeBounds("observed_at", begin, end)
        )
        live = self._read("batches", self._find_live("batches"), TimeBounds("opened_at", begin, terms.span.high))
        rows = batches.select_batchable(own_updates, batching.update_filter)
        rows = rows.unionByName(batches.mark_live_batches(live))
        count = count_pieces(count_rows(self._done.values()).get("updates", 0), UPDATES_PER_STEP)
        for number in self._list_pending("batching", count):
            piece = batches.select_piece(rows, number, count)
            outputs = batches.build_batches(piece, batching, terms.span, self._lake)
            self._commit("batching", number, _collect_outputs(outputs), terms.span)
        self._resources.report(RunProgress("batching", count, count, None, self._frames, self._rows_written))


def _count_rows(table: str, versions: Iterable[_TableVersion], times: TimeBounds) -> int:
    """Compute an upper bound of the number of rows of tables in a time range, from file statistics."""
    return sum(count_rows_at_most(lake, table, version, times) for lake, version in versions)


def build_stopped_error(name: str) -> StoppedError:
    """Build the error for a backfill run that a signal has stopped."""
    return StoppedError(
        f"backfill run {name} was stopped. Its finished part is stored: type the same command again to continue"
    )


@contextmanager
def _group_with_marks(rows: DataFrame, *marks: DataFrame, has_few_marks: bool) -> Iterator[DataFrame]:
    """Shuffle the rows of a chunk together with known rows of the same messages or streams.

    Args:
        rows: Rows of the chunk (MERGED_ROWS).
        marks: Known rows (MERGED_ROWS).
        has_few_marks: True to shuffle all `marks`. Otherwise, only those of groups in `rows` are shuffled.
    """
    merged = reduce(DataFrame.unionByName, marks)
    if not has_few_marks:
        rows = rows.persist(StorageLevel.DISK_ONLY)  # read twice
        merged = semi_join(merged, rows)
    try:
        yield group_rows(rows.unionByName(merged))
    finally:
        rows.unpersist()


def _collect_outputs(rows: DataFrame) -> list[StageOutput]:
    return [msgspec.msgpack.decode(bytes(row.data), type=StageOutput) for row in rows.collect()]
