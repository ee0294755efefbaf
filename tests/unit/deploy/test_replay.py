"""kiln.deploy.demo.traffic.capture_files, kiln.bridge.kafka.producers: a capture becomes Frames, and none is lost
on the way."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import socket
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from hypothesis import given
from hypothesis import strategies as st

from conftest import VECTORS
from kiln.bridge.capture.tap import ConnectionTap
from kiln.bridge.kafka import producers
from kiln.bridge.kafka.producers import FramesProducer, FramesProducerError, connect
from kiln.deploy.demo.traffic.capture_files import DEFAULT_NETWORK, replay, survey_file
from kiln.schemas.captures.kiln_capture import (
    CaptureError,
    CaptureRecord,
    build_frames,
    compute_connection_id,
    open_capture,
    read_capture,
    survey_capture,
    write_capture,
)
from kiln.schemas.kafka.frames import read_frame
from kiln.schemas.proto.gossipsub import rpc_pb2
from kiln.schemas.proto.kiln import frame_pb2
from kiln.schemas.wire.identity import peer_bytes
from kiln.schemas.wire.topic_table import bundle_hash, parse_hello

CAPTURES = VECTORS / "captures"
IN, OUT = frame_pb2.Frame.IN, frame_pb2.Frame.OUT
TOPIC = "/ceramic/testnet-clay"
A, B, C = b"\x00\x01a", b"\x00\x01b", b"\x00\x01c"


def unused(*_: float) -> float:
    raise AssertionError("no clock is needed at full speed")


def sleepless(_: float) -> None:
    raise AssertionError("no sleep is needed at full speed")


def replayed(path: Path, network: str | None = None, fallback: str = DEFAULT_NETWORK) -> list[frame_pb2.Frame]:
    frames: list[frame_pb2.Frame] = []
    replay(path, frames.append, network=network, fallback=fallback, now=unused, sleep=sleepless)
    return frames


def capture(name: str) -> Path:
    return CAPTURES / f"{name}.rpc.gz"


def records_of(path: Path) -> list[CaptureRecord]:
    with open_capture(path) as stream:
        return list(read_capture(stream))


def made(tmp_path: Path, records: list[CaptureRecord], name: str = "made.rpc.gz") -> Path:
    raw = io.BytesIO()
    write_capture(raw, records)
    path = tmp_path / name
    path.write_bytes(gzip.compress(raw.getvalue(), mtime=0))
    return path


def hello(*topics: str, table: list[bytes] | None = None, test: bool = False) -> bytes:
    rpc = rpc_pb2.RPC(subscriptions=[rpc_pb2.RPC.SubOpts(subscribe=True, topicid=topic) for topic in topics])
    if table is not None:
        rpc.control.extensions.topicTableExtension.topicBundleHashes.extend(table)
    if test:
        rpc.control.extensions.testExtension.SetInParent()
    return rpc.SerializeToString()


def unsubscribe(topic: str) -> bytes:
    option = rpc_pb2.RPC.SubOpts(subscribe=False, topicid=topic)
    return rpc_pb2.RPC(subscriptions=[option]).SerializeToString()


def publish(data: bytes = b"x", topic: str = TOPIC) -> bytes:
    return rpc_pb2.RPC(publish=[rpc_pb2.Message(data=data, topic=topic)]).SerializeToString()


def heard(*rpcs: bytes, remote: bytes = B) -> list[CaptureRecord]:
    return [CaptureRecord("R", 1000 * (i + 1), A, remote, "/meshsub/1.1.0", rpc) for i, rpc in enumerate(rpcs)]


def connections(frames: list[frame_pb2.Frame]) -> dict[bytes, dict[int, list[frame_pb2.Frame]]]:
    grouped: dict[bytes, dict[int, list[frame_pb2.Frame]]] = defaultdict(lambda: defaultdict(list))
    for frame in frames:
        grouped[frame.connection][frame.direction].append(frame)
    return grouped


hello_parts = st.lists(
    st.one_of(
        st.lists(st.binary(min_size=3, max_size=5), max_size=4).map(lambda hashes: hello(table=hashes)),
        st.binary(max_size=8).map(lambda more: hello(table=[b"AAAA"]) + more),
        st.binary(max_size=20),
    ),
    max_size=3,
).map(b"".join)


@given(hello_parts, hello_parts)
def test_a_live_frame_and_a_replayed_one_have_the_same_hellos(first: bytes, second: bytes) -> None:
    """First RPCs of a connection, live through the bridge's tap and out of a capture file."""
    if not first or not second:
        return  # an RPC of nothing is no frame
    tap = ConnectionTap("local-test", bytes(16), A, B, "/meshsub/1.3.0")
    tap.frame("IN", first, 1)
    live = read_frame(tap.frame("OUT", second, 2))
    records = [
        CaptureRecord("R", 1, A, B, "/meshsub/1.3.0", first),
        CaptureRecord("S", 2, A, B, "/meshsub/1.3.0", second),
    ]
    found = survey_capture(records)
    replayed_ones = list(build_frames(records, found, bytes(32), "local-test"))
    assert isinstance(live, frame_pb2.Frame)
    assert {(each.hello_in, each.hello_out) for each in replayed_ones} == {(live.hello_in, live.hello_out)}


