"""kiln.schemas.captures.lines and formats: parts of a file, lines without end, compressed files, and what is told
apart."""

from __future__ import annotations

import bz2
import io
import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.schemas.captures.compression import DamagedError
from kiln.schemas.captures.formats import FORMATS, describe_file, detect_format
from kiln.schemas.captures.items import (
    FILE_ENDS_EARLY,
    LINE_MALFORMED,
    LINE_TOO_LONG,
    REASONS,
    UnreadableItem,
)
from kiln.schemas.captures.lines import (
    MAX_LINE,
    QUARANTINED_LINE_BYTES,
    WHOLE,
    FileRange,
    Line,
    read_lines,
    split_lines,
)
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kit.history import (
    LINE_LAYERS,
    PACKINGS,
    SOURCE,
    in_parts,
    items,
    kubo_line,
    message_of,
    only_frames,
    unread,
    zipped,
)

PEER = bytes.fromhex("002408011220") + bytes(32)
GOOD = kubo_line(PEER, b'{"typ":3,"ts":1}', b"\x01" * 8, "/ceramic/local-history")
CERAMIC = Path(__file__).parent / "history_files" / "js_ceramic.log"
LINES = [name for name, each in FORMATS.items() if each.has_lines]

some_bytes = st.one_of(
    st.binary(max_size=300),
    st.lists(
        st.one_of(
            st.sampled_from(
                [
                    GOOD,
                    b"",
                    b"\r",
                    b"{}",
                    b"\xff",
                    b'{"type":3,"peerID":"AA==","timestamp":1}',
                    b"[Thu, 15 Jul 2021 13:24:33 GMT] service=pubsub event=received topic=/ceramic/x message.typ=3",
                ]
            ),
            st.binary(max_size=40),
        )
    ).map(b"\n".join),
)


@pytest.mark.parametrize("name", FORMATS)
@given(raw=some_bytes)
def test_any_bytes_become_frames_and_faults_and_nothing_is_raised(name: str, raw: bytes) -> None:
    with suppress(DamagedError):  # some bytes begin as compressed data does
        found = items(name, raw)
        assert all(isinstance(item, Frame) or item.reason in REASONS for item in found)
        assert items(name, zipped(raw)) == found


@pytest.mark.parametrize("name", LINES)
@given(raw=some_bytes)
def test_each_line_that_holds_something_is_one_item_under_its_number(name: str, raw: bytes) -> None:
    if list(split_lines(io.BytesIO(raw), 1))[:1] == [WHOLE]:
        return  # compressed, or not of plain lines
    holding = [number for number, line in enumerate(raw.split(b"\n"), 1) if line.removesuffix(b"\r")]
    found = items(name, raw)
    assert [item.line if isinstance(item, UnreadableItem) else item.sequence for item in found] == holding
    for item in found:
        if isinstance(item, UnreadableItem):
            assert item.data == raw.split(b"\n")[item.line - 1].removesuffix(b"\r")


@pytest.mark.parametrize("name", FORMATS)
@given(raw=some_bytes, size=st.integers(1, 400))
def test_parts_of_any_size_give_what_the_whole_file_gives(name: str, raw: bytes, size: int) -> None:
    with suppress(DamagedError):
        assert in_parts(name, raw, size) == items(name, raw)


@given(
    lines=st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line), max_size=30), size=st.integers(1, 90)
)
def test_parts_begin_at_lines_and_know_their_numbers(lines: list[bytes], size: int) -> None:
    raw = b"\n".join(lines)
    parts = list(split_lines(io.BytesIO(raw), size))
    if parts[:1] == [WHOLE]:
        return
    assert [part.start for part in parts] == [0, *(part.stop for part in parts)][: len(parts)]
    assert not parts or parts[-1].stop == len(raw)
    for part in parts:
        assert raw[: part.start].count(b"\n") == part.first - 1
        assert part.start == 0 or raw[part.start - 1 : part.start] == b"\n"
        assert part.stop is not None
        assert part.stop - part.start >= size or part is parts[-1]


@pytest.mark.parametrize("pack", PACKINGS.values(), ids=PACKINGS)
def test_a_compressed_file_is_one_part_and_reads_as_the_file(pack: Callable[[bytes], bytes]) -> None:
    raw = GOOD + b"\n" + GOOD
    assert list(split_lines(io.BytesIO(pack(raw)), 10)) == [WHOLE]
    assert items("kubo-sub", pack(raw)) == items("kubo-sub", raw)
    assert detect_format(io.BytesIO(pack(raw))) is FORMATS["kubo-sub"]


