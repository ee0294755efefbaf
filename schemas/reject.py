"""The value that a reader returns for bytes that it rejects.

Bad traffic is normal on a public network. A reader that runs for each message returns this value instead of raising:
raising an exception takes more time than parsing a message, and an uncaught exception would stop a query.
"""

from __future__ import annotations

import msgspec


class Rejected(msgspec.Struct, frozen=True):
    """The reason for which a reader rejects bytes. The bytes go to quarantine with the reason (decision 6)."""

    reason: str
    """snake_case code, listed in the reader's `REASONS` and in `kiln.schemas.faults.FAULTS`; metrics group by it"""
    detail: str = ""
    """explanation for people; no code may depend on the wording"""
