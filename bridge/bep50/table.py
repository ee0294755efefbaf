"""The routing table of one topic.

BEP 50: "The value of K is set to one. The routing table's home bucket and its sibling SHOULD have a capacity of at
least 8 nodes each. When the home bucket is split the sibling of the previous home bucket (now an uncle of the new home
bucket) SHOULD be resized to one node per the setting of K=1."

Bucket *i* holds nodes whose ids share exactly *i* leading bits with ours. The last bucket, the home bucket, holds all
nodes that share *i* or more bits. The sibling is the bucket before the home bucket, and the buckets before the sibling
are uncles::

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
from kiln.schemas.dht.node_id import compute_distance, count_shared_bits

NEAR: Final = 8
"""Capacity of the home bucket and its sibling."""
MAX_FAILURES: Final = 3
"""Consecutive unanswered queries after which a contact is removed."""


@dataclass(eq=False)
class OverlayContact:
    """A node that has answered a query."""

    id: bytes
    address: DhtAddress
    first_answered: float
    """Time of the node's first response. A full bucket keeps the oldest contacts (BEP 5, Routing Table)."""
    last_answered: float
    failures: int = 0
    """Unanswered queries since the last response."""
    sequence: int = -1
    """Sequence number of the newest item that the node is known to have."""
    token: bytes | None = None
    token_at: float = 0.0
    get_pending: bool = False
    """True while a get that was sent to the contact has no response."""
    put_pending: bool = False
    """True while a put that was sent to the contact has no response. Newer items wait for the response. Then only
    the newest one is sent."""
    refusals: int = 0
    """Number of times that the contact has refused our newest item."""

    @property
    def node(self) -> DhtNode:
        return DhtNode(self.id, self.address)


class RoutingTable:
    """Contacts in buckets, by the distance of their ids from ours.

    Args:
        far: Capacity of an uncle: 1 in BEP 50, 8 in BEP 5.
        per_ip: Maximum number of contacts with one IP, because one host can use any number of ids; 0 is no limit.
    """

    def __init__(self, own_id: bytes, far: int = 1, per_ip: int = 0) -> None:
        self._own_id = own_id
        self._far = far
        self._per_ip = per_ip
        self._buckets: list[list[OverlayContact]] = [[]]
        self._by_address: dict[DhtAddress, OverlayContact] = {}

    def __len__(self) -> int:
        return len(self._by_address)

    def __iter__(self) -> Iterator[OverlayContact]:
        return iter(list(self._by_address.values()))

    @property
    def sizes(self) -> list[int]:
        """Number of contacts in each bucket, from the farthest to the home bucket."""
        return [len(bucket) for bucket in self._buckets]

    def find(self, address: DhtAddress) -> OverlayContact | None:
        """Return the contact at an address, if there is one."""
        return self._by_address.get(address)

    def has_room(self, node: DhtNode) -> bool:
        """Return true if `insert` would insert this node."""
        if node.id == self._own_id or node.address in self._by_address:
            return False
        if self._per_ip and sum(address.ip == node.address.ip for address in self._by_address) >= self._per_ip:
            return False
        index = self._index(node.id)
        bucket = self._buckets[index]
        same = next((entry for entry in bucket if entry.id == node.id), None)
        if same is not None:  # the node has moved, or another node uses its id: keep the address that answers
            return same.failures > 0
        return len(bucket) < self._capacity(index) or self._is_home(index) or any(entry.failures for entry in bucket)

    def insert(self, node: DhtNode, now: float) -> OverlayContact | None:
        """Insert a node that has just answered. Return `None` if there is no room for the node."""
        if not self.has_room(node):
            return None
        contact = OverlayContact(node.id, node.address, first_answered=now, last_answered=now)
        while True:
            index = self._index(node.id)
            bucket = self._buckets[index]
            same = next((entry for entry in bucket if entry.id == node.id), None)
            if same is not None:
                self.remove(same)
            elif len(bucket) >= self._capacity(index):
                failing = max(bucket, key=lambda entry: entry.failures)
                if failing.failures:
                    self.remove(failing)
                elif self._is_home(index):
                    self._split()
                    continue
                else:
                    return None
            bucket.append(contact)
            self._by_address[node.address] = contact
            return contact

    def remove(self, contact: OverlayContact) -> None:
        """Remove a contact, if it is in the table."""
        if self._by_address.get(contact.address) is contact:
            del self._by_address[contact.address]
            self._buckets[self._index(contact.id)].remove(contact)

    def closest(self, target: bytes, count: int) -> list[DhtNode]:
        """Return up to ``count`` contacts, nearest to ``target`` first, without those that did not answer lately."""
        good = [contact for contact in self._by_address.values() if not contact.failures]
        good.sort(key=lambda entry: compute_distance(entry.id, target))
        return [contact.node for contact in good[:count]]

    def _index(self, node_id: bytes) -> int:
        return min(count_shared_bits(self._own_id, node_id), len(self._buckets) - 1)

    def _is_home(self, index: int) -> bool:
        return index == len(self._buckets) - 1 < ID_SIZE * 8 - 1

    def _capacity(self, index: int) -> int:
        return NEAR if index >= len(self._buckets) - 2 else self._far

    def _split(self) -> None:
        home = self._buckets.pop()
        depth = len(self._buckets)
        self._buckets += [[], []]
        for contact in home:
            self._buckets[self._index(contact.id)].append(contact)
        if depth:
            # The old sibling is an uncle now. BEP 50 does not specify which node stays: here, the longest good one.
            uncle = self._buckets[depth - 1]
            uncle.sort(key=lambda entry: (entry.failures, entry.first_answered))
            for contact in uncle[self._far :]:
                self.remove(contact)
