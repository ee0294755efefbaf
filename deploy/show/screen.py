"""What `kiln run` shows while it runs: `render` and `line` turn a `Snapshot` into a picture or a line, nothing else.

`open_view` picks the live screen where there is a terminal, and a line every five seconds where there is none.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Literal, Protocol, Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from deploy.observe.snapshot import BridgeLine, FetchLine, OverlayLine, QueryPhase, Snapshot

LINE_EVERY = timedelta(seconds=5)
_PHASES: Mapping[QueryPhase, tuple[str, str]] = {
    "starting": ("◌", "yellow"),
    "running": ("●", "green"),
    "idle": ("○", "green"),
    "restarting": ("↻", "yellow"),
    "failed": ("✕", "bold red"),
    "stopped": ("■", "dim"),
}
# Colours of the terminal's own theme, so that they fit a light one too.
_LABEL = "dim"
_TITLE = "bold cyan"


# ---------------------------------------------------------------- words and numbers


def count(number: float | None) -> str:
    """A number in at most six characters: `999`, `12,345`, `1.2 M`."""
    if number is None:
        return "-"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e5, "k")):
        if number >= size:
            scaled = number / (1e3 if unit == "k" else size)
            return f"{scaled:.0f} {unit}" if scaled >= 100 else f"{scaled:.1f} {unit}"
    return f"{number:,.0f}"


def rate(number: float | None) -> str:
    """A rate: with a decimal when it is small."""
    return "-" if number is None else f"{number:.1f}" if 0 < number < 10 else count(number)


def seconds(value: float | None) -> str:
    """A length of time: `85 ms`, `1.25 s`, `3 min`."""
    if value is None:
        return "-"
    if abs(value) < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if abs(value) < 10 else f"{value:.0f} s" if abs(value) < 180 else f"{value / 60:.0f} min"


def clock(value: timedelta) -> str:
    """`0:37`, `1:02:03`."""
    minutes, second = divmod(int(value.total_seconds()), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def short(text: str, width: int) -> str:
    """The beginning and the end: ids of one kind all begin alike, so most of the width goes to the end."""
    if len(text) <= width:
        return text
    if width < 3:
        return text[:width]
    head = min(5, (width - 1) // 3)
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def separator(key: str, value: str, width: int) -> str:
    """`key/value`, the key whole if it leaves the value eight characters."""
    if len(key) + 9 > width:
        key = short(key, max(3, width - 9))
    return f"{key}/{short(value, max(3, width - len(key) - 1))}"


def top(counts: Mapping[str, int], rows: int) -> list[tuple[str, int]]:
    """The greatest counts, with the rest summed up in a last row when they do not all fit."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    if len(ordered) <= rows:
        return ordered
    rest = ordered[rows - 1 :]
    return [*ordered[: rows - 1], (f"{len(rest)} others", sum(number for _, number in rest))]


def copies_per_message(snapshot: Snapshot) -> float | None:
    """How often a message was received, on average."""
    messages = sum(snapshot.messages.values())
    return snapshot.copies / messages if snapshot.copies is not None and messages else None


def line(snapshot: Snapshot) -> str:
    """The snapshot in one line of plain text."""
    behind = [f"{query.name} {count(query.lag)}" for query in snapshot.queries if query.lag]
    troubled = [f"{query.name} {query.phase}" for query in snapshot.queries if query.phase in ("restarting", "failed")]
    copies = copies_per_message(snapshot)
    parts = [
        clock(snapshot.elapsed),
        f"frames {count(snapshot.frames)} ({rate(snapshot.frames_rate)}/s)",
        f"messages {count(sum(snapshot.messages.values()))}" + (f" x{copies:.1f}" if copies else ""),
        f"open {count(snapshot.open_separators)}",
        f"batches {count(snapshot.batches)}",
        f"late p50 {seconds(snapshot.late_p50)} p99 {seconds(snapshot.late_p99)}",
        f"quarantine {count(sum(snapshot.quarantine.values()))}",
        f"behind: {', '.join(behind) or 'none'}",
        *_bridge_words(snapshot.bridge),
        *troubled,
        *(f"error: {error}" for error in snapshot.errors[-1:]),
    ]
    return " | ".join(" ".join(part.split()) for part in parts)


