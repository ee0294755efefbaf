"""Pubsub messages: every era as others wrote it, and no bytes that raise."""

from __future__ import annotations

import json
from typing import Any, get_args  # Any: JSON of several shapes

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiformats import multibase

from conftest import VECTORS
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.cid import CidError, cid_bytes, cid_text, compute_cid
from kiln.schemas.wire.pubsub import (
    MAX_DATA,
    REASONS,
    Era,
    PubsubMessage,
    compute_query_id,
    format_query_id,
    read_message,
    write_batch_update,
    write_keepalive,
    write_query,
    write_response,
    write_response_2020,
    write_update,
)
from kiln.schemas.wire.streamid import METAMODEL, StreamID
from kiln.schemas.wire.topics import MAX_KEY, Separator, TopicError, encode_separator_value

STREAM = "kjzl6kcym7w8y77nkulpqe1jsv2s5hxzh5mz1yhtmq2hyjsze78ejn9cxmxwecg"
TIP = "bagcqceralv4232m443k6wluzhzyvhz3i3k36khnxwx5qkddqbhoev7pp7gqa"
MODEL = "kjzl6hvfrbw6c8x4r08h39j30tl3a19x0r80i15hubw8afv4fu2w9m9owz4cbol"
BATCH = "bafyreifqd2nn3hpa3ikwlbvlt7h7ovbbi5ml7jcrwdhfzptgxsaldjvyui"
V0 = "QmSnuWmxptJZdLJpKRarxBMS2Ju2oANVrgbr2xWbie9b2D"
COMMIT = "k3y52l7qbv1frxwipl4hp7e6jlu4f6u8upm2xv0irmedfkm5cnutmezzi3u7mytj4"

tips = st.builds(
    lambda block, codec: cid_text(compute_cid(block, codec)), st.binary(max_size=8), st.sampled_from([0x71, 0x85])
)
batches = st.builds(
    lambda block, codec: cid_text(compute_cid(block, codec)), st.binary(max_size=8), st.sampled_from([0x71, 0x51, 0x55])
)
genesis = st.builds(compute_cid, st.binary(max_size=8), st.sampled_from([0x71, 0x85]))
streams = st.builds(lambda kind, cid: StreamID(kind, cid).text, st.integers(0, 4), genesis)
streams_2020 = st.builds(lambda kind, cid: StreamID(kind, cid).text, st.integers(0, 1), genesis)
texts = st.text(st.characters(codec="utf-8"), max_size=20)


def read(**fields: object) -> PubsubMessage | Rejected:
    return read_message(json.dumps(fields).encode())


def reason(data: bytes, batch_typ: int = 3) -> str | None:
    answer = read_message(data, batch_typ)
    return answer.reason if isinstance(answer, Rejected) else None


def lines(name: str) -> list[dict[str, Any]]:  # JSON of several shapes
    return [json.loads(line) for line in (VECTORS / "ceramic" / name).read_text().splitlines()]


def test_captured_messages() -> None:
    names = {0: "UPDATE", 1: "QUERY", 2: "RESPONSE", 3: "KEEPALIVE"}
    captured = lines("captured_messages.jsonl")
    assert len(captured) == 9
    for vector in captured:
        fields = vector.get("fields") or json.loads(vector["wire"])
        wire = vector["wire"].encode() if "wire" in vector else json.dumps(fields).encode()
        message = read_message(wire)
        assert isinstance(message, PubsubMessage), vector["id"]
        assert message.type == names[fields["typ"]]
        assert message.stream == (fields.get("stream") or fields.get("doc"))
        assert (message.tip, message.tips) == (fields.get("tip"), fields.get("tips"))
        assert (message.query_id, message.ts) == (fields.get("id"), fields.get("ts"))
        if "stream_type" in vector:
            assert message.stream is not None
            assert StreamID.parse(message.stream).type == vector["stream_type"]
            assert cid_text(StreamID.parse(message.stream).genesis) == vector["genesis_cid"]


def test_messages_of_other_codecs_tests() -> None:
    # rust-ceramic takes any string for a CID, and its examples put a StreamID there; js-ceramic rejects those, as here
    rejected = {
        "rust-update-min": "bad_tip",
        "rust-update-max": "bad_tip",
        "rust-response": "bad_tip",
        "js-invalid-typ": "unknown_typ",
    }
    vectors = lines("codec_test_messages.jsonl")
    assert len(vectors) == 14
    for vector in vectors:
        message = read_message(vector["wire"].encode())
        if vector["id"] in rejected:
            assert isinstance(message, Rejected), vector["id"]
            assert message.reason == rejected[vector["id"]]
        else:
            assert isinstance(message, PubsubMessage), (vector["id"], message)
            assert message.type == vector["kind"]


