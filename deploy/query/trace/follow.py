"""Asks the steps of a plan, one after the other, over one connection: each table is opened once."""

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
"""The tables that the steps ask."""


class TraceError(KilnError):
    """There is nothing to show; the message says what was looked for, and where."""


class StepAnswer(Answer):
    """The answer to a step, whole."""

    def __init__(self, step: TraceStep, columns: tuple[str, ...], cells: list[Cells]) -> None:
        super().__init__(columns, ())
        self.step = step
        self.cells = cells

    def rows(self) -> Iterator[Cells]:
        """As of `Answer`."""
        yield from self.cells


@dataclass(frozen=True)
class Trace:
    """The way of a thing: `kind` in a word, and the steps in order."""

    subject: Id
    kind: str
    steps: tuple[StepAnswer, ...]


def trace_subject(
    lake: Lake, subject: Id, most: int = MESSAGES, progress: Callable[[str], None] = lambda words: None
) -> Trace:
    """The whole way of a thing. TraceError: no table knows the id, or a table is missing. LakeError.

    `most`: of how many messages to show copies and frames. `progress` is told the step that is being asked.
    """
    opened = {name: lake.open(name) for name in lake.tables() if name in TABLES}
    missing = set(TABLES) - set(opened)
    if missing:
        raise TraceError(
            f"the tables in {lake.path} are not all there yet: {', '.join(sorted(missing))} "
            f"{'is' if len(missing) == 1 else 'are'} missing. kiln run makes them when it starts"
        )
    answers: dict[str, StepAnswer] = {}
    found: dict[str, list[Row]] = {}
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute("SET parquet_metadata_cache = true")  # each step looks into the same files
        allow_only(connection, create_views(connection, lake, opened))
        while steps := next_steps(subject, found, most):
            for step in steps:
                if step.name not in found:  # two conditions may give one step
                    progress(step.says)
                    answers[step.name] = answer = _run_step(connection, step)
                    found[step.name] = [dict(zip(answer.columns, cells, strict=True)) for cells in answer.cells]
    if not any(found.values()):
        raise TraceError(f"nothing in {lake.path} knows {subject.text}")
    return Trace(subject, describe_kind(subject, found), tuple(answers[name] for name in list_steps(subject, found)))


def _run_step(connection: duckdb.DuckDBPyConnection, step: TraceStep) -> StepAnswer:
    try:
        connection.execute(step.sql)
        columns = tuple(str(column[0]) for column in connection.description or ())
        return StepAnswer(step, columns, connection.fetchall())
    except (duckdb.Error, OSError) as error:
        raise TraceError(f"step {step.name}: {error}") from error
