"""bridge.kafka.thread: a session that fails is begun anew, whatever of Kafka or of the system failed."""

from __future__ import annotations

import errno

import pytest
from kafka.errors import KafkaTimeoutError
from kit.awaiting import wait_until

from bridge.kafka.producers import FramesProducerError
from bridge.kafka.thread import KafkaThread


class Failing(KafkaThread):
    """Its first session fails."""

    def __init__(self, error: Exception) -> None:
        super().__init__("reader", "nothing is read", ["127.0.0.1:1"], {}, "t.", "group")
        self.sessions = 0
        self._failure = error

    def _session(self) -> None:
        self.sessions += 1
        if self.sessions == 1:
            raise self._failure
        self._stop.wait(30)

    def _ended(self) -> None: ...


@pytest.mark.parametrize(
    "error",
    [KafkaTimeoutError(), FramesProducerError("x"), OSError(errno.EMFILE, "Too many open files"), ValueError("x")],
    ids=lambda error: type(error).__name__,
)
def test_the_thread_goes_on_after_a_failure(error: Exception) -> None:
    thread = Failing(error)
    thread.start()
    try:
        wait_until(lambda: thread.sessions == 2, "another session")
        assert "nothing is read" in (thread.error or "")
    finally:
        thread.stop()
