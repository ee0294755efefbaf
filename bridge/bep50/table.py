"""The routing table of one topic.

BEP 50: "The value of K is set to one. The routing table's home bucket and its sibling SHOULD have a capacity of at
least 8 nodes each. When the home bucket is split the sibling of the previous home bucket (now an uncle of the new home
bucket) SHOULD be resized to one node per the setting of K=1."

Bucket *i* holds nodes whose ids share exactly *i* leading bits with ours; the last one, the home bucket, all that share
as many or more. So its sibling is the bucket before it, and those before the sibling are uncles::

    id bits shared    0    1    2    3    4 and more
    capacity          1    1    1    8    8
                      uncles         |    home
                                     sibling
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kiln.schemas.dht.krpc import ID_SIZE, DhtAddress, DhtNode
from kiln.schemas.dht.node_id import distance, is_bound, shared_bits

NEAR: Final = 8
"""Capacity of the home bucket and its sibling."""
GONE: Final = 3
"""A contact that left so many queries in a row unanswered is removed."""


@dataclass(eq=False)
class OverlayContact:
    """A node that has answered us."""

    id: bytes
    address: DhtAddress
    since: float
    """When it first answered: what was good for longest is kept longest (BEP 5, Routing Table)."""
    answered: float
    failures: int = 0
    """Queries unanswered since the last answer."""
    sequence: int = -1
    """The newest item that it is known to have."""
    token: bytes | None = None
    token_at: float = 0.0
    asking: bool = False
    """A get is on its way to it."""
    putting: bool = False
    """A put is on its way to it. There is one at most: of a burst of items it gets the first and the newest."""
    refused: int = 0
    """How often it refused our newest item."""

    @property
    def node(self) -> DhtNode:
        return DhtNode(self.id, self.address)


class RoutingTable:
    """Contacts by distance from our id. ``far`` is the capacity of an uncle: BEP 50's K; 8 makes BEP 5's table.

    ``per_ip`` bounds the contacts of one IP, if it is not 0: ids cost nothing, addresses do. ``bound_ids``: only ids
    that BEP 42 allows.
    """

    def __init__(self, own_id: bytes, far: int = 1, near: int = NEAR, per_ip: int = 0, bound_ids: bool = False) -> None:
        self._own_id = own_id
        self._far = far
        self._near = near
        self._per_ip = per_ip
        self._bound_ids = bound_ids
        self._buckets: list[list[OverlayContact]] = [[]]
        self._at: dict[DhtAddress, OverlayContact] = {}

    def __len__(self) -> int:
        return len(self._at)

    def __iter__(self) -> Iterator[OverlayContact]:
        return iter(list(self._at.values()))

    @property
    def sizes(self) -> list[int]:
        """How many contacts each bucket has, the farthest first, the home bucket last."""
        return [len(bucket) for bucket in self._buckets]

    def find(self, address: DhtAddress) -> OverlayContact | None:
        """The contact at an address."""
        return self._at.get(address)

    def has_room(self, node: DhtNode) -> bool:
        """Whether a node would be taken in if it answered."""
        if node.id == self._own_id or node.address in self._at:
            return False
        if self._bound_ids and not is_bound(node.id, node.address.ip):
            return False
        if self._per_ip and sum(each.ip == node.address.ip for each in self._at) >= self._per_ip:
            return False
        index = self._index(node.id)
        bucket = self._buckets[index]
        same = next((each for each in bucket if each.id == node.id), None)
        if same is not None:  # a node has moved, or another has taken its id: the one that answers is right
            return same.failures > 0
        return len(bucket) < self._capacity(index) or self._is_home(index) or any(each.failures for each in bucket)

    def insert(self, node: DhtNode, now: float) -> OverlayContact | None:
        """Take in a node that has just answered; None if there is no room for it."""
        if not self.has_room(node):
            return None
        contact = OverlayContact(node.id, node.address, since=now, answered=now)
        while True:
            index = self._index(node.id)
            bucket = self._buckets[index]
            same = next((each for each in bucket if each.id == node.id), None)
            if same is not None:
                self.remove(same)
            elif len(bucket) >= self._capacity(index):
                failing = max(bucket, key=lambda each: each.failures)
                if failing.failures:
                    self.remove(failing)
                elif self._is_home(index):
                    self._split()
                    continue
                else:
                    return None
            bucket.append(contact)
            self._at[node.address] = contact
            return contact

    def remove(self, contact: OverlayContact) -> None:
        """Take a contact out, if it is in."""
        if self._at.get(contact.address) is contact:
            del self._at[contact.address]
            self._buckets[self._index(contact.id)].remove(contact)

    def closest(self, target: bytes, count: int) -> list[DhtNode]:
        """Up to ``count`` contacts, those nearest to ``target`` first; none whose last query failed."""
        good = [contact for contact in self._at.values() if not contact.failures]
        good.sort(key=lambda each: distance(each.id, target))
        return [contact.node for contact in good[:count]]

    def _index(self, node_id: bytes) -> int:
        return min(shared_bits(self._own_id, node_id), len(self._buckets) - 1)

    def _is_home(self, index: int) -> bool:
        """Whether it is the home bucket, and can still be split."""
        return index == len(self._buckets) - 1 < ID_SIZE * 8 - 1

    def _capacity(self, index: int) -> int:
        return self._near if index >= len(self._buckets) - 2 else self._far

    def _split(self) -> None:
        home = self._buckets.pop()
        depth = len(self._buckets)
        self._buckets += [[], []]
        for contact in home:
            self._buckets[self._index(contact.id)].append(contact)
        if depth:
            # The old sibling is an uncle now. Which of its nodes is kept the text does not say: the longest good one.
            uncle = self._buckets[depth - 1]
            uncle.sort(key=lambda each: (each.failures, each.since))
            for contact in uncle[self._far :]:
                self.remove(contact)
