"""A bridge as a process of its own with no broker: what it captures is in its spool, where a test can read it."""

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
"""A broker that is away."""


def memory_of(pid: int, of: str = "VmHWM") -> int:
    """Bytes that a process takes, or took at most."""
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(of)) << 10


class BridgeAlone:
    """A bridge on the network `local-test`. `settings`: KILN_…; `before`: a command line that runs another."""

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
        """The bridge's folder as the bridge itself sees it, in a mount namespace of its own."""
        return Path(f"/proc/{self.process.pid}/root{self.state}/bridge")

    def status(self) -> BridgeStatus | None:
        """What the bridge says of itself. AssertionError: it has ended."""
        assert self.process.poll() is None, self.process.communicate()[1]
        return read_status(self.files / "status.json")

    def until(self, true: Callable[[BridgeStatus], bool], what: str, seconds: float = PATIENCE) -> BridgeStatus:
        """The first status of which something is true."""
        found: list[BridgeStatus] = []

        def holds() -> bool:
            status = self.status()
            if status is not None and true(status):
                found.append(status)
            return bool(found)

        wait_until(holds, what, seconds)
        return found[0]

    def memory(self, of: str = "VmHWM") -> int:
        """Bytes that the process takes, or took at most."""
        return memory_of(self.process.pid, of)

    def stop(self) -> tuple[int, str]:
        """Ends the bridge: its exit status and what it said."""
        self.process.send_signal(signal.SIGTERM)
        said = self.process.communicate(timeout=PATIENCE)[1]
        return self.process.returncode, said

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self.process.returncode is None:
            self.process.kill()
            self.process.communicate()

    def frames(self) -> Iterator[Frame]:
        """All frames in the spool, of a bridge that has ended, in their order."""
        with closing(sqlite3.connect(self.state / "bridge" / "spool" / FILE_NAME)) as spool:
            for (frame,) in spool.execute("SELECT frame FROM frames ORDER BY id"):
                yield Frame.FromString(frame)

    def received_ids(self) -> Iterator[tuple[bytes, str]]:
        """The remote peer and the id of each received message in the spool, of a bridge that has ended."""
        for frame in self.frames():
            if frame.direction == Frame.IN:
                for message in RPC.FromString(frame.payload).publish:
                    yield frame.remote_peer, message_id(message)
