"""`kiln capture`: frames of a lake as a file that gives the same messages again."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from kiln.deploy.cli.app import run_command
from kiln.pipelines.decode.decoder import DecodeConfig, DecodedMessage, FrameDecoder
from kiln.pipelines.decode.frame_row import build_frame_row
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.captures.kiln_capture import (
    CaptureRecord,
    build_frames,
    open_capture,
    read_capture,
    survey_capture,
    write_capture,
)
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kit.small_lake import append

START = datetime(2026, 1, 1, tzinfo=UTC)
NS = 1_000_000_000
TOPIC = "/ceramic/testnet-clay"
US, THEM = b"\x12\x20" + bytes(32), b"\x12\x20" + b"\x01" * 32


def record(second: int, rpc: RPC, direction: str = "R") -> CaptureRecord:
    at = int(START.timestamp() + second) * NS
    return CaptureRecord("S" if direction == "S" else "R", at, US, THEM, "/meshsub/1.2.0", rpc.SerializeToString())


def message(number: int) -> RPC:
    return RPC(publish=[Message(topic=TOPIC, data=b'{"typ":3,"ts":%d}' % number)])


HELLO = RPC(subscriptions=[RPC.SubOpts(subscribe=True, topicid=TOPIC)])
RECORDS = [
    record(0, HELLO),
    record(0, HELLO, "S"),
    *(record(second, message(second), "RS"[second % 2]) for second in range(1, 9)),
]


def messages(path: Path) -> list[tuple[str, bytes, int]]:
    decoder = FrameDecoder(DecodeConfig())
    found = [item for number, frame in enumerate(frames_of(path)) for item in decoder.decode_frame(frame, 0, number)]
    return [
        (item.message_id, item.envelope.data, item.observed_at) for item in found if isinstance(item, DecodedMessage)
    ]


def frames_of(path: Path) -> list[Frame]:
    with open_capture(path) as file:
        records = list(read_capture(file))
    return list(build_frames(records, survey_capture(records), bytes(32), "testnet-clay"))


@pytest.fixture
def original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A capture whose frames are in the lake, next to a line of a log and a frame that was cut."""
    monkeypatch.setenv("KILN_STATE", str(tmp_path))
    path = tmp_path / "original.rpc.gz"
    with gzip.open(path, "wb") as file:
        write_capture(file, RECORDS)  # type: ignore[arg-type]  # a BinaryIO in all but its declared type
    lake = Lake(str(tmp_path / "lake"))
    lake.create(("frames",))
    rows = [build_frame_row(0, number, 0, frame) for number, frame in enumerate(frames_of(path))]
    named = [row._asdict() for row in rows]
    others = [{**named[2], "protocol": "ceramic-log"}, {**named[2], "declared_length": 5_000_000}]
    append(lake, "frames", [*named, *others])
    return path


def test_the_file_of_a_range_gives_the_same_messages(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = original.with_name("out.rpc.gz")
    end = (START + timedelta(seconds=60)).isoformat()
    assert run_command(["capture", str(out), "--from", START.isoformat(), "--to", end, "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts == {"file": str(out), "records": 10, "earlier": 0, "from_logs": 1, "truncated": 1}
    assert sorted(messages(out)) == sorted(messages(original))
    assert len(messages(out)) == 4
    assert not out.with_name("out.rpc.gz.partial").exists()


def test_a_range_within_a_connection_begins_with_the_first_rpcs_of_the_connection(original: Path) -> None:
    out = original.with_name("out.rpc.gz")
    low, high = (str(START + timedelta(seconds=seconds)) for seconds in (4, 7))
    assert run_command(["capture", str(out), "--from", low, "--to", high]) == 0
    with open_capture(out) as file:
        assert list(read_capture(file)) == [*RECORDS[:2], *RECORDS[5:8]]


def test_a_range_without_frames_writes_no_file_and_says_so(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = original.with_name("out.rpc.gz")
    out.write_bytes(b"of before")
    assert run_command(["capture", str(out), "--from", "2020-01-01", "--to", "2020-01-02"]) == 1
    assert "no frame from 2020-01-01 to 2020-01-02 is in" in capsys.readouterr().err
    assert out.read_bytes() == b"of before"
    assert run_command(["capture", str(out), "--from", "2020-01-02", "--to", "2020-01-01"]) == 2
    assert run_command(["capture", str(out), "--from", "noon", "--to", "2020-01-01"]) == 2
