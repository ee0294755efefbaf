"""kiln.pipelines.recovery: a checkpoint and its tables as a power cut leaves them, or as somebody put them back."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest

from kiln.conf.process.location import parse_location
from kiln.deploy.cli.recover import render_recovery
from kiln.pipelines.backfill.run_log import append_event, read_runs
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.delta.lake import Lake, locate_commit
from kiln.pipelines.recovery import (
    Damage,
    DamageError,
    DamageLocation,
    adopt_topics,
    examine,
    repair,
    set_files_aside,
)
from kiln.pipelines.runtime.checkpoint import Checkpoint, is_whole, read_topic_ids, save_topic_ids
from kiln.pipelines.runtime.dedup_store import FILE_NAME, DedupStore, DedupStoreConfig, build_dedup_store
from kiln.pipelines.runtime.query_context import TableOutput, TableWriter
from kiln.pipelines.runtime.table_ages import OlderTableError, check_tables
from kiln.pipelines.runtime.topics import TopicState
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.kafka.records import Epoch

QUERY = "0b0ccb4a-0b0c-4b0c-8b0c-0b0ccb4a0b0c"
TABLE = "tips"
EMPTY, CUT = b"", None


class State:
    """The state folder of one query, whose micro-batch n reads ten records and appends a row to `tips`."""

    def __init__(self, folder: Path, name: str = "sink") -> None:
        self.place = DamageLocation(folder, parse_location(folder / "checkpoints"), Lake(str(folder / "lake")))
        self.name = name
        self.lake = self.place.lake
        self.path = folder / "checkpoints" / name
        self.lake.create((TABLE,))
        self._write(self.path / "metadata", json.dumps({"id": QUERY}))
        self._write(self.path / "sources" / "0" / "0", 'v1\n{"kiln.updates":{"0":0}}')

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        data, sums = path.read_bytes(), b"crc\0\x00\x00\x02\x00"
        for place in range(0, len(data), 512):
            sums += zlib.crc32(data[place : place + 512]).to_bytes(4)
        path.with_name(f".{path.name}.crc").write_bytes(sums)

    def begin(self, batch: int, end: int | None = None) -> None:
        end = batch * 10 + 10 if end is None else end
        at = {"batchWatermarkMs": 0, "batchTimestampMs": 0}
        self._write(self.path / "offsets" / str(batch), f'v1\n{json.dumps(at)}\n{{"kiln.updates":{{"0":{end}}}}}')

    def commit(self, batch: int) -> Path:
        """The state, and then the table."""
        self.keep(batch)
        if self.name != "sink":
            return self.path
        files = TableFiles(self.lake, TABLE)
        files.add(tuple(f"row {batch}" if column.type == "string" else batch for column in TABLES[TABLE].columns))
        tables = TableWriter(self.lake, DeltaRsCommits(self.lake, durable=True), Checkpoint(parse_location(self.path)))
        tables.commit(QUERY, batch, [TableOutput(TABLE, files.close())])
        return Path(locate_commit(self.lake.folder(TABLE), self.lake.open(TABLE).version()).uri)

    def data(self, entry: Path) -> Path:
        """The file that a commit adds."""
        (add,) = [json.loads(line)["add"] for line in entry.read_text().splitlines() if '"add"' in line]
        return Path(self.lake.table(TABLE), add["path"])

    def keep(self, batch: int) -> None:
        for part in (0, 1):
            self._write(self.path / "state" / "0" / str(part) / f"{batch + 1}.changelog", "x" * 700)

    def finish(self, batch: int) -> None:
        self._write(self.path / "commits" / str(batch), 'v1\n{"nextBatchWatermarkMs":0}')

    def run(self, *batches: int) -> None:
        for batch in batches:
            self.begin(batch)
            self.commit(batch)
            self.finish(batch)

    @property
    def rows(self) -> list[str]:
        return sorted(self.lake.open(TABLE).to_pyarrow_table(columns=["batch_cid"])["batch_cid"].to_pylist())

    @property
    def next(self) -> int:
        """The micro-batch with which Spark goes on, and its offsets must be there or be none."""
        checkpoint = Checkpoint(parse_location(self.path))
        return checkpoint.planned + (checkpoint.planned == checkpoint.committed)


def damaged(path: Path, how: bytes | None) -> Path:
    """When it was written changes with it, as where a person tries this."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if how is None else how)
    return path


