"""Signature policies: which pubsub messages are accepted on a topic, and whether own messages are signed there.

This module imports no codec, because the settings are read at every start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

Policy = Literal["strict", "none", "either"]
"""`strict`: a valid signature is required. `none`: signatures are not allowed. `either`: both are accepted."""


def match_policy(topic: str, patterns: Mapping[str, Policy]) -> Policy | None:
    """Return the policy of the longest pattern that matches a topic's name, or `None` if none does.

    Args:
        patterns: Policies by pattern, in which `*` stands for any characters, slashes included.
    """
    matching = [pattern for pattern in patterns if match_topic(topic, pattern)]
    return patterns[max(matching, key=len)] if matching else None


def match_topic(topic: str, pattern: str) -> bool:
    """Return whether a pattern, in which `*` stands for any characters, matches a topic's name."""
    return fnmatchcase(topic, re.sub(r"[?[]", r"[\g<0>]", pattern))
