"""Tasks of the query `updates`: decode the messages of `kiln.frames`, and emit each new update with its separator.

Messages are decoded with the native core or in Python. Most copies of a message give the same rows as its first copy.
The native core recognises these copies without decoding them.

On a cluster, or with checkpoints in an object store, a stateful processor keyed by the Ceramic stream drops repeated
updates (decision 10). pandas is imported only where it processes rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)
from pyspark.sql.types import BinaryType, StructField, StructType

from kiln.pipelines.decode.decoder import (
    DecodeConfig,
    DecodedMessage,
    FrameDecoder,
    MessageCopy,
    MessageRef,
    RejectedMessage,
)
from kiln.pipelines.decode.identities import is_lasting
from kiln.pipelines.delta.arrow_rows import RowBuffer
from kiln.pipelines.native.core import Core, CoreRows, RecordRow, can_decode, leave_all, take_records
from kiln.pipelines.native.library import find_engine, turn_off
from kiln.pipelines.runtime.clocks import get_batch_time, with_dedup_watermark
from kiln.pipelines.runtime.dedup_store import (
    DedupRule,
    DedupStoreConfig,
    StoredDigest,
    chunk_copies,
    filter_new_copies,
)
from kiln.pipelines.runtime.deduplication import (
    Deduplication,
    DedupSteps,
    StateDeduplication,
    build_decode_task,
    is_small,
)
from kiln.pipelines.runtime.epoch import get_task_epoch
from kiln.pipelines.runtime.kafka_ranges import ArrowTask
from kiln.pipelines.updates.repeats import list_keys, select_updates
from kiln.pipelines.updates.row_builder import (
    COPIES_DDL,
    COPY_COLUMNS,
    ROWS,
    ROWS_DDL,
    NoStreams,
    RowBuilder,
    StreamStates,
    UpdateRow,
    read_copies,
    write_copies,
)
from kiln.pipelines.updates.separators import SeparatorConfig, open_known_streams
from kiln.schemas.kafka.records import Epoch
from kiln.schemas.proto.gossipsub.rpc_pb2 import Message
from kiln.schemas.wire.identity import VERDICT_NAMES, Verdict
from kiln.schemas.wire.pubsub import PubsubMessage
from kiln.schemas.wire.topics import Separator

if TYPE_CHECKING:
    import pandas as pd

_TYPES: Final = ("UPDATE", "BATCH_UPDATE")
_LASTING: Final = -(1 << 63)  # in a digest, in place of a span of time
_ABSENT: Final = (1 << 64) - 1  # in a digest, in place of a size
_RecordMessages = Iterator[tuple[DecodedMessage, "CopyKey | None"]]


class CopyKey(NamedTuple):
    """Key of a copy of a message in a Kafka partition. Copies with the same key give rows with the same identities."""

    same: bytes
    partition: int


class MessageReader:
    """Decoder of the messages of one task."""

    def __init__(self, config: DecodeConfig, count_difference: Callable[[int], None]) -> None:
        """Create the decoder. `count_difference`: called with the number of records that the native core and Python
        decoded differently."""
        self._config = config
        self._count_difference = count_difference
        self._decoder = FrameDecoder(config)
        self._core: Core | None = None
        self._is_started = False
        self._finished: set[CopyKey] = set()

    def finish(self, key: CopyKey) -> None:
        """Ignore further copies with this key from now on."""
        self._finished.add(key)

    def read(self, batch: pa.RecordBatch) -> _RecordMessages:
        """Decode the messages in a record batch of Kafka records. Yield each with its key, or with None if Python
        decoded the record. The native core returns only UPDATE and BATCH_UPDATE messages."""
        if not self._is_started:
            self._is_started = True
            self._core = Core(self._config) if can_decode(self._config, batch.num_rows) else None
        first = 0
        for rows in self._core.updates(batch) if self._core is not None else ():
            if self._find_difference(rows, batch):
                self._core = None
                break
            yield from self._merge(rows, batch)
            first = rows.end
        for rows in leave_all(batch, first):
            yield from self._merge(rows, batch)

    def _merge(self, rows: CoreRows, batch: pa.RecordBatch) -> _RecordMessages:
        """Yield the messages that the core returned and those that Python decodes, in the order of their records."""
        left = take_records(batch, rows.left)
        record = next(left, None)
        if rows.tables:
            messages = rows.tables[0]
            numbers: list[int] = messages.column("row").to_pylist()
            same: list[bytes] = messages.column("same").to_pylist()
            partitions = batch.column("partition").to_pylist()
            keys = [CopyKey(digest, partitions[row]) for digest, row in zip(same, numbers, strict=True)]
            new = self._read_new(messages, batch, keys)
            for at, (row, key) in enumerate(zip(numbers, keys, strict=True)):
                while record is not None and record.row < row:
                    yield from self._decode(record)
                    record = next(left, None)
                if key not in self._finished:
                    message = new.get(at)
                    yield message or _build_messages(messages.slice(at, 1), batch)[0], key
        while record is not None:
            yield from self._decode(record)
            record = next(left, None)

    def _read_new(
        self, messages: pa.RecordBatch, batch: pa.RecordBatch, keys: list[CopyKey]
    ) -> dict[int, DecodedMessage]:
        """Build the first message of each key that is not finished, by its row in `messages`."""
        first: dict[CopyKey, int] = {}
        for at, key in enumerate(keys):
            if key not in self._finished:
                first.setdefault(key, at)
        if not first:
            return {}
        chosen = list(first.values())
        return dict(zip(chosen, _build_messages(messages.take(pa.array(chosen, pa.int32())), batch), strict=True))

    def _decode(self, record: RecordRow) -> _RecordMessages:
        for item in self._decoder.decode(record.value, record.partition, record.offset, record.stamp):
            if not isinstance(item, RejectedMessage):
                yield item, None

    def _find_difference(self, rows: CoreRows, batch: pa.RecordBatch) -> bool:
        """Compare the samples of a call of the core with what Python decodes, and turn the core off at a difference.
        Return true if the core is off, because of this task or another one of the worker."""
        if rows.samples:
            messages = rows.tables[0]
            from_core: dict[int, list[tuple[DecodedMessage, bytes]]] = {row: [] for row in rows.samples}
            chosen = [at for at, row in enumerate(messages.column("row").to_pylist()) if row in from_core]
            some = messages.take(pa.array(chosen, pa.int32()))
            columns = (some.column(name).to_pylist() for name in ("row", "same"))
            for row, same, message in zip(*columns, _build_messages(some, batch), strict=True):
                from_core[row].append((message, same))
            for record in take_records(batch, rows.samples):
                items = [item for item, _ in self._decode(record) if item.content.type in _TYPES]
                expected = [(item, _compute_same(item, self._config.unsigned_horizon)) for item in items]
                if from_core[record.row] != expected:
                    reason = "the native core and Python decoded a record into different messages"
                    turn_off(reason, record.partition, record.offset)
                    self._count_difference(1)
                    return True
        return not find_engine().is_native  # another task of this worker has found one


def _compute_same(item: DecodedMessage, horizon: int) -> bytes:
    """Compute the digest of a `CopyKey`, as `compute_same` in native/src/updates.rs does."""
    content = item.content
    span = _LASTING
    if not is_lasting(item.message_id, item.verdict is Verdict.VALID):
        span = item.observed_at // horizon
    digest = blake2b(bytes((item.origin == "REPLAY", item.verdict, item.own)), digest_size=16)
    digest.update(span.to_bytes(8, "little", signed=True))
    separator = item.separator or (None, None)
    claims = (content.stream, content.tip, content.model, content.sep, content.batch)
    for text in (content.type, item.network, *separator, *claims):
        raw = b"" if text is None else text.encode()
        digest.update((_ABSENT if text is None else len(raw)).to_bytes(8, "little") + raw)
    digest.update(item.message_id.encode())
    return digest.digest()


def _build_messages(messages: pa.RecordBatch, batch: pa.RecordBatch) -> list[DecodedMessage]:
    """Build messages from the columns that the core returned. `batch`: the Kafka records that contain them."""
    records = messages.column("row")
    positions = (batch.column(name).take(records).to_pylist() for name in ("partition", "offset"))
    columns = {name: messages.column(name).to_pylist() for name in messages.schema.names}
    contents = (columns[name] for name in ("type", "stream", "tip", "model", "sep", "batch"))
    given = map(VERDICT_NAMES.__getitem__, columns["given_verdict"])
    separators = zip(columns["separator_key"], columns["separator_value"], strict=True)
    fields: dict[str, Iterable[object]] = {
        "ref": map(MessageRef, *positions, columns["message_index"]),
        **{name: columns[name] for name in _SAME},
        "separator": (None if separator[0] is None else Separator(*separator) for separator in separators),
        "verdict": map(Verdict, columns["verdict"]),
        "envelope": map(Message.FromString, columns["envelope"]),
        "content": map(PubsubMessage, *contents),
        "copy": map(MessageCopy, columns["network"], columns["message_id"], given),
        "own": (own == 1 for own in columns["own"]),
        "previous": [()] * messages.num_rows,
    }
    return list(map(DecodedMessage._make, zip(*(fields[name] for name in DecodedMessage._fields), strict=True)))


_SAME: Final = ("message_id", "network", "origin", "topic", "topic_source", "remote_peer", "observed_at")
"""Fields of `DecodedMessage` whose values are those of the core's columns with the same names"""


