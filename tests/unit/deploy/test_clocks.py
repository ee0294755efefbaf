"""kiln.deploy.ops.status: a clock that trails what Kiln has kept is told with since when and what to do."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from kiln.conf.settings.model import Settings
from kiln.deploy.cli.status import encode_status, render_status
from kiln.deploy.ops.doctor_checks import check_clocks
from kiln.deploy.ops.status import BrokerStatus, KilnStatus, compare_clocks, find_trailing_clocks
from kiln.pipelines.runtime.dedup_store import FILE_NAME, DedupStore, DedupStoreConfig
from kiln.schemas.kafka.records import Epoch

NOW = 1_800_000_000_000_000
"""2027-01-15 08:00:00 UTC"""
MINUTE = 60_000_000


def begin(settings: Settings, query: str, batch: int, at: int, watermark: int = 0) -> None:
    folder = settings.state / "checkpoints" / query / "offsets"
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"batchWatermarkMs": watermark // 1000, "batchTimestampMs": at // 1000}
    (folder / str(batch)).write_text(f"v1\n{json.dumps(metadata)}\n{{}}")


def test_where_all_is_well_nothing_is_told(tmp_path: Path) -> None:
    settings = Settings(state=tmp_path)
    assert find_trailing_clocks(settings, ()) == ()
    begin(settings, "archive", 0, NOW, watermark=NOW)
    assert compare_clocks(settings, NOW, {"archive": NOW + 500_000}, "kiln.updates", NOW) == ()
    assert check_clocks(()).level == "ok"


def test_since_when_the_stamps_trail_the_log_its_query_s_checkpoint_says(tmp_path: Path) -> None:
    settings = Settings(state=tmp_path)
    ahead = NOW + 30 * MINUTE
    for batch, at in enumerate((ahead - MINUTE, ahead, NOW - 2 * MINUTE, NOW - MINUTE)):
        begin(settings, "batch", batch, at)
    (found,) = compare_clocks(settings, NOW, {}, "kiln.updates", ahead)
    assert (found.name, found.behind) == ("log", 1_800)
    assert found.since == datetime(2027, 1, 15, 7, 58, tzinfo=UTC)
    assert found.until == datetime(2027, 1, 15, 8, 30, tzinfo=UTC)
    assert found.problem == (
        "the broker's clock is 1,800 s behind the newest timestamp in kiln.updates, since 2027-01-15 07:58:00 UTC: "
        "the clock was ahead when that timestamp was written. Until the clock reaches 2027-01-15 08:30:00 UTC, windows "
        "stay open and batches are late. Nothing is lost. If the broker's clock is wrong now, correct it; else wait"
    )
    assert (check_clocks([found]).level, check_clocks([found]).found) == ("warn", found.problem)


@pytest.mark.parametrize("by_file", [False, True])
def test_status_tells_of_a_watermark_ahead_of_the_clock(by_file: bool, tmp_path: Path) -> None:
    """Spark's, or the time that is in the file of what the query has let through."""
    settings = Settings(state=tmp_path)
    now = datetime.now(UTC)
    put_right = int(now.timestamp()) * 1_000_000
    ahead = put_right + 2 * 86_400_000_000
    remembered = int(settings.dedupe.signed_ttl / timedelta(microseconds=1))
    begin(settings, "sink", 0, ahead)
    begin(settings, "sink", 1, put_right, 0 if by_file else ahead - remembered)
    if by_file:
        path = settings.state / "checkpoints" / "sink" / FILE_NAME
        with DedupStore(DedupStoreConfig(str(path), remembered)) as file:
            file.mark(Epoch("sink", 0), ahead)
    found = find_trailing_clocks(settings, ())
    assert [(each.name, each.since) for each in found] == [("watermark", now.replace(microsecond=0))]
    status = KilnStatus("state", BrokerStatus("a:1", False, "away", ()), (), (), clocks=found)
    (told,) = json.loads(encode_status(status))["clocks"]
    assert told["problem"].startswith("the clock of this machine is 172,")
    console = Console(file=StringIO(), width=400)
    console.print(render_status(status, now))
    assert isinstance(console.file, StringIO)
    assert told["problem"] in console.file.getvalue()


def test_a_checkpoint_that_cannot_be_read_does_not_keep_status_from_telling_the_rest(tmp_path: Path) -> None:
    settings = Settings(state=tmp_path)
    begin(settings, "archive", 0, NOW)
    (settings.state / "checkpoints" / "archive" / "offsets" / "1").write_bytes(b"")
    assert find_trailing_clocks(settings, ()) == ()
    (found,) = compare_clocks(settings, NOW, {"archive": NOW + MINUTE}, "kiln.updates", 0)
    assert found.since is None
