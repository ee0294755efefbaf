"""`kiln interests`: list or change what the bridge follows on the network."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kiln.conf.process.errors import KilnError
from kiln.conf.process.state_folder import claim_state_folder
from kiln.deploy.cli.options import ConfigOption, JsonOption, StateOption, UsageError, settings_of

commands = typer.Typer()


@commands.command()
def interests(
    add: Annotated[
        list[str] | None,
        typer.Option(
            "--add",
            metavar="X",
            help="Separator to follow: * (all), KEY or KEY/VALUE. "
            "On non-Ceramic networks: a topic, in which * stands for any text. Repeatable.",
        ),
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove", metavar="X", help="Separator or topic to stop following. Repeatable."),
    ] = None,
    as_json: JsonOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """List or change the topics or separators that Kiln follows."""
    settings = settings_of(config, state)
    from kiln.bridge.app.interests import open_interests
    from kiln.schemas.printable import printable

    file = open_interests(settings)
    now = list(file.read())
    if file.error:
        raise KilnError(file.error)
    if add or remove:
        unknown = [text for text in remove or () if text not in now]
        if unknown:
            raise UsageError(f"--remove {unknown[0]}: not in the list of interests ({', '.join(now) or 'empty'})")
        now = [text for text in [*now, *(add or ())] if text not in (remove or ())]
        claim_state_folder(settings.state)
        try:
            file.write(now)
        except ValueError as error:
            raise UsageError(f"--add: {error}") from None
    now = list(dict.fromkeys(now))
    print(json.dumps(now) if as_json else "\n".join(map(printable, now)))
