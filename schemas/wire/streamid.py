"""StreamIDs (CIP-59).

Layout::

    StreamID = varint(0xce) varint(type) <genesis CID>
    CommitID = varint(0xce) varint(type) <genesis CID> ( 00 | <commit CID> )        00: the commit is the genesis

The text is multibase base36, "k…". A CommitID is refused. It can have the same length and prefix as a StreamID: only
the bytes distinguish them. Stream types in use: 0 tile, 1 caip10-link, 2 model, 3 model instance, 4 metamodel. Type 5
is an EventID (CIP-124) and is refused. Other types are accepted, so that traffic of a new type is not lost.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, TypeAlias

from libipld import encode_multibase

from kiln.schemas.wire.cid import CidError, cid_text, find_cid_end, read_varint, write_varint

TILE = 0
CAIP10_LINK = 1
MODEL = 2
MODEL_INSTANCE = 3
EVENT_ID = 5

METAMODEL = "kh4q0ozorrgaq2mezktnrmdwleo1d"
"""StreamID of the metamodel, which is the model of every model."""

MAX_TEXT = 640
"""Maximum number of characters of a StreamID's or CommitID's text: for two CIDs with digests of
kiln.schemas.wire.cid.MAX_DIGEST bytes."""

_CODEC = b"\xce\x01"
_Bytes: TypeAlias = bytes  # inside the class, `bytes` is its property


class StreamIdError(ValueError):
    """The bytes or the text are not a StreamID."""


class StreamID(NamedTuple):
    """Id of a stream: the stream's type, and the CID of its genesis as bytes."""

    type: int
    genesis: bytes

    @property
    def bytes(self) -> bytes:
        """The id as bytes."""
        return _CODEC + write_varint(self.type) + self.genesis

    @property
    def text(self) -> str:
        """The id as base36 text, ``k…``."""
        return _encode_base36(self.bytes)

    @classmethod
    def from_bytes(cls, raw: _Bytes) -> StreamID:
        """Parse the bytes of a StreamID.

        Raises:
            StreamIdError: The bytes are not a StreamID. A CommitID is refused too.
        """
        if not raw.startswith(_CODEC):
            raise StreamIdError(f"bytes {raw[:4].hex()}… do not start with the StreamID codec, ce01")
        try:
            kind, at = read_varint(raw, 2)
            if kind == EVENT_ID:
                raise StreamIdError("this is an EventID (type 5), not a StreamID")
            end = find_cid_end(raw, at)
        except CidError as error:
            raise StreamIdError(f"bytes {raw[:8].hex()}… hold no genesis CID: {error}") from error
        if end != len(raw):
            raise StreamIdError(_describe_rest(raw[end:]))
        return cls(kind, raw[at:end])

    @classmethod
    def parse(cls, text: str) -> StreamID:
        """Parse the text of a StreamID: ``k…``, ``ceramic://k…`` or ``/ceramic/k…``.

        Raises:
            StreamIdError: The text is not a StreamID. A CommitID is refused too.
        """
        return cls.from_bytes(_decode_text(_strip_scheme(text)))


def stream_text(text: str) -> str:
    """Convert any accepted text of a StreamID to its canonical base36 text.

    Results are cached, because messages repeat the same streams and models.

    Raises:
        StreamIdError: The text is not a StreamID. A CommitID is refused too.
    """
    if len(text) > MAX_TEXT:  # before the cache, so that it stores no large text
        raise StreamIdError(f"text of {len(text)} characters is not a StreamID; at most {MAX_TEXT} are accepted")
    return _stream_text(text)


@lru_cache(maxsize=65536)
def _stream_text(text: str) -> str:
    body = _strip_scheme(text)
    usual = _USUAL.get(body[:_PREFIX])
    # Texts of one length sort like their bytes, so a text between the least and the greatest usual StreamID is valid.
    if usual and len(body) == len(usual[0]) and usual[0] <= body <= usual[1] and _is_base36(body):
        return body
    StreamID.from_bytes(_decode_text(body))
    return body  # canonical, because _decode_text accepts lower case only


def _encode_base36(raw: bytes) -> str:
    text: str = encode_multibase("k", raw)
    return text


def _strip_scheme(text: str) -> str:
    if text.startswith("ceramic://"):
        return text[10:]
    return text.removeprefix("/ceramic/")


def _decode_text(text: str) -> bytes:
    # int() alone would accept signs, spaces, underscores, upper case and digits of any script
    if len(text) > MAX_TEXT:
        raise StreamIdError(f"text of {len(text)} characters is not a StreamID; at most {MAX_TEXT} are accepted")
    if not _is_base36(text) or text[1:2] in ("", "0"):
        # a leading 0 would be a leading zero byte, but ids start with 0xce
        raise StreamIdError(f"{text[:80]!r} is not the base36 text (k…) of a StreamID")
    number = int(text[1:], 36)
    return number.to_bytes((number.bit_length() + 7) // 8, "big")


def _is_base36(text: str) -> bool:
    return text.startswith("k") and text.isascii() and text.isalnum() and text.islower()


def _describe_rest(rest: bytes) -> str:
    if rest == b"\x00":
        return "this is a CommitID (of the genesis), not a StreamID"
    try:
        if find_cid_end(rest) == len(rest):
            return f"this is a CommitID (of {cid_text(rest)}), not a StreamID"
    except CidError:
        pass
    return f"{len(rest)} bytes that are not a CID follow the genesis CID"


def _compute_usual_ranges() -> dict[str, tuple[str, str]]:
    """Compute, by prefix, the least and the greatest text of each usual kind of StreamID. A usual StreamID has a type
    below 5, and the CID of a genesis in DAG-CBOR or DAG-JOSE with sha2-256.
    """
    ranges: dict[str, tuple[str, str]] = {}
    for kind in range(EVENT_ID):
        for genesis in (b"\x01\x71\x12\x20", b"\x01\x85\x01\x12\x20"):
            least, greatest = (
                _encode_base36(_CODEC + bytes((kind,)) + genesis + digit * 32) for digit in (b"\x00", b"\xff")
            )
            ranges[least[:_PREFIX]] = least, greatest
    return ranges


_PREFIX = 8
_USUAL = _compute_usual_ranges()
