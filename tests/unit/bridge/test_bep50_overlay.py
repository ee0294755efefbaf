"""The overlay as a whole: many nodes in simulated time with losses, both address families, hostile datagrams."""

from __future__ import annotations

from pathlib import Path
from random import Random
from statistics import median

import pytest
from nacl.signing import SigningKey

from kiln.bridge.bep50 import (
    Datagram,
    ItemConflict,
    ItemPublishError,
    ItemTransfer,
    ItemUpdate,
    Overlay,
    OverlaySettings,
)
from kiln.bridge.bep50.store import StoredTopic, TopicStore, TopicStoreError, decode_topic, encode_topic
from kiln.schemas.dht import bencode
from kiln.schemas.dht.bencode import Value
from kiln.schemas.dht.items import Item, build_item_fields, build_put_fields, compute_target, sign
from kiln.schemas.dht.krpc import (
    OLD_SEQUENCE,
    DhtAddress,
    KrpcError,
    KrpcQuery,
    KrpcResponse,
    MalformedDatagram,
    read_message,
    write_message,
)
from kit.overlay_simulation import Network

KEY = SigningKey(b"\x01" * 32)
PUBLIC, SALT = KEY.verify_key.encode(), b"salt"
TOPIC = compute_target(PUBLIC, SALT)


def item(sequence: int) -> Item:
    return sign(KEY, SALT, sequence, bencode.encode(b"v%d" % sequence))


def place(number: int) -> DhtAddress:
    return DhtAddress.parse(f"10.0.{number >> 8}.{number & 255}", 6881)


def place6(number: int) -> DhtAddress:
    return DhtAddress.parse(f"2001:db8:{number:x}::1", 6881)


def joined(network: Network, places: list[DhtAddress]) -> list[DhtAddress]:
    """Start a node at each place; each but the first knows one, any one, of those before it."""
    for number, each in enumerate(places):
        contacts = [places[network.random.randrange(number)]] if number else []
        network.apply(each, network.add(each).subscribe(PUBLIC, SALT, network.now, contacts=contacts))
    return places


def publish(network: Network, publisher: DhtAddress, new: Item) -> None:
    network.apply(publisher, network.overlays[publisher].publish(new, network.now))


def holders(network: Network, new: Item) -> int:
    return sum(each.topics[TOPIC].item == new for each in network.overlays.values())


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_a_hundred_nodes_have_the_newest_item_within_five_seconds_at_a_fifth_of_losses(seed: int) -> None:
    network = Network(seed, loss=0.2)
    places = joined(network, [place(number) for number in range(1, 101)])
    network.run(30.0)
    sizes = [len(each.topics[TOPIC].contacts) for each in network.overlays.values()]
    assert min(sizes) >= 5
    assert 10 <= median(sizes) <= max(sizes) <= 25
    for events in network.events.values():
        events.clear()
    for sequence, publisher in enumerate((places[0], places[0], places[0]), 1):
        publish(network, publisher, item(sequence))
        network.run(5.0)
        assert holders(network, item(sequence)) == 100
    events = [event for each in network.events.values() for event in each]
    assert sum(isinstance(event, ItemUpdate) for event in events) == 300  # each item once at each node
    received = sum(isinstance(event, ItemTransfer) and event.direction == "in" for event in events)
    assert received / 300 < 20  # copies per node and item


def test_a_burst_ends_with_the_newest_everywhere() -> None:
    network = Network(3, loss=0.2)
    places = joined(network, [place(number) for number in range(1, 31)])
    network.run(30.0)
    for sequence in range(1, 21):
        publish(network, places[0], item(sequence))
        network.run(0.05)
    network.run(5.0)
    assert holders(network, item(20)) == 30


def test_nodes_that_come_and_go_do_not_break_the_overlay() -> None:
    network = Network(4, loss=0.1)
    places = joined(network, [place(number) for number in range(1, 41)])
    network.run(30.0)
    for gone in places[20:]:
        network.stop(gone)
    for number in range(100, 110):
        network.apply(
            place(number), network.add(place(number)).subscribe(PUBLIC, SALT, network.now, contacts=places[:3])
        )
    network.run(60.0)
    publish(network, places[0], item(1))
    network.run(5.0)
    assert holders(network, item(1)) == 30
    alive = set(network.overlays)
    network.run(120.0)
    for each in network.overlays.values():
        assert {contact.address for contact in each.topics[TOPIC].contacts} <= alive


