"""The sample lake, which the wheel contains: a minute of the demo network, its batches, and a backfill run.

`make sample` records it (`kiln.deploy.query.sample_recording`).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from kiln.conf.process.errors import KilnError

SAMPLE_LAKE: Final = Path(__file__).with_name("sample_lake")
"""Folder of the sample lake's tables."""


def copy_sample(state: Path) -> Path:
    """Copy the sample lake into a new state folder, and return the folder of its tables.

    Raises:
        KilnError: The folder exists and is not empty.
    """
    if state.exists() and (not state.is_dir() or any(state.iterdir())):
        raise KilnError(f"cannot copy the sample lake to {state}: it exists and is not empty. Pass a new folder")
    lake = state / "lake"
    shutil.copytree(SAMPLE_LAKE, lake, copy_function=shutil.copyfile)
    return lake
