"""The status page: the values of the screen as HTML that reloads itself, without scripts or external resources."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from kiln.deploy.ops.formatting import (
    compute_copies_per_message,
    compute_duplicate_share,
    format_clock,
    format_count,
    format_range,
    format_rate,
    format_seconds,
    take_top,
)
from kiln.deploy.ops.monitor.facts import MonitorInputs, why_not_ready
from kiln.deploy.ops.monitor.history import Plot
from kiln.deploy.ops.snapshot import CONTROL_KINDS, QUALITY_RESULTS, QualityInRun, sum_by_reason
from kiln.schemas.printable import printable

_REASONS: Final = 8
_PEERS: Final = 12
_HEAD: Final = """<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>Kiln</title>"""

_TEMPLATES: Final = Environment(
    loader=PackageLoader("kiln.deploy.ops.monitor", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)


def render_page(facts: MonitorInputs | None, plots: Sequence[Plot]) -> str:
    """Render the page, with `None` before the first snapshot."""
    if facts is None:
        return f"{_HEAD}<p>Kiln is starting."
    snapshot = facts.snapshot
    bridge = snapshot.bridge.status if snapshot.bridge is not None else None
    return _TEMPLATES.get_template("page.html").render(
        facts=facts,
        snapshot=snapshot,
        bridge=bridge,
        received=snapshot.bridge.received if snapshot.bridge is not None else {},
        fetched=snapshot.bridge.fetched if snapshot.bridge is not None else {},
        peers=sorted(bridge.peers, key=lambda peer: -peer.frames_in)[:_PEERS] if bridge is not None else (),
        problems=[*dict.fromkeys([*snapshot.errors, *why_not_ready(facts)])],
        elapsed=format_clock(snapshot.elapsed),
        copies=compute_copies_per_message(snapshot),
        duplicates=compute_duplicate_share(sum(snapshot.messages.values()), snapshot.copies),
        control_kinds=[*CONTROL_KINDS, *sorted(snapshot.control_entries.keys() - {*CONTROL_KINDS})],
        quarantine=take_top(sum_by_reason(snapshot.quarantine), _REASONS),
        plots=[plot for plot in plots if snapshot.is_ceramic or not plot.title.startswith("Batch")],
        quality=_group_by_table(snapshot.quality),
        checked=format_clock(timedelta(seconds=facts.read_at - snapshot.quality.at))
        if snapshot.quality is not None
        else "",
        ages={
            table.name: format_clock(timedelta(seconds=facts.read_at - table.committed_at.timestamp()))
            for table in facts.tables
            if table.committed_at is not None
        },
    )


def _group_by_table(check: QualityInRun | None) -> list[tuple[str, list[int]]]:
    """Group the number of passed and failed expectations by table."""
    counts = check.counts if check is not None else {}
    tables = dict.fromkeys(table for table, _ in counts)
    return [(table, [counts.get((table, result), 0) for result in QUALITY_RESULTS]) for table in tables]


def format_size(number: float) -> str:
    """Format a number of bytes in few characters."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


_TEMPLATES.filters |= {
    "count": format_count,
    "range": format_range,
    "rate": format_rate,
    "seconds": format_seconds,
    "printable": printable,
    "size": format_size,
}
