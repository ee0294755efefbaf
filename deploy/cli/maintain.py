"""`kiln maintain`: maintenance of the tables."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from kiln.conf.process.extras import require_extras
from kiln.deploy.cli.exits import FAILED, OK, UsageError
from kiln.deploy.cli.options import ConfigOption, JsonOption, StateOption, answers, notes, settings_of

if TYPE_CHECKING:
    from kiln.deploy.ops.maintenance import TableMaintenance

commands = typer.Typer()


@commands.command()
def maintain(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat every maintenance.interval until Ctrl-C.")] = False,
    as_json: JsonOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Compact files, trim table logs, vacuum, and apply retention.

    The command works while Kiln runs; `kiln run` does the same every ten minutes. Rows are deleted only by
    lake.retention. Exit code 1 if a table failed. --json prints an object per table; with --watch, one per line and
    table each time.
    """
    if dry_run and watch:
        raise UsageError("--dry-run and --watch: choose one")
    require_extras("lake")
    settings = settings_of(config, state)
    from kiln.deploy.ops.maintenance import Maintenance, preview_maintenance
    from kiln.deploy.screens.maintain import encode_maintenance, format_maintenance_line, render_maintenance

    def show(tables: Sequence[TableMaintenance], *, done: bool = True) -> None:
        if as_json:
            print(encode_maintenance(tables, as_lines=watch), flush=True)
        elif watch:
            answers().print(format_maintenance_line(tables), highlight=False)
        else:
            answers().print(render_maintenance(tables, done=done))

    if dry_run:
        show(tables := preview_maintenance(settings), done=False)
    else:
        out = notes()
        with Maintenance(settings, lambda words: out.print(words, style="dim", highlight=False)) as maintenance:
            show(tables := maintenance.run())
            with suppress(KeyboardInterrupt):  # the user ends --watch
                while watch:
                    maintenance.wait()
                    show(tables := maintenance.run())
    raise typer.Exit(FAILED if any(each.error for each in tables) else OK)
