"""A catch-up that begins in Python goes on with the native core, and back, as one in Python alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import msgspec
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from bench.catch_up import catch_up, in_micro_batches
from kiln.bridge.kafka.producers import connect
from kiln.conf.settings.model import JobName, Kafka, Network, Settings
from kiln.deploy.demo.traffic import Traffic, TrafficOptions
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.deploy.stack.kafka_broker import make_topics
from kiln.pipelines.app import launch
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.schemas.kafka.records import Epoch, UpdateRecord, decode_update
from kit import engines
from kit.broker_access import variables
from kit.strange_records import read_all

pytest_plugins = ["kit.local_spark"]
pytestmark = [
    pytest.mark.spark,
    pytest.mark.kafka,
    pytest.mark.timeout(600),
    pytest.mark.skipif(engines.core_is_missing(), reason="no native core to compare with Python"),
]

FRAMES = 300
"""frames of each part"""
QUERIES: tuple[JobName, ...] = ("archive", "updates")
TABLES = ("frames", "copies", "messages", "subscriptions", "controls")


def run_query(spark: SparkSession, settings: Settings, query: JobName, end: int, *, native_core: bool) -> None:
    """Run a query up to an offset, with the native core or in Python."""
    read = launch.decode_config

    def decode_config(settings: Settings, *, remember: bool = False) -> DecodeConfig:
        return replace(read(settings, remember=remember), native_core=native_core)

    with patch.object(launch, "decode_config", decode_config):
        catch_up(spark, settings, query, {"frames": {0: end}})


def read_tables(settings: Settings) -> dict[str, pa.Table]:
    """Rows of the tables of `archive`, in the order of the log."""
    tables = {}
    for name in TABLES:
        rows = DeltaTable((settings.lake_root / name).uri).to_pyarrow_table()
        position = ("kafka_partition", "kafka_offset", "message_index", "entry_index")
        tables[name] = rows.sort_by([(column, "ascending") for column in position if column in rows.schema.names])
    return tables


def read_updates(kafka: Kafka) -> list[UpdateRecord]:
    """All records of `kiln.updates`, without the names of the queries that wrote them."""
    values = [record.value for record in read_all(kafka.bootstrap, kafka.topic("updates"))]
    return [msgspec.structs.replace(decode_update(value or b""), epoch=Epoch("", 0)) for value in values]


def test_a_catch_up_changes_engines_between_micro_batches(
    spark: SparkSession, broker: EmbeddedBroker, prefix: str, tmp_path: Path
) -> None:
    """Python, the core, and Python again, next to Python alone: both read the same topic."""
    access = {name.removeprefix("KILN_KAFKA__").lower(): value for name, value in variables(broker.address).items()}
    kafka = Kafka.model_validate({**access, "prefix": prefix, "frames_partitions": 1, "updates_partitions": 1})
    make_topics(kafka, kafka.servers)
    base = in_micro_batches(Settings(network=Network(name="local-both"), kafka=kafka), 0, *QUERIES)
    switched, in_python = (base.model_copy(update={"state": tmp_path / name}) for name in ("switched", "python"))
    options = TrafficOptions(seed=9, network="local-both", copies=4, checked=0.7, garbage=0.05, forged=0.05)
    traffic = Traffic(options, engines.NOW * 1_000, 200.0, keep_ledger=False).frames()
    for part, native_core in enumerate((False, True, False), 1):
        with connect(kafka.client_options(), kafka.topic("frames")) as producer:
            for frame in islice(traffic, FRAMES):
                producer.send_record(frame.key, frame.value)
        for query in QUERIES:
            run_query(spark, switched, query, part * FRAMES, native_core=native_core)
    updates = read_updates(kafka)
    for query in QUERIES:
        run_query(spark, in_python, query, part * FRAMES, native_core=False)
    assert read_updates(kafka) == updates * 2
    assert len(updates) > 100
    expected = read_tables(in_python)
    assert {name: rows.num_rows > 0 for name, rows in expected.items()} == dict.fromkeys(TABLES, True)
    assert [name for name, rows in read_tables(switched).items() if not rows.equals(expected[name])] == []
