"""Datagrams of BEP 50 as Frames: whose they are, how they are numbered, and that connections are bounded."""

from __future__ import annotations

import hashlib

import pytest

from kiln.bridge.bep50 import ItemTransfer
from kiln.bridge.bep50.tap import MAX_OPEN, ItemTap
from kiln.schemas.dht.announcement import PublisherKey, parse_source
from kiln.schemas.dht.krpc import DhtAddress, parse_host_and_port
from kiln.schemas.kafka.frames import read_frame
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.topics import Separator

NODE, OTHER = b"\x01" * 20, b"\x02" * 20
TOPIC, TOPIC_TOO = b"\xaa" * 20, b"\xbb" * 20
HERE, THERE = DhtAddress.parse("127.0.0.1", 4813), DhtAddress.parse("10.0.0.1", 6881)


class Tapped:
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.tap = ItemTap("local-test", NODE, {4: HERE}, self._put)

    def _put(self, connection: bytes, frame: bytes) -> None:
        read = read_frame(frame)
        assert isinstance(read, Frame)
        assert read.connection == connection
        self.frames.append(read)


def came(datagram: bytes, address: DhtAddress = THERE, node: bytes = OTHER, target: bytes = TOPIC) -> ItemTransfer:
    return ItemTransfer(target, "in", datagram, address, node)


def test_a_frame_says_all_of_a_datagram() -> None:
    tapped = Tapped()
    at = 1_700_000_000_000_000_000
    tapped.tap.record(came(b"d...e"), at)
    (frame,) = tapped.frames
    begun = at.to_bytes(8, "big")
    assert frame == Frame(
        network="local-test",
        connection=hashlib.sha256(HERE.compact + THERE.compact + TOPIC + begun).digest()[:16],
        direction=Frame.IN,
        local_peer=NODE,
        remote_peer=OTHER,
        protocol="bep50",
        observed_at=at,
        payload=b"d...e",
        sequence=1,
        origin=Frame.LIVE,
        remote_address=THERE.compact,
    )


def test_a_connection_is_what_one_node_says_of_one_topic() -> None:
    tapped = Tapped()
    for carried in (came(b"a"), came(b"b"), came(b"c", target=TOPIC_TOO), came(b"d", node=NODE), came(b"e")):
        tapped.tap.record(carried, 5)
    tapped.tap.record(ItemTransfer(TOPIC, "out", b"f", THERE, OTHER), 6)
    a, b, c, d, e, f = tapped.frames
    assert a.connection == b.connection == e.connection == f.connection
    assert len({a.connection, c.connection, d.connection}) == 3
    assert [each.sequence for each in tapped.frames] == [1, 2, 1, 1, 3, 1]
    tapped.tap.close(7)
    ends = tapped.frames[6:]
    assert len(ends) == 6
    assert all(not each.payload for each in ends)
    assert [each.sequence for each in ends if each.connection == a.connection] == [4, 2]


def test_one_begun_anew_has_another_id() -> None:
    before, after = Tapped(), Tapped()
    before.tap.record(came(b"a"), 5)
    before.tap.close(6)
    after.tap.record(came(b"a"), 7)
    assert before.frames[0].connection != after.frames[0].connection


def test_strangers_cannot_have_as_many_as_they_like() -> None:
    tapped = Tapped()
    first = DhtAddress(b"\x0a\x00\x00\x01", 1)
    tapped.tap.record(came(b"a", first), 1)
    for port in range(2, MAX_OPEN + 1):
        tapped.tap.record(came(b"a", DhtAddress(first.ip, port)), port)
    tapped.tap.record(came(b"again", first), MAX_OPEN + 1)
    assert all(each.payload for each in tapped.frames)
    tapped.tap.record(came(b"a", DhtAddress(first.ip, 60_000)), MAX_OPEN + 2)
    closing, one_more = [each for each in tapped.frames if not each.payload], tapped.frames[-1]
    assert {each.remote_address for each in closing} == {DhtAddress(first.ip, 2).compact}  # silent for longest
    assert one_more.payload == b"a"


def test_what_has_no_way_to_go_is_no_frame() -> None:
    tapped = Tapped()
    tapped.tap.record(ItemTransfer(TOPIC, "out", b"a", DhtAddress.parse("2001:db8::1", 1), OTHER), 1)
    assert tapped.frames == []


@pytest.mark.parametrize("text", ["127.0.0.1:4813", "[2001:db8::1]:1", "0.0.0.0:0"])
def test_an_address_is_read_as_it_is_written(text: str) -> None:
    assert DhtAddress.from_text(text).text == text


@pytest.mark.parametrize("text", ["", "127.0.0.1", ":1", "::1:4813", "127.0.0.1:65536", "127.0.0.1:-1", "1.2.3.4:٣"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|brackets"):
        parse_host_and_port(text)


def test_whom_to_follow_is_read() -> None:
    assert parse_source(f"{'ab' * 32}/a/b/k2t6") == PublisherKey(b"\xab" * 32, Separator("a/b", "k2t6"))
    for wrong in ("", "ab" * 32, f"{'ab' * 31}/model/k2t6", f"{'xy' * 32}/model/k2t6", f"{' ab' * 32}/model/k2t6"):
        with pytest.raises(ValueError, match=r"public key|slash"):
            parse_source(wrong)
    with pytest.raises(ValueError, match="base36"):
        parse_source(f"{'ab' * 32}/model/K2T6")
