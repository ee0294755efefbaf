"""Estimate of the messages and bytes that batching saves with other window lengths T (`batch.window`).

Windows over the rows of the tables `updates` and `messages` are simulated in event time (CIP-123; decision 1).
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, TextIO

from rich.console import Console

from kiln.conf.settings.durations import micros, parse_duration
from kiln.deploy.query.answer import print_table
from kiln.deploy.query.ask import Answer, query_lake
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.kafka.records import Origin
from kiln.schemas.wire.batch_block import MAX_BLOCK, encode_stream_key, write_leaves
from kiln.schemas.wire.cid import cid_bytes
from kiln.schemas.wire.pubsub import BATCH_UPDATE, write_batch_update
from kiln.schemas.wire.topics import Separator


class ReceivedUpdate(NamedTuple):
    """An UPDATE message, with its event time in µs and its length in bytes."""

    network: str
    origin: Origin
    separator: Separator | None
    event_time: int
    size: int
    new: tuple[str, bytes] | None
    """StreamID and CID; `None` for a repeat of an earlier update, which opens no window"""


@dataclass
class BatchSavings:
    """Messages and bytes with a window length T of `window` µs, for a separator or for all updates without one."""

    network: str
    origin: Origin
    separator: Separator | None
    window: int
    updates: int = 0
    update_bytes: int = 0
    batches: int = 0
    batch_bytes: int = 0
    """bytes of the BATCH_UPDATEs, without the blocks"""
    block_bytes: int = 0
    others: int = 0
    """updates in no window: without separator, or repeated while no window is open"""
    other_bytes: int = 0

    @property
    def batched(self) -> tuple[int, int]:
        """Number of messages and of bytes sent if batches replace the UPDATEs in windows."""
        return self.batches + self.others, self.batch_bytes + self.other_bytes

    @property
    def both(self) -> tuple[int, int]:
        """Number of messages and of bytes sent if all UPDATEs are sent, and batches in addition."""
        return self.updates + self.batches, self.update_bytes + self.batch_bytes


class _Window(NamedTuple):
    """A simulated window: its end in µs, and the tips of streams, as `write_leaves` takes them."""

    closes_at: int
    leaves: set[bytes]


def estimate_savings(
    received: Iterable[ReceivedUpdate], windows: Sequence[int], *, typ: int = BATCH_UPDATE, limit: int = MAX_BLOCK
) -> list[BatchSavings]:
    """Estimate the savings for each T, by network, origin and separator.

    A simulated window takes all updates within T of its first update. A real window can end earlier, by log time. So
    `kiln.batches` can have more batches than estimated for the T in use.

    Args:
        received: Updates grouped by separator, and ordered by event time in each group. At equal times, new updates
            come before repeated ones.
        windows: Window lengths T, in µs.
        typ: Message type of a BATCH_UPDATE.
        limit: Maximum size of a block, in bytes.
    """
    savings: list[BatchSavings] = []
    for (network, origin, separator), updates in groupby(received, key=itemgetter(0, 1, 2)):
        candidates = [(BatchSavings(network, origin, separator, window), _Window(0, set())) for window in windows]
        for update in updates:
            for number, (saving, window) in enumerate(candidates):
                saving.updates += 1
                saving.update_bytes += update.size
                is_inside = update.event_time < window.closes_at and bool(window.leaves)
                if separator and update.new:
                    if not is_inside:
                        _add_window(saving, separator, window, typ, limit)
                        window = _Window(update.event_time + saving.window, set())
                        candidates[number] = saving, window
                    stream, tip = update.new
                    window.leaves.add(encode_stream_key(stream) + tip)
                elif not is_inside:
                    saving.others += 1
                    saving.other_bytes += update.size
        for saving, window in candidates:
            if separator:
                _add_window(saving, separator, window, typ, limit)
            savings.append(saving)
    return savings


def _add_window(saving: BatchSavings, separator: Separator, window: _Window, typ: int, limit: int) -> None:
    for block in write_leaves(window.leaves, limit):
        saving.batches += 1
        saving.batch_bytes += len(write_batch_update(separator, block.cid, typ))
        saving.block_bytes += len(block.data)


def read_received_updates(lake: Lake) -> Iterator[ReceivedUpdate]:
    """Read the UPDATEs of the tables `updates` and `messages`, in the order that `estimate_savings` needs.

    Raises:
        SqlError: The query fails.
        LakeError: A table cannot be read.
    """
    sql = """
        SELECT network, origin, separator_key, separator_value, epoch_us(heard_at), update_bytes, again, stream, tip
        FROM announcements
        ORDER BY network, origin, separator_key, separator_value, heard_at, again"""
    for row in query_lake(lake, sql).rows():
        match row:
            case (
                str(network),
                "LIVE" | "REPLAY" as origin,
                key,
                value,
                int(event_time),
                int(size),
                bool(again),
                str(stream),
                str(tip),
            ):
                separator = Separator(key, value) if isinstance(key, str) and isinstance(value, str) else None
                new = None if again else (stream, cid_bytes(tip))
                yield ReceivedUpdate(network, origin, separator, event_time, size, new)
            case _:
                raise TypeError(f"a row of the view announcements has unexpected types: {row!r}")


def parse_windows(text: str) -> tuple[int, ...]:
    """Parse a list of durations such as `1s,5s,30s` to µs, without duplicates.

    Raises:
        ValueError: A duration is malformed or zero; the message says what was expected.
    """
    windows = tuple(dict.fromkeys(micros(parse_duration(part.strip())) for part in text.split(",")))
    if 0 in windows:
        raise ValueError("durations greater than zero")
    return windows


# ---------------------------------------------------------------- output

_COUNTS = (
    "batches",
    "block_bytes",
    "messages_unbatched",
    "bytes_unbatched",
    "messages_batched",
    "bytes_batched",
    "messages_both",
    "bytes_both",
)
_PLACE = ("network", "origin")
_SEPARATOR = ("separator_key", "separator_value")

Record = dict[str, str | int | float | None]


def build_separator_records(savings: Iterable[BatchSavings]) -> list[Record]:
    """Build a record for each network, origin, separator and T, in descending order of updates."""
    return [
        {
            "network": saving.network,
            "origin": saving.origin,
            "separator_key": saving.separator.key if saving.separator else None,
            "separator_value": saving.separator.value if saving.separator else None,
            "window_seconds": saving.window / 1e6,
            **_sum_counts([saving]),
        }
        for saving in sorted(savings, key=lambda saving: -saving.updates)
    ]


def build_total_records(savings: Iterable[BatchSavings]) -> list[Record]:
    """Build a record for each network, origin and T, over all separators and updates without one."""
    groups: dict[tuple[str, str, int], list[BatchSavings]] = {}
    for saving in savings:
        groups.setdefault((saving.network, saving.origin, saving.window), []).append(saving)
    return [
        {
            "network": network,
            "origin": origin,
            "window_seconds": window / 1e6,
            "separators": sum(saving.separator is not None for saving in group),
            **_sum_counts(group),
        }
        for (network, origin, window), group in groups.items()
    ]


def _sum_counts(group: Sequence[BatchSavings]) -> dict[str, int]:
    values = (
        sum(saving.batches for saving in group),
        sum(saving.block_bytes for saving in group),
        sum(saving.updates for saving in group),
        sum(saving.update_bytes for saving in group),
        *(sum(saving.batched[which] for saving in group) for which in (0, 1)),
        *(sum(saving.both[which] for saving in group) for which in (0, 1)),
    )
    return dict(zip(_COUNTS, values, strict=True))


def write_estimate(savings: Sequence[BatchSavings], out: TextIO) -> None:
    """Write the savings as JSON: `{"totals": […], "separators": […]}`."""
    record = {"totals": build_total_records(savings), "separators": build_separator_records(savings)}
    out.write(json.dumps(record, indent=1) + "\n")


def print_estimate(savings: Sequence[BatchSavings], console: Console, limit: int) -> None:
    """Print the totals, then the first `limit` rows by separator."""
    print_table(
        _build_answer(build_total_records(savings), (*_PLACE, "window_seconds", "separators", *_COUNTS)), console, 1_000
    )
    console.print()
    print_table(
        _build_answer(build_separator_records(savings), (*_PLACE, *_SEPARATOR, "window_seconds", *_COUNTS)),
        console,
        limit,
    )


def _build_answer(records: Sequence[Record], columns: Sequence[str]) -> Answer:
    return Answer(columns, [tuple(record[name] for name in columns) for record in records])
