"""Which frames of a micro-batch are new (decision 9). A frame comes twice where the bridge was killed and began
again."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from kiln.pipelines.archive.transform import DecodeResult
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.files import DataFile, rewrite_file
from kiln.pipelines.delta.frame_ranges import FrameRanges, build_range_key, contains, overlap
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.delta.stored_frame_ranges import StoredFrameRanges, read_frame_ranges
from kiln.schemas.kafka.frames import DIRECTIONS

_Files = tuple[list[DataFile], list[DataFile]]


class FrameDedup:
    """Knows, from the first micro-batch on, which frames the lake holds. Tasks write all frames into files, and the
    rare file with a frame that the lake holds is written anew: no task needs to know what all tasks wrote before."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._held: StoredFrameRanges | None = None

    def drop_stored(self, passed: Iterable[DecodeResult], write: WriteId) -> _Files:
        """The files of `frames` and of `copies`, without what the lake held before this micro-batch. `write`: that of
        the micro-batch."""
        in_order = sorted(passed, key=lambda each: min(each.spans.items()))
        if self._held is None:
            # If this micro-batch is a repeat, its own rows are in the table: no frame was there before itself. Rows at
            # the same offsets of an earlier topic of the name are not its own.
            own = [(part, low, high) for each in in_order for part, (low, high) in each.spans.items()]
            newest = self._lake.open("frames").transaction_version(write.app_id("frames"))
            is_repeat = newest is not None and newest >= write.batch_id
            self._held = read_frame_ranges(self._lake, own if is_repeat else ())
        frames: list[DataFile] = []
        copies: list[DataFile] = []
        for each in in_order:
            near = self._held.find_near(each.taken)
            new = self._rewrite_without(each, near) if overlap(near, each.taken) else (each.frames, each.copies)
            frames += new[0]
            copies += new[1]
            self._held.add(each.taken)
        return frames, copies

    def _rewrite_without(self, passed: DecodeResult, held: FrameRanges) -> _Files:
        """The files of a task, written anew without the frames in `held` and the copies in these frames."""
        repeated: set[tuple[int, int]] = set()  # partition and offset

        def new_frames(rows: pa.Table) -> pa.Array:
            names = ("connection", "direction", "sequence", "kafka_partition", "kafka_offset")
            keep: list[bool] = []
            for connection, direction, sequence, partition, offset in zip(
                *(rows[name].to_pylist() for name in names), strict=True
            ):
                is_held = contains(held.get(build_range_key(connection, DIRECTIONS.index(direction)), []), sequence)
                if is_held:
                    repeated.add((partition, offset))
                keep.append(not is_held)
            return pa.array(keep, pa.bool_())

        def new_copies(rows: pa.Table) -> pa.Array:
            places = zip(rows["kafka_partition"].to_pylist(), rows["kafka_offset"].to_pylist(), strict=True)
            return pa.array([place not in repeated for place in places], pa.bool_())

        frames = [new for file in passed.frames for new in rewrite_file(self._lake, file, new_frames)]
        return frames, [new for file in passed.copies for new in rewrite_file(self._lake, file, new_copies)]
