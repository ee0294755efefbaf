"""CIDs as bytes and as text, parsed by their lengths alone.

Layout (multiformats CID specification)::

    CIDv0 = 12 20 <32-byte digest>                                          text: base58btc with no prefix, "Qm…"
    CIDv1 = 01 varint(codec) varint(hash code) varint(digest length) <digest>   text: multibase

No codec and no hash code is looked up. Ceramic's metamodel is named by a CID whose hash code, 0x71, is no hash at all
(an encoding mistake that stays for ever), and proofs hold CIDs of codec 0x00: a parser that checks codes against the
multicodec table refuses both.
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

from libipld import decode_multibase, encode_multibase

from kiln.schemas.reject import Rejected

DAG_CBOR = 0x71
DAG_JOSE = 0x85
CBOR = 0x51
RAW = 0x55
DAG_PB = 0x70
SHA2_256 = 0x12

REASONS: Final = (
    "cid_malformed",  # bytes that are not one CID
    "cid_hash_unsupported",  # a hash other than sha2-256 of 32 bytes, which cannot be checked
    "block_hash_mismatch",  # the block does not have the hash in the CID
)
"""Every reason that ``check_block`` rejects with."""

MAX_DIGEST = 128
"""Longest accepted digest, in bytes: Kubo's limit for an identity hash; no real hash is longer than 64. It bounds the
work that one hostile CID can cause, because base 36 and base 58 take quadratic time."""

MAX_TEXT = 1280
"""Longest accepted CID text, in characters: that of a CID with a digest of MAX_DIGEST bytes, in base 2."""

# The two CIDs that nearly all Ceramic traffic consists of: sha2-256 of DAG-CBOR and of DAG-JOSE.
_DAG_CBOR_SHA256 = b"\x01\x71\x12\x20"
_DAG_JOSE_SHA256 = b"\x01\x85\x01\x12\x20"

USUAL_TEXT: Final = "bafyrei[a-h][a-z2-7]{50}[aeimquy4]|bagcqcera[a-z2-7]{51}[aq]"
"""A regular expression that matches the usual text, base32, of sha2-256 CIDs of DAG-CBOR and DAG-JOSE. The CIDs have 36
and 37 bytes, and the unused bits at the end of the text are 0."""

# libipld also knows the identity "base" (a NUL, then the bytes as they are); no CID is written in it.
_MULTIBASES = frozenset("079fFvVtTbBcCkKzZmMuUh")


class CidError(ValueError):
    """The bytes or the text are not exactly one CID."""


def read_varint(buf: bytes, at: int) -> tuple[int, int]:
    """Read an unsigned varint at ``at``; return its value and the index after it.

    A varint has at most 9 bytes and must be the shortest form (multiformats unsigned-varint specification), because two
    forms of one CID would be two keys.

    Raises:
        CidError: There is no such varint.
    """
    value = shift = 0
    for index in range(at, min(at + 9, len(buf))):
        byte = buf[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if not byte and shift:
                raise CidError(f"varint at byte {at} is not in its shortest form")
            return value, index + 1
        shift += 7
    raise CidError(f"varint at byte {at} has no end")


def write_varint(value: int) -> bytes:
    """Write an unsigned varint in its shortest form."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def find_cid_end(buf: bytes, start: int = 0) -> int:
    """Return the index just after the CID that starts at ``start``.

    Raises:
        CidError: No CID starts there, it is incomplete, or its digest is longer than MAX_DIGEST.
    """
    if buf[start : start + 2] == b"\x12\x20":
        end = start + 34
    else:
        version, at = read_varint(buf, start)
        if version != 1:
            raise CidError(f"CID version {version} at byte {start}; only 0 and 1 exist")
        _, at = read_varint(buf, at)
        _, at = read_varint(buf, at)
        length, at = read_varint(buf, at)
        if length > MAX_DIGEST:
            raise CidError(f"CID at byte {start} has a digest of {length} bytes; at most {MAX_DIGEST} are accepted")
        end = at + length
    if end > len(buf):
        raise CidError(f"CID at byte {start} is cut short: {end - len(buf)} bytes are missing")
    return end


def is_cid(raw: bytes) -> bool:
    """Return true if ``raw`` is exactly one CID."""
    size = len(raw)
    if (size == 36 and raw.startswith(_DAG_CBOR_SHA256)) or (size == 37 and raw.startswith(_DAG_JOSE_SHA256)):
        return True
    try:
        return find_cid_end(raw) == size
    except CidError:
        return False


