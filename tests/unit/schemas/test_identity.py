"""kiln.schemas.wire.identity: who wrote a message, and whether that is true."""

from __future__ import annotations

import hashlib
import json

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import VECTORS
from kiln.schemas.captures.kiln_capture import open_capture, read_capture
from kiln.schemas.kafka.frames import read_rpc
from kiln.schemas.proto.gossipsub import rpc_pb2
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.identity import (
    MAX_SEQNO,
    OVERSIZED,
    REASONS,
    PeerIdError,
    PrivateKey,
    Verdict,
    build_signed_bytes,
    check,
    compute_peer_id,
    message_id,
    parse_author,
    peer_bytes,
    peer_text,
    raw_peer,
    sign,
)
from kiln.schemas.wire.signing_policy import Policy

CAPTURES = VECTORS / "captures"
POLICIES: tuple[Policy, ...] = ("strict", "none", "either")
KEYS: dict[str, PrivateKey] = {
    "ed25519": Ed25519PrivateKey.from_private_bytes(bytes(range(32))),
    "secp256k1": ec.derive_private_key(0xC0FFEE, ec.SECP256K1()),
    "rsa": rsa.generate_private_key(65537, 2048),
    "ecdsa": ec.derive_private_key(0xC0FFEE, ec.SECP256R1()),
}
GOOD = (Verdict.VALID, "")


def signed(kind: str = "ed25519", data: bytes = b"hello", seqno: bytes = b"\x00" * 7 + b"\x01") -> rpc_pb2.Message:
    message = rpc_pb2.Message(data=data, seqno=seqno, topic="/ceramic/testnet-clay")
    sign(message, KEYS[kind])
    return message


def captured(name: str) -> list[rpc_pb2.Message]:
    messages: list[rpc_pb2.Message] = []
    with open_capture(CAPTURES / f"{name}.rpc.gz") as stream:
        for record in read_capture(stream):
            rpc = read_rpc(record.rpc)
            assert not isinstance(rpc, Rejected)
            if record.direction == "R":
                messages += rpc.publish
    return messages


# --- peer ids


def test_peer_ids_of_real_nodes_are_read_and_written() -> None:
    text = "12D3KooWJbGnfa4eDiQ75ipmVTu5HvekCykwqoqEyfwCiXgbrw9a"
    assert peer_text(peer_bytes(text)) == text
    assert peer_bytes(text)[:6] == bytes.fromhex("002408011220")


def test_a_peer_id_may_be_written_as_a_cid() -> None:
    """libp2p specs, peer-ids.md, String representation: its two example texts of one id."""
    assert peer_bytes("bafzbeie5745rpv2m6tjyuugywy4d5ewrqgqqhfnf445he3omzpjbx5xqxe") == peer_bytes(
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "Qm",
        "12D3KooW",
        "12D3KooWJbGnfa4eDiQ75ipmVTu5HvekCykwqoqEyfwCiXgbrw9b0",
        "bafy",
        "peer",
        "Qm€",
        "bafyreigdyrzt5sfp7udm7hu76uh7y26nf3efuylqabf3oclgtqy55fbzdi",
    ],
)
def test_what_is_not_a_peer_id_is_an_error_that_shows_it(text: str) -> None:
    with pytest.raises(PeerIdError, match="not a peer id"):
        peer_bytes(text)


@given(st.binary(min_size=32, max_size=32))
def test_peer_ids_round_trip(digest: bytes) -> None:
    raw = b"\x12\x20" + digest
    assert peer_bytes(peer_text(raw)) == raw
    assert peer_text(raw).startswith("Qm")


@pytest.mark.parametrize(("size", "is_hex"), [(1024, False), (1025, True)])
def test_a_peer_id_over_1024_bytes_is_in_hex(size: int, is_hex: bool) -> None:
    raw = b"\x7f" * size
    text = peer_text(raw)
    assert (text == "f" + raw.hex()) is is_hex
    assert raw_peer(text) == raw


def test_a_megabyte_of_peer_id_costs_no_time() -> None:
    assert peer_text(b"\xff" * 1_000_000) == "f" + "ff" * 1_000_000


