"""The DHT's keys, addresses, memories and answers, without a network."""

from __future__ import annotations

import hashlib
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from multiaddr import Multiaddr

from kiln.bridge.libp2p.discovery import DialBackoff
from kiln.bridge.libp2p.kademlia import (
    MAX_ADDRESSES,
    MAX_PROVIDERS,
    AddressScope,
    DhtContact,
    DhtLimits,
    DhtServer,
    K,
    KademliaTable,
    ProviderRecords,
    TcpAddress,
    address_scope,
    build_announcement,
    is_peer_id,
    key_position,
    merge_contacts,
    nearest_contacts,
    read_address,
    shareable_addresses,
    topic_key,
    trusted_contact,
)

KEY = topic_key("/ceramic/testnet-clay")
OURS = TcpAddress("192.0.2.1", 4811)


def peer(number: int) -> bytes:
    return b"\x00\x24\x08\x01\x12\x20" + number.to_bytes(32, "big")


def contact(number: int, *addresses: TcpAddress) -> DhtContact:
    return DhtContact(peer(number), addresses or (TcpAddress(f"93.184.{number // 250}.{number % 250 + 1}", 4001),))


# ---------------------------------------------------------------- keys


def test_the_key_of_a_topic_is_its_sha2_256_multihash() -> None:
    assert b"\x12\x20" + hashlib.sha256(b"/ceramic/testnet-clay").digest() == KEY
    assert topic_key("/ceramic/ü")[2:] == hashlib.sha256("/ceramic/ü".encode()).digest()


@given(st.text(max_size=60))
def test_the_key_of_any_topic_is_its_sha2_256_multihash(topic: str) -> None:
    assert topic_key(topic) == b"\x12\x20" + hashlib.sha256(topic.encode()).digest()


def test_peer_ids() -> None:
    assert is_peer_id(peer(1))
    assert is_peer_id(b"\x12\x20" + bytes(32))
    for wrong in (b"", b"\x00\x00", b"\x12\x20" + bytes(31), peer(1) + b"\x00", b"\x00\x7f" + bytes(127), b"\x11\x14"):
        assert not is_peer_id(wrong)


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", AddressScope.HOST),
        ("127.255.0.9", AddressScope.HOST),
        ("::1", AddressScope.HOST),
        ("::ffff:127.0.0.1", AddressScope.HOST),
        ("10.0.0.1", AddressScope.SITE),
        ("192.168.1.1", AddressScope.SITE),
        ("172.16.0.1", AddressScope.SITE),
        ("100.64.0.1", AddressScope.SITE),
        ("fd00::1", AddressScope.SITE),
        ("::ffff:10.0.0.1", AddressScope.SITE),
        ("93.184.215.14", AddressScope.WORLD),
        ("2606:2800:21f:cb07::1", AddressScope.WORLD),
        ("0.0.0.0", None),
        ("::", None),
        ("169.254.169.254", None),
        ("fe80::1", None),
        ("224.0.0.1", None),
        ("255.255.255.255", None),
        ("240.0.0.1", None),
        ("2002:7f00:1::", None),
        ("64:ff9b::7f00:1", None),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", None),
    ],
)
def test_from_where_an_address_can_be_reached(host: str, expected: AddressScope | None) -> None:
    assert address_scope(host) == expected


@given(st.ip_addresses(), st.integers(1, 65535), st.booleans())
def test_addresses_are_multiaddrs(ip: object, port: int, named: bool) -> None:
    address = TcpAddress(str(ip), port)
    text = address.text + ("/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN" if named else "")
    raw = Multiaddr(text).to_bytes()
    owner = raw[-38:] if named else peer(1)
    assert address.bytes == Multiaddr(address.text).to_bytes()
    assert read_address(raw, owner) == address
    if named:
        assert read_address(raw, peer(1)) is None  # somebody else's


@given(st.binary(max_size=80))
def test_anything_may_be_said_to_be_an_address(raw: bytes) -> None:
    address = read_address(raw, peer(1))
    assert address is None or (ip_address(address.host) and 0 < address.port < 65536)


@pytest.mark.parametrize(
    "text",
    [
        "/dns4/example.org/tcp/4001",
        "/ip4/93.184.215.14/udp/4001/quic-v1",
        "/ip4/93.184.215.14/tcp/4001/ws",
        "/ip4/1.2.3.4",
    ],
)
def test_no_other_address_is_read(text: str) -> None:
    assert read_address(Multiaddr(text).to_bytes(), peer(1)) is None


