"""User data of the bridges in Kafka's group protocol, and the choice of their leader.

Each bridge joins the group with a `Member`. One of them, which the broker chooses, makes the `GroupView` of all
members, which the broker distributes. Both are JSON, as the user data of Kafka's consumer protocol. The leader is
assigned the group's one partition. The broker's generation of the group numbers the rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from hashlib import blake2b

import msgspec

from kiln.bridge.cluster.rendezvous import find_owner

PROTOCOL = "kiln-bridges"
"""The protocol name of this layout: the broker refuses a bridge of another layout."""


class Member(msgspec.Struct, frozen=True):
    """User data with which a bridge joins."""

    peer: str
    """peer id"""
    host: str
    """the machine's name, for users"""
    interests: str
    """`interests_digest` of its interests"""
    fetches: bool = False
    """true if its settings allow the leader's task"""
    led: int = 0
    """the round since which it has led; 0: it does not lead"""
    authors: tuple[str, ...] = ()
    """peer ids of the authors of its messages"""


class LiveBridge(msgspec.Struct, frozen=True):
    """A live bridge, as the others know it."""

    peer: str
    host: str
    interests: str


class GroupView(msgspec.Struct, frozen=True):
    """User data for all members."""

    leader: str
    authors: tuple[str, ...]
    """peer ids that sign the messages of the bridges"""
    bridges: tuple[LiveBridge, ...]


_MEMBER = msgspec.json.Decoder(Member)
_ROUND = msgspec.json.Decoder(GroupView)


def group_name(prefix: str, network: str) -> str:
    """Return the consumer group of the bridges of a network; `prefix` is that of the topics."""
    return f"{prefix}bridges.{network}"


def interests_digest(texts: Iterable[str]) -> str:
    """Return 8 bytes of BLAKE2b over the sorted texts, in hex; equal for equal interests in any order."""
    return blake2b("\n".join(sorted(set(texts))).encode(), digest_size=8).hexdigest()


def build_round(members: Collection[Member]) -> GroupView:
    """Build the round of these members.

    The leader stays leader. If several members led, because one was cut off from Kafka, the one that has led since the
    latest round does. A member that fetches nothing leads only if none does.

    Raises:
        ValueError: there is no member.
    """
    candidates = {member.peer: member for member in members if member.fetches} or {m.peer: m for m in members}
    leaders = [member for member in candidates.values() if member.led]
    current = max(leaders, key=lambda member: (member.led, member.peer), default=None)
    leader = find_owner("", candidates) if current is None else current.peer
    authors = sorted({author for member in members for author in member.authors})
    bridges = sorted((LiveBridge(m.peer, m.host, m.interests) for m in members), key=lambda bridge: bridge.peer)
    return GroupView(leader, tuple(authors), tuple(bridges))


def read_member(data: bytes) -> Member:
    """Decode the data of a member.

    Raises:
        msgspec.DecodeError: the bytes have another layout.
    """
    return _MEMBER.decode(data)


def read_round(data: bytes) -> GroupView:
    """Decode a round.

    Raises:
        msgspec.DecodeError: the bytes have another layout.
    """
    return _ROUND.decode(data)
