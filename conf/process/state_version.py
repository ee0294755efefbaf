"""The version of a state folder: how its files are laid out, and what checkpoints and tables in it are like.

Every room may import this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kiln.conf.process.disk import to_disk
from kiln.conf.process.errors import KilnError

STATE_VERSION: Final = 2
"""To be raised with a change after which an earlier Kiln would do harm in the folder. Folders of 0.1.0 name none."""

_FILE = "version"


class NewerStateError(KilnError):
    """A newer Kiln has written the folder."""


def take_on(state: Path) -> None:
    """Notes in a state folder that this Kiln works in it. NewerStateError, with nothing changed; OSError.

    A folder of an earlier version is taken on: whoever reads what has changed since knows the earlier form too.
    """
    path = state / _FILE
    text = path.read_text(encoding="ascii", errors="replace").strip() if path.exists() else ""
    if text == str(STATE_VERSION):
        return
    if text.isdigit() and int(text) > STATE_VERSION:
        raise NewerStateError(
            f"the state folder {state} is of version {text}, and this Kiln knows up to version {STATE_VERSION}: a "
            "newer Kiln has written it. Use that Kiln, or give this one another folder with --state"
        )
    fresh = path.with_suffix(".new")
    fresh.write_text(f"{STATE_VERSION}\n", encoding="ascii")
    to_disk(fresh)
    fresh.replace(path)
    to_disk(state)
