"""`kiln recover` of a query with tables: restored to the newest micro-batch that all of them have, they are equal to
those of an undisturbed run once the rest is read again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from deltalake import CommitProperties

from kiln.conf.process.location import parse_location
from kiln.deploy.ops.recover import read_message_identities
from kiln.pipelines.decode.identities import compute_column_identities
from kiln.pipelines.delta.commits import MAINTENANCE_PREFIX, WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import DataFile, TableFiles
from kiln.pipelines.delta.lake import Lake, locate_commit
from kiln.pipelines.recovery import DamageError, DamageLocation, examine, recover_tables
from kiln.pipelines.runtime.checkpoint import FIRST_OFFSETS_FILE, Checkpoint
from kiln.pipelines.runtime.dedup_store import FILE_NAME, DedupStore, DedupStoreConfig
from kiln.pipelines.runtime.query_context import TableOutput, TableWriter
from kiln.pipelines.runtime.topics import TopicState
from kiln.schemas.delta.tables import TABLES
from kit.small_lake import append

TOPIC = "kiln.updates"
TABLES_OF_ROWS = ("tips", "batch_tips", "streams")
END = 7


class KilledError(Exception):
    """The driver is killed."""


class Query:
    """`sink` as a driver of three tables. Micro-batch n of a new query reads ten records, of which each table has a
    row; `streams` has none of an even n. `commits_left`: the driver is killed before the commit after these."""

    def __init__(self, folder: Path) -> None:
        self.location = DamageLocation(folder, parse_location(folder / "checkpoints"), Lake(str(folder / "lake")))
        self.lake = self.location.lake
        self.path = folder / "checkpoints" / "sink"
        self.lake.create(TABLES_OF_ROWS)
        self._write("metadata", json.dumps({"id": "first"}))
        self._write(FIRST_OFFSETS_FILE, f'v1\n{{"{TOPIC}":{{"0":0}}}}')

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(parse_location(self.path))

    def _write(self, name: str, text: str) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(text)

    def run(self, until: int, commits_left: int = 1_000) -> None:
        """Run micro-batches up to the records of number `until`, from where the checkpoint ends."""
        checkpoint = self.checkpoint
        commits = Killed(self.lake, commits_left)
        tables = TableWriter(self.lake, commits, checkpoint)
        batch = checkpoint.planned + (checkpoint.planned == checkpoint.committed)
        begin = checkpoint.starts(batch)[TOPIC][0] // 10
        for number in range(begin, until):
            at = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": 0})
            self._write(f"offsets/{batch}", f'v1\n{at}\n{{"{TOPIC}":{{"0":{number * 10 + 10}}}}}')
            outputs = [
                TableOutput(table, self._files(table, number))
                for table in TABLES_OF_ROWS
                if table != "streams" or number % 2
            ]
            tables.commit(checkpoint.query_id, batch, outputs)
            self._write(f"commits/{batch}", "v1\n{}")
            batch += 1

    def _files(self, table: str, number: int) -> list[DataFile]:
        files = TableFiles(self.lake, table)
        files.add(tuple(f"row {number}" if column.type == "string" else number for column in TABLES[table].columns))
        return files.close()

    def rows(self) -> dict[str, list[str]]:
        return {
            table: sorted(self.lake.open(table).to_pyarrow_table(columns=["stream"])["stream"].to_pylist())
            for table in TABLES_OF_ROWS
        }

    def recover(self, begin: int = 0, topics: Mapping[str, TopicState] | None = None) -> None:
        known = {TOPIC: TopicState("id", {0: begin}, {0: 1_000})} if topics is None else topics
        recover_tables(self.location, "sink", known, lambda lake: iter(()), 5, durable=True)


class Killed(DeltaRsCommits):
    """Commits of a driver that is killed."""

    def __init__(self, lake: Lake, left: int) -> None:
        super().__init__(lake, durable=True)
        self._left = left

    def commit(self, *arguments: object) -> bool:
        self._left -= 1
        if self._left < 0:
            raise KilledError
        return super().commit(*arguments)  # type: ignore[arg-type]  # passes them on


def whole(end: int = END) -> dict[str, list[str]]:
    every = [f"row {number}" for number in range(end)]
    return {"tips": sorted(every), "batch_tips": sorted(every), "streams": sorted(every[1::2])}


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(tmp_path)


@pytest.mark.parametrize("is_lost", [False, True], ids=["checkpoint", "no checkpoint"])
@pytest.mark.parametrize("commits", range(1, 9))
def test_killed_between_any_two_commits(query: Query, commits: int, is_lost: bool) -> None:
    """Also where the killed driver was that of a query which had been recovered before, and killed at once again."""
    for until in (END - 3, END):
        with pytest.raises(KilledError):
            query.run(until + 20, commits)
        if is_lost:
            shutil.rmtree(query.path)
        query.recover()
        assert examine(query.location, ["sink"]) == []
        end = len(query.rows()["tips"])
        assert query.rows() == whole(end), "no table is ahead of another"
        assert query.checkpoint.starts(0) == {TOPIC: {0: end * 10}}
    query.run(end + 3)
    assert query.rows() == whole(end + 3)
    assert query.checkpoint.deleted_records == {}


def test_an_older_copy_of_one_table(query: Query, tmp_path: Path) -> None:
    query.run(3)
    table = Path(query.lake.table("batch_tips"))
    shutil.copytree(table, tmp_path / "copy")
    query.run(END)
    shutil.rmtree(table)
    shutil.copytree(tmp_path / "copy", table)
    (damage,) = examine(query.location, ["sink"])
    assert "the table batch_tips" in damage.problem
    assert damage.is_restorable
    query.recover()
    assert query.rows() == whole(3)
    query.run(END)
    assert query.rows() == whole()


def test_an_older_copy_of_the_checkpoint(query: Query, tmp_path: Path) -> None:
    query.run(3)
    shutil.copytree(query.path, tmp_path / "copy")
    query.run(END)
    shutil.rmtree(query.path)
    shutil.copytree(tmp_path / "copy", query.path)
    (damage,) = examine(query.location, ["sink"])
    assert "is older than the table" in damage.problem
    query.recover()
    assert query.rows() == whole(), "the tables prove that they have everything"
    query.run(END + 2)
    assert query.rows() == whole(END + 2)


def test_a_torn_commit_of_a_micro_batch_that_is_done(query: Query) -> None:
    query.run(END)
    version = query.lake.open("tips").version()
    Path(locate_commit(query.lake.folder("tips"), version).uri).write_bytes(b"")
    (damage,) = examine(query.location, ["sink"])
    assert damage.is_restorable
    query.recover()
    assert query.rows() == whole(END - 1)
    query.run(END)
    assert query.rows() == whole()
    assert len(list((query.location.state / "set-aside").rglob(f"{version:020}.json"))) == 1


def test_a_restore_that_was_cut_short_is_continued(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    query.run(4)
    with pytest.raises(KilledError):
        query.run(END, 2)  # all but `streams`
    with monkeypatch.context() as patch:
        patch.setattr("kiln.pipelines.recovery.write_checkpoint", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            query.recover()
    query.recover()
    query.run(END)
    assert query.rows() == whole()


def test_compaction_is_undone_with_the_rows_it_holds(query: Query) -> None:
    query.run(4)
    query.lake.open("tips").optimize.compact()
    with pytest.raises(KilledError):
        query.run(END, 5)
    query.recover()
    query.run(END)
    assert query.rows() == whole()


def test_a_version_whose_files_were_removed_is_not_restored(query: Query) -> None:
    with pytest.raises(KilledError):
        query.run(END, 4)  # all but `batch_tips`
    tips = query.lake.open("tips")
    tips.optimize.compact(commit_properties=CommitProperties({"userMetadata": MAINTENANCE_PREFIX}))
    tips.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    before = query.rows()
    with pytest.raises(
        DamageError, match=r"cannot restore table tips in .* to version 1: its file .* is missing\. Rest"
    ):
        query.recover()
    assert query.rows() == before
    assert query.path.exists()


def test_a_lost_checkpoint_is_detected(query: Query) -> None:
    query.run(2)
    shutil.rmtree(query.path)
    (damage,) = examine(query.location, ["sink"])
    assert "does not exist" in damage.problem
    assert "the tables tips, batch_tips, streams in" in damage.problem
    assert damage.is_restorable


def test_what_another_writer_has_changed_is_not_undone(query: Query) -> None:
    query.run(4)
    with pytest.raises(KilledError):
        query.run(END, 1)
    DeltaRsCommits(query.lake).commit("tips", query._files("tips", 99), WriteId("somebody", 7))
    before = query.rows()
    with pytest.raises(DamageError, match="another writer has committed to it since"):
        query.recover()
    assert query.rows() == before


def test_records_that_kafka_no_longer_has_are_not_skipped(query: Query) -> None:
    with pytest.raises(KilledError):
        query.run(END, 4)
    before = query.rows()
    with pytest.raises(DamageError, match=r"cannot restart sink at the offset 10 of kiln.updates-0: the oldest .* 11,"):
        query.recover(begin=11)
    with pytest.raises(
        DamageError, match=r"cannot restore the tables of sink: cannot read its topics kiln.updates from Kafka"
    ):
        query.recover(topics={})
    assert query.rows() == before


def test_where_nothing_can_be_restored_a_data_file_that_is_put_back_ends_the_damage(query: Query) -> None:
    query.run(END)
    before = examine(query.location, ["sink"])
    path = max(Path(query.lake.table("tips")).glob("*.parquet"), key=lambda file: file.stat().st_mtime_ns)
    kept = path.read_bytes()
    path.write_bytes(kept[:10])
    with pytest.raises(DamageError, match="cannot restart sink at the offset"):
        query.recover(begin=1_000)
    assert examine(query.location, ["sink"]) != before
    path.write_bytes(kept)
    assert examine(query.location, ["sink"]) == before


def test_a_topic_that_was_created_again_is_read_from_its_beginning_and_no_row_goes(query: Query) -> None:
    with pytest.raises(KilledError):
        query.run(END, 4)
    before = query.rows()
    query.recover(topics={TOPIC: TopicState("id", {0: 3, 1: 0}, {0: 5, 1: 0})})
    assert query.rows() == before
    assert query.checkpoint.first_offsets == {TOPIC: {0: 3, 1: 0}}


def test_state_in_spark_is_not_rebuilt(query: Query) -> None:
    query.run(2)
    (query.path / "state").mkdir()
    shutil.rmtree(query.lake.table("tips"))
    assert [damage.is_restorable for damage in examine(query.location, ["sink"])] == [False]
    with pytest.raises(DamageError, match="is in Spark's state store, which cannot be rebuilt"):
        query.recover()


def test_tables_whose_commits_carry_no_offsets_are_left_alone(query: Query) -> None:
    for number in range(2):
        DeltaRsCommits(query.lake).commit("tips", query._files("tips", number), WriteId("first", number))
    with pytest.raises(DamageError, match=r"no commit of the tables tips in .* has the progress of the query"):
        query.recover()
    assert len(query.rows()["tips"]) == 2


def test_a_query_without_rows_begins(query: Query) -> None:
    query.recover()
    assert not query.path.exists()


class MemoryCopy(NamedTuple):
    position: str
    identities: tuple[bytes, ...]
    size: int = 1


def test_archive_has_its_deduplication_state_from_its_table(tmp_path: Path) -> None:
    """Messages that passed, signed or not, do not pass again; new ones do."""
    query, horizon, at = Query(tmp_path), 120_000_000, 1_700_000_000_000_000
    query.run(1)
    query.lake.create(("messages",))
    seen: list[dict[str, object]] = [
        {"network": "n", "message_id": f"m{number}", "verdict": verdict, "observed_at": _time(at + number)}
        for number, verdict in enumerate(["valid", "unsigned"] * 50)
    ]
    append(query.lake, "messages", seen)

    def copy(number: int, signed: bool) -> MemoryCopy:
        digests = compute_column_identities("n", f"m{number}", signed, at + number, "", horizon)
        return MemoryCopy(f"1/{number}/0", digests[:1] if signed else digests)

    def read(lake: Lake) -> Iterator[tuple[bytes, ...]]:
        return read_message_identities(lake, horizon)

    topics = {TOPIC: TopicState("id", {0: 0}, {0: 1_000})}
    recover_tables(query.location, "sink", topics, read, 5, durable=True)
    copies, new = [copy(number, number % 2 == 0) for number in range(100)], copy(100, True)
    with DedupStore(DedupStoreConfig(str(query.path / FILE_NAME), 1_000)) as file:
        assert file.filter_new([*copies, new], 6) == [new]


def _time(micros: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)
