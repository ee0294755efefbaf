"""Reader and writer of the pubsub messages of all js-ceramic versions.

A message is a JSON object (UTF-8) in the field ``data`` of a gossipsub message. Its form depends on the *era*, that is,
on the version of js-ceramic. The first version with a form is in brackets::

    2020         {"typ":0,"id":"/ceramic/<CID>","cid":"<CID>","doctype":"tile"}       REQUEST: typ 1, without cid
                 {"typ":2,"id":"/ceramic/<CID>","cid":"<CID>","doctype":"tile"}       also "ceramic://<CID>"
    doc          {"typ":0,"doc":…,"tip":…}                   [0.14.1, CIP-71]
                 {"typ":1,"doc":…,"id":…}
                 {"typ":2,"id":…,"tips":{"<StreamID>":"<CID>"}}                       from here on
    doc+stream   {"typ":0,"doc":…,"stream":…,"tip":…}        [1.0.0]; + "model" [2.3.0]
                 {"typ":1,"stream":…,"id":…,"doc":…}
    stream       {"typ":0,"stream":…,"tip":…,"model":…}      [2.31.0]; "model" is optional
                 {"typ":1,"stream":…,"id":…}
    keepalive    {"typ":3,"ts":…}                            [1.3.0]; + "ver" [2.0.4]; + "ipfsVer" [2.35.0]
    batch        {"typ":3,"sep":"<key>/<value>","batch":"<CID>"}    CIP-123

The reader recognizes the era by the fields, not by their order, because clients order keys differently and add others.

JSON is parsed as js-ceramic does (``TextDecoder``, ``JSON.parse``). Bytes that are not UTF-8 become U+FFFD, and a
leading byte order mark is dropped. If a key repeats, its last value counts. 1, 1.0 and 1e0 are the same number, and
``true`` is not a number. Unknown keys are allowed. An optional field must not be ``null``. Unlike in js-ceramic,
escapes of lone surrogates, numbers beyond a double, and more than 1,024 levels of nesting are rejected as
``invalid_json``, because later stages could not store them.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, TypeGuard

import cbor2
import msgspec
import orjson

from kiln.schemas.reject import Rejected
from kiln.schemas.wire.batch_block import is_block_cid
from kiln.schemas.wire.cid import CidError, cid_bytes, cid_text
from kiln.schemas.wire.streamid import CAIP10_LINK, TILE, StreamID, StreamIdError, stream_text
from kiln.schemas.wire.topics import Separator, TopicError, format_separator, parse_separator

MessageType = Literal["UPDATE", "QUERY", "RESPONSE", "KEEPALIVE", "BATCH_UPDATE", "DATA"]
Era = Literal["2020", "doc", "doc+stream", "stream"]

UPDATE: Final = 0
QUERY: Final = 1
RESPONSE: Final = 2
KEEPALIVE: Final = 3
BATCH_UPDATE: Final = 3
"""Number of BATCH_UPDATE in CIP-123, which KEEPALIVE already had (decision 3)."""
BATCH_UPDATE_OTHER: Final = 4
"""Number of BATCH_UPDATE in networks that avoid the conflict with KEEPALIVE."""

MAX_TIMESTAMP = 8_640_000_000_000_000
"""Maximum of the absolute value of ``ts``, in ms since the epoch: the range of a JavaScript Date."""

MAX_DATA: Final = 1 << 20
"""Maximum number of bytes of a message's data that is parsed as JSON. Parsing an object of this size takes 35 ms of
CPU."""

REASONS = (
    "data_too_large",  # data over MAX_DATA, which no go-libp2p peer would pass on
    "invalid_json",  # not JSON as described above; NaN and Infinity are not JSON
    "not_an_object",  # JSON, but not an object
    "unknown_typ",  # `typ` is missing, not a number, or not the number of a message type
    "missing_stream",  # none of `stream`, `doc`, or `id` with `doctype`
    "bad_stream",  # the stream's id is not the text of a StreamID; a CommitID is refused too
    "unknown_doctype",  # 2020: a `doctype` other than tile and caip10-link, for which no StreamID is known
    "missing_tip",  # UPDATE without `tip`; 2020: UPDATE or RESPONSE without `cid`
    "bad_tip",  # a tip that is not the text of a CID
    "bad_model",  # `model` present and not a StreamID; also null
    "missing_id",  # QUERY or RESPONSE without `id`
    "bad_id",  # `id` of a QUERY or RESPONSE that is not a string
    "missing_tips",  # RESPONSE with neither `tips` nor the 2020 fields
    "bad_tips",  # `tips` is not an object, or a key of it is not a StreamID
    "conflicting_tips",  # two spellings of one StreamID in `tips` with different tips
    "ambiguous_shape",  # KEEPALIVE and BATCH_UPDATE at once: string `sep` and `batch`, and numeric `ts`
    "unknown_shape",  # a typ of KEEPALIVE or BATCH_UPDATE with the fields of neither
    "bad_ts",  # KEEPALIVE: `ts` outside the range of a date
    "bad_version",  # KEEPALIVE: `ver` or `ipfsVer` present and not a string
    "bad_separator",  # BATCH_UPDATE: `sep` is not "<key>/<value in base36>"
    "bad_batch",  # BATCH_UPDATE: `batch` is not a CID
    "unusable_batch",  # BATCH_UPDATE: a CID that names no batch block (kiln.schemas.wire.batch_block, is_block_cid)
)
"""Reasons for which ``read_message`` rejects data."""

_JSON: TypeAlias = "dict[str, _JSON] | list[_JSON] | str | int | float | bool | None"

_DOCTYPES = {"tile": TILE, "caip10-link": CAIP10_LINK}


class PubsubMessage(msgspec.Struct, frozen=True):
    """A pubsub message of any era. StreamIDs and CIDs are in canonical form: base36, and base32 (v0: base58).

    Fields by type of message:

    ====================  =====================================================================================
    UPDATE                stream, tip, model if it was sent
    QUERY                 stream, query_id (None in the 2020 form, whose ``id`` is the stream)
    RESPONSE              tips: StreamID -> CID, possibly empty; query_id (None in the 2020 form)
    KEEPALIVE             ts (ms since the epoch), ver, ipfs_ver
    BATCH_UPDATE          sep ("<key>/<value>", see kiln.schemas.wire.topics), batch
    DATA                  none: a message of a network that is not Ceramic's, which `read_message` never returns
    ====================  =====================================================================================

    ``query_id`` is the text as sent, usually base64url. Before 2021 it was a list of decimals, and some clients compute
    it in their own way.
    """

    type: MessageType
    stream: str | None = None
    tip: str | None = None
    model: str | None = None
    sep: str | None = None
    batch: str | None = None
    query_id: str | None = None
    tips: dict[str, str] | None = None
    ts: int | None = None
    ver: str | None = None
    ipfs_ver: str | None = None


def read_message(data: bytes, batch_typ: int = BATCH_UPDATE) -> PubsubMessage | Rejected:
    """Read the data of a pubsub message. Never raises, whatever the bytes.

    Args:
        batch_typ: The network's number for BATCH_UPDATE; 3 and 4 are accepted too. The fields of the message
            distinguish it from a KEEPALIVE (decision 3).

    Returns:
        The message, or a rejection with one of REASONS.
    """
    if len(data) > MAX_DATA:
        return Rejected("data_too_large", f"{len(data):,} bytes of data; the limit is {MAX_DATA:,}")
    try:
        message: _JSON = orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            # as TextDecoder decodes; hardly any message needs it
            message = orjson.loads(data.decode("utf-8", "replace").removeprefix("\ufeff"))
        except orjson.JSONDecodeError as error:
            return Rejected("invalid_json", str(error))
    if not isinstance(message, dict):
        return Rejected("not_an_object", f"the message is JSON of type {type(message).__name__}")
    typ = message.get("typ")
    if not _is_number(typ):
        return Rejected("unknown_typ", f"typ is {_format_value(typ)}" if "typ" in message else "there is no typ")
    if typ == UPDATE:
        return _read_update(message)
    if typ == QUERY:
        return _read_query(message)
    if typ == RESPONSE:
        return _read_response(message)
    if typ in (KEEPALIVE, BATCH_UPDATE_OTHER, batch_typ):
        return _read_keepalive_or_batch(message)
    return Rejected("unknown_typ", f"typ is {_format_value(typ)}")


def _read_update(message: dict[str, _JSON]) -> PubsubMessage | Rejected:
    stream = _read_stream(message)
    if isinstance(stream, Rejected):
        return stream
    tip = _read_tip(message, "cid" if _is_2020(message) else "tip")
    if isinstance(tip, Rejected):
        return tip
    model = message.get("model")
    if model is None and "model" not in message:
        return PubsubMessage("UPDATE", stream, tip)
    if not isinstance(model, str):
        return Rejected("bad_model", f"model is {_format_value(model)}")
    try:
        return PubsubMessage("UPDATE", stream, tip, stream_text(model))
    except StreamIdError as error:
        return Rejected("bad_model", str(error))


def _read_query(message: dict[str, _JSON]) -> PubsubMessage | Rejected:
    stream = _read_stream(message)
    if isinstance(stream, Rejected):
        return stream
    if _is_2020(message):
        return PubsubMessage("QUERY", stream)
    query_id = _read_query_id(message)
    if isinstance(query_id, Rejected):
        return query_id
    return PubsubMessage("QUERY", stream, query_id=query_id)


def _read_response(message: dict[str, _JSON]) -> PubsubMessage | Rejected:
    tips = message.get("tips")
    if tips is None and "tips" not in message:
        return _read_response_2020(message)
    query_id = _read_query_id(message)
    if isinstance(query_id, Rejected):
        return query_id
    if not isinstance(tips, dict):
        return Rejected("bad_tips", f"tips is {_format_value(tips)}")
    # js-ceramic does not check the keys, but only uses the tip of the queried stream. It accepts an empty `tips`.
    canonical: dict[str, str] = {}
    for key in tips:
        try:
            stream = stream_text(key)
        except StreamIdError as error:
            return Rejected("bad_tips", str(error))
        tip = _read_tip(tips, key)
        if isinstance(tip, Rejected):
            return tip
        if canonical.setdefault(stream, tip) != tip:
            return Rejected("conflicting_tips", f"two spellings of {stream} with different tips")
    return PubsubMessage("RESPONSE", query_id=query_id, tips=canonical)


def _read_response_2020(message: dict[str, _JSON]) -> PubsubMessage | Rejected:
    if not _is_2020(message):
        return Rejected("missing_tips", "RESPONSE without tips")
    stream = _read_stream(message)
    if isinstance(stream, Rejected):
        return stream
    tip = _read_tip(message, "cid")
    if isinstance(tip, Rejected):
        return tip
    return PubsubMessage("RESPONSE", tips={stream: tip})


def _read_keepalive_or_batch(message: dict[str, _JSON]) -> PubsubMessage | Rejected:
    sep, batch, ts = message.get("sep"), message.get("batch"), message.get("ts")
    if isinstance(sep, str) and isinstance(batch, str):
        if _is_number(ts):
            return Rejected("ambiguous_shape", "has sep and batch, as a BATCH_UPDATE, and also ts, as a KEEPALIVE")
        try:
            sep = format_separator(parse_separator(sep))
        except TopicError as error:
            return Rejected("bad_separator", str(error))
        try:
            cid = cid_bytes(batch)
            if not is_block_cid(cid):
                return Rejected(
                    "unusable_batch", f"{batch[:80]}: not a CIDv1 with sha2-256 and the codec dag-cbor, cbor or raw"
                )
            return PubsubMessage("BATCH_UPDATE", sep=sep, batch=cid_text(cid))
        except CidError as error:
            return Rejected("bad_batch", str(error))
    if message["typ"] != KEEPALIVE:
        return Rejected("unknown_shape", "no string sep and batch")
    if not _is_number(ts):
        return Rejected("unknown_shape", "neither string sep and batch nor numeric ts")
    if abs(ts) > MAX_TIMESTAMP:
        return Rejected("bad_ts", f"ts is {_format_value(ts)}; a date is within ±{MAX_TIMESTAMP} ms")
    ver, ipfs_ver = message.get("ver"), message.get("ipfsVer")
    if not isinstance(ver, str) and (ver is not None or "ver" in message):
        return Rejected("bad_version", f"ver is {_format_value(ver)}")
    if not isinstance(ipfs_ver, str) and (ipfs_ver is not None or "ipfsVer" in message):
        return Rejected("bad_version", f"ipfsVer is {_format_value(ipfs_ver)}")
    return PubsubMessage("KEEPALIVE", ts=int(ts), ver=ver, ipfs_ver=ipfs_ver)


def _is_number(value: _JSON) -> TypeGuard[int | float]:
    return type(value) is int or type(value) is float  # isinstance would accept `true`


def _is_2020(message: dict[str, _JSON]) -> bool:
    return "doctype" in message and "stream" not in message and "doc" not in message


def _read_stream(message: dict[str, _JSON]) -> str | Rejected:
    stream = message.get("stream")
    if stream is None or stream == "":
        # as `stream || doc` in js-ceramic 1.0 to 2.30
        stream = message.get("doc")
    if isinstance(stream, str):
        try:
            return stream_text(stream)
        except StreamIdError as error:
            return Rejected("bad_stream", str(error))
    if _is_2020(message):
        return _read_stream_2020(message)
    if stream is None:
        return Rejected("missing_stream", "neither stream nor doc")
    return Rejected("bad_stream", f"the stream is {_format_value(stream)}")


def _read_stream_2020(message: dict[str, _JSON]) -> str | Rejected:
    doctype, document = message["doctype"], message.get("id")
    stream_type = _DOCTYPES.get(doctype) if isinstance(doctype, str) else None
    if stream_type is None:
        return Rejected("unknown_doctype", f"doctype is {_format_value(doctype)}")
    if document is None:
        return Rejected("missing_stream", "a doctype, but no id")
    if not isinstance(document, str):
        return Rejected("bad_stream", f"id is {_format_value(document)}")
    if document.startswith("/ceramic/"):
        cid = document[9:]
    elif document.startswith("ceramic://"):
        cid = document[10:]
    else:
        return Rejected("bad_stream", f"id is {_format_value(document)}, not /ceramic/<CID> or ceramic://<CID>")
    try:
        return StreamID(stream_type, cid_bytes(cid)).text
    except CidError as error:
        return Rejected("bad_stream", str(error))


def _read_tip(fields: dict[str, _JSON], key: str) -> str | Rejected:
    tip = fields.get(key)
    if isinstance(tip, str):
        try:
            return cid_text(cid_bytes(tip))
        except CidError as error:
            return Rejected("bad_tip", str(error))
    if tip is None and key not in fields:
        return Rejected("missing_tip", f"there is no {key}")
    return Rejected("bad_tip", f"the tip is {_format_value(tip)}")


def _read_query_id(message: dict[str, _JSON]) -> str | Rejected:
    query_id = message.get("id")
    if isinstance(query_id, str):
        return query_id
    if query_id is None and "id" not in message:
        return Rejected("missing_id", "there is no id")
    return Rejected("bad_id", f"id is {_format_value(query_id)}")


def _format_value(value: _JSON) -> str:
    """Format a JSON value for `detail`. Of objects and arrays, only the type is named: they can be large."""
    if isinstance(value, str):
        return repr(value[:80])
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    return repr(value)


def compute_query_id(stream: str, era: Era = "stream") -> bytes:
    """Compute the id of a QUERY as js-ceramic does: the sha2-256 multihash of DAG-CBOR ``{"typ": 1, "stream": …}``.

    In the era "doc", the key is ``doc`` in place of ``stream``. Two QUERYs for the same stream have the same id.
    """
    hashed = cbor2.dumps({"typ": QUERY, ("doc" if era == "doc" else "stream"): stream}, canonical=True)
    return b"\x12\x20" + hashlib.sha256(hashed).digest()


def format_query_id(raw: bytes, *, decimal: bool = False) -> str:
    """Format a query id as base64url without padding or, as before 2021-02-25, as decimals (``"18,32,…"``)."""
    return ",".join(map(str, raw)) if decimal else base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def write_update(stream: str, tip: str, model: str | None = None, era: Era = "stream") -> bytes:
    """Encode an UPDATE. The field ``model`` exists since js-ceramic 2.3.0, in the eras "doc+stream" and "stream".

    Raises:
        ValueError: UPDATEs of the era have no ``model``.
    """
    if model is not None and era in ("2020", "doc"):
        raise ValueError(f"an UPDATE of era {era!r} has no field for a model: omit model")
    if era == "2020":
        fields = {"typ": UPDATE, "id": _format_document_2020(stream), "cid": tip, "doctype": _get_doctype(stream)}
    elif era == "doc":
        fields = {"typ": UPDATE, "doc": stream, "tip": tip}
    elif era == "doc+stream":
        fields = {"typ": UPDATE, "doc": stream, "stream": stream, "tip": tip}
    else:
        fields = {"typ": UPDATE, "stream": stream, "tip": tip}
    if model is not None:
        fields["model"] = model
    return orjson.dumps(fields)


def write_query(stream: str, query_id: str | None = None, era: Era = "stream") -> bytes:
    """Encode a QUERY. Without ``query_id``, the id is computed as js-ceramic does.

    Raises:
        ValueError: ``query_id`` is given for the era 2020, whose QUERYs have no field for it.
    """
    if era == "2020":
        if query_id is not None:
            raise ValueError("a QUERY of era '2020' has no field for a query id: omit query_id")
        return orjson.dumps({"typ": QUERY, "id": _format_document_2020(stream), "doctype": _get_doctype(stream)})
    if query_id is None:
        query_id = format_query_id(compute_query_id(stream, era))
    if era == "doc":
        return orjson.dumps({"typ": QUERY, "doc": stream, "id": query_id})
    if era == "doc+stream":
        return orjson.dumps({"typ": QUERY, "stream": stream, "id": query_id, "doc": stream})
    return orjson.dumps({"typ": QUERY, "stream": stream, "id": query_id})


def write_response(query_id: str, tips: Mapping[str, str]) -> bytes:
    """Encode a RESPONSE in the form that all js-ceramic versions since 0.14.1 use. ``tips``: CID by StreamID."""
    return orjson.dumps({"typ": RESPONSE, "id": query_id, "tips": dict(tips)})


def write_response_2020(stream: str, tip: str) -> bytes:
    """Encode a RESPONSE in the form of 2020, which has the stream in place of a query id."""
    fields = {"typ": RESPONSE, "id": _format_document_2020(stream), "cid": tip, "doctype": _get_doctype(stream)}
    return orjson.dumps(fields)


def write_keepalive(ts: int, ver: str | None = None, ipfs_ver: str | None = None) -> bytes:
    """Encode a KEEPALIVE. ``ts`` is in ms since the epoch. Nodes of old versions omit ``ver`` and ``ipfs_ver``."""
    fields: dict[str, int | str] = {"typ": KEEPALIVE, "ts": ts}
    if ver is not None:
        fields["ver"] = ver
    if ipfs_ver is not None:
        fields["ipfsVer"] = ipfs_ver
    return orjson.dumps(fields)


def write_batch_update(separator: Separator, cid: str, batch_typ: int = BATCH_UPDATE) -> bytes:
    """Encode a BATCH_UPDATE (CIP-123, Pubsub message type).

    Raises:
        TopicError: The separator is invalid.
        CidError: ``cid`` cannot be the CID of a batch block.
        ValueError: ``batch_typ`` is the number of UPDATE, QUERY or RESPONSE.
    """
    if batch_typ in (UPDATE, QUERY, RESPONSE):
        raise ValueError(f"typ {batch_typ} is the number of another message type: use {BATCH_UPDATE}, as CIP-123 does")
    raw = cid_bytes(cid)
    if not is_block_cid(raw):
        raise CidError(
            f"{cid[:80]} is not the CID of a batch block: use a CIDv1 of dag-cbor, cbor or raw with sha2-256"
        )
    return orjson.dumps({"typ": batch_typ, "sep": format_separator(separator), "batch": cid_text(raw)})


def _format_document_2020(stream: str) -> str:
    return f"/ceramic/{cid_text(StreamID.parse(stream).genesis)}"


def _get_doctype(stream: str) -> str:
    kind = StreamID.parse(stream).type
    for doctype, stream_type in _DOCTYPES.items():
        if stream_type == kind:
            return doctype
    raise ValueError(f"streams of type {kind} did not exist in 2020: {stream}")
