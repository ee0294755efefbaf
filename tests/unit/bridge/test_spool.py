"""The frame sink and its spool: whatever Kafka and the disk do, every frame arrives, in order; nothing in silence."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kafka.errors import KafkaError, KafkaTimeoutError

from kiln.bridge.capture import segments, spool
from kiln.bridge.capture.segments import Segments
from kiln.bridge.capture.spool import MAX_FRAME, FrameSink, SinkError
from kiln.bridge.kafka.producers import FramesProducerError
from kit.awaiting import awaited

A, B = b"a" * 16, b"b" * 16
Records = list[tuple[bytes, bytes]]


# ---------------------------------------------------------------- a Kafka of the test's own


class Future:
    def __init__(self) -> None:
        self.done = False
        self.error: BaseException | None = None
        self.callbacks: list[Callable[[object], None]] = []
        self.errbacks: list[Callable[[BaseException], None]] = []

    def add_callback(self, f: Callable[[object], None], /) -> None:
        if self.done and self.error is None:
            f(None)
        self.callbacks.append(f)

    def add_errback(self, f: Callable[[BaseException], None], /) -> None:
        if self.done and self.error is not None:
            f(self.error)
        self.errbacks.append(f)

    def settle(self, error: BaseException | None) -> None:
        self.done, self.error = True, error
        if error is None:
            for callback in self.callbacks:
                callback(None)
        else:
            for errback in self.errbacks:
                errback(error)


class Producer:
    def __init__(self, kafka: Kafka) -> None:
        self.kafka = kafka
        self.pending: list[tuple[bytes, bytes, Future]] = []
        self.abandoned = False

    def send(self, topic: str, *, value: bytes, key: bytes) -> Future:
        assert topic == "frames"
        if self.abandoned:
            raise KafkaTimeoutError("closed")
        future = Future()
        with self.kafka.lock:
            self.pending.append((key, value, future))
        self.kafka.deliver(self)
        return future

    def abandon(self) -> None:
        self.abandoned = True

    def close(self, timeout: float) -> None:
        self.abandoned = True
        self.kafka.producers.remove(self)


class Kafka:
    """One partition. `up`: answers at once. `refuse`: the next record is answered with an error."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.up = True
        self.refuse = False
        self.reachable = True
        self.log: Records = []
        self.producers: list[Producer] = []

    def connect(self) -> Producer:
        if not self.reachable:
            raise FramesProducerError("cannot write to Kafka at nowhere")
        self.producers.append(Producer(self))
        return self.producers[-1]

    def deliver(self, producer: Producer) -> None:
        """Settle what a producer has sent, in order; after an error only if it was not told to stop."""
        while True:
            with self.lock:
                if not self.up or producer.abandoned or not producer.pending:
                    return
                key, value, future = producer.pending.pop(0)
                error = KafkaError("refused") if self.refuse else None
                self.refuse = False
                if error is None:
                    self.log.append((key, value))
            future.settle(error)

    def back(self) -> None:
        self.up = True
        for producer in list(self.producers):
            self.deliver(producer)

    def firsts(self) -> Records:
        """The first copy of each record."""
        return list(dict.fromkeys(list(self.log)))


def frames(count: int, connection: bytes = A, start: int = 0, size: int = 100) -> Records:
    return [(connection, f"{number:08}".encode().ljust(size, b".")) for number in range(start, start + count)]


@pytest.fixture
def kafka() -> Kafka:
    return Kafka()


@pytest.fixture
def new_sink(kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FrameSink]]:
    monkeypatch.setattr(spool, "TICK", 0.005)
    made: list[FrameSink] = []

    def make(
        *, spool_limit: int = 1 << 20, memory_limit: int = 1 << 20, spool_after: float = 0.05, segment: int = 4096
    ) -> FrameSink:
        sink = FrameSink(
            kafka.connect,
            "frames",
            tmp_path / "spool",
            spool_limit,
            memory_limit,
            spool_after=spool_after,
            retry_after=0.01,
            segment_bytes=segment,
        )
        made.append(sink)
        return sink

    yield make
    for each in made:
        each.close(0)


def put(sink: FrameSink, records: Iterable[tuple[bytes, bytes]]) -> None:
    for connection, frame in records:
        sink.put(connection, frame)


