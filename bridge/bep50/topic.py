"""One topic: a node of its own in the overlay of those who follow one item (BEP 50).

"Clients MUST treat each topic as a separate node with its own routing table and transaction state." What it does:

* join: find others by get_peers in the plain DHT, probe each with a get, and ask each that answers for nodes near us;
* hold the newest item, and answer ping, find_node, get and put, each with the topic's ``c``;
* push each new item to every contact that is not known to have it, as queries of our own;
* ask every contact for the item now and then: it renews the write token, and heals what was lost.

A contact is entered only once it has answered. Whoever names a node can lie about it, and get_peers names no ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kiln.bridge.bep50.core import (
    ConnectivityChange,
    ItemAcknowledgement,
    ItemConflict,
    ItemTransfer,
    ItemUpdate,
    OverlayCore,
    PlainStoreResult,
    Via,
)
from kiln.bridge.bep50.limits import WriteTokens
from kiln.bridge.bep50.plain import PlainNode, WritableNode
from kiln.bridge.bep50.table import GONE, OverlayContact, RoutingTable
from kiln.bridge.bep50.transactions import Answer, Transactions
from kiln.conf.process.backoff import pause_after
from kiln.schemas.dht.bencode import Value
from kiln.schemas.dht.items import Item, is_signed, item_fields, limit, put_fields, read_item, target
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
"""A contact that has refused our newest item so often is sent it no more."""
MAX_SILENT: Final = 1024
FIRST_RETRY: Final = 2.0
LAST_RETRY: Final = 60.0
"""Seconds between two attempts to join, while there is nobody: doubled each time, up to this."""
# The largest UDP payload in an Ethernet frame: 1500 bytes without the headers of IP and UDP.
_ROOM: Final[dict[Family, int]] = {4: 1472, 6: 1452}


class ItemPublishError(ValueError):
    """An item that this topic cannot publish, and why."""


class TopicNode:
    """The overlay node of one topic."""

    def __init__(
        self,
        machine: OverlayCore,
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
        self.target = target(key, salt)
        self.item = stored
        """The newest item (BEP 50: "SHOULD store the latest value of the mutable item ... at all times")."""
        self.published: Item | None = stored if publishing else None
        """The last item published here, in this run or an earlier one."""
        self.rival: Item | None = None
        """An item that somebody else has published under the key that we publish under."""
        self.closed = False
        per_ip, bound_ids = machine.settings.per_ip, machine.settings.bound_ids
        self.tables: dict[Family, RoutingTable] = {  # two DHTs (BEP 32), one item: it crosses where a node is in both
            4: RoutingTable(machine.id, per_ip=per_ip, bound_ids=bound_ids),
            6: RoutingTable(machine.id, per_ip=per_ip, bound_ids=bound_ids),
        }
        self._core = machine
        self._plain = plain
        self._tokens = tokens
        self._transactions = Transactions(machine, self.target)
        self._first_contacts = list(contacts)
        self._probing: dict[DhtAddress, int] = {}
        """How often each was asked."""
        self._silent: dict[DhtAddress, float] = {}
        self._connected = False
        self._join_count = 0
        self._looking = 0
        self._tries = 0
        self._announced: float | None = None
        self._stored_plain: float | None = None
        self._join()
        self._refresh_in(FIRST_RETRY)

    @property
    def contacts(self) -> list[OverlayContact]:
        """All contacts of both families."""
        return [contact for table in self.tables.values() for contact in table]

    @property
    def waiting(self) -> int:
        """How many queries wait for their answer."""
        return len(self._transactions)

    def close(self) -> None:
        """Leave. BEP 50 has no word of farewell: others notice that we no longer answer."""
        self.closed = True
        self._transactions.forget()

    # ---------------------------------------------------------------- joining

    def add_contact(self, address: DhtAddress, node_id: bytes | None = None, *, insist: bool = False) -> None:
        """Probe a node that we were told of, if the table would take it in. An id is known unless it comes from
        get_peers. One that did not answer is left alone for a while, unless we ``insist``."""
        machine, table = self._core, self.tables[address.family]
        if self.closed or address in self._probing or table.find(address) or not address.usable:
            return
        if not insist and self._silent.get(address, machine.now) > machine.now:
            return
        if node_id is not None and not table.has_room(DhtNode(node_id, address)):
            return
        if len(self._probing) < machine.settings.probes:
            self._silent.pop(address, None)
            self._probing[address] = 1
            self._get(address)

    def _join(self) -> None:
        """Find others, and be found: again and again while there is nobody, later as often as we are announced."""
        if self.closed:
            return
        machine = self._core
        since = None if self._announced is None else machine.now - self._announced
        if not self._connected:
            for address in self._first_contacts:
                self.add_contact(address, insist=True)
        if self._connected and since is not None and since < machine.settings.announce:
            self._tries = 0
            self._join_in(machine.settings.announce - since)
            return
        if not self._looking:
            self._looking = len(self.tables)  # a lookup in each family
            self._plain.look_up(b"get_peers", self.target, self._add_peers, self._announce)
        self._tries += 1
        self._join_in(pause_after(self._tries, FIRST_RETRY, LAST_RETRY))

    def _join_in(self, delay: float) -> None:
        self._join_count += 1  # only the timer set last counts
        count = self._join_count
        self._core.schedule(self._core.jitter(delay), lambda: self._join() if count == self._join_count else None)

    def _add_peers(self, response: KrpcResponse, _: DhtAddress) -> None:
        for address in read_addresses(response.values.get(b"values")):
            self.add_contact(address)

    def _announce(self, nodes: list[WritableNode]) -> None:
        """BEP 50: "Clients SHOULD also announce themselves to this infohash". The item is looked up too: who cut us off
        from the overlay has not also cut us off from the plain DHT."""
        self._looking -= 1
        if nodes and not self.closed:
            self._announced = self._core.now
            self._plain.announce(self.target, nodes)
            # Now, when nodes near the target are known: npm's names no others beside a value, and its may be old.
            self._plain.look_up(b"get", self.target, self._add_plain_item, lambda _: None)

    def _refresh(self, delay: float) -> None:
        """Ask every contact for the item; soon after the start, then ever more seldom: what a table lacks, it lacks
        after losses in the first seconds."""
        if self.closed:
            return
        machine = self._core
        contacts = self.contacts
        for contact in contacts:
            self._get(contact.address)
        for address in self._first_contacts:  # also those that did not answer: else two islands would never know
            self.add_contact(address, insist=True)
        if contacts:
            self._find(machine.random.choice(contacts).node, machine.id)
            self._find(machine.random.choice(contacts).node, machine.random.randbytes(ID_SIZE))
        due = self._stored_plain is None or machine.now - self._stored_plain >= machine.settings.plain_put
        if self.published is not None and due:
            self._put_plain()
        self._refresh_in(min(2 * delay, machine.settings.refresh))

    def _refresh_in(self, delay: float) -> None:
        self._core.schedule(self._core.jitter(delay), lambda: self._refresh(delay))

    # ---------------------------------------------------------------- asking

    def _get(self, address: DhtAddress) -> None:
        """Ask for the item. BEP 50: ``seq`` SHOULD always be there, unless one joins and has no value yet."""
        arguments: dict[bytes, Value] = {b"target": self.target}
        if self.item is not None:
            arguments[b"seq"] = self.item.sequence
        contact = self.tables[address.family].find(address)
        if contact is not None:
            if contact.asking:
                return
            contact.asking = True
        self._transactions.send_query(
            address, b"get", arguments, lambda answer: self._handle_get(address, answer), contact.id if contact else b""
        )

    def _handle_get(self, address: DhtAddress, answer: Answer) -> None:
        tries = self._probing.pop(address, 0)
        table = self.tables[address.family]
        contact = table.find(address)
        if contact is not None:
            contact.asking = False
        if answer is None and contact is None and tries < GONE:
            self._probing[address] = tries + 1
            self._get(address)
            return
        if not isinstance(answer, KrpcResponse):
            if not self._failed(address, contact, is_gone=answer is not None):
                self._get(address)
            return
        if answer.sender == self._core.id:  # get_peers also names us
            self._back_off(address, self._core.settings.announce)
            return
        if contact is not None and contact.id != answer.sender:  # started anew, with a new id
            table.remove(contact)
            contact = None
        is_new = contact is None
        contact = contact or table.insert(DhtNode(answer.sender, address), self._core.now)
        self._update_connected()
        if not self._read_get_contacts(answer, address, contact):
            return
        for node in read_nodes(answer.values)[: 2 * self._core.settings.nodes]:
            self.add_contact(node.address, node.id)
        if is_new:
            # Also if there is no room for it: with K = 1 two islands can each have all the far nodes they take. Then it
            # is the nodes near us, for which there is room, that join them.
            self._find(DhtNode(answer.sender, address), self._core.id)
        if contact is None:
            return
        contact.answered, contact.failures = self._core.now, 0
        token = answer.values.get(b"token")
        if isinstance(token, bytes):
            contact.token, contact.token_at = token, self._core.now
        else:
            contact.refused += 1
        self._push(contact)

    def _read_get_contacts(self, response: KrpcResponse, address: DhtAddress, contact: OverlayContact | None) -> bool:
        """Take the item out of a get response, if it has one; False if it is not what a node of this topic answers."""
        sequence = response.values.get(b"seq")
        if b"v" in response.values:
            self._core.emit(ItemTransfer(self.target, "in", self._core.datagram, address, response.sender))
            item = read_item(response.values, self.salt)
            if not isinstance(item, Item) or item.key != self.key or not self._offer(item, "get", address, contact):
                self._core.dropped["bad_item"] += 1
                self._failed(address, contact, is_gone=True)
                return False
        if contact is not None and isinstance(sequence, int):
            contact.sequence = sequence
        return True

    def _find(self, node: DhtNode, wanted: bytes, tries: int = 1) -> None:
        """Ask a node for those near ``wanted``. Failures are not counted: those of the gets are."""

        def done(answer: Answer) -> None:
            if isinstance(answer, KrpcResponse) and answer.sender == node.id:
                for each in read_nodes(answer.values)[: 2 * self._core.settings.nodes]:
                    self.add_contact(each.address, each.id)
            elif answer is None and tries < GONE:
                self._find(node, wanted, tries + 1)

        self._transactions.send_query(node.address, b"find_node", {b"target": wanted}, done, node.id)

    def _failed(self, address: DhtAddress, contact: OverlayContact | None, *, is_gone: bool = False) -> bool:
        """A query was not answered, or (``is_gone``) answered as no node of this topic does. True if that was one time
        too many, and the address is no contact any more."""
        if contact is not None:
            contact.failures += 1
            if not is_gone and contact.failures < GONE:
                return False
            self.tables[address.family].remove(contact)
            self._update_connected()
        self._back_off(address, self._core.settings.silence)
        return True

    def _back_off(self, address: DhtAddress, time: float) -> None:
        self._silent.pop(address, None)
        self._silent[address] = self._core.now + time
        if len(self._silent) > MAX_SILENT:
            del self._silent[next(iter(self._silent))]

    def _update_connected(self) -> None:
        connected = any(len(table) for table in self.tables.values())
        if connected != self._connected:
            self._connected = connected
            self._core.emit(ConnectivityChange(self.target, connected))
            if not connected:
                self._join_in(0.0)

    # ---------------------------------------------------------------- the item

    def publish(self, item: Item) -> None:
        """Send a new item to all contacts (BEP 50, Publishing messages); the plain DHT has it hourly.

        Raises PublishError if it is no newer item of this topic, well signed, or if our publishing has stopped.
        """
        if self.rival is not None:
            raise ItemPublishError(
                f"another publisher uses the key of topic {self.target.hex()}: it has sent sequence "
                f"{self.rival.sequence}, signed {self.rival.signature.hex()[:16]}...; stop it, or use another key"
            )
        if (item.key, item.salt) != (self.key, self.salt):
            raise ItemPublishError(f"an item of {item.target.hex()} cannot be published in topic {self.target.hex()}")
        refusal = limit(item) or (None if is_signed(item) else BAD_SIGNATURE)
        if refusal is not None:
            raise ItemPublishError(f"the item would be refused: {refusal.text.decode()}")
        if self.item is not None and item.sequence <= self.item.sequence:
            raise ItemPublishError(f"sequence {item.sequence} is not above {self.item.sequence}, which the topic is at")
        is_first = self.published is None
        self.published = item
        self._accept(item, "publish", None)
        if is_first:
            self._put_plain()

    def _offer(self, item: Item, via: Via, source: DhtAddress, contact: OverlayContact | None) -> bool:
        """Take an item that a get has brought, if it is newer; False if it is not well signed."""
        stored = self.item
        if limit(item) is not None:
            return False
        if stored is not None and (item.sequence < stored.sequence or item == stored):
            return True
        if not is_signed(item):
            return False
        if stored is not None and item.sequence == stored.sequence:
            self._compare(stored, item, source)
            return True
        if contact is not None:
            contact.sequence = item.sequence
        self._accept(item, via, source)
        return True

    def _compare(self, stored: Item, other: Item, source: DhtAddress | None) -> None:
        """A well signed item with the sequence number of ours: one number should have one value."""
        if other.value != stored.value:
            self._report(stored, other, source)

    def _report(self, stored: Item, other: Item, source: DhtAddress | None) -> None:
        ours = self.published is not None
        if ours and self.rival is None:
            self.rival = other
        self._core.emit(ItemConflict(self.target, stored, other, ours, source))

    def _accept(self, item: Item, via: Via, source: DhtAddress | None) -> None:
        """A verified newer item: keep it, tell, and push it on. From wherever it came: BEP 50 forwards puts, but what a
        get has brought is as new to our contacts."""
        stored = self.item
        self.item = item
        self._core.emit(ItemUpdate(self.target, item, via, source, stored))
        if self.published is not None and self.published is not item and stored is not None:
            self._report(stored, item, source)
        for contact in self.contacts:
            contact.refused = 0
            self._push(contact)

    def _push(self, contact: OverlayContact) -> None:
        """Put our newest item to a contact that is not known to have it: "by generating new queries as if the client
        originated the request", with the token that this contact gave us."""
        item = self.item
        if item is None or contact.sequence >= item.sequence or contact.putting or contact.refused >= MAX_REFUSALS:
            return
        machine = self._core
        if contact.token is None or machine.now - contact.token_at > machine.settings.token_use:
            self._get(contact.address)  # its answer brings us back here
            return
        contact.putting = True
        self._transactions.send_query(
            contact.address,
            b"put",
            {**put_fields(item), b"token": contact.token},
            lambda answer: self._handle_put(contact, item, answer),
            contact.id,
        )

    def _handle_put(self, contact: OverlayContact, item: Item, answer: Answer) -> None:
        contact.putting = False
        if self.tables[contact.address.family].find(contact.address) is not contact:
            return
        match answer:
            case KrpcResponse():
                contact.failures = 0
                contact.answered = self._core.now
                contact.sequence = max(contact.sequence, item.sequence)
                if item is self.published:
                    self._core.emit(ItemAcknowledgement(self.target, item.sequence, contact.address))
            case KrpcError():
                contact.refused += 1
                if answer.refusal.code in (CAS_MISMATCH.code, OLD_SEQUENCE.code):  # it is ahead of us
                    self._get(contact.address)
                    return
                if answer.refusal.code != BAD_TOKEN.code:
                    contact.refused = MAX_REFUSALS
                contact.token = None
            case None:
                if self._failed(contact.address, contact):
                    return
        self._push(contact)

    # ---------------------------------------------------------------- the item in the plain DHT

    def _put_plain(self) -> None:
        self._stored_plain = self._core.now
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
            told = self._core.emit
            self._plain.put(item, nodes, lambda nodes: told(PlainStoreResult(self.target, item.sequence, nodes)))

    # ---------------------------------------------------------------- answering

    def handle_response(self, message: KrpcResponse | KrpcError, source: DhtAddress) -> bool:
        """Take an answer; False if nobody had asked."""
        done = self._transactions.pop(message, source)
        if done is not None:
            done(message)
        return done is not None

    def handle_query(self, query: KrpcQuery, source: DhtAddress) -> None:
        """Answer a query that has this topic's ``c``."""
        if query.method == b"put" and b"v" in query.arguments:
            self._core.emit(ItemTransfer(self.target, "in", self._core.datagram, source, query.sender))
        answer = self._answer(query, source)
        if isinstance(answer, KrpcRefusal):
            self._core.send_error(KrpcError(query.transaction, answer, self.target), source)
        else:
            self._respond(query, answer, source)
        if not query.read_only and query.sender != self._core.id:
            self.add_contact(source, query.sender, insist=True)

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
        if contact is not None and known is not None:
            contact.sequence = max(contact.sequence, known)
        if self.item is not None:
            if known is None or known < self.item.sequence:
                values |= item_fields(self.item)
            else:
                values[b"seq"] = self.item.sequence
        return values

    def _answer_put(self, query: KrpcQuery, source: DhtAddress) -> KrpcRefusal | None:
        """BEP 44's rules in BEP 50's bounds; None if we have the item now."""
        token, cas = query.arguments.get(b"token"), query.arguments.get(b"cas")
        if not isinstance(token, bytes) or not self._tokens.is_valid(token, source.ip, self.target, self._core.now):
            return BAD_TOKEN
        item = read_item(query.arguments)
        if isinstance(item, KrpcRefusal):
            return item
        beyond = limit(item)
        if beyond is not None:
            return beyond
        if (item.key, item.salt) != (self.key, self.salt):
            return OTHER_ITEM
        stored, contact = self.item, self._contact(query, source)
        if cas is not None and stored is not None and cas != stored.sequence:
            return CAS_MISMATCH
        if item != stored:  # what floods in again needs no second look
            if stored is not None and item.sequence < stored.sequence:
                return OLD_SEQUENCE
            if not is_signed(item):
                return BAD_SIGNATURE
            if stored is not None and item.sequence == stored.sequence and item.value != stored.value:
                self._compare(stored, item, source)
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
        """Answer in one datagram: where a large value leaves no room for all nodes, some are left out."""
        response = KrpcResponse(query.transaction, self._core.id, values, self.target)
        excess = len(write_message(response)) - _ROOM[source.family]
        if excess > 0:
            key, size = (b"nodes", 26) if source.family == 4 else (b"nodes6", 38)
            nodes = values.get(key)
            if isinstance(nodes, bytes):
                values[key] = nodes[: max(0, len(nodes) // size - -(-excess // size)) * size]
        self._core.send(response, source, query.sender)


def addresses(contacts: Iterable[OverlayContact]) -> list[DhtAddress]:
    """Where the contacts are reached, those that answered last first: what to keep for the next start."""
    return [each.address for each in sorted(contacts, key=lambda each: -each.answered)]
