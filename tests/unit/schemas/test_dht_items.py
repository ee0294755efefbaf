"""Mutable items (BEP 44), node ids (BEP 42), and the value that announces a batch."""

from __future__ import annotations

import hashlib
import json

import nacl.bindings
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nacl.signing import SigningKey

from conftest import VECTORS
from kiln.schemas.dht import bencode
from kiln.schemas.dht.announcement import (
    MAX_ANNOUNCEMENT,
    REASONS,
    Announcement,
    ReceivedAnnouncement,
    compute_next_sequence,
    compute_salt,
    find_missed_batches,
    read_announcement,
    read_datagram,
    write_announcement,
)
from kiln.schemas.dht.bencode import BencodeError, Value
from kiln.schemas.dht.items import (
    MAX_SEQUENCE,
    Item,
    ItemError,
    build_item_fields,
    build_put_fields,
    build_signed_bytes,
    compute_target,
    find_refusal,
    is_signed,
    read_item,
    sign,
)
from kiln.schemas.dht.krpc import (
    BAD_ARGUMENTS,
    BAD_SEQUENCE,
    BAD_SIGNATURE,
    SALT_TOO_BIG,
    VALUE_TOO_BIG,
    KrpcError,
    KrpcQuery,
    KrpcRefusal,
    KrpcResponse,
    write_message,
)
from kiln.schemas.dht.node_id import compute_bound_id, compute_distance, count_shared_bits, is_exempt
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.cid import CidError, cid_bytes, compute_cid
from kiln.schemas.wire.topics import Separator

KEY = SigningKey(b"\x01" * 32)


def sign_expanded(expanded: bytes, message: bytes) -> bytes:
    """Ed25519 with the expanded private key (scalar, then prefix), as BEP 44's vectors give it (RFC 8032, 5.1.6)."""
    scalar, prefix = expanded[:32], expanded[32:]
    public = nacl.bindings.crypto_scalarmult_ed25519_base_noclamp(scalar)
    reduce_ = nacl.bindings.crypto_core_ed25519_scalar_reduce
    r = reduce_(hashlib.sha512(prefix + message).digest())
    point = nacl.bindings.crypto_scalarmult_ed25519_base_noclamp(r)
    h = reduce_(hashlib.sha512(point + public + message).digest())
    # The scalar is clamped, not reduced: the product takes either.
    product = nacl.bindings.crypto_core_ed25519_scalar_mul(h, scalar)
    return point + nacl.bindings.crypto_core_ed25519_scalar_add(r, product)


# ---------------------------------------------------------------- items


@pytest.mark.parametrize("name", ["mutable", "mutable_salt"])
def test_bep44_vectors(name: str) -> None:
    vectors = json.loads((VECTORS / "bittorrent/vectors.json").read_text())["bep44"]
    vector, key = vectors[name], bytes.fromhex(vectors["public_key"])
    salt, value, signature = vector["salt"].encode(), vector["value"].encode(), bytes.fromhex(vector["signature"])
    assert build_signed_bytes(salt, vector["seq"], value) == vector["signed"].encode()
    assert compute_target(key, salt).hex() == vector["target"]
    item = Item(key, salt, vector["seq"], value, signature)
    assert find_refusal(item) is None
    assert sign_expanded(bytes.fromhex(vectors["private_key"]), vector["signed"].encode()) == signature
    assert find_refusal(Item(key, salt + b"x", vector["seq"], value, signature)) == BAD_SIGNATURE
    assert find_refusal(Item(key, salt, vector["seq"] + 1, value, signature)) == BAD_SIGNATURE
    assert find_refusal(Item(key, salt, vector["seq"], b"12:Hello world!", signature)) == BAD_SIGNATURE


PUBLISHED = bytes.fromhex("77ff84905a91936367c01360803104f92432fcd904a43511876df5cdf3e7e548")
"""The public key of BEP 44's test vectors."""


def test_a_target_is_the_sha1_of_key_and_salt() -> None:
    assert compute_target(PUBLISHED).hex() == "4a533d47ec9c7d95b1ad75f576cffc641853b750"
    assert compute_target(PUBLISHED, b"foobar").hex() == "411eba73b6f087ca51a3795d9c8c938d365e32c1"


