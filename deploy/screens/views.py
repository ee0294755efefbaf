"""Output of `kiln run` while it runs: a screen on a terminal, and otherwise a line every five seconds."""

from __future__ import annotations

from datetime import timedelta
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kiln.conf.process.logs import identify_problem
from kiln.deploy.ops.snapshot import Snapshot
from kiln.deploy.screens.screen import format_line, render_screen
from kiln.schemas.printable import printable

LINE_EVERY = timedelta(seconds=5)


class View(Protocol):
    """Output of `kiln run` while it runs. As a context manager, it restores the terminal at the end."""

    def show(self, snapshot: Snapshot) -> None:
        """Show a snapshot."""

    def say(self, words: str) -> None:
        """Show a line of text before there is a snapshot, such as "starting the broker …"."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LiveView:
    """A screen that fills the terminal and is redrawn in place. It disappears at the end."""

    def __init__(self, console: Console) -> None:
        self._live = Live(Text(""), console=console, screen=True, auto_refresh=False, redirect_stderr=False)

    def show(self, snapshot: Snapshot) -> None:
        """Draw the snapshot."""
        self._live.update(render_screen(snapshot), refresh=True)

    def say(self, words: str) -> None:
        """Show only the message on the screen."""
        self._live.update(Text.assemble((" Kiln ", "bold reverse cyan"), f" {printable(words)}"), refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


class LineView:
    """Printer of a plain line every five seconds, measured by the times of the snapshots, and of a line for each new
    error."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: timedelta | None = None
        self._told: set[str] = set()

    def show(self, snapshot: Snapshot) -> None:
        """Print the line of the snapshot if one is due."""
        for error in snapshot.errors:
            if identify_problem(error) not in self._told:
                self.say(f"error: {' '.join(error.split())}")
        self._told = set(map(identify_problem, snapshot.errors))
        if self._last is None or snapshot.elapsed - self._last >= LINE_EVERY:
            self._last = snapshot.elapsed
            self.say(format_line(snapshot))

    def say(self, words: str) -> None:
        """Print the message as a line."""
        self._console.print(Text(printable(words)), soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def open_view(console: Console) -> LiveView | LineView:
    """Open the view that suits the console."""
    return LiveView(console) if console.is_terminal and not console.is_dumb_terminal else LineView(console)