def test_query_ids() -> None:
    for vector in json.loads((VECTORS / "ceramic" / "query_id_vectors.json").read_text()):
        era: Era = "doc" if vector["hashed_key"] == "doc" else "stream"
        raw = compute_query_id(vector["stream"], era)
        assert format_query_id(raw) == vector["id"]
        assert format_query_id(raw, decimal=True) == vector["id_decimal_list"]


def test_writer_gives_the_captured_bytes() -> None:
    by_id = {vector["id"]: vector for vector in lines("captured_messages.jsonl")}
    fields = by_id["cap-2021-07-13-update"]
    sent = json.loads(fields["wire"])
    assert write_update(sent["stream"], sent["tip"], era="doc+stream") == fields["wire"].encode()
    query = by_id["cap-2021-07-13-query"]["wire"].encode()
    assert write_query(sent["stream"], era="doc+stream") == query


def test_update_of_today() -> None:
    wire = f'{{"typ":0,"stream":"{STREAM}","tip":"{TIP}","model":"{MODEL}"}}'.encode()
    assert write_update(STREAM, TIP, MODEL) == wire
    assert read_message(wire) == PubsubMessage("UPDATE", stream=STREAM, tip=TIP, model=MODEL)


def test_batch_update_of_the_cip() -> None:
    wire = f'{{"typ":3,"sep":"model/{MODEL}","batch":"{BATCH}"}}'.encode()
    assert len(wire) == 157
    assert write_batch_update(Separator("model", MODEL), BATCH) == wire
    assert read_message(wire) == PubsubMessage("BATCH_UPDATE", sep=f"model/{MODEL}", batch=BATCH)


def test_metamodel_as_model() -> None:
    assert read_message(write_update(STREAM, TIP, METAMODEL)) == PubsubMessage("UPDATE", STREAM, TIP, METAMODEL)


@given(streams, tips, st.none() | streams)
def test_update_round_trip(stream: str, tip: str, model: str | None) -> None:
    expected = PubsubMessage("UPDATE", stream, tip, model)
    assert read_message(write_update(stream, tip, model)) == expected
    assert read_message(write_update(stream, tip, model, "doc+stream")) == expected
    assert read_message(write_update(stream, tip, None, "doc")) == PubsubMessage("UPDATE", stream, tip)


@given(streams, st.none() | texts, st.sampled_from(["doc", "doc+stream", "stream"]))
def test_query_round_trip(stream: str, query_id: str | None, era: Era) -> None:
    message = read_message(write_query(stream, query_id, era))
    expected = format_query_id(compute_query_id(stream, era)) if query_id is None else query_id
    assert message == PubsubMessage("QUERY", stream, query_id=expected)


@given(texts, st.dictionaries(streams, tips, max_size=4))
def test_response_round_trip(query_id: str, answer: dict[str, str]) -> None:
    assert read_message(write_response(query_id, answer)) == PubsubMessage("RESPONSE", query_id=query_id, tips=answer)


@given(st.integers(-8_640_000_000_000_000, 8_640_000_000_000_000), st.none() | texts, st.none() | texts)
def test_keepalive_round_trip(ts: int, ver: str | None, ipfs_ver: str | None) -> None:
    assert read_message(write_keepalive(ts, ver, ipfs_ver)) == PubsubMessage(
        "KEEPALIVE", ts=ts, ver=ver, ipfs_ver=ipfs_ver
    )


@given(
    st.text(st.characters(codec="utf-8"), min_size=1), st.binary(min_size=1, max_size=50), batches, st.integers(3, 99)
)
def test_batch_update_round_trip(key: str, value: bytes, cid: str, typ: int) -> None:
    separator = Separator(key, encode_separator_value(value))
    expected = PubsubMessage("BATCH_UPDATE", sep=f"{key}/{separator.value}", batch=cid)
    assert read_message(write_batch_update(separator, cid, typ), typ) == expected


