"""BEP 50, requirement by requirement: R1 to R15, each quoted from its text.

One node is driven by hand: `Peer` sends it datagrams from an address of its own, and sees what comes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest
from nacl.signing import SigningKey

from kiln.bridge.bep50 import (
    Datagram,
    ItemConflict,
    ItemPublishError,
    ItemUpdate,
    Overlay,
    OverlayEffects,
    OverlaySettings,
)
from kiln.bridge.bep50.limits import TOKEN_EPOCH, RateLimits, WriteTokens
from kiln.bridge.bep50.store import TopicStore
from kiln.bridge.bep50.table import RoutingTable
from kiln.schemas.dht import bencode
from kiln.schemas.dht.bencode import Value
from kiln.schemas.dht.items import Item, build_item_fields, build_put_fields, compute_target, sign
from kiln.schemas.dht.krpc import (
    DhtAddress,
    DhtNode,
    KrpcError,
    KrpcQuery,
    KrpcRefusal,
    KrpcResponse,
    MalformedDatagram,
    Message,
    read_message,
    read_nodes,
    write_message,
    write_nodes,
)
from kiln.schemas.dht.node_id import count_shared_bits
from kit.overlay_simulation import Network

KEY, OTHER_KEY = SigningKey(b"\x01" * 32), SigningKey(b"\x02" * 32)
PUBLIC, SALT = KEY.verify_key.encode(), b"salt"
TOPIC = compute_target(PUBLIC, SALT)
OWN_ID = b"\x00" * 20
HERE = DhtAddress.parse("10.0.0.1", 6881)
ANY = OverlaySettings(per_ip=0)


def item(sequence: int, value: bytes | None = None, key: SigningKey = KEY, salt: bytes = SALT) -> Item:
    return sign(key, salt, sequence, bencode.encode(value if value is not None else b"v%d" % sequence))


def read(datagram: Datagram) -> Message:
    message = read_message(datagram.data)
    assert not isinstance(message, MalformedDatagram)
    return message


def overlay(settings: OverlaySettings = ANY, bootstrap: Iterable[DhtAddress] = (), now: float = 0.0) -> Overlay:
    return Overlay(OWN_ID, HERE.port, Random(1), now, settings, bootstrap)


class Peer:
    """A node moved by hand."""

    def __init__(self, node: Overlay, number: int, node_id: bytes | None = None, topic: bytes | None = TOPIC) -> None:
        self.node = node
        self.id = node_id or Random(number).randbytes(20)
        self.address = DhtAddress.parse(f"10.1.{number >> 8}.{number & 255}", 1000 + number)
        self.topic = topic
        self.now = 0.0
        self.last = OverlayEffects([], [])

    def send(self, message: Message) -> list[Message]:
        """Send a message; all that comes back here."""
        return self.send_bytes(write_message(message))

    def send_bytes(self, data: bytes) -> list[Message]:
        self.last = self.node.receive(data, self.address, self.now)
        return self.mine(self.last)

    def mine(self, output: OverlayEffects) -> list[Message]:
        return [read(each) for each in output.datagrams if each.address == self.address]

    def ask(self, method: bytes, arguments: dict[bytes, Value] | None = None) -> KrpcResponse | KrpcError:
        """Send a query; its answer."""
        answers = self.send(KrpcQuery(b"tt", method, self.id, arguments or {}, self.topic, read_only=True))
        (answer,) = [each for each in answers if not isinstance(each, KrpcQuery)]
        assert answer.transaction == b"tt"
        return answer

    def token(self) -> bytes:
        answer = self.ask(b"get", {b"target": TOPIC})
        assert isinstance(answer, KrpcResponse)
        token = answer.values[b"token"]
        assert isinstance(token, bytes)
        return token

    def put(self, new: Item, token: bytes | None = None, **more: Value) -> KrpcResponse | KrpcError:
        extra: dict[bytes, Value] = {key.encode(): value for key, value in more.items()}
        return self.ask(b"put", {**build_put_fields(new), b"token": token or self.token(), **extra})

    def answer(self, query: Message, **values: Value) -> list[Message]:
        """Answer a query of the node; all that comes back here."""
        assert isinstance(query, KrpcQuery)
        fields: dict[bytes, Value] = {key.encode(): value for key, value in values.items()}
        return self.send(KrpcResponse(query.transaction, self.id, fields, self.topic))

    def enter(self, sequence: int | None = None) -> list[Message]:
        """Become a contact: ask something, and answer the get that this leads to. What the node asks next."""
        asked = self.send(KrpcQuery(b"tt", b"ping", self.id, {}, self.topic))
        (probe,) = [each for each in asked if isinstance(each, KrpcQuery)]
        assert probe.method == b"get"
        held: dict[str, Value] = {} if sequence is None else {"seq": sequence}
        after = self.answer(probe, token=b"token%d" % self.address.port, **held)
        assert self.node.topics[TOPIC].tables[4].find(self.address) is not None
        return after


def refusal(answer: KrpcResponse | KrpcError) -> int:
    assert isinstance(answer, KrpcError), answer
    assert answer.topic == TOPIC
    return answer.refusal.code


def puts(output: OverlayEffects) -> list[tuple[DhtAddress, KrpcQuery]]:
    found = [(each.address, read(each)) for each in output.datagrams]
    return [(address, each) for address, each in found if isinstance(each, KrpcQuery) and each.method == b"put"]


@pytest.fixture
def node() -> Overlay:
    """A node that has joined the topic and knows nobody."""
    made = overlay()
    made.subscribe(PUBLIC, SALT, 0.0)
    return made


def held(node: Overlay) -> Item | None:
    return node.topics[TOPIC].item


# ---------------------------------------------------------------- the routing table


def near(bits: int, number: int) -> DhtNode:
    """A node whose id shares exactly so many leading bits with OWN_ID."""
    rest = Random(bits * 1000 + number).getrandbits(159 - bits)
    node_id = (1 << 159 - bits | rest).to_bytes(20, "big")
    assert count_shared_bits(OWN_ID, node_id) == bits
    return DhtNode(node_id, DhtAddress.parse(f"10.{bits}.0.{number + 1}", 1))


def test_r1_k_is_one_but_for_the_home_bucket_and_its_sibling() -> None:
    """ "The value of K is set to one. The routing table's home bucket and its sibling SHOULD have a capacity of at
    least 8 nodes each. When the home bucket is split the sibling of the previous home bucket ... SHOULD be resized to
    one node per the setting of K=1." """
    table = RoutingTable(OWN_ID)
    for number in range(8):
        assert table.insert(near(0, number), float(number))
    assert table.sizes == [8]
    for number in range(8):
        assert table.insert(near(1, number), 10.0)
    assert table.sizes == [8, 8]
    assert table.insert(near(0, 9), 11.0) is None  # the sibling is full, and is not split
    for number in range(8):
        assert table.insert(near(2, number), 20.0)
    assert table.sizes == [1, 8, 8]
    assert table.closest(near(0, 0).id, 1) == [near(0, 0)]  # of the old sibling the longest good one is left
    assert table.insert(near(0, 1), 21.0) is None


