"""Checker of the law of imports in docs/design/overview.md. Pure functions read the law from the document and the
imports from syntax trees, and describe the violations. `tests/unit/test_imports.py` applies them to the code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath

PACKAGE = ("schemas", "conf", "bridge", "pipelines", "deploy")
"""The folders that `kiln/` links to."""

Tree = Mapping[str, str]
"""Python files: path from the top of the repository, with slashes, to text."""

_NAME = re.compile(r"`[^`]+`")
_SEPARATOR = re.compile(r",\s+and\s+|,\s+|\s+and\s+")


class LawError(ValueError):
    """The checker cannot parse the law in the document. The message quotes the text."""


@dataclass(frozen=True)
class Law:
    """Rooms, each a folder or one file (`bridge/gossipsub`, `pipelines/app/launch.py`), and what the rooms may
    import."""

    rooms: Mapping[str, frozenset[str]]
    """the other rooms that a room may import, by room"""
    free: frozenset[str]
    """folders that every room but `schemas` may import, and whose files may import only each other"""

    def room_of(self, path: str) -> str | None:
        """Return the innermost room that contains a file, or `None` if no room does."""
        inside = [room for room in self.rooms if path == room or path.startswith(f"{room}/")]
        return max(inside, key=len, default=None)

    def allows(self, path: str, imported: str) -> bool:
        """Return true if the file `path` may import the file `imported`."""
        if self.is_free(imported):
            return not path.startswith("schemas/")
        room, other = self.room_of(path), self.room_of(imported)
        return not self.is_free(path) and room is not None and (other == room or other in self.rooms[room])

    def is_free(self, path: str) -> bool:
        """Return true if a file is in a folder that every room but `schemas` may import."""
        return any(path.startswith(f"{folder}/") for folder in self.free)


# ---------------------------------------------------------------- the document


def read_law(document: str) -> Law:
    """Read the law from the overview: the paragraph "The law of imports" and the table after it.

    Raises:
        LawError: There is no such paragraph or table, or a cell cannot be parsed.
    """
    paragraph, _, after = document.partition("**The law of imports.**")[2].partition("\n| room |")
    free = re.search(r"Every room but `schemas` may import ([^;]+);\s+the\s+table\s+leaves", paragraph)
    if not after or free is None:
        raise LawError('no paragraph "The law of imports" that says what every room may import, with a table of rooms')
    cells: dict[str, str] = {}
    for line in after.splitlines()[2:]:
        if not line.startswith("|"):
            break
        first, _, last = (cell.strip() for cell in line.strip("|").split("|"))
        for room in _names(first):
            cells[room] = last
    laid: dict[str, frozenset[str]] = {}
    for room in cells:
        laid[room] = frozenset(_allowed(cells[room], cells, laid)) - {room}
    return Law(laid, frozenset(_names(free[1])))


def _allowed(cell: str, rooms: Iterable[str], above: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """Yield the rooms that a cell names: `none`, `everything`, `everything but …`, or a list.

    An item of a list is a room, `all of` a folder of rooms, or `what … may`: the rooms that a room above may import.
    """
    if cell == "none":
        return
    if cell == "everything":
        yield from rooms
        return
    if cell.startswith("everything but "):
        yield from set(rooms) - set(_names(cell.removeprefix("everything but ")))
        return
    for item in _SEPARATOR.split(cell):
        match re.fullmatch(r"(|all of |what )`([^`]+)`(| may)", item):
            case re.Match() as found if found.groups()[::2] == ("", "") and found[2] in rooms:
                yield found[2]
            case re.Match() as found if found.groups()[::2] == ("all of ", ""):
                yield from (room for room in rooms if room.startswith(f"{found[2]}/"))
            case re.Match() as found if found.groups()[::2] == ("what ", " may") and found[2] in above:
                yield from above[found[2]]
            case _:
                raise LawError(f"{item!r} in the table of rooms names no room above or beside it")


def _names(cell: str) -> list[str]:
    names = _SEPARATOR.split(cell)
    if not all(map(_NAME.fullmatch, names)):
        raise LawError(f"{cell!r} is no list of names")
    return [name.strip("`") for name in names]


# ---------------------------------------------------------------- the code


def module_of(path: str) -> str:
    """Name the module of a file: `a.b` for a/b.py and a/b/__init__.py; the folders of the package lie under `kiln`."""
    parts = PurePosixPath(path).with_suffix("").parts
    if parts[0] in PACKAGE:
        parts = ("kiln", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: str, text: str) -> Iterator[str]:
    """Yield the full names that a file imports, at the top level, in functions and under TYPE_CHECKING.

    `from a import b` gives `a.b`, whether b is a module or not. `import_module("a.b")` counts as an import of a.b, and
    `import_module(f"a.{name}")` as an import of a.

    Raises:
        LawError: The package of a computed name cannot be read from the source.
    """
    package = module_of(path).split(".")
    if not path.endswith("/__init__.py"):
        package.pop()
    for node in ast.walk(ast.parse(text, path)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = (
                    [*package[: len(package) - level + 1], *([module] if module else [])] if level else [module or ""]
                )
                yield from (".".join([*base, alias.name]) for alias in names)
            case ast.Call(func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module")):
                yield _computed(path, node)


def _computed(path: str, call: ast.Call) -> str:
    match call.args:
        case [ast.Constant(value=str(name)), *_]:
            return name
        case [ast.JoinedStr(values=[ast.Constant(value=str(start)), *_]), *_] if "." in start:
            return start.rpartition(".")[0]
    raise LawError(f"{path}:{call.lineno}: nobody can read what this imports; begin the name with its package")


def imported_files(tree: Tree) -> dict[str, dict[str, str]]:
    """Map each file to the files of the tree that it imports, and these to the imported names.

    A name that is no module of the tree stands for the longest module that it begins with, such as
    `kiln.schemas.kafka.topics.TOPICS` for schemas/kafka/topics.py. Imports from outside the tree are left out.
    """
    files = {module_of(path): path for path in tree}
    found: dict[str, dict[str, str]] = {}
    for path, text in tree.items():
        found[path] = {}
        for name in imports(path, text):
            parts = name.split(".")
            named = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
            file = next((files[each] for each in named if each in files), None)
            if file is not None and file != path:
                found[path].setdefault(file, name)
    return found


def foreign_imports(path: str, text: str) -> set[str]:
    """Return the first parts of the names that a file imports: `pyspark` for `from pyspark.sql import DataFrame`."""
    return {name.split(".")[0] for name in imports(path, text)}


def breaches(tree: Tree, law: Law) -> list[str]:
    """Describe each import that the law does not allow, and each file that is in no room.

    An `__init__.py` that imports nothing may be in no room, such as `bridge/__init__.py`.
    """
    said: list[str] = []
    for path, imported in sorted(imported_files(tree).items()):
        empty = path.endswith("__init__.py") and not imported
        if law.room_of(path) is None and not law.is_free(path) and not empty:
            said.append(f"{path} stands in no room of the table")
            continue
        said += [f"{path} may not import {name}" for other, name in imported.items() if not law.allows(path, other)]
    return said


def circle(tree: Tree) -> list[str]:
    """Return the files of an import cycle, the first file again at the end; empty if there is no cycle.

    Imports in functions and under TYPE_CHECKING also count, because they hide a cycle from Python but not from a
    reader. An import of `a.b` also runs `a/__init__.py`, so that file's imports count, except for files in `a`.
    """
    graph = {path: set(imported) for path, imported in imported_files(tree).items()}
    for path, imported in graph.items():
        above = {f"{folder}/__init__.py" for each in imported for folder in PurePosixPath(each).parents}
        own = {f"{folder}/__init__.py" for folder in PurePosixPath(path).parents}
        imported |= (above & set(graph)) - own
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [str(path) for path in reversed(error.args[1])]
    return []