def test_peer_ids_hold_the_keys_of_the_specification() -> None:
    """libp2p specs, peer-ids.md, Test vectors: private and public keys of one pair."""
    ed25519 = Ed25519PrivateKey.from_private_bytes(
        bytes.fromhex("7e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d")
    )
    encoded = "080112201ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    assert compute_peer_id(ed25519).hex() == "0024" + encoded
    secp256k1 = ec.derive_private_key(
        int("53dadf1d5a164d6b4acdb15e24aa4c5b1d3461bdbd42abedb0a4404d56ced8fb", 16), ec.SECP256K1()
    )
    encoded = "08021221037777e994e452c21604f91de093ce415f5432f701dd8cd1a7a6fea0e630bfca99"
    assert compute_peer_id(secp256k1).hex() == "0025" + encoded


# --- message ids


def test_a_signed_message_is_known_by_author_and_seqno() -> None:
    message = signed()
    assert message_id(message) == peer_text(compute_peer_id(KEYS["ed25519"])) + "/0000000000000001"
    message.data = b"other"
    assert message_id(message) == peer_text(compute_peer_id(KEYS["ed25519"])) + "/0000000000000001"


@pytest.mark.parametrize(("field", "limit"), [("from", 2048), ("seqno", MAX_SEQNO)])
def test_an_author_or_seqno_over_its_limit_is_hashed_in_an_id(field: str, limit: int) -> None:
    for size in (limit, limit + 1):
        message = signed()
        setattr(message, field, b"x" * size)
        assert message_id(message).startswith(OVERSIZED) is (size > limit)


def test_an_unsigned_message_is_known_by_its_data_alone() -> None:
    message = rpc_pb2.Message(data=b"abc", seqno=b"\x01", topic="t")
    assert message_id(message) == "sha256/" + hashlib.sha256(b"abc").hexdigest()


def test_the_author_in_the_id_of_a_message() -> None:
    peer = peer_text(compute_peer_id(KEYS["ed25519"]))
    assert parse_author(f"{peer}/0000000000000001") == peer
    for other in ("sha256/" + 64 * "0", "", "bep50/x", peer[:-1] + "/00"):
        assert parse_author(other) is None


# --- policies


@pytest.mark.parametrize("kind", KEYS)
def test_a_good_signature_is_good_except_where_none_may_be(kind: str) -> None:
    assert check(signed(kind), "strict")[:2] == GOOD
    assert check(signed(kind), "either")[:2] == GOOD
    assert check(signed(kind), "none")[:2] == (Verdict.AGAINST_POLICY, "unexpected_auth")


def test_an_unsigned_message_is_allowed_except_where_all_must_be_signed() -> None:
    message = rpc_pb2.Message(data=b"x", topic="t")
    assert check(message, "strict")[:2] == (Verdict.AGAINST_POLICY, "missing_signature")
    assert check(message, "either")[:2] == (Verdict.UNSIGNED, "")
    assert check(message, "none")[:2] == (Verdict.UNSIGNED, "")


@pytest.mark.parametrize("field", ["from", "seqno", "signature", "key"])
def test_under_none_any_trace_of_an_author_is_against_the_policy(field: str) -> None:
    message = rpc_pb2.Message(data=b"x", topic="t")
    setattr(message, field, b"")
    assert check(message, "none")[:2] == (Verdict.AGAINST_POLICY, "unexpected_auth")


@pytest.mark.parametrize("policy", ["strict", "either"])
@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("from", b"", "missing_from"),
        ("seqno", b"", "missing_seqno"),
        ("seqno", bytes(MAX_SEQNO + 1), "invalid_seqno"),
    ],
)
def test_a_signed_message_needs_what_its_id_is_made_of(policy: Policy, field: str, value: bytes, reason: str) -> None:
    message = signed()
    setattr(message, field, value)
    assert check(message, policy)[:2] == (Verdict.AGAINST_POLICY, reason)
    message.ClearField("from" if field == "from" else "seqno")
    assert check(message, policy).verdict == Verdict.AGAINST_POLICY


# --- signatures


def test_the_longest_seqno_is_accepted() -> None:
    assert check(signed(seqno=bytes(MAX_SEQNO)), "strict")[:2] == GOOD


@pytest.mark.parametrize("kind", KEYS)
@given(data=st.binary(max_size=100), seqno=st.binary(min_size=1, max_size=9), topic=st.text(max_size=20))
@settings(max_examples=25)
def test_what_is_signed_verifies(kind: str, data: bytes, seqno: bytes, topic: str) -> None:
    message = rpc_pb2.Message(data=data, seqno=seqno, topic=topic)
    sign(message, KEYS[kind])
    assert check(rpc_pb2.Message.FromString(message.SerializeToString()), "strict")[:2] == GOOD