def payloads(frames: list[frame_pb2.Frame]) -> list[list[bytes]]:
    """The payloads of each connection with one direction, in the order of first frames."""
    return [[frame.payload for frame in lane] for lanes in connections(frames).values() for lane in lanes.values()]


# --- the real captures


@pytest.mark.parametrize(("name", "count"), [("go4nosign", 307), ("go4tt", 887)])
def test_every_captured_rpc_is_in_a_frame_byte_for_byte(name: str, count: int) -> None:
    path = capture(name)
    frames = replayed(path)
    records = records_of(path)
    for letter, direction in (("R", IN), ("S", OUT)):
        of_records = [(r.observed_at, r.local, r.remote, r.protocol, r.rpc) for r in records if r.direction == letter]
        of_frames = [
            (f.observed_at, f.local_peer, f.remote_peer, f.protocol, f.payload)
            for f in frames
            if f.direction == direction and f.payload
        ]
        assert len(of_frames) == count
        assert of_frames == of_records


@pytest.mark.parametrize("name", ["go4nosign", "go4tt"])
def test_sequences_have_no_gap_and_each_direction_is_closed_once(name: str) -> None:
    for lanes in connections(replayed(capture(name))).values():
        assert set(lanes) == {IN, OUT}
        for lane in lanes.values():
            assert [frame.sequence for frame in lane] == list(range(1, len(lane) + 1))
            assert [not frame.payload for frame in lane] == [False] * (len(lane) - 1) + [True]
            assert lane[-1].observed_at == lane[-2].observed_at


@pytest.mark.parametrize("name", ["go4nosign", "go4tt"])
def test_frames_keep_the_contract(name: str) -> None:
    for frame in replayed(capture(name)):
        assert read_frame(frame.SerializeToString()) == frame
        assert frame.network == "testnet-clay"  # the one that the captures' topics name
        assert frame.origin == frame_pb2.Frame.REPLAY
        assert not frame.verdicts
        assert not frame.declared_length


@pytest.mark.parametrize("name", ["go4nosign", "go4tt"])
def test_each_pair_has_one_connection_but_the_one_that_came_again_has_two(name: str) -> None:
    path = capture(name)
    nodes = [peer_bytes(node) for node in json.loads((CAPTURES / f"{name}.meta.json").read_text())["nodes"]]
    again = [node for node in nodes if node.hex()[-6:] in ("e5d576", "efa9b1")]
    frames = replayed(path)
    numbers: dict[tuple[bytes, bytes], set[bytes]] = defaultdict(set)
    for frame in frames:
        numbers[frame.local_peer, frame.remote_peer].add(frame.connection)
    assert len(again) == 2
    assert len(numbers) == 10  # 5 of the 6 pairs ever met, each seen from both sides
    digest = hashlib.sha256(path.read_bytes()).digest()
    for (local, remote), ids in numbers.items():
        count = 2 if {local, remote} == set(again) else 1
        expected = {
            hashlib.sha256(digest + local + remote + n.to_bytes(4, "big")).digest()[:16] for n in range(1, count + 1)
        }
        assert ids == expected


