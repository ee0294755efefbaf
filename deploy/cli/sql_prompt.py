"""Interactive prompt of `kiln sql`, with history and completion."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from prompt_toolkit import PromptSession
from prompt_toolkit.application.current import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output

from kiln.conf.process.errors import KilnError
from kiln.deploy.cli.options import answers
from kiln.deploy.query.ask import list_names, print_listing, read_view_columns
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.printable import printable_lines

_KEYWORDS: Final = (
    *("SELECT", "DISTINCT", "FROM", "JOIN", "LEFT JOIN", "ANTI JOIN", "USING", "ON", "WHERE", "AND", "OR", "NOT"),
    *("IS NULL", "IN", "BETWEEN", "LIKE", "GROUP BY", "HAVING", "QUALIFY", "ORDER BY", "DESC", "LIMIT", "AS", "WITH"),
    *("CASE", "WHEN", "THEN", "ELSE", "END", "INTERVAL", "OVER", "PARTITION BY", "UNION ALL", "count(*)", "EXPLAIN"),
)
_LEAVE: Final = ("exit", "quit", "\\q")
HELP: Final = (
    "End a query with ; or an empty line. Tab completes names. \\d lists tables and views, \\d NAME the columns. "
    "Ctrl-C clears the line, Ctrl-D or \\q quits."
)


def converse(
    lake: Lake,
    history: Path | None,
    show: Callable[[str], None],
    *,
    read: Input | None = None,
    write: Output | None = None,
) -> None:
    """Read queries until the user quits, and pass each to `show`. Print errors, and go on.

    Args:
        lake: The lake, for the completion of names.
        history: File of earlier queries; `None` to store none.
        show: Runs a query and prints its result.
        read: Input; by default the terminal of this program.
        write: Output; by default the terminal of this program.
    """
    columns: Mapping[str, Iterable[str]] = {
        **{name: _columns(lake, name) for name in lake.tables()},
        **read_view_columns(),
    }
    session: PromptSession[str] = PromptSession(
        "kiln> ",
        multiline=True,
        prompt_continuation="  ... ",
        completer=SqlNames(columns),
        complete_while_typing=False,
        history=InMemoryHistory() if history is None else FileHistory(_private(history)),
        key_bindings=_keys(),
        input=read,
        output=write,
    )
    console = answers()
    console.print(HELP, style="dim")
    while True:
        try:
            text = session.prompt().strip().removesuffix(";").strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if text in _LEAVE:
            return
        try:
            if text.startswith("\\"):
                print_listing(list_names(lake, text), console)
            elif text:
                show(text)
        except KilnError as error:
            console.print(printable_lines(str(error)), style="red")
        except KeyboardInterrupt:
            console.print("query stopped", style="dim")


class SqlNames(Completer):
    """Completer for names of tables, views and columns, and SQL keywords. After `NAME.` it offers only the columns of
    the table or alias NAME."""

    def __init__(self, columns: Mapping[str, Iterable[str]]) -> None:
        self._columns = columns

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """Complete the word before the cursor. Columns of the tables in the query come first."""
        before = re.search(r"(?:(\w+)\.)?(\w*)$", document.text_before_cursor)
        whose, start = (before[1], before[2]) if before else (None, "")
        for name in self._candidates(whose, document.text):
            if name.lower().startswith(start.lower()) and name != start:
                yield Completion(name, start_position=-len(start))

    def _candidates(self, whose: str | None, text: str) -> list[str]:
        if whose is not None:
            alias = re.search(rf"(\w+)\s+(?:AS\s+)?{re.escape(whose)}\b", text, re.IGNORECASE)
            names = [whose, alias[1] if alias else whose]
            return [column for name in dict.fromkeys(names) for column in self._columns.get(name, ())]
        named = [name for name in re.findall(r"\w+", text) if name in self._columns]
        near = [column for name in named for column in self._columns[name]]
        far = [] if near else [column for columns in self._columns.values() for column in columns]
        return list(dict.fromkeys([*near, *self._columns, *far, *_KEYWORDS]))


def _columns(lake: Lake, name: str) -> tuple[str, ...]:
    """Return the columns of a table; none if the table cannot be read. A query of the table reports the error."""
    try:
        return tuple(field.name for field in lake.open(name).schema().fields)
    except KilnError:
        return ()


def _keys() -> KeyBindings:
    """Bind Enter: it submits a complete query, and otherwise starts a new line."""
    keys = KeyBindings()

    @keys.add("enter", filter=Condition(lambda: is_whole(get_app().current_buffer.text)))
    def _end(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    return keys


def is_whole(text: str) -> bool:
    """Return true if Enter submits the text: if it is blank or a command such as `\\d`, or ends with `;` or an empty
    line."""
    stripped = text.strip()
    return not stripped or stripped.endswith(";") or text.endswith("\n") or stripped in _LEAVE or stripped[0] == "\\"


def _private(path: Path) -> str:
    """Create the history file, readable only by the user, because queries may be confidential. Return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_APPEND, 0o600))
    return str(path)
