"""Comparison of the native core with Python: both decode some sampled records of `kiln.frames`."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from kiln.pipelines.archive.rows import build_message_row, decode_record
from kiln.pipelines.decode.decoder import DecodedMessage, FrameDecoder, RejectedMessage
from kiln.pipelines.decode.identities import compute_identities
from kiln.pipelines.delta.arrow_rows import build_arrow_schema
from kiln.pipelines.native.core import CoreRows, RecordRow, take_records
from kiln.pipelines.native.library import TABLES_OF_CORE, turn_off
from kiln.schemas.delta.tables import TABLES

_Values = list[tuple[object, ...]]
_ArchiveRows = dict[str, _Values]
"""Rows of one record by table; under `identities`, the digests and positions of its messages"""


def turn_off_at_difference(rows: CoreRows, batch: pa.RecordBatch, decoder: FrameDecoder) -> bool:
    """Compare the rows that the core built from the sampled records of a call with the rows that Python builds from
    them. At a difference, stop using the core in this process, and return true."""
    samples = list(take_records(batch, rows.samples))
    from_core: dict[tuple[int, int], _ArchiveRows] = {
        (sample.partition, sample.offset): {name: [] for name in (*TABLES_OF_CORE, "identities")} for sample in samples
    }
    offsets = pa.array([record.offset for record in samples], pa.int64())
    for name, table in zip(TABLES_OF_CORE, rows.tables, strict=False):
        some = table.filter(pc.is_in(table.column("kafka_offset"), offsets))
        for position, values in zip(list_positions(some), _list_rows(some), strict=True):
            if position in from_core:
                from_core[position][name].append(values)
    by_row = {record.row: (record.partition, record.offset) for record in samples}
    identities = rows.tables[-1]
    some = identities.filter(pc.is_in(identities.column("row"), pa.array(list(by_row), pa.int32())))
    for row, digests in zip(some.column("row").to_pylist(), _list_rows(some.drop_columns("row")), strict=True):
        from_core[by_row[row]]["identities"].append(digests)
    for record in samples:
        if from_core[record.partition, record.offset] != _build_python_rows(record, decoder):
            turn_off("the native core and Python decoded a record into different rows", record.partition, record.offset)
            return True
    return False


def list_positions(rows: pa.RecordBatch) -> list[tuple[int, int]]:
    """List the Kafka partition and offset of each row."""
    columns = (rows.column(name).to_pylist() for name in ("kafka_partition", "kafka_offset"))
    return list(zip(*columns, strict=True))


def _build_python_rows(record: RecordRow, decoder: FrameDecoder) -> _ArchiveRows:
    decoded = decode_record(decoder, record.partition, record.offset, record.stamp, record.value)
    messages = [item for item in decoded.items if isinstance(item, DecodedMessage)]
    made: dict[str, Sequence[Sequence[object]]] = {
        "frames": [] if decoded.row is None else [decoded.row],
        "copies": decoded.copies,
        "messages": [build_message_row(item) for item in messages],
        "subscriptions": decoded.control.subscriptions,
        "controls": decoded.control.controls,
    }
    rows = {name: _convert_rows(name, made[name]) for name in TABLES_OF_CORE}
    identities: _Values = []
    for item in messages:
        early, *late = compute_identities(item, "", decoder.config.unsigned_horizon)
        identities.append((early, late[0] if late else None, item.ref.text))
    faults = (item for item in decoded.items if isinstance(item, RejectedMessage))
    identities += [(fault.stage, fault.reason, fault.ref.text) for fault in faults]  # the core has no faults
    return {**rows, "identities": identities}


def _convert_rows(table: str, rows: Sequence[Sequence[object]]) -> _Values:
    """Convert rows to the values that a reader of the table's files would get."""
    if not rows:
        return []
    schema = build_arrow_schema(TABLES[table].columns)
    arrays = [pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), schema, strict=True)]
    return _list_rows(pa.RecordBatch.from_arrays(arrays, schema=schema))


def _list_rows(batch: pa.RecordBatch) -> _Values:
    return list(zip(*(column.to_pylist() for column in batch.columns), strict=True))
