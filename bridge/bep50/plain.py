"""Our node in the plain DHT, which is the BitTorrent DHT without BEP 50 (BEP 5, BEP 44).

The node finds the nodes of topics, and stores our items at other nodes. It stores nothing for others, so it issues no
write tokens. It answers ping, find_node, get_peers and get. Otherwise the lookups of libtorrent would wait for it: the
routing table of libtorrent includes each node that announces itself, even a read-only one (BEP 43).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from kiln.bridge.bep50.core import OverlayCore
from kiln.bridge.bep50.table import MAX_FAILURES, RoutingTable
from kiln.bridge.bep50.transactions import Answer, Transactions
from kiln.schemas.dht.bencode import Value
from kiln.schemas.dht.items import Item, build_item_fields, build_put_fields
from kiln.schemas.dht.krpc import (
    BAD_ARGUMENTS,
    BAD_TOKEN,
    ID_SIZE,
    UNKNOWN_METHOD,
    DhtAddress,
    DhtNode,
    Family,
    KrpcError,
    KrpcQuery,
    KrpcRefusal,
    KrpcResponse,
    read_nodes,
    write_nodes,
)
from kiln.schemas.dht.node_id import compute_distance

K: Final = 8
ALPHA: Final = 4
"""Maximum number of concurrent queries of one lookup."""
MAX_QUERIES: Final = 64
"""Maximum number of queries of one lookup."""

LookupMethod = Literal[b"get_peers", b"get"]


@dataclass
class WritableNode:
    """A node that answered a lookup, and the write token from its response."""

    node: DhtNode
    token: bytes


@dataclass
class Lookup:
    """An iterative lookup in one address family.

    It queries the nearest known node that was not queried yet, until the K nearest nodes have answered.
    """

    method: LookupMethod
    target: bytes
    family: Family
    on_response: Callable[[KrpcResponse, DhtAddress], None]
    on_end: Callable[[list[WritableNode]], None]
    candidates: list[DhtNode] = field(default_factory=list)
    unnamed: list[DhtAddress] = field(default_factory=list)
    """Bootstrap addresses, whose node ids are unknown. They are queried until a node has answered."""
    queried: set[DhtAddress] = field(default_factory=set)
    answered: dict[bytes, WritableNode | None] = field(default_factory=dict)
    """Nodes that answered, by id; `None` for a node that gave no token."""
    waiting: int = 0
    ended: bool = False

    def add_nodes(self, nodes: Iterable[DhtNode]) -> None:
        known = {node.address: node for node in nodes if node.address.family == self.family}
        known |= {candidate.address: candidate for candidate in self.candidates}
        self.candidates = sorted(known.values(), key=lambda node: compute_distance(node.id, self.target))[:MAX_QUERIES]

    def next_node(self) -> DhtNode | None:
        """Return the node to query next, one of the K nearest that have not failed; `None` if there is none."""
        if len(self.queried) >= MAX_QUERIES:
            return None
        nearest = [n for n in self.candidates if n.address not in self.queried or n.id in self.answered][:K]
        for node in nearest:
            if node.address not in self.queried:
                return node
        if self.unnamed and not self.answered:
            return DhtNode(b"", self.unnamed.pop())
        return None

    @property
    def nearest(self) -> list[WritableNode]:
        """The K nearest nodes that answered with a token."""
        nodes = [node for node in self.answered.values() if node is not None]
        return sorted(nodes, key=lambda answered: compute_distance(answered.node.id, self.target))[:K]


class PlainNode:
    """Our node in the plain DHT: makes lookups, and answers queries.

    Args:
        bootstrap: Addresses with which lookups begin. Kiln has no built-in ones.
        find_item: Returns the item of a target, if we have it.
    """

    def __init__(
        self, core: OverlayCore, bootstrap: Iterable[DhtAddress], find_item: Callable[[bytes], Item | None]
    ) -> None:
        self._core = core
        self.bootstrap = list(bootstrap)
        """Addresses with which lookups begin; callers may add more."""
        self._find_item = find_item
        self.transactions = Transactions(core, topic=None)
        self.tables: dict[Family, RoutingTable] = {
            4: RoutingTable(core.id, far=K, per_ip=core.settings.per_ip),
            6: RoutingTable(core.id, far=K, per_ip=core.settings.per_ip),
        }

    # ---------------------------------------------------------------- queries sent

    def look_up(
        self,
        method: LookupMethod,
        target: bytes,
        on_response: Callable[[KrpcResponse, DhtAddress], None],
        on_end: Callable[[list[WritableNode]], None],
    ) -> None:
        """Start one lookup of ``target`` in IPv4 and one in IPv6.

        Args:
            on_response: Called with each response, and the address it came from.
            on_end: Called at the end of each lookup, with the nearest nodes that gave a token.
        """
        for family, table in self.tables.items():
            unnamed = [address for address in self.bootstrap if address.family == family]
            lookup = Lookup(method, target, family, on_response, on_end, unnamed=unnamed)
            lookup.add_nodes(table.closest(target, K))
            self._continue(lookup)

    def announce(self, target: bytes, nodes: Iterable[WritableNode]) -> None:
        """Announce our port for a topic (BEP 50: "with the port they are listening for DHT messages on").

        ``implied_port`` lets the receiver use the source port of the datagram. This port is right even behind a NAT
        that changes ports, because our node sends and receives on one port.
        """
        for node in nodes:
            arguments: dict[bytes, Value] = {
                b"info_hash": target,
                b"port": self._core.port,
                b"implied_port": 1,
                b"token": node.token,
            }
            self.transactions.send_query(node.node.address, b"announce_peer", arguments, lambda _: None)

    def put(self, item: Item, nodes: Iterable[WritableNode], on_end: Callable[[int], None]) -> None:
        """Store an item at these nodes, then call ``on_end`` with the number of nodes that stored it."""
        nodes = list(nodes)
        outcomes: list[bool] = []

        def handle_answer(answer: Answer) -> None:
            outcomes.append(isinstance(answer, KrpcResponse))
            if len(outcomes) == len(nodes):
                on_end(sum(outcomes))

        for node in nodes:
            arguments = {**build_put_fields(item), b"token": node.token}
            self.transactions.send_query(node.node.address, b"put", arguments, handle_answer, node.node.id, item.target)

    def _continue(self, lookup: Lookup) -> None:
        while lookup.waiting < ALPHA and (node := lookup.next_node()) is not None:
            self._query(lookup, node)
        if not lookup.waiting and not lookup.ended:
            lookup.ended = True
            lookup.on_end(lookup.nearest)

    def _query(self, lookup: Lookup, node: DhtNode) -> None:
        def handle_answer(answer: Answer) -> None:
            lookup.waiting -= 1
            self._record_node(node.address, answer)
            if isinstance(answer, KrpcResponse):
                token = answer.values.get(b"token")
                sender = DhtNode(answer.sender, node.address)
                if answer.sender != self._core.id and answer.sender not in lookup.answered:
                    lookup.answered[answer.sender] = WritableNode(sender, token) if isinstance(token, bytes) else None
                lookup.add_nodes(read_nodes(answer.values)[: 2 * K])
                lookup.on_response(answer, node.address)
            self._continue(lookup)

        lookup.queried.add(node.address)
        lookup.waiting += 1
        name = b"info_hash" if lookup.method == b"get_peers" else b"target"
        self.transactions.send_query(node.address, lookup.method, {name: lookup.target}, handle_answer)

    def _record_node(self, address: DhtAddress, answer: Answer) -> None:
        table = self.tables[address.family]
        contact = table.find(address)
        if isinstance(answer, KrpcResponse):
            if contact is None or contact.id != answer.sender:
                if contact is not None:
                    table.remove(contact)
                table.insert(DhtNode(answer.sender, address), self._core.now)
            else:
                contact.last_answered, contact.failures = self._core.now, 0
        elif contact is not None:
            contact.failures += 1
            if contact.failures >= MAX_FAILURES:
                table.remove(contact)

    # ---------------------------------------------------------------- queries received

    def handle_query(self, query: KrpcQuery, source: DhtAddress) -> None:
        """Answer a query."""
        answer = self._answer(query, source)
        if isinstance(answer, KrpcRefusal):
            self._core.send_error(KrpcError(query.transaction, answer), source)
        else:
            target = query.arguments.get(b"target")
            response = KrpcResponse(query.transaction, self._core.id, answer)
            self._core.send(response, source, query.sender, target if isinstance(target, bytes) else None)

    def _answer(self, query: KrpcQuery, source: DhtAddress) -> dict[bytes, Value] | KrpcRefusal:
        method = query.method
        if method == b"ping":
            return {}
        if method in (b"announce_peer", b"put"):
            return BAD_TOKEN  # we issue none
        if method not in (b"find_node", b"get_peers", b"get"):
            return UNKNOWN_METHOD
        target = query.arguments.get(b"info_hash" if method == b"get_peers" else b"target")
        if not isinstance(target, bytes) or len(target) != ID_SIZE:
            return BAD_ARGUMENTS
        values = write_nodes(self.tables[source.family].closest(target, K))
        item = self._find_item(target) if method == b"get" else None
        if item is not None:  # the item is signed, so any node may serve it
            known = query.arguments.get(b"seq")
            if isinstance(known, int) and known >= item.sequence:
                values[b"seq"] = item.sequence
            else:
                values |= build_item_fields(item)
        return values
