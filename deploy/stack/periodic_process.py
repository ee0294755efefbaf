"""A child process that does its work and ends, now and then while a run goes on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from kiln.deploy.stack.child_logs import rotate_log
from kiln.deploy.stack.spawn import bind_to_parent, terminate_process

_PATIENCE = 5.0  # s that a child has to end


@dataclass(frozen=True)
class ChildCommand:
    """What a child is started with. `told`: the file for what it prints; None: the log too."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    told: Path | None = None


class PeriodicProcess:
    """`check()` now and then, then `stop()`. One child at a time; the pause begins when a child has ended."""

    def __init__(
        self, work: ChildCommand, every: timedelta, ended: Callable[[int], None], now: Callable[[], float]
    ) -> None:
        """`every`: the pause, also before the first child, so that a short run has none; none: there never is one.
        `ended` hears the exit code of each child. `now`: monotonic s."""
        self._work = work
        self._every = every.total_seconds()
        self._ended = ended
        self._now = now
        self._due = now() + self._every
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether a child is at work, as far as `check` knows."""
        return self._process is not None

    def check(self) -> None:
        """Starts a child when it is time, and hears how the last one did."""
        if self._process is not None and self._process.poll() is not None:
            code, self._process = self._process.returncode, None
            self._due = self._now() + self._every
            self._ended(code)
            rotate_log(self._work.log)
        if self._every and self._process is None and self._now() >= self._due:
            self._start()

    def stop(self) -> None:
        """Ends a child. What it had still to do, a later one does."""
        process, self._process = self._process, None
        if process is not None:
            terminate_process(process, _PATIENCE)

    def read_last_line(self) -> str:
        """The last line of the log."""
        log = self._work.log
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def _start(self) -> None:
        work = self._work
        for path in (work.log, work.told or work.log):
            path.parent.mkdir(parents=True, exist_ok=True)
        with work.log.open("ab") as log, (work.told or work.log).open("wb" if work.told else "ab") as told:
            self._process = subprocess.Popen(
                bind_to_parent(work.command),
                env=work.environment,
                stdin=subprocess.DEVNULL,
                stdout=told,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us
            )
