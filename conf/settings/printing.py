"""The settings in force as TOML, for `kiln config show`."""

from __future__ import annotations

import json
from datetime import timedelta

from pydantic import SecretStr

from conf.settings.durations import duration_text
from conf.settings.keys import Keys, dotted, known_keys, value_at
from conf.settings.model import Settings
from conf.settings.reading import Loaded
from conf.settings.secrets import MASK, may_be_secret, without_secrets


def shown(loaded: Loaded) -> str:
    """The settings as TOML, secrets masked, each value that is not a default with where it came from."""
    defaults = Settings(state=Settings().state.absolute())
    lines: list[str] = []
    table: Keys = ()
    for keys in known_keys():
        if keys[:-1] != table:
            table = keys[:-1]
            lines += ["", f"[{dotted(table)}]"]
        value = value_at(loaded.settings, keys)
        # a file that repeats a default says nothing new
        same = value == value_at(defaults, keys)
        lines.append(f"{keys[-1]} = {_value_text(value)}" + ("" if same else f"  # {loaded.source(keys)}"))
    return "\n".join(
        [f"# settings file: {loaded.file}; where a value is not the default, its place is named", *lines, ""]
    )


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
