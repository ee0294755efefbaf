"""Topic tables: the seed's Go function by its vectors, and hellos as peers send them."""

from __future__ import annotations

import json
import pickle
from random import Random

import pytest
from google.protobuf.message import Message as ProtobufMessage
from hypothesis import given
from hypothesis import strategies as st

import kiln.schemas
from conftest import VECTORS
from kiln.schemas.kafka.topics import MAX_TOPIC
from kiln.schemas.proto.gossipsub import rpc_pb2
from kiln.schemas.proto.gossipsub.rpc_pb2 import (
    RPC,
    ControlExtensions,
    ControlGraft,
    ControlIHave,
    ControlPrune,
    ExtTopicTable,
    Message,
)
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.topic_table import (
    INDEX_OUT_OF_RANGE,
    INDEX_REASONS,
    MAX_BUNDLES,
    NO_TABLE,
    REASONS,
    UNKNOWN_BUNDLE,
    BundleError,
    BundleSet,
    TopicTable,
    build_hello_extensions,
    bundle_hash,
    find_hello,
    intersect,
    negotiate_table,
    parse_hello,
    read_hello,
    resolve_topic,
    write_hello,
)

TABLES = VECTORS / "libp2p" / "topic_table.json"

hashes = st.binary(min_size=4, max_size=4)
few_hashes = st.sampled_from([bytes(3) + bytes([value]) for value in range(8)])
lists = st.lists(few_hashes, unique=True, max_size=8)


def test_all_intersect_vectors() -> None:
    cases = json.loads(TABLES.read_text())["intersect"]
    assert len(cases) >= 100
    for case in cases:
        first, second, result, swapped = (
            [bytes.fromhex(text) for text in case[name] or []] for name in ("First", "Second", "Result", "Swapped")
        )
        assert intersect(first, second) == result, case
        assert intersect(second, first) == swapped, case


def test_all_bundle_vectors() -> None:
    for bundle in json.loads(TABLES.read_text())["bundles"]:
        assert bundle_hash(bundle["Topics"] or []).hex() == bundle["Hash"]


@pytest.mark.parametrize(
    ("topics", "expected"),
    [
        ([], "7852b855"),
        (["/ceramic/mainnet"], "120f04b2"),
        (["b", "ab", "a"], "e825acf4"),
        (["a", "ab", "b", "a"], "e825acf4"),
    ],
)
def test_the_hash_of_a_bundle_is_the_last_four_bytes_over_its_topics_in_order(topics: list[str], expected: str) -> None:
    assert bundle_hash(topics).hex() == expected


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ("xydce", "xyfcd", "xycd"),
        ("xyfcd", "xydce", "xycd"),
        ("ba", "ba", "ba"),  # a common prefix stays in the order of preference
        ("ba", "ab", "ab"),  # without one, what is common is sorted
        ("cba", "cab", "cab"),
        ("abc", "", ""),
        ("ab", "cd", ""),
        ("ab", "abc", "ab"),
    ],
)
def test_intersections_of_the_go_function(ours: str, theirs: str, expected: str) -> None:
    def read(names: str) -> list[bytes]:
        return [name.encode() * 4 for name in names]

    assert intersect(read(ours), read(theirs)) == read(expected)


def test_example_of_the_specification() -> None:
    def named(names: str) -> list[bytes]:
        return [name.encode() * 4 for name in names]

    assert kiln.schemas.intersect(named("xydce"), named("xyfcd")) == named("xycd")


@given(lists, lists)
def test_intersect_is_symmetric_and_complete(ours: list[bytes], theirs: list[bytes]) -> None:
    agreed = intersect(ours, theirs)
    assert agreed == intersect(theirs, ours)
    assert sorted(agreed) == sorted(set(ours) & set(theirs))


