"""Setup of a backfill run from the settings: its options, its inputs, and the Spark session.

A backfill run builds tables again for a time range, next to the live tables.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Final, Literal

from msgspec import structs
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from kafka import KafkaConsumer, TopicPartition
from kiln.conf.process.extras import read_version
from kiln.conf.process.kafka_clients import open_client
from kiln.conf.process.librdkafka import librdkafka_options
from kiln.conf.process.stop_signal import stop_on_signals
from kiln.conf.settings.durations import micros
from kiln.conf.settings.model import Settings
from kiln.pipelines.app.launch import batch_config, decode_config
from kiln.pipelines.backfill.run import (
    LIVE_TABLES,
    RunError,
    RunInputs,
    RunOutcome,
    RunProgress,
    RunResources,
    StoppedError,
    build_repeated_outcome,
    build_stopped_error,
    find_matching_run,
    run,
)
from kiln.pipelines.backfill.run_log import check_name
from kiln.pipelines.backfill.runs import lock_run
from kiln.pipelines.backfill.sources import (
    InputError,
    count_parts_per_step,
    delete_streams,
    find_captures,
    save_streams,
    split_captures,
)
from kiln.pipelines.backfill.terms import RunTerms, Source, TimeRange
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.delta.table_history import find_commit_at
from kiln.pipelines.runtime.kafka_ranges import ClientOptions
from kiln.pipelines.runtime.table_ages import check_tables
from kiln.pipelines.runtime.topics import KafkaTopics
from kiln.schemas.printable import printable_lines

_CANCEL_EVERY: Final = 0.5  # s


Engine = Literal["core", "python"]


def build_terms(
    settings: Settings,
    name: str,
    low: int,
    high: int,
    *,
    source: Source = "frames",
    files: Sequence[Path] = (),
    window: timedelta | None = None,
    network: str | None = None,
    as_of: int | None = None,
    engine: Engine = "core",
) -> RunTerms:
    """Build the terms of a backfill run from the settings and the options of the command.

    Args:
        low: Start of the time range, µs.
        high: End of the time range (exclusive), µs.
        source: Source of the frames.
        files: Paths, if the source is files.
        window: Length of the windows of batches; by default, the setting `batch.window`.
        network: As in `RunTerms`.
        as_of: As in `RunTerms`.
        engine: `core` to decode frames with the native core if it is built, `python` to decode with Python only.

    Raises:
        BundleError: A topic bundle of the settings contradicts the table `bundles`.
    """
    batching = batch_config(settings)
    return RunTerms(
        name=name,
        span=TimeRange(low, high),
        decoding=replace(decode_config(settings), native_core=engine == "core"),
        batching=batching if window is None else replace(batching, window=micros(window)),
        source=source,
        files=tuple(map(str, files)),
        network=network,
        as_of=as_of,
        fetch=settings.fetches,
        signed_horizon=micros(settings.dedupe.signed_ttl),
        chunk=settings.backfill.frames_per_chunk,
    )


def execute(
    settings: Settings,
    terms: RunTerms,
    open_spark: Callable[[], AbstractContextManager[SparkSession]],
    say: Callable[[str], None],
    report: Callable[[RunProgress], None],
) -> RunOutcome:
    """Execute a backfill run, or resume it if it was interrupted. A lock allows only one process per run.

    Args:
        open_spark: Starts Spark. It is not called if the run is done or cannot begin.
        say: Receives messages for the user.
        report: Receives the progress of the run.

    Raises:
        KilnError: There is a problem that the user can fix, or a signal has stopped the run.
    """
    lake = Lake.from_location(settings.lake_root)
    with lock_run(settings.state, check_name(terms.name)):
        terms = save_input(settings, terms)
        run = find_matching_run(terms, lake)
        if run is not None and run.is_done:
            delete_streams(settings.state / "backfill" / run.name)
            return build_repeated_outcome(run)
        check_tables(lake, settings.checkpoints_root)
        if run is None and terms.files:
            _check_files(settings, terms, say)
        with open_spark() as spark, cancel_on_signal(spark) as is_stopped:
            return backfill(spark, settings, terms, is_stopped, report)


def save_input(settings: Settings, terms: RunTerms) -> RunTerms:
    """Save the data of standard input and pipes in the state folder, so that all tasks of a run can read it.

    Returns:
        The terms, with the paths of the saved files.

    Raises:
        InputError: Standard input or a pipe cannot be read or saved.
        StoppedError: SIGTERM arrived before all data was saved.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise StoppedError(
            f"backfill run {terms.name} was stopped before it began. Its saved input is deleted. To start it, type the "
            "same command again"
        )

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        files = save_streams([Path(file) for file in terms.files], settings.state / "backfill" / terms.name)
        return replace(terms, files=tuple(str(file.absolute()) for file in files))
    finally:
        signal.signal(signal.SIGTERM, previous)


