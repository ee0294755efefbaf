"""`kiln.frames` to the tables `frames` (exact bytes) and `copies` (each copy of a message)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
from pyspark.accumulators import Accumulator
from pyspark.core.broadcast import Broadcast
from pyspark.sql import DataFrame

from pipelines.logic.held_frames import HeldFrames, Sieve
from pipelines.spark.rows import RowBuffer, arrow_schema, columns_of, ddl
from schemas.frames import BEP50, DIRECTIONS, ORIGINS, gossip_messages, read_frame
from schemas.identity import Verdict, message_id, peer_text
from schemas.proto.kiln.frame_pb2 import Frame
from schemas.reject import Rejected
from schemas.tables import TABLES
from schemas.topic_table import Bundles, agreement, message_topic
from schemas.topics import parse_topic

_Batches = Iterator[pa.RecordBatch]

FRAMES = columns_of(TABLES["frames"])
COPIES = columns_of(TABLES["copies"])


def frames(records: DataFrame, held: Broadcast[HeldFrames], taken: Accumulator[HeldFrames]) -> DataFrame:
    """Columns partition, offset, stamp, value in; rows of the table `frames` out: frames not in `held`, each once.

    A record that is no Frame has no row: the query `messages` puts the record into quarantine. `taken` hears which
    frames have a row.
    """
    source = records.select("partition", "offset", "stamp", "value")
    return source.mapInArrow(_frame_rows(held, taken), ddl(FRAMES)).select(*(column.name for column in FRAMES))


def copies(records: DataFrame, held: Broadcast[HeldFrames], bundles: Bundles) -> DataFrame:
    """The same records in; rows of the table `copies` out: a row for each message in the same frames that came IN."""
    source = records.select("partition", "offset", "stamp", "value")
    return source.mapInArrow(_copy_rows(held, bundles), ddl(COPIES)).select(*(column.name for column in COPIES))


def _new_frames(batch: pa.RecordBatch, sieve: Sieve) -> Iterator[tuple[int, int, int, Frame]]:
    """(partition, offset, stamp, Frame) of the frames in the records that the lake does not hold yet."""
    for partition, offset, stamp, value in zip(*(column.to_pylist() for column in batch.columns), strict=True):
        frame = read_frame(value)
        if not isinstance(frame, Rejected) and sieve.passes(frame.connection, frame.direction, frame.sequence):
            yield partition, offset, stamp, frame


def _frame_rows(held: Broadcast[HeldFrames], taken: Accumulator[HeldFrames]) -> Callable[[_Batches], _Batches]:
    def rows(batches: _Batches) -> _Batches:
        sieve = Sieve(held.value)
        buffer = RowBuffer(arrow_schema(FRAMES))
        for batch in batches:
            for partition, offset, stamp, frame in _new_frames(batch, sieve):
                if buffer.add(frame_row(partition, offset, stamp, frame), len(frame.payload)):
                    yield from buffer.drain()
            yield from buffer.drain()
        taken.add(sieve.taken)

    return rows


def _copy_rows(held: Broadcast[HeldFrames], bundles: Bundles) -> Callable[[_Batches], _Batches]:
    def rows(batches: _Batches) -> _Batches:
        sieve = Sieve(held.value)
        buffer = RowBuffer(arrow_schema(COPIES))
        for batch in batches:
            for partition, offset, _, frame in _new_frames(batch, sieve):
                for row in copy_rows(partition, offset, frame, bundles):
                    if buffer.add(row):
                        yield from buffer.drain()
            yield from buffer.drain()

    return rows


def frame_row(partition: int, offset: int, stamp: int, frame: Frame) -> tuple[object, ...]:
    """The row of a frame in the order of FRAMES; `stamp`: the broker's, µs."""
    return (
        frame.network,
        frame.connection,
        DIRECTIONS[frame.direction],
        _peer(frame.local_peer, frame.protocol),
        _peer(frame.remote_peer, frame.protocol),
        frame.protocol,
        frame.observed_at // 1000,
        frame.sequence,
        frame.payload,
        frame.hello_in,
        frame.hello_out,
        frame.verdicts,
        ORIGINS[frame.origin],
        frame.remote_address,
        frame.declared_length,
        partition,
        offset,
        stamp,
    )


def copy_rows(partition: int, offset: int, frame: Frame, bundles: Bundles) -> Iterator[tuple[object, ...]]:
    """The rows, in the order of COPIES, of the messages in a frame that came IN. A frame that is no RPC has none.

    The network is the topic's, whether the topic goes by name or by index, as in the table `messages`; else the
    frame's.
    """
    if frame.direction != Frame.IN:
        return
    messages = gossip_messages(frame)
    if isinstance(messages, Rejected) or not messages:
        return
    table = agreement(frame.hello_in, frame.hello_out, bundles).table
    remote = _peer(frame.remote_peer, frame.protocol)
    observed_at = frame.observed_at // 1000
    for index, message in enumerate(messages):
        name = message_topic(message, table)
        topic = parse_topic(name) if isinstance(name, str) else None
        network = topic.network if topic else frame.network
        verdict = frame.verdicts[index] if index < len(frame.verdicts) else int(Verdict.NOT_CHECKED)
        yield network, message_id(message), remote, observed_at, verdict, partition, offset, index


def _peer(raw: bytes, protocol: str) -> str:
    """A peer id as text. A node id of the BitTorrent DHT has no other text than hex."""
    return raw.hex() if protocol == BEP50 else peer_text(raw)
