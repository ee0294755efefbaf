"""Results of `kiln quality` on the screen: the tables, and for failed expectations the keys, the hint and the SQL."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from kiln.pipelines.quality.results import CheckResult
from kiln.schemas.printable import printable

_KEYS = 5


def render_results(results: Sequence[CheckResult]) -> RenderableType:
    """Render the results by table, with the totals in the last line."""
    lines: list[RenderableType] = []
    for table, group in groupby(
        sorted(results, key=lambda result: result.check.table), key=lambda result: result.check.table
    ):
        table_results = list(group)
        failures = [result for result in table_results if not result.success]
        if not failures:
            lines.append(Text(f"ok    {table}: {len(table_results)} expectations", "green"))
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
            rows = f"{result.pending:,} rows are not judged yet" if result.pending > 1 else "1 row is not judged yet"
            words = f"{result.check.table}: {rows} by {result.check.name}: what they refer to may still come"
            lines.append(Text(printable(words), "yellow"))
    return Group(*lines, "", last)


def _render_failure(result: CheckResult) -> list[RenderableType]:
    check = result.check
    style = "bold red" if check.level == "error" else "yellow"
    lines: list[RenderableType] = [Text(f"  {check.level:5} {check.name}: {printable(result.observed)}", style)]
    for key, words in zip(result.keys[:_KEYS], [*result.words, *[""] * _KEYS], strict=False):
        key_text = ", ".join(f"{name}={value}" for name, value in key.items())
        lines.append(Text(f"        {printable(key_text)}" + (f": {printable(words)}" if words else "")))
    if result.count > _KEYS:
        lines.append(Text(f"        … and {result.count - _KEYS:,} more"))
    lines.append(Text(f"        → {result.hint} ({check.owner}; {check.location})"))
    if result.sql:
        lines.append(Text(f'        kiln sql "{printable(result.sql)}"', "dim"))
    return lines
