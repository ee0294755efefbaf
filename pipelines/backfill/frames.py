"""Reader of frames from Kafka or files for a backfill run: writes each frame once to the run's own table `frames`.

The run then reads this table instead of the live one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from kiln.pipelines.archive.rows import build_fault_records
from kiln.pipelines.backfill.copies import RunTarget, build_quarantine_row
from kiln.pipelines.backfill.merged_rows import (
    MERGED_ROWS,
    OUTPUT_RANK,
    STAGE_OUTPUTS,
    MergedRow,
    MergedRowBuffer,
    OutsideFrames,
    StageOutput,
    encode_outputs,
    read_groups,
    select_merged,
)
from kiln.pipelines.backfill.sources import FilePart, open_parts
from kiln.pipelines.backfill.terms import TimeRange
from kiln.pipelines.decode.decoder import MessageRef, RejectedMessage, reject_failed, reject_unreadable
from kiln.pipelines.decode.frame_row import FrameRow, build_frame_row
from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.delta.frame_ranges import Ranges, contains, insert
from kiln.pipelines.runtime.kafka_ranges import ClientOptions, LostRecordsError, OffsetRange, read_ranges
from kiln.pipelines.runtime.row_packing import pack
from kiln.schemas.captures.formats import FORMATS
from kiln.schemas.captures.items import FileSource, UnreadableItem
from kiln.schemas.kafka.frames import DIRECTIONS, HISTORY, find_frame_fault, read_frame
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected
from kiln.schemas.times import MIN_MICROS

_Batches = Iterator[pa.RecordBatch]

RUN_FRAME = 1
"""Rank of a frame that the run has written in an earlier chunk. The name of the group is a connection and a direction,
and `at` is the frame's sequence number there."""
NEW_FRAME = 2
"""Rank of a frame of this chunk. `data` is a packed row of `frames`."""


@dataclass(frozen=True)
class FrameFilter:
    """Condition for frames: captured in the time range `span`, and of `network`, where `None` means every network."""

    span: TimeRange
    network: str | None = None

    def matches(self, frame: Frame) -> bool:
        return frame.observed_at // 1000 in self.span and self.network in (None, frame.network)


def read_kafka_frames(
    spark: SparkSession,
    ranges: Sequence[OffsetRange],
    options: ClientOptions,
    wanted: FrameFilter,
    target: RunTarget,
) -> DataFrame:
    """Read the frames in offset ranges of `kiln.frames`, one task for each, for the shuffle (MERGED_ROWS).

    Records that are no valid Frame go to the run's table `quarantine`. A task fails if Kafka has removed a record of
    its range, or librdkafka cannot decode one.
    """

    def rows(batches: _Batches) -> _Batches:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from _read_records(read_ranges([ranges[number]], options), wanted, target)

    return spark.range(0, len(ranges), 1, max(1, len(ranges))).mapInArrow(rows, MERGED_ROWS)