def test_a_signature_is_that_of_bep_44s_bytes() -> None:
    assert build_signed_bytes(b"", 1, b"12:Hello World!") == b"3:seqi1e1:v12:Hello World!"
    assert build_signed_bytes(b"foobar", 1, b"12:Hello World!") == b"4:salt6:foobar3:seqi1e1:v12:Hello World!"
    signature = bytes.fromhex(
        "6834284b6b24c3204eb2fea824d82f88883a3d95e8b4a21b8c0ded553d17d17d"
        "df9a8a7104b1258f30bed3787e6cb896fca78c58f8e03b5f18f14951a87d9a08"
    )
    assert is_signed(Item(PUBLISHED, b"foobar", 1, b"12:Hello World!", signature))


def test_bep44_error_codes() -> None:
    codes = json.loads((VECTORS / "bittorrent/vectors.json").read_text())["bep44"]["errors"]
    ours = {BAD_ARGUMENTS: 203, VALUE_TOO_BIG: 205, BAD_SIGNATURE: 206, SALT_TOO_BIG: 207}
    assert {each.code for each in ours} <= set(map(int, codes))
    assert all(each.code == code for each, code in ours.items())


def test_bep50_batch_vector() -> None:
    """The value layout, its salt, target and signature, byte for byte."""
    vector = json.loads((VECTORS / "bittorrent/vectors_bep50.json").read_text())["batch_announcement"]
    bep44 = json.loads((VECTORS / "bittorrent/vectors.json").read_text())["bep44"]
    key, value, salt = bytes.fromhex(bep44["public_key"]), bytes.fromhex(vector["v"]), bytes.fromhex(vector["salt"])
    fields = bencode.decode(value)
    assert isinstance(fields, dict)
    name = bytes(fields[b"sep"]) if isinstance(fields[b"sep"], bytes) else b""
    separator = Separator(*name.decode().rsplit("/", 1))
    networks = [
        each for each in ("mainnet", "testnet-clay", "local", "dev-unstable") if compute_salt(each, separator) == salt
    ]
    assert len(networks) == 1
    read = read_announcement(value, networks[0], salt)
    assert isinstance(read, Announcement)
    assert (read.time_ms, read.count, len(read.previous)) == (1_700_000_000_000, 250, 2)
    assert write_announcement(read) == value
    signed = build_signed_bytes(salt, vector["seq"], value)
    assert signed.hex() == vector["signed"]
    assert sign_expanded(bytes.fromhex(bep44["private_key"]), signed).hex() == vector["sig"]
    item = Item(key, salt, vector["seq"], value, bytes.fromhex(vector["sig"]))
    assert find_refusal(item) is None
    assert item.target.hex() == vector["c"]


