"""A counter of a process's open file descriptors, and a broker that closes every connection."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def descriptors(pid: int | None = None) -> int:
    """Count the open file descriptors of a process, by default of this process."""
    return len(list(Path(f"/proc/{pid or os.getpid()}/fd").iterdir()))


class HangingBroker:
    """Accepts connections, sends `words` and closes them. `calls` counts the closed connections."""

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
        """Stop the broker, and return when all its descriptors are closed."""
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
    """Run a broker for the duration of the context."""
    broker = HangingBroker(words)
    try:
        yield broker
    finally:
        broker.close()
