"""Authorship of gossipsub messages: peer ids, message ids and signatures.

No bytes of a message make a function here raise. Where the specifications leave room, this module follows
go-libp2p, which most peers run.

Sources: libp2p specs, pubsub/README.md (Message signing, Signature policy options) and peer-ids/peer-ids.md (Keys,
Peer Ids); decision 5.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum
from functools import lru_cache
from typing import Final, NamedTuple

import base58
from cryptography.exceptions import InternalError, InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from google.protobuf.message import DecodeError
from nacl.bindings import crypto_sign_open
from nacl.exceptions import BadSignatureError

from kiln.schemas.proto.gossipsub import rpc_pb2
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.cid import CidError, cid_bytes
from kiln.schemas.wire.public_key import (
    BAD_KEY,
    KEY_ALGORITHM,
    PublicKey,
    estimate_signature_cost,
    fits_signature_length,
    read_public_key,
)
from kiln.schemas.wire.signing_policy import Policy

PrivateKey = Ed25519PrivateKey | rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey

SIGN_PREFIX: Final = b"libp2p-pubsub:"

BAD_SIGNATURE: Final = "bad_signature"
MISSING_SIGNATURE: Final = "missing_signature"
MISSING_FROM: Final = "missing_from"
MISSING_SEQNO: Final = "missing_seqno"
INVALID_SEQNO: Final = "invalid_seqno"
UNEXPECTED_AUTH: Final = "unexpected_auth"
REASONS: Final = (
    BAD_SIGNATURE,  # INVALID: the signature does not match the message and its author
    BAD_KEY,  # INVALID: `from` is not a peer id, contains no usable key, or is not the peer id of `key`
    KEY_ALGORITHM,  # INVALID: the key's algorithm is not that of its type; no honest program makes such a key
    MISSING_SIGNATURE,  # AGAINST_POLICY: the policy is strict, and the message is not signed
    MISSING_FROM,  # AGAINST_POLICY: signed, but without `from`
    MISSING_SEQNO,  # AGAINST_POLICY: signed, but without the seqno that is a part of its id
    INVALID_SEQNO,  # AGAINST_POLICY: signed, with a seqno longer than MAX_SEQNO (8 bytes in practice)
    UNEXPECTED_AUTH,  # AGAINST_POLICY: the policy is none, and the message has from, seqno, signature or key
)

MAX_SEQNO: Final = 64  # bytes
_MAX_PEER_ID: Final = 2048  # bytes; an identity multihash of an RSA-8192 key has 1,100
_BASE58_LIMIT: Final = 1024  # bytes; base58 takes time with the square of the length
_USUAL_PEER: Final = 64  # bytes; other peer ids are not cached
_USUAL_TEXT: Final = 90  # characters
_USUAL_KEY: Final = 1024  # bytes of peer id and key
_NIST_CURVES: Final = (ec.SECP224R1, ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
_IDENTITY_LIMIT: Final = 42  # bytes; the peer id of a longer PublicKey is its sha2-256
_IDENTITY: Final = 0x00
_SHA2_256: Final = 0x12
_ED25519_PEER: Final = bytes.fromhex("002408011220")
_LIBP2P_KEY: Final = b"\x01\x72"  # CIDv1, codec libp2p-key
_NO_KEY: Final = Rejected(BAD_KEY, "no key of the author")
_MESSAGE_COST: Final = 12

MAX_RPC_COST: Final = 200_000
"""Maximum estimated CPU time, in µs, for the messages of one RPC: enough for 2,000 messages with ed25519 signatures."""


class Verdict(IntEnum):
    """Result of checking a message's signature: a byte per message in Frame.verdicts (docs/design/contracts.md)."""

    NOT_CHECKED = 0
    VALID = 1
    INVALID = 2
    UNSIGNED = 3
    AGAINST_POLICY = 4
    UNVERIFIABLE = 5


VERDICT_NAMES: Final = (*(verdict.name.lower() for verdict in Verdict), *["not_checked"] * (256 - len(Verdict)))
"""Names of the verdict bytes 0 to 255, as in the column `verdict`. Unknown bytes count as not checked."""


UNVERIFIED: Final = "unverified/"
"""Prefix of ids of messages from the log of another node, whose signature cannot be checked."""


OVERSIZED: Final = "oversized/"
"""Prefix of ids of signed messages whose author or seqno is too long for an id."""


class PeerIdError(ValueError):
    """The text is not a peer id, or the key has none."""


def peer_text(raw: bytes) -> str:
    """Format a peer id as base58btc of its multihash ("12D3Koo…", "Qm…").

    Bytes that are not a peer id have a text too. For more than 1,024 bytes, it is "f" and hex digits.
    """
    if len(raw) <= _USUAL_PEER:
        return _format_usual_text(raw)
    return base58.b58encode(raw).decode("ascii") if len(raw) <= _BASE58_LIMIT else "f" + raw.hex()