@given(streams_2020, tips)
def test_2020_round_trip(stream: str, tip: str) -> None:
    assert read_message(write_update(stream, tip, era="2020")) == PubsubMessage("UPDATE", stream, tip)
    assert read_message(write_query(stream, era="2020")) == PubsubMessage("QUERY", stream)
    assert read_message(write_response_2020(stream, tip)) == PubsubMessage("RESPONSE", tips={stream: tip})


@pytest.mark.parametrize(("doctype", "kind"), [("tile", 0), ("caip10-link", 1)])
@pytest.mark.parametrize("prefix", ["/ceramic/", "ceramic://"])
def test_2020_document_ids(doctype: str, kind: int, prefix: str) -> None:
    stream = StreamID(kind, compute_cid(b"")).text
    document = prefix + cid_text(compute_cid(b""))
    assert read(typ=0, id=document, cid=V0, doctype=doctype) == PubsubMessage("UPDATE", stream, V0)


def test_writers_refuse_what_their_era_had_not() -> None:
    with pytest.raises(ValueError, match="no field for a model"):
        write_update(STREAM, TIP, MODEL, "doc")
    with pytest.raises(ValueError, match="did not exist in 2020"):
        write_update(STREAM, TIP, era="2020")
    with pytest.raises(ValueError, match="no field for a query id"):
        write_query(STREAM, "0", "2020")
    with pytest.raises(ValueError, match="another message"):
        write_batch_update(Separator("model", MODEL), BATCH, 2)
    with pytest.raises(TopicError):
        write_batch_update(Separator("", MODEL), BATCH)
    for cid in (TIP, V0):
        with pytest.raises(CidError, match="not the CID of a batch block"):
            write_batch_update(Separator("model", MODEL), cid)


@pytest.mark.parametrize("spelling", [f"ceramic://{STREAM}", f"/ceramic/{STREAM}"])
def test_ids_become_canonical(spelling: str) -> None:
    base58 = "zdpuAyvkgEDQm9TenwGkd5eNaosSxjgEYd8QatfPetgB1CdEZ"  # the CID specification's example
    expected = PubsubMessage("UPDATE", STREAM, "bafyreigbtj4x7ip5legnfznufuopl4sg4knzc2cof6duas4b3q2fy6swua", STREAM)
    tip = "f" + compute_cid(b"\xa0").hex()
    assert read(typ=0, stream=spelling, tip=tip, model=spelling) == expected
    assert read(typ=2, id="1", tips={spelling: V0}) == PubsubMessage("RESPONSE", query_id="1", tips={STREAM: V0})
    other = read(typ=0, stream=STREAM, tip=base58)
    assert isinstance(other, PubsubMessage)
    assert other.tip is not None
    assert other.tip.startswith("bafyrei")


def test_doc_is_read_where_stream_is_missing() -> None:
    expected = PubsubMessage("UPDATE", STREAM, TIP)
    assert read(typ=0, doc=STREAM, tip=TIP) == expected
    assert read(typ=0, stream=None, doc=STREAM, tip=TIP) == expected
    assert read(typ=0, stream="", doc=STREAM, tip=TIP) == expected
    assert read(typ=0, stream=STREAM, doc=MODEL, tip=TIP) == expected


def update_with(typ: str) -> bytes:
    return f'{{"typ":{typ},"stream":"{STREAM}","tip":"{TIP}"}}'.encode()


@pytest.mark.parametrize("typ", ["0", "0.0", "-0", "0e0", "0E+5", "-0.0"])
def test_numbers_are_compared_by_value(typ: str) -> None:
    assert read_message(update_with(typ)) == PubsubMessage("UPDATE", STREAM, TIP)


@pytest.mark.parametrize("typ", ["1", "1.0", "1e0", "10e-1"])
def test_one_in_any_spelling_is_a_query(typ: str) -> None:
    assert read_message(f'{{"typ":{typ},"stream":"{STREAM}","id":"0"}}'.encode()) == PubsubMessage(
        "QUERY", STREAM, query_id="0"
    )


@pytest.mark.parametrize(
    "typ", ["true", "false", "null", '"0"', "[0]", "{}", "-1", "0.5", "5", "1e300", str(2**64), "9" * 400]
)
def test_other_typs(typ: str) -> None:
    assert reason(update_with(typ)) in ("unknown_typ", "invalid_json")


