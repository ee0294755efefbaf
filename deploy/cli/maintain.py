"""`kiln maintain`: compact, vacuum and trim the Delta tables."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
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
    notes,
    settings_of,
)

if TYPE_CHECKING:
    from rich.console import Group

    from kiln.pipelines.maintenance.steps import MaintenanceResult

_USUAL_PAUSE = 600.0  # s between repetitions if `maintenance.interval` is 0, which stops maintenance by `kiln run`

commands = typer.Typer()


@commands.command()
def maintain(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the planned steps, and change nothing.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat every maintenance.interval until Ctrl-C.")] = False,
    as_json: JsonOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Compact files, trim table logs, vacuum, and apply retention.

    You can run the command while Kiln runs. kiln run itself maintains the tables every maintenance.interval (10m).
    Rows are deleted only if the setting lake.retention limits their age. Exit code 1 if a table could not be
    maintained. --json prints an array with an object per table. With --watch --json, each object is on a line of
    its own.
    """
    if dry_run and watch:
        raise UsageError("--dry-run and --watch cannot be combined. Pass one of them")
    require_extras("lake")
    settings = settings_of(config, state)
    from kiln.conf.process.state_folder import lock_state
    from kiln.deploy.ops.maintenance import LOCK, encode_maintenance, maintain_tables, preview_maintenance

    def show(tables: Sequence[MaintenanceResult], *, done: bool = True) -> None:
        objects = [encode_maintenance(table) for table in tables]
        if as_json:
            print("\n".join(map(json.dumps, objects)) if watch else json.dumps(objects, indent=2), flush=True)
        elif watch:
            answers().print(_format_line(tables), highlight=False)
        else:
            answers().print(_render_tables(tables, done=done))

    if dry_run:
        show(tables := preview_maintenance(settings), done=False)
    else:
        out = notes()

        def say(words: str) -> None:
            out.print(words, style="dim", highlight=False)

        with lock_state(settings.state, LOCK):
            show(tables := maintain_tables(settings, say))
            with suppress(KeyboardInterrupt):  # the user ends --watch
                while watch:
                    time.sleep(settings.maintenance.interval.total_seconds() or _USUAL_PAUSE)
                    show(tables := maintain_tables(settings, say))
    raise typer.Exit(FAILED if any(table.error for table in tables) else OK)


def _render_tables(tables: Sequence[MaintenanceResult], *, done: bool) -> Group:
    """Render a row for each table, with values as `before → after`, and errors below. If `done` is false, the results
    are predictions, whose steps are listed too."""
    from rich.console import Group
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False)
    for name in ("table", "files", "bytes", "log entries", "rewritten", "expired rows", "removed", "seconds"):
        grid.add_column(name, justify="left" if name == "table" else "right")
    for result in tables:
        if result.left_alone or result.error:
            grid.add_row(result.table, "skipped", "", "", "", "", "", f"{result.seconds:.1f}")
            continue
        files, size = result.garbage
        grid.add_row(
            result.table,
            _format_change(*result.files),
            _format_change(*map(decimal, result.size)),
            _format_change(*result.entries),
            decimal(result.rewritten) if result.rewritten else "",
            f"{result.expired_rows:,}" if result.expired_rows else "",
            f"{files:,} files, {decimal(size)}" if files else "",
            f"{result.seconds:.1f}",
        )
    lines: list[Table | Text] = [grid]
    for result in tables:
        if result.left_alone:
            lines.append(Text(f"{result.table} was skipped: {result.left_alone}"))
        if result.error:
            lines.append(Text(result.error, "red"))
        if not done:
            lines += [Text(f"{result.table}: {words}", "dim") for words in result.words]
    if not done:
        lines.append(Text("Nothing was changed. To run these steps: kiln maintain", "bold"))
    return Group(*lines)


def _format_line(tables: Sequence[MaintenanceResult]) -> str:
    parts = [
        f"{result.table} {_format_change(*result.files)} files"
        for result in tables
        if result.rewritten or result.expired_rows or result.garbage[0]
    ]
    errors = [result.error for result in tables if result.error]
    return "; ".join([*(parts or ["nothing to do"]), *errors])


def _format_change(before: int | str, after: int | str) -> str:
    texts = [f"{value:,}" if isinstance(value, int) else value for value in (before, after)]
    return texts[0] if before == after else " → ".join(texts)
