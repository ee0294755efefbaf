"""Puts a run's rows in the place of live's, over the run's range (docs/design, decision 22).

Each step is one commit of one table. Between any two of them, and wherever a swap is cut short, readers find the tips
of each batch, and the update of each tip.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from kiln.conf.process.errors import KilnError
from kiln.conf.process.location import Location
from kiln.pipelines.backfill.account import BackfillRun, claim_swap, tell
from kiln.pipelines.backfill.range_comparison import RangeComparison, TableSnapshot, both_sides, time_of
from kiln.pipelines.backfill.swap import FileSwap, OvertakenError, SwapMarker
from kiln.pipelines.delta.arrow_rows import arrow_schema
from kiln.pipelines.delta.files import DataFile, TableFiles, discard
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.tables import TABLES

STEPS: Final = (
    "frames",
    "copies",
    "messages",
    "updates",
    "batch_tips",
    "batches",
    "tips",
    "updates_rest",
    "quarantine",
)
"""In this order. `updates` keeps the updates that only live has, until no batch and no tip speaks of them."""

_TRIES: Final = 10
_ROWS_AT_ONCE: Final = 20_000
_AT_ONCE: Final = 1 << 20  # bytes
_CLAIM_STAGE: Final = "separator"
_CLAIM: Final = ("stage", "reason", "kafka_partition", "kafka_offset", "message_index")
"""What tells apart claims that a genesis contradicts: the bridge and the queries say each in other words."""

_REST: Final = "swap-rest.parquet"
"""In the run's folder: the keys of the updates that `updates` kept, and `updates_rest` takes out."""


class SwapError(KilnError):
    """The run cannot be swapped; the message says why."""


@dataclass(frozen=True)
class _RemovedFiles:
    """Files that a step takes out, as the log names them, and which of their rows are not to be in the table again."""

    files: tuple[str, ...]
    condition: str


@dataclass(frozen=True)
class SwapStep:
    """What a step commits."""

    gone: Sequence[str]
    files: Sequence[DataFile]


def swap(
    lake: Lake,
    run: BackfillRun,
    exchange: FileSwap,
    now: Callable[[], int],
    say: Callable[[str], None],
    *,
    replace: bool = False,
    by: str = "",
    take_over: bool = False,
) -> dict[str, int] | None:
    """Swaps the run in, or goes on with a swap that was cut short. Returns the version of each table afterwards, and
    None where the run is swapped in already. `now`: µs. `say` hears of each step. `replace`: also where live heard what
    the run did not. `by`, `take_over`: as `claim_swap` takes them.

    ClaimedError: somebody elsewhere swaps. SwapError: the run is not done, live heard what the run did not, or other
    work on the tables does not let a step through. LakeError.
    """
    events = [each.event for each in run.events]
    if "swapped" in events:
        return None
    _check_done(run)
    tables = [table for table in TABLES if table in STEPS]
    lake.create(tables)
    if "swapping" not in events:
        with both_sides(lake, run) as sides:
            _check_late(sides, run)
            if not replace:
                _check_heard(sides, run)
        before = {table: lake.open(table).version() for table in tables}
    else:
        before = _versions(next(each.details for each in reversed(run.events) if each.event == "swapping"))
    claim_swap(lake, run, by, now(), before, take_over=take_over)
    begun = run.events[0].happened_at
    with both_sides(lake, run) as sides:
        swapping = _RunSwap(sides, before)
        for name in STEPS:
            table = _table(name)
            mark = SwapMarker(run.name, name, begun)
            if exchange.has(table, mark):
                continue
            say(f"{table}: swapping")
            swapping.take(name, table, exchange, mark)
    after = {table: lake.open(table).version() for table in tables}
    tell(lake, run.name, "swapped", now(), range_from=run.range_from, range_to=run.range_to, details=after)
    return after


def add_frames(lake: Lake, run: BackfillRun, exchange: FileSwap, say: Callable[[str], None]) -> bool:
    """Adds the frames of a run that live lacks, and leaves every other table alone: the first step of a swap. False:
    they are there already. SwapError: the run is not done or has no frames, or as `swap`. LakeError."""
    _check_done(run)
    if run.details.get("source") == "frames":
        raise SwapError(f"run {run.name} was made from live's own frames, and has no others")
    lake.create(["frames"])
    mark = SwapMarker(run.name, "frames", run.events[0].happened_at)
    if exchange.has("frames", mark):
        return False
    before = lake.open("frames").version()
    with both_sides(lake, run) as sides:
        say("frames: adding")
        _RunSwap(sides, {}).take("frames", "frames", exchange, mark)
    return lake.open("frames").version() > before


