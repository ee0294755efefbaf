"""Rendezvous hashing (Thaler and Ravishankar, 1998): choose the owner of a key.

Members with the same member list choose the same owner without coordination. If a member leaves, its keys move to the
others in equal parts, and no other key moves. A new member takes an equal part from each old one.
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b


def compute_weight(member: str, key: str) -> int:
    """Return the weight of a member for a key.

    It is the first 8 bytes of BLAKE2b over the member and the key, each in UTF-8 after its length (u32, big-endian).
    """
    hashed = blake2b(digest_size=8)
    for text in (member.encode(), key.encode()):
        hashed.update(len(text).to_bytes(4, "big") + text)
    return int.from_bytes(hashed.digest(), "big")


def find_owner(key: str, members: Collection[str]) -> str:
    """Return the member with the greatest weight for a key.

    Raises:
        ValueError: there is no member.
    """
    return max(members, key=lambda member: (compute_weight(member, key), member))
