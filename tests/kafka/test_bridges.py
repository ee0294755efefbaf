"""Two bridges of one network on one broker: they split the topics, one leads, and the other one takes over.

Each bridge is a process. The broker, and a peer that both are connected with, are real. The test writes the batches.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import trio
from kafka.coordinator.base import MemberState

from conftest import free_ports
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kiln.bridge.cluster import membership
from kiln.bridge.cluster.group import Member, interests_digest
from kiln.bridge.cluster.membership import Membership
from kiln.bridge.cluster.rendezvous import find_owner
from kiln.bridge.kafka.session_thread import SESSION, KafkaConfig
from kiln.bridge.libp2p.keys import load_or_create_key
from kiln.conf.process.bridge_status import BridgeStatus
from kiln.conf.process.state_folder import claim_state_folder
from kiln.conf.settings.model import Kafka
from kiln.deploy.ops.status import list_live_bridges
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.deploy.stack.kafka_broker import ensure_topics
from kiln.schemas.kafka.records import BatchRecord, PublicationRecord, SeparatorRecord, decode_publication, encode
from kiln.schemas.kafka.topics import TOPICS
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.identity import compute_peer_id, message_id, peer_text
from kiln.schemas.wire.topics import Separator, encode_separator_value, format_topic
from kit.awaiting import awaited, wait_until
from kit.bridge_alone import BridgeAlone
from kit.broker_access import client, security, variables
from kit.node_town import OPTIONS, Running, Town, in_town

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_200)]

KILLS = int(os.environ.get("KILN_TEST_LEADER_KILLS", "1"))
STOPS = int(os.environ.get("KILN_TEST_LEADER_STOPS", "0"))
NETWORK = "local-test"
WHOLE = format_topic(NETWORK, None)
SEPARATORS = [Separator("model", encode_separator_value(bytes([1, number]))) for number in range(16)]
SPLIT = {format_topic(NETWORK, separator) for separator in SEPARATORS}
EVERY = 0.2  # s between two batches
SAID = [b"to the whole network %d" % number for number in range(10)]


class Bridge:
    """A bridge that can be killed and started again, with its key, at its address."""

    def __init__(self, state: Path, port: int, settings: dict[str, str]) -> None:
        self._state = state
        self._settings = settings
        claim_state_folder(state)
        (state / "bridge").mkdir()
        self.peer = peer_text(compute_peer_id(load_or_create_key(state / "bridge" / "key")))
        self._listen = f"/ip4/127.0.0.1/tcp/{port}"
        self.address = f"{self._listen}/p2p/{self.peer}"
        self._process: BridgeAlone | None = None

    def start(self, beside: str) -> None:
        view = {"KILN_BRIDGE__LISTEN": self._listen, "KILN_BRIDGE__BOOTSTRAP": beside, **self._settings}
        self._process = BridgeAlone(self._state, **view)

    @property
    def lives(self) -> bool:
        return self._process is not None

    def status(self) -> BridgeStatus | None:
        """Of this process, and none of one before."""
        if self._process is None:
            return None
        view = self._process.status()
        return view if view is not None and view.pid == self._process.process.pid else None

    def send(self, signal_: signal.Signals) -> None:
        assert self._process is not None
        self._process.process.send_signal(signal_)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def stop(self) -> tuple[int, str]:
        process, self._process = self._process, None
        assert process is not None
        return process.stop()


class Log:
    """The test's own side of Kafka: batches in, receipts out."""

    def __init__(self, address: str, prefix: str) -> None:
        self._address = address
        self._prefix = prefix
        self._stop = threading.Event()
        self._feeder = threading.Thread(target=self._feed, daemon=True)
        self._receipts: list[PublicationRecord] = []
        self._publications = self._open("publications")
        self.written: dict[str, float] = {}
        """CID of each batch, and when it was written (`time.monotonic`)"""

    def start(self) -> None:
        self._feeder.start()

    def stop(self) -> None:
        self._stop.set()
        if self._feeder.ident is not None:
            self._feeder.join()

    def close(self) -> None:
        self.stop()
        self._publications.close()

    def _feed(self) -> None:
        producer = KafkaProducer(**client(self._address), acks="all")
        while not self._stop.wait(EVERY):
            number = len(self.written)
            block = b"block %d" % number
            separator = SeparatorRecord(*SEPARATORS[number % len(SEPARATORS)])
            now = time.time_ns() // 1_000
            cid = cid_text(compute_cid(block))
            record = BatchRecord(NETWORK, "LIVE", separator, cid, block, now - 1_000_000, now)
            producer.send(f"{self._prefix}batches", value=encode(record)).get(30)
            self.written[cid] = time.monotonic()
        producer.close()

    def _open(self, topic: str) -> KafkaConsumer:
        consumer = KafkaConsumer(**client(self._address))
        part = TopicPartition(f"{self._prefix}{topic}", 0)
        consumer.assign([part])
        consumer.seek_to_beginning(part)
        return consumer

    def frames(self) -> list[Frame]:
        """Read all frames."""
        consumer = self._open("frames")
        values = read_new(consumer)
        consumer.close()
        return [Frame.FromString(value) for value in values]

    def receipts(self) -> list[PublicationRecord]:
        """Read the new receipts, and return all so far."""
        self._receipts += map(decode_publication, read_new(self._publications))
        return self._receipts


