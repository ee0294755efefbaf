"""Reading of the settings (file, environment and command line), description of invalid ones, and output as TOML."""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path

from pydantic import SecretStr, ValidationError
from pydantic_core import ErrorDetails

from kiln.conf.process.errors import SettingsError
from kiln.conf.process.location import expand_path
from kiln.conf.settings.addresses import check_path
from kiln.conf.settings.durations import duration_text
from kiln.conf.settings.keys import (
    CONFIG_VARIABLE,
    ENV_PREFIX,
    NETWORK_NAME,
    NETWORK_VARIABLE,
    Keys,
    find_bounds,
    get_value,
    is_secret,
    join_key,
    list_keys,
    name_variable,
    suggest_key,
)
from kiln.conf.settings.model import Settings
from kiln.conf.settings.service_links import is_service_link
from kiln.conf.settings.values import MASK, is_secret_key, mask_secrets

_SEE_FILE = "; see conf/kiln.toml for all settings"
_LOG = logging.getLogger(__name__)


def find_unknown_variables(environ: Mapping[str, str]) -> Iterable[str]:
    """Describe each environment variable that has Kiln's prefix but is neither a setting nor a service link."""
    names = [*map(name_variable, list_keys()), CONFIG_VARIABLE]
    for name in _nameless(environ):
        if is_service_link(name, environ[name]):
            continue
        # the user means the short variable, whose name is not the most similar one
        is_long = name.upper() == f"{NETWORK_VARIABLE}__NAME"
        hint = f"; did you mean {NETWORK_VARIABLE}?" if is_long else suggest_key(name.upper(), names)
        yield f"environment {name}: no such setting{hint or _SEE_FILE}"


def service_links(environ: Mapping[str, str]) -> tuple[str, ...]:
    """List the names of the variables that Kubernetes sets for a Service such as `kiln-bridge`, in order."""
    return tuple(name for name in _nameless(environ) if is_service_link(name, environ[name]))


def _nameless(environ: Mapping[str, str]) -> Iterator[str]:
    """List the names of the variables with Kiln's prefix that are not settings, in order."""
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


@dataclass(frozen=True)
class ValueSources:
    """Sources of the settings' values, which error messages name."""

    path: Path
    """path of the settings file"""
    text: str
    """content of the settings file"""
    variables: frozenset[str]
    """names of the environment variables that are set"""
    command_line: frozenset[Keys]
    """keys that options of the command line set"""

    def name(self, keys: Keys) -> str:
        """Name the source of a key's value: an option, a variable, or a line of the file."""
        if any(key[: len(keys)] == keys for key in self.command_line):
            return f"--{keys[0]}"
        for depth in range(len(keys), 0, -1):
            if name_variable(keys[:depth]) in self.variables:
                return f"environment {name_variable(keys[:depth])}"
        line = line_of(self.text, keys)
        file = f"{self.path}:{line}" if line else str(self.path)
        # an invalid section may come from the file, or from the variables of keys in the section
        within = sorted(name for name in self.variables if keys and name.startswith(f"{name_variable(keys)}__"))
        return ", environment ".join([file, *within])


def problem(details: ErrorDetails, places: ValueSources) -> str:
    """Describe an error of pydantic in one line: source, key, value, and what is expected."""
    loc = details["loc"]
    keys = tuple(str(key) for key in loc if isinstance(key, str) and key not in ("[key]",))
    known = list_keys()
    message = _PARSING.sub("", details["msg"].removeprefix("Value error, ").removeprefix("Input should be "))
    match details["type"]:
        case "extra_forbidden":
            return f"{places.name(keys)}: {join_key(keys)}: no such setting{_nearest_key(keys, known)}"
        case "missing":
            return f"{places.name(keys[:-1])}: {join_key(keys)}: this key is missing, and has no default"
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
    """Suggest a key with a similar name in the same section, else in another section."""
    beside = {key[: len(keys)] for key in known if key[: len(keys) - 1] == keys[:-1] and len(key) >= len(keys)}
    for candidates, cutoff in ((beside, 0.6), (set(known), 1.0), (set(known), 0.75)):
        match = difflib.get_close_matches(keys[-1], sorted({key[-1] for key in candidates}), n=1, cutoff=cutoff)
        if match:
            return f"; did you mean {join_key(min(key for key in candidates if key[-1] == match[0]))}?"
    return _SEE_FILE