def test_a_node_cut_off_catches_up_when_it_is_back() -> None:
    network = Network(5)
    places = joined(network, [place(number) for number in range(1, 6)])
    network.run(10.0)
    cut = network.overlays.pop(places[4])
    publish(network, places[0], item(1))
    network.run(20.0)
    network.overlays[places[4]] = cut
    network.apply(places[4], cut.advance(network.now))
    network.run(60.0)
    assert holders(network, item(1)) == 5


def test_a_subscriber_comes_back_with_what_it_had(tmp_path: Path) -> None:
    network, store = Network(6), TopicStore(tmp_path)
    places = joined(network, [place(number) for number in range(1, 6)])
    network.run(10.0)
    publish(network, places[0], item(1))
    network.run(2.0)
    topic = network.overlays[places[4]].topics[TOPIC]
    store.save(TOPIC, topic.item, [each.address for each in topic.contacts])
    network.stop(places[4])
    publish(network, places[0], item(2))
    network.run(2.0)
    kept = store.load(TOPIC)
    assert kept.item == item(1)
    again = network.add(places[4])
    network.apply(places[4], again.subscribe(PUBLIC, SALT, network.now, kept.item, kept.contacts))
    assert again.topics[TOPIC].item == item(1)
    network.run(1.0)
    assert again.topics[TOPIC].item == item(2)


def test_a_node_that_was_alone_gets_contacts_again() -> None:
    network = Network(7)
    one, other = joined(network, [place(1), place(2)])
    network.run(5.0)
    network.stop(other)
    network.run(120.0)
    assert network.overlays[one].topics[TOPIC].contacts == []
    network.apply(other, network.add(other).subscribe(PUBLIC, SALT, network.now, contacts=[one]))
    network.run(5.0)
    assert [each.address for each in network.overlays[one].topics[TOPIC].contacts] == [other]


# ---------------------------------------------------------------- address families and ids


def test_an_ipv6_overlay_works_as_one_of_ipv4() -> None:
    network = Network(8)
    places = joined(network, [place6(number) for number in range(1, 31)])
    network.run(30.0)
    assert min(len(each.topics[TOPIC].tables[6]) for each in network.overlays.values()) >= 8
    big = sign(KEY, SALT, 1, bencode.encode(b"x" * 990))
    publish(network, places[0], big)
    network.run(5.0)
    assert holders(network, big) == 30


def test_an_answer_over_ipv6_fits_a_datagram_too() -> None:
    network = Network(8)
    places = joined(network, [place6(number) for number in range(1, 31)])
    network.run(30.0)
    publish(network, places[0], sign(KEY, SALT, 1, bencode.encode(b"x" * 996)))
    query = KrpcQuery(b"tttt", b"get", b"\x77" * 20, {b"target": TOPIC}, TOPIC, read_only=True)
    output = network.overlays[places[0]].receive(write_message(query), place6(999), network.now)
    (answer,) = [each for each in output.datagrams if each.address == place6(999)]
    assert 1350 < len(answer.data) <= 1452
    assert b"6:nodes6" in answer.data


def test_an_item_crosses_where_a_node_is_in_both_families() -> None:
    network = Network(9)
    both, four, six = Overlay(b"\x0b" * 20, 6881, Random(1), 0.0), place(1), place6(1)
    for each in (four, six):
        network.apply(each, network.add(each).subscribe(PUBLIC, SALT, network.now))
    # The simulated network knows a node by one address; this one is carried by hand.
    sent = both.subscribe(PUBLIC, SALT, 0.0, contacts=[four, six]).datagrams
    mine = {4: place(2), 6: place6(2)}

    def pump(datagrams: list[Datagram]) -> None:
        while datagrams:
            datagram = datagrams.pop(0)
            source = mine[datagram.address.family]
            for answer in network.overlays[datagram.address].receive(datagram.data, source, 0.0).datagrams:
                if answer.address == source:
                    datagrams.extend(both.receive(answer.data, datagram.address, 0.0).datagrams)

    pump(sent)
    assert {len(table) for table in both.topics[TOPIC].tables.values()} == {1}
    (push,) = [each for each in network.overlays[four].publish(item(1), 0.0).datagrams if each.address == mine[4]]
    datagrams = both.receive(push.data, four, 0.0).datagrams
    if both.topics[TOPIC].item is None:  # the publisher had no token yet, and asks for one first
        (answer,) = [each for each in datagrams if each.address == four]
        datagrams = [
            each
            for put in network.overlays[four].receive(answer.data, mine[4], 0.0).datagrams
            for each in both.receive(put.data, four, 0.0).datagrams
        ]
    pump([each for each in datagrams if each.address == six])
    assert network.overlays[six].topics[TOPIC].item == item(1)