MAX_DIGESTS: Final = 3_000
"""Maximum number of digests in the state of a stream. Beyond that number, the oldest digests are dropped before they
expire."""

_STATE = StructType([StructField("state", BinaryType())])


class StreamState:
    """State of one stream in Spark: digests, each with the time at which it was stored, in µs."""

    def __init__(self, packed: bytes, span: int) -> None:
        """Load the state. `packed`: what `dump` returned, or empty; `span`: retention of a digest, µs."""
        self._span = span
        self._digests = _DECODER.decode(packed) if packed else {}

    def select(self, copies: list[UpdateRow], now: int) -> list[UpdateRow]:
        """Return the copies to emit. `now`: time of the micro-batch, µs."""
        self.expire(now)
        stored = {key: StoredDigest(*digest[1:]) for key, digest in self._digests.items()}
        copies.sort(key=lambda copy: (copy.observed_at, copy.ref.partition, copy.ref.offset, copy.ref.position or 0))
        passed, changed = select_updates(copies, stored)
        for key, digest in changed.items():
            self._digests.pop(key, None)  # so that the newest ones are last
            self._digests[key] = (now, *digest)
        for key in list(self._digests)[:-MAX_DIGESTS]:
            del self._digests[key]
        return passed

    def expire(self, now: int) -> None:
        """Drop the digests that have expired. `now`: µs."""
        self._digests = {key: digest for key, digest in self._digests.items() if digest[0] > now - self._span}

    @property
    def newest_time(self) -> int | None:
        """Time at which the newest digest was stored, µs; None if there is no digest."""
        return max((digest[0] for digest in self._digests.values()), default=None)

    def dump(self) -> bytes:
        return msgspec.msgpack.encode(self._digests)


