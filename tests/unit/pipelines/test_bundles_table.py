"""The table of bundles that were once known, by delta-rs."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from deltalake import DeltaTable

from kiln.conf.settings.model import Settings, TopicTable
from kiln.pipelines.app.launch import decode_config
from kiln.pipelines.delta.bundles import read_bundles, save_bundles
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.wire.topic_table import BundleError, BundleSet, bundle_hash

FIRST = datetime(2025, 1, 1, tzinfo=UTC)
LATER = datetime(2025, 1, 2, tzinfo=UTC)
CLAY, MAIN = {"clay": ["/ceramic/testnet-clay"]}, {"main": ["/ceramic/mainnet", "/ceramic/dev"]}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(str(tmp_path))
    lake.create(("bundles",))
    return lake


def rows(lake: Lake) -> list[dict[str, object]]:
    return sorted(DeltaTable(lake.table("bundles")).to_pyarrow_table().to_pylist(), key=lambda row: str(row["hash"]))


def test_there_are_none_without_a_table(tmp_path: Path) -> None:
    assert read_bundles(Lake(str(tmp_path))) == BundleSet()


def test_a_row_says_what_the_table_says_it_does(lake: Lake) -> None:
    save_bundles(lake, BundleSet(MAIN), FIRST)
    assert rows(lake) == [
        {
            "hash": bundle_hash(MAIN["main"]).hex(),
            "name": "main",
            "topics": ["/ceramic/dev", "/ceramic/mainnet"],
            "first_seen": FIRST,
        }
    ]
    assert [field.name for field in DeltaTable(lake.table("bundles")).schema().fields] == [
        c.name for c in TABLES["bundles"].columns
    ]
    protocol = DeltaTable(lake.table("bundles")).protocol()
    assert (protocol.min_reader_version, protocol.min_writer_version) == (1, 2)


def test_what_left_the_settings_is_still_known_and_comes_last(lake: Lake) -> None:
    assert save_bundles(lake, BundleSet(CLAY), FIRST) == BundleSet(CLAY)
    assert save_bundles(lake, BundleSet(MAIN), LATER) == BundleSet(MAIN | CLAY)
    assert read_bundles(lake) == BundleSet(CLAY | MAIN)
    assert save_bundles(lake, BundleSet(), LATER) == BundleSet(CLAY | MAIN)


def test_known_ones_are_not_written_again(lake: Lake) -> None:
    save_bundles(lake, BundleSet(CLAY | MAIN), FIRST)
    version, before = DeltaTable(lake.table("bundles")).version(), rows(lake)
    save_bundles(lake, BundleSet({"another name": MAIN["main"]} | CLAY), LATER)
    assert (DeltaTable(lake.table("bundles")).version(), rows(lake)) == (version, before)


def test_a_name_used_again_for_other_topics_takes_nothing_away(lake: Lake) -> None:
    save_bundles(lake, BundleSet({"one": ["a"]}), FIRST)
    both = save_bundles(lake, BundleSet({"one": ["b"]}), LATER)
    assert set(both.values()) == {("a",), ("b",)}
    assert set(read_bundles(lake).values()) == {("a",), ("b",)}


def test_other_topics_under_a_known_hash_are_refused(lake: Lake) -> None:
    # the draft joins topics with nothing between them
    save_bundles(lake, BundleSet({"one": ["ab", "c"]}), FIRST)
    version = DeltaTable(lake.table("bundles")).version()
    with pytest.raises(BundleError, match=r"'two'.*'one'"):
        save_bundles(lake, BundleSet({"two": ["a", "bc"], "new": ["d"]}), LATER)
    assert DeltaTable(lake.table("bundles")).version() == version


def test_queries_decode_by_the_settings_and_by_what_was_once_in_them(tmp_path: Path) -> None:
    def settings(bundles: dict[str, list[str]]) -> Settings:
        return Settings(state=tmp_path, topic_table=TopicTable(bundles=bundles))

    assert decode_config(settings(CLAY)).bundles == BundleSet(CLAY)
    assert decode_config(settings({})).bundles == BundleSet()  # nothing was written: that is for `messages` to do
    assert decode_config(settings(CLAY), remember=True).bundles == BundleSet(CLAY)
    assert decode_config(settings(MAIN)).bundles == BundleSet(MAIN | CLAY)


def test_it_needs_no_spark() -> None:
    code = "import sys, kiln.pipelines.delta.bundles; raise SystemExit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
