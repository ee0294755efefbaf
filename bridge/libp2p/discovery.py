"""Find peers for the node's topics through the libp2p DHT (CIP-120, Peer discovery), and serve the DHT to others.

For each topic the node announces itself at the servers nearest to the topic's key, looks up which peers did the same,
and dials some of them. It does the same for blocks: it announces those that it serves, and connects to providers of
those that it fetches. It starts from the bootstrap peers; without bootstrap peers it sends no queries and only answers
others.

Discovered peers deserve little trust. The node dials a few of them at a time, with a growing back-off after failures.
It refuses addresses that cannot be meant for it, and disconnects a peer that is not on the topic. Discovered peers are
at most half of a mesh, and half of the peers that a topic needs.
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
    build_query,
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
_SELF_LOOK_UP_EVERY: Final = 3600.0  # s; a look-up of our own id makes us known to the servers near us
_READ_BYTES: Final = 64 * 1024
_KNOWN_SERVERS_AGE: Final = 1.0  # s that the list of known servers stays valid


@dataclass(frozen=True)
class DiscoveryOptions:
    """Options of discovery. Times in seconds."""

    prefix: str = PREFIX  # of the protocol, <prefix>/kad/1.0.0
    serve: bool = True  # serve the DHT if the node listens
    announce: Sequence[str] = ()  # multiaddrs to announce; by default the listen addresses
    reprovide_interval: float = 12 * 3600.0
    lookup_interval: float = 300.0  # of a topic that lacks peers; shorter at first
    first_lookup_interval: float = 5.0
    max_dials: int = 8  # at a time
    max_topic_lookups: int = 4  # at a time
    parallel_queries: int = 3  # of one lookup
    max_queries: int = 60  # of one lookup
    lookup_timeout: float = 60.0
    dial_timeout: float = 5.0
    query_timeout: float = 10.0
    max_providers: int = 16  # providers of a topic dialled after one lookup
    max_blocks: int = 10_000  # blocks that are announced, the newest ones
    max_block_walks: int = 2  # at a time, to announce blocks
    max_block_providers: int = 4  # providers of a block dialled during one lookup
    subscribe_timeout: float = 10.0  # a peer dialled for a topic that does not subscribe by then is disconnected
    max_discovered: int = 100  # discovered peers connected, for all topics together
    max_idle_connections: int = 32  # connections that no topic needs, retained for further queries
    idle_connection_timeout: float = 30.0  # since the last query
    first_backoff: float = 60.0  # after the first failure; doubles with each
    max_backoff: float = 3600.0
    max_backoff_entries: int = 4096  # of failures, and of dialled addresses
    max_dials_per_address: int = 4  # in `first_backoff`, for any peer
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


@dataclass
class _LookupResult:
    """Result of a lookup: the servers that answered, and the providers they named."""

    servers: list[DhtContact]
    providers: dict[bytes, DhtContact]


class DialBackoff:
    """Back-off of peers and addresses. Bounded: the oldest entries are dropped."""

    def __init__(self, first: float, longest: float, max_entries: int, per_address: int) -> None:
        self._first, self._longest, self._per_address = first, longest, per_address
        self._failed = BoundedDict[tuple[bytes, TcpAddress | None], tuple[int, float]](max_entries)  # (count, until)
        self._dialled = BoundedDict[TcpAddress, tuple[int, float]](max_entries)  # (count, since)

    def __len__(self) -> int:
        return len(self._failed) + len(self._dialled)

    def in_backoff(self, peer: bytes, address: TcpAddress | None, now: float) -> bool:
        """Return whether a peer is in back-off at this address, or at all if `address` is `None`."""
        if now < self._failed.get((peer, address), (0, 0.0))[1]:
            return True
        if address is None:
            return False
        count, since = self._dialled.get(address, (0, 0.0))
        # many ids at an address are one machine, perhaps a victim; no failure is recorded, as it may be honest
        return count >= self._per_address and now < since + self._first

    def record_dial(self, address: TcpAddress, now: float) -> None:
        """Record a dial of an address, for any peer."""
        count, since = self._dialled.get(address, (0, now))
        if now >= since + self._first:
            count, since = 0, now
        self._dialled[address] = (count + 1, since)

    def record_failure(self, peer: bytes, address: TcpAddress | None, now: float) -> None:
        """Record that the peer was not at the address or, if `address` is `None`, that it was useless."""
        count = self._failed.get((peer, address), (0, 0.0))[0]
        self._failed[peer, address] = (count + 1, now + pause_after(count + 1, self._first, self._longest))

    def record_success(self, peer: bytes, address: TcpAddress | None) -> None:
        """Record a success, which ends the back-off."""
        self._failed.pop((peer, address), None)


class Discovery:
    """Peer discovery of a node. Create it before the node runs, and `run` it once the node listens.

    Events are counted in the node's counters, as discovery_….
    """

    def __init__(self, node: Node, options: DiscoveryOptions, rng: Random, mesh: int = 6) -> None:
        """Register the DHT server of the node.

        Args:
            mesh: number of peers that a topic needs, gossipsub's D.

        Raises:
            NodeError: an address to announce is malformed.
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
        self._connected_bootstrap: dict[bytes, int] = {}  # bootstrap peers that are connected
        self._self_at = 0.0
        self._used: dict[bytes, float] = {}  # time of the last query to a peer that we dialled
        self._candidates: set[bytes] = set()  # peers being tried for a topic
        self._on_topic: set[bytes] = set()  # peers that we dialled, and are on a topic of ours
        self._ongoing_dials: dict[bytes, trio.Event] = {}  # being dialled
        self._streams: dict[bytes, int] = {}  # served, by peer
        self._blocks: dict[bytes, _ProvidedBlock] = {}  # by multihash, the newest last
        self._server.blocks = self._blocks
        self._block_walks = 0
        self._next_answer_at = 0.0
        self._known_servers_at, self._known_servers_cache = -_KNOWN_SERVERS_AGE, list[DhtContact]()
        self._serves = options.serve and node.is_listening
        if self._serves:
            node.serve(options.protocol, self._serve)

    @property
    def servers(self) -> int:
        """Servers that have answered us."""
        return len(self._table)

    @property
    def sizes(self) -> dict[str, int]:
        """Number of entries of each store; all are bounded."""
        return {
            "servers": len(self._table),
            "records": len(self._server.providers),
            "failures": len(self._failures),
            "connections": len(self._node.discovered),
            "blocks": len(self._blocks),
        }

    async def run(self) -> None:
        """Announce, look up, dial and answer until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                self._tick(nursery, trio.current_time())
                await trio.sleep(_TICK)

    # ------------------------------------------------------------------ blocks

    def provide_block(self, key: bytes) -> None:
        """Announce a block now and at each `reprovide_interval`, until it is withdrawn or displaced by newer blocks.

        Args:
            key: multihash of the block.
        """
        if key in self._blocks:
            return
        self._blocks[key] = _ProvidedBlock(trio.current_time())
        if len(self._blocks) > self._options.max_blocks:
            self.withdraw_block(next(iter(self._blocks)))

    def withdraw_block(self, key: bytes) -> None:
        """Stop announcing a block. Its records at servers expire by themselves."""
        block = self._blocks.pop(key, None)
        if block is not None and not block.is_announced:
            self._counters["discovery_blocks_unprovided"] += 1

    async def connect_providers(self, key: bytes, report: Callable[[bytes], None]) -> bool:
        """Look up the providers of a block, connect to some of them, and return whether a server answered.

        Args:
            key: multihash of the block.
            report: called with each provider once it is connected.
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
            result = await self._look_up(key, Message.GET_PROVIDERS, add_provider)
        return bool(result.servers)

    def _announce_blocks(self, nursery: trio.Nursery, now: float) -> None:
        """Start announcing the blocks that are due, the newest first."""
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
            result = await self._look_up(key, Message.GET_PROVIDERS)
            count = await self._announce(key, nearest_contacts(result.servers, key))
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
            # a new peer, or one that reconnected and may have forgotten us
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
        """Return whether there is an address to announce."""
        return bool(self._announced_addresses or self._node.addresses)

    def _needs_announce(self, state: _Topic, now: float) -> bool:
        return state.announce_at <= now and self._can_announce

    def _missing_peers(self, topic: str) -> int:
        """Return the number of peers still to find for a topic."""
        subscribers = self._node.router.subscribers(topic)
        return min(
            self._mesh // 2 - sum(peer in subscribers for peer in self._node.discovered),
            self._mesh - len(subscribers),
            self._options.max_discovered - len(self._node.discovered),
        )

    def _disconnect_spare(self, nursery: trio.Nursery, now: float) -> None:
        """Disconnect dialled peers that no topic needs and that have not been queried for a while."""
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
                result = await self._look_up(state.key, Message.GET_PROVIDERS)
                if self._needs_announce(state, trio.current_time()):
                    count = await self._announce(state.key, nearest_contacts(result.servers, state.key))
                    self._counters["discovery_provided"] += count
                    # jitter, so that topics joined together are not renewed together
                    wait = self._options.lookup_interval
                    if count:
                        wait = self._options.reprovide_interval * self._rng.uniform(0.8, 1)
                    state.announce_at = trio.current_time() + wait
                if self._missing_peers(topic) > 0:
                    await self._dial_providers(topic, list(result.providers.values()))
        finally:
            if self._missing_peers(topic) <= 0:
                state.delay = self._options.first_lookup_interval
            state.look_up_at = trio.current_time() + state.delay
            state.delay = min(state.delay * 2, self._options.lookup_interval)
            state.is_busy = False

    # ------------------------------------------------------------------ queries

    async def _look_up(
        self, key: bytes, kind: Message.MessageType, report: Callable[[DhtContact], None] = lambda contact: None
    ) -> _LookupResult:
        """Query ever nearer servers until the K nearest have answered.

        Args:
            report: called with the providers while the lookup goes on.
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
                    reply = await self._query(contacts[peer], build_query(kind, key))
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
        return _LookupResult(servers, providers)

    def _initial_servers(self) -> Iterator[DhtContact]:
        """Return the servers that have answered, and the connected ones, which need no address."""
        known = {contact.peer: contact for contact in self._table.contacts()}
        for peer in (
            *self._connected_bootstrap,
            *(peer for peer, _ in self._node.peers_speaking(self._options.protocol)),
        ):
            known.setdefault(peer, DhtContact(peer, ()))
        now = trio.current_time()
        return (contact for contact in known.values() if not self._failures.in_backoff(contact.peer, None, now))

    async def _query(self, contact: DhtContact, message: Message) -> tuple[Message, AddressScope] | None:
        """Query a server.

        Returns:
            The answer and the scope of the server's address, or `None` without an answer; the server is then dropped.
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
        """Announce to servers that we provide a key, and return the number of servers that it was sent to. Servers do
        not answer."""
        rest = list(servers)
        count = 0

        async def worker() -> None:
            nonlocal count
            while rest:
                peer = rest.pop(0).peer
                with suppress(*BROKEN), self._mark_used(peer), trio.fail_after(self._options.query_timeout):
                    addresses = shareable_addresses(self._own_addresses(peer), self._remote_scope(peer))
                    if not addresses:
                        self._counters["discovery_unreachable"] += 1  # the server could reach none of our addresses
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
        """Return the addresses at which a connected peer reaches us."""
        if self._announced_addresses:
            return self._announced_addresses
        addresses: list[TcpAddress] = []
        for text in self._node.addresses:
            address = read_address(Multiaddr(text).to_bytes(), self._node.peer)
            if address is None:
                continue
            if address.host in ("0.0.0.0", "::"):
                # any address of this machine: take the one of this peer's connection
                host = _local_address(self._node.remote_address(peer))
                if host is None or (":" in host) != (":" in address.host):
                    continue
                address = TcpAddress(host, address.port)
            addresses.append(address)
        return addresses

    def _remote_scope(self, peer: bytes) -> AddressScope:
        remote = self._node.remote_address(peer)
        if remote is None:
            raise trio.ClosedResourceError("no connection")
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
        """Connect to a peer at one of its addresses that are not in back-off, and return whether it is connected."""
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
        """Dial random providers of a topic until it has the peers it needs."""
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
                    # a peer that discovery did not connect stays, on the topic or not
                    if peer in self._node.router.subscribers(topic) or peer not in self._node.discovered:
                        continue
                elif all(self._failures.in_backoff(peer, address, now) for address in contact.addresses):
                    self._counters["discovery_refused"] += 1  # or there is no trusted one
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
        """Wait until a peer dialled for a topic subscribes to it, and return whether it does."""
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
        """Handle a stream of queries for libp2p."""
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
                    raise WireError("not a query")
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
        """Limit the rate of answers, so that queries cannot take the node's time."""
        now = trio.current_time()
        self._next_answer_at = max(self._next_answer_at + 1 / self._options.max_answers_per_second, now)
        await trio.sleep(self._next_answer_at - now)

    def _answer(self, peer: bytes, query: Message) -> bytes | None:
        scope = self._remote_scope(peer)
        answer = self._server.answer(
            query, DhtContact(peer, ()), scope, self._list_known_servers(), self._own_contact(peer), trio.current_time()
        )
        if answer is None:
            return None
        self._counters["discovery_queries_answered"] += 1
        return answer.SerializeToString()

    def _own_contact(self, peer: bytes) -> DhtContact:
        return DhtContact(self._node.peer, tuple(self._own_addresses(peer)))

    def _list_known_servers(self) -> list[DhtContact]:
        """Return the servers to name to others: servers that have answered us, and connected servers."""
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
    """A stream to a peer that is closed after use, or reset after an error."""

    def __init__(self, node: Node, peer: bytes, protocol: str) -> None:
        self._node, self._peer, self._protocol = node, peer, protocol

    async def __aenter__(self) -> NetStream:
        self._stream = await self._node.stream_to(self._peer, self._protocol)
        return self._stream

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with shielded(1), suppress(*BROKEN):
            await (self._stream.close() if kind is None else self._stream.reset())