_DECODER = msgspec.msgpack.Decoder(dict[bytes, tuple[int, str, bytes, int]])


class UpdateProcessor(StatefulProcessor):
    """Stateful processor, keyed by the Ceramic stream, that drops repeated updates.

    Its time is that of the micro-batches. Spark's watermark is `retention` behind it.
    """

    def __init__(self, retention: int) -> None:
        """Create the processor. `retention`: retention of a digest, µs; up to twice as long after the query was
        down."""
        self._retention = retention

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._state = handle.getValueState("stream", _STATE)

    def handleInputRows(
        self,
        key: tuple[bytes],
        rows: Iterator[pd.DataFrame] | Iterator[Row],
        timerValues: TimerValues,
    ) -> Iterator[pd.DataFrame]:
        """Return the rows of one stream to emit. The input has the columns COPIES_DDL, the output the columns
        ROWS_DDL."""
        import pandas as pd

        copies: list[UpdateRow] = []
        now = 0
        for frame in rows:
            if isinstance(frame, pd.DataFrame):  # the pandas form of the operator
                copies += read_copies(zip(*(frame[name].tolist() for name in COPY_COLUMNS), strict=True))
                now = max(now, int(frame["batch_time"].max()))
        state = self._load()
        if state.newest_time is None:
            self._set_timer(now)
        passed = state.select(copies, now)
        self._state.update((state.dump(),))
        if passed:  # pandas would give an empty column a type of its own choice
            yield pd.DataFrame(
                {
                    "topic": [row.topic for row in passed],
                    "key": [row.key for row in passed],
                    "value": [row.value for row in passed],
                    "observed_at": [row.observed_at for row in passed],
                }
            )

    def handleExpiredTimer(  # noqa: N802  # PySpark's name
        self,
        key: tuple[bytes],
        timerValues: TimerValues,
        expiredTimerInfo: ExpiredTimerInfo,  # noqa: N803  # as above
    ) -> Iterator[pd.DataFrame]:
        """Drop the digests of a stream that have expired."""
        state = self._load()
        state.expire(timerValues.getCurrentWatermarkInMs() * 1000 + self._retention)
        if state.newest_time is None:
            self._state.clear()
        else:
            self._state.update((state.dump(),))
            self._set_timer(state.newest_time)
        return iter(())

    def close(self) -> None:
        """Do nothing, because all state is Spark's."""

    def _load(self) -> StreamState:
        state = self._state.get()
        return StreamState(bytes(state[0]) if state else b"", 2 * self._retention)

    def _set_timer(self, now: int) -> None:
        """Set the timer for the time at which a digest that was stored at `now` expires."""
        self._handle.registerTimer((now + self._retention) // 1000 + 1)


_Batches = Iterator[pa.RecordBatch]

SMALL: Final = 2_000
"""Number of records in a micro-batch up to which one task is as fast as several"""

UPDATE_RULE: Final[DedupRule[UpdateRow]] = DedupRule(list_keys, select_updates)


def ignore_difference(records: int) -> None:
    """Ignore that the native core and Python decoded records differently."""


def build_steps(
    deduplication: Deduplication,
    config: DecodeConfig,
    separating: SeparatorConfig,
    prefix: str = "",
    first_epoch: Epoch | None = None,
    count_difference: Callable[[int], None] = ignore_difference,
) -> DedupSteps:
    """Build the two steps of the query: decode the records, then select the rows to emit.

    Of the copies of a message in one Kafka partition, the first step decodes one.

    The input has the columns of Kafka records, the rows between the steps have the columns COPIES_DDL, and the output
    has the columns ROWS_DDL.

    Args:
        prefix: Prefix of the Kafka topics in the rows.
        first_epoch: Epoch (decision 7) of a replaced checkpoint, whose numbers the query continues; None: no such
            checkpoint.
        count_difference: Called with the number of records that the native core and Python decoded differently.
    """

    def decode(batches: _Batches) -> Iterator[UpdateRow]:
        return build_copies(batches, config, separating, _get_epoch(first_epoch), count_difference)

    task = build_decode_task(decode, write_copies)
    if isinstance(deduplication, StateDeduplication):
        select_by_state = partial(_select_by_state, retention=deduplication.retention, prefix=prefix)
        return DedupSteps(task, COPIES_DDL, select_by_state, lambda rows, _: sort_by_capture_time(rows.coalesce(1)))
    select = _build_select_task(deduplication.store, prefix)

    def run_in_micro_batch(rows: DataFrame, records: int | None) -> DataFrame:
        # One task selects: a micro-batch has few new rows, and a shuffle by key costs more than it saves. A small
        # micro-batch has one task anyway, and each operation on a DataFrame costs 10 to 30 ms of planning.
        one_task = rows if is_small(records, SMALL) else rows.repartition(1)
        return sort_copies(one_task).mapInArrow(select, ROWS_DDL)

    return DedupSteps(task, COPIES_DDL, lambda rows: rows, run_in_micro_batch)


def build_copies(
    batches: _Batches,
    config: DecodeConfig,
    separating: SeparatorConfig,
    epoch: Epoch,
    count_difference: Callable[[int], None] = ignore_difference,
) -> Iterator[UpdateRow]:
    """Decode the records of a task, and build the rows of their valid messages, each row once per Kafka partition.

    A row is built from its first copy in the partition. A repeated micro-batch has this copy again, even if Spark
    divides the micro-batch into other tasks (decision 10). `epoch`: epoch for the updates.
    """
    emitted: set[tuple[bytes, int]] = set()
    reader = MessageReader(config, count_difference)
    streams: StreamStates = NoStreams()
    if separating.streams is not None:
        streams = known = open_known_streams(separating.streams)
        known.refresh()
    builder = RowBuilder(config, separating, streams, epoch)
    for batch in batches:
        for item, copy_key in reader.read(batch):
            rows = builder.build(item)
            # a quarantine record has an identity of its own in each copy
            if copy_key is not None and all(row.topic != "quarantine" for row in rows):
                reader.finish(copy_key)
            for row in rows:
                message = None if row.announcement is None else row.announcement.message
                key = (message or row.identity, item.ref.partition)
                if key not in emitted:
                    emitted.add(key)
                    yield row


def _get_epoch(first_epoch: Epoch | None) -> Epoch:
    """Return the epoch of this task's micro-batch (decision 7)."""
    own = get_task_epoch()
    return own if first_epoch is None else Epoch(first_epoch.query, first_epoch.batch + own.batch)


def _build_select_task(dedup: DedupStoreConfig, prefix: str) -> ArrowTask:
    """Build the task that selects the rows to emit by the deduplication file. The input has the columns COPIES_DDL and
    is sorted by capture time; the output has the columns ROWS_DDL."""

    def select(batches: _Batches) -> _Batches:
        buffer = RowBuffer(ROWS)
        columns = ((batch.column(name).to_pylist() for name in COPY_COLUMNS) for batch in batches)
        copies = chain.from_iterable(read_copies(zip(*column, strict=True)) for column in columns)
        for chunk in filter_new_copies(chunk_copies(copies), dedup, get_batch_time(), get_task_epoch(), UPDATE_RULE):
            for row in chunk:
                if buffer.add((prefix + row.topic, row.key, row.value, row.observed_at), row.size):
                    yield from buffer.drain()
        yield from buffer.drain()

    return select


def _select_by_state(copies: DataFrame, retention: int, prefix: str) -> DataFrame:
    """Select the rows to emit by Spark's state. The input has the columns COPIES_DDL, the output the columns ROWS_DDL.
    `retention`: µs."""
    rows = with_dedup_watermark(copies.withColumn("seen_at", F.timestamp_micros("batch_time")), retention)
    new = rows.groupBy("stream").transformWithStateInPandas(
        UpdateProcessor(retention), outputStructType=ROWS_DDL, outputMode="Append", timeMode="EventTime"
    )
    return new.withColumn("topic", F.concat(F.lit(prefix), "topic"))


def sort_copies(copies: DataFrame) -> DataFrame:
    """Sort the copies of one micro-batch, in one partition, by capture time. The columns are COPIES_DDL.

    The recognition of repeats (decision 5) and the windows (decision 1) depend on this order.
    """
    return copies.sortWithinPartitions("observed_at", "partition", "offset", "index")


def sort_by_capture_time(rows: DataFrame) -> DataFrame:
    """Sort rows as `sort_copies` does, by capture time. The columns are ROWS_DDL."""
    return rows.sortWithinPartitions("observed_at", "value")
