"""The fetcher's `PendingFetches` without Kafka and IPFS, records for it, and a broker that accepts everything."""

from __future__ import annotations

from collections.abc import Iterable

import cbor2
from msgspec import structs

from kiln.bridge.fetcher.attempts import Answer, BlockRequest, FetchFailure
from kiln.bridge.fetcher.fetch_queue import KnownAnswers
from kiln.bridge.fetcher.offsets import DoneOffsets
from kiln.bridge.fetcher.pending import FetchingOptions, FetchOutput, PendingFetches
from kiln.bridge.fetcher.wanted import KafkaPosition
from kiln.schemas.kafka.records import (
    BlockRecord,
    Coordinates,
    Epoch,
    QuarantineRecord,
    SeparatorRecord,
    StreamRecord,
    UpdateRecord,
    WantedRecord,
    decode_block,
    decode_quarantine,
    decode_stream,
    decode_update,
    encode,
)
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.streamid import StreamID
from kiln.schemas.wire.topics import encode_separator_value, parse_interest
from kit.batch_blocks import write_blocks

NETWORK = "local-test"
S = 1_000_000
START = 1_700_000_000 * S
MODEL = SeparatorRecord("model", encode_separator_value(b"\x01\x02"))
OTHER = SeparatorRecord("model", encode_separator_value(b"\x01\x03"))
OPTIONS = FetchingOptions(NETWORK, max_concurrent=2, give_up_after=10 * S, retry_after=100 * S, genesis_timeout=5 * S)
EVERYTHING = [parse_interest("*")]
UNAVAILABLE = FetchFailure("genesis_unavailable", "nobody gave it", final=False)


def genesis_of(number: int, separator: SeparatorRecord | None = MODEL) -> bytes:
    """Build the block of an unsigned init event, the genesis of a stream."""
    header: dict[str, object] = {"controllers": [f"did:key:z{number}"]}
    if separator is not None:
        header |= {"sep": "model", "model": b"\x01\x02"}
    return cbor2.dumps({"data": None, "header": header}, canonical=True)


def stream_of(number: int) -> str:
    return StreamID(3, compute_cid(genesis_of(number))).text


def genesis_cid(number: int) -> str:
    return cid_text(compute_cid(genesis_of(number)))


def wanted_update(stream: int, message: int) -> WantedRecord:
    update = UpdateRecord(
        NETWORK,
        "LIVE",
        None,
        None,
        stream_of(stream),
        cid_text(compute_cid(f"tip {message}".encode())),
        None,
        f"message {message}",
        Epoch("updates", 7),
        Coordinates(0, message, 1),
        START,
    )
    return WantedRecord(NETWORK, genesis_cid(stream), "genesis", START, update=update)


def block_of(*streams: int) -> tuple[str, bytes]:
    (block,) = write_blocks({stream_of(number): [compute_cid(b"tip")] for number in streams})
    return block.cid, block.data


def wanted_batch(cid: str, separator: SeparatorRecord = MODEL, message: str = "m") -> WantedRecord:
    return WantedRecord(NETWORK, cid, "batch", START, separator=separator, message_id=message)


def claim(
    stream: int, message: int, topic: SeparatorRecord | None = OTHER, model: SeparatorRecord | None = None
) -> WantedRecord:
    """Build a request of kind `claim`, with an update that uses the separator of its topic, or else of its model."""
    waits = wanted_update(stream, message).update
    assert waits is not None
    update = structs.replace(waits, separator=topic or model, separator_source="topic" if topic else "model")
    return WantedRecord(NETWORK, genesis_cid(stream), "claim", START, update=update, topic=topic, model=model)


def disagreeing(stream: int, message: int) -> WantedRecord:
    return structs.replace(wanted_update(stream, message), topic=OTHER, model=MODEL)


class Run:
    """Pending fetches of one partition, from offset 0 on, and a broker that accepts all writes at once."""

    def __init__(self, options: FetchingOptions = OPTIONS, memory: KnownAnswers | None = None) -> None:
        self.pending = PendingFetches(options, memory or KnownAnswers())
        self.done_offsets = DoneOffsets(0, "", 1_000)
        self.pending.start(0, self.done_offsets)
        self.offset = 0
        self.now = START
        self.written: list[FetchOutput] = []

    def take(self, *records: WantedRecord | bytes | None, interests: Iterable[str] = ("*",)) -> None:
        for record in records:
            value = encode(record) if isinstance(record, WantedRecord) else record
            followed = [parse_interest(text) for text in interests]
            self.pending.add_record(KafkaPosition(0, self.offset), value, followed, self.now)
            self.offset += 1

    def round(self) -> list[FetchOutput]:
        due = self.pending.stage_writes(self.now)
        if not self.done_offsets.is_repeating and (due.releasing or self.done_offsets.changed):
            self.done_offsets.mark_committed()
        self.pending.confirm_writes()
        outputs = [output for stage in due.stages for output in stage]
        self.written += outputs
        return outputs

    def next(self) -> list[BlockRequest]:
        return self.pending.start_fetches(self.now)

    def answer(self, ask: BlockRequest, answer: Answer) -> list[FetchOutput]:
        self.pending.add_answer(ask, answer, self.now)
        return self.round()

    def try_until(self, end: int, answer: Answer) -> list[FetchOutput]:
        """Answer every fetch with `answer`, one second after its start, until `end` seconds have passed."""
        outputs: list[FetchOutput] = []
        until = self.now + end * S
        while self.now < until:
            asks = self.next()
            self.now += S
            for ask in asks:
                outputs += self.answer(ask, answer)
            outputs += self.round()
        return outputs

    def updates(self) -> list[UpdateRecord]:
        return [decode_update(output.value) for output in self.written if output.topic == "updates"]

    def faults(self) -> list[QuarantineRecord]:
        return [decode_quarantine(output.value) for output in self.written if output.topic == "quarantine"]

    def streams(self) -> list[StreamRecord]:
        return [decode_stream(output.value) for output in self.written if output.topic == "streams"]

    def blocks(self) -> list[BlockRecord]:
        return [decode_block(output.value) for output in self.written if output.topic == "blocks"]
