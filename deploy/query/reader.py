"""The Python API of a lake: `kiln.open` returns a `LakeReader`, which only reads and needs neither Java nor a
broker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from kiln.conf.process.errors import KilnError, PrerequisiteError
from kiln.conf.process.location import STORE, expand_path, parse_location
from kiln.conf.process.state_folder import check_state_version
from kiln.conf.settings.keys import suggest_key
from kiln.deploy.query.ask import Answer, AsOf, QueryRelation, Row, SqlError, parse_as_of
from kiln.deploy.query.sample import SAMPLE_LAKE
from kiln.deploy.query.trace import trace_subject
from kiln.deploy.query.trace_ids import parse_id
from kiln.pipelines.delta.duckdb_tables import quote_name
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.views import views

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

_SHOWN_ROWS: Final = 20

Value = TypeVar("Value")


class LakeNotFoundError(KilnError):
    """There is no lake, or a lake without tables, at the given location."""


class QueryResult:
    """Result of a query, as Python tuples or for pyarrow, pandas or polars.

    Each method runs the query on the same version of the tables, and loads the whole result into memory.
    """

    def __init__(self, query: QueryRelation) -> None:
        self._query = query

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self._query.relation.columns)

    def rows(self) -> list[Row]:
        """Return the rows as tuples of Python values, with times in UTC.

        Raises:
            SqlError: The query fails at run time.
        """
        return self._read(self._query.relation.fetchall)

    def arrow(self) -> pa.Table:
        """Return the rows as a pyarrow table.

        Raises:
            SqlError: The query fails at run time.
            PrerequisiteError: pyarrow is not installed.
        """
        _require("pyarrow")
        return self._read(self._query.relation.to_arrow_table)

    def pandas(self) -> pd.DataFrame:
        """Return the rows as a pandas DataFrame.

        Raises:
            SqlError: The query fails at run time.
            PrerequisiteError: pandas is not installed.
        """
        _require("pandas")
        frame: pd.DataFrame = self._read(self._query.relation.df)
        return frame

    def polars(self) -> pl.DataFrame:
        """Return the rows as a polars DataFrame.

        Raises:
            SqlError: The query fails at run time.
            PrerequisiteError: polars or pyarrow is not installed.
        """
        _require("polars", "pyarrow")
        return self._read(self._query.relation.pl)

    def __repr__(self) -> str:
        from rich.console import Console

        from kiln.deploy.query.answer import print_table

        first = self._read(lambda: self._query.relation.limit(_SHOWN_ROWS + 1).fetchall())
        out = StringIO()
        print_table(Answer(self.columns, first), Console(file=out, markup=False), _SHOWN_ROWS)
        return out.getvalue().rstrip("\n")

    def _read(self, read: Callable[[], Value]) -> Value:
        with self._query.translate_errors():
            return read()


@dataclass(frozen=True)
class TraceReport:
    """The path of a batch, stream, tip or message through Kiln."""

    id: str
    kind: str
    """kind of the traced id: batch, stream, tip, message or frame"""
    steps: Mapping[str, list[dict[str, object]]]
    """rows of each step, by name of the step (docs/trace.md), in the order of the path"""


class LakeReader:
    """A lake to query. Its tables may grow while it is open: each query reads their newest version."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake

    def __repr__(self) -> str:
        return f"LakeReader({self.uri!r})"

    @property
    def uri(self) -> str:
        """Path or URI of the folder of the Delta tables: `f"{lake.uri}/batches"` is a table."""
        return self._lake.path

    def sql(self, query: str, *, as_of: int | str | datetime | None = None) -> QueryResult:
        """Run a query over the tables and views, in DuckDB's SQL.

        Args:
            query: One SELECT.
            as_of: Version of each table, or a time with a time zone or in ISO 8601; by default the newest version.

        Raises:
            SqlError: The text is not one read-only query, or it names an unknown table or column.
            LakeError: A table cannot be read.
            NoSuchVersionError: A table does not have that version.
            ValueError: `as_of` is neither a version nor a time.
        """
        return QueryResult(QueryRelation(self._lake, query, _read_as_of(as_of)))

    def table(self, name: str, *, as_of: int | str | datetime | None = None) -> QueryResult:
        """Read a table or a view. Use `sql` to read only the columns and rows that you need.

        Raises:
            SqlError: There is no such table or view; the message has the nearest name.
            LakeError: The table cannot be read.
            NoSuchVersionError: The table does not have that version.
            ValueError: `as_of` is neither a version nor a time.
        """
        known = (*self.tables(), *self.views())
        if name not in known:
            raise SqlError(
                f"there is no table or view {name} in {self.uri}{suggest_key(name, known) or '.'} tables() and views() "
                "list the names"
            )
        return self.sql(f"SELECT * FROM {quote_name(name)}", as_of=as_of)

    def tables(self) -> tuple[str, ...]:
        """List the names of the tables that exist."""
        return self._lake.tables()

    def views(self) -> tuple[str, ...]:
        """List the names of the views, which docs/SQL.md describes."""
        return tuple(sorted(views()))

    def trace(self, subject: str, *, messages: int = 25) -> TraceReport:
        """Trace a batch, stream, tip or message, as `kiln trace` does.

        Args:
            subject: CID of a batch or tip, StreamID, message id, or `PARTITION/OFFSET[/INDEX]` in kiln.frames.
            messages: Number of newest messages whose copies and frames are read, and of newest batches whose
                publications are read.

        Raises:
            IdError: The text is not an id.
            TraceError: No table has the id, or a table is missing.
            LakeError: A table cannot be read.
        """
        trace = trace_subject(self._lake, parse_id(subject), messages)
        steps = {
            step.step.name: [dict(zip(step.columns, cells, strict=True)) for cells in step.cells]
            for step in trace.steps
        }
        return TraceReport(trace.subject.text, trace.kind, steps)


