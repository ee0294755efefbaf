"""Descriptions of invalid settings: source, key, value, and what is expected."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from pydantic_core import ErrorDetails

from kiln.conf.settings.durations import duration_text
from kiln.conf.settings.keys import (
    CONFIG_VARIABLE,
    ENV_PREFIX,
    NETWORK_VARIABLE,
    Keys,
    find_bounds,
    is_secret,
    join_key,
    list_keys,
    name_variable,
    suggest_key,
)
from kiln.conf.settings.secrets import MASK, is_secret_key, mask_secrets
from kiln.conf.settings.service_links import is_service_link
from kiln.conf.settings.values import parse_json

_SEE_FILE = "; see conf/kiln.toml for all settings"


def find_unknown_variables(environ: Mapping[str, str]) -> Iterable[str]:
    """Describe each variable that has Kiln's prefix but is neither a setting nor a service link."""
    names = [*map(name_variable, list_keys()), CONFIG_VARIABLE]
    for name in _nameless(environ):
        if is_service_link(name, environ[name]):
            continue
        # the nearest name is not that of the short variable
        is_long = name.upper() == f"{NETWORK_VARIABLE}__NAME"
        hint = f"; did you mean {NETWORK_VARIABLE}?" if is_long else suggest_key(name.upper(), names)
        yield f"environment {name}: no such setting{hint or _SEE_FILE}"


def service_links(environ: Mapping[str, str]) -> tuple[str, ...]:
    """List the variables that Kubernetes sets for a Service such as `kiln-bridge`, by name."""
    return tuple(name for name in _nameless(environ) if is_service_link(name, environ[name]))


def _nameless(environ: Mapping[str, str]) -> Iterator[str]:
    """List the variables with Kiln's prefix that are not settings, by name."""
    known = list_keys()
    names = {name_variable(key): free for key, free in known.items()}
    free_tables = {f"{name}__" for name, free in names.items() if free}
    tables = {name_variable(key[:depth]) for key in known for depth in range(1, len(key))}
    for name in sorted(environ):
        upper = name.upper()
        if not upper.startswith(ENV_PREFIX) or upper == CONFIG_VARIABLE or upper in names or upper in tables:
            continue
        table = next((prefix for prefix in free_tables if upper.startswith(prefix)), None)
        if table is None or "__" in upper.removeprefix(table):
            yield name


def unreadable_tables(environ: Mapping[str, str]) -> Iterable[str]:
    """Describe each variable of a section or table that is not a JSON object."""
    known = list_keys()
    tables = {name_variable(key[:depth]) for key, free in known.items() for depth in range(1, len(key) + free)}
    tables.discard(NETWORK_VARIABLE)
    for name in sorted(environ):
        if name.upper() not in tables:
            continue
        try:
            value = parse_json(environ[name])
        except ValueError as error:
            yield f"environment {name}: {error}"
            continue
        if not isinstance(value, dict):
            yield f"environment {name}: expected a JSON object, such as " + '{"key": "value"}'


@dataclass(frozen=True)
class ValueSources:
    """Sources of values: the settings file and its text, the variables that are set, the command line."""

    path: Path
    text: str
    variables: frozenset[str]
    command_line: frozenset[Keys]

    def name(self, keys: Keys) -> str:
        """Name the source of a key's value: an option, a variable, or a line of the file."""
        if any(key[: len(keys)] == keys for key in self.command_line):
            return f"--{keys[0]}"
        for depth in range(len(keys), 0, -1):
            if name_variable(keys[:depth]) in self.variables:
                return f"environment {name_variable(keys[:depth])}"
        line = line_of(self.text, keys)
        file = f"{self.path}:{line}" if line else str(self.path)
        # an invalid section may come from the file or from variables of its keys
        within = sorted(name for name in self.variables if keys and name.startswith(f"{name_variable(keys)}__"))
        return ", environment ".join([file, *within])


def problem(details: ErrorDetails, places: ValueSources) -> str:
    """Describe one of pydantic's errors in a line: source, key, value, and what is expected."""
    loc = details["loc"]
    keys = tuple(str(key) for key in loc if isinstance(key, str) and key not in ("[key]",))
    known = list_keys()
    message = _PARSING.sub("", details["msg"].removeprefix("Value error, ").removeprefix("Input should be "))
    match details["type"]:
        case "extra_forbidden":
            return f"{places.name(keys)}: {join_key(keys)}: no such setting{_nearest_key(keys, known)}"
        case "missing":
            return f"{places.name(keys[:-1])}: {join_key(keys)}: missing, and it has no default"
        case "model_type":
            message = f"a table: [{join_key(keys)}]"
        case "int_parsing_size":
            message = "a smaller number"
        case "greater_than_equal" | "less_than_equal" if isinstance(details["input"], timedelta):
            message = f"{_format_value(find_bounds(keys)[0])} to {_format_value(find_bounds(keys)[1])}"
        case "item":  # an item of a list
            return f"{places.name(keys)}: {join_key(keys)}: {message}"
        case "value_error" if not isinstance(details["input"], str | int | float):  # a table or a list as a whole
            return f"{places.name(keys)}: {join_key(keys)}: {message}" if keys else message
    secret = is_secret(keys) if keys in known else is_secret_key(".".join(keys))
    shown = MASK if secret else mask_secrets(json.dumps(details["input"], default=_format_value, ensure_ascii=False))
    shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}…"
    return f"{places.name(keys)}: {join_key(keys)} = {shown}: expected {message.removeprefix('expected ')}"


_MAX_SHOWN = 200  # characters of a value


def _format_value(value: object) -> str:
    return duration_text(value) if isinstance(value, timedelta) else str(value)


# suffix of pydantic's messages for text that it cannot parse
_PARSING = re.compile(r", unable to (parse string as an? \w+|interpret input)$")


def _nearest_key(keys: Keys, known: Iterable[Keys]) -> str:
    """Suggest a key: a similar name in the same section, else the same name elsewhere, else a similar name."""
    beside = {key[: len(keys)] for key in known if key[: len(keys) - 1] == keys[:-1] and len(key) >= len(keys)}
    for candidates, cutoff in ((beside, 0.6), (set(known), 1.0), (set(known), 0.75)):
        match = difflib.get_close_matches(keys[-1], sorted({key[-1] for key in candidates}), n=1, cutoff=cutoff)
        if match:
            return f"; did you mean {join_key(min(key for key in candidates if key[-1] == match[0]))}?"
    return _SEE_FILE


def line_of(text: str, keys: Keys) -> int:
    """Find the line (from 1) that sets a key or begins its section; 0 if it cannot be determined."""
    table: Keys = ()
    best = 0
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[([^\[\]]+)\]\s*(#.*)?$", line)
        if header:
            table = tuple(part.strip().strip("\"'") for part in header[1].split("."))
            if keys[: len(table)] == table:
                best = number
            continue
        assignment = re.match(r"\s*([^#=\s]+|\"[^\"]*\"|'[^']*')\s*=", line)
        if assignment:
            name = assignment[1]
            path = (*table, *([name.strip("\"'")] if name[0] in "\"'" else name.split(".")))
            if keys[: len(path)] == path:
                return number
    return best
