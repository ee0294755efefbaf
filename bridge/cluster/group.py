"""User data of the bridges in Kafka's group protocol, and the election of their leader.

Each bridge joins the group with a `Member`. One of them, which the broker chooses, makes the `GroupView` of all
members, which the broker distributes. Both are JSON, as the user data of Kafka's consumer protocol; no partition is
assigned. The broker's generation of the group numbers the rounds.
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
    """`interests_digest` of what it follows"""
    duties: int = 0
    """number of the leader's tasks that its settings allow: publish, announce, fetch"""
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
    """User data for all members. `after`: another member that leads until it learns of this round, or empty."""

    leader: str
    authors: tuple[str, ...]
    """of the leader's messages"""
    bridges: tuple[LiveBridge, ...]
    after: str = ""


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

    The leader stays leader; of several, the one of the latest round. A member with fewer duties than another never
    leads, because the missing ones would not be done.

    Raises:
        ValueError: there is no member.
    """
    most = max(member.duties for member in members)
    able = {member.peer: member for member in members if member.duties == most}
    before = [member for member in members if member.led]
    leading = max((m for m in before if m.peer in able), key=lambda m: (m.led, m.peer), default=None)
    leader = able[find_owner("", able)] if leading is None else leading
    others = sorted(member.peer for member in before if member.peer != leader.peer)
    bridges = sorted((LiveBridge(m.peer, m.host, m.interests) for m in members), key=lambda bridge: bridge.peer)
    return GroupView(leader.peer, leader.authors, tuple(bridges), others[0] if others else "")


def read_member(data: bytes) -> Member:
    """msgspec.DecodeError: bytes of another layout."""
    return _MEMBER.decode(data)


def read_round(data: bytes) -> GroupView:
    """msgspec.DecodeError: bytes of another layout."""
    return _ROUND.decode(data)