def raw_peer(text: str) -> bytes:
    """Convert a text that `peer_text` returned back to bytes.

    Raises:
        ValueError: The text is neither base58 nor "f" and hex digits.
    """
    if len(text) <= _USUAL_TEXT:
        return _usual_raw(text)
    if len(text) > 2 * _BASE58_LIMIT:  # longer than any text in base58
        return bytes.fromhex(text[1:])
    return bytes(base58.b58decode(text))


def peer_bytes(text: str) -> bytes:
    """Parse a peer id in base58 or as a CID ("bafz…", "k51…"). Return its multihash bytes.

    Raises:
        PeerIdError: The text is not a peer id.
    """
    if len(text) <= _USUAL_TEXT:
        return _usual_peer(text)
    if len(text) > 2 * _MAX_PEER_ID:  # no encoding is twice as long, and base58 takes quadratic time
        raise PeerIdError(f"not a peer id: {len(text)} characters")
    return _read_peer(text)


def _read_peer(text: str) -> bytes:
    try:
        if text.startswith(("1", "Qm")):
            raw: bytes = base58.b58decode(text)
        else:
            cid = cid_bytes(text)
            if not cid.startswith(_LIBP2P_KEY):
                raise PeerIdError(f"not a peer id: {text!r} is a CID, but not of a libp2p key")
            raw = cid[2:]
    except PeerIdError:
        raise
    except (CidError, ValueError) as error:
        raise PeerIdError(f"not a peer id: {text!r}: {error}") from error
    if _read_multihash(raw) is None:
        raise PeerIdError(f"not a peer id: {text!r} does not hold an identity or sha2-256 multihash")
    return raw


def build_ed25519_peer_id(key: bytes) -> bytes:
    """Build the peer id of an ed25519 public key (32 bytes): the identity multihash of its PublicKey protobuf."""
    return _ED25519_PEER + key


def message_id(message: rpc_pb2.Message) -> str:
    """Compute the id of a message as in the column `message_id`, unique within the network.

    If the message has a signature, valid or not, the id is "<author's peer id>/<seqno in hex>" or, if one of the two is
    too long, "oversized/<hex of a sha256>". Otherwise the id is "sha256/<hex of sha256(data)>".
    """
    if message.HasField("signature"):
        return _format_id(getattr(message, "from"), message.seqno)  # `from` is a keyword in Python
    return "sha256/" + hashlib.sha256(message.data).hexdigest()


def compute_unverified_id(message: rpc_pb2.Message) -> str:
    """Compute the id of a message from the log of another node: "unverified/<author's peer id>/<seqno in hex>".

    The prefix keeps a forged log line from counting as a copy of a verified message. If the log has no author or seqno,
    the id is that of `message_id`.
    """
    author: bytes = getattr(message, "from")
    return UNVERIFIED + _format_id(author, message.seqno) if author and message.seqno else message_id(message)


def _format_id(author: bytes, seqno: bytes) -> str:
    """Format the id of a signed message. Long fields are hashed, because rows contain the id."""
    if len(author) > _MAX_PEER_ID or len(seqno) > MAX_SEQNO:
        return OVERSIZED + hashlib.sha256(len(author).to_bytes(8) + author + seqno).hexdigest()
    return f"{peer_text(author)}/{seqno.hex()}"


def parse_author(message: str) -> str | None:
    """Return the author's peer id in a message id, or `None` if the id does not begin with one."""
    peer = message.partition("/")[0]
    try:
        peer_bytes(peer)
    except PeerIdError:
        return None
    return peer


class Judgement(NamedTuple):
    """Verdict on a message, with its reason and the cost of the check."""

    verdict: Verdict
    reason: str = ""
    """reason of the verdict INVALID or AGAINST_POLICY, one of REASONS; otherwise empty"""
    cost: int = 0
    """estimated CPU time of the signature check in µs; 0 if no signature was checked"""


