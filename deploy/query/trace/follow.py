"""Execution of a trace's steps over one connection, with each table opened once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import duckdb

from kiln.conf.process.errors import KilnError
from kiln.deploy.query.ask import Answer
from kiln.deploy.query.ask import Row as Cells
from kiln.deploy.query.trace.ids import Id
from kiln.deploy.query.trace.plan import MESSAGES, Row, TraceStep, describe_kind, list_steps, next_steps
from kiln.pipelines.delta.duckdb_tables import allow_only, create_views
from kiln.pipelines.delta.lake import Lake

TABLES = (
    *("batch_tips", "batches", "copies", "frames", "messages", "publications", "quarantine", "streams", "tips"),
    "updates",
)
"""The tables that the steps query."""


class TraceError(KilnError):
    """There is nothing to trace; the message has the id, and where it was searched."""


class StepAnswer(Answer):
    """Result of a step, read completely."""

    def __init__(self, step: TraceStep, columns: tuple[str, ...], cells: list[Cells]) -> None:
        super().__init__(columns, ())
        self.step = step
        self.cells = cells

    def rows(self) -> Iterator[Cells]:
        """Return the rows, as `Answer.rows`."""
        yield from self.cells


@dataclass(frozen=True)
class Trace:
    """A trace: the kind of its subject, and the steps in order."""

    subject: Id
    kind: str
    steps: tuple[StepAnswer, ...]


def trace_subject(
    lake: Lake, subject: Id, most: int = MESSAGES, progress: Callable[[str], None] = lambda words: None
) -> Trace:
    """Trace a subject through the tables.

    Args:
        lake: The lake.
        subject: Id to trace.
        most: Maximum number of messages whose copies and frames are shown.
        progress: Called with the title of each step.

    Raises:
        TraceError: No table has the id, or a table is missing.
        LakeError: A table cannot be read.
    """
    opened = {name: lake.open(name) for name in lake.tables() if name in TABLES}
    missing = set(TABLES) - set(opened)
    if missing:
        raise TraceError(
            f"there is no table {', '.join(sorted(missing))} in {lake.path} yet. kiln run creates missing tables when "
            "it starts"
        )
    answers: dict[str, StepAnswer] = {}
    found: dict[str, list[Row]] = {}
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute("SET parquet_metadata_cache = true")  # the steps read the same files
        allow_only(connection, create_views(connection, lake, opened))
        while steps := next_steps(subject, found, most):
            for step in steps:
                if step.name not in found:  # two conditions may give one step
                    progress(step.says)
                    answers[step.name] = answer = _run_step(connection, step)
                    found[step.name] = [dict(zip(answer.columns, cells, strict=True)) for cells in answer.cells]
    if not any(found.values()):
        raise TraceError(f"no table in {lake.path} has {subject.text}")
    return Trace(subject, describe_kind(subject, found), tuple(answers[name] for name in list_steps(subject, found)))


def _run_step(connection: duckdb.DuckDBPyConnection, step: TraceStep) -> StepAnswer:
    try:
        connection.execute(step.sql)
        columns = tuple(str(column[0]) for column in connection.description or ())
        return StepAnswer(step, columns, connection.fetchall())
    except (duckdb.Error, OSError) as error:
        raise TraceError(f"step {step.name}: {error}") from error
