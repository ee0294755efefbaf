"""Messages back out of quarantine, by a lake that delta-rs wrote."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from deltalake import write_deltalake

from conftest import VECTORS
from kiln.conf.process.errors import KilnError
from kiln.conf.process.state_folder import claim_state_folder
from kiln.deploy.cli.app import run_command
from kiln.deploy.demo.traffic.capture_files import replay
from kiln.deploy.ops.quarantine import FramePosition, decode_again, read_frames, select_messages
from kiln.deploy.ops.quarantine_replay import (
    QuarantineReplay,
    ReplayCandidates,
    describe_candidates,
    find_unfetched_blocks,
)
from kiln.deploy.query.ask import query_lake
from kiln.pipelines.archive.rows import build_message_row
from kiln.pipelines.decode import decoder
from kiln.pipelines.decode.decoder import DecodeConfig, RejectedMessage, decode
from kiln.pipelines.decode.frame_row import build_frame_row
from kiln.pipelines.decode.identities import compute_identities
from kiln.pipelines.delta.arrow_rows import RowBuffer, build_arrow_schema, select_columns
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.faults import FAULTS, Fault
from kiln.schemas.kafka.frames import read_rpc
from kiln.schemas.kafka.records import Coordinates, Epoch, SeparatorRecord, UpdateRecord, WantedRecord, encode
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.identity import Verdict, compute_peer_id, sign
from kiln.schemas.wire.pubsub import write_keepalive
from kiln.schemas.wire.topic_table import UNKNOWN_BUNDLE, BundleSet, write_hello

CAPTURE = VECTORS / "captures" / "go4tt.rpc.gz"
CLAY = "/ceramic/testnet-clay"
BUNDLES = BundleSet({"clay": [CLAY, "/ceramic/zzz"]})  # clay is 1
HELLO = write_hello(BUNDLES)
ANNA = Ed25519PrivateKey.from_private_bytes(b"a" * 32)
BEFORE, AFTER = DecodeConfig(), DecodeConfig(bundles=BUNDLES)
QUARANTINE = tuple(TABLES["quarantine"].columns)


def message(number: int, *, index: int | None = 1, data: bytes | None = None) -> Message:
    made = Message(data=data or write_keepalive(1_700_000_000_000 + number, "1", "2"), topic=CLAY)
    made.seqno = number.to_bytes(8)
    sign(made, ANNA)
    if index is not None:
        made.ClearField("topic")
        made.topicIndex = index
    return made


def frame(sequence: int, *messages: Message, verdicts: bytes = b"", connection: int = 1) -> Frame:
    return Frame(
        network="testnet-clay",
        connection=connection.to_bytes(16),
        direction=Frame.IN,
        local_peer=compute_peer_id(ANNA),
        remote_peer=compute_peer_id(ANNA),
        protocol="/meshsub/1.3.0",
        observed_at=1_700_000_000_000_000_000 + sequence * 1_000_000,
        payload=RPC(publish=messages).SerializeToString(),
        hello_in=HELLO,
        hello_out=HELLO,
        sequence=sequence,
        verdicts=verdicts,
        origin=Frame.LIVE,
    )


class World:
    """What the queries make of `kiln.frames`, without Spark: rows of `frames`, `messages` and `quarantine`."""

    def __init__(self, folder: Path) -> None:
        self.lake = folder / "lake"
        Lake(str(self.lake)).create(("frames", "messages", "quarantine"))
        self._offset = 0
        self._held: set[tuple[bytes, int, int]] = set()
        self._known: set[bytes] = set()

    def take(self, frames: Iterable[Frame], how: DecodeConfig) -> None:
        stored, good, bad = (
            RowBuffer(build_arrow_schema(columns))
            for columns in (TABLES["frames"].columns, TABLES["messages"].columns, QUARANTINE)
        )
        for each in frames:
            self._offset += 1
            key = (each.connection, int(each.direction), each.sequence)
            if key not in self._held:
                self._held.add(key)
                stored.add(build_frame_row(0, self._offset, self._offset, each))
            for item in decode(each.SerializeToString(), 0, self._offset, 0, how):
                if isinstance(item, RejectedMessage):
                    where = (*item.ref, None)
                    bad.add((*where, item.stage, item.reason, item.detail, item.data, item.observed_at))
                    continue
                digests = compute_identities(item, "", how.unsigned_horizon)
                if self._known.isdisjoint(digests):
                    good.add(build_message_row(item))
                self._known.update(digests)
        for name, rows in (("frames", stored), ("messages", good), ("quarantine", bad)):
            for batch in rows.drain():
                write_deltalake(str(self.lake / name), pa.Table.from_batches([batch]), mode="append")

    def forget(self) -> None:
        """As when the queries have forgotten the copies of long ago."""
        self._known.clear()

    def rows(self, sql: str) -> list[tuple[object, ...]]:
        return list(query_lake(Lake(str(self.lake)), sql).rows())

    def messages(self) -> list[tuple[object, ...]]:
        """All but stamps and coordinates."""
        names = [
            column.name
            for column in TABLES["messages"].columns
            if column.name not in ("kafka_partition", "kafka_offset", "message_index", "origin", "remote_peer")
            and column.name != "observed_at"
        ]
        return sorted(self.rows(f"SELECT {', '.join(names)} FROM messages"), key=repr)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def requeue(
    world: World, how: DecodeConfig = AFTER, reason: str = UNKNOWN_BUNDLE
) -> tuple[ReplayCandidates, list[Frame]]:
    queue = QuarantineReplay(Lake(str(world.lake)), reason, how)
    found = queue.find()
    return found, list(queue.frames())


def test_messages_come_back_as_if_the_bundle_had_been_there_from_the_start(world: World, tmp_path: Path) -> None:
    frames = [frame(number, message(number)) for number in range(1, 6)]
    frames += [frame(number, message(number), connection=2) for number in range(1, 6)]  # copies
    frames.append(frame(6, message(6, data=b"not JSON")))
    world.take(frames, BEFORE)
    assert world.messages() == []
    found, again = requeue(world)
    assert found == ReplayCandidates(back=6, present=5)
    assert {each.origin for each in again} == {Frame.REPLAY}
    for each, original in zip(again, [*frames[:5], frames[-1]], strict=True):
        each.origin = Frame.LIVE
        assert each == original
    world.take(again, AFTER)
    (tmp_path / "always").mkdir()
    always = World(tmp_path / "always")
    always.take(frames, AFTER)
    assert world.messages() == always.messages()
    assert len(world.messages()) == 5
    assert ("message", "invalid_json", 1) in world.rows(
        "SELECT stage, reason, count(*) FROM quarantine GROUP BY ALL ORDER BY ALL"
    )


def test_a_second_time_nothing_is_left_to_bring_back(world: World) -> None:
    world.take([frame(number, message(number)) for number in range(1, 4)], BEFORE)
    world.take(requeue(world)[1], AFTER)
    before = world.messages()
    world.forget()
    found, again = requeue(world)
    assert (found, again) == (ReplayCandidates(present=3), [])
    assert world.messages() == before


def test_what_was_good_in_the_same_frame_is_not_sent_again(world: World) -> None:
    mixed = frame(1, message(1, index=None), message(2), message(3, index=None), message(4, index=9))
    world.take([mixed], BEFORE)
    assert len(world.messages()) == 2
    found, (again,) = requeue(world)
    # an index out of range had the same reason while nobody knew how long the table is: now it gets another one
    assert found == ReplayCandidates(back=2)
    rpc = read_rpc(again.payload)
    assert not isinstance(rpc, Rejected)
    assert list(rpc.publish) == [message(2), message(4, index=9)]
    world.forget()
    world.take([again], AFTER)
    assert len(world.messages()) == 3


def test_what_still_cannot_be_read_stays(world: World) -> None:
    world.take([frame(1, message(1))], BEFORE)
    found, again = requeue(world, BEFORE)
    assert (found, again) == (ReplayCandidates(refused=1), [])


def test_a_forged_message_does_not_come_back(world: World) -> None:
    forged = message(1)
    forged.data = write_keepalive(1, "forged", "2")
    world.take([frame(1, forged)], BEFORE)
    found, again = requeue(world)
    assert found == ReplayCandidates(back=1)  # to where it belongs
    world.take(again, AFTER)
    assert world.messages() == []
    assert ("bad_signature",) in world.rows("SELECT reason FROM quarantine")


def test_verdicts_stay_with_their_messages() -> None:
    whole = frame(1, *map(message, range(3)), verdicts=bytes([Verdict.VALID, Verdict.NOT_CHECKED, Verdict.INVALID]))
    part = select_messages(whole, {0, 2})
    assert part.verdicts == bytes([Verdict.VALID, Verdict.INVALID])
    assert select_messages(whole, {0, 1, 2}) == whole


def test_an_unsigned_message_that_was_said_twice_comes_back_twice(world: World) -> None:
    unsigned = Message(data=write_keepalive(1, "1", "2"), topicIndex=1)
    frames = [frame(1, unsigned), frame(2, unsigned), frame(1_000_000, unsigned)]
    for each in frames:
        each.origin = Frame.REPLAY
    world.take(frames, BEFORE)
    found, again = requeue(world)
    assert found == ReplayCandidates(back=2, present=1)
    world.take(again, AFTER)
    assert len(world.messages()) == 2


def test_a_frame_that_is_not_held_is_counted(world: World) -> None:
    world.take([frame(1, message(1))], BEFORE)
    world.take([frame(1, message(1))], BEFORE)  # written twice, held once
    found, again = requeue(world)
    assert (found, len(again)) == (ReplayCandidates(back=1, missing=1), 1)


def quarantine(world: World, *rows: tuple[object, ...]) -> None:
    buffer = RowBuffer(build_arrow_schema(QUARANTINE))
    for row in rows:
        buffer.add(row)
    for batch in buffer.drain():
        write_deltalake(str(world.lake / "quarantine"), pa.Table.from_batches([batch]), mode="append")


NO_MESSAGE = (None, None, None, None)


def test_what_is_no_message_that_the_tables_lack_is_refused_in_words(world: World) -> None:
    """A replay does not bring back an update that failed in the query `updates`: its message is in the tables."""
    world.take([frame(1, message(1))], AFTER)
    quarantine(
        world,
        (*NO_MESSAGE, "batch", "update_malformed", "no", b"x", 1),
        (0, 7, None, None, "frame", "frame_malformed", "no", b"x", 1),
        (0, 1, 0, None, "updates", "processing_failed", "no", b"x", 1),
        (*NO_MESSAGE, "sink", "processing_failed", "no", b"x", 1),
    )
    for reason, stages in (
        ("update_malformed", "batch"),
        ("frame_malformed", "frame"),
        ("processing_failed", "sink, updates"),
    ):
        words = rf"{reason} \(stage {stages}\) cannot be replayed.* kiln quarantine show --reason {reason}$"
        with pytest.raises(KilnError, match=words):
            QuarantineReplay(Lake(str(world.lake)), reason, AFTER)
    with pytest.raises(KilnError, match="did you mean update_malformed"):
        QuarantineReplay(Lake(str(world.lake)), "update_malforme", AFTER)


def test_without_tables_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(KilnError, match="no table quarantine"):
        QuarantineReplay(Lake(str(tmp_path)), UNKNOWN_BUNDLE, AFTER)


def test_a_frame_comes_out_of_its_row_as_it_went_in() -> None:
    original = frame(7, message(1), verdicts=b"\1")
    original.remote_address, original.declared_length = b"\x04\x7f\0\0\1", 5
    stored = RowBuffer(build_arrow_schema(TABLES["frames"].columns))
    stored.add(build_frame_row(3, 4, 5, original))
    with duckdb.connect() as connection:
        connection.register("frames", pa.Table.from_batches(stored.drain()))
        read = list(read_frames(connection, [FramePosition(3, 4), FramePosition(3, 5)]))
    original.origin = Frame.REPLAY
    assert read == [(FramePosition(3, 4), original)]


def test_a_whole_frame_that_can_be_read_now_brings_all_its_messages() -> None:
    assert set(decode_again(frame(1, message(1), message(2)), {None}, "rpc_malformed", AFTER).items) == {0, 1}
    broken = frame(1, message(1))
    broken.payload = b"\xff\xff"
    assert decode_again(broken, {None}, "rpc_malformed", AFTER) == ({}, 1)


def test_a_capture_by_index(world: World, tmp_path: Path) -> None:
    def frames(source: Path) -> list[Frame]:
        out: list[Frame] = []

        def sleep(_: float) -> None:
            raise AssertionError

        replay(source, out.append, now=lambda: 0.0, sleep=sleep)
        return out

    captured = frames(CAPTURE)
    topics = sorted(
        {
            option.topicid
            for each in captured
            if not isinstance(rpc := read_rpc(each.payload), Rejected)
            for option in rpc.subscriptions
        }
    )
    how = DecodeConfig(bundles=BundleSet({"all": topics}))
    world.take(captured, BEFORE)
    assert world.messages() == []
    assert world.rows("SELECT reason, count(*) FROM quarantine GROUP BY ALL") == [(UNKNOWN_BUNDLE, 853)]
    found, again = requeue(world, how)
    assert (found.back + found.present, found.refused, found.missing) == (853, 0, 0)
    world.take(again, how)
    (tmp_path / "always").mkdir()
    always = World(tmp_path / "always")
    always.take(captured, how)
    assert world.messages() == always.messages()
    assert len(world.messages()) == 153
    assert Counter(row[0] for row in world.rows("SELECT topic_source FROM messages")) == {"index": 153}


def test_what_was_found_is_said() -> None:
    assert describe_candidates(ReplayCandidates()) == "nothing to replay"
    assert "1,000 messages" in describe_candidates(ReplayCandidates(back=1000))
    assert "3 messages skipped, because Kiln would reject" in describe_candidates(ReplayCandidates(refused=3))


# ---------------------------------------------------------------- the command


class Taken:
    """A producer of `kiln.frames` that has it all at once."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def __enter__(self) -> Taken:
        return self

    def __exit__(self, *_: object) -> None: ...
    def send(self, frame: Frame) -> None:
        self.frames.append(frame)

    def flush(self) -> None: ...


