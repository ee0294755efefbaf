"""Summary that `kiln run` prints at its end: rows in the lake, rows added by this run, and example queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from kiln.deploy.ops.formatting import build_table, format_clock, format_seconds
from kiln.deploy.ops.status import read_lake_status
from kiln.deploy.query.ask import query_lake
from kiln.deploy.run.application import RunOutcome
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.printable import printable

_REASONS = 12
"""Maximum number of quarantine reasons to print."""

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
    """Suggest example queries.

    Args:
        tables: Names of the existing tables.
        command: `kiln sql` with options.

    Returns:
        Title and command line of each query whose tables exist.
    """
    existing = set(tables)
    return [
        (title, f'{command} "{sql}"') for table, title, sql in _QUERIES if {table, *_NEEDS.get(table, ())} <= existing
    ]


def read_row_counts(lake: Lake) -> dict[str, int]:
    """Read the number of rows of each table from its Delta log."""
    return {table.name: table.rows for table in read_lake_status(lake) if table.rows is not None}


def render_summary(
    outcome: RunOutcome, lake: Lake, before: Mapping[str, int], command: str = "kiln sql", *, is_ceramic: bool = True
) -> RenderableType:
    """Render the summary of a run.

    Args:
        outcome: Outcome of the run.
        before: Result of `read_row_counts` at the start of the run.
        command: `kiln sql` with options.
        is_ceramic: False on other networks, which have no batches.

    Raises:
        SqlError: A query fails.
        LakeError: A table cannot be read.
    """
    head = [f"ran {format_clock(timedelta(seconds=outcome.seconds))}"]
    if is_ceramic:
        first = outcome.first_batch
        head.append("no batch" if first is None else f"first batch after {format_seconds(first)}")
        head.append(f"{outcome.batches:,} batches")
    if outcome.late_p50 is not None:
        late = f"{format_seconds(outcome.late_p50)} (p50), {format_seconds(outcome.late_p99)} (p99)"
        head.append(f"batch delay {late}")
    parts: list[RenderableType] = [Rule("summary", style="dim"), Text(" · ".join(head)), ""]
    tables = {status.name: status.rows for status in read_lake_status(lake)}
    if tables:
        totals = build_table(["table"], ["rows", "added by this run"])
        for name, rows in tables.items():
            added = "?" if rows is None else f"{rows - before.get(name, 0):,}"
            totals.add_row(name, "?" if rows is None else f"{rows:,}", added)
        parts += [totals, ""]
    if "quarantine" in tables:
        parts += _render_quarantine(lake)
    parts += [Text(f"error: {' '.join(outcome.error.split())}", "red")] if outcome.error else []
    parts += [Text(f"warning: {' '.join(warning.split())}", "yellow") for warning in outcome.warnings]
    if outcome.unread:
        parts.append(Text(describe_unread(outcome.unread), "yellow"))
    lines = suggest_queries([name for name, rows in tables.items() if rows != 0], command)
    if lines:
        parts += [Text(f"the tables are in {lake.path}; to query them:", "dim")]
        for title, line in lines:
            # each query on one line, so that it can be pasted
            parts += [Text(f"# {title}", "dim"), Text(line, no_wrap=True, overflow="ignore")]
    return Group(*parts)


def _render_quarantine(lake: Lake) -> list[RenderableType]:
    sql = "SELECT stage, reason, count(*) AS rows FROM quarantine GROUP BY ALL ORDER BY rows DESC, stage, reason"
    counts = [
        (str(stage), str(reason), rows) for stage, reason, rows in query_lake(lake, sql).rows() if isinstance(rows, int)
    ]
    if not counts:
        return []
    table = build_table(["in quarantine", "reason"], ["rows"])
    for stage, reason, rows in counts[:_REASONS]:
        table.add_row(printable(stage), printable(reason), f"{rows:,}")
    if others := counts[_REASONS:]:
        table.add_row("…", f"{len(others)} others", f"{sum(rows for _, _, rows in others):,}")
    return [table, ""]


def describe_unread(unread: Mapping[str, int | None]) -> str:
    """Describe how many records each query left unread in Kafka. In `unread`, `None` is an unknown number."""
    rest = ", ".join(
        f"{name} (number unknown)" if count is None else f"{name} {count:,} records"
        for name, count in sorted(unread.items())
    )
    return (
        f"records left unread in Kafka, by query: {rest}. The next kiln run reads them. To wait longer at the end of a "
        "run, raise the setting run.drain"
    )
