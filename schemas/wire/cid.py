"""CIDs as bytes and as text. The parser reads lengths, but does not check codecs and hash codes.

Layout (multiformats CID specification)::

    CIDv0 = 12 20 <32-byte digest>                                          text: base58btc with no prefix, "Qm…"
    CIDv1 = 01 varint(codec) varint(hash code) varint(digest length) <digest>   text: multibase

A parser that checks the codes against the multicodec table would refuse CIDs that Ceramic uses: the CID of its
metamodel has 0x71 as hash code, which is not a hash (an old mistake), and proofs contain CIDs with codec 0x00.
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
"""Maximum number of bytes of a digest: Kubo's limit for identity hashes. Real hashes have at most 64. The limit bounds
the work for a hostile CID, because decoding base 36 and base 58 takes quadratic time."""

MAX_TEXT = 1280
"""Maximum number of characters of a CID's text: for a digest of MAX_DIGEST bytes, in base 2."""

# Prefixes of nearly all CIDs in Ceramic traffic: sha2-256 of DAG-CBOR and of DAG-JOSE.
_DAG_CBOR_SHA256 = b"\x01\x71\x12\x20"
_DAG_JOSE_SHA256 = b"\x01\x85\x01\x12\x20"

USUAL_TEXT: Final = "bafyrei[a-h][a-z2-7]{50}[aeimquy4]|bagcqcera[a-z2-7]{51}[aq]"
"""A regular expression for the base32 text of sha2-256 CIDs of DAG-CBOR and DAG-JOSE. In its last character, the bits
that do not belong to the CID's 36 or 37 bytes are 0."""

# libipld also decodes the identity "base" (a NUL, then the bytes), which is not allowed for CIDs.
_MULTIBASES = frozenset("079fFvVtTbBcCkKzZmMuUh")


class CidError(ValueError):
    """The bytes or the text are not a CID."""


def read_varint(buf: bytes, at: int) -> tuple[int, int]:
    """Read the unsigned varint at ``at``. Return its value and the index after it.

    A varint has at most 9 bytes and must have its shortest form (multiformats, unsigned-varint), so that a CID has only
    one binary form.

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
    """Return the index after the CID that starts at ``start``.

    Raises:
        CidError: No CID starts there, or the CID is incomplete or has a digest longer than MAX_DIGEST.
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
    """Return true if the bytes are exactly one CID."""
    size = len(raw)
    if (size == 36 and raw.startswith(_DAG_CBOR_SHA256)) or (size == 37 and raw.startswith(_DAG_JOSE_SHA256)):
        return True
    try:
        return find_cid_end(raw) == size
    except CidError:
        return False


def cid_bytes(text: str) -> bytes:
    """Parse the text of a CID: ``Qm…`` for v0, or v1 in any usual multibase. Return its bytes.

    Bases that use letters of one case are accepted in upper and lower case, because host names may change the case. A
    v0 CID with a multibase prefix is refused (CID specification, decoding algorithm).

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
    # as in is_cid, but without a function call for usual CIDs
    if (size == 36 and raw.startswith(_DAG_CBOR_SHA256)) or (size == 37 and raw.startswith(_DAG_JOSE_SHA256)):
        return raw
    if find_cid_end(raw) != size:
        raise CidError(f"{text[:80]!r} has bytes after its CID")
    if plain != raw.startswith(b"\x12\x20"):
        raise CidError(f"{text[:80]!r}: only a version 0 CID has no multibase prefix, and it never has one")
    return raw


def cid_text(raw: bytes) -> str:
    """Format a CID in its usual form: v1 in lower-case base32 (``b…``), v0 in base58btc (``Qm…``).

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
    """Version, codec of the block (DAG_PB in v0), code of the hash function, and digest of a CID."""

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
    """Return the sha2-256 digest in a CID, or a rejection if the CID cannot verify a block.

    Other hash functions, shortened digests and identity CIDs give ``cid_hash_unsupported``. Ceramic uses them only for
    the metamodel, which has no block.
    """
    try:
        _, _, code, digest = parse_cid(cid)
    except CidError as error:
        return Rejected("cid_malformed", str(error))
    if code != SHA2_256 or len(digest) != 32:
        return Rejected("cid_hash_unsupported", f"hash 0x{code:x} of {len(digest)} bytes; only sha2-256 is checked")
    return digest


def check_block(block: bytes, cid: bytes) -> Rejected | None:
    """Verify a block against its CID. Return `None` if they match, otherwise a rejection with one of REASONS."""
    digest = read_sha2_256_digest(cid)
    if isinstance(digest, Rejected):
        return digest
    if hashlib.sha256(block).digest() != digest:
        return Rejected(
            "block_hash_mismatch", f"the block ({len(block)} bytes) does not have the hash in {cid_text(cid)}"
        )
    return None


def compute_cid(block: bytes, codec: int = DAG_CBOR) -> bytes:
    """Compute the CIDv1 of a block, with sha2-256."""
    return b"\x01" + write_varint(codec) + b"\x12\x20" + hashlib.sha256(block).digest()
