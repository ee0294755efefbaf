"""Effective settings as TOML, for `kiln config show`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import timedelta

from pydantic import SecretStr

from kiln.conf.settings.durations import duration_text
from kiln.conf.settings.keys import Keys, get_value, join_key, list_keys
from kiln.conf.settings.model import Settings
from kiln.conf.settings.reading import LoadedSettings
from kiln.conf.settings.secrets import MASK, is_secret_key, mask_secrets


def format_settings(loaded: LoadedSettings) -> str:
    """Render the settings as TOML, with secrets masked and the source of each value that is not a default."""
    head = f"# settings file: {loaded.file}; values that are not defaults have their source"
    return _render_toml(head, list_keys(), loaded, lambda keys, _: f"  # {loaded.source(keys)}")


def format_changed_settings(loaded: LoadedSettings) -> str:
    """Render the settings that are not defaults as TOML, with source and default."""
    defaults = _build_defaults()
    keys = [key for key in list_keys() if get_value(loaded.settings, key) != get_value(defaults, key)]
    head = f"# settings file: {loaded.file}; values that are not defaults" if keys else "# all values are defaults"
    return _render_toml(head, keys, loaded, lambda keys, default: f"  # {loaded.source(keys)}; default: {default}")


def _render_toml(head: str, wanted: Iterable[Keys], loaded: LoadedSettings, remark: Callable[[Keys, str], str]) -> str:
    defaults = _build_defaults()
    lines: list[str] = []
    table: Keys = ()
    for keys in wanted:
        if keys[:-1] != table:
            table = keys[:-1]
            lines += ["", f"[{join_key(table)}]"]
        value, default = get_value(loaded.settings, keys), get_value(defaults, keys)
        # the source of a value that equals the default does not matter
        lines.append(
            f"{keys[-1]} = {_format_value(value)}" + ("" if value == default else remark(keys, _format_value(default)))
        )
    return "\n".join([head, *lines, ""])


def _build_defaults() -> Settings:
    return Settings(state=Settings().state.absolute())


def _format_value(value: object) -> str:
    match value:
        case timedelta():
            return json.dumps(duration_text(value))
        case SecretStr():
            return json.dumps(str(value))
        case dict():
            items = (
                f"{json.dumps(str(key))} = {_format_value(MASK if is_secret_key(str(key)) else item)}"
                for key, item in value.items()
            )
            return f"{{ {', '.join(items)} }}" if value else "{}"
        case tuple() | list():
            return f"[{', '.join(map(_format_value, value))}]"
        case bool():
            return str(value).lower()
        case int() | float():
            return str(value)
    return json.dumps(mask_secrets(str(value)), ensure_ascii=False)
