"""Selects rows of the table `quarantine` by stage, reason, time and author, to count, read, replay or drop them.

Each dropped row is recorded in the table `quarantine_dropped` before it is removed from `quarantine`. If the command is
interrupted in between, the next drop removes the row without recording it twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Final, Literal, NamedTuple, Self
from urllib.parse import unquote

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import write_deltalake
from deltalake.exceptions import DeltaError

from kiln.conf.process.errors import KilnError
from kiln.conf.process.location import Location, find_os_error, shorten_error
from kiln.conf.settings.keys import suggest_key
from kiln.pipelines.decode.decoder import DecodeConfig, DecodedMessage, RejectedMessage, decode
from kiln.pipelines.decode.frame_row import FrameRow, parse_frame_row
from kiln.pipelines.delta.arrow_rows import build_arrow_schema
from kiln.pipelines.delta.duckdb_tables import build_columns_query, create_newest_views, register_store, require_columns
from kiln.pipelines.delta.files import DataFile, TableFiles, delete_files
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.maintenance.plan import TableFile
from kiln.pipelines.maintenance.state import describe_unsupported, list_files
from kiln.pipelines.maintenance.steps import replace_files
from kiln.schemas.delta.tables import TABLES
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
"""Columns by which rows are grouped, for each grouping of `kiln quarantine list --by`."""

_AT_ONCE: Final = 100
"""Number of rows in memory; a row has up to 5 MiB."""


@dataclass(frozen=True)
class QuarantineFilter:
    """Filter of rows. A field that is `None` accepts any value.

    Attributes:
        since: Earliest `observed_at`, inclusive.
        until: Latest `observed_at`, exclusive.
        author: As `QuarantineRow.author`.
    """

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
    """A row of `quarantine`, with the author of its message and the peer that sent it."""

    stage: str
    reason: str
    observed_at: datetime
    kafka_partition: int | None
    kafka_offset: int | None
    message_index: int | None
    cid: str | None
    author: str | None
    """author that the message names, perhaps forged; `None` without one, or if the table `frames` lacks the frame"""
    remote_peer: str | None
    """peer that sent the frame; `None` if the table `frames` lacks the frame"""
    detail: str | None
    data: bytes


class ReasonCount(NamedTuple):
    """Number of rows in a group, with the capture times of the oldest and the newest row."""

    of: tuple[object, ...]
    """values of the group, for the columns in `GROUPS`"""
    rows: int
    oldest: datetime
    newest: datetime


class QuarantineRows:
    """The rows that a filter accepts, at the newest version of the table. Use it as a context manager."""

    def __init__(self, lake: Lake, wanted: QuarantineFilter, *, authors: bool = False) -> None:
        """Select the rows.

        Args:
            authors: True to read `author` and `remote_peer` from the table `frames`, which takes time. They are also
                read if the filter has an author.

        Raises:
            KilnError: The table does not exist, or has no row of this stage or reason.
            LakeError: The table cannot be read.
        """
        there = lake.tables()
        if "quarantine" not in there:
            raise KilnError(f"there is no table quarantine in {lake.path} yet: kiln run creates it")
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
            hint = suggest_key(value, known) or f". Quarantine has: {', '.join(known) or 'no record'}"
            raise KilnError(f"no record in quarantine has the {column} {value!r}{hint}")

    def _pick(self, wanted: QuarantineFilter) -> None:
        tests = {
            "stage = ?": wanted.stage,
            "reason = ?": wanted.reason,
            "observed_at >= ?": wanted.since,
            "observed_at < ?": wanted.until,
        }
        given = {test: value for test, value in tests.items() if value is not None}
        self._db.execute(
            "CREATE TEMP TABLE picked AS SELECT filename, file_row_number, kafka_partition, kafka_offset, "
            f"message_index, stage, reason, observed_at, date_trunc('hour', observed_at) AS hour, "
            f"NULL::VARCHAR AS author, NULL::VARCHAR AS remote_peer FROM every WHERE {' AND '.join(given) or 'true'}",
            list(given.values()),
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

    def counts(self, by: By = "reason") -> list[ReasonCount]:
        """Count the rows by group. The largest group comes first, but hours come in the order of time."""
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
        """Return the row numbers in each data file, by the path of the file in the folder of the table."""
        found: dict[str, list[int]] = {}
        for name, number in self._db.execute("SELECT filename, file_row_number FROM picked ORDER BY ALL").fetchall():
            found.setdefault(self._paths[name], []).append(number)
        return found


def _read_senders(frame: Frame, positions: Set[int | None]) -> Iterator[tuple[int | None, str | None, str]]:
    """Read position, author and sending peer of messages of a frame. The position `None` stands for the whole frame,
    which has no author."""
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
    if name not in FrameRow._field_defaults  # columns with defaults are null for a frame with messages
)
_ROWS_AT_ONCE: Final = 1_000


class FramePosition(NamedTuple):
    """Partition and offset of a frame in `kiln.frames`."""

    partition: int
    offset: int


MessagePositions = dict[FramePosition, set[int | None]]
"""Positions of messages in the RPC of each frame; `None` for the frame as a whole."""


class DecodedFrame(NamedTuple):
    """Result of decoding a frame again."""

    items: dict[int, DecodedMessage | RejectedMessage]
    """messages that are now valid or rejected for another reason, by position in the RPC"""
    refused: int
    """number of messages that are rejected for the same reason again"""


def decode_again(frame: Frame, positions: Set[int | None], reason: str, how: DecodeConfig) -> DecodedFrame:
    """Decode a frame again, after messages of it were rejected.

    Args:
        frame: The frame, as in the table `frames`.
        positions: Positions of the rejected messages; with `None` among them, all messages.
        reason: Reason for which they were rejected.
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
    """Return a copy of a frame whose RPC has only the messages at these positions, or the frame if it has no others."""
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
    """Read frames from the view `frames` in the order of arrival, and set their origin to REPLAY.

    Args:
        connection: Connection with the view.
        places: Positions of the frames. A frame that the view lacks is skipped.
    """
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