def test_r1_the_sibling_takes_eight_also_after_the_split() -> None:
    table = RoutingTable(OWN_ID)
    for bits, count in [(0, 3), (1, 8), (0, 9)]:
        for number in range(count):
            table.insert(near(bits, number), 0.0)
    assert table.sizes == [8, 8]


def test_r1_a_table_stays_small_among_many_nodes() -> None:
    table = RoutingTable(OWN_ID)
    random = Random(5)
    for number in range(20_000):
        table.insert(DhtNode(random.randbytes(20), DhtAddress(number.to_bytes(4, "big"), 1)), 0.0)
    assert len(table) == sum(table.sizes)
    assert max(table.sizes[:-2]) <= 1
    assert len(table) <= 16 + len(table.sizes) - 2
    assert len(table) >= 16


def test_r1_a_node_that_fails_makes_room_and_one_that_does_not_keeps_its_place() -> None:
    table = RoutingTable(OWN_ID, per_ip=0)
    contacts = [table.insert(near(0, number), 0.0) for number in range(8)]
    for number in range(8):
        table.insert(near(1, number), 0.0)
    failing = contacts[3]
    assert failing is not None
    assert not table.has_room(near(0, 9))
    failing.failures = 1
    assert near(0, 3) not in table.closest(near(0, 3).id, 20)  # not handed out any more
    assert table.insert(near(0, 9), 1.0) is not None
    assert table.find(near(0, 3).address) is None
    thief = DhtNode(near(0, 5).id, DhtAddress.parse("10.9.9.9", 1))  # an id that another has
    assert not table.has_room(thief)
    assert table.insert(thief, 1.0) is None


def test_r1_one_address_cannot_fill_the_table() -> None:
    table = RoutingTable(OWN_ID, per_ip=2)
    ip = DhtAddress.parse("10.0.0.9", 1).ip
    taken = [table.insert(DhtNode(Random(port).randbytes(20), DhtAddress(ip, port)), 0.0) for port in range(1, 10)]
    assert sum(each is not None for each in taken) == 2


def test_r1_one_address_has_two_contacts_of_a_topic() -> None:
    node = overlay(OverlaySettings())
    node.subscribe(PUBLIC, SALT, 0.0)
    for number in range(1, 5):
        peer = Peer(node, number)
        peer.address = DhtAddress(HERE.ip, 7000 + number)
        for probe in peer.send(KrpcQuery(b"tt", b"ping", peer.id, {}, TOPIC)):
            if isinstance(probe, KrpcQuery):
                peer.answer(probe, token=b"t")
    assert len(node.topics[TOPIC].contacts) == 2


def test_r1_a_node_that_was_only_named_is_no_contact(node: Overlay) -> None:
    """A node may lie about others: only an answer makes a contact."""
    peer, named = Peer(node, 1), Peer(node, 2)
    sent = peer.send(KrpcQuery(b"tt", b"ping", peer.id, {}, TOPIC))
    (probe,) = (each for each in sent if isinstance(each, KrpcQuery))
    nodes = write_nodes([DhtNode(named.id, named.address)])
    peer.answer(probe, token=b"t", nodes=nodes[b"nodes"])
    assert [each.address for each in node.topics[TOPIC].contacts] == [peer.address]
    (second_probe,) = named.mine(peer.last)
    named.answer(second_probe, token=b"t")
    assert {each.address for each in node.topics[TOPIC].contacts} == {peer.address, named.address}


# ---------------------------------------------------------------- the key c


