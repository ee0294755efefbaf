"""A bridge that fetches what an honest peer announces, while strangers announce batches that nobody has.

The bridge has a broker of its own. The query `updates` runs as plain Python in a thread, without Spark.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import cbor2
import pyarrow as pa
import trio

from hostile.attack import Done
from hostile.scene import MEMORY, MIB, Latencies, attacked, is_grafted
from kafka import KafkaConsumer, KafkaProducer
from kiln.conf.process.bridge_status import BridgeStatus
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.updates.separators import SeparatorConfig
from kiln.pipelines.updates.transform import build_copies
from kiln.schemas.kafka.records import Epoch, decode_block, decode_stream
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.pubsub import write_batch_update, write_update
from kiln.schemas.wire.streamid import StreamID
from kiln.schemas.wire.topics import Separator, encode_separator_value
from kit.batch_blocks import write_blocks
from kit.bitswap_sides import Block, Side, open_side
from kit.bridge_alone import BridgeAlone
from kit.broker_access import client, variables
from kit.live_batches import running_broker
from kit.node_town import TOPIC, Town, in_town

_EVERY = 1.0  # s between two honest announcements, each of a batch and of an update that waits for its genesis
_GENESIS = 30.0  # s, the longest that a genesis may take
_DRAINED = 120.0  # s after the attack
_TIMES_AS_LATE = 2.0
_SHORT = 1.0  # s: delays below it are those of the polls between the parts, and not compared


class _Updates:
    """The query `updates` in a thread: from `kiln.frames` to `kiln.wanted`; and when answers came."""

    def __init__(self, address: str) -> None:
        self.streams: dict[str, float] = {}
        """when the separator of a stream was written, in seconds since the epoch"""
        self.blocks: dict[str, float] = {}
        """likewise of the block of a batch"""
        self.wanted = 0
        self._address = address
        self._stopping = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(self._run)
            try:
                yield
            finally:
                self._stopping.set()
            done.result()

    def _run(self) -> None:
        topics = ("kiln.frames", "kiln.streams", "kiln.blocks")
        consumer = KafkaConsumer(*topics, **client(self._address), auto_offset_reset="earliest", group_id=None)
        producer = KafkaProducer(**client(self._address), acks="all")
        emitted: set[bytes] = set()
        while not self._stopping.is_set():
            for part, records in consumer.poll(timeout_ms=100).items():
                if part.topic == "kiln.frames":
                    columns = {
                        "partition": [part.partition] * len(records),
                        "offset": [record.offset for record in records],
                        "stamp": [record.timestamp * 1000 for record in records],
                        "value": [record.value for record in records],
                    }
                    batch = pa.RecordBatch.from_pydict(columns)
                    config, separating = DecodeConfig(), SeparatorConfig(fetch=True)
                    for row in build_copies(iter([batch]), config, separating, Epoch("updates", 0)):
                        if row.topic == "wanted" and row.identity not in emitted:
                            emitted.add(row.identity)
                            self.wanted += 1
                            producer.send("kiln.wanted", key=row.key, value=row.value)
                for record in records if part.topic == "kiln.streams" else ():
                    self.streams.setdefault(decode_stream(record.value).stream, record.timestamp / 1e3)
                for record in records if part.topic == "kiln.blocks" else ():
                    block = decode_block(record.value)
                    if block.block is not None:
                        self.blocks.setdefault(block.batch_cid, record.timestamp / 1e3)
        producer.close()
        consumer.close()


class _Author:
    """An honest peer that announces updates and batches, and serves their geneses and blocks."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._number = 0
        self.streams: dict[str, float] = {}
        """when an update of a stream was announced"""
        self.batches: dict[str, float] = {}

    async def announce(self, seconds: float) -> None:
        """For so long."""
        began = trio.current_time()
        for number in range(int(seconds / _EVERY)):
            await trio.sleep_until(began + number * _EVERY)
            model = b"\x01" + self._number.to_bytes(4, "big")
            stream = self._put_genesis(model)
            tip = compute_cid(b"tip" + model)
            self.streams[stream] = time.time()
            self._side.node.publish(TOPIC, write_update(stream, cid_text(tip)))
            # of another stream, whose genesis the bridge fetches for the batch
            (block,) = write_blocks({self._put_genesis(model + b"batch"): [tip]})
            self._side.put(Block(block.cid, block.data))
            self.batches[block.cid] = time.time()
            separator = Separator("model", encode_separator_value(model))
            self._side.node.publish(TOPIC, write_batch_update(separator, block.cid))
            self._number += 1

    def _put_genesis(self, model: bytes) -> str:
        header = {"controllers": ["did:key:z6Mk"], "sep": "model", "model": model}
        data = cbor2.dumps({"data": None, "header": header}, canonical=True)
        self._side.put(Block(cid_text(compute_cid(data)), data))
        return StreamID(3, compute_cid(data)).text