@given(lists, lists)
def test_intersect_gives_a_part_of_both_and_nothing_twice(ours: list[bytes], theirs: list[bytes]) -> None:
    agreed = intersect(ours, theirs)
    assert set(agreed) <= set(ours)
    assert set(agreed) <= set(theirs)
    assert len(set(agreed)) == len(agreed)


@given(lists, lists)
def test_a_second_intersect_changes_nothing(ours: list[bytes], theirs: list[bytes]) -> None:
    agreed = intersect(ours, theirs)
    for other in (agreed, ours, theirs):
        assert intersect(agreed, other) == intersect(other, agreed) == agreed


@given(lists)
def test_equal_lists_keep_their_order(ours: list[bytes]) -> None:
    assert intersect(ours, ours) == ours


@given(st.lists(st.text(max_size=6), max_size=6), st.randoms())
def test_bundle_is_a_set(topics: list[str], random: Random) -> None:
    shuffled = topics + topics
    random.shuffle(shuffled)
    assert kiln.schemas.bundle_hash(shuffled) == bundle_hash(topics)


def test_bundle_order_is_that_of_utf8() -> None:
    # In UTF-16 order, as other languages compare strings, the second would come first.
    assert bundle_hash(["\uffff", "\U00010000"]) == bundle_hash(["\uffff\U00010000"])


@given(st.lists(hashes, unique=True, max_size=MAX_BUNDLES))
def test_hello_round_trip(bundles: list[bytes]) -> None:
    assert parse_hello(ExtTopicTable(topicBundleHashes=bundles).SerializeToString()) == bundles


def test_hello_of_a_real_shape_with_an_unknown_field() -> None:
    assert parse_hello(bytes.fromhex("0a0401020304" + "1801" + "0a0405060708")) == [b"\1\2\3\4", b"\5\6\7\x08"]


def test_a_hello_of_as_many_bundles_as_are_accepted() -> None:
    bundles = [number.to_bytes(4) for number in range(MAX_BUNDLES)]
    assert parse_hello(ExtTopicTable(topicBundleHashes=bundles).SerializeToString()) == bundles


def test_empty_hello() -> None:
    assert parse_hello(b"") == []


def test_a_repeated_bundle_hash_is_named() -> None:
    hashes = [b"\1\2\3\4", b"\5\6\7\x08", b"\5\6\7\x08"]
    answer = parse_hello(ExtTopicTable(topicBundleHashes=hashes).SerializeToString())
    assert answer == Rejected("hello_repeats", "bundle hash 05060708 occurs more than once")


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


# ---------------------------------------------------------------- hellos as they are written


@given(st.lists(hashes, unique=True, max_size=MAX_BUNDLES))
def test_a_hello_is_read_as_it_was_written(bundles: list[bytes]) -> None:
    assert parse_hello(write_hello(bundles)) == bundles
    rpc = RPC()
    rpc.control.extensions.CopyFrom(build_hello_extensions(bundles))
    sent = RPC.FromString(rpc.SerializeToString()).control.extensions
    assert read_hello(sent) == bundles


def test_the_hello_is_field_4820938() -> None:
    # varint of 4820938 << 3 | 2, then a message of one hash
    assert build_hello_extensions([b"abcd"]).SerializeToString().hex() == "d2fcb112" + "06" + "0a04" + b"abcd".hex()


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (Message(topicIndex=1), "38 01"),
        (ControlIHave(topicIndex=1), "18 01"),
        (ControlGraft(topicIndex=1), "10 01"),
        (ControlPrune(topicIndex=1), "20 01"),
        (RPC.SubOpts(topicIndex=1), "18 01"),
        (Message(topic="a"), "22 01 61"),
        (ControlIHave(topicID="a"), "0a 01 61"),
        (ControlGraft(topicID="a"), "0a 01 61"),
        (ControlPrune(topicID="a"), "0a 01 61"),
        (RPC.SubOpts(topicid="a"), "12 01 61"),
        (ExtTopicTable(topicBundleHashes=[b"abcd"]), "0a 04 61 62 63 64"),
        (ControlExtensions(topicTableExtension=ExtTopicTable()), "d2 fc b1 12 00"),
    ],
)
def test_names_indices_and_hashes_have_the_fields_of_the_draft(part: ProtobufMessage, expected: str) -> None:
    assert part.SerializeToString().hex(" ") == expected


