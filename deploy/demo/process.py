"""The demo network as a process beside the bridge: started, told to go, listened to, ended."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from kiln.bridge.bep50.carrier import publisher_key
from kiln.bridge.libp2p.keys import KeyFileError
from kiln.conf.process.errors import PrerequisiteError
from kiln.conf.settings.model import Settings
from kiln.deploy.stack.bridge_process import child_environment
from kiln.deploy.stack.child_logs import rotate_log
from kiln.deploy.stack.restart_backoff import Backoff
from kiln.deploy.stack.spawn import bind_to_parent, terminate_process

_READY_IN = 60.0  # s
_TRIES = 4


class DemoNetworkError(PrerequisiteError):
    """The demo network did not come up."""


class DemoNetwork:
    """`launch()`, `addresses()` once it listens, `go()`, `check()` now and then, `stop()`. Its log is `logs/demo.log`.

    `demo/received.jsonl` keeps the BATCH_UPDATEs that the Kubo node heard, with their bytes.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[str] | None = None
        self._backoff = Backoff()
        self._ready = threading.Event()
        self._addresses: tuple[str, ...] = ()
        self.received: dict[str, int] = {}
        """how many BATCH_UPDATEs each node has heard"""
        self.errors: tuple[str, ...] = ()
        try:
            self._publisher = publisher_key(settings.bridge_dir).verify_key.encode().hex()
        except KeyFileError as error:
            raise DemoNetworkError(str(error)) from error
        self.contacts: tuple[str, ...] = ()
        """Where the nodes of BEP 50 listen, once the network is up."""
        self.follow: tuple[str, ...] = ()
        """What the nodes of BEP 50 announce."""

    def launch(self) -> None:
        """Starts the network, and returns at once."""
        self._ready = threading.Event()
        self._addresses = ()
        settings, traffic = self._settings, self._settings.traffic
        settings.logs.mkdir(parents=True, exist_ok=True)
        (settings.state / "demo").mkdir(exist_ok=True)
        arguments = {
            "--folder": settings.state / "demo",
            "--network": settings.network.name,
            "--rate": traffic.rate,
            "--seed": traffic.seed,
            "--separators": traffic.separators,
            "--streams": traffic.streams,
            "--publisher": self._publisher,
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                bind_to_parent(
                    [
                        sys.executable,
                        "-m",
                        "kiln.deploy.demo.network",
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
        threading.Thread(
            target=self._listen, args=(self._process.stdout, self._ready), name="demo", daemon=True
        ).start()

    def check(self) -> None:
        """Starts the network again when it has died, after a pause that doubles. Keeps the log small.

        A network that was started again listens elsewhere, and waits for `go`.
        """
        if self._process is not None and self._process.poll() is not None:
            self._backoff.record_death()
            self.errors = (f"the demo network ended with {self._process.returncode}; it is started again",)
            self._process = None
        if self._process is None and self._backoff.is_due:
            self.launch()
        rotate_log(self._log)

    @property
    def listens(self) -> bool:
        """Whether the network is up, so that `addresses` does not wait."""
        return self._process is not None and self._ready.is_set() and bool(self._addresses)

    def addresses(self) -> tuple[str, ...]:
        """Where the nodes listen, as bootstrap peers for the bridge. Waits until they do. DemoNetworkError."""
        deadline = time.monotonic() + _READY_IN
        while not self.listens:
            self._ready.wait(0.05)
            self.check()  # the network of a Kiln that was just killed may still be ending
            if self._backoff.deaths >= _TRIES or time.monotonic() > deadline:
                raise DemoNetworkError(f"the demo network did not come up: {self._log} says why")
        return self._addresses

    def go(self) -> None:
        """Lets the network publish."""
        self._tell("go")

    def mute(self) -> None:
        """Lets the network publish no more. The nodes stay, and listen."""
        self._tell("mute")

    def _tell(self, command: str) -> None:
        if self._process is None or self._process.stdin is None:
            return
        with suppress(BrokenPipeError):  # the network has ended, and `errors` says so
            self._process.stdin.write(f'{{"cmd":"{command}"}}\n')
            self._process.stdin.flush()

    def stop(self, patience: float = 10.0) -> None:
        """Ends the network with all its nodes."""
        process, self._process = self._process, None
        if process is not None:
            terminate_process(process, patience)

    @property
    def _log(self) -> Path:
        return self._settings.logs / "demo.log"

    def _listen(self, lines: IO[str], ready: threading.Event) -> None:
        with (self._settings.state / "demo" / "received.jsonl").open("a") as heard:
            for line in lines:
                if not line.endswith("\n"):
                    break  # the network was killed
                event = json.loads(line)
                match event["event"]:
                    case "ready":
                        self._addresses = tuple(event["addresses"])
                        self.contacts = tuple(event["overlay"]["contacts"])
                        self.follow = tuple(event["overlay"]["follow"])
                        self._backoff.reset()
                        ready.set()
                    case "status":
                        self.received = event["heard_batches"]
                        self.errors = tuple(event["errors"])
                    case "batch":
                        heard.write(line)
                        heard.flush()
        ready.set()