def check(message: rpc_pb2.Message, policy: Policy, topic: str | None = None) -> Judgement:
    """Check the signature of a message under a signature policy.

    Args:
        policy: `strict`: the message must have a valid signature. `none`: it must have no from, seqno, signature or
            key. `either`: it may be unsigned, but a signature must be valid. A signed message also needs from and
            seqno, because they are its id.
        topic: Name of the topic, if the message has only its index. Signatures cover the name.
    """
    signed = message.HasField("signature")
    if policy == "none":
        if signed or message.HasField("from") or message.HasField("seqno") or message.HasField("key"):
            return Judgement(Verdict.AGAINST_POLICY, UNEXPECTED_AUTH)
        return Judgement(Verdict.UNSIGNED)
    if not signed:
        if policy == "strict":
            return Judgement(Verdict.AGAINST_POLICY, MISSING_SIGNATURE)
        return Judgement(Verdict.UNSIGNED)
    author: bytes = getattr(message, "from")
    if not author:
        return Judgement(Verdict.AGAINST_POLICY, MISSING_FROM)
    seqno = message.seqno
    if not seqno:
        return Judgement(Verdict.AGAINST_POLICY, MISSING_SEQNO)
    if len(seqno) > MAX_SEQNO:
        return Judgement(Verdict.AGAINST_POLICY, INVALID_SEQNO)
    attached = message.key if message.HasField("key") else None
    if len(author) > _MAX_PEER_ID or (attached is not None and len(attached) > _MAX_PEER_ID):
        return Judgement(Verdict.INVALID, BAD_KEY)
    usual = len(author) + len(attached or b"") <= _USUAL_KEY
    key = (_usual_key if usual else _public_key)(author, attached)
    if isinstance(key, Rejected):
        return Judgement(Verdict.INVALID, key.reason)
    signature = message.signature
    if not fits_signature_length(key, signature):
        return Judgement(Verdict.INVALID, BAD_SIGNATURE)
    good = verify_signature(key, signature, build_signed_bytes(message, topic))
    cost = estimate_signature_cost(key, good)
    return Judgement(Verdict.VALID, "", cost) if good else Judgement(Verdict.INVALID, BAD_SIGNATURE, cost)


def estimate_id_cost(message: rpc_pb2.Message) -> int:
    """Estimate the CPU time, in µs, for reading a message and building its id, without checking its signature."""
    size = len(getattr(message, "from"))
    return _MESSAGE_COST + (size * size // 450 if _USUAL_PEER < size <= _BASE58_LIMIT else 0)


def build_signed_bytes(message: rpc_pb2.Message, topic: str | None = None) -> bytes:
    """Build the bytes that the signature of a message covers.

    They are "libp2p-pubsub:" and the message without signature and key, with unknown fields at the end. Source: libp2p
    specs, pubsub/README.md, Message signing.

    Args:
        topic: Name of the topic, which replaces the topic index, because signatures cover the name.
    """
    bare = rpc_pb2.Message()
    bare.CopyFrom(message)
    bare.ClearField("signature")
    bare.ClearField("key")
    if topic is not None:
        bare.ClearField("topicIndex")
        bare.topic = topic
    return SIGN_PREFIX + bare.SerializeToString()


def sign(message: rpc_pb2.Message, private_key: PrivateKey, topic: str | None = None) -> None:
    """Sign a message in place: set `from`, `signature` and, for RSA and ECDSA, `key`.

    The message must have seqno, data and topic already.

    Args:
        private_key: Key of the author.
        topic: Name of the topic, if the message has only its index.

    Raises:
        PeerIdError: The key is not ed25519, secp256k1, RSA or ECDSA on a NIST curve.
    """
    encoded = _encode_public_key(private_key.public_key())
    author = _build_peer_id(encoded)
    setattr(message, "from", author)  # a keyword in Python
    message.ClearField("signature")
    message.ClearField("key")
    if author[0] != _IDENTITY:
        message.key = encoded
    data = build_signed_bytes(message, topic)
    if isinstance(private_key, Ed25519PrivateKey):
        message.signature = private_key.sign(data)
    elif isinstance(private_key, rsa.RSAPrivateKey):
        message.signature = private_key.sign(data, padding.PKCS1v15(), hashes.SHA256())
    else:
        message.signature = private_key.sign(data, ec.ECDSA(hashes.SHA256()))


def compute_peer_id(private_key: PrivateKey) -> bytes:
    """Compute the peer id (multihash bytes) that belongs to a private key.

    Raises:
        PeerIdError: libp2p does not support this kind of key.
    """
    return _build_peer_id(_encode_public_key(private_key.public_key()))


# Peers choose the inputs, so these caches only store inputs of usual length, which bounds their memory.
@lru_cache(maxsize=65536)
def _format_usual_text(raw: bytes) -> str:
    text: str = base58.b58encode(raw).decode("ascii")
    return text


@lru_cache(maxsize=65536)
def _usual_raw(text: str) -> bytes:
    return bytes(base58.b58decode(text))


_usual_peer = lru_cache(maxsize=65536)(_read_peer)


def _read_varint(raw: bytes, start: int) -> tuple[int, int] | None:
    """Read an unsigned varint of at most 9 bytes in its shortest form. Return it and the index after it, or `None`."""
    value = 0
    for i in range(start, min(start + 9, len(raw))):
        byte = raw[i]
        value |= (byte & 0x7F) << (7 * (i - start))
        if byte < 0x80:
            return None if byte == 0 and i > start else (value, i + 1)
    return None


def split_peer(raw: bytes) -> tuple[bytes, bytes] | None:
    """Split bytes that begin with a peer id into peer id and rest. Return `None` for other bytes."""
    if (head := _read_varint(raw, 0)) is None or (size := _read_varint(raw, head[1])) is None:
        return None
    end = size[1] + size[0]
    return (raw[:end], raw[end:]) if _read_multihash(raw[:end]) is not None else None


def _read_multihash(raw: bytes) -> tuple[int, bytes] | None:
    """Parse an identity or sha2-256 multihash, as in peer ids. Return code and digest, or `None` for other bytes."""
    if (head := _read_varint(raw, 0)) is None or (size := _read_varint(raw, head[1])) is None:
        return None
    code, digest = head[0], raw[size[1] :]
    if len(digest) != size[0] or code not in (_IDENTITY, _SHA2_256) or (code == _SHA2_256 and len(digest) != 32):
        return None
    return code, digest


def _build_peer_id(encoded_key: bytes) -> bytes:
    """Build the peer id of an encoded PublicKey protobuf (libp2p specs, peer-ids.md, Peer Ids)."""
    if len(encoded_key) <= _IDENTITY_LIMIT:
        return bytes((_IDENTITY, len(encoded_key))) + encoded_key
    return bytes((_SHA2_256, 32)) + hashlib.sha256(encoded_key).digest()


def _encode_public_key(key: object) -> bytes:
    kind = rpc_pb2.PublicKey
    if isinstance(key, Ed25519PublicKey):
        return kind(Type=kind.Ed25519, Data=key.public_bytes_raw()).SerializeToString()
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256K1):
        point = key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
        return kind(Type=kind.Secp256k1, Data=point).SerializeToString()
    if isinstance(key, rsa.RSAPublicKey):
        return kind(Type=kind.RSA, Data=_encode_pkix(key)).SerializeToString()
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, _NIST_CURVES):
        return kind(Type=kind.ECDSA, Data=_encode_pkix(key)).SerializeToString()
    raise PeerIdError(f"libp2p has no peer ids for {type(key).__name__}")


