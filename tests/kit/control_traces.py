"""Traces of RPCs in the JSON of go-libp2p-pubsub's own tracer, as entries to compare the control tables with."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple  # the tracer's JSON

from kiln.schemas.wire.message_id import format_gossip_id

KINDS: Final = ("ihave", "iwant", "graft", "prune", "idontwant")


class Entry(NamedTuple):
    """An entry of an RPC."""

    direction: str
    """IN or OUT, from the side of the bridge"""
    kind: str
    topic: str | None
    content: tuple[str, ...] | bool
    """message ids; for a subscription, true if it is a SUBSCRIBE"""


class TracedEntry(NamedTuple):
    at: int
    """unix ns, by the clock of the tracer"""
    entry: Entry


def read_trace(path: Path, bridge: bytes) -> Iterator[TracedEntry]:
    """Yield the entries that the traced peer sent to the bridge or received from it. `bridge` is the bridge's peer id.

    go-libp2p-pubsub's tracer leaves out the first RPC of each stream, which has the peer's subscriptions.
    """
    text = path.read_text() if path.exists() else ""
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            return  # it is still being written
        event: dict[str, Any] = json.loads(line)
        for name, side, direction in (("sendRPC", "sendTo", "IN"), ("recvRPC", "receivedFrom", "OUT")):
            rpc = event.get(name)
            if rpc is None or b64decode(rpc[side]) != bridge:
                continue
            for each in rpc["meta"].get("subscription") or ():
                entry = Entry(direction, "SUBSCRIBE", each["topic"], each.get("subscribe", False))
                yield TracedEntry(event["timestamp"], entry)
            for kind, entries in (rpc["meta"].get("control") or {}).items():
                assert kind in KINDS
                for each in entries:
                    ids = tuple(format_gossip_id(b64decode(one)) for one in each.get("messageIDs") or ())
                    entry = Entry(direction, kind.upper(), each.get("topic"), ids)
                    yield TracedEntry(event["timestamp"], entry)
