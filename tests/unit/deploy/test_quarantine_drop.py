"""What is in quarantine, counted, shown and dropped, by a lake that delta-rs wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from hypothesis import given
from hypothesis import strategies as st

from kiln.conf.process.errors import KilnError
from kiln.deploy.cli.app import run_command
from kiln.deploy.cli.quarantine import format_data
from kiln.deploy.ops import quarantine
from kiln.deploy.ops.quarantine import QuarantineFilter, QuarantineRows
from kiln.deploy.query.ask import query_lake
from kiln.pipelines.decode.decoder import DecodeConfig, RejectedMessage, decode
from kiln.pipelines.decode.frame_row import build_frame_row
from kiln.pipelines.delta.files import DataFile
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.maintenance.plan import TableFile
from kiln.pipelines.maintenance.steps import replace_files
from kiln.schemas.printable import printable
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import compute_peer_id, peer_text, sign
from kit.small_lake import append

ANNA, BERT, PEER = (Ed25519PrivateKey.from_private_bytes(each * 32) for each in (b"a", b"b", b"p"))
START = datetime(2026, 5, 4, 12, tzinfo=UTC)
CLAY = "/ceramic/testnet-clay"


def soon(minutes: float = 0) -> datetime:
    """A time of a command, after or before what is in the lake by now."""
    return datetime.now(UTC) + timedelta(minutes=minutes)


def test_rows_that_cannot_be_recorded_are_an_error_in_words(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a full disk, whose error delta-rs reports in this form."""

    def write(*_: object, **__: object) -> None:
        raise DeltaError("Failed to parse parquet: External: Unable to copy data to file: No space left (os error 28)")

    monkeypatch.setattr(quarantine, "write_deltalake", write)
    before = lake.open("quarantine").version()
    assert run_command(["quarantine", "drop", "--all", "--yes", "--why", "x"]) == 1
    said = f"kiln: cannot write to {lake.path} (No space left), so no row was dropped. Fix this, and try again\n"
    assert capsys.readouterr().err == said
    assert lake.open("quarantine").version() == before


def said(author: Ed25519PrivateKey, number: int, data: bytes) -> Message:
    made = Message(data=data, topic=CLAY, seqno=number.to_bytes(8))
    sign(made, author)
    return made


