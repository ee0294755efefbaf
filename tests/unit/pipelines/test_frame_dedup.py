"""Frames that come again in a later micro-batch: each is in `frames` once, and its copies with it (decision 9)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from kiln.pipelines.archive.query import FrameDedup
from kiln.pipelines.archive.record_decoder import DECODE_RESULT, DecodeResult, decode_records
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import delete_files
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame

TABLES = ("frames", "copies", "subscriptions", "controls")


def frame(sequence: int, connection: bytes = b"c" * 16) -> bytes:
    """A frame with two messages, two subscriptions and two control entries."""
    messages = [Message(data=b"%d/%d" % (sequence, number), topic="/ceramic/mainnet") for number in range(2)]
    made = Frame(network="mainnet", connection=connection, remote_peer=b"peer", protocol="/meshsub/1.2.0")
    made.sequence, made.observed_at = sequence, 1_700_000_000_000_000_000
    rpc = RPC(publish=messages, subscriptions=[RPC.SubOpts(subscribe=True, topicid="t")] * 2)
    rpc.control.graft.add(topicID="t")
    rpc.control.prune.add(topicID="t")
    made.payload = rpc.SerializeToString()
    return made.SerializeToString()


Task = tuple[int, int, Sequence[bytes]]
"""What a task reads: a partition, the first offset, the records."""


class Driver:
    """A driver that has just started."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._new = FrameDedup(lake)
        self._commits = DeltaRsCommits(lake)

    def micro_batch(self, batch: int, *tasks: Task, tables: Sequence[str] = TABLES) -> None:
        """As `kiln.pipelines.archive.query` does. `tables`: those to which it commits before it crashes."""
        passed = [self._passed(task) for task in tasks]
        write = WriteId("query", batch)
        frames, parts = self._new.drop_stored(reversed(passed), write)
        for table in TABLES:
            files = [file for file in (*frames, *parts) if file.table == table]
            if files and (table not in tables or not self._commits.commit(table, files, write)):
                delete_files(self._lake, files)

    def _passed(self, task: Task) -> DecodeResult:
        partition, first, values = task
        columns = {
            "partition": pa.array([partition] * len(values), pa.int32()),
            "offset": pa.array(range(first, first + len(values)), pa.int64()),
            "stamp": pa.array([0] * len(values), pa.int64()),
            "value": pa.array(values, pa.binary()),
        }
        digest = b"%d/%d" % (partition, first)
        made = decode_records(iter([pa.RecordBatch.from_pydict(columns)]), DecodeConfig("none"), self._lake, digest)
        (result,) = (item.row for chunk in made for item in chunk.items if item.kind == DECODE_RESULT)
        assert isinstance(result, DecodeResult)
        return result


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(str(tmp_path / "lake"))
    lake.create(TABLES)
    return lake


def held(lake: Lake) -> list[tuple[int, int]]:
    """Sequence and offset of each row of `frames`. The rows of its parts are just those of these frames, and no file
    is there that no commit names."""
    frames = lake.open("frames").to_pyarrow_table()
    places = zip(*(frames[name].to_pylist() for name in ("kafka_partition", "kafka_offset")), strict=True)
    expected = sorted((*place, index) for place in places for index in (0, 1))
    for table in TABLES[1:]:
        parts = lake.open(table).to_pyarrow_table()
        names = ("kafka_partition", "kafka_offset", "message_index" if table == "copies" else "entry_index")
        assert sorted(zip(*(parts[name].to_pylist() for name in names), strict=True)) == expected
    for table in TABLES:
        there = {path.name for path in Path(lake.table(table)).glob("*.parquet")}
        assert there == {Path(uri).name for uri in lake.open(table).file_uris()}
    return sorted(zip(frames["sequence"].to_pylist(), frames["kafka_offset"].to_pylist(), strict=True))


ONE, TWO, THREE, FOUR, FIVE, SIX = (frame(sequence) for sequence in range(1, 7))


@pytest.mark.parametrize("restarted", [False, True], ids=["one driver", "started again"])
def test_frames_that_come_again_are_there_once(lake: Lake, restarted: bool) -> None:
    driver = Driver(lake)
    driver.micro_batch(0, (0, 10, [ONE, TWO, THREE]))
    if restarted:
        driver = Driver(lake)
    driver.micro_batch(1, (0, 13, [TWO, THREE, FOUR]))
    driver.micro_batch(2, (0, 16, [FOUR, ONE]))
    driver.micro_batch(3, (0, 18, [FIVE]))
    assert held(lake) == [(1, 10), (2, 11), (3, 12), (4, 15), (5, 18)]


def test_a_repeated_micro_batch_takes_its_own_ranges_into_account(lake: Lake) -> None:
    """The driver crashed after the commits. Its frames are in the table, and are no repeats of themselves; what comes
    after them is."""
    driver = Driver(lake)
    driver.micro_batch(0, (0, 10, [ONE, TWO]))
    driver.micro_batch(1, (0, 12, [TWO, THREE]))
    again = Driver(lake)
    again.micro_batch(1, (0, 12, [TWO, THREE]))
    again.micro_batch(2, (0, 14, [THREE, TWO, FOUR]))
    assert held(lake) == [(1, 10), (2, 11), (3, 13), (4, 16)]


@pytest.mark.parametrize("before", [(), ("frames",)], ids=["before both commits", "between the commits"])
def test_after_a_crash_a_micro_batch_is_whole(lake: Lake, before: tuple[str, ...]) -> None:
    driver = Driver(lake)
    driver.micro_batch(0, (0, 10, [ONE, TWO]))
    driver.micro_batch(1, (0, 12, [TWO, THREE]), (1, 50, [FIVE]), tables=before)
    again = Driver(lake)
    again.micro_batch(1, (0, 12, [TWO, THREE]), (1, 50, [FIVE]))
    again.micro_batch(2, (0, 14, [THREE, FIVE, FOUR]))
    assert held(lake) == [(1, 10), (2, 11), (3, 13), (4, 16), (5, 50)]


def test_of_two_tasks_the_one_with_the_earlier_records_has_the_frame(lake: Lake) -> None:
    """So that a repeat, whose tasks report in another order, finds the same."""
    Driver(lake).micro_batch(0, (0, 10, [ONE, TWO]), (0, 12, [TWO, THREE]))
    assert held(lake) == [(1, 10), (2, 11), (3, 13)]


def test_frames_that_were_missing_are_no_repeats(lake: Lake) -> None:
    """Neither between frames that the table holds, nor of another connection."""
    Driver(lake).micro_batch(0, (0, 10, [ONE, THREE, FOUR, SIX]))
    other = frame(3, b"o" * 16)
    Driver(lake).micro_batch(1, (0, 14, [TWO, FIVE, THREE, other, SIX]))
    assert held(lake) == [(1, 10), (2, 14), (3, 11), (3, 17), (4, 12), (5, 15), (6, 13)]


def test_frames_that_come_again_at_the_offsets_of_an_earlier_topic_are_repeats(lake: Lake) -> None:
    """`kiln.frames` was deleted and created again. The records of a micro-batch are at offsets at which the records of
    the earlier topic were, and are not those."""
    Driver(lake).micro_batch(0, (0, 10, [ONE, TWO, THREE]))
    Driver(lake).micro_batch(1, (0, 10, [TWO, FOUR, ONE]))
    assert held(lake) == [(1, 10), (2, 11), (3, 12), (4, 11)]
