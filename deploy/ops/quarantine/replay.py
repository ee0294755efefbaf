"""Messages back out of quarantine: frames that Kiln can read now, into `kiln.frames` once more, as origin REPLAY.

What stopped a message may have been on Kiln's side, such as a topic bundle that nobody had told Kiln. The message's
frame is in the table `frames` to the byte. So this module decodes the frame again, as the queries do, to see which
messages get further than they did. The queries then decode those messages themselves. Nothing else of a frame is sent
again, so that a message which was good at once has no second row, however long ago that was. Nothing is published: the
origin is REPLAY.

Blocks that could not be fetched are another matter: `kiln.deploy.ops.quarantine.unfetched`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import duckdb
import pyarrow as pa

from kiln.conf.process.errors import KilnError
from kiln.conf.settings.keys import suggest_nearest
from kiln.deploy.ops.quarantine.frames import (
    FramePosition,
    MessagePositions,
    decode_again,
    read_frames,
    select_messages,
)
from kiln.pipelines.decode.decoder import (
    DecodeConfig,
    DecodedMessage,
    RejectedMessage,
    compute_column_identities,
    compute_identities,
)
from kiln.pipelines.delta.duckdb_tables import create_newest_views
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import VERDICT_NAMES, Verdict

_ROWS_AT_ONCE = 1_000


class QuarantineReplayError(KilnError):
    """These messages cannot be brought back; the text says why."""


@dataclass(frozen=True)
class ReplayCandidates:
    """What came of looking: messages, but for `missing`, which counts frames."""

    back: int = 0  # brought back
    present: int = 0  # in the table `messages` already, or a copy of one that is brought back
    refused: int = 0  # refused again, for the same reason
    missing: int = 0  # the frame is not in the table `frames`

    def __add__(self, other: ReplayCandidates) -> ReplayCandidates:
        return ReplayCandidates(
            self.back + other.back,
            self.present + other.present,
            self.refused + other.refused,
            self.missing + other.missing,
        )


def describe_candidates(found: ReplayCandidates) -> str:
    """What was found, for people."""
    said = [f"{found.back:,} messages put into Kafka again" if found.back else "nothing to bring back"]
    if found.present:
        said.append(f"{found.present:,} are in the tables already, or copies")
    if found.refused:
        said.append(f"{found.refused:,} would be refused for the same reason")
    if found.missing:
        said.append(f"{found.missing:,} frames are not in the table frames: written twice, or not archived")
    return "; ".join(said)


_Digest = tuple[int, bytes]
"""Of the first or of the second of the two by which copies are known."""


class _Candidate(NamedTuple):
    """A message that gets further now, and the digests by which its copies are known."""

    at: FramePosition
    position: int
    message_id: str
    digests: tuple[_Digest, ...]


class QuarantineReplay:
    """Reads a lake; `find()`, then `frames()`."""

    def __init__(self, lake: Lake, reason: str, how: DecodeConfig) -> None:
        """QuarantineReplayError: nothing is in quarantine for that reason, or what is there came from no frame.
        LakeError.
        """
        self._reason = reason
        self._how = how
        self._connection = duckdb.connect()
        self._connection.execute("SET TimeZone = 'UTC'")
        there = lake.tables()
        create_newest_views(
            self._connection, lake, [name for name in ("quarantine", "frames", "messages") if name in there]
        )
        self._messages = "messages" in there
        self._places = self._quarantined(there)
        self._chosen: dict[FramePosition, set[int]] = {}

    def _quarantined(self, there: tuple[str, ...]) -> MessagePositions:
        missing = [name for name in ("quarantine", "frames") if name not in there]
        if missing:
            raise QuarantineReplayError(
                f"nothing can be brought back: there is no table {' and no table '.join(missing)} yet"
            )
        places: MessagePositions = {}
        stages: set[str] = set()
        refused: set[str] = set()
        rows = self._connection.execute(
            "SELECT DISTINCT stage, kafka_partition, kafka_offset, message_index FROM quarantine WHERE reason = ?",
            [self._reason],
        ).fetchall()
        for stage, partition, offset, position in rows:
            stages.add(stage)
            # what is no Frame has no row in `frames`, though it has a place in Kafka
            if partition is None or offset is None or stage == "frame":
                refused.add(stage)
            else:
                places.setdefault(FramePosition(partition, offset), set()).add(position)
        if not rows:
            known = [
                row[0]
                for row in self._connection.execute("SELECT DISTINCT reason FROM quarantine ORDER BY 1").fetchall()
            ]
            have = f"there are: {', '.join(known)}" if known else "it is empty"
            raise QuarantineReplayError(
                f"nothing is in quarantine for {self._reason!r}{suggest_nearest(self._reason, known)}; {have}"
            )
        if not places:
            raise QuarantineReplayError(
                f"{self._reason} (stage {', '.join(sorted(refused))}) is about records that came from no frame: there "
                "is nothing to put into kiln.frames again"
            )
        return places

    def find(self) -> ReplayCandidates:
        """Reads all the frames again, and says what `frames` will give."""
        candidates: list[_Candidate] = []
        total = ReplayCandidates(missing=len(self._places))
        for at, frame in read_frames(self._connection, self._places):
            read = decode_again(frame, self._places[at], self._reason, self._how)
            total += ReplayCandidates(refused=read.refused, missing=-1)
            candidates += [self._candidate(at, position, item) for position, item in read.items.items()]
        seen = self._present({each.message_id for each in candidates if each.message_id})
        chosen: dict[FramePosition, set[int]] = {}
        for each in candidates:
            if not seen.isdisjoint(each.digests):
                total += ReplayCandidates(present=1)
                continue
            seen.update(each.digests)
            total += ReplayCandidates(back=1)
            chosen.setdefault(each.at, set()).add(each.position)
        self._chosen = chosen
        return total

    def _candidate(self, at: FramePosition, position: int, item: DecodedMessage | RejectedMessage) -> _Candidate:
        if isinstance(item, RejectedMessage):
            return _Candidate(at, position, "", ())  # the copy of nothing
        digests = enumerate(compute_identities(item, "", self._how.unsigned_horizon))
        return _Candidate(at, position, item.message_id, tuple(digests))

    def frames(self) -> Iterator[Frame]:
        """What `find` found, as it is to be sent: in the order in which it came into Kafka."""
        for at, frame in read_frames(self._connection, self._chosen):
            yield select_messages(frame, self._chosen[at])

    def _present(self, messages: set[str]) -> set[_Digest]:
        """The digests of those of these messages that are in the table `messages`."""
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
                signed = verdict == VERDICT_NAMES[Verdict.GOOD]
                digests = compute_column_identities(
                    network, message_id, signed, observed_at, "", self._how.unsigned_horizon
                )
                present.update(enumerate(digests))
        return present
