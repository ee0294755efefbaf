"""Write quarantined messages that Kiln can decode now to the topic `kiln.frames`, as frames with the origin REPLAY.

A message can be rejected because something was unknown, such as a topic bundle. Its frame is in the table `frames`, so
this module decodes the frame again, as the queries do, and selects the messages that are no longer rejected for the
same reason. The queries then decode those messages themselves. The other messages of a frame are not sent again, so
valid ones get no second row. Batches made from replayed messages are not published, because their origin is REPLAY.

Blocks that could not be fetched (stage `fetch`) are requested again in `kiln.wanted`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import duckdb
import pyarrow as pa
from msgspec import structs

from kiln.conf.process.errors import KilnError
from kiln.conf.settings.keys import suggest_key
from kiln.deploy.ops.quarantine import (
    FramePosition,
    MessagePositions,
    decode_again,
    read_frames,
    select_messages,
)
from kiln.pipelines.decode.decoder import DecodeConfig, DecodedMessage
from kiln.pipelines.decode.identities import compute_column_identities, compute_identities
from kiln.pipelines.delta.duckdb_tables import create_newest_views
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.kafka.records import UNREADABLE, Epoch, WantedRecord, decode_wanted
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import VERDICT_NAMES, Verdict

_ROWS_AT_ONCE = 1_000
_NOT_REPLAYED = ("frame", "updates")
"""Stages that cannot be replayed although their rows have an offset: a malformed frame has no row in `frames`, and the
messages that failed in the query `updates` are already in `messages`."""


@dataclass
class ReplayCandidates:
    """Number of messages by result of the search."""

    back: int = 0
    """messages to replay"""
    present: int = 0
    """messages in the table `messages`, and copies of messages to replay"""
    refused: int = 0
    """messages rejected again for the same reason"""
    missing: int = 0
    """frames that are not in the table `frames`"""


def describe_candidates(found: ReplayCandidates) -> str:
    """Describe the result of a replay."""
    parts = [f"{found.back:,} messages sent to Kafka again" if found.back else "nothing to replay"]
    if found.present:
        parts.append(f"{found.present:,} are already in the tables, or are copies")
    if found.refused:
        parts.append(f"{found.refused:,} would be rejected for the same reason")
    if found.missing:
        parts.append(f"{found.missing:,} frames are not in the table frames: duplicates, or not archived")
    return "; ".join(parts)


_Digest = tuple[int, bytes]
"""Number (0 or 1) and value of one of the two digests that identify copies."""


class QuarantineReplay:
    """Replay of a lake's messages that were rejected for a reason. Call `find`, then `frames`."""

    def __init__(self, lake: Lake, reason: str, how: DecodeConfig) -> None:
        """Select the rows.

        Raises:
            KilnError: No row is in quarantine for that reason, or no such row came from a frame.
            LakeError: A table cannot be opened.
        """
        self._reason = reason
        self._how = how
        self._connection = duckdb.connect()
        self._connection.execute("SET TimeZone = 'UTC'")
        tables = lake.tables()
        create_newest_views(
            self._connection, lake, [name for name in ("quarantine", "frames", "messages") if name in tables]
        )
        self._messages = "messages" in tables
        self.other_stages: tuple[str, ...] = ()
        """stages whose records a replay does not bring back"""
        self._positions = self._read_positions(tables)
        self._chosen: dict[FramePosition, set[int]] = {}

    def _read_positions(self, tables: tuple[str, ...]) -> MessagePositions:
        missing = [name for name in ("quarantine", "frames") if name not in tables]
        if missing:
            raise KilnError(f"nothing to replay: there is no table {' and no table '.join(missing)} yet")
        positions: MessagePositions = {}
        refused: set[str] = set()
        rows = self._connection.execute(
            "SELECT DISTINCT stage, kafka_partition, kafka_offset, message_index FROM quarantine WHERE reason = ?",
            [self._reason],
        ).fetchall()
        for stage, partition, offset, position in rows:
            if partition is None or offset is None or stage in _NOT_REPLAYED:
                refused.add(stage)
            else:
                positions.setdefault(FramePosition(partition, offset), set()).add(position)
        if not rows:
            known = [
                row[0]
                for row in self._connection.execute("SELECT DISTINCT reason FROM quarantine ORDER BY 1").fetchall()
            ]
            hint = f"there are: {', '.join(known)}" if known else "it is empty"
            raise KilnError(f"nothing is in quarantine for {self._reason!r}{suggest_key(self._reason, known)}; {hint}")
        if not positions:
            raise KilnError(
                f"cannot replay {self._reason} (stage {', '.join(sorted(refused))}): these records are not messages "
                f"that the tables lack. kiln quarantine show --reason {self._reason} shows what to do"
            )
        self.other_stages = tuple(sorted(refused))
        return positions

    def find(self) -> ReplayCandidates:
        """Decode all frames again, and count the messages by result."""
        candidates: list[tuple[FramePosition, int, str, tuple[_Digest, ...]]] = []
        total = ReplayCandidates(missing=len(self._positions))
        for at, frame in read_frames(self._connection, self._positions):
            read = decode_again(frame, self._positions[at], self._reason, self._how)
            total.refused += read.refused
            total.missing -= 1
            for position, item in read.items.items():
                # a rejected message has no digests, and so counts as a copy of no other message
                message_id = item.message_id if isinstance(item, DecodedMessage) else ""
                digests = (
                    tuple(enumerate(compute_identities(item, "", self._how.unsigned_horizon)))
                    if isinstance(item, DecodedMessage)
                    else ()
                )
                candidates.append((at, position, message_id, digests))
        seen = self._find_present({message_id for _, _, message_id, _ in candidates if message_id})
        self._chosen = {}
        for at, position, _, digests in candidates:
            if not seen.isdisjoint(digests):
                total.present += 1
                continue
            seen.update(digests)
            total.back += 1
            self._chosen.setdefault(at, set()).add(position)
        return total

    def frames(self) -> Iterator[Frame]:
        """Build the frames with the messages that `find` selected, in the order of arrival."""
        for at, frame in read_frames(self._connection, self._chosen):
            yield select_messages(frame, self._chosen[at])

    def _find_present(self, messages: set[str]) -> set[_Digest]:
        """Find the digests of the messages that are already in the table `messages`."""
        if not self._messages or not messages:
            return set()
        self._connection.register("asked", pa.table({"message_id": pa.array(sorted(messages), pa.string())}))
        answer = self._connection.execute(
            "SELECT network, message_id, verdict, epoch_us(observed_at) "
            "FROM messages SEMI JOIN asked USING (message_id)"
        )
        present: set[_Digest] = set()
        while rows := answer.fetchmany(_ROWS_AT_ONCE):
            for network, message_id, verdict, observed_at in rows:
                signed = verdict == VERDICT_NAMES[Verdict.VALID]
                digests = compute_column_identities(
                    network, message_id, signed, observed_at, "", self._how.unsigned_horizon
                )
                present.update(enumerate(digests))
        return present