values: st.SearchStrategy[Value] = st.recursive(
    st.integers() | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.binary(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(values, st.binary(max_size=64), st.integers(0, MAX_SEQUENCE))
def test_a_signed_item_survives_the_wire(value: Value, salt: bytes, sequence: int) -> None:
    written = bencode.encode(value)
    if len(written) > 1000:
        return
    item = sign(KEY, salt, sequence, written)
    sent = bencode.encode(build_put_fields(item))
    received = bencode.decode(sent)
    assert isinstance(received, dict)
    assert read_item(received) == item
    assert find_refusal(item) is None
    assert (b"salt" in received) == bool(salt)


@given(st.integers(0, 63), st.integers(1, 255))
def test_no_other_signature_is_taken(at: int, flip: int) -> None:
    item = sign(KEY, b"s", 1, b"i1e")
    other = bytearray(item.signature)
    other[at] ^= flip
    assert not is_signed(Item(item.key, item.salt, item.sequence, item.value, bytes(other)))


def test_limits_are_told_before_the_signature() -> None:
    good = sign(KEY, b"s" * 64, 7, b"996:" + b"x" * 996)
    assert len(good.value) == 1000
    assert find_refusal(good) is None
    zeros = b"\x00" * 64
    assert find_refusal(Item(good.key, b"s" * 65, 7, good.value, zeros)) == SALT_TOO_BIG
    assert find_refusal(Item(good.key, b"s", 7, b"997:" + b"x" * 997, zeros)) == VALUE_TOO_BIG
    assert find_refusal(Item(good.key, b"s", -1, b"i1e", zeros)) == BAD_SEQUENCE
    assert find_refusal(Item(good.key, b"s", MAX_SEQUENCE + 1, b"i1e", zeros)) == BAD_SEQUENCE
    assert find_refusal(Item(good.key, b"s", MAX_SEQUENCE, b"i1e", zeros)) == BAD_SIGNATURE
    assert find_refusal(Item(b"\xff" * 32, b"s", 7, b"i1e", zeros)) == BAD_SIGNATURE
    with pytest.raises(ItemError, match="value too big") as error:
        sign(KEY, b"s", 1, b"997:" + b"x" * 997)
    assert error.value.refusal == VALUE_TOO_BIG
    with pytest.raises(BencodeError):
        sign(KEY, b"s", 1, b"i01e")


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("k", b"x" * 31),
        ("k", 1),
        ("sig", b"x" * 63),
        ("sig", None),
        ("seq", b"1"),
        ("seq", None),
        ("salt", 1),
        ("v", None),
    ],
)
def test_a_field_that_is_wrong_is_an_argument_error(key: str, wrong: Value | None) -> None:
    fields = build_put_fields(sign(KEY, b"s", 1, b"i1e"))
    if wrong is None:
        del fields[key.encode()]
    else:
        fields[key.encode()] = wrong
    found = read_item(fields)
    assert isinstance(found, KrpcRefusal)
    assert found.code == 203


# ---------------------------------------------------------------- node ids


def test_bep42_vectors() -> None:
    for host, last, expected in json.loads((VECTORS / "bittorrent/vectors.json").read_text())["bep42"]:
        ip, node = bytes(map(int, host.split("."))), bytes.fromhex(expected)
        assert node[-1] == last
        assert compute_bound_id(ip, node) == node
        for other in (bytes([node[0] ^ 1]) + node[1:], node[:-1] + bytes([node[-1] ^ 1])):
            assert compute_bound_id(ip, other) != other


@given(st.binary(min_size=4, max_size=4) | st.binary(min_size=16, max_size=16), st.binary(min_size=20, max_size=20))
def test_a_bound_id_is_bound_and_keeps_the_rest_of_its_chance(ip: bytes, entropy: bytes) -> None:
    node = compute_bound_id(ip, entropy)
    assert compute_bound_id(ip, node) == node
    assert node[3:] == entropy[3:]
    assert node[2] & 7 == entropy[2] & 7


def test_addresses_without_global_scope_are_exempt() -> None:
    for ip in [[127, 0, 0, 1], [10, 1, 2, 3], [192, 168, 1, 1], [172, 31, 0, 1], [169, 254, 1, 1]]:
        assert is_exempt(bytes(ip))
    assert is_exempt(b"\x00" * 15 + b"\x01")
    assert not is_exempt(bytes([172, 32, 0, 1]))
    assert not is_exempt(bytes.fromhex("20010db8000000000000000000000001"))


def test_distance_is_xor() -> None:
    one, other = b"\xff" * 20, b"\xff" * 19 + b"\xf0"
    assert compute_distance(one, other) == compute_distance(other, one) == 15
    assert count_shared_bits(one, other) == 156
    assert count_shared_bits(one, one) == 160
    assert count_shared_bits(one, b"\x00" * 20) == 0


# ---------------------------------------------------------------- announcements

SEPARATOR = Separator("model", "kh4q0ozorrgaq2mezktnrmdwleo1d")
SALT = compute_salt("testnet", SEPARATOR)


def cid(number: int) -> bytes:
    return compute_cid(number.to_bytes(4, "big"))


cids = st.integers(0, 10_000).map(cid) | st.sampled_from([cid_bytes("QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWnPbdG")])
announcements = st.builds(
    Announcement,
    st.just(SEPARATOR),
    cids,
    st.integers(0, 2**63 - 1),
    st.lists(cids, max_size=15).map(tuple),
    st.none() | st.integers(0, 2**63 - 1),
)


