"""Announcements of batches that nobody has, signed by one key or by a new key for each."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.identity import sign
from kiln.schemas.wire.pubsub import write_batch_update
from kiln.schemas.wire.topics import Separator, encode_separator_value
from kit.node_town import TOPIC

EVERY = 0.05
"""s between two RPCs of a peer"""
_IN_AN_RPC = 11  # 220 announcements a second, of each of two peers
_SEPARATOR = Separator("model", encode_separator_value(b"\x01\x02"))


def _announce(rng: Random, new_key: Callable[[], Ed25519PrivateKey]) -> bytes:
    rpc = RPC()
    for _ in range(_IN_AN_RPC):
        cid = cid_text(compute_cid(rng.randbytes(32)))
        out = Message(topic=TOPIC, data=write_batch_update(_SEPARATOR, cid), seqno=rng.randbytes(8))
        sign(out, new_key())
        rpc.publish.append(out)
    return rpc.SerializeToString()


def by_one_author(rng: Random) -> bytes:
    """Batches that nobody has, all of one author."""
    return _announce(rng, lambda: _AUTHOR)


def by_many_authors(rng: Random) -> bytes:
    """Batches that nobody has, each of another author."""
    return _announce(rng, lambda: Ed25519PrivateKey.from_private_bytes(rng.randbytes(32)))


ANNOUNCEMENTS = (by_one_author, by_many_authors)
_AUTHOR = Ed25519PrivateKey.from_private_bytes(b"\1" * 32)
