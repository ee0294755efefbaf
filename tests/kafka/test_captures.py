"""`kiln replay`, then `kiln run --catch-up`, on captures made by other people's software, and on one of an author who
returns to an earlier tip."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, cast  # columns of any type

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from deltalake import DeltaTable

from conftest import VECTORS
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.schemas.captures.kiln_capture import CaptureRecord, open_capture, read_capture, write_capture
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.identity import compute_peer_id, sign
from kiln.schemas.wire.pubsub import write_update
from kiln.schemas.wire.streamid import StreamID
from kit.kiln_process import Kiln
from kit.log_feed import kiln_beside
from kit.log_model import expected_batches, read_batches, read_log

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

CAPTURES = ("go4nosign", "go4tt", "jsc3")
WINDOW = 1_000_000  # µs
CERAMIC = "inmemory-jsc"  # the network of jsc3

RETURNING = "local-return"
STREAM = StreamID(2, compute_cid(b"a stream to whose tip an author returns"))
MODEL = StreamID(2, compute_cid(b"its model"))
A, B = (cid_text(compute_cid(tip)) for tip in (b"the first tip", b"the second tip"))
START = 1_700_000_000_000_000_000  # ns


def capture_return(path: Path) -> str:
    """Anna announces A, B and A, 400 ms and 3 s apart. Boris repeats B late. Copies of her first two messages come at
    the end, over another connection."""
    anna, boris = (Ed25519PrivateKey.from_private_bytes(seed * 32) for seed in (b"a", b"b"))
    said = [(anna, A, 0), (anna, B, 400), (anna, A, 3_400), (boris, B, 3_500)]
    messages = [announce(author, tip, number) for number, (author, tip, _) in enumerate(said)]
    heard = [(1, message, ms) for message, (_, _, ms) in zip(messages, said, strict=True)]
    heard += [(2, messages[0], 3_600), (2, messages[1], 3_700)]
    records = [
        CaptureRecord(
            "R",
            START + ms * 1_000_000,
            compute_peer_id(Ed25519PrivateKey.from_private_bytes(b"k" * 32)),
            compute_peer_id(Ed25519PrivateKey.from_private_bytes(bytes([peer]) * 32)),
            "/meshsub/1.1.0",
            RPC(publish=[message]).SerializeToString(),
        )
        for peer, message, ms in heard
    ]
    with gzip.open(path, "wb") as file:
        write_capture(cast(BinaryIO, file), records)
    return str(path)


def announce(author: Ed25519PrivateKey, tip: str, seqno: int) -> Message:
    data = write_update(STREAM.text, tip, MODEL.text)
    message = Message(data=data, topic=f"/ceramic/{RETURNING}", seqno=seqno.to_bytes(8))
    sign(message, author)
    return message


@pytest.fixture(scope="module")
def kiln(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Kiln:
    """The captures replayed twice, and caught up. The second start is one after a crash of the query `updates` before
    Spark had recorded its newest micro-batch as done."""
    folder = tmp_path_factory.mktemp("captures")
    kiln = kiln_beside(broker.address, "captures.", folder)
    files = [str(VECTORS / "captures" / f"{name}.rpc.gz") for name in CAPTURES]
    files.append(capture_return(folder / "return.rpc.gz"))
    kiln.run("replay", *files)
    kiln.run_kept("run", "--catch-up")
    commits = kiln.state / "checkpoints" / "updates" / "commits"
    newest = max(int(file.name) for file in commits.iterdir() if file.name.isdigit())
    for file in (commits / str(newest), commits / f".{newest}.crc"):
        file.unlink(missing_ok=True)
    kiln.run("replay", *files)
    kiln.run_kept("run", "--catch-up")
    return kiln


def records_of(name: str) -> list[CaptureRecord]:
    with open_capture(VECTORS / "captures" / f"{name}.rpc.gz") as stream:
        return list(read_capture(stream))


Row = dict[str, Any]  # columns of any type


def rows(kiln: Kiln, table: str, columns: list[str]) -> list[Row]:
    found: list[Row] = DeltaTable(str(kiln.lake / table)).to_pyarrow_table(columns=columns).to_pylist()
    return found


def test_every_frame_is_held_once_byte_for_byte(kiln: Kiln) -> None:
    held = Counter(
        (row["direction"], row["payload"]) for row in rows(kiln, "frames", ["direction", "payload"]) if row["payload"]
    )
    captured = Counter(
        ("IN" if record.direction == "R" else "OUT", record.rpc)
        for name in CAPTURES
        for record in records_of(name)
        if record.rpc
    )
    assert held - captured == returning_frames()
    assert captured <= held


def returning_frames() -> Counter[tuple[str, bytes]]:
    with TemporaryDirectory() as folder, open_capture(Path(capture_return(Path(folder) / "file"))) as stream:
        return Counter(("IN", record.rpc) for record in read_capture(stream))


def test_sequences_have_no_gap_and_end_with_a_closing_frame(kiln: Kiln) -> None:
    sides: dict[tuple[object, object], list[tuple[int, bytes]]] = {}
    for row in rows(kiln, "frames", ["connection", "direction", "sequence", "payload"]):
        sides.setdefault((row["connection"], row["direction"]), []).append((row["sequence"], row["payload"]))
    assert sides
    for frames in sides.values():
        frames.sort()
        assert [sequence for sequence, _ in frames] == list(range(1, len(frames) + 1))
        assert frames[-1][1] == b""


def test_a_pair_that_reconnects_has_two_connections(kiln: Kiln) -> None:
    pairs = Counter(
        (row["local_peer"], row["remote_peer"], row["protocol"])
        for row in {
            (row["connection"], row["local_peer"], row["remote_peer"], row["protocol"]): row
            for row in rows(kiln, "frames", ["connection", "local_peer", "remote_peer", "protocol"])
        }.values()
    )
    # 10 pairs in each go-libp2p capture, of which one parts and meets again, seen from both ends; the bridge and three
    # Kubos; and two
    assert sum(pairs.values()) == 24 + 3 + 2


def test_each_published_message_is_there_once_under_its_topic(kiln: Kiln) -> None:
    with gzip.open(VECTORS / "captures" / "go4nosign.published.jsonl.gz") as lines:
        published = {entry["sha256"]: entry["topic"] for entry in map(json.loads, lines)}
    received = {
        hashlib.sha256(data).hexdigest()
        for record in records_of("go4nosign")
        if record.direction == "R"
        for data in published_data(record.rpc)
    }
    assert received <= published.keys()
    messages = [
        row
        for row in rows(kiln, "messages", ["message_id", "topic", "data", "network", "origin"])
        if row["network"] not in (CERAMIC, RETURNING)
    ]
    kept = {hashlib.sha256(row["data"]).hexdigest(): row for row in messages}
    refused = {
        hashlib.sha256(row["data"]).hexdigest()
        for row in rows(kiln, "quarantine", ["stage", "data"])
        if row["stage"] == "message"
    }
    assert len(messages) == len(kept)
    assert kept.keys() | refused == received
    assert not kept.keys() & refused
    assert all(row["topic"] == published[digest] for digest, row in kept.items())
    assert {row["origin"] for row in messages} == {"REPLAY"}
    assert {row["network"] for row in messages} == {"testnet-clay"}


def published_data(rpc: bytes) -> list[bytes]:
    return [message.data for message in RPC.FromString(rpc).publish]


def test_every_copy_is_counted(kiln: Kiln) -> None:
    copies = sum(
        len(published_data(record.rpc)) for name in CAPTURES for record in records_of(name) if record.direction == "R"
    )
    assert kiln.count("copies", f"network != '{RETURNING}'") == copies
    assert kiln.count("copies", f"network = '{RETURNING}'") == 6
    assert kiln.count("copies", f"network = '{CERAMIC}'") == 832


def test_every_entry_of_an_rpc_is_a_row_in_both_directions(kiln: Kiln) -> None:
    """The tables have the entries that protobuf alone counts, once each, although the files were replayed twice."""
    expected = Counter[tuple[str, str]]()
    for name in CAPTURES:
        for record in records_of(name):
            rpc, direction = RPC.FromString(record.rpc), "IN" if record.direction == "R" else "OUT"
            expected.update((direction, str(each.subscribe)) for each in rpc.subscriptions)
            for kind in ("IHAVE", "IWANT", "IDONTWANT", "GRAFT", "PRUNE"):
                expected[direction, kind] += len(getattr(rpc.control, kind.lower()))
    held = Counter((row["direction"], row["kind"]) for row in rows(kiln, "controls", ["direction", "kind"]))
    held.update(
        (row["direction"], str(row["subscribe"])) for row in rows(kiln, "subscriptions", ["direction", "subscribe"])
    )
    others = {each: held.pop(each) for each in list(held) if each[1] in ("EXTENSIONS", "UNKNOWN")}
    assert held == +expected
    assert others[("IN", "UNKNOWN")] == 2  # RPCs of the test extension
    ids = "select unnest(message_ids) as message_id from controls where kind = 'IHAVE'"
    assert kiln.sql(f"select count(*) as n from ({ids}) where message_id not in (select message_id from copies)") == [
        {"n": 0}
    ]


def test_what_is_no_message_is_in_quarantine_with_its_bytes(kiln: Kiln) -> None:
    by_reason = {row["reason"]: row["n"] for row in kiln.sql("select reason, count(*) as n from quarantine group by 1")}
    # go4tt names its topics by index alone, in bundles nobody has told this Kiln of
    assert by_reason.pop("unknown_bundle_hash") == 853
    assert set(by_reason) <= {"invalid_json"}
    assert kiln.count("quarantine", "octet_length(data) = 0") == 0


def test_updates_batches_and_tips_agree(kiln: Kiln) -> None:
    updates = kiln.sql("select distinct stream, tip from updates where separator_key is not null order by all")
    assert updates
    assert updates == kiln.sql("select distinct stream, tip from batch_tips order by all")
    clay = "network = 'testnet-clay'"
    assert kiln.count("updates", clay) == kiln.count("messages", f"type = 'UPDATE' and {clay}") > 0
    assert kiln.sql("select stream, tip from tips where source = 'update' order by all") == kiln.sql(
        "select distinct stream, tip from updates order by all"
    )
    kiln.check_updates_are_new_once()


def test_the_batches_are_those_of_the_model_over_the_log(broker: EmbeddedBroker, kiln: Kiln) -> None:
    """So are those of a Kiln that was killed (tests/chaos): the same log gives the same CIDs."""
    expected = expected_batches(read_log(broker.address, "captures.updates"), WINDOW)
    assert expected
    assert set(read_batches(broker.address, "captures.batches")) == expected


def test_the_messages_of_real_nodes_are_there_once_with_their_bytes(kiln: Kiln) -> None:
    with gzip.open(VECTORS / "captures" / "jsc3.published.jsonl.gz") as lines:
        captured = Counter(
            (each["from"], each["seqno"], each["sha256"], each["type"])
            for each in map(json.loads, lines)
            if each["captured"]
        )
    columns = ["network", "from_peer", "seqno", "data", "type"]
    messages = Counter(
        (row["from_peer"], row["seqno"].hex(), hashlib.sha256(row["data"]).hexdigest(), row["type"])
        for row in rows(kiln, "messages", columns)
        if row["network"] == CERAMIC
    )
    assert messages == captured
    assert messages.total() == 310
    ours = kiln.sql("select distinct kafka_partition, kafka_offset from copies where network = 'inmemory-jsc'")
    assert ours
    faults = kiln.sql("select distinct kafka_partition, kafka_offset from quarantine")
    assert not [each for each in faults if each in ours]


def test_the_separators_of_real_streams_are_those_of_their_creators(kiln: Kiln) -> None:
    """As far as an announcement names one. Without geneses, an announcement without a separator counts only if none
    with it came before."""
    streams = json.loads((VECTORS / "captures" / "jsc3.streams.json").read_text())
    columns = ["network", "stream", "tip", "separator_key", "separator_value", "observed_at"]
    updates = [row for row in rows(kiln, "updates", columns) if row["network"] == CERAMIC]
    named = {row["stream"]: (row["separator_key"], row["separator_value"]) for row in updates if row["separator_key"]}
    assert len(named) > 10
    for stream, separator in named.items():
        assert "/".join(separator) == streams[stream]["separator"]
    first = {
        (row["stream"], row["tip"]): row["observed_at"]
        for row in sorted(updates, key=lambda row: row["observed_at"], reverse=True)
        if row["separator_key"]
    }
    bare = [row for row in updates if row["separator_key"] is None]
    assert all(row["observed_at"] <= first.get((row["stream"], row["tip"]), row["observed_at"]) for row in bare)


def test_a_tip_to_which_its_author_returns_is_an_update_and_is_batched(kiln: Kiln) -> None:
    """And a late copy of the first announcement is none. The micro-batch was written twice."""
    where = f"where network = '{RETURNING}'"
    assert kiln.sql(f"select tip from updates {where} order by observed_at") == [{"tip": A}, {"tip": B}, {"tip": A}]
    batched = (
        f"select list(tip order by tip) as tips from batches join batch_tips using (batch_cid) {where} "
        "group by opened_at order by opened_at"
    )
    assert kiln.sql(batched) == [{"tips": sorted([A, B])}, {"tips": [A]}]
    assert kiln.sql(f"select tip, tips from latest_tips {where}") == [{"tip": A, "tips": 1}]
