"""The queries beside programs that write to Kiln's topics with other codecs, other headers and no sense: live, and at
the next start."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from hashlib import md5
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.schemas.kafka.records import MAX_QUARANTINED, SeparatorRecord, StreamRecord, encode
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.identity import compute_peer_id, sign
from kiln.schemas.wire.streamid import StreamID
from kiln.schemas.wire.topics import encode_separator_value, format_topic
from kit.awaiting import wait_until
from kit.kiln_process import Kiln, end, kill_all
from kit.log_feed import kiln_beside
from kit.strange_records import CODECS, GARBAGE, HUGE, Writer, Written

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.timeout(900)]

NETWORK = "local-strange"
AUTHOR = Ed25519PrivateKey.from_private_bytes(b"s" * 32)
MODEL = SeparatorRecord("model", encode_separator_value(b"\x01\x02"))
OF_SINK = ("updates", "batches", "publications", "quarantine", "streams", "blocks")


def stream(number: int) -> str:
    return StreamID(3, compute_cid(f"genesis {number}".encode())).text


def tip(number: int) -> str:
    return cid_text(compute_cid(f"tip {number}".encode()))


def frame(number: int) -> bytes:
    content = {"typ": 0, "stream": stream(number), "tip": tip(number)}
    message = Message(data=json.dumps(content).encode(), topic=format_topic(NETWORK, None), seqno=number.to_bytes(8))
    sign(message, AUTHOR)
    peer = compute_peer_id(AUTHOR)
    payload = RPC(publish=[message]).SerializeToString()
    return Frame(
        network=NETWORK,
        connection=b"s" * 16,
        direction=Frame.IN,
        local_peer=peer,
        remote_peer=peer,
        protocol="/meshsub/1.1.0",
        observed_at=time.time_ns(),
        payload=payload,
        sequence=number + 1,
        origin=Frame.LIVE,
    ).SerializeToString()


def size(written: Written) -> int:
    return len(written.value or b"")


def hash_of(written: Written, limit: int | None = None) -> str:
    """Hash the bytes, or the first of the parts into which a large record is divided."""
    return md5((written.value or b"")[:limit]).hexdigest()


@dataclass
class Log:
    """What the test has written, by topic without prefix."""

    address: str
    prefix: str
    bad: dict[str, list[Written]] = field(default_factory=dict)
    tips: list[str] = field(default_factory=list)

    def write(self, number: int, codec: str) -> None:
        """Write garbage to every topic, a known stream and its update behind it, and a transaction that is aborted."""
        writer = Writer(self.address, codec)
        bad = [*GARBAGE, HUGE] if codec == "zstd" else GARBAGE
        known = encode(StreamRecord(NETWORK, stream(number), MODEL, time.time_ns() // 1_000, source="genesis"))
        for topic in (*OF_SINK, "frames", "wanted"):
            good = {"streams": [(stream(number).encode(), known)], "frames": [(b"s" * 16, frame(number))]}
            written = writer.write(f"{self.prefix}{topic}", [*bad, *good.get(topic, [])])
            self.bad.setdefault(topic, []).extend(written[: len(written) - len(good.get(topic, []))])
        aborted = {f"{self.prefix}frames": frame(number + 10_000), f"{self.prefix}updates": b"aborted"}
        Writer(self.address, codec, f"{self.prefix}{number}").abort(aborted)
        self.tips.append(tip(number))


def has_batched(kiln: Kiln, tips: int) -> bool:
    return (kiln.lake / "batch_tips").is_dir() and kiln.count("batch_tips") >= tips


@pytest.fixture(scope="module")
def run(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> tuple[Kiln, Log]:
    state: Path = tmp_path_factory.mktemp("strange")
    kiln = kiln_beside(broker.address, "strange.", state)
    log = Log(broker.address, "strange.")
    started = kiln.start("run", "--no-network")
    try:
        for number, codec in enumerate(2 * CODECS):
            log.write(number, codec)
            if codec == CODECS[-1]:
                wait_until(lambda: started.poll() is not None or has_batched(kiln, len(log.tips)), kiln.log, 240)
                assert started.poll() is None, kiln.log()
        end(started)
    finally:
        if started.poll() is None:
            kill_all(started)
    for number, codec in enumerate(CODECS, start=2 * len(CODECS)):
        log.write(number, codec)
    kiln.run_kept("run", "--catch-up")
    return kiln, log


def test_no_query_stops(run: tuple[Kiln, Log]) -> None:
    kiln, _ = run
    assert "terminated with error" not in (kiln.state / "logs" / "spark.log").read_text(errors="replace")
    assert "stopped" not in (kiln.state / "started.out").read_text(errors="replace")


def test_what_is_good_is_in_the_tables_once_and_nothing_that_was_aborted(run: tuple[Kiln, Log]) -> None:
    kiln, log = run
    expected = sorted(log.tips)
    for table in ("messages", "updates", "batch_tips"):
        assert [row["tip"] for row in kiln.sql(f"select tip from {table} order by tip")] == expected, table
    assert kiln.sql("select distinct separator_source as source from updates") == [{"source": "genesis"}]


def test_what_is_bad_is_in_quarantine_with_its_position_and_bytes(run: tuple[Kiln, Log]) -> None:
    kiln, log = run
    frames = kiln.sql(
        "select kafka_partition, kafka_offset, sum(octet_length(data))::bigint as size, "
        "arg_min(md5(data), detail) as hash from quarantine where stage = 'frame' group by all order by kafka_offset"
    )
    expected = [
        {"kafka_partition": 0, "kafka_offset": each.offset, "size": size(each), "hash": hash_of(each, MAX_QUARANTINED)}
        for each in log.bad["frames"]
    ]
    assert frames == expected
    rows = kiln.sql(
        "select regexp_extract(detail, '^record (0/[0-9]+ of [a-z]+): ', 1) as record, octet_length(data) as size, "
        "md5(data) as hash from quarantine where stage = 'sink'"
    )
    expected = [
        {"record": f"0/{each.offset} of {topic}", "size": size(each), "hash": hash_of(each)}
        for topic in OF_SINK
        for each in log.bad[topic]
    ]
    assert sorted(rows, key=str) == sorted(expected, key=str)
