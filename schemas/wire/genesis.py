"""The genesis of a stream: its init event, and the separator in it (CIP-120, Specification; CIP-59; docs/design,
decision 4).

The CID of the first block is in the StreamID. Blocks, all named by sha2-256::

    unsigned   DAG-CBOR   {"data": null or …, "header": {"sep": "model", "model": <bytes>, "controllers": […], …}}
    signed     DAG-JOSE   {"payload": <bytes of the CID of a block as above>, "signatures": […]}

``header.sep`` is the separator's key and names another field of the header, whose bytes are its value: for a model
instance the model's StreamID, for a model the metamodel's. Tiles and CAIP-10 links have no ``sep``, nor have model
instances of before 2023. Whether a signature is the controller's, is not asked: the CID in the StreamID says which
block is the genesis, whoever signed it.

Nothing is fetched here: whoever calls brings the blocks, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from kiln.schemas.reject import Rejected
from kiln.schemas.wire import cid as cids
from kiln.schemas.wire.cid import DAG_CBOR, DAG_JOSE, CidError, parse_cid, cid_text, read_sha2_256_digest, check_block
from kiln.schemas.wire.streamid import StreamID, StreamIdError
from kiln.schemas.wire.topics import Separator, TopicError, format_separator, encode_separator_value

REASONS: Final = (
    *cids.REASONS,
    "cid_codec_unsupported",  # a CID of another codec than an init event has
    "genesis_malformed",  # not CBOR as DAG-CBOR has it, or an envelope without a payload's CID
    "genesis_not_init",  # another block than an init event: it has no header, or something comes before it
)
"""Every reason that ``read_genesis`` rejects with."""

WITHOUT: Final = (
    "sep_missing",  # the header has no `sep`
    "sep_not_text",  # `sep` is not a string
    "value_missing",  # the header has no field of the name that `sep` gives
    "value_not_bytes",  # that field is not a byte string; a link is none
    "value_empty",  # it has no bytes
    "bad_separator",  # a key or value that no topic name can hold
)
"""Every kind of genesis without a separator."""


class Genesis(NamedTuple):
    """Content of an init event: separator, or with None which of WITHOUT it is; and its model's StreamID, if any."""

    separator: Separator | None
    without: str | None
    model: str | None


class NeedsBlock(NamedTuple):
    """The genesis goes on in another block, of this CID (bytes)."""

    cid: bytes


def read_genesis(
    root: bytes, blocks: Mapping[bytes, bytes], implied_separator: str | None = None
) -> Genesis | NeedsBlock | Rejected:
    """Read the genesis of CID ``root`` out of ``blocks`` (CID bytes -> block); NeedsBlock names one that is missing.

    Each block is verified against its CID; what is no genesis is Rejected with one of REASONS, and nothing is raised.
    ``implied_separator``: the key of a header with no ``sep``, if it has that field; rust-ceramic takes "model" so.
    """
    payload = root
    codec = _codec(root)
    if codec == DAG_JOSE:
        envelope = _block(root, blocks)
        if not isinstance(envelope, bytes):
            return envelope
        try:
            payload = _payload_cid(envelope)
            codec = parse_cid(payload).codec
        except (_MalformedError, CidError) as error:
            return Rejected("genesis_malformed", f"signed event {cid_text(root)}: {error}")
    if codec is None:
        return Rejected("cid_malformed", f"{root[:40].hex()} is not a CID")
    if codec != DAG_CBOR:
        return Rejected("cid_codec_unsupported", f"codec 0x{codec:x}; an event is DAG-CBOR, or DAG-JOSE around that")
    block = _block(payload, blocks)
    if not isinstance(block, bytes):
        return block
    try:
        event = _fields(block, 0, whole=True)
        header = event.get(b"header")
        if header is None or block[header] >> 5 != _MAP or event.keys() & {b"prev", b"id"}:
            return Rejected("genesis_not_init", f"{cid_text(payload)} has the fields {_names(event)}")
        return _read_header(block, _fields(block, header), implied_separator)
    except _MalformedError as error:
        return Rejected("genesis_malformed", f"{cid_text(payload)}: {error}")


def _codec(cid: bytes) -> int | None:
    try:
        return parse_cid(cid).codec
    except CidError:
        return None


def _block(cid: bytes, blocks: Mapping[bytes, bytes]) -> bytes | NeedsBlock | Rejected:
    digest = read_sha2_256_digest(cid)
    if isinstance(digest, Rejected):  # told before anybody fetches what could not be checked
        return digest
    if cid not in blocks:
        return NeedsBlock(cid)
    fault = check_block(blocks[cid], cid)
    return blocks[cid] if fault is None else fault


