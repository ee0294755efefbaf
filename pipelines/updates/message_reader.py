"""Reader of the messages that the query `updates` needs, with the native core or in Python.

Most copies of a message give the same rows as the first one, which the core detects without decoding them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import Final, NamedTuple

import pyarrow as pa

from kiln.pipelines.decode.decoder import (
    DecodeConfig,
    DecodedMessage,
    FrameDecoder,
    MessageCopy,
    MessageRef,
    RejectedMessage,
)
from kiln.pipelines.decode.identities import is_lasting
from kiln.pipelines.native.core import Core, CoreRows, RecordRow, can_decode, leave_all, take_records
from kiln.pipelines.native.library import find_engine, turn_off
from kiln.schemas.proto.gossipsub.rpc_pb2 import Message
from kiln.schemas.wire.identity import VERDICT_NAMES, Verdict
from kiln.schemas.wire.pubsub import PubsubMessage
from kiln.schemas.wire.topics import Separator

_TYPES: Final = ("UPDATE", "BATCH_UPDATE")
_LASTING: Final = -(1 << 63)  # in place of a span of time
_ABSENT: Final = (1 << 64) - 1  # in place of a size
_RecordMessages = Iterator[tuple[DecodedMessage, "CopyKey | None"]]


class CopyKey(NamedTuple):
    """Copies with the same key give rows with the same identities, within a Kafka partition."""

    same: bytes
    partition: int


class MessageReader:
    """Reader of the messages of one task."""

    def __init__(self, config: DecodeConfig, count_difference: Callable[[int], None]) -> None:
        """Create the reader.

        Args:
            config: How to decode.
            count_difference: Receives the number of records that the core and Python decoded differently.
        """
        self._config = config
        self._count_difference = count_difference
        self._decoder = FrameDecoder(config)
        self._core: Core | None = None
        self._is_started = False
        self._finished: set[CopyKey] = set()

    def finish(self, key: CopyKey) -> None:
        """Skip further copies with this key."""
        self._finished.add(key)

    def read(self, batch: pa.RecordBatch) -> _RecordMessages:
        """Read the messages of a batch of RECORDS, each with its key. From the core come only UPDATE and
        BATCH_UPDATE."""
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
        """Read the messages of a call in the order of their records."""
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
        """Read the first message of each key that is not finished, by position."""
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
        """Compare the samples with what Python decodes. At a difference, the core is turned off."""
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
                    reason = "the native core and Python decoded a record into other messages"
                    turn_off(reason, record.partition, record.offset)
                    self._count_difference(1)
                    return True
        return not find_engine().is_native  # another task of this worker has found one


def _compute_same(item: DecodedMessage, horizon: int) -> bytes:
    """Compute the digest of `CopyKey`, as `compute_same` of native/src/updates.rs."""
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
    """Build messages from the core's columns. `batch`: the RECORDS that the messages are in."""
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
"""Fields that have the values of the columns of these names"""
