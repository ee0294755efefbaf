"""kiln.pipelines.maintenance: tables that queries write and others read meanwhile keep their rows, and have few files
and a short log. The tables are real, and DuckDB and deltalake read them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from hypothesis import given
from hypothesis import strategies as st

from kiln.conf.process.errors import KilnError
from kiln.conf.process.location import FileEntry
from kiln.deploy.query.ask import query_lake
from kiln.pipelines.delta.commits import BatchProgress, SecondWriterError, WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.delta.lake import Lake, list_stats_columns, locate_commit
from kiln.pipelines.delta.log_faults import find_newest_write, inspect_log, restore_version
from kiln.pipelines.delta.table_progress import RestoreError, find_restore_point
from kiln.pipelines.maintenance import plan
from kiln.pipelines.maintenance.plan import LogEntry, MaintenancePolicy, RemovedFiles, TableFile
from kiln.pipelines.maintenance.state import read_log, read_state
from kiln.pipelines.maintenance.steps import (
    MaintenanceError,
    MaintenanceResult,
    maintain_table,
    predict_result,
    replace_files,
)
from kiln.schemas.delta.layout import LAYOUTS
from kiln.schemas.delta.tables import TABLES
from kit.kiln_table import append_rows

HOUR = 3_600_000_000
DAY = 24 * HOUR
MIB = 1 << 20
RULES = MaintenancePolicy(target=128 * MIB, keep=12 * HOUR)
TABLE = "updates"
NAMES = [column.name for column in TABLES[TABLE].columns]


def now() -> int:
    return time.time_ns() // 1_000


@dataclass
class Appender:
    """A query whose micro-batch n appends ten rows of `updates`, of any separator."""

    lake: Lake
    query: str = "q"
    batch: int = 0
    at: int = 0
    """when the first row was heard; 0: now"""

    def __post_init__(self) -> None:
        self._commits = DeltaRsCommits(self.lake)
        self._first = self.at or now()

    def append(self, times: int = 1) -> None:
        for _ in range(times):
            out = TableFiles(self.lake, TABLE)
            for number in range(10):
                out.add(self.row(number))
            starts, ends = ({"kiln.updates": {0: 10 * each}} for each in (self.batch, self.batch + 1))
            progress = BatchProgress(
                query_id=self.query, batch=self.batch, writes=[f"{TABLE}:append"], starts=starts, ends=ends
            )
            assert self._commits.commit(TABLE, out.close(), WriteId(self.query, self.batch), progress)
            self.batch += 1

    def row(self, number: int) -> tuple[object, ...]:
        name = f"{self.query}-{self.batch}-{number}"
        heard = self._first + self.batch * 1_000_000 + number
        of_model = (None, None) if number == 9 else ("model", f"k{number * 7 % 5}")
        return (
            *("n", "LIVE", name, None, *of_model, None, f"stream {number % 3}", f"tip {name}", heard, heard),
            *(0, self.batch * 10 + number),
        )


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    made = Lake(str(tmp_path / "lake"))
    made.create([TABLE])
    return made


LONG = 160
"""commits of the long log"""


@pytest.fixture(scope="module")
def made_long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lake = Lake(str(tmp_path_factory.mktemp("long") / "lake"))
    lake.create([TABLE])
    Appender(lake).append(LONG)
    return Path(lake.path)


@pytest.fixture
def long(made_long: Path, tmp_path: Path) -> Lake:
    """A table with a log of a query `q` that is worth shortening, once it is old."""
    shutil.copytree(made_long, tmp_path / "long")
    return Lake(str(tmp_path / "long"))


def folder(lake: Lake) -> Path:
    return Path(lake.table(TABLE))


def cared(lake: Lake, rules: MaintenancePolicy = RULES, at: int | None = None) -> MaintenanceResult:
    return maintain_table(lake, TABLE, rules, now() if at is None else at, lambda _: None)


def rows(lake: Lake, version: int | None = None) -> list[tuple[object, ...]]:
    """As deltalake reads them, whatever their order."""
    table = DeltaTable(lake.table(TABLE), version=version).to_pyarrow_table()
    return sorted(zip(*(table[name].to_pylist() for name in NAMES), strict=True), key=repr)


def rows_of_duckdb(lake: Lake) -> list[tuple[object, ...]]:
    return sorted(query_lake(lake, f"SELECT {', '.join(NAMES)} FROM {TABLE}").rows(), key=repr)


def number_of_files(lake: Lake) -> int:
    return len(lake.open(TABLE).file_uris())


def versions(lake: Lake) -> list[int]:
    return [entry.version for entry in read_log(lake.folder(TABLE))[0]]


# ---------------------------------------------------------------- tables


def test_small_files_become_one_and_every_reader_sees_the_same_rows(lake: Lake) -> None:
    Appender(lake).append(30)
    before = rows(lake)
    seen = rows_of_duckdb(lake)
    done = cared(lake)
    assert done.files == (30, 1)
    assert number_of_files(lake) == 1
    assert rows(lake) == before
    assert rows_of_duckdb(lake) == seen
    assert cared(lake).rewritten == 0, "nothing is left to do"


def test_a_compacted_file_states_what_holds_for_its_rows_and_is_sorted(lake: Lake) -> None:
    Appender(lake).append(20)
    cared(lake)
    adds = pa.table(lake.open(TABLE).get_add_actions(flatten=True))
    data = lake.open(TABLE).to_pyarrow_table()
    assert adds["num_records"].to_pylist() == [200]
    for name in list_stats_columns(TABLES[TABLE]):
        told = [adds[f"{end}.{name}"][0].as_py() for end in ("min", "max")]
        assert told == [pc.min(data[name]).as_py(), pc.max(data[name]).as_py()], name
        assert adds[f"null_count.{name}"][0].as_py() == data[name].null_count
    order = [data[name].to_pylist() for name in LAYOUTS[TABLE].order]
    keys = [tuple((value is None, value) for value in key) for key in zip(*order, strict=True)]
    assert keys == sorted(keys)
    in_file = pq.ParquetFile(folder(lake) / adds["path"][0].as_py())
    assert in_file.metadata.num_row_groups == 1, "the rows of twenty files are one row group"


def test_streaming_readers_are_told_that_no_row_is_new(lake: Lake) -> None:
    Appender(lake).append(10)
    cared(lake)
    entry = locate_commit(lake.folder(TABLE), lake.open(TABLE).version()).read().splitlines()
    actions = [json.loads(line) for line in entry]
    assert {each[kind]["dataChange"] for each in actions for kind in ("add", "remove") if kind in each} == {False}


def test_nobody_who_appends_in_a_loop_loses_a_row_or_fails(lake: Lake) -> None:
    """Two queries commit as fast as they can, beside one that compacts, shortens the log and removes files."""
    failed: list[Exception] = []
    counts: dict[str, int] = {}
    over = threading.Event()

    def run(query: str) -> None:
        appender = Appender(lake, query)
        try:
            while not over.is_set():
                appender.append()
        except (KilnError, DeltaError, OSError) as error:
            failed.append(error)
        counts[query] = appender.batch

    threads = [threading.Thread(target=run, args=(query,)) for query in ("a", "b")]
    for thread in threads:
        thread.start()
    done: list[MaintenanceResult] = []
    while not failed and not (
        versions(lake)[0] > 0  # the log was shortened meanwhile
        and sum(each.rewritten > 0 for each in done) > 3
        and any(each.garbage[0] for each in done)
    ):
        done.append(cared(lake, MaintenancePolicy(128 * MIB, keep=0), at=now()))
    over.set()
    for thread in threads:
        thread.join()
    assert not failed
    expected = sorted(
        f"{query}-{batch}-{number}" for query, n in counts.items() for batch in range(n) for number in range(10)
    )
    assert sorted(str(row[NAMES.index("message_id")]) for row in rows(lake)) == expected
    for query, batches in counts.items():  # known still, and so not written twice
        assert not DeltaRsCommits(lake).commit(TABLE, [], WriteId(query, batches - 1))


def test_the_log_is_short_and_every_version_that_it_tells_of_can_be_read(long: Lake) -> None:
    driver = Appender(long, batch=LONG)
    driver.append()
    cared(long)
    assert versions(long)[0] == 0, "the log is young"
    before, seen = rows(long), rows_of_duckdb(long)
    done = cared(long, at=now() + 13 * HOUR)
    kept = versions(long)
    assert kept[0] == 49, "the last checkpoint before the newest hundred commits"
    assert done.entries == (LONG + 3, len(kept))
    for version in (*kept[:2], kept[50], *kept[-2:]):
        assert len(rows(long, version)) == 10 * min(version, LONG + 1)
    assert rows(long) == before
    assert rows_of_duckdb(long) == seen
    driver.append()
    assert len(rows(long)) == 10 * LONG + 20, "a driver that knew the long log goes on"
    assert not DeltaRsCommits(long).commit(TABLE, [], WriteId("q", LONG + 1)), "what it wrote stays known"


def test_a_driver_that_stood_still_while_the_log_went_on_goes_on_too_and_notices_a_second_one(long: Lake) -> None:
    slow, first, second = Appender(long, "slow"), Appender(long, "same"), Appender(long, "same", batch=1)
    for driver in (slow, first, second):
        driver.append()
    Appender(long, "fast").append(LONG)
    cared(long, at=now() + 13 * HOUR)
    assert versions(long)[0] > LONG + 3
    slow.append(2)
    assert sum(str(row[2]).startswith("slow") for row in rows(long)) == 30
    first.batch = 2
    with pytest.raises(SecondWriterError):
        first.append()


def test_files_that_the_log_still_tells_of_stay_and_then_go(lake: Lake) -> None:
    appender = Appender(lake)
    appender.append(120)
    cared(lake)
    assert len(list(folder(lake).glob("*.parquet"))) == 121
    assert cared(lake, at=now() + 100 * DAY).garbage == (0, 0), "a hundred commits stay, and what they name"
    appender.append(110)
    done = cared(lake, at=now() + 13 * HOUR)
    assert done.garbage[0] == 120
    assert len(rows(lake)) == 2300


def test_a_file_that_a_task_has_written_is_not_touched_before_its_query_is_past_it(lake: Lake) -> None:
    """Also where the machine slept between the file and the commit."""
    appender = Appender(lake)
    appender.append()
    out = TableFiles(lake, TABLE)
    out.add(appender.row(0))
    (waiting,) = out.close()
    cared(lake, at=now() + 30 * DAY)
    assert (folder(lake) / waiting.name).exists()
    assert DeltaRsCommits(lake).commit(TABLE, [waiting], WriteId("q", 1))
    assert len(rows(lake)) == 11


def test_what_a_crash_left_goes_once_its_query_is_past_it(lake: Lake) -> None:
    out = TableFiles(lake, TABLE)
    out.add(Appender(lake).row(0))
    (left,) = out.close()
    two_days_ago = time.time() - 2 * 86_400
    os.utime(folder(lake) / left.name, (two_days_ago, two_days_ago))
    (folder(lake) / "_delta_log" / "_commit_x.json.tmp").write_text("{")
    os.utime(folder(lake) / "_delta_log" / "_commit_x.json.tmp", (two_days_ago, two_days_ago))
    Appender(lake).append()
    done = cared(lake)
    assert done.garbage == (1, left.size)
    assert not (folder(lake) / left.name).exists()
    assert not list((folder(lake) / "_delta_log").glob("_commit_*"))
    assert len(rows(lake)) == 10


def test_nothing_is_deleted_by_age_where_nobody_asked_for_it(lake: Lake) -> None:
    Appender(lake, at=now() - 4_000 * DAY).append(20)
    cared(lake, at=now() + 365 * DAY)
    assert len(rows(lake)) == 200


def test_rows_go_by_age_as_whole_files_and_a_file_is_written_anew_only_where_it_must(lake: Lake) -> None:
    old, young = Appender(lake, "old", at=now() - 40 * DAY), Appender(lake, "young")
    old.append(3)
    young.append(3)
    both = TableFiles(lake, TABLE)
    for appender in (old, young):
        both.add(appender.row(0))
    straddling = both.close()
    DeltaRsCommits(lake).commit(TABLE, straddling, WriteId("both", 0))
    within = {file.path for file in read_state(lake, TABLE).files}
    rules = MaintenancePolicy(128 * MIB, 12 * HOUR, retention=30 * DAY)
    assert predict_result(lake, TABLE, rules, now()).files == (7, 4)
    done = cared(lake, rules)
    assert done.expired_rows == 31
    assert {str(row[2]).split("-")[0] for row in rows(lake)} == {"young"}
    assert len(rows(lake)) == 31
    assert len({file.path for file in read_state(lake, TABLE).files} & within) == 3, "young files stay as they are"


def test_rows_that_go_by_age_do_not_make_an_append_fail(lake: Lake) -> None:
    old, driver = Appender(lake, "old", at=now() - 40 * DAY), Appender(lake)
    driver.append()
    old.append(3)
    driver.append()  # and so knows the old files
    assert cared(lake, MaintenancePolicy(128 * MIB, 12 * HOUR, retention=30 * DAY)).expired_rows == 30
    driver.append()
    assert len(rows(lake)) == 30


def test_a_look_alone_changes_nothing(lake: Lake) -> None:
    Appender(lake).append(20)
    before = sorted(path.name for path in folder(lake).rglob("*"))
    seen = predict_result(lake, TABLE, RULES, now())
    assert seen.files == (20, 1)
    assert seen.words
    assert sorted(path.name for path in folder(lake).rglob("*")) == before


def test_two_who_take_out_the_same_files_do_not_both_come_through(lake: Lake) -> None:
    Appender(lake).append(10)
    state, other = read_state(lake, TABLE), lake.open(TABLE)
    cared(lake)
    assert not replace_files(lake, TABLE, other, state.files, (), "the same", removes_rows=True)
    assert len(rows(lake)) == 100


def test_a_table_of_somebody_else_is_left_alone(lake: Lake) -> None:
    append_rows(Path(lake.table("tips")), pa.table({"stream": ["s"], "tip": ["t"]}), ["stream"])
    done = maintain_table(lake, "tips", RULES, now(), lambda _: None)
    assert done.left_alone == "it has partition columns"


def test_a_file_that_is_gone_is_said_in_words_and_the_table_stays_as_it_is(lake: Lake) -> None:
    Appender(lake).append(10)
    gone = folder(lake) / read_state(lake, TABLE).files[3].path
    gone.unlink()
    with pytest.raises(MaintenanceError, match=f"cannot compact table updates: its file .*{gone.name} is missing"):
        cared(lake)
    assert number_of_files(lake) == 10
    assert len(list(folder(lake).glob("*.parquet"))) == 9, "what was begun is taken away"


_KILLED = """
import sys, time
from kiln.conf.process.location import FileEntry
from kiln.pipelines.maintenance.plan import MaintenancePolicy
from kiln.pipelines.maintenance.steps import maintain_table
from kiln.pipelines.delta.lake import Lake
rules = MaintenancePolicy(128 << 20, keep=0)
maintain_table(Lake(sys.argv[1]), "updates", rules, time.time_ns() // 1000, lambda words: print(words, flush=True))
"""


@pytest.mark.parametrize(
    "after", [0.0, 0.01, 0.08, *(pytest.param(at, marks=pytest.mark.slow) for at in (0.002, 0.03))]
)
def test_a_kill_in_the_midst_leaves_a_table_and_the_next_one_goes_on(long: Lake, after: float) -> None:
    lake = long
    before = rows(lake)
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED, lake.path], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()  # it has begun to write
    time.sleep(after)  # the moments differ on purpose
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert rows(lake) == before
    assert inspect_log(lake, TABLE).torn == []
    cared(lake)
    assert number_of_files(lake) == 1
    assert rows(lake) == before


# ---------------------------------------------------------------- beside recovery


def lack(lake: Lake, batch: int) -> None:
    """Let another table of the query end before a micro-batch."""
    lake.create(["tips"])
    for each in (batch - 1, batch):
        at = {"kiln.updates": {0: 10 * each}}
        writes = [f"{TABLE}:append", "tips:append", *(["streams:append"] if each == batch else [])]
        progress = BatchProgress(query_id="q", batch=each, writes=writes, starts=at, ends=at)
        assert DeltaRsCommits(lake).commit("tips", [], WriteId("q", each), progress)


def test_a_table_goes_back_to_before_a_micro_batch_over_a_compaction(lake: Lake) -> None:
    appender = Appender(lake)
    appender.append(20)
    before = rows(lake)
    cared(lake)
    appender.append(10)
    cared(lake)
    lack(lake, 20)
    point = find_restore_point(lake, [TABLE, "tips", "streams"])
    assert point is not None
    assert point.offsets == {"kiln.updates": {0: 200}}
    restore_version(lake, TABLE, point.versions[TABLE])
    assert rows(lake) == before


def test_a_table_goes_back_within_a_short_log(long: Lake) -> None:
    cared(long, at=now() + 13 * HOUR)
    assert find_newest_write(long, TABLE, "q", inspect_log(long, TABLE)) == LONG - 1
    lack(long, 100)
    point = find_restore_point(long, [TABLE, "tips", "streams"])
    assert point is not None
    restore_version(long, TABLE, point.versions[TABLE])
    assert len(rows(long)) == 1000


def test_a_table_does_not_go_back_further_than_its_log(long: Lake) -> None:
    cared(long, at=now() + 13 * HOUR)
    lack(long, 20)
    with pytest.raises(RestoreError, match="maintenance has removed that version from the log"):
        find_restore_point(long, [TABLE, "tips", "streams"])


def test_a_torn_checkpoint_of_a_short_log_is_found(long: Lake) -> None:
    lake = long
    cared(lake, at=now() + 13 * HOUR)
    before = rows(lake)
    log = folder(lake) / "_delta_log"
    newest = max(log.glob("*.checkpoint.parquet"))
    newest.write_bytes(b"")
    found = inspect_log(lake, TABLE).checkpoints
    assert newest in found
    for path in found:
        path.unlink()
    assert rows(lake) == before


def test_nothing_looks_torn_after_care(long: Lake) -> None:
    lake = long
    cared(lake, MaintenancePolicy(128 * MIB, keep=0), at=now() + DAY)
    Appender(lake, batch=LONG).append(60)
    cared(lake, MaintenancePolicy(128 * MIB, keep=0), at=now() + 2 * DAY)
    assert versions(lake)[0] > 0
    log = inspect_log(lake, TABLE)
    assert (log.torn, log.within, log.checkpoints) == ([], [], [])


# ---------------------------------------------------------------- the plan


def file(size: int, at: int = 0, *, least: int | None = None) -> TableFile:
    return TableFile(f"{size}-{at}", size, 1, at, at if least is None else least, at)


@given(
    st.lists(st.tuples(st.integers(1, 200 * MIB), st.integers(0, 40 * DAY)), max_size=60), st.sampled_from([None, DAY])
)
def test_each_file_is_taken_once_and_comes_together_with_files_of_its_time(
    given_files: list[tuple[int, int]], retention: int | None
) -> None:
    files = [file(size, at) for size, at in given_files]
    steps = plan.plan_compaction(files, MaintenancePolicy(128 * MIB, HOUR, retention=retention), 40 * DAY)
    taken = [each for step in steps for each in step.files]
    assert len(taken) <= len(files)
    for step in steps:
        assert len(step.files) > 1
        assert plan.total_size(step.files) <= 128 * MIB
        if retention is not None:
            assert len({each.modified // DAY for each in step.files}) == 1


def test_a_row_is_written_a_few_times_however_often_a_table_is_cared_for() -> None:
    """A micro-batch of 200 kB each, care after each sixty, a month long: 4 GB."""
    files: list[TableFile] = []
    written = brought = most = 0
    rules = MaintenancePolicy(128 * MIB, HOUR)
    for minute in range(0, 60 * 24 * 30, 10):
        at = minute * 60_000_000
        files += [file(200_000, at + number) for number in range(6)]
        brought += 6 * 200_000
        steps = plan.plan_compaction(files, rules, at)
        for step in steps:
            gone = {id(each) for each in step.files}
            files = [each for each in files if id(each) not in gone]
            made = plan.total_size(step.files)
            files.append(file(made, max(each.modified for each in step.files)))
            written += made
        most = max(most, len(files))
    assert written / brought < 5
    assert most < brought / (64 * MIB) + 40


def entries(count: int, first: int = 0, every: int = 1_000_000) -> list[LogEntry]:
    return [LogEntry(first + number, number * every) for number in range(count)]


def test_the_log_begins_at_a_checkpoint_that_all_that_must_stay_follows() -> None:
    rules = MaintenancePolicy(128 * MIB, keep=HOUR)
    log = entries(10_000)  # one a second
    at = log[-1].at
    checkpoints = set(range(49, 10_000, 50))
    begins = plan.choose_log_start(log, checkpoints, rules, at)
    assert begins == 6_399  # an hour is 3,600 commits
    assert plan.choose_log_start(log, set(), rules, at) is None
    assert plan.choose_log_start(log, {9_999}, rules, at) is None
    assert plan.choose_log_start(log[:100], checkpoints, rules, at + 10 * DAY) is None, "the newest hundred stay"
    assert plan.choose_log_start(log, checkpoints, replace(rules, pinned=3_000), at) == 2_999
    assert plan.choose_log_start(log, checkpoints, replace(rules, pinned=20), at) is None


def test_a_log_of_many_commits_is_shortened_to_the_last_hour_before_its_time() -> None:
    rules = MaintenancePolicy(128 * MIB, keep=12 * HOUR)
    log = entries(20_000)
    begins = plan.choose_log_start(log, set(range(49, 20_000, 50)), rules, log[-1].at)
    assert begins == 14_999
    quick = entries(20_000, every=100_000)  # ten a second: an hour has more
    assert plan.choose_log_start(quick, set(range(49, 20_000, 50)), rules, quick[-1].at) is None


@given(st.data())
def test_no_file_goes_that_the_log_tells_of_or_that_is_young(data: st.DataObject) -> None:
    names = [f"f{number}" for number in range(8)]
    strays = [FileEntry(name, 1, data.draw(st.integers(0, 10 * DAY))) for name in names]
    named = RemovedFiles(
        frozenset(data.draw(st.sets(st.sampled_from(names)))), frozenset(data.draw(st.sets(st.sampled_from(names))))
    )
    newest = data.draw(st.none() | st.integers(0, 10 * DAY))
    gone = plan.select_garbage(strays, named, RULES, newest, 10 * DAY)
    for stray in gone:
        assert stray.name not in named.after_start
        assert stray.name in named.before_start or (newest is not None and stray.modified < newest - DAY)
