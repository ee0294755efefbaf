"""Reads one record of `kiln.frames` as a user's own code would: the generated protobuf classes, orjson, base58."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

import base58
import orjson
from google.protobuf.message import DecodeError

from schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from schemas.proto.kiln.frame_pb2 import Frame

TYPES = {0: "UPDATE", 1: "QUERY", 2: "RESPONSE", 3: "KEEPALIVE", 4: "BATCH_UPDATE"}
_PASSING = (1, 3)  # verdicts of the bridge: a good signature, unsigned and allowed

Row = tuple[object, ...]


class Rows(NamedTuple):
    """Rows in the columns of the tables; a message with its id."""

    frames: list[Row]
    copies: list[Row]
    messages: list[tuple[str, Row]]
    quarantine: list[Row]


def read(value: bytes, partition: int, offset: int, stamp: int) -> Rows:
    """All rows of a record; `stamp`: the broker's, µs."""
    rows = Rows([], [], [], [])
    try:
        frame = Frame.FromString(value)
    except DecodeError as error:
        rows.quarantine.append((partition, offset, None, None, "frame", "frame_malformed", str(error), value, stamp))
        return rows
    observed_at = frame.observed_at // 1000
    remote = _peer(frame.remote_peer)
    rows.frames.append(
        (
            frame.network,
            frame.connection,
            "OUT" if frame.direction else "IN",
            _peer(frame.local_peer),
            remote,
            frame.protocol,
            observed_at,
            frame.sequence,
            frame.payload,
            frame.hello_in,
            frame.hello_out,
            frame.verdicts,
            "REPLAY" if frame.origin else "LIVE",
            frame.remote_address,
            frame.declared_length,
            partition,
            offset,
            stamp,
        )
    )
    if frame.direction:
        return rows
    try:
        rpc = RPC.FromString(frame.payload)
    except DecodeError as error:
        rows.quarantine.append(
            (partition, offset, None, None, "rpc", "rpc_malformed", str(error), frame.payload, observed_at)
        )
        return rows
    for index, message in enumerate(rpc.publish):
        network = message.topic.split("/")[2] if message.topic.startswith("/ceramic/") else frame.network
        known_as = _id(message)
        verdict = frame.verdicts[index] if index < len(frame.verdicts) else 0
        place = (partition, offset, index)
        rows.copies.append((network, known_as, remote, observed_at, verdict, *place))
        if verdict not in _PASSING:
            fault = (*place, None, "signature", "bad_signature", "", message.data, observed_at)
            rows.quarantine.append(fault)
            continue
        try:
            content = orjson.loads(message.data)
            kind = TYPES[content["typ"]]
            _check(content)
        except (ValueError, LookupError, TypeError) as error:
            rows.quarantine.append((*place, None, "message", "invalid_json", str(error), message.data, observed_at))
            continue
        if kind == "KEEPALIVE" and "sep" in content:
            kind = "BATCH_UPDATE"
        tips = content.get("tips")
        row = (
            known_as,
            network,
            rows.frames[0][12],
            message.topic,
            "name",
            kind,
            _peer(getattr(message, "from")) if verdict == 1 else None,
            message.seqno if verdict == 1 else None,
            content.get("stream") or content.get("doc"),
            content.get("tip"),
            content.get("model"),
            content.get("sep"),
            content.get("batch"),
            content.get("id"),
            list(tips.items()) if tips is not None else None,
            content.get("ts"),
            content.get("ver"),
            content.get("ipfsVer"),
            message.data,
            verdict,
            remote,
            observed_at,
            *place,
        )
        rows.messages.append((f"{network}/{known_as}", row))
    return rows


_TEXTS = ("stream", "doc", "tip", "model", "sep", "batch", "id", "ver", "ipfsVer")


def _check(content: dict[str, object]) -> None:
    """ValueError: a field has no type that its column takes."""
    tips, ts = content.get("tips"), content.get("ts")
    good = all(isinstance(content.get(name, ""), str) for name in _TEXTS)
    good = good and (ts is None or (isinstance(ts, int) and abs(ts) < 2**62))
    if isinstance(tips, dict):
        good = good and all(isinstance(tip, str) for tip in tips.values())
    if not good or not (tips is None or isinstance(tips, dict)):
        raise ValueError("a field of another type")


def _id(message: Message) -> str:
    if message.HasField("signature"):
        return f"{_peer(getattr(message, 'from'))}/{message.seqno.hex()}"
    return "sha256/" + hashlib.sha256(message.data).hexdigest()


@lru_cache(maxsize=10_000)
def _peer(raw: bytes) -> str:
    text: str = base58.b58encode(raw).decode()
    return text