def test_r2_every_message_carries_c(node: Overlay) -> None:
    """ "All messages MUST contain a key c with a 20-byte string value." """
    sent: list[Datagram] = []
    for number in range(1, 5):
        peer = Peer(node, number)
        peer.enter(sequence=number)
        sent += peer.last.datagrams
    peer.put(item(9))
    sent += peer.last.datagrams
    for method in (b"ping", b"find_node", b"get", b"put", b"get_peers", b"nonsense"):
        peer.ask(method, {b"target": TOPIC})
        sent += peer.last.datagrams
    for second in range(1, 100):
        sent += node.advance(float(second)).datagrams
    kinds = {type(read(each)) for each in sent}
    assert kinds == {KrpcQuery, KrpcResponse, KrpcError}
    methods = {message.method for each in sent if isinstance(message := read(each), KrpcQuery)}
    assert methods == {b"get", b"find_node", b"put"}
    for each in sent:
        top = bencode.decode(each.data)
        assert isinstance(top, dict)
        assert top[b"c"] == TOPIC


def test_r2_a_message_without_our_c_is_none_of_the_topic(node: Overlay) -> None:
    peer = Peer(node, 1)
    token = peer.token()
    for topic in (None, b"\x07" * 20):
        stranger = Peer(node, 1, topic=topic)
        assert isinstance(stranger.put(item(1), token), KrpcError)
    for wrong in (b"1:c3:abc", b"1:ci1e", b"1:c0:", b"1:c21:" + b"a" * 21, b"1:cle"):
        query = write_message(KrpcQuery(b"tt", b"put", peer.id, {**build_put_fields(item(1)), b"token": token}, TOPIC))
        (answer,) = peer.send_bytes(query.replace(b"1:c20:" + TOPIC, wrong))
        assert isinstance(answer, KrpcError)
        assert answer.refusal.code == 203
    assert held(node) is None
    assert not node.topics[TOPIC].contacts


def test_r2_an_answer_with_another_c_is_not_taken() -> None:
    """No implementation of the plain DHT echoes ``c``: what comes without it is from no node of the topic."""
    node = overlay()
    salts = [SALT, b"other"]
    contact = Peer(node, 1)
    out = [node.subscribe(PUBLIC, salt, 0.0, contacts=[contact.address]) for salt in salts]
    (probe,) = contact.mine(out[0])
    assert isinstance(probe, KrpcQuery)
    fields = build_item_fields(item(3))
    for topic in (None, compute_target(PUBLIC, b"other"), b"\x07" * 20):
        contact.send(KrpcResponse(probe.transaction, contact.id, fields, topic))
    assert held(node) is None
    assert node.dropped["not_asked_for"] == 3
    contact.send(KrpcResponse(probe.transaction, contact.id, fields, TOPIC))
    assert held(node) == item(3)


# ---------------------------------------------------------------- what is permitted


def test_r3_get_peers_and_announce_peer_are_prohibited(node: Overlay) -> None:
    """ "The get_peers and announce_peer queries are prohibited." Error 204 is our choice: the text names none."""
    peer = Peer(node, 1)
    token = peer.token()
    assert refusal(peer.ask(b"get_peers", {b"info_hash": TOPIC})) == 204
    announce: dict[bytes, Value] = {b"info_hash": TOPIC, b"port": 1, b"token": token}
    assert refusal(peer.ask(b"announce_peer", announce)) == 204
    assert refusal(peer.ask(b"vote", {})) == 204


def test_r4_get_and_put_are_only_for_the_item_of_the_topic(node: Overlay) -> None:
    """ "Mutable get and put queries are only permitted for the mutable item associated with the topic." """
    peer = Peer(node, 1)
    token = peer.token()
    assert refusal(peer.ask(b"get", {b"target": b"\x07" * 20})) == 203
    assert refusal(peer.ask(b"get", {})) == 203
    assert refusal(peer.put(item(1, salt=b"other"), token)) == 203
    assert refusal(peer.put(item(1, salt=b""), token)) == 203
    assert refusal(peer.put(item(1, key=OTHER_KEY), token)) == 203
    assert refusal(peer.ask(b"put", {b"v": b"immutable", b"token": token})) == 203
    assert held(node) is None
    assert not any(isinstance(event, ItemUpdate) for event in peer.last.events)


# ---------------------------------------------------------------- a valid update


def test_r5_a_valid_update_is_stored(node: Overlay) -> None:
    """ "An update is valid if the query is valid per BEP 44 and the value has a sequence number greater than the
    client's currently stored value." """
    peer = Peer(node, 1)
    for sequence in (0, 1, 5, 2**63 - 1):
        before = held(node)
        assert isinstance(peer.put(item(sequence)), KrpcResponse)
        assert held(node) == item(sequence)
        assert ItemUpdate(TOPIC, item(sequence), "put", peer.address, before) in peer.last.events


def test_r5_what_bep44_refuses_is_refused(node: Overlay) -> None:
    peer = Peer(node, 1)
    peer.put(item(5))
    good, token = item(6), peer.token()
    fields = build_put_fields(good)

    def refused(**changed: Value) -> int:
        more: dict[bytes, Value] = {key.encode(): value for key, value in changed.items()}
        code = refusal(peer.ask(b"put", {**fields, b"token": token, **more}))
        assert held(node) == item(5)
        return code

    assert refused(v=b"x" * 997) == 205
    assert refused(salt=b"s" * 65) == 207
    assert refused(sig=b"\x00" * 64) == 206
    assert refused(seq=7) == 206
    assert refused(seq=-1) == 203
    assert refused(seq=2**63) == 203
    assert refused(v=b"another") == 206
    assert refused(token=b"") == 203
    assert refused(token=b"another!") == 203
    assert refused(token=1) == 203
    assert refused(cas=4) == 301
    assert refused(cas=b"5") == 301
    assert refused(**{key.decode(): value for key, value in build_put_fields(item(4)).items()}) == 302
    assert isinstance(peer.put(good, token, cas=5), KrpcResponse)
    assert held(node) == good


