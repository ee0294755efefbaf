"""A small lake in which each step of `kiln trace` finds rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
from deltalake import write_deltalake

from kiln.pipelines.delta.arrow_rows import build_arrow_schema
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.wire.cid import cid_bytes, cid_text, compute_cid
from kiln.schemas.wire.streamid import StreamID

AT = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)
NETWORK = "testnet-clay"
PEERS = ("12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Nft9HyQ6X", "12D3KooWH3uVF6wv47WnArKHk5p6cvgCJEb74UTmxztmQDc298L3")


def cid(name: str) -> str:
    return cid_text(compute_cid(name.encode()))


def stream(name: str) -> str:
    return StreamID(3, compute_cid(name.encode())).text


def message(number: int) -> str:
    return f"{PEERS[number % 2]}/{number:016x}"


TRUE, FALSE = stream("model A"), stream("model B")
"""model in the genesis of the stream "claimed", and the model in the stream's false claim"""
BATCH, OTHERS_BATCH = cid("batch"), cid("others' batch")


def after(seconds: float) -> datetime:
    return AT + timedelta(seconds=seconds)


def at(number: int, copy: int = 0) -> dict[str, object]:
    """Return the position of a copy. Second copies are in another partition."""
    return {"kafka_partition": copy, "kafka_offset": 100 + number, "message_index": 1}


def heard(number: int, kind: str = "UPDATE", **columns: object) -> dict[str, list[dict[str, object]]]:
    """Build the rows of a message: the message itself, two copies and their frames."""
    one = {"network": NETWORK, "message_id": message(number), "verdict": "valid"}
    copies = [{**one, **at(number, c), "remote_peer": PEERS[c], "observed_at": after(number + c / 4)} for c in (0, 1)]
    return {
        "messages": [{**copies[0], "origin": "LIVE", "type": kind, "from_peer": PEERS[0], "data": b"{}", **columns}],
        "copies": copies,
        "frames": [frame(100 + number, c, number + c / 4) for c in (0, 1)],
    }


def frame(
    offset: int, partition: int, seconds: float, direction: str = "IN", payload: bytes = b"rpc"
) -> dict[str, object]:
    return {
        "network": NETWORK,
        "connection": bytes(16),
        "direction": direction,
        "local_peer": "us",
        "origin": "LIVE",
        "remote_peer": PEERS[partition],
        "protocol": "/meshsub/1.2.0",
        "observed_at": after(seconds),
        "sequence": offset,
        "payload": payload,
        "hello_in": b"",
        "hello_out": b"",
        "verdicts": b"\x01\x01",
        "remote_address": b"",
        "declared_length": 0,
        "kafka_partition": partition,
        "kafka_offset": offset,
        "kafka_timestamp": after(seconds + 0.1),
    }


def update(number: int, of: str, model: str, source: str = "topic") -> dict[str, object]:
    return {
        "network": NETWORK,
        "origin": "LIVE",
        "message_id": message(number),
        "separator_key": "model",
        "separator_value": model,
        "separator_source": source,
        "stream": stream(of),
        "tip": cid(f"tip {number}"),
        "observed_at": after(number),
        "log_time": after(number + 0.5),
        "log_partition": 0,
        "log_offset": number,
    }


def batch(text: str, model: str, opened: float) -> dict[str, object]:
    return {
        "batch_cid": text,
        "network": NETWORK,
        "origin": "LIVE",
        "separator_key": "model",
        "separator_value": model,
        "opened_at": after(opened),
        "closed_at": after(opened + 5),
        "emitted_at": after(opened + 5.4),
        "stream_count": 1,
        "tip_count": 2,
        "block_bytes": 3,
        "block": b"\x82\x00\x00",
    }


def refused(
    reason: str, place: Mapping[str, object], detail: str = "why", text: str | None = None
) -> dict[str, object]:
    stage = "separator" if reason == "contradicts_genesis" else "message"
    return {
        **place,
        "stage": stage,
        "reason": reason,
        "detail": detail,
        "data": b"bytes",
        "observed_at": AT,
        "cid": text,
    }


