"""The genesis of a stream: its init event, and the separator in it (CIP-120, Specification; CIP-59; docs/design,
decision 4).

The CID of the first block is in the StreamID. Blocks, all named by sha2-256::

    unsigned   DAG-CBOR   {"data": null or …, "header": {"sep": "model", "model": <bytes>, "controllers": […], …}}
    signed     DAG-JOSE   {"payload": <bytes of the CID of a block as above>, "signatures": […]}

``header.sep`` is the separator's key. It names another field of the header, whose bytes are the separator's value: the
model's StreamID in a model instance, the metamodel's StreamID in a model. Tiles, CAIP-10 links and model instances from
before 2023 have no ``sep``. Signatures are not checked: the CID in the StreamID identifies the genesis, whoever signed.

Nothing is fetched here: the caller provides the blocks, one after the other. `Claims` are what a sender claims about
the separator of an update; they are compared with a verified genesis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from kiln.schemas.reject import Rejected
from kiln.schemas.wire import cid as cids
from kiln.schemas.wire.cid import DAG_CBOR, DAG_JOSE, CidError, check_block, cid_text, parse_cid, read_sha2_256_digest
from kiln.schemas.wire.streamid import StreamID, StreamIdError
from kiln.schemas.wire.topics import Separator, TopicError, encode_separator_value, format_separator

CONTRADICTS: Final = "contradicts_genesis"
"""Quarantine reason of a false claim."""


CONTRADICTS_TOPIC: Final = "contradicts_topic"
"""Quarantine reason of a BATCH_UPDATE on the topic of another separator."""


class Claims(NamedTuple):
    """The separators that the topic and the field `model` claim. The key of the field's separator is always "model"."""

    topic: Separator | None
    model: Separator | None

    @property
    def first(self) -> Separator | None:
        """The claim that applies while no genesis is known."""
        return self.topic or self.model

    @property
    def disagree(self) -> bool:
        """True if one of the two claims must be false. A field `model` claims nothing about another key."""
        return (
            self.topic is not None
            and self.model is not None
            and self.topic.key == self.model.key
            and self.topic != self.model
        )

    def find_contradicted(self, verified: Separator) -> Separator | None:
        """Return the first claim that this verified separator contradicts, if any."""
        if self.topic is not None and self.topic != verified:
            return self.topic
        if self.model is not None and self.model != verified and self.model.key == verified.key:
            return self.model
        return None


def describe_contradiction(claimed: Separator, verified: Separator) -> str:
    """Describe a false claim for quarantine."""
    return f"claimed {claimed.key}/{claimed.value}; the genesis names {verified.key}/{verified.value}"


REASONS: Final = (
    *cids.REASONS,
    "cid_codec_unsupported",  # the CID's codec is not that of an init event
    "genesis_malformed",  # not CBOR as DAG-CBOR allows it, or an envelope without the CID of its payload
    "genesis_not_init",  # not an init event: the event has no header, or refers to an earlier event
)
"""Every reason that ``read_genesis`` rejects with."""

WITHOUT: Final = (
    "sep_missing",  # the header has no `sep`
    "sep_not_text",  # `sep` is not a string
    "value_missing",  # the header has no field of the name that `sep` gives
    "value_not_bytes",  # the field that `sep` names is not a byte string; a link does not count as one
    "value_empty",  # the field that `sep` names is empty
    "bad_separator",  # a key or value that no topic name can hold
)
"""Every kind of genesis without a separator."""


class Genesis(NamedTuple):
    """Content of an init event."""

    separator: Separator | None
    without: str | None
    """one of WITHOUT, if there is no separator"""
    model: str | None
    """the model's StreamID, if any"""


class NeedsBlock(NamedTuple):
    """The genesis continues in another block, which has this CID (bytes)."""

    cid: bytes


def read_genesis(
    root: bytes, blocks: Mapping[bytes, bytes], implied_separator: str | None = None
) -> Genesis | NeedsBlock | Rejected:
    """Read a genesis, and verify each of its blocks against its CID.

    Args:
        root: CID of the genesis, as bytes.
        blocks: The blocks fetched so far, by CID bytes.
        implied_separator: Separator key for a header that has no ``sep``, but a field of this name. rust-ceramic uses
            "model".

    Returns:
        The genesis, `NeedsBlock` if a block is missing, or a rejection with one of REASONS.
    """
    payload = root
    codec = _read_codec(root)
    if codec == DAG_JOSE:
        envelope = _get_block(root, blocks)
        if not isinstance(envelope, bytes):
            return envelope
        try:
            payload = _read_payload_cid(envelope)
            codec = parse_cid(payload).codec
        except (_MalformedError, CidError) as error:
            return Rejected("genesis_malformed", f"signed event {cid_text(root)}: {error}")
    if codec is None:
        return Rejected("cid_malformed", f"{root[:40].hex()} is not a CID")
    if codec != DAG_CBOR:
        return Rejected("cid_codec_unsupported", f"codec 0x{codec:x}; an event is DAG-CBOR, or that in DAG-JOSE")
    block = _get_block(payload, blocks)
    if not isinstance(block, bytes):
        return block
    try:
        event = _read_fields(block, 0, whole=True)
        header = event.get(b"header")
        if header is None or block[header] >> 5 != _MAP or event.keys() & {b"prev", b"id"}:
            return Rejected(
                "genesis_not_init", f"{cid_text(payload)} is not an init event; its fields: {_list_names(event)}"
            )
        return _read_header(block, _read_fields(block, header), implied_separator)
    except _MalformedError as error:
        return Rejected("genesis_malformed", f"{cid_text(payload)}: {error}")


