"""`kiln status`: show the broker, its topics, the progress of the queries, and the tables."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer

from kiln.deploy.cli.options import ConfigOption, JsonOption, StateOption, answers, settings_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kiln.deploy.ops.status import KilnStatus

commands = typer.Typer()


@commands.command()
def status(as_json: JsonOption = False, state: StateOption = None, config: ConfigOption = None) -> None:
    """Show topics, query progress and tables."""
    settings = settings_of(config, state)
    from kiln.deploy.ops.status import read_status

    kiln = read_status(settings)
    if as_json:
        print(encode_status(kiln))
    else:
        answers().print(render_status(kiln, datetime.now(UTC)))


def encode_status(status: KilnStatus) -> str:
    """Encode the status as JSON. Times are ISO 8601 in UTC, and the offsets of a topic are an object by partition."""
    return json.dumps(asdict(status), indent=2, default=lambda value: value.isoformat().replace("+00:00", "Z"))


def format_age(then: datetime | None, now: datetime) -> str:
    """Format the time since `then`, such as `3 s ago` or `2 h ago`; `-` if `then` is `None`."""
    if then is None:
        return "-"
    seconds = max(0, int((now - then).total_seconds()))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


def format_megabytes(count: int) -> str:
    """Format a number of bytes in MB, or in kB below 100 kB."""
    return f"{count / 1e6:,.1f} MB" if count >= 100_000 else f"{count / 1e3:,.1f} kB"


def render_status(status: KilnStatus, now: datetime) -> RenderableType:
    """Render the status for a terminal."""
    from rich.console import Group
    from rich.rule import Rule
    from rich.text import Text

    from kiln.deploy.ops.formatting import build_table
    from kiln.schemas.printable import printable

    broker = Text.assemble(("broker  ", "bold"), f"{status.broker.servers}  ")
    if status.broker.reachable:
        broker.append("answers", "green")
    else:
        broker.append(f"does not answer: {status.broker.problem}. To diagnose: kiln doctor", "red")
    parts: list[RenderableType] = [broker, Text.assemble(("state   ", "bold"), status.state)]
    parts += [Text.assemble(("engine  ", "bold"), status.engine), ""]
    if status.broker.topics:
        topics = build_table(["topic"], ["partitions", "records", "end offsets"])
        for topic in status.broker.topics:
            ends = ", ".join(f"{end:,}" for end in topic.end.values())
            topics.add_row(printable(topic.name), str(len(topic.end)), f"{topic.records:,}", ends)
        parts += [topics, ""]
    if status.bridges:
        bridges = build_table(["bridge"], ["machine", "address", "fetches blocks"])
        for bridge in status.bridges:
            leads = "yes" if bridge.leads else "standby" if bridge.duties else "no"
            bridges.add_row(printable(bridge.peer), printable(bridge.host), printable(bridge.address), leads)
        parts += [bridges, ""]
    queries = build_table(["query"], ["micro-batches", "last commit", "lag"])
    for query in status.queries:
        batches = "none yet" if query.batch is None else f"{query.batch + 1:,}"
        lag = "-" if query.lag is None else f"{query.lag:,}"
        queries.add_row(
            query.name,
            batches,
            format_age(query.committed_at, now),
            Text(printable(query.problem) or lag, "red" if query.problem else ""),
        )
    parts += [queries, ""]
    if status.tables:
        tables = build_table(["table"], ["rows", "files", "size", "last commit"])
        for table in status.tables:
            rows = "?" if table.rows is None else f"{table.rows:,}"
            if table.problem:
                tables.add_row(table.name, Text(printable(table.problem), "red"))
                continue
            tables.add_row(
                table.name, rows, f"{table.files:,}", format_megabytes(table.bytes), format_age(table.committed_at, now)
            )
        parts.append(tables)
    else:
        parts.append(Text("no tables in the lake yet", "dim"))
    return Group(Rule("kiln status", style="dim"), *parts)
