"""kiln.schemas.wire.public_key: strangers' keys, read at a cost that is bounded; a loader of any key agrees on the good
ones."""

from __future__ import annotations

import hashlib
import tracemalloc
from random import Random

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln.schemas.proto.gossipsub.rpc_pb2 import Message, PublicKey
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.identity import Verdict, build_ed25519_peer_id, check, peer_text, raw_peer
from kiln.schemas.wire.public_key import (
    BAD_KEY,
    KEY_ALGORITHM,
    MAX_RSA_EXPONENT,
    estimate_signature_cost,
    read_public_key,
)
from kit.cpu_time import count_steps
from kit.key_bytes import KEY_ATTACKS, REFUSED_RSA, integer, public_key, rsa_key, sequence, tlv

MOST_STEPS = 1e6  # of CPU that one message may cost; what is measured is a hundred times less
CURVES: tuple[ec.EllipticCurve, ...] = (ec.SECP224R1(), ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1())


def message_with(kind: PublicKey.KeyType.ValueType, data: bytes, field: str) -> Message:
    """A message whose author has this key, in the field `key` or within the peer id itself."""
    encoded = public_key(kind, data)
    message = Message(data=b"x", seqno=b"\x01", topic="t", signature=bytes(64))
    size = bytes((len(encoded) & 0x7F | 0x80, len(encoded) >> 7)) if len(encoded) > 127 else bytes((len(encoded),))
    author = b"\x00" + size + encoded
    if field == "key":
        message.key = encoded
        author = b"\x12\x20" + hashlib.sha256(encoded).digest()
    setattr(message, "from", author)  # a keyword in Python
    return message


