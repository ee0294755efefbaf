"""Windows of one partition of `kiln.updates`, in event time (CIP-123, Sending a batch update; decision 1).

Plain objects: no Spark, no clock, no I/O. The same records in the same order give the same windows, whatever the
micro-batches, restarts or speed at which they are read.

Log time C is the greatest broker timestamp so far. The event time h of an update is never later than C. A separator's
window opens at the h of its first update (t0), when log time is c0. An update of the separator belongs to the window if
h < t0 + T and C < c0 + T + G; otherwise it opens the next window. A window is emitted at the first record that ends it:
an update of the separator with h >= t0 + T, or any record with C >= c0 + T + G.
"""

from __future__ import annotations

import heapq
from typing import Final

import msgspec

from kiln.pipelines.batch.offset_range import NO_UPDATE, UpdateRange, WindowKey
from kiln.schemas.kafka.epoch_guard import EpochGuard, SavedEpoch
from kiln.schemas.wire.batch_block import encode_stream_key

# µs: before and after every time that a record can have
_NEVER: Final = -(2**63)
_FOREVER: Final = 2**63


class Window(msgspec.Struct, gc=False):
    """A window of one separator: updates whose event time is less than T after the first update's. Times are µs."""

    key: WindowKey
    opened_at: int
    """t0: event time of the first update"""
    closes_at: int
    """t0 + T: end of the window in event time"""
    leaves: set[bytes] = msgspec.field(default_factory=set)
    """the tips of streams, as `write_leaves` takes them"""
    due: int = 0
    """c0 + T + G: log time at which the window ends"""
    accepts_until: int = 0
    """the window accepts updates before this event time: `closes_at`; for an ended window, a time before all updates"""


class _SavedWindow(msgspec.Struct, array_like=True, gc=False):
    """An open window in Spark's state."""

    key: WindowKey
    opened_at: int
    closes_at: int
    due: int
    leaves: list[bytes]
    """tips of streams, sorted"""


class _State(msgspec.Struct, array_like=True):
    """State of a partition in Spark, as msgpack of these fields in this order."""

    log_time: int = 0
    windows: list[_SavedWindow] = []
    """open windows, in the order in which they end"""
    epochs: list[SavedEpoch] = []


class PartitionWindows:
    """Open windows of one partition. Updates that a writer wrote twice are dropped (`EpochGuard`).

    Call `add_range` for each range of records, in the order of their offsets. For single records, the equivalent is
    `advance(stamp)`, then `add(…)` for each update that is no duplicate.
    """

    def __init__(self, length: int, state: bytes = b"", grace: int = 0) -> None:
        """Load the windows.

        Args:
            length: T, µs, of new windows.
            state: What `dump` returned before.
            grace: G, µs, of new windows.
        """
        saved = _decoder.decode(state) if state else _State()
        self._length = length
        self._grace = grace
        self.log_time = saved.log_time
        self.guard = EpochGuard(saved.epochs)
        self._open = {
            each.key: Window(each.key, each.opened_at, each.closes_at, set(each.leaves), each.due, each.closes_at)
            for each in saved.windows
        }
        # A heap of tuples: `due`, number of windows opened before, window. A window that an update has ended stays in
        # the heap.
        self._dues = [(window.due, count, window) for count, window in enumerate(self._open.values())]
        self._opened = len(self._dues)

    def __len__(self) -> int:
        return len(self._open)

    def add_range(self, records: UpdateRange) -> list[Window | int]:
        """Add the next records of the partition to their windows.

        Returns:
            In the order of the records, each window that ends, and the index of each record that could not be decoded.
        """
        results: list[Window | int] = []
        log_time, due = self.log_time, self._next_due()
        windows = [self._open.get(key, _ENDED) for key in records.owners]
        last_epoch = -1
        digests: set[bytes] | None = None  # of the messages so far in this epoch
        columns = zip(
            records.stamps,
            records.owner_indexes,
            records.epoch_indexes,
            records.leaves,
            records.observed_at,
            records.messages,
            strict=True,
        )
        for index, (stamp, owner, epoch, leaf, event_time, message) in enumerate(columns):
            if stamp > log_time:
                log_time = stamp
                if log_time >= due:
                    results += self.advance(log_time)
                    due = self._next_due()
            if owner < 0:
                if owner != NO_UPDATE:
                    results.append(index)
                continue
            if epoch != last_epoch:
                digests, last_epoch = self.guard.load_epoch(*records.epochs[epoch]), epoch
            if digests is not None:
                if message in digests:
                    continue
                digests.add(message)
            if event_time > log_time:
                event_time = log_time
            if event_time < windows[owner].accepts_until:
                windows[owner].leaves.add(leaf)
            else:
                self.log_time = log_time
                key = records.owners[owner]
                results += self._add_leaf(key, leaf, event_time)
                windows[owner] = self._open[key]
                due = self._next_due()
        self.log_time = log_time
        return results

    def advance(self, stamp: int) -> list[Window]:
        """Advance log time to the broker timestamp of a record (µs), and return the windows that end."""
        self.log_time = max(self.log_time, stamp)
        closed: list[Window] = []
        while self._dues and self._dues[0][0] <= self.log_time:
            _, _, window = heapq.heappop(self._dues)
            if window.accepts_until != _NEVER:
                window.accepts_until = _NEVER
                del self._open[window.key]
                closed.append(window)
        return closed

    def add(self, key: WindowKey, stream: str, tip: bytes, event_time: int) -> list[Window]:
        """Add an update to the window of its separator. If the update ends the window, return that window.
        `event_time`: µs."""
        return self._add_leaf(key, encode_stream_key(stream) + tip, event_time)

    def dump(self) -> bytes:
        """Return the state. The same records in the same order give the same bytes."""
        windows = [
            _SavedWindow(window.key, window.opened_at, window.closes_at, window.due, sorted(window.leaves))
            for _, _, window in sorted(self._dues)
            if window.accepts_until != _NEVER
        ]
        return _encoder.encode(_State(self.log_time, windows, self.guard.save()))

    def _add_leaf(self, key: WindowKey, leaf: bytes, event_time: int) -> list[Window]:
        last = self._open.get(key)
        if last is not None:
            if event_time < last.accepts_until:
                last.leaves.add(leaf)
                return []
            last.accepts_until = _NEVER
        closes_at = event_time + self._length
        due = self.log_time + self._length + self._grace
        window = self._open[key] = Window(key, event_time, closes_at, {leaf}, due, closes_at)
        heapq.heappush(self._dues, (due, self._opened, window))
        self._opened += 1
        return [] if last is None else [last]

    def _next_due(self) -> int:
        return self._dues[0][0] if self._dues else _FOREVER


_ENDED: Final = Window(WindowKey("", "LIVE", "", ""), 0, 0, accepts_until=_NEVER)
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_State)