@given(announcements, st.booleans())
def test_an_announcement_is_read_as_written(announcement: Announcement, in_a_string: bool) -> None:
    value = write_announcement(announcement)
    if in_a_string:  # all that libtorrent's Python binding and the crate mainline can put
        value = bencode.encode(value)
    assert read_announcement(value, "testnet", SALT) == announcement


def test_the_layout_of_a_value() -> None:
    """Other programs read these bytes, and find the item under this salt."""
    separator = Separator("model", "k01")
    first, second, third = (b"\x01\x71\x12\x20" + bytes([number]) * 32 for number in (1, 2, 3))
    assert write_announcement(Announcement(separator, first, 1_700_000_000_000)) == (
        b"d5:batch36:" + first + b"3:sep9:model/k012:tsi1700000000000e3:typi3ee"
    )
    assert write_announcement(Announcement(separator, first, 5, (second, third), 7)) == (
        b"d5:batch36:" + first + b"1:ni7e4:prev72:" + second + third + b"3:sep9:model/k012:tsi5e3:typi3ee"
    )
    assert compute_salt("mainnet", separator) == hashlib.sha256(b"/ceramic/mainnet/sep/model/k01").digest()


def test_as_many_earlier_batches_as_fit_are_named_the_newest_first() -> None:
    long = Separator("model", "k" + "1" * 62)
    announcement = Announcement(long, cid(100), 1_700_000_000_000, tuple(map(cid, range(99, 0, -1))), 250)
    value = write_announcement(announcement)
    read = read_announcement(value, "testnet", compute_salt("testnet", long))
    assert isinstance(read, Announcement)
    assert read.previous == tuple(map(cid, range(99, 77, -1)))  # 22
    assert MAX_ANNOUNCEMENT - 36 < len(value) <= MAX_ANNOUNCEMENT
    with pytest.raises(ValueError, match="no room"):
        write_announcement(Announcement(Separator("\U0001f511" * 224, "k" + "1" * 400), cid(1), 0))
    with pytest.raises(CidError):
        write_announcement(Announcement(SEPARATOR, b"no cid", 0))


def changed(**fields: Value | None) -> bytes:
    base: dict[bytes, Value] = {b"batch": cid(1), b"sep": f"model/{SEPARATOR.value}".encode(), b"ts": 1, b"typ": 3}
    for key, value in fields.items():
        if value is None:
            del base[key.encode()]
        else:
            base[key.encode()] = value
    return bencode.encode(base)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"i01e", "not_bencoded"),
        (b"5:i01ee", "not_bencoded"),
        (b"i1e", "not_an_announcement"),
        (changed(typ=0), "not_an_announcement"),
        (changed(typ=None), "not_an_announcement"),
        (changed(batch=b"x"), "bad_batch"),
        (changed(batch=cid(1) + b"x"), "bad_batch"),
        (changed(batch=None), "bad_batch"),
        (changed(prev=cid(1)[:-1]), "bad_prev"),
        (changed(prev=[cid(1)]), "bad_prev"),
        (changed(ts=-1), "bad_ts"),
        (changed(ts=None), "bad_ts"),
        (changed(n=b"1"), "bad_n"),
        (changed(sep=b"model"), "bad_separator"),
        (changed(sep=b"\xff/k1"), "bad_separator"),
        (changed(sep=1), "bad_separator"),
        (changed(sep=b"model/kother"), "wrong_salt"),
    ],
)
def test_what_is_no_announcement_has_a_reason(value: bytes, reason: str) -> None:
    found = read_announcement(value, "testnet", SALT)
    assert isinstance(found, Rejected)
    assert found.reason == reason
    assert reason in REASONS


def test_a_value_cannot_claim_another_separator_or_network() -> None:
    value = write_announcement(Announcement(SEPARATOR, cid(1), 1))
    for network, salt in [("mainnet", SALT), ("testnet", compute_salt("testnet", Separator("model", "k1")))]:
        found = read_announcement(value, network, salt)
        assert isinstance(found, Rejected)
        assert found.reason == "wrong_salt"


