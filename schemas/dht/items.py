"""Mutable items of the DHT (BEP 44, Mutable items; Signature Verification).

An item is the latest value that the holder of a key has signed under a salt. ``sha1(key || salt)`` is its target: its
location in the DHT, and the name of its topic in BEP 50. The signature covers these bytes::

    ["4:salt" <length> ":" <salt>] "3:seqi" <sequence> "e1:v" <the bencoded value>         salt only if not empty

An `Item` keeps the value as it was signed: bencoded bytes.
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
"""Maximum number of bytes of a bencoded value that nodes may store. Write at most 999: in another place, BEP 44 says
"less than 1000 bytes", and some clients refuse 1000."""
MAX_SEQUENCE: Final = 2**63 - 1


class ItemError(ValueError):
    """An item exceeds the limits of BEP 44. ``refusal`` is the error that a node would send."""

    def __init__(self, refusal: KrpcRefusal) -> None:
        super().__init__(f"{refusal.text.decode()} (error {refusal.code})")
        self.refusal = refusal


class Item(Struct, frozen=True):
    """A mutable item. ``value`` is bencoded. Its signature is not verified: see `is_signed`."""

    key: bytes
    salt: bytes
    sequence: int
    value: bytes
    signature: bytes

    @property
    def target(self) -> bytes:
        return compute_target(self.key, self.salt)


def compute_target(key: bytes, salt: bytes = b"") -> bytes:
    """Compute the target (20 bytes) of the item that ``key`` signs under ``salt``."""
    return hashlib.sha1(key + salt, usedforsecurity=False).digest()


def build_signed_bytes(salt: bytes, sequence: int, value: bytes) -> bytes:
    """Build the bytes that the signature of an item covers. ``value`` is bencoded."""
    prefix = b"4:salt%d:%b" % (len(salt), salt) if salt else b""
    return b"%b3:seqi%de1:v%b" % (prefix, sequence, value)


def sign(key: SigningKey, salt: bytes, sequence: int, value: bytes) -> Item:
    """Create a signed item of a bencoded value.

    Raises:
        ItemError: The item exceeds a limit of BEP 44.
        BencodeError: The value is not canonical bencoding.
    """
    bencode.decode(value)
    signature = key.sign(build_signed_bytes(salt, sequence, value)).signature
    item = Item(key.verify_key.encode(), salt, sequence, value, signature)
    refusal = find_exceeded_limit(item)
    if refusal is not None:
        raise ItemError(refusal)
    return item


def find_exceeded_limit(item: Item) -> KrpcRefusal | None:
    """Return the error for the limit that an item exceeds (size of salt or value, range of the sequence), or `None`."""
    if len(item.salt) > MAX_SALT:
        return SALT_TOO_BIG
    if len(item.value) > MAX_VALUE:
        return VALUE_TOO_BIG
    if not 0 <= item.sequence <= MAX_SEQUENCE:  # BEP 44 lets a node refuse numbers outside this range; libtorrent does
        return BAD_SEQUENCE
    return None


def is_signed(item: Item) -> bool:
    """Return true if the item's signature is valid for its key, salt, sequence number and value."""
    try:
        VerifyKey(item.key).verify(build_signed_bytes(item.salt, item.sequence, item.value), item.signature)
    except (BadSignatureError, ValueError):  # ValueError: a key or signature of another size
        return False
    return True


def find_refusal(item: Item) -> KrpcRefusal | None:
    """Return the error with which a node refuses to store an item, or `None` if it may store the item."""
    return find_exceeded_limit(item) or (None if is_signed(item) else BAD_SIGNATURE)


def build_item_fields(item: Item) -> dict[bytes, Value]:
    """Build the fields ``k``, ``seq``, ``sig`` and ``v`` of an item in a get response."""
    return {
        b"k": item.key,
        b"seq": item.sequence,
        b"sig": item.signature,
        b"v": bencode.decode(item.value),
    }


def build_put_fields(item: Item) -> dict[bytes, Value]:
    """Build the fields of an item in the arguments of a put: as in a get response, and ``salt`` if it is not empty."""
    return build_item_fields(item) | ({b"salt": item.salt} if item.salt else {})


def read_item(fields: dict[bytes, Value], salt: bytes | None = None) -> Item | KrpcRefusal:
    """Read an item in the arguments of a put or in a get response. Its signature is not checked.

    Args:
        salt: Salt of the item, for a get response, which does not contain it.
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
    # Decoding is strict, so encoding gives the bytes that were received and signed.
    return Item(key, item_salt, sequence, bencode.encode(fields[b"v"]), signature)
