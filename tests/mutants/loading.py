"""Files of the checkout that a test module loads, read from syntax trees."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Final

_FOLDERS: Final = {"kiln": ".", "kit": "tests/kit", "fuzz": "tests/fuzz", "hostile": "tests/hostile"}


@cache
def list_imports(root: Path, path: Path) -> frozenset[Path]:
    """List the files that a file imports, in functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Import():
                names.update(alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module), level=0):
                names.add(module)
                names.update(f"{module}.{alias.name}" for alias in node.names)
    return frozenset(file for name in names if (file := _find(root, name)) is not None)


def list_loaded_files(root: Path, path: Path) -> set[Path]:
    """List the files that a file imports, and those that they import."""
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        new = list_imports(root, waiting.pop()) - found
        found |= new
        waiting += new
    return found


def _find(root: Path, name: str) -> Path | None:
    package, *parts = name.split(".")
    if package not in _FOLDERS:
        return None
    path = root.joinpath(_FOLDERS[package], *parts)
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)
