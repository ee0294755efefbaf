"""A backfill run as the settings and a request say: terms, what it reads, and what it works with."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from kafka import KafkaConsumer, TopicPartition
from kiln.conf.process.errors import KilnError
from kiln.conf.process.kafka_clients import open_client
from kiln.conf.process.locks import lock_state
from kiln.conf.settings.durations import micros, parse_duration
from kiln.conf.settings.model import Settings
from kiln.conf.settings.reading import load_settings
from kiln.pipelines.app.launch import batch_config, decode_config
from kiln.pipelines.backfill.chunks import TimeRange
from kiln.pipelines.backfill.frames import FilePart, split_file
from kiln.pipelines.backfill.run import (
    LIVE_TABLES,
    RunError,
    RunInputs,
    RunOutcome,
    RunProgress,
    RunResources,
    build_stopped_error,
    run,
)
from kiln.pipelines.backfill.run_log import check_name
from kiln.pipelines.backfill.terms import RunTerms, Source
from kiln.pipelines.delta.commits import Commits
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.delta_spark import DeltaSparkCommits
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.kafka import Broker
from kiln.pipelines.runtime.s3a import build_s3a_settings
from kiln.pipelines.runtime.session import create_session
from kiln.pipelines.runtime.topics import KafkaTopics
from kiln.schemas.captures.formats import FORMATS, detect_format
from kiln.schemas.printable import printable_lines

_CANCEL_EVERY: Final = 0.5  # s


class InputError(KilnError):
    """An input of a run cannot be read."""


class RequestError(KilnError):
    """The options of a run contradict each other."""

    exit_code = 2


@dataclass(frozen=True)
class BackfillRequest:
    """Options of a run. Times are µs."""

    name: str
    low: int
    high: int
    source: Source = "frames"
    files: tuple[Path, ...] = ()
    window: timedelta | None = None
    """by default that of the settings"""
    network: str | None = None
    as_of: int | None = None
    publish: bool = False

    def __post_init__(self) -> None:
        if self.publish and self.source == "files":
            raise RequestError(
                "--publish: frames out of files are of origin REPLAY, and the bridge publishes LIVE batches only. Take "
                "--source frames or kafka"
            )


def build_terms(settings: Settings, request: BackfillRequest) -> RunTerms:
    """The terms of a run. BundleError: the settings' topic bundles contradict those of the table `bundles`."""
    batches = batch_config(settings)
    return RunTerms(
        name=request.name,
        span=TimeRange(request.low, request.high),
        decoding=decode_config(settings),
        window=batches.window if request.window is None else micros(request.window),
        grace=batches.grace,
        source=request.source,
        files=tuple(str(path.absolute()) for path in request.files),
        network=request.network,
        as_of=request.as_of,
        block_limit=batches.block_limit,
        update_filter=batches.update_filter,
        fetch=bool(settings.ipfs.api),
        signed_horizon=micros(settings.dedupe.signed_ttl),
        chunk=settings.backfill.frames_per_chunk,
    )


def backfill(
    spark: SparkSession,
    settings: Settings,
    terms: RunTerms,
    stopped: Callable[[], bool],
    report: Callable[[RunProgress], None],
    publish: bool = False,
) -> RunOutcome:
    """Does a run, or what is left of it. `publish`: its batches go to the bridge, too.

    RunError: there is a run of this name with other terms. StoppedError: `stopped` said so. InputError.
    """
    # Spark's default of 200 costs more than the work of a chunk
    parallel = spark.sparkContext.defaultParallelism
    spark.conf.set("spark.sql.shuffle.partitions", str(2 * parallel))
    lake = Lake.from_location(settings.lake_root)
    kafka, durable = settings.broker, settings.durability == "power"

    def commits(where: Lake) -> Commits:
        if settings.lake.writer == "delta-rs":
            return DeltaRsCommits(where, durable=durable)
        return DeltaSparkCommits(where, spark, durable=durable)

    live = RunResources(
        spark=spark,
        lake=lake,
        commits=commits,
        broker=Broker(kafka.servers, kafka.prefix, kafka.spark_options() if terms.source == "kafka" or publish else {}),
        now=lambda: time.time_ns() // 1000,
        version=_code_version(),
        topic_id=(lambda: frames_topic_id(settings)) if terms.source == "kafka" else (lambda: ""),
        is_stopped=stopped,
        report=report,
    )
    try:
        return run(terms, live, lambda: _read_inputs(settings, lake, terms, 2 * parallel), publish)
    except (Py4JError, PySparkException) as error:
        if stopped():  # Spark was told to give up what it was at
            raise build_stopped_error(terms.name) from error
        said = str(error).strip().split("\n")[0]  # below stands a trace
        raise RunError(
            f"Spark has given up: {said}. What is done of the run {terms.name} is kept: the same command goes on from "
            f"there. {settings.logs / 'backfill'} says more"
        ) from error


