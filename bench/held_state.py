"""CPU time of the steps of a micro-batch that read stored state: open windows, past connections, known streams. The
steps run in one process, without Spark and broker."""

from __future__ import annotations

import gc
import hashlib
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.report import Finding, Ratio
from bench.runs import Extent, Say, Side, in_turn
from kiln.pipelines.batch.offset_range import UpdateRange, WindowKey, WriterEpoch
from kiln.pipelines.batch.windows import PartitionWindows
from kiln.pipelines.delta.frame_ranges import FrameRanges, StoredFrameRanges, build_range_key
from kiln.pipelines.updates.separators import StreamsFile
from kiln.schemas.kafka.records import SeparatorRecord, StreamRecord, encode
from kiln.schemas.wire.batch_block import encode_stream_key

WINDOWS, CONNECTIONS, STREAMS = 100_000, 100_000, 1_000_000
TOUCHED = 1_000
"""updates of a micro-batch, each with another separator; also the number of streams that it looks up"""
ALIVE = 100
"""connections of a micro-batch, half of them new"""

_LENGTH = 10**12  # µs: no window ends while this measures
_NOT_KNOWN = SeparatorRecord("-", "-")
_AT = 1_735_689_600_000_000  # µs, 2025-01-01


def measure(extent: Extent, say: Say) -> Finding:
    """Measure the CPU time of each step of a micro-batch, with empty and with large state."""
    gc.set_threshold(100_000, 50, 100)  # as Spark's workers have it
    windows, connections, streams = (extent.of(size, least=2_000) for size in (WINDOWS, CONNECTIONS, STREAMS))
    names = (
        ("windows: none open", f"windows: {windows:,} open"),
        ("connections: none past", f"connections: {connections:,} past"),
        ("streams: none known", f"streams: {streams:,} known"),
    )
    with tempfile.TemporaryDirectory(prefix="kiln-held-") as folder:
        say("opening windows")
        few, many = _Windows(0), _Windows(windows)
        say("storing connections")
        none, past = _Connections(0), _Connections(connections)
        say("storing streams")
        nobody, known = _Streams(Path(folder) / "none", 0), _Streams(Path(folder) / "many", streams)
        sides: dict[str, Side] = {
            names[0][0]: few.micro_batch,
            names[0][1]: many.micro_batch,
            names[1][0]: none.micro_batch,
            names[1][1]: past.micro_batch,
            names[2][0]: nobody.micro_batch,
            names[2][1]: known.micro_batch,
        }
        series = {one_series.name: one_series for one_series in in_turn(sides, extent.runs, "ms", say)}
        notes = {
            "bytes a window": round(many.size / windows),
            "bytes a stream": round(known.size / streams),
            "updates": TOUCHED,
            "connections": ALIVE,
        }
    ratios = tuple(Ratio(f"{held} over none", series[held], series[empty]) for empty, held in names)
    return Finding(
        "held",
        "CPU time of steps of a micro-batch, with empty and with large state",
        tuple(series.values()),
        ratios,
        notes,
    )


class _Windows:
    """Windows of one partition. A micro-batch loads their state, adds updates, ends due windows and dumps the state."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._state = b""
        step = max(10_000, count // 4)
        for first in range(0, count, step):
            self._take(_stretch(range(first, min(count, first + step)), 0))
        if count:  # an epoch of few messages: those of the newest one are in the state (decision 7)
            self._take(_stretch([0], 1))

    @property
    def size(self) -> int:
        """Size of the state in bytes."""
        return len(self._state)

    def micro_batch(self, run: int) -> float:
        """Return the CPU time of a micro-batch, ms. If no window is open, each update opens one."""
        kept = self._state
        touched = random.Random(run).sample(range(self._count), TOUCHED) if self._count else range(TOUCHED)
        stretch = _stretch(touched, 1 + run)
        started = time.process_time()
        self._take(stretch)
        taken = _since(started)
        self._state = kept
        return taken

    def _take(self, stretch: UpdateRange) -> None:
        windows = PartitionWindows(_LENGTH, self._state)
        windows.add_range(stretch)
        windows.advance(stretch.stamps[-1] + 1)
        self._state = windows.dump()


def _stretch(separators: Sequence[int], epoch: int) -> UpdateRange:
    count = len(separators)
    owners = [WindowKey("bench", "LIVE", "model", _text(number)) for number in separators]
    epochs = [WriterEpoch("bench", epoch)]
    messages = [_digest(number)[:16] for number in separators]
    leaves = [encode_stream_key(_text(number)) + _digest(number) + b"cid." for number in separators]
    numbers = list(range(count))
    at = [epoch] * count
    return UpdateRange(numbers, at, owners, epochs, numbers, [0] * count, leaves, at, messages)


class _Connections:
    """Stored frame ranges of connections. A micro-batch looks up the ranges of its connections, and adds new ones."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._held = StoredFrameRanges()
        for first in range(0, count, 10_000):
            self._held.add({_side(number): [(1, 50)] for number in range(first, min(count, first + 10_000))})

    def micro_batch(self, run: int) -> float:
        """Return the CPU time of a micro-batch, ms."""
        chance = random.Random(run)
        taken: FrameRanges = {_side(chance.randrange(2**40, 2**41)): [(1, 10)] for _ in range(ALIVE // 2)}
        for _ in range(ALIVE // 2):
            taken[_side(chance.randrange(self._count or 2**40))] = [(40 + 20 * run, 50 + 20 * run)]
        started = time.process_time()
        self._held.find_near(taken)
        self._held.add(taken)
        return _since(started)


def _side(number: int) -> bytes:
    return build_range_key(_digest(number)[:16], "IN")


class _Streams:
    """Streams in a worker's file. A micro-batch looks up streams, half of which are in the file, and adds a few."""

    def __init__(self, path: Path, count: int) -> None:
        self._count = count
        self._path = path
        self._file = StreamsFile(path)
        self._file.add(self._records(0, count), {0: count})

    @property
    def size(self) -> int:
        """Size of the file on disk in bytes."""
        return sum(file.stat().st_size for file in self._path.parent.glob(f"{self._path.name}*"))

    def micro_batch(self, run: int) -> float:
        """Return the CPU time of a micro-batch, ms."""
        chance = random.Random(run)
        asked = [("bench", _text(chance.randrange(2 * self._count or 2**40))) for _ in range(TOUCHED)]
        first = 2**41 + TOUCHED * run
        learnt = list(self._records(first, first + 10))
        started = time.process_time()
        self._file.add(learnt, {0: first})
        for stream in asked:
            self._file.get(stream, _NOT_KNOWN)
        return _since(started)

    @staticmethod
    def _records(first: int, end: int) -> Iterator[bytes]:
        for number in range(first, end):
            yield encode(StreamRecord("bench", _text(number), SeparatorRecord("model", _text(number % 1_000)), _AT))


def _digest(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def _text(number: int) -> str:
    return f"k{number:062d}"


def _since(started: float) -> float:
    return 1_000 * (time.process_time() - started)
