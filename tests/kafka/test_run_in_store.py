"""`kiln run` with tables and checkpoints in an object store, over a kill; and history made anew there."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from kiln.conf.process.location import parse_location
from kiln.deploy.query.ask import query_lake
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.pipelines.delta.lake import Lake
from kit.awaiting import wait_until
from kit.kept_jvm import KeptJvm
from kit.kiln_process import kill_all
from kit.log_feed import kiln_beside
from kit.log_model import UNFOUNDED_REPEATS, expected_batches, read_log
from kit.object_store import ObjectStore

pytest_plugins = ["kit.object_store"]
pytestmark = [pytest.mark.spark, pytest.mark.kafka]

WINDOW = 1_000_000


def test_queries_fill_tables_and_keep_checkpoints_there_and_go_on_after_a_kill(
    object_store: ObjectStore, broker: EmbeddedBroker, prefix: str, tmp_path: Path
) -> None:
    bucket = object_store.bucket()
    store = {
        "KILN_LAKE__URI": f"{bucket}/kiln/lake",
        "KILN_CHECKPOINTS__URI": f"{bucket}/kiln/checkpoints",
        **{f"KILN_LAKE__STORAGE_OPTIONS__{key.upper()}": value for key, value in object_store.address.items()},
        **object_store.credentials,
    }
    triggers = {f"KILN_JOBS__{query}__TRIGGER": "2s" for query in ("UPDATES", "BATCH")}  # each micro-batch writes there
    kiln = kiln_beside(broker.address, prefix, tmp_path / "state", store | triggers)
    lake = Lake(store["KILN_LAKE__URI"], object_store.options)

    def sql(question: str) -> list[tuple[object, ...]]:
        return list(query_lake(lake, question).rows())

    captures = []
    for seed in ("1", "2"):
        captures.append(str(tmp_path / f"{seed}.rpc.gz"))
        kiln.run_kept("generate", captures[-1], "--for", "8s", "--seed", seed)
    kiln.run_kept("replay", captures[0])
    running = kiln.start("run", "--no-network")
    try:
        wait_until(lambda: "messages" in lake.tables() and lake.has_rows("messages"), kiln.log, 200)
    finally:
        kill_all(running)
    first = sql("SELECT count(*), count(DISTINCT message_id) FROM messages")[0]
    assert first[0] == first[1]
    kiln.run_kept("replay", *captures)  # the first once more: its frames are held
    with KeptJvm(store) as kiln.jvm:
        kiln.run_kept("run", "--catch-up")
        check_tables(sql)
        kept = parse_location(store["KILN_CHECKPOINTS__URI"], object_store.options)
        assert sorted(kept.folders()) == ["archive", "batch", "sink", "updates"]
        assert not (kiln.state / "lake").exists()
        assert not (kiln.state / "checkpoints").exists()

        ends = "min(observed_at)::VARCHAR, (max(observed_at) + INTERVAL 1 SECOND)::VARCHAR"
        low, high = sql(f"SELECT {ends} FROM frames")[0]
        kiln.run_kept("backfill", "run", "--from", str(low), "--to", str(high), "--run", "again")
        kiln.run_kept("backfill", "diff", "again")  # which ends with 1 if something differs

        expected = expected_batches(read_log(broker.address, f"{prefix}updates"), WINDOW)
        status = json.loads(kiln.run_kept("status", "--json").stdout)
        rows = sql("SELECT network, origin, separator_key, separator_value, batch_cid FROM batches")
        assert Counter(rows) == Counter((*each.owner, each.cid) for each in expected)
        assert {query["name"]: query["lag"] for query in status["queries"]} == dict.fromkeys(kept.folders(), 0)
        logs = [path for folder in (kiln.state / "logs", kiln.jvm.logs) for path in folder.rglob("*.*")]
        assert logs
        assert not [path for path in logs if object_store.secret.encode() in path.read_bytes()]


def check_tables(sql: Callable[[str], list[tuple[object, ...]]]) -> None:
    """Nothing is there twice, and each announced tip has an update."""
    for table, key in (
        ("frames", "connection, direction, sequence"),
        ("copies", "kafka_partition, kafka_offset, message_index"),
        ("messages", "network, message_id"),
        ("updates", "network, origin, separator_key, separator_value, stream, tip, message_id"),
        ("batch_tips", "batch_cid, stream, tip"),
    ):
        assert sql(f"SELECT {key} FROM {table} GROUP BY ALL HAVING count(*) > 1") == [], table
    assert sql(UNFOUNDED_REPEATS) == []
    announced = "SELECT network, stream, tip FROM messages WHERE type = 'UPDATE'"
    assert sql(f"{announced} EXCEPT SELECT network, stream, tip FROM updates") == []