def _bridge_words(bridge: BridgeLine | None) -> list[str]:
    if bridge is None:
        return []
    heard = (
        f" (heard by {', '.join(f'{name} {number}' for name, number in bridge.heard.items())})" if bridge.heard else ""
    )
    return [
        f"peers {len(bridge.peers)} topics {bridge.topics} in {count(bridge.frames_in)} out {count(bridge.frames_out)}",
        f"published {count(bridge.published)}{heard}",
        *([f"BEP 50 announced {count(bridge.overlay.published)}"] if bridge.overlay else []),
        *([f"wanted {count(bridge.fetch.waiting)} blocks {count(bridge.fetch.blocks)}"] if bridge.fetch else []),
    ]


# ---------------------------------------------------------------- the picture


def render(snapshot: Snapshot) -> RenderableType:
    """The snapshot as a picture that fills the terminal it is shown on; made for 80x24 and larger."""
    return _Picture(snapshot)


@dataclass(frozen=True)
class _Picture:
    snapshot: Snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or console.height
        lines: list[list[Segment]] = []
        for part in _parts(self.snapshot, width, height):
            lines += console.render_lines(part, options.update(width=width, height=None), pad=True)
        # a picture higher than the terminal would scroll it away under itself
        for number, segments in enumerate(lines[:height]):
            if number:
                yield Segment.line()
            yield from segments


def _parts(snapshot: Snapshot, width: int, height: int) -> list[RenderableType]:
    roomy = height >= 28
    gap: list[RenderableType] = [Text("")] if roomy else []
    errors = _error_lines(snapshot.errors, width, 4 if roomy else 2)
    middle = 6 if roomy else 5
    queries = len(snapshot.queries)
    network = _bridge(snapshot.bridge, width, 4 if roomy else 2)
    fixed = 1 + 2 + 1 + middle + 2 + 2 + queries + 4 * len(gap) + (len(errors) + 1 if errors else 0)
    fixed += len(network) + len(gap) if network else 0
    batches = max(2, min(8, height - fixed))
    return [
        _header(snapshot, width),
        *gap,
        _figures(snapshot, width),
        *gap,
        _counts(snapshot, width, middle),
        *gap,
        *([*network, *gap] if network else []),
        *_batches(snapshot, width, batches),
        *gap,
        *_queries(snapshot, width),
        *_errors(errors, width),
    ]


def _title(text: str, width: int, note: str = "") -> Text:
    title = Text.assemble((text, _TITLE), (f"  {note}" if note else "", _LABEL))
    title.append(" " + "─" * max(0, width - title.cell_len - 1), _LABEL)
    title.truncate(width)
    return title


def _header(snapshot: Snapshot, width: int) -> Text:
    until = f" of {clock(snapshot.duration)}" if snapshot.duration is not None else ""
    left = Text.assemble((" Kiln ", "bold reverse cyan"), f" {snapshot.network}", (f" · {snapshot.mode}", _LABEL))
    right = Text.assemble((clock(snapshot.elapsed), "bold"), until, ("  Ctrl-C stops ", _LABEL))
    left.truncate(max(0, width - right.cell_len - 1), overflow="ellipsis")
    left.append(" " * max(1, width - left.cell_len - right.cell_len))
    return left.append_text(right)


def _figures(snapshot: Snapshot, width: int) -> Table:
    copies = copies_per_message(snapshot)
    late = f"{seconds(snapshot.late_p50)} / {seconds(snapshot.late_p99)}"
    window = seconds(snapshot.window.total_seconds()).replace(".00", "")
    figures = (
        ("frames/s", rate(snapshot.frames_rate)),
        ("frames", count(snapshot.frames)),
        ("messages", count(sum(snapshot.messages.values()))),
        ("copies each", "-" if copies is None else f"{copies:.1f}"),
        ("open windows", count(snapshot.open_separators)),
        ("batches", count(snapshot.batches)),
        (f"later than {window} after heard, p50/p99", late),
    )
    if width < 104:
        figures = (*figures[:-1], ("late p50/p99", late))
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for _ in figures:
        table.add_column(no_wrap=True)
    table.add_row(*(Text(name, _LABEL) for name, _ in figures))
    table.add_row(*(Text(value, "bold") for _, value in figures))
    return table