def _check_done(run: BackfillRun) -> None:
    if not run.done:
        raise SwapError(
            f"run {run.name} is not done: the rest of its range would be empty. Type kiln backfill run once more, with "
            "the same options"
        )


def _check_heard(sides: RangeComparison, run: BackfillRun) -> None:
    """SwapError: live heard messages, or copies, in the range that are not in what the run read. They would go."""
    source = run.details.get("source")
    if source == "frames":
        return
    lacks = {}
    for table in ("messages", "copies"):
        sides.view(table)
        key = ", ".join(sides.extents[table].key)
        if found := sides.count(f"live_{table} ANTI JOIN run_{table} USING ({key})"):
            lacks[table] = f"{found:,} {table}"
    if not lacks:
        return
    read = "Kafka held" if source == "kafka" else "the files hold"
    raise SwapError(
        f"live has {' and '.join(lacks.values())} of the range that are not in what {read}, and the swap would take "
        f"them out of these tables. To have both, type kiln backfill swap {run.name} --only-frames, make a new run of "
        "the range with --source frames, and swap that one. To have the run's rows alone, type kiln backfill swap "
        f"{run.name} --replace"
    )


def _check_late(sides: RangeComparison, run: BackfillRun) -> None:
    """SwapError: frames of the range came into the table when the run had begun. The run may not have read them, and
    what live made of them would go."""
    now, then = (
        sides.then("frames", when) for when in (sides.lake.open("frames").version(), time_of(run.events[0].happened_at))
    )
    if run.details.get("source") != "frames" or now is None or then is None:
        return
    inside = sides.inside("frames")
    late = sides.count(f"({now.select()}) WHERE {inside}") - sides.count(f"({then.select()}) WHERE {inside}")
    if late > 0:
        raise SwapError(
            f"{late:,} frames of the range came into the table frames after run {run.name} had begun, and the run may "
            f"lack them. Drop the run, and begin it anew when Kiln has caught up"
        )


def _table(step: str) -> str:
    return step.removesuffix("_rest")


def _versions(details: Mapping[str, object]) -> dict[str, int]:
    return {table: version for table, version in details.items() if isinstance(version, int)}


