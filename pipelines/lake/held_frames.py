"""What the table `frames` holds, read by delta-rs: Spark would load all of Delta's classes for it, at each start."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.lake.lake import Lake
from pipelines.logic.held_frames import HeldFrames, Ranges, insert, merge, side
from schemas.frames import DIRECTIONS

Span = tuple[int, int, int]
"""Kafka partition, first and last offset."""

_SIDE = ["connection", "direction"]


def read_held_frames(lake: Lake, but: Iterable[Span] = ()) -> HeldFrames:
    """The frames in the table, as ranges; without those that came from the records in `but`.

    LakeError: the table cannot be read.
    """
    wanted = pc.scalar(True)
    for partition, low, high in but:
        offset = pc.field("kafka_offset")
        wanted = wanted & ~((pc.field("kafka_partition") == partition) & (offset >= low) & (offset <= high))
    held: HeldFrames = {}
    rows = lake.open("frames").to_pyarrow_dataset().to_batches(columns=[*_SIDE, "sequence"], filter=wanted)
    for batch in rows:
        if batch.num_rows:
            merge(held, _ranges(pa.Table.from_batches([batch])))
    return held


def _ranges(rows: pa.Table) -> HeldFrames:
    found: HeldFrames = {}
    sides = rows.group_by(_SIDE).aggregate(
        [("sequence", "min"), ("sequence", "max"), ("sequence", "count_distinct"), ("sequence", "list")]
    )
    names = (*_SIDE, "sequence_min", "sequence_max", "sequence_count_distinct")
    for place, (connection, direction, low, high, frames) in enumerate(
        zip(*(sides[name].to_pylist() for name in names), strict=True)
    ):
        ranges: Ranges = [(low, high)]
        if frames != high - low + 1:
            ranges = []
            for sequence in sorted(sides["sequence_list"][place].as_py()):
                insert(ranges, sequence, sequence)
        found[side(connection, DIRECTIONS.index(direction))] = ranges
    return found
