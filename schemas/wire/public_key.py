"""Parser of the public keys of libp2p peers that takes little time for any bytes, because strangers send them.

OpenSSL's DER loader checks any kind of key before a caller learns its type; a Diffie-Hellman key of 8,192 bits takes a
minute. So this module first parses the algorithm, the structure and all sizes itself, accepting a single encoding, and
then builds the key from its numbers.

Sources: libp2p specs, peer-ids/peer-ids.md (Keys); RFC 5280, 4.1.2.7, and RFC 3279, 2.3.1 (RSA); RFC 5480, 2.1.1 and
2.2 (named curves, uncompressed points); the bounds of RSA keys as in go-libp2p and Go's crypto/rsa.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cryptography.exceptions import InternalError, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from kiln.schemas.proto.gossipsub import rpc_pb2
from kiln.schemas.reject import Rejected

PublicKey = Ed25519PublicKey | rsa.RSAPublicKey | ec.EllipticCurvePublicKey

BAD_KEY: Final = "bad_key"
KEY_ALGORITHM: Final = "key_algorithm"

MIN_RSA_BITS: Final = 2048
MAX_RSA_BITS: Final = 8192
MAX_RSA_EXPONENT: Final = 2**31 - 1

_SEQUENCE: Final = 0x30
_INTEGER: Final = 0x02
_RSA_ALGORITHM: Final = bytes.fromhex("300d06092a864886f70d0101010500")
_ED25519_BYTES: Final = 32
_SECP256K1_BYTES: Final = (33, 65)
_LARGEST_ECDSA_SIGNATURE: Final = 141  # bytes; DER of two numbers below the order of P-521


_CURVES: Final[tuple[tuple[bytes, ec.EllipticCurve, int], ...]] = (
    (bytes.fromhex("301006072a8648ce3d020106052b81040021"), ec.SECP224R1(), 28),
    (bytes.fromhex("301306072a8648ce3d020106082a8648ce3d030107"), ec.SECP256R1(), 32),
    (bytes.fromhex("301006072a8648ce3d020106052b81040022"), ec.SECP384R1(), 48),
    (bytes.fromhex("301006072a8648ce3d020106052b81040023"), ec.SECP521R1(), 66),
)
"""AlgorithmIdentifier of a key on the curve, the curve, and the number of bytes of a coordinate."""

_CURVE_COST: Final[Mapping[str, int]] = {
    "secp256k1": 750,
    "secp224r1": 180,
    "secp256r1": 150,
    "secp384r1": 1100,
    "secp521r1": 1000,
}


def read_public_key(kind: int, data: bytes) -> PublicKey | Rejected:
    """Read the key in a libp2p PublicKey protobuf.

    RSA and ECDSA keys are only accepted in the encoding of go-libp2p. Otherwise an author could have many peer ids.

    Args:
        kind: Field `Type` of the protobuf.
        data: Field `Data` of the protobuf.

    Returns:
        The key, or a rejection: key_algorithm if the bytes name an algorithm other than that of the type, or a curve
        that libp2p does not have (no honest program makes such a key); bad_key for any other error.
    """
    try:
        if kind == rpc_pb2.PublicKey.Ed25519:
            if len(data) == _ED25519_BYTES:
                return Ed25519PublicKey.from_public_bytes(data)
        elif kind == rpc_pb2.PublicKey.Secp256k1:
            if len(data) in _SECP256K1_BYTES:
                return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256K1(), data)
        elif kind == rpc_pb2.PublicKey.RSA:
            numbers = read_rsa(data)
            return numbers.public_key() if isinstance(numbers, rsa.RSAPublicNumbers) else numbers
        elif kind == rpc_pb2.PublicKey.ECDSA:
            return _read_ecdsa(data)
    except (ValueError, UnsupportedAlgorithm, InternalError) as error:
        return Rejected(BAD_KEY, f"not a key: {error}")
    return Rejected(BAD_KEY, f"no key of type {kind} has {len(data)} bytes")


def read_rsa(data: bytes) -> rsa.RSAPublicNumbers | Rejected:
    """Read an RSA key in DER (SubjectPublicKeyInfo).

    Returns:
        The key, or a rejection: key_algorithm if the bytes name another algorithm; bad_key if they are malformed, or
        the size or exponent of the key is out of bounds.
    """
    start = _find_algorithm(data)
    if start is None:
        return Rejected(BAD_KEY, "not a SubjectPublicKeyInfo in DER")
    if not data.startswith(_RSA_ALGORITHM, start):
        return Rejected(KEY_ALGORITHM, "the type of the key is RSA, and the algorithm in its bytes is not")
    at = start + len(_RSA_ALGORITHM)
    bits = _read_element(data, at, 0x03)
    if bits is None or bits[1] != len(data) or data[bits[0] : bits[0] + 1] != b"\x00":
        return Rejected(BAD_KEY, "the bytes of an RSA key are not a SubjectPublicKeyInfo in DER")
    body = _read_element(data, bits[0] + 1, _SEQUENCE)
    modulus = None if body is None or body[1] != len(data) else _read_number(data, body[0])
    exponent = None if modulus is None else _read_number(data, modulus[1])
    if modulus is None or exponent is None or exponent[1] != len(data):
        return Rejected(BAD_KEY, "the bytes of an RSA key are not modulus and exponent in DER")
    n, e = modulus[0], exponent[0]
    if not MIN_RSA_BITS <= n.bit_length() <= MAX_RSA_BITS:
        return Rejected(BAD_KEY, f"an RSA key of {n.bit_length()} bits, not {MIN_RSA_BITS} to {MAX_RSA_BITS}")
    if not n & 1:
        return Rejected(BAD_KEY, "the modulus of an RSA key is even")
    if not 3 <= e <= MAX_RSA_EXPONENT or not e & 1:
        return Rejected(BAD_KEY, f"the exponent of an RSA key is not an odd number between 3 and {MAX_RSA_EXPONENT}")
    return rsa.RSAPublicNumbers(e, n)


def fits_signature_length(key: PublicKey, signature: bytes) -> bool:
    """Return true if a signature has a length that signatures of this key can have."""
    if isinstance(key, Ed25519PublicKey):
        return len(signature) == 64
    if isinstance(key, rsa.RSAPublicKey):
        return len(signature) == (key.key_size + 7) // 8
    return len(signature) <= _LARGEST_ECDSA_SIGNATURE


def estimate_signature_cost(key: PublicKey, good: bool) -> int:
    """Estimate the CPU time for verifying a signature of a key, in µs on a core of 2026 (docs/performance.md).

    The estimate does not depend on the machine, so the same messages are accepted everywhere. An invalid ed25519
    signature costs more, because both libsodium and OpenSSL check it.

    Args:
        good: True if the signature is valid.
    """
    if isinstance(key, Ed25519PublicKey):
        return 88 if good else 300
    if isinstance(key, rsa.RSAPublicKey):
        return 40 + (key.key_size >> 10) ** 2 * key.public_numbers().e.bit_length() // 2
    return _CURVE_COST[key.curve.name]


def _read_ecdsa(data: bytes) -> ec.EllipticCurvePublicKey | Rejected:
    start = _find_algorithm(data)
    if start is None:
        return Rejected(BAD_KEY, "not a SubjectPublicKeyInfo in DER")
    for algorithm, curve, size in _CURVES:
        if not data.startswith(algorithm, start):
            continue
        bits = _read_element(data, start + len(algorithm), 0x03)
        if bits is None or bits[1] != len(data) or data[bits[0] : bits[0] + 2] != b"\x00\x04":
            break
        point = data[bits[0] + 1 :]
        if len(point) != 1 + 2 * size:
            break
        return ec.EllipticCurvePublicKey.from_encoded_point(curve, point)
    else:
        return Rejected(KEY_ALGORITHM, "the type of the key is ECDSA, and its bytes name no curve of libp2p")
    return Rejected(BAD_KEY, "the bytes of an ECDSA key do not hold an uncompressed point of the curve that they name")


def _find_algorithm(data: bytes) -> int | None:
    """Return the start of the AlgorithmIdentifier in a SubjectPublicKeyInfo, or `None` if the bytes are none."""
    outer = _read_element(data, 0, _SEQUENCE)
    if outer is None or outer[1] != len(data):
        return None
    return outer[0] if _read_element(data, outer[0], _SEQUENCE) is not None else None


def _read_element(data: bytes, at: int, tag: int) -> tuple[int, int] | None:
    """Return start and end of the content of the DER element at `at`, or `None` if it is incomplete or has another tag.

    DER allows only definite lengths in their shortest form (X.690, 10.1).
    """
    if len(data) < at + 2 or data[at] != tag:
        return None
    size, start = data[at + 1], at + 2
    if size >= 0x80:
        digits = size & 0x7F
        start += digits
        if not 1 <= digits <= 2 or start > len(data):
            return None
        size = int.from_bytes(data[at + 2 : start], "big")
        if size < 0x80 or (digits == 2 and size < 0x100):
            return None
    return (start, start + size) if start + size <= len(data) else None


def _read_number(data: bytes, at: int) -> tuple[int, int] | None:
    """Read a non-negative INTEGER in its shortest form. Return it and the index after it, or `None`."""
    content = _read_element(data, at, _INTEGER)
    if content is None or content[0] == content[1]:
        return None
    start, end = content
    first = data[start]
    if first >= 0x80 or (first == 0 and end - start > 1 and data[start + 1] < 0x80):
        return None  # negative, or with a superfluous zero byte
    return int.from_bytes(data[start:end], "big"), end
