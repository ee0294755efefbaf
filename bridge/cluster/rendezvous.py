"""Rendezvous hashing (Thaler and Ravishankar, 1998): who of several has a thing.

Everybody who knows the same members names the same owner, with nothing to agree on. A member that goes loses what it
had to the others, in equal parts, and nothing else moves. A member that comes takes an equal part from each.
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b


def weight(member: str, thing: str) -> int:
    """How much a member wants a thing: the first 8 bytes of BLAKE2b over both, each in UTF-8 with its length before it
    (u32, big-endian)."""
    hashed = blake2b(digest_size=8)
    for text in (member.encode(), thing.encode()):
        hashed.update(len(text).to_bytes(4, "big") + text)
    return int.from_bytes(hashed.digest(), "big")


def find_owner(thing: str, members: Collection[str]) -> str:
    """The member that has a thing: the one of the greatest weight. ValueError: there is no member."""
    return max(members, key=lambda member: (weight(member, thing), member))
