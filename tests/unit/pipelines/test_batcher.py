"""kiln.pipelines.batch.processor: a partition of `kiln.updates` to records of `kiln.batches` (decisions 1, 2 and 7)."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import dag_cbor
import msgspec
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from multiformats import CID
from pyspark.sql.streaming.stateful_processor import TimerValues
from pyspark.sql.streaming.tws_tester import TwsTester

from kiln.pipelines.batch.batching import BatchConfig, BatchOutput, batch_offset_ranges
from kiln.pipelines.batch.offset_range import ALL, UpdateFilter, WindowKey
from kiln.pipelines.batch.processor import BatchProcessor
from kiln.pipelines.batch.transform import OFFSET_RANGES, build_range_task
from kiln.pipelines.batch.windows import PartitionWindows, Window
from kiln.schemas.kafka.records import (
    TICK,
    BatchRecord,
    Coordinates,
    Epoch,
    Origin,
    SeparatorRecord,
    UpdateRecord,
    decode_batch,
    decode_quarantine,
    decode_update,
    encode,
)
from kiln.schemas.times import MAX_MICROS
from kiln.schemas.wire.batch_block import MAX_BLOCK, encode_stream_key
from kiln.schemas.wire.cid import cid_bytes, cid_text, compute_cid
from kiln.schemas.wire.streamid import StreamID
from kit.log_model import Owner, Update, block_of, cid_of, windows_of, without_repeats
from kit.plain_batcher import LogRecord, batch_partition, build_outputs, list_window_tips, plainly, read_range

T = 1_000_000
SCHEMA = Path(__file__).resolve().parents[3] / "schemas" / "kafka" / "batches.schema.json"
VALID = Draft202012Validator(json.loads(SCHEMA.read_text()))

STREAMS = tuple(StreamID(3, compute_cid(b"genesis %d" % n)).text for n in range(3))
TIPS = tuple(cid_text(compute_cid(b"tip %d" % n)) for n in range(4))
ANNA, BERT = SeparatorRecord("model", "ka"), SeparatorRecord("model", "kb")


EPOCH = Epoch("query", 0)
ORIGIN = 1_700_000_000_000_000  # µs: stamps count from here
NEVER_BEFORE = MAX_MICROS  # of a clock that is ahead, so that an update counts as heard when it was stamped


def update(
    stream: str = STREAMS[0],
    tip: str = TIPS[0],
    *,
    separator: SeparatorRecord | None = ANNA,
    network: str = "mainnet",
    origin: Origin = "LIVE",
    message: str = "author/00",
    epoch: Epoch = EPOCH,
    heard: int = NEVER_BEFORE,
) -> bytes:
    at = Coordinates(0, 0, 0)
    return encode(UpdateRecord(network, origin, separator, "topic", stream, tip, None, message, epoch, at, heard))


def log_of(*records: tuple[int, bytes | None]) -> list[LogRecord]:
    return [LogRecord(0, offset, ORIGIN + stamp, value) for offset, (stamp, value) in enumerate(records)]


def run(
    records: Iterable[LogRecord], windows: PartitionWindows | None = None, limit: int = MAX_BLOCK
) -> tuple[list[BatchRecord], list[BatchOutput]]:
    """The batches, and what went elsewhere."""
    outputs = list(batch_partition(PartitionWindows(T) if windows is None else windows, iter(records), limit))
    return (
        [decode_batch(output.value) for output in outputs if output.topic == "batches"],
        [output for output in outputs if output.topic != "batches"],
    )


def tips_of(batch: BatchRecord) -> dict[str, list[str]]:
    """What a library that is not ours reads in a block."""
    block = dag_cbor.decode(batch.block)
    assert isinstance(block, dict)
    assert list(block) == ["tips"]
    return {stream: [cid_text(bytes(tip)) for tip in tips] for stream, tips in block["tips"].items()}


# ---------------------------------------------------------------- one partition


def test_a_window_becomes_a_batch() -> None:
    batches, others = run(
        log_of(
            (1_000_000, update(STREAMS[0], TIPS[0], message="m1")),
            (1_500_000, update(STREAMS[1], TIPS[1], message="m2")),
            (1_999_999, update(STREAMS[0], TIPS[2], message="m3")),
            (2_000_000, TICK),
        )
    )
    assert not others
    (batch,) = batches
    assert (batch.network, batch.origin, batch.separator) == ("mainnet", "LIVE", ANNA)
    assert (batch.opened_at, batch.closed_at) == (ORIGIN + 1_000_000, ORIGIN + 2_000_000)
    assert tips_of(batch) == {STREAMS[0]: sorted((TIPS[0], TIPS[2]), key=cid_bytes), STREAMS[1]: [TIPS[1]]}
    cid = CID.decode(batch.batch_cid)
    assert (cid.version, cid.codec.name, cid.hashfun.name, cid.base.name) == (1, "dag-cbor", "sha2-256", "base32")
    assert cid.raw_digest == hashlib.sha256(batch.block).digest()


def test_records_and_their_keys_are_as_the_schema_says() -> None:
    log = log_of((0, update()), (0, update(separator=BERT, network="testnet-clay", message="m")), (T, TICK))
    outputs = list(batch_partition(PartitionWindows(T), iter(log), MAX_BLOCK))
    assert [(output.topic, output.key) for output in outputs] == [
        ("batches", b"mainnet/model/ka"),
        ("batches", b"testnet-clay/model/kb"),
    ]
    for output in outputs:
        VALID.validate(json.loads(output.value))


@pytest.mark.parametrize("tick", [TICK, None], ids=["empty", "null"])
def test_a_tick_moves_the_clock_and_nothing_else(tick: bytes | None) -> None:
    windows = PartitionWindows(T)
    assert run(log_of((0, tick), (2 * T, tick)), windows) == ([], [])
    assert windows.log_time == ORIGIN + 2 * T
    assert len(windows) == 0


def test_networks_origins_and_separators_do_not_share_a_batch() -> None:
    values = [
        update(STREAMS[0], TIPS[0], message="m1"),
        update(STREAMS[0], TIPS[1], message="m2", separator=BERT),
        update(STREAMS[0], TIPS[2], message="m3", origin="REPLAY"),
        update(STREAMS[0], TIPS[3], message="m4", network="testnet-clay"),
    ]
    batches, _ = run(log_of(*((0, value) for value in values), (T, TICK)))
    found = {(batch.network, batch.origin, batch.separator.value): tips_of(batch) for batch in batches}
    assert found == {
        ("mainnet", "LIVE", "ka"): {STREAMS[0]: [TIPS[0]]},
        ("mainnet", "LIVE", "kb"): {STREAMS[0]: [TIPS[1]]},
        ("mainnet", "REPLAY", "ka"): {STREAMS[0]: [TIPS[2]]},
        ("testnet-clay", "LIVE", "ka"): {STREAMS[0]: [TIPS[3]]},
    }


def test_an_update_without_a_separator_is_no_part_of_a_batch() -> None:
    assert run(log_of((0, update(separator=None)), (T, TICK))) == ([], [])


def test_only_the_updates_of_the_authors_and_with_a_verified_separator_where_the_settings_say_so() -> None:
    said = (("anna", "genesis"), ("anna", "topic"), ("bert", "genesis"), (None, "model"))
    records = [
        (offset, T + offset, encode(msgspec.structs.replace(read, from_=author, separator_source=source)))
        for offset, (author, source) in enumerate(said)
        for read in [decode_update(update(STREAMS[0], TIPS[offset]))]
    ]

    def batched(which: UpdateFilter) -> list[int]:
        offsets, stamps, values = zip(*records, strict=True)
        stretch = read_range(offsets, stamps, values, which)
        assert stretch.offsets == [0, 1, 2, 3]  # the others still move the clock
        return [offset for offset, owner in enumerate(stretch.owner_indexes) if owner >= 0]

    assert batched(UpdateFilter()) == [0, 1, 2, 3]
    assert batched(UpdateFilter(frozenset({"anna"}))) == [0, 1]
    assert batched(UpdateFilter(only_verified=True)) == [0, 2]
    assert batched(UpdateFilter(frozenset({"bert"}), only_verified=True)) == [2]


@settings(max_examples=25)
@given(
    st.permutations(range(24)),
    st.permutations(range(24)),
    st.lists(st.integers(0, T // 2), min_size=24, max_size=24),
    st.frozensets(st.sampled_from("abcd")),
)
def test_two_kilns_of_disjoint_authors_share_the_updates_between_them(
    heard: list[int], heard_by_the_other: list[int], pauses: list[int], mine: frozenset[str]
) -> None:
    """Each hears all, in an order of its own: each update is in one batch of one of them."""
    values = [
        encode(msgspec.structs.replace(decode_update(each), from_="abcd"[number % 4]))
        for number in range(24)
        for each in [update(STREAMS[number % 3], cid_text(compute_cid(b"own %d" % number)), message=f"m{number}")]
    ]

    def batched(order: list[int], authors: frozenset[str]) -> list[tuple[str, str]]:
        windows, stamp = PartitionWindows(T), ORIGIN
        found: list[tuple[str, str]] = []
        records: list[tuple[int, int, bytes | None]] = []
        for number, pause in zip(order, pauses, strict=True):
            stamp += pause
            records.append((len(records), stamp, values[number]))
        records.append((24, stamp + T, TICK))
        offsets, stamps, read_values = zip(*records, strict=True)
        stretch = read_range(offsets, stamps, read_values, UpdateFilter(authors))
        for output in batch_offset_ranges(windows, 0, [stretch], MAX_BLOCK):
            for stream, tips in tips_of(decode_batch(output.value)).items():
                found += [(stream, tip) for tip in tips]
        return found

    both = batched(heard, mine) + batched(heard_by_the_other, frozenset("abcd") - mine)
    assert sorted(both) == sorted((decode_update(each).stream, decode_update(each).tip) for each in values)


def test_other_spellings_of_a_stream_or_tip_are_the_same() -> None:
    genesis = StreamID.parse(STREAMS[0])
    spelled = "ceramic://" + genesis.text
    upper = CID.decode(TIPS[0]).encode("base58btc")
    batches, others = run(
        log_of((0, update(message="m1")), (0, update(spelled, message="m2")), (0, update(tip=upper)), (T, TICK))
    )
    assert not others
    assert [tips_of(batch) for batch in batches] == [{STREAMS[0]: [TIPS[0]]}]


# ---------------------------------------------------------------- what cannot be read


def changed(**fields: object) -> bytes:
    return json.dumps({**json.loads(update()), **fields}).encode()


def without(field: str) -> bytes:
    return json.dumps({name: value for name, value in json.loads(update()).items() if name != field}).encode()


UNREADABLE = {
    "not JSON": b"\x00\xff garbage",
    "cut": update()[:-1],
    "an array": b"[]",
    "deep": b"[" * 10_000,
    "NaN": b'{"network": NaN}',
    "no stream": without("stream"),
    "no tip": without("tip"),
    "no epoch": without("epoch"),
    "no separator key": without("separator"),
    "number as a stream": changed(stream=5),
    "stream that is none": changed(stream="kjz"),
    "CommitID as a stream": changed(stream=StreamID.parse(STREAMS[0]).text + "0"),
    "tip that is not a CID": changed(tip="bafy"),
    "empty network": changed(network=""),
    "unknown origin": changed(origin="OTHER"),
    "empty separator value": changed(separator={"key": "model", "value": ""}),
    "negative batch": changed(epoch={"query": "q", "batch": -1}),
    "unknown field": changed(since="version 9"),
    "unknown field of a separator": changed(separator={"key": "model", "value": "ka", "kind": "text"}),
    "unknown source of the separator": changed(separator_source="rumour"),
}
NO_JSON_ERROR = {
    "text that is not UTF-8": update().replace(b"mainnet", b"main\xffnet"),
    "deep in an unknown field": update()[:-1] + b',"x":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
}


@pytest.mark.parametrize(
    "value",
    [
        *(pytest.param(value, id=name) for name, value in UNREADABLE.items()),
        *(pytest.param(value, id=name) for name, value in NO_JSON_ERROR.items()),
    ],
)
def test_what_cannot_be_read_goes_to_quarantine_and_the_rest_goes_on(value: bytes) -> None:
    log = log_of((0, update(message="m1")), (10, value), (20, update(tip=TIPS[1], message="m2")), (T, TICK))
    batches, others = run(log)
    assert [tips_of(batch) for batch in batches] == [{STREAMS[0]: sorted(TIPS[:2], key=cid_bytes)}]
    (output,) = others
    assert output.topic == "quarantine"
    fault = decode_quarantine(output.value)
    assert (fault.stage, fault.reason, fault.data, fault.observed_at) == (
        "batch",
        "update_malformed",
        value,
        ORIGIN + 10,
    )
    assert "record 0/1 of updates" in fault.detail


def test_what_cannot_be_read_still_moves_the_clock() -> None:
    batches, _ = run(log_of((0, update()), (T, b"garbage")))
    assert len(batches) == 1


# ---------------------------------------------------------------- a micro-batch written twice


def test_a_micro_batch_that_was_written_twice_changes_nothing() -> None:
    first, again = Epoch("query", 7), Epoch("query", 7)
    once = [(0, update(tip=TIPS[0], message="m1", epoch=first)), (1, update(tip=TIPS[1], message="m2", epoch=first))]
    # 2.5 s later, in another order: without the guard these would be a second batch
    twice = [
        (2_500_000, update(tip=TIPS[1], message="m2", epoch=again)),
        (2_500_000, update(tip=TIPS[0], message="m1", epoch=again)),
    ]
    end = [(4_000_000, TICK)]
    assert run(log_of(*once, *twice, *end)) == run(log_of(*once, *end))


def test_what_only_the_second_writing_holds_is_taken() -> None:
    """The first was cut short by the crash."""
    epoch = Epoch("query", 7)
    batches, _ = run(
        log_of(
            (0, update(tip=TIPS[0], message="m1", epoch=epoch)),
            (2_500_000, update(tip=TIPS[0], message="m1", epoch=epoch)),
            (2_500_000, update(tip=TIPS[1], message="m2", epoch=epoch)),
            (4_000_000, TICK),
        )
    )
    assert [tips_of(batch) for batch in batches] == [{STREAMS[0]: [TIPS[0]]}, {STREAMS[0]: [TIPS[1]]}]


def test_a_tip_announced_again_is_batched_again() -> None:
    values = [update(message=f"m{n}", epoch=Epoch("query", n)) for n in range(2)]
    batches, _ = run(log_of((0, values[0]), (T, values[1]), (2 * T, TICK)))
    assert [tips_of(batch) for batch in batches] == [{STREAMS[0]: [TIPS[0]]}] * 2


def test_one_message_id_in_two_networks_or_origins_is_two_messages() -> None:
    """An unsigned message's id is its digest: the same bytes may come on both."""
    values = [update(), update(network="testnet-clay"), update(origin="REPLAY")]
    batches, _ = run(log_of(*((0, value) for value in values), (T, TICK)))
    assert len(batches) == 3


