"""kiln.pipelines.runtime.progress: reports that Spark delivers after the next start of the query count as earlier."""

from __future__ import annotations

from uuid import UUID, uuid4

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryStartedEvent,
    SinkProgress,
    SourceProgress,
    StreamingQueryProgress,
)

from kiln.pipelines.runtime.progress import ProgressListener, QueryProgress

NAME = "archive"
QUERY = UUID(int=7)
NOW = "2026-11-30T12:00:00.000Z"
ENDS = {"kiln.frames": {0: 30}}


def report(run: UUID, batch_id: int, start: int, end: int) -> StreamingQueryProgress:
    offsets = [f'{{"kiln.frames": {{"0": {offset}}}}}' for offset in (start, end)]
    source = SourceProgress("kafka", offsets[0], offsets[1], offsets[1], end - start, 0.0, 0.0, {})
    sink = SinkProgress("delta", end - start, {})
    return StreamingQueryProgress(
        QUERY, run, NAME, NOW, batch_id, 5, {"triggerExecution": 5}, {}, [], [source], sink, None, None, None, {}
    )


def start(listener: ProgressListener) -> UUID:
    run = uuid4()
    listener.onQueryStarted(QueryStartedEvent(QUERY, run, NAME, NOW, set()))
    return run


def newest(listener: ProgressListener) -> QueryProgress:
    return listener.snapshot()[NAME]


def test_late_reports_of_an_earlier_run_are_not_taken_for_reports_of_the_restarted_query() -> None:
    listener = ProgressListener()
    first = start(listener)
    listener.record(report(first, 0, 0, 20))
    assert newest(listener).lag(ENDS) == 10
    second = start(listener)
    unread = newest(listener).lag(ENDS)
    assert unread != 0
    listener.onQueryIdle(QueryIdleEvent(QUERY, first, NOW))
    listener.record(report(first, 1, 20, 30))
    assert newest(listener).lag(ENDS) == unread
    assert newest(listener).records == 30, "but it did read them"
    listener.record(report(second, 2, 30, 30))
    listener.onQueryIdle(QueryIdleEvent(QUERY, second, NOW))
    assert (newest(listener).lag(ENDS), newest(listener).records, newest(listener).idle) == (0, 30, True)
