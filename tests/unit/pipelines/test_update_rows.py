"""kiln.pipelines.updates.transform: good copies of UPDATEs to records of `kiln.updates` (decision 4)."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from nacl.signing import SigningKey

from kiln.pipelines.batch.windows import PartitionWindows
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.runtime.dedup_store import StoredDigest
from kiln.pipelines.updates import transform as module
from kiln.pipelines.updates.repeats import select_updates
from kiln.pipelines.updates.row_builder import COPY_COLUMNS, UpdateRow, read_copies, write_copies
from kiln.pipelines.updates.separators import (
    KnownSeparators,
    SeparatedUpdate,
    SeparatorConfig,
    StreamsTopic,
    resolve_separator,
)
from kiln.pipelines.updates.transform import build_copies
from kiln.schemas.dht.announcement import Announcement, compute_salt, write_announcement
from kiln.schemas.dht.items import build_put_fields
from kiln.schemas.dht.items import sign as sign_item
from kiln.schemas.dht.krpc import KrpcQuery, write_message
from kiln.schemas.kafka.frames import MAX_RPC
from kiln.schemas.kafka.records import (
    Epoch,
    SeparatorRecord,
    SeparatorSource,
    UpdateRecord,
    WaitedTip,
    decode_batch,
    decode_quarantine,
    decode_update,
    decode_wanted,
)
from kiln.schemas.kafka.topics import MAX_RECORD
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.times import MAX_MICROS, MIN_MICROS
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.genesis import Claims
from kiln.schemas.wire.identity import compute_peer_id, peer_text, sign
from kiln.schemas.wire.pubsub import write_batch_update, write_keepalive, write_query, write_response, write_update
from kiln.schemas.wire.streamid import StreamID
from kiln.schemas.wire.topics import Separator, encode_separator_value, format_separator, format_topic
from kit import engines
from kit.plain_batcher import LogRecord, batch_partition

SCHEMA = Path(__file__).resolve().parents[3] / "schemas" / "kafka" / "updates.schema.json"
VALID = Draft202012Validator(json.loads(SCHEMA.read_text()))

ANNA = Ed25519PrivateKey.from_private_bytes(b"a" * 32)
STREAM = "kjzl6cwe1jw145as2el62s5k2n5xwij7snqu1mngluhpr05xy5wylfswe1zvq39"
MODEL = StreamID(2, compute_cid(b"model"))
OTHER = StreamID(2, compute_cid(b"another model"))
WAITED = cid_text(compute_cid(b"a tip that waited"))
TIP = "bafyreigtsyqmmvgtal3y2ahcs277xjk5prvb673lb3li2i2egz2nhp6u4y"
CLAY = "/ceramic/testnet-clay"
CONTROLLER = Separator("controller", encode_separator_value(b"did:key:z6Mk"))
EPOCH = Epoch("7d8e", 12)
SEEN_AT = 1_800_000_000_000_001


def frame(*messages: Message, network: str = "mainnet", origin: str = "LIVE", at: int = 1_700_000_000_123_456) -> bytes:
    return Frame(
        network=network,
        connection=bytes(16),
        observed_at=at * 1000,
        sequence=1,
        origin=Frame.Origin.Value(origin),
        payload=RPC(publish=messages).SerializeToString(),
    ).SerializeToString()


def unsigned(data: bytes, topic: str = CLAY) -> Message:
    return Message(data=data, topic=topic)


def signed(data: bytes, topic: str = CLAY, seqno: bytes = b"\0\1") -> Message:
    message = Message(data=data, topic=topic, seqno=seqno)
    sign(message, ANNA)
    return message


def columns(*values: bytes | None) -> dict[str, pa.Array]:
    return {
        "partition": pa.array([3] * len(values), type=pa.int32()),
        "offset": pa.array(range(77, 77 + len(values)), type=pa.int64()),
        "stamp": pa.array([0] * len(values), type=pa.int64()),
        "value": pa.array(values, type=pa.binary()),
    }


def rows(*values: bytes | None, how: DecodeConfig | None = None, fetch: bool = False) -> list[UpdateRow]:
    """Of the copies in records 77, 78 … of partition 3."""
    return rows_with(SeparatorConfig(fetch=fetch), *values, how=how)


def select(copies: list[UpdateRow], state: dict[bytes, StoredDigest] | None = None) -> list[UpdateRow]:
    """The copies that pass, in their order. `state` is changed."""
    state = {} if state is None else state
    passed, changed = select_updates(copies, state)
    state.update(changed)
    return passed


def rows_with(separating: SeparatorConfig, *values: bytes | None, how: DecodeConfig | None = None) -> list[UpdateRow]:
    batches = [pa.RecordBatch.from_pydict(columns(*values))]
    engines.check_records(batches, how or DecodeConfig(default_policy="either"))
    return list(build_copies(iter(batches), how or DecodeConfig(default_policy="either"), separating, EPOCH))


def records(*values: bytes | None) -> list[UpdateRecord]:
    found = rows(*values)
    for row in found:
        VALID.validate(json.loads(row.value))
    return [decode_update(row.value) for row in found]


# ---------------------------------------------------------------- separators


@pytest.mark.parametrize(
    ("topic", "model", "expected"),
    [
        (CONTROLLER, MODEL.text, (CONTROLLER, "topic")),
        (CONTROLLER, None, (CONTROLLER, "topic")),
        (None, MODEL.text, (Separator("model", MODEL.text), "model")),
        (None, None, (None, None)),
    ],
)
def test_the_topic_comes_before_the_model(
    topic: Separator | None, model: str | None, expected: tuple[Separator | None, SeparatorSource | None]
) -> None:
    known: KnownSeparators = {("testnet-clay", STREAM): None}
    assert resolve_separator(claims(topic, model), ("mainnet", STREAM), known, SeparatorConfig()) == SeparatedUpdate(
        *expected
    )


def claims(topic: Separator | None, model: str | None) -> Claims:
    return Claims(topic, None if model is None else Separator("model", model))


BY_MODEL, BY_OTHER = Separator("model", MODEL.text), Separator("model", OTHER.text)


@pytest.mark.parametrize(
    ("verified", "topic", "model", "expected"),
    [
        pytest.param(BY_MODEL, None, None, SeparatedUpdate(BY_MODEL, "genesis"), id="no claim"),
        pytest.param(BY_MODEL, BY_MODEL, MODEL.text, SeparatedUpdate(BY_MODEL, "genesis"), id="true claims"),
        pytest.param(
            BY_MODEL,
            None,
            OTHER.text,
            SeparatedUpdate(BY_MODEL, "genesis", Separator("model", OTHER.text)),
            id="a false model",
        ),
        pytest.param(BY_MODEL, CONTROLLER, None, SeparatedUpdate(BY_MODEL, "genesis", CONTROLLER), id="a false topic"),
        pytest.param(CONTROLLER, CONTROLLER, MODEL.text, SeparatedUpdate(CONTROLLER, "genesis"), id="another key"),
        pytest.param(None, CONTROLLER, MODEL.text, SeparatedUpdate(None, "genesis"), id="a genesis that names none"),
    ],
)
def test_a_verified_genesis_comes_before_all(
    verified: Separator | None, topic: Separator | None, model: str | None, expected: SeparatedUpdate
) -> None:
    known: KnownSeparators = {("mainnet", STREAM): SeparatorRecord(*verified) if verified else None}
    for fetch in (False, True):
        assert (
            resolve_separator(claims(topic, model), ("mainnet", STREAM), known, SeparatorConfig(fetch=fetch))
            == expected
        )


@pytest.mark.parametrize(
    ("topic", "model", "expected"),
    [
        pytest.param(BY_OTHER, MODEL.text, (None, None), id="of one key, they cannot both be true"),
        pytest.param(BY_MODEL, MODEL.text, (BY_MODEL, "topic"), id="they agree"),
        pytest.param(CONTROLLER, MODEL.text, (CONTROLLER, "topic"), id="of another key, model says nothing"),
        pytest.param(None, MODEL.text, (BY_MODEL, "model"), id="model alone"),
    ],
)
def test_claims_that_disagree_count_for_nothing_where_the_genesis_can_be_asked_for(
    topic: Separator | None, model: str, expected: tuple[Separator | None, SeparatorSource | None]
) -> None:
    assert resolve_separator(
        claims(topic, model), ("mainnet", STREAM), {}, SeparatorConfig(fetch=True)
    ) == SeparatedUpdate(*expected)
    found = resolve_separator(claims(topic, model), ("mainnet", STREAM), {}, SeparatorConfig())
    assert found.separator == (topic or Separator("model", model)), "without an IPFS node the topic comes first"
    doubting = SeparatorConfig(fetch=True, believe=False)
    assert resolve_separator(claims(topic, model), ("mainnet", STREAM), {}, doubting) == SeparatedUpdate(None, None), (
        "it waits"
    )
    alone = SeparatorConfig(believe=False)
    assert resolve_separator(claims(topic, model), ("mainnet", STREAM), {}, alone) == found, "nobody can be asked"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """kiln.streams says of STREAM, on testnet-clay, that its separator is BY_MODEL."""

    class Streams(dict[tuple[str, str], SeparatorRecord | None]):
        def refresh(self) -> None:
            self["testnet-clay", STREAM] = SeparatorRecord(*BY_MODEL)

        def has_waited(self, stream: tuple[str, str], tip: WaitedTip) -> bool:
            return (stream, tip) == (("testnet-clay", STREAM), WaitedTip("LIVE", WAITED))

    monkeypatch.setattr(module, "open_known_streams", lambda where: Streams())


@pytest.mark.usefixtures("known")
def test_a_claim_that_the_genesis_contradicts_is_put_into_quarantine_and_the_genesis_wins() -> None:
    data = write_update(STREAM, TIP, OTHER.text)
    update, fault = rows_with(SeparatorConfig(StreamsTopic("kiln.streams", ("nowhere:1",))), frame(unsigned(data)))
    assert [update.topic, fault.topic] == ["updates", "quarantine"]
    record = decode_update(update.value)
    assert (record.separator, record.separator_source) == (SeparatorRecord(*BY_MODEL), "genesis")
    assert update.identity != fault.identity
    said = decode_quarantine(fault.value)
    assert (said.stage, said.reason, said.data) == ("separator", "contradicts_genesis", data)
    assert fault.key == b"3/77/0"
    assert OTHER.text in said.detail
    assert MODEL.text in said.detail


@pytest.mark.usefixtures("known")
def test_an_update_that_waited_is_no_new_update_when_it_is_announced_again() -> None:
    values = [
        frame(unsigned(write_update(STREAM, WAITED))),
        frame(unsigned(write_update(STREAM, TIP))),
        frame(unsigned(write_update(STREAM, WAITED)), origin="REPLAY"),
    ]
    separating = SeparatorConfig(StreamsTopic("kiln.streams", ("nowhere:1",)), fetch=True)
    found = [decode_update(row.value) for row in select(rows_with(separating, *values))]
    assert [(update.origin, update.tip) for update in found] == [("LIVE", TIP), ("REPLAY", WAITED)]


@pytest.mark.usefixtures("known")
def test_a_tip_that_waited_is_an_update_when_its_author_returns_to_it() -> None:
    """The fetcher has released both tips before. A late copy of the first message is no return."""
    waiting = frame(signed(write_update(STREAM, WAITED)), at=SEEN_AT)
    values = [
        waiting,  # again, as in a repeated micro-batch
        frame(signed(write_update(STREAM, TIP), seqno=b"\0\2"), at=SEEN_AT + 1),
        frame(signed(write_update(STREAM, WAITED)), at=SEEN_AT + 2),
        frame(signed(write_update(STREAM, WAITED), seqno=b"\0\3"), at=SEEN_AT + 3),
    ]
    known = SeparatorConfig(StreamsTopic("kiln.streams", ("nowhere:1",)), fetch=True)
    state: dict[bytes, StoredDigest] = {}
    assert [row.topic for row in select(rows_with(SeparatorConfig(fetch=True), waiting), state)] == ["wanted"]
    found = [decode_update(row.value) for row in select(rows_with(known, *values), state)]
    assert [(update.tip, update.observed_at) for update in found] == [(TIP, SEEN_AT + 1), (WAITED, SEEN_AT + 3)]


# ---------------------------------------------------------------- an update is new once


def identities_of(*values: bytes, fetch: bool = False) -> list[bytes]:
    return [row.identity for row in rows(*values, fetch=fetch)]


def test_an_update_announced_again_is_no_new_update() -> None:
    """Neither by its author, nor by another, nor by nobody, nor on another topic, nor later."""
    data, topic = write_update(STREAM, TIP, MODEL.text), format_topic("testnet-clay", BY_MODEL)
    other = Message(data=data, topic=CLAY, seqno=b"\0\3")
    sign(other, Ed25519PrivateKey.from_private_bytes(b"another author's key, 32 bytes.."))
    announced = (
        frame(signed(data)),
        frame(signed(data, seqno=b"\0\2")),
        frame(signed(data, topic, b"\0\2")),
        frame(other),
        frame(unsigned(data), at=1_700_050_000_000_000),
    )
    found = [identity for each in announced for identity in identities_of(each)]
    assert len(found) == 5
    assert len(set(found)) == 1
    (first,) = select(rows(*announced))
    assert first == rows(announced[0])[0]


def test_rows_bear_the_time_of_the_micro_batch_and_are_read_as_they_were() -> None:
    """And not a time of the frame: with that, copies heard late would be dropped."""
    written = rows(frame(signed(write_update(STREAM, TIP, MODEL.text)), unsigned(batch_update())), None, fetch=True)
    (batch,) = write_copies(written, SEEN_AT)
    assert set(batch.column("batch_time").to_pylist()) == {SEEN_AT}
    assert list(read_copies(zip(*(batch.column(name).to_pylist() for name in COPY_COLUMNS), strict=True))) == written
    assert {row.announcement is None for row in written} == {True, False}


def test_another_tip_another_origin_and_another_separator_are_another_update() -> None:
    """A false claim must not mask the true separator."""
    data = write_update(STREAM, TIP, MODEL.text)
    found = identities_of(
        frame(signed(data)),
        frame(signed(write_update(STREAM, cid_text(compute_cid(b"another tip")), MODEL.text), seqno=b"\0\2")),
        frame(signed(data), origin="REPLAY"),
        frame(signed(data, format_topic("testnet-clay", CONTROLLER), b"\0\3")),
        frame(signed(write_update(STREAM, TIP), seqno=b"\0\4")),
    )
    assert len(set(found)) == 5


def test_rows_say_when_they_were_heard() -> None:
    assert [row.observed_at for row in rows(frame(signed(write_update(STREAM, TIP)), at=SEEN_AT))] == [SEEN_AT]


# ---------------------------------------------------------------- what must be fetched


def test_an_update_whose_separator_nobody_names_waits_for_its_genesis() -> None:
    (row,) = rows(frame(unsigned(write_update(STREAM, TIP))), fetch=True)
    wanted = decode_wanted(row.value)
    assert row.topic == "wanted"
    assert wanted.reason == "genesis"
    assert [wanted.cid, row.key.decode()] == 2 * [cid_text(StreamID.parse(STREAM).genesis)]
    assert wanted.update == decode_update(rows(frame(unsigned(write_update(STREAM, TIP))))[0].value)


def test_an_update_that_claims_its_separator_goes_on_and_its_genesis_is_wanted_beside_it() -> None:
    data = write_update(STREAM, TIP, MODEL.text)
    update, claim = rows(frame(unsigned(data)), fetch=True)
    assert [update.topic, claim.topic] == ["updates", "wanted"]
    assert update.identity != claim.identity
    wanted = decode_wanted(claim.value)
    assert (wanted.reason, wanted.topic, wanted.model) == ("claim", None, SeparatorRecord(*BY_MODEL))
    assert [wanted.cid, claim.key.decode()] == 2 * [cid_text(StreamID.parse(STREAM).genesis)]
    assert wanted.update == decode_update(update.value)
    (alone,) = rows(frame(unsigned(data)))
    assert alone.value == update.value


def test_an_update_whose_claims_disagree_waits_with_both() -> None:
    data = write_update(STREAM, TIP, MODEL.text)
    (row,) = rows(frame(unsigned(data, format_topic("testnet-clay", BY_OTHER))), fetch=True)
    wanted = decode_wanted(row.value)
    assert (row.topic, wanted.reason) == ("wanted", "genesis")
    assert (wanted.topic, wanted.model) == (SeparatorRecord(*BY_OTHER), SeparatorRecord(*BY_MODEL))
    assert wanted.update is not None
    assert (wanted.update.separator, wanted.update.separator_source) == (None, None)


def batch_update(separator: Separator = CONTROLLER, cid: str = TIP) -> bytes:
    return write_batch_update(separator, cid)


def test_a_batch_is_wanted_at_each_announcement() -> None:
    announced = (frame(signed(batch_update())), frame(signed(batch_update(), seqno=b"\0\2")))
    (first,), (again,) = (rows(each, fetch=True) for each in announced)
    found = rows(*announced, *announced, fetch=True)
    assert [(row.identity, row.value) for row in found] == [(row.identity, row.value) for row in (first, again)]
    wanted = decode_wanted(first.value)
    assert first.topic == "wanted"
    assert first.key == TIP.encode()
    assert (wanted.reason, wanted.cid, wanted.separator) == ("batch", TIP, SeparatorRecord(*CONTROLLER))
    assert wanted.network == "testnet-clay"
    (other,) = rows(frame(signed(batch_update(BY_MODEL))), fetch=True)
    assert other.identity != first.identity


def test_what_is_wanted_names_the_author_and_the_peer_that_sent_it() -> None:
    for data in (batch_update(), write_update(STREAM, TIP)):
        relayed = Frame.FromString(frame(signed(data)))
        relayed.remote_peer = compute_peer_id(ANNA)
        (row,) = (row for row in rows(relayed.SerializeToString(), fetch=True) if row.topic == "wanted")
        wanted = decode_wanted(row.value)
        assert wanted.peer == peer_text(relayed.remote_peer)
        assert wanted.message_id is not None


@pytest.mark.parametrize("fetch", [True, False])
def test_a_batch_on_the_topic_of_another_separator_is_in_quarantine_once_and_its_block_is_fetched(fetch: bool) -> None:
    data = batch_update(CONTROLLER)
    on_other = signed(data, format_topic("testnet-clay", BY_OTHER))
    on_its_own = signed(data, format_topic("testnet-clay", CONTROLLER), seqno=b"\0\2")
    on_the_network = signed(data, seqno=b"\0\3")
    found = rows(*map(frame, (on_other, on_other, on_its_own, on_the_network)), fetch=fetch)
    (row,) = (row for row in found if row.topic == "quarantine")
    fault = decode_quarantine(row.value)
    assert (fault.stage, fault.reason, fault.data) == ("separator", "contradicts_topic", data)
    assert fault.detail == (
        f"the batch is for {format_separator(CONTROLLER)}, "
        f"but was received on the topic of {format_separator(BY_OTHER)}"
    )
    assert sum(row.topic == "wanted" for row in found) == 3 * fetch


def test_where_nothing_can_be_fetched_nothing_is_wanted() -> None:
    assert rows(frame(signed(batch_update()))) == []


def test_our_own_batch_coming_back_is_left_alone() -> None:
    mine = Frame.FromString(frame(signed(batch_update())))
    mine.local_peer = compute_peer_id(ANNA)
    assert rows(mine.SerializeToString(), fetch=True) == []


def test_an_announcement_in_the_dht_wants_all_it_names() -> None:
    key, separator = SigningKey(b"k" * 32), BY_MODEL
    newest, before = compute_cid(b"newest"), compute_cid(b"before")
    salt = compute_salt("testnet-clay", separator)
    value = write_announcement(Announcement(separator, newest, 1_700_000_000_000, (before,)))
    item = sign_item(key, salt, 7, value)
    datagram = Frame.FromString(frame(network="testnet-clay"))
    datagram.protocol = "bep50"
    query = KrpcQuery(b"aa", b"put", bytes(20), {**build_put_fields(item), b"token": b"t"}, item.target)
    datagram.payload = write_message(query)
    found = rows(datagram.SerializeToString(), fetch=True)
    assert [row.key.decode() for row in found] == [cid_text(newest), cid_text(before)]
    assert (decode_wanted(found[0].value).message_id or "").startswith("bep50/")


def test_a_model_in_the_message_and_in_the_topic_is_one_separator() -> None:
    """The value in a topic name is that of the header, a StreamID's bytes."""
    topic = format_topic("testnet-clay", Separator("model", encode_separator_value(MODEL.bytes)))
    (by_topic,) = records(frame(unsigned(write_update(STREAM, TIP), topic)))
    (by_model,) = records(frame(unsigned(write_update(STREAM, TIP, MODEL.text))))
    assert by_topic.separator == by_model.separator
    assert (by_topic.separator_source, by_model.separator_source) == ("topic", "model")


