"""Decoder of a record of `kiln.frames` as a user would write it, with protobuf classes, orjson and base58."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache

import base58
import orjson
from google.protobuf.message import DecodeError

from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import VERDICT_NAMES

TABLES = ("frames", "copies", "messages", "quarantine")

Row = dict[str, object]
Rows = dict[str, list[Row]]
"""Rows by table; `messages` has a row for each copy."""

_TYPES = {0: "UPDATE", 1: "QUERY", 2: "RESPONSE", 3: "KEEPALIVE", 4: "BATCH_UPDATE"}
_GOOD = 1
_PASSING = (_GOOD, 3)  # verdicts of the bridge: valid signature; unsigned, which is allowed
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def read(value: bytes, partition: int, offset: int, stamp: datetime) -> Rows:
    """Decode a record into rows of all tables. `stamp` is its Kafka timestamp."""
    rows: Rows = {name: [] for name in TABLES}
    place: Row = {"kafka_partition": partition, "kafka_offset": offset}
    try:
        frame = Frame.FromString(value)
    except DecodeError as error:
        rows["quarantine"].append(_fault(place, error, value, stamp))
        return rows
    seen: Row = {"observed_at": _EPOCH + timedelta(microseconds=frame.observed_at // 1000), **place}
    seen["remote_peer"] = _peer(frame.remote_peer)
    rows["frames"].append(
        {
            **seen,
            "network": frame.network,
            "connection": frame.connection,
            "direction": "OUT" if frame.direction else "IN",
            "local_peer": _peer(frame.local_peer),
            "protocol": frame.protocol,
            "sequence": frame.sequence,
            "payload": frame.payload,
            "hello_in": frame.hello_in,
            "hello_out": frame.hello_out,
            "verdicts": frame.verdicts,
            "origin": "REPLAY" if frame.origin else "LIVE",
            "remote_address": frame.remote_address,
            "declared_length": frame.declared_length,
            "kafka_timestamp": stamp,
        }
    )
    if frame.direction:
        return rows
    try:
        published = RPC.FromString(frame.payload).publish
    except DecodeError as error:
        rows["quarantine"].append(_fault(seen, error, frame.payload))
        return rows
    verdicts = frame.verdicts.ljust(len(published), b"\0")
    for index, (message, verdict) in enumerate(zip(published, verdicts, strict=False)):
        topic = message.topic.split("/")
        copy: Row = {
            **seen,
            "message_index": index,
            "network": topic[2] if message.topic.startswith("/ceramic/") else frame.network,
            "message_id": _id(message),
            "verdict": VERDICT_NAMES[verdict],
        }
        rows["copies"].append(copy)
        try:
            if verdict not in _PASSING:
                raise ValueError(f"verdict {verdict}")
            content = _content(orjson.loads(message.data.decode("utf-8-sig", "replace")))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            rows["quarantine"].append(_fault(copy, error, message.data))
            continue
        signed = verdict == _GOOD
        rows["messages"].append(
            {
                **copy,
                **content,
                "origin": rows["frames"][0]["origin"],
                "topic": message.topic,
                "topic_source": "name",
                "from_peer": _peer(getattr(message, "from")) if signed else None,
                "seqno": message.seqno if signed else None,
                "data": message.data,
            }
        )
    return rows


def _content(message: Mapping[str, object]) -> Row:
    """Build columns of the table `messages` from the JSON of a message.

    Raises:
        ValueError: A field is missing or has a wrong type.
        LookupError: The type of the message is unknown.
    """
    kind = "BATCH_UPDATE" if "sep" in message else _TYPES[int(str(message["typ"]))]
    old = "doctype" in message and "doc" not in message and "stream" not in message  # the form of 2020
    row: Row = {name: message.get(name) for name in ("model", "sep", "ver")}
    row["batch_cid"] = message.get("batch")
    row |= {"type": kind, "tip": message.get("cid" if old else "tip"), "ipfs_ver": message.get("ipfsVer")}
    row["stream"] = message.get("id") if old else message.get("stream") or message.get("doc")
    row["query_id"] = None if old else message.get("id")
    for name, text in row.items():
        if not isinstance(text, str | None):
            raise ValueError(f"{name} is no text")
    tips, ts = message.get("tips", {}), message.get("ts")
    if (kind == "UPDATE" and not row["tip"]) or (kind in ("UPDATE", "QUERY") and not row["stream"]):
        raise ValueError("stream or tip is missing")
    if not isinstance(tips, dict) or not all(isinstance(tip, str) for tip in tips.values()):
        raise ValueError("tips are no texts")
    if not isinstance(ts, int | None):
        raise ValueError("ts is no number")
    return {**row, "tips": tips if kind == "RESPONSE" else None, "ts": ts}


def _fault(where: Row, error: Exception, data: bytes, stamp: datetime | None = None) -> Row:
    own = {"stage": "decoding", "reason": type(error).__name__, "detail": str(error), "data": data}
    place = {name: where.get(name) for name in ("kafka_partition", "kafka_offset", "message_index")}
    return {**own, **place, "observed_at": stamp or where["observed_at"]}


def _id(message: Message) -> str:
    if message.HasField("signature"):
        return f"{_peer(getattr(message, 'from'))}/{message.seqno.hex()}"
    return "sha256/" + hashlib.sha256(message.data).hexdigest()


@lru_cache(maxsize=10_000)
def _peer(raw: bytes) -> str:
    text: str = base58.b58encode(raw).decode()
    return text
