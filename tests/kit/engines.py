"""Tasks of the queries `archive` and `updates`, run with the native core and in Python to compare their output."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest.mock import patch

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from kiln.pipelines.archive import record_decoder, transform
from kiln.pipelines.archive.core_samples import turn_off_at_difference
from kiln.pipelines.archive.record_decoder import DECODE_RESULT, FAULT, DecodeResult
from kiln.pipelines.archive.transform import ARCHIVE_OUTPUT, ArchiveOutput
from kiln.pipelines.decode.decoder import DecodeConfig, FrameDecoder
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.native import core, library
from kiln.pipelines.runtime import dedup_store
from kiln.pipelines.runtime.dedup_store import DedupStoreConfig
from kiln.pipelines.runtime.kafka_ranges import RECORDS
from kiln.pipelines.updates import transform as updates
from kiln.pipelines.updates.row_builder import UpdateRow
from kiln.pipelines.updates.separators import SeparatorConfig, StreamsTopic
from kiln.pipelines.updates.transform import MessageReader
from kiln.schemas.kafka.records import Epoch, SeparatorRecord, WaitedTip

NOW = 1_800_000_000_000_000
EPOCH = Epoch("query", 7)
_SPAN = 30 * 86_400_000_000
_TABLES = ("frames", "copies", "messages", "subscriptions", "controls")
_SORT = ("kafka_partition", "kafka_offset", "message_index", "entry_index")


def build_batches(values: Sequence[bytes | None], size: int = 500, partitions: int = 1) -> list[pa.RecordBatch]:
    """Build record batches with schema RECORDS from these values, each of one partition, as the Kafka reader does."""
    lanes: list[list[tuple[int, bytes | None]]] = [[] for _ in range(partitions)]
    for at, value in enumerate(values):
        lanes[zlib.crc32(value or b"") % partitions].append((at, value))
    found: list[pa.RecordBatch] = []
    for partition, lane in enumerate(lanes):
        for start in range(0, len(lane), size):
            some = lane[start : start + size]
            count = len(some)
            columns = {
                "topic": ["frames"] * count,
                "partition": [partition] * count,
                "offset": range(100 + start, 100 + start + count),
                "stamp": [NOW + at for at, _ in some],
                "key": [b""] * count,
                "value": [value for _, value in some],
            }
            arrays = [pa.array(columns[field.name], field.type) for field in RECORDS]
            found.append(pa.RecordBatch.from_arrays(arrays, schema=RECORDS))
    return found


def archive(batches: Sequence[pa.RecordBatch], config: DecodeConfig) -> dict[str, object]:
    """Run a task of `archive`, and return all that it writes and returns, in a form that can be compared."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kiln-engines-")))
        stack.enter_context(patch.object(transform, "get_batch_time", lambda: NOW))
        for module in (record_decoder, transform):
            stack.enter_context(patch.object(module, "get_task_epoch", lambda: EPOCH))
        lake = Lake(str(folder / "lake"))
        lake.create(_TABLES)
        dedup = DedupStoreConfig(str(folder / "dedup.sqlite"), _SPAN)
        stack.callback(dedup_store._open_store.cache_clear)
        rows = [
            row
            for batch in transform.build_archive_task(config, lake, dedup)(iter(batches))
            for row in batch.to_pylist()
        ]
        return _collect(rows, folder)


def _collect(rows: list[dict[str, object]], folder: Path) -> dict[str, object]:
    found: dict[str, object] = {
        "faults": sorted((str(row["key"]), str(row["value"])) for row in rows if row["kind"] == FAULT)
    }
    files = []
    for row in rows:
        if row["kind"] == DECODE_RESULT:
            assert isinstance(row["value"], bytes)
            result = msgspec.msgpack.decode(row["value"], type=DecodeResult)
            files += [*result.frames, *result.parts]
            found |= {"spans": result.spans, "ranges": result.frame_ranges, "copies": result.valid_copies}
            found |= {"entries": result.entries, "differences": result.core_differences}
        if row["kind"] == ARCHIVE_OUTPUT:
            assert isinstance(row["value"], bytes)
            output = msgspec.msgpack.decode(row["value"], type=ArchiveOutput)
            files += output.messages
            found |= {"counts": output.counts, "rejected": output.faults, "tallies": sorted(map(repr, output.tallies))}
    found["stats"] = sorted((file.table, file.rows, file.stats) for file in files)
    for table in _TABLES:
        parts = [pq.read_table(path) for path in sorted((folder / "lake" / table).glob("*.parquet"))]
        if parts:
            whole = pa.concat_tables(parts)
            order = [(name, "ascending") for name in _SORT if name in whole.schema.names]
            found[table] = whole.sort_by(order)
    with sqlite3.connect(folder / "dedup.sqlite") as file:
        found["digests"] = sorted(file.execute("SELECT digest, position, passed_at FROM digests"))
        found["progress"] = file.execute(
            "SELECT digest_count, query_id, batch_id, newest_time FROM progress"
        ).fetchall()
    return found


