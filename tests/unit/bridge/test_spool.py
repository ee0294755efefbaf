"""The frame sink and its spool: whatever Kafka and the disk do, every frame arrives, in order; nothing in silence."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import cast

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, KafkaException
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kiln.bridge.capture import sink as sink_module
from kiln.bridge.capture.sink import MAX_FRAME, MAX_PORTION, PORTION, FrameSink
from kiln.bridge.capture.spool import QueuedFrame, Spool, SpoolError
from kiln.bridge.kafka.producers import FramesProducerError
from kit.awaiting import awaited

A, B = b"a" * 16, b"b" * 16
MIB = 1 << 20
LIMIT = 16 * MIB
Records = list[tuple[bytes, bytes]]
Report = Callable[[KafkaError, None], None]


# ---------------------------------------------------------------- a Kafka of the test's own


class Producer:
    """A producer like librdkafka's: `flush` serves reports, and all records after a refused one are refused too."""

    def __init__(self, kafka: Kafka) -> None:
        self.kafka = kafka
        self.pending: list[tuple[bytes, bytes, Report]] = []
        self.refused = False

    def produce(self, topic: str, value: bytes, key: bytes, on_delivery: Report) -> None:
        assert topic == "frames"
        if self.refused:
            raise KafkaException(KafkaError(KafkaError._FATAL))
        self.pending.append((key, value, on_delivery))

    def flush(self, timeout: float) -> int:
        with self.kafka.changed:
            if self.pending and not self.kafka.up:
                self.kafka.changed.wait(timeout)
            self.kafka.portions.append(sum(len(value) for _, value, _ in self.pending))
            while self.pending and (self.kafka.up or self.refused):
                key, value, report = self.pending.pop(0)
                self.refused, self.kafka.refuse = self.refused or self.kafka.refuse, False
                if self.refused:
                    report(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), None)
                else:
                    self.kafka.log.append((key, value))
        return len(self.pending)

    def purge(self) -> None:
        self.refused = True


class Kafka:
    """One partition. `up`: answers at once. `refuse`: the next record is refused."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.up = True
        self.refuse = False
        self.reachable = True
        self.log: Records = []
        self.portions: list[int] = []  # bytes at each flush
        self.producers: list[Producer] = []

    def connect(self) -> confluent_kafka.Producer:
        if not self.reachable:
            raise FramesProducerError("cannot write to Kafka at nowhere")
        self.producers.append(Producer(self))
        return cast(confluent_kafka.Producer, self.producers[-1])

    def back(self) -> None:
        with self.changed:
            self.up = True
            self.changed.notify_all()

    def firsts(self) -> Records:
        """The first copy of each record."""
        return list(dict.fromkeys(list(self.log)))


def frames(count: int, connection: bytes = A, start: int = 0, size: int = 100) -> Records:
    return [(connection, f"{number:08}".encode().ljust(size, b".")) for number in range(start, start + count)]


def queued(records: Iterable[tuple[bytes, bytes]]) -> list[QueuedFrame]:
    return [QueuedFrame(*record) for record in records]


@pytest.fixture
def kafka() -> Kafka:
    return Kafka()


@pytest.fixture
def new_sink(kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FrameSink]]:
    monkeypatch.setattr(sink_module, "TICK", 0.005)
    made: list[FrameSink] = []

    def make(
        *, limit: int = LIMIT, memory_limit: int = LIMIT, spool_after: float = 0.05, spool: Spool | None = None
    ) -> FrameSink:
        spool = spool or Spool(tmp_path / "spool", limit)
        made.append(FrameSink(kafka.connect, "frames", spool, memory_limit, spool_after=spool_after, retry_after=0.01))
        return made[-1]

    yield make
    for each in made:
        each.close(0)


def put(sink: FrameSink, records: Iterable[tuple[bytes, bytes]]) -> None:
    for connection, frame in records:
        sink.put(connection, frame)


def put_together(sink: FrameSink, records: Iterable[tuple[bytes, bytes]]) -> None:
    """Put records so that the sink's thread finds them all, even if this thread stops between two of them."""
    with sink._changed:
        put(sink, records)


def all_there(sink: FrameSink) -> bool:
    return sink.status().waiting == 0


