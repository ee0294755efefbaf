"""`kiln recover` on the screen and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.text import Text

from kiln.pipelines.recovery import Damage


def recovery_json(found: Sequence[Damage], left: Sequence[Damage]) -> str:
    """As a JSON array of objects; `done`: whether it was put right."""
    by_query = {damage.query: damage for damage in left}
    return json.dumps([_object(each, by_query.get(each.query)) for each in found], indent=2, ensure_ascii=False)


def _object(damage: Damage, left: Damage | None) -> dict[str, object]:
    shown = damage if left is None else left
    return {
        "query": damage.query,
        "found": damage.problem,
        "remedy": shown.remedy,
        "files": [str(path) for path in damage.files],
        "can": shown.is_repairable,
        "done": left is None,
    }


def render_recovery(found: Sequence[Damage], left: Sequence[Damage]) -> Text:
    """For the screen: what was found, what is to be done or was done, and what to type."""
    if not found:
        return Text("nothing is damaged, and checkpoints and tables go together", "green")
    by_query = {damage.query: damage for damage in left}
    text = Text()
    for damage in found:
        shown = by_query.get(damage.query)
        text.append(f"{damage.query}: ", "bold").append(f"{damage.problem}.\n", "red")
        mark, words = ("→", shown.remedy) if shown is not None else ("done:", damage.remedy)
        text.append(f"  {mark} {words}.\n")
    can = any(damage.is_repairable for damage in left)
    if can:
        text.append("Nothing was changed. To do this, type kiln recover --yes", "bold")
    elif not left:
        text.append("Put right. What was in the way is in the folder set-aside. Next: kiln run", "green")
    else:
        text.append("What is left needs a hand", "bold red")
    return text
