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
from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final, NamedTuple, Protocol

import msgspec

from kiln.pipelines.batch.offset_range import NO_UPDATE, UpdateRange, WindowKey
from kiln.schemas.kafka.topics import MAX_EPOCH_WRITERS
from kiln.schemas.wire.batch_block import encode_stream_key, list_tips

# µs: before and after every time that a record can have
_NEVER: Final = -(2**63)
_FOREVER: Final = 2**63

_MAX_HEAD_WINDOWS: Final = 256
"""Maximum number of windows in the head of a state: up to it, reading and writing the head costs less than loading
shards."""
_SHARD_WINDOWS: Final = 16
"""Windows per shard, on average."""
_NO_DUE: Final = 2**63 - 1
"""Due time of a shard without windows."""


class Window(msgspec.Struct, gc=False):
    """The updates of one separator whose event time is within T of the first. Times are µs."""

    opened_at: int
    """t0: event time of the first update"""
    closes_at: int
    """t0 + T"""
    leaves: set[bytes] = msgspec.field(default_factory=set)
    """the tips of streams (kiln.schemas.wire.batch_block)"""
    due: int = 0
    """c0 + T + G: log time that ends the window"""
    accepts_until: int = 0
    """The window accepts updates with an earlier event time: closes_at, or never once the window has ended."""
    rank: int = 0
    """number of windows of the partition that were opened before"""

    @property
    def tips(self) -> dict[str, set[bytes]]:
        """CID bytes by StreamID text."""
        return list_tips(self.leaves)

    def add(self, stream: str, tip: bytes) -> None:
        """Add a tip of a stream, which is a canonical StreamID."""
        self.leaves.add(encode_stream_key(stream) + tip)


class ClosedWindow(NamedTuple):
    key: WindowKey
    window: Window


class _SavedWindow(msgspec.Struct, array_like=True, gc=False):
    """A window in the state."""

    opened_at: int
    closes_at: int
    due: int
    leaves: list[bytes]
    """sorted"""


class _WindowsHead(msgspec.Struct, array_like=True):
    """Head of a state: msgpack of these fields in this order."""

    log_time: int = 0
    windows: list[tuple[WindowKey, _SavedWindow]] = []
    """in order of opening; empty if they are in shards"""
    epochs: list[tuple[str, int, list[bytes]]] = []
    """number and message digests by writer, in the order of their last write"""
    dues: bytes = b""
    """least `due` of the windows of each shard: 8 bytes each, little-endian, µs"""
    count: int = 0
    """windows in all shards"""
    rank: int = 0
    """rank of the next window, where windows are in shards"""


class _ShardWindow(msgspec.Struct, array_like=True, gc=False):
    """A window in a shard, which is msgpack of a list of these, by rank. `data` stays packed until a record touches the
    window or it comes due."""

    digest: bytes
    """16-byte digest of the key"""
    rank: int
    due: int
    data: bytes
    """msgpack of key, _SavedWindow"""


class StateShards(Protocol):
    """Storage of the shards of a state, by number. Each shard below the number of shards exists."""

    def __getitem__(self, shard: int, /) -> bytes: ...
    def __setitem__(self, shard: int, data: bytes, /) -> None: ...
    def __delitem__(self, shard: int, /) -> None: ...


class _WriterEpoch:
    """The newest epoch of a writer, and its messages so far."""

    def __init__(self, number: int, digests: Iterable[bytes] = ()) -> None:
        self.number = number
        self.digests = set(digests)
        """16-byte digests of the messages in the state"""
        self.messages: set[str] = set()
        """messages since then. Few epochs live to the end of a micro-batch, so digests can wait until then."""

    def add(self, message: str) -> bool:
        """Add a message.

        Returns:
            False if the message came before.
        """
        count = len(self.messages)
        self.messages.add(message)
        return len(self.messages) > count and not (self.digests and _digest(message) in self.digests)

    def dump(self) -> list[bytes]:
        return sorted(self.digests.union(map(_digest, self.messages)))


