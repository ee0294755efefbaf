"""Keys of the settings, and how they are written in files, environment variables and messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from annotated_types import Ge, Le
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from kiln.conf.settings.model import Settings

ENV_PREFIX = "KILN_"
CONFIG_VARIABLE = "KILN_CONFIG"
NETWORK_VARIABLE = "KILN_NETWORK"
"""Environment variable that sets `network.name`, with a short name like the option `--network`."""
NETWORK_NAME = ("network", "name")

Keys = tuple[str, ...]
"""A key as a path from the top: `("batch", "window")`."""


def list_keys(model: type[BaseModel] = Settings, above: Keys = ()) -> dict[Keys, bool]:
    """List the keys of the settings. The value is true if the key is a free table, in which users choose the keys."""
    keys: dict[Keys, bool] = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            keys |= list_keys(kind, (*above, name))
        else:
            keys[(*above, name)] = str(kind).startswith("dict[")
    return keys


def is_secret(keys: Keys) -> bool:
    """Return true if the value of a key must not be shown: a secret, or a table in which users choose the keys."""
    kind = find_field(keys).annotation
    return kind is SecretStr or str(kind).startswith("dict[")


def find_bounds(keys: Keys) -> tuple[object, object]:
    """Find the minimum and the maximum of a number or duration, each `None` if not declared."""
    metadata = find_field(keys).metadata
    return (
        next((limit.ge for limit in metadata if isinstance(limit, Ge)), None),
        next((limit.le for limit in metadata if isinstance(limit, Le)), None),
    )


def find_field(keys: Keys) -> FieldInfo:
    """Find the declaration of a key."""
    model: type[BaseModel] = Settings
    for name in keys[:-1]:
        section = model.model_fields[name].annotation
        assert isinstance(section, type)
        assert issubclass(section, BaseModel)
        model = section
    return model.model_fields[keys[-1]]


def get_value(model: BaseModel, keys: Keys) -> object:
    """Look up the value of a key."""
    value: object = model
    for key in keys:
        value = getattr(value, key)
    return value


def name_variable(keys: Keys) -> str:
    """Name the environment variable that overrides a key: `KILN_BATCH__WINDOW`."""
    if keys == NETWORK_NAME:
        return NETWORK_VARIABLE
    return ENV_PREFIX + "__".join(keys).upper()


def join_key(keys: Iterable[object]) -> str:
    """Format a key as text: `batch.window`."""
    return ".".join(str(key) for key in keys)


def suggest_key(wrong: str, known: Iterable[str]) -> str:
    """Suggest the most similar known name, as `; did you mean X?`. Return "" if no name is similar."""
    match = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]}?" if match else ""
