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
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec

from pipelines.logic.stretch import FAULT, Stretch, WindowKey
from schemas.batch import stream_key, tips_of
from schemas.log import MAX_EPOCH_WRITERS

# µs: before and after all that a record can say
_NEVER: Final = -(2**63)
_EVER: Final = 2**63


class Window(msgspec.Struct, gc=False):
    """The updates of one separator that were heard within T of the first. Times are µs."""

    opened_at: int
    """t0: when the first update was heard"""
    closes_at: int
    """t0 + T"""
    leaves: set[bytes] = msgspec.field(default_factory=set)
    """the tips of streams (schemas.batch)"""
    ends_at: int = 0
    """c0 + T + G: where the log's clock ends the window. 0: a window of a state from before hearing time, which runs by
    the log's clock alone, from opened_at to closes_at."""
    takes_until: int = 0
    """An open window takes what was heard before. That is closes_at, or for ever where the log's clock alone counts. A
    window that has ended takes nothing."""
    rank: int = 0
    """how many windows the partition's had opened before"""

    @property
    def due(self) -> int:
        """Where the log's clock ends the window."""
        return self.ends_at or self.closes_at

    @property
    def tips(self) -> dict[str, set[bytes]]:
        """CID bytes by StreamID text."""
        return tips_of(self.leaves)

    def add(self, stream: str, tip: bytes) -> None:
        """Takes a tip of a stream by its canonical StreamID."""
        self.leaves.add(stream_key(stream) + tip)


class ClosedWindow(NamedTuple):
    key: WindowKey
    window: Window


class _KeptWindow(msgspec.Struct, array_like=True, gc=False):
    """A window in the state."""

    opened_at: int
    closes_at: int
    tips: dict[str, set[bytes]] | None
    """StreamID text -> CID bytes, in a state from before windows had leaves. None since then: what reads only `tips`
    refuses the state, and loses nothing."""
    ends_at: int = 0
    leaves: list[bytes] = []
    """in their order"""


class _State(msgspec.Struct, array_like=True):
    """Layout of the blob kept in the state store: msgpack of this, fields in this order."""

    clock: int = 0
    windows: list[tuple[WindowKey, _KeptWindow]] = []
    epoch: tuple[str, int] | None = None
    seen: list[bytes] = []
    others: list[tuple[str, int, list[bytes]]] = []


class _Epoch:
    """The newest epoch of a writer, and its messages so far."""

    def __init__(self, number: int, digests: Iterable[bytes] = ()) -> None:
        self.number = number
        self.digests = set(digests)
        """of the messages in the state; 16 bytes each"""
        self.messages: set[str] = set()
        """since then. Few epochs live to the end of a micro-batch, so digests can wait until then."""

    def repeats(self, message: str) -> bool:
        """Whether the message came before; from now on it did."""
        count = len(self.messages)
        self.messages.add(message)
        return len(self.messages) == count or bool(self.digests and _digest(message) in self.digests)

    def dump(self) -> list[bytes]:
        return sorted(self.digests.union(map(_digest, self.messages)))