class PartitionWindows:
    """Open windows of one partition.

    Call `add_range` for each range of records, in offset order. The equivalent for single records is `advance(stamp)`,
    then `add(…)` for each update that `is_duplicate` does not reject.

    A state is a head and, where many windows are open, shards. The digest of its key selects the shard of a window. The
    number of shards follows the number of windows (linear hashing: a new shard takes windows from one other shard
    only). So the cost of reading and writing depends on the windows that records touch and that come due, and not on
    how many are open.
    """

    def __init__(self, length: int, state: bytes = b"", grace: int = 0, shards: StateShards | None = None) -> None:
        """Load the windows.

        Args:
            length: T, µs. Open windows keep their own.
            state: An earlier `dump()`, with the `shards` of that time.
            grace: G, µs. Open windows keep their own.
            shards: Storage of the shards. Without it, all windows stay in the head.

        Raises:
            ValueError: The state has shards, and `shards` is None.
        """
        head = _head_decoder.decode(state) if state else _WindowsHead()
        self._length = length
        self._grace = grace
        self.log_time = head.log_time
        self._epochs = {query: _WriterEpoch(batch, digests) for query, batch, digests in head.epochs}
        self._open: dict[WindowKey, Window] = {}  # of the head, or loaded from shards
        # The rank, which tells the order of opening, makes the order of closing total.
        self._dues: list[tuple[int, int, WindowKey]] = []  # of the same windows
        self._rank = head.rank
        self._shards = shards
        self._shard_dues = array("q", head.dues)
        if self._shard_dues and shards is None:
            raise ValueError(f"{head.count} open windows are in {len(self._shard_dues)} shards, which are not given")
        self._packed: dict[int, dict[bytes, _ShardWindow]] = {}  # by shard that was read, windows not in `_open`
        self._changed_shards: set[int] = set()  # those of all open windows are among them
        self._packed_count = head.count  # windows that are not in `_open`
        self._packed_due = min(self._shard_dues, default=_FOREVER)  # lower bound of their due times
        for key, window in head.windows:
            self._open_window(key, _restore_window(window))

    def __len__(self) -> int:
        return self._packed_count + len(self._open)

    def add_range(self, records: UpdateRange) -> list[ClosedWindow | int]:
        """Add the next records of the partition to their windows.

        Returns:
            In the order of the records, each window that ends, and the index of each record that cannot be read.
        """
        results: list[ClosedWindow | int] = []
        self._load_shards(owner.key for owner in records.owners)
        self._load_due(max(records.stamps, default=self.log_time))
        log_time, due = self.log_time, self._next_due()
        distinct: dict[tuple[str, int], tuple[str, int]] = {}
        writers = [distinct.setdefault(writer, writer) for writer in (owner[1:] for owner in records.owners)]
        windows = [self._open.get(owner.key, _ENDED) for owner in records.owners]
        writer: tuple[str, int] | None = None
        epoch: _WriterEpoch | None = None
        columns = zip(
            records.stamps,
            records.owner_indexes,
            records.leaves,
            records.observed_at,
            records.message_keys,
            strict=True,
        )
        for index, (stamp, owner, leaf, event_time, message) in enumerate(columns):
            if stamp > log_time:
                log_time = stamp
                if log_time >= due:
                    results += self.advance(log_time)
                    due = self._next_due()
            if owner < 0:
                if owner != NO_UPDATE:
                    results.append(index)
                continue
            if writers[owner] is not writer:
                writer = writers[owner]
                epoch = self._load_epoch(*writer)
            if epoch is not None and not epoch.add(message):
                continue
            if event_time > log_time:
                event_time = log_time
            if event_time < windows[owner].accepts_until:
                windows[owner].leaves.add(leaf)
            else:
                self.log_time = log_time
                key = records.owners[owner].key
                results += self._add_leaf(key, leaf, event_time)
                windows[owner] = self._open[key]
                due = self._next_due()
        self.log_time = log_time
        return results

    def advance(self, stamp: int) -> list[ClosedWindow]:
        """Move log time forward to a record's broker stamp (µs), and return the windows that it ends."""
        if stamp > self.log_time:
            self.log_time = stamp
        self._load_due(self.log_time)
        closed: list[ClosedWindow] = []
        while self._dues and self._dues[0][0] <= self.log_time:
            _, rank, key = heapq.heappop(self._dues)
            window = self._open.get(key)
            if window is not None and window.rank == rank:  # else an update has ended that window before
                closed.append(self._close_window(key))
        return closed

    def add(self, key: WindowKey, stream: str, tip: bytes, event_time: int) -> list[ClosedWindow]:
        """Add an update to its separator's window, and return the window that it ends, if any. `event_time`: µs."""
        self._load_shards([key])
        return self._add_leaf(key, encode_stream_key(stream) + tip, event_time)

    def is_duplicate(self, query: str, batch: int, message: str) -> bool:
        """Add a message, and return true if its writer's newest epoch already had it (decision 7).

        An epoch is one micro-batch of the query that writes the log, or the records that the bridge released between
        two commits: after a crash Kafka may have them twice. Messages are stored for the newest epoch of each of the
        last few writers, in the state as 16-byte digests; a new query id starts afresh.
        """
        epoch = self._load_epoch(query, batch)
        return epoch is not None and not epoch.add(message)

    def dump(self) -> bytes:
        """Write the shards that have changed, and return the head. Equal histories give equal bytes."""
        self._resize_shards()
        epochs = [(query, epoch.number, epoch.dump()) for query, epoch in self._epochs.items()]
        if self._shard_dues:
            self._write_shards()
            dues = self._shard_dues.tobytes()
            head = _WindowsHead(self.log_time, [], epochs, dues, len(self), self._rank)
        else:
            in_order = sorted(self._open.items(), key=lambda opened: opened[1].rank)
            windows = [(key, _save_window(window)) for key, window in in_order]
            head = _WindowsHead(self.log_time, windows, epochs)
        return _encoder.encode(head)

    def _resize_shards(self) -> None:
        """Adapt the number of shards to the number of windows, and move windows between shards."""
        old, count = len(self._shard_dues), len(self)
        new = 0 if self._shards is None or count <= _MAX_HEAD_WINDOWS else -(-count // _SHARD_WINDOWS)
        if new == old or self._shards is None:
            return
        if new < old:
            for shard in range(new, old):
                windows = self._read_shard(shard)
                del self._shards[shard], self._packed[shard]
                for digest, window in windows.items():
                    self._move_window(digest, window, new)
        else:
            for shard in range(old, new):
                self._packed[shard] = {}
            for shard in {_fold(shard, old) for shard in range(old, new)} if old else ():
                windows, self._packed[shard] = self._read_shard(shard), {}
                for digest, window in windows.items():
                    self._move_window(digest, window, new)
                self._changed_shards.add(shard)
        self._shard_dues = self._shard_dues[:new] + array("q", [_NO_DUE]) * (new - old)
        self._changed_shards = {shard for shard in self._changed_shards if shard < new}.union(range(old, new))

    def _move_window(self, digest: bytes, window: _ShardWindow, shards: int) -> None:
        if not shards:
            self._unpack_window(window)
            return
        shard = _select_shard(digest, shards)
        self._read_shard(shard)[digest] = window
        self._changed_shards.add(shard)

    def _write_shards(self) -> None:
        if self._shards is None:
            return
        opened: dict[int, list[_ShardWindow]] = {}
        for key, window in self._open.items():
            digest, data = _key_digest(key), _encoder.encode((key, _save_window(window)))
            packed = _ShardWindow(digest, window.rank, window.due, data)
            opened.setdefault(_select_shard(digest, len(self._shard_dues)), []).append(packed)
        for shard in self._changed_shards | opened.keys():
            windows = [*self._read_shard(shard).values(), *opened.get(shard, ())]
            windows.sort(key=lambda each: each.rank)
            self._shards[shard] = _encoder.encode(windows)
            self._shard_dues[shard] = min((each.due for each in windows), default=_NO_DUE)
        self._changed_shards = set(opened)

    def _load_shards(self, keys: Iterable[WindowKey]) -> None:
        """Unpack the windows of these keys, which are about to change."""
        if self._shard_dues:
            for key in set(keys) - self._open.keys():
                digest = _key_digest(key)
                shard = _select_shard(digest, len(self._shard_dues))
                self._changed_shards.add(shard)
                window = self._read_shard(shard).pop(digest, None)
                if window is not None:
                    self._unpack_window(window)

    def _load_due(self, log_time: int) -> None:
        """Unpack the windows that end at this log time or before."""
        if self._packed_due > log_time:
            return
        for shard, due in enumerate(self._shard_dues):
            if due <= log_time:
                windows = self._read_shard(shard)
                self._changed_shards.add(shard)  # its due windows are about to close
                for digest, window in list(windows.items()):
                    if window.due <= log_time:
                        self._unpack_window(windows.pop(digest))
                self._shard_dues[shard] = min((window.due for window in windows.values()), default=_NO_DUE)
        self._packed_due = min(self._shard_dues, default=_FOREVER)

    def _read_shard(self, shard: int) -> dict[bytes, _ShardWindow]:
        windows = self._packed.get(shard)
        if windows is None:
            data = b"" if self._shards is None else self._shards[shard]
            windows = self._packed[shard] = {each.digest: each for each in _shard_decoder.decode(data)}
        return windows

    def _unpack_window(self, packed: _ShardWindow) -> None:
        key, saved = _window_decoder.decode(packed.data)
        window = _restore_window(saved)
        window.rank = packed.rank
        self._open[key] = window
        heapq.heappush(self._dues, (window.due, window.rank, key))
        self._packed_count -= 1

    def _add_leaf(self, key: WindowKey, leaf: bytes, event_time: int) -> list[ClosedWindow]:
        window = self._open.get(key)
        if window is not None and event_time < window.accepts_until:
            window.leaves.add(leaf)
            return []
        closed = [] if window is None else [self._close_window(key)]
        closes_at = event_time + self._length
        due = self.log_time + self._length + self._grace
        self._open_window(key, Window(event_time, closes_at, {leaf}, due, closes_at))
        return closed

    def _open_window(self, key: WindowKey, window: Window) -> None:
        window.rank = self._rank
        self._rank += 1
        self._open[key] = window
        heapq.heappush(self._dues, (window.due, window.rank, key))

    def _close_window(self, key: WindowKey) -> ClosedWindow:
        window = self._open.pop(key)
        window.accepts_until = _NEVER
        return ClosedWindow(key, window)

    def _next_due(self) -> int:
        return self._dues[0][0] if self._dues else _FOREVER

    def _load_epoch(self, query: str, batch: int) -> _WriterEpoch | None:
        """Return this epoch of a writer, now the one that wrote last; None if the writer has begun a newer epoch."""
        epoch = self._epochs.pop(query, None)
        if epoch is None or epoch.number < batch:
            epoch = _WriterEpoch(batch)
        self._epochs[query] = epoch
        while len(self._epochs) > MAX_EPOCH_WRITERS:
            del self._epochs[next(iter(self._epochs))]
        return epoch if epoch.number == batch else None


def _save_window(window: Window) -> _SavedWindow:
    return _SavedWindow(window.opened_at, window.closes_at, window.due, sorted(window.leaves))


def _restore_window(saved: _SavedWindow) -> Window:
    return Window(saved.opened_at, saved.closes_at, set(saved.leaves), saved.due, saved.closes_at)


def _key_digest(key: WindowKey) -> bytes:
    return blake2b("\n".join(key).encode(), digest_size=16).digest()


def _select_shard(digest: bytes, shards: int) -> int:
    return _fold(int.from_bytes(digest[:8], "little") & ((1 << shards.bit_length()) - 1), shards)


def _fold(number: int, shards: int) -> int:
    """Drop the highest bits of a number until it is below `shards`."""
    while number >= shards:
        number &= (1 << (number.bit_length() - 1)) - 1
    return number


def _digest(message: str) -> bytes:
    return blake2b(message.encode(), digest_size=16).digest()


_ENDED: Final = Window(0, 0, accepts_until=_NEVER)
_encoder: Final = msgspec.msgpack.Encoder()
_head_decoder: Final = msgspec.msgpack.Decoder(_WindowsHead)
_shard_decoder: Final = msgspec.msgpack.Decoder(list[_ShardWindow])
_window_decoder: Final = msgspec.msgpack.Decoder(tuple[WindowKey, _SavedWindow])
