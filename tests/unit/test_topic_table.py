"""Topic tables: the seed's Go function by its vectors, and hellos as peers send them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schemas
from schemas.proto.gossipsub.rpc_pb2 import ExtTopicTable
from schemas.reject import Rejected
from schemas.topic_table import MAX_BUNDLES, REASONS, bundle_hash, intersect, parse_hello

VECTORS = Path(__file__).resolve().parents[2].parent / "shared/vectors/libp2p/topic_table.json"
needs_vectors = pytest.mark.skipif(not VECTORS.exists(), reason=f"no topic table vectors at {VECTORS}")

hashes = st.binary(min_size=4, max_size=4)
few_hashes = st.sampled_from([bytes(3) + bytes([value]) for value in range(8)])
lists = st.lists(few_hashes, unique=True, max_size=8)


def load() -> Any:  # the file is JSON of several shapes
    return json.loads(VECTORS.read_text())


@needs_vectors
def test_all_intersect_vectors() -> None:
    cases = load()["intersect"]
    assert len(cases) >= 100
    for case in cases:
        first, second, result, swapped = (
            [bytes.fromhex(text) for text in case[name] or []] for name in ("First", "Second", "Result", "Swapped")
        )
        assert intersect(first, second) == result, case
        assert intersect(second, first) == swapped, case


@needs_vectors
def test_all_bundle_vectors() -> None:
    for bundle in load()["bundles"]:
        assert bundle_hash(bundle["Topics"] or []).hex() == bundle["Hash"]


def test_example_of_the_specification() -> None:
    def named(names: str) -> list[bytes]:
        return [name.encode() * 4 for name in names]

    assert schemas.intersect(named("xydce"), named("xyfcd")) == named("xycd")


@given(lists, lists)
def test_intersect_is_symmetric_and_complete(ours: list[bytes], theirs: list[bytes]) -> None:
    agreed = intersect(ours, theirs)
    assert agreed == intersect(theirs, ours)
    assert sorted(agreed) == sorted(set(ours) & set(theirs))


@given(lists)
def test_equal_lists_keep_their_order(ours: list[bytes]) -> None:
    assert intersect(ours, ours) == ours


@given(st.lists(st.text(max_size=6), max_size=6), st.randoms())
def test_bundle_is_a_set(topics: list[str], random: Any) -> None:
    shuffled = topics + topics
    random.shuffle(shuffled)
    assert schemas.bundle_hash(shuffled) == bundle_hash(topics)


def test_bundle_order_is_that_of_utf8() -> None:
    # In UTF-16 order, as other languages compare strings, the second would come first.
    assert bundle_hash(["\uffff", "\U00010000"]) == bundle_hash(["\uffff\U00010000"])


@given(st.lists(hashes, unique=True, max_size=MAX_BUNDLES))
def test_hello_round_trip(bundles: list[bytes]) -> None:
    assert parse_hello(ExtTopicTable(topicBundleHashes=bundles).SerializeToString()) == bundles


def test_hello_of_a_real_shape_with_an_unknown_field() -> None:
    assert parse_hello(bytes.fromhex("0a0401020304" + "1801" + "0a0405060708")) == [b"\1\2\3\4", b"\5\6\7\x08"]


def test_empty_hello() -> None:
    assert parse_hello(b"") == []


@pytest.mark.parametrize(
    ("ext", "reason"),
    [
        (b"\x0a\x04\x01", "hello_malformed"),
        (b"\xff" * 20, "hello_malformed"),
        (b"\x0a\x04\x01\x02\x03\x04" * 2, "hello_repeats"),
        (b"\x0a\x03\x01\x02\x03", "hello_hash_length"),
        (b"\x0a\x05\x01\x02\x03\x04\x05", "hello_hash_length"),
        (b"\x0a\x00", "hello_hash_length"),
        (
            b"".join(b"\x0a\x04" + value.to_bytes(4, "big") for value in range(MAX_BUNDLES + 1)),
            "hello_too_many_bundles",
        ),
    ],
)
def test_refused_hello(ext: bytes, reason: str) -> None:
    answer = parse_hello(ext)
    assert isinstance(answer, Rejected)
    assert answer.reason == reason


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_rejected(ext: bytes) -> None:
    answer = parse_hello(ext)
    if isinstance(answer, Rejected):
        assert answer.reason in REASONS
    else:
        assert all(len(known) == 4 for known in answer)