def test_who_is_outside_names_nothing_in_here() -> None:
    here, site, world = TcpAddress("127.0.0.1", 1), TcpAddress("10.0.0.1", 2), TcpAddress("93.184.215.14", 3)
    named = [each.bytes for each in (here, site, world, TcpAddress("0.0.0.0", 4), TcpAddress("169.254.169.254", 80))]
    assert trusted_contact(peer(1), named, AddressScope.WORLD).addresses == (world,)
    assert trusted_contact(peer(1), named, AddressScope.SITE).addresses == (site, world)
    assert trusted_contact(peer(1), named, AddressScope.HOST).addresses == (here, site, world)
    assert shareable_addresses((here, site, world), AddressScope.WORLD) == [world.bytes]
    assert shareable_addresses((here, site, world), AddressScope.HOST) == [here.bytes, site.bytes, world.bytes]


def test_of_many_addresses_few_are_kept() -> None:
    many = [TcpAddress("93.184.215.14", port) for port in range(1, 100)]
    known = trusted_contact(peer(1), [each.bytes for each in many], AddressScope.WORLD)
    assert known.addresses == tuple(many[:MAX_ADDRESSES])
    assert merge_contacts(contact(1, many[50]), known).addresses == (many[50], *many[: MAX_ADDRESSES - 1])


# ---------------------------------------------------------------- memory


def test_a_full_bucket_keeps_those_it_has() -> None:
    table = KademliaTable(peer(0))
    for number in range(1, 2000):
        table.add(contact(number))
    assert len(table) < 20 * 12
    far = [
        each.peer for each in table.contacts() if (key_position(each.peer) ^ key_position(peer(0))).bit_length() == 256
    ]
    assert len(far) == K
    assert far == [each for number in range(1, 2000) if (each := peer(number)) in far][:K]
    table.remove(far[0])
    table.add(contact(1999, OURS))
    assert len(table.contacts()) == len(table)


def test_nearest() -> None:
    all_of_them = [contact(number) for number in range(100)]
    found = nearest_contacts(all_of_them, KEY)
    distances = [key_position(each.peer) ^ key_position(KEY) for each in found]
    assert len(found) == K
    assert distances == sorted(distances)
    assert max(distances) <= min(
        key_position(each.peer) ^ key_position(KEY) for each in all_of_them if each not in found
    )


def test_records_are_bounded_and_age() -> None:
    providers = ProviderRecords(DhtLimits(records=6, of_a_key=3, of_a_peer=2, age=10))
    for number in range(5):
        providers.add(b"a", contact(number), 0)
    assert [each.peer for each in providers.get_providers(b"a", 1)] == [peer(2), peer(3), peer(4)]
    providers.add(b"a", contact(2), 5)  # again: now the newest
    providers.add(b"a", contact(9), 5)
    assert [each.peer for each in providers.get_providers(b"a", 6)] == [peer(4), peer(2), peer(9)]
    for key in (b"b", b"c", b"d"):
        providers.add(key, contact(7), 6)
    assert [len(providers.get_providers(key, 6)) for key in (b"b", b"c", b"d")] == [0, 1, 1]
    for number in range(20):
        providers.add(bytes([number]), contact(number + 20), 7)
    assert len(providers) == 6
    assert providers.get_providers(bytes([19]), 16.9)
    assert not providers.get_providers(bytes([19]), 17)
    assert len(providers) == 0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(0, 3)), max_size=60))
def test_what_is_renewed_within_its_time_is_there(steps: list[tuple[int, int, int]]) -> None:
    providers, model, now = ProviderRecords(DhtLimits(age=10)), dict[tuple[bytes, bytes], int](), 0
    for key, number, pause in steps:
        now += pause
        providers.add(bytes([key]), contact(number), now)
        model[bytes([key]), peer(number)] = now
        for each in range(5):
            there = {known.peer for known in providers.get_providers(bytes([each]), now)}
            assert there == {who for (what, who), since in model.items() if what == bytes([each]) and now - since < 10}


# ---------------------------------------------------------------- answers


def ask(
    server: DhtServer, message: Message, asker: int = 1, away: AddressScope = AddressScope.WORLD, known: int = 0
) -> Message | None:
    near = [contact(number) for number in range(100, 100 + known)]
    return server.answer(
        message, DhtContact(peer(asker), ()), away, near, DhtContact(peer(0), (OURS, TcpAddress("8.8.8.8", 1))), 0
    )


