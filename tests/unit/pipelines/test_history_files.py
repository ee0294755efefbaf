"""Files of others through the first stage of `archive`: each line is in a table or is a fault."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kiln.pipelines.archive.transform import DECODE_RESULT, FAULT, MESSAGES, build_message_rows, decode_records
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.captures.items import Item, UnreadableItem
from kiln.schemas.kafka.frames import METADATA_ONLY
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import peer_bytes
from kit.history import items, kubo_line

FILES = Path(__file__).resolve().parents[1] / "schemas" / "history_files"
CLAY = "/ceramic/testnet-clay"
AUTHOR = peer_bytes("QmQotCKxiMWt935TyCBFTN23jaivxwrZ3uD58wNxeg5npi")


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    made = Lake(str(tmp_path))
    made.create(("frames", "copies", "messages"))
    return made


def rows_of(lake: Lake, found: Iterable[Item]) -> tuple[list[dict[str, object]], Counter[str]]:
    """Rows of `messages`, and how many faults of each reason, out of the Frames among the items. The policy is strict,
    as a network's is by default."""

    def records() -> Iterator[pa.RecordBatch]:
        values = [item.SerializeToString() for item in found if isinstance(item, Frame)]
        size = len(values)
        columns = (
            pa.array([0] * size, pa.int32()),
            pa.array(range(size), pa.int64()),
            pa.array([0] * size, pa.int64()),
            pa.array(values, pa.binary()),
        )
        yield pa.RecordBatch.from_arrays(list(columns), names=["partition", "offset", "stamp", "value"])

    messages: list[dict[str, object]] = []
    faults: Counter[str] = Counter()
    for item in build_message_rows(decode_records(records(), DecodeConfig("strict"), lake, b"task")):
        if item.kind == FAULT:
            faults[str(item.row[0])] += 1
        elif item.kind != DECODE_RESULT:
            messages.append(dict(zip((column.name for column in MESSAGES), item.row, strict=True)))
    return messages, faults


def copies(lake: Lake) -> list[dict[str, object]]:
    folder = Path(lake.table("copies"))
    return [row for file in sorted(folder.glob("*.parquet")) for row in pq.ParquetFile(file).read().to_pylist()]


def test_the_lines_of_a_js_ceramic_log_are_messages_that_can_be_filtered(lake: Lake) -> None:
    found = items("ceramic-log", (FILES / "js_ceramic.log").read_bytes())
    messages, faults = rows_of(lake, found)
    unread = [item for item in found if isinstance(item, UnreadableItem)]
    assert len(messages) + sum(faults.values()) + len(unread) == 9
    assert faults == {}
    assert {row["verdict"] for row in messages} == {row["verdict"] for row in copies(lake)} == {"unverifiable"}
    assert {row["from_peer"] for row in messages} == {row["seqno"] for row in messages} == {None}
    assert Counter(str(row["message_id"]).split("/")[0] for row in messages) == {"unverified": 6, "sha256": 2}


def test_a_message_that_is_told_twice_is_a_message_and_two_copies(lake: Lake) -> None:
    line = kubo_line(AUTHOR, b'{"typ":3,"ts":1}', b"\x07", CLAY)
    messages, faults = rows_of(lake, items("kubo-sub", line + b"\n" + line))
    assert (len(messages), len(copies(lake)), faults) == (1, 2, {})


def test_the_copies_of_a_trace_are_copies_and_say_what_is_missing(lake: Lake) -> None:
    found = items("pubsub-trace-json", gzip.decompress((FILES / "go_pubsub.trace.json.gz").read_bytes()))
    messages, faults = rows_of(lake, found)
    heard = copies(lake)
    assert messages == []
    assert faults == {METADATA_ONLY: len(heard)}
    unread = [item for item in found if isinstance(item, UnreadableItem)]
    assert len(heard) + len(unread) == len(found)
    assert len({row["message_id"] for row in heard}) == 10
    assert {len(list(peers)) for peers in _by_message(heard).values()} == {3}


def _by_message(rows: list[dict[str, object]]) -> dict[object, set[object]]:
    senders: dict[object, set[object]] = {}
    for row in rows:
        senders.setdefault(row["message_id"], set()).add(row["remote_peer"])
    return senders
