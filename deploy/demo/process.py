"""The demo network as a supervised child process."""

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
from kiln.conf.process.backoff import Backoff
from kiln.conf.process.errors import PrerequisiteError
from kiln.conf.settings.model import Settings
from kiln.deploy.stack.child_process import bind_to_parent, child_environment, rotate_log, terminate_process

_PATIENCE = 60.0  # s until the network must listen
_TRIES = 4


class DemoNetwork:
    """Runs the demo network in a child process, with its log in `logs/demo.log`.

    Call `launch`, `addresses` (which waits until the network listens) and `go`, in this order. Then call `check`
    several times per second, and `stop` at the end. The BATCH_UPDATEs that the Kubo node receives are appended, with
    their bytes, to `demo/received.jsonl`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[str] | None = None
        self._backoff = Backoff()
        self._ready = threading.Event()
        self._addresses: tuple[str, ...] = ()
        self.received: dict[str, int] = {}
        """number of BATCH_UPDATEs that each node has received"""
        self.fetched: dict[str, int] = {}
        """number of blocks of BATCH_UPDATEs that each node has fetched"""
        self.errors: tuple[str, ...] = ()
        try:
            publisher_key(settings.bridge_dir)  # which the network follows
        except KeyFileError as error:
            raise PrerequisiteError(str(error)) from error
        self.contacts: tuple[str, ...] = ()
        """`HOST:PORT` of the BEP 50 nodes, once they listen"""
        self.follow: tuple[str, ...] = ()
        """sources that the first BEP 50 node announces, in the form of the setting `bep50.follow`"""

    def launch(self) -> None:
        """Start the network, and return at once."""
        self._ready = threading.Event()
        self._addresses = ()
        settings = self._settings
        settings.logs.mkdir(parents=True, exist_ok=True)
        (settings.state / "demo").mkdir(exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                bind_to_parent([sys.executable, "-m", "kiln.deploy.demo.network"]),
                env=child_environment(settings),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        threading.Thread(
            target=self._read_events, args=(self._process.stdout, self._ready), name="demo", daemon=True
        ).start()

    def check(self) -> None:
        """Restart the network after an exponential back-off if it has ended, and rotate its log.

        A restarted network listens on other ports, and sends no messages before `go`.
        """
        if self._process is not None and self._process.poll() is not None:
            self._backoff.record_death()
            code = self._process.returncode
            self.errors = (f"the demo network exited with code {code}, and is being restarted",)
            self._process = None
        if self._process is None and self._backoff.is_due:
            self.launch()
        rotate_log(self._log)

    @property
    def listens(self) -> bool:
        """True if the network listens, so that `addresses` does not wait."""
        return self._process is not None and self._ready.is_set() and bool(self._addresses)

    def addresses(self) -> tuple[str, ...]:
        """Wait up to 60 s until the nodes listen, and return their addresses as bootstrap peers for the bridge.

        Raises:
            PrerequisiteError: The network does not start.
        """
        deadline = time.monotonic() + _PATIENCE
        while not self.listens:
            self._ready.wait(0.05)
            self.check()  # the demo network of a killed Kiln may still be ending, and hold the lock
            if self._backoff.deaths >= _TRIES or time.monotonic() > deadline:
                raise PrerequisiteError(f"the demo network does not start. The reason is in {self._log}")
        return self._addresses

    def go(self) -> None:
        """Start the traffic."""
        self._send("go")

    def mute(self) -> None:
        """Stop the traffic. The nodes keep listening."""
        self._send("mute")

    def _send(self, command: str) -> None:
        if self._process is None or self._process.stdin is None:
            return
        with suppress(BrokenPipeError):  # the network has ended; `check` reports that
            self._process.stdin.write(f"{command}\n")
            self._process.stdin.flush()

    def stop(self, patience: float = 10.0) -> None:
        """Stop the network with all its nodes."""
        process, self._process = self._process, None
        if process is not None:
            terminate_process(process, patience)

    @property
    def _log(self) -> Path:
        return self._settings.logs / "demo.log"

    def _read_events(self, lines: IO[str], ready: threading.Event) -> None:
        with (self._settings.state / "demo" / "received.jsonl").open("a") as received:
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
                        self.fetched = event["fetched"]
                        self.errors = tuple(event["errors"])
                    case "batch":
                        received.write(line)
                        received.flush()
        ready.set()
