"""Public keys that are expensive to load, as an attacker would send them, and functions to encode them in DER."""

from __future__ import annotations

from typing import Final

from kiln.schemas.proto.gossipsub.rpc_pb2 import PublicKey

_DH: Final = bytes.fromhex("06092a864886f70d010301")
_DHX: Final = bytes.fromhex("06072a8648ce3e0201")
_DSA: Final = bytes.fromhex("06072a8648ce380401")
_EC: Final = bytes.fromhex("06072a8648ce3d0201")
_RSA: Final = bytes.fromhex("06092a864886f70d010101")
_PRIME_FIELD: Final = bytes.fromhex("06072a8648ce3d0101")
_NULL: Final = b"\x05\x00"


def tlv(tag: int, content: bytes) -> bytes:
    """Encode a DER element."""
    size = len(content)
    if size < 0x80:
        return bytes((tag, size)) + content
    digits = size.to_bytes((size.bit_length() + 7) // 8)
    return bytes((tag, 0x80 | len(digits))) + digits + content


def integer(value: int) -> bytes:
    return tlv(0x02, value.to_bytes(value.bit_length() // 8 + 1))


def sequence(*elements: bytes) -> bytes:
    return tlv(0x30, b"".join(elements))


def subject_key(algorithm: bytes, key: bytes) -> bytes:
    """Encode a SubjectPublicKeyInfo."""
    return sequence(algorithm, tlv(0x03, b"\x00" + key))


def public_key(kind: PublicKey.KeyType.ValueType, data: bytes) -> bytes:
    """Encode a PublicKey protobuf."""
    return PublicKey(Type=kind, Data=data).SerializeToString()


def modp(bits: int) -> int:
    """Return the safe prime of the MODP group of this size (RFC 3526). A loader of Diffie-Hellman keys tests its
    primality, which is expensive."""
    add = {2048: 124476, 4096: 240904, 8192: 4743158}[bits]
    one = 1 << (bits - 130 + 64)
    pi = (16 * _arctan(one, 5) - 4 * _arctan(one, 239)) >> 64
    return (1 << bits) - (1 << bits - 64) - 1 + ((pi + add) << 64)


def _arctan(one: int, inverse: int) -> int:
    """Compute arctan(1 / inverse) times `one`."""
    power = total = one // inverse
    divisor, sign = 1, 1
    while power:
        power //= inverse * inverse
        divisor, sign = divisor + 2, -sign
        total += sign * (power // divisor)
    return total


def diffie_hellman(bits: int, generator: int = 3) -> bytes:
    """Encode an expensive Diffie-Hellman key. With an odd generator, the group is none that OpenSSL knows."""
    return subject_key(sequence(_DH, sequence(integer(modp(bits)), integer(generator))), integer(7))


def _explicit_curve() -> bytes:
    """Encode the parameters of P-256 explicitly instead of its name."""
    prime = 2**256 - 2**224 + 2**192 + 2**96 - 1
    b = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    point = bytes.fromhex(
        "046b17d1f2e12c4247f8bce6e563a440f277037d812deb33a0f4a13945d898c296"
        "4fe342e2fe1a7f9b8ee7eb4a7c0f9e162bce33576b315ececbb6406837bf51f5"
    )
    field = sequence(_PRIME_FIELD, integer(prime))
    curve = sequence(tlv(0x04, (prime - 3).to_bytes(32)), tlv(0x04, b.to_bytes(32)))
    parameters = sequence(integer(1), field, curve, tlv(0x04, point), integer(order), integer(1))
    return subject_key(sequence(_EC, parameters), point)


def rsa_key(modulus: int, exponent: int = 65537) -> bytes:
    """Encode an RSA public key with any modulus and exponent."""
    return subject_key(sequence(_RSA, _NULL), sequence(integer(modulus), integer(exponent)))


KEY_ATTACKS: Final[tuple[tuple[str, PublicKey.KeyType.ValueType, bytes], ...]] = (
    *(
        (f"Diffie-Hellman {bits} as {PublicKey.KeyType.Name(kind)}", kind, diffie_hellman(bits))
        for bits in (2048, 4096, 8192)
        for kind in (PublicKey.RSA, PublicKey.ECDSA)
    ),
    (
        "X9.42 Diffie-Hellman 4096 as RSA",
        PublicKey.RSA,
        subject_key(
            sequence(_DHX, sequence(integer(modp(4096)), integer(3), integer((modp(4096) - 1) // 2))),
            integer(7),
        ),
    ),
    (
        "DSA 4096 as RSA",
        PublicKey.RSA,
        subject_key(
            sequence(_DSA, sequence(integer(modp(4096)), integer((modp(4096) - 1) // 2), integer(3))),
            integer(7),
        ),
    ),
    ("explicit curve as ECDSA", PublicKey.ECDSA, _explicit_curve()),
)
"""Name, declared type and bytes of keys whose algorithm is not the one of the declared type."""

REFUSED_RSA: Final[tuple[tuple[str, bytes], ...]] = (
    ("1,024 bits", rsa_key((1 << 1023) + 1)),
    ("8,200 bits", rsa_key((1 << 8199) + 1)),
    ("an even modulus", rsa_key(1 << 4095)),
    ("an even exponent", rsa_key((1 << 4095) + 1, 65536)),
    ("an exponent of 1", rsa_key((1 << 4095) + 1, 1)),
    ("an exponent of 4,000 bits", rsa_key((1 << 4095) + 1, (1 << 4000) - 1)),
)
"""Name and bytes of RSA keys that Kiln rejects, because their modulus or exponent is out of bounds."""
