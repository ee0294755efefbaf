"""Console of every command. Text from peers cannot control the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from kiln.schemas.printable import printable_lines


class PlainConsole(Console):
    """A console that escapes control characters in all text, and does not interpret markup.

    Newlines are kept. Text for a table cell or a single line must be passed through `printable` first.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as `Console`, which calls this method for each part of its output, with text escaped."""
        if isinstance(renderable, str):
            renderable = Text(renderable)
        return super().render(escape_text(renderable) if isinstance(renderable, Text) else renderable, options)


def escape_text(text: Text) -> Text:
    """Escape unsafe characters of a text, and keep its styles."""
    if printable_lines(text.plain) == text.plain:
        return text
    parts = text.divide(range(1, len(text.plain)))
    for part in parts:
        part.plain = printable_lines(part.plain)
    return text.blank_copy().join(parts)
