"""kiln.schemas.captures.lines and formats: parts of a file, lines without end, compressed files, and what is told
apart."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Iterator
from typing import BinaryIO, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.schemas.captures.formats import FORMATS, detect_format
from kiln.schemas.captures.items import (
    FILE_DAMAGED,
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
from kit.history import SOURCE, in_parts, items, kubo_line, only_frames, unread, zipped

PEER = bytes.fromhex("002408011220") + bytes(32)
GOOD = kubo_line(PEER, b'{"typ":3,"ts":1}', b"\x01" * 8, "/ceramic/local-history")
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
    found = items(name, raw)
    assert all(isinstance(item, Frame) or item.reason in REASONS for item in found)
    assert items(name, zipped(raw)) == found


@pytest.mark.parametrize("name", LINES)
@given(raw=some_bytes)
def test_each_line_that_holds_something_is_one_item_under_its_number(name: str, raw: bytes) -> None:
    if raw.startswith(b"\x1f\x8b"):
        return  # a compressed file
    holding = [number for number, line in enumerate(raw.split(b"\n"), 1) if line.removesuffix(b"\r")]
    found = items(name, raw)
    assert [item.line if isinstance(item, UnreadableItem) else item.sequence for item in found] == holding
    for item in found:
        if isinstance(item, UnreadableItem):
            assert item.data == raw.split(b"\n")[item.line - 1].removesuffix(b"\r")


@pytest.mark.parametrize("name", FORMATS)
@given(raw=some_bytes, size=st.integers(1, 400))
def test_parts_of_any_size_give_what_the_whole_file_gives(name: str, raw: bytes, size: int) -> None:
    assert in_parts(name, raw, size) == items(name, raw)


@given(
    lines=st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line), max_size=30), size=st.integers(1, 90)
)
def test_parts_begin_at_lines_and_know_their_numbers(lines: list[bytes], size: int) -> None:
    raw = b"\n".join(lines)
    if raw.startswith(b"\x1f\x8b"):
        return
    parts = list(split_lines(io.BytesIO(raw), size))
    assert [part.start for part in parts] == [0, *(part.stop for part in parts)][: len(parts)]
    assert not parts or parts[-1].stop == len(raw)
    for part in parts:
        assert raw[: part.start].count(b"\n") == part.first - 1
        assert part.start == 0 or raw[part.start - 1 : part.start] == b"\n"
        assert part.stop is not None
        assert part.stop - part.start >= size or part is parts[-1]


def test_a_compressed_file_is_one_part() -> None:
    assert list(split_lines(io.BytesIO(zipped(GOOD * 100)), 10)) == [WHOLE]


def test_a_windows_file_and_one_without_a_last_newline_are_read() -> None:
    assert [frame.sequence for frame in only_frames(items("kubo-sub", GOOD + b"\r\n\r\n" + GOOD))] == [1, 3]


def test_a_last_line_that_is_cut_says_so() -> None:
    found = items("kubo-sub", GOOD + b"\n" + GOOD[:-5])
    assert unread(found) == [(2, FILE_ENDS_EARLY)]
    assert unread(items("kubo-sub", GOOD[:-5] + b"\n")) == [(1, LINE_MALFORMED)]


@given(st.integers(1, 60))
def test_a_compressed_file_that_is_cut_gives_what_is_whole(lost: int) -> None:
    lines = [kubo_line(PEER, b"%d" % at, at.to_bytes(8), "/ceramic/local-history") for at in range(1, 400)]
    whole = only_frames(items("kubo-sub", b"\n".join(lines)))
    found = items("kubo-sub", zipped(b"\n".join(lines))[:-lost])
    assert unread(found[-1:]) == [(len(found), FILE_ENDS_EARLY)]
    assert found[:-1] == whole[: len(found) - 1]


def test_a_damaged_compressed_file_gives_what_came_before() -> None:
    raw = zipped(GOOD)
    assert unread(items("kubo-sub", raw[:-8] + bytes(8))) == [(1, FILE_DAMAGED)]  # the checksum
    assert unread(items("kubo-sub", raw[:10] + b"\xff" * 20)) == [(1, FILE_DAMAGED)]


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
    detect_format(io.BytesIO(raw))
    detect_format(io.BytesIO(zipped(raw)[:-3]))


def test_the_same_file_gives_the_same_keys_and_another_file_others() -> None:
    def keys(raw: bytes, digest: bytes) -> Iterator[tuple[bytes, int]]:
        for frame in only_frames(items("kubo-sub", raw, source=SOURCE._replace(digest=digest))):
            yield frame.connection, frame.sequence

    raw = GOOD + b"\n" + GOOD
    assert list(keys(raw, bytes(32))) == list(keys(raw, bytes(32)))
    assert len(set(keys(raw, bytes(32))) | set(keys(raw, b"\1" * 32))) == 4
