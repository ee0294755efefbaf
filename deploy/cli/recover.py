"""`kiln recover`: detect and repair damaged checkpoints and tables."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kiln.conf.process.extras import require_extras
from kiln.deploy.cli.options import (
    FAILED,
    OK,
    ConfigOption,
    JsonOption,
    StateOption,
    answers,
    note_once,
    notes,
    settings_of,
)
from kiln.schemas.queries import QUERIES

if TYPE_CHECKING:
    from rich.text import Text

    from kiln.pipelines.recovery import Damage

commands = typer.Typer()


@commands.command()
def recover(
    query: Annotated[
        str, typer.Argument(metavar="[QUERY]", help="Query to repair: archive, updates, batch or sink.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Repair all damage instead of listing it.")] = False,
    as_json: JsonOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Detect and repair power-loss damage and stale checkpoints.

    Stop Kiln first. The command also detects topics that were deleted and created again. Without QUERY or --yes it
    changes nothing. A repair deletes no file: damaged files move to the folder set-aside in the state folder, and
    tables are restored to an earlier version. Exit code 1 if damage remains.
    """
    require_extras("spark")
    settings = settings_of(config, state)
    from kiln.deploy.ops.recover import Recovery

    if query and query not in QUERIES:
        raise typer.BadParameter(f"there is no query {query}. Pass one of {', '.join(QUERIES)}")
    with Recovery(settings, note_once(notes())) as recovery:
        found = recovery.find(query)
        left = recovery.repair(found, time.time_ns() // 1_000) if yes or query else found
    if as_json:
        print(encode_recovery(found, left))
    else:
        answers().print(render_recovery(found, left), soft_wrap=True)
    raise typer.Exit(FAILED if left else OK)


def encode_recovery(damages: Sequence[Damage], left: Sequence[Damage]) -> str:
    """Encode damages as a JSON array of objects. `left` has those that were not repaired."""
    unrepaired = {damage.query: damage for damage in left}
    return json.dumps(
        [
            {
                "query": damage.query,
                "found": damage.problem,
                "remedy": unrepaired.get(damage.query, damage).remedy,
                "files": [str(path) for path in damage.files],
                "can": unrepaired.get(damage.query, damage).is_repairable,
                "done": damage.query not in unrepaired,
            }
            for damage in damages
        ],
        indent=2,
    )


def render_recovery(damages: Sequence[Damage], left: Sequence[Damage]) -> Text:
    """Render damages with their remedies, and the command to run next. `left` has those that were not repaired."""
    from rich.text import Text

    if not damages:
        return Text("nothing is damaged, and the checkpoints match the tables", "green")
    unrepaired = {damage.query: damage for damage in left}
    text = Text()
    for damage in damages:
        text.append(f"{damage.query}: ", "bold").append(f"{damage.problem}.\n", "red")
        mark = "→" if damage.query in unrepaired else "done:"
        text.append(f"  {mark} {unrepaired.get(damage.query, damage).remedy}.\n")
    if any(damage.is_repairable for damage in left):
        text.append("Nothing was changed. To repair: kiln recover --yes", "bold")
    elif not left:
        text.append("Repaired. Damaged files are in the folder set-aside. Next: kiln run", "green")
    else:
        text.append("Kiln cannot repair the damage marked with →. Follow the instructions there", "bold red")
    return text