_TRIES: Final = 20
"""Attempts to drop rows while other processes rewrite the data files of the table."""
_RECORD: Final = "quarantine_dropped"
_KEPT: Final = ("kafka_partition", "kafka_offset", "message_index", "cid", "stage", "reason", "detail")
_SAME: Final = ("kafka_partition", "kafka_offset", "message_index", "cid", "stage", "reason", "sha256", "observed_at")
"""Columns by which a row of `quarantine` is found in `quarantine_dropped`."""


class DropResult(NamedTuple):
    """Result of a drop."""

    drop_id: str
    """id of the drop in `quarantine_dropped`"""
    rows: int
    """number of removed rows"""
    known: int = 0
    """number of removed rows that an earlier, interrupted drop had recorded"""


def drop_rows(lake: Lake, wanted: QuarantineFilter, why: str, drop_id: str, now: datetime) -> DropResult:
    """Remove the rows that a filter accepts from the table `quarantine`, and record them with `drop_id`, time and `why`
    in the table `quarantine_dropped`.

    Raises:
        KilnError: No row has the stage or reason of the filter, a table cannot be written, or other processes keep
            rewriting the table.
        LakeError: The table cannot be read.
    """
    for _ in range(_TRIES):
        with QuarantineRows(lake, wanted) as picked:
            if reason := describe_unsupported(lake, "quarantine", picked.table):
                raise KilnError(f"cannot drop rows of the table quarantine, because Kiln must not write it: {reason}")
            places, table = picked.by_file(), picked.table
        if not places:
            return DropResult(drop_id, 0)
        files = [file for file in list_files(table, "observed_at") if file.path in places]
        try:
            known = _record_rows(lake, files, places, {"drop_id": drop_id, "dropped_at": now, "why": why})
            new = _write_remaining_rows(lake, files, places)
        except FileNotFoundError:
            continue  # the files of this version are gone: read the next version
        except (DeltaError, OSError) as error:
            cause = find_os_error(error) or shorten_error(error)
            raise KilnError(
                f"cannot write to {lake.path} ({cause}), so no row was dropped. Fix this, and try again"
            ) from error
        rows = sum(map(len, places.values()))
        if replace_files(lake, "quarantine", table, files, new, f"{rows:,} rows dropped, {drop_id}", removes_rows=True):
            lake.sync_commits("quarantine", table.version(), table.version())
            return DropResult(drop_id, rows, known)
        delete_files(lake, new)
    raise KilnError(
        f"no row was dropped: other processes rewrote the table quarantine during each of {_TRIES} attempts. Try again"
    )


