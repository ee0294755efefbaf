"""User data of the bridges in Kafka's group protocol.

Each bridge joins the consumer group with a `Member`. Kafka's group leader builds a `GroupView` from all members, and
the broker sends the view to all members. Both are JSON, as the user data of Kafka's consumer protocol. Each change
of the group begins a round with a new view. The number of the round is the generation of the group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from hashlib import blake2b

import msgspec

PROTOCOL = "kiln-bridges"
"""Name of the group protocol. An incompatible layout needs another name, so that its bridges cannot join this group."""


class Member(msgspec.Struct, frozen=True):
    """User data with which a bridge joins the group."""

    peer: str
    """peer id"""
    host: str
    """name of the bridge's machine, for users"""
    interests: str
    """`interests_digest` of the bridge's interests"""
    fetches: bool = False
    """true if the bridge's settings allow it to fetch"""
    leads: bool = False
    """true if the bridge fetches for all bridges"""
    authors: tuple[str, ...] = ()
    """peer ids of the authors of the bridge's messages"""


class LiveBridge(msgspec.Struct, frozen=True):
    """A live bridge, as the other bridges know it."""

    peer: str
    host: str
    interests: str
    leads: bool = False


class GroupView(msgspec.Struct, frozen=True):
    """User data that all members receive: the live bridges."""

    leader: str
    """peer id of the bridge that fetches; empty if none does"""
    authors: tuple[str, ...]
    """peer ids that sign the messages of the bridges"""
    bridges: tuple[LiveBridge, ...]


def group_name(prefix: str, network: str) -> str:
    """Return the name of the bridges' consumer group. `prefix` is that of the Kafka topics."""
    return f"{prefix}bridges.{network}"


def interests_digest(texts: Iterable[str]) -> str:
    """Return a digest of the interests that does not depend on their order: 8 bytes of BLAKE2b, in hex."""
    return blake2b("\n".join(sorted(set(texts))).encode(), digest_size=8).hexdigest()


def build_round(members: Collection[Member]) -> GroupView:
    """Build the view of these members.

    While fetching moves from one member to another, both may report that they lead. The greater peer id then counts.
    """
    leader = max((member.peer for member in members if member.leads), default="")
    authors = sorted({author for member in members for author in member.authors})
    ordered = sorted(members, key=lambda member: member.peer)
    bridges = tuple(LiveBridge(member.peer, member.host, member.interests, member.leads) for member in ordered)
    return GroupView(leader, tuple(authors), bridges)