def line_of(text: str, keys: Keys) -> int:
    """Find the number of the line that sets a key, or else of the line that begins the key's section.

    Lines count from 1. Return 0 if there is no such line.
    """
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


DEFAULT_FILE = Path(__file__).resolve().parents[1] / "kiln.toml"


@dataclass(frozen=True)
class LoadedSettings:
    """Settings, and the source of each value."""

    settings: Settings
    file: Path
    from_file: frozenset[Keys]
    from_environment: frozenset[Keys]
    from_command_line: frozenset[Keys]

    def source(self, keys: Keys) -> str:
        """Describe the source of a key's value."""
        if keys in self.from_command_line:
            return "command line"
        if any(key[: len(keys)] == keys for key in self.from_environment):
            return f"environment {name_variable(keys)}"
        if any(key[: len(keys)] == keys for key in self.from_file):
            return str(self.file)
        return "default"


def load(config: Path | None = None, *, state: Path | None = None, network: str | None = None) -> LoadedSettings:
    """Read the settings from a file and the environment, which takes precedence over the file.

    Args:
        config: The settings file; by default `KILN_CONFIG`, else `conf/kiln.toml`.
        state: Value of `state` that takes precedence over both.
        network: Value of `network.name` that takes precedence over both.

    Raises:
        SettingsError: The settings are invalid. The error lists all problems.
    """
    if os.environ.get(CONFIG_VARIABLE) == "":
        raise SettingsError(
            [f"environment {CONFIG_VARIABLE}: empty. Set it to the path of a settings file, or unset it"]
        )
    path = config or Path(os.environ.get(CONFIG_VARIABLE, DEFAULT_FILE))
    text = _file_text(path)
    file = _parse_toml(path, text)
    links = service_links(os.environ)
    environment, unreadable = read_variables({name: text for name, text in os.environ.items() if name not in links})
    if problems := [*find_unknown_variables(os.environ), *unreadable]:
        raise SettingsError(problems)
    _warn_of_links(links)
    command_line: dict[str, object] = {} if state is None else {"state": state}
    if network is not None:
        command_line["network"] = {"name": network}
    merged = _merge(_merge(_merge(Settings().model_dump(), file), environment), command_line)
    try:
        settings = Settings.model_validate(merged)
    except ValidationError as error:
        places = ValueSources(path, text, frozenset(map(str.upper, os.environ)), _leaves(command_line))
        raise SettingsError(problem(details, places) for details in error.errors()) from None
    resolved = settings.model_copy(update={"state": expand_path(settings.state)})
    loaded = LoadedSettings(
        settings=resolved,
        file=path,
        from_file=_leaves(file),
        from_environment=_leaves(environment),
        from_command_line=_leaves(command_line),
    )
    if problems := list(_find_unusable_paths(loaded)):
        raise SettingsError(problems)
    return loaded


def read_variables(environ: Mapping[str, str]) -> tuple[dict[str, object], list[str]]:
    """Read the settings in environment variables.

    A variable of a section, or of a free table, in which users choose the keys, contains a JSON object. Variables of
    single keys are merged into the object. In a free table, the variable of a key may have a JSON value,
    and the key becomes lower case. The case of variable names does not matter.

    Returns:
        The values by key, as nested dicts, and a description of each variable that cannot be read.
    """
    known = list_keys()
    tables = {key[:depth] for key, free in known.items() for depth in range(1, len(key) + free)}
    found: dict[Keys, str] = {}
    for name in sorted(environ):
        upper = name.upper()
        if upper.startswith(ENV_PREFIX) and upper != CONFIG_VARIABLE:
            parts = tuple(upper.removeprefix(ENV_PREFIX).lower().split("__"))
            found[NETWORK_NAME if upper == NETWORK_VARIABLE else parts] = name
    tree: dict[str, object] = {}
    problems = []
    for keys, name in sorted(found.items(), key=lambda item: len(item[0])):
        value: object = environ[name]
        if known.get(keys) is not False:  # no single key
            try:
                value = json.loads(environ[name])
            except ValueError as error:
                problems += [f"environment {name}: not JSON: {error}"] if keys in tables else []
            else:
                if keys in tables and not isinstance(value, dict):
                    problems.append(f'environment {name}: expected a JSON object, such as {{"key": "value"}}')
        branch: dict[str, object] = {keys[-1]: value}
        for key in reversed(keys[:-1]):
            branch = {key: branch}
        tree = _merge(tree, branch)
    return tree, problems


