"""The fetcher on a real broker, with an IPFS node of the test's that goes away and comes back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import cbor2
import pytest
from kafka.admin import KafkaAdminClient
from kafka.structs import OffsetAndMetadata

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kiln.bridge.fetcher.fetcher import Fetcher
from kiln.bridge.fetcher.offsets import DoneOffsets
from kiln.bridge.fetcher.pending import FetchingOptions
from kiln.bridge.kafka import thread as kafka_thread
from kiln.bridge.kafka.thread import KafkaConfig, Leadership
from kiln.bridge.kafka.topic_notes import TopicNotes, locate_topic_notes
from kiln.conf.process.state_version import claim_state_folder
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.deploy.stack.kafka_topics import ensure_topics
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
from kiln.schemas.wire.batch_block import write_blocks
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.streamid import StreamID
from kiln.schemas.wire.topics import encode_separator_value
from kit.awaiting import awaited
from kit.broker_access import client, security
from kit.memory_ipfs import Ipfs
from kit.topics import create_again, recover
from kit.turns import Turns

pytestmark = pytest.mark.kafka

S = 1_000_000
AT = 1_700_000_000_000_000  # µs
MODEL = SeparatorRecord("model", encode_separator_value(b"\x01\x02"))
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


def has_released(fetcher: Fetcher) -> bool:
    return fetcher.counts["released"] > 0


class Kiln:
    """Topics of its own, fetchers on them."""

    def __init__(self, address: str, prefix: str) -> None:
        self.address = address
        self.prefix = prefix
        self.ipfs = Ipfs()
        self.interests: tuple[str, ...] = ("model",)
        self.running: list[Fetcher] = []
        self.position_file: Path | None = None
        self.notes: TopicNotes | None = None
        ensure_topics(
            address, prefix, {"updates": 2}, dict.fromkeys(TOPICS, timedelta(days=1)), client_options=security(address)
        )

    def write(self, *records: WantedRecord | bytes) -> None:
        producer = KafkaProducer(**client(self.address), acks="all")
        for record in records:
            value = record if isinstance(record, bytes) else encode(record)
            producer.send(f"{self.prefix}wanted", value=value, partition=0)
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
        leadership: Leadership | None = None,
    ) -> Fetcher:
        fetcher = Fetcher(
            KafkaConfig([self.address], security(self.address), self.prefix),
            options,
            self.ipfs,
            lambda: self.interests,
            clock_us,
            position_file=self.position_file,
            notes=self.notes,
            leadership=leadership,
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

    def place(self) -> int | None:
        kept = self.committed()
        return None if kept is None else kept.offset

    def not_done(self, until: int) -> list[int]:
        """Offsets that the next run would deal with."""
        kept = self.committed()
        if kept is None:
            return list(range(until))
        done_offsets = DoneOffsets(kept.offset, kept.metadata, 0)
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
    assert awaited(lambda: fetcher.state == "IPFS is unavailable: no node at http://127.0.0.1:5001 (waiting: 30)")
    assert fetcher.error == "nothing is fetched, IPFS is unavailable: no node at http://127.0.0.1:5001"
    kiln.write(*(wanted(message % 3, message) for message in range(30, 60)))
    assert awaited(lambda: fetcher.waiting == 60)
    assert kiln.read("updates") == []
    kiln.ipfs.away = False
    assert awaited(lambda: fetcher.counts["released"] == 60)
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
    assert awaited(lambda: first.counts["released"] == 1)
    assert awaited(lambda: kiln.place() == 1)
    first.stop()
    assert first.state == "stopped"
    kiln.write(wanted(1, 1))
    again = kiln.start()
    assert awaited(lambda: again.counts["released"] == 1)
    assert [update.message_id for update in kiln.updates()] == ["message 0", "message 1"]
    assert kiln.ipfs.asked[cid] == 1
    assert len(kiln.read("streams")) == 1


def test_genesis_that_never_comes_ends_in_quarantine_and_holds_up_no_other(kiln: Kiln) -> None:
    kiln.ipfs.add(genesis(1))
    records = [wanted(0, 0), wanted(1, 1), wanted(0, 2)]
    kiln.write(*records)
    fetcher = kiln.start(FetchingOptions("local-test", timeout=S, give_up_after=2 * S))
    assert awaited(lambda: fetcher.counts["released"] == 1)
    assert awaited(lambda: fetcher.counts["genesis_unavailable"] == 2)
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
        WantedRecord("local-test", bad, "batch", AT, separator=MODEL, message_id="m4"),
        WantedRecord("local-test", faulty, "batch", AT, separator=MODEL, message_id="m5"),
        b"{",
    )
    fetcher = kiln.start()
    assert awaited(lambda: kiln.place() == 6)
    blocks = {block.batch_cid: block for block in map(decode_block, kiln.read("blocks"))}
    assert (blocks[good.cid].block, blocks[good.cid].separator, blocks[good.cid].reason) == (good.data, MODEL, None)
    assert (blocks[bad].block, blocks[bad].reason) == (None, "block_malformed")
    assert (blocks[faulty].block, blocks[faulty].reason) == (None, "fetch_fault")
    reasons = Counter(decode_quarantine(value).reason for value in kiln.read("quarantine"))
    assert reasons == {"block_malformed": 1, "fetch_fault": 1, "wanted_malformed": 1}
    assert (fetcher.counts["not_of_interest"], fetcher.counts["already_fetched"]) == (1, 1)
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


# the fault is raised on purpose, in the fetcher's thread
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_crash_after_a_release_repeats_it_in_the_same_epoch(kiln: Kiln) -> None:
    for number in range(20):
        kiln.ipfs.add(genesis(number))
    crashed = 0
    for turn in range(5):
        kiln.write(*(wanted(message % 20, message) for message in range(100 * turn, 100 * (turn + 1))))
        before = len(kiln.read("updates"))

        def clock(before: int = before) -> int:
            # asked for between what is written and the commit that says so
            if len(kiln.read("updates")) > before:
                raise RuntimeError("the process ends here")
            return time.time_ns() // 1_000

        fetcher = kiln.start(clock_us=clock)
        assert awaited(lambda: kiln.running[-1].state == "stopped")
        crashed += fetcher.error == "nothing is fetched: the fetcher has crashed, and will be restarted"
    assert crashed == 5
    last = kiln.start()
    assert awaited(lambda: kiln.place() == 500)
    last.stop()
    assert Counter(kiln.kept()) == Counter(f"message {message}" for message in range(500))
    assert len(kiln.updates()) > 500  # there were repeats


def test_one_that_waits_does_not_hold_back_its_place_in_few_bytes(kiln: Kiln) -> None:
    """What comes after it is done, and stays done over a restart, though the place stays before it."""
    kiln.ipfs.add(genesis(1))
    kiln.write(wanted(0, 0), *(wanted(1, message) for message in range(1, 1_001)))
    first = kiln.start()
    assert awaited(lambda: first.counts["released"] == 1_000)
    assert awaited(lambda: kiln.not_done(1_001) == [0])
    first.stop()
    kiln.ipfs.add(genesis(0))
    again = kiln.start()
    assert awaited(lambda: again.counts["released"] == 1)
    assert awaited(lambda: kiln.place() == 1_001)
    assert again.counts["released"] == 1
    assert Counter(kiln.kept()) == Counter(f"message {message}" for message in range(1_001))


def test_broker_away_at_the_start(kiln: Kiln, free_port: int) -> None:
    fetcher = Fetcher(KafkaConfig(f"127.0.0.1:{free_port}", {}, "kiln."), OPTIONS, kiln.ipfs, lambda: ("*",))
    fetcher.start()
    assert awaited(lambda: "Kafka fails" in fetcher.state)
    fetcher.stop(10)
    assert fetcher.state == "stopped"


# ---------------------------------------------------------------- what Kafka forgets


def test_a_place_that_kafka_lost_is_taken_from_the_file(
    kiln: Kiln, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kiln.position_file = tmp_path / "fetcher.json"
    for number in range(2):
        kiln.ipfs.add(genesis(number))
    kiln.write(wanted(0, 0), wanted(2, 1), wanted(1, 2))  # nobody has the genesis of 2
    first = kiln.start()
    assert awaited(lambda: first.counts["released"] == 2 and kiln.place() == 1)
    first.stop()
    kiln.forget_place()
    kiln.ipfs.add(genesis(2))
    kiln.write(wanted(0, 3))

    again = kiln.start()
    assert awaited(lambda: again.counts["released"] == 2)
    assert (again.places_lost, again.status().places_lost) == (1, 1)
    assert "Kafka has lost the committed offset" in caplog.text
    assert sorted(update.message_id for update in kiln.updates()) == [f"message {message}" for message in range(4)]


def test_of_two_fetchers_the_one_that_leads_fetches_and_has_the_file(kiln: Kiln, tmp_path: Path) -> None:
    for number in range(3):
        kiln.ipfs.add(genesis(number))
    turns, files = Turns("a"), {name: tmp_path / f"{name}.json" for name in "ab"}
    fetchers: dict[str, Fetcher] = {}
    for name, kiln.position_file in files.items():
        fetchers[name] = kiln.start(leadership=turns.of(name))

    def turn(name: str, number: int) -> None:
        turns.leader = name
        kiln.write(wanted(number, number))
        assert awaited(lambda: kiln.place() == number + 1)
        assert awaited(lambda: {each for each in files if files[each].exists()} == {name})
        turns.leader = None  # nobody is known to lead: the file may be the newest there is
        assert awaited(lambda: fetchers[name].state == "on standby: None leads")
        assert files[name].exists()

    for number, name in enumerate("aba"):
        turn(name, number)
    assert [update.message_id for update in kiln.updates()] == [f"message {number}" for number in range(3)]


def test_without_place_and_file_nothing_is_guessed(kiln: Kiln, tmp_path: Path) -> None:
    kiln.position_file = tmp_path / "fetcher.json"
    kiln.ipfs.add(genesis(1))
    kiln.write(wanted(1, 0))
    first = kiln.start()
    assert awaited(lambda: first.counts["released"] == 1 and kiln.place() == 1)
    assert awaited(lambda: len(kiln.read("streams")) == 1)
    first.stop()
    kiln.forget_place()
    kiln.position_file.unlink()
    again = kiln.start()
    assert awaited(lambda: again.error is not None)
    said = str(again.error)
    assert (
        f"Kafka has lost the committed offset of group {kiln.prefix}fetcher.local-test for {kiln.prefix}wanted-0"
        in said
    )
    assert "--reset-offsets" in said
    again.stop()
    assert [update.message_id for update in kiln.updates()] == ["message 0"]


def test_the_place_of_a_topic_that_was_made_anew_is_none(kiln: Kiln, tmp_path: Path) -> None:
    kiln.position_file = tmp_path / "fetcher.json"
    kiln.position_file.write_text('{"topic": "another", "positions": {"0": {"offset": 1, "metadata": ""}}}')
    kiln.ipfs.add(genesis(1))
    kiln.write(wanted(1, 0), wanted(1, 1))
    fetcher = kiln.start()
    assert awaited(lambda: fetcher.counts["released"] == 2)
    assert fetcher.places_lost == 0


@pytest.mark.parametrize("runs", [False, True], ids=["stopped", "running"])
def test_another_topic_is_refused_and_read_from_its_beginning_after_recover(
    kiln: Kiln, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    monkeypatch.setattr(kafka_thread, "CHECK_EVERY", 0.2)
    claim_state_folder(tmp_path)
    (tmp_path / "bridge").mkdir()
    kiln.notes, kiln.position_file = (
        locate_topic_notes(tmp_path / "bridge", "fetcher"),
        tmp_path / "bridge" / "fetcher.json",
    )
    kiln.ipfs.add(genesis(1))
    kiln.write(wanted(1, 0), wanted(1, 1))
    fetcher = kiln.start()
    assert awaited(lambda: fetcher.counts["released"] == 2 and kiln.place() == 2)
    if not runs:
        fetcher.stop()
    create_again(kiln.address, kiln.prefix, "wanted")
    if not runs:
        kiln.write(*(wanted(1, message) for message in range(2, 6)))
        fetcher = kiln.start()
    said = f"nothing is fetched: {kiln.prefix}wanted is not the topic that was read before"
    assert awaited(lambda: (fetcher.error or "").startswith(said)), fetcher.error
    if runs:
        kiln.write(*(wanted(1, message) for message in range(2, 6)))
    fetcher.stop()
    assert len(kiln.updates()) == 2

    assert [damage.query for damage in recover(kiln.address, kiln.prefix, tmp_path)] == ["bridge, fetcher"]
    again = kiln.start()
    assert awaited(lambda: again.counts["released"] == 4 and kiln.place() == 4), again.error
    again.stop()
    assert sorted(kiln.kept()) == [f"message {number}" for number in range(6)]
    assert recover(kiln.address, kiln.prefix, tmp_path) == []


def test_records_that_retention_took_unread_are_told(kiln: Kiln, caplog: pytest.LogCaptureFixture) -> None:
    kiln.ipfs.add(genesis(1))
    kiln.write(wanted(1, 0), wanted(1, 1))
    first = kiln.start()
    assert awaited(lambda: first.counts["released"] == 2 and kiln.place() == 2)
    first.stop()
    kiln.write(*(wanted(1, message) for message in range(2, 7)))
    with KafkaAdminClient(**client(kiln.address)) as admin:
        admin.delete_records({TopicPartition(f"{kiln.prefix}wanted", 0): 5})
    again = kiln.start()
    assert awaited(lambda: again.counts["released"] == 2)
    assert again.status().counts["lost"] == 3
    assert "3 records of" in caplog.text
    assert "offsets 2 to 4" in caplog.text
    assert awaited(lambda: kiln.place() == 7)
    (fault,) = map(decode_quarantine, kiln.read("quarantine"))
    assert (fault.reason, fault.detail) == ("wanted_gone", "3 records out of 0/2 to 0/4 of wanted")
