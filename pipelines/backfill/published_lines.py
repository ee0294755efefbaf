"""Completion of logs of js-ceramic: adds the missing seqno to messages in the log of the node that published them.

Only the nodes that received a message have its seqno in their logs. Without it, the publisher's line and a receiver's
line would count as two messages. The two lines have the same author, topic and content, apart from fields such as
`model`, which one may lack. A node may publish the same content again, so the receiver's line nearest in time is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Final

import msgspec
import pyarrow as pa
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from kiln.schemas.captures import ceramic_log
from kiln.schemas.kafka.frames import read_rpc
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.pubsub import read_message

MAX_GAP: Final = 5_000_000
"""Maximum time between the two lines, µs: logs have whole seconds, and each node has its own clock"""

_LINES: Final = "kafka_partition int, kafka_offset bigint, at bigint, content binary, seqno binary"
_LINES_SCHEMA: Final = pa.schema(
    [
        ("kafka_partition", pa.int32()),
        ("kafka_offset", pa.int64()),
        ("at", pa.int64()),
        ("content", pa.binary()),
        ("seqno", pa.binary()),
    ]
)
_POSITION: Final = ["kafka_partition", "kafka_offset"]
_Batches = Iterator[pa.RecordBatch]


def has_log_lines(frames: DataFrame) -> bool:
    """Return true if rows of the table `frames` come from logs of js-ceramic."""
    return not frames.where(_is_log_line()).isEmpty()


def set_seqnos(frames: DataFrame, near: DataFrame) -> DataFrame:
    """Add the seqno to the message in each line about a published message, if the log of a receiving node has it.

    Args:
        frames: Rows of the table `frames`.
        near: The same rows, and the rows up to MAX_GAP before and after them.
    """
    of_log = _is_log_line()
    lines = (
        near.where(of_log)
        .select(*_POSITION, F.unix_micros("observed_at").alias("at"), "payload")
        .mapInArrow(_read_lines, _LINES)
    )
    nearest = F.when(F.col("seqno").isNull(), _find_nearest())
    matches = lines.select(*_POSITION, nearest.alias("found")).where(F.col("found").isNotNull())
    matched = frames.where(of_log).join(matches, _POSITION, "left").select(*frames.columns, "found")
    return frames.where(~of_log).unionByName(matched.mapInArrow(_insert_seqnos, frames.schema))


def _is_log_line() -> Column:
    return F.col("protocol") == ceramic_log.NAME


def _find_nearest() -> Column:
    """Build a column with the seqno of the nearest line in time about a received message with the same content.

    It is null if there is no such line within 5 s.
    """
    received = F.when(F.col("seqno").isNotNull(), F.struct("at", "seqno"))
    by_content = Window.partitionBy("content").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    before = F.last(received, ignorenulls=True).over(by_content.orderBy("at", "seqno"))
    after = F.last(received, ignorenulls=True).over(by_content.orderBy(F.desc("at"), F.desc("seqno")))
    gaps = [F.abs(F.col("at") - neighbour["at"]) for neighbour in (before, after)]
    nearest = F.when(F.coalesce(gaps[0] <= gaps[1], gaps[1].isNull()), before["seqno"]).otherwise(after["seqno"])
    return F.when(F.least(*gaps) <= MAX_GAP, nearest)


def _read_lines(batches: _Batches) -> _Batches:
    for batch in batches:
        partitions, offsets, times, payloads = (column.to_pylist() for column in batch.columns)
        contents = [_identify(payload) for payload in payloads]
        columns = [
            partitions,
            offsets,
            times,
            [content for content, _ in contents],
            [seqno for _, seqno in contents],
        ]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, _LINES_SCHEMA, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=_LINES_SCHEMA).filter(arrays[3].is_valid())


def _identify(payload: bytes) -> tuple[bytes | None, bytes | None]:
    """Return the digest of a message's fields that publisher and receiver log, and the message's seqno.

    The digest is `None` if the payload has no such message. The seqno is `None` in a line of the publisher.
    """
    rpc = read_rpc(payload)
    if isinstance(rpc, Rejected) or not rpc.publish:
        return None, None
    message = rpc.publish[0]
    content = read_message(message.data)
    if isinstance(content, Rejected):
        return None, None
    tips = sorted((content.tips or {}).items())
    fields = (content.type, content.stream, content.tip, content.query_id, tips, content.ts, content.sep, content.batch)
    key = msgspec.msgpack.encode((getattr(message, "from"), message.topic, fields))
    return sha256(key).digest(), message.seqno or None


def _insert_seqnos(batches: _Batches) -> _Batches:
    for batch in batches:
        index = batch.schema.get_field_index("payload")
        payloads = [
            payload if seqno is None else _insert_seqno(payload, seqno)
            for payload, seqno in zip(batch["payload"].to_pylist(), batch["found"].to_pylist(), strict=True)
        ]
        columns = batch.columns[:-1]
        columns[index] = pa.array(payloads, batch.schema.field(index).type)
        yield pa.RecordBatch.from_arrays(columns, names=batch.schema.names[:-1])


def _insert_seqno(payload: bytes, seqno: bytes) -> bytes:
    rpc = read_rpc(payload)
    assert not isinstance(rpc, Rejected)
    rpc.publish[0].seqno = seqno
    return rpc.SerializeToString()