def _counts(snapshot: Snapshot, width: int, rows: int) -> Table:
    half = (width - 3) // 2
    table = Table.grid(padding=0)
    table.add_column(width=half)
    table.add_column(width=width - 2 * half)
    table.add_column(width=half)
    refused = sum(snapshot.quarantine.values())
    table.add_row(
        _title("messages by type", half), "", _title("quarantine by reason", half, count(refused) if refused else "")
    )
    left = _bars(top(snapshot.messages, rows), half, "green", "none yet")
    right = _bars(top(snapshot.quarantine, rows), half, "yellow", "empty")
    for number in range(rows):
        table.add_row(left[number] if number < len(left) else "", "", right[number] if number < len(right) else "")
    return table


def _bars(items: Sequence[tuple[str, int]], width: int, colour: str, nothing: str) -> list[Text]:
    if not items:
        return [Text(nothing, _LABEL)]
    most = max(number for _, number in items) or 1
    names = min(max(len(name) for name, _ in items), max(10, width - 12))
    room = width - names - 9
    rows = []
    for name, number in items:
        row = Text(f"{short(name, names):<{names}} {count(number):>7} ")
        if room > 3:
            row.append(_bar(number / most, room), colour)
        rows.append(row)
    return rows


def _bar(share: float, width: int) -> str:
    whole, eighths = divmod(round(share * width * 8), 8)
    bar = "█" * whole + (" ▏▎▍▌▋▊▉"[eighths] if eighths else "")
    return bar or ("▏" if share > 0 else "")


