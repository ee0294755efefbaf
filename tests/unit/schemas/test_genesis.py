"""The separator in a genesis: against events of other implementations, every kind of header, and damaged blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any  # JSON of several shapes

import cbor2
import dag_cbor
import libipld
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiformats import CID, multibase

from conftest import VECTORS
from kiln.schemas.reject import Rejected
from kiln.schemas.wire import genesis as genesis_module
from kiln.schemas.wire.cid import DAG_CBOR, DAG_JOSE, check_block, cid_bytes, cid_text, compute_cid
from kiln.schemas.wire.genesis import REASONS, WITHOUT, Genesis, NeedsBlock, read_genesis
from kiln.schemas.wire.streamid import METAMODEL, StreamID
from kiln.schemas.wire.topics import MAX_KEY, Separator, encode_separator_value

MODEL = StreamID.parse("kjzl6hvfrbw6c8x4r08h39j30tl3a19x0r80i15hubw8afv4fu2w9m9owz4cbol")
BY_MODEL = Separator("model", MODEL.text)
NONE = object()


def write(event: object, codec: int = DAG_CBOR) -> tuple[bytes, bytes]:
    """CID and block of an event, as cbor2 writes it."""
    block = cbor2.dumps(event, canonical=True)
    return compute_cid(block, codec), block


def unsigned(**header: object) -> tuple[bytes, bytes]:
    return write({"data": None, "header": {"controllers": ["did:key:z6Mk"], **header}})


def answer(*blocks: tuple[bytes, bytes], implied: str | None = None) -> Genesis | NeedsBlock | Rejected:
    """What is read of the first of these blocks, given them all."""
    return read_genesis(blocks[0][0], dict(blocks), implied)


def reason(*blocks: tuple[bytes, bytes]) -> str | None:
    read = answer(*blocks)
    return read.reason if isinstance(read, Rejected) else None


# ---------------------------------------------------------------- events of other implementations


Fields = dict[str, Any]  # JSON of several shapes


class Vector:
    """The blocks of an event as values, and as the bytes that their CIDs are of."""

    def __init__(self, decoded: Fields) -> None:
        self.decoded = decoded
        self.blocks = {cid_bytes(cid): dag_cbor.encode(_restore(value)) for cid, value in decoded.items()}
        assert all(check_block(block, cid) is None for cid, block in self.blocks.items())

    def inits(self) -> Iterator[tuple[bytes, Fields]]:
        """The CID of each genesis in it, with the header that it has."""
        for cid, event in self.decoded.items():
            if not isinstance(event, dict):
                continue
            payload = event
            if "payload" in event:
                payload = self.decoded[cid_text(bytes.fromhex(event["payload"]["$bytes_hex"]))]
            if "header" in payload and "prev" not in payload:
                yield cid_bytes(cid), payload["header"]


def _restore(value: object) -> object:
    """Return the value with its bytes and links, for which JSON has no types."""
    match value:
        case {"$bytes_hex": str(digits)}:
            return bytes.fromhex(digits)
        case {"/": str(cid)}:
            return CID.decode(cid)
        case dict():
            return {name: _restore(each) for name, each in value.items()}
        case list():
            return [_restore(each) for each in value]
    return value


_LINES = (VECTORS / "ceramic" / "events.jsonl").read_text().splitlines()
EVENTS = {event["name"]: Vector(event["blocks"]) for event in map(json.loads, _LINES)}
NAMES = list(EVENTS)


def test_the_vectors_are_all_there() -> None:
    assert len(EVENTS) >= 15
    assert sum(1 for vector in EVENTS.values() for _ in vector.inits()) >= 40


@pytest.mark.parametrize("name", NAMES)
def test_every_genesis_of_the_vectors(name: str) -> None:
    vector = EVENTS[name]
    for cid, header in vector.inits():
        model = header["model"]["$streamid"] if "model" in header else None
        named = Separator("model", model) if model else None
        given_sep = Genesis(named, None, model) if "sep" in header else Genesis(None, "sep_missing", model)
        assert header.get("sep") in (None, "model")
        assert read_genesis(cid, vector.blocks) == given_sep
        implied = Genesis(named, None, model) if model else Genesis(None, "sep_missing", None)
        assert read_genesis(cid, vector.blocks, "model") == implied
        if model:
            assert model == multibase.encode(bytes.fromhex(header["model"]["$bytes_hex"]), "base36")


@pytest.mark.parametrize("name", NAMES)
def test_other_blocks_of_the_vectors_are_no_genesis(name: str) -> None:
    vector = EVENTS[name]
    for cid in vector.blocks.keys() - {cid for cid, _ in vector.inits()}:
        read = read_genesis(cid, vector.blocks)
        assert isinstance(read, Rejected)
        assert read.reason == "genesis_not_init"


@pytest.mark.parametrize(
    ("name", "genesis", "separator"),
    [
        (
            "rc-event.signed_init_event_car",
            "bagcqcerar2aga7747dm6fota3iipogz4q55gkaamcx2weebs6emvtvie2oha",
            "kjzl6hvfrbw6c90uwoyz8j519gxma787qbsfjtrarkr1huq1g1s224k7hopvsyg",
        ),
        (
            "rc-event.unsigned_init_event_car",
            "bafyreiakimdaub7m6inx2nljypdhvhu5vozjhylqukif4hjxt65qnkv6my",
            "kjzl6hvfrbw6c8bbwlli9gjd9iu2eyd5ol1dkyxbga3at3clzsch6fudvfc70lz",
        ),
        ("rc-event.unsigned_init_no_sep_car", "bafyreifnrwf76bgwv446b3gkl7nexypvb5kmwp4ernqil3gx4pgrb5ekle", None),
        (
            "cas.anchor-request-signed-genesis",
            "bafyreigoetnvcimetv4n3dh3pxjeg7x2vym6bjgf7pxjcbbvwknuyssl24",
            None,
        ),
        ("cas.big-metadata-genesis", "bafyreifayqofjshi2i35ixcha5t4imkl22dnonzobfvjet2hqj3fhvuwia", None),
    ],
)
def test_what_the_notes_say_of_the_vectors(name: str, genesis: str, separator: str | None) -> None:
    read = read_genesis(cid_bytes(genesis), EVENTS[name].blocks)
    assert isinstance(read, Genesis)
    assert read.separator == (Separator("model", separator) if separator else None)
    assert read.without == (None if separator else "sep_missing")


def test_stream_of_an_anchor_request_is_that_of_its_genesis() -> None:
    vector = EVENTS["cas.anchor-request-signed-genesis"]
    request = next(event for event in vector.decoded.values() if isinstance(event, dict) and "streamId" in event)
    stream = StreamID.from_bytes(bytes.fromhex(request["streamId"]["$bytes_hex"]))
    read = read_genesis(stream.genesis, vector.blocks)
    assert isinstance(read, Genesis)
    assert read.model == "kjzl6hvfrbw6c8f4rakx148geyyvl2k2zicik3mrn4l5rgbct37vric5omua00d"


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_byte_in_a_block_is_detected(name: str) -> None:
    vector = EVENTS[name]
    genesis, _ = next(vector.inits(), (None, None))
    if genesis is None:
        genesis = next(cid for cid in vector.blocks if vector.decoded[cid_text(cid)])
    needed = {genesis: vector.blocks[genesis]}
    while isinstance(more := read_genesis(genesis, needed), NeedsBlock):
        needed[more.cid] = vector.blocks[more.cid]
    for cid, block in needed.items():
        step = max(1, len(block) // 700)  # every byte of all but the block of 70 kB
        for at in range(0, len(block), step):
            damaged = block[:at] + bytes([block[at] ^ (1 << at % 8)]) + block[at + 1 :]
            read = read_genesis(genesis, {**needed, cid: damaged})
            assert isinstance(read, Rejected)
            assert read.reason == "block_hash_mismatch"


# ---------------------------------------------------------------- every kind of header


@pytest.mark.parametrize(
    ("header", "without"),
    [
        ({"model": MODEL.bytes}, "sep_missing"),
        ({}, "sep_missing"),
        ({"sep": None, "model": MODEL.bytes}, "sep_not_text"),
        ({"sep": 5}, "sep_not_text"),
        ({"sep": b"model", "model": MODEL.bytes}, "sep_not_text"),
        ({"sep": ["model"], "model": MODEL.bytes}, "sep_not_text"),
        ({"sep": "model"}, "value_missing"),
        ({"sep": "Model", "model": MODEL.bytes}, "value_missing"),
        ({"sep": "model", "model": MODEL.text}, "value_not_bytes"),
        ({"sep": "model", "model": None}, "value_not_bytes"),
        ({"sep": "model", "model": {"a": b"x"}}, "value_not_bytes"),
        ({"sep": "model", "model": cbor2.CBORTag(42, b"\x00" + compute_cid(b""))}, "value_not_bytes"),
        ({"sep": "sep"}, "value_not_bytes"),
        ({"sep": "model", "model": b""}, "value_empty"),
        ({"sep": "", "": b"x"}, "bad_separator"),
        ({"sep": "k" * (MAX_KEY + 1), "k" * (MAX_KEY + 1): b"x"}, "bad_separator"),
        ({"sep": "model", "model": b"\xff" * 700}, "bad_separator"),
    ],
)
def test_headers_without_a_separator(header: dict[str, object], without: str) -> None:
    read = answer(unsigned(**header))
    assert isinstance(read, Genesis)
    assert (read.separator, read.without) == (None, without)
    assert without in WITHOUT


@pytest.mark.parametrize("key", ["model", "context", "a/b", "ключ", "k" * MAX_KEY])
def test_the_key_names_the_field(key: str) -> None:
    read = answer(unsigned(sep=key, other=b"\x01", **{key: b"\x00\xff"}))
    assert isinstance(read, Genesis)
    assert read.separator == Separator(key, encode_separator_value(b"\x00\xff"))


def test_separator_of_a_model_is_the_metamodel() -> None:
    read = answer(unsigned(sep="model", model=StreamID.parse(METAMODEL).bytes))
    assert read == Genesis(Separator("model", METAMODEL), None, METAMODEL)


def test_a_model_that_is_no_stream_is_a_separator_all_the_same() -> None:
    assert answer(unsigned(sep="model", model=b"\x07")) == Genesis(
        Separator("model", encode_separator_value(b"\x07")), None, None
    )


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ({"model": MODEL.bytes}, Genesis(BY_MODEL, None, MODEL.text)),
        ({}, Genesis(None, "sep_missing", None)),
        ({"model": b""}, Genesis(None, "value_empty", None)),
        ({"sep": 5, "model": MODEL.bytes}, Genesis(None, "sep_not_text", MODEL.text)),
        ({"sep": "other", "model": MODEL.bytes}, Genesis(None, "value_missing", MODEL.text)),
        (
            {"sep": "other", "other": b"x", "model": MODEL.bytes},
            Genesis(Separator("other", encode_separator_value(b"x")), None, MODEL.text),
        ),
    ],
)
def test_an_implied_separator_stands_for_a_missing_sep_only(header: dict[str, object], expected: Genesis) -> None:
    assert answer(unsigned(**header), implied="model") == expected


# ---------------------------------------------------------------- blocks


def signed(payload: bytes) -> tuple[bytes, bytes]:
    return write({"payload": payload, "signatures": [{"protected": b"{}", "signature": bytes(64)}]}, DAG_JOSE)


def test_a_block_that_is_not_that_of_its_cid_is_refused_inside_an_envelope_too() -> None:
    inner, other = unsigned(sep="model", model=MODEL.bytes), unsigned(sep="model", model=b"\x01")
    envelope = signed(inner[0])
    assert reason((inner[0], other[1])) == "block_hash_mismatch"
    assert reason(envelope, (inner[0], other[1])) == "block_hash_mismatch"
    assert reason((envelope[0], signed(other[0])[1]), inner, other) == "block_hash_mismatch"


def test_a_signed_genesis_says_which_block_it_needs() -> None:
    inner = unsigned(sep="model", model=MODEL.bytes)
    envelope = signed(inner[0])
    assert read_genesis(envelope[0], {}) == NeedsBlock(envelope[0])
    assert answer(envelope) == NeedsBlock(inner[0])
    assert answer(envelope, inner) == Genesis(BY_MODEL, None, MODEL.text)


@pytest.mark.parametrize(
    ("cid", "expected"),
    [
        (StreamID.parse(METAMODEL).genesis, "cid_hash_unsupported"),
        (b"\x01\x71\x00\x01\xa0", "cid_hash_unsupported"),  # identity
        (b"\x01\x71\x12\x00", "cid_hash_unsupported"),  # sha2-256, cut to nothing
        (b"\x01\x71\x12\x10" + bytes(16), "cid_hash_unsupported"),
        (b"\x01\x71\x13\x40" + bytes(64), "cid_hash_unsupported"),  # sha2-512
        (b"\x01\x55\x12\x20" + bytes(32), "cid_codec_unsupported"),  # raw
        (b"\x12\x20" + bytes(32), "cid_codec_unsupported"),  # version 0: dag-pb
        (b"\x01\x71\x12\x20" + bytes(31), "cid_malformed"),
        (b"\x01\x71\x12\x20" + bytes(33), "cid_malformed"),
        (b"", "cid_malformed"),
    ],
)
def test_a_cid_that_no_genesis_has_is_told_before_anything_is_fetched(cid: bytes, expected: str) -> None:
    read = read_genesis(cid, {})
    assert isinstance(read, Rejected)
    assert read.reason == expected


def test_what_a_signed_event_may_not_hold() -> None:
    envelope = signed(unsigned()[0])
    assert reason(signed(envelope[0]), envelope) == "cid_codec_unsupported"  # an envelope in an envelope
    assert reason(signed(b"\x01\x71\x13\x40" + bytes(64))) == "cid_hash_unsupported"
    assert reason(signed(b"none")) == "genesis_malformed"
    assert reason(write({"signatures": []}, DAG_JOSE)) == "genesis_malformed"
    assert reason(write({"payload": "text"}, DAG_JOSE)) == "genesis_malformed"
    assert reason(write({"ciphertext": b"x", "protected": b"{}"}, DAG_JOSE)) == "genesis_malformed"


@pytest.mark.parametrize(
    "event",
    [
        {"data": None},
        {"header": None},
        {"header": []},
        {"id": "x", "prev": "y", "data": [], "header": {}},
        {"prev": None, "header": {"sep": "model", "model": b"x"}},
        [],
        5,
        "header",
        None,
    ],
)
def test_what_is_no_init_event(event: object) -> None:
    assert reason(write(event)) == "genesis_not_init"


HEADER = b"\xa1\x66header"  # {"header": …


@pytest.mark.parametrize(
    "block",
    [
        b"",
        HEADER,
        HEADER + b"\xa1\x63sep",
        HEADER + b"\xa0\x00",  # a byte too many
        HEADER + b"\xbf\xff",  # indefinite
        HEADER + b"\xa1\x5f\x41a\xff\x00",
        HEADER + b"\xa1\x41a\x00",  # a key in bytes
        HEADER + b"\xa2\x61a\x00\x61a\x00",  # a key twice
        HEADER + b"\xa1\x61a\xc1\x00",  # a tag that is not 42
        HEADER + b"\xa1\x63sep\x61\xff",  # no UTF-8
        HEADER + b"\xa1\x61a\x5b" + b"\xff" * 8,
        HEADER + b"\xa1\x61a\x9b" + b"\xff" * 8,
        HEADER + b"\xbb" + b"\xff" * 8,
        HEADER + b"\xa1\x61a\x1c",
        b"\xa2\x66header\xa0\x66header\xa0",
        b"\x81" * 200_000,
    ],
)
def test_what_is_not_dag_cbor(block: bytes) -> None:
    assert reason((compute_cid(block), block)) == "genesis_malformed"


@pytest.mark.parametrize("unit", [b"\x9a\x00\x1f\x00\x00" + b"\x00" * 0x1F0000, b"\x81" * 2_000_000 + b"\x00"])
def test_genesis_of_many_small_items_is_refused_after_few(unit: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    header = cbor2.dumps({"controllers": ["did:key:z6Mk"], "model": MODEL.bytes, "sep": "model"}, canonical=True)
    block = b"\xa2\x64data" + unit + b"\x66header" + header
    steps = 0

    def count(data: bytes, at: int) -> tuple[int, int, int]:
        nonlocal steps
        steps += 1
        return read_head(data, at)

    read_head = genesis_module._read_head
    monkeypatch.setattr(genesis_module, "_read_head", count)
    assert reason((compute_cid(block), block)) == "genesis_malformed"
    assert steps < 300_000


def test_nesting_is_no_limit() -> None:
    block = HEADER + b"\xa3\x61a" + b"\x81" * 200_000 + b"\x00" + b"\x63sep\x65model\x65model\x41x"
    assert reason((compute_cid(block), block)) is None


def test_short_floats_and_any_order_of_keys_are_read() -> None:
    block = b"\xa2" + b"\x66header\xa2\x65model\x41x\x63sep\x65model" + b"\x64data\xf9\x3e\x00"
    assert answer((compute_cid(block), block)) == Genesis(Separator("model", encode_separator_value(b"x")), None, None)


# ---------------------------------------------------------------- any header

json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
header_keys = st.sampled_from(["sep", "model", "a", "unique", ""]) | st.text(max_size=5)
headers = st.dictionaries(header_keys, json_like | st.sampled_from(["model", "a"]), max_size=6)


def expected_of(header: dict[str, object]) -> tuple[Separator | None, str | None]:
    sep = header.get("sep", NONE)
    if sep is NONE:
        return None, "sep_missing"
    if not isinstance(sep, str):
        return None, "sep_not_text"
    value = header.get(sep, NONE)
    if value is NONE:
        return None, "value_missing"
    if not isinstance(value, bytes):
        return None, "value_not_bytes"
    if not value:
        return None, "value_empty"
    if not sep:
        return None, "bad_separator"
    return Separator(sep, str(multibase.encode(value, "base36"))), None


@given(headers, st.booleans())
def test_any_header_is_read_as_other_decoders_read_it(header: dict[str, object], by_libipld: bool) -> None:
    event = {"data": [header], "header": header}
    block: bytes = libipld.encode_dag_cbor(event) if by_libipld else cbor2.dumps(event, canonical=True)
    decoded = cbor2.loads(block)
    assert decoded == libipld.decode_dag_cbor(block)
    read = answer((compute_cid(block), block))
    assert isinstance(read, Genesis)
    assert (read.separator, read.without) == expected_of(decoded["header"])


@given(st.binary(max_size=80) | st.binary(max_size=60).map(lambda tail: HEADER + tail), st.booleans())
def test_any_bytes_are_read_or_rejected_and_strictly_read_ones_alike(block: bytes, jose: bool) -> None:
    read = answer((compute_cid(block, DAG_JOSE if jose else DAG_CBOR), block), implied="model")
    if isinstance(read, Rejected):
        assert read.reason in REASONS
    elif isinstance(read, Genesis):
        assert (read.separator is None) == (read.without in WITHOUT)
    try:
        libipld.decode_dag_cbor(block)
    except ValueError:
        return
    assert not isinstance(read, Rejected) or jose or read.reason == "genesis_not_init"


@given(headers, st.data())
def test_damaged_blocks_never_raise(header: dict[str, object], data: st.DataObject) -> None:
    block = bytearray(cbor2.dumps({"header": header}))
    block[data.draw(st.integers(0, len(block) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(block[: data.draw(st.integers(0, len(block)))])
    read = answer((compute_cid(damaged), damaged))
    assert not isinstance(read, NeedsBlock)


def test_codes_are_snake_case_and_distinct() -> None:
    for codes in (REASONS, WITHOUT):
        assert len(set(codes)) == len(codes)
        assert all(code == code.lower() and code.replace("_", "").isalpha() for code in codes)
