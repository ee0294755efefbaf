"""What batching would save with another T: the windows of the log, made again from the table `updates` (CIP-123)."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TextIO

import pyarrow as pa
from rich.console import Console

from conf.settings.durations import micros, parse_duration
from deploy.show.answer import print_table
from deploy.sql.ask import Answer, ask
from deploy.sql.views import UPDATE_BYTES, with_empty
from pipelines.lake.lake import Lake
from pipelines.logic.windows import ClosedWindow, PartitionWindows, WindowKey
from schemas.batch import MAX_BLOCK, write_blocks
from schemas.cid import cid_bytes
from schemas.pubsub import BATCH_UPDATE, write_batch_update
from schemas.records import Origin
from schemas.topics import Separator


class LoggedUpdate(NamedTuple):
    """An update in the log: its partition there, the log's clock in µs, and the length of its message."""

    partition: int
    updated_at: int
    network: str
    origin: Origin
    separator: Separator | None
    stream: str
    tip: bytes
    size: int


@dataclass
class Saving:
    """Messages and bytes of one separator, or of None, with the T `window` (µs). An update without a separator is in no
    batch, so it goes on in any case."""

    network: str
    origin: Origin
    separator: Separator | None
    window: int
    updates: int = 0
    update_bytes: int = 0
    batches: int = 0
    batch_bytes: int = 0
    """of the BATCH_UPDATEs"""
    block_bytes: int = 0

    @property
    def if_stopped(self) -> tuple[int, int]:
        """Messages and bytes where no UPDATE is sent that is in a batch."""
        return (self.batches, self.batch_bytes) if self.separator else (self.updates, self.update_bytes)

    @property
    def if_kept(self) -> tuple[int, int]:
        """Messages and bytes where UPDATEs go on beside the batches."""
        return self.updates + self.batches, self.update_bytes + self.batch_bytes


def estimate(
    log: Iterable[LoggedUpdate], windows: Sequence[int], *, typ: int = BATCH_UPDATE, limit: int = MAX_BLOCK
) -> list[Saving]:
    """What each T of `windows` (µs) makes of a log, by network, origin and separator, in the order of first updates.

    `log`: partition by partition, each in its order. The windows are those of the query `batch`, had it read the log
    from the start with that T; the last ones are closed as if time had passed.
    """
    found: dict[tuple[int, str, Origin, Separator | None], Saving] = {}

    def saving(window: int, network: str, origin: Origin, separator: Separator | None) -> Saving:
        key = (window, network, origin, separator)
        if key not in found:
            found[key] = Saving(network, origin, separator, window)
        return found[key]

    def count(window: int, closed: Iterable[ClosedWindow]) -> None:
        for key, tips in ((each.key, each.window.tips) for each in closed):
            separator = Separator(key.separator_key, key.separator_value)
            of = saving(window, key.network, key.origin, separator)
            for block in write_blocks(tips, limit):
                of.batches += 1
                of.batch_bytes += len(write_batch_update(separator, block.cid, typ))
                of.block_bytes += len(block.data)

    for _, partition in groupby(log, key=lambda update: update.partition):
        open_ = {window: PartitionWindows(window) for window in windows}
        for update in partition:
            for window, state in open_.items():
                of = saving(window, update.network, update.origin, update.separator)
                of.updates += 1
                of.update_bytes += update.size
                count(window, state.advance(update.updated_at))
                if update.separator:
                    state.add(WindowKey(update.network, update.origin, *update.separator), update.stream, update.tip, update.updated_at)
        for window, state in open_.items():
            count(window, state.advance(state.clock + window))
    return list(found.values())


