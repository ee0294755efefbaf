"""Keys that are expensive, in every field that holds a key: RPCs of them, and handshakes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from random import Random
from typing import Final

from cryptography.hazmat.primitives.asymmetric import ec

from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message, PublicKey
from kiln.schemas.wire.identity import sign
from kit.key_bytes import KEY_ATTACKS, public_key, rsa_key
from kit.node_town import TOPIC

ELSEWHERE: Final = "/ceramic/local-test-elsewhere"
"""A topic that no bridge is on, so that its messages come to the queries unchecked."""
_NUMBERS: Final = count()


def strange_key(rng: Random) -> bytes:
    """One message whose key costs minutes in a loader of any kind of key, on the topic that all are on."""
    return _strange(rng, TOPIC, 1, _by_key)


def strange_identity(rng: Random) -> bytes:
    """The same, with the key within the author's peer id."""
    return _strange(rng, TOPIC, 1, _by_identity)


def strange_keys_elsewhere(rng: Random) -> bytes:
    """An RPC full of such keys, on a topic that nobody checks but the queries."""
    return _strange(rng, ELSEWHERE, 100, rng.choice((_by_key, _by_identity)))


def strange_records(rng: Random) -> bytes:
    """PRUNE whose peers have signed records with such keys."""
    rpc = RPC()
    prune = rpc.control.prune.add(topicID=TOPIC, backoff=60)
    for _, kind, data in KEY_ATTACKS:
        encoded = public_key(kind, data)
        # an Envelope: public_key, payload_type, payload, signature (libp2p specs, RFC 0002)
        envelope = b"\x0a" + _varint(len(encoded)) + encoded + b"\x12\x02\x03\x01\x1a\x01x\x2a\x01x"
        prune.peers.add(peerID=_by_key(encoded)[0], signedPeerRecord=envelope)
    return rpc.SerializeToString()


def slow_signatures(rng: Random) -> bytes:
    """Good messages of a key that is slow to check, on the topic that all are on."""
    rpc = RPC()
    for _ in range(20):
        message = rpc.publish.add(data=rng.randbytes(20), seqno=next(_NUMBERS).to_bytes(8), topic=TOPIC)
        sign(message, _SLOW)
    return rpc.SerializeToString()


def slow_signatures_elsewhere(rng: Random) -> bytes:
    """Forged messages of every kind of key that is slow to check, on a topic that nobody checks but the queries."""
    rpc = RPC()
    for template in _slow_templates():
        for _ in range(100):
            message = rpc.publish.add()
            message.CopyFrom(template)
            message.seqno = next(_NUMBERS).to_bytes(8)
    return rpc.SerializeToString()


KEYS: Final[tuple[Callable[[Random], bytes], ...]] = (
    strange_key,
    strange_identity,
    strange_keys_elsewhere,
    strange_records,
    slow_signatures,
    slow_signatures_elsewhere,
)
_SLOW: Final = ec.derive_private_key(0xC0FFEE, ec.SECP256K1())


def shown_identities() -> Iterator[bytes]:
    """Without end: PublicKey protobufs for a handshake to show."""
    while True:
        for _, kind, data in KEY_ATTACKS:
            yield public_key(kind, data)


@cache
def _slow_templates() -> tuple[Message, ...]:
    templates = []
    for curve in (ec.SECP256K1(), ec.SECP384R1(), ec.SECP521R1()):
        message = Message(data=b"slow", seqno=b"\0", topic=ELSEWHERE)
        sign(message, ec.derive_private_key(0xC0FFEE, curve))
        templates.append(message)
    modulus = Random(1).getrandbits(8192) | 1 << 8191 | 1
    author, key = _by_key(public_key(PublicKey.RSA, rsa_key(modulus, 2**31 - 1)))
    message = Message(data=b"slow", topic=ELSEWHERE, key=key, signature=bytes(1) + bytes(range(256)) * 3 + bytes(255))
    setattr(message, "from", author)  # a keyword in Python
    templates.append(message)
    return tuple(templates)


def _strange(rng: Random, topic: str, messages: int, place: Callable[[bytes], tuple[bytes, bytes | None]]) -> bytes:
    rpc = RPC()
    for _ in range(messages):
        _, kind, data = rng.choice(KEY_ATTACKS)
        author, key = place(public_key(kind, data))
        message = rpc.publish.add(data=b"x", seqno=rng.randbytes(8), topic=topic, signature=bytes(256))
        setattr(message, "from", author)  # a keyword in Python
        if key is not None:
            message.key = key
    return rpc.SerializeToString()


def _by_key(encoded: bytes) -> tuple[bytes, bytes]:
    return b"\x12\x20" + hashlib.sha256(encoded).digest(), encoded


def _by_identity(encoded: bytes) -> tuple[bytes, None]:
    return b"\x00" + _varint(len(encoded)) + encoded, None


def _varint(value: int) -> bytes:
    return bytes((value,)) if value < 0x80 else bytes((value & 0x7F | 0x80, value >> 7))
