"""Suites in YAML, read and checked: one file for a table or a theme. What is wrong is named with file and line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final, Literal, cast

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError

from kiln.conf.process.errors import SettingsError
from kiln.conf.settings.durations import parse_duration
from kiln.conf.settings.keys import nearest
from kiln.pipelines.quality.catalogue import EXPECTATIONS, Expectation, Kind
from kiln.schemas.delta.tables import TABLES

FOLDER: Final = Path(__file__).resolve().parents[2] / "conf" / "quality"
"""The suites that come with Kiln."""

Level = Literal["warn", "error"]
LEVELS: Final = ("warn", "error")
_SUITE: Final = ("table", "owner", "expectations")
_OF_EACH: Final = ("expect", "level", "owner", "hint")

_READ: Final = tuple(name for name in TABLES if name != "quality_results")


@dataclass(frozen=True)
class SuiteCheck:
    """An expectation of a suite on a table. `arguments`: as the suite gives them."""

    table: str
    expectation: str
    arguments: Mapping[str, object]
    level: Level
    owner: str
    hint: str
    place: str
    """file:line"""

    @property
    def kind(self) -> Expectation:
        """Entry of the expectation in the catalogue."""
        return EXPECTATIONS[self.expectation]

    @property
    def id(self) -> str:
        """Names what is checked, and not how grave a failure is: 12 hex digits."""
        what = json.dumps([self.table, self.expectation, self.arguments], sort_keys=True, default=str)
        return blake2b(what.encode(), digest_size=6).hexdigest()

    @property
    def name(self) -> str:
        """The expectation, and on what: `expect_keys_to_be_unique(network, message)`."""
        told = [
            self.arguments[name]
            for name in ("column", "column_A", "column_B", "columns", "tables", "than", "rule")
            if name in self.arguments
        ]
        words = [", ".join(map(str, each)) if isinstance(each, list) else str(each) for each in told]
        return f"{self.expectation}({', '.join(words)})" if words else self.expectation


def read_all(own: Iterable[str]) -> list[SuiteCheck]:
    """Read the checks of Kiln's suites and of a user's own: files and folders. SettingsError names every fault."""
    return read_suites([FOLDER, *map(Path, own)])


def read_suites(places: Iterable[Path]) -> list[SuiteCheck]:
    """Read the checks of all suites in these files, and in these folders' `*.yaml`. SettingsError names every fault."""
    checks: list[SuiteCheck] = []
    faults: list[str] = []
    seen: dict[str, str] = {}
    for file in _files(places, faults):
        for found in _read(file):
            if isinstance(found, str):
                faults.append(found)
            elif found.id in seen:
                faults.append(f"{found.place}: {found.name} is also in {seen[found.id]}")
            else:
                seen[found.id] = found.place
                checks.append(found)
    if faults:
        raise SettingsError(faults)
    return checks


def _files(places: Iterable[Path], faults: list[str]) -> Iterator[Path]:
    for place in places:
        if place.is_dir():
            yield from sorted(place.glob("*.yaml"))
        elif place.is_file():
            yield place
        else:
            faults.append(f"{place}: there is no such suite")


def _read(file: Path) -> Iterator[SuiteCheck | str]:
    """Read the checks of a file, or descriptions of its faults with their lines."""
    try:
        suite = YAML().load(file.read_text(encoding="utf-8"))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        yield f"{file}:{mark.line + 1 if mark else 1}: {error.problem or error.context}"
        return
    except (OSError, UnicodeDecodeError) as error:
        yield f"{file}: {error}"
        return
    if not isinstance(suite, CommentedMap):
        yield f"{file}:1: expected a mapping with table and expectations"
        return
    wrong = [*_unknown(file, suite, _SUITE, "key of a suite")]
    table = suite.get("table")
    if table not in _READ:
        wrong.append(
            f"{file}:{_line(suite, 'table')}: table {table}: there is no such table{nearest(str(table), _READ)}"
        )
    each = suite.get("expectations")
    if not isinstance(each, CommentedSeq) or not each:
        wrong.append(f"{file}:{_line(suite, 'expectations')}: expectations: expected a list of expectations")
    if wrong:
        yield from wrong
        return
    for number, item in enumerate(each):
        line = each.lc.item(number)[0] + 1
        if not isinstance(item, CommentedMap):
            yield f"{file}:{line}: expected a mapping with expect, level and hint"
            continue
        faults = list(_faults(file, line, str(table), suite, item))
        yield from faults
        if not faults:
            arguments = {str(key): _plain(value) for key, value in item.items() if key not in _OF_EACH}
            yield SuiteCheck(
                str(table),
                str(item["expect"]),
                arguments,
                cast(Level, item["level"]),
                str(item.get("owner", suite.get("owner", ""))),
                str(item["hint"]),
                f"{file}:{line}",
            )


