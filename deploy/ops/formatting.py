"""Formats numbers, times, ids and separators in few characters, for the screen and the status page."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.table import Table

from kiln.schemas.printable import printable

if TYPE_CHECKING:
    from kiln.deploy.ops.snapshot import Snapshot


def format_count(number: float | None) -> str:
    """Format a count in at most six characters: `999`, `12,345`, `1.2 M`; `-` for `None`."""
    if number is None:
        return "-"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e5, "k")):
        if number >= size:
            scaled = number / (1e3 if unit == "k" else size)
            return f"{scaled:.0f} {unit}" if scaled >= 100 else f"{scaled:.1f} {unit}"
    return f"{number:,.0f}"


def format_rate(number: float | None) -> str:
    """Format a rate like a count, but with one decimal below 10."""
    return "-" if number is None else f"{number:.1f}" if 0 < number < 10 else format_count(number)


def format_seconds(value: float | None) -> str:
    """Format a duration in seconds: `85 ms`, `1.25 s`, `3 min`; `-` for `None`."""
    if value is None:
        return "-"
    if abs(value) < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if abs(value) < 10 else f"{value:.0f} s" if abs(value) < 180 else f"{value / 60:.0f} min"


def format_clock(value: timedelta) -> str:
    """Format a duration as on a clock: `0:37`, `1:02:03`."""
    minutes, second = divmod(int(value.total_seconds()), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def shorten(text: str, width: int) -> str:
    """Shorten a text to `width` characters by replacing its middle with `…`. Control characters are escaped.

    Ids of one kind begin with the same characters, so most of the kept characters are from the end.
    """
    text = printable(text)
    if len(text) <= width:
        return text
    if width < 3:
        return text[:width]
    head = min(5, (width - 1) // 3)
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def format_separator(key: str, value: str, width: int) -> str:
    """Format a separator as `key/value` in `width` characters. The key is shortened only if it would leave fewer than
    eight characters for the value."""
    key = printable(key)
    if len(key) + 9 > width:
        key = shorten(key, max(3, width - 9))
    return f"{key}/{shorten(value, max(3, width - len(key) - 1))}"


def take_top(counts: Mapping[str, int], rows: int) -> list[tuple[str, int]]:
    """Return at most `rows` counts, the greatest first. If there are more counts, the last row is the sum of the
    rest."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    if len(ordered) <= rows:
        return ordered
    rest = ordered[rows - 1 :]
    return [*ordered[: rows - 1], (f"{len(rest)} others", sum(number for _, number in rest))]


def format_range(numbers: Collection[int]) -> str:
    """Format the least and the greatest number as `2-6`, or as `6` if they are equal; `0` without numbers."""
    if not numbers:
        return "0"
    least, greatest = min(numbers), max(numbers)
    return f"{least}" if least == greatest else f"{least}-{greatest}"


def compute_duplicate_share(messages: int, copies: int | None) -> float | None:
    """Compute the share of copies (from 0 to 1) that are not the first copy of their message."""
    return max(0.0, 1 - messages / copies) if copies and copies > 0 else None


def compute_copies_per_message(snapshot: Snapshot) -> float | None:
    """Compute the mean number of copies of a message."""
    messages = sum(snapshot.messages.values())
    return snapshot.copies / messages if snapshot.copies is not None and messages else None


def build_table(left: Sequence[str], right: Sequence[str]) -> Table:
    """Build a table without rows, with columns of text (`left`), then columns of numbers (`right`)."""
    table = Table(header_style="bold", show_edge=False, pad_edge=False)
    for name in (*left, *right):
        table.add_column(name, justify="left" if name in left else "right")
    return table
