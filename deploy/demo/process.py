"""The demo network as a process beside the bridge: started, told to go, listened to, ended."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO

from conf import PrerequisiteError
from conf.settings import Settings
from deploy.bridge import child_environment
from deploy.tied import end, tied

_READY_IN = 60.0  # s


class DemoNetworkError(PrerequisiteError):
    """The demo network did not come up."""


class DemoNetwork:
    """`launch()`, `addresses()` once it listens, `go()`, then `stop()`. Its log is `logs/demo.log`.

    The BATCH_UPDATEs that its Kubo node heard are kept in `demo/heard.jsonl`, with their bytes.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[str] | None = None
        self._ready = threading.Event()
        self._addresses: tuple[str, ...] = ()
        self.heard: dict[str, int] = {}
        """BATCH_UPDATEs that each node of it has heard"""
        self.errors: tuple[str, ...] = ()

    def launch(self) -> None:
        """Starts it, and returns at once."""
        settings, traffic = self._settings, self._settings.traffic
        settings.logs.mkdir(parents=True, exist_ok=True)
        (settings.state / "demo").mkdir(exist_ok=True)
        arguments = {
            "--folder": settings.state / "demo",
            "--network": settings.network,
            "--rate": traffic.rate,
            "--seed": traffic.seed,
            "--separators": traffic.separators,
            "--streams": traffic.streams,
        }
        with (settings.logs / "demo.log").open("ab") as log:
            self._process = subprocess.Popen(
                tied(
                    [
                        sys.executable,
                        "-m",
                        "deploy.demo.network",
                        *(str(part) for pair in arguments.items() for part in pair),
                    ]
                ),
                env=child_environment(settings),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        threading.Thread(target=self._listen, args=(self._process.stdout,), name="demo", daemon=True).start()

    def addresses(self) -> tuple[str, ...]:
        """Where its nodes listen, as bootstrap peers for the bridge. DemoNetworkError."""
        if not self._ready.wait(_READY_IN) or not self._addresses:
            raise DemoNetworkError(f"the demo network did not come up: {self._settings.logs / 'demo.log'} says why")
        return self._addresses

    def go(self) -> None:
        """Lets it publish."""
        self._tell("go")

    def hush(self) -> None:
        """Lets it publish no more; its nodes stay and listen."""
        self._tell("hush")

    def _tell(self, command: str) -> None:
        if self._process is None or self._process.stdin is None:
            return
        with suppress(BrokenPipeError):  # it has ended, and `errors` says so
            self._process.stdin.write(f'{{"cmd":"{command}"}}\n')
            self._process.stdin.flush()

    def stop(self, patience: float = 10.0) -> None:
        """Ends it and all its nodes."""
        process, self._process = self._process, None
        if process is not None:
            end(process, patience)

    def _listen(self, lines: IO[str]) -> None:
        with (self._settings.state / "demo" / "heard.jsonl").open("a") as heard:
            for line in lines:
                event = json.loads(line)
                match event["event"]:
                    case "ready":
                        self._addresses = tuple(event["addresses"])
                        self._ready.set()
                    case "status":
                        self.heard = event["heard_batches"]
                        self.errors = tuple(event["errors"])
                    case "batch":
                        heard.write(line)
                        heard.flush()
        if self._process is not None:
            self.errors = ("the demo network ended",)
        self._ready.set()
