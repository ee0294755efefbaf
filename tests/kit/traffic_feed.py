"""Synthetic traffic for `kiln.frames` in real time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kiln.bridge.kafka.producers import FramesProducer, FramesProducerError
from kiln.deploy.demo.traffic import Traffic, TrafficOptions


class Feed:
    """Sends traffic from a thread between `start()` and `stop()`; `error` is the reason of an early end."""

    def __init__(
        self,
        options: TrafficOptions,
        rate: float,
        connect: Callable[[], FramesProducer],
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Create the feed; `rate` is the number of messages per second, without copies."""
        self._options = options
        self._rate = rate
        self._connect = connect
        self._clock_ns = clock_ns
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self.error: str | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close the connections, and wait until the broker has all frames."""
        self._stop.set()
        self._thread.join(timeout=60)

    def _run(self) -> None:
        try:
            with self._connect() as producer:
                started = self._clock_ns()
                traffic = Traffic(self._options, started, self._rate, keep_ledger=False)
                for frame in traffic.frames():
                    early = (started + frame.due_ns - self._clock_ns()) / 1e9
                    if not self._stop.is_set() and (early <= 0 or not self._stop.wait(early)):
                        producer.send_record(frame.key, frame.value)
                        continue
                    traffic.stop()  # what is under way and the closing frames still go out, at once
                    producer.send_record(frame.key, frame.value)
        except FramesProducerError as error:
            self.error = f"the traffic ended: {error}"
