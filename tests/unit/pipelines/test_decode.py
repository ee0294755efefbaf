"""kiln.pipelines.decode.decoder: what is in a record of `kiln.frames`, and what goes to quarantine (decisions 5 and
6)."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from nacl.signing import SigningKey

from conftest import VECTORS
from kiln.deploy.demo.traffic.capture_files import replay
from kiln.pipelines.archive.rows import build_fault_rows
from kiln.pipelines.decode.decoder import DecodeConfig, DecodedMessage, MessageRef, RejectedMessage, decode, get_signer
from kiln.pipelines.decode.identities import compute_fault_identity, compute_identities
from kiln.schemas.dht.announcement import Announcement, compute_salt, write_announcement
from kiln.schemas.dht.items import build_item_fields, build_put_fields
from kiln.schemas.dht.items import sign as sign_item
from kiln.schemas.dht.krpc import KrpcQuery, KrpcResponse, write_message
from kiln.schemas.kafka.frames import MAX_RPC
from kiln.schemas.kafka.records import QuarantineRecord, decode_quarantine, encode
from kiln.schemas.kafka.topics import MAX_RECORD
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, ExtTopicTable, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.times import MIN_MICROS
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.identity import Verdict, compute_peer_id, peer_text, sign
from kiln.schemas.wire.pubsub import write_batch_update, write_keepalive, write_query, write_update
from kiln.schemas.wire.signing_policy import Policy
from kiln.schemas.wire.topic_table import (
    INDEX_OUT_OF_RANGE,
    NO_TABLE,
    TOPIC_MISSING,
    UNKNOWN_BUNDLE,
    BundleSet,
    write_hello,
)
from kiln.schemas.wire.topics import Separator, format_topic

STREAM = "kjzl6cwe1jw145as2el62s5k2n5xwij7snqu1mngluhpr05xy5wylfswe1zvq39"
MODEL = "k2t6wz4z9kggqqnbn3vqggh2z4fe9jctr9vvbc1em2yho0qnzzrtzz1n2hr4lq"
TIP = "bafyreigtsyqmmvgtal3y2ahcs277xjk5prvb673lb3li2i2egz2nhp6u4y"
CLAY = "/ceramic/testnet-clay"
UPDATE = write_update(STREAM, TIP, MODEL)

ANNA, BERT = Ed25519PrivateKey.from_private_bytes(b"a" * 32), Ed25519PrivateKey.from_private_bytes(b"b" * 32)
REMOTE = compute_peer_id(BERT)

QUARANTINE = Draft202012Validator(
    json.loads((Path(__file__).resolve().parents[3] / "schemas" / "kafka" / "quarantine.schema.json").read_text())
)


def unsigned(data: bytes = UPDATE, topic: str | None = CLAY) -> Message:
    return Message(data=data, topic=topic)


def signed(
    data: bytes = UPDATE, topic: str | None = CLAY, seqno: bytes = b"\0\1", key: Ed25519PrivateKey = ANNA
) -> Message:
    message = Message(data=data, topic=topic, seqno=seqno)
    sign(message, key)
    return message


def forged(data: bytes = UPDATE, seqno: bytes = b"\0\1") -> Message:
    """As if ANNA had written `data`."""
    message = signed(seqno=seqno)
    message.data = data
    message.signature = bytes(64)
    return message


def frame(*messages: Message, payload: bytes | None = None, origin: str = "LIVE", **fields: object) -> Frame:
    made = Frame(
        network="mainnet",
        connection=bytes(16),
        remote_peer=REMOTE,
        protocol="/meshsub/1.2.0",
        observed_at=1_700_000_000_123_456_789,
        sequence=1,
        origin=Frame.Origin.Value(origin),
        payload=RPC(publish=messages).SerializeToString() if payload is None else payload,
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def read(made: Frame | bytes | None, how: DecodeConfig | None = None) -> list[DecodedMessage | RejectedMessage]:
    value = made.SerializeToString() if isinstance(made, Frame) else made
    return list(decode(value, 3, 77, 1_800_000_000_000_000, how or DecodeConfig(default_policy="either")))


def only(made: Frame | bytes | None, how: DecodeConfig | None = None) -> DecodedMessage | RejectedMessage:
    (item,) = read(made, how)
    return item


def good(made: Frame, how: DecodeConfig | None = None) -> DecodedMessage:
    item = only(made, how)
    assert isinstance(item, DecodedMessage), item
    return item


def fault(made: Frame | bytes | None, how: DecodeConfig | None = None) -> RejectedMessage:
    item = only(made, how)
    assert isinstance(item, RejectedMessage), item
    return item


# ---------------------------------------------------------------- good messages


def test_a_message_and_what_is_known_of_it() -> None:
    item = good(frame(signed()))
    assert item.ref == MessageRef(3, 77, 0)
    assert item.message_id == f"{peer_text(compute_peer_id(ANNA))}/0001"
    assert (item.network, item.origin, item.topic, item.separator) == ("testnet-clay", "LIVE", CLAY, None)
    assert item.verdict is Verdict.VALID
    assert item.remote_peer == peer_text(REMOTE)
    assert item.observed_at == 1_700_000_000_123_456
    assert item.envelope.data == UPDATE
    assert (item.content.type, item.content.stream, item.content.tip, item.content.model) == (
        "UPDATE",
        STREAM,
        TIP,
        MODEL,
    )
    assert get_signer(item.envelope, item.verdict) == peer_text(compute_peer_id(ANNA))


def test_messages_of_a_frame_come_in_order_with_their_positions() -> None:
    messages = [unsigned(write_keepalive(n, "2.35.0")) for n in range(5)]
    messages[2] = unsigned(b"garbage")
    items = read(frame(*messages))
    assert [item.ref.position for item in items] == [0, 1, 2, 3, 4]
    assert [item.content.ts if isinstance(item, DecodedMessage) else item.reason for item in items] == [
        0,
        1,
        "invalid_json",
        3,
        4,
    ]


def test_a_separator_comes_from_the_topic() -> None:
    item = good(frame(unsigned(topic=f"{CLAY}/sep/model/{MODEL}")))
    assert (item.network, item.separator) == ("testnet-clay", Separator("model", MODEL))


@pytest.mark.parametrize(
    ("topic", "network"),
    [(CLAY, "testnet-clay"), ("/ceramic/mainnet", "mainnet"), ("something/else", "testnet-dev"), ("", "testnet-dev")],
)
def test_the_network_is_the_topics_else_the_frames(topic: str, network: str) -> None:
    item = good(frame(unsigned(topic=topic), network="testnet-dev"))
    assert (item.network, item.topic) == (network, topic)


def test_a_name_wins_over_an_index() -> None:
    message = unsigned()
    message.topicIndex = 7
    item = good(frame(message))
    assert (item.topic, item.topic_source) == (CLAY, "name")


def test_an_unsigned_message_has_no_author_whatever_it_claims() -> None:
    message = unsigned()
    setattr(message, "from", compute_peer_id(ANNA))
    item = good(frame(message))
    assert item.message_id == "sha256/" + hashlib.sha256(UPDATE).hexdigest()
    assert get_signer(item.envelope, item.verdict) is None


# ---------------------------------------------------------------- nothing to read


def test_frames_that_we_sent_hold_nothing_for_us() -> None:
    assert read(frame(signed(), unsigned(b"garbage"), direction=Frame.OUT, hello_in=b"\xff")) == []
    assert read(frame(payload=b"\xff", direction=Frame.OUT)) == []


# ---------------------------------------------------------------- what our node published


def announcement(key: Ed25519PrivateKey = ANNA, seqno: bytes = b"\0\1") -> Message:
    return signed(write_batch_update(Separator("model", MODEL), TIP), seqno=seqno, key=key)


def sent(
    *messages: Message, payload: bytes | None = None, verdicts: bytes = bytes([Verdict.VALID]), declared_length: int = 0
) -> Frame:
    made = frame(*messages, payload=payload, direction=Frame.OUT, verdicts=verdicts, declared_length=declared_length)
    made.local_peer, made.remote_peer = compute_peer_id(BERT), compute_peer_id(ANNA)
    return made


def test_a_batch_update_that_our_node_published_is_read_from_the_sent_frame() -> None:
    """Under any of its authors. It is no copy, and the id is that of an echo, so that both give one row."""
    item, echo = good(sent(announcement())), good(frame(announcement()))
    assert (item.own, item.copy, item.remote_peer) == (True, None, peer_text(compute_peer_id(BERT)))
    assert (item.message_id, item.network, item.content) == (echo.message_id, echo.network, echo.content)
    assert (item.topic, item.verdict) == (CLAY, Verdict.VALID)
    assert get_signer(item.envelope, item.verdict) == get_signer(echo.envelope, echo.verdict)
    assert compute_identities(item, "", 1) == compute_identities(echo, "", 1)
    bare = Message(data=announcement().data, topic=CLAY)
    assert good(sent(bare, verdicts=bytes([Verdict.UNSIGNED]))).message_id == good(frame(bare)).message_id


def test_an_index_in_a_sent_frame_is_of_the_table_of_its_connection() -> None:
    bundles = BundleSet({"clay": [CLAY], "other": ["/other"]})
    first, second = bundles
    message = announcement()
    message.ClearField("topic")
    message.topicIndex = 2
    made = sent(message)
    made.hello_in = made.hello_out = write_hello([second, first])
    item = good(made, DecodeConfig(bundles=bundles))
    assert (item.topic, item.topic_source) == (CLAY, "index")


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(sent(announcement(), verdicts=b""), id="relayed"),
        pytest.param(sent(announcement(), verdicts=b"\0"), id="relayed, with others"),
        pytest.param(sent(signed()), id="an update"),
        pytest.param(sent(signed(b"garbage")), id="unreadable"),
        pytest.param(sent(announcement(), verdicts=b"\1\1"), id="more verdicts than messages"),
        pytest.param(sent(announcement(), declared_length=5_000_000), id="cut"),
        pytest.param(sent(payload=b"\xff"), id="no RPC"),
    ],
)
def test_nothing_else_is_read_from_a_sent_frame(made: Frame) -> None:
    assert read(made) == []


def test_a_closing_frame_holds_nothing() -> None:
    assert read(frame(payload=b"")) == []


def test_an_rpc_without_messages_holds_nothing() -> None:
    rpc = RPC()
    rpc.subscriptions.add(subscribe=True, topicid=CLAY)
    assert read(frame(payload=rpc.SerializeToString())) == []


# ---------------------------------------------------------------- datagrams of the BitTorrent DHT

PUBLISHER = SigningKey(b"p" * 32)
BY_MODEL = Separator("model", "kabc")
BATCH, BEFORE = compute_cid(b"a batch"), compute_cid(b"the one before")


def datagram(*, sequence: int = 7, answer: bool = False, salt: bytes | None = None) -> Frame:
    value = write_announcement(Announcement(BY_MODEL, BATCH, 1_700_000_000_000, (BEFORE,)))
    item = sign_item(PUBLISHER, compute_salt("mainnet", BY_MODEL) if salt is None else salt, sequence, value)
    if answer:
        message: KrpcQuery | KrpcResponse = KrpcResponse(
            b"aa", bytes(20), {**build_item_fields(item), b"token": b"t"}, item.target
        )
    else:
        message = KrpcQuery(b"aa", b"put", bytes(20), {**build_put_fields(item), b"token": b"t"}, item.target)
    return frame(payload=write_message(message), protocol="bep50", remote_peer=b"n" * 20, local_peer=b"m" * 20)


def test_an_announcement_in_the_dht_is_a_batch_update() -> None:
    item = good(datagram())
    publisher = compute_peer_id(Ed25519PrivateKey.from_private_bytes(b"p" * 32))
    assert (item.content.type, item.content.sep, item.content.batch) == ("BATCH_UPDATE", "model/kabc", cid_text(BATCH))
    assert (item.topic, item.topic_source, item.separator) == (format_topic("mainnet", BY_MODEL), "name", BY_MODEL)
    assert (item.network, item.verdict, item.remote_peer) == ("mainnet", Verdict.VALID, (b"n" * 20).hex())
    assert get_signer(item.envelope, item.verdict) == peer_text(publisher)
    assert item.envelope.seqno == (7).to_bytes(8)
    assert item.previous == (cid_text(BEFORE),)


def test_an_item_is_one_message_however_it_came_and_a_newer_one_another() -> None:
    put, answer, newer = good(datagram()), good(datagram(answer=True)), good(datagram(sequence=8))
    assert put.message_id == answer.message_id
    assert put.message_id != newer.message_id


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (frame(payload=b"d1:ad2:id20:abcdefghij0123456789ee", protocol="bep50"), "not_krpc"),
        (datagram(salt=b"another"), "wrong_salt"),
        (frame(payload=datagram().payload, protocol="bep50", network="a/b"), "bad_network"),
    ],
)
def test_a_datagram_that_announces_nothing_is_put_into_quarantine(made: Frame, reason: str) -> None:
    fault = only(made)
    assert isinstance(fault, RejectedMessage)
    assert (fault.stage, fault.reason, fault.data) == ("bep50", reason, made.payload)


def test_what_we_sent_into_the_dht_and_the_closing_frame_hold_nothing() -> None:
    sent = datagram()
    sent.direction = Frame.OUT
    assert read(sent) == []
    assert read(frame(payload=b"", protocol="bep50")) == []


# ---------------------------------------------------------------- faults of the frame


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        pytest.param(None, "frame_malformed", id="null"),
        pytest.param(b"\xff\xff garbage", "frame_malformed", id="garbage"),
        pytest.param(frame(signed()).SerializeToString()[:-3], "frame_malformed", id="cut"),
        pytest.param(b"", "frame_invalid", id="empty"),
        pytest.param(frame(connection=bytes(15)).SerializeToString(), "frame_invalid", id="connection of 15 bytes"),
        pytest.param(frame(sequence=0).SerializeToString(), "frame_invalid", id="no sequence"),
        pytest.param(frame(sequence=2**63).SerializeToString(), "frame_invalid", id="sequence beyond a BIGINT"),
        pytest.param(frame(direction=2).SerializeToString(), "frame_invalid", id="unknown direction"),
        pytest.param(frame(origin="LIVE").SerializeToString() + b"\x68\x02", "frame_invalid", id="unknown origin"),
    ],
)
def test_what_is_no_frame(value: bytes | None, reason: str) -> None:
    item = fault(value)
    assert (item.ref, item.stage, item.reason) == (MessageRef(3, 77, None), "frame", reason)
    assert item.data == (value or b"")
    assert item.observed_at == 1_800_000_000_000_000  # there is no other time
    assert item.detail


def test_an_rpc_that_was_cut_short() -> None:
    payload = RPC(publish=[signed()]).SerializeToString()[:-3]
    item = fault(frame(payload=payload))
    assert (item.ref, item.stage, item.reason, item.data) == (
        MessageRef(3, 77, None),
        "rpc",
        "rpc_malformed",
        payload,
    )
    assert item.observed_at == 1_700_000_000_123_456


def test_an_rpc_that_was_too_long_to_keep() -> None:
    payload = RPC(publish=[signed()]).SerializeToString()
    item = fault(frame(payload=payload, declared_length=5_000_000))
    assert (item.ref, item.stage, item.reason, item.data) == (
        MessageRef(3, 77, None),
        "rpc",
        "rpc_oversized",
        payload,
    )


BAD_HELLOS = {
    "hello_malformed": b"\x0a\xff",
    "hello_too_many_bundles": ExtTopicTable(
        topicBundleHashes=[n.to_bytes(4, "big") for n in range(257)]
    ).SerializeToString(),
    "hello_hash_length": ExtTopicTable(topicBundleHashes=[b"abc"]).SerializeToString(),
    "hello_repeats": ExtTopicTable(topicBundleHashes=[b"abcd", b"abcd"]).SerializeToString(),
}


@pytest.mark.parametrize("side", ["hello_in", "hello_out"])
@pytest.mark.parametrize("reason", list(BAD_HELLOS))
def test_a_bad_hello_is_a_fault_and_named_messages_still_come(reason: str, side: str) -> None:
    made = frame(signed())
    setattr(made, side, BAD_HELLOS[reason])
    first, second = read(made)
    assert isinstance(first, RejectedMessage)
    assert (first.ref, first.stage, first.reason) == (MessageRef(3, 77, None), "hello", reason)
    assert first.data == BAD_HELLOS[reason]
    assert first.detail.startswith(f"{side}: ")
    assert isinstance(second, DecodedMessage)


def test_two_bad_hellos_are_two_faults() -> None:
    bad = BAD_HELLOS["hello_repeats"]
    items = read(frame(hello_in=bad, hello_out=bad))
    assert [item.stage for item in items if isinstance(item, RejectedMessage)] == ["hello", "hello"]
    assert len({compute_fault_identity(item) for item in items if isinstance(item, RejectedMessage)}) == 2


# ---------------------------------------------------------------- topics


def hello(*hashes: bytes) -> bytes:
    return ExtTopicTable(topicBundleHashes=hashes).SerializeToString()


@pytest.mark.parametrize(
    ("hello_in", "hello_out", "reason"),
    [
        pytest.param(b"", b"", NO_TABLE, id="no hello"),
        pytest.param(hello(b"aaaa"), b"", NO_TABLE, id="theirs only"),
        pytest.param(b"", hello(b"aaaa"), NO_TABLE, id="ours only"),
        pytest.param(hello(b"aaaa"), hello(b"bbbb"), NO_TABLE, id="nothing in common"),
        pytest.param(hello(b"aaaa"), hello(b"aaaa", b"bbbb"), UNKNOWN_BUNDLE, id="agreed"),
        pytest.param(hello(b"cccc", b"bbbb"), hello(b"aaaa", b"bbbb"), UNKNOWN_BUNDLE, id="agreed out of order"),
    ],
)
def test_an_index_without_a_name(hello_in: bytes, hello_out: bytes, reason: str) -> None:
    message = Message(data=UPDATE, topicIndex=5)
    item = fault(frame(message, hello_in=hello_in, hello_out=hello_out))
    assert (item.ref, item.stage, item.reason, item.data) == (MessageRef(3, 77, 0), "topic", reason, UPDATE)
    assert "topic index 5" in item.detail


def test_an_index_with_a_bad_hello() -> None:
    first, second = read(frame(Message(data=UPDATE, topicIndex=0), hello_in=BAD_HELLOS["hello_repeats"]))
    assert isinstance(first, RejectedMessage)
    assert isinstance(second, RejectedMessage)
    assert (first.reason, second.reason) == ("hello_repeats", NO_TABLE)


SEP = f"{CLAY}/sep/model/{MODEL}"
BUNDLES = BundleSet({"clay": [CLAY, SEP], "main": ["/ceramic/mainnet"]})
# the lists have no common prefix, so the table has the bundles in the order of their hashes
TOPICS = [topic for known in sorted(BUNDLES) for topic in BUNDLES[known]]
RESOLVING = DecodeConfig("strict", bundles=BUNDLES)


def tabled(*messages: Message, **fields: object) -> Frame:
    made = frame(*messages, hello_in=write_hello(reversed(list(BUNDLES))), hello_out=write_hello(BUNDLES))
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def indexed(topic: str, index: int | None = None, data: bytes = UPDATE) -> Message:
    """Signed over the topic's name; the index on the wire."""
    message = signed(data, topic)
    message.ClearField("topic")
    message.topicIndex = TOPICS.index(topic) + 1 if index is None else index
    return message