def error_of(sink: FrameSink) -> str:
    return sink.status().error or ""


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
    assert (status.put, status.acknowledged, status.spooled, status.memory_bytes) == (1000, 1000, 0, 0)
    assert (status.error, files(tmp_path)) == (None, [])


def test_kafka_away_and_back(kafka: Kafka, new_sink: Callable[..., FrameSink], tmp_path: Path) -> None:
    sink = new_sink()
    put(sink, frames(100))
    assert awaited(lambda: all_there(sink))
    kafka.up = False
    put(sink, frames(300, start=100))
    assert awaited(lambda: sink.status().spooled >= 300)  # those that the producer has, too
    assert awaited(lambda: "no acknowledgement for" in error_of(sink))
    assert sink.status().memory_bytes == 0
    put(sink, frames(300, start=400))
    assert awaited(lambda: sink.status().spooled >= 600)
    assert sink.status().waiting == 600
    kafka.back()
    put(sink, frames(100, start=700))
    assert awaited(lambda: all_there(sink))
    assert kafka.firsts() == frames(800)
    assert error_of(sink) == ""
    assert awaited(lambda: sink.status().disk_bytes == 0)
    assert files(tmp_path) == []
    assert sink.status().acknowledged == 800


def test_no_broker_at_the_start(kafka: Kafka, new_sink: Callable[..., FrameSink]) -> None:
    kafka.reachable = False
    sink = new_sink()
    put(sink, frames(10))
    assert awaited(lambda: "cannot write to Kafka at nowhere" in error_of(sink))
    assert awaited(lambda: sink.status().spooled == 10)
    kafka.reachable = True
    assert awaited(lambda: all_there(sink))
    assert kafka.log == frames(10)
    assert error_of(sink) == ""


