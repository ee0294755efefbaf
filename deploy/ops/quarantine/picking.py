"""Selection of rows of the table `quarantine` by stage, reason, time and author: counts, contents, positions in
files, and the messages of their frames that are no longer rejected for the same reason."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, NamedTuple, Self
from urllib.parse import unquote

import duckdb
import pyarrow as pa

from kiln.conf.process.errors import KilnError
from kiln.conf.settings.keys import suggest_key
from kiln.pipelines.decode.decoder import DecodeConfig, DecodedMessage, RejectedMessage, decode
from kiln.pipelines.decode.frame_row import FrameRow, parse_frame_row
from kiln.pipelines.delta.duckdb_tables import build_columns_query, create_newest_views, register_store, require_columns
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.kafka.frames import BEP50, ORIGINS, list_messages
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.identity import peer_text

By = Literal["reason", "hour", "author"]
GROUPS: Final[Mapping[By, tuple[str, ...]]] = {
    "reason": ("stage", "reason"),
    "hour": ("hour", "stage", "reason"),
    "author": ("author", "remote_peer", "stage", "reason"),
}
"""Columns by which rows are grouped and counted."""

_AT_ONCE: Final = 100
"""rows in memory, each of up to 5 MiB"""


class QuarantineError(KilnError):
    """The rows cannot be found, shown or dropped; the message has the reason."""


@dataclass(frozen=True)
class QuarantineFilter:
    """Selection of rows; a field that is None accepts any value. `since` is inclusive, `until` exclusive; `author` as
    in `QuarantineRow.author`."""

    stage: str | None = None
    reason: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    author: str | None = None

    @property
    def is_all(self) -> bool:
        """True if the filter accepts every row."""
        return self == QuarantineFilter()


class QuarantineRow(NamedTuple):
    """A row of `quarantine`, with author and sending peer of its message."""

    stage: str
    reason: str
    observed_at: datetime
    kafka_partition: int | None
    kafka_offset: int | None
    message_index: int | None
    cid: str | None
    author: str | None
    """author in the message, which may be forged; `None` if it has none, or its frame is not in the table `frames`"""
    remote_peer: str | None
    """peer that sent the frame; `None` if the frame is not in the table `frames`"""
    detail: str | None
    data: bytes


class ReasonCount(NamedTuple):
    """Number of rows in a group, and the times of the first and the last row; `of` has the group's values of the
    columns in GROUPS."""

    of: tuple[object, ...]
    rows: int
    oldest: datetime
    newest: datetime


class QuarantineRows:
    """The rows of a selection at the newest version of the table. A context manager."""

    def __init__(self, lake: Lake, wanted: QuarantineFilter, *, authors: bool = False) -> None:
        """Select the rows.

        Args:
            authors: Also fill `author` and `remote_peer`, which reads frames. A selection by author always does.

        Raises:
            QuarantineError: There is no such table, stage or reason.
            LakeError: The table cannot be read.
        """
        there = lake.tables()
        if "quarantine" not in there:
            raise QuarantineError("there is no table quarantine yet")
        self.table = lake.open("quarantine")
        columns = require_columns(lake, "quarantine", self.table)
        folder = lake.table("quarantine")
        names = self.table.get_add_actions(flatten=False)["path"].to_pylist()
        self._paths = {f"{folder}/{unquote(name)}": unquote(name) for name in names}
        self._db = duckdb.connect()
        register_store(self._db, lake)
        self._db.execute("SET TimeZone = 'UTC'")
        self._db.execute(
            f"CREATE TEMP VIEW every AS {build_columns_query(columns, list(self._paths), with_positions=True)}"
        )
        self._refuse_unknown("stage", wanted.stage)
        self._refuse_unknown("reason", wanted.reason)
        self._pick(wanted)
        if (authors or wanted.author) and "frames" in there:
            create_newest_views(self._db, lake, ["frames"])
            self._find_authors()
        if wanted.author:
            self._db.execute("DELETE FROM picked WHERE author IS DISTINCT FROM ?", [wanted.author])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def _refuse_unknown(self, column: str, value: str | None) -> None:
        if value is None:
            return
        known = [row[0] for row in self._db.execute(f"SELECT DISTINCT {column} FROM every ORDER BY 1").fetchall()]
        if value not in known:
            have = f"there are: {', '.join(known)}" if known else "it is empty"
            raise QuarantineError(
                f"nothing is in quarantine with {column} {value!r}{suggest_key(value, known)}; {have}"
            )

    def _pick(self, wanted: QuarantineFilter) -> None:
        tests = {
            "stage = ?": wanted.stage,
            "reason = ?": wanted.reason,
            "observed_at >= ?": wanted.since,
            "observed_at < ?": wanted.until,
        }
        said = {test: value for test, value in tests.items() if value is not None}
        self._db.execute(
            "CREATE TEMP TABLE picked AS SELECT filename, file_row_number, kafka_partition, kafka_offset, "
            f"message_index, stage, reason, observed_at, date_trunc('hour', observed_at) AS hour, "
            f"NULL::VARCHAR AS author, NULL::VARCHAR AS remote_peer FROM every WHERE {' AND '.join(said) or 'true'}",
            list(said.values()),
        )

    def _find_authors(self) -> None:
        places: MessagePositions = {}
        for partition, offset, index in self._db.execute(
            "SELECT DISTINCT kafka_partition, kafka_offset, message_index FROM picked "
            "WHERE kafka_partition IS NOT NULL AND kafka_offset IS NOT NULL"
        ).fetchall():
            places.setdefault(FramePosition(partition, offset), set()).add(index)
        told = [
            (at.partition, at.offset, index, author, sender)
            for at, frame in read_frames(self._db, places)
            for index, author, sender in _read_senders(frame, places[at])
        ]
        if not told:
            return
        names = ("kafka_partition", "kafka_offset", "message_index", "author", "remote_peer")
        columns = [pa.array(column) for column in zip(*told, strict=True)]
        self._db.register("told", pa.table(columns, names=names))
        self._db.execute(
            "UPDATE picked SET author = told.author, remote_peer = told.remote_peer FROM told "
            "WHERE picked.kafka_partition = told.kafka_partition AND picked.kafka_offset = told.kafka_offset "
            "AND picked.message_index IS NOT DISTINCT FROM told.message_index"
        )

    def count(self) -> int:
        """Count the rows."""
        row = self._db.execute("SELECT count(*) FROM picked").fetchone()
        return row[0] if row else 0

    def counts(self, by: By = "reason") -> list[ReasonCount]:
        """Count the rows by group, the largest group first, or by hour in the order of time."""
        columns = ", ".join(GROUPS[by])
        order = columns if by == "hour" else f"rows DESC, {columns}"
        answer = self._db.execute(
            f"SELECT {columns}, count(*) AS rows, min(observed_at), max(observed_at) FROM picked GROUP BY {columns} "
            f"ORDER BY {order}"
        ).fetchall()
        return [ReasonCount(tuple(row[:-3]), *row[-3:]) for row in answer]

    def rows(self, limit: int) -> Iterator[QuarantineRow]:
        """Read at most `limit` rows, the newest first."""
        newest = "observed_at DESC, kafka_partition, kafka_offset, message_index"
        answer = self._db.execute(
            "SELECT s.stage, s.reason, s.observed_at, s.kafka_partition, s.kafka_offset, s.message_index, e.cid, "
            f"s.author, s.remote_peer, e.detail, e.data FROM (SELECT * FROM picked ORDER BY {newest} LIMIT {limit}) s "
            f"JOIN every e USING (filename, file_row_number) ORDER BY {', '.join(f's.{n}' for n in newest.split(', '))}"
        )
        while found := answer.fetchmany(_AT_ONCE):
            yield from (QuarantineRow(*row) for row in found)

    def by_file(self) -> dict[str, list[int]]:
        """Group the row numbers by the path of their file in the table's folder."""
        found: dict[str, list[int]] = {}
        for name, number in self._db.execute("SELECT filename, file_row_number FROM picked ORDER BY ALL").fetchall():
            found.setdefault(self._paths[name], []).append(number)
        return found


