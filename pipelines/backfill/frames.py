"""Frames out of Kafka, or out of files, into the run's table `frames`, each once: from there a run reads them as it
reads the live table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from kiln.pipelines.archive.transform import FRAMES, fault_records, frame_row
from kiln.pipelines.backfill.chunks import TimeRange
from kiln.pipelines.backfill.grouped import (
    MIXED,
    TALLIES,
    TALLY,
    MergedRow,
    MergedRowBuffer,
    StageOutput,
    read_groups,
    tallies,
)
from kiln.pipelines.backfill.messages import RunTarget, quarantine_row
from kiln.pipelines.decode.decoder import MessageRef, RejectedMessage, failed, unreadable
from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.delta.frame_ranges import Ranges, contains, insert
from kiln.pipelines.runtime.row_packing import pack, unpack
from kiln.schemas.captures.formats import FORMATS
from kiln.schemas.captures.items import FileSource, UnreadableItem
from kiln.schemas.captures.lines import FileRange
from kiln.schemas.kafka.frames import DIRECTIONS, HISTORY, frame_fault, read_frame
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected

_Batches = Iterator[pa.RecordBatch]

HELD, FRAME = 1, 2
"""Ranks. A group is one direction of one connection, and `at` the sequence. HELD: the run has the frame of an earlier
chunk. FRAME: `data` is a row of `frames`, packed."""

_OBSERVED_AT = next(place for place, column in enumerate(FRAMES) if column.name == "observed_at")
_PART_BYTES = 64 << 20


class FilePart(msgspec.Struct, frozen=True, array_like=True):
    """A part of a file, for one task."""

    path: str
    format: str
    digest: bytes
    network: str
    heard_at: int
    part: FileRange

    @property
    def partition(self) -> int:
        """What stands in `kafka_partition`: negative, and the same for the same file."""
        return -1 - (int.from_bytes(self.digest[:4], "big") >> 2)


@dataclass(frozen=True)
class FrameFilter:
    """Which frames a run reads: heard in `span`, and of a network; None: of all."""

    span: TimeRange
    network: str | None = None

    def takes(self, frame: Frame) -> bool:
        return frame.observed_at // 1000 in self.span and self.network in (None, frame.network)


def parts_of(path: str, format_name: str, digest: bytes, network: str, heard_at: int) -> list[FilePart]:
    """A file in parts that tasks can read beside each other. OSError as from the file."""
    with Path(path).open("rb") as file:
        cut = list(FORMATS[format_name].cut(file, _PART_BYTES))
    return [FilePart(path, format_name, digest, network, heard_at, part) for part in cut]


def from_kafka(records: DataFrame, wanted: FrameFilter, where: RunTarget) -> DataFrame:
    """Columns partition, offset, stamp, value in; MIXED out. What is no Frame goes into files of `quarantine`."""
    source = records.select("partition", "offset", "stamp", "value")
    return source.mapInArrow(_from_kafka(wanted, where), MIXED)


def from_files(spark: SparkSession, parts: Sequence[FilePart], wanted: FrameFilter, where: RunTarget) -> DataFrame:
    """MIXED out. What cannot be read goes into files of `quarantine`, with file and line."""
    packed = spark.createDataFrame([(msgspec.msgpack.encode(each),) for each in parts], "part binary")
    return packed.repartition(len(parts)).mapInArrow(_from_files(wanted, where), MIXED)


def held(frames: DataFrame) -> DataFrame:
    """The run's `frames` in, MIXED out."""
    return frames.select(
        F.lit("").alias("network"),
        F.concat(F.lower(F.hex("connection")), F.col("direction")).alias("name"),
        F.lit(HELD).alias("rank"),
        F.col("sequence").alias("at"),
        F.lit(0).alias("partition"),
        F.lit(0).cast("bigint").alias("offset"),
        F.lit(0).alias("position"),
        F.lit(0).alias("note"),
        F.lit(b"").alias("data"),
    )


def written(rows: DataFrame, where: RunTarget) -> DataFrame:
    """MIXED in groups in, TALLIES out; rows of `frames` go into files."""
    return rows.mapInArrow(_written(where), TALLIES)


