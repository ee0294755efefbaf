"""StreamIDs against the vectors of js-ceramic, rust-ceramic and others."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiformats import multibase

from conftest import VECTORS
from kiln.schemas.wire.cid import cid_bytes, cid_text, write_varint
from kiln.schemas.wire.streamid import METAMODEL, StreamID, StreamIdError, stream_text

IDS = VECTORS / "ceramic" / "streamid_commitid_vectors.json"

TILE = "kjzl6cwe1jw147dvq16zluojmraqvwdmbh61dx9e0c59i344lcrsgqfohexp60s"

digests = st.binary(min_size=32, max_size=32)
usual_cids = st.builds(
    lambda head, digest: head + digest, st.sampled_from([b"\x01\x71\x12\x20", b"\x01\x85\x01\x12\x20"]), digests
)
odd_cids = st.builds(
    lambda codec, code, digest: b"\x01" + write_varint(codec) + write_varint(code) + write_varint(len(digest)) + digest,
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.binary(max_size=64),
)
cids = usual_cids | odd_cids
types = st.one_of(st.integers(0, 4), st.integers(6, 2**40))
streams = st.builds(StreamID, types, cids)


def test_all_vectors() -> None:
    vectors = json.loads(IDS.read_text())["vectors"]
    assert len(vectors) >= 22
    for vector in vectors:
        text, raw = vector["string"], bytes.fromhex(vector["bytes_hex"])
        if vector["kind"] == "StreamID":
            stream = StreamID.parse(text)
            assert stream == StreamID.from_bytes(raw) == StreamID(vector["type"], cid_bytes(vector["genesis_cid"]))
            assert (stream.text, stream.bytes) == (text, raw)
            assert stream_text(text) == text
        else:
            named = rf"this is a CommitID \(of {vector['commit_cid'] or 'the genesis'}\), not a StreamID"
            with pytest.raises(StreamIdError, match=named):
                stream_text(text)
            with pytest.raises(StreamIdError, match=named):
                StreamID.from_bytes(raw)


def test_spellings_of_the_vectors() -> None:
    for behaviour in json.loads(IDS.read_text())["behaviour"]:
        cases = [case.split(" (")[0] for case in behaviour["cases"]]
        if behaviour["expect"] == "same id":
            assert {stream_text(case) for case in cases} == {TILE}
        else:
            for case in cases:
                with pytest.raises(StreamIdError):
                    stream_text(case)


def test_metamodel() -> None:
    stream = StreamID.parse(METAMODEL)
    assert (stream.type, cid_text(stream.genesis)) == (4, "bafyxccyabfug233emvwc25rr")
    assert stream_text(METAMODEL) == METAMODEL


def test_commit_id_has_the_length_of_a_stream_id() -> None:
    text = "kjzl6kcxmxh5ptk7var1omd88sqzmw5a2l53x2qzfv0sopon2vdgug3vrsfoe80"
    assert len(text) == len(TILE)
    with pytest.raises(StreamIdError, match="CommitID"):
        stream_text(text)


@given(streams)
def test_stream_round_trip(stream: StreamID) -> None:
    assert StreamID.from_bytes(stream.bytes) == StreamID.parse(stream.text) == stream
    assert stream_text(stream.text) == stream_text("ceramic://" + stream.text) == stream.text


@given(streams)
def test_text_equals_multiformats(stream: StreamID) -> None:
    text = multibase.encode(stream.bytes, "base36")
    assert stream.text == text
    assert multibase.decode(text) == StreamID.parse(text).bytes


@given(streams, st.none() | cids)
def test_a_commit_id_is_refused(stream: StreamID, tip: bytes | None) -> None:
    with pytest.raises(StreamIdError, match="this is a CommitID"):
        stream_text(multibase.encode(stream.bytes + (tip or b"\0"), "base36"))


@given(streams, st.data())
def test_cut_short_is_refused(stream: StreamID, data: st.DataObject) -> None:
    cut = stream.bytes[: data.draw(st.integers(0, len(stream.bytes) - 1))]
    with pytest.raises(StreamIdError):
        StreamID.from_bytes(cut)
    with pytest.raises(StreamIdError):
        stream_text(multibase.encode(cut, "base36"))


@given(st.text(max_size=90) | st.text("0123456789abcdefghijklmnopqrstuvwxyz", max_size=90).map(lambda text: "k" + text))
def test_any_text_is_a_stream_or_a_stream_id_error(text: str) -> None:
    try:
        canonical = stream_text(text)
    except StreamIdError:
        return
    assert StreamID.parse(text).text == canonical


@given(
    st.integers(0, 6),
    st.sampled_from((b"\x01\x71\x12\x20", b"\x01\x85\x01\x12\x20", b"\x01\x71\x12\x21", b"\x01\x84\x01\x12\x20")),
    st.sampled_from((0, 2**256 - 1)) | st.integers(0, 2**256 - 1),
    st.integers(-2, 2),
    st.sampled_from(("", "0", "z", "A", "ª", " ")),
    st.integers(1, 63),
)
def test_texts_about_the_bounds_of_each_kind_are_read_as_the_parser_reads_them(
    kind: int, genesis: bytes, digest: int, beside: int, put: str, at: int
) -> None:
    raw = b"\xce\x01" + bytes((kind,)) + genesis + digest.to_bytes(32, "big")
    text = multibase.encode((int.from_bytes(raw) + beside).to_bytes(len(raw), "big"), "base36")
    text = text[:at] + put + text[at + len(put) :]
    try:
        expected: str | None = StreamID.parse(text).text
    except StreamIdError:
        expected = None
    try:
        found: str | None = stream_text(text)
    except StreamIdError:
        found = None
    assert found == expected


@given(digests)
def test_fast_path_equals_the_parser(digest: bytes) -> None:
    for head in ("ce010301711220", "ce010501711220", "ce01800101711220", "ce01030171121f", "ce01030185011221"):
        text = multibase.encode(bytes.fromhex(head) + digest, "base36")
        try:
            expected: str | None = StreamID.parse(text).text
        except StreamIdError:
            expected = None
        if expected is None:
            with pytest.raises(StreamIdError):
                stream_text(text)
        else:
            assert stream_text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "k",
        "k0",
        "kk",
        TILE.upper(),
        "K" + TILE[1:].upper(),
        "k0" + TILE[1:],  # a leading zero byte
        "k+" + TILE[1:],
        "k_" + TILE[1:],
        TILE[:9] + "_" + TILE[9:],
        TILE + " ",
        " " + TILE,
        TILE + "\n",
        TILE.replace("1", "１"),
        TILE + "/",
        "ceramic:/" + TILE,
        "/ceramic//ceramic/" + TILE,
        "\ud800",
        "k" + "z" * 1_000_000,
        "ceramic://k" + "z" * 5_000,
    ],
)
def test_what_is_no_stream_id_is_refused(text: str) -> None:
    with pytest.raises(StreamIdError):
        stream_text(text)


def test_event_id_is_named_as_such() -> None:
    raw = bytes.fromhex("ce01050171122020c0b871d923af4ababd169400e3651a3497e6557c06e0eca38eba16a19225acb2")
    with pytest.raises(StreamIdError, match="EventID"):
        StreamID.from_bytes(raw)