@contextmanager
def stoppable(spark: SparkSession) -> Iterator[Callable[[], bool]]:
    """While this lasts, SIGTERM and Ctrl-C end what Spark is at; gives whether one came. A second Ctrl-C waits for
    nothing."""
    asked, over = threading.Event(), threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()

    def cancel() -> None:
        asked.wait()
        while not over.wait(_CANCEL_EVERY):  # the next job may just begin
            with suppress(Py4JError):
                spark.sparkContext.cancelAllJobs()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    watcher = threading.Thread(target=cancel, name="stop", daemon=True)
    watcher.start()
    try:
        yield asked.is_set
    finally:
        over.set()
        asked.set()  # ends the thread
        watcher.join()
        for number, handler in before.items():
            signal.signal(number, handler)


def parse_time(text: str) -> int:
    """ISO 8601 as µs; without a zone, UTC. ValueError: it is no time."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("a time such as 2026-11-01 or 2026-11-01T12:00:00Z") from None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def parse_source(texts: Sequence[str]) -> tuple[Source, tuple[Path, ...]]:
    """`frames`, `kafka` or files. ValueError: a mixture."""
    if list(texts) in ([], ["frames"]):
        return "frames", ()
    if list(texts) == ["kafka"]:
        return "kafka", ()
    if {"frames", "kafka"} & set(texts):
        raise ValueError("frames, kafka, or files: one of the three")
    return "files", tuple(map(Path, texts))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `pipelines/jobs/backfill.py` under `spark-submit`: print each step, and at the end rows by table, as lines of
    JSON. Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        settings = load_settings()
        source, files = parse_source(options.source or ())
        request = BackfillRequest(
            options.run,
            parse_time(options.low),
            parse_time(options.high),
            source=source,
            files=files,
            window=None if options.window is None else parse_duration(options.window),
            network=options.network,
            as_of=None if options.as_of is None else parse_time(options.as_of),
            publish=options.publish,
        )
        with lock_state(settings.state, f"backfill-{check_name(request.name)}"):
            outcome = _run_submitted(settings, request)
    except (KilnError, ValueError) as error:
        print(printable_lines(str(error)), file=sys.stderr)
        return error.exit_code if isinstance(error, KilnError) else 2
    told = {"run": outcome.name, "wrote": outcome.rows_written, "frames": outcome.frames, "rows": dict(outcome.rows)}
    print(json.dumps({**told, "published": outcome.published, "gone": list(outcome.lost)}))
    return 0


def _run_submitted(settings: Settings, request: BackfillRequest) -> RunOutcome:
    terms = build_terms(settings, request)
    spark = create_session(
        "kiln-backfill",
        master=settings.spark.master,
        driver_memory=settings.spark.driver_memory,
        java_options=settings.spark.java_options,
        jars=(),
        extra=build_s3a_settings(settings.places, os.environ) | settings.spark.conf,
    )

    def report(progress: RunProgress) -> None:
        print(json.dumps({"step": progress.step, "done": progress.done, "of": progress.total}), flush=True)

    try:
        with stoppable(spark) as stopped:
            return backfill(spark, settings, terms, stopped, report, request.publish)
    finally:
        spark.stop()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="A backfill run. docs/backfill.md explains the options.")
    parser.add_argument("--from", dest="low", required=True, metavar="TIME")
    parser.add_argument("--to", dest="high", required=True, metavar="TIME")
    parser.add_argument("--run", required=True, metavar="NAME")
    parser.add_argument("--source", nargs="+", metavar="frames|kafka|FILE")
    parser.add_argument("--window", metavar="T")
    parser.add_argument("--network", metavar="NAME")
    parser.add_argument("--as-of", metavar="TIME")
    parser.add_argument("--publish", action="store_true")
    return parser


def _code_version() -> str:
    try:
        return version("kiln")
    except PackageNotFoundError:
        return "unknown"


def _read_inputs(settings: Settings, lake: Lake, terms: RunTerms, at_once: int) -> RunInputs:
    live = {name: lake.open(name).version() for name in LIVE_TABLES}
    if terms.as_of is not None:
        known = _find_version_at(lake, "streams", terms.as_of)
        if known is None:
            del live["streams"]
        else:
            live["streams"] = known
    inputs = RunInputs(live, at_once)
    if terms.source == "kafka":
        topic_id = frames_topic_id(settings)
        offsets, gone = kafka_offsets(settings, terms)
        return replace(inputs, kafka=offsets, topic_id=topic_id, lost=gone)
    if terms.source == "files":
        return replace(
            inputs, files=[part for file in terms.files for part in _read_parts(file, terms, settings.network.name)]
        )
    return inputs


def _find_version_at(lake: Lake, table: str, at: int) -> int | None:
    """The newest version of a table that was there at a time, µs; None: none was."""
    commits = lake.open(table).history()
    there = [int(str(each["version"])) for each in commits if int(str(each["timestamp"])) * 1000 <= at]
    return max(there, default=None)


def frames_topic_id(settings: Settings) -> str:
    """Read Kafka's id of `kiln.frames`; empty if there is no such topic, or the broker does not tell. KafkaError."""
    topic, topics = settings.kafka.topic("frames"), KafkaTopics(settings.broker.client_options)
    try:
        found = topics.read_identities([topic])
    finally:
        topics.close()
    return found[topic].id if topic in found else ""