def test_a_peer_with_other_extensions_says_nothing_of_tables() -> None:
    assert read_hello(ControlExtensions(testExtension=rpc_pb2.TestExtension())) is None
    assert read_hello(ControlExtensions(topicTableExtension=ExtTopicTable())) == []


@pytest.mark.parametrize(
    "bundles", [[b"abc"], [b"abcde"], [b"abcd"] * 2, [value.to_bytes(4, "big") for value in range(257)]]
)
def test_a_hello_that_peers_would_refuse_is_not_written(bundles: list[bytes]) -> None:
    with pytest.raises(BundleError, match="peers would refuse"):
        write_hello(bundles)


# ---------------------------------------------------------------- bundles

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
named_bundles = st.dictionaries(st.text(max_size=4), st.sets(names, min_size=1, max_size=5), max_size=5)


def bundles_of(named: dict[str, set[str]]) -> BundleSet:
    """Without those that hold the same as another."""
    distinct = {bundle_hash(topics): name for name, topics in named.items()}
    return BundleSet({name: named[name] for name in distinct.values()})


@given(named_bundles)
def test_bundles_are_known_by_their_hashes_and_in_bytewise_order(named: dict[str, set[str]]) -> None:
    made = bundles_of(named)
    for known, topics in made.items():
        assert known == bundle_hash(topics)
        assert [topic.encode() for topic in topics] == sorted(topic.encode() for topic in topics)
        assert set(topics) == named[made.name(known)]


def test_bundles_keep_the_order_of_preference() -> None:
    assert list(BundleSet({"late": ["z"], "early": ["a"]})) == [bundle_hash(["z"]), bundle_hash(["a"])]


@given(named_bundles)
def test_bundles_are_equal_by_content_in_another_process_too(named: dict[str, set[str]]) -> None:
    made = bundles_of(named)
    again = pickle.loads(pickle.dumps(made))
    assert (again, hash(again)) == (made, hash(made))
    assert dict(again) == dict(made)
    assert made != BundleSet({"another": ["a topic of its own"]})


def test_bundles_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(BundleError, match="bundles 'a' and 'b' both have the same topics"):
        BundleSet({"a": ["x", "y"], "b": ["y", "x", "x"]})
    # nothing stands between the topics in what is hashed
    with pytest.raises(BundleError, match="bundles 'a' and 'b' both have the same hash, f20015ad"):
        BundleSet({"a": ["ab", "c"], "b": ["a", "bc"]})


def test_a_bundle_may_have_the_longest_topic() -> None:
    assert list(BundleSet({"mine": ["a" * MAX_TOPIC]}).values()) == [("a" * MAX_TOPIC,)]


@pytest.mark.parametrize("topics", [[], [""], ["a", ""], ["\ud800"], ["a" * (MAX_TOPIC + 1)]])
def test_topics_that_no_bundle_can_have(topics: list[str]) -> None:
    with pytest.raises(BundleError, match="'mine'"):
        BundleSet({"mine": topics})


def test_bundles_once_known_stay_known() -> None:
    now, before = BundleSet({"a": ["x"], "b": ["y"]}), BundleSet({"b": ["z"], "was a": ["x"]})
    both = now.merge(before)
    assert list(both) == [bundle_hash(["x"]), bundle_hash(["y"]), bundle_hash(["z"])]
    assert [both.name(known) for known in both] == ["a", "b", bundle_hash(["z"]).hex()]
    with pytest.raises(BundleError, match="bundles 'mine' and 'old' have the same hash, f20015ad"):
        BundleSet({"mine": ["ab", "c"]}).merge(BundleSet({"old": ["a", "bc"]}))


