"""Packages that are imported when a module of Kiln is loaded, also through other modules of Kiln. The imports are read
from syntax trees."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class CommandImports:
    """Imports inside a command's function and the functions of its file that it calls.

    Attributes:
        modules: Imported modules, each with the extras that the function requires before that import.
        extras: All extras that the command requires.
    """

    modules: list[tuple[str, frozenset[str]]] = field(default_factory=list)
    extras: set[str] = field(default_factory=set)


def list_loaded_packages(modules: Iterable[str]) -> dict[str, str]:
    """Map the top-level modules of other packages to the module of Kiln that loads them."""
    loaded: dict[str, str] = {}
    seen: set[str] = set()
    waiting = [(module, "") for module in modules]
    while waiting:
        module, loader = waiting.pop()
        top = module.partition(".")[0]
        if top != "kiln":
            if top not in sys.stdlib_module_names:
                loaded.setdefault(top, loader)
        elif module not in seen:
            seen.add(module)
            waiting.extend((each, module) for each in _load(module))
    return loaded


def read_commands(file: Path) -> Iterator[tuple[str, CommandImports]]:
    """Read the commands of a file of deploy/cli."""
    functions = {
        node.name: node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)
    }
    for name, function in functions.items():
        if any("commands.command" in ast.unparse(each) for each in function.decorator_list):
            found = CommandImports()
            _follow(function, functions, frozenset(), found)
            yield name, found


def _follow(
    function: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef], extras: frozenset[str], found: CommandImports
) -> None:
    """Collect imports in the order of the text: those before `require_extras` must do without the extra."""
    others = {name: each for name, each in functions.items() if each is not function}
    nodes = [
        node for statement in function.body for node in ast.walk(statement) if isinstance(node, ast.stmt | ast.expr)
    ]
    for node in sorted(nodes, key=lambda each: (each.lineno, each.col_offset)):
        match node:
            case ast.Import() | ast.ImportFrom():
                found.modules.extend((module, extras) for module in _names(node))
            case ast.Call(func=ast.Name(id="require_extras"), args=arguments):
                extras |= {str(ast.literal_eval(argument)) for argument in arguments}
                found.extras |= extras
            case ast.Name(id=name) if name in others:
                _follow(functions[name], others, extras, found)


@cache
def _load(module: str) -> frozenset[str]:
    """List the modules that a module of Kiln imports at its top level, and the packages that contain it."""
    file = _find(module)
    if file is None:
        return frozenset()
    parents = module.split(".")
    found = {".".join(parents[:length]) for length in range(2, len(parents))}
    waiting: list[ast.stmt] = list(ast.parse(file.read_text("utf-8")).body)
    while waiting:
        node = waiting.pop()
        match node:
            case ast.Import() | ast.ImportFrom():
                found.update(_names(node))
            case ast.If(test=test) if "TYPE_CHECKING" not in ast.unparse(test):
                waiting += [*node.body, *node.orelse]
            case ast.Try() | ast.With() | ast.ClassDef():
                waiting += node.body
    return frozenset(found)


def _names(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif node.module and not node.level:
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            yield name if node.module.startswith("kiln") and _find(name) else node.module


def _find(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split(".")[1:])
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)