class _Messages:
    """Reader of the messages on a stream."""

    def __init__(self, stream: NetStream) -> None:
        self._stream = stream
        self._splitter = RpcSplitter(MAX_MESSAGE, 1)
        self._waiting: deque[bytes | OversizedRpc] = deque()

    async def next(self) -> Message | None:
        """Return the next message, or `None` at the end.

        Raises:
            WireError, DecodeError: the message is malformed. A broken stream raises one of `BROKEN`.
        """
        while not self._waiting:
            try:
                data = await self._stream.muxed_stream.read(_READ_BYTES)
            except EOFError:
                return None
            self._waiting.extend(self._splitter.feed(data))
        payload = self._waiting.popleft()
        if isinstance(payload, OversizedRpc):
            raise WireError("the message is too long")
        return Message.FromString(payload)


def _parse_announced(text: str, own: bytes) -> TcpAddress:
    hint = "expected TCP at an IP address, such as /ip4/192.0.2.1/tcp/4811"
    try:
        address = read_address(Multiaddr(text).to_bytes(), own)
    except ADDRESS_ERRORS as error:
        raise NodeError(f"discovery.announce {text!r}: not a multiaddr; {hint}: {error}") from error
    if address is None:
        raise NodeError(f"discovery.announce {text!r}: {hint}")
    return address


def _local_address(remote: tuple[str, int] | None) -> str | None:
    """Return the local address from which another address is reached, by the routing table. Nothing is sent."""
    if remote is None:
        return None
    family = socket.AF_INET6 if ":" in remote[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(remote)
            return str(probe.getsockname()[0])
        except OSError:
            return None
