"""Deduplication of the frames of a micro-batch (decision 9). A frame comes twice if the bridge was killed and
restarted."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from kiln.pipelines.archive.record_decoder import DecodeResult
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.files import DataFile, rewrite_file
from kiln.pipelines.delta.frame_ranges import FrameRanges, build_range_key, contains, overlap
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.delta.stored_frame_ranges import StoredFrameRanges, read_frame_ranges
from kiln.schemas.kafka.frames import DIRECTIONS

_Files = tuple[list[DataFile], list[DataFile]]


class FrameDedup:
    """Tracks, from the first micro-batch on, which frames the lake has. Tasks write all frames into files without
    knowing the frames of earlier tasks. The rare file with a frame that the lake already has is rewritten
    afterwards."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._stored: StoredFrameRanges | None = None

    def drop_stored(self, results: Iterable[DecodeResult], write_id: WriteId) -> _Files:
        """Return the files of `frames` and of their parts, without the frames that the lake had before this
        micro-batch. `write_id` identifies the writes of the micro-batch."""
        in_order = sorted(results, key=lambda result: min(result.spans.items()))
        if self._stored is None:
            # If this micro-batch is a repeat, its own rows are in the table: a frame is no duplicate of itself. Rows at
            # the same offsets of an earlier topic of this name are not its own.
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
        """Rewrite the files of a task without the frames in `stored` and the parts of these frames."""
        repeated: set[tuple[int, int]] = set()  # partition and offset

        def select_new_frames(rows: pa.Table) -> pa.Array:
            names = ("connection", "direction", "sequence", "kafka_partition", "kafka_offset")
            keep: list[bool] = []
            for connection, direction, sequence, partition, offset in zip(
                *(rows[name].to_pylist() for name in names), strict=True
            ):
                is_stored = contains(stored.get(build_range_key(connection, DIRECTIONS.index(direction)), []), sequence)
                if is_stored:
                    repeated.add((partition, offset))
                keep.append(not is_stored)
            return pa.array(keep, pa.bool_())

        def select_new_parts(rows: pa.Table) -> pa.Array:
            positions = zip(rows["kafka_partition"].to_pylist(), rows["kafka_offset"].to_pylist(), strict=True)
            return pa.array([position not in repeated for position in positions], pa.bool_())

        frames = [new for file in result.frames for new in rewrite_file(self._lake, file, select_new_frames)]
        return frames, [new for file in result.parts for new in rewrite_file(self._lake, file, select_new_parts)]