# ---------------------------------------------------------------- tables


def reason_of(answer: str | Rejected) -> str:
    assert isinstance(answer, Rejected)
    assert answer.detail
    return answer.reason


@given(named_bundles, st.data())
def test_index_to_name_to_index(named: dict[str, set[str]], data: st.DataObject) -> None:
    made = bundles_of(named)
    table = TopicTable(data.draw(st.permutations(list(made))), made)
    seen: dict[str, int] = {}
    for index in range(1, len(table) + 1):
        topic = table.resolve(index)
        assert isinstance(topic, str)
        lowest = seen.setdefault(topic, index)
        assert table.find_index(topic) == lowest
    for topics in made.values():
        for topic in topics:
            found = table.find_index(topic)
            assert found is not None
            assert table.resolve(found) == topic
    assert len(table) == sum(map(len, made.values()))
    assert table.find_index("no topic of any bundle") is None


def test_a_table_is_its_bundles_one_after_another_from_1() -> None:
    made = BundleSet({"first": ["m", "b"], "second": ["a", "b"]})
    first, second = made
    table = TopicTable([second, first], made)
    assert [table.resolve(index) for index in (1, 2, 3, 4)] == ["a", "b", "b", "m"]
    assert (table.find_index("b"), table.find_index("m"), table.find_index("c")) == (2, 4, None)


@pytest.mark.parametrize("index", [0, 4, 127, 128, 2**31, 2**32 - 1])
def test_an_index_that_no_topic_has(index: int) -> None:
    made = BundleSet({"all": ["a", "b", "c"]})
    assert reason_of(TopicTable(list(made), made).resolve(index)) == INDEX_OUT_OF_RANGE


def test_an_unknown_bundle_hides_itself_and_all_after_it() -> None:
    made = BundleSet({"first": ["a", "b"], "last": ["z"]})
    first, last = made
    table = TopicTable([first, b"????", last], made)
    assert [table.resolve(1), table.resolve(2)] == ["a", "b"]
    assert [reason_of(table.resolve(index)) for index in (3, 4, 99)] == [UNKNOWN_BUNDLE] * 3
    answer = table.resolve(3)
    assert isinstance(answer, Rejected)
    assert b"????".hex() in answer.detail
    assert reason_of(table.resolve(0)) == INDEX_OUT_OF_RANGE  # none, whatever the bundle holds
    assert (table.find_index("a"), table.find_index("z")) == (1, None)


@pytest.mark.parametrize("index", [0, 1, 2**32 - 1])
def test_no_table(index: int) -> None:
    assert reason_of(TopicTable([], BundleSet({"a": ["x"]})).resolve(index)) == NO_TABLE


def test_the_reasons_for_an_index() -> None:
    assert INDEX_REASONS == ("index_out_of_range", "no_table_agreed", "unknown_bundle_hash")


OTHER, MINE = BundleSet({"other": ["x"]}), BundleSet({"b": ["m", "n"], "a": ["k"], "c": ["q"]})
(X,), (B, A, C) = OTHER, MINE


def table_of(hello_in: bytes, hello_out: bytes, bundles: BundleSet) -> TopicTable:
    return negotiate_table(hello_in, hello_out, bundles).table


def test_both_peers_compute_the_same_table() -> None:
    ours, theirs = write_hello([B, A, C]), write_hello([B, C, X, A])
    mine, yours = table_of(theirs, ours, MINE), table_of(ours, theirs, MINE)
    assert mine.agreed == yours.agreed == (B, *sorted((A, C)))
    topics = ["m", "n", *(topic for known in sorted((A, C)) for topic in MINE[known])]
    assert [table.resolve(index) for table in (mine, yours) for index in (1, 2, 3, 4)] == topics * 2


