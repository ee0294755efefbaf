"""kiln.schemas.captures: traces of go-libp2p-pubsub, which give copies without data, and Kiln's own captures."""

from __future__ import annotations

import base64
import gzip
import io
import json
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import VECTORS
from kiln.deploy.demo.traffic.capture_files import replay
from kiln.pipelines.decode.decoder import RejectedMessage
from kiln.schemas.captures.formats import detect_format
from kiln.schemas.captures.items import FILE_DAMAGED, FILE_ENDS_EARLY, LINE_MALFORMED, Item, UnreadableItem
from kiln.schemas.captures.kiln_capture import CaptureRecord, write_capture
from kiln.schemas.captures.lines import MAX_LINE
from kiln.schemas.kafka.frames import METADATA_ONLY
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.proto.pubsub_trace.trace_pb2 import TraceEvent
from kiln.schemas.times import MAX_NANOS, MIN_NANOS
from kiln.schemas.wire.identity import peer_text
from kit.history import SOURCE, decoded, items, message_of, only_frames, unread, zipped

HERE = Path(__file__).parent / "history_files"
JSON, PB = "pubsub-trace-json", "pubsub-trace-pb"
DUPLICATE, DELIVER = 2, 3
CLAY = "/ceramic/testnet-clay"

keys = st.binary(min_size=32, max_size=32)
peers = st.one_of(keys.map(lambda key: bytes.fromhex("002408011220") + key), keys.map(lambda key: b"\x12\x20" + key))
copies = st.tuples(
    st.sampled_from((DUPLICATE, DELIVER)),
    peers,
    st.integers(MIN_NANOS, MAX_NANOS),
    peers,
    st.binary(min_size=1, max_size=8),
    peers,
    st.text(st.characters(codec="utf-8"), max_size=20),
)
Copy = tuple[int, bytes, int, bytes, bytes, bytes, str]


def as_json(copy: Copy) -> bytes:
    kind, node, at, author, seqno, sender, topic = copy
    told = {"messageID": _text(author + seqno), "topic": topic, "receivedFrom": _text(sender)}
    name = "duplicateMessage" if kind == DUPLICATE else "deliverMessage"
    return json.dumps({"type": kind, "peerID": _text(node), "timestamp": at, name: told}).encode()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def as_pb(copy: Copy) -> bytes:
    kind, node, at, author, seqno, sender, topic = copy
    event = TraceEvent(type=kind, peerID=node, timestamp=at)
    told = event.duplicateMessage if kind == DUPLICATE else event.deliverMessage
    told.messageID, told.receivedFrom, told.topic = author + seqno, sender, topic
    return delimited(event.SerializeToString())


def delimited(raw: bytes) -> bytes:
    length, head = len(raw), bytearray()
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*head, length]) + raw


def told(found: list[Item]) -> list[tuple[object, ...]]:
    """What the Frames say, apart from their format."""
    return [
        (each.sequence, each.observed_at, each.local_peer, each.remote_peer, each.payload, each.network)
        for each in only_frames(found)
    ]


@given(st.lists(copies, max_size=8))
def test_each_copy_of_a_trace_is_a_frame_in_either_form(those: list[Copy]) -> None:
    others = [copy for copy in those if copy[1] != copy[5]]
    found = items(PB, b"".join(map(as_pb, others)))
    assert told(found) == told(items(JSON, b"\n".join(map(as_json, others))))
    for copy, frame in zip(others, only_frames(found), strict=True):
        _, node, at, author, seqno, sender, topic = copy
        message = message_of(frame)
        assert (getattr(message, "from"), message.seqno, message.topic) == (author, seqno, topic)
        assert not message.HasField("data")
        assert (frame.local_peer, frame.remote_peer, frame.observed_at) == (node, sender, at)


@pytest.mark.parametrize(("name", "suffix"), [(JSON, "json"), (PB, "pb")])
def test_the_trace_of_a_real_node_gives_its_copies(name: str, suffix: str) -> None:
    raw = (HERE / f"go_pubsub.trace.{suffix}.gz").read_bytes()
    events = [
        json.loads(line) for line in gzip.decompress((HERE / "go_pubsub.trace.json.gz").read_bytes()).splitlines()
    ]
    kinds = Counter(event["type"] for event in events)
    tracing = peer_text(base64.b64decode(events[0]["peerID"]))
    format_ = detect_format(io.BytesIO(raw))
    assert format_ is not None
    assert format_.name == name
    found = items(name, raw)
    assert len(found) == len(events)
    assert {item.reason for item in found if isinstance(item, UnreadableItem)} == {METADATA_ONLY}
    frames = [item for item in found if isinstance(item, Frame)]
    # the node delivers its own message to itself, and nobody sent it that one
    assert len(frames) == kinds[DUPLICATE] + kinds[DELIVER] - 1
    heard = {tuple(line.split()) for line in (HERE / "go_pubsub.heard.txt").read_text().splitlines()}
    copies_of = Counter((peer_text(getattr(m, "from")), m.seqno.hex()) for m in map(message_of, frames))
    assert set(copies_of) == {(author, seqno) for author, seqno in heard if author != tracing}
    for frame in frames:
        fault = decoded(frame)
        assert isinstance(fault, RejectedMessage)
        assert (fault.stage, fault.reason) == ("history", METADATA_ONLY)
        assert fault.data == message_of(frame).SerializeToString()
        assert fault.copy is not None
        _, author, seqno = fault.copy.message_id.split("/")
        assert (author, seqno) in heard
        assert (fault.copy.network, fault.copy.verdict) == ("testnet-clay", "unverifiable")


