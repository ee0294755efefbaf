"""Seen messages, kept messages, and what messages are called."""

from __future__ import annotations

from hashlib import sha256

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from kiln.bridge.gossipsub.cache import MessageCache, SeenSet
from kiln.schemas.proto.gossipsub.rpc_pb2 import Message, PublicKey
from kiln.schemas.wire.identity import MAX_SEQNO, PrivateKey, compute_peer_id, message_id, peer_text, sign
from kiln.schemas.wire.message_id import (
    canonical_id,
    format_gossip_id,
    is_key_form,
    is_text_form,
    key_form,
    text_form,
)
from kit.scripted_peers import gossip_id


def test_an_id_is_held_for_the_horizon_from_when_it_first_came() -> None:
    seen = SeenSet(horizon=120, cap=100)
    assert seen.add(b"a", -7, 3, 0.0)
    assert not seen.add(b"a", 2, 1, 100.0)
    seen.expire(119.9)
    assert seen.get(b"a") == (-7, 3)
    seen.expire(121.0)
    assert b"a" not in seen
    assert seen.add(b"a", 3, 1, 122.0)


def test_over_the_cap_the_oldest_go() -> None:
    seen = SeenSet(horizon=120, cap=3)
    for index in range(5):
        seen.add(b"%d" % index, index, 1, index * 0.4)
    assert [b"%d" % index in seen for index in range(5)] == [False, False, True, True, True]
    assert (len(seen), seen.evicted) == (3, 2)


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 5)), max_size=200), st.integers(1, 12))
def test_the_seen_set_keeps_its_bounds_and_forgets_nothing_early(events: list[tuple[int, float]], cap: int) -> None:
    seen = SeenSet(horizon=10, cap=cap)
    now = 0.0
    added: dict[bytes, float] = {}
    order: list[bytes] = []
    for number, step in events:
        now += step
        seen.expire(now)
        for key in [key for key, since in added.items() if now - since >= 11.01]:
            assert key not in seen
        key = b"%d" % number
        if seen.add(key, 0, 1, now):
            added[key] = now
            order.append(key)
        assert len(seen) <= cap
        for recent in dict.fromkeys(order[-cap:]):
            if now - added[recent] < 10:
                assert recent in seen


def test_a_message_is_kept_for_its_heartbeats_and_told_of_for_fewer() -> None:
    cache = MessageCache(length=5, gossip=3, cap=1000)
    cache.put(b"id", "t", b"data", True)
    for beat in range(5):
        assert (cache.gossip_ids("t") == [b"id"]) == (beat < 3)
        assert cache.get(b"id") is not None
        cache.shift()
    assert cache.get(b"id") is None
    assert (len(cache), cache.size) == (0, 0)


def test_ids_are_told_by_topic_newest_window_first() -> None:
    cache = MessageCache(length=3, gossip=2, cap=1000)
    cache.put(b"a", "t", b"", True)
    cache.put(b"b", "u", b"", True)
    cache.shift()
    cache.put(b"c", "t", b"", True)
    assert cache.gossip_ids("t") == [b"c", b"a"]
    assert cache.gossip_ids("u") == [b"b"]


def test_sendings_are_counted_per_peer_and_forgotten_with_the_message() -> None:
    cache = MessageCache(length=1, gossip=1, cap=1000)
    cache.put(b"a", "t", b"", True)
    assert [cache.count(b"a", b"p"), cache.count(b"a", b"p"), cache.count(b"a", b"q")] == [1, 2, 1]
    cache.shift()
    cache.put(b"a", "t", b"", True)
    assert cache.count(b"a", b"p") == 1


@given(st.lists(st.one_of(st.none(), st.integers(0, 60)), max_size=150))
def test_the_bytes_kept_stay_under_the_cap(events: list[int | None]) -> None:
    cache = MessageCache(length=4, gossip=2, cap=100)
    kept: list[tuple[bytes, int, int]] = []  # id, size, heartbeat
    beat = 0
    for number, size in enumerate(events):
        if size is None:
            cache.shift()
            beat += 1
        else:
            cache.put(b"%d" % number, "t", bytes(size), True)
            kept.append((b"%d" % number, size, beat))
        kept = [each for each in kept if beat - each[2] < 4]
        while sum(each[1] for each in kept) > 100:
            kept.pop(0)
        assert cache.size == sum(each[1] for each in kept)
        assert all(cache.get(key) for key, _, _ in kept)
        assert len(cache) == len(kept)
        assert set(cache.gossip_ids("t")) == {key for key, _, since in kept if beat - since < 2}


# ---------------------------------------------------------------- ids

KEYS: dict[str, PrivateKey] = {
    "ed25519": Ed25519PrivateKey.from_private_bytes(b"k" * 32),
    "secp256k1": ec.derive_private_key(7, ec.SECP256K1()),
    "ecdsa": ec.derive_private_key(7, ec.SECP256R1()),
    "rsa": rsa.generate_private_key(65537, 2048),
}


def signed(key: PrivateKey) -> Message:
    message = Message(data=b"data", seqno=(2**60 + 1).to_bytes(8, "big"), topic="t")
    sign(message, key)
    return message


def public_key(key: PrivateKey, message: Message) -> bytes:
    """The PublicKey protobuf: in the peer id, or attached."""
    return message.key if message.HasField("key") else compute_peer_id(key)[2:]


