"""Types of values in several sections of the settings, and masking of secrets."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from kiln.conf.settings.durations import duration_text

MASK: Final = "**********"

# hadoop.security.sensitive-config-keys, spark.redaction.regex, Kafka's type password, the options of object stores
_SECRET: Final = re.compile(
    r"secret|passw|passphrase|pwd|token|credential|jaas|oauth|keytab|private|signature|(^|[._-])sas([._-]|$)|pass$|auth$"
    r"|(^|[._\- ])keys?([._\- ]|$)|(?-i:[a-z]Key)",
    re.IGNORECASE,
)
_USER_INFO: Final = re.compile(r"(?<=://)[^/@\s]+(?=@)")
# -Djavax.net.ssl.keyStorePassword=…, password="…"; and --password …
_ASSIGNED: Final = re.compile(
    r"(?<![\w.\-])(?P<name>[\w.\-]++)(?P<equals>[\"']?\s*(?:=|:(?!//))\s*)"
    r"(?P<value>\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s;,&\"']+)"
)


def is_secret_key(key: str) -> bool:
    """Return true if the name of a key suggests a secret. Use it for tables in which users choose the keys."""
    return _SECRET.search(key) is not None


def mask_secrets(text: str) -> str:
    """Mask the secrets in a text: values assigned to secret names, and user and password of URLs."""
    return _ASSIGNED.sub(_mask, _USER_INFO.sub(MASK, text))


def _mask(found: re.Match[str]) -> str:
    return f"{found['name']}{found['equals']}{MASK}" if is_secret_key(found["name"]) else found[0]


_Number = TypeVar("_Number", int, timedelta)


def split_items(value: object) -> object:
    """Split the text of an environment variable into a list: "archive, batch" or '["archive", "batch"]'."""
    if isinstance(value, str):
        if value.startswith("["):
            with suppress(json.JSONDecodeError):
                return json.loads(value)
        return [item for item in re.split(r'[\[\]",\s]+', value) if item]
    return value


def like(pattern: str, expected: str) -> AfterValidator:
    """Validate that a text matches a pattern in full. `expected` describes the pattern in the error."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(expected)
        return value

    return AfterValidator(check)


def _switch(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    try:
        return validate(value)
    except ValidationError:
        raise ValueError('true, false or "auto"') from None


Names = Annotated[tuple[str, ...], BeforeValidator(split_items)]
"""A list of names or addresses."""


def zero_or(least: _Number) -> AfterValidator:
    """Validate that a value is zero or at least `least`."""

    def check(value: _Number) -> _Number:
        if value and value < least:
            raise ValueError(
                f'"0s" or at least {duration_text(least)}' if isinstance(least, timedelta) else f"0 or at least {least}"
            )
        return value

    return AfterValidator(check)


def within_megabytes(least: int, most: int) -> AfterValidator:
    """Validate that a `Memory` is within bounds, given in MB."""

    def check(value: str) -> str:
        if not least <= int(value[:-1]) << (10 if value.endswith("g") else 0) <= most:
            raise ValueError(f'"{least}m" to "{most >> 10}g"')
        return value

    return AfterValidator(check)


def _refuse_empty(value: object) -> object:
    if value == "":
        raise ValueError('the path of a folder ("." for the current one)')
    return value


Folder = Annotated[Path, BeforeValidator(_refuse_empty)]
"""A folder on this machine."""

FileName = Annotated[str, like(r"[^\0]*", "the path of a file")]
"""A file on this machine; empty for none."""

Memory = Annotated[str, like(r"[0-9]{1,9}[mg]", 'a size as -Xmx takes it, such as "384m" or "2g"')]
"""Heap size of a JVM."""

StorageUri = Annotated[
    str,
    like(
        r"(?!.*://).*|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[\w.=@+-]+)*/?",
        'a path, or s3://BUCKET/PREFIX, such as "s3://kiln/lake"',
    ),
]
"""Folder on this machine or in an object store."""

Switch = Annotated[bool | Literal["auto"], WrapValidator(_switch)]
"""True, false, or "auto". conf/kiln.toml describes when "auto" is true."""