def _payload_cid(envelope: bytes) -> bytes:
    at = _fields(envelope, 0, whole=True).get(b"payload")
    payload = None if at is None else _bytes(envelope, at)
    if payload is None:
        raise _MalformedError("an envelope with no payload in bytes")
    return payload


def _read_header(block: bytes, header: Mapping[bytes, int], implied: str | None) -> Genesis:
    model = _model(block, header)
    if b"sep" in header:
        key = _text(block, header[b"sep"])
        if key is None:
            return Genesis(None, "sep_not_text", model)
    elif implied is not None and implied.encode() in header:
        key = implied
    else:
        return Genesis(None, "sep_missing", model)
    at = header.get(key.encode())
    if at is None:
        return Genesis(None, "value_missing", model)
    value = _bytes(block, at)
    if not value:
        return Genesis(None, "value_not_bytes" if value is None else "value_empty", model)
    try:
        separator = Separator(key, encode_separator_value(value))
        format_separator(separator)
    except TopicError:
        return Genesis(None, "bad_separator", model)
    return Genesis(separator, None, model)


def _model(block: bytes, header: Mapping[bytes, int]) -> str | None:
    raw = _bytes(block, header[b"model"]) if b"model" in header else None
    try:
        return None if raw is None else StreamID.from_bytes(raw).text
    except StreamIdError:
        return None


def _names(fields: Mapping[bytes, int]) -> str:
    return ", ".join(repr(name.decode(errors="replace")[:40]) for name in sorted(fields)[:8]) or "of no map"


# ---------------------------------------------------------------- DAG-CBOR
#
# Walked, not decoded: real headers have 70 kB, of which two fields count. And libipld gives a link and a byte string as
# the same thing, and refuses short floats and keys in another order, which old encoders wrote; cbor2 builds whatever
# object a tag asks for.

_BYTES, _TEXT, _ARRAY, _MAP, _TAG = 2, 3, 4, 5, 6


class _MalformedError(ValueError):
    """Bytes that are not DAG-CBOR; the text names the byte."""


def _head(data: bytes, at: int) -> tuple[int, int, int]:
    """Major type and argument of the item at ``at``, and the index after the head."""
    if at >= len(data):
        raise _MalformedError(f"cut short at byte {at}")
    major, short = data[at] >> 5, data[at] & 0x1F
    if short < 24:
        return major, short, at + 1
    if short > 27:
        raise _MalformedError(f"an indefinite or unknown length at byte {at}, which DAG-CBOR does not have")
    end = at + 1 + (1 << (short - 24))
    if end > len(data):
        raise _MalformedError(f"cut short at byte {at}")
    return major, int.from_bytes(data[at + 1 : end], "big"), end


def _skip(data: bytes, at: int) -> int:
    """The index after the item at ``at``. No recursion: a peer chooses how deep it goes."""
    left = 1
    while left:
        start = at
        major, count, at = _head(data, at)
        left -= 1
        if major in (_BYTES, _TEXT):
            at += count
        elif major == _ARRAY:
            left += count
        elif major == _MAP:
            left += 2 * count
        elif major == _TAG:
            if count != 42:
                raise _MalformedError(f"tag {count} at byte {start}; DAG-CBOR has 42 alone")
            left += 1
        if at + left > len(data):  # each item takes a byte
            raise _MalformedError(f"cut short: what begins at byte {start} does not end")
    return at


def _fields(data: bytes, at: int, *, whole: bool = False) -> dict[bytes, int]:
    """Where the values of the map at ``at`` begin, by key; none if it is no map. ``whole``: the data ends with it."""
    major, count, start = _head(data, at)
    end = _skip(data, at)
    if whole and end != len(data):
        raise _MalformedError(f"{len(data) - end} bytes follow the event")
    fields: dict[bytes, int] = {}
    at = start
    for _ in range(count if major == _MAP else 0):
        kind, size, begin = _head(data, at)
        if kind != _TEXT:
            raise _MalformedError(f"a key that is no text at byte {at}")
        at = begin + size
        if fields.setdefault(data[begin:at], at) != at:
            raise _MalformedError(f"a key twice, again at byte {begin}")
        at = _skip(data, at)
    return fields


def _bytes(data: bytes, at: int) -> bytes | None:
    major, size, start = _head(data, at)
    return data[start : start + size] if major == _BYTES else None


def _text(data: bytes, at: int) -> str | None:
    major, size, start = _head(data, at)
    if major != _TEXT:
        return None
    try:
        return data[start : start + size].decode()
    except UnicodeDecodeError as error:
        raise _MalformedError(f"text that is not UTF-8 at byte {at}") from error
