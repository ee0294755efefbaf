"""kiln.pipelines.runtime.checkpoint: a query's checkpoint, as Spark writes one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kiln.conf.process.location import parse_location
from kiln.pipelines.runtime.checkpoint import Checkpoint

QUERY = "0b0ccb4a-0b0c-4b0c-8b0c-0b0ccb4a0b0c"


def offsets(watermark: int, *sources: dict[str, dict[str, int]]) -> str:
    """A file of `offsets/` (OffsetSeqLog, version 1): the version, the metadata, and a line for each source."""
    metadata = {"batchWatermarkMs": watermark, "batchTimestampMs": 1_700_000_000_000, "conf": {"a": "b"}}
    lines = [json.dumps(source, separators=(",", ":")) for source in sources]
    return "\n".join(["v1", json.dumps(metadata), *lines])


@pytest.fixture
def made(tmp_path: Path) -> Checkpoint:
    (tmp_path / "offsets").mkdir()
    (tmp_path / "commits").mkdir()
    (tmp_path / "metadata").write_text(json.dumps({"id": QUERY}))
    return Checkpoint(parse_location(tmp_path))


def begin(checkpoint: Checkpoint, batch: int, text: str) -> None:
    Path(f"{checkpoint.path}/offsets/{batch}").write_text(text)
    Path(f"{checkpoint.path}/offsets/.{batch}.crc").write_bytes(b"crc")


def finish(checkpoint: Checkpoint, batch: int) -> None:
    Path(f"{checkpoint.path}/commits/{batch}").write_text('v1\n{"nextBatchWatermarkMs":0}')
    Path(f"{checkpoint.path}/commits/.{batch}.crc").write_bytes(b"crc")


def test_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    none = Checkpoint(parse_location(tmp_path / "archive"))
    assert not none.exists
    assert (none.planned, none.committed, none.watermark, none.ends(-1)) == (-1, -1, 0, {})


def test_a_query_that_has_begun_nothing(made: Checkpoint) -> None:
    assert made.exists
    assert made.query_id == QUERY
    assert (made.planned, made.committed, made.watermark, made.ends(made.planned)) == (-1, -1, 0, {})


def test_the_newest_micro_batch_is_that_of_the_greatest_number(made: Checkpoint) -> None:
    """And not of the last name: 10 comes after 9. Files of check sums, and files half written, are none."""
    for batch in (8, 9, 10):
        begin(made, batch, offsets(batch * 1000, {"kiln.frames": {"0": batch * 10, "1": 7}}))
    for batch in (8, 9):
        finish(made, batch)
    Path(f"{made.path}/offsets/.11.8f0e.tmp").write_text("half")
    assert (made.planned, made.committed) == (10, 9)
    assert made.watermark == 10_000_000  # µs
    assert made.ends(9) == {"kiln.frames": {0: 90, 1: 7}}
    assert made.ends(10) == {"kiln.frames": {0: 100, 1: 7}}


def test_the_ends_of_all_topics_of_a_source(made: Checkpoint) -> None:
    begin(made, 0, offsets(0, {"kiln.updates": {"0": 1}, "kiln.batches": {"0": 2, "11": 3}}))
    assert made.ends(0) == {"kiln.updates": {0: 1}, "kiln.batches": {0: 2, 11: 3}}


def test_what_cannot_be_read_is_an_error(made: Checkpoint) -> None:
    Path(f"{made.path}/metadata").write_text("")
    with pytest.raises(ValueError, match="Expecting value"):
        assert made.query_id
    with pytest.raises(FileNotFoundError):
        made.ends(3)


def test_how_many_records_a_micro_batch_reads(made: Checkpoint) -> None:
    """Where a partition is new, or the micro-batch is the first, nothing says where it begins."""
    begin(made, 0, offsets(0, {"kiln.frames": {"0": 5}}))
    begin(made, 1, offsets(0, {"kiln.frames": {"0": 12}}))
    begin(made, 2, offsets(0, {"kiln.frames": {"0": 12, "1": 3}}))
    begin(made, 3, offsets(0, {"kiln.frames": {"0": 13, "1": 7}}))
    assert [made.count_records(batch) for batch in range(4)] == [None, 7, None, 5]
