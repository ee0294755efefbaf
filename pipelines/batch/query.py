"""Query `batch`: windows of each separator to CIP-123 batches on `kiln.batches`. The ticks of its driver advance log
time."""

from __future__ import annotations

from typing import Final

from pyspark.sql.streaming.query import StreamingQuery

from kiln.conf.process.errors import KilnError
from kiln.conf.process.location import Location
from kiln.pipelines.batch.batching import BatchConfig
from kiln.pipelines.batch.transform import OFFSET_RANGES, batch_ranges, build_range_task
from kiln.pipelines.runtime.kafka import build_sink_options
from kiln.pipelines.runtime.query_context import QueryContext, start_query

_SMALL = 2_000  # number of records up to which one task is as fast as several
_FORMER_STATE: Final = rb"\"stateName\":\"shards\""


def check_state(checkpoint: Location) -> None:
    """Check that Spark's state of the query is not of an earlier version, which divided open windows into shards.

    Raises:
        KilnError: It is.
    """
    metadata = checkpoint / "state" / "0" / "_metadata" / "v2"
    if any(_FORMER_STATE in (metadata / file.name).read() for file in metadata.files()):
        raise KilnError(
            f"the state of the query batch ({checkpoint}) is of an earlier version of Kiln, which stored open windows "
            "in another form. Restart the query from scratch (RUNBOOK, State)"
        )


def start(context: QueryContext, batching: BatchConfig) -> StreamingQuery:
    """Start the query. A `Ticker` must run next to it, or windows close only with later updates.

    Raises:
        KilnError: Spark's state of the query is of an earlier version.
    """
    check_state(context.checkpoints / "batch")
    session = context.new_session()
    # Most work is before the shuffle, in a task for each Kafka partition unless the micro-batch is small. Each task
    # after it costs a Python worker and a commit of state in every micro-batch.
    session.conf.set("spark.sql.shuffle.partitions", "1")
    decode = build_range_task(batching.update_filter)
    ranges = context.read_stream("batch", session, decode, OFFSET_RANGES, small=_SMALL)
    rows = batch_ranges(ranges, batching, context.broker.prefix)
    return start_query("batch", context, rows.writeStream.format("kafka").options(**build_sink_options(context.broker)))