def read_log(lake: Lake) -> Iterator[LoggedUpdate]:
    """The table `updates` as the log it was written from. SqlError, LakeError: it cannot be read."""
    sql = f"""
        SELECT u.log_partition, epoch_us(u.updated_at), u.network, u.origin, u.separator_key, u.separator_value,
               u.stream, u.tip, {UPDATE_BYTES}
        FROM updates AS u LEFT JOIN messages AS m USING (network, message)
        ORDER BY u.log_partition, u.log_offset"""
    for row in ask(lake, with_empty(sql, ("updates", "messages"), lake.tables())).rows():
        match row:
            case (
                int(partition),
                int(updated_at),
                str(network),
                "LIVE" | "REPLAY" as origin,
                key,
                value,
                str(stream),
                str(tip),
                int(size),
            ):
                separator = Separator(key, value) if isinstance(key, str) and isinstance(value, str) else None
                yield LoggedUpdate(partition, updated_at, network, origin, separator, stream, cid_bytes(tip), size)
            case _:
                raise TypeError(f"a row of updates has values of other types than its columns: {row!r}")


def parse_windows(text: str) -> tuple[int, ...]:
    """`1s,5s,30s` as µs, each once. ValueError says what was expected."""
    windows = tuple(dict.fromkeys(micros(parse_duration(part.strip())) for part in text.split(",")))
    if 0 in windows:
        raise ValueError("more than nothing")
    return windows


# ---------------------------------------------------------------- output

_COUNTS = (
    "batches",
    "block_bytes",
    "messages_before",
    "bytes_before",
    "messages_if_stopped",
    "bytes_if_stopped",
    "messages_if_kept",
    "bytes_if_kept",
)
_PLACE = ("network", "origin")
_SEPARATOR = ("separator_key", "separator_value")

Record = dict[str, str | int | float | None]


def separator_records(savings: Iterable[Saving]) -> list[Record]:
    """One for each network, origin, separator and T, those with the most updates first."""
    return [
        {
            "network": saving.network,
            "origin": saving.origin,
            "separator_key": saving.separator.key if saving.separator else None,
            "separator_value": saving.separator.value if saving.separator else None,
            "window_seconds": saving.window / 1e6,
            **_counts([saving]),
        }
        for saving in sorted(savings, key=lambda saving: -saving.updates)
    ]


def total_records(savings: Iterable[Saving]) -> list[Record]:
    """One for each network, origin and T: all its separators, and the updates without one."""
    together: dict[tuple[str, str, int], list[Saving]] = {}
    for saving in savings:
        together.setdefault((saving.network, saving.origin, saving.window), []).append(saving)
    return [
        {
            "network": network,
            "origin": origin,
            "window_seconds": window / 1e6,
            "separators": sum(saving.separator is not None for saving in group),
            **_counts(group),
        }
        for (network, origin, window), group in together.items()
    ]


def _counts(group: Sequence[Saving]) -> dict[str, int]:
    values = (
        sum(saving.batches for saving in group),
        sum(saving.block_bytes for saving in group),
        sum(saving.updates for saving in group),
        sum(saving.update_bytes for saving in group),
        *(sum(saving.if_stopped[which] for saving in group) for which in (0, 1)),
        *(sum(saving.if_kept[which] for saving in group) for which in (0, 1)),
    )
    return dict(zip(_COUNTS, values, strict=True))


def write_estimate(savings: Sequence[Saving], out: TextIO) -> None:
    """As JSON: `{"totals": […], "separators": […]}`."""
    found = {"totals": total_records(savings), "separators": separator_records(savings)}
    out.write(json.dumps(found, ensure_ascii=False, indent=1) + "\n")


def print_estimate(savings: Sequence[Saving], console: Console, limit: int) -> None:
    """The totals, then the first `limit` rows by separator."""
    print_table(_answer(total_records(savings), (*_PLACE, "window_seconds", "separators", *_COUNTS)), console, 1_000)
    console.print()
    print_table(_answer(separator_records(savings), (*_PLACE, *_SEPARATOR, "window_seconds", *_COUNTS)), console, limit)


def _answer(records: Sequence[Record], columns: Sequence[str]) -> Answer:
    table = pa.table({name: [record[name] for record in records] for name in columns})
    return Answer(columns, table.to_batches())
