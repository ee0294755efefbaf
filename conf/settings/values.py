"""Types of values that several sections of the settings have."""

import json
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ValidationError, ValidatorFunctionWrapHandler, WrapValidator


def split_items(value: object) -> object:
    """Split the text of an environment variable into a list: "archive, batch" or '["archive", "batch"]'."""
    if isinstance(value, str):
        if value.startswith("["):
            try:
                return json.loads(value)
            except json.JSONDecodeError:
                pass
        return [item for item in re.split(r'[\[\]",\s]+', value) if item]
    return value


def like(pattern: str, expected: str) -> AfterValidator:
    """Validate that a text matches a pattern in full; `expected` describes the pattern."""

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

Memory = Annotated[str, like(r"[0-9]+[mg]", 'a size as -Xmx takes it, such as "384m" or "2g"')]
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
"""True, false, or derived from other settings."""