def cid_bytes(text: str) -> bytes:
    """Return the bytes of a CID from its text: v0 ``Qm…``, or v1 in any usual multibase.

    Case follows the multibase table: a base that uses one case is read in either case, because base32 and base36 may
    change case in host names. A v0 CID with a multibase prefix is refused (CID specification, decoding algorithm).

    Raises:
        CidError: The text is not a CID.
    """
    if len(text) > MAX_TEXT:
        raise CidError(f"text of {len(text)} characters is not a CID; at most {MAX_TEXT} are accepted")
    plain = text.startswith("Q")
    if not plain and text[:1] not in _MULTIBASES:
        raise CidError(f"{text[:80]!r} starts with no multibase prefix of a CID")
    try:
        raw: bytes = decode_multibase("z" + text if plain else text)[1]
    except ValueError as error:
        raise CidError(f"{text[:80]!r} is not valid in its multibase") from error
    size = len(raw)
    # Repeated from is_cid so that the usual CID costs no further call.
    if (size == 36 and raw.startswith(_DAG_CBOR_SHA256)) or (size == 37 and raw.startswith(_DAG_JOSE_SHA256)):
        return raw
    if find_cid_end(raw) != size:
        raise CidError(f"{text[:80]!r} has bytes after its CID")
    if plain != raw.startswith(b"\x12\x20"):
        raise CidError(f"{text[:80]!r}: only a version 0 CID has no multibase prefix, and it never has one")
    return raw


def cid_text(raw: bytes) -> str:
    """Return the usual text of a CID: v1 in lower-case base32 (``b…``), v0 in base58btc (``Qm…``).

    Raises:
        CidError: ``raw`` is not exactly one CID.
    """
    if not is_cid(raw):
        raise CidError(f"{len(raw) - find_cid_end(raw)} bytes follow the CID")
    if raw.startswith(b"\x12\x20"):
        base58: str = encode_multibase("z", raw)
        return base58[1:]
    base32: str = encode_multibase("b", raw)
    return base32


class CidParts(NamedTuple):
    """Parts of a CID: version, codec of the block (v0: DAG_PB), code of the hash, and the digest."""

    version: int
    codec: int
    hash: int
    digest: bytes


def parse_cid(raw: bytes) -> CidParts:
    """Split a CID into its parts.

    Raises:
        CidError: ``raw`` is not exactly one CID.
    """
    if not is_cid(raw):
        raise CidError(f"{len(raw) - find_cid_end(raw)} bytes follow the CID")
    if raw.startswith(b"\x12\x20"):
        return CidParts(0, DAG_PB, SHA2_256, raw[2:])
    codec, at = read_varint(raw, 1)
    code, at = read_varint(raw, at)
    _, at = read_varint(raw, at)
    return CidParts(1, codec, code, raw[at:])


def read_sha2_256_digest(cid: bytes) -> bytes | Rejected:
    """Extract the digest that the CID's block must have, or the reason why no block can be checked against the CID.

    Only sha2-256 is checked, because Ceramic uses another hash only for the metamodel, which has no block. A shortened
    digest is no proof, and an identity CID contains the block itself: both are ``cid_hash_unsupported``.
    """
    try:
        _, _, code, digest = parse_cid(cid)
    except CidError as error:
        return Rejected("cid_malformed", str(error))
    if code != SHA2_256 or len(digest) != 32:
        return Rejected("cid_hash_unsupported", f"hash 0x{code:x} of {len(digest)} bytes; only sha2-256 is checked")
    return digest


def check_block(block: bytes, cid: bytes) -> Rejected | None:
    """Check a block against its CID, and return None if they match, else the reason (one of REASONS)."""
    digest = read_sha2_256_digest(cid)
    if isinstance(digest, Rejected):
        return digest
    if hashlib.sha256(block).digest() != digest:
        return Rejected(
            "block_hash_mismatch", f"the block ({len(block)} bytes) does not have the hash in {cid_text(cid)}"
        )
    return None


def compute_cid(block: bytes, codec: int = DAG_CBOR) -> bytes:
    """Return the CIDv1 of a block: ``codec``, sha2-256."""
    return b"\x01" + write_varint(codec) + b"\x12\x20" + hashlib.sha256(block).digest()
