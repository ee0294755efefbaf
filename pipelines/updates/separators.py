"""The separator of an update: from the verified genesis of its stream, or from a claim in the message (decision 4).

Verified separators come from the topic `kiln.streams`. Each machine has a file with them on its disk, which its Python
workers share. At the start of a task, they add the new records of the topic to the file.
"""

from __future__ import annotations

import fcntl
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from pyspark import SparkFiles

from kiln.conf.process.kafka_records import RecordReader
from kiln.schemas.kafka.records import (
    UNREADABLE,
    QuarantineRecord,
    SeparatorRecord,
    SeparatorSource,
    WaitedTip,
    decode_stream,
)
from kiln.schemas.wire.genesis import CONTRADICTS, Claims, describe_contradiction
from kiln.schemas.wire.topics import Separator


@dataclass(frozen=True)
class SeparatorConfig:
    """Options for finding the separators of updates.

    Attributes:
        streams: Topic with the verified separators; None if no geneses are verified.
        fetch: True if blocks, and so geneses, can be fetched.
        believe: True to accept a claim before it is verified, even if it can be verified.
    """

    streams: StreamsTopic | None = None
    fetch: bool = False
    believe: bool = True


class KnownSeparators(Protocol):
    """Verified separators by network and StreamID, for example a dict. None: the genesis names no separator."""

    def get(self, stream: tuple[str, str], default: SeparatorRecord | None, /) -> SeparatorRecord | None: ...


_UNKNOWN: Final = SeparatorRecord("-", "-")


class SeparatedUpdate(NamedTuple):
    """The separator of an update, its source, and the claim that the genesis contradicts, if any. Without source, the
    separator is not known."""

    separator: Separator | None
    source: SeparatorSource | None
    contradicted: Separator | None = None


def resolve_separator(
    claims: Claims, stream: tuple[str, str], known: KnownSeparators, separating: SeparatorConfig
) -> SeparatedUpdate:
    """Find the separator of an update: from the verified genesis, else from the topic, else from the field `model`
    (decision 4).

    A genesis that names no separator contradicts no claim, but the update then has no separator. If the genesis is
    unknown but can be fetched (`fetch`), no claim counts if claims contradict each other or if `believe` is off.

    Args:
        claims: Claims of the update: by its topic, and by its field `model`.
        stream: Network and StreamID.
        known: Verified separators.
        separating: Options, which decide which claims are accepted.
    """
    verified = known.get(stream, _UNKNOWN)
    if verified is None:
        return SeparatedUpdate(None, "genesis")
    if verified is not _UNKNOWN:
        separator = Separator(verified.key, verified.value)
        return SeparatedUpdate(separator, "genesis", claims.find_contradicted(separator))
    if claims.first is None or (separating.fetch and (claims.disagree or not separating.believe)):
        return SeparatedUpdate(None, None)
    return SeparatedUpdate(claims.first, "topic" if claims.topic is not None else "model")


def build_claims(topic: Separator | None, model: str | None) -> Claims:
    """Build the claims of an UPDATE: the separator of the topic it was received on, and its field `model`."""
    return Claims(topic, None if model is None else Separator("model", model))


def build_false_claim(claimed: Separator, separator: Separator, data: bytes, observed_at: int) -> QuarantineRecord:
    """Build the quarantine record of an UPDATE whose claim the genesis contradicts. `data`: bytes of the message."""
    return QuarantineRecord(
        stage="separator",
        reason=CONTRADICTS,
        detail=describe_contradiction(claimed, separator),
        data=data,
        observed_at=observed_at,
    )


_POLL_S: Final = 1.0
_PATIENCE_S: Final = 30.0  # seconds for a broker to answer; after that the task fails, and the query starts again
_LOCK_PATIENCE_S: Final = 60.0  # seconds for another worker to put its rows into the file
_REMEMBERED: Final = 10_000  # cached answers of a worker


@dataclass(frozen=True)
class StreamsTopic:
    """The topic with the verified separators: its full name, the brokers, and options of kafka-python as names and
    values."""

    topic: str
    servers: tuple[str, ...]
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)


