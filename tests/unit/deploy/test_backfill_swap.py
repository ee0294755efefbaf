"""A run swapped in: live has the run's rows, whoever is killed and whoever appends meanwhile, and readers never see a
batch without its tips."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Semaphore, Thread

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Transaction

from kiln.deploy.query.ask import query_lake
from kiln.pipelines.backfill.run_diff import diff_run
from kiln.pipelines.backfill.run_log import append_event, find_run, read_events
from kiln.pipelines.backfill.swap import FileSwap
from kiln.pipelines.backfill.swap_runs import SwapError, add_frames, swap_run
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import DataFile, TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.tables import TABLES
from kit.run_tables import FROM, RUN_TABLES, TO, Row, append, begin, fill, history, message, row, tip, update

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
OUTSIDE = range(500, 510)
"""Updates after the range."""


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


def swapped(lake: Lake, exchange: FileSwap | None = None, name: str = "r") -> dict[str, int] | None:
    run = find_run(lake, name)
    assert run is not None
    return swap_run(lake, run, exchange or FileSwap(lake), lambda: TO + 10, lambda words: None)


def equal(lake: Lake) -> bool:
    run = find_run(lake, "r")
    assert run is not None
    return all(each.is_equal for each in diff_run(lake, run, lambda words: None))


def column(lake: Lake, table: str, name: str) -> list[object]:
    values: list[object] = lake.open(table).to_pyarrow_table(columns=[name])[name].to_pylist()
    return values


def check_reader(lake: Lake) -> None:
    """Each batch has its tips, each tip of a batch and each tip has its update, and no row is there twice."""
    bad = query_lake(
        lake,
        """
        SELECT 'tips of a batch', batch_cid FROM batches LEFT JOIN batch_tips AS t USING (batch_cid)
        GROUP BY batch_cid, batches.tip_count HAVING count(t.tip) <> batches.tip_count
        UNION ALL SELECT 'update of a batch', tip FROM batches JOIN batch_tips USING (batch_cid)
                  ANTI JOIN updates USING (stream, tip)
        UNION ALL SELECT 'update of a tip', tip FROM tips ANTI JOIN updates USING (network, stream, tip)
                  WHERE source = 'update'
        UNION ALL SELECT 'twice', message_id FROM messages GROUP BY network, message_id HAVING count(*) > 1
        UNION ALL SELECT 'twice', message_id FROM updates GROUP BY network, origin, message_id HAVING count(*) > 1
        UNION ALL SELECT 'twice', batch_cid FROM batches
                  GROUP BY network, origin, separator_key, separator_value, opened_at, batch_cid HAVING count(*) > 1
        UNION ALL SELECT 'twice', batch_cid FROM batch_tips GROUP BY batch_cid, stream, tip HAVING count(*) > 1""",
    )
    assert list(bad.rows()) == []


@pytest.fixture(scope="module")
def other_history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Live and a run that differ in every table: the run lacks some updates and has others, in other batches."""
    lake = Lake(str(tmp_path_factory.mktemp("other") / "lake"))
    fill(lake, history(range(40)))
    fill(lake, history(OUTSIDE, at=TO - 500_000_000, name="out"))
    begin(lake)
    tables = history(range(5, 50), name="b")
    tables["updates"][3] = update(8, FROM + 8_000_000, separator="model/k9")
    fill(lake.locate_run("r"), tables)
    return Path(lake.path)


@pytest.fixture
def differing(lake: Lake, other_history: Path) -> None:
    """Give `lake` the tables of `other_history`."""
    shutil.copytree(other_history, lake.path)


# ---------------------------------------------------------------- what a swap does


@pytest.mark.usefixtures("differing")
def test_live_has_the_run_s_rows_in_the_range_and_its_own_beyond(lake: Lake) -> None:
    append(lake, "tips", [tip(900, FROM, source="batch", batch_cid="c")])
    theirs = [
        row("quarantine", stage=stage, reason="r", data=stage.encode()) for stage in ("fetch", "separator", "frame")
    ]
    append(lake, "quarantine", theirs)
    append(lake, "publications", [row("publications", batch_cid="b0-9-10")])
    after = swapped(lake)
    assert equal(lake)
    assert after == {table: lake.open(table).version() for table in after or ()}
    check_reader(lake)
    messages = {f"m{number}" for number in (*range(5, 50), *OUTSIDE)}
    for table in ("copies", "messages", "updates"):
        assert sorted(map(str, column(lake, table, "message_id"))) == sorted(messages), table
    assert "t900" in column(lake, "tips", "tip")
    assert {"fetch", "separator", "frame"} <= set(column(lake, "quarantine", "stage"))
    assert column(lake, "publications", "batch_cid") == ["b0-9-10"]
    # what a batch of old held stays known: the batch may have been published
    assert "b0-9-10" in column(lake, "batch_tips", "batch_cid")
    assert "b0-9-10" not in column(lake, "batches", "batch_cid")