@pytest.mark.parametrize("topic", TOPICS)
def test_an_index_is_resolved_by_the_hellos_of_its_frame_and_the_signature_is_over_the_name(topic: str) -> None:
    item = good(tabled(indexed(topic), network="testnet-dev"), RESOLVING)
    named = good(frame(signed(topic=topic), network="testnet-dev"), RESOLVING)
    assert (item.topic_source, named.topic_source) == ("index", "name")
    assert item.verdict is Verdict.VALID
    assert item._replace(envelope=named.envelope, topic_source="name") == named
    assert compute_identities(item, "", 10) == compute_identities(named, "", 10)


def test_an_index_of_another_topic_than_was_signed() -> None:
    item = fault(tabled(indexed(CLAY, TOPICS.index(SEP) + 1)), RESOLVING)
    assert (item.stage, item.reason) == ("signature", "bad_signature")


def test_the_bridges_verdict_on_an_indexed_message_holds() -> None:
    assert good(tabled(indexed(CLAY), verdicts=b"\1"), RESOLVING).verdict is Verdict.VALID
    item = fault(tabled(indexed(CLAY), verdicts=b"\2"), RESOLVING)
    assert (item.stage, item.reason) == ("signature", "bad_signature")


@pytest.mark.parametrize("index", [0, 4, 2**32 - 1])
def test_an_index_out_of_range(index: int) -> None:
    item = fault(tabled(indexed(CLAY, index)), RESOLVING)
    assert (item.ref, item.stage, item.reason, item.data) == (
        MessageRef(3, 77, 0),
        "topic",
        INDEX_OUT_OF_RANGE,
        UPDATE,
    )
    assert f"topic index {index}" in item.detail