def test_the_number_of_a_network_is_read_beside_the_usual_ones() -> None:
    for typ in (3, 4, 9):
        value = write_announcement(Announcement(SEPARATOR, cid(1), 1), typ)
        assert isinstance(read_announcement(value, "testnet", SALT, typ=9), Announcement)
    assert isinstance(read_announcement(value, "testnet", SALT), Rejected)


@given(st.binary(max_size=100))
def test_no_value_raises(value: bytes) -> None:
    read_announcement(value, "testnet", SALT)


def datagram(item: Item, *, put: bool = True, topic: bytes | None = None) -> bytes:
    if put:
        return write_message(KrpcQuery(b"tt", b"put", b"i" * 20, {**build_put_fields(item), b"token": b"t"}, topic))
    return write_message(KrpcResponse(b"tt", b"i" * 20, {**build_item_fields(item), b"token": b"t"}, topic))


@pytest.mark.parametrize("put", [True, False])
@pytest.mark.parametrize("with_topic", [True, False])
def test_a_captured_datagram_is_read_and_verified(put: bool, with_topic: bool) -> None:
    announcement = Announcement(SEPARATOR, cid(5), 1, (cid(4),))
    value = write_announcement(announcement)
    item = sign(KEY, SALT, 7, value)
    topic = item.target if with_topic else None
    assert read_datagram(datagram(item, put=put, topic=topic), "testnet") == ReceivedAnnouncement(item, announcement)

    def reason(other: Item, topic: bytes | None, network: str = "testnet") -> str:
        found = read_datagram(datagram(other, put=put, topic=topic), network)
        assert isinstance(found, Rejected)
        assert found.reason in REASONS
        return found.reason

    unsigned = Item(item.key, SALT, 7, value, b"\x00" * 64)
    assert reason(unsigned, topic) == "bad_signature"
    assert reason(Item(item.key, SALT, -1, value, item.signature), topic) == "beyond_limits"
    assert reason(sign(KEY, SALT, 7, b"i1e"), topic) == "not_an_announcement"
    # An announcement of this separator, well signed but under the salt of another, or of another network:
    elsewhere = sign(KEY, compute_salt("testnet", Separator("model", "k1")), 7, value)
    expected = "wrong_salt" if put else "wrong_topic" if with_topic else "bad_signature"
    assert reason(elsewhere, elsewhere.target if with_topic else None) == expected
    assert reason(item, topic, "mainnet") == expected
    if with_topic:
        assert reason(item, b"\x07" * 20) == "wrong_topic"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not_krpc"),
        (write_message(KrpcError(b"tt", BAD_ARGUMENTS)), "not_krpc"),
        (write_message(KrpcResponse(b"tt", b"i" * 20, {b"seq": 7})), "no_item"),
        (write_message(KrpcQuery(b"tt", b"put", b"i" * 20, {b"v": b"immutable"})), "no_item"),
    ],
)
def test_a_datagram_without_an_announcement_has_a_reason(data: bytes, reason: str) -> None:
    found = read_datagram(data, "testnet")
    assert isinstance(found, Rejected)
    assert found.reason == reason


def test_a_reader_sees_what_it_missed() -> None:
    newest = Announcement(SEPARATOR, cid(5), 1, (cid(4), cid(3), cid(2)))
    assert find_missed_batches(newest, cid(5)) == ((), False)
    assert find_missed_batches(newest, cid(4)) == ((cid(5),), False)
    assert find_missed_batches(newest, cid(2)) == ((cid(3), cid(4), cid(5)), False)
    assert find_missed_batches(newest, cid(1)) == ((cid(2), cid(3), cid(4), cid(5)), True)
    assert find_missed_batches(newest, None) == ((cid(2), cid(3), cid(4), cid(5)), False)


def test_sequences_rise_over_restarts_and_clocks_put_back() -> None:
    assert compute_next_sequence(1_700_000_000_000, None) == 1_700_000_000_000
    assert compute_next_sequence(1_700_000_000_000, 5) == 1_700_000_000_000
    assert compute_next_sequence(5, 1_700_000_000_000) == 1_700_000_000_001
    assert compute_next_sequence(7, 7) == 8
