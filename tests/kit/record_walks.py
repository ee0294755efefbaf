"""Functions and files of Kiln through which one record goes. `python tests/kit/record_walks.py` prints them.

A function counts if one of its arguments on entry, or its result, contains the record's offset, stream, tip or message
id, in any form. Functions that do not handle the record, for example to open a file, do not count; nor do functions
without a name. Kafka and Spark are left out: a walk begins with the record batch that a task reads.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import NamedTuple
from unittest.mock import patch

import msgspec
import pandas as pd
import pyarrow as pa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message as ProtobufMessage
from pyspark.sql.streaming.tws_tester import TwsTester

from kiln.pipelines.archive import record_decoder, transform
from kiln.pipelines.batch.batching import BatchConfig
from kiln.pipelines.batch.offset_range import ALL
from kiln.pipelines.batch.processor import BatchProcessor
from kiln.pipelines.batch.transform import build_range_task
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.native import core
from kiln.pipelines.runtime.dedup_store import DedupStoreConfig
from kiln.pipelines.runtime.kafka_ranges import RECORDS
from kiln.schemas.kafka.records import Coordinates, Epoch, SeparatorRecord, UpdateRecord, encode
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.identity import compute_peer_id, peer_text, sign
from kiln.schemas.wire.pubsub import write_update
from kiln.schemas.wire.streamid import StreamID

ROOT = Path(__file__).resolve().parents[2]
NOW = 1_800_000_000_000_000
KEY = Ed25519PrivateKey.from_private_bytes(b"a" * 32)
STREAM, TIP, MODEL = StreamID(3, compute_cid(b"genesis")), compute_cid(b"a tip"), StreamID(2, compute_cid(b"model"))
OFFSET = 77_777_777
MESSAGE_ID = f"{peer_text(compute_peer_id(KEY))}/0000000077777777"
_TEXTS = (STREAM.text, cid_text(TIP), MESSAGE_ID, f"/{OFFSET}")
_BYTES = (*(text.encode() for text in _TEXTS), TIP)
_DEPTH = 5


class Walk(NamedTuple):
    """Functions by file, in the order of their first call."""

    functions: list[tuple[str, str]]

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(file for file, _ in self.functions))


def carries(value: object, depth: int = 0) -> bool:
    """Return true if a value contains the record or a part of it."""
    match value:
        case int():
            return value == OFFSET
        case str():
            return any(text in value for text in _TEXTS)
        case bytes():
            return any(raw in value for raw in _BYTES)
        case _ if depth > _DEPTH:
            return False
        case tuple() | list() | set() | frozenset():
            return any(carries(each, depth + 1) for each in value)
        case Mapping():
            return any(carries(each, depth + 1) for each in (*value, *value.values()))
        case ProtobufMessage():
            return carries(value.SerializeToString())
        case msgspec.Struct():
            return carries(msgspec.structs.astuple(value), depth)
        case pa.RecordBatch() | pa.Array() | pa.Table():
            return carries(value.to_pylist(), depth)
        case pd.DataFrame():
            return carries(value.to_dict("list"), depth)
        case StreamID():
            return value == STREAM
    return False


@contextmanager
def walking(
    rooms: tuple[str, ...] = ("pipelines", "schemas", "conf"),
    carries: Callable[[object], bool] = carries,
    *,
    new_threads: bool = False,
) -> Iterator[Walk]:
    """Record the walk of this thread, and of threads that start meanwhile if `new_threads` is true.

    Args:
        rooms: Folders of Kiln whose functions count.
        carries: Returns true if a value contains the record or a part of it.
    """
    functions: dict[tuple[str, str], None] = {}
    folders = tuple(f"{ROOT}/kiln/{room}/" for room in rooms)

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(folders) or code.co_name.startswith("<"):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        is_entry = event == "call" and any(carries(frame.f_locals.get(name)) for name in names)
        if is_entry or (event == "return" and carries(argument)):
            functions.setdefault((str(Path(code.co_filename).relative_to(ROOT / "kiln")), code.co_qualname))

    walk = Walk([])
    threading.setprofile(profile if new_threads else None)
    sys.setprofile(profile)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        walk.functions.extend(functions)


def build_record(value: bytes, offset: int = OFFSET, stamp: int = NOW) -> pa.RecordBatch:
    """Build a record batch with schema RECORDS and one record, from partition 3."""
    row = {"topic": "t", "partition": 3, "offset": offset, "stamp": stamp, "key": b"", "value": value}
    return pa.RecordBatch.from_pylist([row], RECORDS)


def build_frame(stream: StreamID = STREAM, seqno: str = MESSAGE_ID[-16:]) -> Frame:
    """Build a received frame with a signed UPDATE whose signature the bridge has verified."""
    tip = TIP if stream == STREAM else compute_cid(seqno.encode())
    data = write_update(stream.text, cid_text(tip), MODEL.text)
    message = Message(data=data, topic="/ceramic/testnet-clay", seqno=bytes.fromhex(seqno))
    sign(message, KEY)
    return Frame(
        network="testnet-clay",
        connection=bytes(16),
        remote_peer=compute_peer_id(KEY),
        observed_at=NOW * 1000,
        sequence=int(seqno, 16) + 1,
        payload=RPC(publish=[message]).SerializeToString(),
        verdicts=b"\1",
    )


def walk_frame(others: int = 0) -> Walk:
    """Record the walk from a frame to a row of `messages` in a file.

    Args:
        others: Number of other frames before this frame. With enough of them, the native core decodes the frames.
    """
    with TemporaryDirectory(prefix="kiln-walk-") as folder:
        lake = Lake(f"{folder}/lake")
        lake.create(("frames", "copies", "messages", "subscriptions", "controls"))
        task = transform.build_archive_task(
            DecodeConfig("either"), lake, DedupStoreConfig(f"{folder}/dedup.sqlite", 1_000_000)
        )
        other = StreamID(3, compute_cid(b"another genesis"))
        frames = [build_frame(other, f"{number:016x}") for number in range(others)] + [build_frame()]
        record = pa.concat_batches(
            build_record(frame.SerializeToString(), OFFSET - others + index) for index, frame in enumerate(frames)
        )
        with (
            patch.object(transform, "get_batch_time", lambda: NOW),
            patch.object(transform, "get_task_epoch", lambda: Epoch("query", 1)),
            patch.object(record_decoder, "get_task_epoch", lambda: Epoch("query", 1)),
            patch.object(core, "SAMPLE_ONE_IN", 1 << 60),  # one of a thousand walks would also go through Python
            walking() as walk,
        ):
            list(task(iter([record])))
    return walk


def walk_update() -> Walk:
    """Record the walk from a record of `kiln.updates` to a record of `kiln.batches`."""
    update = UpdateRecord(
        network="testnet-clay",
        origin="LIVE",
        separator=SeparatorRecord("model", MODEL.text),
        separator_source="model",
        stream=STREAM.text,
        tip=cid_text(TIP),
        from_=None,
        message_id=MESSAGE_ID,
        epoch=Epoch("query", 1),
        frame=Coordinates(3, 5, 0),
        observed_at=NOW,
    )
    task = build_range_task(ALL)
    tester = TwsTester(BatchProcessor(BatchConfig()), timeMode="None", outputMode="Append")
    outputs: list[object] = []
    with walking() as walk:
        for record in (build_record(encode(update)), build_record(b"", OFFSET + 1, NOW + 60_000_000)):
            for ranges in task(iter([record])):
                outputs += tester.testInPandas(3, ranges.to_pandas().drop(columns="partition")).values.tolist()
    assert outputs, "no batch"
    return walk


WALKS: dict[str, Callable[[], Walk]] = {
    "frame → messages row": walk_frame,
    "frame → messages row, native core": lambda: walk_frame(core.MIN_RECORDS),
    "update → batch": walk_update,
}


def print_walk(name: str, walk: Walk) -> None:
    """Print the functions of a walk by file."""
    print(f"{name}: {len(walk.functions)} functions, {len(walk.files)} files")
    for file in walk.files:
        print(f"  {file}: {', '.join(function for path, function in walk.functions if path == file)}")


if __name__ == "__main__":
    assert threading.current_thread() is threading.main_thread()
    for name, follow in WALKS.items():
        print_walk(name, follow())