@pytest.mark.parametrize("index", [TOPICS.index(CLAY) + 1, TOPICS.index(SEP) + 1, 99])
def test_a_name_on_the_wire_wins_over_any_index_signed_with_it_or_added_later(index: int) -> None:
    added = signed()
    added.topicIndex = index
    own = Message(data=UPDATE, topic=CLAY, topicIndex=index, seqno=b"\0\1")
    sign(own, ANNA)
    for message in (added, own):
        item = good(tabled(message), RESOLVING)
        assert (item.topic, item.topic_source, item.verdict) == (CLAY, "name", Verdict.VALID)


def test_what_was_unknown_is_decoded_once_the_bundle_is_known() -> None:
    made = tabled(indexed(SEP), indexed("/ceramic/mainnet"))
    assert [item.reason for item in read(made, DecodeConfig("strict")) if isinstance(item, RejectedMessage)] == [
        UNKNOWN_BUNDLE
    ] * 2
    one = DecodeConfig("strict", bundles=BundleSet({"clay": [CLAY, SEP]}))
    known_first = TOPICS[0] != "/ceramic/mainnet"
    assert isinstance(read(made, one)[0], DecodedMessage) is known_first
    assert [item.topic for item in read(made, RESOLVING) if isinstance(item, DecodedMessage)] == [
        SEP,
        "/ceramic/mainnet",
    ]