def _check_files(settings: Settings, terms: RunTerms, say: Callable[[str], None]) -> None:
    """Report the files that the run will skip. If an input cannot be read, delete all saved inputs."""
    try:
        for skipped in find_captures(terms.files, say)[1]:
            say(printable_lines(skipped))
    except InputError:
        delete_streams(settings.state / "backfill" / terms.name)
        raise


def backfill(
    spark: SparkSession,
    settings: Settings,
    terms: RunTerms,
    is_stopped: Callable[[], bool],
    report: Callable[[RunProgress], None],
) -> RunOutcome:
    """Execute a backfill run in a Spark session, or the rest of an interrupted run.

    Args:
        is_stopped: Returns true as soon as the run must stop.
        report: Receives the progress.

    Raises:
        RunError: There is a run of this name with other terms, or Spark failed.
        StoppedError: The run was stopped.
        InputError: An input cannot be read.
    """
    # Spark's default of 200 partitions costs more than the work of a chunk.
    parallelism = spark.sparkContext.defaultParallelism
    spark.conf.set("spark.sql.shuffle.partitions", str(2 * parallelism))
    lake = Lake.from_location(settings.lake_root)
    kafka, options = settings.broker, ClientOptions()
    if terms.source == "kafka":
        options = (*librdkafka_options(kafka.client_options()).items(), ("group.id", kafka.topic("reader")))
    resources = RunResources(
        spark=spark,
        lake=lake,
        durable=settings.durability == "power",
        topic=kafka.topic("frames"),
        client_options=options,
        now=lambda: time.time_ns() // 1000,
        version=read_version(),
        topic_id=(lambda: read_frames_topic_id(settings)) if terms.source == "kafka" else (lambda: ""),
        is_stopped=is_stopped,
        report=report,
    )
    try:
        outcome = run(terms, resources, lambda: _read_inputs(settings, lake, terms, 2 * parallelism, report))
        delete_streams(settings.state / "backfill" / terms.name)
        return outcome
    except (Py4JError, PySparkException) as error:
        if is_stopped():  # `cancel_on_signal` cancels Spark's jobs
            raise build_stopped_error(terms.name) from error
        message = str(error).strip().split("\n")[0]  # a stack trace follows
        raise RunError(
            f"backfill run {terms.name} failed in Spark: {message}. The logs in {settings.logs / 'backfill'} have the "
            "details. The finished part of the run is stored: type the same command again to continue"
        ) from error


@contextmanager
def cancel_on_signal(spark: SparkSession) -> Iterator[Callable[[], bool]]:
    """Cancel Spark's jobs on SIGTERM or Ctrl-C. On a second Ctrl-C, raise KeyboardInterrupt at once.

    Yields:
        A function that returns true after a signal has arrived.
    """
    ended = threading.Event()

    def cancel() -> None:
        stop.wait()
        while not ended.wait(_CANCEL_EVERY):  # repeated, as the next job may be about to start
            with suppress(Py4JError):
                spark.sparkContext.cancelAllJobs()

    with stop_on_signals() as stop:
        watcher = threading.Thread(target=cancel, name="stop", daemon=True)
        watcher.start()
        try:
            yield stop.is_set
        finally:
            ended.set()
            stop.set()  # ends the thread
            watcher.join()


def parse_source(texts: Sequence[str]) -> tuple[Source, tuple[Path, ...]]:
    """Parse the values of the option `--source`: `frames`, `kafka`, or paths of files.

    Raises:
        ValueError: The values mix these three sources.
    """
    if list(texts) in ([], ["frames"]):
        return "frames", ()
    if list(texts) == ["kafka"]:
        return "kafka", ()
    if {"frames", "kafka"} & set(texts):
        raise ValueError("frames, kafka and files cannot be combined. Pass one of these")
    return "files", tuple(map(Path, texts))