# ---------------------------------------------------------------- hostile datagrams


def mutated(chance: Random, datagram: bytes) -> bytes:
    """The datagram with one to four changes: bytes flipped, cut, repeated, put in, or a key or length made another."""
    data = bytearray(datagram)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(7):
            case 0 if at < len(data):
                data[at] = chance.randrange(256)
            case 1:
                del data[at : at + chance.randrange(1, 30)]
            case 2:
                data[at:at] = data[at : at + chance.randrange(1, 30)]
            case 3:
                data[at:at] = chance.randbytes(chance.randrange(1, 8))
            case 4:
                data[at:at] = chance.choice(
                    [b"d", b"l", b"e", b"i-1e", b"i01e", b"1:c", b"0:", b"99999:", b"le", b"de"]
                )
            case 5:
                keys = [b"1:t", b"1:y", b"1:q", b"1:a", b"1:r", b"1:e", b"1:c", b"1:k", b"1:v", b"3:seq", b"3:sig"]
                data = data.replace(chance.choice(keys), chance.choice(keys), 1)
            case _:
                data[at:] = chance.randbytes(chance.randrange(40))
        if not data:
            break
    return bytes(data)


class Target:
    """A node with one contact, which is known to have the held item, and a get to it that waits for its answer; and
    well-made datagrams to make bad ones of."""

    contact, stranger, contact_id, held, newer = place(1), place(2), b"\x31" * 20, item(5), item(6)

    def __init__(self) -> None:
        self.node = Overlay(b"\x00" * 20, 6881, Random(1), 0.0, OverlaySettings(rate=1e9, burst=1e9))
        self.node.subscribe(PUBLIC, SALT, 0.0)
        self.topic = self.node.topics[TOPIC]
        sent = self.receive(self.query(b"get", {b"target": TOPIC}))
        (token,) = [each.values[b"token"] for each in sent if isinstance(each, KrpcResponse)]
        (probe,) = [each for each in sent if isinstance(each, KrpcQuery)]
        self.receive(self.response(probe, self.held))
        sent = [read_message(each.data) for each in self.node.advance(2.5).datagrams]
        (self.get,) = [each for each in sent if isinstance(each, KrpcQuery) and each.method == b"get"]
        put, again = build_put_fields(self.newer) | {b"token": token}, build_put_fields(self.held) | {b"token": token}
        self.datagrams = [
            write_message(each)
            for each in (
                self.query(b"put", put),
                self.query(b"put", again),
                self.query(b"get", {b"target": TOPIC, b"seq": 5}),
                self.query(b"find_node", {b"target": b"\x09" * 20}),
                self.query(b"ping", {}),
                KrpcQuery(b"tt", b"get_peers", self.contact_id, {b"info_hash": TOPIC}),
                KrpcQuery(b"tt", b"put", self.contact_id, put),
                self.response(self.get, self.newer),
                KrpcError(self.get.transaction, OLD_SEQUENCE, TOPIC),
            )
        ]

    def query(self, method: bytes, arguments: dict[bytes, Value]) -> KrpcQuery:
        return KrpcQuery(b"tt", method, self.contact_id, arguments, TOPIC)

    def response(self, query: KrpcQuery, new: Item) -> KrpcResponse:
        return KrpcResponse(query.transaction, self.contact_id, {b"token": b"t", **build_item_fields(new)}, TOPIC)

    def receive(
        self, message: KrpcQuery | KrpcResponse
    ) -> list[KrpcQuery | KrpcResponse | KrpcError | MalformedDatagram]:
        output = self.node.receive(write_message(message), self.contact, 0.0)
        return [read_message(each.data) for each in output.datagrams]

    @property
    def state(self) -> tuple[object, ...]:
        contacts = [(each.id, each.address, each.sequence, each.token) for each in self.topic.contacts]
        return self.topic.item, len(self.topic.transactions), self.topic.published, contacts, len(self.node.topics)


