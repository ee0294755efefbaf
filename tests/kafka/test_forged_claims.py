"""Forged claims, on a real broker with a real fetcher (decision 20): what is batched, what is in quarantine, and what
the view `false_claims` says. The table in docs/design/20-claims.md is held against what is found here.

The queries' own functions run in this process, one micro-batch for each call, with a set in place of Spark's
deduplicating operator: with Spark, a hundred micro-batches would take minutes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import NamedTuple

import cbor2
import pyarrow as pa
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from deltalake import DeltaTable, write_deltalake
from pyspark import SparkFiles

from conftest import ROOT
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kiln.bridge.fetcher.fetcher import Fetcher
from kiln.bridge.fetcher.pending import FetchingOptions
from kiln.bridge.kafka.session_thread import KafkaConfig
from kiln.deploy.query.ask import query_lake
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.deploy.stack.kafka_broker import ensure_topics
from kiln.pipelines.batch.batching import batch_offset_ranges
from kiln.pipelines.batch.offset_range import ALL, UpdateFilter
from kiln.pipelines.batch.windows import PartitionWindows
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.dedup_store import StoredDigest
from kiln.pipelines.sink import transform as sink
from kiln.pipelines.updates import transform as updates
from kiln.pipelines.updates.repeats import select_updates
from kiln.pipelines.updates.separators import SeparatorConfig, StreamsTopic
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.kafka.records import BatchRecord, Epoch, UpdateRecord, decode_batch, decode_stream, decode_update
from kiln.schemas.kafka.topics import TOPICS
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.batch_block import read_block
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.identity import sign
from kiln.schemas.wire.pubsub import write_update
from kiln.schemas.wire.streamid import StreamID
from kiln.schemas.wire.topics import Separator, format_topic
from kit.awaiting import wait_until
from kit.broker_access import client, security
from kit.memory_ipfs import Ipfs
from kit.plain_batcher import read_range

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]

NETWORK = "local-claims"
S = 1_000_000
MODELS = {name: StreamID(2, compute_cid(f"model {name}".encode())) for name in "AB"}
NAMES = {model.text: name for name, model in MODELS.items()}
AUTHORS = [Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(1, 4)]


class Stream(NamedTuple):
    """A stream of model A."""

    text: str
    genesis: bytes

    @property
    def tip(self) -> str:
        return cid_text(compute_cid(b"tip of " + self.genesis))


def stream(number: int) -> Stream:
    header = {"controllers": [f"did:key:z{number}"], "sep": "model", "model": MODELS["A"].bytes}
    block = cbor2.dumps({"data": None, "header": header}, canonical=True)
    return Stream(StreamID(3, compute_cid(block)).text, block)


class Claim(NamedTuple):
    """What an update of a stream of A claims: by its topic, or None on the network's; by its field `model`, or None."""

    topic: str | None
    model: str | None

    def __str__(self) -> str:
        where = "the network's topic" if self.topic is None else f"{self.topic}'s topic"
        return f"on {where}, " + ("no `model`" if self.model is None else f"`model` {self.model}")

    def said(self, of: Stream, author: int = 0, at: int | None = None, tip: str = "") -> bytes:
        """A frame in which somebody announces a tip, by default the stream's one. `at`: µs."""
        model = None if self.model is None else MODELS[self.model].text
        place = None if self.topic is None else Separator("model", MODELS[self.topic].text)
        number = next(_NUMBERS)
        message = Message(
            data=write_update(of.text, tip or of.tip, model),
            topic=format_topic(NETWORK, place),
            seqno=number.to_bytes(8, "big"),
        )
        sign(message, AUTHORS[author])
        return Frame(
            network=NETWORK,
            connection=bytes(16),
            sequence=number,
            observed_at=time.time_ns() if at is None else at * 1000,
            payload=RPC(publish=[message]).SerializeToString(),
        ).SerializeToString()


_NUMBERS = count(1)


class Record(NamedTuple):
    """Of a topic; `stamp`: µs."""

    partition: int
    offset: int
    stamp: int
    key: bytes
    value: bytes


class Found(NamedTuple):
    """What became of a stream: in words, as a row of the table says it."""

    at_once: str
    at_the_end: str
    quarantine: str
    view: str