def test_decoding_goes_to_another_process_as_it_is() -> None:
    assert pickle.loads(pickle.dumps(RESOLVING)) == RESOLVING


def test_a_capture_of_the_reference_resolves_wholly() -> None:
    captures = VECTORS / "captures"
    topics = json.loads((captures / "go4tt.meta.json").read_text())["topics"]
    with gzip.open(captures / "go4tt.published.jsonl.gz", "rt") as lines:
        published = {entry["sha256"]: entry["topic"] for entry in map(json.loads, lines)}
    values: list[bytes] = []

    def keep(made: Frame) -> None:
        made.origin = Frame.LIVE  # REPLAY would be judged "either": here each signature must hold
        values.append(made.SerializeToString())

    replay(captures / "go4tt.rpc.gz", keep, now=lambda: 0.0, sleep=lambda _: None)

    def items(how: DecodeConfig) -> list[DecodedMessage | RejectedMessage]:
        return [item for value in values for item in decode(value, 0, 0, 0, how)]

    with_bundle = items(DecodeConfig("strict", bundles=BundleSet({"go4tt": topics})))
    assert len(with_bundle) == 853
    decoded = [item for item in with_bundle if isinstance(item, DecodedMessage)]
    refused = [item for item in with_bundle if isinstance(item, RejectedMessage)]
    assert {(item.topic_source, item.verdict) for item in decoded} == {("index", Verdict.VALID)}
    assert all(item.topic == published[hashlib.sha256(item.envelope.data).hexdigest()] for item in decoded)
    assert len({item.message_id for item in decoded}) == 153
    # one of the 154 messages is not JSON; it is signed well, over the name that its index stands for
    assert {(item.reason, item.author != "") for item in refused} == {("invalid_json", True)}
    assert len({item.data for item in refused}) == 1
    without = [item for item in items(DecodeConfig("strict")) if isinstance(item, RejectedMessage)]
    assert Counter(item.reason for item in without) == {UNKNOWN_BUNDLE: 853}