def all_there(sink: FrameSink) -> bool:
    return sink.status().waiting == 0


def with_the_producer(kafka: Kafka, sink: FrameSink, records: Records) -> list[Future]:
    """The futures of records that the producer has; Kafka knows nothing of them, so the test answers."""
    kafka.up = False
    put(sink, records)
    assert awaited(lambda: bool(kafka.producers) and len(kafka.producers[0].pending) == len(records))
    futures = [future for _, _, future in kafka.producers[0].pending]
    kafka.producers[0].pending.clear()
    assert awaited(lambda: bool(futures[-1].callbacks))
    return futures


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "spool").iterdir())


# ---------------------------------------------------------------- the sink


def test_while_kafka_is_well_nothing_touches_the_disk(
    kafka: Kafka, new_sink: Callable[..., FrameSink], tmp_path: Path
) -> None:
    sink = new_sink(spool_after=30.0)
    sent = [each for pair in zip(frames(500), frames(500, B), strict=True) for each in pair]
    put(sink, sent)
    assert awaited(lambda: all_there(sink))
    assert kafka.log == sent
    status = sink.status()
    assert (status.put, status.acknowledged, status.spooled, status.memory_bytes, status.error) == (
        1000,
        1000,
        0,
        0,
        None,
    )
    assert files(tmp_path) == []


def test_kafka_away_and_back(kafka: Kafka, new_sink: Callable[..., FrameSink], tmp_path: Path) -> None:
    sink = new_sink()
    put(sink, frames(100))
    assert awaited(lambda: all_there(sink))
    kafka.up = False
    put(sink, frames(300, start=100))
    assert awaited(lambda: sink.status().spooled >= 300)  # those that the producer has, too
    assert sink.error is not None
    assert "no acknowledgement for" in sink.error
    assert sink.status().memory_bytes == 0
    put(sink, frames(300, start=400))
    assert awaited(lambda: sink.status().spooled >= 600)
    kafka.back()
    put(sink, frames(100, start=700))
    assert awaited(lambda: all_there(sink))
    assert kafka.firsts() == frames(800)
    assert sink.error is None
    assert awaited(lambda: files(tmp_path) == [])
    assert sink.status().disk_bytes == 0


def test_no_broker_at_the_start(kafka: Kafka, new_sink: Callable[..., FrameSink]) -> None:
    kafka.reachable = False
    sink = new_sink()
    put(sink, frames(10))
    assert awaited(lambda: "cannot write to Kafka at nowhere" in (sink.error or ""))
    assert awaited(lambda: sink.status().spooled == 10)
    kafka.reachable = True
    assert awaited(lambda: all_there(sink))
    assert kafka.log == frames(10)
    assert sink.error is None


def test_refused_frame_is_not_overtaken(kafka: Kafka, new_sink: Callable[..., FrameSink]) -> None:
    """kafka-python goes on with the next batch when one fails."""
    sink = new_sink(spool_after=30.0)
    kafka.up = False
    put(sink, frames(50))
    assert awaited(lambda: bool(kafka.producers) and len(kafka.producers[0].pending) == 50)
    kafka.refuse = True
    kafka.back()
    assert awaited(lambda: all_there(sink))
    assert kafka.log == frames(50)


def test_answer_to_a_later_frame_does_not_stand_for_a_refused_one(
    kafka: Kafka, new_sink: Callable[..., FrameSink]
) -> None:
    sink = new_sink(spool_after=30.0)
    first, _, last = with_the_producer(kafka, sink, frames(3))
    first.settle(KafkaError("refused"))
    last.settle(None)  # a broker may be faster than the stop
    assert sink.status().acknowledged == 0
    kafka.back()
    assert awaited(lambda: all_there(sink))
    assert kafka.log == frames(3)


def test_frames_count_as_acknowledged_in_the_order_of_the_line(
    kafka: Kafka, new_sink: Callable[..., FrameSink]
) -> None:
    sink = new_sink(spool_after=30.0)
    futures = with_the_producer(kafka, sink, [*frames(2, A), *frames(2, B), *frames(1, A, 2)])
    for at in (0, 1, 4):
        futures[at].settle(None)
    assert awaited(lambda: sink.status().acknowledged == 2)  # the third, of B, is not answered
    for at in (2, 3):
        futures[at].settle(None)
    assert awaited(lambda: all_there(sink))
    assert sink.status().acknowledged == 5