@dataclass
class Delays:
    """Seconds from an honest announcement until what it names was in Kafka."""

    geneses: Latencies
    batches: Latencies

    def __str__(self) -> str:
        return f"geneses {self.geneses}\n          batches {self.batches}"


@dataclass
class Announcements:
    """Result of strangers that announce batches that nobody has."""

    before: Delays
    during: Delays
    missing: int
    """honest geneses and blocks that never came"""
    announced: int
    """records of `kiln.wanted`"""
    drained: float
    """seconds after the attack until nothing waited"""
    memory: int
    status: BridgeStatus
    done: Done

    def __str__(self) -> str:
        fetcher = self.status.fetcher
        counts = {} if fetcher is None else {name: count for name, count in sorted(fetcher.counts.items()) if count}
        return "\n".join(
            (
                f"before:   {self.before}",
                f"during:   {self.during}",
                f"{self.missing} honest ones never came; {self.announced} records of kiln.wanted",
                f"drained after {self.drained:.0f} s; bridge: {self.memory / MIB:.0f} MiB of memory at most",
                f"fetcher: {counts}",
                f"strangers came: {self.done.came}; bytes: {self.done.said}",
            )
        )

    def wrong(self) -> list[str]:
        """Return a sentence for each requirement that was not met."""
        slowest = self.during.geneses.at(1.0) / 1e3
        later = self.during.batches.at(0.5) / max(self.before.batches.at(0.5), _SHORT * 1e3)
        return [
            text
            for text, bad in (
                (f"{self.missing} honest geneses and blocks never came", self.missing > 0),
                (f"a genesis took {slowest:.1f} s", slowest > _GENESIS),
                (f"honest batches came {later:.1f} times as late", later > _TIMES_AS_LATE),
                (f"drained after {self.drained:.0f} s", self.drained > _DRAINED),
                (f"{self.memory / MIB:.0f} MiB of memory", self.memory > MEMORY),
            )
            if bad
        ]


def announcements(folder: Path, quiet: float, seconds: float, seed: int) -> Announcements:
    """An honest peer announces for so many quiet seconds, and then for so many beside strangers."""
    results: list[Announcements] = []
    with running_broker(folder / "broker") as broker:
        updates = _Updates(broker.address)
        bridge = BridgeAlone(folder / "state", KILN_IPFS__FETCH="true", **variables(broker.address))
        try:
            with updates.running():

                async def test(town: Town) -> None:
                    results.append(await _run(town, bridge, updates, quiet, seconds, seed))

                in_town(folder, test, quiet + seconds + 600)
        finally:
            bridge.kill()
    return results[0]


async def _run(
    town: Town, bridge: BridgeAlone, updates: _Updates, quiet: float, seconds: float, seed: int
) -> Announcements:
    address = (await _until(bridge, lambda status: bool(status.addresses))).addresses[0]
    side = await open_side(town, "author", address)
    side.node.join(TOPIC)
    await town.bell.until(lambda: is_grafted(side.running))
    author, done = _Author(side), list[Done]()
    await author.announce(quiet)
    turned = time.time()
    async with attacked(address, done, "--announcements", "--seed", seed):
        await author.announce(seconds)
    ended = time.time()
    with trio.move_on_after(2 * _DRAINED):
        while not _is_drained(bridge, updates, author):
            await trio.sleep(0.5)  # the pace of the looks
    drained = time.time() - ended
    missing = len(author.streams.keys() - updates.streams.keys()) + len(author.batches.keys() - updates.blocks.keys())
    status = await _until(bridge, lambda status: status.fetcher is not None)
    before, during = (_measure(author, updates, *span) for span in ((0.0, turned), (turned, ended)))
    return Announcements(before, during, missing, updates.wanted, drained, bridge.memory(), status, done[0])


def _is_drained(bridge: BridgeAlone, updates: _Updates, author: _Author) -> bool:
    """Return whether all that is honest came, and all that is not is refused or given up."""
    status = bridge.status()
    fetcher = None if status is None else status.fetcher
    if fetcher is None or not author.streams.keys() <= updates.streams.keys():
        return False
    # each record has one outcome
    outcomes = ("released", "already_released", "blocks", "already_fetched", "announcer_over_limit")
    settled = sum(fetcher.counts.get(name, 0) for name in (*outcomes, "block_unavailable", "genesis_unavailable"))
    return author.batches.keys() <= updates.blocks.keys() and settled >= updates.wanted and not fetcher.waiting


def _measure(author: _Author, updates: _Updates, since: float, until: float) -> Delays:
    def measure(announced: dict[str, float], came: dict[str, float]) -> Latencies:
        return Latencies([came[each] - at for each, at in announced.items() if since <= at < until and each in came])

    return Delays(measure(author.streams, updates.streams), measure(author.batches, updates.blocks))


async def _until(bridge: BridgeAlone, true: Callable[[BridgeStatus], bool]) -> BridgeStatus:
    return await trio.to_thread.run_sync(bridge.until, true, "the bridge runs")