def _record_rows(
    lake: Lake, files: Sequence[TableFile], places: Mapping[str, Sequence[int]], drop: dict[str, object]
) -> int:
    """Append rows to `quarantine_dropped`, with the columns of `drop`. Skip rows that an interrupted drop has already
    recorded, and return the number of skipped rows."""
    lake.create([_RECORD])
    schema = build_arrow_schema(TABLES[_RECORD].columns, strict=True)
    rows = [
        {**drop, **row, "came": file.modified}
        for file in files
        for row in _read_rows(lake.folder("quarantine") / file.path, places[file.path])
    ]
    every = pa.Table.from_pylist(rows, schema=schema.append(pa.field("came", pa.int64())))
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        create_newest_views(connection, lake, [_RECORD])
        connection.register("every", every)
        same = " AND ".join(f"d.{name} IS NOT DISTINCT FROM every.{name}" for name in _SAME)
        # A row in a file that is newer than the record of an equal row is another row, for example from a backfill.
        new = connection.sql(
            f"SELECT * EXCLUDE (came) FROM every WHERE NOT EXISTS "
            f"(SELECT 1 FROM {_RECORD} d "
            f"WHERE {same} AND (d.drop_id = every.drop_id OR epoch_us(d.dropped_at) >= came))"
        ).to_arrow_table()
    if new.num_rows:
        write_deltalake(lake.table(_RECORD), new.cast(schema), mode="append", storage_options=lake.storage_options)
        version = lake.open(_RECORD).version()
        lake.sync_commits(_RECORD, version, version)
    return int(every.num_rows - new.num_rows)


def _read_rows(path: Location, numbers: Sequence[int]) -> Iterator[dict[str, object]]:
    for batch, first in _read_batches(path):
        mine = pa.array([number - first for number in numbers if first <= number < first + batch.num_rows], pa.int64())
        for row in batch.take(mine).to_pylist():
            data = row["data"]
            yield {name: row.get(name) for name in _KEPT} | {
                "reason": row["reason"],
                "bytes": len(data),
                "sha256": sha256(data).hexdigest(),
                "observed_at": row["observed_at"],
            }


def _write_remaining_rows(
    lake: Lake, files: Sequence[TableFile], places: Mapping[str, Sequence[int]]
) -> list[DataFile]:
    """Write the rows of these files, except those in `places`, to new files, and commit nothing."""
    out = TableFiles(lake, "quarantine")
    schema = build_arrow_schema(TABLES["quarantine"].columns, strict=True)
    try:
        for file in files:
            gone = set(places[file.path])
            for batch, first in _read_batches(lake.folder("quarantine") / file.path):
                stays = pa.array([number not in gone for number in range(first, first + batch.num_rows)])
                left = batch.filter(stays)
                if left.num_rows:
                    out.add_batch(
                        pa.RecordBatch.from_arrays(
                            [left.column(field.name).cast(field.type) for field in schema], schema=schema
                        )
                    )
    except BaseException:  # any exception is raised again
        with suppress(OSError):
            delete_files(lake, out.close())
        raise
    return out.close()


def _read_batches(path: Location) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Read a Parquet file as record batches, each with the number of its first row in the file."""
    first = 0
    with path.open() as opened, pq.ParquetFile(opened) as file:
        for batch in file.iter_batches(_AT_ONCE):
            yield batch, first
            first += batch.num_rows
