"""kiln.deploy.ops.snapshot_builder: what the screen counts of the topics."""

from __future__ import annotations

import pytest

from kiln.deploy.ops.snapshot_builder import OpenWindows, TopicCounts
from kiln.schemas.kafka.records import BatchRecord, Origin, SeparatorRecord, encode
from kiln.schemas.wire.cid import compute_cid
from kiln.schemas.wire.streamid import StreamID
from kit.batch_blocks import write_blocks

T = 1_000_000  # µs
AT = 1_700_000_000_000  # ms
(BLOCK,) = write_blocks({StreamID(3, compute_cid(b"stream")).text: [compute_cid(b"tip")]})


def batch(heard_at: int, origin: Origin = "LIVE") -> bytes:
    """A batch of which the first update was heard at µs, from AT on."""
    separator, heard_at = SeparatorRecord("model", "k1"), AT * 1_000 + heard_at
    return encode(BatchRecord("clay", origin, separator, BLOCK.cid, BLOCK.data, heard_at, heard_at + T))


def test_a_batch_is_late_by_how_much_later_than_t_after_hearing_the_broker_has_it() -> None:
    seen = TopicCounts()
    for stamp in (6_400, 6_100, 7_000):
        seen.add_batch(batch(5_000_000), AT + stamp)
    assert sorted(seen.late) == pytest.approx([0.1, 0.4, 1.0])
    assert (seen.percentile(0.5), seen.percentile(0.99)) == pytest.approx((0.4, 1.0))
    assert [line.late for line in seen.newest] == pytest.approx([1.0, 0.1, 0.4])


def test_a_capture_heard_years_ago_makes_no_batch_late() -> None:
    seen = TopicCounts()
    seen.add_batch(batch(5_000_000, "REPLAY"), 2 * AT)
    assert (seen.batches, seen.percentile(0.5), seen.newest[0].late) == (1, None, None)
    seen.add_batch(batch(5_000_000), AT + 6_200)
    assert (seen.batches, len(seen.newest)) == (2, 2)
    assert seen.percentile(0.99) == pytest.approx(0.2)


def test_a_window_is_open_until_the_clock_of_the_log_ends_it() -> None:
    windows = OpenWindows(1.5)
    windows.add_update(0, b"clay/model/k1", 1_000)
    windows.add_update(0, b"clay/model/k2", 2_000)
    windows.add_update(0, b"clay/model/k1", 2_400)  # joins the first
    windows.add_update(1, b"clay/model/k3", 1_000)
    windows.add_update(0, b"kstream", 2_400)  # no separator, no window
    assert len(windows) == 3
    windows.add_update(0, None, 2_500)
    assert len(windows) == 2
    windows.add_update(0, None, 3_500)
    assert len(windows) == 1  # of the other partition, whose clock is its own
