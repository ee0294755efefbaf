"""Query `archive`: from Kafka's topic `kiln.frames` to Delta. Rejected messages and frames (in the following:
rejections) go to the topic `kiln.quarantine`.

Each frame becomes a row of `frames` with its exact bytes. Each copy of a message in it becomes a row of `copies`, each
subscription a row of `subscriptions`, and each control entry a row of `controls`. One valid copy of each message
becomes the row of `messages`; which one is not defined.

    on one machine   source: decode, accept each message once, write files ─ foreachBatch: rejections to Kafka, commits
    on a cluster     source: decode, write files of `frames`, `copies`, `subscriptions` and `controls`
                     ─ dropDuplicatesWithinWatermark ─ foreachBatch: write files of `messages`, rejections to Kafka,
                     commits

The source is Kiln's own Python data source (`pipelines/runtime/kafka.py`), whose tasks read Kafka and decode. Tasks
write the rows of tables into files; no row reaches the driver. The driver gets the rejections, and from each task a
`DecodeResult` (the files of `frames`, `copies`, `subscriptions` and `controls`) and an `ArchiveOutput` (the files of
`messages`). The column `kind` tells them apart.

The first micro-batch begins at the oldest records in Kafka, and each later one where the previous one ended. A
micro-batch has at most `max_offsets_per_trigger` records. The query stops with an error if Kafka has deleted a record
that the query has not read. A micro-batch starts every 10 s (`jobs.archive.trigger`), or as soon as the previous one
ends if that one takes longer.

A message is accepted unless a message with the same digest was accepted before, and this digest is still stored. On
one machine, a file next to the checkpoint stores the digests, each with the position of the accepted copy (partition,
offset, index in the frame). On a cluster, Spark's state stores the digests. All tasks of a micro-batch use one time,
which the driver's clock gives when the micro-batch starts, and which never goes back. By this time, digests expire
after at least `dedupe.signed_ttl` and at most twice that. A copy that comes later is accepted again.

A bridge that was killed may send a frame again. `FrameDedup` recognises it by its connection, direction and sequence
number, and drops its rows of all tables except `messages`, where the digests suffice. The ranges of stored sequence
numbers are in a temporary SQLite database, which is filled from `frames` at the first micro-batch after a start.

A micro-batch has these effects, in this order. With `durability = "power"`, `write_in_order` syncs the checkpoint after
1 and after 4, and tasks and commits sync their files. So a power cut has the same effects as a crash.

1. Spark's offset log: which records the micro-batch has.
2. The tasks store the digests, in the file or in Spark's state, and write files of rows, which no table names yet.
3. Rejections, in `kiln.quarantine`.
4. The driver removes repeated frames by rewriting their files. Then come the Delta commits: to `messages`, then to each
   other table with new rows. The transaction identifier of a commit (`txn`) holds the ids of the query and the
   micro-batch.
5. Spark's commit log.

After a crash, Spark repeats the micro-batch, with the same records and ids.

- The same messages are accepted, unless the stop was so long that digests have expired. On one machine, the file
  has the positions of the accepted copies; on a cluster, Spark begins with the state before the micro-batch.
- Rows go into new files. `kiln maintain` deletes files that no commit names.
- Rejections may be in the topic twice, with the same key, and `sink` stores them once.
- A table that already has the transaction ignores the commit. If `frames` has it, `FrameDedup` leaves out the rows with
  this micro-batch's own offsets when it reads the stored ranges.

Between 2 and 3, `DecodeBreaker` stops the query with an error if the messages of many authors no longer decode. It
compares them with earlier messages of the same authors, which it remembers only in memory. So after the next start,
the repeated micro-batch passes, and its rejections go to quarantine even if Kiln's decoder is still at fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from kiln.pipelines.archive.record_decoder import DECODE_RESULT, FAULT, PARTS, DecodeResult
from kiln.pipelines.archive.transform import ARCHIVE_OUTPUT, ArchiveOutput, build_stages
from kiln.pipelines.decode.breaker import DecodeBreaker, check_samples
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.files import DataFile, rewrite_file
from kiln.pipelines.delta.frame_ranges import (
    FrameRanges,
    StoredFrameRanges,
    build_range_key,
    contains,
    overlap,
    read_frame_ranges,
)
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.checkpoint import Checkpoint
from kiln.pipelines.runtime.deduplication import DedupSteps
from kiln.pipelines.runtime.kafka import write_topic
from kiln.pipelines.runtime.query_context import QueryContext, TableOutput, write_in_order
from kiln.schemas.queries import CONTROL_PREFIX, QUERIES


def start(context: QueryContext, decoding: DecodeConfig, breaker: DecodeBreaker) -> StreamingQuery:
    """Start the query.

    Raises:
        DecodingBrokenError: Messages that are known to be valid do not decode.
    """
    check_samples()
    session = context.new_session("archive")
    context.lake.create(QUERIES["archive"].tables)
    steps = context.find_deduplication("archive").accept_once(build_stages(decoding, context.lake))
    source = context.register_source("archive", session, steps.source_task)
    decoded = session.readStream.format(source).schema(steps.source_schema).load()
    rows = steps.deduplicate(decoded)
    write = _ArchiveWriter(context, steps, breaker).write
    return (
        rows.writeStream.queryName("archive")
        .foreachBatch(write_in_order(write, context.find_durable_checkpoint("archive")))
        .option("checkpointLocation", context.checkpoint_uri("archive"))
        .trigger(processingTime=context.trigger)
        .start()
    )


class _ArchiveWriter:
    def __init__(self, context: QueryContext, steps: DedupSteps, breaker: DecodeBreaker) -> None:
        self._context = context
        self._steps = steps
        self._breaker = breaker
        self._clock = context.create_clock("archive")
        self._checkpoint = Checkpoint(context.checkpoints / "archive")
        self._frame_dedup = FrameDedup(context.lake)
        self._tables = context.create_table_writer("archive")

    def write(self, rows: DataFrame, batch_id: int, query_id: str) -> None:
        """Write one micro-batch: the effects 2 to 4 of the module's docstring."""
        context = self._context
        self._clock.set_time(rows.sparkSession.sparkContext)  # the time by which digests expire
        out = self._steps.run_in_micro_batch(rows, self._checkpoint.count_records(batch_id))
        out.persist(StorageLevel.DISK_ONLY)  # the faults are read again, and the tasks must write files only once
        try:
            summaries = out.where(F.col("kind") != FAULT).collect()
            outputs = [
                msgspec.msgpack.decode(bytes(row.value), type=ArchiveOutput)
                for row in summaries
                if row.kind == ARCHIVE_OUTPUT
            ]
            results = [
                msgspec.msgpack.decode(bytes(row.value), type=DecodeResult)
                for row in summaries
                if row.kind == DECODE_RESULT
            ]
            self._breaker.observe(tally for output in outputs for tally in output.tallies)
            if any(output.faults for output in outputs):
                write_topic(out.where(F.col("kind") == FAULT), context.broker, "quarantine")
        finally:
            out.unpersist()
        frames, parts = self._frame_dedup.drop_stored(results, WriteId(query_id, batch_id))
        self._tables.commit(
            query_id,
            batch_id,
            [
                TableOutput("messages", [file for output in outputs for file in output.messages]),
                TableOutput("frames", frames),
                *(TableOutput(table, [file for file in parts if file.table == table]) for table in PARTS),
            ],
        )
        counts = sum((Counter(output.counts) for output in outputs), Counter[str]())
        entries = sum((Counter(result.entries) for result in results), Counter[str]())
        counts.update({f"{CONTROL_PREFIX}{kind}": number for kind, number in entries.items()})
        totals = {
            "copies": sum(result.valid_copies for result in results),
            "core_differences": sum(result.core_differences for result in results),
        }
        context.report("archive", {**counts, **totals})