def test_r5_a_value_of_1000_bytes_is_stored_and_one_of_1001_not(node: Overlay) -> None:
    peer = Peer(node, 1)
    assert isinstance(peer.put(item(1, b"x" * 996)), KrpcResponse)
    newer = build_put_fields(item(2, b"x" * 996)) | {b"v": b"x" * 997}
    assert refusal(peer.ask(b"put", {**newer, b"token": peer.token()})) == 205


def test_r5_a_value_that_is_not_canonical_is_refused_and_told(node: Overlay) -> None:
    """BEP 44: bencoding that is not canonical MUST be refused, and SHOULD be with error 203."""
    peer = Peer(node, 1)
    value = bencode.encode([1, 2])
    query = KrpcQuery(
        b"tt", b"put", peer.id, {**build_put_fields(sign(KEY, SALT, 1, value)), b"token": peer.token()}, TOPIC
    )
    (answer,) = peer.send_bytes(write_message(query).replace(value, b"li01ei2ee"))
    assert answer == KrpcError(b"tt", KrpcRefusal(203, b"malformed message"), TOPIC)
    assert held(node) is None


def test_r5_the_same_item_again_is_acknowledged_and_another_of_its_number_is_not(node: Overlay) -> None:
    """BEP 44 would refuse both; with flooding the first is the commonest put of all, and says that both have it."""
    peer = Peer(node, 1)
    peer.put(item(5))
    assert isinstance(peer.put(item(5)), KrpcResponse)
    assert refusal(peer.put(item(5, b"another"))) == 302
    assert ItemConflict(TOPIC, item(5), item(5, b"another"), False, peer.address) in peer.last.events
    assert held(node) == item(5)
    forged = build_put_fields(item(5)) | {b"v": b"forged"}
    assert refusal(peer.ask(b"put", {**forged, b"token": peer.token()})) == 206
    assert not any(isinstance(event, ItemConflict) for event in peer.last.events)


def test_r5_a_token_is_bound_to_address_and_time() -> None:
    """BEP 5: the secret changes every five minutes, and tokens up to ten minutes old are accepted."""
    tokens = WriteTokens(b"secret")
    token = tokens.create_token(b"\x0a\x00\x00\x01", TOPIC, 10.0)
    assert tokens.is_valid(token, b"\x0a\x00\x00\x01", TOPIC, 10.0)
    assert tokens.is_valid(token, b"\x0a\x00\x00\x01", TOPIC, 10.0 + TOKEN_EPOCH)
    assert not tokens.is_valid(token, b"\x0a\x00\x00\x01", TOPIC, 10.0 + 2 * TOKEN_EPOCH)
    assert not tokens.is_valid(token, b"\x0a\x00\x00\x02", TOPIC, 10.0)
    assert not tokens.is_valid(token, b"\x0a\x00\x00\x01", b"\x07" * 20, 10.0)
    assert not WriteTokens(b"other").is_valid(token, b"\x0a\x00\x00\x01", TOPIC, 10.0)
    assert tokens.is_valid(tokens.create_token(b"\x00" * 16, TOPIC, -5.0), b"\x00" * 16, TOPIC, -5.0)


def test_r5_one_address_is_answered_so_many_queries_and_no_more() -> None:
    node = overlay(OverlaySettings(rate=10, burst=20))
    node.subscribe(PUBLIC, SALT, 0.0)
    one, other = Peer(node, 1), Peer(node, 2)
    ping = KrpcQuery(b"tt", b"ping", one.id, {}, TOPIC, read_only=True)
    assert sum(len(one.send(ping)) for _ in range(100)) == 20
    assert node.dropped["too_many_queries"] == 80
    assert isinstance(other.ask(b"ping"), KrpcResponse)
    one.now = 1.0
    assert sum(len(one.send(ping)) for _ in range(100)) == 10


def test_r5_addresses_that_one_host_can_have_share_a_limit() -> None:
    limits = RateLimits(rate=1, burst=1)
    assert limits.allows(bytes.fromhex("20010db8000000010000000000000001"), 0.0)
    assert not limits.allows(bytes.fromhex("20010db8000000010000000000000002"), 0.0)
    assert limits.allows(bytes.fromhex("20010db8000000020000000000000001"), 0.0)


# ---------------------------------------------------------------- forwarding


@pytest.fixture
def contacts(node: Overlay) -> list[Peer]:
    """Six contacts of the node that have no item yet."""
    peers = [Peer(node, number) for number in range(1, 7)]
    for peer in peers:
        peer.enter()
    return peers


def test_r6_a_valid_put_is_forwarded_to_all_contacts(node: Overlay, contacts: list[Peer]) -> None:
    """ "If a put query contains a valid update it SHOULD be forwarded to all nodes in the routing table for the topic."
    But not back to where it came from, which is known to have it."""
    sender, *others = contacts
    assert isinstance(sender.put(item(1)), KrpcResponse)
    assert {address for address, _ in puts(sender.last)} == {each.address for each in others}