def test_what_is_whole_is_left_alone(tmp_path: Path) -> None:
    state = State(tmp_path)
    assert repair(state.place, ["sink"]) == []
    state.run(0, 1, 2)
    state.begin(3)
    before = sorted(tmp_path.rglob("*"))
    assert repair(state.place, ["archive", "updates", "batch", "sink"]) == []
    state.commit(3)
    assert repair(state.place, ["sink"]) == []
    assert set(before) <= set(tmp_path.rglob("*"))
    assert not (tmp_path / "set-aside").exists()


def copied(folder: Path) -> None:
    """The folder as a copy has it that does not keep the times of files."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (0, 0))


@pytest.mark.parametrize("how", [EMPTY, CUT, b"\0" * 50], ids=["empty", "cut", "zeros"])
@pytest.mark.parametrize("what", ["offsets", "commits", "state", "entry", "data"])
def test_a_file_of_the_micro_batch_under_way_is_set_aside_and_the_micro_batch_done_again(
    tmp_path: Path, what: str, how: bytes | None
) -> None:
    state = State(tmp_path)
    state.run(0, 1, 2)
    state.begin(3)
    if what != "offsets":
        entry = state.commit(3)
    if what in ("commits", "state"):
        state.finish(3)
    path = {
        "offsets": state.path / "offsets" / "3",
        "commits": state.path / "commits" / "3",
        "state": state.path / "state" / "0" / "1" / "4.changelog",
    }.get(what)
    if what == "entry":
        path = entry
    if what == "data":
        path = state.data(entry)
    assert path is not None
    damaged(path, how)
    copied(tmp_path)
    (words,) = repair(state.place, ["sink"])
    assert str(entry if what == "data" else path) in words
    assert state.next == 3
    assert repair(state.place, ["sink"]) == []
    redone = what in ("entry", "data", "offsets")
    assert state.rows == ["row 0", "row 1", "row 2", *([] if redone else ["row 3"])]
    # Spark does the micro-batch again
    if not (state.path / "offsets" / "3").exists():
        state.begin(3)
    if redone:
        state.commit(3)
    state.keep(3)
    state.finish(3)
    assert state.rows == ["row 0", "row 1", "row 2", "row 3"]
    assert repair(state.place, ["sink"]) == []


def test_what_is_on_another_disk_than_the_state_folder_is_set_aside(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        (tmp_path / "checkpoints").symlink_to(other)
        state = State(tmp_path)
        state.run(0, 1, 2)
        state.begin(3)
        path = damaged(state.path / "offsets" / "3", EMPTY)
        assert len(repair(state.place, ["sink"])) == 1
        assert not path.exists()
        assert [each.read_bytes() for each in (tmp_path / "set-aside").rglob("3")] == [EMPTY]
        set_files_aside(state.place, Damage("sink", "it is old", "it is set aside", files_to_set_aside=(state.path,)))
        assert list(Path(other).iterdir()) == []
        assert len(list((tmp_path / "set-aside").rglob("commits/2"))) == 1


def kept_copy(folder: Path, copy: Path) -> Path:
    shutil.copytree(folder, copy)
    return copy


def put_back(copy: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)


@pytest.mark.parametrize("since", [0, 1, 3], ids=lambda number: f"micro-batch {number} on")
def test_a_table_that_is_older_than_the_checkpoint_is_refused(tmp_path: Path, since: int) -> None:
    state = State(tmp_path)
    table = Path(state.lake.table(TABLE))
    state.run(*range(since))
    older = kept_copy(table, tmp_path / "copy")
    state.run(*range(since, 4))
    state.begin(4)
    put_back(older, table)
    end = f"ends with micro-batch {since - 1}" if since else "has no micro-batch of this query"
    words = rf"the table tips in .* is older than the checkpoint of sink in .*: the table {end}, but sink had written "
    words += "micro-batch 3"
    with pytest.raises(DamageError, match=f"^sink cannot start: {words}"):
        repair(state.place, ["sink"])
    with pytest.raises(OlderTableError, match=f"^{words}.* Restore the newest backup of the table"):
        check_tables(state.lake, state.place.checkpoints)
    (damage,) = examine(state.place, ["sink"])
    assert not damage.is_restorable, "the deduplication state is in Spark's"
    shutil.rmtree(table)
    state.lake.create((TABLE,))
    assert "the table has no micro-batch of this query" in examine(state.place, ["sink"])[0].problem


def test_a_table_without_rows_in_the_newest_micro_batches_is_not_old(tmp_path: Path) -> None:
    """Nor is one that another program has compacted and restored, or that a crash left without the newest one."""
    state = State(tmp_path)
    state.run(0, 1)
    older = kept_copy(Path(state.lake.table(TABLE)), tmp_path / "copy")
    for batch in (2, 3):
        state.begin(batch)
        state.keep(batch)
        state.finish(batch)
    assert examine(state.place, ["sink"]) == []
    state.lake.open(TABLE).optimize.compact()
    state.lake.open(TABLE).restore(1)
    assert examine(state.place, ["sink"]) == []
    state.begin(4)
    state.commit(4)
    put_back(older, Path(state.lake.table(TABLE)))
    assert examine(state.place, ["sink"]) == [], "Spark repeats micro-batch 4"
    check_tables(state.lake, state.place.checkpoints)


def test_tables_and_checkpoint_of_one_age_go_on(tmp_path: Path) -> None:
    state = State(tmp_path)
    state.run(0, 1)
    folders = (Path(state.lake.path), state.path)
    copies = [(kept_copy(folder, tmp_path / f"{folder.name}-copy"), folder) for folder in folders]
    state.run(2, 3)
    for copy, folder in copies:
        put_back(copy, folder)
    assert examine(state.place, ["sink"]) == []
    # a query that went back has another id, under which its tables have nothing yet
    (state.path / "metadata").unlink()
    state._write(state.path / "metadata", json.dumps({"id": "another"}))
    assert examine(state.place, ["sink"]) == []


def test_commits_beneath_whole_ones_are_never_touched(tmp_path: Path) -> None:
    state = State(tmp_path)
    state.run(0, 1, 2)
    damaged(Path(locate_commit(state.lake.folder(TABLE), 2).uri), EMPTY)
    with pytest.raises(DamageError, match=r"2\.json is damaged, or a file that it adds is missing, although"):
        repair(state.place, ["sink"])


@pytest.mark.parametrize("name", ["updates", "batch"])
def test_updates_repeats_one_micro_batch_and_batch_any_number(tmp_path: Path, name: str) -> None:
    """Of `updates`, batches would get what is repeated of an earlier epoch (decision 7)."""
    state = State(tmp_path, name)
    state.run(0, 1, 2)
    damaged(state.path / "commits" / "2", EMPTY)
    assert len(repair(state.place, [name])) == 1
    assert state.next == 2
    state.run(2, 3, 4)
    for batch in (3, 4):
        damaged(state.path / "offsets" / str(batch), EMPTY)
    if name == "batch":
        assert len(repair(state.place, [name])) == 1
        assert state.next == 3
    else:
        with pytest.raises(DamageError, match="updates cannot start"):
            repair(state.place, [name])


def test_a_query_whose_first_file_is_torn_begins(tmp_path: Path) -> None:
    state = State(tmp_path)
    damaged(state.path / "metadata", EMPTY)
    assert "sink starts" in repair(state.place, ["sink"])[0]
    assert not state.path.exists()


@pytest.mark.parametrize("name", ["00000000000000000002.checkpoint.parquet", "_last_checkpoint"])
def test_a_torn_summary_of_a_log_is_set_aside(tmp_path: Path, name: str) -> None:
    state = State(tmp_path)
    state.run(0, 1)
    state.lake.open(TABLE).create_checkpoint()
    state.run(2)
    damaged(Path(state.lake.table(TABLE)) / "_delta_log" / name, CUT)
    assert len(repair(state.place, ["sink"])) == 1
    assert state.rows == ["row 0", "row 1", "row 2"]
    assert repair(state.place, ["sink"]) == []


def test_what_a_torn_file_hides_is_refused_too(tmp_path: Path) -> None:
    state = State(tmp_path)
    state.run(0, 1)
    state.lake.open(TABLE).create_checkpoint()
    shutil.rmtree(state.path)
    damaged(Path(state.lake.table(TABLE)) / "_delta_log" / "_last_checkpoint", CUT)
    with pytest.raises(
        DamageError, match=r"sink cannot start: the checkpoint .* does not exist, but the tables tips in"
    ):
        repair(state.place, ["sink"])


@pytest.mark.parametrize("how", [EMPTY, CUT])
def test_a_torn_commit_of_a_table_that_no_query_writes_is_set_aside(tmp_path: Path, how: bytes | None) -> None:
    state = State(tmp_path)
    lake = state.lake
    lake.create(("backfill_runs",))
    append_event(lake, "one", "begun", 1, range_from=1, range_to=2)
    append_event(lake, "two", "begun", 2, range_from=1, range_to=2)
    damaged(Path(locate_commit(lake.folder("backfill_runs"), 2).uri), how)
    (words,) = repair(state.place, ["sink"])
    assert "table backfill_runs" in words
    assert [run.name for run in read_runs(lake)] == ["one"]

    damaged(Path(locate_commit(lake.folder("backfill_runs"), 1).uri), how)
    damaged(Path(locate_commit(lake.folder("backfill_runs"), 0).uri), how)
    assert "Kiln creates the table again" in repair(state.place, ["sink"])[0]
    assert "backfill_runs" not in lake.tables()
    lake.create(("backfill_runs",))
    assert read_runs(lake) == []
    assert repair(state.place, ["sink"]) == []


# ---------------------------------------------------------------- topics


def created_again(end: int = 500) -> dict[str, TopicState]:
    """The topic of `State`, as of a second partition, and of records that retention took."""
    return {"kiln.updates": TopicState("new", {0: 3, 1: 0}, {0: end, 1: end})}


@pytest.mark.parametrize("begun", [False, True], ids=["between two", "in a micro-batch"])
def test_another_topic_is_read_from_its_beginning_with_tables_state_and_id_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    state = State(tmp_path, "batch")
    state.run(0, 1, 2)
    if begun:
        state.begin(3)
        state.commit(3)
    where = parse_location(state.path)
    save_topic_ids(where, {"kiln.updates": "old", "kiln.batches": "kept"})
    topics = {"batch": created_again()}
    with pytest.raises(DamageError, match=r"^batch cannot start: kiln.updates is not the topic .* Run kiln"):
        repair(state.place, ["batch"], None, topics)
    (damage,) = examine(state.place, ["batch"], None, topics)
    assert "reads kiln.updates from the oldest new record" in damage.remedy
    assert ("unfinished micro-batch 3 are lost" in damage.remedy) is begun
    assert "To repair: kiln recover --yes" in render_recovery([damage], [damage]).plain
    with monkeypatch.context() as patch:
        patch.setattr("kiln.pipelines.recovery.save_topic_ids", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            adopt_topics(state.place, damage)
    (damage,) = examine(state.place, ["batch"], None, topics)  # cut short, and done again
    adopt_topics(state.place, damage)
    checkpoint = Checkpoint(where)
    assert [checkpoint.ends(batch) for batch in ((2, 3) if begun else (2,))] == [
        {"kiln.updates": {0: 3, 1: 0}} for _ in range(1 + begun)
    ]
    assert (checkpoint.query_id, state.next) == (QUERY, 3)
    assert read_topic_ids(where) == {"kiln.updates": "new", "kiln.batches": "kept"}
    assert is_whole(state.path / "offsets" / "2")
    assert len(list((tmp_path / "set-aside").rglob("batch/2"))) == 2
    assert examine(state.place, ["batch"], None, topics) == []


def test_a_query_that_was_stopped_in_its_first_micro_batch_begins_in_the_other_topic(tmp_path: Path) -> None:
    state = State(tmp_path, "batch")
    state.begin(0)
    save_topic_ids(parse_location(state.path), {"kiln.updates": "old"})
    (damage,) = examine(state.place, ["batch"], None, {"batch": created_again()})
    adopt_topics(state.place, damage)
    first = (state.path / "sources" / "0" / "0").read_text().splitlines()
    assert (first[0], json.loads(first[-1])) == ("v1", {"kiln.updates": {"0": 3, "1": 0}})
    assert Checkpoint(parse_location(state.path)).count_records(0) == 0
    assert examine(state.place, ["batch"], None, {"batch": created_again()}) == []


def test_a_topic_that_lost_its_newest_records_is_read_on_from_its_end(tmp_path: Path) -> None:
    """As after a power cut that took records of the broker: the id is the same."""
    state = State(tmp_path, "batch")
    state.run(0, 1, 2)
    save_topic_ids(parse_location(state.path), {"kiln.updates": "new"})
    topics = {"batch": created_again(end=25)}
    (damage,) = examine(state.place, ["batch"], None, topics)
    assert damage.problem.startswith("kiln.updates-0 ends at the offset 25, but was read up to 30: ")
    adopt_topics(state.place, damage)
    assert Checkpoint(parse_location(state.path)).ends(2) == {"kiln.updates": {0: 25, 1: 0}}


class MemoryCopy(NamedTuple):
    position: str
    identities: tuple[bytes, ...]
    size: int = 1


@pytest.mark.parametrize("query", ["updates"])
def test_in_another_topic_what_passed_does_not_pass_again_unless_it_got_no_further(tmp_path: Path, query: str) -> None:
    """Other records are at the offsets of those that passed, and the same messages may come at the same offsets."""
    state = State(tmp_path, query)
    state.run(0, 1, 2)
    state.begin(3)
    kept, lost = MemoryCopy("0/5/0", (b"kept",)), MemoryCopy("0/35/0", (b"lost",))
    task = MemoryCopy("3fa9", (b"task",))  # as the result of a decode task of `archive` has it
    remembered = DedupStoreConfig(str(state.path / FILE_NAME), 1_000)
    with DedupStore(remembered) as file:
        assert file.filter_new([kept, lost, task], 1) == [kept, lost, task]
        assert file.filter_new([kept], 1) == [kept], "a micro-batch that is repeated reads the same copy"
        file.mark(Epoch(QUERY, 2), 1)
    save_topic_ids(parse_location(state.path), {"kiln.updates": "old"})
    (damage,) = examine(state.place, [query], None, {query: created_again()})
    adopt_topics(state.place, damage)
    with DedupStore(remembered) as file:
        assert file.filter_new([kept, lost], 2) == [lost]


def damaged_file(state: State, damage: Callable[[Path], None]) -> str:
    """The words about a query whose deduplication file is damaged after its micro-batches 0 to 2."""
    state.run(0, 1, 2)
    with DedupStore(DedupStoreConfig(str(state.path / FILE_NAME), 1_000)) as file:
        copies = [MemoryCopy(f"0/{at}/0", (b"%016d" % at,)) for at in range(5_000)]
        assert len(file.filter_new(copies, 1)) == 5_000
        file.mark(Epoch(QUERY, 2), 1)
    assert examine(state.place, [state.path.name]) == []
    damage(state.path / FILE_NAME)
    (found,) = examine(state.place, [state.path.name])
    assert not found.is_self_repairing
    with pytest.raises(DamageError, match="Run kiln recover"):
        repair(state.place, [state.path.name])
    return found.problem


def change(sql: str) -> Callable[[Path], None]:
    def execute(path: Path) -> None:
        with closing(sqlite3.connect(path)) as file, file:
            file.execute(sql)

    return execute


def tear(path: Path) -> None:
    """Pages from the middle on are older: they are those of an empty file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(64 * 1024))