def _read_inputs(
    settings: Settings, lake: Lake, terms: RunTerms, parts_per_step: int, report: Callable[[RunProgress], None]
) -> RunInputs:
    live = {name: lake.open(name).version() for name in LIVE_TABLES}
    if terms.as_of is not None:
        commit = find_commit_at(lake.folder("streams"), terms.as_of // 1000)
        if commit is None:
            del live["streams"]
        else:
            live["streams"] = commit.version
    inputs = RunInputs(live, parts_per_step)
    if terms.source == "kafka":
        topic_id = read_frames_topic_id(settings)
        offsets, lost = read_kafka_offsets(settings, terms)
        return structs.replace(inputs, kafka=offsets, topic_id=topic_id, lost=lost)
    if terms.source == "files":
        network = terms.network or settings.network.name
        captures, _ = find_captures(terms.files)
        parts = split_captures(captures, network, lambda done: report(RunProgress("hashing", done, len(captures))))
        return structs.replace(inputs, files=parts, parts_per_step=count_parts_per_step(parts, parts_per_step))
    return inputs


def read_frames_topic_id(settings: Settings) -> str:
    """Read Kafka's id of the topic `kiln.frames`.

    Returns:
        An empty text if there is no such topic, or if the broker does not report ids.

    Raises:
        KafkaError: No broker answers.
    """
    topic, topics = settings.kafka.topic("frames"), KafkaTopics(settings.broker.client_options)
    try:
        identities = topics.read_identities([topic])
    finally:
        topics.close()
    return identities[topic].id if topic in identities else ""


def read_kafka_offsets(settings: Settings, terms: RunTerms) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Find the offsets in `kiln.frames` that a backfill run reads, and describe the records that Kafka has removed.

    The run selects frames by capture time, which is before the broker's timestamp. So it reads from the first record
    with a timestamp in its range, to the end of the topic.

    Returns:
        First offset and end offset by partition, and the descriptions.

    Raises:
        InputError: The topic does not exist, or Kafka has removed all records of the range.
    """
    kafka = settings.broker
    consumer = open_client(
        KafkaConsumer,
        **kafka.client_options(),
        group_id=None,
        enable_auto_commit=False,
        isolation_level="read_committed",
    )
    try:
        topic = kafka.topic("frames")
        parts = [TopicPartition(topic, part) for part in sorted(consumer.partitions_for_topic(topic) or ())]
        if not parts:
            raise InputError(
                f"the broker at {kafka.servers} has no topic {topic}. Start Kiln first, or pass --source frames"
            )
        since = max(0, (terms.read_span.low) // 1000)
        ends = consumer.end_offsets(parts)
        by_time = consumer.offsets_for_times(dict.fromkeys(parts, since))
        offsets = {
            str(part.partition): (ends[part] if by_time[part] is None else by_time[part].offset, ends[part])
            for part in parts
        }
        starts, oldest = consumer.beginning_offsets(parts), consumer.offsets_for_times(dict.fromkeys(parts, 0))
        lost = {
            part.partition: description
            for part in parts
            if (
                description := _describe_lost_range(
                    starts[part], None if oldest[part] is None else oldest[part].timestamp, terms.span
                )
            )
        }
        gaps = [f"partition {partition}: {description}" for partition, description in lost.items()]
        if lost and all(first == end for first, end in offsets.values()):
            raise InputError(
                f"Kafka has removed all records of the time range from the topic {topic} ({'; '.join(gaps)}). If the "
                "table frames still has them, pass --source frames"
            )
        return offsets, [f"{topic}, {gap}" for gap in gaps]
    finally:
        consumer.close()


def _describe_lost_range(start: int, oldest: int | None, span: TimeRange) -> str:
    """Describe the records of a time range that Kafka may have removed from a partition; empty if there are none.

    Args:
        start: First offset of the partition.
        oldest: The broker's timestamp of the first record, ms; `None` if the partition has no records.
    """
    if not start:
        return ""
    if oldest is None:
        return f"Kafka has removed all {start:,} records"
    if oldest * 1000 <= span.low:
        return ""
    at = datetime.fromtimestamp(oldest / 1000, UTC)
    return f"Kafka has removed {start:,} records older than {at:%Y-%m-%d %H:%M:%S} UTC"
