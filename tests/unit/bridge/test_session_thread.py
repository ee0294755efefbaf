"""kiln.bridge.kafka.session_thread: a failed session is restarted, and a stalled one is reported."""

from __future__ import annotations

import errno
import re
from threading import Event
from typing import cast

import pytest
from kafka.errors import KafkaTimeoutError

from kafka import TopicPartition
from kiln.bridge.kafka import session_thread, worker
from kiln.bridge.kafka.producers import FramesProducerError
from kiln.bridge.kafka.session_thread import KafkaConfig, SessionThread
from kiln.bridge.kafka.worker import StallCheck
from kiln.conf.process.kafka_records import RecordReader
from kit.awaiting import awaited, wait_until


class Failing(SessionThread):
    """Its first session fails."""

    def __init__(self, error: Exception) -> None:
        super().__init__("reader", "nothing is read", KafkaConfig({"bootstrap_servers": ["127.0.0.1:1"]}, "t."))
        self.sessions = 0
        self._failure = error

    def _run_session(self) -> None:
        self.sessions += 1
        if self.sessions == 1:
            raise self._failure
        self._stop.wait(60)

    def _release_resources(self) -> None: ...


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


def test_a_thread_that_a_fault_has_ended_starts_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session_thread, "_LONG_PAUSE", 0.1)
    thread = Failing(RuntimeError("can't start new thread"))
    thread.start()
    try:
        wait_until(lambda: thread.sessions == 2, "another session")
        assert thread.error == "nothing is read: the reader has crashed, and will be restarted"
        assert "can't start new thread" in caplog.text
        assert "in _run_session" in caplog.text
    finally:
        thread.stop()
    assert (thread.sessions, thread.state) == (2, "stopped")


def test_a_fault_that_comes_at_once_does_not_fill_the_log_or_delay_the_end() -> None:
    thread = Failing(RuntimeError("can't start new thread"))
    thread.start()
    wait_until(lambda: bool(thread.error), "the fault")
    thread.stop()
    assert (thread.sessions, thread.state) == (1, "stopped")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_the_thread_goes_on_where_no_descriptor_is_free_to_find_out_why(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def none_free(**_: object) -> object:
        raise OSError(number, "Too many open files")

    monkeypatch.setattr("kafka.net.selector.NetworkSelector", none_free)
    thread = Failing(KafkaTimeoutError("Unable to bootstrap"))
    thread.start()
    try:
        wait_until(lambda: thread.sessions == 2, "another session")
        assert "Unable to bootstrap" in (thread.error or "")
    finally:
        thread.stop()


class Waiting(SessionThread):
    """Moves until it waits for what never comes, or comes when it is let go."""

    def __init__(self) -> None:
        super().__init__("reader", "nothing is read", KafkaConfig({"bootstrap_servers": ["127.0.0.1:1"]}, "t."))
        self.waits = Event()
        self.go = Event()

    def _run_session(self) -> None:
        if self.waits.is_set():
            self.go.wait(60)

    def _release_resources(self) -> None: ...


def test_a_thread_that_stands_still_says_where_and_no_longer_once_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_thread, "STALL_AFTER", 0.5)
    thread = Waiting()
    thread.start()
    try:
        assert not awaited(lambda: thread.error is not None, 1.0)
        thread.waits.set()
        wait_until(lambda: thread.error is not None, "the words")
        where = r"_run \(session_thread.py:\d+\) > _run_session \(test_session_thread.py:\d+\) > wait \(threading.py:"
        assert re.match("nothing is read: the reader has stalled in " + where, thread.error or "")
        thread.waits.clear()
        thread.go.set()
        wait_until(lambda: thread.error is None, "the end of the problem")
    finally:
        thread.go.set()
        thread.stop()


PART = TopicPartition("t.batches", 0)


class Silent:
    """A reader at offset 5, to whom nothing comes."""

    def __init__(self, end: int = 5, paused: bool = False) -> None:
        self._end = end
        self.active_positions = {} if paused else {PART: 5}

    def read_end(self, part: TopicPartition, timeout: float) -> int:
        return self._end


def look(reader: Silent, times: int) -> None:
    check = StallCheck()
    for _ in range(times):
        check.check(cast(RecordReader, reader), has_records=False)


def test_a_reader_that_gives_nothing_of_what_there_is_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_NO_RECORD_FOR", -1.0)
    look(Silent(end=9), 1)  # it may come yet
    with pytest.raises(KafkaTimeoutError, match=r"no record of t\.batches-0 from offset 5 on"):
        look(Silent(end=9), 2)


@pytest.mark.parametrize("reader", [Silent(), Silent(end=9, paused=True)], ids=["at the end", "paused"])
def test_a_reader_that_has_nothing_to_give_is_kept(reader: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_NO_RECORD_FOR", -1.0)
    look(reader, 3)