def test_the_reasons_for_an_index_are_spelled_like_all_others() -> None:
    assert (NO_TABLE, UNKNOWN_BUNDLE, INDEX_OUT_OF_RANGE) == (
        "no_table_agreed",
        "unknown_bundle_hash",
        "index_out_of_range",
    )


def test_neither_a_topic_nor_an_index() -> None:
    item = fault(frame(Message(data=UPDATE)))
    assert (item.stage, item.reason, item.data) == ("topic", TOPIC_MISSING, UPDATE)


def test_a_topic_that_is_not_utf8() -> None:
    payload = RPC(publish=[unsigned(topic="?????")]).SerializeToString().replace(b"?????", b"abc\xff\xfe")
    item = fault(frame(payload=payload))
    assert (item.ref.position, item.stage, item.reason, item.data) == (0, "topic", "topic_not_utf8", UPDATE)


def test_bytes_that_are_no_message() -> None:
    item = fault(frame(signed(b'{"typ": true}')))
    assert (item.stage, item.reason, item.data) == ("message", "unknown_typ", b'{"typ": true}')
    assert item.author == peer_text(compute_peer_id(ANNA))


@pytest.mark.parametrize("message", [unsigned(b"garbage"), forged(b"garbage")], ids=["unsigned", "forged"])
def test_only_who_signed_well_is_the_author_of_a_fault(message: Message) -> None:
    assert fault(frame(message)).author == ""


