"""kiln.bridge.gossipsub.table_agreements: topic tables with peers, hostile ones too. What goes out is judged by its
bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.bridge.gossipsub.table_agreements import (
    AGENT,
    PROTOCOL,
    Item,
    PeerTable,
    SendMode,
    TableAgreements,
)
from kiln.schemas.kafka.frames import read_rpc
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
from kiln.schemas.wire.topic_table import BundleError, BundleSet, TopicTable

CLAY, MAIN, SEP = "/ceramic/testnet-clay", "/ceramic/mainnet", "/ceramic/testnet-clay/sep/model/k2t6wz"
ELSEWHERE = "/ceramic/elsewhere"
BUNDLES = BundleSet({"clay": [SEP, CLAY], "main": [MAIN]})
CLAY_HASH, MAIN_HASH = BUNDLES
ANNA, BERT, CARL = b"anna", b"bert", b"carl"
LARGEST = 2**32 - 1
MODES: tuple[SendMode, ...] = get_args(SendMode)


class Tables:
    """The tables of peers by their ids, as the router has them; an unknown peer has no extensions."""

    def __init__(self, bundles: BundleSet, send: SendMode = "cautious") -> None:
        self._agreements = TableAgreements(bundles, send)
        self._peers: dict[bytes, PeerTable] = {}

    def _of(self, peer: bytes) -> PeerTable:
        return self._peers[peer] if peer in self._peers else self._agreements.open("/meshsub/1.2.0")[0]

    def add(self, peer: bytes, protocol: str = PROTOCOL) -> ControlExtensions | None:
        self.remove(peer)
        self._peers[peer], extensions = self._agreements.open(protocol)
        return extensions

    def remove(self, peer: bytes) -> None:
        self._peers.pop(peer, None)

    def set_agent(self, peer: bytes, agent: str) -> None:
        self._of(peer).is_kiln = agent.startswith(AGENT)

    def receive(self, peer: bytes, extensions: ControlExtensions, *, is_first: bool) -> None:
        self._agreements.receive(self._of(peer), extensions, is_first=is_first)

    def receive_hello(self, peer: bytes, extensions: ControlExtensions) -> None:
        self.receive(peer, extensions, is_first=True)

    def resolve_topic(self, peer: bytes, item: Item) -> str | None:
        return self._agreements.resolve_topic(self._of(peer), item)

    def encode_for_peer(self, peer: bytes, rpc: RPC) -> RPC:
        return self._agreements.encode_for_peer(self._of(peer), rpc)

    def with_topic_name(self, message: Message, topic: str) -> Message:
        return self._agreements.with_topic_name(message, topic)

    def table(self, peer: bytes) -> TopicTable | None:
        return self._of(peer).table

    @property
    def counters(self) -> Mapping[str, int]:
        return self._agreements.counters


def hello(*hashes: bytes) -> ControlExtensions:
    return ControlExtensions(topicTableExtension=ExtTopicTable(topicBundleHashes=hashes))


def side(send: SendMode = "cautious", greeted: Iterable[bytes] = (ANNA,), hashes: Iterable[bytes] = BUNDLES) -> Tables:
    """With peers that sent a hello of these hashes."""
    made = Tables(BUNDLES, send)
    for peer in greeted:
        made.add(peer)
        made.receive_hello(peer, hello(*hashes))
    return made


def full_rpc() -> RPC:
    """Everything that has a topic, by name."""
    rpc = RPC(publish=[Message(data=b"one", topic=CLAY), Message(data=b"two", topic=ELSEWHERE)])
    rpc.subscriptions.add(subscribe=True, topicid=MAIN)
    rpc.control.ihave.add(topicID=SEP, messageIDs=[b"id"])
    rpc.control.iwant.add(messageIDs=[b"id"])
    rpc.control.graft.add(topicID=MAIN)
    rpc.control.prune.add(topicID=CLAY, backoff=60)
    rpc.control.prune.add(topicID=ELSEWHERE)
    return rpc


def topics_in(table_side: Tables, peer: bytes, rpc: RPC) -> list[str | None]:
    control = rpc.control
    kinds: list[Iterable[Item]] = [rpc.subscriptions, rpc.publish, control.ihave, control.graft, control.prune]
    return [table_side.resolve_topic(peer, item) for kind in kinds for item in kind]


EVERY_KIND: list[Callable[[int], Item]] = [
    lambda index: Message(topicIndex=index),
    lambda index: RPC.SubOpts(subscribe=True, topicIndex=index),
    lambda index: ControlIHave(topicIndex=index),
    lambda index: ControlGraft(topicIndex=index),
    lambda index: ControlPrune(topicIndex=index),
]
KINDS = pytest.mark.parametrize("made", EVERY_KIND, ids=["message", "subscription", "ihave", "graft", "prune"])


# ---------------------------------------------------------------- hellos


def test_the_first_rpc_carries_our_bundles_in_order_of_preference() -> None:
    extensions = Tables(BUNDLES).add(ANNA, "/meshsub/1.3.0")
    assert extensions is not None
    assert list(extensions.topicTableExtension.topicBundleHashes) == [CLAY_HASH, MAIN_HASH]


@pytest.mark.parametrize("protocol", ["/meshsub/1.2.0", "/meshsub/1.1.0", "/meshsub/1.0.0", "/floodsub/1.0.0"])
def test_older_protocols_have_no_extensions(protocol: str) -> None:
    made = Tables(BUNDLES, "eager")
    assert made.add(ANNA, protocol) is None
    made.receive_hello(ANNA, hello(CLAY_HASH))
    assert made.counters == {"hello_unexpected": 1}
    assert made.resolve_topic(ANNA, Message(topicIndex=1)) is None
    assert made.encode_for_peer(ANNA, full_rpc()) == full_rpc()


def test_without_bundles_nothing_is_said_and_nothing_agreed() -> None:
    made = Tables(BundleSet(), "eager")
    assert made.add(ANNA) is None
    made.receive_hello(ANNA, hello(CLAY_HASH))
    assert made.resolve_topic(ANNA, Message(topicIndex=1)) is None
    assert made.encode_for_peer(ANNA, full_rpc()) == full_rpc()
    assert made.counters == {"hello_accepted": 1, "no_table_agreed": 1}


def test_more_bundles_than_a_hello_may_have() -> None:
    with pytest.raises(BundleError, match="257 bundle hashes"):
        Tables(BundleSet({str(number): [str(number)] for number in range(257)}))


HOSTILE = {
    "257 entries": (hello(*(number.to_bytes(4, "big") for number in range(257))), "hello_too_many_bundles"),
    "10,000 entries": (hello(*(number.to_bytes(4, "big") for number in range(10_000))), "hello_too_many_bundles"),
    "10,000 empty entries": (hello(*[b""] * 10_000), "hello_too_many_bundles"),
    "repeats": (hello(CLAY_HASH, MAIN_HASH, CLAY_HASH), "hello_repeats"),
    "3 bytes": (hello(CLAY_HASH, b"abc"), "hello_hash_length"),
    "5 bytes": (hello(CLAY_HASH, b"abcde"), "hello_hash_length"),
    "a megabyte": (hello(bytes(1 << 20)), "hello_hash_length"),
}


@pytest.mark.parametrize(("extensions", "reason"), HOSTILE.values(), ids=list(HOSTILE))
def test_a_refused_hello_is_counted_by_kind_and_makes_no_table(extensions: ControlExtensions, reason: str) -> None:
    made = Tables(BUNDLES, "eager")
    for peer in (ANNA, BERT):
        made.add(peer)
    made.receive_hello(BERT, hello(*BUNDLES))
    made.receive_hello(ANNA, extensions)
    assert made.counters == {"hello_accepted": 1, reason: 1}
    assert made.table(ANNA) is None
    # the peer is served on, by name
    assert made.resolve_topic(ANNA, Message(topic=CLAY)) == CLAY
    assert made.resolve_topic(ANNA, Message(topicIndex=1)) is None
    assert made.encode_for_peer(ANNA, full_rpc()) == full_rpc()
    # a good one after it does not help: both would have to know which counts
    made.receive_hello(ANNA, hello(*BUNDLES))
    assert made.table(ANNA) is None
    assert made.counters["hello_repeated"] == 1
    assert made.resolve_topic(BERT, Message(topicIndex=1)) == CLAY


def test_256_entries_are_taken() -> None:
    made = side(hashes=[*(number.to_bytes(4, "big") for number in range(255)), CLAY_HASH])
    assert made.resolve_topic(ANNA, Message(topicIndex=2)) == SEP


def test_a_second_hello_changes_nothing() -> None:
    made = side(hashes=[CLAY_HASH])
    for _ in range(3):
        made.receive_hello(ANNA, hello(MAIN_HASH))
    assert made.counters == {"hello_accepted": 1, "hello_repeated": 3}
    assert made.resolve_topic(ANNA, Message(topicIndex=1)) == CLAY


def test_only_the_first_rpc_of_a_stream_is_a_hello() -> None:
    made = Tables(BUNDLES)
    for peer in (ANNA, BERT):
        made.add(peer)
    for is_first in (True, False):
        made.receive(ANNA, hello(CLAY_HASH), is_first=is_first)
    made.receive(BERT, hello(CLAY_HASH), is_first=False)
    made.receive(CARL, hello(CLAY_HASH), is_first=True)
    assert made.counters == {"hello_accepted": 1, "hello_repeated": 1, "hello_late": 1, "hello_unexpected": 1}
    assert (made.table(ANNA) is None, made.table(BERT) is None) == (False, True)


def test_other_extensions_are_no_topic_table() -> None:
    made = Tables(BUNDLES)
    made.add(ANNA)
    made.receive_hello(ANNA, ControlExtensions())
    assert made.counters == {}
    made.receive_hello(ANNA, hello(CLAY_HASH))
    assert made.table(ANNA) is not None


def test_a_peer_that_comes_again_begins_anew() -> None:
    made = side("eager", hashes=[CLAY_HASH])
    made.add(ANNA)
    assert made.resolve_topic(ANNA, Message(topicIndex=1)) is None
    made.receive_hello(ANNA, hello(MAIN_HASH))
    assert made.resolve_topic(ANNA, Message(topicIndex=1)) == MAIN
    made.remove(ANNA)
    made.remove(ANNA)
    assert made.resolve_topic(ANNA, Message(topicIndex=1)) is None


def test_hellos_that_share_nothing() -> None:
    made = side("eager", hashes=[b"????"])
    assert made.counters == {"hello_accepted": 1}
    assert made.resolve_topic(ANNA, Message(topicIndex=1)) is None
    assert made.counters["no_table_agreed"] == 1
    assert made.encode_for_peer(ANNA, full_rpc()) == full_rpc()


# ---------------------------------------------------------------- in


@KINDS
def test_every_kind_is_read_by_index(made: Callable[[int], Item]) -> None:
    table_side = side()
    assert [table_side.resolve_topic(ANNA, made(index)) for index in (1, 2, 3)] == [CLAY, SEP, MAIN]
    assert table_side.counters["index_resolved"] == 3


@KINDS
@pytest.mark.parametrize("index", [0, 4, LARGEST])
def test_an_index_that_no_topic_has(made: Callable[[int], Item], index: int) -> None:
    table_side = side()
    assert table_side.resolve_topic(ANNA, made(index)) is None
    assert table_side.counters == {"hello_accepted": 1, "index_out_of_range": 1}


@KINDS
@pytest.mark.parametrize("index", [0, 1, LARGEST])
def test_an_index_without_a_table(made: Callable[[int], Item], index: int) -> None:
    table_side = Tables(BUNDLES)
    table_side.add(ANNA)
    assert table_side.resolve_topic(ANNA, made(index)) is None
    assert table_side.resolve_topic(b"nobody", made(index)) is None
    assert table_side.counters == {"no_table_agreed": 2}


@pytest.mark.parametrize("index", [0, 1, 3, LARGEST])
def test_the_name_wins_over_an_index(index: int) -> None:
    made = side()
    assert made.resolve_topic(ANNA, Message(topic=ELSEWHERE, topicIndex=index)) == ELSEWHERE
    assert made.resolve_topic(ANNA, Message(topic="", topicIndex=index)) is None
    assert made.resolve_topic(ANNA, ControlGraft(topicID=CLAY, topicIndex=index)) == CLAY
    assert made.counters == {"hello_accepted": 1, "name_and_index": 3}
    assert made.encode_for_peer(ANNA, full_rpc()) == full_rpc()


def test_field_3_of_a_subscription_means_partial_messages_to_most_peers() -> None:
    # go-libp2p-pubsub 0.16: requestsPartial and supportsSendingPartial beside every name
    option = RPC.SubOpts.FromString(bytes.fromhex("0801" + "1203" + b"abc".hex() + "1801" + "2000"))
    made = side()
    assert made.resolve_topic(ANNA, option) == "abc"
    assert made.counters == {"hello_accepted": 1}


@pytest.mark.parametrize("item", [Message(), RPC.SubOpts(), ControlIHave(), ControlGraft(), ControlPrune()])
def test_neither_name_nor_index(item: Item) -> None:
    made = side()
    assert made.resolve_topic(ANNA, item) is None
    assert made.counters == {"hello_accepted": 1, "topic_missing": 1}


def test_a_name_that_is_no_text() -> None:
    made = side()
    message = Message.FromString(Message(topic="???").SerializeToString().replace(b"???", b"a\xff\xfe"))
    message.topicIndex = 1
    assert made.resolve_topic(ANNA, message) is None
    assert made.counters == {"hello_accepted": 1, "topic_not_utf8": 1}


def test_a_message_is_named_in_a_copy() -> None:
    made = side()
    message = Message(data=b"data", seqno=b"1", signature=b"signature", topicIndex=2)
    before = message.SerializeToString()
    with_topic_name = made.with_topic_name(message, SEP)
    assert with_topic_name == Message(data=b"data", seqno=b"1", signature=b"signature", topic=SEP)
    assert message.SerializeToString() == before
    assert made.with_topic_name(Message(topic=CLAY, topicIndex=3), CLAY) == Message(topic=CLAY)


# ---------------------------------------------------------------- out


def test_eager_writes_indices_wherever_the_table_has_the_topic() -> None:
    rpc = side("eager").encode_for_peer(ANNA, full_rpc())
    expected = full_rpc()
    for item, index in (
        (expected.publish[0], 1),
        (expected.control.ihave[0], 2),
        (expected.control.graft[0], 3),
        (expected.control.prune[0], 1),
    ):
        item.ClearField("topic") if isinstance(item, Message) else item.ClearField("topicID")
        item.topicIndex = index
    assert rpc == expected
    wire = rpc.SerializeToString()
    assert (wire.count(CLAY.encode()), wire.count(ELSEWHERE.encode())) == (0, 2)
    assert wire.count(MAIN.encode()) == 1  # the subscription


def test_a_name_that_is_shorter_than_its_index_stays() -> None:
    many = BundleSet({"many": [*(f"!{number}" for number in range(16_382)), "}", "~"]})
    made = Tables(many, "eager")
    made.add(ANNA)
    made.receive_hello(ANNA, hello(*many))
    rpc = made.encode_for_peer(ANNA, RPC(publish=[Message(topic="}"), Message(topic="~")]))
    assert list(rpc.publish) == [Message(topicIndex=16_383), Message(topic="~")]


@pytest.mark.parametrize("mode", MODES)
def test_what_others_get_is_not_altered(mode: SendMode) -> None:
    made = side(mode, [ANNA, BERT])
    made.resolve_topic(ANNA, Message(topicIndex=1))
    made.add(CARL, "/meshsub/1.1.0")
    rpc = full_rpc()
    before = rpc.SerializeToString(deterministic=True)
    forms = {peer: made.encode_for_peer(peer, rpc).SerializeToString(deterministic=True) for peer in (ANNA, BERT, CARL)}
    assert rpc.SerializeToString(deterministic=True) == before
    assert forms[CARL] == before
    assert (forms[ANNA] != before, forms[BERT] != before) == {
        "cautious": (True, False),
        "eager": (True, True),
        "off": (False, False),
    }[mode]


def test_cautious_writes_indices_once_the_peer_has_sent_one_that_resolves() -> None:
    made = side()
    for item in (Message(topicIndex=99), Message(topic=CLAY, topicIndex=1), RPC.SubOpts(topicid=CLAY, topicIndex=1)):
        made.resolve_topic(ANNA, item)
        assert made.encode_for_peer(ANNA, full_rpc()) == full_rpc()
    made.resolve_topic(ANNA, ControlGraft(topicIndex=1))
    assert made.encode_for_peer(ANNA, full_rpc()).publish[0].topicIndex == 1


@pytest.mark.parametrize(("agent", "indices"), [("kiln/0.1.0", True), ("go-libp2p/0.47", False), ("xkiln/1", False)])
def test_cautious_trusts_a_kiln(agent: str, indices: bool) -> None:
    made = side()
    made.set_agent(ANNA, agent)
    made.set_agent(b"nobody", agent)
    assert made.encode_for_peer(ANNA, full_rpc()).publish[0].HasField("topicIndex") is indices


def test_off_reads_indices_and_writes_none() -> None:
    made = side("off")
    made.set_agent(ANNA, "kiln/0.1.0")
    assert made.resolve_topic(ANNA, Message(topicIndex=3)) == MAIN
    assert made.encode_for_peer(ANNA, full_rpc()) == full_rpc()


POOL = {"clay": [SEP, CLAY], "main": [MAIN], "both": [CLAY, MAIN, "another"], "own": ["unshared", ELSEWHERE]}
pools = st.lists(st.sampled_from(list(POOL)), unique=True).map(
    lambda names: BundleSet({name: POOL[name] for name in names})
)
some_topics = st.lists(st.sampled_from([CLAY, MAIN, SEP, ELSEWHERE, "another", "nowhere", ""]), max_size=4)


@given(pools, pools, some_topics, some_topics)
def test_what_one_writes_the_other_reads(
    ours: BundleSet, theirs: BundleSet, published: list[str], control: list[str]
) -> None:
    here, there = Tables(ours, "eager"), Tables(theirs, "eager")
    to_there, to_here = here.add(BERT), there.add(ANNA)
    if to_there is not None:
        there.receive_hello(ANNA, to_there)
    if to_here is not None:
        here.receive_hello(BERT, to_here)
    rpc = RPC(publish=[Message(topic=topic) for topic in published])
    for topic in control:
        rpc.control.graft.add(topicID=topic)
        rpc.control.prune.add(topicID=topic)
        rpc.control.ihave.add(topicID=topic)
    shared = {topic for known in ours if known in theirs for topic in ours[known]}
    for writer, to, reader, source in ((here, BERT, there, ANNA), (there, ANNA, here, BERT)):
        sent = RPC.FromString(writer.encode_for_peer(to, rpc).SerializeToString())
        assert topics_in(reader, source, sent) == [topic or None for topic in (*published, *control * 3)]
        assert [message.HasField("topicIndex") for message in sent.publish] == [topic in shared for topic in published]


@given(st.binary(max_size=80), st.binary(max_size=60), st.sampled_from(MODES))
def test_no_bytes_of_a_peer_do_harm(first: bytes, second: bytes, mode: SendMode) -> None:
    made = side(mode, hashes=[MAIN_HASH])
    made.add(BERT)
    for number, payload in enumerate((first, second)):
        rpc = read_rpc(payload)
        if isinstance(rpc, Rejected):
            continue
        made.receive(BERT, rpc.control.extensions, is_first=not number)
        topics_in(made, ANNA, rpc)
        made.encode_for_peer(ANNA, rpc)
