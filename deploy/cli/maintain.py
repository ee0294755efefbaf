"""`kiln maintain`: the care of the tables."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from kiln.deploy.cli.exits import FAILED, OK, UsageError
from kiln.deploy.cli.options import ConfigOption, JsonOption, StateOption, answers, notes, settings_of

if TYPE_CHECKING:
    from kiln.deploy.ops.maintenance import TableMaintenance

commands = typer.Typer()


@commands.command()
def maintain(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what the command would do, and change nothing.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Do it again and again, every maintenance.interval, until Ctrl-C.")
    ] = False,
    as_json: JsonOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Make few files of many, shorten the logs of the tables, remove what nobody needs, and rows that are too old.

    The command works while Kiln runs, and `kiln run` does the same every ten minutes. Rows go only where the settings
    say so (lake.retention). The exit code is 1 when a table could not be cared for. --json prints an object for each
    table, and with --watch a line for each table each time.
    """
    if dry_run and watch:
        raise UsageError("--dry-run and --watch: choose one")
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
            with suppress(KeyboardInterrupt):  # who watches is done when the user says so
                while watch:
                    maintenance.wait()
                    show(tables := maintenance.run())
    raise typer.Exit(FAILED if any(each.error for each in tables) else OK)
