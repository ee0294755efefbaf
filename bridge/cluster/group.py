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
    """`interests_digest` of its interests"""
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

    The leader stays leader. If several members lead, the one that has led since the latest round does. A member with
    fewer duties than another never leads, because no bridge would do the missing ones.

    Raises:
        ValueError: there is no member.
    """
    most = max(member.duties for member in members)
    candidates = {member.peer: member for member in members if member.duties == most}
    former_leaders = [member for member in members if member.led]
    current = max((m for m in former_leaders if m.peer in candidates), key=lambda m: (m.led, m.peer), default=None)
    leader = candidates[find_owner("", candidates)] if current is None else current
    others = sorted(member.peer for member in former_leaders if member.peer != leader.peer)
    bridges = sorted((LiveBridge(m.peer, m.host, m.interests) for m in members), key=lambda bridge: bridge.peer)
    return GroupView(leader.peer, leader.authors, tuple(bridges), others[0] if others else "")


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
