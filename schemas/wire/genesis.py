"""Reader of the genesis of a stream (its init event), which names the stream's separator (CIP-120, CIP-59, decision 4).

The StreamID contains the CID of the genesis, which consists of one or two blocks::

    unsigned   DAG-CBOR   {"data": null or …, "header": {"sep": "model", "model": <bytes>, "controllers": […], …}}
    signed     DAG-JOSE   {"payload": <bytes of the CID of a block as above>, "signatures": […]}

``header.sep`` is the separator's key. It is the name of another field of the header, whose bytes are the separator's
value: the StreamID of the model in a model instance, that of the metamodel in a model. Tiles, CAIP-10 links and model
instances from before 2023 have no ``sep``. Signatures are not checked, because the CID in the StreamID already
identifies the genesis. This module fetches nothing: the caller provides the blocks, one after the other.
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
"""Quarantine reason of an update that claims a separator other than the one in the genesis of its stream."""


CONTRADICTS_TOPIC: Final = "contradicts_topic"
"""Quarantine reason of a BATCH_UPDATE on the topic of another separator."""


class Claims(NamedTuple):
    """Separators that an update claims: by its message's topic, and by its field `model`, for the key "model"."""

    topic: Separator | None
    model: Separator | None

    @property
    def first(self) -> Separator | None:
        """The claim that counts as the separator until the genesis is known: the topic's, or else the model's."""
        return self.topic or self.model

    @property
    def disagree(self) -> bool:
        """True if topic and model claim different values for the key "model", so that one claim must be false."""
        return (
            self.topic is not None
            and self.model is not None
            and self.topic.key == self.model.key
            and self.topic != self.model
        )

    def find_contradicted(self, verified: Separator) -> Separator | None:
        """Return the first claim that a verified separator shows to be false, or `None`. The field `model` claims
        nothing about a separator with another key."""
        if self.topic is not None and self.topic != verified:
            return self.topic
        if self.model is not None and self.model != verified and self.model.key == verified.key:
            return self.model
        return None


def describe_contradiction(claimed: Separator, verified: Separator) -> str:
    """Describe a false claim, for `detail` in quarantine."""
    return f"claimed {claimed.key}/{claimed.value}; the genesis names {verified.key}/{verified.value}"


REASONS: Final = (
    *cids.REASONS,
    "cid_codec_unsupported",  # the CID's codec is not that of an init event
    "genesis_malformed",  # not CBOR as DAG-CBOR allows it, or an envelope without the CID of its payload
    "genesis_not_init",  # not an init event: the event has no header, or refers to an earlier event
)
"""Every reason that ``read_genesis`` rejects with."""

WITHOUT: Final = (
    "sep_missing",  # the header has no field `sep`
    "sep_not_text",  # `sep` is not a string
    "value_missing",  # the header does not have the field that `sep` names
    "value_not_bytes",  # the field that `sep` names is not a byte string; a link does not count as one
    "value_empty",  # the field that `sep` names is empty
    "bad_separator",  # a key or value that cannot be part of a topic name
)
"""Reasons why a genesis has no separator."""


class Genesis(NamedTuple):
    """Separator and model in the genesis of a stream."""

    separator: Separator | None
    without: str | None
    """reason why there is no separator, one of WITHOUT; `None` if there is one"""
    model: str | None
    """StreamID of the stream's model; `None` if the genesis names no model"""


class NeedsBlock(NamedTuple):
    """Result of `read_genesis` if a block is missing, with the CID (bytes) of the block."""

    cid: bytes


def read_genesis(
    root: bytes, blocks: Mapping[bytes, bytes], implied_separator: str | None = None
) -> Genesis | NeedsBlock | Rejected:
    """Read a genesis, and verify each of its blocks against its CID.

    Args:
        root: CID of the genesis, as bytes.
        blocks: The blocks that have been fetched so far, by CID bytes.
        implied_separator: Separator key to assume if the header has no ``sep``, but a field with this name.
            rust-ceramic assumes "model".

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
        return Rejected("cid_codec_unsupported", f"codec 0x{codec:x}: an event has the codec dag-cbor or dag-jose")
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
# Events are scanned and not decoded: real headers have 70 kB, of which two fields matter. libipld would not distinguish
# links from byte strings, and would refuse short floats and unsorted keys, which old encoders wrote. cbor2 would build
# any object that a tag names.

_BYTES, _TEXT, _ARRAY, _MAP, _TAG = 2, 3, 4, 5, 6
_MAX_ITEMS = 256_000  # an item takes a byte, and js-ceramic loads no event of more bytes (IPFS_MAX_COMMIT_SIZE)


class _MalformedError(ValueError):
    """The bytes are not DAG-CBOR. The message names the position of the invalid byte."""


def _read_head(data: bytes, at: int) -> tuple[int, int, int]:
    """Read the head of the CBOR item at ``at``. Return major type, argument, and the index after the head."""
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
    """Return the index after the CBOR item at ``at``. Not recursive, because a peer chooses the depth."""
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
    """Return the positions of the values in the CBOR map at ``at``, by key. Any other item gives an empty result.

    Args:
        whole: Require that the data ends with the item.
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
