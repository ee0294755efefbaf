"""Two writers at the same moment, on an object store: no commit is lost, and no row comes twice.

A few rounds of each; KILN_TEST_RACES=200 makes as many.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Final

import pytest

from kiln.pipelines.backfill.run_log import SwapClaimedError, find_run
from kiln.pipelines.backfill.swap import FileSwap
from kiln.pipelines.backfill.swap_runs import swap_run
from kiln.pipelines.delta.commits import SecondWriterError, WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import DataFile, TableFiles, delete_files
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.maintenance.plan import MaintenancePolicy
from kiln.pipelines.maintenance.steps import MaintenanceResult, maintain_table
from kiln.schemas.delta.tables import TABLES
from kit.object_store import ObjectStore
from kit.run_tables import FROM, TO, begin, fill, history, message, tip, update

pytest_plugins = ["kit.object_store"]
pytestmark = pytest.mark.timeout(3600)

RACES: Final = int(os.environ.get("KILN_TEST_RACES", "3"))
_DAY: Final = 86_400_000_000


def at_once(*tasks: Callable[[], object]) -> list[object]:
    """Runs tasks in threads that begin at the same moment; what each gave, or why another one had the right of way."""
    start = Barrier(len(tasks))

    def run(task: Callable[[], object]) -> object:
        start.wait()
        try:
            return task()
        except (SecondWriterError, SwapClaimedError) as error:
            return error

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(run, tasks))


def files_of(lake: Lake, table: str, rows: Iterable[object]) -> list[DataFile]:
    files = TableFiles(lake, table)
    for row in rows:
        assert isinstance(row, dict)
        files.add(tuple(row[column.name] for column in TABLES[table].columns))
    return files.close()


def column(lake: Lake, table: str, name: str) -> list[str]:
    return sorted(map(str, lake.open(table).to_pyarrow_table(columns=[name])[name].to_pylist()))


class Driver:
    """A query's driver, as far as commits are concerned: it begins anew after another one was noticed."""

    def __init__(self, lake: Lake, table: str = "tips", query: str = "q") -> None:
        self.lake, self.table, self.query = lake, table, query
        self.noticed = self.wrote = 0
        self._commits = DeltaRsCommits(lake, durable=True)

    def files(self, rows: Iterable[object]) -> list[DataFile]:
        return files_of(self.lake, self.table, rows)

    def commit(self, batch: int, files: Sequence[DataFile]) -> None:
        try:
            if self._commits.commit(self.table, files, WriteId(self.query, batch)):
                self.wrote += 1
                return
        except SecondWriterError:
            self.noticed += 1
            self._commits = DeltaRsCommits(self.lake, durable=True)
        delete_files(self.lake, files)


def test_a_job_that_was_started_twice_writes_each_micro_batch_once(object_store: ObjectStore) -> None:
    lake = object_store.lake()
    lake.create(["tips"])
    drivers = [Driver(lake), Driver(lake)]
    for batch in range(RACES):
        rows = [tip(10 * batch + number, TO + batch) for number in range(10)]
        files = [driver.files(rows) for driver in drivers]
        at_once(*(partial(driver.commit, batch, its) for driver, its in zip(drivers, files, strict=True)))
    assert column(lake, "tips", "tip") == sorted(f"t{number}" for number in range(10 * RACES))
    assert sum(driver.wrote for driver in drivers) == RACES
    assert sum(driver.noticed for driver in drivers) > 0, "some of the commits met"
    print(f"{RACES} races, {sum(driver.noticed for driver in drivers)} noticed by the commit itself")


def test_queries_that_append_to_one_table_at_once_all_come_through(object_store: ObjectStore) -> None:
    lake = object_store.lake()
    lake.create(["tips"])
    drivers = [Driver(lake, query=f"q{number}") for number in range(4)]
    for batch in range(RACES):
        files = [driver.files([tip(10 * batch + number, TO)]) for number, driver in enumerate(drivers)]
        at_once(*(partial(driver.commit, batch, its) for driver, its in zip(drivers, files, strict=True)))
    expected = sorted(f"t{10 * batch + number}" for batch in range(RACES) for number in range(4))
    assert column(lake, "tips", "tip") == expected


def test_a_job_goes_on_beside_the_care_of_its_table(object_store: ObjectStore) -> None:
    """Rows of a month that is over: any two files are worth being one, so care has work in each race."""
    lake = object_store.lake()
    lake.create(["tips"])
    driver, rules = Driver(lake), MaintenancePolicy(128 << 20, keep=0)
    now = FROM + 400 * _DAY
    cared: list[MaintenanceResult] = []
    for batch in range(RACES + 2):
        files = driver.files([tip(10 * batch + number, FROM) for number in range(10)])
        if batch < 2:
            driver.commit(batch, files)
            continue
        _, done = at_once(
            partial(driver.commit, batch, files),
            partial(maintain_table, lake, "tips", rules, now, lambda words: None, durable=True),
        )
        assert isinstance(done, MaintenanceResult)
        cared.append(done)
    assert driver.noticed == 0
    assert column(lake, "tips", "tip") == sorted(f"t{number}" for number in range(10 * (RACES + 2)))
    assert sum(each.rewritten > 0 for each in cared) > RACES // 2


def test_a_swap_and_a_stream_lose_nothing_to_each_other(object_store: ObjectStore) -> None:
    lake = object_store.lake()
    lake.create(TABLES)
    fill(lake, history(range(20)))
    tables = {"messages": message, "updates": update}
    streams = {table: Driver(lake, table, "live") for table in tables}
    written = 0

    def stream(rounds: int) -> None:
        nonlocal written
        for _ in range(rounds):
            for table, made in tables.items():
                streams[table].commit(written, streams[table].files([made(1_000 + written, TO + written)]))
            written += 1

    for number in range(RACES):
        begin(lake, f"r{number}")
        fill(lake.locate_run(f"r{number}"), history(range(number % 7, 20 + number % 5)))
        run = find_run(lake, f"r{number}")
        assert run is not None
        at_once(
            partial(swap_run, lake, run, FileSwap(lake, durable=True), lambda: TO + 10, lambda words: None),
            partial(stream, 8),
        )
        expected = [*range(number % 7, 20 + number % 5), *range(1_000, 1_000 + written)]
        for table in tables:
            assert column(lake, table, "message_id") == sorted(f"m{each}" for each in expected), (number, table)
        lake.locate_run(f"r{number}").root.remove_all()
    assert sum(driver.noticed for driver in streams.values()) == 0
    assert written == 8 * RACES


def test_of_two_machines_that_swap_a_run_at_once_one_does(object_store: ObjectStore) -> None:
    lake = object_store.lake()
    lake.create(TABLES)
    refused = 0
    for number in range(RACES):
        name = f"r{number}"
        begin(lake, name)
        fill(lake.locate_run(name), history(range(number, 20 + number)))

        def swapped(by: str, name: str = name) -> object:
            run = find_run(lake, name)
            assert run is not None
            return swap_run(lake, run, FileSwap(lake, durable=True), lambda: TO + 10, lambda words: None, by=by)

        done = at_once(partial(swapped, "one:/state"), partial(swapped, "two:/state"))
        refused += sum(isinstance(each, SwapClaimedError) for each in done)
        assert swapped("two:/state") is None, "one of the two has swapped the run in"
        for table in ("messages", "updates", "tips"):
            rows = column(lake, table, "tip")
            assert rows == sorted(f"t{each}" for each in range(number, 20 + number)), (number, table)
        lake.locate_run(name).root.remove_all()
    assert refused == RACES