def _grid(*columns: tuple[str, int, Literal["left", "right"]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _, size, justify in columns:
        table.add_column(width=size, no_wrap=True, justify=justify)
    table.add_row(*(Text(name, _LABEL) for name, _, _ in columns))
    return table


def _batches(snapshot: Snapshot, width: int, rows: int) -> list[RenderableType]:
    numbers = 7 + 5 + 8 + 2 * 4
    rest = width - numbers
    name = min(46, rest // 2)
    cid = min(59, rest - name)
    table = _grid(
        ("separator", name, "left"),
        ("streams", 7, "right"),
        ("tips", 5, "right"),
        ("late", 8, "right"),
        ("CID", cid, "left"),
    )
    for batch in list(snapshot.newest_batches)[:rows]:
        table.add_row(
            Text(separator(batch.separator_key, batch.separator_value, name)),
            count(batch.streams),
            count(batch.tips),
            seconds(batch.late),
            Text(short(batch.cid, cid), _LABEL),
        )
    shown = min(rows, len(snapshot.newest_batches))
    filler = [Text("" if shown or number else "none yet", _LABEL) for number in range(rows - shown)]
    return [_title("batches", width, "newest first"), table, *filler]


def _bridge(bridge: BridgeLine | None, width: int, peers: int) -> list[RenderableType]:
    """The title, a line of figures, one of BEP 50 and one of IPFS where they run, and a line for each peer."""
    if bridge is None:
        return []
    heard = ", ".join(f"{name} {count(number)}" for name, number in bridge.heard.items())
    mesh = max((number for _, number in bridge.mesh), default=0)
    figures = Text.assemble(
        ("in ", _LABEL),
        count(bridge.frames_in),
        ("  out ", _LABEL),
        count(bridge.frames_out),
        ("  topics ", _LABEL),
        count(bridge.topics),
        ("  mesh ", _LABEL),
        f"{mesh}",
        ("  spool ", _LABEL),
        f"{bridge.spooled / 1e6:.1f} MB" if bridge.spooled else "empty",
        ("  published ", _LABEL),
        count(bridge.published),
        (f"  heard by {heard}" if heard else f"  {bridge.publishing}", _LABEL),
    )
    figures.truncate(width, overflow="ellipsis")
    lines: list[RenderableType] = [_title("network", width, f"{bridge.state} {bridge.address}".strip()), figures]
    if bridge.overlay is not None:
        lines.append(_overlay(bridge.overlay, width))
        peers -= 1
    if bridge.fetch is not None:
        lines.append(_fetch(bridge.fetch, width))
        peers -= 1
    for peer in list(bridge.peers)[:peers]:
        arrow = "→" if peer.outbound else "←"
        line = Text.assemble(f"{arrow} {short(peer.peer, 16)} ", (f"{peer.protocol} ", _LABEL), peer.agent)
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return [*lines, *(Text("") for _ in range(peers - len(bridge.peers)))]


def _overlay(overlay: OverlayLine, width: int) -> Text:
    figures = Text.assemble(
        ("BEP 50  topics ", _LABEL),
        count(overlay.topics),
        ("  contacts ", _LABEL),
        count(overlay.contacts),
        ("  items ", _LABEL),
        count(overlay.items),
        ("  dropped ", _LABEL),
        count(overlay.dropped),
        ("  announced ", _LABEL),
        count(overlay.published),
        (f"  {overlay.publishing}", _LABEL),
    )
    figures.truncate(width, overflow="ellipsis")
    return figures


def _fetch(fetch: FetchLine, width: int) -> Text:
    figures = Text.assemble(
        ("IPFS  wanted ", _LABEL),
        count(fetch.waiting),
        ("  fetching ", _LABEL),
        count(fetch.fetching),
        ("  blocks ", _LABEL),
        count(fetch.blocks),
        ("  updates let go ", _LABEL),
        count(fetch.released),
        ("  given up ", _LABEL),
        count(fetch.given_up),
        (f"  {fetch.node}", _LABEL),
    )
    figures.truncate(width, overflow="ellipsis")
    return figures


def _queries(snapshot: Snapshot, width: int) -> list[RenderableType]:
    name = max([8, *(len(query.name) for query in snapshot.queries)])
    wide = width >= 96
    table = _grid(
        ("", 1, "left"),
        ("query", name, "left"),
        ("state", 10, "left"),
        ("behind", 8, "right"),
        ("took", 8, "right"),
        ("in/s", 8, "right"),
        ("done/s", 8, "right"),
        *((("batch", 8, "right"),) if wide else ()),
        ("restarts", 8, "right"),
    )
    for query in snapshot.queries:
        mark, colour = _PHASES[query.phase]
        table.add_row(
            Text(mark, colour),
            query.name,
            Text(query.phase, colour),
            count(query.lag),
            seconds(query.took),
            rate(query.input_rate),
            rate(query.process_rate),
            *((count(query.batch),) if wide else ()),
            Text(str(query.restarts) if query.restarts else "-", Style(color="yellow") if query.restarts else Style()),
        )
    return [_title("queries", width, "records behind, time of the last micro-batch, rows in and done"), table]


def _error_lines(errors: Sequence[str], width: int, rows: int) -> list[str]:
    """The newest errors, wrapped; as many as fit, the newest one cut where even it does not."""
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


def _errors(lines: Sequence[str], width: int) -> list[RenderableType]:
    return [_title("errors", width), *(Text(text, "red") for text in lines)] if lines else []


# ---------------------------------------------------------------- views


class View(Protocol):
    """Where `kiln run` shows how it goes. Used as a context manager, so that a terminal is left as it was found."""

    def show(self, snapshot: Snapshot) -> None:
        """Show this now."""

    def say(self, words: str) -> None:
        """Show something that has no snapshot: "starting the broker …"."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LiveView:
    """A picture that fills the terminal and is drawn anew in place; gone when left."""

    def __init__(self, console: Console) -> None:
        self._live = Live(Text(""), console=console, screen=True, auto_refresh=False, redirect_stderr=False)

    def show(self, snapshot: Snapshot) -> None:
        """Draw the snapshot."""
        self._live.update(render(snapshot), refresh=True)

    def say(self, words: str) -> None:
        """Show the words alone on the screen."""
        self._live.update(Text.assemble((" Kiln ", "bold reverse cyan"), f" {words}"), refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


class LineView:
    """A plain line every five seconds (by the snapshots' own clock), and one for each error when it comes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: timedelta | None = None
        self._told: tuple[str, ...] = ()

    def show(self, snapshot: Snapshot) -> None:
        """Print the snapshot's line when one is due."""
        for error in snapshot.errors:
            if error not in self._told:
                self.say(f"error: {' '.join(error.split())}")
        self._told = tuple(snapshot.errors)
        if self._last is None or snapshot.elapsed - self._last >= LINE_EVERY:
            self._last = snapshot.elapsed
            self.say(line(snapshot))

    def say(self, words: str) -> None:
        """Print the words as a line."""
        self._console.print(Text(words), soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def open_view(console: Console) -> LiveView | LineView:
    """The view that fits the console."""
    return LiveView(console) if console.is_terminal and not console.is_dumb_terminal else LineView(console)