def open_lake(place: str | Path | None = None, options: Mapping[str, str] | None = None) -> LakeReader:
    """Open a lake, with the arguments of `kiln.open`.

    Raises:
        LakeNotFoundError: There is no lake.
        StateVersionError: An older or a newer Kiln wrote the state folder.
        SettingsError: The settings cannot be used.
    """
    if place is None:
        from kiln.conf.settings.reading import load_settings

        settings = load_settings()
        check_state_version(settings.state)
        return _find_tables(Lake.from_location(settings.lake_root))
    if str(place).startswith(STORE):
        return _find_tables(Lake.from_location(parse_location(place, options)))
    folder = expand_path(place)
    if (folder / "lake").is_dir():
        check_state_version(folder)
        return _find_tables(Lake(str(folder / "lake")))
    return _find_tables(Lake(str(folder)))


def open_sample() -> LakeReader:
    """Open the sample lake."""
    return LakeReader(Lake(str(SAMPLE_LAKE)))


def _find_tables(lake: Lake) -> LakeReader:
    if not lake.tables():
        raise LakeNotFoundError(
            f"there are no Delta tables in {lake.path}. Pass a state folder, or the folder of the tables. kiln run "
            "creates a state folder; kiln.sample() opens the sample lake that comes with Kiln"
        )
    return LakeReader(lake)


def _read_as_of(as_of: int | str | datetime | None) -> AsOf | None:
    if isinstance(as_of, datetime) and as_of.tzinfo is None:
        raise ValueError(f"as_of = {as_of}: expected a time with a time zone")
    if not isinstance(as_of, str):
        return as_of
    try:
        return parse_as_of(as_of)
    except ValueError as error:
        raise ValueError(f"as_of = {as_of!r}: expected {error}") from None


def _require(*packages: str) -> None:
    for name in packages:
        if find_spec(name) is None:
            raise PrerequisiteError(f"{name} is not installed. Install it: pip install {name}")
