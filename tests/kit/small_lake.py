"""A small lake with rows in every table: synthetic traffic as in `make bench ARGS=views`, and unusual rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from bench.views import make_lake
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.tables import TABLES

AT = datetime(2026, 1, 1, 0, 0, 30, 123_456, tzinfo=UTC)

_DEFAULTS: dict[str, object] = {
    "string": "",
    "binary": b"",
    "timestamp": AT,
    "int": 0,
    "bigint": 0,
    "boolean": False,
    "array<string>": [],
}

Row = Mapping[str, object]


def small_lake(folder: str, messages: int = 1_500) -> Lake:
    """Create the lake in an existing folder."""
    lake = Lake(folder)
    make_lake(lake, messages)
    lake.create(TABLES)
    for name, rows in _odd_rows().items():
        append(lake, name, rows)
    return lake


def append(lake: Lake, name: str, rows: Iterable[Row]) -> None:
    """Append rows to a table. Columns that are not given are null, or have a default value if they are not nullable."""
    whole = [
        {
            **{column.name: None if column.nullable else _DEFAULTS[column.type] for column in TABLES[name].columns},
            "network": "clay",
            "origin": "LIVE",
            **row,
        }
        for row in rows
    ]
    names = [column.name for column in TABLES[name].columns]
    schema = DeltaTable(lake.table(name)).to_pyarrow_dataset().schema
    table = pa.Table.from_pylist([{column: row[column] for column in names} for row in whole], schema=schema)
    write_deltalake(lake.table(name), table, mode="append")


def _after(seconds: float) -> datetime:
    return AT + timedelta(seconds=seconds)


def _odd_rows() -> dict[str, list[dict[str, object]]]:
    """Build unusual rows by table, such as messages without an author, or a key that JSON escapes."""
    key, value = 'a/"ключ"\n\\', "k2t"
    odd = {"separator_key": key, "separator_value": value}
    topic = f"/ceramic/clay/sep/{key}/{value}"
    alive: dict[str, object] = {"type": "KEEPALIVE", "from_peer": "p", "observed_at": AT}
    update: dict[str, object] = {"type": "UPDATE", "topic": topic, "stream": "kodd", "data": b"\x00\xff" * 40}
    return {
        "messages": [
            {**update, "message_id": "odd1", "tip": "b1", "observed_at": AT, "topic_source": "index"},
            {**update, "message_id": "odd2", "tip": "b1", "observed_at": _after(0.5), "from_peer": "p"},
            {**update, "message_id": "odd3", "tip": "b2", "observed_at": _after(5), "origin": "REPLAY"},
            {**update, "message_id": "odd4", "tip": "b9", "observed_at": _after(6), "topic": None},
            {**update, "message_id": "line", "tip": "b9", "topic": f"{topic}\n"},
            {"message_id": "bare", "type": "QUERY", "stream": "kodd", "topic": f"/ceramic/clay/sep/x/{value[1:]}"},
            {
                "message_id": "ask",
                "type": "QUERY",
                "stream": "kodd",
                "query_id": "q",
                "observed_at": AT,
                "topic": topic,
            },
            {"message_id": "ask2", "type": "QUERY", "stream": "kodd", "query_id": "q", "observed_at": _after(20)},
            *(
                {
                    "message_id": f"say{number}",
                    "type": "RESPONSE",
                    "query_id": "q",
                    "from_peer": f"p{number}",
                    "observed_at": _after(number),
                    "tips": tips,
                    "topic": topic,
                }
                for number, tips in enumerate([{"kodd": "b1", "kother": "b5"}, {"kodd": "b2"}, {}, {"kother": None}])
            ),
            {"message_id": "batch", "type": "BATCH_UPDATE", "sep": "model/k1", "batch_cid": "c", "topic": topic},
            {"message_id": "slash", "type": "BATCH_UPDATE", "sep": f"{key}/{value}", "batch_cid": "c", "topic": topic},
            {**alive, "message_id": "alive0", "ver": "1"},
            {**alive, "message_id": "alive1"},
        ],
        "copies": [
            {"message_id": "odd1", "remote_peer": peer, "observed_at": _after(late), "kafka_offset": 10**9 + number}
            for number, (peer, late) in enumerate([("b", 0), ("a", 0), ("a", 0.25), ("c", 61.000_001)])
        ],
        "frames": [
            {
                "connection": b"\xee" * 16,
                "direction": "IN",
                "local_peer": f"us{number % 2}",
                "remote_peer": "b",
                "protocol": "/meshsub/1.1.0",
                "sequence": sequence,
                "kafka_offset": 10**9 + number,
                "payload": b"\x0a\x00" if sequence < 8 else b"",
                **({"agent": "kubo/1", "end_reason": "gone", "dialled": False} if sequence == 8 else {}),
                "observed_at": _after(number - 1),
            }
            for number, sequence in enumerate([2, 3, 7, 8])
        ],
        **_odd_entries(),
        "updates": [
            {
                **({} if tip == "b9" else odd),
                "message_id": f"odd{number}",
                "origin": origin,
                "from_peer": author,
                "separator_source": "genesis" if number == 1 else "topic",
                "stream": "kodd",
                "tip": tip,
                "observed_at": _after(late),
                "log_time": _after(late + 0.1),
                "log_offset": 10**9 + number,
            }
            for number, tip, origin, author, late in [
                (1, "b1", "LIVE", None, 0),
                (3, "b2", "REPLAY", "p", 5),
                (4, "b9", "LIVE", "p", 6),
                (5, "b3", "LIVE", "p", 7),
                (6, "b4", "LIVE", "p", 7),
            ]
        ],
        "tips": [
            {"stream": "kodd", "tip": tip, "source": source, "observed_at": _after(late)}
            for tip, source, late in [
                *(("b1", "update", 0), ("b1", "batch", 3), ("b2", "update", 5), ("b9", "update", 6)),
                *(("b3", "update", 7), ("b4", "update", 7)),
            ]
        ],
        "batches": [
            {
                **odd,
                "batch_cid": cid,
                "origin": origin,
                "opened_at": _after(opened),
                "closed_at": _after(opened + length),
                "emitted_at": _after(opened + length + 0.333_333),
                "block_bytes": 200,
            }
            for cid, origin, opened, length in [
                *(("c1", "LIVE", 0, 1), ("c2", "LIVE", 4, 1), ("c1", "REPLAY", 0, 1), ("c3", "REPLAY", 5, 2.5)),
                ("c0", "LIVE", -9, 1),
            ]
        ],
        "batch_tips": [
            {"batch_cid": cid, "stream": "kodd", "tip": tip}
            for cid, tip in [("c1", "b1"), ("c2", "b1"), ("c3", "b2"), ("c0", "b1")]
        ],
        "publications": [
            {"batch_cid": "c1", "transport": "gossipsub", "published_at": _after(-5), "topic": topic, "peer_count": 2},
            {"batch_cid": "c1", "transport": "gossipsub", "published_at": _after(2), "error": "no peers"},
            {"batch_cid": "c1", "transport": "gossipsub", "published_at": _after(3), "topic": topic, "peer_count": 2},
            {"batch_cid": "c1", "transport": "bep50", "published_at": _after(2.5), "target": "ab"},
        ],
        "streams": [{"stream": "kodd", "separator_key": "model", "separator_value": "kx", "source": "genesis"}],
        "quarantine": [
            {
                "kafka_partition": 0,
                "kafka_offset": 10**9 + number,
                "message_index": 0,
                "stage": "message",
                "reason": reason,
                "data": data,
            }
            for number, (reason, data) in enumerate(
                [("invalid_json", b"{\xff"), ("invalid_json", b"{}"), ("invalid json", b"\x1b")]
            )
        ],
        "bundles": [{"hash": "00", "topics": [topic]}],
    }


def _odd_entries() -> dict[str, list[dict[str, object]]]:
    """Build rows of control traffic with peers a and b. Peer a grafts twice; then we prune and graft a. Peer b grafts,
    once in a topic with an unknown index."""
    a, b = (
        {"connection": bytes([0xE0 + n]) * 16, "local_peer": "us0", "remote_peer": name}
        for n, name in ((0, "a"), (14, "b"))
    )
    by_name = {"topic": "odd", "topic_source": "name"}
    by_index = {"topic": "odd", "topic_source": "index", "topic_index": 200}
    controls: list[dict[str, object]] = [
        {**a, "direction": "IN", "kind": "GRAFT", **by_name, "observed_at": _after(0)},
        {**a, "direction": "IN", "kind": "GRAFT", **by_name, "observed_at": _after(1)},
        {**a, "direction": "OUT", "kind": "PRUNE", **by_index, "backoff": 60, "observed_at": _after(2)},
        {**a, "direction": "OUT", "kind": "GRAFT", **by_name, "observed_at": _after(3)},
        {**b, "direction": "IN", "kind": "GRAFT", **by_name, "observed_at": _after(0)},
        {**b, "direction": "IN", "kind": "GRAFT", "topic_source": "index", "topic_index": 999},
        {**a, "direction": "IN", "kind": "IHAVE", **by_index, "message_ids": ["odd1", "odd2", "none"]},
        {**a, "direction": "OUT", "kind": "IWANT", "message_ids": ["odd1", "none"]},
        {**b, "direction": "IN", "kind": "IWANT", "message_ids": ["odd1"]},
        {**b, "direction": "OUT", "kind": "IDONTWANT", "message_ids": ["odd1", "odd9"], "observed_at": _after(-1)},
        {**a, "direction": "OUT", "kind": "IDONTWANT", "message_ids": ["odd1"], "observed_at": _after(9)},
        {**a, "direction": "OUT", "kind": "IDONTWANT", "message_ids": [], "observed_at": _after(9)},
    ]
    subscriptions: list[dict[str, object]] = [
        {**peer, "direction": "IN", "subscribe": subscribe, **by_name, "observed_at": _after(late)}
        for peer, subscribe, late in ((a, True, -2), (a, False, -1), (a, True, 0), (b, True, 0))
    ]
    return {
        table: [{**row, "wire_bytes": 10, "kafka_offset": 10**9 + number} for number, row in enumerate(rows)]
        for table, rows in (("controls", controls), ("subscriptions", subscriptions))
    }
