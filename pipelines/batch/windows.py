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
from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final, NamedTuple, Protocol

import msgspec

from kiln.pipelines.batch.offset_range import NO_UPDATE, OffsetRange, WindowKey
from kiln.schemas.kafka.topics import MAX_EPOCH_WRITERS
from kiln.schemas.wire.batch_block import stream_key, tips_of

# µs: before and after all that a record can say
_NEVER: Final = -(2**63)
_FOREVER: Final = 2**63

_MAX_HEAD_WINDOWS: Final = 256
"""Most windows that the head of a state holds itself: to read and write them costs less than to reach parts."""
_SHARD_WINDOWS: Final = 16
"""Windows of one part, on average."""
_NO_DUE: Final = 2**63 - 1
"""The due of a part without windows."""


class Window(msgspec.Struct, gc=False):
    """The updates of one separator that were heard within T of the first. Times are µs."""

    opened_at: int
    """t0: when the first update was heard"""
    closes_at: int
    """t0 + T"""
    leaves: set[bytes] = msgspec.field(default_factory=set)
    """the tips of streams (kiln.schemas.wire.batch_block)"""
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


class _SavedWindow(msgspec.Struct, array_like=True, gc=False):
    """A window in the state."""

    opened_at: int
    closes_at: int
    tips: dict[str, set[bytes]] | None
    """StreamID text -> CID bytes, in a state from before windows had leaves. None since then: what reads only `tips`
    refuses the state, and loses nothing."""
    ends_at: int = 0
    leaves: list[bytes] = []
    """in their order"""


class _WindowsHead(msgspec.Struct, array_like=True):
    """Layout of the head of a state: msgpack of this, fields in this order."""

    clock: int = 0
    windows: list[tuple[WindowKey, _SavedWindow]] | None = []
    """in order of opening. None: they are in parts; code from before there were parts refuses the state."""
    epoch: tuple[str, int] | None = None
    seen: list[bytes] = []
    others: list[tuple[str, int, list[bytes]]] = []
    dues: bytes = b""
    """of each part, the least `due` of its windows: 8 bytes each, little-endian, µs"""
    count: int = 0
    """windows in all parts"""
    rank: int = 0
    """of the next window, where windows are in parts"""


class _ShardWindow(msgspec.Struct, array_like=True, gc=False):
    """A window in a part; a part is msgpack of a list of these, by rank. A window stays as it is, `data`, until a
    record touches it or it comes due."""

    digest: bytes
    """of the key, 16 bytes"""
    rank: int
    due: int
    data: bytes
    """msgpack of key, _KeptWindow"""


class StateShards(Protocol):
    """Where the parts of a state are kept, by number. Each part below the number of parts is there."""

    def __getitem__(self, part: int, /) -> bytes: ...
    def __setitem__(self, part: int, data: bytes, /) -> None: ...
    def __delitem__(self, part: int, /) -> None: ...


