"""The console of every command: what a peer said reaches the terminal as text, never as something to obey."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from kiln.schemas.printable import printable_lines


class PlainConsole(Console):
    """A console that escapes what a terminal obeys in all text, and takes no text for markup.

    Kiln's own newlines stay. What stands in a table or in one line of the screen has no newline: `printable` makes it
    so where such text is put together.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As of `Console`, which calls this method for each part of what it prints."""
        if isinstance(renderable, str):
            renderable = Text(renderable)
        return super().render(escape_text(renderable) if isinstance(renderable, Text) else renderable, options)


def escape_text(text: Text) -> Text:
    """The text with its styles, unsafe characters escaped."""
    if printable_lines(text.plain) == text.plain:
        return text
    parts = text.divide(range(1, len(text.plain)))
    for part in parts:
        part.plain = printable_lines(part.plain)
    return text.blank_copy().join(parts)
