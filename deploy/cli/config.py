"""`kiln config show` and `kiln config check`: print the settings, or check a settings file."""

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
    diff: Annotated[bool, typer.Option("--diff", help="Only settings that differ from their defaults.")] = False,
) -> None:
    """Print the settings as TOML, with their sources."""
    from kiln.conf.settings.reading import format_settings
    from kiln.schemas.printable import printable_lines

    print(printable_lines(format_settings(loaded(config, state), only_changed=diff)), end="")


@commands.command("check")
def config_check(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", parser=parse_path, help="Settings file. Default: the file of --config."),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Check the settings file, KILN_ variables and quality suites."""
    found = loaded(file or config, None)
    from kiln.pipelines.quality.suites import read_all_suites

    read_all_suites(found.settings.quality.suites)
    print(f"{found.file}: fine")