@pytest.mark.parametrize("pack", PACKINGS.values(), ids=PACKINGS)
@pytest.mark.parametrize("name", LINES)
def test_compressed_data_that_is_damaged_is_not_read_to_a_false_end(name: str, pack: Callable[[bytes], bytes]) -> None:
    packed = pack(b"\n".join([GOOD] * 99))
    for raw in (packed[: len(packed) * 9 // 10], packed[: len(packed) // 2] + bytes(40)):
        with pytest.raises(DamagedError, match="the compressed data is "):
            items(name, raw)


@pytest.mark.parametrize("wrap", LINE_LAYERS.values(), ids=LINE_LAYERS)
def test_a_log_is_read_as_its_program_wrote_it_whatever_is_around_its_lines(wrap: Callable[[bytes], bytes]) -> None:
    raw = CERAMIC.read_bytes()
    assert detect_format(io.BytesIO(wrap(raw))) is FORMATS["ceramic-log"]
    plain = items("ceramic-log", raw)
    assert len(only_frames(plain[:8])) == 8
    for found in (items("ceramic-log", wrap(raw)), in_parts("ceramic-log", wrap(raw), 700)):
        assert only_frames(found[:8]) == plain[:8]
        assert unread(found) == unread(plain)


@pytest.mark.parametrize("wrap", [LINE_LAYERS[name] for name in ("docker json-file", "CRI")])
def test_a_line_that_a_runtime_wrote_in_pieces_is_one_line(wrap: Callable[[bytes], bytes]) -> None:
    lines = [
        kubo_line(PEER, bytes([at]) * size, b"\x07", "/ceramic/local-history") for at, size in enumerate((9, 40_000))
    ]
    found = only_frames(items("kubo-sub", wrap(b"\n".join([*lines, *lines]))))
    assert [len(message_of(frame).data) for frame in found] == [9, 40_000, 9, 40_000]
    assert [frame.sequence for frame in found] == [1, 2, 6, 7]
    cut = wrap(lines[1]).splitlines()[:-1]
    assert unread(items("kubo-sub", b"\n".join(cut) + b"\n")) == [(1, FILE_ENDS_EARLY)]


def test_streams_of_a_container_are_joined_apart() -> None:
    out, error = (list(LINE_LAYERS["CRI"](each).splitlines()) for each in (GOOD + b" " * 20_000, b"x" * 20_000))
    error = [line.replace(b"stdout", b"stderr") for line in error]
    found = items("kubo-sub", b"\n".join([out[0], error[0], out[1], error[1], b""]))
    assert [item.sequence if isinstance(item, Frame) else (item.line, item.reason) for item in found] == [
        1,
        (2, LINE_MALFORMED),
    ]


@pytest.mark.parametrize(
    ("prefix", "at"),
    [
        (b"2023-05-04T12:00:00.25Z ", 1_683_201_600_250_000_000),
        (b"2023-05-04T14:00:00,250+02:00 ", 1_683_201_600_250_000_000),
        (b"1683201600.25 ", 1_683_201_600_250_000_000),
        (b"1683201600250 ", 1_683_201_600_250_000_000),
        (b"[2023-05-04 12:00:00] ", 1_683_201_600_000_000_000),
        (b"2023-15-04T12:00:00Z ", SOURCE.default_time),
        (b"", SOURCE.default_time),
    ],
)
def test_a_line_without_a_time_has_that_of_its_prefix(prefix: bytes, at: int) -> None:
    (frame,) = only_frames(items("kubo-sub", prefix + GOOD))
    assert frame.observed_at == at


def test_text_of_strangers_inside_a_line_is_no_line() -> None:
    log = CERAMIC.read_bytes().splitlines()[0]
    for line in (b'nginx-1  | 10.0.0.1 "GET / " "' + log + b'"', b"note: " + log, b'{"msg":"%b"}' % log[:20]):
        assert unread(items("ceramic-log", line + b"\n")) == [(1, LINE_MALFORMED)]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "it is empty"),
        (zipped(b""), "it is a gzip file with nothing in it"),
        (zipped(GOOD * 99)[:12], "the compressed data is cut off before its first byte (gzip)"),
        (b"hello\nthere\n", "it is text, and its first line is 'hello'"),
        (bz2.compress(b"\n\nhello"), "it is a bzip2 file with text, and its first line is 'hello'"),
        (b"\x89PNG\r\n\x1a\n\0\0", "it is a file with bytes that are not text, which begin with 0x89504e470d0a1a0a"),
        (b"[\n" + GOOD + b",\n" + GOOD + b"\n]\n", "it is text, and its first line is '['"),
        (json.dumps(json.loads(GOOD), indent=2).encode(), "it is text, and its first line is '{'"),
    ],
)
def test_a_file_of_no_format_is_described(raw: bytes, words: str) -> None:
    assert detect_format(io.BytesIO(raw)) is None
    assert describe_file(io.BytesIO(raw)) == words


