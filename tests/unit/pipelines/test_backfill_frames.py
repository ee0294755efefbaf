"""kiln.pipelines.backfill.frames: records of `kiln.frames` and parts of files to the run's table `frames`, without
Spark."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kiln.pipelines.backfill.copies import RunTarget
from kiln.pipelines.backfill.frames import (
    RUN_FRAME,
    FrameFilter,
    _read_file_partition,
    _read_records,
    _write_partition,
)
from kiln.pipelines.backfill.merged_rows import MergedRow, MergedRowBuffer
from kiln.pipelines.backfill.sources import CaptureFile, FilePart, split_captures
from kiln.pipelines.backfill.terms import TimeRange
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.kafka_ranges import RECORDS, LostRecordsError
from kiln.schemas.captures.kiln_capture import CaptureRecord, write_capture
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.times import MIN_MICROS

SECOND = 1_000_000
BEGIN = 1_700_000_000
"""s"""
WHOLE = FrameFilter(TimeRange(BEGIN * SECOND, (BEGIN + 100) * SECOND))


@pytest.fixture
def where(tmp_path: Path) -> RunTarget:
    """A run of the 10th to the 20th second after `BEGIN`."""
    run = Lake(str(tmp_path / "run"))
    beyond = Lake(f"{run.path}/beyond")
    run.create(("frames", "quarantine"))
    beyond.create(("frames",))
    return RunTarget(run, beyond, TimeRange((BEGIN + 10) * SECOND, (BEGIN + 20) * SECOND))


def frame(sequence: int, at: int, network: str = "n") -> bytes:
    """Heard at a second after `BEGIN`."""
    made = Frame(
        network=network,
        connection=b"c" * 16,
        observed_at=(BEGIN + at) * 1_000_000_000,
        sequence=sequence,
        protocol="/meshsub",
    )
    return made.SerializeToString()


def part_of(file: Path, modified_at: int) -> FilePart:
    """The capture file as a run reads it; ns."""
    os.utime(file, ns=(modified_at, modified_at))
    (part,) = split_captures([CaptureFile(str(file), "kiln-capture")], "n")
    return part


def records(*values: bytes, stamp: int = (BEGIN + 12) * SECOND) -> Iterator[pa.RecordBatch]:
    rows = [
        {"topic": "frames", "partition": 1, "offset": offset, "stamp": stamp, "value": value}
        for offset, value in enumerate(values)
    ]
    yield pa.RecordBatch.from_pylist(rows, schema=RECORDS)


def settle(batches: Iterator[pa.RecordBatch], where: RunTarget, held: tuple[int, ...] = ()) -> None:
    """As the shuffle would bring the rows to one task."""
    rows = [MergedRow._make(row.values()) for batch in batches for row in batch.to_pylist()]
    side = next(row.name for row in rows if row.name)
    out = MergedRowBuffer()
    ordered = sorted([*rows, *(MergedRow("", side, RUN_FRAME, sequence) for sequence in held)])
    made = [batch for row in ordered for batch in out.add(row)]
    list(_write_partition(where)(iter([*made, *out.drain()])))


def written(lake: Lake, table: str, *columns: str) -> list[tuple[object, ...]]:
    found = [row for path in Path(lake.table(table)).glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    return sorted(tuple(row[name] for name in columns) for row in found)


def test_each_frame_of_the_range_is_there_once_as_it_first_stood_in_the_log(where: RunTarget) -> None:
    values = (frame(1, 9), frame(2, 12), frame(3, 13), frame(2, 12), frame(4, 20), frame(5, 200), b"no frame")
    settle(_read_records(records(*values), WHOLE, where), where)
    place = ("sequence", "kafka_partition", "kafka_offset")
    assert written(where.run, "frames", *place) == [(2, 1, 1), (3, 1, 2)]
    assert written(where.beyond, "frames", *place) == [(1, 1, 0), (4, 1, 4)], "what is far from the range is left out"
    fault = ("kafka_partition", "kafka_offset", "stage", "reason", "data")
    assert written(where.run, "quarantine", *fault) == [(1, 6, "frame", "frame_malformed", b"no frame")]


def test_what_an_earlier_chunk_had_is_not_written_again(where: RunTarget) -> None:
    settle(_read_records(records(frame(7, 12), frame(8, 12), frame(9, 12)), WHOLE, where), where, held=(6, 7, 8))
    assert written(where.run, "frames", "sequence") == [(9,)]


def test_frames_of_other_networks_are_left_out_where_one_is_asked_for(where: RunTarget) -> None:
    wanted = FrameFilter(WHOLE.span, "n")
    settle(_read_records(records(frame(1, 12), frame(2, 12, "other")), wanted, where), where)
    assert written(where.run, "frames", "sequence", "network") == [(1, "n")]


def test_a_run_fails_where_kafka_cannot_decode_a_record_that_live_may_have_read(where: RunTarget) -> None:
    damaged = records(b"no record can be decoded here: Bad message", stamp=MIN_MICROS)
    with pytest.raises(LostRecordsError, match=r"cannot read offset 0 of kiln\.frames-1: no record can be decoded"):
        list(_read_records(damaged, WHOLE, where))


def test_a_capture_file_gives_frames_with_a_place_of_their_own_and_its_damage_goes_to_quarantine(
    where: RunTarget, tmp_path: Path
) -> None:
    file = tmp_path / "some.rpc"
    rpc = RPC(subscriptions=[RPC.SubOpts(subscribe=True, topicid="/ceramic/n")]).SerializeToString()
    with file.open("wb") as out:
        write_capture(out, [CaptureRecord("R", (BEGIN + 12) * 1_000_000_000, b"us", b"them", "/meshsub/1.2.0", rpc)])
        out.write(b"\x00\x00\x00\x09cut")
    part = part_of(file, (BEGIN + 12) * 1_000_000_000)
    given = pa.RecordBatch.from_pydict({"part": [msgspec.msgpack.encode([part])]})
    settle(_read_file_partition(WHOLE, where)(iter([given])), where)
    rows = written(where.run, "frames", "sequence", "kafka_partition", "kafka_offset", "payload", "origin")
    assert rows[0] == (1, part.partition, 0, rpc, "REPLAY")
    assert part.partition < 0
    ((stage, detail, place),) = written(where.run, "quarantine", "stage", "detail", "kafka_offset")
    assert (stage, place) == ("history", None)
    assert str(detail).startswith("some.rpc, line 2: ")


def test_a_frame_beyond_the_bounds_goes_to_quarantine_with_its_bytes_and_the_rest_is_read(
    where: RunTarget, tmp_path: Path
) -> None:
    file = tmp_path / "giant.rpc"
    rpc = RPC(subscriptions=[RPC.SubOpts(subscribe=True, topicid="/ceramic/n")]).SerializeToString()
    giant = b"\xff" * 65_535
    with file.open("wb") as out:
        peers = (b"them", giant, b"others")
        write_capture(
            out,
            [CaptureRecord("R", (BEGIN + 12) * 1_000_000_000, b"us", peer, "/meshsub/1.2.0", rpc) for peer in peers],
        )
    part = part_of(file, (BEGIN + 12) * 1_000_000_000)
    given = pa.RecordBatch.from_pydict({"part": [msgspec.msgpack.encode([part])]})
    rows = [row for batch in _read_file_partition(WHOLE, where)(iter([given])) for row in batch.to_pylist()]
    assert len({row["name"] for row in rows if row["name"]}) == 2, "two connections are read"
    refused = written(where.run, "quarantine", "stage", "reason", "data", "detail")
    assert [each[:2] for each in refused] == [("frame", "frame_invalid")] * 2, "the frame, and the closing one"
    assert all(Frame.FromString(data).remote_peer == giant for _, _, data, _ in refused if isinstance(data, bytes))
    assert all("giant.rpc, frame" in str(detail) and "remote_peer" in str(detail) for *_, detail in refused)


@pytest.mark.parametrize(
    "seconds", [0, 946_684_799, 4_102_444_800, 9_000_000_000], ids=["1970", "1999", "2100", "2255"]
)
def test_frames_of_a_capture_from_another_time_go_to_quarantine(where: RunTarget, tmp_path: Path, seconds: int) -> None:
    file = tmp_path / "old.rpc"
    rpc = RPC(subscriptions=[RPC.SubOpts(subscribe=True, topicid="/ceramic/n")]).SerializeToString()
    with file.open("wb") as out:
        write_capture(out, [CaptureRecord("R", seconds * 1_000_000_000, b"us", b"them", "/meshsub/1.2.0", rpc)])
    part = part_of(file, (BEGIN + 12) * 1_000_000_000)
    given = pa.RecordBatch.from_pydict({"part": [msgspec.msgpack.encode([part])]})
    rows = [row for batch in _read_file_partition(WHOLE, where)(iter([given])) for row in batch.to_pylist()]
    assert not [row["name"] for row in rows if row["name"]], "no frame is read"
    refused = written(where.run, "quarantine", "stage", "reason", "detail", "observed_at")
    assert {each[:2] for each in refused} == {("frame", "frame_invalid")}
    assert all("not in the years 2000 to 2099" in str(detail) for _, _, detail, _ in refused)
    assert {at.timestamp() for *_, at in refused if isinstance(at, datetime)} == {BEGIN + 12}
