"""A thread that works in sessions with Kafka. If a session fails, the thread reports the error and begins another."""

from __future__ import annotations

import logging
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from traceback import walk_stack
from typing import Final, NamedTuple

from kafka.errors import KafkaError

from kiln.bridge.kafka.producers import FramesProducerError
from kiln.conf.process.kafka_clients import describe_kafka_error
from kiln.schemas.times import clamp_micros

SESSION: Final = 10.0
"""Seconds without a heartbeat after which the broker removes a bridge from a consumer group. The default minimum of
brokers is 6 s (`group.min.session.timeout.ms`)."""

STALL_AFTER: Final = 60.0
"""Seconds without a finished step after which a thread is reported as stalled. No healthy step takes so long."""

_LOG: Final = logging.getLogger(__name__)
_LONG_PAUSE: Final = 10.0  # seconds; a bug that appears at once must not fill the log


def now_us() -> int:
    """Return the Unix time in µs. If the clock is wrong, clamp the time to the range that Kiln's records allow."""
    return clamp_micros(time.time_ns() // 1_000)


class BlockedError(RuntimeError):
    """The thread cannot work until a user does what the message says."""


class TwinError(BlockedError):
    """Another bridge runs with the same key, so the broker accepts only one of the two."""

    def __init__(self, peer: str) -> None:
        super().__init__(f"another bridge uses the key of this one ({peer}). Give each bridge its own state folder.")


class KafkaConfig(NamedTuple):
    """Connection options of Kafka clients, and the prefix of topics and groups.

    Attributes:
        client_options: by the names of kafka-python (bootstrap_servers, security_protocol, sasl_…, ssl_…).
    """

    client_options: Mapping[str, object]
    prefix: str


class SessionThread(ABC):
    """A thread that runs one session after the other, from `start()` to `stop()`."""

    def __init__(self, name: str, consequence: str, kafka: KafkaConfig, retry_after: float = 1.0) -> None:
        """Create the thread without starting it.

        Args:
            name: name of the thread, also in messages.
            consequence: beginning of the messages if the thread cannot work, such as "nothing is published".
            retry_after: seconds from a failed session to the next one.
        """
        self._name = name
        self._consequence = consequence
        self._client_options, self._prefix = kafka
        self._retry_after = retry_after
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._state = "not started"
        self._error: str | None = None
        self._progress_at = time.monotonic()

    def start(self) -> None:
        self._mark_progress()
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        thread.start()
        self._thread = thread

    def stop(self, timeout: float = 5.0) -> None:
        """Tell the thread to end after its current step, and wait up to `timeout` seconds for its end."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout)

    @property
    def state(self) -> str:
        """Text for users: what the thread does, or waits for."""
        return self._state

    @property
    def error(self) -> str | None:
        """Text for users: why the thread cannot work now; `None` if it can."""
        alive = self._thread is not None and self._thread.is_alive()
        if self._error is None and alive and time.monotonic() - self._progress_at > STALL_AFTER:
            return f"{self._consequence}: the {self._name} has stalled in {self._describe_stack()}. Restart the bridge."
        return self._error

    def _mark_progress(self) -> None:
        """Record the time of a step. If no step follows within STALL_AFTER, `error` reports a stalled thread."""
        self._progress_at = time.monotonic()

    def _describe_stack(self) -> str:
        """Return the thread's innermost call in Kiln's code, and the library calls made from there."""
        ident = None if self._thread is None else self._thread.ident
        frame = sys._current_frames().get(ident or 0)
        calls = []
        for call, line in () if frame is None else walk_stack(frame):
            calls.append(f"{call.f_code.co_name} ({Path(call.f_code.co_filename).name}:{line})")
            if str(call.f_globals.get("__name__")).startswith("kiln."):
                break
        return " > ".join(reversed(calls))

    @abstractmethod
    def _run_session(self) -> None:
        """Run one session, which ends at the latest when the thread is stopped. If Kafka fails, raise an error."""

    def _release_resources(self) -> None:  # noqa: B027 – most threads have none
        """Release resources; called when the thread ends."""

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._mark_progress()
                try:
                    self._run_session()
                except BlockedError as error:
                    self._error = self._state = f"{self._consequence}: {error}"
                    self._stop.wait(_LONG_PAUSE)
                # kafka-python asserts that it knows every option, raises ValueError for wrong values, and passes an
                # OSError through, such as too many open files
                except (KafkaError, FramesProducerError, OSError, ValueError, AssertionError) as error:
                    self._error = self._state = (
                        f"{self._consequence}, because Kafka fails: {self._describe_error(error)}"
                    )
                    self._stop.wait(self._retry_after)
                except Exception:  # noqa: BLE001 – a bug in Kiln must not end the thread for good
                    _LOG.exception("the %s has crashed, and will be restarted. Report this bug in Kiln", self._name)
                    self._error = self._state = (
                        f"{self._consequence}: the {self._name} has crashed, and will be restarted"
                    )
                    self._stop.wait(_LONG_PAUSE)
        finally:
            self._release_resources()
            self._state = "stopped"

    def _describe_error(self, error: Exception) -> str:
        if isinstance(error, KafkaError):
            return describe_kafka_error(error, self._client_options)
        return str(error) if isinstance(error, FramesProducerError) else repr(error)