@pytest.mark.parametrize("kind", KEYS)
@given(field=st.sampled_from(["from", "data", "seqno", "topic", "signature", "key"]), bit=st.integers(0, 10**6))
@settings(max_examples=60)
def test_any_flipped_bit_is_bad(kind: str, field: str, bit: int) -> None:
    message = signed(kind)
    value = getattr(message, field)
    raw = bytearray(value.encode() if isinstance(value, str) else value)
    if not raw:  # ed25519 and secp256k1 messages have no key
        return
    raw[bit // 8 % len(raw)] ^= 1 << bit % 8
    if field == "topic":
        message.ClearField("topic")
        message.MergeFromString(b"\x22" + bytes([len(raw)]) + bytes(raw))
    else:
        setattr(message, field, bytes(raw))
    verdict, reason, _ = check(message, "either")
    assert verdict is Verdict.INVALID
    assert reason in REASONS


@pytest.mark.parametrize("kind", ["ed25519", "rsa"])
def test_a_removed_or_added_field_is_bad(kind: str) -> None:
    for change in (b"\x38\x01", b"\xa2\x06\x01x"):  # a topic index, an unknown field
        message = signed(kind)
        message.MergeFromString(change)
        assert check(message, "strict")[:2] == (Verdict.INVALID, "bad_signature")
    message = signed(kind)
    message.ClearField("data")
    assert check(message, "strict")[:2] == (Verdict.INVALID, "bad_signature")


def test_unknown_fields_are_signed_too() -> None:
    message = rpc_pb2.Message(data=b"x", seqno=b"\x01", topic="t")
    message.MergeFromString(b"\xa2\x06\x03abc")
    sign(message, KEYS["ed25519"])
    assert build_signed_bytes(message).endswith(b"\xa2\x06\x03abc")
    assert check(message, "strict")[:2] == GOOD


def test_an_index_is_verified_over_the_name() -> None:
    message = rpc_pb2.Message(data=b"x", seqno=b"\x01", topic="/ceramic/a")
    sign(message, KEYS["ed25519"])
    message.ClearField("topic")
    message.topicIndex = 3
    assert check(message, "strict", "/ceramic/a")[:2] == GOOD
    assert check(message, "strict", "/ceramic/b")[:2] == (Verdict.INVALID, "bad_signature")
    assert check(message, "strict")[:2] == (Verdict.INVALID, "bad_signature")
    assert message.topicIndex == 3  # judging changes nothing
    assert not message.HasField("topic")


def test_the_key_must_be_the_author_s() -> None:
    message = signed("rsa")
    other = rpc_pb2.Message(data=b"hello", seqno=message.seqno, topic=message.topic)
    sign(other, KEYS["ecdsa"])
    message.key = other.key
    assert check(message, "strict")[:2] == (Verdict.INVALID, "bad_key")
    message.ClearField("key")
    assert check(message, "strict")[:2] == (Verdict.INVALID, "bad_key")


def test_a_key_beside_a_peer_id_that_holds_it_must_match_too() -> None:
    message = signed("ed25519")
    message.key = compute_peer_id(KEYS["ed25519"])[2:]
    assert check(message, "strict")[:2] == GOOD
    message.key = compute_peer_id(KEYS["secp256k1"])[2:]
    assert check(message, "strict")[:2] == (Verdict.INVALID, "bad_key")
    message.key = b""
    assert check(message, "strict")[:2] == (Verdict.INVALID, "bad_key")


def test_an_ed25519_author_under_its_sha2_256_is_known() -> None:
    key = KEYS["ed25519"]
    assert isinstance(key, Ed25519PrivateKey)
    encoded = compute_peer_id(key)[2:]
    message = rpc_pb2.Message(data=b"x", seqno=b"\x01", topic="t")
    setattr(message, "from", b"\x12\x20" + hashlib.sha256(encoded).digest())
    message.signature = key.sign(build_signed_bytes(message))
    assert check(message, "strict")[:2] == (Verdict.INVALID, "bad_key")
    message.key = encoded
    assert check(message, "strict")[:2] == GOOD


@pytest.mark.parametrize("bits", [1024, 2047, 8200])
def test_rsa_keys_out_of_range_are_refused(bits: int) -> None:
    """8,200 bits: made of no primes, a public key is all a peer shows; a good signature could not be made in time."""
    if bits == 8200:
        public = rsa.RSAPublicNumbers(65537, (1 << 8199) + 1).public_key()
        signature = bytes(1025)
        author, key = _rsa_author(public)
        message = rpc_pb2.Message(data=b"x", seqno=b"\x01", topic="t", key=key, signature=signature)
        setattr(message, "from", author)
    else:
        private = rsa.generate_private_key(65537, bits)
        author, key = _rsa_author(private.public_key())
        message = rpc_pb2.Message(data=b"x", seqno=b"\x01", topic="t", key=key)
        setattr(message, "from", author)
        message.signature = private.sign(build_signed_bytes(message), padding.PKCS1v15(), hashes.SHA256())
    assert check(message, "strict")[:2] == (Verdict.INVALID, "bad_key")


def _rsa_author(public: rsa.RSAPublicKey) -> tuple[bytes, bytes]:
    der = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    key = rpc_pb2.PublicKey(Type=rpc_pb2.PublicKey.RSA, Data=der).SerializeToString()
    return b"\x12\x20" + hashlib.sha256(key).digest(), key


def test_a_key_in_another_encoding_is_not_a_second_identity() -> None:
    """PKCS#1 holds the same RSA key as PKIX; go-libp2p writes and hashes PKIX only."""
    private = KEYS["rsa"]
    assert isinstance(private, rsa.RSAPrivateKey)
    der = private.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.PKCS1)
    key = rpc_pb2.PublicKey(Type=rpc_pb2.PublicKey.RSA, Data=der).SerializeToString()
    message = rpc_pb2.Message(data=b"x", seqno=b"\x01", topic="t", key=key)
    setattr(message, "from", b"\x12\x20" + hashlib.sha256(key).digest())
    message.signature = private.sign(build_signed_bytes(message), padding.PKCS1v15(), hashes.SHA256())
    assert check(message, "strict")[:2] == (Verdict.INVALID, "bad_key")