def test_the_reconnect_begins_where_the_peers_said_hello_again() -> None:
    for name, seconds in (("go4nosign", 6.889), ("go4tt", 9.638)):
        path = capture(name)
        frames = replayed(path)
        start = frames[0].observed_at
        firsts: dict[tuple[bytes, int], float] = {}
        for frame in frames:
            firsts.setdefault((frame.connection, frame.direction), (frame.observed_at - start) / 1e9)
        late = sorted(round(at, 3) for at in firsts.values() if at > 5)
        assert late == [seconds] * 4  # two views of one connection, two directions each


def test_every_frame_of_the_topic_table_capture_carries_both_hellos() -> None:
    path = capture("go4tt")
    bundle = bundle_hash(json.loads((CAPTURES / "go4tt.meta.json").read_text())["topics"])
    for frame in replayed(path):
        assert parse_hello(frame.hello_in) == [bundle]
        assert parse_hello(frame.hello_out) == [bundle]


def test_no_frame_of_the_other_capture_has_a_hello() -> None:
    frames = replayed(capture("go4nosign"))
    assert {(frame.hello_in, frame.hello_out) for frame in frames} == {(b"", b"")}


def test_a_replay_twice_is_the_same_bytes() -> None:
    path = capture("go4tt")
    assert [f.SerializeToString() for f in replayed(path)] == [f.SerializeToString() for f in replayed(path)]


# --- what a hello is


def test_control_extensions_again_are_a_new_connection(tmp_path: Path) -> None:
    first, again = hello(TOPIC, test=True), hello("/other", test=True)
    frames = replayed(made(tmp_path, heard(first, publish(), again, publish())))
    assert payloads(frames) == [[first, publish(), b""], [again, publish(), b""]]


def test_a_subscription_that_stands_already_is_a_new_connection(tmp_path: Path) -> None:
    frames = replayed(made(tmp_path, heard(hello(TOPIC), publish(), hello("/more"), hello(TOPIC, "/other"))))
    assert payloads(frames) == [[hello(TOPIC), publish(), hello("/more"), b""], [hello(TOPIC, "/other"), b""]]


def test_a_topic_left_and_joined_again_is_the_same_connection(tmp_path: Path) -> None:
    rpcs = (hello(TOPIC), unsubscribe(TOPIC), hello(TOPIC))
    assert payloads(replayed(made(tmp_path, heard(*rpcs)))) == [[*rpcs, b""]]


def test_a_new_connection_forgets_the_subscriptions_of_the_old(tmp_path: Path) -> None:
    rpcs = (hello(TOPIC, "/more"), hello(TOPIC), hello("/more"), hello(TOPIC))
    assert payloads(replayed(made(tmp_path, heard(*rpcs)))) == [[rpcs[0], b""], [rpcs[1], rpcs[2], b""], [rpcs[3], b""]]


def test_peers_do_not_share_subscriptions(tmp_path: Path) -> None:
    frames = replayed(made(tmp_path, heard(hello(TOPIC)) + heard(hello(TOPIC), remote=C)))
    assert payloads(frames) == [[hello(TOPIC), b""], [hello(TOPIC), b""]]


def test_inbound_and_outbound_hellos_pair_by_number(tmp_path: Path) -> None:
    ours, theirs = (
        [hello(TOPIC, table=[bytes([n]) * 4]) for n in (1, 2)],
        [hello(TOPIC, table=[bytes([n]) * 4]) for n in (3, 4)],
    )
    inbound = [CaptureRecord("R", at, A, B, "/meshsub/1.3.0", rpc) for at, rpc in ((1, theirs[0]), (9, theirs[1]))]
    outbound = [CaptureRecord("S", at, A, B, "/meshsub/1.3.0", rpc) for at, rpc in ((4, ours[0]), (5, ours[1]))]
    frames = replayed(made(tmp_path, sorted(inbound + outbound, key=lambda record: record.observed_at)))
    pairs = Counter((f.connection, f.hello_in[2:], f.hello_out[2:]) for f in frames)
    assert sorted((hi[:1], ho[:1], count) for (_, hi, ho), count in pairs.items()) == [
        (b"\x03", b"\x01", 4),
        (b"\x04", b"\x02", 4),
    ]
    assert len({connection for connection, _, _ in pairs}) == 2


