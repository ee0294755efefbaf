"""Windows of one partition of `kiln.updates`, by the log's own clock (CIP-123, Sending a batch update; decision 1).

A plain object: no Spark, no clock, no I/O. The same records in the same order give the same windows, whatever the
micro-batches, restarts or speed at which they are read.
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
    """The updates of one separator since its first. Times are µs of the log's clock."""

    opened_at: int
    closes_at: int
    tips: dict[str, set[bytes]]  # StreamID text -> CID bytes

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

    def __init__(self, length: int, state: bytes = b"") -> None:
        """`length`: T in µs; windows already open keep the T they were opened with. `state`: an earlier `dump()`."""
        kept = msgspec.msgpack.decode(state, type=_State) if state else _State()
        self._length = length
        self.clock = kept.clock
        self._open = dict(kept.windows)
        # by writer, the one that wrote last at the end
        self._epochs = {query: (batch, set(seen)) for query, batch, seen in kept.others}
        if kept.epoch is not None:
            self._epochs[kept.epoch[0]] = (kept.epoch[1], set(kept.seen))
        # Windows are kept in order of opening, so the rank makes the order of closing total.
        self._due = [(window.closes_at, rank, key) for rank, (key, window) in enumerate(self._open.items())]
        heapq.heapify(self._due)
        self._rank = len(self._due)

    def __len__(self) -> int:
        return len(self._open)

    def advance(self, stamp: int) -> list[ClosedWindow]:
        """Moves the clock to a record's broker stamp (µs), never back, and takes out the windows then due."""
        if stamp > self.clock:
            self.clock = stamp
        closed: list[ClosedWindow] = []
        while self._due and self._due[0][0] <= self.clock:
            key = heapq.heappop(self._due)[2]
            closed.append(ClosedWindow(key, self._open.pop(key)))
        return closed

    def add(self, key: WindowKey, stream: str, tip: bytes) -> None:
        """Puts an update in its separator's window, which opens at the clock if none is open."""
        window = self._open.get(key)
        if window is None:
            window = Window(self.clock, self.clock + self._length, {})
            self._open[key] = window
            heapq.heappush(self._due, (window.closes_at, self._rank, key))
            self._rank += 1
        window.add(stream, tip)

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
        return _encoder.encode(_State(self.clock, list(self._open.items()), epoch, seen, epochs))


# Sets are written sorted, so that the same state is the same bytes.
_encoder = msgspec.msgpack.Encoder(order="deterministic")