# ---------------------------------------------------------------- the block limit


def window_of(streams: int, tips: int, order: int) -> Window:
    pairs = [
        (StreamID(3, compute_cid(b"stream %d" % n)).text, compute_cid(b"%d/%d" % (n, m)))
        for n in range(streams)
        for m in range(tips)
    ]
    random.Random(order).shuffle(pairs)
    window = Window(WindowKey("mainnet", "LIVE", "model", "ka"), ORIGIN + 10, ORIGIN + 20)
    window.leaves.update(encode_stream_key(stream) + tip for stream, tip in pairs)
    return window


@pytest.mark.parametrize(("streams", "tips"), [(40, 1), (5, 30), (1, 100)], ids=["many", "some", "one"])
def test_the_limit_splits_a_window_the_same_way_each_time(streams: int, tips: int) -> None:
    limit = 1_000
    expected = list(build_outputs(window_of(streams, tips, 0), limit))
    assert len(expected) > 1
    assert all(list(build_outputs(window_of(streams, tips, order), limit)) == expected for order in range(1, 5))

    batches = [decode_batch(output.value) for output in expected]
    assert all(len(batch.block) <= limit for batch in batches)
    assert len({batch.batch_cid for batch in batches}) == len(batches)
    assert {(batch.opened_at, batch.closed_at) for batch in batches} == {(ORIGIN + 10, ORIGIN + 20)}
    found = [(stream, tip) for batch in batches for stream, links in tips_of(batch).items() for tip in links]
    assert len(found) == len(set(found)) == streams * tips
    assert set(found) == {
        (stream, cid_text(tip))
        for stream, links in list_window_tips(window_of(streams, tips, 0)).items()
        for tip in links
    }


