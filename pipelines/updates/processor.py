"""Stateful processor of the query `updates` on a cluster: selects updates by the state of their stream (decision 10).

As in the query `batch`, pandas is imported only where rows are processed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)
from pyspark.sql.types import BinaryType, StructField, StructType

from kiln.pipelines.runtime.dedup_store import StoredDigest
from kiln.pipelines.updates.repeats import select_updates
from kiln.pipelines.updates.row_builder import COPY_COLUMNS, UpdateRow, read_copies

if TYPE_CHECKING:
    import pandas as pd

MAX_DIGESTS: Final = 3_000
"""Digests in the state of a stream. Beyond that, the oldest ones are forgotten, as if they had expired."""

_STATE = StructType([StructField("state", BinaryType())])


class StreamState:
    """Digests of one stream, each with the time at which it was stored, µs."""

    def __init__(self, packed: bytes, span: int) -> None:
        """Load what `dump` returned. `span`: retention of a digest, µs."""
        self._span = span
        self._digests = _DECODER.decode(packed) if packed else {}

    def select(self, copies: list[UpdateRow], now: int) -> list[UpdateRow]:
        """Select the copies to emit. `now`: time of the micro-batch, µs."""
        self.expire(now)
        stored = {key: StoredDigest(*digest[1:]) for key, digest in self._digests.items()}
        copies.sort(key=lambda copy: (copy.observed_at, copy.ref.partition, copy.ref.offset, copy.ref.position or 0))
        passed, changed = select_updates(copies, stored)
        for key, digest in changed.items():
            self._digests.pop(key, None)  # so that the newest ones are last
            self._digests[key] = (now, *digest)
        for key in list(self._digests)[:-MAX_DIGESTS]:
            del self._digests[key]
        return passed

    def expire(self, now: int) -> None:
        """Forget the digests that have expired. `now`: µs."""
        self._digests = {key: digest for key, digest in self._digests.items() if digest[0] > now - self._span}

    @property
    def count(self) -> int:
        """Number of digests."""
        return len(self._digests)

    @property
    def newest_time(self) -> int | None:
        """Time of the newest digest, µs."""
        return max((digest[0] for digest in self._digests.values()), default=None)

    def dump(self) -> bytes:
        """Return the state as bytes."""
        return msgspec.msgpack.encode(self._digests)


_DECODER = msgspec.msgpack.Decoder(dict[bytes, tuple[int, str, bytes, int]])


class UpdateProcessor(StatefulProcessor):
    """Selector keyed by stream. Its time is that of the micro-batches, and its watermark is `retention` behind."""

    def __init__(self, retention: int) -> None:
        """
        Args:
            retention: Retention of a digest without downtime, µs; twice that time at most.
        """
        self._retention = retention

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._state = handle.getValueState("stream", _STATE)

    def handleInputRows(
        self,
        key: tuple[bytes],
        rows: Iterator[pd.DataFrame] | Iterator[Row],
        timerValues: TimerValues,
    ) -> Iterator[pd.DataFrame]:
        """Select rows of one stream. Rows in: COPIES_DDL. Rows out: ROWS_DDL."""
        import pandas as pd

        copies: list[UpdateRow] = []
        now = 0
        for frame in rows:
            if isinstance(frame, pd.DataFrame):  # the pandas form of the operator
                copies += read_copies(zip(*(frame[name].tolist() for name in COPY_COLUMNS), strict=True))
                now = max(now, int(frame["batch_time"].max()))
        state = self._load()
        if state.newest_time is None:
            self._set_timer(now)
        passed = state.select(copies, now)
        self._state.update((state.dump(),))
        if passed:  # pandas would give an empty column a type of its own choice
            yield pd.DataFrame(
                {
                    "topic": [row.topic for row in passed],
                    "key": [row.key for row in passed],
                    "value": [row.value for row in passed],
                    "observed_at": [row.observed_at for row in passed],
                }
            )

    def handleExpiredTimer(  # noqa: N802  # PySpark's name
        self,
        key: tuple[bytes],
        timerValues: TimerValues,
        expiredTimerInfo: ExpiredTimerInfo,  # noqa: N803  # as above
    ) -> Iterator[pd.DataFrame]:
        """Forget what has expired."""
        state = self._load()
        state.expire(timerValues.getCurrentWatermarkInMs() * 1000 + self._retention)
        if state.newest_time is None:
            self._state.clear()
        else:
            self._state.update((state.dump(),))
            self._set_timer(state.newest_time)
        return iter(())

    def close(self) -> None:
        """Do nothing: there is no state outside Spark's."""

    def _load(self) -> StreamState:
        state = self._state.get()
        return StreamState(bytes(state[0]) if state else b"", 2 * self._retention)

    def _set_timer(self, now: int) -> None:
        """Set the timer that fires when the watermark passes the expiry of a digest of this time."""
        self._handle.registerTimer((now + self._retention) // 1000 + 1)
