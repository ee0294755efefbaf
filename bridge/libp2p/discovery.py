"""Find peers for the node's topics through the libp2p DHT (CIP-120, Peer discovery), and serve the DHT to others.

For each topic, the node announces itself to the servers nearest to the topic's key, looks up which peers did the same,
and dials some of them. It also announces the blocks that it serves, and connects to providers of the blocks that it
fetches. Lookups start at the bootstrap peers. Without a bootstrap peer, the node only answers the queries of others.

Discovered peers are not trusted. The node dials a few of them at a time, with a growing back-off after failures. It
ignores addresses that the reporting peer cannot know, such as private ones from a public peer. It disconnects a peer
that does not subscribe to the topic. Discovered peers are at most half of a mesh, and at most half of the peers that a
topic needs.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Final

import trio
from google.protobuf.message import DecodeError
from libp2p.abc import INetStream
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.network.stream.net_stream import NetStream
from multiaddr import Multiaddr

from kiln.bridge.gossipsub.wire import OversizedRpc, RpcSplitter, WireError, encode
from kiln.bridge.libp2p.addresses import ADDRESS_ERRORS, NodeError
from kiln.bridge.libp2p.closing import BROKEN, shielded
from kiln.bridge.libp2p.host import Node
from kiln.bridge.libp2p.kademlia import (
    MAX_MESSAGE,
    MAX_PROVIDERS,
    AddressScope,
    DhtContact,
    DhtLimits,
    DhtServer,
    K,
    KademliaTable,
    TcpAddress,
    address_scope,
    build_announcement,
    key_position,
    merge_contacts,
    nearest_contacts,
    read_address,
    read_peers,
    shareable_addresses,
    topic_key,
    trusted_contact,
)
from kiln.conf.process.backoff import pause_after
from kiln.conf.process.bounded_dict import BoundedDict

PREFIX: Final = "/ipfs"
_TICK: Final = 0.5
_SELF_LOOK_UP_EVERY: Final = 3600.0  # s; a lookup of the node's own id makes the node known to the servers near it
_READ_BYTES: Final = 64 * 1024
_KNOWN_SERVERS_AGE: Final = 1.0  # s that the list of known servers stays valid


@dataclass(frozen=True)
class DiscoveryOptions:
    """Options of discovery. Times are in seconds."""

    prefix: str = PREFIX  # of the protocol, <prefix>/kad/1.0.0
    serve: bool = True  # serve the DHT if the node listens
    announce: Sequence[str] = ()  # multiaddrs to announce; by default the listen addresses
    reprovide_interval: float = 12 * 3600.0
    lookup_interval: float = 300.0  # between lookups of a topic with too few peers; shorter at first
    first_lookup_interval: float = 5.0
    max_dials: int = 8  # at a time
    max_topic_lookups: int = 4  # at a time
    parallel_queries: int = 3  # of one lookup
    max_queries: int = 60  # of one lookup
    lookup_timeout: float = 60.0
    dial_timeout: float = 5.0
    query_timeout: float = 10.0
    max_providers: int = 16  # providers of a topic to dial after one lookup
    max_blocks: int = 10_000  # that are announced; the newest ones
    max_block_walks: int = 2  # lookups at a time that announce blocks
    max_block_providers: int = 4  # providers of a block to dial during one lookup
    subscribe_timeout: float = 10.0  # a peer dialled for a topic that does not subscribe by then is disconnected
    max_discovered: int = 100  # discovered peers connected, for all topics together
    max_idle_connections: int = 32  # that no topic needs, kept for further queries
    idle_connection_timeout: float = 30.0  # since the last query
    first_backoff: float = 60.0  # after the first failure; doubles with each
    max_backoff: float = 3600.0
    max_backoff_entries: int = 4096  # failures, and as many dialled addresses
    max_dials_per_address: int = 4  # within `first_backoff`, for all peers together
    max_streams: int = 32  # served at a time, a quarter of them to one peer
    max_answers_per_second: float = 200.0  # to all peers
    stream_timeout: float = 60.0  # a served stream without a query is closed
    limits: DhtLimits = field(default_factory=DhtLimits)

    @property
    def protocol(self) -> str:
        return f"{self.prefix}/kad/1.0.0"


@dataclass
class _Topic:
    key: bytes
    announce_at: float
    look_up_at: float
    delay: float
    is_busy: bool = False


@dataclass
class _ProvidedBlock:
    announce_at: float
    is_announced: bool = False
    is_busy: bool = False


class DialBackoff:
    """Back-off of peers that failed, and a limit on the dials of an address.

    Args:
        first: Back-off in seconds after the first failure. It doubles with each further failure.
        longest: Maximum back-off in seconds.
        max_entries: Maximum number of failures, and also of addresses, to remember. The oldest are dropped.
        per_address: Maximum number of dials of an address in `first` seconds.
    """

    def __init__(self, first: float, longest: float, max_entries: int, per_address: int) -> None:
        self._first, self._longest, self._per_address = first, longest, per_address
        self._failed = BoundedDict[tuple[bytes, TcpAddress | None], tuple[int, float]](max_entries)  # (count, until)
        self._dialled = BoundedDict[TcpAddress, tuple[int, float]](max_entries)  # (count, since)

    def __len__(self) -> int:
        return len(self._failed) + len(self._dialled)

    def in_backoff(self, peer: bytes, address: TcpAddress | None, now: float) -> bool:
        """Return true if a peer may not be dialled now at an address or, if `address` is `None`, at any address."""
        if now < self._failed.get((peer, address), (0, 0.0))[1]:
            return True
        if address is None:
            return False
        count, since = self._dialled.get(address, (0, 0.0))
        # many peer ids at one address: perhaps an attack on that address, so it is not a failure of the peer
        return count >= self._per_address and now < since + self._first

    def record_dial(self, address: TcpAddress, now: float) -> None:
        """Record a dial of an address, whichever peer it was for."""
        count, since = self._dialled.get(address, (0, now))
        if now >= since + self._first:
            count, since = 0, now
        self._dialled[address] = (count + 1, since)

    def record_failure(self, peer: bytes, address: TcpAddress | None, now: float) -> None:
        """Record that a dial of a peer failed or, if `address` is `None`, that the connected peer was of no use."""
        count = self._failed.get((peer, address), (0, 0.0))[0]
        self._failed[peer, address] = (count + 1, now + pause_after(count + 1, self._first, self._longest))

    def record_success(self, peer: bytes, address: TcpAddress | None) -> None:
        """End the back-off of a peer at an address or, if `address` is `None`, as a whole."""
        self._failed.pop((peer, address), None)


class Discovery:
    """Peer discovery of a node. Create it before the node runs, and `run` it once the node listens.

    It counts events in the node's counters, under names that begin with discovery_.
    """

    def __init__(self, node: Node, options: DiscoveryOptions, rng: Random, mesh: int = 6) -> None:
        """Create the discovery. If the node listens and `options.serve` is true, let the node serve the DHT.

        Args:
            mesh: Number of peers that a topic needs: gossipsub's D.

        Raises:
            NodeError: An address to announce is invalid.
        """
        self._node = node
        self._options = options
        self._rng = rng
        self._mesh = mesh
        self._announced_addresses = [_parse_announced(text, node.peer) for text in options.announce]
        self._counters = node.counters
        self._topics: dict[str, _Topic] = {}
        self._table = KademliaTable(node.peer)
        self._server = DhtServer(node.peer, options.limits)
        self._failures = DialBackoff(
            options.first_backoff, options.max_backoff, options.max_backoff_entries, options.max_dials_per_address
        )
        self._dials = trio.CapacityLimiter(options.max_dials)
        self._topic_slots = trio.CapacityLimiter(options.max_topic_lookups)
        self._connected_bootstrap: dict[bytes, int] = {}  # connected bootstrap peers, and how often each was dialled
        self._self_at = 0.0
        self._used: dict[bytes, float] = {}  # discovered peer -> time of the last query to it
        self._candidates: set[bytes] = set()  # peers being tried for a topic
        self._on_topic: set[bytes] = set()  # discovered peers that subscribe to a joined topic
        self._ongoing_dials: dict[bytes, trio.Event] = {}  # peer -> set when the dial ends
        self._streams: dict[bytes, int] = {}  # number of served streams by peer
        self._blocks: dict[bytes, _ProvidedBlock] = {}  # by multihash, the newest last
        self._server.blocks = self._blocks
        self._block_walks = 0
        self._next_answer_at = 0.0
        self._known_servers_at, self._known_servers_cache = -_KNOWN_SERVERS_AGE, list[DhtContact]()
        self._serves = options.serve and node.is_listening
        if self._serves:
            node.serve(options.protocol, self._serve)

    @property
    def sizes(self) -> dict[str, int]:
        """Number of entries in each store. All stores are bounded."""
        return {
            "servers": len(self._table),
            "records": len(self._server.providers),
            "failures": len(self._failures),
            "connections": len(self._node.discovered),
            "blocks": len(self._blocks),
        }

    async def run(self) -> None:
        """Announce, look up and dial until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                self._tick(nursery, trio.current_time())
                await trio.sleep(_TICK)

    # ------------------------------------------------------------------ blocks

    def provide_block(self, key: bytes) -> None:
        """Announce a block now and every `reprovide_interval`, until it is withdrawn or displaced by newer blocks.

        Args:
            key: Multihash of the block.
        """
        if key in self._blocks:
            return
        self._blocks[key] = _ProvidedBlock(trio.current_time())
        if len(self._blocks) > self._options.max_blocks:
            self.withdraw_block(next(iter(self._blocks)))

    def withdraw_block(self, key: bytes) -> None:
        """Stop announcing a block. The servers drop its records when these expire."""
        block = self._blocks.pop(key, None)
        if block is not None and not block.is_announced:
            self._counters["discovery_blocks_unprovided"] += 1

    async def connect_providers(self, key: bytes, report: Callable[[bytes], None]) -> bool:
        """Look up the providers of a block, and connect to some of them. Return false if no DHT server answered.

        Args:
            key: Multihash of the block.
            report: Called with the peer id of each provider once it is connected.
        """
        tried: set[bytes] = set()

        async def connect(contact: DhtContact) -> None:
            if await self._dial(contact):
                self._used[contact.peer] = trio.current_time()
                report(contact.peer)

        def add_provider(contact: DhtContact) -> None:
            if contact.peer not in tried and len(tried) < self._options.max_block_providers:
                tried.add(contact.peer)
                nursery.start_soon(connect, contact)

        self._counters["discovery_block_lookups"] += 1
        async with trio.open_nursery() as nursery:
            servers, _ = await self._look_up(key, Message.GET_PROVIDERS, add_provider)
        return bool(servers)

    def _announce_blocks(self, nursery: trio.Nursery, now: float) -> None:
        """Start to announce the blocks that are due, the newest first, up to `max_block_walks` at a time."""
        if self._block_walks >= self._options.max_block_walks or not self._can_announce:
            return
        for key in reversed(self._blocks):
            block = self._blocks[key]
            if block.announce_at <= now and not block.is_busy:
                block.is_busy = True
                self._block_walks += 1
                nursery.start_soon(self._announce_block, key, block)
                if self._block_walks >= self._options.max_block_walks:
                    return

    async def _announce_block(self, key: bytes, block: _ProvidedBlock) -> None:
        count = 0
        try:
            servers, _ = await self._look_up(key, Message.GET_PROVIDERS)
            count = await self._announce(key, nearest_contacts(servers, key))
        finally:
            self._block_walks -= 1
            block.is_busy = False
            wait = self._options.lookup_interval
            if count:
                self._counters["discovery_blocks_provided"] += not block.is_announced
                block.is_announced = True
                wait = self._options.reprovide_interval * self._rng.uniform(0.8, 1)
            block.announce_at = trio.current_time() + wait

    # ------------------------------------------------------------------ schedule

    def _tick(self, nursery: trio.Nursery, now: float) -> None:
        topics = self._node.topics
        for topic in self._topics.keys() - set(topics):
            del self._topics[topic]
        for topic in topics:
            if topic not in self._topics:
                self._topics[topic] = _Topic(topic_key(topic), now, now, self._options.first_lookup_interval)
        self._server.provided = {followed.key for followed in self._topics.values()}
        self._disconnect_spare(nursery, now)

        up = {peer: tries for peer, tries in self._node.bootstrap.items() if self._node.is_connected(peer)}
        reconnected = up.items() - self._connected_bootstrap.items()
        if reconnected:
            # a new bootstrap peer, or one that may have restarted and lost the records of this node
            for peer, _ in reconnected:
                self._failures.record_success(peer, None)
            self._self_at = now
            for followed in self._topics.values():
                followed.announce_at, followed.look_up_at, followed.delay = (
                    now,
                    now,
                    self._options.first_lookup_interval,
                )
        self._connected_bootstrap = up
        if not up and not len(self._table):
            return
        if self._serves and now >= self._self_at:
            self._self_at = now + (_SELF_LOOK_UP_EVERY if len(self._table) >= K else self._options.lookup_interval)
            nursery.start_soon(self._look_up, self._node.peer, Message.FIND_NODE)
        self._announce_blocks(nursery, now)
        for topic, state in self._topics.items():
            if not state.is_busy and (
                self._needs_announce(state, now) or (state.look_up_at <= now and self._missing_peers(topic) > 0)
            ):
                state.is_busy = True
                nursery.start_soon(self._refresh_topic, topic, state)

    @property
    def _can_announce(self) -> bool:
        """True if the node has an address to announce."""
        return bool(self._announced_addresses or self._node.addresses)

    def _needs_announce(self, state: _Topic, now: float) -> bool:
        return state.announce_at <= now and self._can_announce

    def _missing_peers(self, topic: str) -> int:
        """Return the number of peers still to find for a topic; 0 or less if it has enough."""
        subscribers = self._node.router.subscribers(topic)
        return min(
            self._mesh // 2 - sum(peer in subscribers for peer in self._node.discovered),
            self._mesh - len(subscribers),
            self._options.max_discovered - len(self._node.discovered),
        )

    def _disconnect_spare(self, nursery: trio.Nursery, now: float) -> None:
        """Disconnect discovered peers that no topic needs, if they were not queried lately or are too many."""
        discovered = list(self._node.discovered)
        if not discovered and not self._used:
            return
        self._used = {peer: self._used.get(peer, now) for peer in discovered}
        needed, on_topic = set(self._candidates), set[bytes]()
        for topic in self._topics:
            subscribers = self._node.router.subscribers(topic)
            on_topic_peers = [peer for peer in discovered if peer in subscribers]
            needed.update(on_topic_peers[: self._mesh // 2])
            on_topic.update(on_topic_peers)
        self._counters["discovery_found"] += len(on_topic - self._on_topic)
        self._on_topic = on_topic
        spare = sorted((peer for peer in discovered if peer not in needed), key=self._used.__getitem__)
        most = max(0, len(spare) - self._options.max_idle_connections)
        for number, peer in enumerate(spare):
            if number < most or self._used[peer] + self._options.idle_connection_timeout < now:
                nursery.start_soon(self._node.disconnect_discovered, peer)

    async def _refresh_topic(self, topic: str, state: _Topic) -> None:
        try:
            async with self._topic_slots:
                servers, providers = await self._look_up(state.key, Message.GET_PROVIDERS)
                if self._needs_announce(state, trio.current_time()):
                    count = await self._announce(state.key, nearest_contacts(servers, state.key))
                    self._counters["discovery_provided"] += count
                    # jitter, so that topics that were joined together are not announced together again
                    wait = self._options.lookup_interval
                    if count:
                        wait = self._options.reprovide_interval * self._rng.uniform(0.8, 1)
                    state.announce_at = trio.current_time() + wait
                if self._missing_peers(topic) > 0:
                    await self._dial_providers(topic, list(providers.values()))
        finally:
            if self._missing_peers(topic) <= 0:
                state.delay = self._options.first_lookup_interval
            state.look_up_at = trio.current_time() + state.delay
            state.delay = min(state.delay * 2, self._options.lookup_interval)
            state.is_busy = False

    # ------------------------------------------------------------------ queries

    async def _look_up(
        self, key: bytes, kind: Message.MessageType, report: Callable[[DhtContact], None] = lambda contact: None
    ) -> tuple[list[DhtContact], dict[bytes, DhtContact]]:
        """Query servers ever nearer to a key, until the K nearest have answered (a Kademlia lookup).

        Args:
            kind: Type of the queries: FIND_NODE or GET_PROVIDERS.
            report: Called with each provider as soon as a server has named it.

        Returns:
            The servers that answered, and the providers that they named, by peer id.
        """
        options = self._options
        target = key_position(key)
        contacts = {contact.peer: contact for contact in self._initial_servers()}
        distance = {peer: key_position(peer) ^ target for peer in contacts}
        waiting = set(contacts)
        answered: set[bytes] = set()
        providers: dict[bytes, DhtContact] = {}
        queries, running = 0, 0
        news = trio.Event()

        def next_peer() -> bytes | None:
            if not waiting or queries >= options.max_queries:
                return None
            peer = min(waiting, key=distance.__getitem__)
            if len(answered) >= K and distance[peer] > sorted(distance[other] for other in answered)[K - 1]:
                return None
            waiting.discard(peer)
            return peer

        def add_answer(answer: Message, scope: AddressScope) -> None:
            now = trio.current_time()
            for closer in read_peers(answer.closerPeers, K, scope):
                peer = closer.peer
                if peer in contacts:
                    contacts[peer] = merge_contacts(contacts[peer], closer)
                elif peer != self._node.peer and closer.addresses and not self._failures.in_backoff(peer, None, now):
                    contacts[peer] = closer
                    distance[peer] = key_position(peer) ^ target
                    waiting.add(peer)
            for closer in read_peers(answer.providerPeers, MAX_PROVIDERS, scope):
                if closer.peer != self._node.peer:
                    providers[closer.peer] = merge_contacts(providers.get(closer.peer, closer), closer)
                    report(providers[closer.peer])

        async def worker() -> None:
            nonlocal queries, running, news
            while True:
                peer = next_peer()
                if peer is None:
                    if not running:
                        return
                    await news.wait()
                    continue
                queries, running = queries + 1, running + 1
                try:
                    reply = await self._query(contacts[peer], Message(type=kind, key=key))
                finally:
                    running -= 1
                    news.set()
                    news = trio.Event()
                if reply is not None:
                    answered.add(peer)
                    add_answer(*reply)

        with trio.move_on_after(options.lookup_timeout):
            async with trio.open_nursery() as nursery:
                for _ in range(options.parallel_queries):
                    nursery.start_soon(worker)
        self._counters["discovery_lookups"] += 1
        servers = [contacts[peer] for peer in answered]
        for contact in servers:
            if contact.addresses:
                self._table.add(contact)
        return servers, providers

    def _initial_servers(self) -> Iterator[DhtContact]:
        """Return the servers at which a lookup starts: connected ones, and those that answered earlier lookups."""
        known = {contact.peer: contact for contact in self._table.contacts()}
        for peer in (
            *self._connected_bootstrap,
            *(peer for peer, _ in self._node.peers_speaking(self._options.protocol)),
        ):
            known.setdefault(peer, DhtContact(peer, ()))
        now = trio.current_time()
        return (contact for contact in known.values() if not self._failures.in_backoff(contact.peer, None, now))

    async def _query(self, contact: DhtContact, message: Message) -> tuple[Message, AddressScope] | None:
        """Send a query to a server, and wait for the answer.

        Returns:
            The answer, and the scope of the server's address. If no answer comes, `None`; the server is then removed
            from the table.
        """
        peer = contact.peer
        if not await self._dial(contact):
            self._table.remove(peer)
            return None
        self._counters["discovery_queries"] += 1
        with self._mark_used(peer):
            try:
                with trio.fail_after(self._options.query_timeout):
                    async with self._stream(peer) as stream:
                        await stream.write(encode(message.SerializeToString()))
                        answer = await _Messages(stream).next()
                    scope = self._remote_scope(peer)
            except (*BROKEN, WireError, DecodeError):
                answer = None
            if answer is None:
                self._counters["discovery_queries_unanswered"] += 1
                self._failures.record_failure(peer, None, trio.current_time())
                self._table.remove(peer)
                return None
        self._failures.record_success(peer, None)
        return answer, scope

    async def _announce(self, key: bytes, servers: Iterable[DhtContact]) -> int:
        """Announce to servers that the node provides a key. Return the number of servers to which this was sent.

        Servers do not answer, so it is unknown how many have stored the record.
        """
        rest = list(servers)
        count = 0

        async def worker() -> None:
            nonlocal count
            while rest:
                peer = rest.pop(0).peer
                with suppress(*BROKEN), self._mark_used(peer), trio.fail_after(self._options.query_timeout):
                    addresses = shareable_addresses(self._own_addresses(peer), self._remote_scope(peer))
                    if not addresses:
                        self._counters["discovery_unreachable"] += 1  # the server can reach no address of the node
                        continue
                    async with self._stream(peer) as stream:
                        message = build_announcement(key, self._node.peer, addresses)
                        await stream.write(encode(message.SerializeToString()))
                        count += 1

        async with trio.open_nursery() as nursery:
            for _ in range(self._options.parallel_queries):
                nursery.start_soon(worker)
        return count

    def _own_addresses(self, peer: bytes) -> list[TcpAddress]:
        """Return the addresses at which a connected peer can reach the node."""
        if self._announced_addresses:
            return self._announced_addresses
        addresses: list[TcpAddress] = []
        for text in self._node.addresses:
            address = read_address(Multiaddr(text).to_bytes(), self._node.peer)
            if address is None:
                continue
            if address.host in ("0.0.0.0", "::"):
                # the node listens on every address: use the one by which this peer is reached
                host = _local_address(self._node.remote_address(peer))
                if host is None or (":" in host) != (":" in address.host):
                    continue
                address = TcpAddress(host, address.port)
            addresses.append(address)
        return addresses

    def _remote_scope(self, peer: bytes) -> AddressScope:
        remote = self._node.remote_address(peer)
        if remote is None:
            raise trio.ClosedResourceError("no connection with the peer")
        scope = address_scope(remote[0])
        return AddressScope.WORLD if scope is None else scope

    @contextmanager
    def _mark_used(self, peer: bytes) -> Iterator[None]:
        self._used[peer] = trio.current_time()
        try:
            yield
        finally:
            self._used[peer] = trio.current_time()

    def _stream(self, peer: bytes) -> _Stream:
        return _Stream(self._node, peer, self._options.protocol)

    # ------------------------------------------------------------------ dialling

    async def _dial(self, contact: DhtContact) -> bool:
        """Connect to a peer at one of its addresses, except those in back-off. Return true if the peer is connected."""
        peer = contact.peer
        while (call := self._ongoing_dials.get(peer)) is not None:
            await call.wait()
        if self._node.is_connected(peer):
            return True
        call = self._ongoing_dials[peer] = trio.Event()
        try:
            own = self._own_addresses(peer)
            for address in contact.addresses:
                async with self._dials:
                    now = trio.current_time()
                    if address in own or self._failures.in_backoff(peer, address, now):
                        self._counters["discovery_refused"] += 1
                        continue
                    self._failures.record_dial(address, now)
                    self._counters["discovery_dialled"] += 1
                    error = await self._node.dial_discovered(peer, address.text, self._options.dial_timeout)
                if not error:
                    self._failures.record_success(peer, address)
                    return True
                self._counters["discovery_dial_failed"] += 1
                self._failures.record_failure(peer, address, trio.current_time())
            return False
        finally:
            del self._ongoing_dials[peer]
            call.set()

    async def _dial_providers(self, topic: str, providers: list[DhtContact]) -> None:
        """Dial random providers of a topic until the topic has enough peers."""
        self._counters["discovery_providers"] += len(providers)
        self._rng.shuffle(providers)
        tries = self._options.max_providers
        trying = 0

        def next_peer() -> DhtContact | None:
            nonlocal tries
            now = trio.current_time()
            while providers and tries and self._missing_peers(topic) > trying:
                contact = providers.pop()
                peer = contact.peer
                if peer in self._candidates or self._failures.in_backoff(peer, None, now):
                    continue
                if self._node.is_connected(peer):
                    # a peer that discovery has not dialled stays connected, on the topic or not
                    if peer in self._node.router.subscribers(topic) or peer not in self._node.discovered:
                        continue
                elif all(self._failures.in_backoff(peer, address, now) for address in contact.addresses):
                    self._counters["discovery_refused"] += 1  # every address is in back-off, or there is none
                    continue
                tries -= 1
                return contact
            return None

        async def worker() -> None:
            nonlocal trying
            while contact := next_peer():
                trying += 1
                self._candidates.add(contact.peer)
                try:
                    if await self._dial(contact) and not await self._wait_for_topic(contact.peer, topic):
                        self._failures.record_failure(contact.peer, None, trio.current_time())
                        await self._node.disconnect_discovered(contact.peer)
                finally:
                    trying -= 1
                    self._candidates.discard(contact.peer)

        async with trio.open_nursery() as nursery:
            for _ in range(self._missing_peers(topic)):
                nursery.start_soon(worker)

    async def _wait_for_topic(self, peer: bytes, topic: str) -> bool:
        """Wait until a peer subscribes to a topic. Return false if it has not done so in time."""
        with trio.move_on_after(self._options.subscribe_timeout):
            while self._node.is_connected(peer):
                if peer in self._node.router.subscribers(topic):
                    self._failures.record_success(peer, None)
                    return True
                await trio.sleep(0.05)
        self._counters["discovery_not_on_topic"] += 1
        return False

    # ------------------------------------------------------------------ serving

    async def _serve(self, stream: INetStream) -> None:
        """Answer the queries on a stream that a peer has opened. libp2p ends the stream when this returns."""
        assert isinstance(stream, NetStream)
        peer = stream.muxed_conn.peer_id.to_bytes()
        stream_count, limit = self._streams.get(peer, 0), self._options.max_streams
        if sum(self._streams.values()) >= limit or stream_count >= max(1, limit // 4):
            self._counters["discovery_streams_refused"] += 1
            await stream.reset()
            return
        self._streams[peer] = stream_count + 1
        try:
            messages = _Messages(stream)
            while True:
                with trio.fail_after(self._options.stream_timeout):
                    query = await messages.next()
                if query is None:
                    break
                await self._wait_for_rate()
                answer = self._answer(peer, query)
                if answer is None:
                    raise WireError("the peer sent an invalid query")
                if answer:
                    with trio.fail_after(self._options.query_timeout):
                        await stream.write(encode(answer))
            await stream.close()
        except (*BROKEN, WireError, DecodeError) as failure:
            self._counters["discovery_streams_broken"] += not isinstance(failure, trio.TooSlowError)
            with suppress(*BROKEN):
                await stream.reset()
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    async def _wait_for_rate(self) -> None:
        """Wait if the node answers too often, so that queries cannot take too much of its time."""
        now = trio.current_time()
        self._next_answer_at = max(self._next_answer_at + 1 / self._options.max_answers_per_second, now)
        await trio.sleep(self._next_answer_at - now)

    def _answer(self, peer: bytes, query: Message) -> bytes | None:
        scope = self._remote_scope(peer)
        own_contact = DhtContact(self._node.peer, tuple(self._own_addresses(peer)))
        answer = self._server.answer(
            query, DhtContact(peer, ()), scope, self._list_known_servers(), own_contact, trio.current_time()
        )
        if answer is None:
            return None
        self._counters["discovery_queries_answered"] += 1
        return answer.SerializeToString()

    def _list_known_servers(self) -> list[DhtContact]:
        """Return the servers to name in answers: connected ones, and those that answered lookups. Cached for 1 s."""
        now = trio.current_time()
        if now >= self._known_servers_at + _KNOWN_SERVERS_AGE:
            known = {contact.peer: contact for contact in self._table.contacts()}
            for peer, addresses in self._node.peers_speaking(self._options.protocol):
                if peer not in known:
                    with suppress(trio.ClosedResourceError):
                        known[peer] = trusted_contact(peer, addresses, self._remote_scope(peer))
            self._known_servers_at, self._known_servers_cache = now, list(known.values())
        return self._known_servers_cache


class _Stream:
    """Context manager of a stream to a peer. The stream is closed at the end, or reset after an exception."""

    def __init__(self, node: Node, peer: bytes, protocol: str) -> None:
        self._node, self._peer, self._protocol = node, peer, protocol

    async def __aenter__(self) -> NetStream:
        self._stream = await self._node.stream_to(self._peer, self._protocol)
        return self._stream

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with shielded(1), suppress(*BROKEN):
            await (self._stream.close() if kind is None else self._stream.reset())


class _Messages:
    """Reader of the DHT messages on a stream."""

    def __init__(self, stream: NetStream) -> None:
        self._stream = stream
        self._splitter = RpcSplitter(MAX_MESSAGE, 1)
        self._waiting: deque[bytes | OversizedRpc] = deque()

    async def next(self) -> Message | None:
        """Return the next message, or `None` at the end.

        Raises:
            WireError, DecodeError: The message is malformed. A broken stream raises one of `BROKEN`.
        """
        while not self._waiting:
            try:
                data = await self._stream.muxed_stream.read(_READ_BYTES)
            except EOFError:
                return None
            self._waiting.extend(self._splitter.feed(data))
        payload = self._waiting.popleft()
        if isinstance(payload, OversizedRpc):
            raise WireError(f"a DHT message is longer than {MAX_MESSAGE} bytes")
        return Message.FromString(payload)


def _parse_announced(text: str, own: bytes) -> TcpAddress:
    hint = "Give an address such as /ip4/192.0.2.1/tcp/4811."
    try:
        address = read_address(Multiaddr(text).to_bytes(), own)
    except ADDRESS_ERRORS as error:
        raise NodeError(f"cannot use discovery.announce address {text!r} ({error}). {hint}") from error
    if address is None:
        raise NodeError(f"cannot use discovery.announce address {text!r}: it is not TCP at an IP address. {hint}")
    return address


def _local_address(remote: tuple[str, int] | None) -> str | None:
    """Return the local address that the routing table selects for packets to `remote`. Nothing is sent."""
    if remote is None:
        return None
    family = socket.AF_INET6 if ":" in remote[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(remote)
            return str(probe.getsockname()[0])
        except OSError:
            return None
