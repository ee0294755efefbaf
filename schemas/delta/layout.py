"""How the rows of each table lie in its compacted files, and by what the age of a row counts, as plain data
(docs/design/24-table-care.md)."""

from __future__ import annotations

from typing import Final, NamedTuple


class Layout(NamedTuple):
    """`order`: the columns by which rows are sorted within a file; none: rows stay as they came. `age`: the timestamp
    by which a row is old; None: the table has none, and the file's time in the log counts. `expires`: whether rows may
    go by age; what Kiln must know to work stays."""

    order: tuple[str, ...] = ()
    age: str | None = None
    expires: bool = True


LAYOUTS: Final[dict[str, Layout]] = {
    "frames": Layout(age="observed_at"),
    "copies": Layout(age="observed_at"),
    "messages": Layout(("type", "stream", "observed_at"), "observed_at"),
    "updates": Layout(("separator_key", "separator_value", "stream", "observed_at"), "observed_at"),
    "batches": Layout(("separator_key", "separator_value", "opened_at"), "closed_at"),
    "batch_tips": Layout(("cid", "stream")),
    "tips": Layout(("stream", "observed_at"), "observed_at"),
    "streams": Layout(("stream",), expires=False),
    "publications": Layout(age="published_at"),
    "bundles": Layout(expires=False),
    "quarantine": Layout(age="observed_at"),
    "dropped": Layout(age="dropped_at"),
    "quality_results": Layout(age="run_at"),
    "runs": Layout(expires=False),
}
"""By table. A table that is not here is laid out as its rows came, and keeps them."""

EXPIRING: Final = tuple(name for name, layout in LAYOUTS.items() if layout.expires)
"""The tables whose rows may go by age."""
