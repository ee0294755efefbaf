"""Finds quarantined messages that Kiln accepts now, and builds frames with only these messages for `kiln.frames`.

A message may have been rejected because something was unknown, such as a topic bundle. Its frame is in the table
`frames`. This module decodes the frame again, as the queries do, and selects the messages that are no longer rejected
for the same reason. The queries decode the new frames like any others. Their origin is REPLAY, so batches of these
messages are not published.

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
"""Stages whose records cannot be replayed, although they have an offset: a malformed frame is not in the table
`frames`, and messages on which the query `updates` failed are already in the table `messages`."""


@dataclass
class ReplayCandidates:
    """Numbers of quarantined messages that a replay sends or skips, and of frames that it cannot find."""

    back: int = 0
    """messages that are sent to Kafka"""
    present: int = 0
    """messages that are skipped: in the table `messages`, or copies of a message that is sent"""
    refused: int = 0
    """messages that are rejected for the same reason again"""
    missing: int = 0
    """frames that the table `frames` lacks"""


def describe_candidates(found: ReplayCandidates) -> str:
    """Describe how many quarantined messages a replay has sent, and how many it has skipped and why."""
    parts = [f"{found.back:,} messages sent to Kafka again" if found.back else "nothing to replay"]
    if found.present:
        parts.append(f"{found.present:,} messages skipped, because the tables have them or they are copies")
    if found.refused:
        parts.append(f"{found.refused:,} messages skipped, because Kiln would reject them again")
    if found.missing:
        parts.append(f"{found.missing:,} frames skipped, because the table frames lacks them")
    return "; ".join(parts)


_Digest = tuple[int, bytes]
"""One of the two digests by which copies of a message are recognised: its number, 0 or 1, and its value."""


class QuarantineReplay:
    """Replay of the messages that were rejected for one reason. Call `find`, then `frames`."""

    def __init__(self, lake: Lake, reason: str, how: DecodeConfig) -> None:
        """Read the positions of the rejected messages.

        Raises:
            KilnError: No record in quarantine has this reason, or no such record can be replayed.
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
        """stages whose records have this reason, but cannot be replayed"""
        self._positions = self._read_positions(tables)
        self._chosen: dict[FramePosition, set[int]] = {}

    def _read_positions(self, tables: tuple[str, ...]) -> MessagePositions:
        missing = [name for name in ("quarantine", "frames") if name not in tables]
        if missing:
            raise KilnError(
                f"nothing to replay: there is no table {' and no table '.join(missing)} yet. kiln run creates them"
            )
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
            hint = suggest_key(self._reason, known) or f". Quarantine has: {', '.join(known) or 'no record'}"
            raise KilnError(f"no record in quarantine has the reason {self._reason!r}{hint}")
        if not positions:
            raise KilnError(
                f"records with the reason {self._reason} (stage {', '.join(sorted(refused))}) cannot be replayed. "
                f"To see remedies: kiln quarantine show --reason {self._reason}"
            )
        self.other_stages = tuple(sorted(refused))
        return positions

    def find(self) -> ReplayCandidates:
        """Decode the frames of the rejected messages again, and choose the messages to replay."""
        candidates: list[tuple[FramePosition, int, str, tuple[_Digest, ...]]] = []
        total = ReplayCandidates(missing=len(self._positions))
        for at, frame in read_frames(self._connection, self._positions):
            read = decode_again(frame, self._positions[at], self._reason, self._how)
            total.refused += read.refused
            total.missing -= 1
            for position, item in read.items.items():
                # a message that is rejected for another reason has no digests, and so is no copy of another
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
        """Build frames with only the messages that `find` chose, in the order of arrival."""
        for at, frame in read_frames(self._connection, self._chosen):
            yield select_messages(frame, self._chosen[at])

    def _find_present(self, messages: set[str]) -> set[_Digest]:
        """Return the digests of the messages with these ids that the table `messages` already has."""
        if not self._messages or not messages:
            return set()
        self._connection.register("wanted_ids", pa.table({"message_id": pa.array(sorted(messages), pa.string())}))
        answer = self._connection.execute(
            "SELECT network, message_id, verdict, epoch_us(observed_at) "
            "FROM messages SEMI JOIN wanted_ids USING (message_id)"
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
"""Value of `Epoch.query` in the updates of a repeated request."""


class UnfetchedBlocks(NamedTuple):
    """Blocks that the fetcher has given up for a reason."""

    missing: list[WantedRecord]
    """requests for the blocks that are still missing, the oldest first"""
    unreadable: int
    """number of quarantined requests that this version of Kiln cannot decode"""


def find_unfetched_blocks(lake: Lake, reason: str) -> UnfetchedBlocks | None:
    """Find the blocks that the fetcher has given up for a reason.

    An update that waits for a block keeps its origin, LIVE or REPLAY, because it has not been in `kiln.updates` yet.

    Returns:
        The blocks, or `None` if no quarantined record of stage `fetch` has this reason.

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
    """Build another request for a block. An update in it gets the new epoch `number`, because the fetcher would ignore
    an epoch that it has seen (docs/design/07-exactly-once.md)."""
    if record.update is None:
        return record
    return structs.replace(record, update=structs.replace(record.update, epoch=Epoch(RETRY, number)))


def _query_rows(
    connection: duckdb.DuckDBPyConnection, there: tuple[str, ...], table: str, query: str
) -> set[tuple[object, ...]]:
    return {tuple(row) for row in connection.execute(query).fetchall()} if table in there else set()
