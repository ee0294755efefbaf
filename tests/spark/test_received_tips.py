"""Tips in the batches of other nodes, compared with the separators of the verified geneses (CIP-123, Receiving batch
update)."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from pyspark.sql import SparkSession

from kiln.pipelines.sink.transform import (
    OTHER_SEPARATOR,
    join_verified_separators,
    quarantine_contradicted_tips,
    select_received_tips,
)

pytest_plugins = ["kit.local_spark"]
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def test_a_tip_of_a_stream_with_another_separator_goes_to_quarantine_alone(spark: SparkSession) -> None:
    """A stream of the separator, one that nobody knows, and one whose genesis has no separator are believed."""
    at = datetime(2026, 1, 1, tzinfo=UTC)
    received = spark.createDataFrame(
        [
            ("mainnet", stream, f"tip of {stream}", "cid", at, "model", "ka")
            for stream in ("its", "new", "none", "other")
        ],
        "network string, stream string, tip string, batch_cid string, observed_at timestamp, separator_key string, "
        "separator_value string",
    )
    streams = spark.createDataFrame(
        [
            ("mainnet", "its", "model", "ka"),
            ("mainnet", "none", None, None),
            ("mainnet", "other", "model", "kb"),
            ("testnet", "new", "model", "kb"),
        ],
        "network string, stream string, separator_key string, separator_value string",
    )
    known = join_verified_separators(received, streams)
    assert {row.stream for row in select_received_tips(known).collect()} == {"its", "new", "none"}
    (row,) = quarantine_contradicted_tips(known).collect()
    assert (row.reason, bytes(row.data)) == (OTHER_SEPARATOR, b"tip of other")
    assert row.detail == "other in a batch of model/ka; its genesis names model/kb"
