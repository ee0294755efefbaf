"""The keys of the settings: which there are, and how a file, a variable and a message write them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import BaseModel

from kiln.conf.settings.model import Settings

ENV_PREFIX = "KILN_"
CONFIG_VARIABLE = "KILN_CONFIG"
NETWORK_VARIABLE = "KILN_NETWORK"
"""The variable of `network.name`, short as the option `--network` is."""
NETWORK_NAME = ("network", "name")

Keys = tuple[str, ...]
"""A key as a path from the top: `("batch", "window")`."""


def list_keys(model: type[BaseModel] = Settings, above: Keys = ()) -> dict[Keys, bool]:
    """Every key as a path from the top (`("batch", "window")`), and whether it is a free table (any key goes below)."""
    found: dict[Keys, bool] = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= list_keys(kind, (*above, name))
        else:
            found[(*above, name)] = str(kind).startswith("dict[")
    return found


def value_at(model: BaseModel, keys: Keys) -> object:
    """Look up the value of a key."""
    value: object = model
    for key in keys:
        value = getattr(value, key)
    return value


def variable(keys: Keys) -> str:
    """Name the environment variable that overrides a key: `KILN_BATCH__WINDOW`."""
    if keys == NETWORK_NAME:
        return NETWORK_VARIABLE
    return ENV_PREFIX + "__".join(keys).upper()


def join_key(keys: Iterable[object]) -> str:
    """Format a key as text: `batch.window`."""
    return ".".join(str(key) for key in keys)


def suggest_nearest(wrong: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known name nearest to the wrong one, or nothing when none is near."""
    match = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]}?" if match else ""