@pytest.mark.parametrize(("seed", "count"), [(49, 15_000), pytest.param(50, 50_000, marks=pytest.mark.slow)])
def test_mutated_datagrams_raise_nothing_and_change_no_state_they_should_not(seed: int, count: int) -> None:
    chance = Random(seed)
    target_ = Target()
    before = target_.state
    stored = answered = probed = 0
    for _ in range(count):
        topic = target_.topic
        datagram = mutated(chance, chance.choice(target_.datagrams))
        source = chance.choice((target_.contact, target_.stranger))
        output = target_.node.receive(datagram, source, 2.5)
        assert len(output.datagrams) <= 4
        assert not any(isinstance(event, ItemConflict) for event in output.events)
        if target_.state == before:
            continue
        # Something has changed: then it is a message of this topic, and ...
        message = read_message(datagram)
        assert isinstance(message, KrpcQuery | KrpcResponse | KrpcError)
        assert message.topic == TOPIC
        if topic.item != target_.held:  # ... the true newer item, from whoever was given the token or was asked,
            assert topic.item == target_.newer
            assert source == target_.contact
            stored += 1
        if isinstance(message, KrpcQuery):  # ... or a query, which may lead to a probe of whoever asked,
            assert len(topic.transactions) - before_waiting(before) in (0, 1)
            probed += len(topic.transactions) > before_waiting(before)
        else:  # ... or the answer that was waited for.
            assert (source, message.transaction) == (target_.contact, target_.get.transaction)
            answered += 1
        assert all(each.address == target_.contact for each in topic.contacts)
        target_ = Target()
        before = target_.state
    assert min(stored, answered, probed) > count / 500  # some changes spoil nothing, so all three were put to the test


def before_waiting(state: tuple[object, ...]) -> int:
    waiting = state[1]
    assert isinstance(waiting, int)
    return waiting


def test_a_bad_item_in_an_answer_costs_the_contact_its_place() -> None:
    network = Network(11)
    one, other = joined(network, [place(1), place(2)])
    network.run(1.0)
    node = network.overlays[one]
    forged = build_item_fields(item(9)) | {b"v": b"forged"}
    for message in [read_message(each.data) for each in node.advance(network.now + 2.1).datagrams]:
        if isinstance(message, KrpcQuery) and message.method == b"get":
            sender = network.overlays[other].node_id
            node.receive(
                write_message(KrpcResponse(message.transaction, sender, forged, TOPIC)), other, network.now + 2.1
            )
    assert node.topics[TOPIC].item is None
    assert node.topics[TOPIC].contacts == []
    assert node.dropped["bad_item"] == 1


def test_a_datagram_from_nowhere_is_dropped() -> None:
    node = Overlay(b"\x00" * 20, 6881, Random(1), 0.0)
    ping = write_message(KrpcQuery(b"tt", b"ping", b"\x31" * 20, {}))
    for source in (DhtAddress(b"\xe0\x00\x00\x01", 1), DhtAddress(b"\x0a\x00\x00\x01", 0), DhtAddress(b"\xff" * 16, 1)):
        assert node.receive(ping, source, 0.0).datagrams == []
    assert node.dropped["unusable_source"] == 3


def test_the_answer_to_any_query_is_no_larger_than_a_datagram_and_to_a_bad_one_smaller_than_it() -> None:
    """Whoever forges the source address of a query gains little by it."""
    node = Overlay(b"\x00" * 20, 6881, Random(1), 0.0)
    unknown = write_message(KrpcQuery(b"tt", b"get", b"\x31" * 20, {b"target": TOPIC}, TOPIC))
    (answer,) = node.receive(unknown, place(1), 0.0).datagrams
    assert len(answer.data) < len(unknown)


# ---------------------------------------------------------------- events and files


def test_every_datagram_with_an_item_is_told_as_it_was_on_the_wire() -> None:
    network = Network(12)
    one, other = joined(network, [place(1), place(2)])
    network.run(5.0)
    publish(network, one, item(1))
    network.run(1.0)
    out = [event for event in network.events[one] if isinstance(event, ItemTransfer)]
    incoming = [event for event in network.events[other] if isinstance(event, ItemTransfer)]
    assert [event.direction for event in out] == ["out"]
    assert [event.direction for event in incoming] == ["in"]
    assert out[0].datagram == incoming[0].datagram
    assert (out[0].address, incoming[0].address) == (other, one)
    assert incoming[0].node == network.overlays[one].node_id
    assert out[0].node == network.overlays[other].node_id
    assert incoming[0].target == TOPIC


def test_a_bad_put_is_told_too_but_stored_nowhere() -> None:
    network = Network(13)
    (one,) = joined(network, [place(1)])
    query = KrpcQuery(b"tt", b"put", b"\x31" * 20, build_put_fields(item(1)), TOPIC)
    output = network.overlays[one].receive(write_message(query), place(2), 0.0)
    assert [type(event) for event in output.events] == [ItemTransfer]
    assert network.overlays[one].topics[TOPIC].item is None


