"""The gossipsub router as a state machine: received RPCs and heartbeats go in, RPCs to send and messages come out.

Sources: libp2p specs, pubsub/gossipsub/gossipsub-v1.0.md to v1.3.md and pubsub/README.md. Where they leave a choice,
the router behaves like go-libp2p-pubsub, which most peers run, except for these points:

* It verifies a message before it stores or announces anything about it, even by IDONTWANT. Otherwise a forged copy
  could block the genuine one.
* It does no peer exchange: it neither sends peers in PRUNE nor uses received ones.
* If a peer subscribes to a topic whose mesh is too small, the router grafts it at once, not at the next heartbeat.
* It also understands message ids in the forms of js-libp2p (public key ‖ seqno) and rust-libp2p (author and seqno as
  text). It answers a peer in the form that the peer uses.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Final

from kiln.bridge.gossipsub.cache import MessageCache, SeenSet
from kiln.bridge.gossipsub.effects import Deliver, PeerID, PeerView, PolicyConflict, Send
from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.peers import Backoffs, PeerState, Promises, RetainedScores, select_mesh_peers
from kiln.bridge.gossipsub.protocols import BACKOFF_VERSION, EXTENSIONS_VERSION, IDONTWANT_VERSION
from kiln.bridge.gossipsub.rpc_parts import MessageTooLargeError, split
from kiln.bridge.gossipsub.score import Score
from kiln.bridge.gossipsub.signing import TopicSigning
from kiln.bridge.gossipsub.table_agreements import AGENT, TableAgreements
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, ControlMessage, Message
from kiln.schemas.wire.identity import MAX_RPC_COST, Judgement, Verdict, estimate_id_cost
from kiln.schemas.wire.message_id import canonical_id
from kiln.schemas.wire.public_key import KEY_ALGORITHM
from kiln.schemas.wire.topic_table import BundleSet

Verify = Callable[[Message], Judgement]
"""Checks a message under the signature policy of its topic, such as `kiln.schemas.wire.identity.check`."""

_NewMessages = list[tuple[Message, str, bytes]]  # with topic and id
_ACCEPTED: Final = (Verdict.VALID, Verdict.UNSIGNED)


class Router:
    """The gossipsub state of one node.

    `now` is in seconds of a monotonic clock. Methods return the RPCs to send, in order for each peer.

    Args:
        verify: Called for each message on a joined topic, except for exact copies of a message that was valid.
        table: The topic tables agreed with peers. By default, topics are sent and received only by name.
    """

    def __init__(
        self, own: PeerID, options: RouterOptions, rng: Random, verify: Verify, table: TableAgreements | None = None
    ) -> None:
        self._own = {own, *options.authors}
        self._options = options
        self._compute_id = options.message_id.compute
        self._by_content = options.message_id.by_content
        self._rng = rng
        self._verify = verify
        self._table = TableAgreements(BundleSet()) if table is None else table
        self._peers: dict[PeerID, PeerState] = {}
        self._floodsub = 0  # number of peers that support only floodsub
        # dicts instead of sets, for their insertion order: with the same seed, the rng chooses the same peers
        self._mesh: dict[str, dict[PeerID, PeerState]] = {}  # its keys are the joined topics
        self._signing = TopicSigning(options.policy_of)
        self._subscribers: dict[str, dict[PeerID, PeerState]] = {}
        self._backoffs = Backoffs(options.max_backoffs)
        self._promises = Promises()
        self._retained = RetainedScores(options.max_retained_scores)
        self._seen = SeenSet(options.seen_horizon, options.seen_cap)
        self._cache = MessageCache(options.mcache_len, options.mcache_gossip, options.mcache_bytes)
        self._counters: defaultdict[str, int] = defaultdict(int)
        self._heartbeats = 0
        self._last_heartbeat: float | None = None

    # ---------------------------------------------------------------- views

    @property
    def counters(self) -> Mapping[str, int]:
        """A live view of the number of events since the start, by kind."""
        self._counters["seen_evicted"] = self._seen.evicted
        self._counters["mcache_evicted"] = self._cache.evicted
        self._counters["backoff_evicted"] = self._backoffs.evicted
        self._counters.update(self._table.counters)
        return MappingProxyType(self._counters)

    @property
    def topics(self) -> Collection[str]:
        """A live view of the joined topics."""
        return self._mesh.keys()

    @property
    def mesh(self) -> Mapping[str, frozenset[PeerID]]:
        """The peers in the mesh of each joined topic."""
        return {topic: frozenset(peers) for topic, peers in self._mesh.items()}

    @property
    def peers(self) -> Mapping[PeerID, PeerView]:
        """The state of each connected peer."""
        return {
            peer: PeerView(state.protocol, frozenset(state.topics), state.score.value, state.outbound)
            for peer, state in self._peers.items()
        }

    @property
    def sizes(self) -> Mapping[str, int]:
        """Number of entries in each store. All stores are bounded by the options and the number of peers."""
        return {
            "seen": len(self._seen),
            "mcache": len(self._cache),
            "mcache_bytes": self._cache.size,
            "backoff": len(self._backoffs),
            "promises": len(self._promises),
            "idontwant": sum(len(state.unwanted) for state in self._peers.values()),
            "topics": sum(len(state.topics) for state in self._peers.values()),
            "retained": len(self._retained),
        }

    @property
    def policy_conflicts(self) -> list[PolicyConflict]:
        """The topics on which the node and a connected peer have different signature policies."""
        return self._signing.list_conflicts(state.signing for state in self._peers.values())

    def subscribers(self, topic: str) -> Collection[PeerID]:
        """Return a live view of the connected peers that subscribe to a topic."""
        return self._subscribers.get(topic, {}).keys()

    # ---------------------------------------------------------------- peers and topics

    def add_peer(self, peer: PeerID, protocol: str, outbound: bool, now: float, discovered: bool = False) -> list[Send]:
        """Add a peer whose pubsub stream is open. The state of an earlier session is dropped, except a negative score.

        Args:
            discovered: True if the node found the peer by DHT discovery. At most D / 2 peers of a mesh are discovered.

        Raises:
            ValueError: `RouterOptions.protocols` does not contain the protocol.
        """
        version = self._options.protocols.get(protocol)
        if version is None:
            raise ValueError(f"{protocol!r} is not one of the pubsub protocols {list(self._options.protocols)}")
        if peer in self._peers:
            self.remove_peer(peer, now)
        score = self._retained.pop(peer, now) or Score(self._options.score)
        table, hello = self._table.open(protocol)
        state = self._peers[peer] = PeerState(peer, protocol, version, outbound, score, discovered, table)
        self._floodsub += version == 0
        rpc = RPC()
        if hello is not None:
            rpc.control.extensions.CopyFrom(hello)
        for topic in self._mesh:
            rpc.subscriptions.add(subscribe=True, topicid=topic)
        sends: list[Send] = []
        if rpc.subscriptions or rpc.HasField("control"):
            self._send(sends, state, rpc, priority=True)
        return sends

    def remove_peer(self, peer: PeerID, now: float) -> None:
        """Remove a peer whose streams are closed. The next heartbeat fills the meshes that become too small."""
        state = self._peers.pop(peer, None)
        if state is None:
            return
        self._floodsub -= state.version == 0
        for topic in state.topics:
            self._remove_subscriber(topic, peer)
        for mesh in self._mesh.values():
            mesh.pop(peer, None)
        self._promises.remove_peer(peer)
        if state.score.compute() < 0:
            # reconnecting does not reset a bad score
            self._retained.put(peer, state.score, now + self._options.retain_score)

    def set_colocated_peers(self, peer: PeerID, count: int) -> None:
        """Set the number of connected peers at the public IP address of a peer (P6)."""
        if state := self._peers.get(peer):
            state.score.colocate(count)

    def is_graylisted(self, peer: PeerID) -> bool:
        """Return true if the score of a connected peer, without P6, is below the graylist threshold."""
        state = self._peers.get(peer)
        return state is not None and state.score.value_without_colocation < self._options.score.graylist_threshold

    def has_delivered(self, peer: PeerID) -> bool:
        """Return true if a connected peer was the first to deliver a valid message in the last minutes (P2)."""
        return peer in self._peers and self._peers[peer].score.first > 0

    def penalize(self, peer: PeerID) -> None:
        """Penalize a connected peer for a breach of the protocol that the caller has found (P7)."""
        if state := self._peers.get(peer):
            state.score.penalize()

    def set_agent(self, peer: PeerID, agent: str) -> None:
        """Set the agent version of a connected peer. It shows if the peer runs Kiln."""
        if state := self._peers.get(peer):
            state.signing.is_kiln = state.table.is_kiln = agent.startswith(AGENT)

    def join(self, topic: str) -> list[Send]:
        """Join a topic: announce the subscription to all peers, and graft up to D subscribers."""
        if topic in self._mesh:
            return []
        mesh = self._mesh[topic] = {}
        self._signing.join(topic)
        for state in self._subscribers.get(topic, {}).values():
            state.unjoined_topics -= 1
        for state in self._sample(self._graftable(topic, mesh), self._options.D):
            self._add_to_mesh(mesh, state)
        sends: list[Send] = []
        for peer, state in self._peers.items():
            rpc = RPC()
            rpc.subscriptions.add(subscribe=True, topicid=topic)
            if peer in mesh:
                rpc.control.graft.add(topicID=topic)
            self._send(sends, state, rpc, priority=True)
        return sends

    def leave(self, topic: str, now: float) -> list[Send]:
        """Leave a topic: announce the unsubscription to all peers, and prune the peers in its mesh."""
        mesh = self._mesh.pop(topic, None)
        if mesh is None:
            return []
        self._signing.leave(topic, (state.signing for state in self._peers.values()))
        for state in self._subscribers.get(topic, {}).values():
            state.unjoined_topics += 1
        sends: list[Send] = []
        for peer, state in self._peers.items():
            rpc = RPC()
            rpc.subscriptions.add(subscribe=False, topicid=topic)
            if peer in mesh:
                state.meshes -= 1
                self._add_prune(rpc.control, state, topic, self._options.unsubscribe_backoff, now)
            self._send(sends, state, rpc, priority=True)
        return sends

    # ---------------------------------------------------------------- messages

    def publish(self, message: Message, now: float) -> list[Send]:
        """Publish a message of the node, which the caller has signed if the topic requires it. Return one RPC per peer.

        The message goes to all subscribers of the topic whose score is at least `publish_threshold` (flood publishing,
        gossipsub-v1.1.md), even if the node has not joined the topic. So there is no fanout.

        Raises:
            MessageTooLargeError: The message is too large for an RPC within `rpc_limits`.
        """
        topic = message.topic
        if not topic:
            raise ValueError("cannot publish a message without a topic")
        key = self._compute_id(message, topic)
        data = message.SerializeToString()
        if not self._options.rpc_limits.accept(len(data), len(message.data)):
            raise MessageTooLargeError(
                f"cannot publish a message of {len(data)} bytes in an RPC of {self._options.rpc_limits.size} bytes. "
                "Raise bridge.max_rpc_bytes_out if every peer of the network accepts more."
            )
        signed = message.HasField("signature")
        verdict = Verdict.VALID if signed else Verdict.UNSIGNED
        self._seen.add(key, hash(data), verdict, now)
        self._cache.put(key, topic, data, signed)
        self._counters["published"] += 1
        threshold = self._options.score.publish_threshold
        pool = [state for state in self._subscribers.get(topic, {}).values() if state.score.value >= threshold]
        targets = [state for state in pool if self._wants(state, topic, key, signed)]
        rpc, encode, verdicts = RPC(publish=[message]), self._table.encode_for_peer, bytes([verdict])
        return [Send(to.peer, encode(to.table, rpc) if to.table.table else rpc, True, verdicts) for to in targets]

    def receive(self, peer: PeerID, rpc: RPC, now: float) -> tuple[list[Send], list[Deliver], bytes]:
        """Process an RPC of a peer. If it cannot be parsed, pass an empty one, which can count as the stream's first.

        Returns RPCs to send, messages to deliver, and the `Verdict` of each message up to `max_messages_per_rpc`.
        """
        sends: list[Send] = []
        delivered: list[Deliver] = []
        publish: Sequence[Message] = rpc.publish
        state = self._peers.get(peer)
        surplus = len(publish) - self._options.max_messages_per_rpc
        if surplus > 0:
            publish = publish[:-surplus]
            self._counters["messages_over_limit"] += surplus
            if state is not None:
                state.score.penalize(self._options.over_limit_penalty)
        if state is None:
            self._counters["unknown_peer"] += 1
            return sends, delivered, bytes(len(publish))
        control = rpc.control if rpc.HasField("control") else None
        if control is not None and control.HasField("extensions"):
            self._table.receive(state.table, control.extensions, is_first=state.awaits_first_rpc)
            # extensions count only in a peer's first RPC; only the topic table is used (gossipsub-v1.3.md)
            if not state.awaits_first_rpc:
                self._counters["extensions_repeated"] += 1
            elif state.version >= EXTENSIONS_VERSION:
                self._counters["extensions"] += 1
        state.awaits_first_rpc = False
        subscriptions = rpc.subscriptions
        if subscriptions:
            self._handle_subscriptions(state, subscriptions, sends)
        if state.score.value < self._options.score.graylist_threshold:
            self._counters["graylisted"] += 1
            return sends, delivered, bytes(len(publish))
        verdicts = self._handle_messages(state, publish, sends, delivered, now) if publish else b""
        if control is not None:
            if state.version:
                self._handle_control(state, control, sends, now)
            else:
                self._counters["control_from_floodsub"] += 1
        return sends, delivered, verdicts

    def record_dropped(self, peer: PeerID, rpc: RPC) -> None:
        """Record an RPC that was not sent because the peer's send queue was full."""
        self._counters["dropped_rpcs"] += 1
        self._counters["dropped_messages"] += len(rpc.publish)
        for item in rpc.control.iwant:
            for raw in item.messageIDs:
                # the peer does not owe messages that were not requested
                self._promises.remove(raw if self._by_content else canonical_id(raw), peer)

    def heartbeat(self, now: float) -> list[Send]:
        """Update scores and meshes, send gossip, and expire old state. Call it every `heartbeat` seconds."""
        options = self._options
        self._heartbeats += 1
        elapsed = 0.0 if self._last_heartbeat is None else max(0.0, now - self._last_heartbeat)
        self._last_heartbeat = now
        for peer, count in self._promises.pop_broken(now).items():
            self._counters["broken_promise"] += count
            # one penalty per heartbeat for any number of ids, because a single lost answer may have had thousands
            self._peers[peer].score.penalize()
        for state in self._peers.values():
            state.ihave_count = state.requested_ids = state.iwant_count = state.iwant_bytes = state.idontwant_count = (
                state.graft_penalties
            ) = 0
            state.subscriptions = max(0, state.subscriptions - options.subscriptions_per_heartbeat)
            if state.unwanted:
                state.unwanted = {key: until for key, until in state.unwanted.items() if until > self._heartbeats}
            state.score.tick(elapsed, state.meshes > 0)
        self._seen.expire(now)
        # with a margin for the peer's clock: a GRAFT at the very end of the back-off would often be too early
        self._backoffs.expire(now - 2 * options.heartbeat)
        self._retained.expire(now)

        out: dict[PeerID, ControlMessage] = {}
        for topic, mesh in self._mesh.items():
            self._maintain_mesh(topic, mesh, out, now)
        sends: list[Send] = []
        for peer, control in out.items():
            self._send(sends, self._peers[peer], RPC(control=control), priority=True)
        gossip: dict[PeerID, ControlMessage] = {}
        for topic, mesh in self._mesh.items():
            self._add_gossip(topic, mesh, gossip)
        for peer, control in gossip.items():
            self._send(sends, self._peers[peer], RPC(control=control), priority=False)
        self._cache.shift()
        return sends

    # ---------------------------------------------------------------- subscriptions and messages

    def _handle_subscriptions(self, state: PeerState, subscriptions: Sequence[RPC.SubOpts], sends: list[Send]) -> None:
        options = self._options
        limit = options.max_subscriptions_per_rpc
        before = max(state.subscriptions, options.subscriptions)
        state.subscriptions += len(subscriptions)
        if state.subscriptions > before:
            self._counters["subscription_flood"] += state.subscriptions - before
            state.score.penalize((state.subscriptions - before) * options.subscription_penalty)
        if len(subscriptions) > limit:
            self._counters["subscriptions_over_limit"] += len(subscriptions) - limit
            subscriptions = subscriptions[:limit]
        graft: list[str] = []
        for item in subscriptions:
            topic = self._table.resolve_topic(state.table, item)
            if topic is None or len(topic) > options.max_topic_length:
                self._counters["bad_topic"] += 1
                continue
            mesh = self._mesh.get(topic)
            if not item.subscribe:
                if topic in state.topics:
                    self._remove_subscription(state, topic)
            elif self._add_subscription(state, topic) and mesh is not None and len(mesh) < options.D_low:
                graft.append(topic)
        rpc = RPC()
        for topic in graft:
            mesh = self._mesh[topic]
            if self._may_graft(topic, state, mesh) and self._limit_discovered([state], mesh):
                self._add_to_mesh(mesh, state)
                rpc.control.graft.add(topicID=topic)
        if rpc.HasField("control"):
            self._send(sends, state, rpc, priority=True)

    def _add_subscription(self, state: PeerState, topic: str) -> bool:
        """Add a subscription. Return false if it exists already or exceeds the peer's limit."""
        if topic in state.topics:
            return False
        if topic not in self._mesh:
            if state.unjoined_topics >= self._options.max_topics_per_peer:
                self._counters["topics_over_limit"] += 1
                return False
            state.unjoined_topics += 1
        state.topics[topic] = None
        self._subscribers.setdefault(topic, {})[state.peer] = state
        return True

    def _remove_subscription(self, state: PeerState, topic: str) -> None:
        del state.topics[topic]
        self._remove_subscriber(topic, state.peer)
        mesh = self._mesh.get(topic)
        if mesh is None:
            state.unjoined_topics -= 1
        elif mesh.pop(state.peer, None) is not None:
            state.meshes -= 1

    def _handle_messages(
        self, state: PeerState, publish: Sequence[Message], sends: list[Send], delivered: list[Deliver], now: float
    ) -> bytes:
        counters = self._counters
        seen = self._seen
        max_size = self._options.max_message_bytes
        verdicts, cost = bytearray(len(publish)), 0
        fresh: _NewMessages = []
        too_large: _NewMessages = []
        for index, received in enumerate(publish):
            if cost >= MAX_RPC_COST:
                # the other messages stay "not checked": signatures that are slow to check must not cost more time
                counters["messages_over_cost"] += len(publish) - index
                state.score.penalize(self._options.over_limit_penalty)
                break
            topic = self._table.resolve_topic(state.table, received)
            if topic is None or topic not in self._mesh:
                counters["unknown_topic"] += 1
                continue
            signed = received.HasField("signature")
            self._signing.record_message(state.signing, topic, signed)
            # from here on no message has an index, which has a meaning only on one connection
            message = self._table.with_topic_name(received, topic) if received.HasField("topicIndex") else received
            cost += estimate_id_cost(message)
            key = self._compute_id(message, topic)
            data = message.SerializeToString()
            size = len(message.data)
            can_relay = self._options.rpc_limits.accept(len(data), size) and (not max_size or size <= max_size)
            if not can_relay:
                counters["message_too_large"] += 1
                state.score.penalize()
            copy = hash(data)
            known_copy, known_verdict = seen.get(key) or (None, 0)
            if known_copy == copy:
                verdicts[index] = known_verdict
                counters["own_message" if getattr(message, "from") in self._own else "duplicate"] += 1
                continue
            judgement = self._verify(message)
            verdicts[index] = verdict = judgement.verdict
            cost += judgement.cost
            if verdict not in _ACCEPTED:
                self._reject_message(state, topic, judgement)
                if state.score.value < self._options.score.graylist_threshold:
                    # the other messages stay "not checked": garbage must not cost more time
                    counters["graylisted"] += 1
                    break
                continue
            if known_copy is not None:
                counters["duplicate"] += 1  # the same message in other bytes
                continue
            if not can_relay and (self._by_content or verdict == Verdict.UNSIGNED):
                # anyone can pad a message whose id depends only on its data: a smaller copy is still wanted
                delivered.append(Deliver(message, topic, state.peer))
                continue
            seen.add(key, copy, verdict, now)
            if getattr(message, "from") in self._own:
                counters["own_message"] += 1  # sent before a restart
                continue
            self._promises.fulfil(key)
            counters["delivered"] += 1
            delivered.append(Deliver(message, topic, state.peer))
            if not can_relay:
                too_large.append((message, topic, key))
                continue
            self._cache.put(key, topic, data, signed)
            state.score.deliver()
            fresh.append((message, topic, key))
        if fresh or too_large:
            self._relay(state, fresh, too_large, sends)
        return bytes(verdicts)

    def _reject_message(self, state: PeerState, topic: str, judgement: Judgement) -> None:
        if judgement.verdict == Verdict.NOT_CHECKED:
            self._counters["not_checked"] += 1
            return
        self._counters["bad_signature" if judgement.verdict == Verdict.INVALID else "against_policy"] += 1
        if self._signing.is_other_policy(state.signing, topic, judgement):
            return
        state.score.reject()
        if judgement.reason == KEY_ALGORITHM:
            self._counters[KEY_ALGORITHM] += 1
            state.score.penalize(self._options.key_algorithm_penalty)

    def _relay(self, source: PeerState, fresh: _NewMessages, too_large: _NewMessages, sends: list[Send]) -> None:
        """Announce new messages by IDONTWANT, so that other peers do not send them too, and forward those that are not
        too large."""
        wanted_not: dict[PeerID, list[bytes]] = {}
        for message, topic, key in (*too_large, *fresh):
            if len(message.data) < self._options.idontwant_threshold:
                continue
            for peer, state in self._mesh[topic].items():
                if state is not source and state.version >= IDONTWANT_VERSION:
                    wanted_not.setdefault(peer, []).append(state.encode_id(key) if state.encode_id else key)
        for peer, keys in wanted_not.items():
            rpc = RPC()
            rpc.control.idontwant.add(messageIDs=keys)
            self._send(sends, self._peers[peer], rpc, priority=True)
            self._counters["idontwant_sent"] += len(keys)
        encode = self._table.encode_for_peer
        if len(fresh) == 1:  # nearly always
            message, topic, key = fresh[0]
            author, signed = getattr(message, "from"), message.HasField("signature")
            rpc = RPC()
            rpc.publish.append(message)
            for peer, state in self._relay_targets(topic).items():
                if state is not source and peer != author and self._wants(state, topic, key, signed):
                    sends.append(Send(peer, encode(state.table, rpc) if state.table.table else rpc, False))
                    self._counters["forwarded"] += 1
            return
        chosen: dict[PeerID, list[int]] = {}
        for index, (message, topic, key) in enumerate(fresh):
            author, signed = getattr(message, "from"), message.HasField("signature")
            for peer, state in self._relay_targets(topic).items():
                if state is not source and peer != author and self._wants(state, topic, key, signed):
                    chosen.setdefault(peer, []).append(index)
        made: dict[tuple[int, ...], list[RPC]] = {}
        for peer, indexes in chosen.items():
            parts = made.get(tuple(indexes))
            if parts is None:
                rpc = RPC()
                rpc.publish.extend([fresh[index][0] for index in indexes])
                parts = made[tuple(indexes)] = self._split(rpc)
            state = self._peers[peer]
            sends.extend(Send(peer, encode(state.table, part) if state.table.table else part, False) for part in parts)
            self._counters["forwarded"] += len(indexes)

    def _wants(self, state: PeerState, topic: str, key: bytes, signed: bool) -> bool:
        if key in state.unwanted:
            self._counters["idontwant_honoured"] += 1
            return False
        if state.signing.sent and not state.signing.accepts(topic, signed):
            self._counters["withheld"] += 1
            return False
        return True

    def _relay_targets(self, topic: str) -> dict[PeerID, PeerState]:
        mesh = self._mesh[topic]
        if not self._floodsub:
            return mesh
        threshold = self._options.score.publish_threshold
        return mesh | {
            peer: state
            for peer, state in self._subscribers.get(topic, {}).items()
            if not state.version and state.score.value >= threshold
        }

    # ---------------------------------------------------------------- control messages

    def _handle_control(self, state: PeerState, control: ControlMessage, sends: list[Send], now: float) -> None:
        state.id_budget = self._options.max_ids_per_rpc
        if control.ihave:
            self._handle_ihave(state, control, sends, now)
        if control.iwant:
            self._handle_iwant(state, control, sends)
        if control.graft:
            self._handle_graft(state, control, sends, now)
        if control.prune:
            self._handle_prune(state, control, now)
        if control.idontwant:
            self._handle_idontwant(state, control)

    def _over_control_limit(self, state: PeerState, count: int) -> int:
        limit = self._options.max_control_per_rpc
        if count > limit:
            self._counters["control_over_limit"] += count - limit
            state.score.penalize(self._options.over_limit_penalty)
        return limit

    def _read_ids(self, state: PeerState, raws: Iterable[bytes]) -> Iterable[tuple[bytes, bytes]]:
        """Yield each id as received and in the form of the seen cache. Ids that are too long are skipped."""
        for raw in raws:
            if state.id_budget < 0:
                return
            if len(raw) > self._options.max_id_bytes:
                self._counters["id_too_long"] += 1
                continue
            yield raw, raw if self._by_content else state.read_id(raw)

    def _handle_ihave(self, state: PeerState, control: ControlMessage, sends: list[Send], now: float) -> None:
        options = self._options
        if state.score.value < options.score.gossip_threshold:
            self._counters["ihave_low_score"] += 1
            return
        state.ihave_count += 1
        if state.ihave_count > options.max_ihave_messages:
            self._counters["ihave_flood"] += 1
            return
        wanted: dict[bytes, bytes] = {}
        room = options.max_requested_ids - state.requested_ids
        for item in control.ihave[: self._over_control_limit(state, len(control.ihave))]:
            topic = self._table.resolve_topic(state.table, item)
            if topic is None or topic not in self._mesh:
                self._counters["ihave_unknown_topic"] += 1
                continue
            ids: Sequence[bytes] = item.messageIDs
            most = min(options.max_ihave_length, state.id_budget)
            if len(ids) > most:
                self._counters["ihave_over_limit"] += len(ids) - most
                ids = ids[:most]
            state.id_budget -= len(ids)
            for raw, key in self._read_ids(state, ids):
                if key in self._seen or key in wanted or self._promises.is_pending(key, state.peer):
                    continue
                if len(wanted) >= room:
                    self._counters["ihave_over_limit"] += 1
                    continue
                wanted[key] = raw
        if not wanted:
            return
        state.requested_ids += len(wanted)
        self._counters["iwant_sent"] += len(wanted)
        until = now + options.iwant_followup
        for key in wanted:
            self._promises.add(key, state.peer, until)
        rpc = RPC()
        rpc.control.iwant.add(messageIDs=wanted.values())
        self._send(sends, state, rpc, priority=False)

    def _handle_iwant(self, state: PeerState, control: ControlMessage, sends: list[Send]) -> None:
        options = self._options
        if state.score.value < options.score.gossip_threshold:
            self._counters["iwant_low_score"] += 1
            return
        answer = RPC()
        for item in control.iwant[: self._over_control_limit(state, len(control.iwant))]:
            ids = item.messageIDs[: state.id_budget]
            state.id_budget -= len(ids)
            self._counters["iwant_over_limit"] += len(item.messageIDs) - len(ids)
            for _, key in self._read_ids(state, ids):
                if state.iwant_count >= options.max_iwant_length or state.iwant_bytes >= options.max_iwant_bytes:
                    self._counters["iwant_over_limit"] += 1
                    continue
                state.iwant_count += 1
                cached = self._cache.get(key)
                if cached is None or not state.signing.accepts(cached.topic, cached.signed):
                    self._counters["iwant_unknown"] += 1
                    continue
                if self._cache.count(key, state.peer) > options.gossip_retransmission:
                    self._counters["iwant_over_limit"] += 1
                    continue
                state.iwant_bytes += len(cached.data)
                answer.publish.add().MergeFromString(cached.data)
        if answer.publish:
            self._counters["iwant_answered"] += len(answer.publish)
            self._send(sends, state, answer, priority=False)

    def _handle_graft(self, state: PeerState, control: ControlMessage, sends: list[Send], now: float) -> None:
        options = self._options
        refused: dict[str, None] = {}
        for item in control.graft[: self._over_control_limit(state, len(control.graft))]:
            topic = self._table.resolve_topic(state.table, item)
            mesh = None if topic is None else self._mesh.get(topic)
            if topic is None or mesh is None:
                self._counters["graft_unknown_topic"] += 1  # no PRUNE back, which would amplify spam
                continue
            if state.peer in mesh:
                continue
            until, since = self._backoffs.get(topic, state.peer)
            if now < until:
                self._counters["graft_backoff"] += 1
                state.penalize_graft(2 if now < since + options.graft_flood else 1, options.max_graft_penalties)
            elif state.score.value < 0:
                self._counters["graft_low_score"] += 1
            elif len(mesh) >= options.D_high and not state.outbound:
                self._counters["graft_mesh_full"] += 1  # otherwise anyone could take over the mesh by dialling
            elif not self._limit_discovered([state], mesh):
                self._counters["graft_discovered_full"] += 1
            else:
                self._add_subscription(state, topic)  # a peer that grafts is on the topic
                state.signing.record_graft(topic)
                self._add_to_mesh(mesh, state)
                continue
            refused[topic] = None
        if refused:
            rpc = RPC()
            for topic in refused:
                self._add_prune(rpc.control, state, topic, options.prune_backoff, now)
            self._send(sends, state, rpc, priority=True)

    def _handle_prune(self, state: PeerState, control: ControlMessage, now: float) -> None:
        options = self._options
        for item in control.prune[: self._over_control_limit(state, len(control.prune))]:
            topic = self._table.resolve_topic(state.table, item)
            mesh = None if topic is None else self._mesh.get(topic)
            if topic is None or mesh is None:
                self._counters["prune_unknown_topic"] += 1
                continue
            self._counters["pruned_by_peer"] += 1
            if mesh.pop(state.peer, None) is not None:
                state.meshes -= 1
                self._signing.record_prune(state.signing, topic)
            seconds = float(item.backoff) or options.prune_backoff
            self._backoffs.add(topic, state.peer, min(seconds, options.max_backoff), now)
            if item.peers:
                self._counters["px_ignored"] += 1

    def _handle_idontwant(self, state: PeerState, control: ControlMessage) -> None:
        options = self._options
        if state.version < IDONTWANT_VERSION:
            self._counters["idontwant_wrong_version"] += 1
            return
        until = self._heartbeats + options.idontwant_ttl
        for item in control.idontwant[: self._over_control_limit(state, len(control.idontwant))]:
            ids = item.messageIDs[: state.id_budget]
            state.id_budget -= len(ids)
            self._counters["idontwant_over_limit"] += len(item.messageIDs) - len(ids)
            for _, key in self._read_ids(state, ids):
                if state.idontwant_count >= options.max_idontwant_length:
                    self._counters["idontwant_over_limit"] += 1
                    continue
                state.idontwant_count += 1
                state.unwanted[key] = until

    # ---------------------------------------------------------------- mesh maintenance

    def _maintain_mesh(
        self, topic: str, mesh: dict[PeerID, PeerState], out: dict[PeerID, ControlMessage], now: float
    ) -> None:
        options = self._options
        for state in [state for state in mesh.values() if state.score.value < 0]:
            self._prune(topic, mesh, state, out, now)
        if len(mesh) < options.D_low:
            pool = self._graftable(topic, mesh)
            self._graft(topic, mesh, self._sample(pool, options.D - len(mesh)), out)
        if len(mesh) > options.D_high:
            keep = select_mesh_peers(mesh, options, self._rng)
            for state in [state for peer, state in mesh.items() if peer not in keep]:
                self._prune(topic, mesh, state, out, now)
        if len(mesh) >= options.D_low:
            missing = options.D_out - sum(state.outbound for state in mesh.values())
            if missing > 0:
                pool = [state for state in self._graftable(topic, mesh) if state.outbound]
                self._graft(topic, mesh, self._sample(pool, missing), out)
        if self._heartbeats % options.opportunistic_ticks == 0 and len(mesh) > 1:
            median = sorted(state.score.value for state in mesh.values())[len(mesh) // 2]
            if median < options.score.opportunistic_threshold:
                pool = [state for state in self._graftable(topic, mesh) if state.score.value > median]
                chosen = self._sample(pool, options.opportunistic_peers)
                self._counters["opportunistic_graft"] += len(chosen)
                self._graft(topic, mesh, chosen, out)

    def _add_gossip(self, topic: str, exclude: Mapping[PeerID, PeerState], out: dict[PeerID, ControlMessage]) -> None:
        options = self._options
        keys = self._cache.gossip_ids(topic)
        if not keys:
            return
        pool = [
            state
            for peer, state in self._subscribers.get(topic, {}).items()
            if state.version and peer not in exclude and state.score.value >= options.score.gossip_threshold
        ]
        count = max(options.D_lazy, math.ceil(options.gossip_factor * len(pool)))
        for state in self._sample(pool, count):
            accepts, is_signed = state.signing.accepts, self._cache.is_signed
            wanted = [key for key in keys if accepts(topic, is_signed(key))] if state.signing.sent else keys
            ids = self._rng.sample(wanted, min(len(wanted), options.max_ihave_length))
            if not ids:
                continue
            if state.encode_id:
                ids = [state.encode_id(key) for key in ids]
            out.setdefault(state.peer, ControlMessage()).ihave.add(topicID=topic, messageIDs=ids)
            self._counters["ihave_sent"] += len(ids)

    def _may_graft(self, topic: str, state: PeerState, mesh: Mapping[PeerID, PeerState]) -> bool:
        # a back-off entry exists for a little longer than the back-off lasts (see `heartbeat`)
        return (
            state.version > 0
            and state.peer not in mesh
            and state.score.value >= 0
            and (topic, state.peer) not in self._backoffs
        )

    def _graftable(self, topic: str, mesh: Mapping[PeerID, PeerState]) -> list[PeerState]:
        subscribers = self._subscribers.get(topic, {})
        pool = [state for state in subscribers.values() if self._may_graft(topic, state, mesh)]
        return self._limit_discovered(pool, mesh)

    def _limit_discovered(self, pool: list[PeerState], mesh: Mapping[PeerID, PeerState]) -> list[PeerState]:
        """Drop random discovered peers that would exceed D / 2 in the mesh, because one attacker could own them all."""
        discovered = [state for state in pool if state.discovered]
        if not discovered:
            return pool
        room = self._options.D // 2 - sum(state.discovered for state in mesh.values())
        return [state for state in pool if not state.discovered] + self._sample(discovered, room)

    def _add_to_mesh(self, mesh: dict[PeerID, PeerState], state: PeerState) -> None:
        mesh[state.peer] = state
        state.meshes += 1

    def _graft(
        self, topic: str, mesh: dict[PeerID, PeerState], chosen: list[PeerState], out: dict[PeerID, ControlMessage]
    ) -> None:
        for state in chosen:
            self._add_to_mesh(mesh, state)
            out.setdefault(state.peer, ControlMessage()).graft.add(topicID=topic)

    def _prune(
        self, topic: str, mesh: dict[PeerID, PeerState], state: PeerState, out: dict[PeerID, ControlMessage], now: float
    ) -> None:
        del mesh[state.peer]
        state.meshes -= 1
        control = out.setdefault(state.peer, ControlMessage())
        self._add_prune(control, state, topic, self._options.prune_backoff, now)

    def _add_prune(self, control: ControlMessage, state: PeerState, topic: str, seconds: float, now: float) -> None:
        """Add a PRUNE, with a back-off if the peer's version supports it. The node observes the back-off, too."""
        self._counters["prune_sent"] += 1
        self._backoffs.add(topic, state.peer, seconds, now)
        prune = control.prune.add(topicID=topic)
        if state.version >= BACKOFF_VERSION:
            prune.backoff = math.ceil(seconds)

    def _remove_subscriber(self, topic: str, peer: PeerID) -> None:
        subscribers = self._subscribers[topic]
        del subscribers[peer]
        if not subscribers:
            del self._subscribers[topic]

    def _sample(self, pool: list[PeerState], count: int) -> list[PeerState]:
        return self._rng.sample(pool, min(len(pool), count)) if count > 0 else []

    def _send(self, sends: list[Send], state: PeerState, rpc: RPC, priority: bool) -> None:
        table, encode = state.table, self._table.encode_for_peer
        sends.extend([Send(state.peer, encode(table, part), priority) for part in self._split(rpc)])

    def _split(self, rpc: RPC) -> list[RPC]:
        parts, left_out = split(rpc, self._options.rpc_limits)
        self._counters["control_too_large"] += left_out
        return parts
