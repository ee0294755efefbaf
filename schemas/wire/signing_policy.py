"""Signature policies of topics: which pubsub messages are accepted, and whether Kiln signs its own messages.

The settings use this module at every start, so it imports nothing slow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

Policy = Literal["strict", "none", "either"]
"""`strict`: messages need a valid signature. `none`: messages must be unsigned. `either`: they may be
unsigned, but a signature must be valid."""


def match_policy(topic: str, patterns: Mapping[str, Policy]) -> Policy | None:
    """Return the policy of the longest pattern that matches a topic's name, or `None` if no pattern matches.

    Args:
        patterns: Policies by pattern. In a pattern, `*` stands for any characters, slashes included.
    """
    matching = [pattern for pattern in patterns if match_topic(topic, pattern)]
    return patterns[max(matching, key=len)] if matching else None


def match_topic(topic: str, pattern: str) -> bool:
    """Return true if a pattern matches a topic's name. `*` stands for any characters, slashes included."""
    return fnmatchcase(topic, re.sub(r"[?[]", r"[\g<0>]", pattern))