def test_r6_nothing_else_is_forwarded(node: Overlay, contacts: list[Peer]) -> None:
    sender, other, *rest = contacts
    sender.put(item(5))
    for peer in [other, *rest]:
        for _, query in [each for each in puts(sender.last) if each[0] == peer.address]:
            assert peer.answer(query) == []
    for again in (item(5), item(4), item(5, b"another")):
        other.put(again)
        assert puts(other.last) == []
    other.ask(b"put", {**build_put_fields(item(6)), b"sig": b"\x00" * 64, b"token": other.token()})
    assert puts(other.last) == []


def test_r6_a_burst_is_forwarded_as_its_first_and_its_newest(node: Overlay, contacts: list[Peer]) -> None:
    """One put at a time is on its way to a contact: who is slow misses what is out of date anyway."""
    sender, other, *_ = contacts
    sent = []
    for sequence in range(1, 10):
        sender.put(item(sequence))
        sent += [query for address, query in puts(sender.last) if address == other.address]
    assert [each.arguments[b"seq"] for each in sent] == [1]
    (newest,) = other.answer(sent[0])
    assert isinstance(newest, KrpcQuery)
    assert newest.arguments[b"seq"] == 9
    assert other.answer(newest) == []


def test_r6_a_contact_that_is_known_to_have_it_is_sent_nothing(node: Overlay) -> None:
    ahead, sender = Peer(node, 1), Peer(node, 2)
    ahead.enter(sequence=7)
    sender.enter()
    sender.put(item(7))
    assert puts(sender.last) == []


@pytest.mark.parametrize("first", [None, 5], ids=["no item", "an item"])
def test_r6_a_get_query_cannot_claim_an_item_that_is_not_published_yet(node: Overlay, first: int | None) -> None:
    """A get query has neither a token nor a signature, so one forged datagram could cut a contact off."""
    sender, victim = Peer(node, 1), Peer(node, 2)
    sender.enter()
    victim.enter()
    if first is not None:
        sender.put(item(first))
        victim.answer(puts(sender.last)[0][1])
    victim.ask(b"get", {b"target": TOPIC, b"seq": 2**63 - 1})
    for sequence in (6, 7):
        sender.put(item(sequence))
        ((address, query),) = puts(sender.last)
        assert (address, query.arguments[b"seq"]) == (victim.address, sequence)
        victim.answer(query)


def test_r6_a_contact_that_has_lost_the_item_is_sent_it_again(node: Overlay) -> None:
    sender, forgetful = Peer(node, 1), Peer(node, 2)
    sender.enter()
    sender.put(item(5))
    forgetful.enter(sequence=5)
    assert puts(forgetful.last) == []
    while not (gets := forgetful.mine(node.advance(forgetful.now))):
        forgetful.now = node.deadline or 0.0
    forgetful.answer(gets[0], token=b"token")
    assert [query.arguments[b"seq"] for _, query in puts(forgetful.last)] == [5]


def test_r6_a_newer_value_from_a_get_is_pushed_on_too(node: Overlay, contacts: list[Peer]) -> None:
    late = Peer(node, 50)
    asked = late.send(KrpcQuery(b"tt", b"ping", late.id, {}, TOPIC))
    (probe,) = [each for each in asked if isinstance(each, KrpcQuery)]
    late.send(KrpcResponse(probe.transaction, late.id, {**build_item_fields(item(3)), b"token": b"t"}, TOPIC))
    assert held(node) == item(3)
    assert {address for address, _ in puts(late.last)} == {each.address for each in contacts}


def test_r7_a_forwarded_put_is_a_query_of_our_own(node: Overlay, contacts: list[Peer]) -> None:
    """ "The query SHOULD be forwarded by generating new queries as if the client originated the request." """
    sender, *others = contacts
    sender.put(item(1), cas=0)
    forwarded = dict(puts(sender.last))
    assert len({each.transaction for each in forwarded.values()}) == len(others)
    for peer in others:
        query = forwarded[peer.address]
        assert query.sender == OWN_ID
        assert query.transaction != b"tt"
        expected = build_put_fields(item(1)) | {
            b"id": OWN_ID,
            b"token": b"token%d" % peer.address.port,
        }  # the receiver's
        assert query.arguments == expected  # and no cas


def test_r7_a_token_that_is_refused_is_renewed(node: Overlay, contacts: list[Peer]) -> None:
    sender, other, *_ = contacts
    sender.put(item(1))
    query = dict(puts(sender.last))[other.address]
    (get,) = other.send(KrpcError(query.transaction, KrpcRefusal(203, b"bad token"), TOPIC))
    assert isinstance(get, KrpcQuery)
    assert get.method == b"get"
    (again,) = other.answer(get, token=b"renewed")
    assert isinstance(again, KrpcQuery)
    assert (again.method, again.arguments[b"token"]) == (b"put", b"renewed")


def test_r7_a_contact_that_refuses_for_ever_is_not_asked_for_ever(node: Overlay, contacts: list[Peer]) -> None:
    sender, other, *_ = contacts
    for sequence, code in enumerate((203, 301, 302, 201), 1):
        sender.put(item(sequence))
        waiting: list[Message] = [query for address, query in puts(sender.last) if address == other.address]
        count = 0
        while waiting:
            query = waiting.pop()
            assert isinstance(query, KrpcQuery)
            count += 1
            assert count < 10
            if query.method == b"get":
                waiting += other.answer(query, token=b"t", seq=0)
            elif query.method == b"put":
                waiting += other.send(KrpcError(query.transaction, KrpcRefusal(code, b"no"), TOPIC))