class Kiln:
    """The queries in this process; the broker and the fetcher are real."""

    def __init__(self, address: str, prefix: str, folder: Path, *, fetch: bool = True) -> None:
        self.address, self.prefix, self.folder = address, prefix, folder
        self.ipfs = Ipfs()
        self._fetch = fetch
        self._state: dict[bytes, StoredDigest] = {}  # as the query remembers for 24 h
        self._heard = count()
        self._micro_batches = count()
        parts = {"updates": 2}
        ensure_topics(
            address, prefix, parts, dict.fromkeys(TOPICS, timedelta(days=1)), client_options=security(address)
        )
        self._producer = KafkaProducer(**client(address), acks="all")
        options = FetchingOptions(NETWORK, max_concurrent=16, timeout=S, give_up_after=S // 2, retry_after=600 * S)
        kafka = KafkaConfig(client(address), prefix)
        self.fetcher = Fetcher(kafka, options, self.ipfs, lambda: ())
        if fetch:
            self.fetcher.start()

    def close(self) -> None:
        self.ipfs.gate.set()
        if self._fetch:
            self.fetcher.stop()
        self._producer.close()

    def hear(self, *frames: bytes) -> None:
        """A micro-batch of `updates`."""
        number = len(frames)
        offsets = [next(self._heard) for _ in frames]
        columns = {
            "partition": pa.array([0] * number, pa.int32()),
            "offset": pa.array(offsets, pa.int64()),
            "stamp": pa.array([0] * number, pa.int64()),
            "value": pa.array(frames, pa.binary()),
        }
        streams = StreamsTopic(f"{self.prefix}streams", (self.address,), tuple(security(self.address).items()))
        batches = iter([pa.RecordBatch.from_pydict(columns)])
        made = updates.build_copies(batches, DecodeConfig(), SeparatorConfig(streams, self._fetch), self._epoch())
        rows, changed = select_updates(sorted(made, key=lambda row: (row.observed_at, row.ref)), self._state)
        self._state.update(changed)
        for row in rows:
            self._producer.send(f"{self.prefix}{row.topic}", key=row.key, value=row.value)
        self._producer.flush()

    def _epoch(self) -> Epoch:
        return Epoch("updates", next(self._micro_batches))

    def read(self, topic: str) -> list[Record]:
        consumer = KafkaConsumer(**client(self.address))
        name = f"{self.prefix}{topic}"
        parts = [TopicPartition(name, number) for number in consumer.partitions_for_topic(name) or ()]
        consumer.assign(parts)
        consumer.seek_to_beginning(*parts)
        ends = consumer.end_offsets(parts)
        found: list[Record] = []
        while any(consumer.position(part) < ends[part] for part in parts):
            for part, records in consumer.poll(timeout_ms=500).items():
                found += [
                    Record(part.partition, each.offset, each.timestamp * 1000, each.key or b"", each.value)
                    for each in records
                ]
        consumer.close()
        return found

    def updates(self, of: Stream) -> list[UpdateRecord]:
        found = [decode_update(record.value) for record in self.read("updates")]
        return [update for update in found if update.stream == of.text]

    def made(self, which: UpdateFilter = ALL) -> list[bytes]:
        """The records of `kiln.batches` that the log gives, when all windows have closed."""
        log = self.read("updates")
        found: list[bytes] = []
        for partition in sorted({record.partition for record in log}):
            mine = [record for record in log if record.partition == partition]
            last = mine[-1]
            offsets = [*(record.offset for record in mine), last.offset + 1]
            stamps = [*(record.stamp for record in mine), last.stamp + 10 * S]
            stretches = [read_range(offsets, stamps, [*(record.value for record in mine), b""], which)]
            found += [out.value for out in batch_offset_ranges(PartitionWindows(S), partition, stretches, 256_000)]
        return found

    def batches(self, which: UpdateFilter = ALL) -> list[BatchRecord]:
        return [decode_batch(value) for value in self.made(which)]

    def fill(self, lake: Lake) -> None:
        """A micro-batch of `sink` over all there is."""
        made = [Record(0, offset, offset, b"", value) for offset, value in enumerate(self.made())]
        topics = {"batches": made} | {name: self.read(name) for name in ("updates", "streams", "quarantine")}
        read = [{"topic": name, **record._asdict()} for name, records in topics.items() for record in records]
        batch = pa.RecordBatch.from_pylist(read)
        rows: dict[str, dict[tuple[bytes, ...], Sequence[object]]] = {}
        for item in sink.read_records(iter([batch])):
            assert isinstance(item.row, tuple)
            rows.setdefault(item.kind, {}).setdefault(item.identities, item.row)
        for name in set(rows) & set(TABLES):
            lake.create((name,))
            schema = DeltaTable(lake.table(name)).to_pyarrow_dataset().schema
            columns = zip(*rows[name].values(), strict=True)
            arrays = [pa.array(column, each.type) for column, each in zip(columns, schema, strict=True)]
            write_deltalake(lake.table(name), pa.Table.from_arrays(arrays, schema=schema), mode="append")

    def await_streams(self, streams: Iterable[Stream]) -> None:
        """Until the fetcher has told what the geneses of these say."""
        wanted = {each.text for each in streams}

        def told() -> bool:
            return wanted <= {decode_stream(record.value).stream for record in self.read("streams")}

        wait_until(told, lambda: f"{len(wanted)} streams are known: {self.fetcher.status()}")


def in_batches(batches: Iterable[BatchRecord], of: Stream) -> str:
    """The separators in whose batches the stream's tip is, each as often as it is."""
    holding = [batch for batch in batches if of.tip in read_block(batch.block).get(of.text, ())]
    return ", ".join(sorted(NAMES[batch.separator.value] for batch in holding)) or "none"


def named(separator: object) -> str:
    """A separator out of a table, as the page names it."""
    return NAMES[str(separator).removeprefix("model/")]


@pytest.fixture
def a_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There is no Spark here to ask for a folder."""
    monkeypatch.setattr(SparkFiles, "getRootDirectory", lambda: str(tmp_path))


@pytest.fixture
def kiln(a_task: None, broker: EmbeddedBroker, prefix: str, tmp_path: Path) -> Iterator[Kiln]:
    made = Kiln(broker.address, prefix, tmp_path)
    yield made
    made.close()


# ---------------------------------------------------------------- the table

CLAIMED = {
    "claims only B": [Claim("B", None), Claim(None, "B"), Claim("B", "B")],
    "claims A and B": [Claim("B", "A"), Claim("A", "B")],
    "claims only A": [Claim("A", "A")],
}
CLAIMS = [claim for claims in CLAIMED.values() for claim in claims]
STREAMS = map(stream, count(1))
ANOTHER = cid_text(compute_cid(b"another tip"))


def announced(kiln: Kiln) -> dict[Claim, Stream]:
    """A stream for each claim, and each is said once."""
    said = {claim: next(STREAMS) for claim in CLAIMS}
    kiln.hear(*(claim.said(of) for claim, of in said.items()))
    return said


def table_of_the_page() -> dict[tuple[str, str], Found]:
    """By announcement and genesis, what the page says."""
    page = (ROOT / "docs" / "design" / "20-claims.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    assert len(rows) > 2, "a heading, a line, and rows"
    return {
        (str(claim), row[0]): read_cell(cell, claim)
        for row in rows[2:]
        for heading, cell in zip(rows[0][1:], row[1:], strict=True)
        for claim in CLAIMED[heading]
    }


def read_cell(cell: str, claim: Claim) -> Found:
    """Content of a cell: true if the update waits, the batches that hold it, its reason in quarantine, the view."""
    words = cell.split(", ")
    waits = words[0] == "waits"
    owner = words[waits].replace("the topic's", str(claim.topic))
    reasons = [word for word in words if word in ("`contradicts_genesis`", "`genesis_unavailable`")]
    told = ", ".join(reasons).replace("`contradicts_genesis`", "`contradicts_genesis`: B") or "nothing"
    view = "in B's, truly A's" if "`false_claims`" in words else "nothing"
    return Found("none" if waits else owner, owner, told, view)


def test_what_becomes_of_forged_claims_is_as_the_page_says(
    kiln: Kiln, broker: EmbeddedBroker, prefix: str, tmp_path: Path
) -> None:
    groups: list[tuple[str, dict[Claim, Stream], list[BatchRecord]]] = []

    def add(genesis: str, said: dict[Claim, Stream], of: Kiln = kiln) -> None:
        groups.append((genesis, said, of.batches()))

    # nobody has the genesis
    add("nobody has it", announced(kiln))
    wait_until(lambda: kiln.fetcher.status().counts["genesis_unavailable"] == 2, lambda: f"{kiln.fetcher.status()}", 60)

    # it is slow; and IPFS goes away, and comes back
    kiln.ipfs.gate.clear()
    slow = announced(kiln)
    wait_until(lambda: kiln.fetcher.status().counts["claims"] == 8, "claims are counted")
    for each in slow.values():
        kiln.ipfs.add(each.genesis)
    add("comes later", slow)
    kiln.ipfs.gate.set()
    kiln.await_streams(slow.values())
    kiln.ipfs.away = True
    away = announced(kiln)
    wait_until(
        lambda: kiln.fetcher.status().state.startswith("IPFS is unavailable"), lambda: kiln.fetcher.status().state
    )
    for each in away.values():
        kiln.ipfs.add(each.genesis)
    add("comes later", away)
    kiln.ipfs.away = False
    kiln.await_streams(away.values())
    wait_until(lambda: kiln.fetcher.status().waiting == 0, "nothing waits")

    known = {claim: next(STREAMS) for claim in CLAIMS}
    for each in known.values():
        kiln.ipfs.add(each.genesis)
    kiln.hear(*(Claim("A", "A").said(each, tip=ANOTHER) for each in known.values()))
    kiln.await_streams(known.values())
    kiln.hear(*(claim.said(each) for claim, each in known.items()))
    add("is known", known)

    # without an IPFS node
    without = Kiln(broker.address, f"{prefix}without.", tmp_path, fetch=False)
    try:
        add("no IPFS node", announced(without), without)
        end = [*kiln.batches(), *without.batches()]
        lake = Lake(str(tmp_path / "lake"))
        kiln.fill(lake)
        without.fill(lake)
        assert without.read("wanted") == []
    finally:
        without.close()

    def rows(query: str) -> list[tuple[object, ...]]:
        return list(query_lake(lake, query).rows())

    view = rows("SELECT stream, tip, separator_value, true_value FROM false_claims")
    faults = rows("SELECT reason, regexp_extract(detail, '^claimed ([^;]+)', 1), data FROM quarantine")
    found: dict[tuple[str, str], Found] = {}
    for genesis, said, at_once in groups:
        for claim, of in said.items():
            told = [
                f"`{reason}`" + (f": {named(false)}" if false else "")
                for reason, false, data in faults
                if isinstance(data, bytes) and of.tip.encode() in data
            ]
            seen = [
                f"in {named(false)}'s, truly {named(true)}'s" for *tip, false, true in view if tip == [of.text, of.tip]
            ]
            words = (", ".join(each) or "nothing" for each in (told, seen))
            became = Found(in_batches(at_once, of), in_batches(end, of), *words)
            assert found.setdefault((str(claim), genesis), became) == became, "slow and away come to the same"
    assert found == table_of_the_page()
    chosen = kiln.batches(UpdateFilter(only_verified=True))
    assert {NAMES[batch.separator.value] for batch in chosen} == {"A"}, "a false claim is in no batch"


# ---------------------------------------------------------------- an update is new once

ON_A, NO_CLAIM, DISAGREE, ON_B = Claim("A", None), Claim(None, None), Claim("B", "A"), Claim("B", None)


def test_a_tip_announced_ten_times_is_one_update_in_one_batch_whatever_comes_to_be_known_meanwhile(kiln: Kiln) -> None:
    """Ten times, 2 s apart, by three authors in turn; the genesis comes between the fourth and the fifth."""
    said = {
        "on its topic": [ON_A] * 10,
        "with no claim": [NO_CLAIM] * 10,
        "with claims that disagree": [DISAGREE] * 10,
        "with no claim first, then on its topic": [NO_CLAIM] * 4 + [ON_A] * 6,
        "with claims that disagree first, then on its topic": [DISAGREE] + [ON_A] * 9,
        "on its topic first, then in every other way": [ON_A, NO_CLAIM, DISAGREE]
        + [NO_CLAIM, ON_A, DISAGREE, ON_B]
        + [ON_A] * 3,
        "under a false separator first": [ON_B] + [ON_A] * 9,
        "under a false separator while nothing is known": [ON_B] * 10,
    }
    streams = {name: next(STREAMS) for name in said}
    start = time.time_ns() // 1_000 - 60 * S
    kiln.ipfs.gate.clear()
    for number in range(10):
        for name, claims in said.items():
            kiln.hear(claims[number].said(streams[name], number % 3, start + number * 2 * S))
        if number == 3:
            wanted = len(kiln.read("wanted"))
            wait_until(
                lambda: kiln.fetcher.status().counts["claims"] + kiln.fetcher.status().waiting == wanted,  # noqa: B023 – the loop waits for it at once
                lambda: f"{kiln.fetcher.status()} of {wanted}",  # noqa: B023 – the loop waits for it at once
            )
            for of in streams.values():
                kiln.ipfs.add(of.genesis)
            kiln.ipfs.gate.set()
            kiln.await_streams(streams.values())
            wait_until(lambda: kiln.fetcher.status().waiting == 0, lambda: f"{kiln.fetcher.status()}")
    batches = kiln.batches()
    false = ("under a false separator first", "under a false separator while nothing is known")
    assert {name: (len(kiln.updates(of)), in_batches(batches, of)) for name, of in streams.items()} == {
        name: (2, "A, B") if name in false else (1, "A") for name in said
    }
