"""Messages back out of quarantine: frames that can be read now, once more into `kiln.frames` as origin REPLAY.

What could not be fetched is asked for once more, in `kiln.wanted`: see `wanted_again`.

What stopped a message may have been on our side, such as a topic bundle nobody had told us. Its frame is in the table
`frames` to the byte, so it can be read again: by the same decoding as the queries', here, to see which messages get
further than they did, and then by the queries themselves. Nothing else of a frame is sent again, so that what was good
at once has no second row, however long ago that was. Nothing is published: the origin is REPLAY.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

import duckdb
import pyarrow as pa

from conf.errors import KilnError
from conf.settings.keys import nearest
from pipelines.lake.lake import Lake
from pipelines.logic.decode import Decoded, Decoding, Faulty, decode, identities, identities_of
from schemas.faults import CODE_IN_SQL, code_of
from schemas.frames import BEP50, DIRECTIONS, gossip_messages
from schemas.identity import Verdict, peer_bytes
from schemas.proto.gossipsub.rpc_pb2 import RPC
from schemas.proto.kiln.frame_pb2 import Frame
from schemas.records import UNREADABLE, WantedRecord, decode_wanted
from schemas.reject import Rejected

_ROWS_AT_ONCE = 1_000
_COLUMNS = (
    "network, connection, direction, local_peer, remote_peer, protocol, epoch_us(observed_at), sequence, payload, "
    "hello_in, hello_out, verdicts, remote_address, declared_length, kafka_partition, kafka_offset"
)


class RequeueError(KilnError):
    """These cannot be brought back; the text says why."""


class At(NamedTuple):
    """Where a frame was in `kiln.frames`."""

    partition: int
    offset: int


Places = dict[At, set[int | None]]
"""Which messages of which frames, by position in the RPC; None: the frame as a whole."""


@dataclass(frozen=True)
class Found:
    """What came of looking: messages, but for `lost`, which counts frames."""

    back: int = 0  # brought back
    held: int = 0  # in the table `messages` already, or a copy of one that is brought back
    same: int = 0  # still refused for the same reason
    lost: int = 0  # the frame is not in the table `frames`

    def __add__(self, other: Found) -> Found:
        return Found(self.back + other.back, self.held + other.held, self.same + other.same, self.lost + other.lost)


def in_words(found: Found) -> str:
    """What was found, for people."""
    said = [f"{found.back:,} messages put into Kafka again" if found.back else "nothing to bring back"]
    if found.held:
        said.append(f"{found.held:,} are in the tables already, or copies")
    if found.same:
        said.append(f"{found.same:,} would be refused for the same reason")
    if found.lost:
        said.append(f"{found.lost:,} frames are not in the table frames: written twice, or not archived")
    return "; ".join(said)


# ---------------------------------------------------------------- one frame


class Again(NamedTuple):
    """A frame read again: the messages that get further now, by position, good or refused for another reason."""

    items: dict[int, Decoded | Faulty]
    same: int


def read_again(frame: Frame, positions: Set[int | None], reason: str, how: Decoding) -> Again:
    """What of the messages at `positions` (None: all of them), refused for `reason` then, gets further now."""
    items: dict[int, Decoded | Faulty] = {}
    same: set[int | None] = set()
    for item in decode(frame.SerializeToString(), 0, 0, 0, how):
        position = item.place.position
        if isinstance(item, Faulty) and item.reason == reason:
            same.add(position)
        elif position is not None and (position in positions or None in positions):
            items[position] = item
    if None in same:  # the frame itself is what was refused, and is
        return Again({}, 1)
    return Again(items, len((same & positions) - {None}))


def with_messages(frame: Frame, positions: Set[int]) -> Frame:
    """The frame with these messages of its RPC and nothing else; as it is, if these are all."""
    messages = gossip_messages(frame)
    if isinstance(messages, Rejected) or len(positions) == len(messages):
        return frame
    kept = sorted(positions)
    copy = Frame()
    copy.CopyFrom(frame)
    copy.payload = RPC(publish=[messages[position] for position in kept]).SerializeToString()
    if frame.verdicts:
        copy.verdicts = bytes(frame.verdicts[at] if at < len(frame.verdicts) else 0 for at in kept)
    return copy


def frame_of(row: tuple[object, ...]) -> tuple[At, Frame]:
    """A row of the table `frames`, in the order of _COLUMNS, as the Frame it was, but of origin REPLAY."""
    (network, connection, direction, local, remote, protocol, observed_at, sequence, payload) = row[:9]
    (hello_in, hello_out, verdicts, address, declared_length, partition, offset) = row[9:]
    frame = Frame(
        network=str(network),
        connection=_bytes(connection),
        direction=Frame.IN if direction == DIRECTIONS[Frame.IN] else Frame.OUT,
        local_peer=_peer(str(local), str(protocol)),
        remote_peer=_peer(str(remote), str(protocol)),
        protocol=str(protocol),
        observed_at=_int(observed_at) * 1000,
        payload=_bytes(payload),
        hello_in=_bytes(hello_in),
        hello_out=_bytes(hello_out),
        sequence=_int(sequence),
        verdicts=_bytes(verdicts),
        origin=Frame.REPLAY,
        remote_address=_bytes(address),
        declared_length=_int(declared_length),
    )
    return At(_int(partition), _int(offset)), frame


def _peer(text: str, protocol: str) -> bytes:
    return bytes.fromhex(text) if protocol == BEP50 else peer_bytes(text)


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value


def _bytes(value: object) -> bytes:
    assert isinstance(value, bytes)
    return value


# ---------------------------------------------------------------- what was not to be had


class Unfetched(NamedTuple):
    """What was given up in fetching, for one reason."""

    missing: list[WantedRecord]
    """what has not come since, in the order in which it was first wanted"""
    unreadable: int
    """rows of the table `quarantine` whose data is no WantedRecord of this version; they stay there"""


def wanted_again(lake: Lake, reason: str) -> Unfetched | None:
    """What was given up for a reason (stage `fetch`); None if that is no reason of this stage.

    `reason`: in either spelling (`schemas.faults.code_of`).

    A waiting update goes on as what it was, LIVE or not: nobody has heard of it yet. LakeError.
    """
    there = lake.tables()
    if "quarantine" not in there:
        return None
    with duckdb.connect() as connection:
        for name in ("quarantine", "updates", "tips"):
            if name in there:
                connection.register(name, lake.open(name).to_pyarrow_dataset())
        rows = connection.execute(
            f"SELECT DISTINCT data FROM quarantine WHERE stage = 'fetch' AND {CODE_IN_SQL} = ?", [code_of(reason)]
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
        updates = _of(connection, there, "updates", "SELECT network, message FROM updates")
        batches = _of(connection, there, "tips", "SELECT DISTINCT network, cid FROM tips WHERE source = 'batch'")
    asked = sorted(records, key=lambda each: each.observed_at)
    missing = [
        each
        for each in asked
        if (each.network, each.cid) not in batches
        and (each.update is None or (each.network, each.update.message) not in updates)
    ]
    return Unfetched(missing, unreadable)


def _of(
    connection: duckdb.DuckDBPyConnection, there: tuple[str, ...], table: str, query: str
) -> set[tuple[object, ...]]:
    return {tuple(row) for row in connection.execute(query).fetchall()} if table in there else set()


# ---------------------------------------------------------------- the lake


class _Candidate(NamedTuple):
    """A message that gets further now, and the digests by which its copies are known."""

    at: At
    position: int
    message: str
    digests: tuple[bytes, ...]


class Requeue:
    """Reads a lake; `find()`, then `frames()`."""

    def __init__(self, lake: Lake, reason: str, how: Decoding) -> None:
        """`reason`: as Kiln writes the reason now, or as earlier versions did (`schemas.faults.code_of`).

        RequeueError: nothing is in quarantine for that reason, or what is there came from no frame. LakeError.
        """
        self._reason = code_of(reason)
        self._how = how
        self._connection = duckdb.connect()
        self._connection.execute("SET TimeZone = 'UTC'")
        there = lake.tables()
        for name in ("quarantine", "frames", "messages"):
            if name in there:
                self._connection.register(name, lake.open(name).to_pyarrow_dataset())
        self._messages = "messages" in there
        self._places = self._quarantined(there)
        self._chosen: dict[At, set[int]] = {}

    def _quarantined(self, there: tuple[str, ...]) -> Places:
        missing = [name for name in ("quarantine", "frames") if name not in there]
        if missing:
            raise RequeueError(f"nothing can be brought back: there is no table {' and no table '.join(missing)} yet")
        places: Places = {}
        stages: set[str] = set()
        refused: set[str] = set()
        rows = self._connection.execute(
            "SELECT DISTINCT stage, kafka_partition, kafka_offset, message_index FROM quarantine "
            f"WHERE {CODE_IN_SQL} = ?",
            [self._reason],
        ).fetchall()
        for stage, partition, offset, position in rows:
            stages.add(stage)
            # what is no Frame has no row in `frames`, though it has a place in Kafka
            if partition is None or offset is None or stage == "frame":
                refused.add(stage)
            else:
                places.setdefault(At(partition, offset), set()).add(position)
        if not rows:
            known = [
                row[0]
                for row in self._connection.execute(
                    f"SELECT DISTINCT {CODE_IN_SQL} FROM quarantine ORDER BY 1"
                ).fetchall()
            ]
            have = f"there are: {', '.join(known)}" if known else "it is empty"
            raise RequeueError(f"nothing is in quarantine for {self._reason!r}{nearest(self._reason, known)}; {have}")
        if not places:
            raise RequeueError(
                f"{self._reason} (stage {', '.join(sorted(refused))}) is about records that came from no frame: there "
                "is nothing to put into kiln.frames again"
            )
        return places

    def find(self) -> Found:
        """Reads all the frames again, and says what `frames` will give."""
        candidates: list[_Candidate] = []
        total = Found(lost=len(self._places))
        for at, frame in self._stored(self._places):
            again = read_again(frame, self._places[at], self._reason, self._how)
            total += Found(same=again.same, lost=-1)
            candidates += [self._candidate(at, position, item) for position, item in again.items.items()]
        seen = self._held({each.message for each in candidates if each.message})
        chosen: dict[At, set[int]] = {}
        for each in candidates:
            if not seen.isdisjoint(each.digests):
                total += Found(held=1)
                continue
            seen.update(each.digests)
            total += Found(back=1)
            chosen.setdefault(each.at, set()).add(each.position)
        self._chosen = chosen
        return total

    def _candidate(self, at: At, position: int, item: Decoded | Faulty) -> _Candidate:
        if isinstance(item, Faulty):
            return _Candidate(at, position, "", ())  # the copy of nothing
        return _Candidate(at, position, item.message, identities(item, "", self._how.unsigned_horizon))

    def frames(self) -> Iterator[Frame]:
        """What `find` found, as it is to be sent: in the order in which it came into Kafka."""
        for at, frame in self._stored(self._chosen):
            yield with_messages(frame, self._chosen[at])

    def _stored(self, places: Mapping[At, object]) -> Iterator[tuple[At, Frame]]:
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
        # a join alone reads every file; by these bounds whole files are passed over
        bounds = " OR ".join(
            f"(kafka_partition = {partition} AND kafka_offset BETWEEN {low} AND {high})"
            for partition, (low, high) in spans.items()
        )
        self._connection.register("wanted", wanted)
        answer = self._connection.execute(
            f"SELECT {_COLUMNS} FROM frames SEMI JOIN wanted USING (kafka_partition, kafka_offset) "
            f"WHERE {bounds} ORDER BY kafka_timestamp, kafka_partition, kafka_offset"
        )
        while rows := answer.fetchmany(_ROWS_AT_ONCE):
            for row in rows:
                yield frame_of(row)

    def _held(self, messages: set[str]) -> set[bytes]:
        """The digests of those of these messages that are in the table `messages`."""
        if not self._messages or not messages:
            return set()
        self._connection.register("asked", pa.table({"message": pa.array(sorted(messages), pa.string())}))
        answer = self._connection.execute(
            "SELECT network, message, verdict, epoch_us(observed_at) FROM messages SEMI JOIN asked USING (message)"
        )
        held: set[bytes] = set()
        while rows := answer.fetchmany(_ROWS_AT_ONCE):
            for network, message, verdict, observed_at in rows:
                signed = verdict == Verdict.GOOD
                held.update(identities_of(network, message, signed, observed_at, "", self._how.unsigned_horizon))
        return held