def read_file_frames(
    spark: SparkSession, parts: Sequence[FilePart], wanted: FrameFilter, target: RunTarget
) -> DataFrame:
    """Read the frames in parts of files, for the shuffle (MERGED_ROWS).

    Unreadable lines and frames go to the run's table `quarantine`, with file and line.
    """
    tasks = min(len(parts), 2 * spark.sparkContext.defaultParallelism)
    edges = [number * len(parts) // tasks for number in range(tasks + 1)]
    slices = [(msgspec.msgpack.encode(parts[low:high]),) for low, high in pairwise(edges)]
    packed = spark.createDataFrame(slices, "parts binary")
    return packed.repartition(tasks).mapInArrow(_read_file_partition(wanted, target), MERGED_ROWS)


def mark_run_frames(frames: DataFrame) -> DataFrame:
    """Build rows of the shuffle from the frames that the run has written, so that none is written again."""
    name = F.concat(F.lower(F.hex("connection")), F.col("direction"))
    return select_merged(frames, network=F.lit(""), name=name, rank=F.lit(RUN_FRAME), at=F.col("sequence"))


def write_frames(rows: DataFrame, target: RunTarget) -> DataFrame:
    """Write each new frame once to files of the table `frames`, after the shuffle. Returns the results of the tasks."""
    return rows.mapInArrow(_write_partition(target), STAGE_OUTPUTS)


def _read_records(batches: _Batches, wanted: FrameFilter, target: RunTarget) -> _Batches:
    out, faults, frames = MergedRowBuffer(), TableFiles(target.run, "quarantine"), 0
    for batch in batches:
        columns = batch.select(["partition", "offset", "stamp", "value"]).columns
        for partition, offset, stamp, value in zip(*(column.to_pylist() for column in columns), strict=True):
            if stamp == MIN_MICROS:  # it may be a frame that the live tables have
                raise LostRecordsError(f"cannot read offset {offset:,} of kiln.frames-{partition}: {value.decode()}")
            frames += 1
            frame = read_frame(value)
            if isinstance(frame, Rejected):
                if stamp in target.span:
                    _add_fault(faults, reject_unreadable(frame, value, partition, offset, stamp))
            elif wanted.matches(frame):
                row = _merge_frame(partition, offset, stamp, frame)
                if isinstance(row, MergedRow):
                    yield from out.add(row)
                else:
                    _add_fault(faults, row)
    yield from out.finish(StageOutput(faults.close(), frames=frames))


def _read_file_partition(wanted: FrameFilter, target: RunTarget) -> Callable[[_Batches], _Batches]:
    def rows(batches: _Batches) -> _Batches:
        out, faults, frames = MergedRowBuffer(), TableFiles(target.run, "quarantine"), 0
        outside = OutsideFrames()
        for batch in batches:
            for packed in batch.column(0).to_pylist():
                for part, file in open_parts(msgspec.msgpack.decode(packed, type=list[FilePart])):
                    reader = FORMATS[part.format]
                    items = reader.read(file, FileSource(part.digest, part.network, part.heard_at), part.part)
                    for number, item in enumerate(items):
                        if isinstance(item, UnreadableItem):
                            detail = f"{part.name}, line {item.line}: {item.detail}"
                            rejection = RejectedMessage(
                                MessageRef(0, 0, None), HISTORY, item.reason, detail, item.data, part.heard_at // 1000
                            )
                            _add_fault(faults, rejection, of_frame=False)
                            continue
                        frames += 1
                        fault = find_frame_fault(item)
                        if fault is not None:
                            rejected = Rejected(fault.reason, f"{part.name}, frame {number + 1}: {fault.detail}")
                            rejection = reject_unreadable(
                                rejected, item.SerializeToString(), 0, 0, part.heard_at // 1000
                            )
                            _add_fault(faults, rejection, of_frame=False)
                            continue
                        at = item.observed_at // 1000
                        if at not in target.span:
                            outside = outside.merge(OutsideFrames(1, at, at))
                        if wanted.matches(item):
                            offset = item.sequence if reader.has_lines else number
                            row = _merge_frame(part.partition, offset, at, item)
                            if isinstance(row, MergedRow):
                                yield from out.add(row)
                            else:
                                _add_fault(faults, row)
        yield from out.finish(StageOutput(faults.close(), frames=frames, outside=outside))

    return rows


def _add_fault(faults: TableFiles, fault: RejectedMessage, *, of_frame: bool = True) -> None:
    for record in build_fault_records(fault):
        row = build_quarantine_row(fault.ref, record)
        faults.add(row if of_frame else row._replace(kafka_partition=None, kafka_offset=None), len(record.data))


def _merge_frame(partition: int, offset: int, stamp: int, frame: Frame) -> MergedRow | RejectedMessage:
    try:
        row = build_frame_row(partition, offset, stamp, frame)
        name = f"{frame.connection.hex()}{DIRECTIONS[frame.direction]}"
        return MergedRow("", name, NEW_FRAME, frame.sequence, partition, offset, data=pack(row))
    except PROCESSING_ERRORS as error:  # pure: the frame alone has caused this
        return reject_failed("archive", error, MessageRef(partition, offset, None), frame.SerializeToString(), stamp)


def _write_partition(target: RunTarget) -> Callable[[_Batches], _Batches]:
    def rows(batches: _Batches) -> _Batches:
        inside, outside = TableFiles(target.run, "frames"), TableFiles(target.beyond, "frames")
        outputs: list[StageOutput] = []
        decoder = msgspec.msgpack.Decoder(FrameRow)
        for group in read_groups(batches):
            ranges: Ranges = []
            for row in group:
                if row.rank == OUTPUT_RANK:
                    outputs.append(msgspec.msgpack.decode(row.data, type=StageOutput))
                elif row.rank == RUN_FRAME:
                    insert(ranges, row.at, row.at)
                elif not contains(ranges, row.at):
                    insert(ranges, row.at, row.at)
                    frame = decoder.decode(row.data)
                    (inside if frame.observed_at in target.span else outside).add(frame, len(row.data))
        yield encode_outputs(*outputs, StageOutput(inside.close(), outside.close()))

    return rows
