"""`kiln config show` and `kiln config check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kiln.deploy.cli.options import ConfigOption, StateOption, loaded, parse_path

commands = typer.Typer(name="config", no_args_is_help=True, help="Print or check the settings.")


@commands.command("show")
def config_show(
    state: StateOption = None,
    config: ConfigOption = None,
    diff: Annotated[bool, typer.Option("--diff", help="Only values that differ from the default.")] = False,
) -> None:
    """Print the settings in force as TOML, with their sources."""
    from kiln.conf.settings.reading import format_settings
    from kiln.schemas.printable import printable_lines

    found = loaded(config, state)
    print(printable_lines(format_settings(found, only_changed=diff)), end="")


@commands.command("check")
def config_check(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", parser=parse_path, help="Settings file. Default: the file in force."),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Check the settings, the environment and the quality suites."""
    found = loaded(file or config, None)
    from kiln.pipelines.quality.suites import read_all_suites

    read_all_suites(found.settings.quality.suites)
    print(f"{found.file}: fine")
