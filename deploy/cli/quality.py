"""`kiln quality`: check the data quality of the tables."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kiln.conf.process.extras import require_extras
from kiln.deploy.cli.options import (
    FAILED,
    OK,
    ConfigOption,
    JsonOption,
    StateOption,
    UsageError,
    answers,
    lake_of,
    length_of,
    notes,
    parse_path,
    settings_of,
)
from kiln.schemas.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kiln.pipelines.quality.results import CheckResult

_SHOWN_KEYS = 5
"""Maximum number of faulty rows that are shown for an expectation, each by its key."""

commands = typer.Typer()


@commands.command()
def quality(
    table: Annotated[
        list[str] | None,
        typer.Option("--table", metavar="NAME", help="Only suites of this table. Repeatable."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since", metavar="DURATION", help="Only rows newer than this age, such as 1h, even if checked before."
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat every quality.interval until Ctrl-C.")] = False,
    recent: Annotated[
        bool, typer.Option("--recent", help="Compare new rows with the last day first, which is faster.")
    ] = False,
    docs: Annotated[
        Path | None,
        typer.Option("--docs", metavar="DIR", parser=parse_path, help="Folder for a report in HTML (Data Docs)."),
    ] = None,
    open_docs: Annotated[
        bool, typer.Option("--open", help="Write the HTML report and open it in the browser.")
    ] = False,
    as_json: JsonOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Check the tables against the suites of expectations.

    Without --since, a check reads only the rows that are new since the last check. Results go to the table
    quality_results. You can run the command while Kiln runs. Requires no Java. Exit code 1 if an expectation of level
    error fails.
    """
    require_extras("quality")
    settings = settings_of(config, state)
    from kiln.conf.settings.keys import suggest_key
    from kiln.schemas.delta.tables import TABLES

    for name in table or ():
        if name not in TABLES:
            raise UsageError(f"--table {name}: there is no such table{suggest_key(name, TABLES)}")
    length = length_of(since, "--since") if since else None
    folder = docs or (settings.quality_dir / "docs" if open_docs else None)
    from kiln.pipelines.quality.check import check_lake
    from kiln.pipelines.quality.suites import read_all_suites

    every = read_all_suites(settings.quality.suites)  # faults of a suite are reported before the slow imports

    from kiln.pipelines.quality.expectations import RowValidator

    validator, lake = RowValidator(), lake_of(settings)
    while True:
        began = time.monotonic()
        results = check_lake(
            settings, lake, every, validator, datetime.now(UTC), tables=table or (), since=length, recent=recent
        )
        if as_json:
            print(json.dumps([result.as_json() for result in results], indent=2, default=str), flush=True)
        else:
            answers().print(render_results(results))
        if folder:
            _write_docs(results, folder, open_docs)
        if not watch:
            break
        pause = max(settings.quality.interval.total_seconds() or 600.0, 1.0)
        duration = time.monotonic() - began
        notes().print(f"the check took {duration:.1f} s; the next check is in {pause:.0f} s", style="dim")
        time.sleep(pause)
    raise typer.Exit(FAILED if any(result.is_error for result in results) else OK)


def _write_docs(results: list[CheckResult], folder: Path, show: bool) -> None:
    import webbrowser

    from kiln.pipelines.quality.data_docs import write_docs

    index = write_docs(results, folder)
    notes().print(f"wrote the report (Data Docs): {index}")
    if show:
        webbrowser.open(index.resolve().as_uri())


def render_results(results: Sequence[CheckResult]) -> RenderableType:
    """Render the failed expectations by table; the last line counts errors and warnings."""
    from rich.console import Group
    from rich.text import Text

    lines: list[RenderableType] = []
    for table, group in groupby(
        sorted(results, key=lambda result: result.check.table), key=lambda result: result.check.table
    ):
        table_results = list(group)
        failures = [result for result in table_results if not result.success]
        if not failures:
            lines.append(Text(f"ok    {table}: {len(table_results)} expectations passed", "green"))
            continue
        lines.append(Text(f"{table}: {len(failures)} of {len(table_results)} expectations failed", "bold"))
        for result in failures:
            lines += _render_failure(result)
    errors = sum(result.is_error for result in results)
    warnings = sum(not result.success for result in results) - errors
    if not results:
        last = Text("no tables to check yet", "yellow")
    elif errors or warnings:
        last = Text(f"{errors} errors, {warnings} warnings", "bold red" if errors else "yellow")
    else:
        last = Text(f"all {len(results)} expectations passed", "green")
    for result in results:
        if result.pending:
            rows = "1 row" if result.pending == 1 else f"{result.pending:,} rows"
            words = (
                f"{result.check.table}: {result.check.name} has not checked {rows} yet: another table may still "
                "get the matching rows"
            )
            lines.append(Text(printable(words), "yellow"))
    return Group(*lines, "", last)


def _render_failure(result: CheckResult) -> list[RenderableType]:
    from rich.text import Text

    check = result.check
    style = "bold red" if check.level == "error" else "yellow"
    lines: list[RenderableType] = [Text(f"  {check.level:5} {check.name}: {printable(result.observed)}", style)]
    for key, words in zip(result.keys[:_SHOWN_KEYS], [*result.words, *[""] * _SHOWN_KEYS], strict=False):
        key_text = ", ".join(f"{name}={value}" for name, value in key.items())
        lines.append(Text(f"        {printable(key_text)}" + (f": {printable(words)}" if words else "")))
    if result.count > _SHOWN_KEYS:
        lines.append(Text(f"        … and {result.count - _SHOWN_KEYS:,} more"))
    lines.append(Text(f"        → {result.hint} ({check.owner}; {check.location})"))
    if result.sql:
        lines.append(Text(f'        kiln sql "{printable(result.sql)}"', "dim"))
    return lines