def read_new(consumer: KafkaConsumer) -> list[bytes]:
    """The values from a consumer's position to the end of its one partition."""
    (part,) = consumer.assignment()
    end = consumer.end_offsets([part])[part]
    found: list[bytes] = []
    while consumer.position(part) < end:
        found += [record.value for record in consumer.poll(timeout_ms=500).get(part, [])]
    return found


class Together:
    """Two bridges, and what they say."""

    def __init__(self, bridges: tuple[Bridge, Bridge]) -> None:
        self.bridges = bridges

    def start(self) -> None:
        for one, other in (self.bridges, self.bridges[::-1]):
            if not one.lives:
                one.start(other.address)

    @property
    def view(self) -> dict[str, BridgeStatus]:
        """By peer id, of those that say something."""
        found = {bridge.peer: bridge.status() for bridge in self.bridges if bridge.lives}
        return {peer: status for peer, status in found.items() if status is not None}

    def have_split(self) -> bool:
        """Whether each topic has its owner on it and nobody else, and one of the two leads."""
        view, peers = self.view, [bridge.peer for bridge in self.bridges]
        if len(view) < 2 or sum(status.sharing.leads for status in view.values()) != 1:
            return False
        owners = {topic: find_owner(topic, peers) for topic in SPLIT}
        on = {topic: [peer for peer, status in view.items() if topic in status.topics] for topic in SPLIT}
        return on == {topic: [owner] for topic, owner in owners.items()}

    def leader(self) -> Bridge | None:
        return next((each for each in self.bridges if (view := each.status()) is not None and view.sharing.leads), None)

    def in_words(self) -> str:
        return "; ".join(
            f"{peer}: {len(SPLIT & set(s.topics))} topics, {s.sharing}, {s.publisher}, {s.errors}"
            for peer, s in self.view.items()
        )


@pytest.fixture
def log(broker: EmbeddedBroker, prefix: str) -> Iterator[Log]:
    address = broker.address
    ensure_topics(
        address, prefix, {"updates": 1}, dict.fromkeys(TOPICS, timedelta(days=1)), client_options=security(address)
    )
    made = Log(address, prefix)
    yield made
    made.close()


@pytest.fixture
def together(broker: EmbeddedBroker, prefix: str, tmp_path: Path) -> Iterator[Together]:
    settings = {
        **variables(broker.address),
        "KILN_KAFKA__PREFIX": prefix,
        "KILN_PUBLISH__ENABLED": "true",
        "KILN_BRIDGE__MIN_FREE_BYTES": "0",
    }
    ports = free_ports(2)
    one, other = (Bridge(tmp_path / name, port, settings) for name, port in zip("ab", ports, strict=True))
    with ExitStack() as stack:
        stack.callback(one.kill)
        stack.callback(other.kill)
        yield Together((one, other))


