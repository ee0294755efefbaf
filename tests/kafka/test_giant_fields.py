"""Records with giant fields, and records at which Kiln itself fails: each goes to quarantine with its bytes, and
everything else is in the tables. The real queries, in one catch-up."""

from __future__ import annotations

import gzip
import os
import time
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from conftest import ROOT
from hostile.giants import EMPTY_MESSAGES, FRAME_FIELDS, GIANT_RECORDS, giant_frame
from kafka import KafkaProducer
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.schemas.captures.kiln_capture import CaptureRecord, write_capture
from kiln.schemas.kafka.topics import MAX_RECORD
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.pubsub import write_update
from kiln.schemas.wire.streamid import StreamID
from kit.broker_access import client
from kit.failing_daemon import MARKED, STAGES
from kit.kiln_process import Kiln
from kit.log_feed import frames_producer, kiln_beside

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.timeout(900)]

PREFIX = "giant."
MODEL = StreamID(2, compute_cid(b"model")).text
HONEST = [StreamID(3, compute_cid(b"honest %d" % number)).text for number in range(20)]
TIP = cid_text(compute_cid(b"tip"))


def announced(stream: str) -> bytes:
    message = Message(data=write_update(stream, TIP, MODEL), topic="/ceramic/local-giant")
    return RPC(publish=[message]).SerializeToString()


def frame(number: int, payload: bytes) -> Frame:
    return Frame(
        network="local-giant",
        connection=number.to_bytes(16),
        local_peer=b"local",
        remote_peer=b"remote",
        protocol="/meshsub/1.2.0",
        observed_at=time.time_ns(),
        sequence=1,
        payload=payload,
    )


@pytest.fixture(scope="module")
def kiln(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Kiln:
    folder = tmp_path_factory.mktemp("giant")
    kiln = kiln_beside(
        broker.address,
        PREFIX,
        folder / "state",
        {
            "KILN_POLICY__DEFAULT": "either",
            "KILN_SPARK__CONF": '{"spark.python.daemon.module": "kit.failing_daemon"}',
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        },
    )
    values = [frame(number, announced(stream)) for number, stream in enumerate(HONEST)]
    values[5:5] = [giant_frame(number, name) for number, name in enumerate(FRAME_FIELDS)]
    values[15:15] = [frame(200 + number, announced(stream)) for number, stream in enumerate(MARKED.values())]
    with frames_producer(broker.address, PREFIX) as producer:
        for each in values:
            producer.send_record(each.connection, each.SerializeToString())
    others = KafkaProducer(**client(broker.address), max_request_size=MAX_RECORD)
    for topic, key, value in GIANT_RECORDS:
        others.send(f"{PREFIX}{topic}", key=key, value=value)
    others.flush(timeout=60)
    others.close()
    kiln.run("replay", str(giant_capture(folder / "giant.rpc.gz")))
    kiln.run_kept("run", "--catch-up", timeout=600)
    return kiln


def giant_capture(path: Path) -> Path:
    """The peer id is as long as the format allows, and 5,000 messages would each have it in their rows."""
    with gzip.open(path, "wb") as file:
        write_capture(
            cast(BinaryIO, file),
            [CaptureRecord("R", time.time_ns(), b"local", b"\xff" * 65_535, "/meshsub/1.2.0", EMPTY_MESSAGES)],
        )
    assert path.stat().st_size < 2_300
    return path


def test_no_query_was_started_again(kiln: Kiln) -> None:
    log = (kiln.state / "logs" / "spark.log").read_text(errors="replace")
    assert "terminated with error" not in log


def test_giant_fields_are_in_quarantine_with_their_bytes(kiln: Kiln) -> None:
    rows = kiln.sql(
        "SELECT detail, octet_length(data) AS bytes FROM quarantine WHERE stage = 'frame' AND reason = 'frame_invalid'"
    )
    details = [str(row["detail"]) for row in rows]
    for name in FRAME_FIELDS:
        assert any(detail.startswith(name) for detail in details), name
    assert sum("65535 bytes" in detail for detail in details) == 2  # of the capture, with its closing frame
    assert len(rows) == len(FRAME_FIELDS) + 2
    assert max(map(len, details)) < 200


def test_all_the_rest_is_in_the_tables(kiln: Kiln) -> None:
    fails_before = {"messages": {"decode", "archive"}, "updates": {"decode", "updates", "sink"}}
    for table, stages in fails_before.items():
        found = {str(row["stream"]) for row in kiln.sql(f"SELECT stream FROM {table}")}
        assert found == {*HONEST, *(stream for stage, stream in MARKED.items() if stage not in stages)}
    assert kiln.sql("SELECT count(*) AS frames FROM frames") == [{"frames": len(HONEST) + len(MARKED)}]
    batched = {str(row["stream"]) for row in kiln.sql("SELECT stream FROM batch_tips")}
    assert batched == {*HONEST, MARKED["archive"], MARKED["sink"]}


@pytest.mark.parametrize("stage", STAGES)
def test_a_record_at_which_a_stage_fails_is_in_quarantine(stage: str, kiln: Kiln) -> None:
    (row,) = kiln.sql(
        "SELECT kafka_partition, kafka_offset, detail, data::VARCHAR AS data FROM quarantine "
        f"WHERE stage = '{stage}' AND reason = 'processing_failed'"
    )
    assert MARKED[stage] in str(row["data"])
    assert f"a fault put into {stage}" in str(row["detail"])
    at = kiln.sql(
        f"SELECT kafka_partition, kafka_offset FROM frames WHERE contains(payload::VARCHAR, '{MARKED[stage]}')"
    )
    if stage in ("decode", "archive", "updates"):
        assert (row["kafka_partition"], row["kafka_offset"]) in [tuple(each.values()) for each in at]
    else:
        assert "of updates" in str(row["detail"])


def test_records_of_the_other_topics_are_in_quarantine(kiln: Kiln) -> None:
    rows = kiln.sql(
        "SELECT stage, reason, sum(octet_length(data))::BIGINT AS bytes FROM quarantine "
        "WHERE stage IN ('batch', 'sink', 's') AND reason <> 'processing_failed' GROUP BY ALL ORDER BY ALL"
    )
    found = {(row["stage"], row["reason"]): row["bytes"] for row in rows}
    assert found[("batch", "update_malformed")] == 7 << 20
    assert found[("s", "r")] == 0
    sink = found[("sink", "record_malformed")]
    assert isinstance(sink, int)
    assert sink > (7 << 20) + 1_000_000
