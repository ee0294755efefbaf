"""Result of a reader for an item that it rejects.

Bad traffic is normal on a public network, so readers on the per-message path return this value instead of raising: an
exception costs more than the parse, and an uncaught one would stop a query.
"""

from __future__ import annotations

import msgspec


class Rejected(msgspec.Struct, frozen=True):
    """A rejected item. It goes to quarantine with its bytes (decision 6).

    ``reason`` is a snake_case code from a closed set, by which counts and dashboards may group; each reader documents
    its own (``kiln.schemas.wire.pubsub.REASONS``, ``kiln.schemas.wire.topic_table.REASONS``), and
    ``kiln.schemas.faults.FAULTS`` lists the codes of all readers. ``detail`` is a short text for people: no code may
    depend on its wording.
    """

    reason: str
    detail: str = ""