def test_what_was_announced_is_found_with_servers_that_are_near() -> None:
    server = DhtServer(peer(0), DhtLimits())
    address = TcpAddress("93.184.215.14", 4001)
    assert (
        ask(server, build_announcement(KEY, peer(1), [address.bytes])) == Message()
    )  # not answered: go would misread it
    answer = ask(server, Message(type=Message.GET_PROVIDERS, key=KEY), asker=2, known=30)
    assert answer is not None
    assert [(each.id, list(each.addrs)) for each in answer.providerPeers] == [(peer(1), [address.bytes])]
    assert len(answer.closerPeers) == K
    answer = ask(server, Message(type=Message.GET_PROVIDERS, key=topic_key("another")), asker=2)
    assert answer is not None
    assert not answer.providerPeers


def test_nobody_announces_another_nor_what_cannot_be_reached() -> None:
    server = DhtServer(peer(0), DhtLimits())
    ask(server, build_announcement(KEY, peer(2), [TcpAddress("93.184.215.14", 4001).bytes]), asker=1)
    ask(
        server,
        build_announcement(KEY, peer(1), [TcpAddress("127.0.0.1", 22).bytes, TcpAddress("10.0.0.1", 22).bytes]),
        asker=1,
    )
    ask(server, build_announcement(KEY, peer(1), []), asker=1)
    assert len(server.providers) == 0


def test_our_own_topics_are_found_at_us() -> None:
    server = DhtServer(peer(0), DhtLimits())
    server.provided = {KEY}
    answer = ask(server, Message(type=Message.GET_PROVIDERS, key=KEY))
    assert answer is not None
    assert [(each.id, list(each.addrs)) for each in answer.providerPeers] == [
        (peer(0), [TcpAddress("8.8.8.8", 1).bytes])
    ]
    answer = ask(server, Message(type=Message.FIND_NODE, key=peer(0)))
    assert answer is not None
    assert [each.id for each in answer.closerPeers] == [peer(0)]


def test_who_asks_is_not_named_to_himself() -> None:
    answer = ask(DhtServer(peer(0), DhtLimits()), Message(type=Message.FIND_NODE, key=KEY), asker=101, known=3)
    assert answer is not None
    assert {each.id for each in answer.closerPeers} == {peer(100), peer(102)}


def test_no_values() -> None:
    server = DhtServer(peer(0), DhtLimits())
    assert ask(server, Message(type=Message.PUT_VALUE, key=KEY)) is None
    answer = ask(server, Message(type=Message.GET_VALUE, key=KEY), known=3)
    assert answer is not None
    assert not answer.HasField("record")
    assert len(answer.closerPeers) == 3
    assert ask(server, Message(type=Message.PING)) == Message(type=Message.PING)
    for key in (b"", bytes(129)):
        assert ask(server, Message(type=Message.GET_PROVIDERS, key=key)) is None


def test_an_answer_is_bounded() -> None:
    server = DhtServer(peer(0), DhtLimits(of_a_key=1000))
    addresses = [TcpAddress("93.184.215.14", port).bytes for port in range(1, 30)]
    for number in range(1, 500):
        ask(server, build_announcement(KEY, peer(number), addresses), asker=number)
    answer = ask(server, Message(type=Message.GET_PROVIDERS, key=KEY), asker=1000, known=50)
    assert answer is not None
    assert len(answer.providerPeers) == MAX_PROVIDERS
    assert answer.ByteSize() < 32_000


# ---------------------------------------------------------------- failures


def test_what_fails_is_left_alone_for_longer_each_time() -> None:
    failures = DialBackoff(first=10, longest=35, max_entries=100, per_address=9)
    until = []
    now = 0.0
    for _ in range(4):
        failures.record_failure(peer(1), OURS, now)
        pause = 0
        while failures.in_backoff(peer(1), OURS, now + pause):
            pause += 1
        until.append(pause)
        now += pause
    assert until == [10, 20, 35, 35]
    assert not failures.in_backoff(peer(2), OURS, now)  # another may be there
    assert not failures.in_backoff(peer(1), TcpAddress("192.0.2.2", 1), now)
    failures.record_failure(peer(1), OURS, now)
    failures.record_success(peer(1), OURS)
    assert not failures.in_backoff(peer(1), OURS, now)


def test_one_address_is_not_dialled_for_each_of_many_ids() -> None:
    failures = DialBackoff(first=10, longest=35, max_entries=100, per_address=3)
    dialled = 0
    for number in range(50):
        if not failures.in_backoff(peer(number), OURS, 1):
            failures.record_dial(OURS, 1)
            dialled += 1
    assert dialled == 3
    assert not failures.in_backoff(peer(60), OURS, 11)


def test_failures_are_forgotten_when_there_are_too_many() -> None:
    failures = DialBackoff(first=10, longest=35, max_entries=100, per_address=3)
    for number in range(1000):
        failures.record_dial(TcpAddress("192.0.2.1", number + 1), 0)
        failures.record_failure(peer(number), OURS, 0)
    assert len(failures) == 200
