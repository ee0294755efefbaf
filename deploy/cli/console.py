"""Console on which commands print. It escapes control characters, so text from peers cannot control the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from kiln.schemas.printable import printable_lines


class PlainConsole(Console):
    """A console that escapes control characters in all text, and does not interpret rich's markup.

    Newlines are kept. Pass text for a table cell or a single line through `printable` first, which escapes newlines.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render a part of the output like `Console`, with its text escaped. rich calls this for every part."""
        if isinstance(renderable, str):
            renderable = Text(renderable)
        return super().render(escape_text(renderable) if isinstance(renderable, Text) else renderable, options)


def escape_text(text: Text) -> Text:
    """Escape the control characters and invisible characters of a text, and keep its styles."""
    if printable_lines(text.plain) == text.plain:
        return text
    parts = text.divide(range(1, len(text.plain)))
    for part in parts:
        part.plain = printable_lines(part.plain)
    return text.blank_copy().join(parts)
