"""Population of the synthetic traffic: separators, streams and authors, each derived at its first use.

Keys and peer ids are a pure function of a seed. They are not secret, and sign only synthetic traffic.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from itertools import accumulate
from typing import Final, Literal, NamedTuple

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

from kiln.deploy.demo.traffic.options import TrafficOptions
from kiln.schemas.proto.gossipsub import rpc_pb2
from kiln.schemas.wire.identity import SIGN_PREFIX, PrivateKey, compute_peer_id, peer_text, sign
from kiln.schemas.wire.streamid import CAIP10_LINK, METAMODEL, MODEL, MODEL_INSTANCE, TILE, StreamID
from kiln.schemas.wire.topics import Separator, encode_separator_value

KeyType = Literal["ed25519", "secp256k1", "rsa", "ecdsa"]

_RSA_EXPONENT = 65537
# Below the order of both curves, so that any 31 bytes are a private key.
_SCALAR_BYTES = 31


def derive_bytes(seed: int, *path: str | int) -> bytes:
    """Derive 32 bytes from a seed and a path: sha256 of "seed/part/part…"."""
    return sha256("/".join(map(str, (seed, *path))).encode()).digest()


@lru_cache(maxsize=4096)
def derive_private_key(seed: int, kind: KeyType, name: str) -> PrivateKey:
    """Derive the key of `name` from a seed. All RSA keys are equal."""
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
            return _build_rsa_key()


# primes of the one RSA key, which signs for every author of that kind
_P = int(
    "f0e97f13f885dcd4909b50cec4bfb52c6865207aa000f7f448e8eb5a4506b6b8f68e3caba188641e61c3c7629c7714e021d1"
    "bb79d62469b69ad700d0111e1cce0b01ae54a2127d8301f7a3ed868d017ff6ccdc7ab259a1aa570d8a05e8da80a95d358c95"
    "f437d774ac6567c1a19c64fffdb3b5486262f1f6f0277a7b8a836341",
    16,
)
_Q = int(
    "e58b40181e43532070f2f84ea0a1382a4f9322aa051060483a016a66a3fb15d6f8c0beedf12049c98910c471bc622801fd57"
    "7adb476b8f2d6950119eeba3c4f7eab254949a8b652cbbc658b5a045b315cc9749e5d51c62d5a926f36d00245979e9c84667"
    "5b55fa3f70165eaa3d2487ac0e0e9901153b955af57565641a5953b5",
    16,
)


def _build_rsa_key() -> rsa.RSAPrivateKey:
    d = pow(_RSA_EXPONENT, -1, math.lcm(_P - 1, _Q - 1))
    public = rsa.RSAPublicNumbers(_RSA_EXPONENT, _P * _Q)
    return rsa.RSAPrivateNumbers(_P, _Q, d, d % (_P - 1), d % (_Q - 1), pow(_Q, -1, _P), public).private_key()


# One key contains a slash, as CIP-120 allows: the last slash separates key and value.
ODD_KEY: Final = "x/tag"
_DAG_JOSE: Final = b"\x01\x85\x01\x12\x20"
_DAG_CBOR: Final = b"\x01\x71\x12\x20"
_SPAMMERS: Final = 2  # fewer than trip the decoding breaker
_KINDS: Final[dict[int, KeyType]] = {5: "secp256k1", 11: "rsa", 17: "ecdsa"}  # of every 24 authors


class SyntheticStream(NamedTuple):
    """A stream: its id, and the separator in its genesis."""

    text: str
    separator: Separator | None


class SyntheticAuthor:
    """An author, who signs messages.

    Every third author has random seqnos, as in JavaScript nodes. The seqnos of the others begin with the time and grow,
    as in Go nodes.
    """

    __slots__ = ("_last", "_sign", "key_field", "kind", "peer", "random_seqno", "text")

    def __init__(self, kind: KeyType, key: PrivateKey, random_seqno: bool) -> None:
        message = rpc_pb2.Message()
        sign(message, key)
        self.kind = kind
        self.peer = compute_peer_id(key)
        self.text = peer_text(self.peer)
        self.key_field: bytes = message.key  # empty if the peer id contains the key
        self.random_seqno = random_seqno
        self._sign = _signer(key)
        self._last = 0

    def signature(self, bare: bytes) -> bytes:
        """Sign a message that is serialized without signature and key. The result is always the same."""
        return self._sign(SIGN_PREFIX + bare)

    def next_seqno(self, now_ns: int) -> bytes:
        """Return the next seqno in 8 bytes, big-endian: the time in ns, or the last seqno + 1 if that is greater."""
        self._last = max(now_ns, self._last + 1)
        return self._last.to_bytes(8, "big")


class Population:
    """The separators, streams and authors of the synthetic traffic with the given options.

    The argument `u` of a method is a random number from 0 to 1 that selects one of them. Some are picked more often
    than others.
    """

    def __init__(self, options: TrafficOptions) -> None:
        self._seed = options.seed
        self._options = options
        self._weights = list(accumulate((rank + 1) ** -options.skew for rank in range(options.separators)))
        self._authors: dict[int, SyntheticAuthor] = {}
        self._spammers: dict[int, SyntheticAuthor] = {}
        self.separator: Callable[[int], Separator] = lru_cache(maxsize=32768)(self._separator)
        self.stream: Callable[[int], SyntheticStream] = lru_cache(maxsize=65536)(self._stream)
        self.old_stream: Callable[[int], SyntheticStream] = lru_cache(maxsize=4096)(self._old_stream)

    def _separator(self, rank: int) -> Separator:
        digest = derive_bytes(self._seed, "separator", rank)
        if rank % 10 == 4:
            return Separator(ODD_KEY, encode_separator_value(digest[1 : 2 + digest[0] % 30]))
        if rank % 6 == 2:
            return Separator("controller", encode_separator_value(f"did:key:z6Mk{digest.hex()[:44]}".encode()))
        if rank == 5:
            return Separator("model", METAMODEL)
        return Separator("model", StreamID(MODEL, _DAG_JOSE + digest).text)

    def _stream(self, number: int) -> SyntheticStream:
        digest = derive_bytes(self._seed, "stream", number)
        kind, separator = TILE + (digest[12] & 1) * CAIP10_LINK, None
        if _fraction(digest[:6]) >= self._options.without_separator:
            rank = min(bisect(self._weights, _fraction(digest[6:12]) * self._weights[-1]), len(self._weights) - 1)
            separator = self.separator(rank)
            kind = MODEL if separator.value == METAMODEL else MODEL_INSTANCE if separator.key == "model" else TILE
        return SyntheticStream(StreamID(kind, _genesis(digest)).text, separator)

    def _old_stream(self, number: int) -> SyntheticStream:
        digest = derive_bytes(self._seed, "old stream", number)
        return SyntheticStream(StreamID(CAIP10_LINK if digest[12] & 3 == 0 else TILE, _genesis(digest)).text, None)

    def pick_stream(self, u: float) -> SyntheticStream:
        """Pick a stream. Streams with low numbers are picked up to twice as often as the average."""
        return self.stream(int(self._options.streams * u * (0.5 + 0.5 * u)))

    def pick_old_stream(self, u: float) -> SyntheticStream:
        """Pick a stream of type tile or CAIP-10 link, the only types before Ceramic had models."""
        return self.old_stream(int(max(1, self._options.streams // 20) * u))

    def pick_separator(self, u: float) -> Separator:
        return self.separator(min(bisect(self._weights, u * self._weights[-1]), len(self._weights) - 1))

    def pick_author(self, u: float) -> SyntheticAuthor:
        """Pick an author; a few authors write most messages."""
        number = int(self._options.authors * u * u)
        author = self._authors.get(number)
        if author is None:
            author = self._authors[number] = self._make_author("author", number, _KINDS.get(number % 24, "ed25519"))
        return author

    def pick_spammer(self, u: float) -> SyntheticAuthor:
        """Pick one of the two authors who sign all garbage and all impostors' messages."""
        number = int(_SPAMMERS * u)
        spammer = self._spammers.get(number)
        if spammer is None:
            spammer = self._spammers[number] = self._make_author("spammer", number, "ed25519")
        return spammer

    def peer(self, role: Literal["local", "remote", "stranger"], number: int = 0) -> bytes:
        """Return the peer id of a node, as multihash bytes."""
        return compute_peer_id(derive_private_key(self._seed, "ed25519", f"{role}/{number}"))

    def _make_author(self, role: str, number: int, kind: KeyType) -> SyntheticAuthor:
        return SyntheticAuthor(
            kind, derive_private_key(self._seed, kind, f"{role}/{number}"), number % 3 == 2 or role == "spammer"
        )


def _fraction(digits: bytes) -> float:
    return int.from_bytes(digits, "big") / (1 << 8 * len(digits))


def _genesis(digest: bytes) -> bytes:
    return (_DAG_CBOR if digest[13] < 60 else _DAG_JOSE) + digest


def _signer(key: PrivateKey) -> Callable[[bytes], bytes]:
    """Build a function that signs data, with equal signatures for equal data.

    `kiln.schemas.wire.identity.sign` is not used, because it draws a random nonce for each ECDSA signature.
    """
    if isinstance(key, ec.EllipticCurvePrivateKey):
        curve = key
        algorithm = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)
        return lambda data: curve.sign(data, algorithm)
    if isinstance(key, rsa.RSAPrivateKey):
        modulus = key
        return lambda data: modulus.sign(data, padding.PKCS1v15(), hashes.SHA256())
    return key.sign
