"""Networks that are not Ceramic's: each message is a row of type DATA with its bytes, its id by the network's rule, and
what the user's decoder makes of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from hashlib import blake2b, sha256
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kiln.pipelines.archive import transform
from kiln.pipelines.archive.record_decoder import DECODE_RESULT, FAULT, PARTS, DecodeResult
from kiln.pipelines.archive.transform import ARCHIVE_OUTPUT, ArchiveOutput, OutputWriter, build_stages
from kiln.pipelines.decode.decoder import DecodeConfig, DecodedMessage, decode
from kiln.pipelines.decode.identities import compute_identities
from kiln.pipelines.decode.user_decoder import load_decoder
from kiln.pipelines.delta.files import DataFile
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.kafka_ranges import RECORDS
from kiln.schemas.kafka.records import QuarantineRecord, decode_quarantine
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import compute_peer_id, peer_text, sign
from kiln.schemas.wire.message_id import parse_message_id_rule
from kiln.schemas.wire.pubsub import write_keepalive
from kiln.schemas.wire.signing_policy import Policy
from kiln.schemas.wire.topic_table import BundleSet, write_hello
from kit.decoder_package import install_decoders

ANNA, BERT = Ed25519PrivateKey.from_private_bytes(b"a" * 32), Ed25519PrivateKey.from_private_bytes(b"b" * 32)
TOPIC, BYTES = "app/rooms", b"\x00\xff no JSON"
RULES = (
    "author_seqno",
    "sha256_data",
    "sha256_topic_data",
    "sha256_data:hex",
    "blake2b_data",
    "blake2b_topic_data:hex20",
)


def gossip(rule: str = "author_seqno", **more: object) -> DecodeConfig:
    return DecodeConfig("either", ceramic=False, message_ids=parse_message_id_rule(rule), **more)  # type: ignore[arg-type]  # any field of the config


def signed(data: bytes, seqno: int = 1, key: Ed25519PrivateKey = ANNA, topic: str = TOPIC) -> Message:
    message = Message(data=data, topic=topic, seqno=seqno.to_bytes(8))
    sign(message, key)
    return message


def frame(rpc: RPC, sequence: int = 1, **fields: object) -> Frame:
    made = Frame(
        network="kubo",
        connection=b"0123456789abcdef",
        direction=Frame.IN,
        local_peer=compute_peer_id(ANNA),
        remote_peer=compute_peer_id(BERT),
        protocol="/meshsub/1.2.0",
        observed_at=1_700_000_000_123_456_789,
        payload=rpc.SerializeToString(),
        sequence=sequence,
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


class Written(NamedTuple):
    messages: list[dict[str, object]]
    copies: list[dict[str, object]]
    controls: list[dict[str, object]]
    faults: list[QuarantineRecord]
    counts: dict[str, int]


def archive(folder: Path, config: DecodeConfig, *frames: Frame) -> Written:
    """Archive the frames in one task, and return the rows that it writes."""
    lake = Lake(str(folder))
    lake.create(("frames", *PARTS, "messages"))
    records = [
        ("frames", 0, number, 1_700_000_000_000_000, None, each.SerializeToString())
        for number, each in enumerate(frames)
    ]
    batch = pa.RecordBatch.from_pylist([dict(zip(RECORDS.names, row, strict=True)) for row in records], RECORDS)
    with patch.object(transform, "compute_task_digest", lambda: b"task"):
        decoded = list(build_stages(config, lake).decode(iter([batch])))
    writer = OutputWriter(config, lake)
    output = chain(writer.write(decoded), writer.finish())
    out = [row for each in output for row in each.to_pylist()]
    values = {
        kind: [row["value"] for row in out if row["kind"] == kind] for kind in (FAULT, DECODE_RESULT, ARCHIVE_OUTPUT)
    }
    result = msgspec.msgpack.decode(values[DECODE_RESULT][0], type=DecodeResult)
    archived = msgspec.msgpack.decode(values[ARCHIVE_OUTPUT][0], type=ArchiveOutput)

    def rows(table: str, files: list[DataFile]) -> list[dict[str, object]]:
        paths = [Path(lake.table(table)) / file.name for file in files if file.table == table]
        return [row for path in paths for row in pq.read_table(path).to_pylist()]

    return Written(
        rows("messages", archived.messages),
        rows("copies", result.parts),
        rows("controls", result.parts),
        [decode_quarantine(value) for value in values[FAULT]],
        archived.counts,
    )


def test_every_message_is_a_row_with_its_bytes(tmp_path: Path) -> None:
    unsigned = Message(data=write_keepalive(5), topic=TOPIC)
    rpc = RPC(publish=[signed(BYTES), unsigned, signed(b"", 2, topic="/ceramic/mainnet"), signed(b"5", 3)])
    rpc.publish[3].ClearField("topic")
    rpc.publish[3].topicIndex = 1
    bundles = BundleSet({"app": [TOPIC]})
    hello = write_hello(bundles)
    made = archive(tmp_path, gossip(bundles=bundles), frame(rpc, hello_in=hello, hello_out=hello))
    assert made.faults == []
    assert made.counts == {"DATA": 4}
    names = ("type", "network", "topic", "topic_source", "data", "verdict", "decoded", "ts", "stream")
    common = {"type": "DATA", "network": "kubo", "decoded": None, "ts": None, "stream": None}
    assert [{name: row[name] for name in names} for row in made.messages] == [
        {**common, "topic": TOPIC, "topic_source": "name", "data": BYTES, "verdict": "valid"},
        {**common, "topic": TOPIC, "topic_source": "name", "data": unsigned.data, "verdict": "unsigned"},
        {**common, "topic": "/ceramic/mainnet", "topic_source": "name", "data": b"", "verdict": "valid"},
        {**common, "topic": TOPIC, "topic_source": "index", "data": b"5", "verdict": "valid"},
    ]
    assert [row["network"] for row in made.copies] == ["kubo"] * 4
    assert made.messages[0]["from_peer"] == peer_text(compute_peer_id(ANNA))


@pytest.mark.parametrize(
    ("policy", "message", "reason"),
    [
        ("strict", Message(data=BYTES, topic=TOPIC), "missing_signature"),
        ("none", signed(BYTES), "unexpected_auth"),
        ("strict", Message(data=BYTES), "topic_missing"),
    ],
)
def test_the_signature_policy_and_the_topic_still_decide(
    tmp_path: Path, policy: Policy, message: Message, reason: str
) -> None:
    config = DecodeConfig(default_policy=policy, ceramic=False)
    made = archive(tmp_path, config, frame(RPC(publish=[message])))
    assert (made.messages, [each.reason for each in made.faults]) == ([], [reason])


@pytest.mark.parametrize("rule", RULES)
def test_ids_follow_the_rule_of_the_network_in_every_table(tmp_path: Path, rule: str) -> None:
    message = signed(BYTES, 258)
    raw = {
        "author_seqno": compute_peer_id(ANNA) + message.seqno,
        "sha256_data": sha256(BYTES).digest(),
        "sha256_topic_data": sha256(TOPIC.encode() + BYTES).digest(),
        "sha256_data:hex": sha256(BYTES).hexdigest().encode(),
        "blake2b_data": blake2b(BYTES, digest_size=32).digest(),
        "blake2b_topic_data:hex20": blake2b(TOPIC.encode() + BYTES, digest_size=32).hexdigest()[:20].encode(),
    }[rule]
    text = {
        "author_seqno": f"{peer_text(compute_peer_id(ANNA))}/0000000000000102",
        "sha256_data": f"sha256/{raw.hex()}",
        "sha256_topic_data": f"sha256/{raw.hex()}",
        "sha256_data:hex": f"sha256/{raw.decode('latin-1')}",
        "blake2b_data": f"blake2b/{raw.hex()}",
        "blake2b_topic_data:hex20": f"blake2b/{raw.decode('latin-1')}",
    }[rule]
    by_index = Message()
    by_index.CopyFrom(message)
    by_index.ClearField("topic")
    by_index.topicIndex = 1
    bundles = BundleSet({"app": [TOPIC]})
    hello = write_hello(bundles)
    rpc = RPC(publish=[message, by_index])
    rpc.control.ihave.add(topicID=TOPIC, messageIDs=[raw])
    made = archive(tmp_path, gossip(rule, bundles=bundles), frame(rpc, hello_in=hello, hello_out=hello))
    assert [row["message_id"] for row in made.messages] == [text]  # the copy by index is a copy of the same message
    assert [row["message_id"] for row in made.copies] == [text] * 2
    assert [row["message_ids"] for row in made.controls] == [[text]]


@pytest.mark.parametrize(("rule", "rows"), [("author_seqno", 1), ("sha256_data", 2)])
def test_the_same_bytes_much_later_are_a_copy_only_by_author_and_seqno(tmp_path: Path, rule: str, rows: int) -> None:
    """Nodes forget an id by content after two minutes, and pass the message on again."""
    rpc = RPC(publish=[signed(BYTES)])
    start = 1_700_000_040_000_000_000
    sent = [frame(rpc, second, observed_at=start + second * 10**9) for second in (1, 11, 600)]
    made = archive(tmp_path, gossip(rule), *sent)
    assert len(made.messages) == rows
    assert len(made.copies) == 3


def test_two_authors_of_the_same_bytes_are_one_message_by_content(tmp_path: Path) -> None:
    rpc = RPC(publish=[signed(BYTES, 1, ANNA), signed(BYTES, 2, BERT)])
    assert len(archive(tmp_path / "content", gossip("sha256_data"), frame(rpc)).messages) == 1
    assert len(archive(tmp_path / "author", gossip(), frame(rpc)).messages) == 2


def test_a_message_of_another_nodes_log_has_no_id_of_a_verified_one() -> None:
    message = Message(data=BYTES, topic=TOPIC)
    log = frame(RPC(publish=[message]), origin=Frame.REPLAY, verdicts=b"\5", remote_peer=b"")
    (item,) = decode(log.SerializeToString(), 0, 0, 0, gossip("sha256_data"))
    assert isinstance(item, DecodedMessage)
    assert item.message_id == f"unverified/sha256/{sha256(BYTES).hexdigest()}"
    early, late = compute_identities(item, "", 120_000_000)
    later = item._replace(observed_at=item.observed_at + 600_000_000)
    assert not {early, late} & set(compute_identities(later, "", 120_000_000))


# ---------------------------------------------------------------- the user's decoder


@pytest.fixture
def decoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install_decoders(tmp_path / "site", "row_decoders")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    load_decoder.cache_clear()
    yield
    load_decoder.cache_clear()
    sys.modules.pop("row_decoders", None)


@pytest.mark.usefixtures("decoders")
def test_one_message_that_the_decoder_cannot_read_is_one_fault_and_still_a_row(tmp_path: Path) -> None:
    good, bad = b'{"sensor": 7}', b"no JSON"
    rpc = RPC(publish=[signed(good, 1), signed(bad, 2), signed(bad, 2), signed(b"[]", 3)])
    made = archive(tmp_path / "lake", gossip(decoder="row_decoders.parse"), frame(rpc), frame(rpc, 2))
    assert [(row["data"], row["decoded"]) for row in made.messages] == [
        (good, '{"sensor":7}'),
        (bad, None),
        (b"[]", None),
    ]
    assert json.loads(str(made.messages[0]["decoded"])) == {"sensor": 7}
    assert [(each.stage, each.reason, each.data) for each in made.faults] == [
        ("decoder", "decoder_failed", bad),
        ("decoder", "decoder_output", b"[]"),
    ]
    assert made.faults[0].observed_at == 1_700_000_000_123_456
    assert made.counts == {"DATA": 3, "decoder_failed": 1, "decoder_output": 1}
