r"""Tables, views and columns of a lake, as `\d` lists them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import duckdb
from rich.console import Console
from rich.text import Text

from kiln.conf.settings.keys import suggest_key
from kiln.deploy.query.ask import Row, RowsAnswer, SqlError
from kiln.pipelines.delta.duckdb_tables import add_empty_tables
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.delta.views import View, views
from kiln.schemas.printable import printable

_COMMAND = re.compile(r"\\d\+?(?:\s+\"?(\w+)\"?)?\s*;?")


class Listing(RowsAnswer):
    """Names with their descriptions. `heading`: about all of them; may be empty."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Row], heading: str = "") -> None:
        super().__init__(columns, rows)
        self.heading = heading


def list_names(lake: Lake, command: str) -> Listing:
    r"""List tables and views (`\d`), or the columns of one (`\d NAME`).

    Raises:
        SqlError: The text is no such command, or there is no such table or view.
        LakeError: The table cannot be read.
    """
    match = _COMMAND.fullmatch(command.strip())
    if match is None:
        raise SqlError(
            f"there is no command {command.strip()}. \\d lists the tables and views; \\d NAME lists the columns of NAME"
        )
    tables = lake.tables()
    if name := match[1]:
        if name in tables:
            return _list_table_columns(lake, name)
        if view := views().get(name):
            return _list_view_columns(view)
        raise SqlError(f"there is no {name}{suggest_key(name, (*tables, *views()))}; \\d lists what there is")
    rows = [(table, "table", _shorten(_describe_table(table))) for table in tables]
    rows += [(view.name, "view", _shorten(view.sentence)) for view in views().values()]
    return Listing(("name", "kind", "description"), rows)


def print_listing(listing: Listing, console: Console) -> None:
    """Print a line for each name. Long ones wrap at the terminal's width."""
    if listing.heading:
        console.print(Text(printable(listing.heading)), soft_wrap=True)
    for name, kind, description in listing.rows():
        console.print(Text(printable(f"{name:<24} {kind:<10} {description}".rstrip())), soft_wrap=True)


def _list_table_columns(lake: Lake, name: str) -> Listing:
    comments = {column.name: column.comment for column in TABLES[name].columns} if name in TABLES else {}
    fields = [(field.name, str(field.type.type)) for field in lake.open(name).schema().fields]
    rows = [(column, _name_type(name, column, kind), comments.get(column, "")) for column, kind in fields]
    return Listing(("column", "type", "description"), rows, _describe_table(name))


def _name_type(table: str, column: str, kind: str) -> str:
    columns = TABLES[table].columns if table in TABLES else ()
    return next((declared.type for declared in columns if declared.name == column), kind)


def _list_view_columns(view: View) -> Listing:
    with duckdb.connect() as connection:
        for earlier in views().values():  # a view may read those before it
            connection.execute(
                f"CREATE TEMP VIEW {earlier.name} AS {add_empty_tables(earlier.duckdb, earlier.tables, ())}"
            )
        relation = connection.table(view.name)
        rows = [(name, str(kind).lower(), "") for name, kind in zip(relation.columns, relation.types, strict=True)]
    return Listing(("column", "type", "description"), rows, f"{view.sentence} A row for {view.grain}.")


def _describe_table(table: str) -> str:
    return f"{TABLES[table].comment}." if table in TABLES else "No table of Kiln's."


def _shorten(sentences: str) -> str:
    return sentences.split(". ")[0].removesuffix(".")
