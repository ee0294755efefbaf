"""Counting the open descriptors of a process, and a broker that hangs up on every client."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def descriptors(pid: int | None = None) -> int:
    """How many a process has open, by default this one."""
    return len(list(Path(f"/proc/{pid or os.getpid()}/fd").iterdir()))


class HangingBroker:
    """Accepts connections, sends `words`, and hangs up. `calls`: how many it has hung up on."""

    def __init__(self, words: bytes = b"") -> None:
        self.calls = 0
        self._words = words
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """`host:port`"""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        """Returns once none of its own descriptors is open."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:  # shut down
                return
            with caller, suppress(OSError):  # a caller that hung up first
                caller.sendall(self._words)
            self.calls += 1


@contextmanager
def hanging_broker(words: bytes = b"") -> Iterator[HangingBroker]:
    """While it runs."""
    broker = HangingBroker(words)
    try:
        yield broker
    finally:
        broker.close()