_Files = tuple[list[DataFile], list[DataFile]]


class FrameDedup:
    """Record of the frames that the lake has, by which repeated frames are dropped (docs/design/09).

    The tasks of a micro-batch write every frame into files. If the lake or an earlier task already has some of the
    frames in a file, the file is rewritten without these frames. This is rare.
    """

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._stored: StoredFrameRanges | None = None

    def drop_stored(self, results: Iterable[DecodeResult], write_id: WriteId) -> _Files:
        """Drop repeated frames, and the rows of their parts, from the files that the tasks of a micro-batch wrote.

        Returns:
            Files of the table `frames`, and files of `copies`, `subscriptions` and `controls`.
        """
        in_order = sorted(results, key=lambda result: min(result.spans.items()))
        if self._stored is None:
            # The first micro-batch after a start may be a repeat, and `frames` may have its commit. Then the rows of
            # its offsets are its own. If it is no repeat, rows with these offsets came from a deleted topic of this
            # name, and may have the same frames.
            own = [(part, low, high) for result in in_order for part, (low, high) in result.spans.items()]
            newest = self._lake.open("frames").transaction_version(write_id.app_id("frames"))
            is_repeat = newest is not None and newest >= write_id.batch_id
            self._stored = read_frame_ranges(self._lake, own if is_repeat else ())
        frames: list[DataFile] = []
        parts: list[DataFile] = []
        for result in in_order:
            near = self._stored.find_near(result.frame_ranges)
            files = (
                self._rewrite_without(result, near)
                if overlap(near, result.frame_ranges)
                else (result.frames, result.parts)
            )
            frames += files[0]
            parts += files[1]
            self._stored.add(result.frame_ranges)
        return frames, parts

    def _rewrite_without(self, result: DecodeResult, stored: FrameRanges) -> _Files:
        repeated: set[tuple[int, int]] = set()  # partition and offset

        def select_new_frames(rows: pa.Table) -> pa.Array:
            names = ("connection", "direction", "sequence", "kafka_partition", "kafka_offset")
            keep: list[bool] = []
            for connection, direction, sequence, partition, offset in zip(
                *(rows[name].to_pylist() for name in names), strict=True
            ):
                is_stored = contains(stored.get(build_range_key(connection, direction), []), sequence)
                if is_stored:
                    repeated.add((partition, offset))
                keep.append(not is_stored)
            return pa.array(keep, pa.bool_())

        def select_new_parts(rows: pa.Table) -> pa.Array:
            positions = zip(rows["kafka_partition"].to_pylist(), rows["kafka_offset"].to_pylist(), strict=True)
            return pa.array([position not in repeated for position in positions], pa.bool_())

        frames = [new for file in result.frames for new in rewrite_file(self._lake, file, select_new_frames)]
        return frames, [new for file in result.parts for new in rewrite_file(self._lake, file, select_new_parts)]
