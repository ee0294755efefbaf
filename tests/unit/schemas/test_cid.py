"""CIDs: cut by lengths, equal to `multiformats` wherever that takes a CID at all."""

from __future__ import annotations

import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiformats import CID, multibase

from kiln.schemas.reject import Rejected
from kiln.schemas.wire.cid import (
    MAX_DIGEST,
    USUAL_TEXT,
    CidError,
    check_block,
    cid_bytes,
    cid_text,
    compute_cid,
    find_cid_end,
    is_cid,
    parse_cid,
    read_sha2_256_digest,
    read_varint,
    write_varint,
)

DAG_CBOR = "bafyreigtsyqmmvgtal3y2ahcs277xjk5prvb673lb3li2i2egz2nhp6u4y"
DAG_JOSE = "bagcqceralv4232m443k6wluzhzyvhz3i3k36khnxwx5qkddqbhoev7pp7gqa"
KECCAK = "bagjqcgzaday6dzalvmy5ady2m5a5legq5zrbsnlxfc2bfxej532ds7htpova"
METAMODEL = "bafyxccyabfug233emvwc25rr"
V0 = "QmSnuWmxptJZdLJpKRarxBMS2Ju2oANVrgbr2xWbie9b2D"

# without base8: multiformats pads it, the multibase specification and libipld do not
BASES = ["base2", "base10", "base16", "base16upper", "base32", "base32upper", "base32hex", "base32pad"]
BASES += ["base32z", "base36", "base36upper", "base58btc", "base58flickr", "base64", "base64url", "base64urlpad"]

numbers = st.one_of(st.integers(0, 300), st.integers(0, 2**63 - 1))
v0_cids = st.binary(min_size=32, max_size=32).map(lambda digest: b"\x12\x20" + digest)
v1_cids = st.builds(
    lambda codec, code, digest: b"\x01" + write_varint(codec) + write_varint(code) + write_varint(len(digest)) + digest,
    numbers,
    numbers,
    st.binary(max_size=MAX_DIGEST),
)
cids = v0_cids | v1_cids


@pytest.mark.parametrize("text", [DAG_CBOR, DAG_JOSE, KECCAK, METAMODEL, V0])
def test_usual_text_is_canonical(text: str) -> None:
    assert cid_text(cid_bytes(text)) == text


@given(st.from_regex(USUAL_TEXT, fullmatch=True))
def test_a_text_of_the_usual_form_is_the_usual_text_of_a_cid(text: str) -> None:
    assert cid_text(cid_bytes(text)) == text


@given(st.sampled_from([b"\x01\x71\x12\x20", b"\x01\x85\x01\x12\x20"]), st.binary(min_size=32, max_size=32))
def test_dag_cbor_and_dag_jose_are_of_the_usual_form(head: bytes, digest: bytes) -> None:
    assert re.fullmatch(USUAL_TEXT, cid_text(head + digest))


def test_metamodel_whose_hash_code_is_no_hash() -> None:
    raw = cid_bytes(METAMODEL)
    assert raw.hex() == "0171710b0009686d6f64656c2d7631"
    assert find_cid_end(b"\xce\x01\x04" + raw, 3) == 18


def test_codec_zero() -> None:
    raw = b"\x01\x00\x12\x20" + bytes(range(32))
    assert cid_text(raw).startswith("baeabei")
    assert cid_bytes(cid_text(raw)) == raw


@given(cids)
def test_round_trip(raw: bytes) -> None:
    assert cid_bytes(cid_text(raw)) == raw
    assert is_cid(raw)


@given(cids, st.binary(), st.binary())
def test_end_is_found_inside_other_bytes(raw: bytes, before: bytes, after: bytes) -> None:
    assert find_cid_end(before + raw + after, len(before)) == len(before) + len(raw)


@given(cids, st.data())
def test_cut_short_is_refused(raw: bytes, data: st.DataObject) -> None:
    cut = raw[: data.draw(st.integers(0, len(raw) - 1))]
    with pytest.raises(CidError):
        find_cid_end(cut)
    assert not is_cid(cut)
    with pytest.raises(CidError):
        cid_text(cut)


@given(cids, st.binary(min_size=1, max_size=3))
def test_trailing_bytes_are_refused(raw: bytes, more: bytes) -> None:
    assert not is_cid(raw + more)
    with pytest.raises(CidError, match="follow"):
        cid_text(raw + more)
    with pytest.raises(CidError):
        cid_bytes(multibase.encode(raw + more, "base32"))


@given(v1_cids, st.sampled_from(BASES))
def test_every_base_gives_the_same_bytes_as_multiformats(raw: bytes, base: str) -> None:
    text = multibase.encode(raw, base)
    assert cid_bytes(text) == multibase.decode(text) == raw


@given(
    st.sampled_from(["dag-cbor", "dag-jose", "dag-pb", "raw"]), st.binary(), st.sampled_from(["base32", "base58btc"])
)
def test_agrees_with_multiformats_on_real_cids(codec: str, block: bytes, base: str) -> None:
    theirs = CID(base, 1, codec, ("sha2-256", hashlib.sha256(block).digest()))
    assert cid_bytes(str(theirs)) == bytes(theirs)
    assert cid_text(bytes(theirs)) == str(theirs.set(base="base32"))
    assert compute_cid(block, theirs.codec.code) == bytes(theirs)


@given(v0_cids)
def test_version_0_agrees_with_multiformats(raw: bytes) -> None:
    assert cid_text(raw) == str(CID("base58btc", 0, "dag-pb", raw))
    assert bytes(CID.decode(cid_text(raw))) == raw