@pytest.mark.parametrize("typ", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "00", "+0", "0x0"])
def test_what_is_no_json_number(typ: str) -> None:
    assert reason(update_with(typ)) == "invalid_json"


def test_last_of_equal_keys_wins() -> None:
    wire = f'{{"typ":1,"tip":"x","stream":"{MODEL}","tip":"{TIP}","stream":"{STREAM}","typ":0}}'.encode()
    assert read_message(wire) == PubsubMessage("UPDATE", STREAM, TIP)


def test_key_order_is_free_and_unknown_keys_are_tolerated() -> None:
    assert read(tip=TIP, anchorService=None, stream=STREAM, x=[{}], model=MODEL, typ=0) == PubsubMessage(
        "UPDATE", STREAM, TIP, MODEL
    )


def test_text_decoding_is_that_of_textdecoder() -> None:
    wire = write_keepalive(5, "2.0")
    expected = PubsubMessage("KEEPALIVE", ts=5, ver="2.0")
    assert read_message(b"\xef\xbb\xbf" + wire) == expected
    assert reason(b"\xef\xbb\xbf\xef\xbb\xbf" + wire) == "invalid_json"
    assert read_message(wire.replace(b"2.0", b"2\xff\xe2\x82x")) == PubsubMessage(
        "KEEPALIVE", ts=5, ver="2\ufffd\ufffdx"
    )
    assert read_message(b" \t\r\n" + wire + b"\n") == expected
    assert reason(b"\x00" + wire) == "invalid_json"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "unknown_typ"),
        ({"typ": "x" * 1_000_000}, "unknown_typ"),
        ({"typ": 0}, "missing_stream"),
        ({"typ": 0, "stream": STREAM}, "missing_tip"),
        ({"typ": 0, "stream": None, "tip": TIP}, "missing_stream"),
        ({"typ": 0, "stream": 5, "doc": STREAM, "tip": TIP}, "bad_stream"),
        ({"typ": 0, "stream": COMMIT, "tip": TIP}, "bad_stream"),
        ({"typ": 0, "stream": f"{STREAM}?commit=0", "tip": TIP}, "bad_stream"),
        ({"typ": 0, "stream": "\x00", "tip": TIP}, "bad_stream"),
        ({"typ": 0, "stream": "k" * 1_000_000, "tip": TIP}, "bad_stream"),
        ({"typ": 0, "stream": STREAM, "tip": "b" * 1_000_000}, "bad_tip"),
        ({"typ": 0, "stream": STREAM, "tip": None}, "bad_tip"),
        ({"typ": 0, "stream": STREAM, "tip": STREAM}, "bad_tip"),
        ({"typ": 0, "stream": STREAM, "tip": ["a"] * 100_000}, "bad_tip"),
        ({"typ": 0, "stream": STREAM, "tip": TIP, "model": None}, "bad_model"),
        ({"typ": 0, "stream": STREAM, "tip": TIP, "model": ""}, "bad_model"),
        ({"typ": 0, "stream": STREAM, "tip": TIP, "model": COMMIT}, "bad_model"),
        ({"typ": 0, "id": f"/ceramic/{TIP}", "cid": TIP, "doctype": "3id"}, "unknown_doctype"),
        ({"typ": 0, "id": f"/ceramic/{TIP}", "cid": TIP, "doctype": None}, "unknown_doctype"),
        ({"typ": 0, "id": f"/ceramic/{TIP}", "cid": TIP, "doctype": {}}, "unknown_doctype"),
        ({"typ": 0, "id": f"/ceramic/{TIP}", "cid": TIP}, "missing_stream"),
        ({"typ": 0, "id": f"/ceramic/{TIP}", "doctype": "tile"}, "missing_tip"),
        ({"typ": 0, "id": f"/ceramic/{TIP}", "tip": TIP, "doctype": "tile"}, "missing_tip"),
        ({"typ": 0, "id": TIP, "cid": TIP, "doctype": "tile"}, "bad_stream"),
        ({"typ": 0, "id": f"/ceramic/{TIP}?version=0", "cid": TIP, "doctype": "tile"}, "bad_stream"),
        ({"typ": 0, "id": 5, "cid": TIP, "doctype": "tile"}, "bad_stream"),
        ({"typ": 0, "cid": TIP, "doctype": "tile"}, "missing_stream"),
        ({"typ": 1, "stream": STREAM}, "missing_id"),
        ({"typ": 1, "stream": STREAM, "id": 0}, "bad_id"),
        ({"typ": 1, "id": "0"}, "missing_stream"),
        ({"typ": 2, "tips": {}}, "missing_id"),
        ({"typ": 2, "id": "0"}, "missing_tips"),
        ({"typ": 2, "id": "0", "tips": None}, "bad_tips"),
        ({"typ": 2, "id": "0", "tips": []}, "bad_tips"),
        ({"typ": 2, "id": "0", "tips": {"garbage": TIP}}, "bad_tips"),
        ({"typ": 2, "id": "0", "tips": {STREAM: [TIP]}}, "bad_tip"),
        ({"typ": 2, "id": "0", "tips": {STREAM: TIP, MODEL: "x"}}, "bad_tip"),
        ({"typ": 2, "id": "0", "tips": {STREAM: TIP, f"/ceramic/{STREAM}": V0}}, "conflicting_tips"),
        ({"typ": 2, "id": f"/ceramic/{TIP}", "doctype": "tile"}, "missing_tip"),
        ({"typ": 2, "id": TIP, "cid": TIP, "doctype": "tile"}, "bad_stream"),
        ({"typ": 3}, "unknown_shape"),
        ({"typ": 3, "ts": True}, "unknown_shape"),
        ({"typ": 3, "ts": "5"}, "unknown_shape"),
        ({"typ": 3, "sep": f"model/{MODEL}"}, "unknown_shape"),
        ({"typ": 3, "sep": f"model/{MODEL}", "batch": None}, "unknown_shape"),
        ({"typ": 3, "sep": f"model/{MODEL}", "batch": BATCH, "ts": 5}, "ambiguous_shape"),
        ({"typ": 3, "sep": f"model/{MODEL}", "batch": STREAM}, "bad_batch"),
        ({"typ": 3, "sep": MODEL, "batch": BATCH}, "bad_separator"),
        ({"typ": 3, "sep": f"/{MODEL}", "batch": BATCH}, "bad_separator"),
        ({"typ": 3, "sep": f"model/{MODEL}/", "batch": BATCH}, "bad_separator"),
        ({"typ": 3, "sep": f"model/{BATCH}", "batch": BATCH}, "bad_separator"),
        ({"typ": 3, "ts": 8_640_000_000_000_001}, "bad_ts"),
        ({"typ": 3, "ts": 1e300}, "bad_ts"),
        ({"typ": 3, "ts": 5, "ver": None}, "bad_version"),
        ({"typ": 3, "ts": 5, "ver": "2", "ipfsVer": 3}, "bad_version"),
    ],
)
def test_reasons(fields: dict[str, object], expected: str) -> None:
    answer = read(**fields)
    assert isinstance(answer, Rejected)
    assert answer.reason == expected
    assert len(answer.detail) < 400


