"""For table maintenance: the row order of compacted files, and the column for retention (decision 24)."""

from __future__ import annotations

from typing import Final, NamedTuple


class Layout(NamedTuple):
    """Row order and retention of one table."""

    order: tuple[str, ...] = ()
    """columns by which maintenance sorts the rows of a file; empty to keep the order of arrival"""
    age: str | None = None
    """timestamp column from which a row's age counts; `None` to use the commit time of the row's file"""
    expires: bool = True
    """true if `lake.retention` applies; Kiln needs all rows of the other tables"""


LAYOUTS: Final[dict[str, Layout]] = {
    "frames": Layout(age="observed_at"),
    "copies": Layout(age="observed_at"),
    "subscriptions": Layout(("topic", "remote_peer", "observed_at"), "observed_at"),
    "controls": Layout(("kind", "topic", "observed_at"), "observed_at"),
    "messages": Layout(("type", "stream", "observed_at"), "observed_at"),
    "updates": Layout(("separator_key", "separator_value", "stream", "observed_at"), "observed_at"),
    "batches": Layout(("separator_key", "separator_value", "opened_at"), "closed_at"),
    "batch_tips": Layout(("batch_cid", "stream")),
    "tips": Layout(("stream", "observed_at"), "observed_at"),
    "streams": Layout(("stream",), expires=False),
    "publications": Layout(age="published_at"),
    "bundles": Layout(expires=False),
    "quarantine": Layout(age="observed_at"),
    "quarantine_dropped": Layout(age="dropped_at"),
    "quality_results": Layout(age="run_at"),
    "backfill_runs": Layout(expires=False),
}

EXPIRING: Final = tuple(name for name, layout in LAYOUTS.items() if layout.expires)
"""Names of the tables to which `lake.retention` applies."""