@pytest.mark.parametrize("table", [[b"abc"], [b"aaaa", b"aaaa"], [n.to_bytes(4, "big") for n in range(257)]])
def test_a_hello_that_is_refused_is_empty(tmp_path: Path, table: list[bytes]) -> None:
    frames = replayed(made(tmp_path, heard(hello(TOPIC, table=table))))
    assert [frame.hello_in for frame in frames] == [b"", b""]


def test_garbage_is_framed_too(tmp_path: Path) -> None:
    rpcs = (b"\xff\xff", hello(TOPIC), b"", b"\x0b", publish())
    frames = replayed(made(tmp_path, heard(*rpcs)))
    assert payloads(frames) == [[*rpcs, b""]]


# --- sizes, networks, pace


def test_an_rpc_over_4_mib_is_cut_and_says_how_long_it_was(tmp_path: Path) -> None:
    limit = 4 * 1024 * 1024
    rpcs = (bytes(limit), b"\x01" * (limit + 1))
    whole, cut, closing = replayed(made(tmp_path, heard(*rpcs)))
    assert (whole.payload, whole.declared_length) == (rpcs[0], 0)
    assert (cut.payload, cut.declared_length) == (b"\x01" * 65536, limit + 1)
    assert (closing.payload, closing.declared_length, closing.sequence) == (b"", 0, 3)


def test_the_network_is_the_one_named_most_or_given_or_the_fallback(tmp_path: Path) -> None:
    named = heard(hello("/ceramic/mainnet"), publish(topic="/ceramic/dev"), publish(topic="/ceramic/dev/sep/model/k1"))
    assert {frame.network for frame in replayed(made(tmp_path, named))} == {"dev"}
    assert {frame.network for frame in replayed(made(tmp_path, named), network="mine")} == {"mine"}
    nameless = made(tmp_path, heard(publish(topic="/other"), b"\xff"), "nameless")
    assert {frame.network for frame in replayed(nameless, fallback="local-1")} == {"local-1"}


def test_a_topic_that_is_not_utf8_names_no_network(tmp_path: Path) -> None:
    message = b"\x22\x02\xff\xfe"
    rpc = b"\x12" + bytes([len(message)]) + message
    assert [frame.payload for frame in replayed(made(tmp_path, heard(rpc)))] == [rpc, b""]


def test_a_broken_capture_sends_nothing(tmp_path: Path) -> None:
    path = made(tmp_path, heard(hello(TOPIC), publish()))
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1]))
    frames: list[frame_pb2.Frame] = []
    with pytest.raises(CaptureError, match="record 2"):
        replay(path, frames.append, now=unused, sleep=sleepless)
    assert frames == []


@pytest.mark.parametrize("pace", [1.0, 4.0])
def test_at_a_pace_each_frame_waits_for_its_time(tmp_path: Path, pace: float) -> None:
    times = [0, 500_000_000, 500_000_000, 3_000_000_000]
    records = [CaptureRecord("R", 10**18 + at, A, B, "/meshsub/1.1.0", publish()) for at in times]
    clock = 100.0
    sent: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    replay(made(tmp_path, records), lambda _: sent.append(clock), pace=pace, now=lambda: clock, sleep=sleep)
    assert sent == pytest.approx([100.0 + at / 1e9 / pace for at in [*times, times[-1]]])


@pytest.mark.parametrize("pace", [0.0, -1.0, float("nan")])
def test_a_pace_must_be_above_zero(tmp_path: Path, pace: float) -> None:
    with pytest.raises(ValueError, match="pace must be greater than 0"):
        replay(made(tmp_path, heard(b"")), lambda _: None, pace=pace, now=unused, sleep=sleepless)


def test_progress_ends_with_everything(tmp_path: Path) -> None:
    rpcs = (hello(TOPIC), b"", publish())
    seen: list[int] = []
    path = made(tmp_path, heard(*rpcs))
    assert replay(path, lambda _: None, now=unused, sleep=sleepless, progress=seen.append) == 4
    assert seen == [1, 2, 3]
    survey = survey_file(path)
    assert (survey.records, survey.connections, survey.select_network("another")) == (3, 1, "testnet-clay")