class StreamsFile:
    """SQLite file with streams, their separators, and the offsets in the topic up to which the file has the records.

    A stream takes about 30 bytes of disk, a tip that waited 20. The text of a separator is stored once. Memory use does
    not depend on the number of streams.

    Several processes may have the file open. After a crash, the file is as the last finished `add` left it. Each method
    raises sqlite3.Error if the disk is full or the file has another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = sqlite3.connect(path, timeout=_LOCK_PATIENCE_S, isolation_level=None)
        self._file.execute("PRAGMA journal_mode = WAL")  # so that readers do not wait for a writer
        self._file.execute("PRAGMA synchronous = OFF")  # the file is of no use after a power cut
        self._file.execute(f"PRAGMA journal_size_limit = {64 << 20}")
        self._file.executescript(_TABLES)
        self._cached_number = lru_cache(maxsize=_REMEMBERED)(self._get_number)

    def read_offsets(self) -> dict[int, int]:
        """Return the offset after the last record in the file, by partition of the topic."""
        return dict(self._file.execute("SELECT partition, next_offset FROM offsets"))

    def add(self, values: Iterable[bytes | None], offsets: Mapping[int, int]) -> None:
        """Add records of the topic, in the order of their offsets, and the offsets after them, in one transaction.

        The rows are sorted before they are inserted, because otherwise each insert would rewrite another page.
        """
        with self._transaction():
            self._file.executemany("INSERT INTO temp.new_streams VALUES (?, ?)", self._rows(values))
            self._file.execute("INSERT OR REPLACE INTO streams SELECT * FROM temp.new_streams ORDER BY digest, rowid")
            self._file.execute("DELETE FROM temp.new_streams")
            self._file.executemany("INSERT OR REPLACE INTO offsets VALUES (?, ?)", offsets.items())

    def get(self, stream: tuple[str, str], default: SeparatorRecord | None, /) -> SeparatorRecord | None:
        """Return the separator that the genesis of a stream (network, StreamID) names, or None if it names none.
        `default`: result if the stream is not in the file."""
        row = self._file.execute(_LOOK_UP, (_digest(*stream),)).fetchone()
        if row is None:
            return default
        return None if row[0] is None else SeparatorRecord(*row)

    def has_waited(self, stream: tuple[str, str], tip: WaitedTip, /) -> bool:
        """Return true if this tip waited for the genesis of its stream. `stream`: network and StreamID."""
        return self._file.execute(_HAS_WAITED, (_digest_tip(stream, tip),)).fetchone() is not None

    def _rows(self, values: Iterable[bytes | None]) -> Iterator[tuple[bytes, int | None]]:
        for value in values:
            try:
                stream = decode_stream(value or b"")
            except UNREADABLE:
                continue  # `sink` puts the record into quarantine
            if stream.waited:  # few, so they are not sorted first
                waited = ((_digest_tip((stream.network, stream.stream), tip),) for tip in stream.waited)
                self._file.executemany("INSERT OR IGNORE INTO waited_tips VALUES (?)", waited)
            separator = stream.separator
            number = None if separator is None else self._cached_number(separator.key, separator.value)
            yield _digest(stream.network, stream.stream), number

    def _get_number(self, key: str, value: str) -> int:
        self._file.execute("INSERT OR IGNORE INTO separators (key, value) VALUES (?, ?)", (key, value))
        row = self._file.execute("SELECT number FROM separators WHERE key = ? AND value = ?", (key, value)).fetchone()
        return int(row[0])

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._file.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:  # raised again, whatever the error is
            self._file.execute("ROLLBACK")
            self._cached_number.cache_clear()  # numbers that no stream has any more
            raise
        self._file.execute("COMMIT")


_TABLES = """
CREATE TABLE IF NOT EXISTS separators (number INTEGER PRIMARY KEY, key TEXT, value TEXT, UNIQUE (key, value));
CREATE TABLE IF NOT EXISTS streams (digest BLOB PRIMARY KEY, separator INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS waited_tips (digest BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS offsets (partition INTEGER PRIMARY KEY, next_offset INTEGER);
CREATE TEMP TABLE new_streams (digest BLOB, separator INTEGER);
"""
_LOOK_UP = "SELECT key, value FROM streams LEFT JOIN separators ON number = separator WHERE digest = ?"
_HAS_WAITED = "SELECT 1 FROM waited_tips WHERE digest = ?"


def _digest(*parts: str) -> bytes:
    return blake2b("\n".join(parts).encode(), digest_size=16).digest()


def _digest_tip(stream: tuple[str, str], tip: WaitedTip) -> bytes:
    return _digest(*stream, tip.origin, tip.tip)


class StreamsLog(Protocol):
    """Reader of the topic with the verified separators."""

    def read_ends(self) -> dict[int, int]:
        """Return the offset after the last record, by partition."""
        ...

    def read(self, offsets: Mapping[int, int], ends: Mapping[int, int]) -> Iterator[bytes | None]:
        """Yield the values of the records from `offsets` to at least `ends`, both by partition."""
        ...


class _KafkaStreams:
    def __init__(self, where: StreamsTopic) -> None:
        self._reader = RecordReader({**dict(where.options), "bootstrap_servers": list(where.servers)}, where.topic)
        with ExitStack() as opened:  # a task that fails is tried again, in the same process
            opened.callback(self._reader.close)
            self._parts = self._reader.list_partitions(where.topic, _PATIENCE_S)
            opened.pop_all()

    def read_ends(self) -> dict[int, int]:
        return {part.partition: self._reader.read_end(part, _PATIENCE_S) for part in self._parts}

    def read(self, offsets: Mapping[int, int], ends: Mapping[int, int]) -> Iterator[bytes | None]:
        self._reader.assign({part: offsets[part.partition] for part in self._parts})
        while any(self._reader.position(part) < ends[part.partition] for part in self._parts):
            for records in self._reader.poll(_POLL_S).values():
                for record in records:
                    yield record.value


class KnownStreams:
    """Verified separators of all networks, as of the last `refresh`."""

    def __init__(self, topic: StreamsLog, file: StreamsFile) -> None:
        self._topic = topic
        self._file = file
        self._offsets: dict[int, int] = {}  # offsets of the file at which the cached answers were read
        self._answers: dict[tuple[str, str], tuple[SeparatorRecord | None, bool]] = {}

    def get(self, stream: tuple[str, str], default: SeparatorRecord | None, /) -> SeparatorRecord | None:
        """Return the separator that the verified genesis of a stream (network, StreamID) names, or None if it names
        none. `default`: result if no genesis of the stream was verified."""
        answer = self._answers.get(stream)
        if answer is None:
            separator = self._file.get(stream, _UNKNOWN)
            answer = (None, False) if separator is _UNKNOWN else (separator, True)
            if len(self._answers) >= _REMEMBERED:
                self._answers.clear()
            self._answers[stream] = answer
        separator, known = answer
        return separator if known else default

    def has_waited(self, stream: tuple[str, str], tip: WaitedTip, /) -> bool:
        """Return true if an update of the stream to this tip waited for the genesis, and was then written to
        `kiln.updates`. `stream`: network and StreamID."""
        return self._file.has_waited(stream, tip)

    def refresh(self) -> None:
        """Add new records of the topic to the file, unless another worker of this machine has added them."""
        ends = self._topic.read_ends()
        offsets = self._file.read_offsets()
        if _is_behind(offsets, ends):
            with _lock_file(self._file.path):
                offsets = self._file.read_offsets()
                if _is_behind(offsets, ends):
                    # a topic that was created again is read from its beginning
                    first = {part: at if (at := offsets.get(part, 0)) <= end else 0 for part, end in ends.items()}
                    self._file.add(self._topic.read(first, ends), ends)
                    offsets = dict(ends)
        if offsets != self._offsets:
            self._offsets = offsets
            self._answers.clear()


def _is_behind(offsets: Mapping[int, int], ends: Mapping[int, int]) -> bool:
    return any(offsets.get(part, 0) != end for part, end in ends.items())


@contextmanager
def _lock_file(path: Path) -> Iterator[None]:
    """Prevent other processes on this machine from adding records to the file while the body runs."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@lru_cache(maxsize=2)
def open_known_streams(where: StreamsTopic) -> KnownStreams:
    """Return the `KnownStreams` of this process, which all tasks of a Python worker share.

    Its file is in the folder of the Spark application on this machine, which Spark removes at the end.

    Raises:
        KafkaError: No broker answers.
    """
    topic = _KafkaStreams(where)
    name = blake2b("\n".join((where.topic, *where.servers)).encode(), digest_size=8).hexdigest()
    path = Path(SparkFiles.getRootDirectory()) / f"streams-{name}.sqlite"
    with _lock_file(path):  # SQLite refuses other connections while the file is created
        return KnownStreams(topic, StreamsFile(path))
