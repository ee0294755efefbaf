"""Topic tables between nodes of ours, foreign peers that know none, and peers that misuse them, on 127.0.0.1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from libp2p.abc import INetStream

from kiln.bridge.gossipsub.wire import encode
from kiln.schemas.kafka.frames import list_messages
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import Verdict, sign
from kiln.schemas.wire.topic_table import BundleSet, negotiate_table, resolve_topic, write_hello
from kit.chance import new_key
from kit.foreign_peer import ForeignPeer, NewPeer
from kit.node_town import OPTIONS, TOPIC, Running, Town, call, in_town, raw_peer, subscription

pytest_plugins = ["kit.foreign_fixtures"]

SHARED_1, SHARED_2, SHARED_3 = "/ceramic/local-test/s1", "/ceramic/local-test/s2", "/ceramic/local-test/s3"
ONLY_A, ONLY_B, NOWHERE = "/ceramic/local-test/a", "/ceramic/local-test/b", "/ceramic/local-test/none"
TOPICS = (SHARED_1, SHARED_2, SHARED_3, ONLY_A, ONLY_B, NOWHERE)
SHARED = {SHARED_1, SHARED_2, SHARED_3}
OF_A = {"first": [SHARED_1, SHARED_2], "own": [ONLY_A], "third": [SHARED_3]}
OF_B = {"third": [SHARED_3], "mine": [ONLY_B], "more": [ONLY_B, NOWHERE], "first": [SHARED_2, SHARED_1]}
EACH = 20

Forms = Counter[tuple[str, bool]]


def forms(one: Running, direction: int) -> Forms:
    """How often each topic was on the wire, and whether by index, from the captured bytes alone: the hellos in each
    frame make the table."""
    bundles = BundleSet(OF_A).merge(BundleSet({f"b {name}": topics for name, topics in OF_B.items()}))
    found: Forms = Counter()
    for frame in one.tape.frames:
        messages = list_messages(frame)
        if frame.direction != direction or not isinstance(messages, Sequence):
            continue
        table = negotiate_table(frame.hello_in, frame.hello_out, bundles).table
        for message in messages:
            topic = resolve_topic(message, table)
            assert isinstance(topic, str)
            found[topic, message.HasField("topicIndex")] += 1
    return found


def on(one: Running, topics: Sequence[str], peers: int) -> bool:
    """Whether so many peers are known to be on each of the topics."""
    views = one.node.router.peers.values()
    return all(sum(topic in view.topics for view in views) >= peers for topic in topics)


def agreed(*nodes: Running) -> bool:
    return all(one.node.view().counters.get("hello_accepted", 0) for one in nodes)


def test_nodes_with_partly_shared_bundles_lose_nothing_and_write_indices_for_shared_topics(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        a = await town.node(replace(OPTIONS, bundles=BundleSet(OF_A), send_indices="eager"))
        b = await town.node(replace(OPTIONS, bundles=BundleSet(OF_B), send_indices="eager", bootstrap=(a.address,)))
        for topic in TOPICS:
            a.node.join(topic)
            b.node.join(topic)
        await town.bell.until(lambda: on(a, TOPICS, 1) and on(b, TOPICS, 1) and agreed(a, b))
        sent: dict[str, list[bytes]] = {"a": [], "b": []}
        for number in range(EACH):
            for topic in TOPICS:
                for name, one in (("a", a), ("b", b)):
                    data = f"{name} {number} {topic}".encode()
                    assert one.node.publish(topic, data) == 1
                    sent[name].append(data)
            await trio.lowlevel.checkpoint()
        await town.bell.until(lambda: len(a.heard) >= len(sent["b"]) and len(b.heard) >= len(sent["a"]))
        assert sorted(a.heard) == sorted(sent["b"])
        assert sorted(b.heard) == sorted(sent["a"])
        expected = {(topic, topic in SHARED): EACH for topic in TOPICS}
        for one in (a, b):
            assert forms(one, Frame.OUT) == expected
            assert forms(one, Frame.IN) == expected
            assert {verdict for frame in one.tape.frames for verdict in frame.verdicts} == {Verdict.VALID}

    in_town(tmp_path, test)


def test_two_cautious_kilns_know_each_other_by_their_agent_version(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        options = replace(OPTIONS, bundles=BundleSet({"one": [TOPIC]}), agent="kiln/0.1.0")
        a, b = await town.pair(options)
        await town.bell.until(lambda: all(peer.agent for one in (a, b) for peer in one.node.view().peers))
        a.node.publish(TOPIC, b"by index")
        await town.until_heard(b, b"by index")
        assert any(m.topicIndex for p in b.tape.payloads(Frame.IN) for m in RPC.FromString(p).publish)

    in_town(tmp_path, test)


def test_a_foreign_peer_without_the_extension_gets_every_message_by_name(tmp_path: Path, js_peer: NewPeer) -> None:
    js: ForeignPeer = js_peer()
    js.subscribe(TOPIC)

    async def test(town: Town) -> None:
        options = replace(OPTIONS, bundles=BundleSet({"one": [TOPIC]}), send_indices="eager", bootstrap=(js.address,))
        a = await town.node(options)
        b = await town.node(replace(options, bootstrap=(js.address, a.address)))
        for one in (a, b):
            one.node.join(TOPIC)
        # before both are subscribed at both others, a message may have nobody to go to
        await town.bell.until(lambda: on(a, (TOPIC,), 2) and on(b, (TOPIC,), 2) and agreed(a, b))
        sent = [f"{name} {number}".encode() for number in range(EACH) for name in ("a", "b")]
        for data in sent:
            source, other = (a, b) if data.startswith(b"a") else (b, a)
            source.node.publish(TOPIC, data)
            await town.until_heard(other, data)  # a burst could overflow a queue
        received = await trio.to_thread.run_sync(lambda: js.wait_received(len(sent), TOPIC))
        assert sorted(each.data for each in received) == sorted(sent)
        await town.bell.until(lambda: len(a.heard) >= EACH and len(b.heard) >= EACH)
        for one in (a, b):
            by_js = {
                (message.topic, message.HasField("topicIndex"))
                for frame in one.tape.frames
                if frame.direction == Frame.OUT and frame.protocol != "/meshsub/1.3.0"
                for message in RPC.FromString(frame.payload).publish
            }
            assert by_js == {(TOPIC, False)}
            by_kiln = {
                message.HasField("topicIndex")
                for frame in one.tape.frames
                if frame.direction == Frame.OUT and frame.protocol == "/meshsub/1.3.0"
                for message in RPC.FromString(frame.payload).publish
            }
            assert by_kiln == {True}

    in_town(tmp_path, test)


# ---------------------------------------------------------------- peers that misuse it


class Odd:
    """A raw peer's stream to a node, and what it says on it."""

    def __init__(self, stream: INetStream) -> None:
        self._stream = stream
        self._key = new_key()
        self._number = 0

    async def say(self, *rpcs: RPC) -> None:
        await self._stream.write(b"".join(encode(rpc.SerializeToString()) for rpc in rpcs))

    def message(self, index: int | None, name: str | None = None) -> RPC:
        """Signed over TOPIC; on the wire with the index and the name given."""
        self._number += 1
        message = Message(topic=TOPIC, data=b"from an odd peer", seqno=self._number.to_bytes(8))
        sign(message, self._key)
        message.ClearField("topic")
        if index is not None:
            message.topicIndex = index
        if name is not None:
            message.topic = name
        return RPC(publish=[message])