@given(st.text(max_size=80) | st.text("abcdefghijklmnopqrstuvwxyz234567Q", max_size=80).map(lambda text: "b" + text))
def test_any_text_is_a_cid_or_a_cid_error(text: str) -> None:
    try:
        raw = cid_bytes(text)
    except CidError:
        return
    assert is_cid(raw)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "b",
        "garbage",
        "\ud800",
        "b\ud800",
        "\x00\x01\x71\x12\x20" + "a" * 32,  # the identity "base"
        "z" + V0,  # version 0 with a multibase prefix
        "Q" + DAG_CBOR,
        DAG_CBOR + "=",
        " " + DAG_CBOR,
        DAG_CBOR[:-1],
        DAG_CBOR[:-1] + "z",  # bits after the last byte that are not zero
        "kjzl6cwe1jw145as2el62s5k2n5xwij7snqu1mngluhpr05xy5wylfswe1zvq39",  # a StreamID
        "b" + "a" * 1_000_000,
        "z" + "z" * 1_000_000,
    ],
)
def test_what_is_no_cid_is_refused(text: str) -> None:
    with pytest.raises(CidError):
        cid_bytes(text)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "no end"),
        (b"\x00\x71\x12\x20" + bytes(32), "version 0"),
        (b"\x02\x71\x12\x20" + bytes(32), "version 2"),
        (b"\x81\x00\x71\x12\x20" + bytes(32), "shortest"),  # 1 in two bytes
        (b"\x01" + b"\xff" * 9 + b"\x01\x12\x20" + bytes(32), "no end"),
        (b"\x01\x71\x12" + write_varint(MAX_DIGEST + 1) + bytes(MAX_DIGEST + 1), "at most 128"),
        (b"\x01\x71\x12\x20" + bytes(31), "1 bytes are missing"),
    ],
)
def test_error_says_what_is_wrong(raw: bytes, words: str) -> None:
    with pytest.raises(CidError, match=words):
        cid_text(raw)


def test_the_longest_cid_is_accepted_as_bytes_and_as_text() -> None:
    largest = write_varint(2**63 - 1)
    raw = b"\x01" + largest * 2 + write_varint(MAX_DIGEST) + bytes(MAX_DIGEST)
    assert cid_bytes(multibase.encode(raw, "base2")) == cid_bytes(cid_text(raw)) == raw


@pytest.mark.parametrize("head", [b"\x01\x71\x12\x1f", b"\x01\x71\x12\x21", b"\x01\x85\x01\x12\x1f"])
def test_of_usual_size_but_of_another_digest_length(head: bytes) -> None:
    raw = head + bytes(32)
    with pytest.raises(CidError):
        cid_text(raw)
    with pytest.raises(CidError):
        cid_bytes(multibase.encode(raw, "base32"))


@given(st.integers(0, 2**63 - 1), st.binary(max_size=3))
def test_varint_round_trip(value: int, after: bytes) -> None:
    raw = write_varint(value)
    assert read_varint(raw + after, 0) == (value, len(raw))


def test_block_cid_of_a_real_block() -> None:
    # the empty map, whose CID any IPLD tool prints
    assert cid_text(compute_cid(b"\xa0")) == "bafyreigbtj4x7ip5legnfznufuopl4sg4knzc2cof6duas4b3q2fy6swua"


@given(cids)
def test_parts(raw: bytes) -> None:
    version, codec, code, digest = parse_cid(raw)
    if version == 0:
        assert (codec, code, b"\x12\x20" + digest) == (0x70, 0x12, raw)
    else:
        assert version == 1
        assert b"\x01" + b"".join(map(write_varint, (codec, code, len(digest)))) + digest == raw
    with pytest.raises(CidError):
        parse_cid(raw + b"\x00")


@given(st.binary(max_size=200), st.sampled_from([0x00, 0x51, 0x55, 0x70, 0x71, 0x85]), st.data())
def test_a_block_is_the_one_that_its_cid_names_and_no_other(block: bytes, codec: int, data: st.DataObject) -> None:
    v1, v0 = compute_cid(block, codec), b"\x12\x20" + hashlib.sha256(block).digest()
    assert check_block(block, v1) is check_block(block, v0) is None
    at = data.draw(st.integers(0, len(block)))
    other = block[:at] + data.draw(st.binary(min_size=1, max_size=2)) + block[at:]
    for cid in (v1, v0):
        fault = check_block(other, cid)
        assert fault is not None
        assert fault.reason == "block_hash_mismatch"


@pytest.mark.parametrize(
    ("cid", "reason"),
    [
        (b"\x01\x71\x00\x01\xa0", "cid_hash_unsupported"),  # identity: its digest is the block
        (b"\x01\x71\x12\x00", "cid_hash_unsupported"),  # any block would do
        (b"\x01\x71\x12\x1f" + hashlib.sha256(b"\xa0").digest()[:31], "cid_hash_unsupported"),
        (b"\x01\x71\x13\x40" + hashlib.sha512(b"\xa0").digest(), "cid_hash_unsupported"),
        (cid_bytes(METAMODEL), "cid_hash_unsupported"),
        (b"", "cid_malformed"),
        (compute_cid(b"\xa0") + b"\x00", "cid_malformed"),
    ],
)
def test_what_no_block_can_be_checked_against(cid: bytes, reason: str) -> None:
    fault = check_block(b"\xa0", cid)
    assert fault is not None
    assert fault.reason == reason
    assert isinstance(read_sha2_256_digest(cid), Rejected)
