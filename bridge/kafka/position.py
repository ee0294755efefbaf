"""Where a record stands in its topic."""

from __future__ import annotations

from typing import NamedTuple


class KafkaPosition(NamedTuple):
    """A record of one topic."""

    partition: int
    offset: int