def test_a_producer_that_is_connected_meanwhile_is_not_replaced(
    kafka: Kafka, new_sink: Callable[..., FrameSink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second producer has nothing to flush, so the frames in flight in the first would count as acknowledged."""
    asked_again = threading.Event()
    connect, wait_for_producer = kafka.connect, FrameSink._await_producer

    def connect_late() -> confluent_kafka.Producer:
        asked_again.wait()
        if kafka.producers:
            awaited(lambda: bool(kafka.producers[0].pending))
        return connect()

    def wait_too_late(sink: FrameSink) -> None:
        if sink._connector is not None:
            asked_again.set()
            sink._connector.join()
        wait_for_producer(sink)

    monkeypatch.setattr(kafka, "connect", connect_late)
    monkeypatch.setattr(FrameSink, "_await_producer", wait_too_late)
    kafka.up = False
    sink = new_sink(spool_after=30.0)
    put(sink, frames(5))
    assert awaited(lambda: bool(kafka.producers and kafka.producers[0].pending))
    assert not awaited(lambda: all_there(sink), 10 * sink_module.TICK)
    kafka.back()
    assert awaited(lambda: all_there(sink))
    assert (kafka.log, len(kafka.producers)) == (frames(5), 1)


@pytest.mark.parametrize("spooled", [False, True])
def test_refused_frame_is_not_overtaken(kafka: Kafka, new_sink: Callable[..., FrameSink], spooled: bool) -> None:
    """Nor are the frames of its portion lost that come after it, wherever the portion is by then."""
    kafka.up = False
    sink = new_sink(spool_after=0.05 if spooled else 30.0)
    put_together(sink, frames(50))
    assert awaited(lambda: bool(kafka.producers) and len(kafka.producers[0].pending) == 50)
    put(sink, frames(50, start=50))
    assert awaited(lambda: sink.status().spooled == (100 if spooled else 0))
    kafka.refuse = True
    kafka.back()
    assert awaited(lambda: all_there(sink))
    assert kafka.log == frames(100)
    assert len(kafka.producers) == 2


def test_what_comes_before_the_answer_is_the_next_portion(kafka: Kafka, new_sink: Callable[..., FrameSink]) -> None:
    kafka.up = False
    sink = new_sink(spool_after=30.0)
    put_together(sink, frames(5))
    assert awaited(lambda: [len(each.pending) for each in kafka.producers] == [5])
    put(sink, frames(7, start=5))
    assert not awaited(lambda: len(kafka.producers[0].pending) > 5, 5 * sink_module.LINGER)
    kafka.back()
    assert awaited(lambda: all_there(sink))
    assert kafka.log == frames(12)


def test_full_spool_says_so_and_loses_nothing(kafka: Kafka, new_sink: Callable[..., FrameSink], tmp_path: Path) -> None:
    sink = new_sink()
    room = threading.Event()
    waiting: list[int] = []
    sink.subscribe(lambda: waiting.append(sink.status().waiting))
    sink.subscribe(room.set)
    kafka.up = False
    sent = frames(200, size=100_000)
    put(sink, sent[:50])
    assert awaited(lambda: sink.status().spooled == 50)
    assert not sink.full
    put(sink, sent[50:])
    assert awaited(lambda: sink.full)
    assert "reading from peers is paused: the spool is full" in error_of(sink)
    assert sum(path.stat().st_size for path in (tmp_path / "spool").iterdir()) <= LIMIT
    assert not room.is_set()
    kafka.back()
    assert room.wait(60)
    assert waiting[0] <= 100  # 120 have room, and reading goes on when a quarter of it is free
    assert not sink.full
    assert awaited(lambda: all_there(sink))
    assert kafka.firsts() == sent
    assert error_of(sink) == ""


def test_memory_is_bounded_before_kafka_is_known_to_be_away(kafka: Kafka, new_sink: Callable[..., FrameSink]) -> None:
    sink = new_sink(memory_limit=100_000, spool_after=30.0)
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
    second = new_sink()
    assert second.status().waiting == 250
    put(second, frames(50, start=250))
    kafka.back()
    assert awaited(lambda: all_there(second))
    assert kafka.firsts() == frames(300)
    assert awaited(lambda: files(tmp_path) == [])


def test_while_the_spool_is_sent_new_frames_follow_to_disk(kafka: Kafka, new_sink: Callable[..., FrameSink]) -> None:
    """A kill then would take all that came since Kafka is back."""
    kafka.up = False
    first = new_sink()
    put(first, frames(20, size=100_000))
    assert first.close(0) == 0
    second = new_sink(spool_after=1e6)
    put(second, frames(5, start=20, size=100_000))
    assert awaited(lambda: second.status().spooled == 5)
    kafka.back()
    assert awaited(lambda: all_there(second))
    assert kafka.firsts() == frames(25, size=100_000)


CHILD = """
import sys
from pathlib import Path
from kiln.bridge.capture.sink import FrameSink
from kiln.bridge.capture.spool import Spool
from kiln.bridge.kafka.producers import FramesProducerError

def connect():
    raise FramesProducerError("away")

sink = FrameSink(connect, "frames", Spool(Path(sys.argv[1]), 1 << 24), 1 << 20, spool_after=0.01)
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


def test_a_disk_that_fails_pauses_and_nothing_is_lost(
    kafka: Kafka, new_sink: Callable[..., FrameSink], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    kafka.up = False
    sink = new_sink()
    room = threading.Event()
    sink.subscribe(room.set)
    with monkeypatch.context() as patched:
        patched.setattr(Spool, "_insert", fail)
        put(sink, frames(100))
        assert awaited(lambda: sink.full)
        assert "(disk I/O error). Check the folder's permissions and the disk." in error_of(sink)
        kafka.back()  # before the disk
        assert awaited(lambda: all_there(sink))
        assert room.wait(60)
        assert (kafka.log, error_of(sink), sink.full) == (frames(100), "", False)


def test_below_the_floor_of_free_space_it_is_full_and_goes_on_by_itself(
    kafka: Kafka, new_sink: Callable[..., FrameSink], tmp_path: Path
) -> None:
    """Also while Kafka is well: others fill the disk too."""
    free = [1_000]
    sink = new_sink(spool=Spool(tmp_path / "spool", LIMIT, 1_000, free=lambda: free[0]))
    room = threading.Event()
    sink.subscribe(room.set)
    put(sink, frames(5))
    assert awaited(lambda: all_there(sink))
    assert (sink.full, error_of(sink)) == (False, "")
    free[0] = 999
    assert awaited(lambda: sink.full)
    assert "has 999 bytes free, and needs 1250 (1.25 times bridge.min_free_bytes)" in error_of(sink)
    assert sink.status().free_bytes == 999
    put(sink, frames(5, start=5))  # what is under way
    assert awaited(lambda: all_there(sink))
    free[0] = 1_249  # not yet: it would come and go
    assert awaited(lambda: sink.status().free_bytes == 1_249)
    assert sink.full
    free[0] = 1_250
    assert room.wait(60)
    assert (sink.full, error_of(sink), kafka.log) == (False, "", frames(10))


def test_close_tells_what_had_no_room(kafka: Kafka, new_sink: Callable[..., FrameSink]) -> None:
    kafka.up = False
    sink = new_sink()
    put(sink, frames(20, size=MIB))
    lost = sink.close(0)
    assert 5 < lost < 15
    kafka.back()
    again = new_sink()
    assert awaited(lambda: all_there(again))
    assert kafka.firsts() == frames(20 - lost, size=MIB)


def test_close_waits_for_kafka(kafka: Kafka, new_sink: Callable[..., FrameSink], tmp_path: Path) -> None:
    kafka.up = False
    sink = new_sink(spool_after=30.0)
    put_together(sink, frames(20))
    assert awaited(lambda: bool(kafka.producers) and len(kafka.producers[0].pending) == 20)
    threading.Timer(0.05, kafka.back).start()
    assert sink.close(20) == 0
    assert kafka.log == frames(20)
    assert files(tmp_path) == []


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


Step = st.one_of(
    st.tuples(st.just("put"), st.integers(1, 60)),
    st.sampled_from([("away", 0), ("back", 0), ("refuse", 0), ("restart", 0), ("settle", 0)]),
)


def test_portions_grow_while_frames_wait_that_kafka_acknowledges_quickly(
    kafka: Kafka, new_sink: Callable[..., FrameSink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_module, "TICK", 60.0)  # nothing is slow, and nothing goes to the spool
    kafka.up = False
    sink = new_sink(spool_after=600.0)
    put(sink, frames(200, size=PORTION // 4))
    kafka.back()
    assert awaited(lambda: all_there(sink), 60), sink.status()
    assert max(kafka.portions) == MAX_PORTION
    assert kafka.firsts() == frames(200, size=PORTION // 4)
    assert sink.close(1) == 0


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(Step, max_size=14),
    spool_after=st.sampled_from([0.0, 0.01, 30.0]),
    memory=st.sampled_from([2_000, MIB]),
)
def test_whatever_happens_all_arrive_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    steps: list[tuple[str, int]],
    spool_after: float,
    memory: int,
) -> None:
    monkeypatch.setattr(sink_module, "TICK", 0.003)
    monkeypatch.setattr(sink_module, "PORTION", 3_000)
    folder = tmp_path_factory.mktemp("spool")
    kafka = Kafka()

    def new() -> FrameSink:
        return FrameSink(
            kafka.connect, "frames", Spool(folder, LIMIT), memory, spool_after=spool_after, retry_after=0.001
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


# ---------------------------------------------------------------- the spool

Frames = st.lists(
    st.tuples(st.binary(min_size=16, max_size=16), st.binary(min_size=1, max_size=6_000)), min_size=1, max_size=30
)


def read_all(spool: Spool, max_bytes: int = 300) -> Records:
    found: Records = []
    while spool.unread:
        found += [(each.connection, each.frame) for each in spool.read(max_bytes)]
    return found


@settings(max_examples=50)
@given(records=Frames, cut=st.integers(1, 5), how=st.sampled_from(["same", "closed", "killed"]), durable=st.booleans())
def test_frames_are_read_as_written(
    tmp_path_factory: pytest.TempPathFactory, records: Records, cut: int, how: str, durable: bool
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    spool = Spool(folder, LIMIT, durable=durable)
    for start in range(0, len(records), cut):
        spool.append(queued(records[start : start + cut]))
        assert spool.size == sum(path.stat().st_size for path in folder.iterdir())
    if how == "closed":
        spool.close()
    if how == "killed":  # the files as they are without any farewell
        folder = Path(shutil.copytree(folder, folder.with_name(f"{folder.name}-killed")))
    if how != "same":
        spool = Spool(folder, LIMIT, durable=durable)
    assert (spool.unread, spool.unacknowledged) == (len(records), len(records))
    part = len(spool.read(300))
    spool.acknowledge()
    spool.release()
    assert spool.unacknowledged == len(records) - part
    assert read_all(spool) == records[part:]
    spool.rewind()
    assert read_all(spool) == records[part:]
    spool.acknowledge()
    spool.release()
    assert list(folder.iterdir()) == []
    assert (spool.size, spool.loss) == (0, None)


@settings(max_examples=60)
@given(records=Frames, where=st.floats(0, 1, exclude_max=True), damage=st.sampled_from(["bit", "cut", "zeros"]))
def test_damage_anywhere_costs_frames_and_makes_none(
    tmp_path_factory: pytest.TempPathFactory, records: Records, where: float, damage: str
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    spool = Spool(folder, LIMIT)
    spool.append(queued(records))
    spool.close()
    (path,) = folder.iterdir()
    data = bytearray(path.read_bytes())
    at = int(len(data) * where)
    if damage == "bit":
        data[at] ^= 8
    elif damage == "zeros":
        data[at : at + 4096] = bytes(len(data[at : at + 4096]))
    else:
        del data[at:]
    path.write_bytes(data)
    spool = Spool(folder, LIMIT)
    spool.append(queued(frames(3)))
    found = read_all(spool)
    assert found[-3:] == frames(3)
    remaining = iter(records)
    assert all(each in remaining for each in found[:-3])  # in their order, and none that was not written
    spool.acknowledge()
    spool.release()
    assert [each.suffix for each in folder.iterdir()] in ([], [".damaged"])
    spool.close()


def test_what_is_no_database_is_set_aside(kafka: Kafka, new_sink: Callable[..., FrameSink], tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "frames.sqlite").write_bytes(b"something else" * 100)
    sink = new_sink(spool_after=30.0)
    put(sink, frames(5))
    assert awaited(lambda: all_there(sink))
    assert kafka.log == frames(5)
    assert sink.status().torn_bytes == 1_400
    assert "frames.sqlite was damaged (file is not a database). Kiln renamed it to frames." in error_of(sink)
    assert [name.rpartition(".")[2] for name in files(tmp_path)] == ["damaged"]


def test_what_precedes_damage_is_sent_and_newer_frames_follow(
    kafka: Kafka, new_sink: Callable[..., FrameSink], tmp_path: Path
) -> None:
    spool = Spool(tmp_path / "spool", LIMIT)
    spool.append(queued(frames(90, size=10_000)))
    spool.close()
    path = tmp_path / "spool" / "frames.sqlite"
    data = bytearray(path.read_bytes())
    third = len(data) // 3 // 4096 * 4096
    data[third : 2 * third] = bytes(third)
    path.write_bytes(data)
    sink = new_sink()
    assert awaited(lambda: "Kiln renamed it to frames." in error_of(sink))
    assert sink.status().torn_bytes == len(data)
    put(sink, frames(5, start=90))
    assert awaited(lambda: sink.status().acknowledged > 25 and all_there(sink))
    assert kafka.log == frames(len(kafka.log) - 5, size=10_000) + frames(5, start=90)


def test_a_damaged_frame_costs_no_other(kafka: Kafka, new_sink: Callable[..., FrameSink], tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", LIMIT)
    spool.append(queued(frames(30)))
    spool.close()
    path = tmp_path / "spool" / "frames.sqlite"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"00000012.", b"0000001?."))
    sink = new_sink()
    assert awaited(lambda: all_there(sink))
    assert kafka.log == [each for each in frames(30) if not each[1].startswith(b"00000012")]
    assert sink.status().torn_bytes == 100
    assert f"frames in {path} are damaged" in error_of(sink)


def test_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("a file")
    with pytest.raises(SpoolError, match=str(tmp_path / "spool")):
        Spool(tmp_path / "spool", LIMIT)


def test_others_cannot_read_it(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", LIMIT)
    spool.append(queued(frames(1)))
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "spool").iterdir()] == [0o600, 0o600]
    spool.close()
