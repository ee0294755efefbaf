"""kiln.pipelines.runtime.dedup_store: each digest passes once, however micro-batches are cut and repeated, and is
forgotten."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import ROOT
from kiln.conf.process.errors import KilnError
from kiln.conf.process.location import parse_location
from kiln.pipelines.runtime.checkpoint import Checkpoint
from kiln.pipelines.runtime.dedup_store import (
    FILE_NAME,
    DedupStore,
    DedupStoreConfig,
    DedupStoreError,
    DedupStoreState,
    chunk_copies,
    filter_new_copies,
    read_dedup_state,
    read_marked_epoch,
)
from kiln.pipelines.runtime.deduplication import FileDeduplication, StateDeduplication, find_deduplication
from kiln.schemas.kafka.records import Epoch

SPAN = 1_000
BATCH = Epoch("query", 7)


class Copy(NamedTuple):
    position: str
    identities: tuple[bytes, ...]
    size: int = 1


def copy(at: int, *digests: int) -> Copy:
    return Copy(f"0/{at}", tuple(digest.to_bytes(16) for digest in digests))


def filter_copies(copies: Iterable[Copy], config: DedupStoreConfig, epoch: Epoch) -> Iterator[Copy]:
    """The copies that pass, one after another."""
    return chain.from_iterable(filter_new_copies(chunk_copies(copies), config, 0, epoch))


def digests(copies: Sequence[Copy]) -> list[bytes]:
    return [copy.identities[0] for copy in copies]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[DedupStore]:
    with DedupStore(DedupStoreConfig(str(tmp_path / "file"), SPAN)) as opened:
        yield opened


def test_one_copy_of_each_digest_passes(file: DedupStore) -> None:
    assert file.filter_new([copy(0, 1), copy(1, 2), copy(2, 1)], 0) == [copy(0, 1), copy(1, 2)]
    assert file.filter_new([copy(3, 2), copy(4, 3), copy(5, 1)], 1) == [copy(4, 3)]


def test_the_copy_that_passed_passes_again_and_no_other(file: DedupStore) -> None:
    """As when a crash repeats a micro-batch."""
    file.filter_new([copy(0, 1), copy(1, 2)], 0)
    assert file.filter_new([copy(2, 2), copy(1, 2), copy(0, 1)], 5) == [copy(1, 2), copy(0, 1)]


def test_a_copy_that_the_second_digest_stops_is_known_by_its_first(file: DedupStore) -> None:
    """As with one operator after the other (decision 10)."""
    assert file.filter_new([copy(0, 1, 10), copy(1, 2, 10), copy(2, 2, 11), copy(3, 3, 12)], 0) == [
        copy(0, 1, 10),
        copy(3, 3, 12),
    ]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))))
def test_two_digests_are_as_two_operators(pairs: list[tuple[int, int]]) -> None:
    """Which know nothing of each other's digests, though they may be the same (`identities` of an unsigned message)."""
    first: set[int] = set()
    second: set[int] = set()
    expected = []
    for at, (early, late) in enumerate(pairs):
        if early not in first:
            first.add(early)
            if late not in second:
                second.add(late)
                expected.append(copy(at, early, late))
    with TemporaryDirectory() as folder, DedupStore(DedupStoreConfig(f"{folder}/file", SPAN)) as file:
        assert file.filter_new([copy(at, *pair) for at, pair in enumerate(pairs)], 0) == expected


@pytest.mark.parametrize(("later", "known"), [(SPAN - 1, True), (SPAN, False), (-50 * SPAN, True)])
def test_a_digest_is_known_for_the_span_and_no_longer(file: DedupStore, later: int, known: bool) -> None:
    file.filter_new([copy(0, 1)], 100 * SPAN)
    assert file.filter_new([copy(1, 1)], 100 * SPAN + later) == ([] if known else [copy(1, 1)])


class Read(NamedTuple):
    """A part of the log, as a task reads it."""

    first: int
    end: int
    done: bool
    """whether the micro-batch ended with it; else Kiln was killed, and the micro-batch comes again"""


@st.composite
def readings(draw: st.DrawFn, length: int) -> list[list[Read]]:
    """For each micro-batch, what its attempts read: parts in any order, of which those that were killed miss some."""
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=4)))
    found = []
    for first, end in zip([0, *cuts], [*cuts, length], strict=True):
        attempts: list[Read] = []
        for done in [*draw(st.lists(st.just(False), max_size=2)), True]:
            inner = sorted(draw(st.sets(st.integers(first, end), max_size=3)))
            parts = [Read(a, b, done) for a, b in zip([first, *inner], [*inner, end], strict=True)]
            attempts += draw(st.permutations(parts))[: None if done else draw(st.integers(0, len(parts)))]
        found.append(attempts)
    return found