class _SomeStreams:
    """Verified separators of some streams, and tips that have waited. Some separators contradict a claim."""

    def refresh(self) -> None:
        """Do nothing."""

    def get(self, stream: tuple[str, str], default: SeparatorRecord | None, /) -> SeparatorRecord | None:
        verified = (None, SeparatorRecord("model", "k2"), SeparatorRecord("x/tag", "k95"))
        return (default, default, default, *verified)[zlib.crc32(repr(stream).encode()) % 6]

    def has_waited(self, stream: tuple[str, str], tip: WaitedTip, /) -> bool:
        return zlib.crc32(tip.tip.encode()) % 3 == 0


SEPARATING = (
    SeparatorConfig(),
    SeparatorConfig(fetch=True),
    SeparatorConfig(StreamsTopic("streams", ()), fetch=True),
    SeparatorConfig(StreamsTopic("streams", ()), fetch=True, believe=False),
)


def update(
    batches: Sequence[pa.RecordBatch],
    config: DecodeConfig,
    separating: SeparatorConfig,
    count_difference: Callable[[int], None] = updates.ignore_difference,
) -> list[UpdateRow]:
    """Run a task of `updates`, and return all its rows."""
    with patch.object(updates, "open_known_streams", lambda topic: _SomeStreams()):
        return list(updates.build_copies(iter(batches), config, separating, EPOCH, count_difference))


class TaskOutputs(NamedTuple):
    """Output of a task of `archive`, and of a task of `updates` for each of SEPARATING."""

    archive: dict[str, object]
    updates: list[list[UpdateRow]]


def decode(batches: Sequence[pa.RecordBatch], config: DecodeConfig) -> TaskOutputs:
    """Run the tasks on these records."""
    return TaskOutputs(archive(batches, config), [update(batches, config, each) for each in SEPARATING])


def decode_in_python(batches: Sequence[pa.RecordBatch], config: DecodeConfig) -> TaskOutputs:
    """Run the tasks on these records without the native core."""
    return decode(batches, replace(config, native_core=False))


def find_differences(
    batches: Sequence[pa.RecordBatch], config: DecodeConfig, in_python: TaskOutputs | None = None
) -> list[str]:
    """Describe the differences between the core's output and Python's. The core's own comparison of samples is off."""
    with patch.object(core, "SAMPLE_ONE_IN", 1 << 60):
        native = decode(batches, config)
    python = in_python or decode_in_python(batches, config)
    found = [
        f"archive, {name}: {str(native.archive.get(name))[:400]}\n  in Python: {str(value)[:400]}"
        for name, value in python.archive.items()
        if not is_equal(value, native.archive.get(name))
    ]
    for separating, rows, expected in zip(SEPARATING, native.updates, python.updates, strict=True):
        if rows != expected:
            first = next((pair for pair in zip(rows, expected, strict=False) if pair[0] != pair[1]), None)
            found.append(f"updates, {separating}: {len(rows)} rows, not {len(expected)}; {first}")
    return found


def is_equal(one: object, other: object) -> bool:
    """True if two results are the same."""
    if isinstance(one, pa.Table):
        return isinstance(other, pa.Table) and bool(one.equals(other))
    return one == other


def count_left(batches: Sequence[pa.RecordBatch], config: DecodeConfig) -> tuple[int, int]:
    """Count the records that the core leaves to Python, in `archive` and in `updates`."""
    decoder = core.Core(config)
    archived = sum(len(rows.left) for batch in batches for rows in decoder.archive(batch))
    return archived, sum(len(rows.left) for batch in batches for rows in decoder.updates(batch))


def other_library(path: Path) -> ExitStack:
    """Use another native library until the returned stack is closed."""
    stack = ExitStack()
    stack.enter_context(patch.object(library, "LIBRARY", path))
    stack.enter_context(patch.object(library, "_turned_off", []))
    return stack


def core_is_missing() -> bool:
    """Return true if this checkout has no native library, or an old one."""
    return not library.find_engine().is_native


def check_records(batches: Sequence[pa.RecordBatch], config: DecodeConfig) -> None:
    """Assert that the core and Python decode these records alike, apart from records that the core leaves to Python.

    Tests of rows call this for their records, so that they test both engines. Without a core, nothing is checked.
    """
    with patch.object(core, "SAMPLE_ONE_IN", 1), patch.object(core, "MIN_RECORDS", 0):
        if not core.can_decode(config, 0):
            return
        decoder, reader = core.Core(config), MessageReader(config, updates.ignore_difference)
        for batch in batches:
            for rows in decoder.archive(batch):
                with patch.object(library, "_turned_off", []):
                    assert not (rows.samples and turn_off_at_difference(rows, batch, FrameDecoder(config))), "archive"
            with patch.object(library, "_turned_off", []):
                list(reader.read(batch))
                assert library.find_engine().is_native, "updates"