# ---------------------------------------------------------------- signatures and policies


@pytest.mark.parametrize(
    ("verdict", "found"),
    [
        (1, Verdict.VALID),
        (2, "bad_signature"),
        (3, Verdict.UNSIGNED),
        (4, "against_policy"),
        (0, Verdict.VALID),  # judged here
        (9, Verdict.VALID),  # what is no verdict counts as none
    ],
)
def test_the_verdict_of_the_bridge_holds_where_there_is_one(verdict: int, found: Verdict | str) -> None:
    item = only(frame(signed(), verdicts=bytes((verdict,))), DecodeConfig("strict"))
    assert (item.verdict if isinstance(item, DecodedMessage) else item.reason) == found


def test_a_forged_message_that_the_bridge_called_good_is_not_judged_again() -> None:
    assert good(frame(forged(), verdicts=b"\1")).verdict is Verdict.VALID


def test_each_message_has_its_own_verdict_and_what_has_none_is_judged_here() -> None:
    items = read(frame(signed(), signed(), signed(), forged(), verdicts=b"\1\2\0"), DecodeConfig("strict"))
    assert [item.reason if isinstance(item, RejectedMessage) else "" for item in items] == [
        "",
        "bad_signature",
        "",
        "bad_signature",
    ]


@pytest.mark.parametrize(
    ("policy", "message", "reason"),
    [
        ("strict", signed(), ""),
        ("strict", unsigned(), "missing_signature"),
        ("strict", forged(), "bad_signature"),
        ("none", signed(), "unexpected_auth"),
        ("none", unsigned(), ""),
        ("none", forged(), "unexpected_auth"),
        ("either", signed(), ""),
        ("either", unsigned(), ""),
        ("either", forged(), "bad_signature"),
    ],
    ids=[f"{policy}-{kind}" for policy in ("strict", "none", "either") for kind in ("signed", "unsigned", "forged")],
)
def test_policies(policy: Policy, message: Message, reason: str) -> None:
    item = only(frame(message), DecodeConfig(policy))
    if reason:
        assert isinstance(item, RejectedMessage)
        assert (item.stage, item.reason, item.data) == ("signature", reason, message.data)
        assert item.author == ""
    else:
        assert isinstance(item, DecodedMessage)


@pytest.mark.parametrize("policy", ["strict", "none"])
@pytest.mark.parametrize("message", [signed(), unsigned()], ids=["signed", "unsigned"])
def test_a_replay_is_judged_either_way(policy: Policy, message: Message) -> None:
    how = DecodeConfig(policy, {"testnet-clay": policy})
    assert good(frame(message, origin="REPLAY"), how).origin == "REPLAY"
    assert fault(frame(forged(), origin="REPLAY"), DecodeConfig("strict")).reason == "bad_signature"