@pytest.mark.parametrize("data", [b"", b"{", b"5", b'"x"', b"null", b"[]", b"[{}]", b"true", b"NaN"])
def test_what_is_no_object(data: bytes) -> None:
    assert reason(data) in ("not_an_object", "invalid_json")


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 1_000_000,
        b"[" * 2_000 + b"]" * 2_000,
        b'{"typ":' * 100_000,
        b'{"a":"\\ud800"}',
        b'{"\\udc00\\ud800":1}',
        b'"' + b"\xff" * 1_000_000,
        b'{"typ":' + b"9" * 1_000_000 + b"}",
        b"\xed\xa0\x80",
        b"\xfe\xff" + '{"typ":0}'.encode("utf-16-be"),
        bytes(1_000_000),
    ],
)
def test_hostile_bytes_are_invalid_json(data: bytes) -> None:
    assert reason(data) == "invalid_json"


def test_empty_tips_are_a_response() -> None:
    assert read(typ=2, id="0", tips={}) == PubsubMessage("RESPONSE", query_id="0", tips={})


def test_two_spellings_with_one_tip_are_one_entry() -> None:
    message = read(typ=2, id="0", tips={STREAM: TIP, f"/ceramic/{STREAM}": TIP})
    assert message == PubsubMessage("RESPONSE", query_id="0", tips={STREAM: TIP})


def test_a_separator_without_its_prefix_gets_it() -> None:
    wire = orjson.dumps({"typ": 3, "sep": f"model/{MODEL[1:]}", "batch": BATCH})
    assert read_message(wire) == PubsubMessage("BATCH_UPDATE", sep=f"model/{MODEL}", batch=BATCH)


