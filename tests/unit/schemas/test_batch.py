"""CIP-123 blocks: read by independent libraries, split the same way every time, refused when they are anything else."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

import cbor2
import dag_cbor
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multiformats import CID

from kiln.schemas.wire import batch_block
from kiln.schemas.wire.batch_block import (
    MAX_BLOCK,
    BatchBlock,
    BlockError,
    ForeignBlock,
    read_block,
    read_foreign_block,
)
from kiln.schemas.wire.cid import cid_bytes, cid_text, compute_cid, write_varint
from kiln.schemas.wire.streamid import METAMODEL, StreamID
from kit.batch_blocks import write_blocks

# A real stream and tip (a CAS request of 2024-05-22), written three ways
STREAM = "kjzl6kcym7w8y77nkulpqe1jsv2s5hxzh5mz1yhtmq2hyjsze78ejn9cxmxwecg"
TIP = "bagcqceralv4232m443k6wluzhzyvhz3i3k36khnxwx5qkddqbhoev7pp7gqa"
LINK = "d82a582600" + cid_bytes(TIP).hex()
KEY = StreamID.parse(STREAM).bytes.hex()
TEXT_KEYS = bytes.fromhex("a16474697073a1783f" + STREAM.encode().hex() + "81" + LINK)
BYTE_KEYS = bytes.fromhex("a16474697073a15828" + KEY + "81" + LINK)
LIST_PAIRS = bytes.fromhex("a16474697073" + "81825828" + KEY + "81" + LINK)

tips = st.builds(compute_cid, st.binary(max_size=4), st.sampled_from([0x71, 0x85, 0x00])) | st.just(
    cid_bytes("QmSnuWmxptJZdLJpKRarxBMS2Ju2oANVrgbr2xWbie9b2D")
)
streams = st.builds(
    lambda kind, cid: StreamID(kind, cid).text,
    st.integers(0, 3),
    st.builds(compute_cid, st.binary(max_size=4), st.sampled_from([0x71, 0x85])),
)
batches = st.dictionaries(streams | st.just(METAMODEL), st.lists(tips, max_size=6), max_size=40)


def model_of(batch: dict[str, list[bytes]]) -> dict[str, list[str]]:
    return {stream: [cid_text(tip) for tip in sorted(set(batch[stream]))] for stream in batch if batch[stream]}


def joined(blocks: Iterable[BatchBlock]) -> dict[str, list[str]]:
    whole: dict[str, list[str]] = {}
    for block in blocks:
        for stream, links in read_block(block.data).items():
            whole.setdefault(stream, []).extend(links)
    return whole


def some_stream(number: int) -> str:
    return StreamID(3, compute_cid(number.to_bytes(8, "big"), 0x85)).text


def some_tip(number: int) -> bytes:
    return compute_cid(b"tip" + number.to_bytes(8, "big"))


def test_bytes_of_the_written_block() -> None:
    blocks = write_blocks({STREAM: [cid_bytes(TIP)]})
    assert blocks == [BatchBlock("bafyreifqd2nn3hpa3ikwlbvlt7h7ovbbi5ml7jcrwdhfzptgxsaldjvyui", TEXT_KEYS)]
    assert len(TEXT_KEYS) == 115


@pytest.mark.parametrize(
    ("streams", "tips", "sizes", "cids"),
    [
        (1, 1, [114], ["bafyreihlkx7x4d7duz3wb4ylhnicxkmuuggk5hy7o724gav27zorxpk7oy"]),
        (25, 3, [4733], ["bafyreiao6a4hkj2asyjcvz4gyi7qm4dixjmlssyzoah3puhqymfsgfpdsi"]),
        (300, 1, [32109], ["bafyreihhzwnfnmm7inx5a73fozlonl42wiukip3osdv62lp3aadnf2mkxy"]),
        (
            3_000,
            1,
            [255953, 65065],
            [
                "bafyreievzyuy4clolqwpzqbll2t27jj3ewz7iwrltychnfn37n5l2b4g74",
                "bafyreiekzwtvp2yfx3ftbtryptyfnvy3bbhngl4ax33gfvpxwkjsmt7is4",
            ],
        ),
        (
            2,
            7_000,
            [255997, 31153, 255997, 31153],
            [
                "bafyreiefe4xbm63ikptm3m7rjui6r22d4cb4e3vflcqrm6qa56lgrkwc4q",
                "bafyreihtuzeavibhvd5ii6kzkyirgjicju7uy2r47bc6vfqpspogcgrb5q",
                "bafyreic3x52vbonzhwhmgzbl27jszaaog4krxhdoustj6fntvms6lqsc2q",
                "bafyreibnz2a4wqotg4p3vrwofyxyfp3n35byhucdcwx5uz6t5sszlhuheq",
            ],
        ),
    ],
)
def test_cids_that_other_versions_wrote(streams: int, tips: int, sizes: list[int], cids: list[str]) -> None:
    batch = {some_stream(n): [some_tip(n * tips + m) for m in range(tips)] for n in range(streams)}
    blocks = write_blocks(batch)
    assert ([len(block.data) for block in blocks], [block.cid for block in blocks]) == (sizes, cids)


@pytest.mark.parametrize(
    ("data", "size", "cid"),
    [
        (TEXT_KEYS, 115, "bafyreifqd2nn3hpa3ikwlbvlt7h7ovbbi5ml7jcrwdhfzptgxsaldjvyui"),
        (BYTE_KEYS, 92, "bafyreidlgqsz6tnqks5jtnu5hyky34ky7ucybzculxik3d4shmtena725i"),
        (LIST_PAIRS, 93, "bafyreie5iu5dm6gdsrdtvhxbqdy2poqd2pwwg4progovo4p6kehiwace5m"),
    ],
)
def test_the_three_forms_read_alike(data: bytes, size: int, cid: str) -> None:
    assert (len(data), cid_text(compute_cid(data))) == (size, cid)
    assert read_block(data) == {STREAM: [TIP]}


def test_list_pairs_with_text_keys() -> None:
    data = bytes.fromhex("a1647469707381" + "82783f" + STREAM.encode().hex() + "81" + LINK)
    assert read_block(data) == {STREAM: [TIP]}


@given(batches)
def test_round_trip(batch: dict[str, list[bytes]]) -> None:
    blocks = write_blocks(batch)
    assert len(blocks) == (1 if model_of(batch) else 0)
    assert joined(blocks) == model_of(batch)


@given(batches, st.integers(200, 1500))
def test_independent_libraries_read_every_block(batch: dict[str, list[bytes]], limit: int) -> None:
    for block in write_blocks(batch, limit):
        theirs = dag_cbor.decode(block.data)  # strict: also refuses keys out of canonical order
        assert dag_cbor.encode(theirs) == block.data
        ours = {stream: [CID.decode(link) for link in links] for stream, links in read_block(block.data).items()}
        assert theirs == {"tips": ours}
        by_cbor2 = cbor2.loads(block.data)
        assert cbor2.dumps(by_cbor2, canonical=True) == block.data
        assert bytes(CID.decode(block.cid)) == b"\x01\x71\x12\x20" + hashlib.sha256(block.data).digest()


def split_by_encoding_again(batch: dict[str, list[bytes]], limit: int) -> list[bytes]:
    """The split rule in its plainest form: encode the block with one more stream (or tip) and look at its size."""

    def encode(parts: list[tuple[str, list[bytes]]]) -> bytes:
        tagged = {key: [cbor2.CBORTag(42, b"\0" + tip) for tip in links] for key, links in parts}
        return cbor2.dumps({"tips": tagged}, canonical=True)

    parts: list[tuple[str, list[bytes]]] = []
    for stream in sorted((stream for stream in batch if batch[stream]), key=lambda key: (len(key), key)):
        part: list[bytes] = []
        for tip in sorted(set(batch[stream])):
            if len(encode([(stream, [*part, tip])])) > limit:
                parts.append((stream, part))
                part = []
            part.append(tip)
        parts.append((stream, part))
    blocks: list[list[tuple[str, list[bytes]]]] = []
    for entry in parts:
        same_stream = bool(blocks) and blocks[-1][-1][0] == entry[0]  # a next part is there because this one is full
        if not blocks or same_stream or len(encode([*blocks[-1], entry])) > limit:
            blocks.append([])
        blocks[-1].append(entry)
    return [encode(block) for block in blocks]


@settings(max_examples=200)
@given(batches, st.integers(130, 3000))
def test_split_is_exact(batch: dict[str, list[bytes]], limit: int) -> None:
    blocks = write_blocks(batch, limit)
    assert [block.data for block in blocks] == split_by_encoding_again(batch, limit)
    assert all(len(block.data) <= limit for block in blocks)
    assert joined(blocks) == model_of(batch)


@given(batches, st.randoms(), st.integers(200, 1500))
def test_order_of_arrival_does_not_matter(batch: dict[str, list[bytes]], random: Random, limit: int) -> None:
    shuffled = list(batch)
    random.shuffle(shuffled)
    again = {stream: random.sample(batch[stream] * 2, len(batch[stream]) * 2) for stream in shuffled}
    assert write_blocks(again, limit) == write_blocks(batch, limit)


def test_a_full_block_has_as_many_streams_as_fit() -> None:
    batch = {some_stream(number): [some_tip(number)] for number in range(6000)}
    # 63-character key and a dag-cbor link: 65 + 1 + 41 bytes; the map's head takes 3
    fit = (MAX_BLOCK - 6 - 3) // 107
    blocks = write_blocks(batch)
    assert [len(read_block(block.data)) for block in blocks] == [fit, fit, 6000 - 2 * fit]
    assert all(len(block.data) <= MAX_BLOCK for block in blocks)
    keys = [key for block in blocks for key in read_block(block.data)]
    assert keys == sorted(batch)


def test_oversized_stream_is_split_by_its_tips() -> None:
    links = [some_tip(number) for number in range(10_000)]
    first, last = sorted([some_stream(1), some_stream(2)])
    blocks = write_blocks({last: [some_tip(1)], first: links})
    read = [read_block(block.data) for block in blocks]
    assert [list(block) for block in read] == [[first], [first, last]]
    assert read[0][first] + read[1][first] == [cid_text(tip) for tip in sorted(links)]
    assert MAX_BLOCK - 41 < len(blocks[0].data) <= MAX_BLOCK


@pytest.mark.parametrize("count", [23, 24, 255, 256, 65_535, 65_536])
@pytest.mark.parametrize("of", ["streams", "tips"])
def test_limit_is_exact_where_a_length_takes_one_byte_more(count: int, of: str) -> None:
    if of == "streams":
        batch = {some_stream(number): [some_tip(number)] for number in range(count)}
    else:
        batch = {some_stream(0): [some_tip(number) for number in range(count)]}
    (whole,) = write_blocks(batch, 100_000_000)
    assert write_blocks(batch, len(whole.data)) == [whole]
    cut = write_blocks(batch, len(whole.data) - 1)
    assert len(cut) == 2
    assert all(len(block.data) < len(whole.data) for block in cut)


def test_shorter_keys_come_first() -> None:
    short, long = "k2t6wzhkhabz46ywlu76f9w8gzjjmwn8q8lj43763x1ss840zuabxj51nlfpd9", STREAM
    assert len(short) < len(long)
    (block,) = write_blocks({long: [cid_bytes(TIP)], short: [cid_bytes(TIP)], METAMODEL: [cid_bytes(TIP)]})
    assert list(read_block(block.data)) == [METAMODEL, short, long]


@pytest.mark.parametrize("size", [0, 32, 54, 64, 65, 128])
def test_a_tip_is_a_link_however_long_its_digest(size: int) -> None:
    cid = b"\x01\x55\x00" + write_varint(size) + bytes(size)
    batch = {METAMODEL: [cid], STREAM: [cid, cid_bytes(TIP)], some_stream(1): [cid]}
    (block,) = write_blocks(batch)
    canonical = {key: [cbor2.CBORTag(42, b"\0" + tip) for tip in sorted(batch[key])] for key in batch}
    assert block.data == cbor2.dumps({"tips": canonical}, canonical=True)
    assert read_block(block.data) == model_of(batch)
    assert write_blocks(batch, len(block.data)) == [block]
    assert joined(write_blocks(batch, len(block.data) - 1)) == model_of(batch)


def test_nothing_gives_no_block() -> None:
    assert write_blocks({}) == write_blocks({STREAM: []}) == []


def test_a_tip_that_does_not_fit_cannot_be_written() -> None:
    with pytest.raises(BlockError, match="does not fit into a block of 114 bytes"):
        write_blocks({STREAM: [cid_bytes(TIP)]}, 114)


def block_of(*entries: str, count: int | None = None) -> bytes:
    """A block in hex: ``tips`` as a map of these entries."""
    return bytes.fromhex("a16474697073" + f"{0xA0 + (len(entries) if count is None else count):02x}" + "".join(entries))


KEY_TEXT = "783f" + STREAM.encode().hex()
ENTRY = KEY_TEXT + "81" + LINK


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cut short"),
        (b"\xa0", "one key"),
        (bytes.fromhex("a2647469707380" + "6161f6"), "one key"),
        (bytes.fromhex("a1647469707a80"), "must be tips"),
        (bytes.fromhex("a1447469707380"), "must be text, not bytes"),
        (bytes.fromhex("80"), "the block must be a map, not an array"),
        (bytes.fromhex("d9d9f7") + TEXT_KEYS, "the block must be a map, not a tag"),
        (bytes.fromhex("a16474697073f6"), "not a simple value"),
        (bytes.fromhex("a1647469707305"), "not an integer"),
        (TEXT_KEYS + b"\0", "1 bytes follow the block"),
        (TEXT_KEYS + TEXT_KEYS, "follow the block"),
        (TEXT_KEYS[:-1], "cut short"),
        (block_of(ENTRY, ENTRY), "occurs twice"),
        (block_of(ENTRY, "5828" + KEY + "80"), "occurs twice"),
        (block_of(ENTRY, "7848" + b"ceramic://".hex() + STREAM.encode().hex() + "80"), "not a StreamID"),
        (block_of(ENTRY, "7849" + b"ceramic://".hex() + STREAM.encode().hex() + "80"), "occurs twice"),
        (block_of("6161" + "80"), "not a StreamID"),
        (block_of("61ff" + "80"), "not a StreamID"),
        (block_of("05" + "80"), "must be text or bytes"),
        (block_of("5829" + KEY + "00" + "80"), "CommitID"),
        (block_of(KEY_TEXT + "a0"), "must be an array, not a map"),
        (block_of(KEY_TEXT + LINK), "must be an array, not a tag"),
        (block_of(KEY_TEXT + "81" + LINK.removeprefix("d82a")), "must be a tag, not bytes"),
        (block_of(KEY_TEXT + "81d82b" + LINK.removeprefix("d82a")), "tag 42"),
        (block_of(KEY_TEXT + "81d82a63616263"), "must be bytes, not text"),
        (block_of(KEY_TEXT + "81d82a582501" + cid_bytes(TIP).hex()[2:]), "zero byte"),
        (block_of(KEY_TEXT + "81d82a40"), "zero byte"),
        (block_of(KEY_TEXT + "81d82a4100"), "not a CID"),
        (block_of(KEY_TEXT + "81d82a582700" + cid_bytes(TIP).hex() + "00"), "not a CID"),
        (block_of(KEY_TEXT + "8178" + "06" + "616263646566"), "shortest form"),
        (block_of("790000" + "80"), "shortest form"),
        (block_of("7a0000ffff" + "80"), "shortest form"),
        (block_of("7b00000000ffffffff" + "80"), "shortest form"),
        (bytes.fromhex("bf6474697073a0ff"), "indefinite"),
        (block_of(KEY_TEXT + "9f" + LINK + "ff"), "indefinite"),
        (block_of(ENTRY, count=2), "cut short"),
        (bytes.fromhex("a16474697073bbffffffffffffffff"), "more items"),
        (bytes.fromhex("a164746970737bffffffffffffffff"), "not text"),
        (bytes.fromhex("a1647469707381" + "81" + KEY_TEXT), "must be a pair"),
        (bytes.fromhex("a1647469707381" + "a1" + ENTRY), "must be an array, not a map"),
        (bytes.fromhex("81" * 100_000), "the block must be a map"),
    ],
)
def test_what_is_no_block(data: bytes, words: str) -> None:
    with pytest.raises(BlockError, match=words):
        read_block(data)


def test_error_names_the_byte() -> None:
    with pytest.raises(BlockError, match="at byte 72: "):
        read_block(block_of(KEY_TEXT + "a0"))


def test_a_repeated_tip_is_given_once_and_order_is_kept() -> None:
    other = cid_text(some_tip(1))
    links = "".join(
        "d82a58" + f"{len(cid_bytes(tip)) + 1:02x}" + "00" + cid_bytes(tip).hex() for tip in (TIP, other, TIP)
    )
    assert read_block(block_of(KEY_TEXT + "83" + links)) == {STREAM: [TIP, other]}


def test_keys_in_any_order_and_streams_without_tips_are_read() -> None:
    metamodel = "781d" + METAMODEL.encode().hex() + "80"
    assert read_block(block_of(ENTRY, metamodel)) == {STREAM: [TIP], METAMODEL: []}


@given(batches)
def test_forms_written_by_cbor2_are_read(batch: dict[str, list[bytes]]) -> None:
    links = {key: [cbor2.CBORTag(42, b"\0" + tip) for tip in values] for key, values in batch.items()}
    raw = {StreamID.parse(key).bytes: tagged for key, tagged in links.items()}
    expected = {key: [cid_text(tip) for tip in dict.fromkeys(values)] for key, values in batch.items()}
    assert read_block(cbor2.dumps({"tips": links})) == expected
    assert read_block(cbor2.dumps({"tips": raw})) == expected
    assert read_block(cbor2.dumps({"tips": [[key, tagged] for key, tagged in raw.items()]})) == expected
    assert read_block(cbor2.dumps({"tips": [[key, tagged] for key, tagged in links.items()]})) == expected


def assert_block_or_error(data: bytes) -> None:
    """Any other exception fails the test; what is taken is made of canonical IDs."""
    try:
        foreign = read_foreign_block(data)
    except BlockError:
        with pytest.raises(BlockError):
            read_block(data)
        return
    try:
        batch = read_block(data)
    except BlockError:
        batch = foreign.tips
    else:
        assert foreign == ForeignBlock(batch, [])
    assert all(StreamID.parse(stream).text == stream for stream in batch)
    assert all(cid_text(cid_bytes(tip)) == tip for links in batch.values() for tip in links)


@given(st.binary(max_size=100) | st.binary(max_size=60).map(lambda tail: b"\xa1\x64tips" + tail))
def test_any_bytes_are_a_block_or_a_block_error(data: bytes) -> None:
    assert_block_or_error(data)


@given(batches.filter(lambda batch: bool(model_of(batch))), st.data())
def test_a_damaged_block_is_another_block_or_an_error(batch: dict[str, list[bytes]], data: st.DataObject) -> None:
    damaged = bytearray(write_blocks(batch)[0].data)
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    assert_block_or_error(bytes(damaged))


def foreign_block(count: int, *bad: int, **also: object) -> bytes:
    """A block of so many streams, with their StreamIDs as bytes, as another writer may write one; those of `bad` lack
    their first byte."""
    entries = {
        StreamID.parse(some_stream(number)).bytes[number in bad :]: [cbor2.CBORTag(42, b"\0" + some_tip(number))]
        for number in range(count)
    }
    return cbor2.dumps({"one": [1.5, {"a": None}], "tips": entries, **also})


def test_one_bad_entry_of_another_writer_costs_itself_alone() -> None:
    data = foreign_block(1000, 500, zwei=b"two", tips_too={1: [2.0**70]})
    read = read_foreign_block(data)
    assert read.tips == {some_stream(n): [cid_text(some_tip(n))] for n in range(1000) if n != 500}
    (bad,) = read.invalid
    assert cbor2.loads(bad.data) == StreamID.parse(some_stream(500)).bytes[1:]
    assert bad.data in data
    assert "not a StreamID" in bad.why
    with pytest.raises(BlockError, match="a map of one key"):
        read_block(data)


@pytest.mark.parametrize(
    "data", [block_of(ENTRY, ENTRY), bytes.fromhex("a1647469707382" + f"82{ENTRY}" + f"83{ENTRY}80")]
)
def test_an_entry_that_repeats_a_stream_or_is_no_pair_costs_itself_alone(data: bytes) -> None:
    read = read_foreign_block(data)
    assert (read.tips, len(read.invalid)) == ({STREAM: [TIP]}, 1)


def test_a_larger_block_than_kiln_writes_is_read() -> None:
    data = foreign_block(4_000)
    assert len(data) > 321_009
    assert len(read_foreign_block(data).tips) == 4_000


def test_a_block_of_bad_entries_alone_is_told_in_bounded_words() -> None:
    data = bytes.fromhex("a16474697073" + "99044c" + "80" * 1_100)
    read = read_foreign_block(data)
    assert (read.tips, len(read.invalid)) == ({}, 1001)
    assert read.invalid[-1].why == "100 more entries are invalid"


_MIB = 1 << 20
_SMALL_LINK = "d82a" + "45" + "0001550000"  # a CID of an identity hash of nothing


@pytest.mark.parametrize(
    "tips",
    [
        pytest.param("ba00100000" + "6080" * _MIB, id="empty streams without tips"),
        pytest.param("ba00100000" + "0000" * _MIB, id="integers"),
        pytest.param("9a00200000" + "80" * 2 * _MIB, id="empty pairs"),
        pytest.param("a1" + "00" + "9a00200000" + "00" * 2 * _MIB, id="an array of integers"),
        pytest.param("a1" + "00" + "81" * 2 * _MIB + "00", id="arrays in arrays"),
        pytest.param("a1" + "00" + "9a00200000" + "f4" * 2 * _MIB, id="simple values"),
        pytest.param("a1" + KEY_TEXT + "9a00030000" + _SMALL_LINK * 0x30000, id="small links"),
        pytest.param("b9ffff" + (KEY_TEXT + "80") * 0xFFFF, id="a stream again and again"),
    ],
)
@pytest.mark.parametrize("read", [read_block, read_foreign_block])
def test_a_block_of_many_small_items_is_refused_after_few(
    read: Callable[[bytes], object], tips: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes.fromhex("a16474697073" + tips)
    steps = 0

    def count(self: batch_block._Reader, size: int) -> bytes:
        nonlocal steps
        steps += 1
        return take(self, size)

    take = batch_block._Reader.take
    monkeypatch.setattr(batch_block._Reader, "take", count)
    with pytest.raises(BlockError):
        read(data)
    assert steps < 50_000 + len(data) / 4  # about two bytes are taken for each item


def test_no_other_dag_cbor_is_taken_for_a_block(shared: Path) -> None:
    seen = 0
    with tarfile.open(shared / "vectors/ceramic/dagcbor/ipld-codec-fixtures.tar.gz") as archive:
        for member in archive.getmembers():
            if member.isfile() and member.name.endswith(".dag-cbor"):
                handle = archive.extractfile(member)
                assert handle is not None
                data = io.BytesIO(handle.read()).getvalue()
                with pytest.raises(BlockError):
                    read_block(data)
                seen += 1
    assert seen > 100
