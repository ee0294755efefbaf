"""Pending batches between a node and a block store of the test's own."""

from __future__ import annotations

from pathlib import Path

from kiln.bridge.ipfs.folder import FolderBlockStore
from kiln.bridge.publisher.batches import (
    OutputRecord,
    PendingBatches,
    PublishError,
    PublishingOptions,
)
from kiln.bridge.publisher.deliveries import Subscribers
from kiln.bridge.publisher.pace import AuthorPacer
from kiln.bridge.publisher.transition import BY_SEPARATOR, TopicScheme
from kiln.schemas.kafka.records import (
    BatchRecord,
    Origin,
    PublicationRecord,
    SeparatorRecord,
    decode_publication,
    encode,
)
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.pubsub import PubsubMessage, read_message
from kiln.schemas.wire.topics import Separator, encode_separator_value, format_topic

NETWORK = "local-test"
S = 1_000_000
START = 1_700_000_000 * S
OPTIONS = PublishingOptions(NETWORK, publish_timeout=10 * S, retry_every=S, max_age=60 * S)
PARTITION = 0


def batch(
    number: int, model: int = 0, origin: Origin = "LIVE", network: str = NETWORK, closed: int = START
) -> BatchRecord:
    block = f"block {number}".encode()
    separator = SeparatorRecord(
        "model", encode_separator_value(b"\1" + model.to_bytes(max(1, model.bit_length() // 8 + 1)))
    )
    return BatchRecord(network, origin, separator, cid_text(compute_cid(block)), block, closed - S, closed)


def topic_of(record: BatchRecord) -> str:
    return format_topic(record.network, Separator(record.separator.key, record.separator.value))


class Node:
    """A node with `peers` peers on each topic, which records the messages that it publishes."""

    def __init__(self, peers: int = 3) -> None:
        self.peers: dict[str, int] = {}
        self.default = peers
        self.sent: list[tuple[str, bytes]] = []
        self.asked = 0
        self.error: str | None = None

    def publish(self, topic: str, data: bytes) -> int:
        self.asked += 1
        if self.error is not None:
            raise PublishError(self.error)
        peers = self.peers.get(topic, self.default)
        if peers:
            self.sent.append((topic, data))
        return peers

    @property
    def cids(self) -> list[str]:
        found = []
        for _, data in self.sent:
            message = read_message(data)
            assert isinstance(message, PubsubMessage)
            assert message.batch is not None
            found.append(message.batch)
        return found


class Ipfs(FolderBlockStore):
    """A block store in memory. If `error` is set, `put` raises `error`."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self.error: Exception | None = None
        self.kept: dict[str, bytes] = {}
        self.asked = 0

    def put(self, cid: str, data: bytes) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error
        self.kept[cid] = data


class Run:
    """Pending batches of one partition, from offset 0 on."""

    def __init__(
        self,
        node: Node,
        not_before: int = 0,
        pace: AuthorPacer | None = None,
        subscribers: Subscribers | None = None,
    ) -> None:
        self.node = node
        self.pace = pace or AuthorPacer(0, 1)
        self.ipfs = Ipfs()
        self.pending = PendingBatches(OPTIONS, subscribers=subscribers)
        self.pending.start(PARTITION, 0, not_before)
        self.offset = 0
        self.outputs: list[OutputRecord] = []

    def take(self, value: BatchRecord | bytes | None, now: int = START) -> None:
        data = encode(value) if isinstance(value, BatchRecord) else value
        self.pending.add_record(PARTITION, self.offset, data, now)
        self.offset += 1
        self.outputs += self.pending.take_outputs()

    def step(self, now: int = START, held: bool = False, on: TopicScheme = BY_SEPARATOR) -> list[PublicationRecord]:
        def publish(topic: str, data: bytes) -> int:
            peers = self.node.publish(topic, data)
            if peers:
                self.pace.record_message(now)
            return peers

        self.pending.step(held, self.ipfs, publish, now, on, self.pace)
        outputs = self.pending.take_outputs()
        self.outputs += outputs
        assert all(output.topic == "publications" for output in outputs)
        return [decode_publication(output.value) for output in outputs]

    def place(self) -> int:
        return self.pending.resume_offsets()[PARTITION]


def network_topic() -> str:
    return format_topic(NETWORK, None)
