"""kiln.schemas.kafka.topics: the limits hold where they count."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiln.conf.process.errors import SettingsError
from kiln.conf.settings.reading import load_settings
from kiln.pipelines.batch.windows import PartitionWindows
from kiln.schemas.kafka.records import MAX_QUARANTINED, QuarantineRecord, encode
from kiln.schemas.kafka.topics import (
    MAX_EPOCH_WRITERS,
    MAX_NETWORKS,
    MAX_OTHER_PARTITIONS,
    MAX_RECORD,
    TOPICS,
    count_unread,
)


@pytest.mark.parametrize("restarted", [False, True])
def test_with_as_many_writers_as_there_can_be_each_one_s_repeat_is_known(restarted: bool) -> None:
    """The query `updates` of each network, and its bridge with an epoch for each partition of `wanted`."""
    networks = [f"network-{number}" for number in range(MAX_NETWORKS)]
    writers = [
        *(f"query of {network}" for network in networks),
        *(f"genesis/{network}/{part}" for network in networks for part in range(MAX_OTHER_PARTITIONS)),
    ]
    assert len(writers) == MAX_EPOCH_WRITERS
    windows = PartitionWindows(1_000_000)
    assert [writer for writer in writers if windows.guard.is_duplicate(writer, 1, "message")] == []
    if restarted:
        windows = PartitionWindows(1_000_000, windows.dump())
    assert [writer for writer in writers if not windows.guard.is_duplicate(writer, 1, "message")] == []


def test_one_partition_too_many_is_refused_by_name_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'[network]\nname = "n"\n[kafka]\nother_partitions = {MAX_OTHER_PARTITIONS}\n', encoding="utf-8")
    assert load_settings(file).kafka.other_partitions == MAX_OTHER_PARTITIONS
    file.write_text(
        f'[network]\nname = "n"\n[kafka]\nother_partitions = {MAX_OTHER_PARTITIONS + 1}\n', encoding="utf-8"
    )
    expected = f"kafka.other_partitions = {MAX_OTHER_PARTITIONS + 1}: expected less than or equal to"
    with pytest.raises(SettingsError) as caught:
        load_settings(file)
    assert str(caught.value) == f"{file}:4: {expected} {MAX_OTHER_PARTITIONS}"
    monkeypatch.setenv("KILN_KAFKA__OTHER_PARTITIONS", str(MAX_OTHER_PARTITIONS + 1))
    with pytest.raises(SettingsError, match=r"^environment KILN_KAFKA__OTHER_PARTITIONS: kafka\.other_partitions"):
        load_settings()


def test_the_topics_by_stream_are_kept_for_ever_and_only_windows_bind_a_topic_for_life() -> None:
    assert {topic.name for topic in TOPICS.values() if topic.compacted} == {"streams"}
    assert {topic.name for topic in TOPICS.values() if topic.for_life} == {"updates"}


def test_the_largest_part_of_what_is_quarantined_fits_a_record() -> None:
    record = QuarantineRecord("message", "not_json", "x" * 1_000, b"\xff" * MAX_QUARANTINED, 2**63 - 1)
    assert len(encode(record)) < MAX_RECORD


def test_lag_counts_what_is_there_and_not_read() -> None:
    ends = {"kiln.frames": {0: 110, 1: 60, 2: 9}, "kiln.blocks": {0: 5}}
    assert count_unread({}, ends) == 110 + 60 + 9 + 5
    assert count_unread({"kiln.frames": {0: 100, 1: 60}}, ends) == 10 + 9 + 5
    assert count_unread(ends, ends) == 0
    # partition 1 was read up to 20, and the broker removed what is before 50
    assert count_unread({"kiln.frames": {0: 100, 1: 20}}, ends, {"kiln.frames": {0: 0, 1: 50, 2: 3}}) == 10 + 10 + 6 + 5


def test_what_was_read_beyond_the_ends_that_were_asked_for_is_no_lag() -> None:
    assert count_unread({"kiln.frames": {0: 120}, "kiln.other": {0: 7}}, {"kiln.frames": {0: 110}}) == 0
