"""Reading of the settings from file, environment and command line."""

from __future__ import annotations

import json
import logging
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path

from pydantic import SecretStr, ValidationError

from kiln.conf.process.errors import SettingsError
from kiln.conf.process.location import expand_path
from kiln.conf.process.small_files import read_small_file
from kiln.conf.settings.addresses import check_path
from kiln.conf.settings.durations import duration_text
from kiln.conf.settings.faults import ValueSources, find_unknown_variables, problem, service_links, unreadable_tables
from kiln.conf.settings.keys import (
    CONFIG_VARIABLE,
    ENV_PREFIX,
    NETWORK_NAME,
    NETWORK_VARIABLE,
    Keys,
    get_value,
    join_key,
    list_keys,
    name_variable,
)
from kiln.conf.settings.model import Settings
from kiln.conf.settings.values import check_depth, parse_json

_LOG = logging.getLogger(__name__)

_MAX_FILE = 1 << 20

DEFAULT_FILE = Path(__file__).resolve().parents[1] / "kiln.toml"


@dataclass(frozen=True)
class LoadedSettings:
    """Settings and the source of each."""

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
    """Read the settings file (`config`, else `KILN_CONFIG`, else `conf/kiln.toml`) and the environment.

    Arguments that are not None take precedence over both.

    Raises:
        SettingsError: The settings are invalid; the error lists all problems.
    """
    if os.environ.get(CONFIG_VARIABLE) == "":
        raise SettingsError([f"environment {CONFIG_VARIABLE}: expected the path of a settings file. Set or unset it"])
    path = config or Path(os.environ.get(CONFIG_VARIABLE, DEFAULT_FILE))
    text = _file_text(path)
    file = _parse_toml(path, text)
    problems = [*find_unknown_variables(os.environ), *unreadable_tables(os.environ)]
    if problems:
        raise SettingsError(problems)
    links = service_links(os.environ)
    _warn_of_links(links)
    environment = read_variables({name: value for name, value in os.environ.items() if name not in links})
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


def read_variables(environ: Mapping[str, str]) -> dict[str, object]:
    """Read the settings in environment variables as a tree, with values as text.

    The variable of a section or of a free table is a JSON object, with which the variables of single keys are merged.
    Values of a free table may be JSON. Names of variables do not depend on case, and keys of free tables are lower
    case.
    """
    known = list_keys()
    found: dict[Keys, str] = {}
    for name, text in environ.items():
        upper = name.upper()
        if upper.startswith(ENV_PREFIX) and upper != CONFIG_VARIABLE:
            parts = tuple(upper.removeprefix(ENV_PREFIX).lower().split("__"))
            found[NETWORK_NAME if upper == NETWORK_VARIABLE else parts] = text
    tree: dict[str, object] = {}
    for keys in sorted(found, key=len):
        value: object = found[keys]
        if known.get(keys) is not False:  # no single key
            with suppress(ValueError):
                value = parse_json(found[keys])
        branch: dict[str, object] = {keys[-1]: value}
        for key in reversed(keys[:-1]):
            branch = {key: branch}
        tree = _merge(tree, branch)
    return tree


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


@cache  # once in a process, however often settings are read
def _warn_of_links(names: tuple[str, ...]) -> None:
    if names:
        _LOG.warning(
            "environment: ignored %s: these are service links of Kubernetes, not settings. To avoid them, set "
            "enableServiceLinks: false in the pod",
            ", ".join(names),
        )


def load_settings(config: Path | None = None, *, state: Path | None = None, network: str | None = None) -> Settings:
    """Read the settings as `load`, without their sources."""
    return load(config, state=state, network=network).settings


def environment(settings: Settings) -> dict[str, str]:
    """Build the variables that give another process these settings. They contain passwords in clear text: never print
    them."""
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
        return read_small_file(path, _MAX_FILE).decode("utf-8-sig")  # editors of Windows begin a file with a BOM
    except FileNotFoundError:
        raise SettingsError([f"{path}: no such settings file (set by --config or {CONFIG_VARIABLE})"]) from None
    except OSError as error:
        raise SettingsError([f"cannot read {path}: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise SettingsError([f"cannot read {path}: not UTF-8 at byte {error.start}. Save it as UTF-8"]) from None


def _parse_toml(path: Path, text: str) -> dict[str, object]:
    try:
        tree: dict[str, object] = tomllib.loads(text)
        check_depth(tree)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError([f"{path}: not TOML: {error}"]) from None
    except RecursionError:
        raise SettingsError([f"{path}: nested too deeply"]) from None
    except ValueError as error:
        # int() has a limit of its own
        text = "a number has thousands of digits" if "digits" in str(error) else str(error)
        raise SettingsError([f"{path}: {text}"]) from None
    return tree


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
