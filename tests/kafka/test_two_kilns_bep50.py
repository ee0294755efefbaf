"""Two Kilns with nothing between them but BEP 50 and bitswap: batches, restarts, and what is lost beyond `prev`."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import pytest
from deltalake import DeltaTable

from conftest import free_ports
from kafka import KafkaProducer
from kiln.bridge.bep50.carrier import publisher_key
from kiln.bridge.bep50.store import TopicStore
from kiln.conf.process.bridge_status import BridgeStatus, OverlayStatus, OverlayTopicStatus, read_status
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.schemas.dht.announcement import Announcement, compute_salt, read_announcement
from kiln.schemas.dht.bencode import Value
from kiln.schemas.dht.items import Item, build_put_fields, compute_target, read_item
from kiln.schemas.dht.krpc import OLD_SEQUENCE, KrpcError, KrpcQuery, KrpcResponse, Message, read_message, write_message
from kiln.schemas.kafka.records import BatchRecord, SeparatorRecord, encode
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.proto.gossipsub.rpc_pb2 import Message as PubsubEnvelope
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.identity import build_ed25519_peer_id, sign
from kiln.schemas.wire.pubsub import write_update
from kiln.schemas.wire.streamid import StreamID
from kiln.schemas.wire.topics import Separator, format_separator, format_topic
from kit.awaiting import wait_until
from kit.batch_blocks import write_blocks
from kit.broker_access import client
from kit.chance import new_key
from kit.kiln_process import Kiln, end
from kit.log_feed import await_end, frames_producer, kiln_beside
from kit.log_model import read_records

pytest_plugins = ["kit.foreign_fixtures"]
pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.network, pytest.mark.timeout(900)]

NETWORK = "local-two-bep50"
SEPARATORS = [Separator("model", StreamID(2, compute_cid(b"model %d" % number)).text) for number in range(3)]
FOLLOWED = SEPARATORS[:2]  # by the second Kiln
STREAMS_EACH, TIPS_EACH = 4, 3
NAMED_BEFORE = 23  # batches that an item names beside its own
PATIENCE = 120.0  # s

Tip = tuple[object, object]
"""StreamID and CID, texts."""


def tip_of(separator: int, stream: int, tip: int) -> tuple[str, str]:
    name = StreamID(3, compute_cid(b"%d/%d" % (separator, stream))).text
    return name, cid_text(compute_cid(b"tip %d/%d/%d" % (separator, stream, tip)))


def frames() -> Iterable[Frame]:
    """What a bridge on gossipsub would have captured: updates, each by the topic of its separator."""
    key = new_key()
    author, connection = build_ed25519_peer_id(key.public_key().public_bytes_raw()), b"\x07" * 16
    number = 0
    for place, separator in enumerate(SEPARATORS):
        for stream in range(STREAMS_EACH):
            for tip in range(TIPS_EACH):
                number += 1
                message = PubsubEnvelope(
                    topic=format_topic(NETWORK, separator),
                    data=write_update(*tip_of(place, stream, tip)),
                    seqno=number.to_bytes(8),
                )
                sign(message, key)
                yield Frame(
                    network=NETWORK,
                    connection=connection,
                    direction=Frame.IN,
                    remote_peer=author,
                    protocol="/meshsub/1.2.0",
                    observed_at=time.time_ns(),
                    payload=RPC(publish=[message]).SerializeToString(),
                    sequence=number,
                    origin=Frame.LIVE,
                )


def batches_of(separator: Separator, numbers: Iterable[int]) -> dict[str, tuple[BatchRecord, Tip]]:
    """One tip each; by CID."""
    found: dict[str, tuple[BatchRecord, Tip]] = {}
    for number in numbers:
        closed = time.time_ns() // 1_000
        stream, tip = (
            StreamID(3, compute_cid(b"later")).text,
            compute_cid(b"%s %d" % (separator.value.encode(), number)),
        )
        (block,) = write_blocks({stream: [tip]})
        record = BatchRecord(
            NETWORK, "LIVE", SeparatorRecord(*separator), block.cid, block.data, closed - 1_000_000, closed
        )
        found[block.cid] = record, (stream, cid_text(tip))
    return found


def rows(kiln: Kiln, table: str) -> list[dict[str, object]]:
    path = str(kiln.lake / table)
    if not DeltaTable.is_deltatable(path):
        return []
    found: list[dict[str, object]] = DeltaTable(path).to_pyarrow_table().to_pylist()
    return found


def announced(item: Item) -> Announcement:
    read = read_announcement(item.value, NETWORK, item.salt)
    assert isinstance(read, Announcement)
    return read


def received(kiln: Kiln) -> set[Tip]:
    return {(row["stream"], row["tip"]) for row in rows(kiln, "tips") if row["source"] == "batch"}


class Side:
    """A Kiln. Its bridge is a process of its own, and its queries run when there is something to read."""

    def __init__(self, stack: ExitStack, kiln: Kiln, address: str, prefix: str) -> None:
        self.kiln = kiln
        self.prefix = prefix
        self._stack = stack
        self._address = address
        self._running: dict[str, subprocess.Popen[str]] = {}

    @property
    def key(self) -> bytes:
        return publisher_key(self.kiln.state / "bridge").verify_key.encode()

    @property
    def status(self) -> BridgeStatus | None:
        return read_status(self.kiln.state / "bridge" / "status.json")

    @property
    def overlay(self) -> OverlayStatus:
        status = self.status
        assert status is not None
        assert status.bep50 is not None
        return status.bep50

    def topic(self, key: bytes, separator: Separator) -> OverlayTopicStatus | None:
        wanted = compute_target(key, compute_salt(NETWORK, separator)).hex()
        return next((each for each in self.overlay.topics if each.target == wanted), None)

    def wait_until(self, true: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
        """Fails at once when one of the processes has ended."""

        def come_or_ended() -> bool:
            return true() or any(process.poll() is not None for process in self._running.values())

        wait_until(come_or_ended, lambda: f"{what}; {self._told}", seconds)
        assert true(), f"{what} never came; {self._told}"

    @property
    def _told(self) -> str:
        """The processes, the bridge's status, and the ends of the logs."""
        status = self.status
        ends = {command: process.poll() for command, process in self._running.items()}
        logs = [self.kiln.state / "started.out", *sorted((self.kiln.state / "logs").glob("*.log"))]
        tails = [f"{log.name}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:]) for log in logs]
        return "\n".join([f"{ends} {status and (status.errors, status.ipfs, status.bep50)}", *tails])

    def sequence(self, key: bytes, separator: Separator) -> int | None:
        topic = self.topic(key, separator)
        return topic.sequence if topic else None

    def start(self, *arguments: str) -> None:
        process = self.kiln.start(*arguments)
        self._running[arguments[0]] = process
        self._stack.callback(_ended, process)

    def start_bridge(self) -> None:
        """Start the bridge, and return once it listens."""
        (self.kiln.state / "bridge" / "status.json").unlink(missing_ok=True)
        self.start("bridge")
        self.wait_until(lambda: self.status is not None, "the bridge")

    def item(self, separator: Separator) -> Item:
        """Return the item that its bridge has announced."""
        target = compute_target(self.key, compute_salt(NETWORK, separator))
        item = TopicStore(self.kiln.state / "bridge" / "bep50").load(target).item
        assert item is not None
        return item

    def catch_up(self, *queries: str) -> None:
        """Have these queries read all records in Kafka."""
        self.kiln.environment["KILN_JOBS__QUERIES"] = ",".join(queries)
        self.kiln.run_kept("run", "--catch-up")

    def receive(self, newest: Iterable[bytes], blocks: int, gaps: int = 0) -> None:
        """Have the queries read what its bridge receives.

        Args:
            newest: CID of the newest batch of each separator, whose item the bridge receives.
            blocks: Number of batches that the bridge has fetched in all by the end.
            gaps: Number of gaps that the bridge has found by the end.
        """

        def are_there() -> bool:
            records = read_records(self._address, f"{self.prefix}frames").values()
            frames = [value for part in records for _, _, value in part]
            return all(any(cid in frame for frame in frames) for cid in newest)

        self.wait_until(are_there, "the newest items")
        self.catch_up("updates")
        await_end(self._address, f"{self.prefix}blocks", blocks, PATIENCE)
        await_end(self._address, f"{self.prefix}quarantine", gaps, PATIENCE)
        self.catch_up("sink")

    def end(self, command: str) -> None:
        process = self._running.pop(command)
        process.terminate()
        assert process.wait(timeout=120) == 0

    def announce(self, batches: dict[str, tuple[BatchRecord, Tip]]) -> None:
        """Have its bridge announce batches, as if its queries had made them; returns when it has."""
        before = self.overlay.publisher
        producer = KafkaProducer(**client(self._address), acks="all")
        for record, _ in batches.values():
            producer.send(f"{self.prefix}batches", value=encode(record), partition=0)
        producer.close()

        def receipts() -> int:
            now = self.overlay.publisher
            return now.published + now.failed - before.published - before.failed

        self.wait_until(lambda: receipts() == len(batches), f"a receipt for each of {len(batches)} batches")


def _ended(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        end(process)


class Stranger:
    """A node of the overlay that says what it is told to."""

    def __init__(self, place: str, topic: bytes) -> None:
        host, _, port = place.rpartition(":")
        self._there = (host, int(port))
        self._topic = topic

    def ask(self, method: bytes, arguments: dict[bytes, Value]) -> Message:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.settimeout(20)
            query = KrpcQuery(b"??", method, b"\x55" * 20, arguments, topic=self._topic, read_only=True)
            udp.sendto(write_message(query), self._there)
            answer = read_message(udp.recv(2_000))
        assert isinstance(answer, KrpcResponse | KrpcError)
        return answer


@pytest.fixture
def sides(peers: ExitStack, broker: EmbeddedBroker, prefix: str, tmp_path: Path) -> tuple[Side, Side]:
    """The first batches; the second follows it, and publishes nothing. They are connected for blocks alone."""
    blocks, first, second = free_ports(3)
    alike = {
        "KILN_NETWORK": NETWORK,
        "KILN_BRIDGE__LISTEN": "[]",
        "KILN_PUBLISH__ENABLED": "false",
        "KILN_PUBLISH__TIMEOUT": "3s",
        "KILN_IPFS__TIMEOUT": "3s",
        "KILN_BEP50__ENABLED": "true",
    }

    def side(name: str, settings: dict[str, str]) -> Side:
        own = f"{name}.{prefix}"
        kiln = kiln_beside(broker.address, own, tmp_path / name, alike | settings)
        return Side(peers, kiln, broker.address, own)

    one = side(
        "first",
        {
            "KILN_BRIDGE__LISTEN": f"/ip4/127.0.0.1/tcp/{blocks}",
            "KILN_BEP50__PUBLISH": "true",
            "KILN_BEP50__LISTEN": f"127.0.0.1:{first}",
            "KILN_BEP50__CONTACTS": f"127.0.0.1:{second}",
        },
    )
    follow = [f"{one.key.hex()}/{format_separator(each)}" for each in FOLLOWED]
    other = side(
        "second",
        {
            "KILN_BEP50__LISTEN": f"127.0.0.1:{second}",
            "KILN_BEP50__CONTACTS": f"127.0.0.1:{first}",
            "KILN_BEP50__FOLLOW": ",".join(follow),
            "KILN_BEP50__PUBLISH": "false",
        },
    )
    return one, other


def test_batches_restarts_and_gaps_over_bep50_alone(sides: tuple[Side, Side], broker: EmbeddedBroker) -> None:
    one, other = sides
    one.start_bridge()
    assert one.status is not None
    other.kiln.environment["KILN_IPFS__PEERS"] = one.status.addresses[0]
    other.start_bridge()
    what_one_batches_the_other_has(one, other, broker.address)
    older = one.item(FOLLOWED[0])
    what_was_announced_meanwhile_comes_after_a_restart_and_what_no_item_names_is_one_gap(one, other, older)
    one.end("bridge")
    a_stored_item_is_served_and_an_older_one_refused(other, one.key, older)


def what_one_batches_the_other_has(one: Side, other: Side, address: str) -> None:
    with frames_producer(address, one.prefix) as producer:
        for frame in frames():
            producer.send(frame)
    one.catch_up("updates", "batch", "sink")
    tips = {row["tip"]: row["batch_cid"] for row in rows(one.kiln, "batch_tips")}
    assert len(tips) == len(SEPARATORS) * STREAMS_EACH * TIPS_EACH
    await_end(address, f"{one.prefix}publications", len(set(tips.values())), PATIENCE)
    one.catch_up("sink")
    receipts = {row["batch_cid"] for row in rows(one.kiln, "publications") if row["transport"] == "bep50"}
    assert receipts == set(tips.values())
    ours = {
        (row["stream"], row["tip"])
        for row in rows(one.kiln, "updates")
        if row["separator_value"] in {each.value for each in FOLLOWED}
    }
    assert len(ours) == len(FOLLOWED) * STREAMS_EACH * TIPS_EACH
    followed = [row for row in rows(one.kiln, "batches") if row["separator_value"] in {each.value for each in FOLLOWED}]
    other.receive([announced(one.item(each)).batch for each in FOLLOWED], len(followed))
    assert received(other.kiln) == ours
    for side in (one, other):  # connected for the blocks alone
        assert side.status is not None
        assert side.status.publisher.published == 0


def what_was_announced_meanwhile_comes_after_a_restart_and_what_no_item_names_is_one_gap(
    one: Side, other: Side, older: Item
) -> None:
    """The item of one separator names all that was announced meanwhile, that of the other does not."""
    earlier = len({row["batch_cid"] for row in rows(other.kiln, "tips") if row["source"] == "batch"})
    other.end("bridge")
    named, unnamed = batches_of(FOLLOWED[1], range(8)), batches_of(FOLLOWED[0], range(NAMED_BEFORE + 4))
    one.announce(named)
    one.announce(unnamed)
    first_named = len(unnamed) - 1 - NAMED_BEFORE
    come = [*named.values(), *list(unnamed.values())[first_named:]]
    expected = received(other.kiln) | {tip for _, tip in come}
    assert received(other.kiln) < expected
    other.start_bridge()
    blocks = [record.block for batches in (named, unnamed) for record, _ in list(batches.values())[-1:]]
    other.receive([compute_cid(block) for block in blocks], earlier + len(come), gaps=1)
    assert received(other.kiln) == expected
    (row,) = rows(other.kiln, "quarantine")
    newest = list(unnamed)[-1]
    assert (row["stage"], row["reason"], row["cid"]) == ("bep50", "gap", newest)
    for told in (one.key.hex(), format_separator(FOLLOWED[0]), cid_text(announced(older).batch), newest):
        assert told in str(row["detail"])
    assert isinstance(row["data"], bytes)
    read = read_announcement(row["data"], NETWORK, compute_salt(NETWORK, FOLLOWED[0]))
    assert isinstance(read, Announcement)
    assert [cid_text(each) for each in (*reversed(read.previous), read.batch)] == list(unnamed)[first_named:]
    assert other.overlay.gaps == 1


def a_stored_item_is_served_and_an_older_one_refused(other: Side, key: bytes, older: Item) -> None:
    """While nobody else has it."""
    sequence = other.sequence(key, FOLLOWED[0])
    assert sequence is not None
    assert sequence > older.sequence
    other.end("bridge")
    other.start_bridge()
    assert other.sequence(key, FOLLOWED[0]) == sequence
    stranger = Stranger(other.overlay.addresses[0], older.target)
    served = stranger.ask(b"get", {b"target": older.target})
    assert isinstance(served, KrpcResponse)
    item = read_item(served.values, older.salt)
    assert isinstance(item, Item)
    assert (item.key, item.sequence) == (key, sequence)
    refused = stranger.ask(b"put", {**build_put_fields(older), b"token": served.values[b"token"]})
    assert isinstance(refused, KrpcError)
    assert refused.refusal.code == OLD_SEQUENCE.code
    told = f"refused_{OLD_SEQUENCE.code}"
    other.wait_until(lambda: other.overlay.dropped.get(told) == 1, "the refusal")
    assert other.sequence(key, FOLLOWED[0]) == sequence