def kafka(address: str, prefix: str) -> Kafka:
    view = {name.removeprefix("KILN_KAFKA__").lower(): value for name, value in variables(address).items()}
    return Kafka.model_validate({**view, "prefix": prefix})


def test_they_split_the_topics_and_every_batch_is_announced(
    broker: EmbeddedBroker, prefix: str, log: Log, together: Together, tmp_path: Path
) -> None:
    together.start()

    async def live(town: Town) -> None:
        addresses = tuple(bridge.address for bridge in together.bridges)
        stranger = await town.node(replace(OPTIONS, bootstrap=addresses))
        for topic in (WHOLE, *SPLIT):
            stranger.node.join(topic)
        await trio.to_thread.run_sync(wait_until, together.have_split, together.in_words)
        for data in SAID:
            stranger.node.publish(WHOLE, data)
        await trio.to_thread.run_sync(kill_leaders, stranger)

    def kill_leaders(stranger: Running) -> None:
        peers = {bridge.peer for bridge in together.bridges}

        def are_listed() -> bool:  # not while a round begins
            members = list_live_bridges(kafka(broker.address, prefix), NETWORK)
            return {member.peer for member in members} == peers and sum(member.leads for member in members) == 1

        wait_until(are_listed, together.in_words)
        wait_until(
            lambda: len({status.sharing.leader for status in together.view.values()} & peers) == 1, together.in_words
        )
        log.start()
        for _ in range(KILLS):
            take_over(log, together, stop=False)
        for _ in range(STOPS):
            take_over(log, together, stop=True)
        log.stop()
        wait_until(lambda: {r.batch_cid for r in log.receipts()} >= log.written.keys(), together.in_words)
        wait_until(together.have_split, together.in_words)
        heard = b"\n".join(stranger.heard)
        assert all(cid.encode() in heard for cid in log.written)

    in_town(tmp_path, live, seconds=1_100)
    for bridge in together.bridges:
        code, said = bridge.stop()
        assert code == 0, said
    receipts = log.receipts()
    assert {receipt.batch_cid for receipt in receipts} == log.written.keys()
    doubled = [each for each, count in Counter(receipt.batch_cid for receipt in receipts).items() if count > 1]
    print(
        f"{KILLS} kills, {STOPS} stops: {len(receipts)} receipts of {len(log.written)} batches, {len(doubled)} doubled"
    )
    assert {receipt.error for receipt in receipts} == {None}
    check_frames(log.frames(), {b.peer for b in together.bridges})


def take_over(log: Log, together: Together, *, stop: bool) -> None:
    """The leader is killed, or stopped as on a machine that sleeps and later wakes up. The other one goes on."""
    wait_until(together.have_split, together.in_words)
    have = len(log.receipts())
    wait_until(lambda: len(log.receipts()) > have + 5, together.in_words)
    leader = together.leader()
    assert leader is not None
    (other,) = (bridge for bridge in together.bridges if bridge is not leader)
    if stop:
        leader.send(signal.SIGSTOP)
    else:
        leader.kill()
    ended = time.monotonic()
    wait_until(lambda: set(topics_of(other)) >= SPLIT, together.in_words)
    topics_after = time.monotonic() - ended

    def is_published() -> bool:
        later = {cid for cid, at in log.written.items() if at > ended}
        return not later.isdisjoint(receipt.batch_cid for receipt in log.receipts())

    wait_until(is_published, together.in_words)
    took = time.monotonic() - ended
    wait_until(lambda: together.leader() is other, together.in_words)
    led = time.monotonic() - ended
    print(f"taken over: topics after {topics_after:.1f} s, publishing after {took:.1f} s, the lead after {led:.1f} s")
    if stop:
        leader.send(signal.SIGCONT)
    together.start()


def topics_of(bridge: Bridge) -> tuple[str, ...]:
    view = bridge.status()
    return () if view is None else view.topics