def test_the_policy_is_that_of_the_messages_network() -> None:
    how = DecodeConfig("strict", {"testnet-clay": "none"})
    assert good(frame(unsigned(topic=CLAY), network="mainnet"), how)
    assert fault(frame(unsigned(topic="/ceramic/mainnet"), network="testnet-clay"), how).reason == "missing_signature"


def test_the_policy_of_a_topic_goes_before_that_of_its_network() -> None:
    patterns: dict[str, Policy] = {"/ceramic/mainnet/sep/*": "strict", "*": "either"}
    how = DecodeConfig("strict", {"mainnet": "none"}, topic_policies=patterns)
    assert fault(frame(unsigned(topic=f"/ceramic/mainnet/sep/model/{MODEL}")), how).reason == "missing_signature"
    assert good(frame(unsigned(topic="/ceramic/mainnet")), how)
    assert good(frame(signed(topic="/ceramic/mainnet")), how)


def test_a_signature_is_over_the_topic_too() -> None:
    message = signed(topic="/ceramic/mainnet")
    message.topic = CLAY
    assert fault(frame(message)).reason == "bad_signature"


# ---------------------------------------------------------------- copies


def digests(item: DecodedMessage | RejectedMessage, horizon: int = 120_000_000) -> set[bytes]:
    return (
        {compute_fault_identity(item)}
        if isinstance(item, RejectedMessage)
        else set(compute_identities(item, "", horizon))
    )


def test_a_forged_first_copy_does_not_mask_the_true_one() -> None:
    bad, true = read(frame(forged(), signed()))
    assert isinstance(bad, RejectedMessage)
    assert isinstance(true, DecodedMessage)
    assert not digests(bad) & digests(true)


def test_an_unsigned_copy_does_not_mask_a_signed_message() -> None:
    stripped = signed()
    stripped.ClearField("signature")
    bare, true = read(frame(stripped, signed()))
    assert not digests(bare) & digests(true)


def test_copies_through_other_peers_are_known_as_such() -> None:
    first = good(frame(signed()))
    again = good(
        frame(signed(), remote_peer=compute_peer_id(ANNA), connection=b"c" * 16, observed_at=1_700_040_000_000_000_000)
    )
    assert compute_identities(first, "", 120_000_000) == compute_identities(again, "", 120_000_000)


def test_faults_are_kept_each_time_they_come() -> None:
    how = DecodeConfig(default_policy="either")
    values = [frame(unsigned(b"garbage"), unsigned(b"garbage"), sequence=number) for number in (1, 2, 3, 4)]
    items = [item for value in values for item in decode(value.SerializeToString(), 0, value.sequence, 0, how)]
    assert len({compute_fault_identity(item) for item in items if isinstance(item, RejectedMessage)}) == len(items) == 8


def at(observed_at: int, message: Message) -> DecodedMessage:
    """Heard at µs from the first time that there can be."""
    return good(frame(message, observed_at=(MIN_MICROS + observed_at) * 1000))


QUERY = write_query(STREAM)
times = st.integers(0, 10**15)
horizons = st.integers(2, 200_000_000)


