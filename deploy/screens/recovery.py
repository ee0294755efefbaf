"""`kiln recover` on the screen and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.text import Text

from kiln.pipelines.recovery import Damage


def encode_recovery(damages: Sequence[Damage], left: Sequence[Damage]) -> str:
    """Encode damages as a JSON array of objects; `done` is true for those not in `left`, which were repaired."""
    by_query = {damage.query: damage for damage in left}
    return json.dumps([_encode_damage(each, by_query.get(each.query)) for each in damages], indent=2)


def _encode_damage(damage: Damage, left: Damage | None) -> dict[str, object]:
    newest = damage if left is None else left
    return {
        "query": damage.query,
        "found": damage.problem,
        "remedy": newest.remedy,
        "files": [str(path) for path in damage.files],
        "can": newest.is_repairable,
        "done": left is None,
    }


def render_recovery(damages: Sequence[Damage], left: Sequence[Damage]) -> Text:
    """Render damages with their remedies, those in `left` as not repaired, and the next command."""
    if not damages:
        return Text("nothing is damaged, and the checkpoints match the tables", "green")
    by_query = {damage.query: damage for damage in left}
    text = Text()
    for damage in damages:
        unrepaired = by_query.get(damage.query)
        text.append(f"{damage.query}: ", "bold").append(f"{damage.problem}.\n", "red")
        mark, remedy = ("→", unrepaired.remedy) if unrepaired is not None else ("done:", damage.remedy)
        text.append(f"  {mark} {remedy}.\n")
    if any(damage.is_repairable for damage in left):
        text.append("Nothing was changed. To repair: kiln recover --yes", "bold")
    elif not left:
        text.append("Repaired. Damaged files are in the folder set-aside. Next: kiln run", "green")
    else:
        text.append("The rest needs manual repair", "bold red")
    return text