def test_a_claim_does_not_override_the_topic() -> None:
    topic = format_topic("testnet-clay", Separator("model", MODEL.text))
    (record,) = records(frame(unsigned(write_update(STREAM, TIP, OTHER.text), topic)))
    assert record.separator is not None
    assert record.separator.value == MODEL.text


# ---------------------------------------------------------------- records


def test_an_update() -> None:
    (row,) = rows(frame(signed(write_update(STREAM, TIP, MODEL.text))))
    assert row.key == f"testnet-clay/model/{MODEL.text}".encode()
    assert json.loads(row.value) == {
        "network": "testnet-clay",
        "origin": "LIVE",
        "separator": {"key": "model", "value": MODEL.text},
        "separator_source": "model",
        "stream": STREAM,
        "tip": TIP,
        "from": peer_text(compute_peer_id(ANNA)),
        "message_id": f"{peer_text(compute_peer_id(ANNA))}/0001",
        "epoch": {"query": "7d8e", "batch": 12},
        "frame": {"partition": 3, "offset": 77, "index": 0},
        "observed_at": 1_700_000_000_123_456,
    }


def test_an_update_without_separator_is_keyed_by_its_stream() -> None:
    (row,) = rows(frame(unsigned(write_update(STREAM, TIP))))
    record = decode_update(row.value)
    assert (record.separator, record.separator_source, record.from_) == (None, None, None)
    assert row.key == STREAM.encode()