def test_an_unsigned_message_is_its_data() -> None:
    one, other = Message(data=b"data", topic="t"), Message(data=b"data", seqno=b"1", topic="u")
    assert gossip_id(one) == gossip_id(other)
    assert gossip_id(one).hex() == "3a6eb0790f39ac87c94f3856b2dd2c5d110e6811602261a9a923d3bb23adc8b7"
    assert format_gossip_id(gossip_id(one)) == message_id(one)


@pytest.mark.parametrize("kind", KEYS)
def test_both_forms_of_an_id_are_one(kind: str) -> None:
    message = signed(KEYS[kind])
    canonical = gossip_id(message)
    assert canonical == compute_peer_id(KEYS[kind]) + message.seqno
    other = public_key(KEYS[kind], message) + message.seqno
    assert PublicKey.FromString(other[:-8]).HasField("Data")
    assert is_key_form(other)
    assert not is_key_form(canonical)
    assert canonical_id(other) == canonical
    assert canonical_id(canonical) == canonical
    assert {format_gossip_id(each) for each in (canonical, other)} == {message_id(message)}
    assert key_form(canonical) == (other if kind in ("ed25519", "secp256k1") else canonical)


@pytest.mark.parametrize("seqno", [b"\7", b"\7" * 7, b"\7" * 9])
@pytest.mark.parametrize("kind", KEYS)
def test_a_seqno_in_an_id_may_have_any_length(kind: str, seqno: bytes) -> None:
    other = public_key(KEYS[kind], signed(KEYS[kind])) + seqno
    assert canonical_id(other) == compute_peer_id(KEYS[kind]) + seqno


def test_the_id_with_the_longest_seqno_is_that_of_its_message() -> None:
    message = signed(KEYS["ed25519"])
    message.seqno = b"\7" * MAX_SEQNO
    assert format_gossip_id(gossip_id(message)) == message_id(message)


@pytest.mark.parametrize(("size", "is_in_id"), [(42, True), (43, False)])
def test_a_key_of_up_to_42_bytes_is_in_the_peer_id(size: int, is_in_id: bool) -> None:
    """libp2p specs, peer-ids.md, Peer Ids."""
    key = b"\x08\1\x12" + bytes([size - 4]) + b"k" * (size - 4)
    peer = b"\0" + bytes([size]) + key if is_in_id else b"\x12\x20" + sha256(key).digest()
    assert canonical_id(key + b"seqno") == peer + b"seqno"


@pytest.mark.parametrize(
    "raw",
    [
        *(pytest.param(public_key(key, signed(key)), id=f"{kind} without a seqno") for kind, key in KEYS.items()),
        pytest.param(b"\x08\1\x12\x1f" + b"k" * 31 + b"s" * 8, id="a key of 31 bytes"),
        pytest.param(b"\x08\1\x12\x7f" + b"k" * 40, id="a key cut short"),
        pytest.param(b"\x08\4\x12\x20" + b"k" * 32 + b"s" * 8, id="a key of an unknown type"),
    ],
)
def test_an_id_that_only_begins_like_a_key_stays_as_it_is(raw: bytes) -> None:
    assert canonical_id(raw) == raw
    assert not is_key_form(raw)


@pytest.mark.parametrize("kind", KEYS)
@given(number=st.integers(0, 2**64 - 1))
def test_an_id_in_text_is_the_same(kind: str, number: int) -> None:
    peer = compute_peer_id(KEYS[kind])
    canonical = peer + number.to_bytes(8, "big")
    text = f"{peer_text(peer)}{number}".encode()
    assert is_text_form(text)
    assert not is_text_form(canonical)
    assert not is_key_form(text)
    assert canonical_id(text) == canonical
    assert text_form(canonical) == text
    assert format_gossip_id(text) == format_gossip_id(canonical) == f"{peer_text(peer)}/{number:016x}"


@pytest.mark.parametrize("number", ["", "00", "01", "-1", "1x", str(2**64), "9" * 30, "²"])
def test_a_text_that_is_no_seqno_is_an_id_of_its_own(number: str) -> None:
    text = (peer_text(compute_peer_id(KEYS["ed25519"])) + number).encode()
    assert canonical_id(text) == text
    assert not is_text_form(text)


TEXTS = st.tuples(
    st.sampled_from(["12D3KooW", "16Uiu2HA", "Qm"]), st.text("123456789ABCDEFGHJKLMNPQRSTUVWXYZ0", max_size=60)
)


@given(st.binary(max_size=80) | TEXTS.map(lambda parts: "".join(parts).encode()))
def test_any_bytes_have_one_canonical_form(raw: bytes) -> None:
    assert canonical_id(canonical_id(raw)) == canonical_id(raw)
    assert (is_key_form(raw) or is_text_form(raw)) == (canonical_id(raw) != raw)
    assert canonical_id(key_form(raw)) == canonical_id(raw)
    assert canonical_id(text_form(raw)) == canonical_id(raw)


@pytest.mark.parametrize("raw", [b"", b"id", b"\0" * 31, b"\0" * 33, b"\x12\x20" + b"p" * 32 + b"s" * 65])
def test_an_id_of_another_form_is_hex(raw: bytes) -> None:
    assert format_gossip_id(raw) == raw.hex()


@given(st.binary(max_size=300))
def test_the_text_of_an_id_is_bounded(raw: bytes) -> None:
    assert len(format_gossip_id(raw)) <= 2 * 128 + 1