def test_a_block_is_as_large_as_js_ceramic_loads_and_no_larger() -> None:
    batches = [decode_batch(output.value) for output in build_outputs(window_of(1, 7_000, 0), MAX_BLOCK)]
    assert [len(batch.block) <= 256_000 for batch in batches] == [True, True]
    assert len(batches[0].block) > 255_900


# ---------------------------------------------------------------- any log


class Step(NamedTuple):
    step: int
    stream: int
    tip: int
    separator: SeparatorRecord | None
    kind: str  # update, tick or garbage
    ago: int  # µs between event time and stamp; less than nothing: of a clock that is ahead


steps = st.lists(
    st.builds(
        Step,
        st.sampled_from((0, 1, T // 2, T - 1, T, -T)),
        st.integers(0, 2),
        st.integers(0, 3),
        st.sampled_from((ANNA, BERT, None)),
        st.sampled_from(("update", "update", "tick", "garbage")),
        st.sampled_from((0, 1, T // 2, T, 3 * T, -T)),
    ),
    max_size=25,
)


def log_from(taken: Sequence[Step], partition: int = 0) -> list[LogRecord]:
    log, now = [], ORIGIN + 10 * T
    for offset, step in enumerate(taken):
        now += step.step
        values = {
            "update": update(
                STREAMS[step.stream],
                TIPS[step.tip],
                separator=step.separator,
                message=f"{partition}/{offset}",
                heard=now - step.ago,
            ),
            "tick": TICK,
            "garbage": b"garbage",
        }
        log.append(LogRecord(partition, offset, now, values[step.kind]))
    return log


@given(steps)
def test_blocks_hold_exactly_what_their_windows_do(taken: list[Step]) -> None:
    windows, expected = PartitionWindows(T), []
    for step, record in zip(taken, log_from(taken), strict=True):
        closed = windows.advance(record.stamp)
        if step.kind == "update" and step.separator is not None:
            key = WindowKey("mainnet", "LIVE", step.separator.key, step.separator.value)
            heard = min(windows.log_time, record.stamp - step.ago)
            closed += windows.add(key, STREAMS[step.stream], cid_bytes(TIPS[step.tip]), heard)
        for window in closed:
            tips = {
                stream: [cid_text(tip) for tip in sorted(links)]
                for stream, links in sorted(list_window_tips(window).items())
            }
            expected.append((window.key, window.opened_at, window.opened_at + T, tips))

    batches, others = run(log_from(taken))
    found = [
        (
            WindowKey(batch.network, batch.origin, batch.separator.key, batch.separator.value),
            batch.opened_at,
            batch.closed_at,
            tips_of(batch),
        )
        for batch in batches
    ]
    assert found == expected
    assert len(others) == sum(step.kind == "garbage" for step in taken)


class Heard(NamedTuple):
    """An update in a log: by whom, of which epoch, and what else there may be of it."""

    owner: Owner
    stream: int
    tip: int
    ago: int
    writer: str
    batch: int
    message: int


OWNERS: tuple[Owner, ...] = (
    ("mainnet", "LIVE", "model", "ka"),
    ("mainnet", "LIVE", "model", "kb"),
    ("mainnet", "LIVE", "controller", "ka"),
    ("mainnet", "REPLAY", "model", "ka"),
    ("testnet-clay", "LIVE", "model", "ka"),
)

free_logs = st.lists(
    st.tuples(
        st.sampled_from((0, 0, 1, T // 3, T - 1, T, T + T // 2, -1, -T)),
        st.sampled_from((TICK, None, b"garbage", b'{"network": "mainnet"}', update(separator=None), update()[:-1]))
        | st.builds(
            Heard,
            st.sampled_from(OWNERS),
            st.integers(0, 2),
            st.integers(0, 3),
            st.sampled_from((0, 0, 1, T // 3, T - 1, T, T + 1, 5 * T, -1, -T)),
            st.sampled_from(("updates", "bridge")),
            st.integers(0, 2),
            st.integers(0, 4),
        ),
    ),
    max_size=40,
)
FreeLog = list[tuple[int, bytes | Heard | None]]


def as_records(taken: FreeLog, partition: int = 0) -> tuple[list[LogRecord], list[tuple[int, Update | None]]]:
    """The log, and the same as the model takes it. Offsets have gaps, as those of a log with transactions do."""
    records: list[LogRecord] = []
    plain: list[tuple[int, Update | None]] = []
    now = ORIGIN + 10 * T
    for number, (step, what) in enumerate(taken):
        now += step
        value, said = what if not isinstance(what, Heard) else None, None
        if isinstance(what, Heard):
            network, origin, key, separator = what.owner
            heard, message = now - what.ago, f"{key}/{separator}/{what.message}"  # a message has one separator
            epoch = Epoch(what.writer, what.batch)
            said = Update(what.owner, STREAMS[what.stream], TIPS[what.tip], heard, (epoch.query, epoch.batch), message)
            value = update(
                said.stream,
                said.tip,
                separator=SeparatorRecord(key, separator),
                network=network,
                origin="LIVE" if origin == "LIVE" else "REPLAY",
                message=message,
                epoch=epoch,
                heard=heard,
            )
        records.append(LogRecord(partition, 3 * number, now, value))
        plain.append((now, said))
    return records, plain


@given(free_logs)
def test_a_stretch_gives_what_its_records_give_one_by_one(taken: FreeLog) -> None:
    records, _ = as_records(taken)
    whole, plain = PartitionWindows(T, grace=T // 4), PartitionWindows(T, grace=T // 4)
    assert list(batch_partition(whole, records, 400)) == list(plainly(plain, records, 400))
    assert whole.dump() == plain.dump()


@given(free_logs, st.sets(st.integers(1, 39)), st.sets(st.integers(1, 39)))
def test_neither_stretches_nor_micro_batches_matter(taken: FreeLog, cuts: set[int], dumps: set[int]) -> None:
    records, _ = as_records(taken)
    plain = PartitionWindows(T)
    expected = list(plainly(plain, records, MAX_BLOCK))
    windows = PartitionWindows(T)
    found: list[BatchOutput] = []
    for start, end in pairwise([0, *sorted(cut for cut in cuts | dumps if cut < len(records)), len(records)]):
        if start in dumps:
            windows = PartitionWindows(T, windows.dump())
        found += batch_partition(windows, records[start:end], MAX_BLOCK)
    assert found == expected
    assert windows.dump() == plain.dump()


@given(free_logs)
def test_batches_are_those_of_the_model(taken: FreeLog) -> None:
    # the model knows of no writer that goes back to an older epoch
    newest: dict[str, int] = {}
    for _, what in taken:
        if isinstance(what, Heard):
            newest[what.writer] = max(what.batch, newest.get(what.writer, 0))
    ordered = [
        (step, what._replace(batch=newest[what.writer]) if isinstance(what, Heard) else what) for step, what in taken
    ]
    records, plain = as_records(ordered)
    batches, others = run(records)
    found = sorted((batch.opened_at, batch.batch_cid) for batch in batches)
    windows = windows_of(without_repeats(plain), T)
    assert found == sorted((window.opened_at, cid_of(block_of(window.tips))) for window in windows)
    unread = [record for record, (_, said) in zip(records, plain, strict=True) if record.value and said is None]
    assert len(others) == sum(record.value != update(separator=None) for record in unread)


# ---------------------------------------------------------------- the stateful processor


def arrow(records: Sequence[LogRecord]) -> pa.RecordBatch:
    """As Spark hands them over."""
    columns = [
        pa.array([record.partition for record in records], pa.int32()),
        pa.array([record.offset for record in records], pa.int64()),
        pa.array([record.stamp for record in records], pa.int64()),
        pa.array([record.value for record in records], pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, ["partition", "offset", "stamp", "value"])


def rows(*parts: Sequence[LogRecord]) -> pd.DataFrame:
    """What the stateful processor gets where the reading task has the records in these parts."""
    made = list(build_range_task(ALL)(iter([arrow(records) for records in parts])))
    frame: pd.DataFrame = pa.Table.from_batches(made).to_pandas()
    assert list(frame.columns) == [column.split()[0] for column in OFFSET_RANGES.split(", ")]
    return frame


def outputs_of(frame: pd.DataFrame) -> list[BatchOutput]:
    if frame.empty:
        return []
    assert list(frame.columns) == ["topic", "key", "value"]
    return [BatchOutput(*row) for row in frame.itertuples(index=False, name=None)]


def new_tester(state: bytes | None = None) -> TwsTester:
    made = TwsTester(BatchProcessor(BatchConfig(T)), timeMode="None", outputMode="Append")
    if state is not None:
        made.updateValueState("windows", 0, (state,))
    return made


def state_of(made: TwsTester, key: int = 0) -> bytes:
    kept = made.peekValueState("windows", key)
    assert kept is not None
    return bytes(kept[0])


@settings(max_examples=50)
@given(steps, st.lists(st.integers(0, 24), max_size=4), st.randoms(use_true_random=False), st.booleans())
def test_the_processor_gives_what_the_log_gives_at_once(
    taken: list[Step], cuts: list[int], chance: random.Random, restarted: bool
) -> None:
    log = log_from(taken)
    made, found = new_tester(), []
    bounds = [0, *sorted(cut for cut in cuts if cut < len(log)), len(log)]
    for start, end in pairwise(bounds):
        micro_batch = log[start:end]
        if not micro_batch:
            continue  # Spark calls no key without rows
        chance.shuffle(micro_batch)
        at = chance.randint(0, len(micro_batch))  # two stretches that may overlap
        found += outputs_of(made.testInPandas(0, rows(micro_batch[:at], micro_batch[at:])))
        if restarted:
            made = new_tester(state_of(made))
    assert found == list(plainly(PartitionWindows(T), log, MAX_BLOCK))


@settings(max_examples=25)
@given(st.lists(steps, min_size=2, max_size=3))
def test_partitions_have_states_of_their_own(parts: list[list[Step]]) -> None:
    logs = [log_from(taken, partition) for partition, taken in enumerate(parts)]
    made = new_tester()
    found: list[list[BatchOutput]] = [[] for _ in logs]
    for half in (0, 1):
        for partition, log in enumerate(logs):
            if records := log[half * len(log) // 2 : (half + 1) * len(log) // 2]:
                found[partition] += outputs_of(made.testInPandas(partition, rows(records)))
    assert found == [list(plainly(PartitionWindows(T), log, MAX_BLOCK)) for log in logs]


def test_records_of_several_partitions_in_one_arrow_batch_are_stretches_of_their_own() -> None:
    logs = [log_from([Step(1, n, n, ANNA, "update", 0)] * 3, partition) for n, partition in enumerate((4, 0, 7))]
    mixed = [record for records in zip(*logs, strict=True) for record in records]
    (made,) = build_range_task(ALL)(iter([arrow([]), arrow(mixed)]))
    assert made.column("partition").to_pylist() == [4, 0, 7]
    apart = [next(build_range_task(ALL)(iter([arrow(log)]))) for log in logs]
    assert made.to_pylist() == [each.to_pylist()[0] for each in apart]


def test_rows_may_come_in_several_frames_in_any_order() -> None:
    log = log_of((0, update(message="m1")), (10, update(tip=TIPS[1], message="m2")), (T, TICK), (T, None))
    made = new_tester()
    made.handle.setGroupingKey(0)
    frames: Iterator[pd.DataFrame] = iter([rows([log[3], log[1]]), rows([log[2]]), rows([log[0]])])
    out = list(made.processor.handleInputRows((0,), frames, TimerValues(-1, -1)))
    found = [output for frame in out if isinstance(frame, pd.DataFrame) for output in outputs_of(frame)]
    assert found == list(batch_partition(PartitionWindows(T), iter(log), MAX_BLOCK))
    assert len(found) == 1


def test_interleaved_ranges_of_rows_keep_the_separators_of_their_updates() -> None:
    one, other = SeparatorRecord("model", "one"), SeparatorRecord("model", "other")
    log = log_of(
        *((at, update(tip=TIPS[at % 2], separator=other if at % 2 else one, message=f"m{at}")) for at in range(4)),
        (2 * T, TICK),
        (2 * T, TICK),
    )
    made = new_tester()
    made.handle.setGroupingKey(0)
    frames: Iterator[pd.DataFrame] = iter([rows(log[::2]), rows(log[1::2])])
    out = list(made.processor.handleInputRows((0,), frames, TimerValues(-1, -1)))
    found = [output for frame in out if isinstance(frame, pd.DataFrame) for output in outputs_of(frame)]
    assert found == list(batch_partition(PartitionWindows(T), iter(log), MAX_BLOCK))
    assert len(found) == 2


def test_a_data_frame_of_outputs_has_a_mebibyte() -> None:
    """A worker holds no more of them in memory, however many a micro-batch gives."""
    log = log_of(*((at, b"x" * 300_000) for at in range(12)))
    made = new_tester()
    made.handle.setGroupingKey(0)
    out = list(made.processor.handleInputRows((0,), iter([rows(log)]), TimerValues(-1, -1)))
    outputs = [outputs_of(frame) for frame in out if isinstance(frame, pd.DataFrame)]
    assert sum(map(len, outputs)) == len(log)
    assert all(sum(len(each.value) for each in frame[:-1]) < 1 << 20 for frame in outputs)


def test_ticks_flush_a_silent_separator_and_leave_no_window_in_state() -> None:
    made = new_tester()
    assert outputs_of(made.testInPandas(0, rows(log_of((0, update()))))) == []
    assert len(PartitionWindows(T, state_of(made))) == 1
    found: list[BatchOutput] = []
    for n in range(1, 12):  # a tick every 100 ms, each in a micro-batch of its own
        found += outputs_of(made.testInPandas(0, rows([LogRecord(0, n, ORIGIN + n * T // 10, TICK)])))
        assert bool(found) == (n >= 10)
    assert len(found) == 1
    assert len(PartitionWindows(T, state_of(made))) == 0


def test_more_windows_than_the_head_of_the_state_holds() -> None:
    """Each separator has a window; the batches come in the order in which the windows were opened."""
    separators = [SeparatorRecord("model", f"k{number}") for number in range(1_000)]
    log = log_of(
        *((0, update(separator=each, message=f"{each.value} 1")) for each in separators),
        *((T // 2, update(tip=TIPS[1], separator=each, message=f"{each.value} 2")) for each in separators[::50]),
        (T, TICK),
        (T, update(message="m")),
    )
    made, found = new_tester(), []
    for start in range(0, len(log), 90):
        found += outputs_of(made.testInPandas(0, rows(log[start : start + 90])))
    assert found == list(plainly(PartitionWindows(T), log, MAX_BLOCK))
    assert len(found) == 1_000


def test_a_new_length_holds_for_windows_opened_from_then_on() -> None:
    made = new_tester()
    made.testInPandas(0, rows([LogRecord(0, 0, ORIGIN, update(message="m1"))]))
    longer = TwsTester(BatchProcessor(BatchConfig(3 * T)))
    longer.updateValueState("windows", 0, (state_of(made),))
    log = [LogRecord(0, 1, ORIGIN + T, update(message="m2")), LogRecord(0, 2, ORIGIN + 4 * T, TICK)]
    batches = [decode_batch(output.value) for output in outputs_of(longer.testInPandas(0, rows(log)))]
    assert [(batch.opened_at, batch.closed_at) for batch in batches] == [
        (ORIGIN, ORIGIN + T),
        (ORIGIN + T, ORIGIN + 4 * T),
    ]


def test_the_limit_of_the_settings_holds() -> None:
    made = TwsTester(BatchProcessor(BatchConfig(T, block_limit=120)))
    log = log_of(*((0, update(stream, message=stream)) for stream in STREAMS), (T, TICK))
    batches = [decode_batch(output.value) for output in outputs_of(made.testInPandas(0, rows(log)))]
    assert [list(tips_of(batch)) for batch in batches] == [[stream] for stream in sorted(STREAMS)]


def test_the_processor_is_read_without_pandas() -> None:
    """Spark starts a process for that with each start of the query."""
    code = "import sys, kiln.pipelines.batch.processor; sys.exit('pandas' in sys.modules or 'pyarrow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_quarantined_bytes_are_whole() -> None:
    value = bytes(range(256))
    found = outputs_of(new_tester().testInPandas(0, rows([LogRecord(0, 0, ORIGIN + 5, value)])))
    assert [base64.b64decode(msgspec.json.decode(output.value)["data"]) for output in found] == [value]