def test_only_good_updates_have_rows() -> None:
    forged = signed(write_update(STREAM, TIP))
    forged.signature = bytes(64)
    values = [
        frame(
            unsigned(write_query(STREAM)),
            unsigned(write_response("id", {STREAM: TIP})),
            unsigned(write_keepalive(1)),
            unsigned(b"garbage"),
            forged,
            unsigned(write_update(STREAM, TIP)),
        ),
        b"no frame",
        None,
        frame(Message(data=write_update(STREAM, TIP), topicIndex=1)),
        frame(unsigned(write_update(STREAM, TIP, MODEL.text)), origin="REPLAY"),
    ]
    found = records(*values)
    assert [(record.frame.offset, record.frame.index, record.origin) for record in found] == [
        (77, 5, "LIVE"),
        (81, 0, "REPLAY"),
    ]


def test_a_message_is_announced_by_each_of_its_networks() -> None:
    data = write_update(STREAM, TIP)
    first, other = rows(frame(unsigned(data)), frame(unsigned(data, "/ceramic/mainnet")))
    assert first.identity != other.identity


def test_the_batch_query_reads_what_is_written() -> None:
    topic = format_topic("testnet-clay", CONTROLLER)
    values = [row.value for row in rows(frame(unsigned(write_update(STREAM, TIP), topic)))]
    log = [LogRecord(0, n, SEEN_AT + n * 1_000_000, value) for n, value in enumerate((*values, b""))]
    (batch,) = batch_partition(PartitionWindows(1_000_000), iter(log), 256_000)
    assert decode_batch(batch.value).separator.key == "controller"
    assert batch.key == f"testnet-clay/{CONTROLLER.key}/{CONTROLLER.value}".encode()


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@given(
    st.sampled_from((CLAY, "/ceramic", "elsewhere", ""))
    | names.map(lambda name: f"/ceramic/{name}")
    | names.map(lambda key: f"{CLAY}/sep/{key}/{MODEL.text}"),
    st.sampled_from((None, MODEL.text)),
    st.sampled_from(("mainnet", "local-1")),
    st.sampled_from(("LIVE", "REPLAY")),
    st.integers(MIN_MICROS, MAX_MICROS),
)
def test_every_row_is_as_the_schema_says(topic: str, model: str | None, network: str, origin: str, at: int) -> None:
    message = unsigned(write_update(STREAM, TIP, model), topic)
    (record,) = records(frame(message, network=network, origin=origin, at=at))
    assert (record.origin, record.observed_at) == (origin, at)


