"""What bridges tell each other in Kafka's group protocol, and what follows from it. Pure.

Each bridge joins the group with a `Member`. One of them, which the broker chooses, makes the `GroupView` of all
members. Each gets the Round from the broker. Both are JSON, as the user data of Kafka's consumer protocol; no partition
is assigned. The broker's generation of the group numbers the rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from hashlib import blake2b

import msgspec

from kiln.bridge.cluster.rendezvous import find_owner

PROTOCOL = "kiln-bridges"
"""The name under which bridges agree on this layout: a bridge of another layout is refused by the broker."""


class Member(msgspec.Struct, frozen=True):
    """What a bridge says of itself when it joins."""

    peer: str
    """peer id"""
    host: str
    """the machine, for people"""
    interests: str
    """`interests_digest` of what it follows"""
    duties: int = 0
    """how many of the leader's tasks its settings let it do: publish, announce, fetch"""
    led: int = 0
    """the round since which it has led; 0: it does not lead"""
    authors: tuple[str, ...] = ()
    """peer ids of which its messages are"""


class LiveBridge(msgspec.Struct, frozen=True):
    """A bridge that lives, as the others know it."""

    peer: str
    host: str
    interests: str


class GroupView(msgspec.Struct, frozen=True):
    """What all members learn. `after`: another member that says it leads until it learns of this round; or empty."""

    leader: str
    authors: tuple[str, ...]
    """of the leader's messages"""
    bridges: tuple[LiveBridge, ...]
    after: str = ""


_MEMBER = msgspec.json.Decoder(Member)
_ROUND = msgspec.json.Decoder(GroupView)


def group_name(prefix: str, network: str) -> str:
    """The consumer group that the bridges of a network join. `prefix`: of topics."""
    return f"{prefix}bridges.{network}"


def interests_digest(texts: Iterable[str]) -> str:
    """Equal for equal interests, in any order: 8 bytes of BLAKE2b over the sorted texts, hex."""
    return blake2b("\n".join(sorted(set(texts))).encode(), digest_size=8).hexdigest()


def build_round(members: Collection[Member]) -> GroupView:
    """The round of these members. Who leads goes on leading, and of several who say so, the one of the latest round.

    A member with fewer duties than another never leads: nobody would do what it cannot. ValueError: no member.
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