def test_what_comes_before_the_answer_is_the_next_portion(kafka: Kafka, new_sink: Callable[..., FrameSink]) -> None:
    kafka.up = False
    sink = new_sink(spool_after=30.0)
    put(sink, frames(5))
    assert awaited(lambda: [len(each.pending) for each in kafka.producers] == [5])
    put(sink, frames(7, start=5))
    assert not awaited(lambda: len(kafka.producers[0].pending) > 5, 5 * spool.LINGER)
    kafka.back()
    assert awaited(lambda: all_there(sink))
    assert kafka.log == frames(12)


def test_full_spool_says_so_and_loses_nothing(kafka: Kafka, new_sink: Callable[..., FrameSink], tmp_path: Path) -> None:
    sink = new_sink(spool_limit=20_000)
    room = threading.Event()
    sink.subscribe(room.set)
    kafka.up = False
    sent = frames(500)
    put(sink, sent[:50])
    assert awaited(lambda: sink.status().spooled == 50)
    assert not sink.full
    put(sink, sent[50:])
    assert awaited(lambda: sink.full)
    assert "reading from peers is paused: the spool is full (20000 bytes)" in (sink.error or "")
    assert sum(path.stat().st_size for path in (tmp_path / "spool").iterdir()) <= 20_000
    assert not room.is_set()
    kafka.back()
    assert room.wait(60)
    assert not sink.full
    assert awaited(lambda: all_there(sink))
    assert kafka.firsts() == sent
    assert sink.error is None


def test_memory_is_bounded_before_kafka_is_known_to_be_away(kafka: Kafka, new_sink: Callable[..., FrameSink]) -> None:
    sink = new_sink(memory_limit=100_000, spool_after=30.0, spool_limit=10 << 20, segment=1 << 20)
    kafka.up = False
    for start in range(0, 10_000, 100):
        put(sink, frames(100, start=start))
        assert awaited(lambda: sink.status().memory_bytes <= 100_000)
    assert sink.status().spooled > 9_000
    kafka.back()
    assert awaited(lambda: all_there(sink))
    assert kafka.firsts() == frames(10_000)


def test_spool_of_an_earlier_run_goes_first(kafka: Kafka, new_sink: Callable[..., FrameSink], tmp_path: Path) -> None:
    kafka.up = False
    first = new_sink()
    put(first, frames(200))
    assert awaited(lambda: first.status().spooled == 200)
    put(first, frames(50, start=200))
    assert first.close(0) == 0  # nothing is lost: the rest is in the spool
    assert len(files(tmp_path)) > 2

    kafka.log.clear()
    second = new_sink()
    put(second, frames(50, start=250))
    kafka.back()
    assert awaited(lambda: all_there(second))
    assert kafka.firsts() == frames(300)
    assert awaited(lambda: files(tmp_path) == [])


CHILD = """
import sys
from pathlib import Path
from kiln.bridge.capture.spool import FrameSink
from kiln.bridge.kafka.producers import FramesProducerError

def connect():
    raise FramesProducerError("away")

sink = FrameSink(connect, "frames", Path(sys.argv[1]), 1 << 20, 1 << 20, spool_after=0.01)
for number in range(200):
    sink.put(b"a" * 16, f"{number:08}".encode().ljust(100, b"."))
while sink.status().spooled < 200:
    pass
print("spooled", flush=True)
sys.stdin.read()
"""


