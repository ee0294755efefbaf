"""`kiln replay`, then `kiln run --catch-up`, on captures made by other people's software."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any  # columns of any type

import pytest
from deltalake import DeltaTable

from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.schemas.captures.capture_file import CaptureRecord, open_capture, read_capture
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kit.kiln_process import Kiln
from kit.log_feed import kiln_beside

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

CAPTURES = ("go4nosign", "go4tt")


@pytest.fixture(scope="module")
def kiln(shared: Path, broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Kiln:
    """Both captures replayed twice, and caught up."""
    kiln = kiln_beside(broker.address, "captures.", tmp_path_factory.mktemp("captures"))
    files = [str(shared / "captures" / f"{name}.rpc.gz") for name in CAPTURES]
    kiln.run("replay", *files)
    kiln.run("run", "--catch-up")
    kiln.run("replay", *files)
    kiln.run("run", "--catch-up")
    return kiln


def records_of(shared: Path, name: str) -> list[CaptureRecord]:
    with open_capture(shared / "captures" / f"{name}.rpc.gz") as stream:
        return list(read_capture(stream))


Row = dict[str, Any]  # columns of any type


def rows(kiln: Kiln, table: str, columns: list[str]) -> list[Row]:
    found: list[Row] = DeltaTable(str(kiln.lake / table)).to_pyarrow_table(columns=columns).to_pylist()
    return found


def test_every_frame_is_held_once_byte_for_byte(kiln: Kiln, shared: Path) -> None:
    held = Counter(
        (row["direction"], row["payload"]) for row in rows(kiln, "frames", ["direction", "payload"]) if row["payload"]
    )
    captured = Counter(
        ("IN" if record.direction == "R" else "OUT", record.rpc)
        for name in CAPTURES
        for record in records_of(shared, name)
        if record.rpc
    )
    assert held == captured


def test_sequences_have_no_gap_and_end_with_a_closing_frame(kiln: Kiln) -> None:
    sides: dict[tuple[object, object], list[tuple[int, bytes]]] = {}
    for row in rows(kiln, "frames", ["connection", "direction", "sequence", "payload"]):
        sides.setdefault((row["connection"], row["direction"]), []).append((row["sequence"], row["payload"]))
    assert sides
    for frames in sides.values():
        frames.sort()
        assert [sequence for sequence, _ in frames] == list(range(1, len(frames) + 1))
        assert frames[-1][1] == b""


def test_a_pair_that_reconnects_has_two_connections(kiln: Kiln, shared: Path) -> None:
    pairs = Counter(
        (row["local_peer"], row["remote_peer"], row["protocol"])
        for row in {
            (row["connection"], row["local_peer"], row["remote_peer"], row["protocol"]): row
            for row in rows(kiln, "frames", ["connection", "local_peer", "remote_peer", "protocol"])
        }.values()
    )
    # 10 pairs in each capture, of which one parts and meets again, seen from both ends
    assert sum(pairs.values()) == 24


def test_each_published_message_is_there_once_under_its_topic(kiln: Kiln, shared: Path) -> None:
    with gzip.open(shared / "captures" / "go4nosign.published.jsonl.gz") as lines:
        published = {entry["sha256"]: entry["topic"] for entry in map(json.loads, lines)}
    received = {
        hashlib.sha256(data).hexdigest()
        for record in records_of(shared, "go4nosign")
        if record.direction == "R"
        for data in published_data(record.rpc)
    }
    assert received <= published.keys()
    messages = rows(kiln, "messages", ["message_id", "topic", "data", "network", "origin"])
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


def test_every_copy_is_counted(kiln: Kiln, shared: Path) -> None:
    copies = sum(
        len(published_data(record.rpc))
        for name in CAPTURES
        for record in records_of(shared, name)
        if record.direction == "R"
    )
    assert kiln.count("copies") == copies
    assert kiln.count("copies", "network = 'testnet-clay'") == copies


def test_every_entry_of_an_rpc_is_a_row_in_both_directions(kiln: Kiln, shared: Path) -> None:
    """The tables have the entries that protobuf alone counts, once each, although the files were replayed twice."""
    expected = Counter[tuple[str, str]]()
    for name in CAPTURES:
        for record in records_of(shared, name):
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
    assert kiln.count("updates") == kiln.count("messages", "type = 'UPDATE'")
    assert kiln.sql("select stream, tip from tips order by all") == kiln.sql(
        "select distinct stream, tip from updates order by all"
    )