def test_r7_a_contact_without_an_answer_is_tried_three_times_and_dropped(node: Overlay, contacts: list[Peer]) -> None:
    sender, *others = contacts
    sender.put(item(1))
    tries = {each.address: 1 for each in others}
    for tenth in range(1, 120):
        output = node.advance(tenth / 10)
        for address, _ in puts(output):
            tries[address] += 1
    assert max(tries.values()) <= 3
    assert not node.topics[TOPIC].contacts


# ---------------------------------------------------------------- get


def test_r8_seq_is_in_every_get_but_the_first_of_a_newcomer(node: Overlay) -> None:
    """ "The seq key SHOULD always be included in get requests unless the node is joining the topic and doesn't have a
    value for the item yet." """
    first, second = Peer(node, 1), Peer(node, 2)
    (probe, *_) = [
        each for each in first.send(KrpcQuery(b"tt", b"ping", first.id, {}, TOPIC)) if isinstance(each, KrpcQuery)
    ]
    assert b"seq" not in probe.arguments
    assert probe.arguments[b"target"] == TOPIC
    first.put(item(4))
    (probe, *_) = [
        each for each in second.send(KrpcQuery(b"tt", b"ping", second.id, {}, TOPIC)) if isinstance(each, KrpcQuery)
    ]
    assert probe.arguments[b"seq"] == 4
    second.answer(probe, token=b"t", seq=4)
    later = [read(each) for each in node.advance(60.0).datagrams]
    gets = [each for each in later if isinstance(each, KrpcQuery) and each.method == b"get"]
    assert [each.arguments.get(b"seq") for each in gets] == [4] * len(gets)
    assert len(gets) >= 2


def test_r8_a_value_is_left_out_if_it_is_not_newer(node: Overlay) -> None:
    """ "the responder did not have a newer value so it was omitted from the response" """
    peer = Peer(node, 1)
    empty = peer.ask(b"get", {b"target": TOPIC, b"seq": 3})
    assert isinstance(empty, KrpcResponse)
    assert set(empty.values) == {b"id", b"token"}
    peer.put(item(4))
    for known, expected in [(None, True), (3, True), (4, False), (5, False)]:
        arguments: dict[bytes, Value] = {b"target": TOPIC}
        if known is not None:
            arguments[b"seq"] = known
        answer = peer.ask(b"get", arguments)
        assert isinstance(answer, KrpcResponse)
        assert answer.values[b"seq"] == 4
        assert (b"v" in answer.values) == (b"k" in answer.values) == (b"sig" in answer.values) == expected
    assert refusal(peer.ask(b"get", {b"target": TOPIC, b"seq": b"4"})) == 203