@pytest.mark.parametrize("typ", [3, 4, 77])
def test_batch_of_every_number_is_read_and_keepalive_has_one_number(typ: int) -> None:
    batch = orjson.dumps({"typ": typ, "sep": f"model/{MODEL}", "batch": BATCH})
    keepalive = read_message(orjson.dumps({"typ": typ, "ts": 5.0}), 77)
    assert read_message(batch, 77) == PubsubMessage("BATCH_UPDATE", sep=f"model/{MODEL}", batch=BATCH)
    if typ == 3:
        assert keepalive == PubsubMessage("KEEPALIVE", ts=5)
    else:
        assert isinstance(keepalive, Rejected)
        assert keepalive.reason == "unknown_shape"
    if typ == 77:
        assert reason(batch) == "unknown_typ"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"sep": f"model/{MODEL}", "batch": BATCH}, "BATCH_UPDATE"),
        ({"sep": f"model/{MODEL}", "batch": BATCH, "ver": "1", "more": {}}, "BATCH_UPDATE"),
        ({"sep": f"model/{MODEL}", "batch": BATCH, "ts": None}, "BATCH_UPDATE"),
        ({"sep": f"model/{MODEL}", "batch": BATCH, "ts": "5"}, "BATCH_UPDATE"),
        ({"ts": 5}, "KEEPALIVE"),
        ({"ts": 5, "ver": "2.0.4"}, "KEEPALIVE"),
        ({"ts": 5, "ver": "2.35.0", "ipfsVer": "0.20"}, "KEEPALIVE"),
        ({"ts": 5, "sep": f"model/{MODEL}"}, "KEEPALIVE"),
        ({"ts": 5, "batch": BATCH}, "KEEPALIVE"),
        ({"ts": 5, "sep": None, "batch": BATCH}, "KEEPALIVE"),
        ({"ts": 5, "sep": f"model/{MODEL}", "batch": BATCH}, "ambiguous_shape"),
        ({"ts": 5.5, "sep": "", "batch": ""}, "ambiguous_shape"),
        ({"sep": "", "batch": ""}, "bad_separator"),
        ({"sep": f"model/{MODEL}", "batch": ""}, "bad_batch"),
        ({"sep": {"key": "model"}, "batch": BATCH}, "unknown_shape"),
        ({"sep": f"model/{MODEL}", "batch": {"/": BATCH}}, "unknown_shape"),
        ({"stream": STREAM, "tip": TIP}, "unknown_shape"),
        ({"typ": True, "ts": 5}, "unknown_typ"),
        ({"typ": "3", "ts": 5}, "unknown_typ"),
        ({"typ": 3.0, "sep": f"model/{MODEL}", "batch": BATCH}, "BATCH_UPDATE"),
    ],
)
def test_typ_3_is_told_by_shape(fields: dict[str, object], expected: str) -> None:
    answer = read(**{"typ": 3, **fields})
    assert (answer.reason if isinstance(answer, Rejected) else answer.type) == expected


@pytest.mark.parametrize(
    ("sep", "expected"),
    [
        (f"model/{MODEL}", None),
        (f"a/b//c/{MODEL}", None),
        (f"//{MODEL}", None),
        (f"ключ/{MODEL}", None),
        ("model/k0", None),  # one zero byte
        ("model/k00a", None),  # leading zeros are bytes of the value, so this is another one than k0a
        (f"{'k' * MAX_KEY}/{MODEL}", None),
        (f"{'k' * (MAX_KEY + 1)}/{MODEL}", "bad_separator"),
        (f"model/{MODEL.upper()}", "bad_separator"),
        (f"model/k{MODEL[1:].upper()}", "bad_separator"),
        (f"model/{MODEL}=", "bad_separator"),
        (f"model/{MODEL} ", "bad_separator"),
        ("model/k", "bad_separator"),
        (MODEL, "bad_separator"),
    ],
)
def test_spellings_of_a_separator(sep: str, expected: str | None) -> None:
    wire = orjson.dumps({"typ": 3, "sep": sep, "batch": BATCH})
    assert reason(wire) == expected
    if expected is None:
        assert read_message(wire) == PubsubMessage("BATCH_UPDATE", sep=sep, batch=BATCH)


RAW_BATCH = cid_bytes(BATCH)


