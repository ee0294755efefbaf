"""The gossipsub node: it keeps connections with peers, and a pubsub session with each.

The router decides what to send, and the node does the I/O. `traffic.py` moves RPCs between streams and router.
Everything runs in one trio thread; only the sink has other threads.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.abc import INetConn, INetStream
from libp2p.custom_types import TProtocol
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from libp2p.stream_muxer.yamux.yamux import Yamux
from multiaddr import Multiaddr
from trio_typing import TaskStatus

from kiln.bridge.capture.tap import Sink
from kiln.bridge.gossipsub.effects import Deliver, PeerID
from kiln.bridge.gossipsub.router import Router
from kiln.bridge.gossipsub.table_agreements import TableAgreements
from kiln.bridge.libp2p.addresses import (
    BootstrapPeer,
    NodeError,
    check_listen_address,
    parse_bootstrap_peers,
    parse_tcp_address,
)
from kiln.bridge.libp2p.budget import BanList
from kiln.bridge.libp2p.closing import BROKEN, close_connection, reset_stream, shielded
from kiln.bridge.libp2p.dialling import describe_missing_pubsub, dial, negotiate
from kiln.bridge.libp2p.inflow import READ_BYTES
from kiln.bridge.libp2p.keys import derive_author_keys
from kiln.bridge.libp2p.links import InboundStream, PeerLink, PubsubSession, open_session
from kiln.bridge.libp2p.options import NodeOptions
from kiln.bridge.libp2p.patches import AGENT_KEY
from kiln.bridge.libp2p.seqno import Seqno
from kiln.bridge.libp2p.slots import InboundSlots, PeerValue
from kiln.bridge.libp2p.streams import ConnectionEvents, get_swarm, make_host
from kiln.bridge.libp2p.traffic import Traffic
from kiln.bridge.libp2p.view import NodeView, describe_bootstrap, describe_peers
from kiln.conf.process.backoff import pause_after
from kiln.conf.process.logs import log_event
from kiln.schemas.proto.gossipsub.rpc_pb2 import Message
from kiln.schemas.wire.identity import check, compute_peer_id, peer_text, sign

_LOG: Final = logging.getLogger("kiln.bridge.libp2p")
_STOPPING: Final = "the bridge is stopping"
_CACHED_POLICIES: Final = 4096  # topics
_MAX_CONNECTIONS_READ: Final = 2  # of a peer: both sides may dial at the same time
_PING: Final = "/ipfs/ping/1.0.0"
_MAX_DOUBLINGS: Final = 7  # of `NodeOptions.inbound_timeout`
_OPEN_ATTEMPTS: Final = 4  # failed outbound streams, after which the node waits until the peer opens one


class Node:
    """A gossipsub peer. Start it by `await nursery.start(node.run)`, and end it by `close`.

    Call all methods in the trio thread. From another thread, use `trio.from_thread.run_sync`.
    """

    def __init__(
        self,
        options: NodeOptions,
        key: Ed25519PrivateKey,
        seqno: Seqno,
        sink: Sink,
        on_message: Callable[[Deliver], None] | None = None,
        router: Router | None = None,
        authors: int = 1,
    ) -> None:
        """Create a node without connecting it.

        Args:
            on_message: Called for the first valid copy of each message on a joined topic.
            router: Replaces the router that the options describe.
            authors: Number of keys that sign the node's own messages. The caller of `publish` selects one.

        Raises:
            NodeError: An address in the options is invalid.
            BundleError: The options have more bundles than a hello may name.
        """
        self.peer: PeerID = compute_peer_id(key)
        self.counters: Counter[str] = Counter()
        self._options = options
        self._key = key
        self._author_keys = derive_author_keys(key, authors)
        self._seqno = seqno
        self._sink = sink
        self._listen = [parse_tcp_address(text, "listen") for text in options.listen]
        self.bootstrap_peers = parse_bootstrap_peers(options.bootstrap, self.peer)
        table = TableAgreements(options.bundles, options.send_indices)
        gossip = replace(options.gossip, authors=frozenset(map(compute_peer_id, self._author_keys)))
        policy_of = lru_cache(_CACHED_POLICIES)(gossip.policy_of)
        self.router = router or Router(
            self.peer, gossip, random.Random(), lambda message: check(message, policy_of(message.topic)), table
        )
        self._links: dict[bytes, PeerLink] = {}
        self._scope = trio.CancelScope()
        self._closing = False
        self._handlers: dict[str, Callable[[INetStream], Awaitable[None]]] = dict.fromkeys(
            options.gossip.protocols, self._accept
        )
        self.addresses: tuple[str, ...] = ()
        """Multiaddrs that the node listens on. They end in /p2p/<peer id>, so other nodes can use them as bootstrap."""
        self._discovered: dict[bytes, None] = {}  # peers found by discovery that are connected or being dialled
        self._dialling: set[bytes] = set()  # the discovered peers that are being dialled
        self._banned = BanList(options.ban)
        self._slots = InboundSlots(options.max_connections, self._value_of)
        self._reserved = frozenset(self.bootstrap)
        self._traffic = Traffic(
            options,
            self.router,
            sink,
            self._links,
            self.counters,
            on_message,
            self._ban,
            self._begin_disconnect,
        )

    # ------------------------------------------------------------------ life cycle

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen, dial and gossip until `close` is called. `task_status.started()` is called once the node listens.

        Raises:
            NodeError: The node cannot listen on an address.
        """
        for address in self._listen:
            check_listen_address(address)
        self._host = host = make_host(self._key, self._options.agent, self._slots)
        self._swarm = get_swarm(host)
        self._swarm.register_notifee(ConnectionEvents(self._on_connected, self._remove_link))
        for protocol, handler in self._handlers.items():
            host.set_stream_handler(TProtocol(protocol), handler)
        self._traffic.start()
        missing: list[str] = []
        with self._scope:
            async with trio.open_nursery() as self._nursery, host.run(self._listen):
                missing = [str(a) for a in self._listen if str(a) not in self._swarm.listeners]
                try:
                    if not missing:
                        own, listeners = f"/p2p/{peer_text(self.peer)}", self._swarm.listeners.values()
                        self.addresses = tuple(f"{a}{own}" for listener in listeners for a in listener.get_addrs())
                        self._nursery.start_soon(self._heartbeat)
                        for target in self.bootstrap_peers:
                            self._nursery.start_soon(self._redial, target)
                        task_status.started()
                        await trio.sleep_forever()
                finally:
                    await self._shut_down()
        if missing:
            raise NodeError(f"cannot listen on {', '.join(missing)}. Set bridge.listen to a free port of this machine.")

    async def _shut_down(self) -> None:
        """Disconnect all peers, and close the listeners, which stay open when py-libp2p's services end."""
        self._closing = True
        with shielded(2):
            async with trio.open_nursery() as nursery:
                for listener in self._swarm.listeners.values():
                    nursery.start_soon(listener.close)
                for conn in self._swarm.get_connections():
                    nursery.start_soon(close_connection, conn)

    def close(self) -> None:
        """End `run`: it puts the closing frames of all sessions into the sink, and returns within about 2 s."""
        self._scope.cancel()

    # ------------------------------------------------------------------ topics and messages

    def publish(self, topic: str, data: bytes, author: int = 0) -> int:
        """Publish a message, which is signed unless the topic's policy is `none`.

        Args:
            author: Position in `authors` of the peer id that signs.

        Returns:
            The number of peers for which the message was queued.

        Raises:
            MessageTooLargeError: The message does not fit in an RPC.
            SeqnoError: The file of the sequence numbers cannot be written.
        """
        message = Message(topic=topic, data=data)
        if self._options.gossip.policy_of(topic) != "none":
            message.seqno = self._seqno.next_bytes()
            sign(message, self._author_keys[author])
        return self._traffic.dispatch(self.router.publish(message, trio.current_time()))

    def join(self, topic: str) -> None:
        """Subscribe to a topic and join its mesh."""
        self._traffic.dispatch(self.router.join(topic))

    def leave(self, topic: str) -> None:
        """Unsubscribe from a topic and leave its mesh."""
        self._traffic.dispatch(self.router.leave(topic, trio.current_time()))

    @property
    def authors(self) -> tuple[str, ...]:
        """The peer ids that sign the node's own messages. The first is the node's peer id."""
        return tuple(peer_text(compute_peer_id(key)) for key in self._author_keys)

    # ------------------------------------------------------------------ interface for discovery

    @property
    def topics(self) -> tuple[str, ...]:
        """The joined topics."""
        return tuple(self.router.topics)

    @property
    def discovered(self) -> Collection[bytes]:
        """A live view of the peers that `dial_discovered` has connected to or is dialling, oldest first."""
        return self._discovered.keys()

    @property
    def bootstrap(self) -> dict[bytes, int]:
        """The bootstrap peers, connected or not, and how often the node has tried to dial each."""
        return {target.id.to_bytes(): target.attempts for target in self.bootstrap_peers}

    def serve(self, protocol: str, handler: Callable[[INetStream], Awaitable[None]]) -> None:
        """Register a handler for streams of another protocol, before `run`. A stream ends when its handler returns."""
        self._handlers[protocol] = handler

    @property
    def is_listening(self) -> bool:
        """True if the options have an address to listen on."""
        return bool(self._listen)

    def is_connected(self, peer: bytes) -> bool:
        return bool(self._open_connections(ID(peer)))

    def remote_address(self, peer: bytes) -> tuple[str, int] | None:
        """Return IP address and port of the peer's end of the newest connection with it, or `None` without one."""
        for conn in reversed(self._open_connections(ID(peer))):
            if isinstance(conn, SwarmConn) and isinstance(conn.muxed_conn, Yamux):
                return conn.muxed_conn.secured_conn.get_remote_address()
        return None

    def peers_speaking(self, *protocols: str) -> list[tuple[bytes, list[bytes]]]:
        """Return each connected peer that supports one of these protocols, with the multiaddrs that it announces."""
        store = self._host.get_peerstore()
        peers = []
        for peer in {conn.muxed_conn.peer_id for conn in self._swarm.get_connections()}:
            with suppress(PeerStoreError):
                if store.supports_protocols(peer, protocols):
                    peers.append((peer.to_bytes(), [address.to_bytes() for address in store.addrs(peer)]))
        return peers

    async def dial_discovered(self, peer: bytes, address: str, seconds: float) -> str:
        """Dial a peer that discovery has found. Only one call at a time may dial a peer.

        The peer then counts as discovered. Discovered peers are at most half of a mesh.

        Args:
            address: A multiaddr of the peer.
            seconds: Timeout.

        Returns:
            "" if the peer is connected, else the reason of the failure.
        """
        if peer in self.bootstrap:
            return "it is a bootstrap peer"
        if self._ban_left(peer):
            return "it is banned"
        if self.is_connected(peer):
            return ""
        self._discovered[peer] = None
        self._dialling.add(peer)
        try:
            return await dial(self._swarm, Multiaddr(address), ID(peer), seconds)
        finally:
            self._dialling.discard(peer)
            self._remove_link(peer)

    async def stream_to(self, peer: bytes, *protocols: str) -> NetStream:
        """Open a stream to a connected peer, with the first protocol that it supports. Errors are those of `BROKEN`."""
        connections = self._open_connections(ID(peer))
        if not connections:
            raise trio.ClosedResourceError("no connection with the peer")
        return await self._negotiate(connections[-1], protocols)

    async def disconnect(self, peer: bytes) -> None:
        """Close all connections with a peer."""
        for conn in self._swarm.get_connections(ID(peer)):
            await close_connection(conn)

    def _begin_disconnect(self, peer: bytes) -> None:
        self._nursery.start_soon(self.disconnect, peer)

    async def disconnect_discovered(self, peer: bytes) -> None:
        """Disconnect a peer, but only if `dial_discovered` has dialled it."""
        if peer in self._discovered:
            await self.disconnect(peer)

    # ------------------------------------------------------------------ views

    def view(self) -> NodeView:
        """Return the current state of the node and its peers."""
        counters = Counter(self.router.counters)
        counters.update(self.counters)
        counters.update(self._slots.counters)
        return NodeView(
            peer=peer_text(self.peer),
            addresses=self.addresses,
            peers=tuple(describe_peers(self._links.values(), self.router)),
            bootstrap=tuple(describe_bootstrap(self.bootstrap_peers, self._links)),
            mesh={topic: tuple(map(peer_text, sorted(peers))) for topic, peers in self.router.mesh.items()},
            topics=self.topics,
            frames_in=self.counters["frames_in"],
            frames_out=self.counters["frames_out"],
            bytes_in=self.counters["bytes_in"],
            bytes_out=self.counters["bytes_out"],
            counters=dict(counters),
            kept_out=self._banned.count(trio.current_time()),
            policy_conflicts=tuple(self.router.policy_conflicts),
        )

    # ------------------------------------------------------------------ connections

    def _value_of(self, peer: bytes) -> PeerValue:
        if peer in self._reserved:
            return PeerValue.RESERVED
        return PeerValue.USEFUL if self.router.has_delivered(peer) else PeerValue.UNKNOWN

    def _add_link(self, peer: bytes) -> PeerLink:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = PeerLink(peer)
            self._nursery.start_soon(self._serve, link)
        return link

    def _remove_link(self, peer: bytes) -> None:
        link = self._links.get(peer)
        if peer in self._discovered and peer not in self._dialling and not self.is_connected(peer):
            del self._discovered[peer]
            with suppress(PeerStoreError):  # libp2p would remember every peer
                self._host.get_peerstore().clear_peerdata(ID(peer))
        if link is not None and not self._open_connections(link.id):
            del self._links[peer]  # at once, so that a peer that reconnects during cleanup gets a new link
            link.disconnected.set()
            if link.session is not None:
                link.session.end("connection closed")
            link.scope.cancel()

    def _open_connections(self, peer: ID) -> list[INetConn]:
        return [conn for conn in self._swarm.get_connections(peer) if not conn.is_closed]

    async def _redial(self, target: BootstrapPeer) -> None:
        failures = 0
        while True:
            started = trio.current_time()
            if not self._open_connections(target.id):
                target.attempts += 1
                before, target.error = target.error, await self._dial(target)
                if target.error and target.error != before:
                    log_event(_LOG, "bootstrap peer unreachable", logging.WARNING, reason=target.error)
            link = self._links.get(target.id.to_bytes())
            if link is not None:
                await link.disconnected.wait()
            if trio.current_time() - started > self._options.redial_most:
                failures = 0
            failures += 1
            pause = pause_after(failures, self._options.redial_first, self._options.redial_most)
            # jitter, because many nodes lose the same peer at the same moment
            await trio.sleep(pause * random.uniform(0.75, 1.25))

    async def _dial(self, target: BootstrapPeer) -> str:
        """Dial a bootstrap peer at one address after the other. Return "" if it is connected, else the last error."""
        if seconds := self._ban_left(target.id.to_bytes()):
            return (
                f"{target.addresses[0]}: the peer is banned for {seconds:.0f} s more, because its score was too low. "
                "A restart of the bridge ends the ban."
            )
        error = ""
        for address in target.addresses:
            error = await dial(self._swarm, address, target.id, self._options.dial_timeout)
            self.counters["dial_failed" if error else "dialled"] += 1
            if not error:
                break
        return error

    async def _accept(self, stream: INetStream) -> None:
        """Handle a pubsub stream that a peer has opened. libp2p ends the stream when this returns."""
        assert isinstance(stream, NetStream)
        if self._closing:
            return
        if self._ban_left(stream.muxed_conn.peer_id.to_bytes()):
            await reset_stream(stream)
            return
        link = self._add_link(stream.muxed_conn.peer_id.to_bytes())
        inbound, session = InboundStream(stream), link.session
        read = session.inbounds if session is not None else []
        replaced = [other for other in (*read, *link.unread_inbounds) if other.stream.swarm_conn is stream.swarm_conn]
        if session is not None and read and not replaced and len(read) < _MAX_CONNECTIONS_READ:
            # rust-libp2p sends on each of its connections, and repeats no subscription on a new stream
            self.counters["stream_added"] += 1
            session.inbounds.append(inbound)
            session.nursery.start_soon(self._read_stream, session, inbound)
            session.nursery.start_soon(self._check_connection, session)
        else:
            dropped = [unread for unread in link.unread_inbounds if unread in replaced]
            dropped += link.unread_inbounds[: max(0, len(link.unread_inbounds) + 1 - _MAX_CONNECTIONS_READ)]
            link.unread_inbounds = [*(unread for unread in link.unread_inbounds if unread not in dropped), inbound]
            link.inbound_opened.set()
            if session is not None and read:
                # only the newest stream of a connection is read, because the peer has given up the other
                self.counters["stream_replaced"] += 1
                session.end("the peer opened a new stream")
            for unread in dropped:
                await self._drop_inbound(unread)
        await inbound.done.wait()

    async def _drop_inbound(self, inbound: InboundStream) -> None:
        await reset_stream(inbound.stream)
        inbound.done.set()

    async def _check_connection(self, session: PubsubSession) -> None:
        """Close the connection of the node's stream if the peer does not answer on it, for example after a restart."""
        conn = session.outbound.swarm_conn
        assert isinstance(conn, SwarmConn)
        try:
            with trio.fail_after(self._options.negotiate_timeout / 2):  # less than multiselect itself waits
                await reset_stream(await self._negotiate(conn, (_PING,)))
        except trio.TooSlowError:
            session.end("the peer opened a new connection, and does not answer on the previous one")
            self._nursery.start_soon(close_connection, conn)
        except BROKEN:
            return  # the peer answers but has no ping, or the connection has ended

    # ------------------------------------------------------------------ one peer

    async def _serve(self, link: PeerLink) -> None:
        """Keep a pubsub session with a connected peer. If only the streams break, start a new session."""
        delay, failures = 0.05, 0
        try:
            with link.scope:
                while True:
                    started = trio.current_time()
                    error = await self._run_session(link)
                    failures = failures + 1 if error else 0
                    if failures >= _OPEN_ATTEMPTS:
                        link.error = describe_missing_pubsub(
                            self._host.get_peerstore(), link.id, self._options.gossip.protocols
                        )
                        await link.inbound_opened.wait()  # a peer that speaks pubsub will open a stream
                        failures, link.error = 0, ""
                    if trio.current_time() - started > 10:
                        delay = 0.05
                    await trio.sleep(delay)
                    delay = min(delay * 2, self._options.redial_most)
        finally:
            if self._links.get(link.peer) is link:
                del self._links[link.peer]
            link.disconnected.set()
            for inbound in link.unread_inbounds:
                await self._drop_inbound(inbound)

    async def _run_session(self, link: PeerLink) -> bool:
        """Exchange RPCs with a peer until the streams end. Return true if the node's stream could not be opened."""
        try:
            with trio.fail_after(self._options.negotiate_timeout):
                outbound, protocol = await self._open_stream(link)
        except BROKEN:
            self.counters["stream_not_opened"] += 1
            return True
        session = open_session(
            self._options.network, self.peer, link.peer, outbound, protocol, self._traffic.open_accounts(link.peer)
        )
        link.session = session
        try:
            self._traffic.dispatch(
                self.router.add_peer(
                    link.peer, protocol, session.dialled, trio.current_time(), link.peer in self._discovered
                )
            )
            self._count_colocated(session.ip)
            self._identify(link, session)
            log_event(
                _LOG,
                "peer connected",
                peer=peer_text(link.peer),
                address=session.address,
                protocol=session.protocol,
                dialled=session.dialled,
            )
            with session.scope:
                async with trio.open_nursery() as nursery:
                    session.nursery = nursery
                    nursery.start_soon(self._traffic.write, session)
                    nursery.start_soon(self._watch, session)
                    nursery.start_soon(self._read, link, session)
        finally:
            link.session = None
            self._identify(link, session)
            reason = session.end_reason or _STOPPING
            log_event(
                _LOG,
                "peer disconnected",
                peer=peer_text(link.peer),
                reason=reason,
                agent=session.agent,
                frames_in=session.frames_in,
                frames_out=session.frames_out,
            )
            for frame in session.connection.close(time.time_ns(), session.agent, reason, session.dialled):
                self._sink.put(session.id, frame)
            self.router.remove_peer(link.peer, trio.current_time())
            self._count_colocated(session.ip)
            if not self._closing:
                await reset_stream(outbound)
            for inbound in session.inbounds:
                await self._drop_inbound(inbound)
        return False

    async def _open_stream(self, link: PeerLink) -> tuple[NetStream, str]:
        # not host.new_stream: it dials addresses from other peers when the peer is disconnected
        offered = link.unread_inbounds[-1].stream.swarm_conn if link.unread_inbounds else None
        connections = self._open_connections(link.id)
        conn = offered if offered in connections else connections[-1] if connections else None
        if not isinstance(conn, SwarmConn):
            raise trio.ClosedResourceError("no connection with the peer")
        stream = await self._negotiate(conn, self._options.gossip.protocols)
        return stream, str(stream.get_protocol())

    async def _negotiate(self, conn: INetConn, protocols: Iterable[str]) -> NetStream:
        return await negotiate(conn, self._host.multiselect_client, protocols, self._options.negotiate_timeout)

    def _count_colocated(self, ip: str) -> None:
        """Report to the router how many peers share a public IP address: many of them are often one attacker (P6)."""
        if not ip or not ipaddress.ip_address(ip).is_global:
            return
        colocated = [link.peer for link in self._links.values() if link.session is not None and link.session.ip == ip]
        for peer in colocated:
            self.router.set_colocated_peers(peer, len(colocated))

    async def _watch(self, session: PubsubSession) -> None:
        """End the session when the peer resets the stream that the node has opened. No RPCs arrive on this stream."""
        try:
            while True:
                await session.outbound.muxed_stream.read(READ_BYTES)
        except EOFError:
            return  # some peers close the unused direction
        except BROKEN:
            session.end("stream reset by the peer")

    async def _await_inbound(self, link: PeerLink, session: PubsubSession) -> None:
        """Wait until the peer opens a pubsub stream. A bootstrap peer that opens none is disconnected, then redialled.

        go-libp2p asks for the node's protocols only once per connection, and waits 5 s. If the node was too busy to
        answer, go-libp2p-pubsub opens no stream on this connection.
        """
        target = next((bootstrap for bootstrap in self.bootstrap_peers if bootstrap.id == link.id), None)
        with trio.move_on_after(math.inf if target is None else self._options.inbound_timeout * 2**target.streamless):
            while not link.unread_inbounds:
                link.inbound_opened = trio.Event()
                await link.inbound_opened.wait()
        session.inbounds, link.unread_inbounds = link.unread_inbounds, []
        if target is not None:
            target.streamless = 0 if session.inbounds else min(target.streamless + 1, _MAX_DOUBLINGS)
        if not session.inbounds:
            self.counters["stream_missing"] += 1
            session.end("the peer opened no pubsub stream")
            self._nursery.start_soon(self.disconnect, link.peer)
            await trio.sleep_forever()  # the session has ended

    async def _read(self, link: PeerLink, session: PubsubSession) -> None:
        await self._await_inbound(link, session)
        link.inbound_opened = trio.Event()
        for inbound in session.inbounds:
            session.nursery.start_soon(self._read_stream, session, inbound)

    async def _read_stream(self, session: PubsubSession, inbound: InboundStream) -> None:
        """Read one of the peer's streams to its end. The session ends with the last of the streams."""
        reason = await self._traffic.read(session, inbound)
        session.inbounds.remove(inbound)
        await self._drop_inbound(inbound)
        if not session.inbounds:
            session.end(reason)

    def _on_connected(self, conn: INetConn) -> None:
        peer = conn.muxed_conn.peer_id.to_bytes()
        if self._ban_left(peer) and not self._closing:
            self.counters["banned_refused"] += 1
            self._nursery.start_soon(close_connection, conn)
        elif not self._closing:
            self._add_link(peer)

    def _ban_left(self, peer: bytes) -> float:
        return self._banned.remaining(peer, trio.current_time())

    def _ban(self, session: PubsubSession) -> None:
        """Disconnect a graylisted peer, and refuse its connections for `NodeOptions.ban` seconds."""
        if not self._options.ban:
            return
        if not self._ban_left(session.peer):
            self.counters["peers_banned"] += 1
        self._banned.add(session.peer, trio.current_time())
        self._begin_disconnect(session.peer)
        session.end("the peer is banned: its score is below the graylist threshold")

    # ------------------------------------------------------------------ clocks and room

    async def _heartbeat(self) -> None:
        while True:
            await trio.sleep(self._options.gossip.heartbeat)
            for link in self._links.values():
                if link.session is not None:
                    self._identify(link, link.session)
            self._traffic.dispatch(self.router.heartbeat(trio.current_time()))
            for link in list(self._links.values()):
                if link.session is not None and self.router.is_graylisted(link.peer):
                    self._ban(link.session)

    def _identify(self, link: PeerLink, session: PubsubSession) -> None:
        """Pass the agent version of a peer to the router, once identify has reported it."""
        if not session.agent:
            with suppress(PeerStoreError):  # not yet
                session.agent = str(self._host.get_peerstore().get(link.id, AGENT_KEY))
                self.router.set_agent(link.peer, session.agent)