@pytest.mark.usefixtures("differing")
def test_each_table_changes_by_one_commit_and_updates_by_two(lake: Lake) -> None:
    lake.create(["frames"])
    before = {table: lake.open(table).version() for table in RUN_TABLES}
    swapped(lake)
    commits = {table: lake.open(table).version() - before[table] for table in RUN_TABLES}
    assert commits == {table: 2 if table == "updates" else 1 for table in RUN_TABLES}
    assert lake.open("frames").version() == 0


@pytest.mark.usefixtures("differing")
def test_a_second_swap_changes_nothing_and_says_so(lake: Lake) -> None:
    assert swapped(lake)
    before = {table: lake.open(table).version() for table in lake.tables()}
    assert swapped(lake) is None
    assert {table: lake.open(table).version() for table in lake.tables()} == before


@pytest.mark.usefixtures("differing")
def test_a_later_run_of_the_same_name_is_another(lake: Lake) -> None:
    swapped(lake)
    append_event(lake, "r", "dropped", TO + 20)
    shutil.rmtree(lake.locate_run("r").path)
    begin(lake, at=TO + 30)
    fill(lake.locate_run("r"), history(range(3)))
    assert swapped(lake)
    assert equal(lake)


def test_frames_that_live_has_not_are_added_and_none_is_removed(lake: Lake) -> None:
    frames = [
        row("frames", connection=b"%16d" % number, direction="IN", sequence=1, payload=b"%d" % number)
        for number in range(4)
    ]
    append(lake, "frames", frames[:3])
    begin(lake, source="files")
    append(lake.locate_run("r"), "frames", frames[2:])
    swapped(lake)
    assert set(column(lake, "frames", "payload")) == {b"0", b"1", b"2", b"3"}
    assert len(column(lake, "frames", "payload")) == 4


@pytest.mark.parametrize(("source", "words"), [("files", "the files do not have"), ("kafka", "Kafka did not have")])
def test_what_live_alone_heard_is_not_swapped_away_unless_asked_for(lake: Lake, source: str, words: str) -> None:
    """Not by a run that read something else than live's frames; nor does it matter where live heard nothing more."""
    fill(lake, history(range(10)))
    begin(lake, source=source)
    fill(lake.locate_run("r"), history(range(4, 20)))
    run = find_run(lake, "r")
    assert run is not None
    with pytest.raises(SwapError, match=f"the live tables have 4 messages and 4 copies that {words}, and"):
        swapped(lake)
    assert [each.event for each in read_events(lake)] == ["begun", "done"]
    assert len(column(lake, "messages", "message_id")) == 10
    assert swap_run(lake, run, FileSwap(lake), lambda: TO + 10, lambda words: None, replace=True)
    assert equal(lake)
    begin(lake, "more", source=source)
    fill(lake.locate_run("more"), history(range(2, 30)))
    assert swapped(lake, name="more")


def test_frames_alone_are_added_once_and_the_swap_goes_on_from_there(lake: Lake) -> None:
    frames = [
        row("frames", connection=b"%16d" % number, direction="IN", sequence=1, payload=b"%d" % number)
        for number in range(4)
    ]
    append(lake, "frames", frames[:3])
    fill(lake, history(range(10)))
    run = begin(lake, source="files")
    append(lake.locate_run("r"), "frames", frames[2:])
    exchange = FileSwap(lake)
    before = {table: lake.open(table).version() for table in lake.tables()}
    assert add_frames(lake, run, exchange, lambda words: None)
    assert not add_frames(lake, run, exchange, lambda words: None)
    assert sorted(map(repr, column(lake, "frames", "payload"))) == [repr(b"%d" % number) for number in range(4)]
    after = {table: lake.open(table).version() for table in lake.tables()}
    assert {table for table in after if after[table] != before[table]} == {"frames"}
    assert swap_run(lake, run, exchange, lambda: TO + 10, lambda words: None, replace=True)
    assert lake.open("frames").version() == after["frames"]
    with pytest.raises(SwapError, match=r"has no frames to add\. Omit --only-frames"):
        add_frames(lake, begin(lake, "own"), exchange, lambda words: None)


