"""Records that Kafka had deleted before a query first ran are reported."""

from __future__ import annotations

from pathlib import Path

from kiln.conf.process.location import parse_location
from kiln.deploy.ops.doctor_checks import check_first_offsets
from kiln.pipelines.runtime.checkpoint import (
    FIRST_OFFSETS_FILE,
    REPLACED_EPOCH_FILE,
    Checkpoint,
    describe_deleted_records,
    format_first_offsets,
)


def test_a_topic_that_began_above_zero_is_reported(tmp_path: Path) -> None:
    checkpoint = Checkpoint(parse_location(tmp_path / "archive"))
    assert checkpoint.deleted_records == {}
    first = tmp_path / "archive" / FIRST_OFFSETS_FILE
    first.parent.mkdir(parents=True)
    first.write_text(format_first_offsets({"kiln.frames": {0: 1_900, 1: 75}, "kiln.blocks": {0: 0}}))
    assert checkpoint.deleted_records == {"kiln.frames": 1_975}
    words = describe_deleted_records("archive", checkpoint.deleted_records)
    assert words == (
        "Kafka had deleted the first 1,975 records of kiln.frames before the query archive first ran, so the tables "
        "lack these records"
    )
    row = check_first_offsets({"archive": words})
    assert (row.level, row.found) == ("warn", words)
    assert "kafka.retention" in row.what_to_do
    (tmp_path / "archive" / REPLACED_EPOCH_FILE).write_text('{"query": "q", "batch": 1}')
    assert checkpoint.deleted_records == {}, "kiln recover chose these offsets"
    assert describe_deleted_records("archive", {}) == ""
    assert check_first_offsets({}).level == "ok"
