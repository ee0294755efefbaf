"""kiln.schemas.captures: logs of js-ceramic and Kubo's pubsub/sub, up to what the live decoder makes of each line."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import VECTORS
from kiln.pipelines.decode.decoder import DecodeConfig, DecodedMessage, RejectedMessage, decode, get_signer
from kiln.pipelines.decode.identities import compute_identities
from kiln.schemas.captures import ceramic_log
from kiln.schemas.captures.items import LINE_MALFORMED, NO_MESSAGE, LoggedMessage, UnreadableItem
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.times import MAX_MICROS, MIN_MICROS
from kiln.schemas.wire.identity import MAX_SEQNO, Verdict, message_id, peer_bytes, peer_text
from kit.history import HEARD_AT, ceramic_line, decoded, items, kubo_line, message_of, only_frames, unread

HERE = Path(__file__).parent / "history_files"
CLAY = "/ceramic/testnet-clay"
NODE, AUTHOR = "QmW4V8TbfaeSWYsbBdtqpydyid2bXkM8RFiEcCw8rHb7k2", "QmQotCKxiMWt935TyCBFTN23jaivxwrZ3uD58wNxeg5npi"
STREAM = "k2t6wyfsu4pg1yl83f5x3f2zffho0tjc7li4i5r57yycco5ke0w9gt2nfg34di"
TIP = "bafyreigtsyqmmvgtal3y2ahcs277xjk5prvb673lb3li2i2egz2nhp6u4y"

peers = st.binary(min_size=32, max_size=32).flatmap(
    lambda key: st.sampled_from((bytes.fromhex("002408011220") + key, b"\x12\x20" + key))
)
seqnos = st.binary(min_size=1, max_size=16)
topics = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)


def vector(name: str) -> bytes:
    return (VECTORS / "ceramic" / name).read_bytes()


def good(frame: Frame) -> DecodedMessage:
    found = decoded(frame)
    assert isinstance(found, DecodedMessage), found
    return found


# ---------------------------------------------------------------- Kubo


@given(peers, st.binary(max_size=300), seqnos, topics)
def test_a_line_of_kubo_is_a_frame_with_all_that_the_line_has(
    peer: bytes, data: bytes, seqno: bytes, topic: str
) -> None:
    (frame,) = only_frames(items("kubo-sub", kubo_line(peer, data, seqno, topic)))
    message = message_of(frame)
    assert (getattr(message, "from"), message.data, message.seqno, message.topic) == (peer, data, seqno, topic)
    assert (frame.protocol, frame.origin, frame.direction) == ("kubo-sub", Frame.REPLAY, Frame.IN)
    assert (frame.observed_at, frame.remote_peer, frame.verdicts) == (HEARD_AT, b"", b"\x05")


@given(peers, st.binary(max_size=300), seqnos)
def test_a_line_of_go_ipfs_before_0_11_is_the_same(peer: bytes, data: bytes, seqno: bytes) -> None:
    from_, text, number = (base64.b64encode(each).decode() for each in (peer, data, seqno))
    line = json.dumps({"from": from_, "data": text, "seqno": number, "topicIDs": [CLAY]}).encode()
    assert items("kubo-sub", line) == items("kubo-sub", kubo_line(peer, data, seqno, CLAY))


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b'{"Message":"context canceled","Code":0,"Type":"error"}',
        b'{"from":"?","data":"u","seqno":"u","topicIDs":["udA"]}',
        b'{"from":"%b","data":"mAA","seqno":"u","topicIDs":["udA"]}' % AUTHOR.encode(),
        b'{"from":"%b","data":"u!","seqno":"u","topicIDs":["udA"]}' % AUTHOR.encode(),
        b'{"from":"%b","data":"u","seqno":"u","topicIDs":[]}' % AUTHOR.encode(),
        b'{"from":"%b","data":"u","seqno":"u","topicIDs":["udA","udA"]}' % AUTHOR.encode(),
        b'{"from":"%b","data":"u","seqno":"u","topicIDs":["u_w"]}' % AUTHOR.encode(),
        b'{"from":"%b","data":"u","seqno":"u","topicIDs":["udA"]}' % (b"1" * 5000),
        kubo_line(peer_bytes(AUTHOR), b"", bytes(MAX_SEQNO + 1), CLAY),
    ],
)
def test_a_line_that_is_none_of_kubo_s_is_kept_with_a_reason(line: bytes) -> None:
    (found,) = items("kubo-sub", line + b"\n")
    assert isinstance(found, UnreadableItem)
    assert (found.line, found.reason, found.data) == (1, LINE_MALFORMED, line)
    assert found.detail


def test_the_lines_of_rust_ceramic_are_read() -> None:
    frames = only_frames(items("kubo-sub", vector("rust_ceramic_pubsub_sub.ndjson")))
    assert [(message_of(frame).data, message_of(frame).topic) for frame in frames] == [
        (b"message 1", "topicA"),
        (b"message 2", "topicA"),
    ]
    assert {frame.network for frame in frames} == {"local-history"}
    for frame in frames:  # the data is no message of Ceramic's, which is for the decoder to say
        found = decoded(frame)
        assert isinstance(found, RejectedMessage)
        assert found.reason == "invalid_json"


@pytest.mark.parametrize("name", ["captured_messages.jsonl", "codec_test_messages.jsonl"])
def test_messages_of_real_nodes_pass_through_kubo_s_form(name: str) -> None:
    wires = [entry["wire"] for entry in map(json.loads, vector(name).splitlines()) if "wire" in entry]
    assert wires
    lines = [kubo_line(peer_bytes(AUTHOR), wire.encode(), bytes([at] * 8), CLAY) for at, wire in enumerate(wires, 1)]
    for frame, wire in zip(only_frames(items("kubo-sub", b"\n".join(lines))), wires, strict=True):
        found = decoded(frame)
        data = found.envelope.data if isinstance(found, DecodedMessage) else found.data
        assert data == wire.encode()
        assert isinstance(found, DecodedMessage) or found.stage == "message"


# ---------------------------------------------------------------- js-ceramic


def received(fields: Mapping[str, str | int], at: int = 1_626_355_473) -> bytes:
    pairs: list[tuple[str, str | int | None]] = [
        ("peer", NODE),
        ("event", "received"),
        ("topic", CLAY),
        ("message.from", AUTHOR),
        ("message.topicIDs.0", CLAY),
        ("message.seqno", "2f188761af038ec4"),
        ("message.receivedFrom", NODE),
    ]
    return ceramic_line(at, pairs + [(f"message.{key}", value) for key, value in fields.items()])


texts = st.text(st.characters(codec="utf-8", exclude_characters="\n\r"))


@given(
    st.dictionaries(st.sampled_from(["stream", "tip", "model", "doc", "id", "ver", "other"]), texts), st.integers(0, 3)
)
def test_the_fields_of_a_line_are_the_fields_of_the_message(fields: dict[str, str], typ: int) -> None:
    (frame,) = only_frames(items("ceramic-log", received({"typ": typ, **fields})))
    data = message_of(frame).data
    assert data == json.dumps({"typ": typ, **fields}, separators=(",", ":"), ensure_ascii=False).encode()
    assert message_of(frame).seqno.hex() == "2f188761af038ec4"


@given(st.integers(MIN_MICROS // 10**6, MAX_MICROS // 10**6))
def test_a_line_is_heard_in_its_second(at: int) -> None:
    (frame,) = only_frames(items("ceramic-log", received({"typ": 3, "ts": 1}, at)))
    assert frame.observed_at == at * 10**9


def test_the_log_lines_of_real_nodes_are_the_messages_they_were() -> None:
    entries = [
        entry for entry in map(json.loads, vector("captured_messages.jsonl").splitlines()) if "log_line" in entry
    ]
    raw = "".join(f"{entry['log_line']}\n" for entry in entries).encode()
    for entry, frame in zip(entries, only_frames(items("ceramic-log", raw)), strict=True):
        found = good(frame)
        assert json.loads(found.envelope.data) == entry["fields"]
        assert list(json.loads(found.envelope.data)) == list(entry["fields"])
        assert found.message_id == f"unverified/{entry['from_']}/{entry['seqno_hex']}"
        assert (found.topic, found.network, peer_text(frame.local_peer)) == (CLAY, "testnet-clay", entry["receiver"])
        assert found.remote_peer == (entry["receivedFrom"] or "")
        if entry["fields"]["typ"] == 0:
            assert (found.content.stream, found.content.tip) == (entry["fields"]["stream"], entry["fields"]["tip"])


def test_what_js_ceramic_s_own_logger_writes_is_read() -> None:
    found = items("ceramic-log", (HERE / "js_ceramic.log").read_bytes())
    assert unread(found) == [(9, NO_MESSAGE)]
    frames = [item for item in found if isinstance(item, Frame)]
    assert [json.loads(message_of(frame).data) for frame in frames] == [
        {"typ": 0, "stream": STREAM, "tip": TIP, "model": STREAM},
        {"typ": 1, "stream": STREAM, "id": "EiB-_"},
        {"typ": 2, "id": "18,32", "tips": {STREAM: TIP}},
        {"typ": 2, "id": "x", "tips": {}},
        {"typ": 3, "ts": 1646925968077, "ver": '2.35.0 "x" = \\', "ipfsVer": ""},
        {"typ": 3, "ts": 1},  # of early 2021: the data itself, as numbers
        {"typ": 0, "doc": STREAM, "tip": TIP},  # of 2020: the message under message.data
        {"typ": 0, "stream": STREAM, "tip": TIP},
    ]
    numbers = [f"2f188761af038e{last:x}" for last in range(0xC4, 0xC9)]
    assert [message_of(frame).seqno.hex() for frame in frames] == [*numbers, "2f188761", "", ""]
    assert [good(frame).content.type for frame in frames[:3]] == ["UPDATE", "QUERY", "RESPONSE"]


def received_from_2_26(fields: Mapping[str, str | int], number: int | str = 1795856911020558180) -> bytes:
    """As js-ceramic from 2.26 on logs: the message as its IPFS client types it, before the fields of its data."""
    pairs: list[tuple[str, str | int | None]] = [
        ("peer", NODE),
        ("event", "received"),
        ("topic", CLAY),
        ("message.type", "signed"),
        ("message.from", AUTHOR),
        ("message.sequenceNumber", number),
        ("message.topic", CLAY),
    ]
    return ceramic_line(1_626_355_473, pairs + [(f"message.{key}", value) for key, value in fields.items()])


def test_a_line_from_2_26_on_is_the_message_of_the_line_before_2_26() -> None:
    fields: dict[str, str | int] = {"typ": 0, "stream": STREAM, "tip": TIP}
    (new,) = only_frames(items("ceramic-log", received_from_2_26(fields, 0x2F188761AF038EC4)))
    (old,) = only_frames(items("ceramic-log", received(fields)))
    assert message_of(new) == message_of(old)
    assert good(new).message_id == f"unverified/{AUTHOR}/2f188761af038ec4"


def test_fields_of_a_message_that_are_named_as_the_other_envelope_s_stay_in_the_message() -> None:
    envelope = {"type": "x", "sequenceNumber": "7", "topic": "y"}
    fields: dict[str, str | int] = {"typ": 0, "stream": STREAM, "tip": TIP, **envelope}
    (old,) = only_frames(items("ceramic-log", received(fields)))
    assert json.loads(message_of(old).data) == fields
    published: list[tuple[str, str | int | None]] = [("peer", NODE), ("event", "published"), ("topic", CLAY)]
    line = ceramic_line(1_626_355_473, published + [(f"message.{key}", value) for key, value in fields.items()])
    (own,) = only_frames(items("ceramic-log", line))
    assert json.loads(message_of(own).data) == fields


@pytest.mark.parametrize(
    ("text", "seqno"),
    [("0", bytes(8)), (str(2**64 - 1), b"\xff" * 8), (str(2**64), b""), ("-1", b""), ("", b""), ("9" * 5000, b"")],
)
def test_the_sequence_number_of_a_line_is_a_seqno_of_8_bytes(text: str, seqno: bytes) -> None:
    (frame,) = only_frames(items("ceramic-log", received_from_2_26({"typ": 3, "ts": 1}, text)))
    assert message_of(frame).seqno == seqno


@pytest.mark.parametrize("version", ["1.11", "2.30", "2.40"])
def test_the_logs_of_real_nodes_have_the_ids_and_the_fields_of_the_messages_on_the_wire(version: str) -> None:
    logs = VECTORS / "ceramic" / f"js-ceramic-{version}-pubsub.log"
    found = items("ceramic-log", logs.read_bytes())
    assert {reason for _, reason in unread(found)} <= {NO_MESSAGE}
    messages = [good(item) for item in found if isinstance(item, Frame)]
    known = {"typ", "doc", "stream", "tip", "model", "id", "tips", "ts", "ver", "ipfsVer"}
    assert all(set(json.loads(each.envelope.data)) <= known for each in messages)
    lines = logs.read_text().splitlines()
    received_lines = [line for line in lines if " event=received " in line]
    ids = {each.message_id for each in messages if not each.own}
    assert len(ids) == len(received_lines)
    assert all(re.fullmatch("unverified/12D3KooW[^/]+/18ec2a58[0-9a-f]{8}", each) for each in ids)


def test_what_a_node_published_is_heard_of_the_node() -> None:
    line = ceramic_line(
        1_626_355_473,
        [
            ("peer", NODE),
            ("event", "published"),
            ("topic", CLAY),
            ("message.typ", 0),
            ("message.stream", STREAM),
            ("message.tip", TIP),
            ("message.model", None),
        ],
    )
    (frame,) = only_frames(items("ceramic-log", line))
    assert peer_text(frame.local_peer) == peer_text(frame.remote_peer) == NODE
    found = good(frame)
    assert (found.content.tip, found.message_id[:7]) == (TIP, "sha256/")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"    at Dispatcher.handleMessage (dispatcher.ts:12)", LINE_MALFORMED),
        (b"[Thu, 15 Jul 2021 13:24:33 GMT] service=pubsub", NO_MESSAGE),
        (b"[Thu, 15 Jul 2021 13:24:33 GMT] service=http-access method=GET", NO_MESSAGE),
        (b"[Thu, 15 Jul 2021 13:24:33 GMT] service=pubsub event=publish-error message.typ=0", NO_MESSAGE),
        (b"[Thu, 31 Feb 2021 13:24:33 GMT] service=pubsub event=received", LINE_MALFORMED),
        (b"[2021-07-15T13:24:33Z] service=pubsub event=received", LINE_MALFORMED),
        (b'[Thu, 15 Jul 2021 13:24:33 GMT] service=pubsub event=received topic="x', LINE_MALFORMED),
        (b"[Thu, 15 Jul 2021 13:24:33 GMT] service=pubsub event=received message.typ=3", LINE_MALFORMED),
        (b"[Thu, 15 Jul 2021 13:24:33 GMT] service=pubsub event=received topic=x", LINE_MALFORMED),
        (b"[Thu, 15 Jul 2021 13:24:33 GMT] service=pubsub event=received topic=\xff message.typ=3", LINE_MALFORMED),
        (received({"typ": 3}).replace(AUTHOR.encode(), b"nobody"), LINE_MALFORMED),
        (received({"typ": 3, "data": "300,1"}), LINE_MALFORMED),
    ],
)
def test_other_lines_of_a_node_are_kept_with_a_reason(line: bytes, reason: str) -> None:
    (found,) = items("ceramic-log", line + b"\n")
    assert isinstance(found, UnreadableItem)
    assert (found.reason, found.data) == (reason, line)


def test_the_seqno_of_every_era() -> None:
    for text, bytes_ in (("2f18", b"\x2f\x18"), ("47,24", b"\x2f\x18"), ("\ufffd\x10", b"")):
        logged = ceramic_log.read_line(received({"typ": 3}).replace(b"2f188761af038ec4", text.encode()))
        assert isinstance(logged, LoggedMessage)
        assert logged.seqno == bytes_


# ---------------------------------------------------------------- what nobody can check


def test_what_a_log_tells_is_marked_and_stands_beside_the_verified_message() -> None:
    (frame,) = only_frames(items("kubo-sub", kubo_line(peer_bytes(AUTHOR), b'{"typ":3,"ts":1}', b"\x07", CLAY)))
    found = good(frame)
    assert found.verdict is Verdict.UNVERIFIABLE
    assert found.message_id == f"unverified/{AUTHOR}/07"
    assert get_signer(found.envelope, found.verdict) is None
    assert found.copy is not None
    assert found.copy.verdict == "unverifiable"
    signed = message_of(frame)
    signed.signature = b"x"
    assert message_id(signed) == found.message_id.removeprefix("unverified/")


def test_two_logs_of_one_message_are_one_message_however_far_apart() -> None:
    line = kubo_line(peer_bytes(AUTHOR), b'{"typ":3,"ts":1}', b"\x07", CLAY)
    logged = received({"typ": 3, "ts": 1}).replace(b"2f188761af038ec4", b"07")
    found = [good(frame) for frame in only_frames([*items("kubo-sub", line), *items("ceramic-log", logged)])]
    assert len({compute_identities(each, "", 120_000_000) for each in found}) == 1


def test_a_live_frame_that_claims_it_is_judged_all_the_same() -> None:
    (frame,) = only_frames(items("kubo-sub", kubo_line(peer_bytes(AUTHOR), b'{"typ":3,"ts":1}', b"\x07", CLAY)))
    frame.origin = Frame.LIVE
    (found,) = decode(frame.SerializeToString(), 0, 0, 0, DecodeConfig())
    assert isinstance(found, RejectedMessage)
    assert (found.stage, found.reason) == ("signature", "missing_signature")


def test_a_signature_is_checked_whatever_the_frame_claims() -> None:
    (frame,) = only_frames(items("kubo-sub", kubo_line(peer_bytes(AUTHOR), b'{"typ":3,"ts":1}', b"\x07", CLAY)))
    rpc_message = message_of(frame)
    rpc_message.signature = b"no signature"
    frame.payload = b"\x12" + bytes([rpc_message.ByteSize()]) + rpc_message.SerializeToString()
    found = decoded(frame)
    assert isinstance(found, RejectedMessage)
    assert found.stage == "signature"