def _find_unusable_paths(loaded: LoadedSettings) -> Iterator[str]:
    settings = loaded.settings
    folders: dict[Keys, Path | None] = {("state",): settings.state}
    folders |= {("lake", "uri"): settings.lake_root.folder} if settings.lake.uri else {}
    folders |= {("checkpoints", "uri"): settings.checkpoints_root.folder} if settings.checkpoints.uri else {}
    for keys, folder in folders.items():
        try:
            check_path("" if folder is None else str(folder))
        except ValueError as error:
            shown = json.dumps(str(folder), ensure_ascii=False)
            yield f"{loaded.source(keys)}: {join_key(keys)} = {shown}: {error}"


@cache
def _warn_of_links(names: tuple[str, ...]) -> None:
    if names:
        _LOG.warning(
            "environment: ignored %s, because these are service links of Kubernetes, not settings. To avoid this "
            "warning, set enableServiceLinks: false in the pod",
            ", ".join(names),
        )


def load_settings(config: Path | None = None) -> Settings:
    """Read the settings like `load`, and return them without their sources."""
    return load(config).settings


def environment(settings: Settings) -> dict[str, str]:
    """Build the environment variables that pass these settings to another process.

    They contain passwords in clear text: never print them.
    """
    return {name_variable(keys): _variable_text(get_value(settings, keys)) for keys in list_keys()}


def _variable_text(value: object) -> str:
    match value:
        case str() | Path():
            return str(value)
        case timedelta():
            return duration_text(value)
        case SecretStr():
            return value.get_secret_value()
        case _:
            return json.dumps(value)


def _file_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")  # editors of Windows begin a file with a BOM
    except FileNotFoundError:
        raise SettingsError([f"{path}: no such settings file (set by --config or {CONFIG_VARIABLE})"]) from None
    except OSError as error:
        raise SettingsError([f"cannot read {path}: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise SettingsError([f"cannot read {path}: not UTF-8 at byte {error.start}. Save it as UTF-8"]) from None


def _parse_toml(path: Path, text: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError([f"{path}: not TOML: {error}"]) from None


def _merge(low: Mapping[str, object], high: Mapping[str, object]) -> dict[str, object]:
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _leaves(tree: Mapping[str, object], above: Keys = ()) -> frozenset[Keys]:
    found: set[Keys] = set()
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= _leaves(value, (*above, key))
        else:
            found.add((*above, key))
    return frozenset(found)


def format_settings(loaded: LoadedSettings, *, only_changed: bool = False) -> str:
    """Render the settings as TOML, with secrets masked. Values that are not defaults are followed by their source.

    Args:
        only_changed: If true, render only the values that are not defaults, with source and default.
    """
    defaults = Settings(state=Settings().state.absolute())
    lines = [f"# settings file: {loaded.file}; each value that is not a default is followed by its source"]
    table: Keys = ()
    for keys in list_keys():
        value, default = get_value(loaded.settings, keys), get_value(defaults, keys)
        if only_changed and value == default:
            continue
        if keys[:-1] != table:
            table = keys[:-1]
            lines += ["", f"[{join_key(table)}]"]
        # the source of a value that equals the default does not matter
        remark = "" if value == default else f"  # {loaded.source(keys)}"
        lines.append(
            f"{keys[-1]} = {_format_toml(value)}{remark}"
            + (f"; default: {_format_toml(default)}" if only_changed else "")
        )
    if only_changed:
        lines[0] = (
            f"# settings file: {loaded.file}; values that are not defaults"
            if lines[1:]
            else "# all values are defaults"
        )
    return "\n".join([*lines, ""])


def _format_toml(value: object) -> str:
    match value:
        case timedelta():
            return json.dumps(duration_text(value))
        case SecretStr():
            return json.dumps(str(value))
        case dict():
            items = (
                f"{json.dumps(str(key))} = {_format_toml(MASK if is_secret_key(str(key)) else item)}"
                for key, item in value.items()
            )
            return f"{{ {', '.join(items)} }}" if value else "{}"
        case tuple() | list():
            return f"[{', '.join(map(_format_toml, value))}]"
        case bool():
            return str(value).lower()
        case int() | float():
            return str(value)
    return json.dumps(mask_secrets(str(value)), ensure_ascii=False)