def frame(offset: int, *messages: Message, hours: int = 0) -> Frame:
    return Frame(
        network="testnet-clay",
        connection=b"c" * 16,
        direction=Frame.IN,
        local_peer=compute_peer_id(PEER),
        remote_peer=compute_peer_id(PEER),
        protocol="/meshsub/1.3.0",
        observed_at=int((START + timedelta(hours=hours)).timestamp() * 1e9) + offset,
        payload=RPC(publish=messages).SerializeToString(),
        sequence=offset,
        origin=Frame.LIVE,
    )


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """Six rows of four kinds, in two files: three by Anna, one by Bert, one of a whole frame, one of no frame."""
    monkeypatch.setenv("KILN_STATE", str(tmp_path))
    found = Lake(str(tmp_path / "lake"))
    found.create(("frames", "quarantine"))
    frames = [
        frame(1, said(ANNA, 1, b"no JSON \x1b[2J"), said(BERT, 2, b'{"typ":99}')),
        frame(2, said(ANNA, 3, b"\x00\xff\x01 some text \x02"), said(ANNA, 4, b'{"typ":99}'), hours=3),
    ]
    cut = frame(3)
    cut.payload = b"\xff\xff"
    for each in (*frames, cut):
        row = build_frame_row(0, each.sequence, 0, each)
        append(found, "frames", [row._asdict()])
    for part in (frames[:1], [*frames[1:], cut]):
        rows: list[dict[str, object]] = []
        for each in part:
            for item in decode(each.SerializeToString(), 0, each.sequence, 0, DecodeConfig()):
                assert isinstance(item, RejectedMessage)
                names = ("kafka_partition", "kafka_offset", "message_index")
                what = ("stage", "reason", "detail", "data", "observed_at")
                said_of: dict[str, object] = {name: getattr(item, name) for name in what}
                rows.append({**said_of, **dict(zip(names, item.ref, strict=True))})
        append(found, "quarantine", rows)
    lost = {"stage": "publisher", "reason": "batches_gone", "detail": "", "data": b"", "observed_at": START}
    append(found, "quarantine", [lost])
    return found


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    assert run_command(["quarantine", *arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    return answer if isinstance(answer, list) else [answer]


def left(lake: Lake) -> list[tuple[object, ...]]:
    return sorted(
        query_lake(lake, "SELECT stage, reason, kafka_offset, message_index FROM quarantine").rows(), key=repr
    )


def test_rows_are_counted_by_reason_by_hour_and_by_author(lake: Lake, capsys: pytest.CaptureFixture[str]) -> None:
    counts = {(row["stage"], row["reason"]): row["rows"] for row in told(capsys, "list")}
    assert counts == {
        ("message", "invalid_json"): 2,
        ("message", "unknown_typ"): 2,
        ("rpc", "rpc_malformed"): 1,
        ("publisher", "batches_gone"): 1,
    }
    assert [row["hour"] for row in told(capsys, "list", "--by", "hour", "--reason", "unknown_typ")] == [
        "2026-05-04T12:00:00.000000Z",
        "2026-05-04T15:00:00.000000Z",
    ]
    by_author = {(row["author"], row["remote_peer"]): 0 for row in told(capsys, "list", "--by", "author")}
    peer = peer_text(compute_peer_id(PEER))
    assert by_author.keys() == {
        (peer_text(compute_peer_id(ANNA)), peer),
        (peer_text(compute_peer_id(BERT)), peer),
        (None, peer),
        (None, None),
    }


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        (["--author", peer_text(compute_peer_id(ANNA))], 3),
        (["--author", peer_text(compute_peer_id(ANNA)), "--reason", "unknown_typ"], 1),
        (["--stage", "message", "--since", "2026-05-04T13:00:00Z"], 2),
        (["--until", "2026-05-04T13:00"], 4),
        (["--since", "1h"], 0),
    ],
)
def test_rows_are_picked(arguments: list[str], rows: int, lake: Lake, capsys: pytest.CaptureFixture[str]) -> None:
    assert sum(int(str(row["rows"])) for row in told(capsys, "list", *arguments)) == rows
    assert len(told(capsys, "show", *arguments, "--rows", "100")) == rows


def test_a_row_is_shown_with_its_bytes_and_nothing_reaches_the_terminal(
    lake: Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["quarantine", "show", "--reason", "invalid_json"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert r"no JSON \u001b[2J" in shown  # as text
    assert "00 ff 01 20 73 6f 6d 65" in shown  # as hex
    assert "... some text ." in shown
    assert peer_text(compute_peer_id(ANNA)) in shown
    assert "another protocol may use the topic" in shown  # what to do
    (row,) = told(capsys, "show", "--reason", "unknown_typ", "--rows", "1")
    assert bytes.fromhex(str(row["data"])) == b'{"typ":99}'
    assert (row["kafka_offset"], row["message_index"]) == (2, 1)


@given(st.binary(max_size=600), st.integers(0, 300))
def test_no_bytes_move_a_cursor_and_a_limit_holds(data: bytes, limit: int) -> None:
    lines = list(format_data(data, limit))
    assert lines
    assert all(printable(line) == line for line in lines)
    assert any("more of" in line for line in lines) == (0 < limit < len(data))


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["show", "--stage", "mesage"], "did you mean message?", 1),
        (["list", "--reason", "unknown_typ_"], "did you mean unknown_typ?", 1),
        (["list", "--since", "yesterday"], "--since yesterday: expected a duration before now such as 1h", 2),
        (["drop", "--why", "garbage"], "or --all without them", 2),
        (["drop", "--why", "garbage", "--all", "--stage", "message"], "or --all without them", 2),
        (["drop", "--why", " ", "--all"], "--why is empty", 2),
    ],
)
def test_a_wrong_command_line_is_named(
    arguments: list[str], words: str, code: int, lake: Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["quarantine", *arguments]) == code
    assert words in " ".join(capsys.readouterr().err.split())