def _from_kafka(wanted: FrameFilter, where: RunTarget) -> Callable[[_Batches], _Batches]:
    def rows(batches: _Batches) -> _Batches:
        out, faults, frames = MergedRowBuffer(), TableFiles(where.run, "quarantine"), 0
        for batch in batches:
            for partition, offset, stamp, value in zip(*(each.to_pylist() for each in batch.columns), strict=True):
                frames += 1
                frame = read_frame(value)
                if isinstance(frame, Rejected):
                    if stamp in where.span:
                        _tell(faults, unreadable(frame, value, partition, offset, stamp))
                elif wanted.takes(frame):
                    row = _mixed(partition, offset, stamp, frame)
                    if isinstance(row, MergedRow):
                        yield from out.add(row)
                    else:
                        _tell(faults, row)
        yield from out.tell(StageOutput(faults.close(), frames=frames))

    return rows


def _from_files(wanted: FrameFilter, where: RunTarget) -> Callable[[_Batches], _Batches]:
    def rows(batches: _Batches) -> _Batches:
        out, faults, frames = MergedRowBuffer(), TableFiles(where.run, "quarantine"), 0
        for batch in batches:
            for data in batch.column(0).to_pylist():
                part = msgspec.msgpack.decode(data, type=FilePart)
                reader, path = FORMATS[part.format], Path(part.path)
                with path.open("rb") as file:
                    items = reader.read(file, FileSource(part.digest, part.network, part.heard_at), part.part)
                    for number, item in enumerate(items):
                        if isinstance(item, UnreadableItem):
                            _tell(faults, _unread(item, path.name, part.heard_at // 1000), of_frame=False)
                            continue
                        frames += 1
                        fault = frame_fault(item)
                        if fault is not None:
                            why = Rejected(fault.reason, f"{path.name}, frame {number + 1}: {fault.detail}")
                            refused = unreadable(why, item.SerializeToString(), 0, 0, part.heard_at // 1000)
                            _tell(faults, refused, of_frame=False)
                        elif wanted.takes(item):
                            offset = item.sequence if reader.of_lines else number
                            row = _mixed(part.partition, offset, item.observed_at // 1000, item)
                            if isinstance(row, MergedRow):
                                yield from out.add(row)
                            else:
                                _tell(faults, row)
        yield from out.tell(StageOutput(faults.close(), frames=frames))

    return rows


def _unread(item: UnreadableItem, name: str, at: int) -> RejectedMessage:
    detail = f"{name}, line {item.line}: {item.detail}"
    return RejectedMessage(MessageRef(0, 0, None), HISTORY, item.reason, detail, item.data, at)


def _tell(faults: TableFiles, fault: RejectedMessage, *, of_frame: bool = True) -> None:
    for record in fault_records(fault):
        row = quarantine_row(fault, record)
        faults.add(row if of_frame else (None, None, *row[2:]), len(record.data))


def _mixed(partition: int, offset: int, stamp: int, frame: Frame) -> MergedRow | RejectedMessage:
    try:
        row = frame_row(partition, offset, stamp, frame)
        name = f"{frame.connection.hex()}{DIRECTIONS[frame.direction]}"
        return MergedRow("", name, FRAME, frame.sequence, partition, offset, data=pack(row))
    except PROCESSING_ERRORS as error:  # pure: the frame alone has caused this
        return failed("archive", error, MessageRef(partition, offset, None), frame.SerializeToString(), stamp)


def _written(where: RunTarget) -> Callable[[_Batches], _Batches]:
    def rows(batches: _Batches) -> _Batches:
        inside, outside = TableFiles(where.run, "frames"), TableFiles(where.beyond, "frames")
        told: list[StageOutput] = []
        for group in read_groups(batches):
            ranges: Ranges = []
            for row in group:
                if row.rank == TALLY:
                    told.append(msgspec.msgpack.decode(row.data, type=StageOutput))
                elif row.rank == HELD:
                    insert(ranges, row.at, row.at)
                elif not contains(ranges, row.at):
                    insert(ranges, row.at, row.at)
                    frame = unpack(row.data)
                    (inside if frame[_OBSERVED_AT] in where.span else outside).add(frame, len(row.data))
        yield tallies(*told, StageOutput(inside.close(), outside.close()))

    return rows
