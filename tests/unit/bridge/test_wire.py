"""RPCs out of a stream, however its bytes are cut."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.bridge.gossipsub.wire import OversizedRpc, RpcSplitter, WireError, encode

LIMIT, HEAD = 300, 20

payloads = st.lists(
    st.one_of(st.binary(max_size=40), st.integers(0, 2 * LIMIT).map(lambda size: bytes(i % 251 for i in range(size)))),
    max_size=12,
)


def chunks(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(places)]


def expected(payload: bytes) -> bytes | OversizedRpc:
    return payload if len(payload) <= LIMIT else OversizedRpc(payload[:HEAD], len(payload))


@given(payloads, st.lists(st.integers(0, 10_000), max_size=30), st.sampled_from([bytes, bytearray, memoryview]))
def test_any_chunking_gives_the_same_payloads(
    sent: list[bytes], cuts: list[int], kind: type[bytes] | type[bytearray] | type[memoryview]
) -> None:
    splitter = RpcSplitter(LIMIT, HEAD)
    got = [item for chunk in chunks(b"".join(map(encode, sent)), cuts) for item in splitter.feed(kind(chunk))]
    assert got == [expected(payload) for payload in sent]
    assert splitter.pending == 0


@given(payloads)
def test_byte_by_byte_too(sent: list[bytes]) -> None:
    splitter = RpcSplitter(LIMIT, HEAD)
    stream = b"".join(map(encode, sent))
    assert [item for byte in stream for item in splitter.feed(bytes((byte,)))] == [expected(each) for each in sent]


@pytest.mark.parametrize(
    ("size", "prefix"), [(0, "00"), (1, "01"), (127, "7f"), (128, "8001"), (300, "ac02"), (16384, "808001")]
)
def test_the_prefix_is_an_unsigned_varint(size: int, prefix: str) -> None:
    assert encode(bytes(size)) == bytes.fromhex(prefix) + bytes(size)


def test_payloads_do_not_depend_on_the_buffer_they_came_in() -> None:
    buffer = bytearray(encode(b"first") + encode(b"second"))
    got = list(RpcSplitter().feed(buffer))
    buffer[:] = bytes(len(buffer))
    assert got == [b"first", b"second"]


@pytest.mark.parametrize("bad", ["ff" * 9 + "01", "80" * 10, "8000", "ffffffffffffffffff7f", "818000"])
def test_a_length_that_is_no_varint_ends_the_stream_after_what_was_whole(bad: str) -> None:
    splitter = RpcSplitter()
    items = splitter.feed(encode(b"good") + bytes.fromhex(bad))
    assert next(items) == b"good"
    with pytest.raises(WireError):
        next(items)
    with pytest.raises(WireError):
        list(splitter.feed(encode(b"after")))


def test_a_cut_comes_as_soon_as_its_head_is_there() -> None:
    splitter = RpcSplitter(LIMIT, HEAD)
    stream = encode(bytes(LIMIT + 1))
    assert list(splitter.feed(stream[: HEAD + 1])) == []
    assert list(splitter.feed(stream[HEAD + 1 : HEAD + 2])) == [OversizedRpc(bytes(HEAD), LIMIT + 1)]
    assert splitter.pending == LIMIT + 1 - HEAD


def test_the_limits_are_those_of_the_contract() -> None:
    whole, over = bytes(4 << 20), bytes((4 << 20) + 1)
    assert list(RpcSplitter().feed(encode(whole))) == [whole]
    assert list(RpcSplitter().feed(encode(over))) == [OversizedRpc(over[: 64 << 10], (4 << 20) + 1)]


def test_a_gigabyte_announced_takes_no_more_room_than_its_head() -> None:
    splitter = RpcSplitter()
    chunk = bytes(64 << 10)
    tracemalloc.start()
    try:
        items = list(splitter.feed(b"\x80\x80\x80\x80\x04"))  # 2**30
        for _ in range((1 << 30) // len(chunk)):
            items += splitter.feed(chunk)
        items += splitter.feed(encode(b"after"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert items == [OversizedRpc(chunk, 1 << 30), b"after"]
    assert peak < 1 << 20


def test_an_announced_length_alone_takes_no_room() -> None:
    tracemalloc.start()
    try:
        splitter = RpcSplitter()
        list(splitter.feed(encode(bytes(4 << 20))[:100]))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 64 << 10
    assert splitter.pending == 100


def test_a_stream_that_breaks_off_is_told_from_one_that_ends() -> None:
    splitter = RpcSplitter()
    list(splitter.feed(encode(b"whole")))
    assert splitter.pending == 0
    for begun in (b"\x80", b"\x01"):  # a length of one byte, of two: both whole
        list(splitter.feed(begun))
        assert splitter.pending > 0


def test_a_head_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="head"):
        RpcSplitter(10, 11)