class PartitionWindows:
    """Open windows of one partition.

    For each stretch of records, in the order of their offsets: `take(stretch)`. The same record by record:
    `advance(stamp)`, then, if it is an update that is no repeat, `add(…)`.
    """

    def __init__(self, length: int, state: bytes = b"", grace: int = 0) -> None:
        """`length`: T, `grace`: G, in µs; open windows keep their own. `state`: an earlier `dump()`."""
        kept = _decoder.decode(state) if state else _State()
        self._length = length
        self._grace = grace
        self.clock = kept.clock
        # by writer, the one that wrote last at the end
        self._epochs = {query: _Epoch(batch, seen) for query, batch, seen in kept.others}
        if kept.epoch is not None:
            self._epochs[kept.epoch[0]] = _Epoch(kept.epoch[1], kept.seen)
        self._open: dict[WindowKey, Window] = {}  # in order of opening
        # The rank, which tells that order, makes the order of closing total.
        self._due: list[tuple[int, int, WindowKey]] = []
        self._rank = 0
        for key, window in kept.windows:
            tips = (window.tips or {}).items()
            leaves = {*window.leaves, *(stream_key(stream) + tip for stream, found in tips for tip in found)}
            until = window.closes_at if window.ends_at else _EVER
            self._put(key, Window(window.opened_at, window.closes_at, leaves, window.ends_at, until))

    def __len__(self) -> int:
        return len(self._open)

    def take(self, stretch: Stretch) -> list[ClosedWindow | int]:
        """Reads the next records of the partition into their windows.

        What comes of it, in the order of the records: each window that ends, and the index of each record that cannot
        be read.
        """
        found: list[ClosedWindow | int] = []
        clock, due = self.clock, self._next_due()
        writers: dict[tuple[str, int], tuple[str, int]] = {}
        written = [writers.setdefault(writer, writer) for writer in (owner[1:] for owner in stretch.table)]
        windows = [self._open.get(owner.key, _ENDED) for owner in stretch.table]
        writer: tuple[str, int] | None = None
        epoch: _Epoch | None = None
        columns = zip(stretch.stamps, stretch.owners, stretch.leaves, stretch.heard, stretch.messages, strict=True)
        for index, (stamp, owner, leaf, heard, message) in enumerate(columns):
            if stamp > clock:
                clock = stamp
                if clock >= due:
                    found += self.advance(clock)
                    due = self._next_due()
            if owner < 0:
                if owner == FAULT:
                    found.append(index)
                continue
            if written[owner] is not writer:
                writer = written[owner]
                epoch = self._epoch(*writer)
            if epoch is not None and epoch.repeats(message):
                continue
            if heard > clock:
                heard = clock
            if heard < windows[owner].takes_until:
                windows[owner].leaves.add(leaf)
            else:
                self.clock = clock
                key = stretch.table[owner].key
                found += self._add(key, leaf, heard)
                windows[owner] = self._open[key]
                due = self._next_due()
        self.clock = clock
        return found

    def advance(self, stamp: int) -> list[ClosedWindow]:
        """Moves the clock to a record's broker stamp (µs), never back, and takes out the windows that it ends."""
        if stamp > self.clock:
            self.clock = stamp
        closed: list[ClosedWindow] = []
        while self._due and self._due[0][0] <= self.clock:
            _, rank, key = heapq.heappop(self._due)
            window = self._open.get(key)
            if window is not None and window.rank == rank:  # else an update has ended that window before
                closed.append(self._close(key))
        return closed

    def add(self, key: WindowKey, stream: str, tip: bytes, heard: int) -> list[ClosedWindow]:
        """Puts an update, heard at µs, into its separator's window; takes out the window that it ends, if it does."""
        return self._add(key, stream_key(stream) + tip, heard)

    def repeats(self, query: str, batch: int, message: str) -> bool:
        """Whether this message already came in its writer's newest epoch (decision 7).

        An epoch is one micro-batch of the query that writes the log, or what the bridge let go between two commits:
        after a crash Kafka may hold it twice. Messages are kept for the newest epoch of each of the last few writers,
        in the state as 16-byte digests; a new query id starts afresh.
        """
        epoch = self._epoch(query, batch)
        return epoch is not None and epoch.repeats(message)

    def dump(self) -> bytes:
        """The state as bytes, equal for equal states."""
        epochs = [(query, epoch.number, epoch.dump()) for query, epoch in self._epochs.items()]
        query, batch, seen = epochs.pop() if epochs else ("", 0, [])
        epoch = (query, batch) if self._epochs else None
        windows = [
            (key, _KeptWindow(window.opened_at, window.closes_at, None, window.ends_at, sorted(window.leaves)))
            for key, window in self._open.items()
        ]
        return _encoder.encode(_State(self.clock, windows, epoch, seen, epochs))

    def _add(self, key: WindowKey, leaf: bytes, heard: int) -> list[ClosedWindow]:
        window = self._open.get(key)
        if window is not None and heard < window.takes_until:
            window.leaves.add(leaf)
            return []
        ended = [] if window is None else [self._close(key)]
        closes_at = heard + self._length
        self._put(key, Window(heard, closes_at, {leaf}, self.clock + self._length + self._grace, closes_at))
        return ended

    def _put(self, key: WindowKey, window: Window) -> None:
        window.rank = self._rank
        self._rank += 1
        self._open[key] = window
        heapq.heappush(self._due, (window.due, window.rank, key))

    def _close(self, key: WindowKey) -> ClosedWindow:
        window = self._open.pop(key)
        window.takes_until = _NEVER
        return ClosedWindow(key, window)

    def _next_due(self) -> int:
        return self._due[0][0] if self._due else _EVER

    def _epoch(self, query: str, batch: int) -> _Epoch | None:
        """The epoch of a writer, who wrote just now; None if the writer has begun a newer one."""
        epoch = self._epochs.pop(query, None)
        if epoch is None or epoch.number < batch:
            epoch = _Epoch(batch)
        self._epochs[query] = epoch
        while len(self._epochs) > MAX_EPOCH_WRITERS:
            del self._epochs[next(iter(self._epochs))]
        return epoch if epoch.number == batch else None


def _digest(message: str) -> bytes:
    return blake2b(message.encode(), digest_size=16).digest()


_ENDED: Final = Window(0, 0, takes_until=_NEVER)
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_State)
