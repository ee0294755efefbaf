"""Takes over the checkpoints of earlier versions.

In Kiln 0.1 two queries read `kiln.frames`: `archive` wrote the tables `frames` and `copies`, `messages` the table
`messages`. The query `archive` does both now, and goes on from the checkpoint of `messages`, which has the state.

What a query has let through was in Spark's state, as it is on a cluster. On one machine it is in a file now
(decision 10).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from kiln.conf.process.disk import to_disk
from kiln.pipelines.archive.frame_dedup import FrameDedup
from kiln.pipelines.archive.transform import DECODE_RESULT, IDENTITIES, DecodeResult, decode_frames
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.files import delete_files
from kiln.pipelines.runtime.checkpoint import Checkpoint
from kiln.pipelines.runtime.dedup_store import DedupStore, DedupStoreConfig, has_dedup_state
from kiln.pipelines.runtime.kafka import read_range
from kiln.pipelines.runtime.micro_batch_clock import MicroBatchClock
from kiln.pipelines.runtime.query_context import QueryContext
from kiln.schemas.kafka import topics as log
from kiln.schemas.kafka.records import Epoch

_EARLIEST = -2  # as Spark's options name the log's beginning
_KEPT = "archive-of-0.1"
"""Where the checkpoint of the earlier `archive` stays, which nothing reads any more."""


def take_over(plan: QueryContext, decoding: DecodeConfig) -> None:
    """Makes the two checkpoints one, if they are of Kiln 0.1. What the earlier `archive` had not written yet of what
    `messages` has read, is written now.

    A crash in the midst does no harm: the commits bear the ids of the earlier query, and come once.
    """
    folder = plan.checkpoints.folder
    if folder is None:  # Kiln 0.1 had none in a store
        return
    archive, messages = (Checkpoint(plan.checkpoints / name) for name in ("archive", "messages"))
    if messages.exists:
        if archive.exists:
            _catch_up(plan, decoding, archive, messages)
            (folder / "archive").rename(folder / _KEPT)
        (folder / "messages").rename(folder / "archive")
    elif archive.exists and archive.committed >= 0 and not has_dedup_state(folder / "archive"):
        (folder / "archive").rename(folder / _KEPT)  # `messages` never ran: all frames are read once more


def _catch_up(plan: QueryContext, decoding: DecodeConfig, archive: Checkpoint, messages: Checkpoint) -> None:
    """The micro-batch of the earlier query that was begun and not finished, then all up to where `messages` is."""
    MicroBatchClock(plan.now, plan.uptime, 0).set_time(plan.spark.sparkContext)
    plan.lake.create(("frames", "copies"))
    new = FrameDedup(plan.lake)
    begun, finished = archive.planned, archive.committed
    if begun > finished:
        _write(plan, decoding, new, archive.ends(finished), archive.ends(begun), WriteId(archive.query_id, begun))
    upto = messages.ends(messages.committed)
    _write(plan, decoding, new, archive.ends(begun), upto, WriteId(archive.query_id, begun + 1))


def _write(
    plan: QueryContext, decoding: DecodeConfig, new: FrameDedup, first: log.Offsets, upto: log.Offsets, write: WriteId
) -> None:
    """Frames and copies of a range of `kiln.frames`, as the earlier query would have written them."""
    topic = plan.broker.topic("frames")
    known = first.get(topic, {})
    ends = {part: max(end, known.get(part, 0)) for part, end in upto.get(topic, {}).items()}
    starts = {part: known.get(part, _EARLIEST) for part in ends}
    if starts == ends:
        return
    records = read_range(plan.spark, plan.broker, "frames", {topic: starts}, {topic: ends})
    told = decode_frames(records, decoding, plan.lake).where(F.col("kind") == DECODE_RESULT).collect()
    rows = [msgspec.msgpack.decode(bytes(row.data), type=tuple[bytes]) for row in told]
    passed = [msgspec.msgpack.decode(data, type=DecodeResult) for (data,) in rows]
    for table, files in zip(("frames", "copies"), new.drop_stored(passed, write), strict=True):
        if files and not plan.commits.commit(table, files, write):
            delete_files(plan.lake, files)


def take_over_remembered(plan: QueryContext, query: str) -> None:
    """Put what Spark's operators remembered for a query into the file that the query uses now. KilnError."""
    remembered = plan.find_dedup_store(query)
    if remembered is not None:
        session = plan.spark.newSession()
        remember_state(session, Checkpoint(plan.checkpoints / query), remembered, plan.dedup_retention)


def remember_state(session: SparkSession, checkpoint: Checkpoint, remembered: DedupStoreConfig, delay: int) -> None:
    """Puts what Spark's operators remember into the file that stands for them, and removes the operators' state. May be
    cut short, and then be done again. `delay`: of the operators' watermark, µs."""
    folder, file = Path(checkpoint.path.uri), Path(remembered.path)
    state = folder / "state"
    if not state.exists():
        return
    if not file.exists():
        fresh = file.with_suffix(".new")
        for left in folder.glob(f"{fresh.name}*"):
            left.unlink()
        to_fill = replace(remembered, path=str(fresh))
        if checkpoint.committed >= 0:
            for operator in sorted(each.name for each in state.iterdir() if each.name.isdigit()):
                held = session.read.format("statestore").option("operatorId", operator).load(str(folder))
                _fill(to_fill, held, delay)
        with DedupStore(to_fill) as filled:  # the last to close it, which leaves one file of it
            filled.mark(Epoch(checkpoint.query_id, checkpoint.committed), checkpoint.newest_time(delay))
        to_disk(fresh)
        fresh.rename(file)
        to_disk(folder)
    shutil.rmtree(state)


def _fill(remembered: DedupStoreConfig, state: DataFrame, delay: int) -> None:
    """Columns key, value of Spark's operator in."""
    (digest,) = state.select("key.*").columns
    turn = int(digest == IDENTITIES[1])

    def know(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with DedupStore(remembered) as file:
            for batch in batches:
                digests, expire = (column.to_pylist() for column in batch.columns)
                file.add_known(((digest, at - delay) for digest, at in zip(digests, expire, strict=True)), turn)
        yield from ()

    digests = state.select("key.*", F.col("value.expiresAtMicros"))
    digests.mapInArrow(know, "none int").collect()
