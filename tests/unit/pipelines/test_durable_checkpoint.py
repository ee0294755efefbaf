"""kiln.pipelines.runtime.checkpoint and the order of syncs: what a power cut leaves is what was synced."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from pyspark.sql import DataFrame

from kiln.bridge.capture.spool import QueuedFrame, Spool
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.delta.lake import Lake, locate_commit
from kiln.pipelines.runtime.checkpoint import DurableCheckpoint
from kiln.pipelines.runtime.query_context import write_in_order
from kiln.schemas.delta.tables import TABLES


class Disk:
    """What was synced of files and folders since the test began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: dict[Path, bytes] = {}
        self.names: dict[Path, set[str]] = {}
        self.order: list[Path] = []
        self._fsync: Callable[[int], None] = os.fsync
        monkeypatch.setattr(os, "fsync", self._sync)

    def _sync(self, opened: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{opened}"))
        self.order.append(path)
        if path.is_dir():
            self.names[path] = set(os.listdir(path))
        else:
            self.files[path] = path.read_bytes()
        self._fsync(opened)

    def lost(self, root: Path) -> list[Path]:
        """Files that a power cut now would take, or leave empty or old."""
        files = [path for path in root.rglob("*") if path.is_file() and not path.name.endswith(".tmp")]
        return [path for path in files if self.files.get(path) != path.read_bytes() or not self._is_named(path, root)]

    def _is_named(self, path: Path, root: Path) -> bool:
        named = path.name in self.names.get(path.parent, ())
        return named and (path.parent == root or self._is_named(path.parent, root))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def write(path: Path, text: str = "v1") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_all_that_spark_has_written_is_kept_and_nothing_twice(tmp_path: Path, disk: Disk) -> None:
    folder = tmp_path / "checkpoints" / "archive"
    write(folder / "metadata")
    write(folder / "offsets" / "0")
    kept = DurableCheckpoint(folder)
    kept.sync()
    assert disk.lost(tmp_path) == []
    for batch in range(3):
        for new in (folder / "state" / "0" / "1" / f"{batch}.changelog", folder / "commits" / str(batch)):
            write(new)
        write(folder / "offsets" / ".9.tmp")
        assert disk.lost(tmp_path) != []
        disk.order.clear()
        kept.sync()
        assert disk.lost(tmp_path) == []
        assert folder / "metadata" not in disk.order
    disk.order.clear()
    kept.sync()
    assert disk.order == []


def test_a_micro_batch_s_offsets_are_kept_before_it_acts_and_its_state_before_it_is_noted(
    tmp_path: Path, disk: Disk
) -> None:
    folder = tmp_path / "checkpoints" / "archive"
    found: list[str] = []
    context = SimpleNamespace(getLocalProperty=lambda name: "query")
    rows = SimpleNamespace(sparkSession=SimpleNamespace(sparkContext=context))

    def act(rows: DataFrame, batch: int, query: str) -> None:
        assert disk.lost(tmp_path) == []
        write(folder / "state" / "0" / "0" / f"{batch + 1}.changelog")
        found.append(query)

    call = write_in_order(act, DurableCheckpoint(folder))
    for batch in range(2):
        write(folder / "offsets" / str(batch))
        call(cast(DataFrame, rows), batch)
        assert disk.lost(tmp_path) == []
        write(folder / "commits" / str(batch))
    assert found == ["query", "query"]


def test_a_commit_is_on_the_disk_with_all_that_it_names(tmp_path: Path, disk: Disk) -> None:
    lake = Lake(str(tmp_path / "lake"))
    lake.create(("tips",))
    assert disk.lost(Path(lake.path)) == []
    commits = DeltaRsCommits(lake, durable=True)
    for batch in range(2):
        files = TableFiles(lake, "tips")
        files.add(tuple("x" if column.type == "string" else batch for column in TABLES["tips"].columns))
        assert commits.commit("tips", files.close(), WriteId("query", batch))
        assert disk.lost(Path(lake.path)) == []
    assert Path(locate_commit(lake.folder("tips"), 2).uri) in disk.order


@pytest.mark.parametrize("durable", [True, False])
def test_what_the_spool_has_taken_is_on_the_disk(tmp_path: Path, disk: Disk, durable: bool) -> None:
    """In the log of its database; SQLite syncs the log itself before it copies it into the file."""
    spool = Spool(tmp_path / "spool", 16 << 20, durable=durable)
    for _ in range(30):
        spool.append([QueuedFrame(b"c" * 16, b"f" * 100)])
        assert (tmp_path / "spool/frames.sqlite-wal" not in disk.lost(tmp_path)) is durable
    spool.close()