def spki(key: rsa.RSAPublicKey | ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


@pytest.mark.parametrize("field", ["key", "from"])
@pytest.mark.parametrize(("name", "kind", "data"), KEY_ATTACKS, ids=[name for name, _, _ in KEY_ATTACKS])
def test_a_key_of_another_algorithm_than_its_type_costs_nothing(
    name: str, kind: PublicKey.KeyType.ValueType, data: bytes, field: str
) -> None:
    message = message_with(kind, data, field)
    judged: list[tuple[Verdict, str]] = []
    assert count_steps(lambda: judged.append(check(message, "strict")[:2])) < MOST_STEPS
    assert judged == [(Verdict.INVALID, "key_algorithm")]


@pytest.mark.parametrize(("name", "data"), REFUSED_RSA, ids=[name for name, _ in REFUSED_RSA])
def test_rsa_keys_out_of_bounds_are_refused_and_cost_nothing(name: str, data: bytes) -> None:
    message = message_with(PublicKey.RSA, data, "key")
    judged: list[tuple[Verdict, str]] = []
    assert count_steps(lambda: judged.append(check(message, "strict")[:2])) < MOST_STEPS
    assert judged == [(Verdict.INVALID, "bad_key")]


# --- the same keys as a loader of any kind of key


@given(st.binary(min_size=32, max_size=32))
def test_any_32_bytes_are_an_ed25519_key(raw: bytes) -> None:
    key = read_public_key(PublicKey.Ed25519, raw)
    assert isinstance(key, Ed25519PublicKey)
    assert key.public_bytes_raw() == raw


@given(st.integers(1, 2**256 - 2**32), st.booleans())
@settings(max_examples=50)
def test_secp256k1_points_are_read_in_both_forms(secret: int, compressed: bool) -> None:
    curve = ec.SECP256K1()
    public = ec.derive_private_key(secret % 2**255 + 1, curve).public_key()
    form = PublicFormat.CompressedPoint if compressed else PublicFormat.UncompressedPoint
    key = read_public_key(PublicKey.Secp256k1, public.public_bytes(Encoding.X962, form))
    assert key == public


@given(st.sampled_from(CURVES), st.integers(1, 2**200))
@settings(max_examples=100)
def test_points_on_named_curves_are_the_loaders(curve: ec.EllipticCurve, secret: int) -> None:
    data = spki(ec.derive_private_key(secret, curve).public_key())
    assert read_public_key(PublicKey.ECDSA, data) == load_der_public_key(data)


@given(
    st.integers(2048, 8192),
    st.integers(1, MAX_RSA_EXPONENT // 2 - 1).map(lambda half: 2 * half + 1),
    st.randoms(use_true_random=False),
)
@settings(max_examples=100)
def test_rsa_keys_are_the_loaders(bits: int, exponent: int, rng: Random) -> None:
    modulus = rng.getrandbits(bits) | 1 << bits - 1 | 1
    data = rsa_key(modulus, exponent)
    key = load_der_public_key(data)
    assert isinstance(key, rsa.RSAPublicKey)
    assert spki(key) == data
    assert read_public_key(PublicKey.RSA, data) == key


VALID: tuple[tuple[PublicKey.KeyType.ValueType, bytes], ...] = (
    *((PublicKey.ECDSA, spki(ec.derive_private_key(0xC0FFEE, curve).public_key())) for curve in CURVES),
    *((PublicKey.RSA, rsa_key(Random(bits).getrandbits(bits) | 1 << bits - 1 | 1)) for bits in (2048, 4096, 8192)),
)
STRANGE = tuple((kind, data) for _, kind, data in KEY_ATTACKS)


@given(
    st.sampled_from(VALID + STRANGE),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4),
    st.integers(0, 40),
    st.binary(max_size=5),
)
@settings(deadline=None)
def test_bytes_that_are_nearly_a_key_cost_nothing_and_a_key_has_one_encoding(
    valid: tuple[PublicKey.KeyType.ValueType, bytes], changes: list[tuple[int, int]], cut: int, more: bytes
) -> None:
    kind, data = valid[0], bytearray(valid[1])
    for place, value in changes:
        data[place % len(data)] = value
    raw = bytes(data[: len(data) - cut]) + more
    read: list[object] = []
    assert count_steps(lambda: read.append(read_public_key(kind, raw))) < MOST_STEPS
    key = read[0]
    if isinstance(key, rsa.RSAPublicKey | ec.EllipticCurvePublicKey):
        assert spki(key) == raw
        assert load_der_public_key(raw) == key
    else:
        assert isinstance(key, Rejected)
        assert key.reason in (BAD_KEY, KEY_ALGORITHM)


@given(st.integers(0, 4), st.binary(max_size=2000))
@settings(deadline=None)
def test_any_bytes_cost_nothing(kind: int, raw: bytes) -> None:
    assert count_steps(lambda: read_public_key(kind, raw)) < MOST_STEPS


N = (1 << 2047) + 1
ALGORITHM = bytes.fromhex("300d06092a864886f70d0101010500")
BODY = sequence(integer(N), integer(65537))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x30",
        BODY,  # PKCS#1
        sequence(ALGORITHM, tlv(0x03, b"\x01" + BODY)),  # unused bits
        sequence(ALGORITHM, tlv(0x03, b"\x00" + BODY + b"\x00")),  # something after it
        sequence(ALGORITHM, tlv(0x03, b"\x00" + BODY), b"\x05\x00"),
        sequence(ALGORITHM, tlv(0x03, b"\x00" + BODY)) + b"\x00",
        sequence(ALGORITHM, tlv(0x03, b"\x00" + sequence(tlv(2, b"\x00\x00" + N.to_bytes(256)), integer(3)))),
        sequence(ALGORITHM, tlv(0x03, b"\x00" + sequence(tlv(2, N.to_bytes(256)), integer(3)))),  # negative
        sequence(ALGORITHM, tlv(0x03, b"\x00" + sequence(integer(N), tlv(2, b"")))),
        sequence(ALGORITHM, tlv(0x03, b"\x00" + sequence(integer(N), integer(3), integer(3)))),
        b"\x30\x80" + ALGORITHM + tlv(0x03, b"\x00" + BODY) + b"\x00\x00",  # BER: indefinite length
        b"\x30\x83\x00\x01\x22" + ALGORITHM + tlv(0x03, b"\x00" + BODY),  # BER: a length that is too long
    ],
)
def test_what_is_not_der_to_the_bit_is_no_rsa_key(data: bytes) -> None:
    key = read_public_key(PublicKey.RSA, data)
    assert isinstance(key, Rejected)
    assert key.reason == BAD_KEY


# --- what checking costs


def test_signatures_of_a_length_that_the_key_cannot_make_cost_nothing() -> None:
    for kind, data in VALID:
        message = message_with(kind, data, "key")
        message.signature = bytes(3_000_000)
        assert check(message, "strict") == (Verdict.INVALID, "bad_signature", 0)


def test_every_key_that_is_read_has_a_cost_of_at_most_a_few_milliseconds() -> None:
    keys = [read_public_key(kind, data) for kind, data in VALID]
    keys.append(Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key())
    keys.append(ec.derive_private_key(1, ec.SECP256K1()).public_key())
    keys.append(rsa.RSAPublicNumbers(MAX_RSA_EXPONENT, (1 << 8191) + 1).public_key())
    for key in keys:
        assert not isinstance(key, Rejected)
        assert 0 < estimate_signature_cost(key, True) <= estimate_signature_cost(key, False) <= 5000


def test_memory_does_not_grow_with_what_strangers_name() -> None:
    rng = Random(1)

    def name(count: int) -> None:
        for _ in range(count):
            raw = rng.randbytes(500)
            assert raw_peer(peer_text(raw)) == raw
            check(message_with(PublicKey.RSA, rsa_key(rng.getrandbits(8192) | 1 << 8191 | 1), "from"), "strict")

    name(1)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    name(200)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 100_000
    assert peer_text(build_ed25519_peer_id(bytes(32))).startswith("12D3KooW")
