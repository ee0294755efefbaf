"""KRPC messages: the vectors of BEP 5, those made for BEP 50, and what is not a message."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import VECTORS
from kiln.schemas.dht import bencode
from kiln.schemas.dht.bencode import Value
from kiln.schemas.dht.items import Item, build_item_fields, build_put_fields
from kiln.schemas.dht.krpc import (
    BAD_TOKEN,
    MAX_DATAGRAM,
    OLD_SEQUENCE,
    PROHIBITED,
    REASONS,
    DhtAddress,
    DhtNode,
    KrpcError,
    KrpcQuery,
    KrpcRefusal,
    KrpcResponse,
    MalformedDatagram,
    Message,
    read_address,
    read_addresses,
    read_message,
    read_nodes,
    write_message,
    write_nodes,
)

ASKER, ANSWERER = b"abcdefghij0123456789", b"mnopqrstuvwxyz123456"
NODE = DhtNode(b"0123456789abcdefghij", DhtAddress.parse("127.0.0.1", 6881))

ids = st.binary(min_size=20, max_size=20)
addresses = st.builds(
    DhtAddress,
    st.binary(min_size=4, max_size=4) | st.binary(min_size=16, max_size=16),
    st.integers(0, 65535),
).filter(lambda each: each.usable)
fields: st.SearchStrategy[dict[bytes, Value]] = st.dictionaries(
    st.binary(max_size=4).filter(lambda key: key != b"id"), st.integers() | st.binary(max_size=20), max_size=4
)
transactions = st.binary(min_size=1, max_size=20)
topics = st.none() | ids
messages = st.one_of(
    st.builds(lambda t, q, s, a, c, r: KrpcQuery(t, q, s, {**a, b"id": s}, c, r), transactions, st.binary(max_size=12),
              ids, fields, topics, st.booleans()),
    st.builds(lambda t, s, v, c: KrpcResponse(t, s, {**v, b"id": s}, c), transactions, ids, fields, topics),
    st.builds(KrpcError, transactions, st.builds(KrpcRefusal, st.integers(0, 999), st.binary(max_size=30)), topics),
)  # fmt: skip


def question(method: bytes, topic: bytes | None = None, **arguments: Value) -> KrpcQuery:
    return KrpcQuery(b"aa", method, ASKER, {key.encode(): value for key, value in arguments.items()}, topic)


@given(messages)
def test_a_message_is_read_as_it_was_written(message: Message) -> None:
    assert read_message(write_message(message)) == message


BEP5: dict[str, Message] = {
    "error": KrpcError(b"aa", KrpcRefusal(201, b"A Generic Error Ocurred")),
    "ping_q": question(b"ping"),
    "ping_r": KrpcResponse(b"aa", ANSWERER, {}),
    "find_node_q": question(b"find_node", target=ANSWERER),
    "get_peers_q": question(b"get_peers", info_hash=ANSWERER),
    "get_peers_r_values": KrpcResponse(b"aa", ASKER, {b"token": b"aoeusnth", b"values": [b"axje.u", b"idhtnm"]}),
    "announce_peer_q": question(
        b"announce_peer", implied_port=1, info_hash=ANSWERER, port=6881, token=b"aoeusnth"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BEP5)
def test_bep5_vectors(name: str) -> None:
    vectors = json.loads((VECTORS / "bittorrent/vectors.json").read_text())["bep5"]
    written = vectors[name].encode()
    assert write_message(BEP5[name]) == written
    read = read_message(written)
    assert not isinstance(read, MalformedDatagram)
    assert write_message(read) == written


def test_bytes_of_the_example_of_bep50() -> None:
    query = KrpcQuery(b"aa", b"get", b"i" * 20, {b"seq": 4, b"target": b"x" * 20}, b"x" * 20)
    expected = b"d1:ad2:id20:%b3:seqi4e6:target20:%be1:c20:%b1:q3:get1:t2:aa1:y1:qe"
    assert write_message(query) == expected % (b"i" * 20, b"x" * 20, b"x" * 20)
    response = KrpcResponse(b"aa", b"i" * 20, {b"seq": 4, b"token": b"tok"}, b"x" * 20)
    expected = b"d1:c20:%b1:rd2:id20:%b3:seqi4e5:token3:toke1:t2:aa1:y1:re"
    assert write_message(response) == expected % (b"x" * 20, b"i" * 20)


@pytest.mark.parametrize("name", ["bep44_salt_foobar", "batch_announcement"])
def test_bep50_vectors(name: str) -> None:
    """Their reading is ours: `c` at the top level of queries, responses and errors."""
    everything = json.loads((VECTORS / "bittorrent/vectors_bep50.json").read_text())
    vectors = {key: bytes.fromhex(value) for key, value in everything[name].items() if isinstance(value, str)}
    key = bytes.fromhex("77ff84905a91936367c01360803104f92432fcd904a43511876df5cdf3e7e548")
    item = Item(key, vectors["salt"], everything[name]["seq"], vectors["v"], vectors["sig"])
    c, token, nodes = vectors["c"], b"aoeusnth", write_nodes([NODE])
    bare: dict[bytes, Value] = {**nodes, b"token": token}
    expected: dict[str, Message] = {
        "ping_q": question(b"ping", c),
        "ping_r": KrpcResponse(b"aa", ANSWERER, {}, c),
        "find_node_q": question(b"find_node", c, target=ASKER),
        "find_node_r": KrpcResponse(b"aa", ANSWERER, nodes, c),
        "get_q_join": question(b"get", c, target=c),
        "get_q_seq": question(b"get", c, target=c, seq=item.sequence),
        "get_r_value": KrpcResponse(b"aa", ANSWERER, {**bare, **build_item_fields(item)}, c),
        "get_r_nothing_newer": KrpcResponse(b"aa", ANSWERER, {**bare, b"seq": item.sequence}, c),
        "get_r_no_value": KrpcResponse(b"aa", ANSWERER, bare, c),
        "put_q": KrpcQuery(b"aa", b"put", ASKER, {**build_put_fields(item), b"token": token}, c),
        "put_r": KrpcResponse(b"aa", ANSWERER, {}, c),
        "put_e_old": KrpcError(b"aa", OLD_SEQUENCE, c),
        "put_e_token": KrpcError(b"aa", BAD_TOKEN, c),
        "get_peers_q_prohibited": question(b"get_peers", c, info_hash=c),
        "prohibited_e": KrpcError(b"aa", PROHIBITED, c),
    }
    assert {each: write_message(expected[each]) for each in expected} == {each: vectors[each] for each in expected}
    assert set(vectors) - set(expected) == {"salt", "v", "signed", "sig", "c"}
    for each in expected:
        read = read_message(vectors[each])
        assert not isinstance(read, MalformedDatagram)
        assert read.topic == c
        assert write_message(read) == vectors[each]


@pytest.mark.parametrize(
    ("datagram", "expected"),
    [
        (b"", MalformedDatagram("not_bencoded")),
        (b"i1e", MalformedDatagram("not_bencoded")),
        (b"\x00" * 20, MalformedDatagram("not_bencoded")),
        (b"d1:y1:qe", MalformedDatagram("bad_transaction")),
        (b"d1:ti1e1:y1:qe", MalformedDatagram("bad_transaction")),
        (b"d1:t21:" + b"a" * 21 + b"1:y1:qe", MalformedDatagram("bad_transaction")),
        (b"d1:t2:aae", MalformedDatagram("bad_message")),
        (b"d1:t2:aa1:y1:xe", MalformedDatagram("bad_message")),
        (b"d1:t2:aa1:y1:qe", MalformedDatagram("bad_message", b"aa")),
        (b"d1:ade1:q4:ping1:t2:aa1:y1:qe", MalformedDatagram("bad_id", b"aa")),
        (b"d1:ad2:id2:abe1:q4:ping1:t2:aa1:y1:qe", MalformedDatagram("bad_id", b"aa")),
        (b"d1:ad2:id20:abcdefghij0123456789e1:qi1e1:t2:aa1:y1:qe", MalformedDatagram("bad_message", b"aa")),
        (b"d1:rde1:t2:aa1:y1:re", MalformedDatagram("bad_id")),
        (b"d1:r2:ab1:t2:aa1:y1:re", MalformedDatagram("bad_message")),
        (b"d1:eli201ee1:t2:aa1:y1:ee", MalformedDatagram("bad_message")),
        (b"d1:e3:bad1:t2:aa1:y1:ee", MalformedDatagram("bad_message")),
        (b"d1:ci1e1:t2:aa1:y1:qe", MalformedDatagram("bad_topic", b"aa")),
        (b"d1:c3:abc1:t2:aa1:y1:qe", MalformedDatagram("bad_topic", b"aa")),
        (b"d1:c3:abc1:t2:aa1:y1:re", MalformedDatagram("bad_topic")),
        (b"d1:t2:aa1:y1:q1:qi01ee", MalformedDatagram("not_bencoded", b"aa")),
        (b"d1:y1:q1:t2:aa1:c20:abcdefghij01234567891:ai-0ee", MalformedDatagram("not_bencoded", b"aa", ASKER)),
        (b"d1:y1:r1:t2:aa1:ai-0ee", MalformedDatagram("not_bencoded")),
        (b"d" + b"a" * MAX_DATAGRAM, MalformedDatagram("too_big")),
    ],
)
def test_what_is_no_message_is_told_apart_by_whether_it_can_be_answered(
    datagram: bytes, expected: MalformedDatagram
) -> None:
    assert read_message(datagram) == expected
    assert expected.reason in REASONS


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda each: b"d1:t2:aa1:y1:q" + each))
def test_no_datagram_raises(datagram: bytes) -> None:
    read_message(datagram)


def test_unknown_keys_are_passed_over() -> None:
    datagram = bencode.encode(
        {b"t": b"aa", b"y": b"q", b"q": b"ping", b"a": {b"id": ASKER, b"x": 1}, b"v": b"LT\x01\x02", b"ip": b"abcdef"}
    )
    assert read_message(datagram) == KrpcQuery(b"aa", b"ping", ASKER, {b"id": ASKER, b"x": 1})


@given(st.lists(st.builds(DhtNode, ids, addresses), max_size=12))
def test_nodes_are_read_as_written_by_family(nodes: list[DhtNode]) -> None:
    assert read_nodes(write_nodes(nodes)) == sorted(nodes, key=lambda each: each.address.family)


def test_nodes_that_cannot_be_reached_are_passed_over() -> None:
    there = DhtAddress.parse("192.0.2.1", 1)
    nowhere = [
        DhtAddress(b"\x00" * 4, 1),
        DhtAddress(b"\xe0\x00\x00\x01", 1),
        DhtAddress(b"\xff" * 4, 1),
        DhtAddress(there.ip, 0),
    ]
    compact = b"".join(ASKER + each.compact for each in [*nowhere, there])
    assert read_nodes({b"nodes": compact}) == [DhtNode(ASKER, there)]
    assert read_nodes({b"nodes": compact[:-1], b"nodes6": 1}) == []
    values: list[Value] = [each.compact for each in [*nowhere, there]]
    assert read_addresses([*values, 1, b"short", []]) == [there]
    assert read_addresses(None) == read_addresses(b"axje.u") == []


@given(addresses)
def test_an_address_is_read_as_written(address: DhtAddress) -> None:
    assert read_address(address.compact) == address
    assert DhtAddress.parse(address.host, address.port) == address


def test_an_address_has_one_form() -> None:
    assert DhtAddress.parse("::ffff:192.0.2.1", 80) == DhtAddress.parse("192.0.2.1", 80)
    assert DhtAddress.parse("192.0.2.1", 80).text == "192.0.2.1:80"
    assert DhtAddress.parse("2001:db8::1", 80).text == "[2001:db8::1]:80"
    for host, port in [("router.example", 1), ("1.2.3", 1), ("192.0.2.1", 65536)]:
        with pytest.raises(ValueError, match=host.replace(".", r"\.")):
            DhtAddress.parse(host, port)