class _RunSwap:
    """Plans steps and commits them. Of live's rows of the range, those go that were there when the swap began."""

    def __init__(self, sides: RangeComparison, before: Mapping[str, int]) -> None:
        """`before`: the versions of the tables when the swap began."""
        self._sides = sides
        self._before = before
        self._plans: dict[str, Callable[[str, TableSnapshot], SwapStep | None]] = {
            "frames": self._missing,
            "batch_tips": self._missing,
            "updates": self._updates,
            "updates_rest": self._updates_rest,
            "quarantine": self._quarantine,
        }

    def take(self, name: str, table: str, exchange: FileSwap, mark: SwapMarker) -> None:
        """Commits one step; anew where somebody else takes files out of the table meanwhile. SwapError."""
        plan = self._plans.get(name, self._replace)
        for _ in range(_TRIES):
            read = self._sides.open(self._sides.lake, table)
            assert read is not None, "the tables were made"
            self._sides.view(table)
            step = plan(table, read)
            if step is None:
                return
            try:
                exchange.commit(table, read.table, step.gone, step.files, mark)
            except OvertakenError:
                discard(self._sides.lake, step.files)
                if exchange.has(table, mark):
                    return
            else:
                return
        raise SwapError(
            f"table {table}: other work took files out of the table each time that this swap was about to, {_TRIES} "
            f"times. Nothing is lost. Type kiln backfill swap {mark.run} once more"
        )

    # -------- plans

    def _replace(self, table: str, read: TableSnapshot) -> SwapStep | None:
        going = self._going(table, read)
        return self._step(table, going.files, self._but(read, going), f"FROM run_{table}")

    def _missing(self, table: str, read: TableSnapshot) -> SwapStep | None:
        """Adds what the run has and live has not, and takes out nothing."""
        key = ", ".join(TABLES[table].key)
        return self._step(
            table,
            (),
            f"SELECT DISTINCT ON ({key}) r.* FROM run_{table} AS r ANTI JOIN ({read.rows}) AS l USING ({key})",
        )

    def _updates(self, table: str, read: TableSnapshot) -> SwapStep | None:
        """As `_replace`, but an update whose tip the run has no update of stays until `_updates_rest`."""
        going = self._going(table, read)
        self._sides.connection.execute(f"""
            CREATE OR REPLACE TEMP TABLE rest AS
            FROM ({read.select(going.files)}) AS l
            ANTI JOIN run_updates AS same_tip USING (network, stream, tip)
            ANTI JOIN run_updates AS same USING ({_key(table)})
            WHERE {going.condition}""")
        with tempfile.TemporaryDirectory(prefix="kiln-") as folder:
            written = f"{folder}/{_REST}"
            self._sides.connection.execute(f"COPY (SELECT {_key(table)} FROM rest) TO '{written}' (FORMAT parquet)")
            with open(written, "rb") as file:
                self._rest.write(iter(partial(file.read, _AT_ONCE), b""))
        return self._step(table, going.files, self._but(read, going), "FROM run_updates", "FROM rest")

    def _updates_rest(self, table: str, read: TableSnapshot) -> SwapStep | None:
        quoted = self._rest.uri.replace("'", "''")
        rest = f"SELECT ({_key(table)}) FROM read_parquet('{quoted}')"
        condition = f"({_key(table)}) IN ({rest})"
        files = (
            [file for file in read.files if self._has_rows(f"FROM ({read.select([file])}) WHERE {condition}")]
            if self._has_rows(rest)
            else []
        )
        if not files:
            return None
        return self._step(table, files, self._but(read, _RemovedFiles(tuple(files), condition)))

    def _quarantine(self, table: str, read: TableSnapshot) -> SwapStep | None:
        """As `_replace`; and claims that a genesis contradicts, where nobody has told of them."""
        going = self._going(table, read)
        of_run = self._sides.open(self._sides.of_run, table)
        claims = (
            []
            if of_run is None
            else [
                f"""
            FROM ({of_run.select()}) AS r ANTI JOIN ({read.rows}) AS l
            ON {" AND ".join(f"l.{name} IS NOT DISTINCT FROM r.{name}" for name in _CLAIM)}
            WHERE r.stage = '{_CLAIM_STAGE}'"""
            ]
        )
        return self._step(table, going.files, self._but(read, going), f"FROM run_{table}", *claims)

    # -------- their parts

    @property
    def _rest(self) -> Location:
        return self._sides.of_run.root / _REST

    def _going(self, table: str, read: TableSnapshot) -> _RemovedFiles:
        """Which rows of the newest version were of the range when the swap began."""
        inside = self._sides.inside(table)
        then = self._sides.then(table, self._before.get(table))
        if then is None or read.all_files.issuperset(then.files):
            return _RemovedFiles((then or read).files, inside)
        # files of then were made anew since, with rows that came later among those of then
        rows = f"SELECT {_row(table)} FROM ({then.select()}) WHERE {inside}"
        return _RemovedFiles(read.files, f"({inside} AND {_row(table)} IN ({rows}))")

    def _but(self, read: TableSnapshot, going: _RemovedFiles) -> str:
        """The rows that stay of the files that go."""
        return f"FROM ({read.select(going.files)}) WHERE ({going.condition}) IS NOT TRUE"

    def _has_rows(self, rows: str) -> bool:
        return bool(self._sides.connection.execute(f"{rows} LIMIT 1").fetchall())

    def _step(self, table: str, gone: Sequence[str], *rows: str) -> SwapStep | None:
        """Writes rows, each SELECT of them into files of its own. None: there is nothing to do."""
        files = [file for each in rows for file in self._write(table, each)]
        return SwapStep(gone, files) if gone or files else None

    def _write(self, table: str, rows: str) -> list[DataFile]:
        files = TableFiles(self._sides.lake, table)
        columns = ", ".join(column.name for column in TABLES[table].columns)
        schema = arrow_schema(TABLES[table].columns)
        for batch in self._sides.connection.sql(f"SELECT {columns} FROM ({rows})").to_arrow_reader(_ROWS_AT_ONCE):
            files.add_batch(batch.cast(schema))
        return files.close()


def _key(table: str) -> str:
    return ", ".join(TABLES[table].key)


def _row(table: str) -> str:
    """What tells a row apart: of a table without a key, all that the row says."""
    columns = ", ".join(column.name for column in TABLES[table].columns)
    return f"({_key(table)})" if TABLES[table].key else f"hash(row({columns}))"
