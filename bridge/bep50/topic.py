"""Our node in the overlay of one topic's subscribers (BEP 50).

"Clients MUST treat each topic as a separate node with its own routing table and transaction state." The node

* finds other nodes of the topic: it looks up addresses by get_peers in the plain DHT, probes each with a get, and
  requests more nodes from those that answer;
* stores the topic's newest item, and answers ping, find_node, get and put with the topic's ``c``;
* pushes each new item with puts to all contacts that are not known to have it;
* sends a get to each contact at intervals, which renews the write token and fetches items whose puts were lost.

A node becomes a contact in the routing table only after it has answered. Until then its id is not certain: get_peers
returns no ids, and nodes may lie about others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kiln.bridge.bep50.core import (
    ItemConflict,
    ItemTransfer,
    ItemUpdate,
    OverlayCore,
    PlainStoreResult,
    Via,
)
from kiln.bridge.bep50.limits import WriteTokens
from kiln.bridge.bep50.plain import PlainNode, WritableNode
from kiln.bridge.bep50.table import MAX_FAILURES, OverlayContact, RoutingTable
from kiln.bridge.bep50.transactions import Answer, Transactions
from kiln.conf.process.backoff import pause_after
from kiln.conf.process.bounded_dict import BoundedDict
from kiln.schemas.dht.bencode import Value
from kiln.schemas.dht.items import (
    Item,
    build_item_fields,
    build_put_fields,
    compute_target,
    find_exceeded_limit,
    is_signed,
    read_item,
)
from kiln.schemas.dht.krpc import (
    BAD_ARGUMENTS,
    BAD_SIGNATURE,
    BAD_TOKEN,
    CAS_MISMATCH,
    ID_SIZE,
    OLD_SEQUENCE,
    OTHER_ITEM,
    PROHIBITED,
    UNKNOWN_METHOD,
    DhtAddress,
    DhtNode,
    Family,
    KrpcError,
    KrpcQuery,
    KrpcRefusal,
    KrpcResponse,
    read_addresses,
    read_nodes,
    write_message,
    write_nodes,
)

MAX_REFUSALS: Final = 3
"""Number of refusals after which our newest item is not sent to the contact again."""
MAX_UNRESPONSIVE: Final = 1024  # addresses
FIRST_RETRY: Final = 2.0  # seconds
LAST_RETRY: Final = 60.0
"""Maximum seconds between attempts to join while there are no contacts. Waits begin with `FIRST_RETRY`, and double."""
# The largest UDP payload in an Ethernet frame: 1500 bytes without the headers of IP and UDP.
_ROOM: Final[dict[Family, int]] = {4: 1472, 6: 1452}


class ItemPublishError(ValueError):
    """The topic cannot publish an item. The message has the reason."""


class TopicNode:
    """The overlay node of one topic."""

    def __init__(
        self,
        core: OverlayCore,
        plain: PlainNode,
        tokens: WriteTokens,
        key: bytes,
        salt: bytes,
        stored: Item | None,
        contacts: Sequence[DhtAddress],
        publishing: bool,
    ) -> None:
        self.key = key
        self.salt = salt
        self.target = compute_target(key, salt)
        self.item = stored
        """The newest item (BEP 50: "SHOULD store the latest value of the mutable item ... at all times")."""
        self.published: Item | None = stored if publishing else None
        """The last item that we published, in this run or an earlier one."""
        self.rival: Item | None = None
        """An item that another publisher signed with our key."""
        self.closed = False
        self.tables: dict[Family, RoutingTable] = {  # for two DHTs (BEP 32); nodes in both pass the item on
            4: RoutingTable(core.id, per_ip=core.settings.per_ip),
            6: RoutingTable(core.id, per_ip=core.settings.per_ip),
        }
        self._core = core
        self._plain = plain
        self._tokens = tokens
        self.transactions = Transactions(core, self.target)
        self._first_contacts = list(contacts)
        self._probing: dict[DhtAddress, int] = {}  # number of probes sent, by address
        self._unresponsive = BoundedDict[DhtAddress, float](MAX_UNRESPONSIVE)
        self._connected = False
        self._join_count = 0
        self._lookups = 0
        self._join_tries = 0
        self._announced_at: float | None = None
        self._plain_put_at: float | None = None
        self._join()
        self._refresh_in(FIRST_RETRY)

    @property
    def contacts(self) -> list[OverlayContact]:
        """All contacts, of IPv4 and IPv6."""
        return [contact for table in self.tables.values() for contact in table]

    def close(self) -> None:
        """Leave the topic, without a message, because BEP 50 has none for this."""
        self.closed = True
        self.transactions.clear()

    # ---------------------------------------------------------------- joining

    def add_contact(self, address: DhtAddress, node_id: bytes | None = None, *, force: bool = False) -> None:
        """Probe a node with a get, if the routing table has room for the node.

        Args:
            node_id: The node's id, if known. get_peers does not return ids.
            force: If true, also probe an address that did not respond recently.
        """
        core, table = self._core, self.tables[address.family]
        if self.closed or address in self._probing or table.find(address) or not address.usable:
            return
        if not force and self._unresponsive.get(address, core.now) > core.now:
            return
        if node_id is not None and not table.has_room(DhtNode(node_id, address)):
            return
        if len(self._probing) < core.settings.probes:
            self._unresponsive.pop(address, None)
            self._probing[address] = 1
            self._get(address)

    def _join(self) -> None:
        """Look up nodes of the topic, and announce ours. Repeat with back-off until there are contacts, then rarely."""
        if self.closed:
            return
        core = self._core
        since = None if self._announced_at is None else core.now - self._announced_at
        if not self._connected:
            for address in self._first_contacts:
                self.add_contact(address, force=True)
        if self._connected and since is not None and since < core.settings.announce:
            self._join_tries = 0
            self._join_in(core.settings.announce - since)
            return
        if not self._lookups:
            self._lookups = len(self.tables)  # a lookup in each family
            self._plain.look_up(b"get_peers", self.target, self._add_peers, self._announce)
        self._join_tries += 1
        self._join_in(pause_after(self._join_tries, FIRST_RETRY, LAST_RETRY))

    def _join_in(self, delay: float) -> None:
        self._join_count += 1  # only the timer set last counts
        count = self._join_count
        self._core.schedule(self._core.jitter(delay), lambda: self._join() if count == self._join_count else None)

    def _add_peers(self, response: KrpcResponse, _: DhtAddress) -> None:
        for address in read_addresses(response.values.get(b"values")):
            self.add_contact(address)

    def _announce(self, nodes: list[WritableNode]) -> None:
        """Announce our node (BEP 50: "Clients SHOULD also announce themselves to this infohash").

        Also look up the item in the plain DHT, because attackers who cut us off from the overlay cannot hide it there.
        """
        self._lookups -= 1
        if nodes and not self.closed:
            self._announced_at = self._core.now
            self._plain.announce(self.target, nodes)
            # After get_peers, so that nodes near the target are known: npm's bittorrent-dht names no nodes in a
            # response with a value, and the value may be old.
            self._plain.look_up(b"get", self.target, self._add_plain_item, lambda _: None)

    def _refresh(self, delay: float) -> None:
        """Send a get to every contact, probe addresses again, and look for more nodes, at growing intervals.

        The first intervals are short, because most missing contacts are due to datagrams lost in the first seconds.
        """
        if self.closed:
            return
        core = self._core
        contacts = self.contacts
        for contact in contacts:
            self._get(contact.address)
        for address in self._first_contacts:  # even silent ones: otherwise two islands would never merge
            self.add_contact(address, force=True)
        if contacts:
            self._find_nodes(core.random.choice(contacts).node, core.id)
            self._find_nodes(core.random.choice(contacts).node, core.random.randbytes(ID_SIZE))
        due = self._plain_put_at is None or core.now - self._plain_put_at >= core.settings.plain_put
        if self.published is not None and due:
            self._put_plain()
        self._refresh_in(min(2 * delay, core.settings.refresh))

    def _refresh_in(self, delay: float) -> None:
        self._core.schedule(self._core.jitter(delay), lambda: self._refresh(delay))

    # ---------------------------------------------------------------- queries sent

    def _get(self, address: DhtAddress) -> None:
        """Send a get for the item. A get SHOULD contain ``seq``, except if the sender has no item yet (BEP 50)."""
        arguments: dict[bytes, Value] = {b"target": self.target}
        if self.item is not None:
            arguments[b"seq"] = self.item.sequence
        contact = self.tables[address.family].find(address)
        if contact is not None:
            if contact.get_pending:
                return
            contact.get_pending = True
        self.transactions.send_query(
            address, b"get", arguments, lambda answer: self._handle_get(address, answer), contact.id if contact else b""
        )

    def _handle_get(self, address: DhtAddress, answer: Answer) -> None:
        tries = self._probing.pop(address, 0)
        table = self.tables[address.family]
        contact = table.find(address)
        if contact is not None:
            contact.get_pending = False
        if answer is None and contact is None and tries < MAX_FAILURES:
            self._probing[address] = tries + 1
            self._get(address)
            return
        if not isinstance(answer, KrpcResponse):
            if not self._record_failure(address, contact, remove=answer is not None):
                self._get(address)
            return
        if answer.sender == self._core.id:  # get_peers also names us
            self._back_off(address, self._core.settings.announce)
            return
        if contact is not None and contact.id != answer.sender:  # it restarted with a new id
            table.remove(contact)
            contact = None
        is_new = contact is None
        contact = contact or table.insert(DhtNode(answer.sender, address), self._core.now)
        self._update_connected()
        if not self._read_get_item(answer, address, contact):
            return
        for node in read_nodes(answer.values)[: 2 * self._core.settings.nodes]:
            self.add_contact(node.address, node.id)
        if is_new:
            # Even if the table has no room for the node: with K = 1, the far buckets of two islands may be full. Then
            # nodes near us, for which there is room, merge the islands.
            self._find_nodes(DhtNode(answer.sender, address), self._core.id)
        if contact is None:
            return
        contact.last_answered, contact.failures = self._core.now, 0
        token = answer.values.get(b"token")
        if isinstance(token, bytes):
            contact.token, contact.token_at = token, self._core.now
        else:
            contact.refusals += 1
        self._push(contact)

    def _read_get_item(self, response: KrpcResponse, address: DhtAddress, contact: OverlayContact | None) -> bool:
        """Process the item in a get response, if any. Return false if the item is invalid, and remove the contact."""
        sequence = response.values.get(b"seq")
        if b"v" in response.values:
            self._core.emit(ItemTransfer(self.target, "in", self._core.datagram, address, response.sender))
            item = read_item(response.values, self.salt)
            if not isinstance(item, Item) or item.key != self.key or not self._offer(item, "get", address, contact):
                self._core.dropped["bad_item"] += 1
                self._record_failure(address, contact, remove=True)
                return False
        if contact is not None:
            contact.sequence = sequence if isinstance(sequence, int) else -1
        return True

    def _find_nodes(self, node: DhtNode, wanted: bytes, tries: int = 1) -> None:
        """Ask a node for nodes near the id ``wanted``. A missing response does not count as a failure of a contact."""

        def handle_answer(answer: Answer) -> None:
            if isinstance(answer, KrpcResponse) and answer.sender == node.id:
                for near in read_nodes(answer.values)[: 2 * self._core.settings.nodes]:
                    self.add_contact(near.address, near.id)
            elif answer is None and tries < MAX_FAILURES:
                self._find_nodes(node, wanted, tries + 1)

        self.transactions.send_query(node.address, b"find_node", {b"target": wanted}, handle_answer, node.id)

    def _record_failure(self, address: DhtAddress, contact: OverlayContact | None, *, remove: bool = False) -> bool:
        """Count an unanswered query, and remove the contact if there are too many in a row.

        Args:
            contact: The contact at the address, if there is one.
            remove: If true, remove the contact at once, because it sent an error or an invalid item.

        Returns:
            True if the address has no contact now.
        """
        if contact is not None:
            contact.failures += 1
            if not remove and contact.failures < MAX_FAILURES:
                return False
            self.tables[address.family].remove(contact)
            self._update_connected()
        self._back_off(address, self._core.settings.probe_pause)
        return True

    def _back_off(self, address: DhtAddress, time: float) -> None:
        self._unresponsive[address] = self._core.now + time

    def _update_connected(self) -> None:
        connected = any(len(table) for table in self.tables.values())
        if connected != self._connected:
            self._connected = connected
            if not connected:
                self._join_in(0.0)

    # ---------------------------------------------------------------- the item

    def publish(self, item: Item) -> None:
        """Send a new item to all contacts (BEP 50, Publishing messages). The plain DHT gets the first item at once, and
        then the newest item hourly.

        Raises:
            ItemPublishError: The item is not a newer, correctly signed item of this topic, or our publishing has
                stopped.
        """
        if self.rival is not None:
            raise ItemPublishError(
                f"cannot publish in topic {self.target.hex()}: another publisher uses its key, and sent an item "
                f"with sequence {self.rival.sequence} and signature {self.rival.signature.hex()[:16]}…. Only one "
                "publisher may use a key."
            )
        if (item.key, item.salt) != (self.key, self.salt):
            raise ItemPublishError(
                f"cannot publish in topic {self.target.hex()}: the item belongs to topic {item.target.hex()}"
            )
        refusal = find_exceeded_limit(item) or (None if is_signed(item) else BAD_SIGNATURE)
        if refusal is not None:
            raise ItemPublishError(
                f"cannot publish in topic {self.target.hex()}: nodes would refuse the item ({refusal.text.decode()})"
            )
        if self.item is not None and item.sequence <= self.item.sequence:
            raise ItemPublishError(
                f"cannot publish in topic {self.target.hex()}: the item's sequence number {item.sequence} is not above "
                f"the topic's {self.item.sequence}"
            )
        is_first = self.published is None
        self.published = item
        self._accept(item, "publish", None)
        if is_first:
            self._put_plain()

    def _offer(self, item: Item, via: Via, source: DhtAddress, contact: OverlayContact | None) -> bool:
        """Accept the item of a get response if it is newer than ours. Return false if the item is invalid."""
        stored = self.item
        if find_exceeded_limit(item) is not None:
            return False
        if stored is not None and (item.sequence < stored.sequence or item == stored):
            return True
        if not is_signed(item):
            return False
        if stored is not None and item.sequence == stored.sequence:
            if item.value != stored.value:
                self._report_conflict(stored, item, source)
            return True
        if contact is not None:
            contact.sequence = item.sequence
        self._accept(item, via, source)
        return True

    def _report_conflict(self, stored: Item, other: Item, source: DhtAddress | None) -> None:
        is_own = self.published is not None
        if is_own and self.rival is None:
            self.rival = other
        self._core.emit(ItemConflict(self.target, stored, other, is_own, source))

    def _accept(self, item: Item, via: Via, source: DhtAddress | None) -> None:
        """Store a verified newer item, emit an `ItemUpdate`, and push the item to our contacts.

        BEP 50 requires this for items from puts. Items from get responses are just as new to our contacts.
        """
        stored = self.item
        self.item = item
        self._core.emit(ItemUpdate(self.target, item, via, source, stored))
        if self.published is not None and self.published is not item and stored is not None:
            self._report_conflict(stored, item, source)
        for contact in self.contacts:
            contact.refusals = 0
            self._push(contact)

    def _push(self, contact: OverlayContact) -> None:
        """Send our newest item to a contact with a put, unless the contact is known to have it.

        BEP 50: "by generating new queries as if the client originated the request".
        """
        item = self.item
        if item is None or contact.sequence >= item.sequence or contact.put_pending or contact.refusals >= MAX_REFUSALS:
            return
        core = self._core
        if contact.token is None or core.now - contact.token_at > core.settings.token_use:
            self._get(contact.address)  # the response handler calls `_push` again
            return
        contact.put_pending = True
        self.transactions.send_query(
            contact.address,
            b"put",
            {**build_put_fields(item), b"token": contact.token},
            lambda answer: self._handle_put(contact, item, answer),
            contact.id,
        )

    def _handle_put(self, contact: OverlayContact, item: Item, answer: Answer) -> None:
        contact.put_pending = False
        if self.tables[contact.address.family].find(contact.address) is not contact:
            return
        match answer:
            case KrpcResponse():
                contact.failures = 0
                contact.last_answered = self._core.now
                contact.sequence = max(contact.sequence, item.sequence)
            case KrpcError():
                contact.refusals += 1
                if answer.refusal.code in (CAS_MISMATCH.code, OLD_SEQUENCE.code):  # the contact has a newer item
                    self._get(contact.address)
                    return
                if answer.refusal.code != BAD_TOKEN.code:
                    contact.refusals = MAX_REFUSALS
                contact.token = None
            case None:
                if self._record_failure(contact.address, contact):
                    return
        self._push(contact)

    # ---------------------------------------------------------------- the item in the plain DHT

    def _put_plain(self) -> None:
        self._plain_put_at = self._core.now
        self._plain.look_up(b"get", self.target, self._add_plain_item, self._store_plain)

    def _add_plain_item(self, response: KrpcResponse, source: DhtAddress) -> None:
        if b"v" in response.values and not self.closed:
            self._core.emit(ItemTransfer(self.target, "in", self._core.datagram, source, response.sender))
            item = read_item(response.values, self.salt)
            if not isinstance(item, Item) or item.key != self.key or not self._offer(item, "plain", source, None):
                self._core.dropped["bad_item"] += 1

    def _store_plain(self, nodes: list[WritableNode]) -> None:
        item = self.item
        if item is not None and nodes and not self.closed:
            emit = self._core.emit
            self._plain.put(item, nodes, lambda count: emit(PlainStoreResult(self.target, item.sequence, count)))

    # ---------------------------------------------------------------- queries received

    def handle_query(self, query: KrpcQuery, source: DhtAddress) -> None:
        """Answer a query with this topic's ``c``, and probe its sender."""
        if query.method == b"put" and b"v" in query.arguments:
            self._core.emit(ItemTransfer(self.target, "in", self._core.datagram, source, query.sender))
        answer = self._answer(query, source)
        if isinstance(answer, KrpcRefusal):
            self._core.send_error(KrpcError(query.transaction, answer, self.target), source)
        else:
            self._respond(query, answer, source)
        if not query.read_only and query.sender != self._core.id:
            self.add_contact(source, query.sender, force=True)

    def _answer(self, query: KrpcQuery, source: DhtAddress) -> dict[bytes, Value] | KrpcRefusal:
        match query.method:
            case b"ping":
                return {}
            case b"find_node":
                wanted = query.arguments.get(b"target")
                if not isinstance(wanted, bytes) or len(wanted) != ID_SIZE:
                    return BAD_ARGUMENTS
                return self._nodes(wanted, source)
            case b"get":
                return self._answer_get(query, source)
            case b"put":
                return self._answer_put(query, source) or {}
            case b"get_peers" | b"announce_peer":
                return PROHIBITED
            case _:
                return UNKNOWN_METHOD

    def _answer_get(self, query: KrpcQuery, source: DhtAddress) -> dict[bytes, Value] | KrpcRefusal:
        if query.arguments.get(b"target") != self.target:
            return OTHER_ITEM
        known = query.arguments.get(b"seq")
        if known is not None and not isinstance(known, int):
            return BAD_ARGUMENTS
        values = self._nodes(self.target, source)
        values[b"token"] = self._tokens.create_token(source.ip, self.target, self._core.now)
        contact = self._contact(query, source)
        if contact is not None and known is not None and self.item is not None:
            # No token or signature proves the number: a false one must not keep later items from the contact.
            contact.sequence = max(contact.sequence, min(known, self.item.sequence))
        if self.item is not None:
            if known is None or known < self.item.sequence:
                values |= build_item_fields(self.item)
            else:
                values[b"seq"] = self.item.sequence
        return values

    def _answer_put(self, query: KrpcQuery, source: DhtAddress) -> KrpcRefusal | None:
        """Apply the rules of BEP 44 and BEP 50 to a put. Return `None` if we have the item now, else the refusal."""
        token, cas = query.arguments.get(b"token"), query.arguments.get(b"cas")
        if not isinstance(token, bytes) or not self._tokens.is_valid(token, source.ip, self.target, self._core.now):
            return BAD_TOKEN
        item = read_item(query.arguments)
        if isinstance(item, KrpcRefusal):
            return item
        refusal = find_exceeded_limit(item)
        if refusal is not None:
            return refusal
        if (item.key, item.salt) != (self.key, self.salt):
            return OTHER_ITEM
        stored, contact = self.item, self._contact(query, source)
        if cas is not None and stored is not None and cas != stored.sequence:
            return CAS_MISMATCH
        if item != stored:  # a copy from flooding is already verified
            if stored is not None and item.sequence < stored.sequence:
                return OLD_SEQUENCE
            if not is_signed(item):
                return BAD_SIGNATURE
            if stored is not None and item.sequence == stored.sequence and item.value != stored.value:
                self._report_conflict(stored, item, source)
                return OLD_SEQUENCE
        if contact is not None:
            contact.sequence = max(contact.sequence, item.sequence)
        if stored is None or item.sequence > stored.sequence:
            self._accept(item, "put", source)
        return None

    def _contact(self, query: KrpcQuery, source: DhtAddress) -> OverlayContact | None:
        contact = self.tables[source.family].find(source)
        return contact if contact is not None and contact.id == query.sender else None

    def _nodes(self, wanted: bytes, source: DhtAddress) -> dict[bytes, Value]:
        nodes = self.tables[source.family].closest(wanted, self._core.settings.nodes + 1)
        others = [node for node in nodes if node.address != source]
        return write_nodes(others[: self._core.settings.nodes])

    def _respond(self, query: KrpcQuery, values: dict[bytes, Value], source: DhtAddress) -> None:
        """Respond in one datagram. If a large item leaves no room for all nodes, omit some nodes."""
        response = KrpcResponse(query.transaction, self._core.id, values, self.target)
        excess = len(write_message(response)) - _ROOM[source.family]
        if excess > 0:
            key, size = (b"nodes", 26) if source.family == 4 else (b"nodes6", 38)
            nodes = values.get(key)
            if isinstance(nodes, bytes):
                values[key] = nodes[: max(0, len(nodes) // size - -(-excess // size)) * size]
        self._core.send(response, source, query.sender)


def addresses(contacts: Iterable[OverlayContact]) -> list[DhtAddress]:
    """Return the addresses of contacts, sorted by the time of the last response, newest first."""
    return [contact.address for contact in sorted(contacts, key=lambda contact: -contact.last_answered)]
