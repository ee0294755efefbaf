"""The bridge beside programs that write to Kiln's topics with other codecs, other headers and no sense."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import cast

import cbor2
import pytest

from kafka import TopicPartition
from kiln.bridge.fetcher.fetcher import Fetcher
from kiln.bridge.fetcher.pending import FetchingOptions
from kiln.bridge.ipfs import BlockStore
from kiln.bridge.kafka.session_thread import KafkaConfig
from kiln.bridge.publisher.batches import PublishingOptions
from kiln.bridge.publisher.publisher import Publisher
from kiln.conf.process.kafka_records import RecordReader
from kiln.conf.process.librdkafka import librdkafka_options
from kiln.deploy.ops.snapshot_builder import TopicWatch
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.deploy.stack.kafka_broker import ensure_topics
from kiln.pipelines.runtime.kafka_ranges import OffsetRange, read_ranges
from kiln.schemas.kafka.records import (
    MAX_QUARANTINED,
    BatchRecord,
    Coordinates,
    Epoch,
    QuarantineRecord,
    SeparatorRecord,
    StreamRecord,
    UpdateRecord,
    WantedRecord,
    decode_publication,
    decode_quarantine,
    decode_update,
    encode,
)
from kiln.schemas.kafka.topics import TOPICS
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.streamid import StreamID
from kiln.schemas.wire.topics import encode_separator_value
from kit.awaiting import wait_until
from kit.batch_blocks import write_blocks
from kit.broker_access import client, security
from kit.memory_ipfs import Ipfs
from kit.strange_records import CODECS, GARBAGE, HUGE, Writer, Written, read_all

pytestmark = pytest.mark.kafka

S = 1_000_000
AT = 1_700_000_000_000_000  # µs
MODEL = SeparatorRecord("model", encode_separator_value(b"\x01\x02"))


def genesis(number: int) -> bytes:
    header = {"controllers": [f"did:key:z{number}"], "sep": "model", "model": b"\x01\x02"}
    return cbor2.dumps({"data": None, "header": header}, canonical=True)


def stream(number: int) -> str:
    return StreamID(3, compute_cid(genesis(number))).text


def batch(number: int) -> BatchRecord:
    (block,) = write_blocks({stream(number): [compute_cid(b"tip")]})
    closed = time.time_ns() // 1_000
    return BatchRecord("local-test", "LIVE", MODEL, block.cid, block.data, closed - S, closed)


def wanted(number: int) -> WantedRecord:
    tip = cid_text(compute_cid(f"tip {number}".encode()))
    at = Coordinates(0, number, 0)
    update = UpdateRecord(
        "local-test", "LIVE", None, None, stream(number), tip, None, f"message {number}", Epoch("updates", 0), at, AT
    )
    return WantedRecord("local-test", cid_text(compute_cid(genesis(number))), "genesis", AT, update=update)


class Bridge:
    """A publisher and a fetcher on topics of their own."""

    def __init__(self, address: str, prefix: str) -> None:
        self.address, self.prefix = address, prefix
        self.ipfs = Ipfs()
        self.sent: list[bytes] = []
        self.running: list[Publisher | Fetcher] = []
        ensure_topics(address, prefix, {}, dict.fromkeys(TOPICS, timedelta(days=1)), client_options=security(address))

    def start(self) -> None:
        kafka = KafkaConfig(client(self.address), self.prefix)
        options = PublishingOptions("local-test", publish_timeout=600 * S, retry_every=S // 5)
        self.publisher = Publisher(kafka, options, self._publish, lambda: None, cast(BlockStore, self))
        fetching = FetchingOptions("local-test", timeout=S, give_up_after=600 * S)
        self.fetcher = Fetcher(kafka, fetching, self.ipfs, lambda: ("model",))
        self.running = [self.publisher, self.fetcher]
        for each in self.running:
            each.start()

    def stop(self) -> None:
        for each in self.running:
            each.stop(30)

    def _publish(self, topic: str, data: bytes) -> int:
        self.sent.append(data)
        return 1

    def put(self, cid: str, data: bytes) -> None: ...

    def remove_older(self, before: int) -> bool:
        return False

    @property
    def errors(self) -> list[str]:
        return [each.error for each in self.running if each.error is not None]

    def read(self, topic: str) -> Iterator[bytes]:
        return (record.value or b"" for record in read_all(self.address, f"{self.prefix}{topic}"))

    @property
    def published(self) -> list[str]:
        return [decode_publication(value).batch_cid for value in self.read("publications") if b'"transport"' in value]

    @property
    def released(self) -> list[str]:
        return [decode_update(value).message_id for value in self.read("updates")]

    @property
    def quarantined(self) -> dict[bytes, bytes]:
        """Bytes by key. Those of a large record are in several quarantine records."""
        data: dict[bytes, bytes] = defaultdict(bytes)
        for record in read_all(self.address, f"{self.prefix}quarantine"):
            data[record.key or b""] += decode_quarantine(record.value or b"").data
        return data


@pytest.fixture
def bridge(broker: EmbeddedBroker, prefix: str) -> Iterator[Bridge]:
    made = Bridge(broker.address, prefix)
    yield made
    made.stop()


def test_publishing_and_fetching_go_on_and_each_bad_record_is_in_quarantine(bridge: Bridge) -> None:
    """Live, and at the next start, which reads the same records of `streams` and `publications` again."""
    bridge.start()
    expected: dict[bytes, bytes] = {}
    for first in (0, len(CODECS)):
        written: dict[bytes, bytes] = {}
        for number, codec in enumerate(CODECS, start=first):
            bridge.ipfs.add(genesis(number))
            written |= write_everything(bridge, number, codec)
        expected |= written
        of_fetcher = sum(key.startswith(b"wanted/") for key in written)
        await_count(lambda: bridge.publisher.status().published, len(CODECS))
        await_count(lambda: len(bridge.quarantined), len(expected))
        await_count(lambda: bridge.fetcher.status().counts["released"], len(CODECS))
        await_count(lambda: bridge.fetcher.status().counts["quarantined"], of_fetcher)
        assert bridge.errors == []
        bridge.stop()
        bridge.start()
    wait_until(lambda: all(each.state.startswith("waiting") for each in bridge.running), "both have started again")
    bridge.stop()
    assert sorted(bridge.published) == sorted(batch(number).batch_cid for number in range(2 * len(CODECS)))
    assert bridge.released == [f"message {number}" for number in range(2 * len(CODECS))]
    assert bridge.quarantined == expected


def await_count(count: Callable[[], int], number: int) -> None:
    wait_until(lambda: count() == number, lambda: f"{count()} instead of {number}")


def write_everything(bridge: Bridge, number: int, codec: str) -> dict[bytes, bytes]:
    """Write a good batch and a good update that waits, behind garbage in each topic, and a transaction that is aborted.

    Returns:
        The bytes by key that must be in quarantine. The publisher keeps the first part of large ones.
    """
    writer, bad = Writer(bridge.address, codec), [*GARBAGE, HUGE] if codec == "zstd" else GARBAGE
    good = {"batches": encode(batch(number)), "wanted": encode(wanted(number))}
    expected: dict[bytes, bytes] = {}
    for topic in ("streams", "publications", "batches", "wanted"):
        records = [*bad, *((b"good", value) for name, value in good.items() if name == topic)]
        done = writer.write(f"{bridge.prefix}{topic}", records)
        if topic in ("batches", "wanted"):
            limit = None if topic == "wanted" else MAX_QUARANTINED
            expected |= {f"{topic}/0/{at}".encode(): (value or b"")[:limit] for at, _, value in done[: len(bad)]}
    aborted = {"batches": encode(batch(1_000)), "wanted": encode(wanted(1_000)), "streams": b"aborted"}
    Writer(bridge.address, codec, f"{bridge.prefix}{number}").abort(
        {f"{bridge.prefix}{topic}": value for topic, value in aborted.items()}
    )
    return expected


def test_a_known_stream_is_read_behind_any_record(bridge: Bridge) -> None:
    """An update of a stream that is in `streams` needs no fetch."""
    bridge.start()
    wait_until(lambda: bridge.fetcher.state == "waiting for records", "a first commit")
    bridge.stop()
    for number, codec in enumerate(CODECS):
        known = encode(StreamRecord("local-test", stream(number), MODEL, AT, source="genesis"))
        Writer(bridge.address, codec).write(f"{bridge.prefix}streams", [*GARBAGE, (stream(number).encode(), known)])
    Writer(bridge.address, "zstd").write(
        f"{bridge.prefix}wanted", [(b"", encode(wanted(number))) for number in range(len(CODECS))]
    )
    bridge.start()
    wait_until(
        lambda: len(bridge.released) == len(CODECS),
        lambda: f"{bridge.errors} {bridge.fetcher.state} {bridge.fetcher.status().counts} {bridge.ipfs.asked}",
    )
    assert bridge.ipfs.asked.total() == 0


def test_the_screen_counts_behind_any_record(bridge: Bridge) -> None:
    watch = TopicWatch(client(bridge.address), bridge.prefix, 1.0)
    watch.start()
    try:
        for number, codec in enumerate(CODECS):
            writer = Writer(bridge.address, codec)
            fault = encode(QuarantineRecord("frame", "frame_invalid", "", b"", AT))
            writer.write(f"{bridge.prefix}batches", [*GARBAGE, (b"good", encode(batch(number)))])
            writer.write(f"{bridge.prefix}quarantine", [*GARBAGE, (b"0/1", fault)])
        wait_until(lambda: watch.counts.batches == len(CODECS), "the batches")
        wait_until(lambda: watch.counts.quarantine["frame", "frame_invalid"] == len(CODECS), "the faults")
    finally:
        watch.stop()


def test_records_that_no_client_can_decode_are_passed_one_offset_at_a_time(broker: EmbeddedBroker, prefix: str) -> None:
    """A damaged disk of the broker: the group of records fails its checksum, and each of its offsets is told."""
    topic = f"{prefix}frames"
    ensure_topics(
        broker.address, prefix, {}, dict.fromkeys(TOPICS, timedelta(days=1)), client_options=security(broker.address)
    )
    writer = Writer(broker.address, "zstd")
    groups = [writer.write(topic, [(b"%d" % each, b"%d" % each * 99) for each in range(5)]) for _ in range(3)]
    damage(broker.state / "broker", topic)
    with closing(RecordReader(client(broker.address), f"{prefix}reader")) as reader:
        part = TopicPartition(topic, 0)
        reader.assign({part: 0})
        end = reader.read_end(part)
        records: list[Written] = []
        while reader.position(part) < end:
            records += [Written(each.offset, each.key, each.value) for each in reader.poll(1.0).get(part, [])]
    assert [each.offset for each in records] == list(range(end))
    told = [each.offset for each in records if (each.value or b"").startswith(b"no record can be decoded here: ")]
    assert told
    assert set(told) < {each.offset for each in groups[1]} | {each.offset for each in groups[0]}
    written = [each for group in groups for each in group if each.offset not in told]
    assert [each for each in records if each.offset not in told] == written
    options = (*librdkafka_options(client(broker.address)).items(), ("group.id", f"{prefix}reader"))
    rows = [row for each in read_ranges([OffsetRange(topic, 0, 0, end)], options) for row in each.to_pylist()]
    assert [(row["offset"], row["value"]) for row in rows] == [(each.offset, each.value) for each in records]


def damage(folder: Path, topic: str) -> None:
    """Change bytes in the second group of records of a topic, in the broker's file."""
    [file] = folder.glob(f"**/{topic}-0/*.log")
    content = file.read_bytes()
    second = 12 + int.from_bytes(content[8:12])
    at = second + 61 + 4  # behind the header of the group
    with file.open("r+b") as log:
        log.seek(at)
        log.write(bytes(byte ^ 0xFF for byte in content[at : at + 4]))