def test_frames_are_made_one_at_a_time() -> None:
    records = heard(hello(TOPIC), publish())
    first = next(build_frames(iter(records), survey_capture(records), bytes(32), "n"))
    assert first.connection == compute_connection_id(bytes(32), A, B, 1)


# --- into Kafka


class Broker:
    """Stands in for librdkafka's producer: keeps what it is given, up to `room` records; `flush` settles it."""

    def __init__(self, error: KafkaError | None = None, room: int = 1_000) -> None:
        self.error = error
        self.room = room
        self.sent: list[tuple[str, bytes, bytes]] = []
        self.pending: list[Callable[[KafkaError | None, object], None]] = []
        self.purged = False

    def produce(
        self, topic: str, value: bytes, key: bytes, on_delivery: Callable[[KafkaError | None, object], None]
    ) -> None:
        if len(self.pending) >= self.room:
            raise BufferError
        self.sent.append((topic, key, value))
        self.pending.append(on_delivery)

    def poll(self, timeout: float = -1) -> int:
        if timeout:
            self.flush()
        return 0

    def flush(self, timeout: float = -1) -> int:
        for report in self.pending if self.error is not None else ():
            report(self.error, None)
        self.pending.clear()
        return 0

    def purge(self, **kinds: bool) -> None:
        self.purged = True


GONE = KafkaError(KafkaError._MSG_TIMED_OUT, "gone")
FRAME = frame_pb2.Frame(network="n", connection=bytes(range(16)), sequence=1, payload=bytes(100))


def test_frames_go_to_their_topic_under_their_connection() -> None:
    broker = Broker()
    with FramesProducer(cast(Producer, broker), "kiln.frames") as producer:
        producer.send(FRAME)
    assert broker.sent == [("kiln.frames", FRAME.connection, FRAME.SerializeToString())]
    assert broker.pending == []


def test_an_error_of_the_broker_comes_out_of_flush_and_of_every_later_call() -> None:
    broker = Broker(GONE)
    producer = FramesProducer(cast(Producer, broker), "kiln.frames")
    producer.send(FRAME)
    producer.send(FRAME)
    with pytest.raises(FramesProducerError, match=r"the broker refused 2 of 2 frames; .*gone"):
        producer.flush()
    with pytest.raises(FramesProducerError, match="gone"):
        producer.send(FRAME)
    assert len(broker.sent) == 2


def test_a_frame_that_is_refused_at_once_raises() -> None:
    class Small(Broker):
        def produce(self, topic: str, value: bytes, key: bytes, on_delivery: Callable[..., None]) -> None:
            raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, f"{len(value)} bytes"))

    producer = FramesProducer(cast(Producer, Small()), "kiln.frames")
    with pytest.raises(FramesProducerError, match=r"cannot write a frame of .*bytes"):
        producer.send(FRAME)


def test_a_full_buffer_waits_for_the_broker() -> None:
    broker = Broker(room=2)
    producer = FramesProducer(cast(Producer, broker), "kiln.frames")
    for _ in range(3):
        producer.send(FRAME)
    assert len(broker.sent) == 3
    broker.error = GONE
    producer.send(FRAME)
    with pytest.raises(FramesProducerError, match="gone"):
        producer.send(FRAME)  # what fills the buffer is refused


def test_leaving_with_an_error_does_not_hide_it() -> None:
    broker = Broker(GONE)

    def fail_under_way() -> None:
        with FramesProducer(cast(Producer, broker), "kiln.frames") as producer:
            producer.send(FRAME)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail_under_way()
    assert broker.purged


def test_no_broker_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers, "_METADATA_TIMEOUT", 0.2)
    with socket.socket() as unused_port:
        unused_port.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers
        address = f"127.0.0.1:{unused_port.getsockname()[1]}"
        with pytest.raises(FramesProducerError, match=address):
            connect({"bootstrap_servers": address}, "kiln.frames")
