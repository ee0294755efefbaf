"""kiln.pipelines.backfill.updates: candidates of a stream, its verified separator and known updates into rows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from kiln.pipelines.archive.rows import MessageRow
from kiln.pipelines.backfill.copies import RunTarget
from kiln.pipelines.backfill.merged_rows import MergedRow, MergedRowBuffer, StageOutput
from kiln.pipelines.backfill.messages import CANDIDATE, LiveUpdate, UpdateMessage
from kiln.pipelines.backfill.terms import TimeRange
from kiln.pipelines.backfill.updates import ANNOUNCEMENT, KNOWN_STREAM, LIVE_UPDATE, RUN_UPDATE, _write_partition
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.row_packing import pack
from kiln.pipelines.updates.separators import SeparatorConfig
from kiln.schemas.wire.topics import Separator

DAY = 86_400_000_000
STREAM, TIP = "kjzl6stream", "bagtip"
KEY = "a\nkey"
"""A separator key may have line breaks."""


def candidate(number: int, at: int, *, tip: str = TIP, model: str | None = None, live: bool = False) -> MergedRow:
    row = MessageRow(
        message_id=f"id{number}",
        network="n",
        origin="LIVE",
        topic="/ceramic/n",
        topic_source="name",
        type="UPDATE",
        from_peer="author",
        seqno=b"s",
        stream=STREAM,
        tip=tip,
        model=model,
        sep=None,
        batch_cid=None,
        query_id=None,
        tips=None,
        ts=None,
        ver=None,
        ipfs_ver=None,
        data=b"data",
        verdict="valid",
        remote_peer="peer",
        observed_at=at,
        kafka_partition=0,
        kafka_offset=number,
        message_index=0,
    )
    message = UpdateMessage(row, True, True, LiveUpdate(at, at, 2, 7) if live else None)
    return MergedRow("n", STREAM, CANDIDATE, at, 0, number, data=pack(message))


def mark(rank: int, at: int, *lines: str) -> MergedRow:
    return MergedRow("n", STREAM, rank, at, data="\n".join(lines).encode())


@pytest.fixture
def target(tmp_path: Path) -> RunTarget:
    run, beyond = Lake(str(tmp_path / "run")), Lake(str(tmp_path / "beyond"))
    run.create(("updates", "tips", "quarantine"))
    beyond.create(("updates",))
    return RunTarget(run, beyond, TimeRange(10, DAY * 2))


def write(target: RunTarget, config: SeparatorConfig, *rows: MergedRow) -> dict[str, list[dict[str, object]]]:
    """Rows by table; those outside the range under `beyond`."""
    buffer = MergedRowBuffer()
    batches = [batch for row in rows for batch in buffer.add(row)]
    batches += buffer.finish(StageOutput([], frames=3))
    outputs = [
        msgspec.msgpack.decode(data, type=StageOutput)
        for batch in _write_partition(config, DAY, target)(iter(batches))
        for data in batch.column(0).to_pylist()
    ]
    assert sum(output.frames for output in outputs) == 3, "outputs of earlier stages pass through"
    found: dict[str, list[dict[str, object]]] = {"updates": [], "tips": [], "quarantine": [], "beyond": []}
    for output in outputs:
        for lake, files in ((target.run, output.files), (target.beyond, output.beyond)):
            for file in files:
                table = file.table if lake is target.run else "beyond"
                found[table] += pq.read_table(f"{lake.path}/{file.table}/{file.name}").to_pylist()
    return found


def test_a_verified_separator_goes_before_a_claim_which_it_contradicts(target: RunTarget) -> None:
    known = mark(KNOWN_STREAM, 0, "model", "kverified")
    found = write(target, SeparatorConfig(), known, candidate(1, 20, model="kclaimed"))
    (row,) = found["updates"]
    assert (row["separator_key"], row["separator_value"], row["separator_source"]) == ("model", "kverified", "genesis")
    (fault,) = found["quarantine"]
    assert (fault["stage"], fault["kafka_offset"]) == ("separator", 1)
    assert [tip["tip"] for tip in found["tips"]] == [TIP]


def test_a_genesis_without_a_separator_goes_before_a_claim(target: RunTarget) -> None:
    (row,) = write(target, SeparatorConfig(), mark(KNOWN_STREAM, 0), candidate(1, 20, model="k"))["updates"]
    assert (row["separator_key"], row["separator_source"]) == (None, "genesis")


@pytest.mark.parametrize("rank", [RUN_UPDATE, LIVE_UPDATE])
def test_a_known_update_counts_under_the_verified_separator(target: RunTarget, rank: int) -> None:
    earlier = mark(rank, 15, "LIVE", TIP, "model", "kclaimed")
    assert (
        write(target, SeparatorConfig(), mark(KNOWN_STREAM, 0, KEY, "kv"), earlier, candidate(1, 20))["updates"] == []
    )
    assert write(target, SeparatorConfig(), earlier, candidate(1, 20, model="kother"))["updates"] != []


def test_a_key_with_line_breaks_is_one_key(target: RunTarget) -> None:
    rows = mark(KNOWN_STREAM, 0, KEY, "kv"), mark(RUN_UPDATE, 5, "LIVE", TIP, KEY, "kv"), candidate(1, 20, tip="other")
    (row,) = write(target, SeparatorConfig(), *rows)["updates"]
    assert Separator(str(row["separator_key"]), str(row["separator_value"])) == Separator(KEY, "kv")


def test_an_update_that_waits_for_its_genesis_is_left_out_unless_live_has_it(target: RunTarget) -> None:
    fetching = SeparatorConfig(fetch=True, believe=False)
    assert write(target, fetching, candidate(1, 20, model="k"))["updates"] == []
    (row,) = write(target, fetching, candidate(1, 20, model="k", live=True))["updates"]
    assert (row["log_partition"], row["log_offset"]) == (2, 7)


def test_a_tip_that_its_author_has_left_is_new_again(target: RunTarget) -> None:
    rows = mark(RUN_UPDATE, 11, "LIVE", TIP), mark(ANNOUNCEMENT, 12, "LIVE", "other", "author"), candidate(1, 20)
    assert [row["message_id"] for row in write(target, SeparatorConfig(), *rows)["updates"]] == ["id1"]
    assert write(target, SeparatorConfig(), rows[0], rows[2])["updates"] == []


def test_updates_before_the_range_are_beyond_it(target: RunTarget) -> None:
    found = write(target, SeparatorConfig(), candidate(1, 5))
    assert (len(found["beyond"]), found["updates"], found["tips"]) == (1, [], [])