def _read_senders(frame: Frame, positions: Set[int | None]) -> Iterator[tuple[int | None, str | None, str]]:
    """Read the author and the sending peer of messages of a frame, with position `None` for the frame as a whole."""
    sender = frame.remote_peer.hex() if frame.protocol == BEP50 else peer_text(frame.remote_peer)
    messages = list_messages(frame)
    for position in positions:
        author = None
        if position is not None and not isinstance(messages, Rejected) and position < len(messages):
            author = peer_text(getattr(messages[position], "from")) or None
        yield position, author, sender


_COLUMNS: Final = ", ".join(
    f"epoch_us({name})" if name in ("observed_at", "kafka_timestamp") else name
    for name in FrameRow._fields
    if name not in FrameRow._field_defaults  # a frame with messages has none of these
)
_ROWS_AT_ONCE: Final = 1_000


class FramePosition(NamedTuple):
    """Partition and offset of a frame in `kiln.frames`."""

    partition: int
    offset: int


MessagePositions = dict[FramePosition, set[int | None]]
"""Positions of messages in the RPCs of frames; `None` for the frame as a whole."""


class DecodedFrame(NamedTuple):
    """Result of decoding a frame again."""

    items: dict[int, DecodedMessage | RejectedMessage]
    """messages by position in the RPC that are now valid, or rejected for another reason"""
    refused: int
    """number of messages rejected for the same reason"""