def test_the_sample_of_bacalhau_is_of_nobody_s_copies() -> None:
    path = VECTORS / "ceramic" / "go_pubsub_jsontracer_sample.ndjson"
    assert unread(items(JSON, path.read_bytes())) == [(line, METADATA_ONLY) for line in (1, 2, 3, 4)]


AUTHOR, SENDER = (b"\x12\x20" + letter * 32 for letter in (b"a", b"b"))
ONE: Copy = (DELIVER, b"\x12\x20" + bytes(32), MIN_NANOS, AUTHOR, b"\x01", SENDER, CLAY)


def test_an_id_that_is_not_author_and_seqno_gives_no_copy() -> None:
    digest = (DELIVER, ONE[1], 1, b"\x99" * 32, b"", ONE[5], CLAY)
    assert unread(items(PB, as_pb(digest))) == unread(items(JSON, as_json(digest))) == [(1, METADATA_ONLY)]


@pytest.mark.parametrize(
    ("raw", "faults"),
    [
        (delimited(b"\xff\xff"), [(2, LINE_MALFORMED)]),
        (bytes(1000), [(2, FILE_DAMAGED)]),  # what a power cut leaves behind
        (as_pb(ONE)[:-1], [(2, FILE_ENDS_EARLY)]),
        (b"\x80", [(2, FILE_ENDS_EARLY)]),
        (b"\xff" * 10, [(2, FILE_DAMAGED)]),
        (b"\xff\xff\xff\xff\x0f" + bytes(100), [(2, FILE_DAMAGED)]),
    ],
)
def test_a_damaged_trace_says_where(raw: bytes, faults: list[tuple[int, str]]) -> None:
    found = items(PB, as_pb(ONE) + raw)
    assert isinstance(found[0], Frame)
    assert unread(found) == faults
    assert items(PB, zipped(as_pb(ONE) + raw)) == found


def test_a_trace_goes_on_after_an_event_that_is_none() -> None:
    found = items(PB, as_pb(ONE) + delimited(b"\xff\xff") + as_pb(ONE))
    assert [isinstance(item, Frame) for item in found] == [True, False, True]


def test_a_long_trace_is_read_in_time_that_grows_with_its_length() -> None:
    raw = as_pb(ONE) * 20_000  # 3 MB, which is more than one block
    assert len(only_frames(items(PB, raw))) == 20_000
    assert len(raw) < MAX_LINE


# ---------------------------------------------------------------- captures


def test_a_capture_gives_what_kiln_replay_sends(tmp_path: Path) -> None:
    path = VECTORS / "captures" / "go4tt.rpc.gz"
    sent: list[Frame] = []
    replay(path, sent.append, now=lambda: 0.0, sleep=lambda _: None)
    raw = path.read_bytes()
    format_ = detect_format(io.BytesIO(raw))
    assert format_ is not None
    assert format_.name == "kiln-capture"
    with path.open("rb") as file:
        source = SOURCE._replace(digest=sha256(raw).digest())
        assert list(format_.read(file, source, next(format_.split(file, 1)))) == sent


def test_a_capture_that_is_cut_gives_its_whole_records_and_a_fault() -> None:
    rpc = RPC(publish=[Message(data=b"x", topic=CLAY)]).SerializeToString()
    records = [CaptureRecord("R", at, b"\x00\x01a", b"\x00\x01b", "/meshsub/1.1.0", rpc) for at in range(1, 4)]
    out = io.BytesIO()
    write_capture(out, records)
    found = items("kiln-capture", out.getvalue()[:-1])
    assert unread(found) == [(3, FILE_DAMAGED)]
    assert [item.observed_at for item in found if isinstance(item, Frame) and item.payload] == [1, 2]
    assert unread(items("kiln-capture", out.getvalue()[:-20] + b"\xff" * 40)) != []