def hello(*hashes: bytes) -> RPC:
    rpc = RPC.FromString(subscription())
    rpc.control.extensions.topicTableExtension.topicBundleHashes.extend(hashes)
    return rpc


BUNDLES = BundleSet({"one": [TOPIC]})
(ONE,) = BUNDLES
HOSTILE = {
    "more than are taken": ([each.to_bytes(4) for each in range(257)], "hello_too_many_bundles"),
    "ten thousand": ([each.to_bytes(4) for each in range(10_000)], "hello_too_many_bundles"),
    "a repeat": ([ONE, b"abcd", ONE], "hello_repeats"),
    "three bytes": ([ONE, b"abc"], "hello_hash_length"),
    "five bytes": ([ONE, b"abcde"], "hello_hash_length"),
    "none": ([ONE, b""], "hello_hash_length"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hello_that_must_be_refused_is_counted_and_the_peer_still_heard_by_name(tmp_path: Path, kind: str) -> None:
    hashes, counter = HOSTILE[kind]

    async def test(town: Town) -> None:
        a = await town.node(replace(OPTIONS, bundles=BUNDLES, send_indices="eager"))
        a.node.join(TOPIC)
        async with raw_peer() as host:
            odd = Odd(await call(host, a))
            await odd.say(hello(*hashes), odd.message(1), odd.message(None, TOPIC))
            await town.bell.until(lambda: len(a.heard) == 1)
            counters = a.node.view().counters
            assert (counters[counter], counters["no_table_agreed"]) == (1, 1)
            # the frames are there to the byte, without a hello to read indices by
            frames = [frame for frame in a.tape.frames if frame.direction == Frame.IN]
            assert len(frames) == 3
            assert {frame.hello_in for frame in frames} == {b""}
            assert frames[0].payload == hello(*hashes).SerializeToString()
            a.node.publish(TOPIC, b"by name")
            await town.bell.until(lambda: any(RPC.FromString(p).publish for p in a.tape.payloads(Frame.OUT)))
            (sent,) = [m for p in a.tape.payloads(Frame.OUT) for m in RPC.FromString(p).publish]
            assert (sent.topic, sent.HasField("topicIndex")) == (TOPIC, False)

    in_town(tmp_path, test)


def test_second_hellos_and_impossible_indices_change_nothing(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        a = await town.node(replace(OPTIONS, bundles=BUNDLES))
        a.node.join(TOPIC)
        async with raw_peer() as host:
            odd = Odd(await call(host, a))
            await odd.say(
                hello(ONE),
                hello(b"abcd"),
                odd.message(0),
                odd.message(2**32 - 1),
                odd.message(2),
                odd.message(None),
                odd.message(2**32 - 1, TOPIC),
                odd.message(1),
            )
            await town.bell.until(lambda: len(a.heard) == 2)
            counters = a.node.view().counters
            assert counters["hello_repeated"] == 1
            assert counters["index_out_of_range"] == 3
            assert counters["topic_missing"] == 1
            assert counters["name_and_index"] == 1
            assert counters["index_resolved"] == 1
            frames = [frame for frame in a.tape.frames if frame.direction == Frame.IN]
            assert {frame.hello_in for frame in frames} == {write_hello([ONE])}
            verdicts = b"".join(frame.verdicts for frame in frames)
            assert verdicts == bytes([Verdict.NOT_CHECKED] * 4 + [Verdict.VALID] * 2)

    in_town(tmp_path, test)
