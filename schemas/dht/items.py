"""Mutable items of the DHT (BEP 44, Mutable items; Signature Verification).

An item is the latest value that the holder of a key has signed under a salt. Its target, which is its location in the
DHT and in BEP 50 the name of its topic, is ``sha1(key || salt)``. The signature covers a piece of bencoding::

    ["4:salt" <length> ":" <salt>] "3:seqi" <sequence> "e1:v" <the bencoded value>         salt only if not empty

The value stays as it was signed: bencoded bytes.
"""

from __future__ import annotations

import hashlib
from typing import Final

from msgspec import Struct
from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from kiln.schemas.dht import bencode
from kiln.schemas.dht.bencode import Value
from kiln.schemas.dht.krpc import BAD_ARGUMENTS, BAD_SEQUENCE, BAD_SIGNATURE, SALT_TOO_BIG, VALUE_TOO_BIG, KrpcRefusal

KEY_SIZE: Final = 32
SIGNATURE_SIZE: Final = 64
MAX_SALT: Final = 64
MAX_VALUE: Final = 1000
"""Largest bencoded value that may be stored. For a put, BEP 44 also says "less than 1000 bytes", and npm's client
refuses a value of 1000: write at most 999."""
MAX_SEQUENCE: Final = 2**63 - 1


class ItemError(ValueError):
    """A value exceeds the limits of an item. ``refusal`` is the error with which a node would respond."""

    def __init__(self, refusal: KrpcRefusal) -> None:
        super().__init__(f"{refusal.text.decode()} (error {refusal.code})")
        self.refusal = refusal


class Item(Struct, frozen=True):
    """A mutable item; ``value`` is bencoded. Not verified: see `find_refusal`."""

    key: bytes
    salt: bytes
    sequence: int
    value: bytes
    signature: bytes

    @property
    def target(self) -> bytes:
        return compute_target(self.key, self.salt)


def compute_target(key: bytes, salt: bytes = b"") -> bytes:
    """Compute the target of the items of ``key`` under ``salt``: 20 bytes."""
    return hashlib.sha1(key + salt, usedforsecurity=False).digest()


def build_signed_bytes(salt: bytes, sequence: int, value: bytes) -> bytes:
    """Build the bytes that are signed; ``value`` is bencoded."""
    prefix = b"4:salt%d:%b" % (len(salt), salt) if salt else b""
    return b"%b3:seqi%de1:v%b" % (prefix, sequence, value)


def sign(key: SigningKey, salt: bytes, sequence: int, value: bytes) -> Item:
    """Create an item of a bencoded value.

    Raises:
        ItemError: No node may store the item.
        BencodeError: The value is not canonical.
    """
    bencode.decode(value)
    signature = key.sign(build_signed_bytes(salt, sequence, value)).signature
    item = Item(key.verify_key.encode(), salt, sequence, value, signature)
    refusal = find_exceeded_limit(item)
    if refusal is not None:
        raise ItemError(refusal)
    return item


def find_exceeded_limit(item: Item) -> KrpcRefusal | None:
    """Return the limit that the item exceeds (size of salt or value, range of the sequence), if any."""
    if len(item.salt) > MAX_SALT:
        return SALT_TOO_BIG
    if len(item.value) > MAX_VALUE:
        return VALUE_TOO_BIG
    if not 0 <= item.sequence <= MAX_SEQUENCE:  # BEP 44 lets a node refuse numbers outside this range; libtorrent does
        return BAD_SEQUENCE
    return None


def is_signed(item: Item) -> bool:
    """Return true if the item's key made the signature (45 µs)."""
    try:
        VerifyKey(item.key).verify(build_signed_bytes(item.salt, item.sequence, item.value), item.signature)
    except (BadSignatureError, ValueError):  # ValueError: a key or signature of another size
        return False
    return True


def find_refusal(item: Item) -> KrpcRefusal | None:
    """Return the reason why a node must not store the item, if any."""
    return find_exceeded_limit(item) or (None if is_signed(item) else BAD_SIGNATURE)


def build_item_fields(item: Item) -> dict[bytes, Value]:
    """Build ``k``, ``seq``, ``sig`` and ``v`` of a get response. A put also has ``salt`` (see `build_put_fields`)."""
    return {
        b"k": item.key,
        b"seq": item.sequence,
        b"sig": item.signature,
        b"v": bencode.decode(item.value),
    }


def build_put_fields(item: Item) -> dict[bytes, Value]:
    """Build the fields of an item in the arguments of a put. An empty salt is left out."""
    return build_item_fields(item) | ({b"salt": item.salt} if item.salt else {})


def read_item(fields: dict[bytes, Value], salt: bytes | None = None) -> Item | KrpcRefusal:
    """Read an item, unverified, out of a put's arguments or a get's values.

    ``salt`` is given for a get response, which has none on the wire.
    """
    key, sequence, signature = fields.get(b"k"), fields.get(b"seq"), fields.get(b"sig")
    item_salt = fields.get(b"salt", b"") if salt is None else salt
    if (
        not isinstance(key, bytes)
        or len(key) != KEY_SIZE
        or not isinstance(sequence, int)
        or not isinstance(signature, bytes)
        or len(signature) != SIGNATURE_SIZE
        or not isinstance(item_salt, bytes)
        or b"v" not in fields
    ):
        return BAD_ARGUMENTS
    # Decoding is strict, so encoding gives back the very bytes that were received, and signed.
    return Item(key, item_salt, sequence, bencode.encode(fields[b"v"]), signature)
