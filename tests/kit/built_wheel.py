"""The wheel as `make wheel` builds it. It is built in a copy of the checkout, because other tests read the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from kiln.deploy.stack.jars import PROJECT


def build_wheel(folder: Path) -> Path:
    """Copy the files in git to a folder, build the wheel there, and return its path."""
    for name in _run_git("ls-files", "-z").rstrip("\0").split("\0"):
        if (PROJECT / name).exists():  # a file may be deleted, and not yet in a commit
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / name, folder / name, follow_symlinks=False)  # `kiln/` holds links
    (folder / ".venv").symlink_to(sys.prefix)
    git = {"GIT_DIR": _run_git("rev-parse", "--absolute-git-dir").strip(), "GIT_WORK_TREE": str(folder)}
    done = subprocess.run(
        ["make", "--old-file=.venv/.installed", "wheel"],
        cwd=folder,
        env={**os.environ, **git, "GIT_OPTIONAL_LOCKS": "0", "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def _run_git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
