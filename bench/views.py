"""Time to read each view (kiln.schemas.delta.views) with DuckDB, and time of `kiln trace`, over a synthetic lake of two
million messages."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bench.report import Finding
from bench.runs import Extent, Say, in_turn
from kiln.deploy.query.ask import query_lake
from kiln.deploy.query.trace import trace_subject
from kiln.deploy.query.trace_ids import parse_id
from kiln.pipelines.delta.arrow_rows import build_arrow_schema
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.delta.views import views
from kiln.schemas.wire.batch_block import BatchBlock, encode_stream_key, write_leaves
from kiln.schemas.wire.cid import cid_bytes
from kiln.schemas.wire.streamid import StreamID

MESSAGES = 2_000_000
AIM_SECONDS = 2.0

_START = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1e6)
_SPAN = 2 * 3600 * 1_000_000  # µs, at full size
_WINDOW = 1_000_000  # µs
_SEPARATORS, _AUTHORS, _NEIGHBOURS, _POINTS = 200, 300, 8, 2
_MESSAGES_A_STREAM = 20
_TYPES = ("UPDATE", "QUERY", "RESPONSE", "KEEPALIVE", "BATCH_UPDATE")
_SHARES = (0.85, 0.05, 0.05, 0.03, 0.02)
_AGAIN = 0.1  # of the UPDATEs
_PAYLOAD = 300  # bytes
_KINDS = ("IHAVE", "IWANT", "IDONTWANT", "GRAFT", "PRUNE")
_KIND_SHARES = (0.6, 0.1, 0.2, 0.05, 0.05)
_IDS = (10, 3, 1, 0, 0)
_ROWS_AT_ONCE = 20_000
_TILE = 0
_BASE36 = b"0123456789abcdefghijklmnopqrstuvwxyz"
_BASE32 = b"abcdefghijklmnopqrstuvwxyz234567"
_BASE58 = b"123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_HEX = b"0123456789abcdef"

_Ints = npt.NDArray[np.int64]
Columns = Mapping[str, pa.Array]


def measure(extent: Extent, say: Say) -> Finding:
    """Measure the time to read all rows and columns of each view as `kiln sql` does, and the time of traces.

    Each run reads the logs of the tables again. DuckDB hashes the values, so Python spends no time on rows. The
    start of a process is not measured.
    """
    with tempfile.TemporaryDirectory(prefix="kiln-views-") as folder:
        lake = Lake(folder)
        count = extent.of(MESSAGES, least=1_000)
        say(f"writing a lake of {count:,} messages")
        rows = make_lake(lake, count)
        say(", ".join(f"{name} {number:,}" for name, number in rows.items()))
        lake.create(TABLES)  # a trace reads tables that no view reads
        sides = {name: partial(seconds, lake, name) for name in views()}
        sides |= {f"trace of a {kind}": partial(seconds_of_trace, lake, text) for kind, text in _traced(lake).items()}
        series = in_turn(sides, extent.runs, "s", say)
    slow = [one_series.name for one_series in series if one_series.median > AIM_SECONDS]
    return Finding(
        "views",
        f"all rows of each view, and traces of ids, with DuckDB; the aim is at most {AIM_SECONDS:g} s each",
        series,
        (),
        {**rows, "over the aim": ", ".join(slow) or "none"},
    )


def seconds(lake: Lake, view: str, run: int) -> float:
    """Measure the time to read a whole view, in s."""
    started = time.perf_counter()
    list(query_lake(lake, f"SELECT count(*), bit_xor(hash(v)) FROM {view} AS v").rows())
    return time.perf_counter() - started


def seconds_of_trace(lake: Lake, text: str, run: int) -> float:
    started = time.perf_counter()
    trace_subject(lake, parse_id(text))
    return time.perf_counter() - started


def _traced(lake: Lake) -> dict[str, str]:
    ids: dict[str, str] = {}
    for kind, table, column in (
        ("stream", "updates", "stream"),
        ("tip", "updates", "tip"),
        ("message", "updates", "message_id"),
        ("batch", "batches", "batch_cid"),
    ):
        ((value,),) = query_lake(lake, f"SELECT max({column}) FROM {table}").rows()
        ids[kind] = str(value)
    return ids


# ---------------------------------------------------------------- the lake


def make_lake(lake: Lake, messages: int) -> dict[str, int]:
    """Fill the tables as the queries would after this number of messages. Return the number of rows of each table.

    Two nodes receive updates of 200 separators; the first separator has a sixth of the updates. Payloads of frames are
    random bytes of the usual length, because views read only the length. Ids and blocks have the forms of real ones.
    """
    rows: dict[str, int] = {}
    for name, columns in tables(messages):
        write(lake, name, columns)
        rows[name] = rows.get(name, 0) + len(next(iter(columns.values())))
    return rows


def tables(count: int) -> Iterator[tuple[str, Columns]]:
    """Yield the rows that `make_lake` writes for `count` messages, table by table, sorted by time in each table."""
    rng = np.random.default_rng(1)
    streams = max(_SEPARATORS, count // _MESSAGES_A_STREAM)
    times = np.sort(rng.integers(0, max(_WINDOW, _SPAN * count // MESSAGES), count)) + _START
    kinds = rng.choice(len(_TYPES), count, p=_SHARES)
    stream_texts = _streams(rng, streams)
    separator_texts = _texts(rng, _SEPARATORS, b"kh4q0ozorrgaq2mezktnrmdwleo", _BASE36, 36)
    authors, neighbours, points = (
        _texts(rng, number, b"12D3KooW", _BASE58, 44) for number in (_AUTHORS, _NEIGHBOURS, _POINTS)
    )
    weights = 1 / np.arange(1, _SEPARATORS + 1)
    separator_of_stream = rng.choice(_SEPARATORS, streams, p=weights / weights.sum())
    topics = pa.array([f"/ceramic/clay/sep/model/{value}" for value in separator_texts.to_pylist()])

    stream = rng.integers(0, streams, count)
    # most streams are written through one node
    author = np.where(rng.random(count) < 0.9, stream % _AUTHORS, rng.integers(0, _AUTHORS, count))
    separator = separator_of_stream[stream]
    ids = _joined(authors.take(pa.array(author)), _texts(rng, count, b"/", _HEX, 16))
    tips = _cids(rng, count)
    update = kinds == 0
    again = update & (rng.random(count) < _AGAIN)
    # a repeat has the content of an update shortly before
    source = np.where(again, np.maximum(0, np.arange(count) - rng.integers(1, 50_000, count)), np.arange(count))
    again &= update[source] & ~again[source]
    source = np.where(again, source, np.arange(count))
    stream, separator = stream[source], separator[source]
    tips = tips.take(pa.array(source))
    new = update & ~again
    first, origin = pa.repeat("clay", count), pa.repeat("LIVE", count)
    stream_column, topic_column = stream_texts.take(pa.array(stream)), topics.take(pa.array(separator))
    query = _texts(rng, streams, b"bagaaiera", _BASE32, 50).take(pa.array(stream))

    # copies, each in a frame of its own; `messages` has the first copy
    number = rng.choice([1, 2, 3], count, p=[0.25, 0.5, 0.25])
    of = np.repeat(np.arange(count), number)
    place = np.arange(len(of)) - np.repeat(np.cumsum(number) - number, number)
    copied_at = times[of] + np.where(place == 0, 0, rng.exponential(80_000, len(of)).astype(np.int64) + 1)
    neighbour, point = rng.integers(0, _NEIGHBOURS, len(of)), rng.integers(0, _POINTS, len(of))
    offsets = np.arange(len(of))
    log = {
        "kafka_partition": pa.array(offsets % 4, pa.int32()),
        "kafka_offset": pa.array(offsets // 4),
    }
    copier = neighbours.take(pa.array(neighbour))
    yield (
        "copies",
        {
            "network": first.take(pa.array(of)),
            "message_id": ids.take(pa.array(of)),
            "remote_peer": copier,
            "observed_at": _stamps(copied_at),
            "verdict": pa.repeat("valid", len(of)),
            **log,
            "message_index": pa.array(np.zeros(len(of)), pa.int32()),
        },
    )
    connection = point * _NEIGHBOURS + neighbour
    sequence = np.zeros(len(of), np.int64)
    for connection_number in range(_POINTS * _NEIGHBOURS):
        mine = connection == connection_number
        sequence[mine] = np.arange(1, mine.sum() + 1)
    kept = (rng.random(len(of)) > 1e-5) | (connection % 4 != 0)  # a quarter of the connections lose frames
    connections = pa.array([bytes([number]) * 16 for number in range(_POINTS * _NEIGHBOURS)], pa.binary())
    empty = pa.array([b""], pa.binary()).take(pa.array(np.zeros(len(of), np.int64)))
    frames = {
        "network": first.take(pa.array(of)),
        "connection": connections.take(pa.array(connection)),
        "direction": pa.repeat("IN", len(of)),
        "local_peer": points.take(pa.array(point)),
        "remote_peer": copier,
        "protocol": pa.repeat("/meshsub/1.2.0", len(of)),
        "observed_at": _stamps(copied_at),
        "sequence": pa.array(sequence),
        "payload": _bytes(rng, len(of), _PAYLOAD),
        "hello_in": empty,
        "hello_out": empty,
        "verdicts": empty,
        "origin": pa.repeat("LIVE", len(of)),
        "remote_address": empty,
        "declared_length": pa.array(np.zeros(len(of), np.int64)),
        **log,
        "kafka_timestamp": _stamps(copied_at + 1_000),
        "agent": pa.nulls(len(of), pa.string()),
        "end_reason": pa.nulls(len(of), pa.string()),
        "dialled": pa.nulls(len(of), pa.bool_()),
    }
    yield "frames", {name: column.filter(pa.array(kept)) for name, column in frames.items()}

    peers = np.arange(_POINTS * _NEIGHBOURS)
    head = {
        "network": pa.repeat("clay", len(peers)),
        "origin": pa.repeat("LIVE", len(peers)),
        "connection": connections,
        "local_peer": points.take(pa.array(peers // _NEIGHBOURS)),
        "remote_peer": neighbours.take(pa.array(peers % _NEIGHBOURS)),
    }
    yield "subscriptions", _subscriptions(head, topics)
    yield "controls", _controls(rng, head, topics, ids, times)

    kept_copy = pa.array(np.flatnonzero(place == 0))
    entries = _cids(rng, count)
    answered = kinds == 2
    yield (
        "messages",
        {
            "message_id": ids,
            "network": first,
            "origin": origin,
            "topic": topic_column,
            "topic_source": pa.array(np.where(rng.random(count) < 0.3, "index", "name")),
            "type": pa.array(np.array(_TYPES)[kinds]),
            "from_peer": authors.take(pa.array(author)),
            "seqno": _bytes(rng, count, 8),
            "stream": _where(kinds <= 1, stream_column),
            "tip": _where(update, tips),
            "model": _where(update, separator_texts.take(pa.array(separator))),
            "sep": _where(
                kinds == 4,
                pa.array([f"model/{text}" for text in separator_texts.to_pylist()]).take(pa.array(separator)),
            ),
            "batch_cid": _where(kinds == 4, entries),
            "query_id": _where((kinds == 1) | answered, query),
            "tips": pa.MapArray.from_arrays(
                pa.array(np.concatenate(([0], np.cumsum(answered))), pa.int32()),
                stream_column.filter(pa.array(answered)),
                tips.filter(pa.array(answered)),
            ),
            "ts": pa.nulls(count, pa.int64()),
            "ver": _where(kinds == 3, pa.array(["2.0.1", "3.1.0", "4.6.0"]).take(pa.array(author % 3))),
            "ipfs_ver": pa.nulls(count, pa.string()),
            "data": _bytes(rng, count, 230),
            "verdict": pa.repeat("valid", count),
            "remote_peer": copier.take(kept_copy),
            "observed_at": _stamps(times),
            **{name: column.take(kept_copy) for name, column in log.items()},
            "message_index": pa.array(np.zeros(count), pa.int32()),
        },
    )

    rows = pa.array(np.flatnonzero(new))
    fresh = len(rows)
    place_in_log = separator[new] % 4
    yield (
        "updates",
        {
            "network": first.take(rows),
            "origin": origin.take(rows),
            "message_id": ids.take(rows),
            "from_peer": authors.take(pa.array(author[new])),
            "separator_key": pa.repeat("model", fresh),
            "separator_value": separator_texts.take(pa.array(separator[new])),
            "separator_source": pa.array(np.where(rng.random(fresh) < 0.5, "genesis", "topic")),
            "stream": stream_column.take(rows),
            "tip": tips.take(rows),
            "observed_at": _stamps(times[new]),
            "log_time": _stamps(times[new] + 50_000),
            "log_partition": pa.array(place_in_log, pa.int32()),
            "log_offset": pa.array(np.arange(fresh)),
        },
    )
    yield (
        "tips",
        {
            "network": first.take(rows),
            "stream": stream_column.take(rows),
            "tip": tips.take(rows),
            "source": pa.repeat("update", fresh),
            "batch_cid": pa.nulls(fresh, pa.string()),
            "observed_at": _stamps(times[new]),
        },
    )

    window, opened, its_separator, held = _windows(separator[new], times[new])
    count = len(opened)
    blocks = _blocks(window, stream_column.take(rows), tips.take(rows), count)
    cids = pa.array([block.cid for block in blocks])
    emitted = opened + _WINDOW + rng.exponential(900_000, count).astype(np.int64)
    order = pa.array(np.argsort(emitted))
    batches = {
        "batch_cid": cids,
        "network": pa.repeat("clay", count),
        "origin": pa.repeat("LIVE", count),
        "separator_key": pa.repeat("model", count),
        "separator_value": separator_texts.take(pa.array(its_separator)),
        "opened_at": _stamps(opened),
        "closed_at": _stamps(opened + _WINDOW),
        "emitted_at": _stamps(emitted),
        "stream_count": pa.array(held, pa.int32()),
        "tip_count": pa.array(held, pa.int32()),
        "block_bytes": pa.array([len(block.data) for block in blocks], pa.int32()),
        "block": pa.array([block.data for block in blocks], pa.binary()),
    }
    yield "batches", {name: column.take(order) for name, column in batches.items()}
    yield (
        "batch_tips",
        {"batch_cid": cids.take(pa.array(window)), "stream": stream_column.take(rows), "tip": tips.take(rows)},
    )
    yield (
        "publications",
        {
            "batch_cid": cids.take(order),
            "transport": pa.repeat("gossipsub", count),
            "topic": topics.take(pa.array(its_separator)).take(order),
            "target": pa.nulls(count, pa.string()),
            "peer_count": pa.array(np.full(count, 6)),
            "published_at": _stamps(emitted + 30_000).take(order),
            "error": pa.nulls(count, pa.string()),
        },
    )
    known = rng.choice(streams, streams // 2, replace=False)
    true = np.where(rng.random(len(known)) < 0.99, separator_of_stream[known], 0)
    yield (
        "streams",
        {
            "network": pa.repeat("clay", len(known)),
            "stream": stream_texts.take(pa.array(known)),
            "separator_key": pa.repeat("model", len(known)),
            "separator_value": separator_texts.take(pa.array(true)),
            "source": pa.repeat("genesis", len(known)),
        },
    )


def _subscriptions(head: Columns, topics: pa.Array) -> Columns:
    connection = np.repeat(np.arange(len(head["connection"])), len(topics))
    topic = np.tile(np.arange(len(topics)), len(head["connection"]))
    return {
        **{name: column.take(pa.array(connection)) for name, column in head.items()},
        "direction": pa.repeat("IN", len(topic)),
        "observed_at": _stamps(np.full(len(topic), _START)),
        "subscribe": pa.array(np.ones(len(topic), np.bool_)),
        "topic": topics.take(pa.array(topic)),
        "topic_source": pa.repeat("name", len(topic)),
        "topic_index": pa.nulls(len(topic), pa.int64()),
        **_entry_tail(connection, topic),
    }


def _controls(rng: np.random.Generator, head: Columns, topics: pa.Array, ids: pa.Array, times: _Ints) -> Columns:
    """Build a control entry per ten messages. Most are IHAVEs with the ids of ten recent messages."""
    count = max(100, len(times) // 10)
    kind = rng.choice(len(_KINDS), count, p=_KIND_SHARES)
    at = np.sort(rng.integers(0, len(times), count))
    listed = np.array(_IDS)[kind]
    of = np.repeat(np.arange(count), listed)
    named = np.maximum(0, at[of] - rng.integers(0, 500, len(of)))
    offsets = pa.array(np.concatenate(([0], np.cumsum(listed))), pa.int32(), mask=np.append(listed == 0, False))
    connection = rng.integers(0, len(head["connection"]), count)
    has_topic = ~np.isin(kind, (1, 2))
    return {
        **{name: column.take(pa.array(connection)) for name, column in head.items()},
        "direction": pa.array(np.where(np.isin(kind, (1, 2)) | (rng.random(count) < 0.3), "OUT", "IN")),
        "observed_at": _stamps(times[at]),
        "kind": pa.array(np.array(_KINDS)[kind]),
        "topic": _where(has_topic, topics.take(pa.array(rng.integers(0, len(topics), count)))),
        "topic_source": _where(has_topic, pa.array(np.where(rng.random(count) < 0.3, "index", "name"))),
        "topic_index": pa.nulls(count, pa.int64()),
        "message_ids": pa.ListArray.from_arrays(offsets, ids.take(pa.array(named))),
        "message_id_count": _where(listed > 0, pa.array(listed, pa.int32())),
        "peer_count": pa.nulls(count, pa.int32()),
        "backoff": pa.nulls(count, pa.int64()),
        **_entry_tail(connection, np.arange(count)),
    }


def _entry_tail(connection: _Ints, number: _Ints) -> Columns:
    return {
        "raw": pa.nulls(len(number), pa.binary()),
        "wire_bytes": pa.array(np.full(len(number), 80), pa.int32()),
        "kafka_partition": pa.array(connection % 4, pa.int32()),
        "kafka_offset": pa.array(number),
        "entry_index": pa.array(np.zeros(len(number)), pa.int32()),
    }


def _windows(separator: _Ints, times: _Ints) -> tuple[_Ints, _Ints, _Ints, _Ints]:
    """Assign updates to windows.

    Returns:
        For each update, the number of the update's window. For each window, the opening time, the separator and the
        number of updates.
    """
    current = [-1] * _SEPARATORS
    ends = [0] * _SEPARATORS
    of: list[int] = []
    opened: list[int] = []
    whose: list[int] = []
    for which, at in zip(separator.tolist(), times.tolist(), strict=True):
        if at >= ends[which]:
            current[which], ends[which] = len(opened), at + _WINDOW
            opened.append(at)
            whose.append(which)
        of.append(current[which])
    return np.array(of), np.array(opened), np.array(whose), np.bincount(of, minlength=len(opened))


def _blocks(window: _Ints, streams: pa.Array, tips: pa.Array, count: int) -> list[BatchBlock]:
    leaves: list[list[bytes]] = [[] for _ in range(count)]
    for which, stream, tip in zip(window.tolist(), streams.to_pylist(), tips.to_pylist(), strict=True):
        leaves[which].append(encode_stream_key(stream) + cid_bytes(tip))
    return [block for leaf in leaves for block in write_leaves(set(leaf))]


def _streams(rng: np.random.Generator, count: int) -> pa.Array:
    head = cid_bytes("bafyrei" + "a" * 52)[:4]
    return pa.array([StreamID(_TILE, head + rng.bytes(32)).text for _ in range(count)])


def _cids(rng: np.random.Generator, count: int) -> pa.Array:
    """Generate CIDs of DAG-CBOR with sha2-256. In base32, 36 bytes take 57.6 letters, so the last bits are 0."""
    cells = _letters(rng, count, b"bafyrei", _BASE32, 52)
    for place, letters in ((7, b"abcdefgh"), (-1, b"aeimquy4")):
        cells[:, place] = rng.choice(np.frombuffer(letters, np.uint8), count)
    return _cells(cells, pa.string())


def _texts(rng: np.random.Generator, count: int, prefix: bytes, alphabet: bytes, length: int) -> pa.Array:
    return _cells(_letters(rng, count, prefix, alphabet, length), pa.string())


def _letters(
    rng: np.random.Generator, count: int, prefix: bytes, alphabet: bytes, length: int
) -> npt.NDArray[np.uint8]:
    letters = np.frombuffer(alphabet, np.uint8)
    cells = np.empty((count, len(prefix) + length), np.uint8)
    cells[:, : len(prefix)] = np.frombuffer(prefix, np.uint8)
    cells[:, len(prefix) :] = letters[rng.integers(0, len(letters), (count, length), np.uint8)]
    return cells


def _bytes(rng: np.random.Generator, count: int, length: int) -> pa.Array:
    return _cells(np.frombuffer(rng.bytes(count * length), np.uint8).reshape(count, length), pa.binary())


def _cells(cells: npt.NDArray[np.uint8], kind: pa.DataType) -> pa.Array:
    count, length = cells.shape
    offsets = np.arange(0, (count + 1) * length, length, dtype=np.int32)
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(cells))])


def _joined(left: pa.Array, right: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(left, right, "")


def _where(mask: npt.NDArray[np.bool_], column: pa.Array) -> pa.Array:
    return pc.if_else(pa.array(mask), column, None)


def _stamps(micros: _Ints) -> pa.Array:
    return pa.array(micros, pa.timestamp("us", tz="UTC"))


def write(lake: Lake, name: str, columns: Columns, batch_id: int = 0) -> None:
    """Write rows in one commit, with the same files, row groups and statistics as the queries.

    Args:
        lake: The lake.
        name: Name of the table, which is created if it is missing.
        columns: The rows, by column. A missing nullable column is null.
        batch_id: Number of the micro-batch of the commit.
    """
    lake.create([name])
    schema = build_arrow_schema(TABLES[name].columns, strict=True)
    nulls = pa.nulls(len(next(iter(columns.values()))))
    table = pa.table(
        [
            nulls.cast(field.type) if field.nullable and field.name not in columns else columns[field.name]
            for field in schema
        ],
        schema=schema,
    )
    files = TableFiles(lake, name)
    for batch in table.to_batches(max_chunksize=_ROWS_AT_ONCE):
        files.add_batch(batch)
    DeltaRsCommits(lake).commit(name, files.close(), WriteId("bench", batch_id))
