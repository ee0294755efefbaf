"""Files of others through the first stage of `archive`: each line is in a table or is a fault."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import threading
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kiln.pipelines.archive import transform
from kiln.pipelines.archive.record_decoder import PARTS
from kiln.pipelines.archive.rows import FaultRow, MessageRow
from kiln.pipelines.archive.transform import build_stages
from kiln.pipelines.backfill import sources
from kiln.pipelines.backfill.sources import (
    FilePart,
    InputError,
    count_parts_per_step,
    delete_streams,
    find_captures,
    open_parts,
    save_streams,
    split_captures,
)
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.captures.formats import FORMATS
from kiln.schemas.captures.items import FILE_DAMAGED, FileSource, Item, UnreadableItem
from kiln.schemas.captures.kiln_capture import CaptureRecord, write_capture
from kiln.schemas.captures.lines import WHOLE
from kiln.schemas.kafka.frames import METADATA_ONLY
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import peer_bytes
from kit.history import LINE_LAYERS, PACKINGS, REFUSED_LAYERS, items, kubo_line, zipped

FILES = Path(__file__).resolve().parents[1] / "schemas" / "history_files"
CLAY = "/ceramic/testnet-clay"
AUTHOR = peer_bytes("QmQotCKxiMWt935TyCBFTN23jaivxwrZ3uD58wNxeg5npi")


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    made = Lake(str(tmp_path))
    made.create(("frames", *PARTS, "messages"))
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
    with patch.object(transform, "compute_task_digest", lambda: b"task"):
        items = list(build_stages(DecodeConfig("strict"), lake).decode(records()))
    for item in items:
        if isinstance(item.row, FaultRow):
            faults[item.row.reason] += 1
        elif isinstance(item.row, MessageRow):
            messages.append(item.row._asdict())
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


WRAPPINGS = {**LINE_LAYERS, **PACKINGS}


def read_all(*names: Path) -> list[Item]:
    """Read the files as a backfill run does."""
    captures, _ = find_captures([str(each) for each in names])
    found: list[Item] = []
    for part, file in open_parts(split_captures(captures, "local-history")):
        source = FileSource(part.digest, part.network, part.heard_at)
        found += FORMATS[part.format].read(file, source, part.part)
    return found


@pytest.mark.parametrize("name", WRAPPINGS)
def test_each_form_of_a_log_gives_the_same_rows(name: str, lake: Lake, tmp_path: Path) -> None:
    """All columns but those that name the file."""
    raw = (FILES / "js_ceramic.log").read_bytes()
    plain, wrapped = tmp_path / "plain.log", tmp_path / "wrapped.log"
    plain.write_bytes(raw)
    wrapped.write_bytes(WRAPPINGS[name](raw))
    expected, faults = rows_of(lake, read_all(plain))
    assert len(expected) == 8
    assert rows_of(lake, read_all(wrapped)) == (expected, faults)


def test_folders_and_streams_are_read(tmp_path: Path) -> None:
    line = kubo_line(AUTHOR, b'{"typ":3,"ts":1}', b"\x07", CLAY)
    folder = tmp_path / "logs"
    (folder / "old" / ".git").mkdir(parents=True)
    (folder / "b.ndjson").write_bytes(line)
    (folder / "old" / "a.ndjson.gz").write_bytes(zipped(line + b"\n" + line))
    (folder / "old" / ".git" / "c.ndjson").write_bytes(line)
    (folder / "README").write_bytes(b"logs of 2021\n")
    (folder / "all.zip").write_bytes(archive_of(line, "zip"))
    captures, skipped = find_captures([str(folder)])
    assert [Path(capture.path).name for capture in captures] == ["b.ndjson", "a.ndjson.gz"]
    assert skipped == [
        f"skipping {folder}/README: it is text, and its first line is 'logs of 2021'",
        f"skipping {folder}/all.zip: it is a zip archive: extract it, and pass the folder",
    ]
    assert len([item for item in read_all(folder) if isinstance(item, Frame)]) == 3

    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(line))
    writer.start()
    (saved,) = save_streams([tmp_path / "pipe"], tmp_path / "state" / "run")
    writer.join()
    assert saved.read_bytes() == line
    assert saved.parent == tmp_path / "state" / "run"
    assert save_streams([saved, folder], tmp_path / "elsewhere") == (saved, folder)


def test_standard_input_is_saved_under_its_content_unless_it_is_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = kubo_line(AUTHOR, b'{"typ":3,"ts":1}', b"\x07", CLAY)
    names = set[str]()
    for _ in range(2):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(line)))
        (saved,) = save_streams([Path("-")], tmp_path / "run")
        assert saved.read_bytes() == line
        names.add(saved.name)
    assert len(names) == 1, "a call that resumes the run names the same file"
    assert [each.name for each in (tmp_path / "run").iterdir()] == [*names]
    delete_streams(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    terminal = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    with pytest.raises(InputError, match="standard input is a terminal"):
        save_streams([Path("-")], tmp_path / "run")


def archive_of(raw: bytes, kind: str) -> bytes:
    """An archive with one log."""
    out = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr("ceramic.log", raw)
        return out.getvalue()
    with tarfile.open(fileobj=out, mode="w") as tar:
        member = tarfile.TarInfo("ceramic.log")
        member.size = len(raw)
        tar.addfile(member, io.BytesIO(raw))
    return PACKINGS.get(kind.removeprefix("tar."), bytes)(out.getvalue())


@pytest.mark.parametrize("kind", ["zip", "tar", *(f"tar.{pack}" for pack in PACKINGS)])
def test_an_archive_is_refused_with_what_to_do_although_its_lines_look_like_a_log(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = archive_of((FILES / "js_ceramic.log").read_bytes(), kind)
    (tmp_path / "logs").write_bytes(raw)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw)))
    for attempt in (
        lambda: find_captures([str(tmp_path / "logs")]),
        lambda: save_streams([Path("-")], tmp_path / "run"),
    ):
        with pytest.raises(InputError, match=r"a (zip|tar) archive: extract it, and pass the folder\. Kiln reads"):
            attempt()
    assert not (tmp_path / "run").exists()


def test_the_files_of_a_large_folder_are_found_with_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_REPORT_EVERY", 4)
    for number in range(9):
        line = kubo_line(AUTHOR, b'{"typ":3,"ts":%d}' % number, bytes([7]), CLAY)
        (tmp_path / f"{number}.ndjson").write_bytes(line)
    shown: list[str] = []
    find_captures([str(tmp_path)], shown.append)
    assert shown == [f"{tmp_path}: {seen} files found, {seen} of them have a known format" for seen in (4, 8)]
    steps: list[int] = []
    split_captures(find_captures([str(tmp_path)])[0], "n", steps.append)
    assert steps == list(range(1, 10))


def test_small_files_are_read_many_in_a_step_and_large_ones_few() -> None:
    def parts(*sizes: int) -> list[FilePart]:
        return [FilePart("f", "kubo-sub", b"", "n", 0, WHOLE, size) for size in sizes]

    assert count_parts_per_step(parts(*[500] * 2_000), 8) == 1_000
    assert count_parts_per_step(parts(500, 64 << 20), 8) == 8
    assert count_parts_per_step(parts(0), 8) == 1_000


def test_files_of_no_known_format_are_named_up_to_a_number(tmp_path: Path) -> None:
    (tmp_path / "a.ndjson").write_bytes(kubo_line(AUTHOR, b'{"typ":3,"ts":1}', b"\x07", CLAY))
    for number in range(25):
        (tmp_path / f"{number:02}.txt").write_text("x")
    _, skipped = find_captures([str(tmp_path)])
    assert len(skipped) == 21
    assert skipped[-1] == f"skipping 5 other files of {tmp_path}, which have no known format"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "it is empty"),
        (b"hello\n", "it is text, and its first line is 'hello'"),
        (archive_of(b"hello\n" * 99, "tar.gzip")[:80], "it is a gzip file with "),
    ],
    ids=["empty", "text", "cut tar"],
)
def test_a_file_that_cannot_be_read_is_refused_with_what_it_is(raw: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "some.file"
    file.write_bytes(raw)
    with pytest.raises(InputError) as error:
        find_captures([str(file)])
    assert str(error.value).startswith(f"cannot read {file}: {words}")


@pytest.mark.parametrize("name", REFUSED_LAYERS)
def test_other_forms_of_a_log_are_refused_with_what_is_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(REFUSED_LAYERS[name]((FILES / "js_ceramic.log").read_bytes()))
    with pytest.raises(InputError) as error:
        find_captures([str(tmp_path / "a.log")])
    assert "ceramic-log" in str(error.value)
    assert "Lines must be UTF-8, and may be wrapped as Docker, CRI or PM2 writes them" in str(error.value)


def cut(raw: bytes) -> bytes:
    return raw[: len(raw) * 9 // 10]


@pytest.mark.parametrize("pack", PACKINGS)
def test_a_damaged_file_is_refused_before_the_run_and_a_capture_is_read_up_to_the_damage(
    pack: str, tmp_path: Path
) -> None:
    random = Random(1)
    lines = [kubo_line(AUTHOR, random.randbytes(300), bytes([7]), CLAY) for _ in range(9_000)]
    packed = PACKINGS[pack](b"\n".join(lines))
    (tmp_path / "a.log").write_bytes(cut(packed))
    captures, _ = find_captures([str(tmp_path / "a.log")])
    with pytest.raises(InputError, match=r"a\.log: the compressed data is cut off\. Decompress the intact part"):
        split_captures(captures, "n")

    records = [
        CaptureRecord("R", 1_700_000_000_000_000_000 + at, AUTHOR, AUTHOR, "/meshsub/1.1.0", b"") for at in range(9)
    ]
    out = io.BytesIO()
    write_capture(out, records)
    (tmp_path / "a.rpc.gz").write_bytes(PACKINGS["gzip"](out.getvalue())[:-4])
    found = read_all(tmp_path / "a.rpc.gz")
    assert [item.reason for item in found if isinstance(item, UnreadableItem)] == [FILE_DAMAGED]
    assert len(found) > 9


class EndlessZeros(io.RawIOBase):
    """/dev/zero, which counts the bytes that were read of it."""

    taken = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any buffer in typeshed
        self.taken += len(buffer)
        buffer[:] = bytes(len(buffer))
        return len(buffer)


def test_a_stream_of_no_known_format_is_refused_by_its_first_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = EndlessZeros()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(zeros)))
    with pytest.raises(InputError, match="cannot read -: it is a file with bytes that are not text"):
        save_streams([Path("-")], tmp_path / "run")
    assert zeros.taken < 4 << 20
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="cannot read /dev/zero: it is a file with bytes that are not text"):
        save_streams([Path("/dev/zero")], tmp_path / "run")


def test_a_stream_that_the_disk_cannot_hold_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = kubo_line(AUTHOR, b'{"typ":3,"ts":1}', b"\x07", CLAY) + b"\n"
    monkeypatch.setattr(sources, "_SAVED_BLOCK", 1 << 20)
    left = iter((2 << 30, 2 << 30, 1 << 30))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=next(left)))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(line * 100_000)))
    with pytest.raises(
        InputError, match=r"after 3,145,728 bytes, less than 1024 MiB of the disk are free\. Free some space"
    ):
        save_streams([Path("-")], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it contains no files"):
        find_captures([str(tmp_path)])


def _by_message(rows: list[dict[str, object]]) -> dict[object, set[object]]:
    senders: dict[object, set[object]] = {}
    for row in rows:
        senders.setdefault(row["message_id"], set()).add(row["remote_peer"])
    return senders