def test_the_command(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def broker(settings: object, say: object) -> Iterator[str]:
        yield "127.0.0.1:1"

    taken = Taken()
    monkeypatch.setattr("kiln.deploy.stack.kafka_broker.start_broker", broker)
    monkeypatch.setattr("kiln.bridge.kafka.producers.connect", lambda *_: taken)
    monkeypatch.setenv("KILN_STATE", str(tmp_path))
    claim_state_folder(tmp_path)
    (tmp_path / "broker").mkdir()
    (tmp_path / "broker" / "password").write_text("of the broker", encoding="utf-8")
    config = tmp_path / "kiln.toml"
    config.write_text("", encoding="utf-8")
    monkeypatch.setenv("KILN_CONFIG", str(config))
    world.take([frame(1, message(1), message(2))], BEFORE)

    assert run_command(["quarantine", "list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["stage"], row["reason"], row["rows"]) == ("topic", UNKNOWN_BUNDLE, 2)
    assert run_command(["quarantine", "list"]) == 0
    assert UNKNOWN_BUNDLE in capsys.readouterr().out
    assert run_command(["quarantine", "list", "--json"]) == 0
    assert [row["reason"] for row in json.loads(capsys.readouterr().out)] == [UNKNOWN_BUNDLE]

    assert run_command(["quarantine", "replay", "--reason", UNKNOWN_BUNDLE]) == 0
    assert "nothing to replay; 2 messages skipped, because Kiln would reject them again" in capsys.readouterr().err
    config.write_text(f'topic_table.bundles = {{ clay = ["{CLAY}", "/ceramic/zzz"] }}', encoding="utf-8")
    assert run_command(["quarantine", "replay", "--reason", UNKNOWN_BUNDLE]) == 0
    assert "2 messages sent to Kafka again" in capsys.readouterr().err
    assert [each.origin for each in taken.frames] == [Frame.REPLAY]
    world.take(taken.frames, AFTER)
    assert run_command(["quarantine", "replay", "--reason", UNKNOWN_BUNDLE]) == 0
    assert len(taken.frames) == 1
    assert run_command(["quarantine", "replay", "--reason", "unknown bundle"]) == 1
    assert "did you mean unknown_bundle_hash?" in capsys.readouterr().err


# ---------------------------------------------------------------- what was not to be had


AT = 1_700_000_000_000_000


def waiting(message: str, cid: str = "bafygenesis") -> WantedRecord:
    update = UpdateRecord(
        network="mainnet",
        origin="LIVE",
        separator=None,
        separator_source=None,
        stream="kstream",
        tip="bafytip",
        from_=None,
        message_id=message,
        epoch=Epoch("q", 1),
        frame=Coordinates(0, 1, 0),
        observed_at=AT + len(message),
    )
    return WantedRecord("mainnet", cid, "genesis", AT + len(message), message_id=message, update=update)


def give_up(world: World, *records: WantedRecord | bytes, reason: str = "genesis_unavailable") -> None:
    data = [each if isinstance(each, bytes) else encode(each) for each in records]
    quarantine(world, *((0, 1, 0, None, "fetch", reason, "", each, 1) for each in data))


def test_what_could_not_be_fetched_is_asked_for_again_in_its_order(world: World) -> None:
    give_up(world, waiting("second"), waiting("1st"), waiting("1st"))
    assert find_unfetched_blocks(Lake(str(world.lake)), "genesis_unavailable") == (
        [waiting("1st"), waiting("second")],
        0,
    )


def test_what_has_come_since_is_not_asked_for(world: World) -> None:
    batch = WantedRecord("mainnet", "bafybatch", "batch", AT + 5, SeparatorRecord("model", "ka"))
    give_up(world, waiting("1st"), waiting("second"), batch)
    Lake(str(world.lake)).create(("updates", "tips"))
    update = ("mainnet", "LIVE", "1st", None, None, None, None, "kstream", "bafytip", 1, 1, 0, 0)
    tip = ("mainnet", "kstream", "bafytip", "batch", "bafybatch", 1)
    for table, row in (("updates", update), ("tips", tip)):
        buffer = RowBuffer(build_arrow_schema(select_columns(TABLES[table])))
        buffer.add(row)
        write_deltalake(str(world.lake / table), pa.Table.from_batches(list(buffer.drain())), mode="append")
    assert find_unfetched_blocks(Lake(str(world.lake)), "genesis_unavailable") == ([waiting("second")], 0)


def test_what_another_version_gave_up_is_counted_and_stops_nothing(world: World) -> None:
    other = encode(waiting("2nd")).replace(b'"update":', b'"waits":')
    give_up(world, waiting("1st"), other)
    assert find_unfetched_blocks(Lake(str(world.lake)), "genesis_unavailable") == ([waiting("1st")], 1)


def test_another_reason_is_none_of_fetching(world: World) -> None:
    assert find_unfetched_blocks(Lake(str(world.lake)), UNKNOWN_BUNDLE) is None


# ---------------------------------------------------------------- the remedies of the catalogue

REMEDIES = [
    (fault, reason)
    for fault in FAULTS
    for reason in re.findall(r"run `kiln quarantine replay --reason (\w+)`", fault.what_to_do)
]


@pytest.mark.parametrize(("fault", "reason"), REMEDIES, ids=lambda value: getattr(value, "stage", value))
def test_the_replay_that_the_catalogue_suggests_brings_the_record_back(
    fault: Fault, reason: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reason == fault.reason
    match fault.stage:
        case "fetch":
            give_up(world, waiting("1st"), reason=reason)
            assert find_unfetched_blocks(Lake(str(world.lake)), reason) == ([waiting("1st")], 0)
            return
        case "topic":
            world.take([frame(1, message(1))], BEFORE)
        case "decode":
            with monkeypatch.context() as faulty:
                faulty.setattr(decoder, "read_message", lambda *_: 1 // 0)
                world.take([frame(1, message(1))], AFTER)
        case stage:
            pytest.fail(f"a replay does not bring back records of stage {stage}")
    assert world.rows("SELECT stage, reason FROM quarantine") == [(fault.stage, reason)]
    # the row of another stage for the same reason is no obstacle, and is named
    quarantine(world, (*NO_MESSAGE, "batch", reason, "no", b"x", 1))
    replay = QuarantineReplay(Lake(str(world.lake)), reason, AFTER)
    assert replay.find() == ReplayCandidates(back=1)
    assert replay.other_stages == ("batch",)
    world.take(replay.frames(), AFTER)
    assert len(world.messages()) == 1
