"""BATCH_UPDATEs that the bridge published are in `messages`, live and in a backfill, with and without an echo."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.identity import compute_peer_id, sign
from kiln.schemas.wire.pubsub import write_batch_update
from kiln.schemas.wire.topics import Separator, encode_separator_value, format_topic
from kit.log_feed import kiln_beside
from kit.strange_records import Writer

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.timeout(900)]

NETWORK = "local-published"
SEPARATOR = Separator("model", encode_separator_value(b"\x01\x02"))
NODE, AUTHOR, PEER = (Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32) for seed in b"nap")
BEGAN = time.time_ns()


def batch(name: str) -> str:
    return cid_text(compute_cid(name.encode()))


def frame(
    number: int, name: str, direction: Frame.Direction.ValueType, *, verdicts: bytes = b""
) -> tuple[bytes, bytes]:
    """Build the frame of a BATCH_UPDATE of `name`, on a connection for each direction and number, and its key."""
    data = write_batch_update(SEPARATOR, batch(name))
    message = Message(data=data, topic=format_topic(NETWORK, SEPARATOR), seqno=name.encode())
    sign(message, AUTHOR)
    connection = bytes([number]) * 16
    made = Frame(
        network=NETWORK,
        connection=connection,
        direction=direction,
        local_peer=compute_peer_id(NODE),
        remote_peer=compute_peer_id(PEER),
        protocol="/meshsub/1.2.0",
        observed_at=BEGAN + number * 1_000_000,
        payload=RPC(publish=[message]).SerializeToString(),
        sequence=1,
        verdicts=verdicts,
    )
    return connection, made.SerializeToString()


def test_a_published_batch_is_in_messages_once_and_a_backfill_agrees(broker: EmbeddedBroker, tmp_path: Path) -> None:
    kiln = kiln_beside(broker.address, "published.", tmp_path)
    valid = b"\1"
    frames = [
        frame(1, "alone", Frame.OUT, verdicts=valid),
        frame(2, "alone", Frame.OUT, verdicts=valid),
        frame(3, "then an echo", Frame.OUT, verdicts=valid),
        frame(4, "then an echo", Frame.IN, verdicts=valid),
        frame(5, "before an echo", Frame.IN, verdicts=valid),
        frame(6, "before an echo", Frame.OUT, verdicts=valid),
        frame(7, "relayed", Frame.OUT),
    ]
    Writer(broker.address, "none").write("published.frames", frames)
    kiln.run_kept("run", "--catch-up")
    found = kiln.sql("select batch_cid from messages order by all")
    assert [row["batch_cid"] for row in found] == sorted(map(batch, ("alone", "then an echo", "before an echo")))
    assert kiln.count("copies") == 2
    low, high = (datetime.fromtimestamp(BEGAN // 10**9 + seconds, UTC).isoformat() for seconds in (-60, 60))
    kiln.run_kept("backfill", "run", "--from", low, "--to", high, "--run", "again")
    kiln.run("backfill", "diff", "again")  # which ends with 1 if something differs
    kiln.run("quality")  # exit status 0: what our node published has no copy, and none is missed