def test_kill_9_of_the_process(kafka: Kafka, new_sink: Callable[..., FrameSink], tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", CHILD, str(tmp_path / "spool")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"spooled\n"
        child.kill()
    sink = new_sink()
    put(sink, frames(10, start=200))
    assert awaited(lambda: all_there(sink))
    assert kafka.log == frames(210)


def test_torn_tail_is_reported_and_not_fatal(kafka: Kafka, new_sink: Callable[..., FrameSink], tmp_path: Path) -> None:
    kafka.up = False
    first = new_sink(segment=1 << 20)
    put(first, frames(20))
    first.close(0)
    (last,) = (tmp_path / "spool").iterdir()
    os.truncate(last, last.stat().st_size - 1)

    kafka.up = True
    second = new_sink()
    put(second, frames(5, start=20))
    assert awaited(lambda: all_there(second))
    assert kafka.firsts() == [*frames(19), *frames(5, start=20)]
    assert second.status().torn_bytes == len(segments.encode_record(*frames(1)[0])) - 1
    assert f"{last} ends in" in (second.error or "")
    assert awaited(lambda: files(tmp_path) == [])


def test_spool_that_cannot_be_read_at_all_does_not_stop_it(
    kafka: Kafka, new_sink: Callable[..., FrameSink], tmp_path: Path
) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / f"{0:020}.spool").write_bytes(b"KILNSPL1" + b"\xff" * 100)
    (tmp_path / "spool" / f"{7:020}.spool").write_bytes(b"something else")
    sink = new_sink()
    put(sink, frames(5))
    assert awaited(lambda: all_there(sink))
    assert kafka.log == frames(5)
    assert sink.status().torn_bytes == 114
    assert sink.error is not None
    # what was no torn tail is kept
    assert awaited(lambda: [name.rpartition(".")[2] for name in files(tmp_path)] == ["damaged", "damaged"])