def test_a_windows_file_and_one_without_a_last_newline_are_read() -> None:
    assert [frame.sequence for frame in only_frames(items("kubo-sub", GOOD + b"\r\n\r\n" + GOOD))] == [1, 3]


def test_a_last_line_that_is_cut_says_so() -> None:
    found = items("kubo-sub", GOOD + b"\n" + GOOD[:-5])
    assert unread(found) == [(2, FILE_ENDS_EARLY)]
    assert unread(items("kubo-sub", GOOD[:-5] + b"\n")) == [(1, LINE_MALFORMED)]


class Endless(io.RawIOBase):
    """A file with one line of 100 MB between two good ones, made as it is read."""

    LONG = 100_000_000

    def __init__(self) -> None:
        self._at = 0

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset
        return offset

    def read(self, size: int = -1) -> bytes:
        pieces = ((GOOD + b"\n", 0), (b"", self.LONG), (b"\n" + GOOD + b"\n", 0))
        start = 0
        for text, blank in pieces:
            length = len(text) or blank
            if self._at < start + length:
                here = self._at - start
                found = text[here : here + size] if text else b"x" * min(size, length - here)
                self._at += len(found)
                return found
            start += length
        return b""


def test_a_line_of_100_mb_is_a_fault_and_costs_little_memory() -> None:
    tracemalloc.start()
    try:
        found = list(FORMATS["kubo-sub"].read(cast(BinaryIO, Endless()), SOURCE, WHOLE))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert unread(found) == [(2, LINE_TOO_LONG)]
    assert [item.sequence for item in found if isinstance(item, Frame)] == [1, 3]
    assert isinstance(found[1], UnreadableItem)
    assert found[1].data == b"x" * QUARANTINED_LINE_BYTES
    assert "100000000 bytes" in found[1].detail
    assert peak < 3 * MAX_LINE


def test_a_message_that_no_frame_can_hold_is_a_fault() -> None:
    line = kubo_line(PEER, bytes(4 * 1024 * 1024), b"\x01" * 8, "/ceramic/local-history")
    assert unread(items("kubo-sub", line)) == [(1, LINE_TOO_LONG)]


def test_a_part_of_a_growing_file_ends_where_it_was_cut() -> None:
    grown = io.BytesIO(GOOD + b"\n" + GOOD)
    assert list(read_lines(grown, FileRange(0, len(GOOD) + 1, 1))) == [Line(1, GOOD, len(GOOD), ended=True)]


@pytest.mark.parametrize(
    ("first", "name"),
    [
        (GOOD, "kubo-sub"),
        (b"a line of another program\r\n" + GOOD + b"\r\n", "kubo-sub"),
        (b'{"type":9,"peerID":"EiDR","timestamp":1,"join":{"topic":"x"}}\n', "pubsub-trace-json"),
        (b"[Thu, 15 Jul 2021 13:24:33 GMT] service=http request=1\n", "ceramic-log"),
        (b"", None),
        (b"nothing that anybody knows\n", None),
        (b"\0" * 100, None),
    ],
)
def test_a_format_is_known_by_its_first_bytes(first: bytes, name: str | None) -> None:
    for raw in (first, zipped(first)):
        found = detect_format(io.BytesIO(raw))
        assert (found and found.name) == name


@given(st.binary(max_size=200))
def test_to_recognise_raises_nothing(raw: bytes) -> None:
    for each in (raw, zipped(raw)[:-3]):
        detect_format(io.BytesIO(each))
        assert describe_file(io.BytesIO(each))


def test_the_same_file_gives_the_same_keys_and_another_file_others() -> None:
    def keys(raw: bytes, digest: bytes) -> Iterator[tuple[bytes, int]]:
        for frame in only_frames(items("kubo-sub", raw, source=SOURCE._replace(digest=digest))):
            yield frame.connection, frame.sequence

    raw = GOOD + b"\n" + GOOD
    assert list(keys(raw, bytes(32))) == list(keys(raw, bytes(32)))
    assert len(set(keys(raw, bytes(32))) | set(keys(raw, b"\1" * 32))) == 4
