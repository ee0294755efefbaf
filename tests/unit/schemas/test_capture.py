"""kiln.schemas.captures.kiln_capture: the records of a capture file, byte for byte, and where a broken one is
broken."""

from __future__ import annotations

import gzip
import io
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import VECTORS
from kiln.schemas.captures.kiln_capture import CaptureError, CaptureRecord, open_capture, read_capture, write_capture

records = st.lists(
    st.builds(
        CaptureRecord,
        st.sampled_from(("R", "S")),
        st.integers(0, 2**63 - 1),
        st.binary(max_size=40),
        st.binary(max_size=40),
        st.text(max_size=20),
        st.binary(max_size=200),
    ),
    max_size=8,
)
ONE = CaptureRecord("R", 1_700_000_000_000_000_001, b"\x00\x01a", b"\x00\x01b", "/meshsub/1.3.0", b"rpc")


def written(those: list[CaptureRecord]) -> bytes:
    stream = io.BytesIO()
    assert write_capture(stream, those) == len(those)
    return stream.getvalue()


def read(raw: bytes) -> list[CaptureRecord]:
    return list(read_capture(io.BytesIO(raw)))


@given(records)
def test_what_is_written_is_read(those: list[CaptureRecord]) -> None:
    assert read(written(those)) == those


def test_the_layout_is_the_contract_s() -> None:
    body = (
        b"\x01R" + struct.pack(">Q", ONE.observed_at) + b"\x00\x03\x00\x01a\x00\x03\x00\x01b\x00\x0e/meshsub/1.3.0rpc"
    )
    assert written([ONE]) == struct.pack(">I", len(body)) + body


@given(st.data())
def test_a_truncated_capture_gives_its_whole_records_and_then_names_the_place(data: st.DataObject) -> None:
    raw = written([ONE, ONE, ONE])
    size = len(raw) // 3
    cut = data.draw(st.integers(0, len(raw)).filter(lambda n: n % size))
    got: list[CaptureRecord] = []
    place = f"record {cut // size + 1} at byte {cut // size * size}:"
    with pytest.raises(CaptureError, match=place):
        got.extend(read_capture(io.BytesIO(raw[:cut])))
    assert got == [ONE] * (cut // size)


@pytest.mark.parametrize(
    ("at", "byte", "words"),
    [
        (0, 0xFF, "length"),
        (4, 2, "version 2"),
        (5, ord("X"), "direction"),
        (6, 0xFF, "time"),
        (14, 0xFF, "peer ids"),
        (26, 0xFF, "protocol"),
    ],
)
def test_a_corrupt_record_is_named(at: int, byte: int, words: str) -> None:
    raw = bytearray(written([ONE, ONE]))
    raw[len(raw) // 2 + at] = byte
    with pytest.raises(CaptureError, match=f"record 2 at byte {len(raw) // 2}: .*{words}"):
        read(bytes(raw))


@pytest.mark.parametrize("length", range(16))
def test_a_record_too_short_for_its_head_is_an_error(length: int) -> None:
    with pytest.raises(CaptureError, match="record 1 at byte 0"):
        read(struct.pack(">I", length) + (b"\x01R" + bytes(14))[:length])


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_capture_error(raw: bytes) -> None:
    try:
        read(raw)
    except CaptureError as error:
        said = str(error)
    else:
        return  # they may also be a good capture
    assert "at byte" in said


def test_what_the_format_cannot_hold_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"record 1: .*65535"):
        written([ONE._replace(local=bytes(65536))])
    with pytest.raises(CaptureError, match="record 2: time"):
        written([ONE, ONE._replace(observed_at=2**63)])


def test_gzip_is_known_by_its_content(tmp_path: Path) -> None:
    raw = written([ONE, ONE])
    for name, content in (("plain", raw), ("zipped", gzip.compress(raw))):
        (tmp_path / name).write_bytes(content)
        with open_capture(tmp_path / name) as stream:
            assert list(read_capture(stream)) == [ONE, ONE]


def test_a_truncated_gzip_is_a_capture_error(tmp_path: Path) -> None:
    zipped = gzip.compress(written([ONE._replace(rpc=bytes(range(256)) * 40)] * 9), compresslevel=0)
    path = tmp_path / "cut.rpc.gz"
    path.write_bytes(zipped[: len(zipped) * 2 // 3])
    with pytest.raises(CaptureError, match=r"record 7 at byte \d+: the compressed file"), open_capture(path) as stream:
        list(read_capture(stream))


@pytest.mark.parametrize(("name", "count"), [("go4nosign", 307), ("go4tt", 887)])
def test_the_real_captures(name: str, count: int) -> None:
    path = VECTORS / "captures" / f"{name}.rpc.gz"
    with open_capture(path) as stream:
        those = list(read_capture(stream))
    assert [sum(r.direction == d for r in those) for d in "RS"] == [count, count]
    assert written(those) == gzip.decompress(path.read_bytes())
    # what one peer sent, another received, byte for byte
    sent = sorted((r.local, r.remote, r.rpc) for r in those if r.direction == "S")
    assert sent == sorted((r.remote, r.local, r.rpc) for r in those if r.direction == "R")