def _encode_pkix(key: rsa.RSAPublicKey | ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _public_key(author: bytes, attached: bytes | None) -> PublicKey | Rejected:
    """Read the author's public key from the peer id, or from the message's field `key` if it matches the peer id."""
    peer = _read_multihash(author)
    if peer is None:
        return _NO_KEY
    code, digest = peer
    if attached is None:
        return _parse_public_key(digest)[0] if code == _IDENTITY else _NO_KEY
    key, encoded = _parse_public_key(attached)
    if isinstance(key, Rejected):
        return key
    # Keys are compared in canonical encoding, as go-libp2p does. Old nodes have sha2-256 peer ids even for short keys.
    matches = digest == encoded if code == _IDENTITY else digest == hashlib.sha256(encoded).digest()
    return key if matches else _NO_KEY


_usual_key = lru_cache(maxsize=4096)(_public_key)


def _parse_public_key(encoded: bytes) -> tuple[PublicKey | Rejected, bytes]:
    """Parse a PublicKey protobuf. Return the key and its canonical encoding."""
    try:
        public = rpc_pb2.PublicKey.FromString(encoded)
    except DecodeError:
        return _NO_KEY, b""
    # an unknown KeyType stays in the unknown fields
    if not public.HasField("Type") or not public.HasField("Data"):
        return _NO_KEY, b""
    kind, data = public.Type, public.Data
    return read_public_key(kind, data), rpc_pb2.PublicKey(Type=kind, Data=data).SerializeToString()


def verify_signature(key: PublicKey, signature: bytes, data: bytes) -> bool:
    """Return true if a signature of the data is valid for a libp2p key (libp2p specs, peer-ids.md, Keys).

    libsodium verifies ed25519 signatures in half of OpenSSL's time. But Go and OpenSSL accept some signatures that
    libsodium rejects: with points of small order and unusual encodings of points, which RFC 8032 leaves open. So
    OpenSSL checks what libsodium has rejected, to accept what other nodes accept.
    """
    try:
        if isinstance(key, Ed25519PublicKey):
            try:
                crypto_sign_open(signature + data, key.public_bytes_raw())
            except BadSignatureError:
                key.verify(signature, data)
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, data, padding.PKCS1v15(), hashes.SHA256())
        else:
            key.verify(signature, data, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError, UnsupportedAlgorithm, InternalError):
        return False
    return True