RETRY: Final = "retry"
"""writer in the epochs of repeated requests"""


class UnfetchedBlocks(NamedTuple):
    """Requests for blocks that the fetcher gave up for a reason."""

    missing: list[WantedRecord]
    """requests for blocks that have not arrived since, in the order of the first request"""
    unreadable: int
    """number of rows of `quarantine` whose data is not a WantedRecord of this version"""


def find_unfetched_blocks(lake: Lake, reason: str) -> UnfetchedBlocks | None:
    """Find the blocks that the fetcher gave up for a reason.

    A waiting update keeps its origin, LIVE or REPLAY, because no topic has had the update yet.

    Returns:
        The blocks, or `None` if the stage `fetch` has no row with this reason.

    Raises:
        LakeError: A table cannot be read.
    """
    there = lake.tables()
    if "quarantine" not in there:
        return None
    with duckdb.connect() as connection:
        create_newest_views(connection, lake, [name for name in ("quarantine", "updates", "tips") if name in there])
        rows = connection.execute(
            "SELECT DISTINCT data FROM quarantine WHERE stage = 'fetch' AND reason = ?", [reason]
        ).fetchall()
        if not rows:
            return None
        records: list[WantedRecord] = []
        unreadable = 0
        for (data,) in rows:
            try:
                records.append(decode_wanted(data))
            except UNREADABLE:
                unreadable += 1
        updates = _query_rows(connection, there, "updates", "SELECT network, message_id FROM updates")
        batches = _query_rows(
            connection, there, "tips", "SELECT DISTINCT network, batch_cid FROM tips WHERE source = 'batch'"
        )
    missing = [
        record
        for record in sorted(records, key=lambda record: record.observed_at)
        if (record.network, record.cid) not in batches
        and (record.update is None or (record.network, record.update.message_id) not in updates)
    ]
    return UnfetchedBlocks(missing, unreadable)


def build_retry(record: WantedRecord, number: int) -> WantedRecord:
    """Build another request for a block. The update in it gets the epoch `number` of the writer `RETRY`, so that the
    fetcher does not take the request for a repeat of the first (decision 7)."""
    if record.update is None:
        return record
    return structs.replace(record, update=structs.replace(record.update, epoch=Epoch(RETRY, number)))


def _query_rows(
    connection: duckdb.DuckDBPyConnection, there: tuple[str, ...], table: str, query: str
) -> set[tuple[object, ...]]:
    return {tuple(row) for row in connection.execute(query).fetchall()} if table in there else set()
