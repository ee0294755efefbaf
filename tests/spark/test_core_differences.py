"""Differences between the native core and Python, from the workers of Spark to the driver."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from unittest.mock import patch

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from kiln.deploy.demo.traffic import Traffic, TrafficOptions
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.native import core, library
from kiln.pipelines.runtime.clocks import MicroBatchClock
from kiln.pipelines.runtime.deduplication import StateDeduplication
from kiln.pipelines.updates import transform
from kiln.pipelines.updates.row_builder import COPIES_DDL
from kiln.pipelines.updates.separators import SeparatorConfig
from kiln.pipelines.updates.transform import build_steps
from kit import engines

pytest_plugins = ["kit.local_spark"]
pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.skipif(engines.core_is_missing(), reason="no native core to compare with Python"),
]


def test_tasks_of_updates_count_a_difference_and_emit_pythons_rows(spark: SparkSession) -> None:
    frames = Traffic(TrafficOptions(network="local-both", checked=1.0), engines.NOW * 1_000, 200.0).frames()
    (records,) = engines.build_batches([frame.value for frame in islice(frames, 400)])
    MicroBatchClock(lambda: engines.NOW, lambda: 0, 0).set_time(spark.sparkContext)
    differences = spark.sparkContext.accumulator(0)
    config = DecodeConfig()
    by_state = StateDeduplication(1)
    decode_in_python = build_steps(by_state, DecodeConfig(native_core=False), SeparatorConfig()).source_task
    decode = build_steps(by_state, config, SeparatorConfig(), count_difference=differences.add).source_task

    def decode_wrongly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with (
            patch.object(core, "SAMPLE_ONE_IN", 1),
            patch.object(transform, "_compute_same", lambda item, horizon: b""),
            patch.object(library, "_turned_off", []),
        ):
            yield from decode(batches)

    rows = spark.createDataFrame(pa.Table.from_batches([records])).coalesce(1)
    found = rows.mapInArrow(decode_wrongly, COPIES_DDL).drop("batch_time").collect()
    expected = rows.mapInArrow(decode_in_python, COPIES_DDL).drop("batch_time").collect()
    assert len(found) > 100
    assert found == expected
    assert differences.value == 1