def _read_codec(cid: bytes) -> int | None:
    try:
        return parse_cid(cid).codec
    except CidError:
        return None


def _get_block(cid: bytes, blocks: Mapping[bytes, bytes]) -> bytes | NeedsBlock | Rejected:
    digest = read_sha2_256_digest(cid)
    if isinstance(digest, Rejected):  # before the fetch of a block that could not be verified
        return digest
    if cid not in blocks:
        return NeedsBlock(cid)
    fault = check_block(blocks[cid], cid)
    return blocks[cid] if fault is None else fault


def _read_payload_cid(envelope: bytes) -> bytes:
    at = _read_fields(envelope, 0, whole=True).get(b"payload")
    payload = None if at is None else _read_bytes(envelope, at)
    if payload is None:
        raise _MalformedError("the envelope has no payload of bytes")
    return payload


def _read_header(block: bytes, header: Mapping[bytes, int], implied: str | None) -> Genesis:
    model = _read_model(block, header)
    if b"sep" in header:
        key = _read_text(block, header[b"sep"])
        if key is None:
            return Genesis(None, "sep_not_text", model)
    elif implied is not None and implied.encode() in header:
        key = implied
    else:
        return Genesis(None, "sep_missing", model)
    at = header.get(key.encode())
    if at is None:
        return Genesis(None, "value_missing", model)
    value = _read_bytes(block, at)
    if not value:
        return Genesis(None, "value_not_bytes" if value is None else "value_empty", model)
    try:
        separator = Separator(key, encode_separator_value(value))
        format_separator(separator)
    except TopicError:
        return Genesis(None, "bad_separator", model)
    return Genesis(separator, None, model)


def _read_model(block: bytes, header: Mapping[bytes, int]) -> str | None:
    raw = _read_bytes(block, header[b"model"]) if b"model" in header else None
    try:
        return None if raw is None else StreamID.from_bytes(raw).text
    except StreamIdError:
        return None


def _list_names(fields: Mapping[bytes, int]) -> str:
    return ", ".join(repr(name.decode(errors="replace")[:40]) for name in sorted(fields)[:8]) or "none"


# ---------------------------------------------------------------- DAG-CBOR
#
# The data is scanned, not decoded: real headers have 70 kB, of which two fields count. libipld does not distinguish a
# link from a byte string, and refuses short floats and keys in another order, which old encoders wrote. cbor2 builds
# any object that a tag names.

_BYTES, _TEXT, _ARRAY, _MAP, _TAG = 2, 3, 4, 5, 6
_MAX_ITEMS = 256_000  # js-ceramic loads no event of more bytes (IPFS_MAX_COMMIT_SIZE), and an item takes a byte


class _MalformedError(ValueError):
    """The bytes are not DAG-CBOR; the message names the byte."""


def _read_head(data: bytes, at: int) -> tuple[int, int, int]:
    """Read the major type and argument of the item at ``at``, and the index after the head."""
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
    """Find the index after the item at ``at``, without recursion, because a peer chooses the depth."""
    left, items = 1, 0
    while left:
        start = at
        items += 1
        if items + left > _MAX_ITEMS:
            raise _MalformedError(f"more than {_MAX_ITEMS} items at byte {start}")
        major, count, at = _read_head(data, at)
        left -= 1
        if major in (_BYTES, _TEXT):
            at += count
        elif major == _ARRAY:
            left += count
        elif major == _MAP:
            left += 2 * count
        elif major == _TAG:
            if count != 42:
                raise _MalformedError(f"tag {count} at byte {start}, but DAG-CBOR allows only tag 42")
            left += 1
        if at + left > len(data):  # each item takes a byte
            raise _MalformedError(f"cut short: the item at byte {start} does not end")
    return at


def _read_fields(data: bytes, at: int, *, whole: bool = False) -> dict[bytes, int]:
    """Find the starts of the values of the map at ``at``, by key; empty if the item is no map.

    ``whole``: the data must end with the map.
    """
    major, count, start = _read_head(data, at)
    end = _skip(data, at)
    if whole and end != len(data):
        raise _MalformedError(f"{len(data) - end} bytes follow the event")
    fields: dict[bytes, int] = {}
    at = start
    for _ in range(count if major == _MAP else 0):
        kind, size, begin = _read_head(data, at)
        if kind != _TEXT:
            raise _MalformedError(f"a key that is not text at byte {at}")
        at = begin + size
        if fields.setdefault(data[begin:at], at) != at:
            raise _MalformedError(f"a key that occurs twice, again at byte {begin}")
        at = _skip(data, at)
    return fields


def _read_bytes(data: bytes, at: int) -> bytes | None:
    major, size, start = _read_head(data, at)
    return data[start : start + size] if major == _BYTES else None


def _read_text(data: bytes, at: int) -> str | None:
    major, size, start = _read_head(data, at)
    if major != _TEXT:
        return None
    try:
        return data[start : start + size].decode()
    except UnicodeDecodeError as error:
        raise _MalformedError(f"text that is not UTF-8 at byte {at}") from error