def rows() -> dict[str, list[dict[str, object]]]:
    """Build the rows of the lake, by table.

    Messages 1 and 2 announce tips of the stream "claimed", whose claim is false. Their tips are in a published batch.
    Message 3 has another stream and batch. Message 4 is rejected. Message 5 announces a batch of another node.
    """
    tables: dict[str, list[dict[str, object]]] = {name: [] for name in TABLES}
    told = [
        *(heard(n, stream=stream("claimed"), tip=cid(f"tip {n}")) for n in (1, 2)),
        heard(3, stream=stream("other"), tip=cid("tip 3")),
        {name: heard(4)[name] for name in ("copies", "frames")},
        heard(5, "BATCH_UPDATE", sep=f"model/{FALSE}", batch_cid=OTHERS_BATCH),
    ]
    for name, of in ((name, of) for each in told for name, of in each.items()):
        tables[name] += of
    # over the DHT nobody sends copies
    dht = {**at(6), "message_id": "bep50/ab/01", "network": NETWORK, "origin": "LIVE", "type": "BATCH_UPDATE"}
    tables["messages"].append({**dht, "data": b"", "verdict": "valid", "remote_peer": "ab", "observed_at": after(6)})
    announced = b"\x0a" + json.dumps({"typ": 3, "batch": BATCH}).encode()
    tables["frames"] += [
        frame(106, 0, 6),
        frame(900, 0, 7.1, "OUT", announced),
        frame(901, 1, 7.2, "OUT", b"something else"),
        frame(902, 1, 7.3, "OUT", b"d1:v" + cid_bytes(BATCH)),
        frame(777, 0, 8, payload=b"garbage"),
    ]
    tables["updates"] = [update(1, "claimed", FALSE), update(2, "claimed", FALSE), update(3, "other", TRUE, "genesis")]
    # the tip of message 1 is in a later batch again, which holds a later announcement of it
    tables["batches"] = [batch(BATCH, FALSE, 1), batch(cid("later"), FALSE, 60), batch(cid("third"), TRUE, 3)]
    tables["batch_tips"] = [
        {"batch_cid": BATCH, "stream": stream("claimed"), "tip": cid("tip 1")},
        {"batch_cid": BATCH, "stream": stream("claimed"), "tip": cid("tip 2")},
        {"batch_cid": cid("later"), "stream": stream("claimed"), "tip": cid("tip 1")},
        {"batch_cid": cid("third"), "stream": stream("other"), "tip": cid("tip 3")},
    ]
    tables["publications"] = [
        {"batch_cid": BATCH, "transport": "gossipsub", "topic": "/t", "peer_count": 3, "published_at": after(7)},
    ]
    tables["streams"] = [
        {
            "network": NETWORK,
            "stream": stream(of),
            "separator_key": "model",
            "separator_value": TRUE,
            "source": "genesis",
        }
        for of in ("claimed", "other")
    ]
    tables["tips"] = [
        {
            "network": NETWORK,
            "stream": stream("claimed"),
            "tip": cid("tip 1"),
            "source": "update",
            "observed_at": after(1),
        },
        {
            "network": NETWORK,
            "stream": stream("theirs"),
            "tip": cid("theirs"),
            "source": "batch",
            "batch_cid": OTHERS_BATCH,
            "observed_at": after(9),
        },
    ]
    tables["quarantine"] = [
        refused("contradicts_genesis", at(1), f"claimed model/{FALSE}; the genesis names model/{TRUE}"),
        refused("not_json", at(4), "\x1b[2Jno JSON"),
        refused("not_json", {**at(4), "message_index": 0}, "of another message of that frame"),
        refused("rpc_malformed", {"kafka_partition": 0, "kafka_offset": 777}),
        refused("hello_repeats", {"kafka_partition": 0, "kafka_offset": 103}),
        refused("cid_hash_unsupported", {}, text=OTHERS_BATCH),
        refused("genesis_unavailable", {}, text=cid("waits")),
    ]
    return tables


def make_lake(folder: Path) -> Lake:
    """Create `folder` and write a lake with these rows, in two files per table."""
    lake = Lake(str(folder))
    folder.mkdir(parents=True)
    lake.create(TABLES)
    for name, of in rows().items():
        full = [{column.name: row.get(column.name) for column in TABLES[name].columns} for row in of]
        for part in (full[::2], full[1::2]):  # two files
            schema = build_arrow_schema(TABLES[name].columns)
            write_deltalake(lake.table(name), pa.Table.from_pylist(part, schema=schema), mode="append")
    return lake