def test_an_item_in_the_plain_dht_is_told_too() -> None:
    """Which has no ``c`` to say whose it is: what we put there, what we are shown there, and what we show."""
    plain, us, asker = place(1), place(2), place(3)
    overlay = Overlay(b"\x11" * 20, us.port, Random(1), 0.0, bootstrap=[plain])
    asked = overlay.subscribe(PUBLIC, SALT, 0.0).datagrams
    asked += overlay.publish(item(2), 0.0).datagrams
    told: list[tuple[str, DhtAddress, bytes]] = []
    time = 0.0
    while asked:
        (datagram, address), *asked = asked
        query = read_message(datagram)
        assert isinstance(query, KrpcQuery)
        shown = build_item_fields(item(1)) if query.method == b"get" else {}
        answer = KrpcResponse(query.transaction, b"\x22" * 20, {b"token": b"t", **shown})
        time += 0.01
        output = overlay.receive(write_message(answer), address, time)
        asked += output.datagrams
        carried = [event for event in output.events if isinstance(event, ItemTransfer)]
        assert all(event.target == TOPIC for event in carried)
        told += [(event.direction, event.address, event.node) for event in carried]
    assert ("in", plain, b"\x22" * 20) in told
    assert ("out", plain, b"\x22" * 20) in told
    get = KrpcQuery(b"tt", b"get", b"\x33" * 20, {b"target": TOPIC})
    (event,) = overlay.receive(write_message(get), asker, time).events
    assert isinstance(event, ItemTransfer)
    assert (event.direction, event.target, event.node) == ("out", TOPIC, b"\x33" * 20)


def test_what_was_published_in_an_earlier_run_is_ours_from_the_start() -> None:
    """A newer item under our key is another publisher's, also before we publish again."""
    network = Network(15)
    (one,) = joined(network, [place(1)])
    publish(network, one, item(5))
    other = network.add(place(2))
    network.apply(place(2), other.subscribe(PUBLIC, SALT, network.now, item(3), [one], publishing=True))
    network.run(2.0)
    (conflict,) = [event for event in network.events[place(2)] if isinstance(event, ItemConflict)]
    assert (conflict.stored, conflict.other, conflict.is_own) == (item(3), item(5), True)
    with pytest.raises(ItemPublishError, match="another publisher"):
        publish(network, place(2), item(6))


def test_files_of_topics_are_replaced_whole_and_checked(tmp_path: Path) -> None:
    store = TopicStore(tmp_path / "dht")
    assert store.load(TOPIC) == StoredTopic(None, [])
    store.save(TOPIC, item(1), [place(1), place6(1)])
    store.save(TOPIC, item(2), [place(1), place6(1)])
    assert store.load(TOPIC) == StoredTopic(item(2), [place(1), place6(1)])
    assert decode_topic(encode_topic(StoredTopic(None, [place(1)]))) == StoredTopic(None, [place(1)])
    assert store.load_node_id(b"\x01" * 20) == store.load_node_id(b"\x02" * 20) == b"\x01" * 20
    (path,) = (tmp_path / "dht").glob("*.item")
    good = path.read_bytes()
    for bad in (good[:-1], b"", b"le", good.replace(b"v2", b"v3"), encode_topic(StoredTopic(None, [])) + b"e"):
        path.write_bytes(bad)
        with pytest.raises(TopicStoreError, match=f"cannot read .*{path.name}.*Delete the file"):
            store.load(TOPIC)
    path.rename(path.with_name("00" * 20 + ".item"))
    path.with_name("00" * 20 + ".item").write_bytes(good)
    with pytest.raises(TopicStoreError, match="its item belongs to target"):
        store.load(b"\x00" * 20)


def test_two_publishers_of_one_key_notice_each_other() -> None:
    network = Network(14)
    one, other = joined(network, [place(1), place(2)])
    network.run(5.0)
    publish(network, one, item(1))
    network.run(1.0)
    publish(network, other, item(2))
    network.run(1.0)
    conflicts = [event for event in network.events[one] if isinstance(event, ItemConflict)]
    assert [(event.stored, event.other, event.is_own) for event in conflicts] == [(item(1), item(2), True)]
    with pytest.raises(ItemPublishError, match="another publisher"):
        publish(network, one, item(3))
    publish(network, other, item(3))  # only one of them goes on
    network.run(1.0)
    assert holders(network, item(3)) == 2
