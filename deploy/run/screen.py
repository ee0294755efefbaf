"""Progress of `kiln run`: a full screen on a terminal, and otherwise a line of text every five seconds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from kiln.conf.process.bridge_status import BridgeStatus, FetcherStatus, OverlayStatus, PublisherStatus, SpoolStatus
from kiln.conf.process.logs import identify_problem
from kiln.deploy.ops.formatting import (
    compute_copies_per_message,
    compute_duplicate_share,
    format_clock,
    format_count,
    format_range,
    format_rate,
    format_seconds,
    format_separator,
    shorten,
    take_top,
)
from kiln.deploy.ops.snapshot import CONTROL_KINDS, BridgeInRun, Snapshot, sum_by_reason
from kiln.pipelines.runtime.query_status import QueryPhase
from kiln.schemas.printable import printable

_PHASES: Mapping[QueryPhase, tuple[str, str]] = {
    "starting": ("◌", "yellow"),
    "running": ("●", "green"),
    "idle": ("○", "green"),
    "restarting": ("↻", "yellow"),
    "tripped": ("✕", "bold red"),
}
# Colours of the terminal's theme, which suit light themes too.
_LABEL = "dim"
_TITLE = "bold cyan"

# Status of a bridge that has not reported yet.
_EMPTY_STATUS = BridgeStatus(
    at=0,
    pid=0,
    peer="",
    network="",
    addresses=(),
    interests=(),
    topics=(),
    mesh={},
    peers=(),
    frames_in=0,
    frames_out=0,
    bytes_in=0,
    bytes_out=0,
    spool=SpoolStatus(put=0, acknowledged=0, memory_bytes=0, disk_bytes=0, full=False),
    publisher=PublisherStatus(""),
    counters={},
)


def format_line(snapshot: Snapshot) -> str:
    """Format a snapshot as one line of plain text, for logs."""
    lags = [f"{query.name} {format_count(query.lag)}" for query in snapshot.queries if query.lag]
    failing = [f"{query.name} {query.phase}" for query in snapshot.queries if query.phase in ("restarting", "tripped")]
    copies = compute_copies_per_message(snapshot)
    parts = [
        format_clock(snapshot.elapsed),
        f"frames {format_count(snapshot.frames)} ({format_rate(snapshot.frames_rate)}/s)",
        f"messages {format_count(sum(snapshot.messages.values()))}"
        + (f" ({copies:.1f} copies each)" if copies else ""),
        *_format_batches(snapshot),
        f"quarantine {format_count(sum(snapshot.quarantine.values()))}",
        f"lag: {', '.join(lags) or 'none'}",
        *_format_bridge(snapshot),
        *failing,
        *(f"error: {error}" for error in snapshot.errors[-1:]),
    ]
    return " | ".join(" ".join(part.split()) for part in parts)


def _format_batches(snapshot: Snapshot) -> list[str]:
    if not snapshot.is_ceramic:
        return []
    return [
        f"open windows {format_count(snapshot.open_separators)}",
        f"batches {format_count(snapshot.batches)}",
        f"batch delay p50 {format_seconds(snapshot.late_p50)} p99 {format_seconds(snapshot.late_p99)}",
    ]


def _format_bridge(snapshot: Snapshot) -> list[str]:
    bridge = snapshot.bridge
    if bridge is None:
        return []
    status = bridge.status or _EMPTY_STATUS
    received = f" ({_describe_receivers(bridge)})" if bridge.received else ""
    traffic = f"frames in {format_count(status.frames_in)} out {format_count(status.frames_out)}"
    duplicates = compute_duplicate_share(sum(snapshot.messages.values()), snapshot.copies)
    words = [
        f"peers {len(status.peers)} topics {len(status.topics)} mesh {format_range(status.mesh.values())} {traffic}",
        f"control entries {format_rate(sum(snapshot.control_rates.values()))}/s"
        + ("" if duplicates is None else f" duplicates {duplicates:.0%}"),
        *([f"published {format_count(status.publisher.published)}{received}"] if snapshot.is_ceramic else []),
    ]
    if status.bep50 is not None:
        words.append(f"BEP 50 announced {format_count(status.bep50.publisher.published)}")
    fetcher = _active_fetcher(status)
    if fetcher is not None:
        blocks = format_count(fetcher.counts.get("blocks", 0))
        words.append(f"blocks fetched {blocks}, records waiting for blocks {format_count(fetcher.waiting)}")
    return words


def _describe_receivers(bridge: BridgeInRun) -> str:
    """Describe for each node of the demo network how many of the announced batches it has fetched."""
    return "fetched by " + ", ".join(
        f"{printable(name)} {format_count(bridge.fetched.get(name, 0))} of {format_count(number)}"
        for name, number in bridge.received.items()
    )


def _active_fetcher(status: BridgeStatus) -> FetcherStatus | None:
    return status.fetcher if status.fetcher is not None and status.fetcher.is_on else None


# ---------------------------------------------------------------- full screen


@dataclass(frozen=True)
class SnapshotScreen:
    """A renderable of rich that draws a snapshot over the whole terminal, of at least 80x24 characters."""

    snapshot: Snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or console.height
        lines: list[list[Segment]] = []
        for part in _render_parts(self.snapshot, width, height):
            lines += console.render_lines(part, options.update(width=width, height=None), pad=True)
        # more lines than the terminal has would make it scroll
        for number, segments in enumerate(lines[:height]):
            if number:
                yield Segment.line()
            yield from segments


def _render_parts(snapshot: Snapshot, width: int, height: int) -> list[RenderableType]:
    roomy = height >= 28
    gap: list[RenderableType] = [Text("")] if roomy else []
    errors = _wrap_errors(snapshot.errors, width, 4 if roomy else 2)
    middle = 6 if roomy else 5
    queries = len(snapshot.queries)
    network = _render_bridge(snapshot, width, 5 if roomy else 2)
    fixed = 1 + 2 + 1 + middle + 2 + 2 + queries + 4 * len(gap) + (len(errors) + 1 if errors else 0)
    fixed += len(network) + len(gap) if network else 0
    batches = max(2, min(8, height - fixed))
    return [
        _render_header(snapshot, width),
        *gap,
        _render_figures(snapshot, width),
        *gap,
        _render_counts(snapshot, width, middle),
        *gap,
        *([*network, *gap] if network else []),
        *([*_render_batches(snapshot, width, batches), *gap] if snapshot.is_ceramic else []),
        *_render_queries(snapshot, width),
        *([_render_title("errors", width), *(Text(error, "red") for error in errors)] if errors else []),
    ]


def _render_title(text: str, width: int, note: str = "") -> Text:
    title = Text.assemble((text, _TITLE), (f"  {note}" if note else "", _LABEL))
    title.append(" " + "─" * max(0, width - title.cell_len - 1), _LABEL)
    title.truncate(width)
    return title


def _render_header(snapshot: Snapshot, width: int) -> Text:
    until = f" of {format_clock(snapshot.duration)}" if snapshot.duration is not None else ""
    network = printable(snapshot.network)
    left = Text.assemble((" Kiln ", "bold reverse cyan"), f" {network}", (f" · {snapshot.mode}", _LABEL))
    right = Text.assemble((format_clock(snapshot.elapsed), "bold"), until, ("  Ctrl-C stops ", _LABEL))
    left.truncate(max(0, width - right.cell_len - 1), overflow="ellipsis")
    left.append(" " * max(1, width - left.cell_len - right.cell_len))
    return left.append_text(right)


def _render_figures(snapshot: Snapshot, width: int) -> Table:
    copies = compute_copies_per_message(snapshot)
    late = f"{format_seconds(snapshot.late_p50)} / {format_seconds(snapshot.late_p99)}"

    figures = [
        ("frames/s", format_rate(snapshot.frames_rate)),
        ("frames", format_count(snapshot.frames)),
        ("messages", format_count(sum(snapshot.messages.values()))),
        ("copies each", "-" if copies is None else f"{copies:.1f}"),
    ]
    if snapshot.is_ceramic:
        figures += [
            ("open windows", format_count(snapshot.open_separators)),
            ("batches", format_count(snapshot.batches)),
            ("batch delay, p50 / p99" if width >= 92 else "delay p50/p99", late),
        ]
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for _ in figures:
        table.add_column(no_wrap=True)
    table.add_row(*(Text(name, _LABEL) for name, _ in figures))
    table.add_row(*(Text(value, "bold") for _, value in figures))
    return table


def _render_counts(snapshot: Snapshot, width: int, rows: int) -> Table:
    half = (width - 3) // 2
    table = Table.grid(padding=0)
    table.add_column(width=half)
    table.add_column(width=width - 2 * half)
    table.add_column(width=half)
    quarantined = sum(snapshot.quarantine.values())
    table.add_row(
        _render_title("messages by type", half),
        "",
        _render_title("quarantine by reason", half, format_count(quarantined) if quarantined else ""),
    )
    left = _render_bars(take_top(snapshot.messages, rows), half, "green", "none yet")
    right = _render_bars(take_top(sum_by_reason(snapshot.quarantine), rows), half, "yellow", "empty")
    for number in range(rows):
        table.add_row(left[number] if number < len(left) else "", "", right[number] if number < len(right) else "")
    return table


def _render_bars(items: Sequence[tuple[str, int]], width: int, colour: str, nothing: str) -> list[Text]:
    if not items:
        return [Text(nothing, _LABEL)]
    most = max(number for _, number in items) or 1
    names = min(max(len(printable(name)) for name, _ in items), max(10, width - 12))
    room = width - names - 9
    rows = []
    for name, number in items:
        row = Text(f"{shorten(name, names):<{names}} {format_count(number):>7} ")
        if room > 3:
            row.append(_draw_bar(number / most, room), colour)
        rows.append(row)
    return rows


def _draw_bar(share: float, width: int) -> str:
    whole, eighths = divmod(round(share * width * 8), 8)
    bar = "█" * whole + (" ▏▎▍▌▋▊▉"[eighths] if eighths else "")
    return bar or ("▏" if share > 0 else "")


def _build_grid(*columns: tuple[str, int, Literal["left", "right"]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _, size, justify in columns:
        table.add_column(width=size, no_wrap=True, justify=justify)
    table.add_row(*(Text(name, _LABEL) for name, _, _ in columns))
    return table


def _render_batches(snapshot: Snapshot, width: int, rows: int) -> list[RenderableType]:
    numbers = 7 + 5 + 8 + 2 * 4
    rest = width - numbers
    name = min(46, rest // 2)
    cid = min(59, rest - name)
    table = _build_grid(
        ("separator", name, "left"),
        ("streams", 7, "right"),
        ("tips", 5, "right"),
        ("delay", 8, "right"),
        ("CID", cid, "left"),
    )
    for batch in list(snapshot.newest_batches)[:rows]:
        table.add_row(
            Text(format_separator(batch.separator_key, batch.separator_value, name)),
            format_count(batch.stream_count),
            format_count(batch.tip_count),
            format_seconds(batch.late),
            Text(shorten(batch.batch_cid, cid), _LABEL),
        )
    shown = min(rows, len(snapshot.newest_batches))
    filler = [Text("" if shown or number else "none yet", _LABEL) for number in range(rows - shown)]
    return [_render_title("batches", width, "newest first"), table, *filler]


def _render_bridge(snapshot: Snapshot, width: int, rows: int) -> list[RenderableType]:
    """Render the network: title, figures, and `rows` lines for BEP 50 and IPFS (if they are on), gossip, and peers."""
    bridge = snapshot.bridge
    if bridge is None:
        return []
    status = bridge.status or _EMPTY_STATUS
    state = "not reading: the spool is full (see the runbook)" if status.spool.full else "listening"
    if bridge.status is None:
        state = "starting"
    figures = [
        ("in", format_count(status.frames_in)),
        ("out", format_count(status.frames_out)),
        ("topics", format_count(len(status.topics))),
        ("mesh", format_range(status.mesh.values())),
        ("spool", f"{status.spool.disk_bytes / 1e6:.1f} MB" if status.spool.disk_bytes else "empty"),
    ]
    note = ""
    if snapshot.is_ceramic:
        figures.append(("published", format_count(status.publisher.published)))
        note = _describe_receivers(bridge) if bridge.received else printable(status.publisher.state)
    address = printable(next(iter(status.addresses), ""))
    lines: list[RenderableType] = []
    if status.bep50 is not None:
        lines.append(_render_overlay(status.bep50, width))
    fetcher = _active_fetcher(status)
    if fetcher is not None:
        lines.append(_render_fetcher(fetcher, status.ipfs, width))
    lines.append(_render_gossip(snapshot, width))
    for peer in status.peers[:rows]:
        arrow = "→" if peer.outbound else "←"
        line = Text.assemble(
            f"{arrow} {shorten(peer.peer, 16)} ", (f"{printable(peer.protocol)} ", _LABEL), printable(peer.agent)
        )
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    lines += [Text("") for _ in range(rows - len(lines))]
    title = _render_title("network", width, f"{state} {address}".strip())
    return [title, _render_line(width, figures, note), *lines[:rows]]


def _render_line(width: int, figures: Sequence[tuple[str, str]], note: str = "") -> Text:
    line = Text()
    for number, (label, value) in enumerate(figures):
        line.append(f"{'  ' if number else ''}{label} ", _LABEL).append(value)
    if note:
        line.append(f"  {note}", _LABEL)
    line.truncate(width, overflow="ellipsis")
    return line


def _render_gossip(snapshot: Snapshot, width: int) -> Text:
    """Render the share of duplicate copies, and the rate of each kind of gossipsub control entry (IHAVE, …)."""
    duplicates = compute_duplicate_share(sum(snapshot.messages.values()), snapshot.copies)
    figures = [("duplicates", "-" if duplicates is None else f"{duplicates:.0%}")]
    for number, kind in enumerate(CONTROL_KINDS):
        rate = format_rate(snapshot.control_rates.get(kind, 0.0))
        figures.append((kind if number else f"per s: {kind}", rate))
    return _render_line(width, figures)


def _render_overlay(overlay: OverlayStatus, width: int) -> Text:
    figures = [
        ("BEP 50  topics", format_count(overlay.joined)),
        ("contacts", format_count(overlay.contacts)),
        ("items", format_count(overlay.items)),
        ("dropped", format_count(sum(overlay.dropped.values()))),
        ("announced", format_count(overlay.publisher.published)),
    ]
    return _render_line(width, figures, printable(overlay.publisher.state))


def _render_fetcher(fetcher: FetcherStatus, node: str, width: int) -> Text:
    counts = fetcher.counts
    figures = [
        ("IPFS  wanted", format_count(fetcher.waiting)),
        ("fetching", format_count(fetcher.fetching)),
        ("blocks", format_count(counts.get("blocks", 0))),
        ("updates released", format_count(counts.get("released", 0))),
        ("given up", format_count(counts.get("quarantined", 0) - counts.get("contradicts_genesis", 0))),
    ]
    if fetcher.claimed:
        figures.append(("claims to check", format_count(fetcher.claimed)))
    return _render_line(width, figures, printable(node))


def _render_queries(snapshot: Snapshot, width: int) -> list[RenderableType]:
    name = max([8, *(len(query.name) for query in snapshot.queries)])
    wide = width >= 96
    table = _build_grid(
        ("", 1, "left"),
        ("query", name, "left"),
        ("state", 10, "left"),
        ("lag", 8, "right"),
        ("took", 8, "right"),
        ("in/s", 8, "right"),
        ("done/s", 8, "right"),
        *((("micro-batch", 11, "right"),) if wide else ()),
        ("restarts", 8, "right"),
    )
    for query in snapshot.queries:
        mark, colour = _PHASES[query.phase]
        table.add_row(
            Text(mark, colour),
            query.name,
            Text(query.phase, colour),
            format_count(query.lag),
            format_seconds(query.took),
            format_rate(query.input_rate),
            format_rate(query.process_rate),
            *((format_count(query.batch),) if wide else ()),
            Text(str(query.restarts) if query.restarts else "-", Style(color="yellow") if query.restarts else Style()),
        )
    return [
        _render_title("queries", width, "lag: unread records; took: last micro-batch; in, done: rows"),
        table,
    ]


def _wrap_errors(errors: Sequence[str], width: int, rows: int) -> list[str]:
    """Wrap the newest errors to at most `rows` lines. The oldest of them is truncated if it does not fit."""
    lines: list[str] = []
    for error in reversed(errors):
        wrapped = textwrap.wrap(
            f"✕ {' '.join(error.split())}",
            width,
            subsequent_indent="  ",
            max_lines=rows - len(lines),
            placeholder=" …",
            break_on_hyphens=False,
        )
        lines = wrapped + lines
        if len(lines) >= rows:
            break
    return lines


LINE_EVERY = timedelta(seconds=5)


class LiveView:
    """A screen that fills the terminal, and is redrawn with each snapshot."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, snapshot: Snapshot) -> None:
        """Draw a snapshot."""
        self._live.update(SnapshotScreen(snapshot), refresh=True)

    def say(self, words: str) -> None:
        """Show a message such as "starting the broker", alone on the screen until the next snapshot."""
        self._live.update(Text.assemble((" Kiln ", "bold reverse cyan"), f" {printable(words)}"), refresh=True)


class LineView:
    """Prints a snapshot as a line at most every five seconds (by `Snapshot.elapsed`), and each new error at once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: timedelta | None = None
        self._printed_errors: set[str] = set()

    def show(self, snapshot: Snapshot) -> None:
        """Print the new errors of a snapshot, and the snapshot itself if five seconds have passed."""
        for error in snapshot.errors:
            if identify_problem(error) not in self._printed_errors:
                self.say(f"error: {' '.join(error.split())}")
        self._printed_errors = set(map(identify_problem, snapshot.errors))
        if self._last is None or snapshot.elapsed - self._last >= LINE_EVERY:
            self._last = snapshot.elapsed
            self.say(format_line(snapshot))

    def say(self, words: str) -> None:
        """Print a message as a line."""
        self._console.print(Text(printable(words)), soft_wrap=True)


View = LiveView | LineView
"""Shows the progress of `kiln run`."""


@contextmanager
def open_view(console: Console) -> Iterator[View]:
    """Open a screen on a terminal, else a printer of lines. At the end, the terminal shows its earlier content."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield LineView(console)
        return
    with Live(Text(""), console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live:
        yield LiveView(live)
