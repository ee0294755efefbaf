"""The position of a record in its topic."""

from __future__ import annotations

from typing import NamedTuple


class KafkaPosition(NamedTuple):
    """The position of a record in one topic."""

    partition: int
    offset: int