def test_a_frame_without_a_network_gives_no_record_that_nobody_can_read() -> None:
    assert not records(frame(unsigned(write_update(STREAM, TIP), "elsewhere"), network=""))


@pytest.mark.parametrize("letter", ['"', "\x01"], ids=["twice as long in JSON", "six times as long"])
@pytest.mark.parametrize("length", [4_000, MAX_RPC - 1_000])
def test_what_one_rpc_holds_makes_no_record_that_kafka_refuses(letter: str, length: int) -> None:
    data = write_update(STREAM, TIP, MODEL.text)
    value = frame(unsigned(data, "/ceramic/" + letter * length))
    assert all(len(row.key) + len(row.value) < MAX_RECORD for row in rows(value))


def test_a_task_gives_the_first_copy_of_a_message_in_each_partition() -> None:
    """The one that passed before is among them, however the records are divided into tasks (decision 10)."""
    sent = frame(signed(write_update(STREAM, TIP, MODEL.text)))
    again = frame(signed(write_update(STREAM, TIP, MODEL.text), seqno=b"\0\2"))
    batch = columns(sent, again, sent, sent)
    batch["partition"] = pa.array([3, 3, 3, 4], type=pa.int32())
    batches = iter([pa.RecordBatch.from_pydict(batch)])
    found = list(build_copies(batches, DecodeConfig(default_policy="either"), SeparatorConfig(), EPOCH))
    assert [row.position for row in found] == ["3/77/0", "3/78/0", "4/80/0"]
    assert len({row.identity for row in found}) == 1
