"""Delta tables of synthetic traffic, filled as Kiln's queries would fill them, but without Spark and Kafka.

The code of the queries builds frames, copies and messages. Updates and batches are built independently: the windows by
`kit.log_model`, and the blocks with another library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import pyarrow as pa
from deltalake import write_deltalake

from kiln.deploy.demo.traffic import Traffic, TrafficOptions
from kiln.pipelines.archive.rows import build_control_rows, build_copy_row, build_message_row, read_control_rpc
from kiln.pipelines.decode.decoder import DecodeConfig, DecodedMessage, FrameDecoder, get_signer
from kiln.pipelines.decode.frame_row import build_frame_row
from kiln.pipelines.delta.arrow_rows import build_arrow_schema
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.captures.items import Item
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.kafka.frames import HISTORY, read_frame
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.genesis import Claims
from kiln.schemas.wire.topics import Separator
from kit.log_model import Owner, Update, block_of, cid_of, windows_of

Row = dict[str, object]
START = datetime(2026, 5, 4, 12, tzinfo=UTC)
WINDOW = 1_000_000


def made_up_rows(messages: int, rate: float = 50.0, options: TrafficOptions | None = None) -> dict[str, list[Row]]:
    """Build the rows, by table, of valid traffic from START on, at `rate` messages per second, with T = 1 s."""
    traffic = Traffic(
        options or TrafficOptions(reconnects=0.002, garbage=0, forged=0, impostors=0),
        int(START.timestamp() * 1e9),
        rate,
        keep_ledger=False,
    )
    return rows_of(generated.frame.SerializeToString() for generated in traffic.frames(messages=messages))


def rows_of(
    values: Iterable[bytes], how: DecodeConfig | None = None, stamped_after: int = 20_000
) -> dict[str, list[Row]]:
    """Build the rows, by table, that the queries would write for these records of `kiln.frames`, with T = 1 s.

    Args:
        stamped_after: Time from the capture of a frame to the broker's timestamp, in µs.
    """
    frames: list[tuple[int, Frame]] = []
    for offset, value in enumerate(values):
        frame = read_frame(value)
        assert not isinstance(frame, Rejected)
        frames.append((offset, frame))
    return _rows_of_frames(frames, 0, how, stamped_after)


def rows_of_file(items: Iterable[Item], partition: int, *, has_lines: bool) -> dict[str, list[Row]]:
    """Build the rows, by table, that a backfill run would write for a file (decision 21)."""
    every = list(items)
    frames = [item for item in every if isinstance(item, Frame)]
    numbered = [(frame.sequence if has_lines else number, frame) for number, frame in enumerate(frames)]
    rows = _rows_of_frames(numbered, partition, None, 0)
    for item in every:
        if not isinstance(item, Frame):
            nowhere = dict.fromkeys(("kafka_partition", "kafka_offset", "message_index", "cid"))
            fault = {"stage": HISTORY, "reason": item.reason, "detail": item.detail, "data": item.data}
            rows["quarantine"].append(nowhere | fault | {"observed_at": START})
    return rows


def _rows_of_frames(
    numbered: Iterable[tuple[int, Frame]], partition: int, how: DecodeConfig | None, stamped_after: int
) -> dict[str, list[Row]]:
    frames: list[tuple[object, ...]] = []
    copies: list[tuple[object, ...]] = []
    subscriptions: list[tuple[object, ...]] = []
    controls: list[tuple[object, ...]] = []
    said: dict[tuple[str, str], DecodedMessage] = {}
    rows: dict[str, list[Row]] = {name: [] for name in TABLES}
    decoder = FrameDecoder(how or DecodeConfig())
    for offset, frame in numbered:
        frames.append(build_frame_row(partition, offset, frame.observed_at // 1000 + stamped_after, frame))
        rpc = read_control_rpc(frame)
        if rpc is not None:
            control = build_control_rows(frame, rpc, decoder.config, partition, offset)
            subscriptions += control.subscriptions
            controls += control.controls
        for item in decoder.decode_frame(frame, partition, offset):
            if item.copy is not None:
                copies.append(build_copy_row(item, frame))
            if isinstance(item, DecodedMessage):
                said.setdefault((item.network, item.message_id), item)
                continue
            place = dict(zip(("kafka_partition", "kafka_offset", "message_index"), item.ref, strict=True))
            fault = {name: getattr(item, name) for name in ("stage", "reason", "detail", "data", "observed_at")}
            rows["quarantine"].append(place | fault | {"cid": None})
    rows["frames"] = _named("frames", frames)
    rows["copies"] = _named("copies", copies)
    rows["subscriptions"] = _named("subscriptions", subscriptions)
    rows["controls"] = _named("controls", controls)
    rows["messages"] = _named("messages", [build_message_row(item) for item in said.values()])
    _batched(rows, sorted(said.values(), key=lambda item: item.observed_at), in_log=partition >= 0)
    return rows


def _batched(rows: dict[str, list[Row]], heard: Iterable[DecodedMessage], *, in_log: bool) -> None:
    """Add rows to the tables that follow from `kiln.updates`, where every third record is a tick. If `in_log` is false,
    add the rows of a backfill run, whose updates are not in Kafka."""
    known: set[tuple[object, ...]] = set()
    log: list[tuple[int, Update | None]] = []
    offset = clock = 0
    for item in heard:
        content = item.content
        if content.type != "UPDATE" or content.stream is None or content.tip is None:
            continue
        separator = Claims(item.separator, (content.model and Separator("model", content.model)) or None).first
        new = (item.network, item.origin, separator, content.stream, content.tip)
        if new in known:
            continue
        known.add(new)
        offset += 1 if offset % 3 else 2
        clock = item.observed_at + (50_000 if in_log else 0)
        key, value = separator or (None, None)
        source = None if separator is None else "topic" if item.separator else "model"
        common = {
            "network": item.network,
            "stream": content.stream,
            "tip": content.tip,
            "observed_at": item.observed_at,
        }
        rows["updates"].append(
            common
            | {
                "origin": item.origin,
                "message_id": item.message_id,
                "from_peer": get_signer(item.envelope, item.verdict),
                "separator_key": key,
            }
            | {"separator_value": value, "separator_source": source, "log_time": clock}
            | {"log_partition": 0 if in_log else -1, "log_offset": offset if in_log else clock}
        )
        if not any(tip["stream"] == content.stream and tip["tip"] == content.tip for tip in rows["tips"][-50:]):
            rows["tips"].append(common | {"source": "update", "batch_cid": None})
        owner: Owner | None = (item.network, item.origin, key, value) if key and value else None
        log.append((clock, owner and Update(owner, content.stream, content.tip, item.observed_at)))
    log.append((clock + 2 * WINDOW, None))
    for window in windows_of(log, WINDOW):
        add_batch(rows, window.owner, window.opened_at, window.tips)


def add_batch(rows: dict[str, list[Row]], owner: Owner, opened_at: int, tips: Iterable[tuple[str, str]]) -> None:
    """Add the rows of a batch: `batches`, `batch_tips` and a receipt."""
    told = sorted(tips)
    block = block_of(told)
    cid, closed = cid_of(block), opened_at + WINDOW
    network, origin, key, value = owner
    rows["batches"].append(
        {"batch_cid": cid, "network": network, "origin": origin, "separator_key": key, "separator_value": value}
        | {"opened_at": opened_at, "closed_at": closed, "emitted_at": closed + 300_000, "tip_count": len(told)}
        | {"stream_count": len({stream for stream, _ in told}), "block_bytes": len(block), "block": block}
    )
    rows["batch_tips"] += [{"batch_cid": cid, "stream": stream, "tip": tip} for stream, tip in told]
    rows["publications"].append(
        {"batch_cid": cid, "transport": "gossipsub", "topic": f"/ceramic/{network}/{key}/{value}", "target": None}
        | {"peer_count": 3, "published_at": closed + 400_000, "error": None}
    )


def write_rows(lake: Lake, rows: Mapping[str, Sequence[Row]]) -> None:
    """Append rows to tables. All tables are created, also those without rows."""
    lake.create(TABLES)
    for name, each in rows.items():
        if each:
            append(lake, name, each)


def append(lake: Lake, table: str, rows: Sequence[Row]) -> None:
    """Append rows to a table in one commit."""
    schema = build_arrow_schema(TABLES[table].columns, strict=True)
    told = pa.Table.from_pylist(list(rows), schema=schema)
    write_deltalake(lake.table(table), told, mode="append", storage_options=lake.storage_options)


def at(seconds: float) -> datetime:
    """Return the time `seconds` after the start of the traffic."""
    return START + timedelta(seconds=seconds)


def _named(table: str, rows: Iterable[Sequence[object]]) -> list[Row]:
    names = [column.name for column in TABLES[table].columns]
    return [dict(zip(names, row, strict=True)) for row in rows]
