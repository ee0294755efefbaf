"""Summary at the end of `kiln run`: rows in the lake, rows of this run, and queries to start with."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from kiln.deploy.ops.formatting import format_clock, format_seconds
from kiln.deploy.ops.summary import RunSummary
from kiln.schemas.printable import printable

_QUERIES = (
    (
        "batches",
        "the newest batches",
        (
            "SELECT separator_key, separator_value, stream_count, tip_count, batch_cid FROM batches "
            "ORDER BY emitted_at DESC LIMIT 10"
        ),
    ),
    (
        "batch_tips",
        "tips of the newest batch",
        "SELECT stream, tip FROM batch_tips WHERE batch_cid = (SELECT arg_max(batch_cid, emitted_at) FROM batches)",
    ),
    (
        "messages",
        "messages by type, with their capture times",
        "SELECT network, type, count(*) AS messages, min(observed_at), max(observed_at) FROM messages GROUP BY ALL",
    ),
    (
        "copies",
        "how often each message was received",
        "SELECT copies, count(*) AS messages FROM message_copies GROUP BY copies",
    ),
    (
        "tips",
        "streams with the most tips",
        "SELECT network, stream, count(*) AS tips FROM tips GROUP BY ALL ORDER BY tips DESC LIMIT 10",
    ),
    (
        "quarantine",
        "quarantined records by reason",
        "SELECT stage, reason, count(*) AS rows, min(detail) AS example FROM quarantine GROUP BY ALL ORDER BY 3 DESC",
    ),
)
_NEEDS = {"batch_tips": {"batches"}}


def suggest_queries(tables: Sequence[str], command: str) -> list[tuple[str, str]]:
    """Suggest queries for existing tables.

    Args:
        tables: Names of the tables.
        command: `kiln sql` with options.

    Returns:
        Titles and command lines.
    """
    existing = set(tables)
    return [
        (title, f'{command} "{sql}"') for table, title, sql in _QUERIES if {table, *_NEEDS.get(table, ())} <= existing
    ]


def render_summary(summary: RunSummary, command: str = "kiln sql") -> RenderableType:
    """Render the summary for the end of the screen, or of a log."""
    first = (
        "no batch"
        if summary.first_batch is None
        else f"first batch after {format_seconds(summary.first_batch.total_seconds())}"
    )
    head = [f"ran {format_clock(summary.elapsed)}"]
    if summary.is_ceramic:
        head += [first, f"{summary.batches:,} batches"]
    if summary.late_p50 is not None:
        late = f"{format_seconds(summary.late_p50)} (p50), {format_seconds(summary.late_p99)} (p99)"
        head.append(f"batch delay {late}")
    parts: list[RenderableType] = [Rule("summary", style="dim"), Text(" · ".join(head)), ""]
    if summary.tables:
        table = _build_table(("table", False), ("rows", True), ("of this run", True))
        for total in summary.tables:
            added = "?" if total.added is None else f"{total.added:,}"
            table.add_row(total.name, "?" if total.rows is None else f"{total.rows:,}", added)
        parts += [table, ""]
    if summary.quarantine:
        table = _build_table(("in quarantine", False), ("reason", False), ("rows", True))
        for stage, reason, rows in summary.quarantine[:12]:
            table.add_row(printable(stage), printable(reason), f"{rows:,}")
        more = sum(rows for _, _, rows in summary.quarantine[12:])
        if more:
            table.add_row("…", f"{len(summary.quarantine) - 12} others", f"{more:,}")
        parts += [table, ""]
    parts += [Text(f"error: {' '.join(error.split())}", "red") for error in summary.errors]
    parts += [Text(f"warning: {' '.join(warning.split())}", "yellow") for warning in summary.warnings]
    if summary.unread:
        parts.append(Text(describe_unread(summary.unread), "yellow"))
    lines = suggest_queries([total.name for total in summary.tables if total.rows != 0], command)
    if lines:
        parts += [Text(f"the lake is {summary.lake.path}; query it with", "dim")]
        for title, line in lines:
            # on one line each, so that they can be pasted
            parts += [Text(f"# {title}", "dim"), Text(line, no_wrap=True, overflow="ignore")]
    return Group(*parts)


def describe_unread(unread: Mapping[str, int | None]) -> str:
    """Describe the records that a run left unread, which are not in the tables above."""
    rest = ", ".join(name if count is None else f"{name} {count:,} records" for name, count in sorted(unread.items()))
    return f"not read yet: {rest}. The next run reads them; run.drain sets how long a run waits for them"


def _build_table(*columns: tuple[str, bool]) -> Table:
    table = Table(header_style="bold", show_edge=False, pad_edge=False)
    for name, right in columns:
        table.add_column(name, justify="right" if right else "left")
    return table
