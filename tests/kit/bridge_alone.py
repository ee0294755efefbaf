"""A bridge in its own process, without a broker. Captured frames stay in the spool, where a test can read them."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from kiln.bridge.capture.spool import FILE_NAME
from kiln.conf.process.bridge_status import BridgeStatus, read_status
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import message_id
from kit.awaiting import PATIENCE, wait_until

NOWHERE = "127.0.0.1:9"
"""Address at which no broker listens."""


def memory_of(pid: int, of: str = "VmHWM") -> int:
    """Return the memory of a process in bytes, by default its peak. `of` is a field of /proc/PID/status."""
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(of)) << 10


class BridgeAlone:
    """A bridge on the network `local-test`.

    Args:
        before: Words before the bridge's command line, such as a program that starts the bridge.
        settings: Environment variables (KILN_…).
    """

    def __init__(self, state: Path, before: Sequence[str] = (), command: Sequence[str] = (), **settings: str) -> None:
        self.state = state
        self.listen = settings.get("KILN_MONITOR__LISTEN", "")
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("KILN_")},
            "KILN_STATE": str(state),
            "KILN_NETWORK": "local-test",
            "KILN_KAFKA__BOOTSTRAP": NOWHERE,
            "KILN_BRIDGE__LISTEN": "/ip4/127.0.0.1/tcp/0",
            "KILN_DISCOVERY__ENABLED": "false",
            "KILN_MONITOR__LISTEN": "",
            "KILN_LOG__LEVEL": "error",
            **settings,
        }
        run = command or (sys.executable, "-m", "kiln.bridge.app.main")
        self.process = subprocess.Popen([*before, *run], env=environment, stderr=subprocess.PIPE, text=True)

    @property
    def files(self) -> Path:
        """The bridge's folder as the bridge sees it, which may run in another mount namespace."""
        return Path(f"/proc/{self.process.pid}/root{self.state}/bridge")

    def status(self) -> BridgeStatus | None:
        """Read the bridge's status.

        Raises:
            AssertionError: The bridge has ended.
        """
        assert self.process.poll() is None, self.process.communicate()[1]
        return read_status(self.files / "status.json")

    def until(self, true: Callable[[BridgeStatus], bool], what: str, seconds: float = PATIENCE) -> BridgeStatus:
        """Wait for a status that meets a condition, and return the status."""
        found: list[BridgeStatus] = []

        def holds() -> bool:
            status = self.status()
            if status is not None and true(status):
                found.append(status)
            return bool(found)

        wait_until(holds, what, seconds)
        return found[0]

    def memory(self, of: str = "VmHWM") -> int:
        """Return the memory of the process as `memory_of` does."""
        return memory_of(self.process.pid, of)

    def stop(self) -> tuple[int, str]:
        """Stop the bridge, and return its exit status and its output on stderr."""
        self.process.send_signal(signal.SIGTERM)
        said = self.process.communicate(timeout=PATIENCE)[1]
        return self.process.returncode, said

    def kill(self) -> None:
        """Send SIGKILL to the bridge if it runs."""
        if self.process.returncode is None:
            self.process.kill()
            self.process.communicate()

    def frames(self) -> Iterator[Frame]:
        """Yield the frames in the spool in their order. The bridge must have ended."""
        with closing(sqlite3.connect(self.state / "bridge" / "spool" / FILE_NAME)) as spool:
            for (frame,) in spool.execute("SELECT frame FROM frames ORDER BY id"):
                yield Frame.FromString(frame)

    def received_ids(self) -> Iterator[tuple[bytes, str]]:
        """Yield the remote peer and the id of each received message in the spool. The bridge must have ended."""
        for frame in self.frames():
            if frame.direction == Frame.IN:
                for message in RPC.FromString(frame.payload).publish:
                    yield frame.remote_peer, message_id(message)