def test_what_is_dropped_is_gone_and_recorded(lake: Lake, capsys: pytest.CaptureFixture[str]) -> None:
    before = left(lake)
    what = ["drop", "--reason", "unknown_typ", "--why", "one client's garbage"]
    assert sum(int(str(row["rows"])) for row in told(capsys, *what)) == 2
    assert left(lake) == before  # without --yes nothing goes
    (done,) = told(capsys, *what, "--yes")
    assert (done["rows"], done["known"]) == (2, 0)
    assert left(lake) == [row for row in before if row[1] != "unknown_typ"]
    rows = DeltaTable(lake.table("quarantine_dropped")).to_pyarrow_table().to_pylist()
    assert {row["drop_id"] for row in rows} == {done["drop_id"]}
    assert {row["why"] for row in rows} == {"one client's garbage"}
    assert sorted((row["kafka_offset"], row["message_index"], row["reason"]) for row in rows) == [
        (1, 1, "unknown_typ"),
        (2, 1, "unknown_typ"),
    ]
    assert {(row["bytes"], row["sha256"]) for row in rows} == {(10, sha256(b'{"typ":99}').hexdigest())}
    assert run_command(["quarantine", *what, "--yes"]) == 1  # there is no such reason any more
    assert len(DeltaTable(lake.table("quarantine_dropped")).to_pyarrow_table()) == 2
    assert run_command(["quarantine", "drop", "--all", "--why", "all", "--yes"]) == 0
    assert left(lake) == []


def test_a_drop_that_was_cut_short_is_finished_and_recorded_once(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = QuarantineFilter(stage="message")

    def killed(*_: object, **__: object) -> bool:
        raise KeyboardInterrupt

    before = left(lake)
    monkeypatch.setattr(quarantine, "replace_files", killed)
    with pytest.raises(KeyboardInterrupt):
        quarantine.drop_rows(lake, wanted, "why", "1", soon(1))
    monkeypatch.undo()
    assert left(lake) == before
    done = quarantine.drop_rows(lake, wanted, "why", "2", soon(2))
    assert (done.rows, done.known) == (4, 4)
    assert len(DeltaTable(lake.table("quarantine_dropped")).to_pyarrow_table()) == 4
    assert {row[0] for row in left(lake)} == {"rpc", "publisher"}


def test_rows_that_come_back_are_dropped_and_recorded_anew(lake: Lake) -> None:
    rows = DeltaTable(lake.table("quarantine")).to_pyarrow_table().to_pylist()
    quarantine.drop_rows(lake, QuarantineFilter(), "why", "1", soon(-1))
    append(lake, "quarantine", rows)
    done = quarantine.drop_rows(lake, QuarantineFilter(), "why", "2", soon(1))
    assert (done.rows, done.known) == (len(rows), 0)
    assert len(DeltaTable(lake.table("quarantine_dropped")).to_pyarrow_table()) == 2 * len(rows)


@pytest.mark.parametrize("meanwhile", ["append", "compact"])
def test_what_others_write_meanwhile_stays(meanwhile: str, lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink appends, and the care of the tables writes files anew, while the command is at work."""
    late = {"stage": "message", "reason": "bad_tip", "detail": "", "data": b"late", "observed_at": START}
    done: list[str] = []

    def with_others(
        lake: Lake,
        table: str,
        opened: DeltaTable,
        old: Sequence[TableFile],
        new: Sequence[DataFile],
        what: str,
        *,
        removes_rows: bool,
    ) -> bool:
        if not done:
            done.append(meanwhile)
            if meanwhile == "append":
                append(lake, "quarantine", [late])
            else:
                DeltaTable(lake.table("quarantine")).optimize.compact()
        return replace_files(lake, table, opened, old, new, what, removes_rows=removes_rows)

    monkeypatch.setattr(quarantine, "replace_files", with_others)
    dropped = quarantine.drop_rows(lake, QuarantineFilter(stage="message"), "why", "1", soon())
    assert dropped.rows == 4
    assert len(DeltaTable(lake.table("quarantine_dropped")).to_pyarrow_table()) == 4
    kept = [row[:2] for row in left(lake)]
    assert kept == [("message", "bad_tip")] * (meanwhile == "append") + [
        ("publisher", "batches_gone"),
        ("rpc", "rpc_malformed"),
    ]


def test_without_a_table_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(KilnError, match="no table quarantine"):
        QuarantineRows(Lake(str(tmp_path)), QuarantineFilter())
    assert issubclass(KilnError, KilnError)