key_protobufs = st.builds(
    lambda kind, data: b"\x08" + bytes([kind]) + b"\x12" + bytes([len(data)]) + data,
    st.integers(0, 5),
    st.one_of(st.binary(max_size=64), st.binary(min_size=32, max_size=33), st.just(b"\x02" + b"\xff" * 32)),
)


@given(
    author=st.one_of(
        st.binary(max_size=80), key_protobufs.map(lambda key: bytes([0, len(key)]) + key), st.just(b"\xff" * 3000)
    ),
    key=st.none() | st.binary(max_size=100) | key_protobufs,
    signature=st.binary(max_size=80),
    rest=st.binary(max_size=40),
)
@settings(max_examples=500)
def test_no_bytes_raise_and_none_are_good_by_chance(
    author: bytes, key: bytes | None, signature: bytes, rest: bytes
) -> None:
    message = rpc_pb2.Message(data=rest, seqno=b"\x01", signature=signature)
    setattr(message, "from", author)
    if key is not None:
        message.key = key
    assert message_id(message)
    for policy in POLICIES:
        verdict, reason, _ = check(message, policy)
        assert verdict in (Verdict.INVALID, Verdict.AGAINST_POLICY)
        assert reason in REASONS


@given(st.binary(max_size=200))
def test_random_messages_get_a_verdict(raw: bytes) -> None:
    rpc = read_rpc(b"\x12" + bytes([len(raw) & 0x7F]) + raw[:127])
    if isinstance(rpc, rpc_pb2.RPC):
        for message in rpc.publish:
            message_id(message)
            for policy in POLICIES:
                check(message, policy)


# --- made by others' software


def test_every_signature_of_the_topic_table_capture_is_good_over_the_name_only() -> None:
    messages = captured("go4tt")
    topics = sorted(json.loads((CAPTURES / "go4tt.meta.json").read_text())["topics"], key=str.encode)
    assert len(messages) == 853
    for message in messages:
        assert not message.HasField("topic")
        name = topics[message.topicIndex - 1]
        assert check(message, "strict", name)[:2] == GOOD
        assert check(message, "strict", topics[message.topicIndex % len(topics)]).verdict == Verdict.INVALID
        assert check(message, "strict").verdict == Verdict.INVALID


def test_the_unsigned_capture_is_unsigned() -> None:
    messages = captured("go4nosign")
    assert messages
    for message in messages:
        assert check(message, "none")[:2] == (Verdict.UNSIGNED, "")
        assert check(message, "either")[:2] == (Verdict.UNSIGNED, "")
        assert check(message, "strict")[:2] == (Verdict.AGAINST_POLICY, "missing_signature")