def decode_again(frame: Frame, positions: Set[int | None], reason: str, how: DecodeConfig) -> DecodedFrame:
    """Decode a frame again.

    Args:
        frame: The frame.
        positions: Positions of messages that were rejected; if it contains `None`, all messages.
        reason: Reason of the rejection.
        how: Configuration of the decoder.
    """
    items: dict[int, DecodedMessage | RejectedMessage] = {}
    same: set[int | None] = set()
    for item in decode(frame.SerializeToString(), 0, 0, 0, how):
        position = item.ref.position
        if isinstance(item, RejectedMessage) and item.reason == reason:
            same.add(position)
        elif position is not None and (position in positions or None in positions):
            items[position] = item
    if None in same:  # the frame itself is rejected again
        return DecodedFrame({}, 1)
    return DecodedFrame(items, len((same & positions) - {None}))


def select_messages(frame: Frame, positions: Set[int]) -> Frame:
    """Reduce a frame to these messages of its RPC, or return the same frame if it has no other messages."""
    messages = list_messages(frame)
    if isinstance(messages, Rejected) or len(positions) == len(messages):
        return frame
    selected = sorted(positions)
    copy = Frame()
    copy.CopyFrom(frame)
    copy.payload = RPC(publish=[messages[position] for position in selected]).SerializeToString()
    if verdicts := frame.verdicts:  # each access makes a copy
        copy.verdicts = bytes(verdicts[at] if at < len(verdicts) else 0 for at in selected)
    return copy


def read_frames(
    connection: duckdb.DuckDBPyConnection, places: Collection[FramePosition]
) -> Iterator[tuple[FramePosition, Frame]]:
    """Read frames from the view `frames` of the connection, in the order of arrival, with origin REPLAY; skip missing
    ones."""
    if not places:
        return
    wanted = pa.table(
        {
            "kafka_partition": pa.array([at.partition for at in places], pa.int32()),
            "kafka_offset": pa.array([at.offset for at in places], pa.int64()),
        }
    )
    spans: dict[int, tuple[int, int]] = {}
    for at in places:
        low, high = spans.get(at.partition, (at.offset, at.offset))
        spans[at.partition] = (min(low, at.offset), max(high, at.offset))
    # a join alone reads every file; these bounds let DuckDB skip whole files
    bounds = " OR ".join(
        f"(kafka_partition = {partition} AND kafka_offset BETWEEN {low} AND {high})"
        for partition, (low, high) in spans.items()
    )
    connection.register("wanted", wanted)
    answer = connection.execute(
        f"SELECT {_COLUMNS} FROM frames SEMI JOIN wanted USING (kafka_partition, kafka_offset) "
        f"WHERE {bounds} ORDER BY kafka_timestamp, kafka_partition, kafka_offset"
    )
    while rows := answer.fetchmany(_ROWS_AT_ONCE):
        for row in (FrameRow(*cells) for cells in rows):
            frame = parse_frame_row(row._replace(origin=ORIGINS[Frame.REPLAY]))
            yield FramePosition(row.kafka_partition, row.kafka_offset), frame
