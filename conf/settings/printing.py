"""The settings in force as TOML, for `kiln config show`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import timedelta

from pydantic import SecretStr

from kiln.conf.settings.durations import duration_text
from kiln.conf.settings.keys import Keys, join_key, list_keys, value_at
from kiln.conf.settings.model import Settings
from kiln.conf.settings.reading import LoadedSettings
from kiln.conf.settings.secrets import MASK, may_be_secret, without_secrets


def format_settings(loaded: LoadedSettings) -> str:
    """Render the settings as TOML, with secrets masked and the source of each value that is not a default."""
    said = f"# settings file: {loaded.file}; where a value is not the default, its place is named"
    return _toml(said, list_keys(), loaded, lambda keys, _: f"  # {loaded.source(keys)}")


def find_changed(loaded: LoadedSettings) -> str:
    """As `format_settings`, only the values that are not defaults, each with the default too."""
    defaults = _defaults()
    keys = [each for each in list_keys() if value_at(loaded.settings, each) != value_at(defaults, each)]
    said = f"# settings file: {loaded.file}; what is not the default" if keys else "# every value is the default"
    return _toml(said, keys, loaded, lambda keys, default: f"  # {loaded.source(keys)}; default: {default}")


def _toml(said: str, wanted: Iterable[Keys], loaded: LoadedSettings, remark: Callable[[Keys, str], str]) -> str:
    defaults = _defaults()
    lines: list[str] = []
    table: Keys = ()
    for keys in wanted:
        if keys[:-1] != table:
            table = keys[:-1]
            lines += ["", f"[{join_key(table)}]"]
        value, default = value_at(loaded.settings, keys), value_at(defaults, keys)
        # a file that repeats a default says nothing new
        lines.append(
            f"{keys[-1]} = {_value_text(value)}" + ("" if value == default else remark(keys, _value_text(default)))
        )
    return "\n".join([said, *lines, ""])


def _defaults() -> Settings:
    return Settings(state=Settings().state.absolute())


def _value_text(value: object) -> str:
    match value:
        case timedelta():
            return json.dumps(duration_text(value))
        case SecretStr():
            return json.dumps(str(value))
        case dict():
            items = (
                f"{json.dumps(str(key))} = {_value_text(MASK if may_be_secret(str(key)) else item)}"
                for key, item in value.items()
            )
            return f"{{ {', '.join(items)} }}" if value else "{}"
        case tuple() | list():
            return f"[{', '.join(map(_value_text, value))}]"
        case bool():
            return str(value).lower()
        case int() | float():
            return str(value)
    return json.dumps(without_secrets(str(value)), ensure_ascii=False)