def check_frames(frames: list[Frame], peers: set[str]) -> None:
    """Each vantage point has frames of its own, numbered without a gap, and both heard what was said to all."""
    numbers: dict[tuple[bytes, int], set[int]] = defaultdict(set)
    owners: dict[bytes, set[str]] = defaultdict(set)
    heard: dict[bytes, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for frame in frames:
        by = peer_text(frame.local_peer)
        numbers[frame.connection, frame.direction].add(frame.sequence)
        owners[frame.connection].add(by)
        if frame.direction == Frame.IN:
            for message in RPC.FromString(frame.payload).publish:
                if message.data in SAID:
                    heard[message.data][message_id(message)].add(by)
    assert all(found == set(range(1, len(found) + 1)) for found in numbers.values())
    assert all(len(found) == 1 for found in owners.values())
    assert set().union(*owners.values()) == peers
    # one id, whoever heard it: so the lake has one message of these copies
    assert [list(by_id.values()) for by_id in heard.values()] == [[peers]] * len(SAID)


def test_a_bridge_alone_publishes_at_once_and_again_at_once_after_a_crash(log: Log, together: Together) -> None:
    bridge, other = together.bridges

    def leads() -> bool:
        view = bridge.status()
        return view is not None and view.sharing.leads

    for _ in range(2):
        bridge.start(other.address)
        wait_until(lambda: bool(together.view), "it listens")
        # after the crash it is the member that it was: nobody waits for a session to run out
        assert awaited(leads, SESSION / 2), together.in_words()
        bridge.kill()


def test_each_membership_learns_of_new_interests_and_of_who_leads(
    broker: EmbeddedBroker, prefix: str, log: Log
) -> None:
    config = KafkaConfig(client(broker.address), prefix)
    with ExitStack() as stack:
        members = [
            Membership(
                config, NETWORK, Member(peer, "host", interests_digest(["model"]), True, authors=(f"by {peer}",))
            )
            for peer in ("a", "b")
        ]
        for member in members:
            stack.callback(member.stop)
            member.start()

        def describe() -> str:
            return "; ".join(f"{member.status()}, {member.error}" for member in members)

        one, other = members
        wait_until(lambda: all(len(member.bridges) == 2 for member in members), describe)
        assert one.authors == other.authors == {"by a", "by b"}
        assert [member.status().leader for member in members] == ["", ""]
        for interests in (["model/x"], ["model/y"], ["model"]):
            one.update(interests, leads=True)
            digest = interests_digest(interests)
            wait_until(lambda: other.bridges[0].interests == digest, describe)  # noqa: B023 – it is awaited at once
        wait_until(lambda: [member.status().leader for member in members] == ["a", "a"], describe)
        one.update(["model"], leads=False)
        other.update(["model"], leads=True)
        wait_until(lambda: [member.status().leader for member in members] == ["b", "b"], describe)


def test_a_rejoin_whose_result_is_lost_costs_no_core_and_comes_again(
    broker: EmbeddedBroker, prefix: str, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kafka-python leaves a member whose rejoin ended between two polls in a state in which its polls do not wait."""
    polls: list[float] = []

    class CountedConsumer(KafkaConsumer):  # type: ignore[misc]  # kafka-python has no types
        def _poll_once(self, *arguments: object, **options: object) -> object:
            polls.append(time.monotonic())
            return super()._poll_once(*arguments, **options)

        def lose_rejoin(self) -> None:
            self._coordinator.state = MemberState.REBALANCING
            self._coordinator._disable_heartbeat()

    consumers: list[CountedConsumer] = []

    def open_counted(kind: object, **options: object) -> CountedConsumer:
        consumers.append(CountedConsumer(**options))
        return consumers[-1]

    monkeypatch.setattr(membership, "open_client", open_counted)
    config = KafkaConfig(client(broker.address), prefix)
    member = Membership(config, NETWORK, Member("a", "host", interests_digest(["model"]), True))
    with ExitStack() as stack:
        stack.callback(member.stop)
        member.start()
        wait_until(lambda: bool(member.bridges), "the first round")
        before, lost_at = member.status().round, time.monotonic()
        consumers[0].lose_rejoin()
        wait_until(lambda: member.status().round > before, "a round after the lost one")
        seconds = time.monotonic() - lost_at
    assert sum(at > lost_at for at in polls) < 20 * (seconds + 1)
