"""Authors of synthetic traffic: private keys and peer ids, as a pure function of a seed.

Nothing here is secret: the keys follow from the seed, and sign only synthetic traffic.
"""

from __future__ import annotations

import math
from functools import lru_cache
from hashlib import sha256
from typing import Literal

from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from kiln.schemas.wire.identity import PrivateKey

KeyType = Literal["ed25519", "secp256k1", "rsa", "ecdsa"]

RSA_BITS = 2048  # the least that libp2p peers accept
_RSA_EXPONENT = 65537
_SMALL_PRIMES = [n for n in range(3, 2000, 2) if all(n % d for d in range(3, math.isqrt(n) + 1, 2))]
# The first 24 primes as bases: what is left to chance (4^-24) is no concern for keys that guard nothing.
_WITNESSES = [2, *_SMALL_PRIMES[:23]]
# Below the order of both curves, so that any 31 bytes are a private key.
_SCALAR_BYTES = 31


def derive_bytes(seed: int, *path: str | int) -> bytes:
    """Derive 32 bytes from a seed and a path: sha256 of "seed/part/part…"."""
    return sha256("/".join(map(str, (seed, *path))).encode()).digest()


@lru_cache(maxsize=4096)
def derive_private_key(seed: int, kind: KeyType, name: str) -> PrivateKey:
    """Derive the key of `name` from a seed. An RSA key takes about half a second, once per process."""
    material = derive_bytes(seed, "key", kind, name)
    match kind:
        case "ed25519":
            return ed25519.Ed25519PrivateKey.from_private_bytes(material)
        case "secp256k1":
            scalar = int.from_bytes(material[:_SCALAR_BYTES]) + 1
            return ec.derive_private_key(scalar, ec.SECP256K1())
        case "ecdsa":
            scalar = int.from_bytes(material[:_SCALAR_BYTES]) + 1
            return ec.derive_private_key(scalar, ec.SECP256R1())
        case "rsa":
            return _rsa_key(material)


def _rsa_key(material: bytes) -> rsa.RSAPrivateKey:
    p, q = _rsa_prime(material + b"p"), _rsa_prime(material + b"q")
    if p < q:  # the order modulo which the inverse below is computed
        p, q = q, p
    d = pow(_RSA_EXPONENT, -1, math.lcm(p - 1, q - 1))
    public = rsa.RSAPublicNumbers(_RSA_EXPONENT, p * q)
    return rsa.RSAPrivateNumbers(p, q, d, d % (p - 1), d % (q - 1), pow(q, -1, p), public).private_key()


def _rsa_prime(material: bytes) -> int:
    """Find the first suitable prime from a start given by `material`, of exactly half of RSA_BITS."""
    size = RSA_BITS // 16
    start = b"".join(sha256(material + bytes([block])).digest() for block in range((size + 31) // 32))[:size]
    # The two top bits set: the product then has exactly RSA_BITS.
    candidate = int.from_bytes(start) | (0b11 << (size * 8 - 2)) | 1
    while not (math.gcd(candidate - 1, _RSA_EXPONENT) == 1 and _is_prime(candidate)):
        candidate += 2
    return candidate


def _is_prime(n: int) -> bool:
    """Test large odd n by Miller-Rabin."""
    if any(n % p == 0 for p in _SMALL_PRIMES):
        return False
    twos = ((n - 1) & -(n - 1)).bit_length() - 1
    odd = (n - 1) >> twos
    return all(_passes(n, odd, twos, witness) for witness in _WITNESSES)


def _passes(n: int, odd: int, twos: int, witness: int) -> bool:
    x = pow(witness, odd, n)
    if x in (1, n - 1):
        return True
    for _ in range(twos - 1):
        x = x * x % n
        if x == n - 1:
            return True
    return False