@given(st.data())
def test_each_digest_passes_once_however_micro_batches_are_cut_and_repeated(data: st.DataObject) -> None:
    """Of the attempts that ended; and the killed ones let through no copy that these do not."""
    log = [copy(at, digest) for at, digest in enumerate(data.draw(st.lists(st.integers(0, 5), min_size=2)))]
    with TemporaryDirectory() as folder:
        remembered = DedupStoreConfig(f"{folder}/file", SPAN)
        killed: set[Copy] = set()
        passed: list[Copy] = []
        for attempts in data.draw(readings(len(log))):
            for read in attempts:
                with DedupStore(remembered) as file:  # another process each time
                    found = file.filter_new(log[read.first : read.end], data.draw(st.integers(0, SPAN - 1)))
                if read.done:
                    passed += found
                else:
                    killed |= set(found)
        assert Counter(digests(passed)) == Counter(set(digests(log)))
        assert killed <= set(passed)


def count(folder: Path) -> int:
    """Digests in the file, as the file says and as they are."""
    with closing(sqlite3.connect(folder / FILE_NAME)) as file:
        (found,) = file.execute("SELECT count(*) FROM digests").fetchone()
    said = read_dedup_state(folder)
    assert said.rows == found
    assert 4_096 <= said.size <= 40_000 + 150 * found
    return int(found)


def test_what_is_forgotten_takes_no_room(tmp_path: Path) -> None:
    """The file holds what it must, and an eighth more, however much has gone through it."""
    remembered = DedupStoreConfig(str(tmp_path / FILE_NAME), 1_000)
    a_time = 100
    counts: list[int] = []
    with DedupStore(remembered) as file:
        for time in range(100):
            now = time * a_time
            file.filter_new([copy(number, number) for number in range(time * 200, time * 200 + 200)], now)
            counts.append(count(tmp_path))
    most = 200 * 1_000 // a_time
    assert max(counts) <= 1.25 * most
    assert min(counts[-50:]) >= most


def test_a_digest_of_another_turn_is_another_digest(tmp_path: Path) -> None:
    with DedupStore(DedupStoreConfig(str(tmp_path / FILE_NAME), SPAN)) as file:
        assert file.filter_new([copy(0, 6, 7), copy(1, 7), copy(2, 5, 7)], 0) == [copy(0, 6, 7), copy(1, 7)]
    assert read_dedup_state(tmp_path / "elsewhere") == read_dedup_state(None) == DedupStoreState()


def test_a_task_asks_for_many_copies_together_and_they_keep_their_order(tmp_path: Path) -> None:
    remembered = DedupStoreConfig(str(tmp_path / "file"), SPAN)
    copies = [copy(at, at // 2) for at in range(5_000)]
    assert list(filter_copies(copies, remembered, BATCH)) == copies[::2]
    large = (Copy(f"1/{at}", (at.to_bytes(16),), 9 << 20) for at in range(10_000, 10_010))
    found = filter_copies(large, remembered, BATCH)
    assert next(found).position == "1/10000"
    assert next(large).position == "1/10002", "of large copies a task holds few at a time"


TASK = """
import sys
from pathlib import Path

sys.path.insert(0, {root!r})
from kiln.conf.process.errors import KilnError
from kiln.conf.process.location import parse_location
from kiln.pipelines.runtime.dedup_store import DedupStoreConfig
from kiln.pipelines.runtime.deduplication import FileDeduplication, StateDeduplication, find_deduplication
from kiln.schemas.kafka.records import Epoch
from tests.unit.pipelines.test_dedup_store import copy, filter_copies

print("ready", flush=True)
sys.stdin.readline()
copies = [copy({number} * 100_000 + at, at) for at in range(20_000)]
for each in filter_copies(copies, DedupStoreConfig({path!r}, 1_000), Epoch("q", 1)):
    print(each.position, int.from_bytes(each.identities[0]))
"""


def test_tasks_beside_each_other_let_each_digest_through_once(tmp_path: Path) -> None:
    """Four processes ask for the same digests at the same time."""
    path = str(tmp_path / "file")
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", TASK.format(root=str(ROOT), number=number, path=path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        )
        for number in range(4)
    ]
    for task in tasks:
        assert task.stdout is not None
        assert task.stdout.readline() == "ready\n"
    for task in tasks:
        assert task.stdin is not None
        task.stdin.write("\n")
        task.stdin.flush()
    passed = [line.split()[1] for task in tasks for line in task.communicate()[0].splitlines()]
    assert all(task.returncode == 0 for task in tasks)
    assert Counter(map(int, passed)) == Counter(range(20_000))


def test_the_file_says_which_micro_batch_it_has(tmp_path: Path) -> None:
    """Also one in which nothing came."""
    remembered = DedupStoreConfig(str(tmp_path / FILE_NAME), SPAN)
    with DedupStore(remembered):
        assert read_marked_epoch(tmp_path) == Epoch("", -1)
    copies = filter_copies([copy(at, at) for at in range(3_000)], remembered, BATCH)
    next(copies)
    assert read_marked_epoch(tmp_path) == Epoch("", -1), "the task is not at its end"
    assert sum(1 for _ in copies) == 2_999
    assert read_marked_epoch(tmp_path) == BATCH
    assert list(filter_copies([], remembered, Epoch("query", 8))) == []
    assert read_marked_epoch(tmp_path) == Epoch("query", 8)


def test_the_newest_time_is_kept_and_does_not_go_back(tmp_path: Path) -> None:
    with DedupStore(DedupStoreConfig(str(tmp_path / FILE_NAME), SPAN)) as file:
        for now in (50, 90, 70):
            file.mark(BATCH, now)
            file.filter_new([copy(now, now)], now)
    assert (read_dedup_state(tmp_path).rows, read_dedup_state(tmp_path).at) == (3, 90)
    assert Checkpoint(parse_location(tmp_path)).newest_time(SPAN) == 90


def test_a_task_asks_the_file_that_is_there_now(tmp_path: Path) -> None:
    """Somebody has put back another state folder, and a worker of Spark has the file of the old one open."""
    remembered = DedupStoreConfig(str(tmp_path / "file"), SPAN)
    assert list(filter_copies([copy(0, 1)], remembered, BATCH)) == [copy(0, 1)]
    for left in tmp_path.iterdir():
        left.unlink()
    assert list(filter_copies([copy(1, 1)], remembered, BATCH)) == [copy(1, 1)]
    with DedupStore(remembered) as file:
        assert file.filter_new([copy(2, 1)], 0) == []


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.data())
def test_a_power_cut_leaves_what_was_synced_and_nothing_half_done(sizes: list[int], data: st.DataObject) -> None:
    """Of the log that SQLite writes ahead, all up to some byte is on the disk, and what follows may be anything."""
    with TemporaryDirectory() as folder, TemporaryDirectory() as after:
        ends, held_then = [0], [0]
        with DedupStore(DedupStoreConfig(f"{folder}/{FILE_NAME}", SPAN, durable=True)) as file:
            log = Path(folder, f"{FILE_NAME}-wal")
            for number, size in enumerate(sizes):
                file.filter_new([copy(at, at) for at in range(number * 100, number * 100 + size)], 0)
                ends.append(log.stat().st_size)
                held_then.append(held_then[-1] + size)
            synced = data.draw(st.integers(0, len(sizes)))
            end = data.draw(st.integers(ends[synced], ends[-1]))
            shutil.copy(Path(folder, FILE_NAME), after)
            Path(after, log.name).write_bytes(log.read_bytes()[:end] + data.draw(st.binary(max_size=50)))
        with DedupStore(DedupStoreConfig(f"{after}/{FILE_NAME}", SPAN, durable=True)):
            found = count(Path(after))
        assert found in held_then[synced:]