def test_a_claim_that_a_genesis_contradicts_is_told_once(lake: Lake) -> None:
    begin(lake)

    def claim(offset: int, data: bytes) -> Row:
        place = {"kafka_partition": 0, "kafka_offset": offset, "message_index": 0}
        return row("quarantine", stage="separator", reason="contradicts_genesis", data=data, **place)

    append(lake, "quarantine", [claim(1, b"the bridge's words")])
    append(lake.locate_run("r"), "quarantine", [claim(1, b"the run's words"), claim(2, b"new")])
    swapped(lake)
    assert set(column(lake, "quarantine", "data")) == {b"new", b"the bridge's words"}
    assert len(column(lake, "quarantine", "data")) == 2


def test_a_run_that_is_not_done_is_refused(lake: Lake) -> None:
    begin(lake, done=False)
    with pytest.raises(SwapError, match="run r is not done"):
        swapped(lake)


def test_frames_that_came_when_the_run_had_begun_are_a_reason_to_refuse(lake: Lake) -> None:
    lake.create(["frames"])
    begin(lake)
    append(lake, "frames", [row("frames")])
    with pytest.raises(SwapError, match="backfill run r: 1 frames of its time range were added to the table frames"):
        swapped(lake)
    assert [each.event for each in read_events(lake)] == ["begun", "done"]


def with_file_times(folder: Path, at: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (at, at))


