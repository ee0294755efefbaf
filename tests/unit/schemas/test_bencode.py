"""Bencoding: strict in both directions, so that what was signed is what is checked (BEP 3, BEP 44)."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kiln.schemas.dht.bencode import BencodeError, Value, decode, encode, fields

values: st.SearchStrategy[Value] = st.recursive(
    st.integers() | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.binary(max_size=8), inner, max_size=5),
    max_leaves=20,
)

# Pieces that bytes near to bencoding are made of.
pieces = st.lists(
    st.sampled_from(
        [b"d", b"l", b"e", b"i", b"0", b"1", b"-", b":", b"1:a", b"1:b", b"0:", b"i0e", b"i-1e", b"2:aa", b" "]
    ),
    max_size=16,
).map(b"".join)


@given(values)
def test_a_value_is_read_as_it_was_written(value: Value) -> None:
    assert decode(encode(value)) == value


@given(pieces | st.binary(max_size=40))
@example(b"d1:ai1e1:bi2ee")
def test_what_is_read_is_the_only_encoding_of_its_value(data: bytes) -> None:
    try:
        value = decode(data)
    except BencodeError:
        return
    assert encode(value) == data


@given(values, st.data())
def test_one_changed_byte_gives_another_value_or_an_error(value: Value, data: st.DataObject) -> None:
    written = encode(value)
    at = data.draw(st.integers(0, len(written) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda each: each != written[at]))
    changed = written[:at] + bytes([byte]) + written[at + 1 :]
    try:
        assert encode(decode(changed)) == changed
        assert decode(changed) != value
    except BencodeError:
        pass


@pytest.mark.parametrize(
    "data",
    [
        *(b"i01e", b"i-0e", b"i00e", b"ie", b"i-e", b"i--1e", b"i+1e", b"i 1e", b"i1 e", b"i1_0e", b"i1", b"i1.0e"),
        *(b"01:a", b"00:", b"-1:a", b"+1:a", b" 1:a", b"1:", b"2:a", b"1", b"1a", b"99999999999999999999:a"),
        b"18446744073709551617:a",  # 2^64 + 1
        *(
            b"d1:bi1e1:ai2ee",
            b"d1:ai1e1:ai1ee",
            b"d2:aai1e1:ai2ee",
            b"di1ei2ee",
            b"d1:ae",
            b"d1:ai1e",
            b"d",
            b"dlei1ee",
        ),
        *(b"l", b"li1e", b"le ", b"i1ei2e", b"i1e\n", b"", b"e", b"x", b"lx", b"\xd9\xa1:a"),
        b"i" + b"9" * 5000 + b"e",
    ],
)
def test_what_is_not_canonical_is_refused(data: bytes) -> None:
    with pytest.raises(BencodeError):
        decode(data)


@pytest.mark.parametrize("data", [b"i-1e", b"i0e", b"0:", b"le", b"de", b"d0:i1e1:ai2ee", b"i9223372036854775808e"])
def test_what_is_canonical_is_read(data: bytes) -> None:
    assert encode(decode(data)) == data


@pytest.mark.parametrize("depth", [10, 500, 1000, 4000, 32000])
def test_no_depth_of_nesting_does_harm(depth: int) -> None:
    data = b"l" * depth + b"e" * depth
    try:
        assert encode(decode(data)) == data
    except BencodeError:
        assert depth > 1000  # as deep as a datagram can be


def test_keys_are_written_in_bytewise_order() -> None:
    assert encode({b"b": 1, b"aa": 2, b"\xff": 3, b"": 4}) == b"d0:i4e2:aai2e1:bi1e1:\xffi3ee"


@given(st.dictionaries(st.binary(max_size=8), values, max_size=6))
def test_fields_are_the_entries_as_they_stand(entries: dict[bytes, Value]) -> None:
    assert fields(encode(entries)) == {key: encode(value) for key, value in entries.items()}


def test_fields_are_found_in_a_dictionary_that_is_not_canonical() -> None:
    assert fields(b"d1:t2:aa1:ad1:bi01e1:ai-0eee") == {b"t": b"2:aa", b"a": b"d1:bi01e1:ai-0ee"}


@given(pieces | st.binary(max_size=40))
def test_fields_raise_nothing_else(data: bytes) -> None:
    try:
        found = fields(b"d" + data)
    except BencodeError:
        return
    assert all(value in data for value in found.values())
