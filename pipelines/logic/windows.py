"""Windows of one partition of `kiln.updates`, in hearing time (CIP-123, Sending a batch update; decision 1).

A plain object: no Spark, no clock, no I/O. The same records in the same order give the same windows, whatever the
micro-batches, restarts or speed at which they are read.

The clock C of the log is the greatest broker stamp so far. An update was heard at h, never later than C. A
separator's window opens at the h of its first update (t0), when the clock stands at c0. An update of the separator
belongs to the window if h < t0 + T and C < c0 + T + G; else it opens the next window. The window comes out at the first
record that ends it: an update of the separator with h >= t0 + T, or any record with C >= c0 + T + G.
"""

from __future__ import annotations

import heapq
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from schemas.log import MAX_EPOCH_WRITERS
from schemas.records import Origin


class WindowKey(NamedTuple):
    """What owns a window: two networks, origins or separators never share one."""

    network: str
    origin: Origin
    separator_key: str
    separator_value: str


class Window(msgspec.Struct, array_like=True):
    """The updates of one separator that were heard within T of the first. Times are µs."""

    opened_at: int
    """t0: when the first update was heard"""
    closes_at: int
    """t0 + T"""
    tips: dict[str, set[bytes]]  # StreamID text -> CID bytes
    ends_at: int = 0
    """c0 + T + G: where the log's clock ends the window. 0: a window of a state from before hearing time, which runs by
    the log's clock alone, from opened_at to closes_at."""

    @property
    def due(self) -> int:
        """Where the log's clock ends the window."""
        return self.ends_at or self.closes_at

    def takes(self, heard: int) -> bool:
        """Whether an update that was heard then belongs to the window, while the log's clock has not ended it."""
        return not self.ends_at or heard < self.closes_at

    def add(self, stream: str, tip: bytes) -> None:
        self.tips.setdefault(stream, set()).add(tip)


class ClosedWindow(NamedTuple):
    key: WindowKey
    window: Window


class _State(msgspec.Struct, array_like=True):
    """Layout of the blob kept in the state store: msgpack of this, fields in this order."""

    clock: int = 0
    windows: list[tuple[WindowKey, Window]] = []
    epoch: tuple[str, int] | None = None
    seen: list[bytes] = []
    others: list[tuple[str, int, list[bytes]]] = []


class PartitionWindows:
    """Open windows of one partition.

    For each record, in offset order: `advance(stamp)`, then, if it is an update that is no repeat, `add(…)`.
    """

    def __init__(self, length: int, state: bytes = b"", grace: int = 0) -> None:
        """`length`: T, `grace`: G, in µs; open windows keep their own. `state`: an earlier `dump()`."""
        kept = msgspec.msgpack.decode(state, type=_State) if state else _State()
        self._length = length
        self._grace = grace
        self.clock = kept.clock
        # by writer, the one that wrote last at the end
        self._epochs = {query: (batch, set(seen)) for query, batch, seen in kept.others}
        if kept.epoch is not None:
            self._epochs[kept.epoch[0]] = (kept.epoch[1], set(kept.seen))
        # In order of opening. The rank, which tells that order, makes the order of closing total.
        self._open = {key: (rank, window) for rank, (key, window) in enumerate(kept.windows)}
        self._due = [(window.due, rank, key) for key, (rank, window) in self._open.items()]
        heapq.heapify(self._due)
        self._rank = len(self._due)

    def __len__(self) -> int:
        return len(self._open)

    def advance(self, stamp: int) -> list[ClosedWindow]:
        """Moves the clock to a record's broker stamp (µs), never back, and takes out the windows that it ends."""
        if stamp > self.clock:
            self.clock = stamp
        closed: list[ClosedWindow] = []
        while self._due and self._due[0][0] <= self.clock:
            _, rank, key = heapq.heappop(self._due)
            found = self._open.get(key)
            if found is not None and found[0] == rank:  # else an update has ended that window before
                closed.append(ClosedWindow(key, self._open.pop(key)[1]))
        return closed

    def add(self, key: WindowKey, stream: str, tip: bytes, heard: int) -> list[ClosedWindow]:
        """Puts an update, heard at µs, into its separator's window; takes out the window that it ends, if it does."""
        found = self._open.get(key)
        if found is not None and found[1].takes(heard):
            found[1].add(stream, tip)
            return []
        ended = [ClosedWindow(key, self._open.pop(key)[1])] if found is not None else []
        window = Window(heard, heard + self._length, {}, self.clock + self._length + self._grace)
        window.add(stream, tip)
        self._open[key] = (self._rank, window)
        heapq.heappush(self._due, (window.due, self._rank, key))
        self._rank += 1
        return ended

    def repeats(self, query: str, batch: int, message: str) -> bool:
        """Whether this message already came in its writer's newest epoch (decision 7).

        An epoch is one micro-batch of the query that writes the log, or what the bridge let go between two commits:
        after a crash Kafka may hold it twice. Ids are kept for the newest epoch of each of the last few writers, as
        16-byte digests; a new query id starts afresh.
        """
        newest, seen = self._epochs.pop(query, (batch, set[bytes]()))
        if newest < batch:
            newest, seen = batch, set()
        self._epochs[query] = (newest, seen)
        while len(self._epochs) > MAX_EPOCH_WRITERS:
            del self._epochs[next(iter(self._epochs))]
        if newest > batch:
            return False
        digest = blake2b(message.encode(), digest_size=16).digest()
        if digest in seen:
            return True
        seen.add(digest)
        return False

    def dump(self) -> bytes:
        """The state as bytes, equal for equal states."""
        epochs = [(query, batch, sorted(seen)) for query, (batch, seen) in self._epochs.items()]
        query, batch, seen = epochs.pop() if epochs else ("", 0, [])
        epoch = (query, batch) if self._epochs else None
        windows = [(key, window) for key, (_, window) in self._open.items()]
        return _encoder.encode(_State(self.clock, windows, epoch, seen, epochs))


# Sets are written sorted, so that the same state is the same bytes.
_encoder = msgspec.msgpack.Encoder(order="deterministic")
