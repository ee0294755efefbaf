"""User data of the bridges in Kafka's group protocol.

Each bridge joins the group with a `Member`. One of them, which the broker chooses, makes the `GroupView` of all
members, which the broker distributes. Both are JSON, as the user data of Kafka's consumer protocol. The broker's
generation of the group numbers the rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from hashlib import blake2b

import msgspec

PROTOCOL = "kiln-bridges"
"""The protocol name of this layout: the broker refuses a bridge with another layout."""


class Member(msgspec.Struct, frozen=True):
    """User data with which a bridge joins."""

    peer: str
    """peer id"""
    host: str
    """the machine's name, for users"""
    interests: str
    """`interests_digest` of the bridge's interests"""
    fetches: bool = False
    """true if the bridge's settings allow it to fetch"""
    leads: bool = False
    """true if Kafka has assigned fetching to the bridge"""
    authors: tuple[str, ...] = ()
    """peer ids of the authors of the bridge's messages"""


class LiveBridge(msgspec.Struct, frozen=True):
    """A live bridge, as the others know it."""

    peer: str
    host: str
    interests: str
    leads: bool = False


class GroupView(msgspec.Struct, frozen=True):
    """User data for all members."""

    leader: str
    """peer id of the bridge that fetches; empty if none does"""
    authors: tuple[str, ...]
    """peer ids that sign the messages of the bridges"""
    bridges: tuple[LiveBridge, ...]


def group_name(prefix: str, network: str) -> str:
    """Return the consumer group of the bridges of a network; `prefix` is the prefix of the topics."""
    return f"{prefix}bridges.{network}"


def interests_digest(texts: Iterable[str]) -> str:
    """Return 8 bytes of BLAKE2b over the sorted texts, in hex; equal for equal interests in any order."""
    return blake2b("\n".join(sorted(set(texts))).encode(), digest_size=8).hexdigest()


def build_round(members: Collection[Member]) -> GroupView:
    """Build the round of these members.

    While fetching moves from one bridge to another, both bridges may still report that they lead.
    """
    leader = max((member.peer for member in members if member.leads), default="")
    authors = sorted({author for member in members for author in member.authors})
    ordered = sorted(members, key=lambda member: member.peer)
    bridges = tuple(LiveBridge(member.peer, member.host, member.interests, member.leads) for member in ordered)
    return GroupView(leader, tuple(authors), bridges)