def test_where_tasks_may_run_elsewhere_spark_remembers(tmp_path: Path) -> None:
    checkpoint = parse_location(tmp_path)
    file = FileDeduplication(DedupStoreConfig(str(tmp_path / FILE_NAME), 2 * SPAN, True))
    assert find_deduplication(checkpoint, "local[4]", SPAN, durable=True) == file
    assert find_deduplication(checkpoint, "spark://a:7077", SPAN, durable=True) == StateDeduplication(SPAN)
    assert find_deduplication(
        parse_location("s3://bucket/updates"), "local[4]", SPAN, durable=True
    ) == StateDeduplication(SPAN)
    (tmp_path / FILE_NAME).touch()
    with pytest.raises(
        KilnError, match=rf"spark.master spark://a:7077: .*{FILE_NAME}, which executors on other machines cannot open"
    ):
        find_deduplication(checkpoint, "spark://a:7077", SPAN, durable=True)
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / "state").mkdir()
    assert find_deduplication(checkpoint, "spark://a:7077", SPAN, durable=True) == StateDeduplication(SPAN)
    with pytest.raises(KilnError, match=rf"spark.master local\[4\]: .* \({tmp_path}/state\), which only"):
        find_deduplication(checkpoint, "local[4]", SPAN, durable=True)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"no database " * 1_000)
    with pytest.raises(DedupStoreError, match=str(path)):
        DedupStore(DedupStoreConfig(str(path), SPAN))


def test_tasks_that_make_the_file_at_once_do_not_lock_each_other_out(tmp_path: Path) -> None:
    together = Barrier(2)

    def open_and_close(path: Path) -> None:
        together.wait()
        with DedupStore(DedupStoreConfig(str(path), SPAN)):
            pass

    with ThreadPoolExecutor(2) as tasks:
        for number in range(300):  # without the lock, four of a hundred
            path = tmp_path / str(number)
            for opened in [tasks.submit(open_and_close, path) for _ in range(2)]:
                opened.result()


def test_a_full_disk_is_said_and_nothing_half_done_stays(file: DedupStore) -> None:
    file._file.execute("PRAGMA max_page_count = 4")
    with pytest.raises(DedupStoreError, match="full"):
        file.filter_new([copy(at, at) for at in range(10_000)], 0)
    file._file.execute("PRAGMA max_page_count = 1000")
    assert file.filter_new([copy(20_000, 1)], 0) == [copy(20_000, 1)]