@pytest.mark.parametrize("query", ["archive", "updates", "sink"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (change("DELETE FROM digests"), "contains 0 of its 5,000 digests. Without"),
        (change("DELETE FROM digests WHERE position < '0/2'"), "of its 5,000 digests. Without"),
        (
            change("DELETE FROM progress"),
            "is damaged: it does not name the newest micro-batch whose digests it contains. Without",
        ),
        (
            change("UPDATE progress SET query_id = '', batch_id = -1"),
            "ends with micro-batch -1, but the checkpoint ends with micro-batch 2",
        ),
        (tear, FILE_NAME),
        (lambda path: path.write_bytes(b""), "no such table"),
    ],
    ids=["emptied", "some gone", "no mark", "new", "torn", "no bytes"],
)
def test_a_deduplication_file_that_lacks_digests_is_not_relied_on(
    tmp_path: Path, query: str, damage: Callable[[Path], None], words: str
) -> None:
    """Frames of the past would pass again, and their rows would be in the tables twice."""
    assert words in damaged_file(State(tmp_path, query), damage)


@pytest.mark.parametrize("query", ["archive", "updates"])
@pytest.mark.parametrize(("end", "is_damaged"), [(0, False), (1, True)])
@pytest.mark.parametrize("is_recovered", [False, True])
def test_a_query_that_has_read_no_record_needs_nothing_in_its_deduplication_file(
    query: str, end: int, is_damaged: bool, is_recovered: bool, tmp_path: Path
) -> None:
    """No task has run that would create the file, or mark one that `kiln recover` created."""
    state = State(tmp_path, query)
    if is_recovered:
        state.path.mkdir(parents=True, exist_ok=True)
        build_dedup_store(DedupStoreConfig(str(state.path / FILE_NAME), 1_000), [(b"%016d" % 1,)], Epoch(QUERY, -1), 1)
    state.begin(0, end)
    state.finish(0)
    assert bool(examine(state.place, [query])) == is_damaged


def _time(micros: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)