def test_full_disk(
    kafka: Kafka, new_sink: Callable[..., FrameSink], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = os.write, [3_000]

    def write(file: int, data: bytes) -> int:
        """A disk with so many bytes left: takes what fits, then nothing."""
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(file, memoryview(data)[: room[0]])
        room[0] -= written
        return written

    kafka.up = False
    sink = new_sink()
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        put(sink, frames(10))
        assert awaited(lambda: sink.status().spooled == 10)
        put(sink, frames(90, start=10))
        assert awaited(lambda: sink.full)
        assert "the disk is full" in (sink.error or "")
        assert sink.status().memory_bytes > 0
        room[0] = 1 << 20
        assert awaited(lambda: not sink.full)
    assert "disk" not in (sink.error or "")
    kafka.back()
    assert awaited(lambda: all_there(sink))
    assert kafka.firsts() == frames(100)
    assert sink.status().torn_bytes == 0


def test_full_disk_and_kafka_comes_back_first(
    kafka: Kafka, new_sink: Callable[..., FrameSink], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    kafka.up = False
    sink = new_sink()
    room = threading.Event()
    sink.subscribe(room.set)
    monkeypatch.setattr(os, "write", write)
    put(sink, frames(100))
    assert awaited(lambda: sink.full)
    kafka.back()
    assert awaited(lambda: all_there(sink))
    assert room.wait(60)
    assert (kafka.log, sink.error, sink.full) == (frames(100), None, False)


def test_below_the_floor_of_free_space_it_is_full_and_goes_on_by_itself(kafka: Kafka, tmp_path: Path) -> None:
    """Also while Kafka is well: others fill the disk too."""
    free = [1_000]
    sink = FrameSink(
        kafka.connect, "frames", tmp_path, 1 << 20, 1 << 20, retry_after=0.01, floor=1_000, free=lambda: free[0]
    )
    room = threading.Event()
    sink.subscribe(room.set)
    put(sink, frames(5))
    assert awaited(lambda: all_there(sink))
    assert (sink.full, sink.error) == (False, None)
    free[0] = 999
    assert awaited(lambda: sink.full)
    assert "has 999 bytes free, less than 1000" in (sink.error or "")
    assert "bridge.min_free_bytes" in (sink.error or "")
    assert sink.status().free_bytes == 999
    put(sink, frames(5, start=5))  # what is under way
    assert awaited(lambda: all_there(sink))
    free[0] = 1_249  # not yet: it would come and go
    assert awaited(lambda: sink.status().free_bytes == 1_249)
    assert sink.full
    free[0] = 1_250
    assert room.wait(60)
    assert (sink.full, sink.error, kafka.log) == (False, None, frames(10))
    sink.close(0)


def test_close_tells_what_had_no_room(kafka: Kafka, new_sink: Callable[..., FrameSink]) -> None:
    kafka.up = False
    sink = new_sink(spool_limit=1_000)
    put(sink, frames(20))
    record = len(segments.encode_record(*frames(1)[0]))
    assert sink.close(0) == 20 - (1_000 - len(segments.MAGIC)) // record


def test_close_waits_for_kafka(kafka: Kafka, new_sink: Callable[..., FrameSink], tmp_path: Path) -> None:
    kafka.up = False
    sink = new_sink(spool_after=30.0)
    put(sink, frames(20))
    assert awaited(lambda: bool(kafka.producers) and len(kafka.producers[0].pending) == 20)
    threading.Timer(0.05, kafka.back).start()
    assert sink.close(20) == 0
    assert kafka.log == frames(20)
    assert files(tmp_path) == []
    with pytest.raises(ValueError, match="closed"):
        sink.put(A, b"x")


def test_after_the_end_of_its_input_it_sends_what_it_has_and_takes_no_more(
    kafka: Kafka, new_sink: Callable[..., FrameSink]
) -> None:
    kafka.up = False
    sink = new_sink()
    put(sink, frames(3))
    sink.end_input()
    put(sink, frames(2, start=3))
    kafka.back()
    assert awaited(lambda: all_there(sink))
    assert kafka.firsts() == frames(3)
    assert (sink.status().put, sink.status().waiting) == (3, 0)


def test_what_cannot_be_a_record_is_refused_aloud(new_sink: Callable[..., FrameSink]) -> None:
    sink = new_sink()
    with pytest.raises(ValueError, match=f"limit: {MAX_FRAME}"):
        sink.put(A, bytes(MAX_FRAME + 1))
    with pytest.raises(ValueError, match="key of 15"):
        sink.put(A[:15], b"x")


def test_folder_that_cannot_be_used(kafka: Kafka, tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("a file")
    with pytest.raises(SinkError, match=str(tmp_path / "spool")):
        FrameSink(kafka.connect, "frames", tmp_path / "spool", 1 << 20, 1 << 20)


Step = st.one_of(
    st.tuples(st.just("put"), st.integers(1, 60)),
    st.sampled_from([("away", 0), ("back", 0), ("refuse", 0), ("restart", 0), ("settle", 0)]),
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(Step, max_size=14),
    spool_after=st.sampled_from([0.0, 0.01, 30.0]),
    memory=st.sampled_from([2_000, 1 << 20]),
)
def test_whatever_happens_all_arrive_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    steps: list[tuple[str, int]],
    spool_after: float,
    memory: int,
) -> None:
    monkeypatch.setattr(spool, "TICK", 0.003)
    folder = tmp_path_factory.mktemp("spool")
    kafka = Kafka()

    def new() -> FrameSink:
        return FrameSink(
            kafka.connect,
            "frames",
            folder,
            1 << 20,
            memory,
            spool_after=spool_after,
            retry_after=0.001,
            segment_bytes=1_000,
            portion=3_000,
        )

    sink = new()
    sent = 0
    for what, count in steps:
        if what == "put":
            put(sink, frames(count, start=sent))
            sent += count
        elif what == "away":
            kafka.up = False
        elif what == "refuse":
            kafka.refuse = True
        elif what == "restart":
            assert sink.close(0) == 0
            sink = new()
        elif what == "settle":
            awaited(partial(all_there, sink), 0.01)  # any amount of progress is right
        else:
            kafka.back()
    kafka.refuse = False
    kafka.back()
    assert awaited(lambda: all_there(sink), 60), sink.status()
    assert kafka.firsts() == frames(sent)
    assert sink.close(1) == 0
    assert list(folder.iterdir()) == []


# ---------------------------------------------------------------- its files

Frames = st.lists(st.tuples(st.binary(min_size=16, max_size=16), st.binary(max_size=200)), min_size=1, max_size=30)


def read_all(store: Segments, number: int, max_bytes: int = 300) -> Records:
    found: Records = []
    while kept := store.read(number, max_bytes):
        assert kept[0].number >= number
        number = kept[-1].number + 1
        found += [(each.connection, each.frame) for each in kept]
    return found


@given(records=Frames, segment=st.integers(50, 2_000), cut=st.integers(1, 5), restart=st.booleans())
def test_frames_are_read_as_written(
    tmp_path_factory: pytest.TempPathFactory, records: Records, segment: int, cut: int, restart: bool
) -> None:
    folder = tmp_path_factory.mktemp("segments")
    store = Segments(folder, 1 << 20, segment)
    for start in range(0, len(records), cut):
        part = records[start : start + cut]
        assert store.append(start, part) == len(part)
    assert store.size == sum(path.stat().st_size for path in folder.iterdir())
    if restart:
        store.close()
        store = Segments(folder, 1 << 20, segment)
    assert (store.first, store.end) == (0, len(records))
    assert read_all(store, 0) == records
    middle = len(records) // 2
    assert read_all(store, middle) == records[middle:]
    store.release(middle)
    assert read_all(store, middle) == records[middle:]
    store.release(len(records))
    assert list(folder.iterdir()) == []
    assert (store.size, store.loss) == (0, None)
    store.close()


@given(records=Frames, where=st.floats(0, 1))
def test_cut_off_anywhere_the_rest_is_read(
    tmp_path_factory: pytest.TempPathFactory, records: Records, where: float
) -> None:
    folder = tmp_path_factory.mktemp("segments")
    store = Segments(folder, 1 << 20, 1 << 20)
    store.append(0, records)
    store.close()
    (path,) = folder.iterdir()
    size = int(path.stat().st_size * where)
    os.truncate(path, size)
    ends = [len(segments.MAGIC)]
    for record in records:
        ends.append(ends[-1] + len(segments.encode_record(*record)))
    whole = max((number for number, end in enumerate(ends) if end <= size), default=0)
    store = Segments(folder, 1 << 20)
    assert read_all(store, 0) == records[:whole]
    assert store.torn_bytes == (size - ends[whole] if size >= ends[0] else size)
    assert (store.loss is None) == (store.torn_bytes == 0 and size > 0)
    store.close()


@given(records=Frames, where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, records: Records, where: float, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("segments")
    store = Segments(folder, 1 << 20, 1 << 20)
    store.append(0, records)
    store.close()
    (path,) = folder.iterdir()
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 1 << bit
    path.write_bytes(data)
    store = Segments(folder, 1 << 20)
    found = read_all(store, 0)
    assert found == records[: len(found)]
    assert len(found) < len(records)
    assert store.torn_bytes > 0
    store.close()


def test_damage_in_the_middle_costs_the_rest_of_that_segment_only(tmp_path: Path) -> None:
    records = frames(30)
    store = Segments(tmp_path, 1 << 20, 1_300)
    for number, record in enumerate(records):
        store.append(number, [record])
    store.close()
    second = sorted(tmp_path.iterdir())[1]
    first_of_second = int(second.stem)
    with second.open("r+b") as stream:
        stream.seek(2 * len(segments.encode_record(*records[0])) + 50)
        stream.write(b"!")
    store = Segments(tmp_path, 1 << 20, 1_300)
    found = read_all(store, 0)
    third = int(sorted(tmp_path.iterdir())[2].stem)
    assert found == records[: first_of_second + 2] + records[third:]
    assert "is damaged at byte" in (store.loss or "")
    store.release(30)
    (kept,) = tmp_path.iterdir()
    assert kept.name.startswith(second.stem)
    assert kept.suffix == ".damaged"


def test_numbers_may_have_gaps(tmp_path: Path) -> None:
    store = Segments(tmp_path, 1 << 20)
    store.append(0, frames(3))
    store.append(10, frames(3, start=10))
    assert [kept.number for number in (0, 3) for kept in store.read(number, 1000)] == [0, 1, 2, 10, 11, 12]
    assert store.has(12)
    assert not store.has(13)
    store.close()
    again = Segments(tmp_path, 1 << 20)
    assert read_all(again, 0) == frames(3) + frames(3, start=10)
    assert again.loss is None


def test_limit_holds_to_the_byte(tmp_path: Path) -> None:
    record = len(segments.encode_record(*frames(1)[0]))
    store = Segments(tmp_path, len(segments.MAGIC) + 5 * record, 1 << 20)
    assert store.append(0, frames(9)) == 5
    assert store.append(5, frames(1, start=5)) == 0
    assert store.size == sum(path.stat().st_size for path in tmp_path.iterdir())
