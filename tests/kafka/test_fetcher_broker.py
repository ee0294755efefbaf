"""The fetcher on a real broker, with an IPFS node of the test's that goes away and comes back.

KILN_TEST_FETCHER_KILLS, KILN_TEST_FETCHER_STOPS: how often the one of two fetchers that works is killed, and suspended.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import cbor2
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from kafka.admin import KafkaAdminClient
from kafka.structs import OffsetAndMetadata

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kiln.bridge.fetcher.fetcher import Fetcher
from kiln.bridge.fetcher.offsets import DoneOffsets
from kiln.bridge.fetcher.pending import FetchingOptions
from kiln.bridge.ipfs import Announcer
from kiln.bridge.kafka import worker
from kiln.bridge.kafka.session_thread import KafkaConfig
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.deploy.stack.kafka_broker import ensure_topics
from kiln.pipelines.batch.windows import PartitionWindows
from kiln.schemas.kafka.records import (
    Coordinates,
    Epoch,
    SeparatorRecord,
    UpdateRecord,
    WantedRecord,
    decode_block,
    decode_quarantine,
    decode_stream,
    decode_update,
    decode_wanted,
    encode,
)
from kiln.schemas.kafka.topics import TOPICS
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.identity import compute_peer_id, peer_text
from kiln.schemas.wire.streamid import StreamID
from kiln.schemas.wire.topics import encode_separator_value
from kit.awaiting import awaited, wait_until
from kit.batch_blocks import write_blocks
from kit.broker_access import client, security
from kit.memory_ipfs import Ipfs
from kit.topics import add_partitions, create_again

pytestmark = pytest.mark.kafka

S = 1_000_000
AT = 1_700_000_000_000_000  # µs
MODEL = SeparatorRecord("model", encode_separator_value(b"\x01\x02"))
KILLS = int(os.environ.get("KILN_TEST_FETCHER_KILLS", "1"))
STOPS = int(os.environ.get("KILN_TEST_FETCHER_STOPS", "0"))
STREAMS = 24
NEVER = 0
"""the stream whose genesis never comes"""
OPTIONS = FetchingOptions("local-test", max_concurrent=4, timeout=S, give_up_after=600 * S, genesis_timeout=2 * S)


def genesis(number: int) -> bytes:
    header = {"controllers": [f"did:key:z{number}"], "sep": "model", "model": b"\x01\x02"}
    return cbor2.dumps({"data": None, "header": header}, canonical=True)


def stream(number: int) -> str:
    return StreamID(3, compute_cid(genesis(number))).text


def wanted(number: int, message: int) -> WantedRecord:
    update = UpdateRecord(
        "local-test",
        "LIVE",
        None,
        None,
        stream(number),
        cid_text(compute_cid(f"tip {message}".encode())),
        None,
        f"message {message}",
        Epoch("updates", 0),
        Coordinates(0, message, 0),
        AT,
    )
    return WantedRecord("local-test", cid_text(compute_cid(genesis(number))), "genesis", AT, update=update)


ANNOUNCER = peer_text(compute_peer_id(Ed25519PrivateKey.from_private_bytes(b"a" * 32)))


def has_released(fetcher: Fetcher) -> bool:
    return fetcher.status().counts["released"] > 0


class Kiln:
    """Topics of its own, fetchers on them."""

    def __init__(self, address: str, prefix: str) -> None:
        self.address = address
        self.prefix = prefix
        self.ipfs = Ipfs()
        self.interests: tuple[str, ...] = ("model",)
        self.running: list[Fetcher] = []
        ensure_topics(
            address, prefix, {"updates": 2}, dict.fromkeys(TOPICS, timedelta(days=1)), client_options=security(address)
        )

    def write(self, *records: WantedRecord | bytes, partition: int = 0) -> None:
        producer = KafkaProducer(**client(self.address), acks="all")
        for record in records:
            value = record if isinstance(record, bytes) else encode(record)
            producer.send(f"{self.prefix}wanted", value=value, partition=partition)
        producer.close()

    def read(self, topic: str) -> list[bytes]:
        consumer = KafkaConsumer(**client(self.address))
        parts = [TopicPartition(f"{self.prefix}{topic}", number) for number in range(2 if topic == "updates" else 1)]
        consumer.assign(parts)
        consumer.seek_to_beginning(*parts)
        ends = consumer.end_offsets(parts)
        found: list[bytes] = []
        while any(consumer.position(part) < ends[part] for part in parts):
            found += [r.value for records in consumer.poll(timeout_ms=500).values() for r in records]
        consumer.close()
        return found

    def updates(self) -> list[UpdateRecord]:
        return [decode_update(value) for value in self.read("updates")]

    def kept(self) -> list[str]:
        """Messages as the batcher keeps them."""
        windows = PartitionWindows(S)
        return [
            u.message_id
            for u in self.updates()
            if not windows.guard.is_duplicate(u.epoch.query, u.epoch.batch, u.message_id)
        ]

    def start(
        self,
        options: FetchingOptions = OPTIONS,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1_000,
        instance: str | None = None,
    ) -> Fetcher:
        fetcher = Fetcher(
            KafkaConfig(client(self.address), self.prefix),
            options,
            self.ipfs,
            lambda: self.interests,
            clock_us,
            instance=instance,
        )
        fetcher.start()
        self.running.append(fetcher)
        return fetcher

    def committed(self) -> OffsetAndMetadata | None:
        with KafkaAdminClient(**client(self.address)) as admin:
            group = f"{self.prefix}fetcher.local-test"
            found = admin.list_group_offsets({group: None})[group]
        return next((kept for part, kept in found.items() if part.topic == f"{self.prefix}wanted"), None)

    def forget_place(self) -> None:
        """As `offsets.retention.minutes` does."""
        with KafkaAdminClient(**client(self.address)) as admin:
            admin.delete_group_offsets(f"{self.prefix}fetcher.local-test", [TopicPartition(f"{self.prefix}wanted", 0)])

    def commit_place(self, offset: int, metadata: str) -> None:
        part = TopicPartition(f"{self.prefix}wanted", 0)
        with KafkaAdminClient(**client(self.address)) as admin:
            admin.alter_group_offsets(f"{self.prefix}fetcher.local-test", {part: OffsetAndMetadata(offset, metadata)})

    def place(self) -> int | None:
        kept = self.committed()
        return None if kept is None else kept.offset

    def not_done(self, until: int) -> list[int]:
        """Offsets that the next run would deal with."""
        kept = self.committed()
        if kept is None:
            return list(range(until))
        _, _, metadata = kept.metadata.partition(" ")  # after the id of the topic
        done_offsets = DoneOffsets(kept.offset, metadata.rstrip("\0"), 0)  # confluent-kafka sends the end of a C string
        return [offset for offset in range(kept.offset, until) if done_offsets.add(offset)]


@pytest.fixture
def kiln(broker: EmbeddedBroker, prefix: str) -> Iterator[Kiln]:
    made = Kiln(broker.address, prefix)
    yield made
    made.ipfs.gate.set()
    for fetcher in made.running:
        fetcher.stop()


def test_with_ipfs_away_updates_wait_and_flow_after_it_is_back(kiln: Kiln) -> None:
    for number in range(3):
        kiln.ipfs.add(genesis(number))
    kiln.ipfs.away = True
    kiln.write(*(wanted(message % 3, message) for message in range(30)))
    fetcher = kiln.start()
    assert awaited(
        lambda: fetcher.state == "IPFS is unavailable: no node at http://127.0.0.1:5001 (records waiting: 30)"
    )
    assert fetcher.error == "nothing is fetched, because IPFS is unavailable: no node at http://127.0.0.1:5001"
    kiln.write(*(wanted(message % 3, message) for message in range(30, 60)))
    assert awaited(lambda: fetcher.status().waiting == 60)
    assert kiln.read("updates") == []
    kiln.ipfs.away = False
    assert awaited(lambda: fetcher.status().counts["released"] == 60)
    updates = kiln.updates()
    for number in range(3):
        own = [update.message_id for update in updates if update.stream == stream(number)]
        assert own == [f"message {message}" for message in range(60) if message % 3 == number]
    assert {(update.separator, update.separator_source) for update in updates} == {(MODEL, "genesis")}
    known = {record.stream: record.separator for record in map(decode_stream, kiln.read("streams"))}
    assert known == {stream(number): MODEL for number in range(3)}
    assert awaited(lambda: kiln.place() == 60)
    assert awaited(lambda: fetcher.error is None and fetcher.state == "waiting for records")


def test_streams_that_are_known_are_not_fetched_again_after_a_restart(kiln: Kiln) -> None:
    cid = kiln.ipfs.add(genesis(1))
    kiln.write(wanted(1, 0))
    first = kiln.start()
    assert awaited(lambda: first.status().counts["released"] == 1)
    assert awaited(lambda: kiln.place() == 1)
    first.stop()
    assert first.state == "stopped"
    kiln.write(wanted(1, 1))
    again = kiln.start()
    assert awaited(lambda: again.status().counts["released"] == 1)
    assert [update.message_id for update in kiln.updates()] == ["message 0", "message 1"]
    assert kiln.ipfs.asked[cid] == 1
    assert len(kiln.read("streams")) == 1


def test_genesis_that_never_comes_ends_in_quarantine_and_holds_up_no_other(kiln: Kiln) -> None:
    kiln.ipfs.add(genesis(1))
    records = [wanted(0, 0), wanted(1, 1), wanted(0, 2)]
    kiln.write(*records)
    fetcher = kiln.start(FetchingOptions("local-test", timeout=S, give_up_after=2 * S))
    assert awaited(lambda: fetcher.status().counts["released"] == 1)
    assert awaited(lambda: fetcher.status().counts["genesis_unavailable"] == 2)
    faults = [decode_quarantine(value) for value in kiln.read("quarantine")]
    assert [(fault.stage, fault.reason) for fault in faults] == [("fetch", "genesis_unavailable")] * 2
    assert [decode_wanted(fault.data) for fault in faults] == [records[0], records[2]]
    assert awaited(lambda: kiln.place() == 3)


def test_blocks_of_batches(kiln: Kiln) -> None:
    (good,) = write_blocks({stream(number): [compute_cid(b"tip")] for number in range(3)})
    kiln.ipfs.blocks[good.cid] = good.data
    for number in range(2):
        kiln.ipfs.add(genesis(number))
    bad = kiln.ipfs.add(b"\xa0")
    faulty = cid_text(compute_cid(b"faulty"))
    kiln.ipfs.fault = faulty
    other = SeparatorRecord("tenant", MODEL.value)
    kiln.write(
        WantedRecord("local-test", good.cid, "batch", AT, separator=MODEL, message_id="m1"),
        WantedRecord("local-test", good.cid, "batch", AT, separator=MODEL, message_id="m2"),
        WantedRecord("local-test", good.cid, "batch", AT, separator=other, message_id="m3"),
        WantedRecord("local-test", bad, "batch", AT, separator=MODEL, message_id=f"{ANNOUNCER}/0001"),
        WantedRecord("local-test", faulty, "batch", AT, separator=MODEL, message_id="m5"),
        b"{",
    )
    fetcher = kiln.start()
    assert awaited(lambda: kiln.place() == 6)
    blocks = {block.batch_cid: block for block in map(decode_block, kiln.read("blocks"))}
    assert (blocks[good.cid].block, blocks[good.cid].separator, blocks[good.cid].reason) == (good.data, MODEL, None)
    assert (blocks[bad].block, blocks[bad].reason) == (None, "block_malformed")
    assert kiln.ipfs.announcers[bad] == [Announcer(ANNOUNCER, "")]
    assert (blocks[faulty].block, blocks[faulty].reason) == (None, "fetch_fault")
    reasons = Counter(decode_quarantine(value).reason for value in kiln.read("quarantine"))
    assert reasons == {"block_malformed": 1, "fetch_fault": 1, "wanted_malformed": 1}
    assert (fetcher.status().counts["not_of_interest"], fetcher.status().counts["already_fetched"]) == (1, 1)
    # the third stream's genesis cannot be had in time, so it is not contradicted
    assert {decode_stream(value).stream for value in kiln.read("streams")} == {stream(0), stream(1)}


def test_stop_in_the_middle_loses_and_repeats_nothing(kiln: Kiln) -> None:
    for number in range(20):
        kiln.ipfs.add(genesis(number))
    for turn in range(6):
        kiln.write(*(wanted(message % 20, message) for message in range(200 * turn, 200 * (turn + 1))))
        fetcher = kiln.start()
        assert awaited(partial(has_released, fetcher))
        fetcher.stop()
        assert fetcher.state == "stopped"
    last = kiln.start()
    assert awaited(lambda: kiln.place() == 1_200)
    last.stop()
    assert Counter(kiln.kept()) == Counter(f"message {message}" for message in range(1_200))


def test_one_that_waits_does_not_hold_back_its_place_in_few_bytes(kiln: Kiln) -> None:
    """What comes after it is done, and stays done over a restart, though the place stays before it."""
    kiln.ipfs.add(genesis(1))
    kiln.write(wanted(0, 0), *(wanted(1, message) for message in range(1, 1_001)))
    first = kiln.start()
    assert awaited(lambda: first.status().counts["released"] == 1_000)
    assert awaited(lambda: kiln.not_done(1_001) == [0])
    first.stop()
    kiln.ipfs.add(genesis(0))
    again = kiln.start()
    assert awaited(lambda: again.status().counts["released"] == 1)
    assert awaited(lambda: kiln.place() == 1_001)
    assert again.status().counts["released"] == 1
    assert Counter(kiln.kept()) == Counter(f"message {message}" for message in range(1_001))


def test_broker_away_at_the_start(kiln: Kiln, free_port: int) -> None:
    fetcher = Fetcher(
        KafkaConfig({"bootstrap_servers": f"127.0.0.1:{free_port}"}, "kiln."), OPTIONS, kiln.ipfs, lambda: ("*",)
    )
    fetcher.start()
    assert awaited(lambda: "Kafka fails" in fetcher.state)
    fetcher.stop(10)
    assert fetcher.state == "stopped"


def test_of_two_fetchers_one_reads_all_partitions_and_the_other_one_takes_over(kiln: Kiln) -> None:
    add_partitions(kiln.address, f"{kiln.prefix}wanted", 3)
    for number in range(3):
        kiln.ipfs.add(genesis(number))
    one, other = kiln.start(), kiln.start()
    standby = f"on standby: Kafka has assigned no partition of {kiln.prefix}wanted to this bridge"
    assert awaited(lambda: {one.state, other.state} == {standby, "waiting for records"})
    assert (one.error, other.error) == (None, None)
    for number in range(3):
        kiln.write(wanted(number, number), partition=number)
    # Kafka may move the first partition when the second one joins, and each of them may begin its session again when it
    # learns of the added partitions: then it releases again, in the same epoch, what was not yet committed as done
    assert awaited(lambda: sorted(kiln.kept()) == [f"message {message}" for message in range(3)])
    assert awaited(lambda: one.leads != other.leads)
    first, second = (one, other) if one.leads else (other, one)
    first.stop()
    for number in range(3):
        kiln.write(wanted(number, 3 + number), partition=number)
    assert awaited(lambda: sorted(kiln.kept()) == [f"message {message}" for message in range(6)])
    assert (second.leads, first.leads) == (True, False)


# ---------------------------------------------------------------- takeover


class Updates:
    """`kiln.updates`, read on and on, behind the guard of the batcher."""

    def __init__(self, address: str, prefix: str) -> None:
        self._consumer = KafkaConsumer(**client(address))
        parts = [TopicPartition(f"{prefix}updates", number) for number in range(2)]
        self._consumer.assign(parts)
        self._consumer.seek_to_beginning(*parts)
        self._windows = {part: PartitionWindows(S) for part in parts}
        self.kept: list[UpdateRecord] = []
        self.repeats = 0

    def read(self) -> set[str]:
        """Read on, and return the messages so far."""
        for part, records in self._consumer.poll(timeout_ms=100).items():
            for record in records:
                update = decode_update(record.value)
                guard = self._windows[part].guard
                if guard.is_duplicate(update.epoch.query, update.epoch.batch, update.message_id):
                    self.repeats += 1
                else:
                    self.kept.append(update)
        return {update.message_id for update in self.kept}

    def close(self) -> None:
        self._consumer.close()


class Pair:
    """Two fetchers in processes of their own, and what waits for them.

    One genesis never comes. A new process, under another id, takes the place of one that was killed.
    """

    def __init__(self, kiln: Kiln, blocks: Path) -> None:
        self.rng = random.Random(KILLS)
        self.written = 0
        self.updates = Updates(kiln.address, kiln.prefix)
        self._kiln = kiln
        self._blocks = blocks
        self._started = 0
        self._members: dict[str, subprocess.Popen[bytes]] = {}
        for number in set(range(STREAMS)) - {NEVER}:
            block = genesis(number)
            (blocks / cid_text(compute_cid(block))).write_bytes(block)

    def start(self, *suspended: str) -> subprocess.Popen[bytes]:
        self._started += 1
        instance = f"bridge {self._started}"
        self._members[instance] = process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "kit.fetcher_process",
                self._kiln.address,
                self._kiln.prefix,
                instance,
                self._blocks,
                *suspended,
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        return process

    def close(self) -> None:
        for process in self._members.values():
            process.kill()
            process.wait()
        self.updates.close()

    def write(self, count: int) -> set[str]:
        """Write updates that wait, and return the messages of those whose genesis comes."""
        messages = range(self.written, self.written + count)
        streams = {message: self.rng.randrange(STREAMS) for message in messages}
        self._kiln.write(*(wanted(streams[message], message) for message in messages))
        self.written += count
        return {f"message {message}" for message in messages if streams[message] != NEVER}

    def wait_for(self, messages: set[str], least: int) -> None:
        def what() -> str:
            return f"{least} of {sorted(messages - self.updates.read())}"

        wait_until(lambda: len(messages & self.updates.read()) >= least, what)

    def find_owner(self) -> str:
        group = f"{self._kiln.prefix}fetcher.local-test"
        with KafkaAdminClient(**client(self._kiln.address)) as admin:
            members = admin.describe_groups([group])[group]["members"]
        for member in members:
            assignment = member["member_assignment"]
            if isinstance(assignment, dict) and assignment["assigned_partitions"]:
                return str(member["group_instance_id"])
        return ""

    def take_over(self, *, stop: bool) -> tuple[set[str], float]:
        """Return the messages that were written, and the seconds until one that was written afterwards is released."""
        first = self.write(60)
        self.wait_for(first, self.rng.randrange(1, 30))
        wait_until(lambda: self.find_owner() in self._members, "a member has the partition")
        first |= self.write(self.rng.randrange(1, 200))
        time.sleep(self.rng.uniform(0, 0.5))  # the seeded moment, before or after a commit or a write
        owner = self.find_owner()
        process = self._members.pop(owner)
        process.send_signal(signal.SIGSTOP if stop else signal.SIGKILL)
        ended = time.monotonic()
        late = self.write(20)
        self.wait_for(late, len(late))
        took = time.monotonic() - ended
        if stop:
            process.send_signal(signal.SIGCONT)
            self._members[owner] = process
        else:
            process.wait()
            self.start()
        return first | late, took


@pytest.mark.timeout(1_800)
def test_each_update_is_released_once_whenever_the_fetcher_ends(kiln: Kiln, tmp_path: Path) -> None:
    with ExitStack() as stack:
        pair = Pair(kiln, tmp_path)
        stack.callback(pair.close)
        pair.start()
        pair.start()
        turns = [pair.take_over(stop=number >= KILLS) for number in range(KILLS + STOPS)]
        messages = set[str]().union(*(written for written, _ in turns))
        pair.wait_for(messages, len(messages))
        pair.wait_for(last := pair.write(100), len(last))  # behind what was suspended
    released = pair.updates.kept
    assert Counter(update.message_id for update in released) == Counter(messages | last)
    assert stream(NEVER) not in {update.stream for update in released}
    takeovers = [took for _, took in turns]
    print(
        f"{KILLS} kills, {STOPS} stops: {len(released)} updates of {pair.written} released, "
        f"{pair.updates.repeats} written again in their epoch, taken over after {min(takeovers):.1f} to "
        f"{max(takeovers):.1f} s"
    )


@pytest.mark.timeout(600)
def test_a_fetcher_that_was_suspended_before_it_wrote_writes_nothing_behind_its_successor(
    kiln: Kiln, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        pair = Pair(kiln, tmp_path)
        stack.callback(pair.close)
        suspended = pair.start("suspended")
        messages = pair.write(60)
        stat = Path(f"/proc/{suspended.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it has committed")
        successor = pair.start()
        pair.wait_for(messages, len(messages))
        pair.wait_for(late := pair.write(60), len(late))
        suspended.send_signal(signal.SIGCONT)
        successor.kill()
        pair.wait_for(last := pair.write(60), len(last))  # by the first one, which goes on
    assert Counter(update.message_id for update in pair.updates.kept) == Counter(messages | late | last)


# ---------------------------------------------------------------- what Kafka forgets


def test_without_an_offset_nothing_is_guessed(kiln: Kiln) -> None:
    kiln.ipfs.add(genesis(1))
    kiln.write(wanted(1, 0))
    first = kiln.start()
    assert awaited(lambda: first.status().counts["released"] == 1 and kiln.place() == 1)
    assert awaited(lambda: len(kiln.read("streams")) == 1)
    first.stop()
    kiln.forget_place()
    again = kiln.start()
    said = f"Kafka has lost the committed offset of group {kiln.prefix}fetcher.local-test for {kiln.prefix}wanted-0"
    assert awaited(lambda: said in (again.error or ""))
    assert "--reset-offsets" in (again.error or "")
    assert again.status().places_lost == 1
    again.stop()
    assert [update.message_id for update in kiln.updates()] == ["message 0"]


def test_a_topic_that_is_created_again_while_it_is_read_is_read_from_its_beginning(
    kiln: Kiln, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "CHECK_EVERY", 0.2)
    kiln.ipfs.add(genesis(1))
    kiln.write(wanted(1, 0), wanted(1, 1))
    fetcher = kiln.start()
    assert awaited(lambda: fetcher.status().counts["released"] == 2 and kiln.place() == 2)
    create_again(kiln.address, kiln.prefix, "wanted")
    kiln.write(*(wanted(1, message) for message in range(2, 6)))
    assert awaited(lambda: fetcher.status().counts["released"] == 6), fetcher.error
    assert sorted(kiln.kept()) == [f"message {number}" for number in range(6)]


def test_an_offset_in_an_earlier_topic_of_that_name_is_none(kiln: Kiln) -> None:
    kiln.ipfs.add(genesis(1))
    kiln.write(wanted(1, 0), wanted(1, 1))
    kiln.commit_place(1, f"{'B' * 22} ")
    fetcher = kiln.start()
    assert awaited(lambda: fetcher.status().counts["released"] == 2)
    assert fetcher.status().places_lost == 0


def test_records_that_retention_took_unread_are_told(kiln: Kiln, caplog: pytest.LogCaptureFixture) -> None:
    kiln.ipfs.add(genesis(1))
    kiln.write(wanted(1, 0), wanted(1, 1))
    first = kiln.start()
    assert awaited(lambda: first.status().counts["released"] == 2 and kiln.place() == 2)
    first.stop()
    kiln.write(*(wanted(1, message) for message in range(2, 7)))
    with KafkaAdminClient(**client(kiln.address)) as admin:
        admin.delete_records({TopicPartition(f"{kiln.prefix}wanted", 0): 5})
    again = kiln.start()
    assert awaited(lambda: again.status().counts["released"] == 2)
    assert again.status().counts["lost"] == 3
    assert "3 records of" in caplog.text
    assert "below offset 5" in caplog.text
    assert awaited(lambda: kiln.place() == 7)
    (fault,) = map(decode_quarantine, kiln.read("quarantine"))
    assert (fault.reason, fault.detail) == (
        "wanted_gone",
        "Kafka deleted 3 unfinished records of wanted from 0/2 to 0/4",
    )