class _WriterEpoch:
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

    A state is a head and, where many windows are open, parts. A window is in the part that the digest of its key names,
    among as many parts as there are windows for (linear hashing: one more part takes windows from one other alone). So
    reading and writing costs what records touch and what comes due, however many windows are open.
    """

    def __init__(self, length: int, state: bytes = b"", grace: int = 0, parts: StateShards | None = None) -> None:
        """`length`: T, `grace`: G, in µs; open windows keep their own. `state`: an earlier `dump()`, with the `parts`
        of that time. None: all windows stay in the head. ValueError: the state has parts, and none are given."""
        kept = _decoder.decode(state) if state else _WindowsHead()
        self._length = length
        self._grace = grace
        self.clock = kept.clock
        # by writer, the one that wrote last at the end
        self._epochs = {query: _WriterEpoch(batch, seen) for query, batch, seen in kept.others}
        if kept.epoch is not None:
            self._epochs[kept.epoch[0]] = _WriterEpoch(kept.epoch[1], kept.seen)
        self._open: dict[WindowKey, Window] = {}  # of the head, or what has been taken out of parts
        # The rank, which tells the order of opening, makes the order of closing total.
        self._due: list[tuple[int, int, WindowKey]] = []  # of the same windows
        self._rank = kept.rank
        self._parts = parts
        self._dues = array("q", kept.dues)
        if self._dues and parts is None:
            raise ValueError(f"{kept.count} open windows are in {len(self._dues)} parts, which are not here")
        self._kept: dict[int, dict[bytes, _ShardWindow]] = {}  # by part that has been read, what is not in `_open`
        self._changed: set[int] = set()
        self._elsewhere = kept.count  # windows that are not in `_open`
        self._due_elsewhere = min(self._dues, default=_FOREVER)  # or less: none of these is due before
        for key, window in kept.windows or []:
            self._put(key, _restore_window(window))

    def __len__(self) -> int:
        return self._elsewhere + len(self._open)

    def take(self, stretch: OffsetRange) -> list[ClosedWindow | int]:
        """Reads the next records of the partition into their windows.

        What comes of it, in the order of the records: each window that ends, and the index of each record that cannot
        be read.
        """
        found: list[ClosedWindow | int] = []
        self._reach(owner.key for owner in stretch.table)
        self._reach_due(max(stretch.stamps, default=self.clock))
        clock, due = self.clock, self._next_due()
        writers: dict[tuple[str, int], tuple[str, int]] = {}
        written = [writers.setdefault(writer, writer) for writer in (owner[1:] for owner in stretch.table)]
        windows = [self._open.get(owner.key, _ENDED) for owner in stretch.table]
        writer: tuple[str, int] | None = None
        epoch: _WriterEpoch | None = None
        columns = zip(stretch.stamps, stretch.owners, stretch.leaves, stretch.heard, stretch.messages, strict=True)
        for index, (stamp, owner, leaf, heard, message) in enumerate(columns):
            if stamp > clock:
                clock = stamp
                if clock >= due:
                    found += self.advance(clock)
                    due = self._next_due()
            if owner < 0:
                if owner != NO_UPDATE:
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
        self._reach_due(self.clock)
        closed: list[ClosedWindow] = []
        while self._due and self._due[0][0] <= self.clock:
            _, rank, key = heapq.heappop(self._due)
            window = self._open.get(key)
            if window is not None and window.rank == rank:  # else an update has ended that window before
                closed.append(self._close(key))
        return closed

    def add(self, key: WindowKey, stream: str, tip: bytes, heard: int) -> list[ClosedWindow]:
        """Puts an update, heard at µs, into its separator's window; takes out the window that it ends, if it does."""
        self._reach([key])
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
        """Writes the parts that have changed; gives the head. Both are equal for equal states of equal histories."""
        self._fit()
        epochs = [(query, epoch.number, epoch.dump()) for query, epoch in self._epochs.items()]
        query, batch, seen = epochs.pop() if epochs else ("", 0, [])
        epoch = (query, batch) if self._epochs else None
        if self._dues:
            self._write()
            state = _WindowsHead(self.clock, None, epoch, seen, epochs, self._dues.tobytes(), len(self), self._rank)
        else:
            in_order = sorted(self._open.items(), key=lambda opened: opened[1].rank)
            windows = [(key, _save_window(window)) for key, window in in_order]
            state = _WindowsHead(self.clock, windows, epoch, seen, epochs)
        return _encoder.encode(state)

    def _fit(self) -> None:
        """Makes the number of parts that of the windows, and moves windows between parts."""
        before, count = len(self._dues), len(self)
        now = 0 if self._parts is None or count <= _MAX_HEAD_WINDOWS else -(-count // _SHARD_WINDOWS)
        if now == before or self._parts is None:
            return
        if now < before:
            for part in range(now, before):
                gone = self._read_part(part)
                del self._parts[part], self._kept[part]
                for digest, each in gone.items():
                    self._put_kept(digest, each, now)
        else:
            for part in range(before, now):
                self._kept[part] = {}
            for part in {_fold(part, before) for part in range(before, now)} if before else ():
                found, self._kept[part] = self._read_part(part), {}
                for digest, each in found.items():
                    self._put_kept(digest, each, now)
                self._changed.add(part)
        self._dues = self._dues[:now] + array("q", [_NO_DUE]) * (now - before)
        self._changed = {part for part in self._changed if part < now}.union(range(before, now))

    def _put_kept(self, digest: bytes, window: _ShardWindow, parts: int) -> None:
        if not parts:
            self._take_out(window)
            return
        part = _shard_index(digest, parts)
        self._read_part(part)[digest] = window
        self._changed.add(part)

    def _write(self) -> None:
        if self._parts is None:
            return
        windows = {part: list(self._read_part(part).values()) for part in self._changed}
        for key, window in self._open.items():
            digest = _key_digest(key)
            part = windows.get(_shard_index(digest, len(self._dues)))
            if part is not None:
                part.append(_ShardWindow(digest, window.rank, window.due, _encoder.encode((key, _save_window(window)))))
        for number, found in windows.items():
            found.sort(key=lambda each: each.rank)
            self._parts[number] = _encoder.encode(found)
            self._dues[number] = min((each.due for each in found), default=_NO_DUE)
        self._changed = set()

    def _reach(self, keys: Iterable[WindowKey]) -> None:
        """Takes windows that are about to change out of their parts."""
        if self._dues:
            for key in set(keys):
                digest = _key_digest(key)
                part = _shard_index(digest, len(self._dues))
                self._changed.add(part)
                window = self._read_part(part).pop(digest, None)
                if window is not None:
                    self._take_out(window)

    def _reach_due(self, clock: int) -> None:
        """Takes the windows that end when the clock stands there out of their parts."""
        if self._due_elsewhere > clock:
            return
        for part, due in enumerate(self._dues):
            if due <= clock:
                found = self._read_part(part)
                for digest, window in list(found.items()):
                    if window.due <= clock:
                        self._take_out(found.pop(digest))
                self._dues[part] = min((window.due for window in found.values()), default=_NO_DUE)
        self._due_elsewhere = min(self._dues, default=_FOREVER)

    def _read_part(self, part: int) -> dict[bytes, _ShardWindow]:
        found = self._kept.get(part)
        if found is None:
            data = b"" if self._parts is None else self._parts[part]
            found = self._kept[part] = {each.digest: each for each in _part_decoder.decode(data)}
        return found

    def _take_out(self, kept: _ShardWindow) -> None:
        key, found = _window_decoder.decode(kept.data)
        window = _restore_window(found)
        window.rank = kept.rank
        self._open[key] = window
        heapq.heappush(self._due, (window.due, window.rank, key))
        self._elsewhere -= 1

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
        if self._dues:
            self._changed.add(_shard_index(_key_digest(key), len(self._dues)))
        return ClosedWindow(key, window)

    def _next_due(self) -> int:
        return self._due[0][0] if self._due else _FOREVER

    def _epoch(self, query: str, batch: int) -> _WriterEpoch | None:
        """The epoch of a writer, who wrote just now; None if the writer has begun a newer one."""
        epoch = self._epochs.pop(query, None)
        if epoch is None or epoch.number < batch:
            epoch = _WriterEpoch(batch)
        self._epochs[query] = epoch
        while len(self._epochs) > MAX_EPOCH_WRITERS:
            del self._epochs[next(iter(self._epochs))]
        return epoch if epoch.number == batch else None


def _save_window(window: Window) -> _SavedWindow:
    return _SavedWindow(window.opened_at, window.closes_at, None, window.ends_at, sorted(window.leaves))


def _restore_window(kept: _SavedWindow) -> Window:
    tips = (kept.tips or {}).items()
    leaves = {*kept.leaves, *(stream_key(stream) + tip for stream, found in tips for tip in found)}
    return Window(kept.opened_at, kept.closes_at, leaves, kept.ends_at, kept.closes_at if kept.ends_at else _FOREVER)


def _key_digest(key: WindowKey) -> bytes:
    return blake2b("\n".join(key).encode(), digest_size=16).digest()


def _shard_index(digest: bytes, parts: int) -> int:
    """The part of a window, among so many."""
    return _fold(int.from_bytes(digest[:8], "little") & ((1 << parts.bit_length()) - 1), parts)


def _fold(number: int, parts: int) -> int:
    """What is left of a number's low bits when higher ones are dropped until it is below `parts`."""
    while number >= parts:
        number &= (1 << (number.bit_length() - 1)) - 1
    return number


def _digest(message: str) -> bytes:
    return blake2b(message.encode(), digest_size=16).digest()


_ENDED: Final = Window(0, 0, takes_until=_NEVER)
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_WindowsHead)
_part_decoder: Final = msgspec.msgpack.Decoder(list[_ShardWindow])
_window_decoder: Final = msgspec.msgpack.Decoder(tuple[WindowKey, _SavedWindow])