def kafka_offsets(settings: Settings, terms: RunTerms) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """By partition of `kiln.frames`, the offset of the first record that the broker stamped when the run's reading
    begins, or later, and the end. A frame is stamped after it was heard, however late. And in words what of the range
    Kafka has let go. InputError: all of it."""
    kafka = settings.broker
    consumer = open_client(KafkaConsumer, **kafka.client_options(), group_id=None, enable_auto_commit=False)
    try:
        topic = kafka.topic("frames")
        parts = [TopicPartition(topic, part) for part in sorted(consumer.partitions_for_topic(topic) or ())]
        if not parts:
            raise InputError(f"the broker at {kafka.servers} has no topic {topic}")
        since = max(0, (terms.read_span.low) // 1000)
        ends = consumer.end_offsets(parts)
        found = consumer.offsets_for_times(dict.fromkeys(parts, since))
        offsets = {
            str(part.partition): (ends[part] if found[part] is None else found[part].offset, ends[part])
            for part in parts
        }
        starts, oldest = consumer.beginning_offsets(parts), consumer.offsets_for_times(dict.fromkeys(parts, 0))
        gone = {
            part.partition: words
            for part in parts
            if (
                words := _describe_lost_range(
                    starts[part], None if oldest[part] is None else oldest[part].timestamp, terms.span
                )
            )
        }
        if gone and all(first == end for first, end in offsets.values()):
            raise InputError(
                f"{topic} holds nothing of the range any more: {'; '.join(_format_gaps(gone))}. The table frames "
                "keeps what Kafka lets go: take --source frames"
            )
        return offsets, [f"{topic}, {words}" for words in _format_gaps(gone)]
    finally:
        consumer.close()


def _describe_lost_range(start: int, oldest: int | None, span: TimeRange) -> str:
    """What of a range a partition has let go, in words; empty: nothing. `start`: its first offset. `oldest`: when the
    broker stamped the first record that is there, ms; None: there is none."""
    if not start:
        return ""
    if oldest is None:
        return f"all {start:,} records are gone"
    if oldest * 1000 <= span.low:
        return ""
    at = datetime.fromtimestamp(oldest / 1000, UTC)
    return f"{start:,} records from before {at:%Y-%m-%d %H:%M:%S} UTC are gone"


def _format_gaps(gone: Mapping[int, str]) -> list[str]:
    return [f"partition {partition}: {words}" for partition, words in gone.items()]


def _read_parts(file: str, terms: RunTerms, fallback: str) -> list[FilePart]:
    path = Path(file)
    try:
        with path.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").digest()
            opened.seek(0)
            found = detect_format(opened)
        heard_at = path.stat().st_mtime_ns
        if found is None:
            raise InputError(f"{file} is of no format that Kiln reads: {', '.join(FORMATS)}")
        return split_file(file, found.name, digest, terms.network or fallback, heard_at)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from error
