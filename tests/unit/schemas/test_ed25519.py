"""ed25519 as go and OpenSSL verify it, also where RFC 8032 leaves room: against a model of points in plain Python."""

from __future__ import annotations

import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln.schemas.proto.gossipsub.rpc_pb2 import Message, PublicKey
from kiln.schemas.wire.identity import Verdict, build_signed_bytes, check

P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P
Point = tuple[int, int]
ZERO: Point = (0, 1)


def add(a: Point, b: Point) -> Point:
    (x1, y1), (x2, y2) = a, b
    k = D * x1 * x2 * y1 * y2 % P
    return (x1 * y2 + x2 * y1) * pow(1 + k, -1, P) % P, (y1 * y2 + x1 * x2) * pow(1 - k, -1, P) % P


def times(n: int, point: Point) -> Point:
    result = ZERO
    while n:
        if n & 1:
            result = add(result, point)
        point = add(point, point)
        n >>= 1
    return result


def minus(point: Point) -> Point:
    return -point[0] % P, point[1]


def encoded(point: Point) -> bytes:
    return (point[1] | (point[0] & 1) << 255).to_bytes(32, "little")


def on_curve(y: int, odd: int) -> Point | None:
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    if (x * x - square) % P:
        return None
    return (x if x & 1 == odd else -x % P), y % P


def decoded(raw: bytes) -> Point | None:
    number = int.from_bytes(raw, "little")
    return on_curve(number % 2**255 % P, number >> 255)


def base() -> Point:
    point = on_curve(4 * pow(5, -1, P) % P, 0)
    assert point is not None
    return point


BASE = base()


def order_of_8() -> Point:
    for y in range(2, 100):
        point = on_curve(y, 0)
        if point is not None and times(4, small := times(L, point)) != ZERO:
            return small
    raise AssertionError


SMALL = [times(n, order_of_8()) for n in range(8)]


def challenge(r: bytes, key: bytes, data: bytes) -> int:
    return int.from_bytes(hashlib.sha512(r + key + data).digest(), "little") % L


def model(key: bytes, signature: bytes, data: bytes) -> bool:
    """As crypto/ed25519 of go: S below the order, and the encoding of SB - hA is that of R, byte for byte."""
    r, s = signature[:32], int.from_bytes(signature[32:], "little")
    point = decoded(key)
    if len(signature) != 64 or s >= L or point is None:
        return False
    return encoded(add(times(s, BASE), minus(times(challenge(r, key, data), point)))) == r


def message_of(key: bytes) -> Message:
    message = Message(data=b"x", seqno=b"\x01", topic="t")
    public = PublicKey(Type=PublicKey.Ed25519, Data=key).SerializeToString()
    setattr(message, "from", bytes((0, len(public))) + public)
    return message


def by_openssl(key: bytes, signature: bytes, data: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def agreed(key: bytes, signature: bytes) -> bool:
    """What Kiln says; it must be what the model and OpenSSL say."""
    message = message_of(key)
    data = build_signed_bytes(message)
    message.signature = signature
    good = check(message, "strict").verdict is Verdict.VALID
    assert good == model(key, signature, data) == by_openssl(key, signature, data)
    return good


@settings(max_examples=30)
@given(
    secret=st.integers(0, L - 1),
    nonce=st.integers(0, L - 1),
    in_key=st.integers(0, 7),
    in_nonce=st.integers(0, 7),
    beyond=st.booleans(),
)
def test_points_with_a_part_of_small_order(secret: int, nonce: int, in_key: int, in_nonce: int, beyond: bool) -> None:
    key = encoded(add(times(secret, BASE), SMALL[in_key]))
    r = encoded(add(times(nonce, BASE), SMALL[in_nonce]))
    s = (nonce + challenge(r, key, build_signed_bytes(message_of(key))) * secret) % L
    good = agreed(key, r + (s + (L if beyond else 0)).to_bytes(32, "little"))
    if not in_key and not in_nonce and not beyond:
        assert good


def test_points_of_small_order() -> None:
    """Nobody signs with these, but who does must not set peers at odds."""
    found = [agreed(encoded(key), encoded(nonce) + bytes(32)) for key in SMALL for nonce in SMALL]
    assert any(found)
    assert not all(found)


def test_a_signature_whose_nonce_is_zero_is_accepted() -> None:
    """libsodium refuses it, all others do not."""
    key, r = encoded(times(7, BASE)), encoded(ZERO)
    s = challenge(r, key, build_signed_bytes(message_of(key))) * 7 % L
    assert agreed(key, r + s.to_bytes(32, "little"))


def test_a_signature_that_is_right_but_for_a_part_of_small_order_is_refused() -> None:
    """Newer libsodium may accept it, as RFC 8032 allows; go does not."""
    key, r = encoded(times(7, BASE)), encoded(add(times(5, BASE), SMALL[1]))
    s = (5 + challenge(r, key, build_signed_bytes(message_of(key))) * 7) % L
    assert not agreed(key, r + s.to_bytes(32, "little"))


@settings(max_examples=20)
@given(st.binary(min_size=32, max_size=32), st.binary(max_size=70), st.integers(0, 63), st.integers(1, 255))
def test_any_bytes_and_good_signatures_with_a_byte_changed(seed: bytes, any_: bytes, at: int, change: int) -> None:
    private = Ed25519PrivateKey.from_private_bytes(seed)
    key = private.public_key().public_bytes_raw()
    good = private.sign(build_signed_bytes(message_of(key)))
    assert agreed(key, good)
    assert not agreed(key, good[:at] + bytes((good[at] ^ change,)) + good[at + 1 :])
    assert not agreed(key, good + b"\0")
    assert not agreed(key, good[:-1])
    assert not agreed(key, any_)