@pytest.mark.parametrize("at", [0, TO // 1_000_000 + 1_000_000], ids=["1970", "after the run"])
def test_the_times_of_files_say_nothing_about_late_frames(lake: Lake, at: int) -> None:
    """A copied state folder has other ones."""
    append(lake, "frames", [row("frames", sequence=1)])
    begin(lake)
    with_file_times(Path(lake.path), at)
    assert swapped(lake)
    begin(lake, "later")
    append(lake, "frames", [row("frames", sequence=2)])
    with_file_times(Path(lake.path), at)
    with pytest.raises(
        SwapError, match="backfill run later: 1 frames of its time range were added to the table frames"
    ):
        swapped(lake, name="later")


@pytest.mark.parametrize("table", ["messages", "backfill/r/messages"])
def test_a_table_that_is_older_than_the_run_is_refused(lake: Lake, table: str, tmp_path: Path) -> None:
    """Of live, or of the run itself: the run's rows would take the place of rows that it has read, or has lost."""
    folder = Path(lake.path, table)
    fill(lake, history(range(5)))
    older = tmp_path / "older"
    if table == "messages":
        shutil.copytree(folder, older)
        append(lake, "messages", [message(7, FROM)])
    begin(lake)
    run_lake = lake.locate_run("r")
    if table != "messages":
        shutil.copytree(folder, older)
        append(run_lake, "messages", [message(7, FROM)])
        versions = {name: run_lake.open(name).version() for name in RUN_TABLES}
        append_event(lake, "r", "chunk", TO + 1, rows=1, details={"versions": versions})
    shutil.rmtree(folder)
    shutil.copytree(older, folder)
    before = {name: lake.open(name).version() for name in lake.tables()}
    with pytest.raises(
        SwapError, match=r"the table messages in .* is older than backfill run r: the table ends with version"
    ):
        swapped(lake)
    assert {name: lake.open(name).version() for name in lake.tables()} == before


@pytest.mark.usefixtures("differing")
def test_the_tables_open_in_deltalake_and_duckdb(lake: Lake) -> None:
    swapped(lake)
    for table in RUN_TABLES:
        opened = DeltaTable(lake.table(table))
        assert opened.protocol().min_reader_version == 1
        by_deltalake = opened.to_pyarrow_table()
        counted = list(query_lake(lake, f"SELECT count(*), count(DISTINCT COLUMNS(*)::VARCHAR) FROM {table}").rows())
        assert counted[0][0] == by_deltalake.num_rows
        assert by_deltalake.column_names == [column.name for column in TABLES[table].columns]
        stated = pa.table(opened.get_add_actions(flatten=True))["num_records"].to_pylist()
        assert sum(stated) == by_deltalake.num_rows


# ---------------------------------------------------------------- cut short


@contextmanager
def killed_swaps(lake: Lake) -> Iterator[Callable[[int], int]]:
    """`swap(moment)` swaps in a process that kills itself at that moment, and returns its exit code."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(Path(lake.path).parent)}
    script = [sys.executable, str(ROOT / "tests/kit/swap_killed.py"), lake.path, "r"]
    with subprocess.Popen(
        script, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def swap(moment: int) -> int:
            print(moment, file=asked, flush=True)
            return int(answers.readline())

        yield swap


@pytest.mark.usefixtures("differing")
def test_a_swap_killed_at_any_commit_leaves_a_consistent_lake_and_goes_on(lake: Lake) -> None:
    """Killed before and after each commit in turn, each time by the same swap that goes on."""
    deaths = 0
    with killed_swaps(lake) as swap:
        while (code := swap(1)) == -signal.SIGKILL:  # right after the first commit of what is left
            deaths += 1
            assert deaths <= len(RUN_TABLES) + 1, "a swap does not go on"
            check_reader(lake)
            if deaths == 4:
                assert swap(0) == -signal.SIGKILL  # its files are written, and nothing names them
                check_reader(lake)
    assert code == 0
    assert deaths == len(RUN_TABLES) + 1
    check_reader(lake)
    assert [each.event for each in read_events(lake)] == ["begun", "done", "swapping", "swapped"]
    assert equal(lake)


# ---------------------------------------------------------------- beside others


class Meanwhile(FileSwap):
    """Something happens right before each commit, when its files are written."""

    def __init__(self, lake: Lake, happens: dict[str, list[object]]) -> None:
        super().__init__(lake)
        self.happens = happens
        self.seen: list[str] = []
        self.lake = lake

    def commit(
        self, table: str, read: DeltaTable, gone: Collection[str], files: Sequence[DataFile], mark: Transaction
    ) -> bool:
        for each in self.happens.pop(table, []):
            assert callable(each)
            each()
        is_committed = super().commit(table, read, gone, files, mark)
        check_reader(self.lake)
        if is_committed:
            self.seen.append(table)
        return is_committed


@pytest.mark.usefixtures("differing")
def test_readers_are_right_after_each_commit(lake: Lake) -> None:
    exchange = Meanwhile(lake, {})
    swapped(lake, exchange)
    assert exchange.seen.index("batch_tips") < exchange.seen.index("batches")


@pytest.mark.usefixtures("differing")
def test_rows_that_come_into_the_range_while_a_swap_goes_on_stay(lake: Lake) -> None:
    late = [message(number, FROM + number) for number in (700, 701)]
    compact = [lambda: lake.open("messages").optimize.compact()]
    exchange = Meanwhile(
        lake,
        {
            "copies": [lambda: append(lake, "messages", late[:1])],  # before the step of messages is planned
            "messages": [lambda: append(lake, "messages", late[1:]), *compact],  # when it is, and its files are gone
        },
    )
    swapped(lake, exchange)
    messages = column(lake, "messages", "message_id")
    assert sorted(map(str, messages)) == sorted(f"m{number}" for number in (*range(5, 50), *OUTSIDE, 700, 701))
    assert not list(_orphans(lake, "messages"))


def _orphans(lake: Lake, table: str) -> set[str]:
    """Files that no version of the table names."""
    named = {
        Path(path).name
        for version in range(lake.open(table).version() + 1)
        for path in DeltaTable(lake.table(table), version=version).file_uris()
    }
    return {path.name for path in Path(lake.table(table)).glob("*.parquet")} - named


class Paced(FileSwap):
    """Lets a stream go on by a few micro-batches at each commit."""

    def __init__(self, lake: Lake, turns: Semaphore) -> None:
        super().__init__(lake)
        self._turns = turns

    def commit(
        self, table: str, read: DeltaTable, gone: Collection[str], files: Sequence[DataFile], mark: Transaction
    ) -> bool:
        self._turns.release(2)
        return super().commit(table, read, gone, files, mark)


def test_a_stream_appends_all_the_time_and_loses_nothing(lake: Lake) -> None:
    """One stream with one `DeltaRsCommits`, as the queries have it; two runs are swapped in meanwhile."""
    lake.create(TABLES)
    fill(lake, history(range(40)))
    stop, turns, failed, wrote = Event(), Semaphore(5), [], []

    def stream() -> None:
        commits = DeltaRsCommits(lake)
        number = 0
        try:
            while turns.acquire() and not stop.is_set():
                for table, made in (("messages", message), ("updates", update)):
                    files = TableFiles(lake, table)
                    rowed = made(1_000 + number, TO + number)
                    files.add(tuple(rowed[column.name] for column in TABLES[table].columns))
                    assert commits.commit(table, files.close(), WriteId("live", number))
                wrote.append(f"m{1_000 + number}")
                number += 1
        except BaseException as error:  # whatever it is: raised again
            failed.append(error)
            raise

    thread = Thread(target=stream)
    thread.start()
    try:
        for number in range(2):
            begin(lake, f"r{number}")
            fill(lake.locate_run(f"r{number}"), history(range(number, 40 + number)))
            assert swapped(lake, Paced(lake, turns), f"r{number}")
    finally:
        stop.set()
        turns.release()
        thread.join()
    assert not failed
    assert len(wrote) >= 20
    expected = sorted([*wrote, *(f"m{number}" for number in range(1, 41))])
    for table in ("messages", "updates"):
        assert sorted(map(str, column(lake, table, "message_id"))) == expected, table
