"""A build that reads the messages of many authors no more: the breaker stops Kiln, and after the build is mended the
tables are as if it had never been."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.cid import cid_text
from kiln.schemas.wire.identity import compute_peer_id, sign
from kiln.schemas.wire.streamid import StreamID
from kiln.schemas.wire.topics import Separator, format_topic
from kit.log_feed import frames_producer, kiln_beside

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
NETWORK = "local-breaker"
AUTHORS = [Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in range(1, 7)]
BEFORE, GARBAGE, AFTER = 240, 1_200, 240
"""messages: good ones, a minute of those that the broken build cannot read, and good ones again"""
SPACING = 50_000_000  # ns
_HEAD = bytes.fromhex("01711220")


def frames(start: int) -> list[Frame]:
    draw = random.Random(5)
    streams = [StreamID(0, _HEAD + draw.randbytes(32)).text for _ in range(40)]
    topics = [format_topic(NETWORK, Separator("model", stream)) for stream in streams[:4]]
    made = []
    for number in range(BEFORE + GARBAGE + AFTER):
        new = BEFORE <= number < BEFORE + GARBAGE
        content = {"typ": 0, "stream": streams[number % 40], "tip": cid_text(_HEAD + draw.randbytes(32))}
        message = Message(
            data=json.dumps(content | ({"v": 2} if new else {})).encode(),
            topic=topics[number % 4],
            seqno=number.to_bytes(8),
        )
        sign(message, AUTHORS[number % len(AUTHORS)])
        made.append(
            Frame(
                network=NETWORK,
                connection=b"b" * 16,
                direction=Frame.IN,
                local_peer=compute_peer_id(AUTHORS[0]),
                remote_peer=compute_peer_id(AUTHORS[1]),
                protocol="/meshsub/1.1.0",
                observed_at=start + number * SPACING,
                payload=RPC(publish=[message]).SerializeToString(),
                sequence=number + 1,
                origin=Frame.LIVE,
            )
        )
    return made


def broken_build(folder: Path) -> Path:
    """A copy of the checkout that takes messages with `v` for garbage. It has no native core, which would read them."""
    for room in ("schemas", "conf", "bridge", "pipelines", "deploy"):
        left_out = shutil.ignore_patterns("node_modules", "*.so")
        shutil.copytree(ROOT / room, folder / room, ignore=left_out)
    shutil.copytree(ROOT / "kiln", folder / "kiln", symlinks=True)
    for link in (".jars", ".venv", "pyproject.toml"):
        (folder / link).symlink_to(ROOT / link)
    file = folder / "schemas" / "wire" / "pubsub.py"
    text = file.read_text()
    begins = "def read_message("
    broken = """

_read_well = read_message


def read_message(data: bytes, batch_typ: int = 3) -> PubsubMessage | Rejected:
    return Rejected("unknown_typ", "this build is broken") if b'"v": 2' in data else _read_well(data, batch_typ)
"""
    assert begins in text
    file.write_text(text + broken)
    return folder


def iso(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds // 1_000_000_000, UTC).isoformat()


def test_no_good_message_is_lost(broker: EmbeddedBroker, prefix: str, tmp_path: Path) -> None:
    settings = {"KILN_JOBS__ARCHIVE__MAX_OFFSETS_PER_TRIGGER": "300", "KILN_JOBS__ARCHIVE__TRIGGER": "1s"}
    kiln = kiln_beside(broker.address, prefix, tmp_path / "state", settings)
    start = int((datetime.now(UTC) - timedelta(minutes=10)).timestamp()) * 1_000_000_000
    sent = frames(start)
    with frames_producer(broker.address, prefix) as producer:
        for frame in sent:
            producer.send(frame)
        producer.flush()

    done = subprocess.run(
        kiln.command("run", "--catch-up"),
        env={**kiln.environment, "PYTHONPATH": str(broken_build(tmp_path / "build"))},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the breaker tripped at" in done.stdout + done.stderr
    assert "6 of 6 authors whose messages used to decode" in done.stdout + done.stderr
    slipped = kiln.count("quarantine")
    assert slipped < len(AUTHORS) * 200

    kiln.run_kept("run", "--catch-up")
    assert kiln.count("messages") == len(sent) - kiln.count("quarantine")
    until = iso(start + len(sent) * SPACING + 10**9)
    kiln.run_kept("backfill", "run", "--run", "repaired", "--from", iso(start), "--to", until)
    kiln.run_kept("backfill", "swap", "repaired")

    said = {json.loads(RPC.FromString(frame.payload).publish[0].data)["tip"] for frame in sent}
    for table in ("messages", "updates"):
        assert kiln.sql(f"SELECT count(*) AS n, count(DISTINCT tip) AS tips FROM {table}") == [
            {"n": len(sent), "tips": len(said)}
        ], table
    assert {row["tip"] for row in kiln.sql("SELECT tip FROM updates")} == said
    assert {row["tip"] for row in kiln.sql("SELECT tip FROM batches JOIN batch_tips USING (batch_cid)")} == said
    assert kiln.sql("SELECT DISTINCT origin FROM updates") == [{"origin": "LIVE"}]
    assert kiln.count("quarantine") == 0
    found = json.loads(kiln.run_kept("quality", "--json").stdout)
    assert [each for each in found if not each["success"] and each["level"] == "error"] == []
