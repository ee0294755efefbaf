"""A child process that runs periodically during a run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from kiln.deploy.stack.spawn import bind_to_parent, rotate_log, terminate_process

_PATIENCE = 5.0  # s until a child that does not end is killed


@dataclass(frozen=True)
class ChildCommand:
    """Command line, environment and output files of a child; `output` is the file of its stdout, by default the log."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    output: Path | None = None


class PeriodicProcess:
    """Starts a child process periodically, one at a time.

    The pause begins when a child has ended. Call `check` often, and `stop` at the end.
    """

    def __init__(
        self, command: ChildCommand, every: timedelta, on_exit: Callable[[int], None], now: Callable[[], float]
    ) -> None:
        """Create the process.

        Args:
            command: The command of a child.
            every: Pause between children, and before the first, so that a short run starts none; zero for no children.
            on_exit: Called with the exit code of each child.
            now: Monotonic clock, s.
        """
        self._command = command
        self._every = every.total_seconds()
        self._on_exit = on_exit
        self._now = now
        self._due = now() + self._every
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """True if a child runs, as of the last `check`."""
        return self._process is not None

    def check(self) -> None:
        """Start a child if one is due, and collect the exit code of the last one."""
        if self._process is not None and self._process.poll() is not None:
            code, self._process = self._process.returncode, None
            self._due = self._now() + self._every
            self._on_exit(code)
            rotate_log(self._command.log)
        if self._every and self._process is None and self._now() >= self._due:
            self._start()

    def stop(self) -> None:
        """End the child, if one runs. A later child completes its work."""
        process, self._process = self._process, None
        if process is not None:
            terminate_process(process, _PATIENCE)

    def read_last_line(self) -> str:
        """Read the last line of the log."""
        log = self._command.log
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "it logged nothing")

    def _start(self) -> None:
        command = self._command
        for path in (command.log, command.output or command.log):
            path.parent.mkdir(parents=True, exist_ok=True)
        with (
            command.log.open("ab") as log,
            (command.output or command.log).open("wb" if command.output else "ab") as out,
        ):
            self._process = subprocess.Popen(
                bind_to_parent(command.command),
                env=command.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us
            )
