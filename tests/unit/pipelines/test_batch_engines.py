"""Records of `kiln.updates` with the native core and in Python: the same ranges, whatever the records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from unittest.mock import patch

import msgspec
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conftest import VECTORS
from kiln.deploy.demo.traffic import Traffic, TrafficOptions
from kiln.deploy.demo.traffic.capture_files import replay
from kiln.pipelines.batch import transform
from kiln.pipelines.batch.offset_range import (
    ALL,
    FAULT,
    NO_UPDATE,
    PackedOffsetRange,
    UpdateFilter,
    UpdateRange,
    merge_offset_ranges,
)
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.native import core, library
from kiln.schemas.kafka.records import TICK, Coordinates, Epoch, SeparatorRecord, UpdateRecord, decode_update, encode
from kiln.schemas.times import MAX_MICROS, MIN_MICROS
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.streamid import StreamID
from kit import engines

pytestmark = pytest.mark.skipif(engines.core_is_missing(), reason="no native core to compare with Python")

STREAM = StreamID(3, compute_cid(b"genesis")).text
TIP = cid_text(compute_cid(b"a tip"))
UPDATE = UpdateRecord(
    network="testnet-clay",
    origin="LIVE",
    separator=SeparatorRecord("model", "ka"),
    separator_source="topic",
    stream=STREAM,
    tip=TIP,
    from_="author",
    message_id="author/00",
    epoch=Epoch("query", 7),
    frame=Coordinates(1, 2, 3),
    observed_at=1_800_000_000_000_000,
)
FILTERS = (
    ALL,
    UpdateFilter(frozenset({"author"})),
    UpdateFilter(only_verified=True),
    UpdateFilter(frozenset({"author", "é"}), only_verified=True),
)


def build_batch(values: Sequence[bytes | None]) -> pa.RecordBatch:
    count = len(values)
    columns = {
        "partition": pa.array([3] * count, pa.int32()),
        "offset": pa.array(range(70, 70 + 2 * count, 2), pa.int64()),
        "stamp": pa.array(range(5, 5 + count), pa.int64()),
        "value": pa.array(values, pa.binary()),
    }
    return pa.RecordBatch.from_pydict(columns)


def read(values: Sequence[bytes | None], update_filter: UpdateFilter, least: int) -> list[UpdateRange]:
    """Return what the task passes on, if the core decodes batches of `least` records or more."""
    with patch.object(core, "MIN_RECORDS", least):
        made = list(transform.build_range_task(update_filter)(iter([build_batch(values)])))
    rows = [row for batch in made for row in batch.to_pylist()]
    return list(merge_offset_ranges(PackedOffsetRange(row["first"], row["last"], row["data"]) for row in rows))


def describe(values: Sequence[bytes | None], update_filter: UpdateFilter = ALL, *, native: bool) -> list[object]:
    """All that the windows get of each record. No sample is compared, so that all rows of the core are seen."""
    with patch.object(core, "SAMPLE_ONE_IN", 1 << 60):
        ranges = read(values, update_filter, 0 if native else 1 << 60)
    return list_records(ranges)


def list_records(ranges: list[UpdateRange]) -> list[object]:
    return [
        (offset, stamp, *one.describe(index))
        for one in ranges
        for index, (offset, stamp) in enumerate(zip(one.offsets, one.stamps, strict=True))
    ]


def count_left(values: Sequence[bytes | None]) -> int:
    return sum(len(rows.left) for rows in core.Core().batch(build_batch(values)))


def test_python_decodes_nothing_that_the_core_decodes() -> None:
    """Otherwise the comparisons below compare Python with itself."""
    with patch.object(transform, "read_offset_range", side_effect=AssertionError):
        assert len(describe([encode(UPDATE)] * 3, native=True)) == 3


# ---------------------------------------------------------------- any record

_TEXTS = ("", "a", "é😀", 'a"b\\c/\n\t\x7f', "\x00\x1f", "x" * 256, "x" * 257, "x" * 1024, "x" * 1025, "é" * 1024)
_LONG = ("x" * 4096, "x" * 4097, "x" * 8192, "x" * 8193, "LIVE", "REPLAY", "genesis", "topic", "model", "none")
_STREAMS = (STREAM, f"ceramic://{STREAM}", f"/ceramic/{STREAM}", STREAM.upper(), STREAM[:-1], STREAM + "0", "k", "k0")
_RAW = (compute_cid(b"x"), b"\x12\x20" + bytes(32), b"\x01\x85\x01\x12\x20" + bytes(32), b"\x01\x55\x00\x01x")
_TIPS = (*map(cid_text, _RAW), TIP.upper(), TIP[:-1], TIP[:-1] + "z", TIP + "a", "z" + cid_text(_RAW[1]), "bafy")
_NUMBERS = (0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**64, 1.0, 1.5, True, MIN_MICROS - 1, MIN_MICROS, MAX_MICROS)
_VALUES: tuple[object, ...] = (
    *(*_TEXTS, *_LONG, *_STREAMS, *_TIPS, *_NUMBERS, MAX_MICROS + 1, None, [], {}),
    *({"key": key, "value": value} for key in ("model", "", 'a"') for value in ("ka", "", 5, None)),
    *({"key": "x" * size, "value": "ka"} for size in (1024, 1025)),
    *({"key": "model", "value": "x" * size} for size in (1024, 1025)),
    *({"query": "x" * size, "batch": 7} for size in (256, 257)),
    *({"key": "model"}, {"value": "ka", "key": "model"}, {"key": "model", "value": "ka", "more": 1}),
    *({"query": query, "batch": batch} for query in ("query", "") for batch in (0, 7, -1, 2**63, None)),
    *({"partition": 1, "offset": 2, "index": index} for index in (0, -1, 2**63 - 1, 2**63, None)),
)
_FIELDS = tuple(json.loads(encode(UPDATE)))

values = st.sampled_from(_VALUES)
changed = st.builds(
    lambda changes, tight, is_ascii: json.dumps(
        {**json.loads(encode(UPDATE)), **changes}, separators=(",", ":") if tight else None, ensure_ascii=is_ascii
    ).encode("utf-8", "surrogatepass"),
    st.dictionaries(st.sampled_from((*_FIELDS, "more")), values, max_size=2),
    st.sampled_from((True, True, True, False)),
    st.booleans(),
)
_TEXT = encode(UPDATE).decode()
respelled = st.sampled_from(
    [
        _TEXT.replace(old, new).encode()
        for old, new in (
            *(('"LIVE"', '"\\u004cIVE"'), (":7}", ":07}"), (":7}", ":-0}"), (":7}", ":7.0}"), (":7}", ":7e0}")),
            *((":7}", ": 7}"), ('"author"', '"\\ud800"'), ('"author"', '"\\ud83d\\ude00"'), ('"author"', '"\\x"')),
            *(('"tip"', '"t\\u0069p"'), ("{", " {"), ("}", "} "), ('"from":"author",', ""), ("null", "nul")),
            *(('"network"', '"origin":"LIVE","network"'), (",", ",,"), ("testnet-clay", "\ufefft"), ("ka", "k\x7f")),
        )
    ]
)
cut = st.builds(lambda at, byte: encode(UPDATE)[:at] + byte, st.integers(0, len(_TEXT)), st.binary(max_size=2))
flipped = st.builds(
    lambda at, byte: encode(UPDATE)[:at] + byte + encode(UPDATE)[at + 1 :],
    st.integers(0, len(_TEXT)),
    st.binary(min_size=1, max_size=1),
)
records = changed | changed | respelled | cut | flipped | st.sampled_from((TICK, None, encode(UPDATE), b"[" * 9_999))


@settings(max_examples=200)
@given(st.lists(records, min_size=1, max_size=30), st.sampled_from(FILTERS))
@example([json.dumps({**json.loads(_TEXT), name: value}).encode() for name in _FIELDS for value in _VALUES], ALL)
@example(
    [
        json.dumps({**json.loads(_TEXT), name: value}, separators=(",", ":")).encode()
        for name in _FIELDS
        for value in _VALUES
    ],
    FILTERS[1],
)
def test_both_engines_read_updates_alike(log: list[bytes | None], update_filter: UpdateFilter) -> None:
    assert describe(log, update_filter, native=True) == describe(log, update_filter, native=False)


def test_the_core_leaves_no_record_that_kiln_writes() -> None:
    """Whatever strangers put into separators, ids and CIDs."""
    replace = msgspec.structs.replace
    written = [
        UPDATE,
        replace(UPDATE, separator=None, separator_source=None, from_=None, origin="REPLAY"),
        *(replace(UPDATE, separator=SeparatorRecord(text, text), message_id=text) for text in _TEXTS[1:-3] if text),
        *(replace(UPDATE, tip=tip) for tip in map(cid_text, _RAW)),
        *(replace(UPDATE, separator_source=source) for source in ("genesis", "model")),
    ]
    log = [*map(encode, written), TICK, None]
    assert count_left(log) == 0
    assert describe(log, native=True) == describe(log, native=False)
    (decoded,) = read(log, ALL, 0)
    assert decoded.owner_indexes.count(NO_UPDATE) == 3


@pytest.mark.parametrize("capture", [None, "jsc3", "go4nosign"])
def test_both_engines_read_the_updates_of_traffic_alike(capture: str | None) -> None:
    frames: list[bytes | None] = []
    if capture is None:
        traffic = Traffic(TrafficOptions(network="local-bench", checked=1.0), 1_735_689_600 * 10**9, 200.0)
        frames += [frame.value for frame, _ in zip(traffic.frames(), range(1_500), strict=False)]
    else:
        replay(
            VECTORS / "captures" / f"{capture}.rpc.gz",
            lambda frame: frames.append(frame.SerializeToString()),
            now=lambda: 0.0,
            sleep=lambda _: None,
        )
    rows = engines.update(engines.build_batches(frames), DecodeConfig("either"), engines.SEPARATING[0])
    log: list[bytes | None] = [row.value for row in rows if row.topic == "updates"]
    assert log
    assert count_left(log) == 0
    assert describe(log, native=True) == describe(log, native=False)


def test_records_that_the_core_leaves_take_their_places() -> None:
    """An unusual spelling that Python reads, and a record that nothing reads, among others of the same separator."""
    spaced = json.dumps(json.loads(_TEXT)).encode()
    log = [encode(msgspec.structs.replace(UPDATE, message_id=f"m{number}")) for number in range(6)]
    log[2], log[4] = spaced, b"garbage"
    assert count_left(log) == 2
    (merged,) = read(log, ALL, 0)
    assert merged.offsets == [70, 72, 74, 76, 78, 80]
    assert merged.owner_indexes[4] == FAULT
    assert describe(log, native=True) == describe(log, native=False)


# ---------------------------------------------------------------- which engine


def test_a_small_task_stays_in_python() -> None:
    log = [encode(UPDATE)] * (core.MIN_RECORDS - 1)
    with patch.object(transform, "Core", side_effect=AssertionError("no core for so few")):
        (one,) = read(log, ALL, core.MIN_RECORDS)
    assert [decode_update(value).stream for value in log] == [STREAM] * len(one.offsets)


def test_a_core_that_is_wrong_is_noticed_and_turned_off() -> None:
    log = [encode(msgspec.structs.replace(UPDATE, message_id=f"m{number}")) for number in range(50)]
    expected = describe(log, native=False)
    build = transform._build_range

    def build_wrong(rows: core.CoreRows, batch: pa.RecordBatch, update_filter: UpdateFilter) -> UpdateRange:
        made = build(rows, batch, update_filter)
        made.observed_at[7] += 1
        return made

    with (
        patch.object(transform, "_build_range", build_wrong),
        patch.object(library, "_turned_off", []),
        patch.object(core, "SAMPLE_ONE_IN", 1),
    ):
        (one,) = read(log, ALL, 0)
        assert library.find_engine().reason == "the native core and Python decoded a record of kiln.updates differently"
        assert list_records([one]) == expected