def _faults(file: Path, line: int, table: str, suite: CommentedMap, item: CommentedMap) -> Iterator[str]:
    name = item.get("expect")
    kind = EXPECTATIONS.get(str(name))
    if kind is None:
        yield f"{file}:{_line(item, 'expect', line)}: {name}: no such expectation{nearest(str(name), EXPECTATIONS)}"
        return
    if item.get("level") not in LEVELS:
        yield f"{file}:{_line(item, 'level', line)}: level {item.get('level')}: expected warn or error"
    for needed in ("hint",) if "owner" in suite or "owner" in item else ("hint", "owner"):
        if not isinstance(item.get(needed), str):
            yield f"{file}:{_line(item, needed, line)}: {name}: {needed} is missing"
    yield from _unknown(file, item, (*_OF_EACH, *kind.arguments), f"argument of {name}")
    for needed in sorted(kind.needs - item.keys()):
        yield f"{file}:{line}: {name}: {needed} is missing"
    for argument, value in item.items():
        if argument in kind.arguments:
            place = f"{file}:{_line(item, argument, line)}: {argument}"
            for problem in _problems(kind.arguments[argument], _plain(value), table):
                yield f"{place}: {problem}"


def _problems(kind: Kind, value: object, table: str) -> Iterator[str]:
    """Describe the faults of an argument's value."""
    columns = [column.name for column in TABLES[table].columns]
    match kind:
        case "column" if value not in columns:
            yield f"{value}: table {table} has no such column{nearest(str(value), columns)}"
        case "columns":
            if not isinstance(value, list) or not value:
                yield "expected a list of columns"
                return
            for each in value:
                yield from _problems("column", each, table)
        case "table" if value not in _READ:
            yield f"{value}: there is no such table{nearest(str(value), _READ)}"
        case "tables":
            if not isinstance(value, list) or not value:
                yield "expected a list of tables"
                return
            for each in value:
                yield from _problems("table", each, table)
        case "number" if isinstance(value, bool) or not isinstance(value, int | float):
            yield f"{value}: expected a number"
        case "switch" if not isinstance(value, bool):
            yield f"{value}: expected true or false"
        case "text" if not isinstance(value, str):
            yield f"{value}: expected text"
        case "list" if not isinstance(value, list):
            yield f"{value}: expected a list"
        case "duration":
            try:
                parse_duration(value)
            except ValueError as error:
                yield f"{value}: expected {error}"
        case _:
            pass


def _unknown(file: Path, mapping: CommentedMap, known: Sequence[str], what: str) -> Iterator[str]:
    for key in mapping:
        if key not in known:
            yield f"{file}:{_line(mapping, key)}: {key}: no such {what}{nearest(str(key), known)}"


def _line(mapping: CommentedMap, key: object, otherwise: int = 1) -> int:
    return int(mapping.lc.key(key)[0]) + 1 if key in mapping else otherwise


def _plain(value: object) -> object:
    """Without ruamel's classes, so that an id does not depend on how YAML is written."""
    if isinstance(value, CommentedSeq):
        return [_plain(each) for each in value]
    if isinstance(value, bool | int | float | str) or value is None:
        for plain in (bool, int, float, str):
            if isinstance(value, plain):
                return plain(value)
        return None
    return str(value)
