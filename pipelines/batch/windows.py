"""Windows of one partition of `kiln.updates`, in event time (CIP-123, Sending a batch update; decision 1).

Plain objects: no Spark, no clock, no I/O. The same records in the same order give the same windows, whatever the
micro-batches, restarts or speed at which they are read.

Log time C is the greatest broker stamp so far. The event time h of an update is never later than C. A separator's
window opens at the h of its first update (t0), when log time is c0. An update of the separator belongs to the window if
h < t0 + T and C < c0 + T + G; otherwise it opens the next window. A window is emitted at the first record that ends it:
an update of the separator with h >= t0 + T, or any record with C >= c0 + T + G.
"""

from __future__ import annotations

import heapq
from typing import Final, NamedTuple

import msgspec

from kiln.pipelines.batch.epoch_guard import EpochGuard, SavedEpoch
from kiln.pipelines.batch.offset_range import WindowKey


class Window(msgspec.Struct, gc=False):
    """The updates of one separator whose event time is within T of the first. Times are µs."""

    opened_at: int
    """t0: event time of the first update"""
    closes_at: int
    """t0 + T"""
    due: int = 0
    """c0 + T + G: log time that ends the window"""
    tips: dict[str, set[bytes]] = {}
    """CID bytes of the tips, by StreamID text"""
    rank: int = 0
    """number of windows that were opened before"""

    def add(self, stream: str, tip: bytes) -> None:
        """Add a tip of a stream, which is a canonical StreamID."""
        tips = self.tips.get(stream)
        if tips is None:
            self.tips[stream] = {tip}
        else:
            tips.add(tip)


class ClosedWindow(NamedTuple):
    key: WindowKey
    window: Window


class _SavedWindow(msgspec.Struct, array_like=True, gc=False):
    """An open window in the state."""

    key: WindowKey
    opened_at: int
    closes_at: int
    due: int
    tips: dict[str, set[bytes]]


class _State(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The state of a partition: msgpack of these fields in this order."""

    log_time: int = 0
    windows: list[_SavedWindow] = []
    """in order of opening"""
    epochs: list[SavedEpoch] = []


class PartitionWindows:
    """Open windows of one partition, and the guard against updates that are in the log twice.

    For each record, in offset order, call `advance` with its stamp. Then call `add` for each update that the guard does
    not know.
    """

    def __init__(self, length: int, state: bytes = b"", grace: int = 0) -> None:
        """Load the windows.

        Args:
            length: T, µs. Open windows keep their own.
            state: An earlier `dump()`.
            grace: G, µs. Open windows keep their own.
        """
        saved = _decoder.decode(state) if state else _State()
        self._length = length
        self._grace = grace
        self.log_time = saved.log_time
        self.guard = EpochGuard(saved.epochs)
        self._open: dict[WindowKey, Window] = {}  # in order of opening
        # The rank makes the order of closing total. A window that an update has ended stays in here.
        self._dues: list[tuple[int, int, WindowKey]] = []
        self._rank = 0
        for window in saved.windows:
            self._open_window(window.key, Window(window.opened_at, window.closes_at, window.due, window.tips))

    def __len__(self) -> int:
        return len(self._open)

    def advance(self, stamp: int) -> list[ClosedWindow]:
        """Move log time forward to a record's broker stamp (µs), and return the windows that it ends."""
        self.log_time = max(self.log_time, stamp)
        closed: list[ClosedWindow] = []
        while self._dues and self._dues[0][0] <= self.log_time:
            _, rank, key = heapq.heappop(self._dues)
            window = self._open.get(key)
            if window is not None and window.rank == rank:
                closed.append(ClosedWindow(key, self._open.pop(key)))
        return closed

    def add(self, key: WindowKey, stream: str, tip: bytes, event_time: int) -> list[ClosedWindow]:
        """Add an update to its separator's window, and return the window that it ends, if any. `event_time`: µs."""
        window = self._open.get(key)
        if window is not None and event_time < window.closes_at:
            window.add(stream, tip)
            return []
        closed = [] if window is None else [ClosedWindow(key, self._open.pop(key))]
        due = self.log_time + self._length + self._grace
        self._open_window(key, Window(event_time, event_time + self._length, due, {stream: {tip}}))
        return closed

    def dump(self) -> bytes:
        """Return the state. Equal histories give equal bytes."""
        windows = [
            _SavedWindow(key, window.opened_at, window.closes_at, window.due, window.tips)
            for key, window in self._open.items()
        ]
        return _encoder.encode(_State(self.log_time, windows, self.guard.save()))

    def _open_window(self, key: WindowKey, window: Window) -> None:
        window.rank = self._rank
        self._rank += 1
        self._open[key] = window
        heapq.heappush(self._dues, (window.due, window.rank, key))


_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")
_decoder: Final = msgspec.msgpack.Decoder(_State)