def test_a_table_is_computed_once_for_a_pair_of_hellos() -> None:
    pair = write_hello([B, X]), write_hello([B, A])
    table = table_of(*pair, MINE)
    again: BundleSet = pickle.loads(pickle.dumps(MINE))
    assert table_of(bytes(bytearray(pair[0])), pair[1], again) is table
    # pairs that agree on the same share one table
    assert table_of(write_hello([B]), write_hello([B, C]), MINE) is table
    assert table_of(*pair, OTHER) is not table


@pytest.mark.parametrize(
    ("theirs", "ours"), [(b"", b""), (write_hello([B]), b""), (b"\x0a\x03abc", write_hello([B])), (b"\xff" * 9000, b"")]
)
def test_hellos_that_agree_on_nothing(theirs: bytes, ours: bytes) -> None:
    for pair in ((theirs, ours), (ours, theirs)):
        table = table_of(*pair, MINE)
        assert len(table) == 0
        assert reason_of(table.resolve(1)) == NO_TABLE


def test_it_is_told_which_hello_was_refused() -> None:
    short, long = b"\x0a\x03abc", write_hello([B]) + b"\x7a\x80\x7d" + bytes(16_000)
    for pair, found in (
        ((short, write_hello([B])), [("hello_in", "hello_hash_length")]),
        ((write_hello([B]), short * 2), [("hello_out", "hello_hash_length")]),
        ((long * 2, short), [("hello_in", "hello_repeats"), ("hello_out", "hello_hash_length")]),
        ((long, write_hello([B])), []),
    ):
        assert [(side, answer.reason) for side, answer in negotiate_table(*pair, MINE).refused] == found


@given(st.binary(max_size=40), st.binary(max_size=40), st.integers(0, 2**32 - 1))
def test_any_hellos_and_any_index_have_an_answer(theirs: bytes, ours: bytes, index: int) -> None:
    answer = table_of(theirs, ours, MINE).resolve(index)
    assert answer in ("k", "m", "n", "q") or reason_of(answer) in INDEX_REASONS


def test_the_topic_of_a_message() -> None:
    table = table_of(write_hello([B, A]), write_hello([B]), MINE)
    for message, found in (
        (Message(topicIndex=2), "n"),
        (Message(topicIndex=2, topic="name"), "name"),
        (Message(topicIndex=2, topic=""), ""),
        (Message(topic="m"), "m"),
    ):
        assert resolve_topic(message, table) == found
    for message, reason in (
        (Message(topicIndex=3), INDEX_OUT_OF_RANGE),
        (Message(topicIndex=0), INDEX_OUT_OF_RANGE),
        (Message(), "topic_missing"),
    ):
        answer = resolve_topic(message, table)
        assert isinstance(answer, Rejected)
        assert answer.reason == reason


@given(st.lists(hashes, unique=True, max_size=8), st.binary(max_size=40))
def test_the_hello_of_an_rpc_holds_the_hashes_and_nothing_else(hashes_: list[bytes], more: bytes) -> None:
    rpc = RPC(subscriptions=[RPC.SubOpts(subscribe=True, topicid="a")])
    rpc.control.extensions.CopyFrom(build_hello_extensions(hashes_))
    unknown = b"\xfa\x01" + bytes([len(more)]) + more  # field 31, bytes
    rpc.control.extensions.topicTableExtension.MergeFromString(unknown)
    assert find_hello(rpc) == write_hello(hashes_)
    assert parse_hello(find_hello(rpc)) == hashes_


@pytest.mark.parametrize("refused", [[b"AAAA", b"AAAA"], [b"AAA"], [n.to_bytes(4, "big") for n in range(257)]])
def test_an_rpc_without_a_table_or_with_a_refused_one_has_no_hello(refused: list[bytes]) -> None:
    rpc = RPC()
    assert find_hello(rpc) == b""
    rpc.control.extensions.testExtension.SetInParent()
    assert find_hello(rpc) == b""
    rpc.control.extensions.topicTableExtension.topicBundleHashes.extend(refused)
    assert find_hello(rpc) == b""