def test_r8_an_answer_names_nodes_and_fits_one_datagram(node: Overlay) -> None:
    for number in range(16):
        Peer(node, number + 1, near(number // 8, number).id).enter()
    peer = Peer(node, 40)
    peer.put(item(1, b"x" * 996))
    peer.ask(b"get", {b"target": TOPIC})
    (datagram,) = [each for each in peer.last.datagrams if each.address == peer.address]
    answer = read(datagram)
    assert isinstance(answer, KrpcResponse)
    assert b"v" in answer.values
    assert 1400 < len(datagram.data) <= 1472
    named = read_nodes(answer.values)
    assert 1 <= len(named) <= 8
    assert {each.address for each in named} <= {each.address for each in node.topics[TOPIC].contacts}
    found = peer.ask(b"find_node", {b"target": b"\xff" * 20})
    assert isinstance(found, KrpcResponse)
    assert len(read_nodes(found.values)) == 8
    assert refusal(peer.ask(b"find_node", {b"target": b"\xff" * 19})) == 203


# ---------------------------------------------------------------- the plain DHT


class PlainDht:
    """One node of the plain DHT that keeps whatever it is given, as a stand-in: real ones are in tests/network."""

    def __init__(self) -> None:
        self.peers: dict[bytes, list[bytes]] = {}
        self.items: dict[bytes, dict[bytes, Value]] = {}
        self.queries: list[KrpcQuery] = []

    def __call__(self, data: bytes, source: DhtAddress, now: float) -> list[Datagram]:
        query = read_message(data)
        if not isinstance(query, KrpcQuery):
            return []
        self.queries.append(query)
        values: dict[bytes, Value] = {b"token": b"token" + source.ip}
        wanted = query.arguments.get(b"info_hash", query.arguments.get(b"target", b""))
        assert isinstance(wanted, bytes)
        match query.method:
            case b"get_peers":
                peers: list[Value] = list(self.peers.get(wanted, []))
                values |= {b"values": peers} if peers else {}
            case b"get":
                values |= self.items.get(wanted, {})
            case b"announce_peer":
                assert query.arguments[b"token"] == b"token" + source.ip
                assert query.arguments[b"port"] == source.port
                self.peers.setdefault(wanted, []).append(source.compact)
            case b"put":
                key, salt = query.arguments[b"k"], query.arguments.get(b"salt", b"")
                assert isinstance(key, bytes)
                assert isinstance(salt, bytes)
                keys = (b"k", b"seq", b"sig", b"v")
                self.items[compute_target(key, salt)] = {each: query.arguments[each] for each in keys}
        return [Datagram(write_message(KrpcResponse(query.transaction, b"\x55" * 20, values)), source)]


PLAIN = DhtAddress.parse("10.9.0.1", 6881)


def network_with_plain_dht(count: int) -> tuple[Network, PlainDht, list[DhtAddress]]:
    network, plain = Network(seed=1), PlainDht()
    network.responders[PLAIN] = plain
    places = [DhtAddress.parse(f"10.0.0.{number + 1}", 6000 + number) for number in range(count)]
    for place in places:
        joining = network.add(place, bootstrap=[PLAIN])
        network.apply(place, joining.subscribe(PUBLIC, SALT, network.now))
    return network, plain, places


def test_r9_others_are_found_by_get_peers_in_the_plain_dht() -> None:
    """ "Clients bootstrap into a network by sending a get_peers query to the DHT with the info_hash field set to the
    target hash of the mutable item associated with the topic." """
    network, plain, places = network_with_plain_dht(3)
    network.run(10.0)
    for place in places:
        found = {each.address for each in network.overlays[place].topics[TOPIC].contacts}
        assert found == set(places) - {place}
    lookups = [each for each in plain.queries if each.method == b"get_peers"]
    assert all(each.arguments[b"info_hash"] == TOPIC and each.topic is None for each in lookups)


def test_r10_a_node_is_announced_with_the_port_it_listens_on() -> None:
    """ "Clients SHOULD also announce themselves to this infohash with the port they are listening for DHT messages
    on." """
    network, plain, places = network_with_plain_dht(3)
    network.run(10.0)
    assert set(plain.peers[TOPIC]) == {each.compact for each in places}
    plain.peers.clear()
    network.run(1000.0)
    assert set(plain.peers[TOPIC]) == {each.compact for each in places}  # again within 15 minutes


def test_r9_without_bootstrap_nodes_the_plain_dht_is_not_used() -> None:
    node = overlay()
    sent = node.subscribe(PUBLIC, SALT, 0.0).datagrams
    for second in range(1, 2000, 10):
        sent += node.advance(float(second)).datagrams
    assert sent == []


def test_r10_plain_queries_are_answered_and_nothing_is_stored(node: Overlay) -> None:
    """libtorrent enters in its table whoever has announced, and asks it; without an answer each lookup would wait."""
    peer = Peer(node, 1, topic=None)
    for method in (b"ping", b"find_node", b"get_peers", b"get"):
        answer = peer.ask(method, {b"target": b"\x07" * 20, b"info_hash": b"\x07" * 20})
        assert isinstance(answer, KrpcResponse)
        assert answer.sender == OWN_ID
        assert answer.topic is None
        assert b"token" not in answer.values
    for method in (b"put", b"announce_peer"):
        assert isinstance(peer.ask(method, {**build_put_fields(item(1)), b"token": b"t"}), KrpcError)
    assert held(node) is None
    Peer(node, 2).put(item(1))
    answer = peer.ask(b"get", {b"target": TOPIC})
    assert isinstance(answer, KrpcResponse)
    assert answer.values[b"v"] == b"v1"  # what we have may be had


def test_r10_an_item_is_also_kept_in_the_plain_dht_for_those_in_no_overlay() -> None:
    network, plain, (publisher, *_) = network_with_plain_dht(2)
    network.run(10.0)
    network.apply(publisher, network.overlays[publisher].publish(item(1), network.now))
    network.run(1.0)
    assert plain.items[TOPIC][b"v"] == b"v1"
    network.apply(publisher, network.overlays[publisher].publish(item(2), network.now))
    network.run(3700.0)
    assert plain.items[TOPIC][b"v"] == b"v2"  # hourly, not each time
    assert sum(each.method == b"put" for each in plain.queries) == 2
    late = DhtAddress.parse("10.0.7.1", 6000)
    network.apply(late, network.add(late, bootstrap=[PLAIN]).subscribe(PUBLIC, SALT, network.now))
    network.run(0.5)
    assert network.overlays[late].topics[TOPIC].item == item(2)


def test_r10_a_rival_that_writes_to_the_plain_dht_alone_is_noticed() -> None:
    network, plain, (publisher, *_) = network_with_plain_dht(1)
    network.run(10.0)
    network.apply(publisher, network.overlays[publisher].publish(item(1), network.now))
    network.run(1.0)
    plain.items[TOPIC] = build_item_fields(item(2))
    network.run(1000.0)
    assert ItemConflict(TOPIC, item(1), item(2), True, PLAIN) in network.events[publisher]


# ---------------------------------------------------------------- topics


def test_r11_each_topic_is_a_separate_node() -> None:
    """ "Clients MUST treat each topic as a separate node with its own routing table and transaction state." """
    node = overlay()
    for salt in (SALT, b"other"):
        node.subscribe(PUBLIC, salt, 0.0)
    other = compute_target(PUBLIC, b"other")
    peer = Peer(node, 1)
    peer.enter()
    peer.put(item(1))
    assert len(node.topics[TOPIC].contacts) == 1
    assert node.topics[TOPIC].item == item(1)
    assert node.topics[other].contacts == []
    assert node.topics[other].item is None
    stranger = Peer(node, 2, topic=other)
    assert isinstance(stranger.ask(b"get", {b"target": TOPIC}), KrpcError)  # the other topic's node keeps no such item
    node.unsubscribe(TOPIC, 0.0)
    assert isinstance(peer.ask(b"ping"), KrpcError)
    assert isinstance(stranger.ask(b"ping"), KrpcResponse)


def test_r12_topics_of_one_address_have_one_node_id() -> None:
    """ "Nodes for different topics with the same listen address SHOULD use the same node id." """
    node = overlay()
    answers, queries = [], []
    for salt in (SALT, b"other"):
        node.subscribe(PUBLIC, salt, 0.0)
        peer = Peer(node, 1, topic=compute_target(PUBLIC, salt))
        answers.append(peer.ask(b"ping"))
        queries += [
            each for each in peer.send(KrpcQuery(b"tt", b"ping", peer.id, {}, peer.topic)) if each not in answers
        ]
    answers.append(Peer(node, 1, topic=None).ask(b"ping"))
    assert [isinstance(each, KrpcResponse) and each.sender for each in answers] == [OWN_ID] * 3
    probes = [each for each in queries if isinstance(each, KrpcQuery)]
    targets = [compute_target(PUBLIC, salt) for salt in (SALT, b"other")]
    assert [(each.topic, each.sender) for each in probes] == [(target, OWN_ID) for target in targets]


def test_r13_the_latest_value_is_kept_over_a_restart(node: Overlay, tmp_path: Path) -> None:
    """ "Clients SHOULD store the latest value of the mutable item associated with the topic at all times." """
    store, peer = TopicStore(tmp_path), Peer(node, 1)
    peer.enter()
    peer.put(item(5))
    for event in peer.last.events:
        if isinstance(event, ItemUpdate):
            store.save(event.target, event.item, [each.address for each in node.topics[TOPIC].contacts])
    stored = TopicStore(tmp_path).load(TOPIC)
    assert (stored.item, stored.contacts) == (item(5), [peer.address])

    again = overlay()
    out = again.subscribe(PUBLIC, SALT, 0.0, stored.item, stored.contacts)
    (probe,) = Peer(again, 1).mine(out)  # the contact of before is asked first, with what we have
    assert isinstance(probe, KrpcQuery)
    assert probe.arguments[b"seq"] == 5
    other = Peer(again, 2)
    served = other.ask(b"get", {b"target": TOPIC})
    assert isinstance(served, KrpcResponse)
    assert served.values[b"v"] == b"v5"
    assert refusal(other.put(item(4))) == 302
    assert isinstance(other.put(item(6)), KrpcResponse)
    with pytest.raises(ValueError, match="stored item has the target"):
        overlay().subscribe(PUBLIC, b"other", 0.0, stored.item)


def test_r14_only_a_topic_that_is_joined_can_be_published_in(node: Overlay) -> None:
    """ "A client which intends to publish messages to a topic SHOULD also subscribe to the topic." """
    node.publish(item(1), 0.0)
    assert held(node) == item(1)
    with pytest.raises(ItemPublishError, match="not joined"):
        node.publish(item(1, salt=b"other"), 0.0)
    with pytest.raises(ItemPublishError, match="not above the topic's 1"):
        node.publish(item(1), 0.0)
    with pytest.raises(ItemPublishError, match="signature"):
        node.publish(Item(PUBLIC, SALT, 2, b"i1e", b"\x00" * 64), 0.0)
    assert held(node) == item(1)


@pytest.mark.parametrize("rival", [item(7), item(5, b"another")])
def test_r14_a_second_publisher_of_our_key_stops_us(node: Overlay, rival: Item) -> None:
    """Two publishers with one key would outrun each other for ever: the first sign of another ends our publishing."""
    peer = Peer(node, 1)
    peer.put(item(3))  # before we have published anything this is history, not rivalry
    node.publish(item(5), 0.0)
    peer.put(item(5))
    assert not any(isinstance(event, ItemConflict) for event in peer.last.events)
    peer.put(rival)
    assert ItemConflict(TOPIC, item(5), rival, True, peer.address) in peer.last.events
    with pytest.raises(ItemPublishError, match=f"another publisher.*sequence {rival.sequence}"):
        node.publish(item(9), 0.0)


def test_r15_a_new_message_goes_to_all_contacts(node: Overlay, contacts: list[Peer]) -> None:
    """ "When a new message is generated it SHOULD be sent to all peers in the client's routing table for the
    topic." """
    output = node.publish(item(1), 0.0)
    sent = dict(puts(output))
    assert set(sent) == {each.address for each in contacts}
    contacts[0].answer(sent[contacts[0].address])
    answered = [each.address for each in node.topics[TOPIC].contacts if each.sequence == 1]
    assert answered == [contacts[0].address]


def test_r15_a_publisher_does_not_reach_for_everybody() -> None:
    """ "Clients SHOULD NOT attempt to send a new value to all nodes subscribed to the topic." The others get it from
    those in the table."""
    network = Network(seed=2)
    places = [DhtAddress.parse(f"10.0.0.{number + 1}", 6881) for number in range(40)]
    for number, place in enumerate(places):
        joining = network.add(place)
        network.apply(place, joining.subscribe(PUBLIC, SALT, network.now, contacts=places[:number][-1:]))
    network.run(30.0)
    publisher = network.overlays[places[0]]
    known = len(publisher.topics[TOPIC].contacts)
    output = publisher.publish(item(1), network.now)
    assert len(puts(output)) <= known < 39
    network.apply(places[0], output)
    network.run(1.0)
    assert all(each.topics[TOPIC].item == item(1) for each in network.overlays.values())