@given(times, horizons, st.data())
def test_unsigned_copies_less_than_half_a_horizon_apart_agree_in_one(
    time: int, horizon: int, data: st.DataObject
) -> None:
    apart = data.draw(st.integers(0, (horizon - 1) // 2))
    first, second = at(time, unsigned(QUERY)), at(time + apart, unsigned(QUERY))
    pairs = zip(compute_identities(first, "", horizon), compute_identities(second, "", horizon), strict=True)
    assert any(one == other for one, other in pairs)


@given(times, horizons, st.integers(0, 10**12))
def test_an_unsigned_message_that_comes_again_after_a_horizon_agrees_in_none(
    time: int, horizon: int, more: int
) -> None:
    first, second = at(time, unsigned(QUERY)), at(time + horizon + more, unsigned(QUERY))
    pairs = zip(compute_identities(first, "", horizon), compute_identities(second, "", horizon), strict=True)
    assert not any(one == other for one, other in pairs)


SIGNED = signed()


@given(times, times, horizons)
def test_a_signed_message_is_one_for_ever(time: int, later: int, horizon: int) -> None:
    (digest,) = compute_identities(at(time, SIGNED), "", horizon)
    assert compute_identities(at(later, SIGNED), "", horizon) == (digest,)


def test_other_messages_networks_and_scopes_are_kept_apart() -> None:
    base = at(0, SIGNED)
    others = [
        compute_identities(at(0, signed(seqno=b"\0\2")), "", 10),
        compute_identities(at(0, signed(key=BERT)), "", 10),
        compute_identities(at(0, signed(topic="/ceramic/mainnet")), "", 10),
        compute_identities(base, "REPLAY", 10),
        compute_identities(at(0, unsigned()), "", 10),
        compute_identities(at(0, unsigned(QUERY)), "", 10),
    ]
    digests = [digest for pair in (compute_identities(base, "", 10), *others) for digest in set(pair)]
    assert len(digests) == len(set(digests))


# ---------------------------------------------------------------- size


def test_what_goes_to_quarantine_fits_into_a_record_and_all_bytes_are_there() -> None:
    data = b"\xff" * (MAX_RECORD - 1_000)
    for item in (fault(frame(payload=b"\xff" * MAX_RPC)), fault(data)):
        rows = list(build_fault_rows(item))
        values = [value for _, (_, _, _, value) in rows]
        assert all(isinstance(value, bytes) and len(value) < MAX_RECORD - 1_000 for value in values)
        assert b"".join(decode_quarantine(value).data for value in values if isinstance(value, bytes)) == item.data
        assert len({identity for identity, _ in rows}) == len(rows)


def test_a_fault_in_a_frame_that_was_written_twice_is_one() -> None:
    value = frame(payload=b"\xff")
    how = DecodeConfig()
    (first,), (again,) = (decode(value.SerializeToString(), 3, offset, 0, how) for offset in (77, 78))
    assert isinstance(first, RejectedMessage)
    assert isinstance(again, RejectedMessage)
    assert compute_fault_identity(first) == compute_fault_identity(again)
    assert compute_fault_identity(first) != compute_fault_identity(fault(frame(payload=b"\xff", sequence=2)))


# ---------------------------------------------------------------- any bytes


def check(items: Sequence[DecodedMessage | RejectedMessage]) -> None:
    """Each fault can be written to Kafka, says why, and has bytes."""
    for item in items:
        if isinstance(item, RejectedMessage):
            assert item.stage in {"frame", "hello", "rpc", "topic", "signature", "message"}
            record = QuarantineRecord(item.stage, item.reason, item.detail, item.data, item.observed_at)
            QUARANTINE.validate(json.loads(encode(record)))
            compute_fault_identity(item)
        else:
            compute_identities(item, "", 120_000_000)
            get_signer(item.envelope, item.verdict)


@given(st.none() | st.binary(max_size=300))
@example(b"")
def test_no_record_value_stops_it(value: bytes | None) -> None:
    items = read(value)
    check(items)
    assert len(items) <= 1 or isinstance(items[0], DecodedMessage | RejectedMessage)


@given(st.data())
def test_no_damage_to_a_frame_stops_it(data: st.DataObject) -> None:
    value = bytearray(frame(signed(), unsigned(QUERY), hello_in=hello(b"aaaa"), verdicts=b"\0\0").SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    check(read(bytes(value)))


@given(st.binary(max_size=300))
def test_no_payload_stops_it(payload: bytes) -> None:
    check(read(frame(payload=payload)))


jsons = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from((STREAM, TIP)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("typ", "stream", "doc", "tip", "model", "id", "tips", "ts", STREAM)), inner)
    ),
    max_leaves=8,
)
datas = st.binary(max_size=60) | jsons.map(lambda value: json.dumps(value).encode())


@given(
    st.lists(
        st.builds(
            dict,
            data=datas,
            topic=st.none() | st.text(max_size=10) | st.just(CLAY),
            topicIndex=st.none() | st.integers(0, 2**32 - 1),
            seqno=st.none() | st.binary(max_size=10),
            signature=st.none() | st.binary(max_size=70),
            key=st.none() | st.binary(max_size=40),
            author=st.none() | st.binary(max_size=40) | st.just(compute_peer_id(ANNA)),
        ),
        max_size=4,
    ),
    st.binary(max_size=20) | st.just(hello(b"aaaa")),
    st.binary(max_size=20) | st.just(hello(b"aaaa")),
    st.binary(max_size=5),
    st.binary(max_size=40),
    st.sampled_from(("strict", "none", "either")),
)
def test_no_message_hello_or_verdict_stops_it(
    fields: list[dict[str, bytes | str | int | None]],
    hello_in: bytes,
    hello_out: bytes,
    verdicts: bytes,
    remote_peer: bytes,
    policy: Policy,
) -> None:
    messages = []
    for given_fields in fields:
        message = Message()
        for name, value in given_fields.items():
            if value is not None:
                setattr(message, "from" if name == "author" else name, value)
        messages.append(message)
    made = frame(*messages, hello_in=hello_in, hello_out=hello_out, verdicts=verdicts, remote_peer=remote_peer)
    items = read(made, DecodeConfig(policy))
    check(items)
    # a message is good or faulty, and none is lost
    assert [item.ref.position for item in items if item.ref.position is not None] == list(range(len(messages)))