@pytest.mark.parametrize("base", ["base16", "base32upper", "base36", "base58btc", "base64url", "base64urlpad"])
def test_a_batch_cid_of_any_base_is_one_cid(base: str) -> None:
    assert read(typ=3, sep=f"model/{MODEL}", batch=multibase.encode(RAW_BATCH, base)) == PubsubMessage(
        "BATCH_UPDATE", sep=f"model/{MODEL}", batch=BATCH
    )


@pytest.mark.parametrize(
    ("cid", "expected"),
    [
        (cid_text(compute_cid(b"", 0x71)), None),
        (cid_text(compute_cid(b"", 0x51)), None),  # cbor, raw: an honest codec for a block with byte keys
        (cid_text(compute_cid(b"", 0x55)), None),
        (cid_text(compute_cid(b"", 0x85)), "unusable_batch"),  # dag-jose
        (cid_text(compute_cid(b"", 0x70)), "unusable_batch"),  # dag-pb
        (cid_text(compute_cid(b"", 0x0129)), "unusable_batch"),  # dag-json
        (V0, "unusable_batch"),
        (cid_text(b"\x01\x71\x1b\x20" + bytes(32)), "unusable_batch"),  # keccak-256
        (cid_text(b"\x01\x71\x13\x40" + bytes(64)), "unusable_batch"),  # sha2-512
        (cid_text(b"\x01\x71\x12\x10" + bytes(16)), "unusable_batch"),  # sha2-256, cut short
        (cid_text(b"\x01\x71\x00\x01\xa0"), "unusable_batch"),  # identity
        (cid_text(StreamID.parse(METAMODEL).genesis), "unusable_batch"),
        (f"z{V0}", "bad_batch"),  # v0 has no multibase prefix
        (BATCH[:-1], "bad_batch"),
        (BATCH + "=", "bad_batch"),
        (f"/ipfs/{BATCH}", "bad_batch"),
        (STREAM, "bad_batch"),
    ],
)
def test_a_batch_cid_names_a_block_that_can_be_checked_and_read(cid: str, expected: str | None) -> None:
    assert reason(orjson.dumps({"typ": 3, "sep": f"model/{MODEL}", "batch": cid})) == expected


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([STREAM, TIP, MODEL, V0, "tile", f"/ceramic/{TIP}", f"m/{MODEL}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([STREAM, "x"]), inner, max_size=2),
    max_leaves=4,
)
names = st.sampled_from(
    ["stream", "doc", "tip", "model", "id", "cid", "doctype", "tips", "ts", "ver", "ipfsVer", "sep", "batch"]
)
objects = st.builds(
    lambda typ, fields: {"typ": typ, **fields},
    st.integers(-1, 5) | st.booleans(),
    st.dictionaries(names, values, max_size=6),
)


def assert_read_or_rejected(data: bytes) -> None:
    answer = read_message(data)
    if isinstance(answer, Rejected):
        assert answer.reason in REASONS
        (answer.reason + answer.detail).encode()
        assert len(answer.detail) < 400
    else:
        for name in answer.__struct_fields__:
            orjson.dumps(getattr(answer, name))


@given(objects)
def test_any_object_is_read_or_rejected(message: dict[str, object]) -> None:
    assert_read_or_rejected(json.dumps(message).encode())


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_rejected(data: bytes) -> None:
    assert_read_or_rejected(data)


@given(objects, st.data())
def test_damaged_messages_are_read_or_rejected(message: dict[str, object], data: st.DataObject) -> None:
    wire = bytearray(json.dumps(message).encode())
    wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    assert_read_or_rejected(bytes(wire[: data.draw(st.integers(0, len(wire)))]))


def test_reason_codes_are_snake_case_and_distinct() -> None:
    assert len(set(REASONS)) == len(REASONS)
    assert all(code == code.lower() and code.replace("_", "").isalpha() for code in REASONS)
    assert set(get_args(Era)) == {"2020", "doc", "doc+stream", "stream"}


def test_data_is_read_up_to_its_bound_and_no_further() -> None:
    """An object of 270,000 keys would take 150 ms of CPU."""
    update = write_update(STREAM, TIP, MODEL)
    padded = update + b" " * (MAX_DATA - len(update))
    assert isinstance(read_message(padded), PubsubMessage)
    assert reason(padded + b" ") == "data_too_large"
