"""The gossipsub router as a state machine: RPCs and ticks in, RPCs and messages out.

Sources: libp2p specs, pubsub/gossipsub/gossipsub-v1.0.md to v1.3.md and pubsub/README.md. Where they leave room, the
router does as go-libp2p-pubsub, which most peers run. Differences, all on purpose:

* The router judges a message before it remembers or announces anything of the message (IDONTWANT included), so that a
  forged copy can never stand in the way of the true copy.
* The router neither uses nor sends peers in PRUNE (peer exchange): the host decides which peers to dial.
* The router grafts a peer that comes onto a topic whose mesh is too small at once, not at the next heartbeat.
* The router understands ids of js-libp2p (key ‖ seqno) and rust-libp2p (both as text), and speaks them to a peer that
  uses them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Final

from bridge.gossip.cache import (
    MessageCache,
    SeenSet,
    canonical_id,
    gossip_id,
    is_key_form,
    is_text_form,
    key_form,
    mark,
    text_form,
)
from bridge.gossip.mesh import worth_keeping
from bridge.gossip.options import RouterOptions
from bridge.gossip.outcomes import Deliver, PeerID, PeerView, Send
from bridge.gossip.parts import MessageTooLargeError, split
from bridge.gossip.peers import Backoffs, Fanout, PeerState, Promises, RetainedScores
from bridge.gossip.protocols import BACKOFF_VERSION, EXTENSIONS_VERSION, IDONTWANT_VERSION, VERSIONS
from bridge.gossip.score import Score
from bridge.gossip.signatures import Verify
from bridge.gossip.table_side import Item, Savings, TableSide
from bridge.status import SavingDirection, SavingStatus
from schemas.identity import MAX_RPC_COST, Judgement, Verdict, id_cost
from schemas.proto.gossipsub.rpc_pb2 import RPC, ControlExtensions, ControlMessage, Message
from schemas.public_key import KEY_ALGORITHM
from schemas.topic_table import Bundles

_ACCEPTED: Final = (Verdict.GOOD, Verdict.UNSIGNED)
_TEXT_LOOKS: Final = 3  # of `max_ids_per_rpc`, that an id as text takes beside its own


class Router:
    """One node's gossipsub state.

    The router calls `verify` once for each message on a joined topic, unless a copy of the very same bytes was good.
    `table`: the topic tables with the peers; without it no topic goes or comes by index. Inside the router a topic is a
    name: topics come in through `_topic_of` and go out through `_for_peer`. `now`: seconds of any clock that does not
    go back. Methods return what is to be sent, in order per peer; the router keeps nothing of what it returns.
    """

    def __init__(
        self, own: PeerID, options: RouterOptions, rng: Random, verify: Verify, table: TableSide | None = None
    ) -> None:
        self._own = {own, *options.authors}
        self._options = options
        self._rng = rng
        self._verify = verify
        self._table = TableSide(Bundles()) if table is None else table
        self._peers: dict[PeerID, PeerState] = {}
        self._floodsub = 0  # peers that speak only that
        # dicts in place of sets: their order is that of insertion, so a seeded rng always chooses the same
        self._mesh: dict[str, dict[PeerID, PeerState]] = {}  # its keys are the topics we are on
        self._subscribers: dict[str, dict[PeerID, PeerState]] = {}
        self._fanout: dict[str, Fanout] = {}
        self._backoffs = Backoffs(options.max_backoffs)
        self._promises = Promises()
        self._retained = RetainedScores(options.max_retained)
        self._seen = SeenSet(options.seen_horizon, options.seen_cap)
        self._cache = MessageCache(options.mcache_len, options.mcache_gossip, options.mcache_bytes)
        self._counters: defaultdict[str, int] = defaultdict(int)
        self._ticks = 0
        self._ticked: float | None = None

    # ---------------------------------------------------------------- views

    @property
    def counters(self) -> Mapping[str, int]:
        """How often what happened, by kind, since the start. A live view: look again, it has moved on."""
        self._counters["seen_evicted"] = self._seen.evicted
        self._counters["mcache_evicted"] = self._cache.evicted
        self._counters["backoff_evicted"] = self._backoffs.evicted
        self._counters.update(self._table.counters)
        return MappingProxyType(self._counters)

    @property
    def mesh(self) -> Mapping[str, frozenset[PeerID]]:
        """The topics we are on and the peers in the mesh of each."""
        return {topic: frozenset(peers) for topic, peers in self._mesh.items()}

    @property
    def peers(self) -> Mapping[PeerID, PeerView]:
        """All connected peers."""
        return {
            peer: PeerView(state.protocol, frozenset(state.topics), state.score.value, state.outbound)
            for peer, state in self._peers.items()
        }

    @property
    def sizes(self) -> Mapping[str, int]:
        """Entries in each of the router's memories: RouterOptions and the number of peers bound all of them."""
        return {
            "seen": len(self._seen),
            "mcache": len(self._cache),
            "mcache_bytes": self._cache.size,
            "backoff": len(self._backoffs),
            "promises": len(self._promises),
            "idontwant": sum(len(state.dont) for state in self._peers.values()),
            "topics": sum(len(state.topics) for state in self._peers.values()),
            "fanout": len(self._fanout),
            "retained": len(self._retained),
        }

    @property
    def savings(self) -> Savings:
        """What references by index took, and would have taken as names, by direction and topic, over all peers."""
        return self._table.savings()

    def savings_of(self, peer: PeerID) -> Mapping[tuple[SavingDirection, str], SavingStatus]:
        """The same of one connected peer."""
        return self._table.savings_of(peer)

    def subscribers(self, topic: str) -> Collection[PeerID]:
        """The connected peers on a topic. A live view."""
        return self._subscribers.get(topic, {}).keys()

    # ---------------------------------------------------------------- peers and topics

    def add_peer(self, peer: PeerID, protocol: str, outbound: bool, now: float, discovered: bool = False) -> list[Send]:
        """A pubsub stream to a peer is open. Returns the node's subscriptions, and the hello of the topic table where
        one is due. `outbound`: the node dialled. `discovered`: strangers named the peer; such peers are at most half of
        a mesh (D / 2).

        A peer that is there already begins anew. ValueError for a protocol that is not in VERSIONS.
        """
        version = VERSIONS.get(protocol)
        if version is None:
            raise ValueError(f"not a pubsub protocol of ours: {protocol!r}; known are {', '.join(VERSIONS)}")
        if peer in self._peers:
            self.remove_peer(peer, now)
        score = self._retained.take(peer, now) or Score(self._options.score)
        state = self._peers[peer] = PeerState(peer, protocol, version, outbound, score, discovered)
        self._floodsub += version == 0
        rpc = RPC()
        hello = self._table.add(peer, protocol)
        if hello is not None:
            rpc.control.extensions.CopyFrom(hello)
        for topic in self._mesh:
            rpc.subscriptions.add(subscribe=True, topicid=topic)
        sends: list[Send] = []
        if rpc.subscriptions or rpc.HasField("control"):
            self._send(sends, state, rpc, priority=True)
        return sends

    def remove_peer(self, peer: PeerID, now: float) -> list[Send]:
        """A peer's streams are closed. The next heartbeat fills the meshes again."""
        state = self._peers.pop(peer, None)
        if state is None:
            return []
        self._floodsub -= state.version == 0
        self._table.remove(peer)
        for topic in state.topics:
            self._unlist(topic, peer)
        for mesh in self._mesh.values():
            mesh.pop(peer, None)
        for fanout in self._fanout.values():
            fanout.peers.pop(peer, None)
        self._promises.forget_peer(peer)
        if state.score.compute() < 0:
            # going and coming back does not wash a peer clean
            self._retained.put(peer, state.score, now + self._options.retain_score)
        return []

    def colocated(self, peer: PeerID, count: int) -> None:
        """So many connected peers, this one included, are on its IP address (P6). Not to be called for addresses that
        many may share, such as loopback."""
        if state := self._peers.get(peer):
            state.score.colocate(count)

    def unbearable(self, peer: PeerID) -> bool:
        """Whether a connected peer has brought itself below the graylist threshold. Neighbours on its address (P6) do
        not count."""
        state = self._peers.get(peer)
        return state is not None and state.score.conduct < self._options.score.graylist_threshold

    def punish(self, peer: PeerID) -> None:
        """A connected peer broke a rule where the router does not see it (P7)."""
        if state := self._peers.get(peer):
            state.score.penalize()

    def identified(self, peer: PeerID, agent: str) -> None:
        """The agent version that a connected peer gave of itself."""
        self._table.agent(peer, agent)

    def join(self, topic: str, now: float) -> list[Send]:
        """Subscribe to a topic: the router tells all peers, and grafts up to D of those on the topic. [] if joined."""
        if topic in self._mesh:
            return []
        mesh = self._mesh[topic] = {}
        fanout = self._fanout.pop(topic, None)
        chosen: list[PeerState] = []
        if fanout is not None:
            chosen = [state for state in fanout.peers.values() if self._may_graft(topic, state, mesh, now)]
            chosen = self._half_discovered(chosen, mesh)[: self._options.D]
        for state in self._subscribers.get(topic, {}).values():
            state.foreign -= 1
        for state in chosen:
            self._enter(mesh, state)
        for state in self._sample(self._graftable(topic, mesh, now), self._options.D - len(mesh)):
            self._enter(mesh, state)
        sends: list[Send] = []
        for peer, state in self._peers.items():
            rpc = RPC()
            rpc.subscriptions.add(subscribe=True, topicid=topic)
            if peer in mesh:
                rpc.control.graft.add(topicID=topic)
            self._send(sends, state, rpc, priority=True)
        return sends

    def leave(self, topic: str, now: float) -> list[Send]:
        """Unsubscribe from a topic: the router tells all peers, and prunes the mesh. [] if not joined."""
        mesh = self._mesh.pop(topic, None)
        if mesh is None:
            return []
        for state in self._subscribers.get(topic, {}).values():
            state.foreign += 1
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
        """Send a message of our own, signed already where the network wants that: one Send per peer.

        To all peers on the topic with `flood_publish`, else to the mesh (filled up to D), or the fanout of a topic we
        are not on; floodsub peers always. The same message may be published again. ValueError without a topic, and
        MessageTooLargeError where no RPC within `rpc_limits` can carry the message.
        """
        topic = message.topic
        if not topic:
            raise ValueError("a message to publish needs a topic")
        key = gossip_id(message)
        data = message.SerializeToString()
        if not self._options.rpc_limits.accept(len(data), len(message.data)):
            raise MessageTooLargeError(
                f"a message of {len(data)} bytes does not fit in an RPC of {self._options.rpc_limits.size}. "
                "Raise bridge.max_rpc_out if every peer of the network accepts more."
            )
        verdict = Verdict.GOOD if message.HasField("signature") else Verdict.UNSIGNED
        self._seen.add(key, mark(data, verdict), now)
        self._cache.put(key, topic, data)
        self._counters["published"] += 1
        targets = [state for state in self._own_targets(topic, now) if key not in state.dont]
        rpc = RPC()
        rpc.publish.append(message)
        return [Send(state.peer, self._for_peer(state, rpc), True) for state in targets]

    def receive(self, peer: PeerID, rpc: RPC, now: float) -> tuple[list[Send], list[Deliver], bytes]:
        """An RPC has come: what to send, what to hand on, and one Verdict for each message in it that is read:
        `max_messages_per_rpc` at most.

        The caller gives an RPC that it could not read as an empty RPC: it may have been the peer's first.
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
        self._table.received(peer, rpc)
        if control is not None and control.HasField("extensions"):
            self._take_hello(state, control.extensions)
        state.silent = False
        subscriptions = rpc.subscriptions
        if subscriptions:
            self._take_subscriptions(state, subscriptions, sends, now)
        if state.score.value < self._options.score.graylist_threshold:
            self._counters["graylisted"] += 1
            return sends, delivered, bytes(len(publish))
        verdicts = self._take_messages(state, publish, sends, delivered, now) if publish else b""
        if control is not None:
            if state.version:
                self._take_control(state, control, sends, now)
            else:
                self._counters["control_from_floodsub"] += 1
        return sends, delivered, verdicts

    def dropped(self, peer: PeerID, rpc: RPC) -> None:
        """A bounded outbound queue had no room for this RPC: it was not sent."""
        self._counters["dropped_rpcs"] += 1
        self._counters["dropped_messages"] += len(rpc.publish)
        for item in rpc.control.iwant:
            for raw in item.messageIDs:
                self._promises.forget(canonical_id(raw), peer)  # what was not asked for, nobody failed to bring

    def heartbeat(self, now: float) -> list[Send]:
        """Once in `RouterOptions.heartbeat` seconds: scores, promises, meshes, fanout, gossip, forgetting."""
        options = self._options
        self._ticks += 1
        elapsed = 0.0 if self._ticked is None else max(0.0, now - self._ticked)
        self._ticked = now
        for peer, count in self._promises.broken(now).items():
            self._counters["broken_promise"] += count
            # once a heartbeat, however many ids: one lost answer may have held thousands
            self._peers[peer].score.penalize()
        for state in self._peers.values():
            state.ihaves = state.asked = state.iwants = state.iwant_bytes = state.donts = state.graft_penalties = 0
            state.subscriptions = max(0, state.subscriptions - options.subscriptions_more)
            if state.dont:
                state.dont = {key: until for key, until in state.dont.items() if until > self._ticks}
            state.score.tick(elapsed, state.meshes > 0)
        self._seen.expire(now)
        # in step with a peer's own clock: to graft in the very second the back-off ends would often be too early
        self._backoffs.expire(now - 2 * options.heartbeat)
        self._retained.expire(now)

        out: dict[PeerID, ControlMessage] = {}
        for topic, mesh in self._mesh.items():
            self._keep_mesh(topic, mesh, out, now)
        for topic in [topic for topic, fanout in self._fanout.items() if now - fanout.published > options.fanout_ttl]:
            del self._fanout[topic]
        for topic, fanout in self._fanout.items():
            self._keep_fanout(topic, fanout)
        sends: list[Send] = []
        for peer, control in out.items():
            self._send(sends, self._peers[peer], RPC(control=control), priority=True)
        gossip: dict[PeerID, ControlMessage] = {}
        for topic, mesh in self._mesh.items():
            self._gossip(topic, mesh, gossip)
        for topic, fanout in self._fanout.items():
            self._gossip(topic, fanout.peers, gossip)
        for peer, control in gossip.items():
            self._send(sends, self._peers[peer], RPC(control=control), priority=False)
        self._cache.shift()
        return sends

    # ---------------------------------------------------------------- the two doors of the topic table

    def _topic_of(self, peer: PeerState, item: Item) -> str | None:
        """The topic that an item of a peer's RPC is about; None where it has no name, or one that is not UTF-8, or an
        index that does not resolve.

        A name always wins: an index beside it is not looked at (SubOpts field 3 is also `requestsPartial`).
        """
        return self._table.topic_of(peer.peer, item) or None

    def _for_peer(self, peer: PeerState, rpc: RPC) -> RPC:
        """The RPC as this peer is to get it; `rpc` itself may be going to others, too, and is never changed."""
        return self._table.for_peer(peer.peer, rpc)

    def _take_hello(self, state: PeerState, extensions: ControlExtensions) -> None:
        """Extensions that a peer offers: they count in its first RPC only. The topic table is `TableSide.received`'s;
        which are unknown is ignored, testExtension asks for nothing (gossipsub-v1.3.md, Extensions Control Message)."""
        if not state.silent:
            self._counters["extensions_repeated"] += 1
        elif state.version >= EXTENSIONS_VERSION:
            self._counters["extensions"] += 1

    # ---------------------------------------------------------------- what comes in

    def _take_subscriptions(
        self, state: PeerState, subscriptions: Sequence[RPC.SubOpts], sends: list[Send], now: float
    ) -> None:
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
            topic = self._topic_of(state, item)
            if topic is None or len(topic) > options.max_topic_bytes:
                self._counters["bad_topic"] += 1
                continue
            mesh = self._mesh.get(topic)
            if not item.subscribe:
                if topic in state.topics:
                    self._unsubscribed(state, topic)
            elif self._subscribed(state, topic) and mesh is not None and len(mesh) < options.D_low:
                graft.append(topic)
        rpc = RPC()
        for topic in graft:
            mesh = self._mesh[topic]
            if self._may_graft(topic, state, mesh, now) and self._half_discovered([state], mesh):
                self._enter(mesh, state)
                rpc.control.graft.add(topicID=topic)
        if rpc.HasField("control"):
            self._send(sends, state, rpc, priority=True)

    def _subscribed(self, state: PeerState, topic: str) -> bool:
        """Note a subscription; False if it is known already or over the limit."""
        if topic in state.topics:
            return False
        if topic not in self._mesh:
            if state.foreign >= self._options.max_topics_per_peer:
                self._counters["topics_over_limit"] += 1
                return False
            state.foreign += 1
        state.topics[topic] = None
        self._subscribers.setdefault(topic, {})[state.peer] = state
        return True

    def _unsubscribed(self, state: PeerState, topic: str) -> None:
        del state.topics[topic]
        self._unlist(topic, state.peer)
        mesh = self._mesh.get(topic)
        if mesh is None:
            state.foreign -= 1
            if (fanout := self._fanout.get(topic)) is not None:
                fanout.peers.pop(state.peer, None)
        elif mesh.pop(state.peer, None) is not None:
            state.meshes -= 1

    def _take_messages(
        self, state: PeerState, publish: Sequence[Message], sends: list[Send], delivered: list[Deliver], now: float
    ) -> bytes:
        counters = self._counters
        joined = self._mesh
        seen = self._seen
        named = self._table.named  # from here on no message has an index: it is of one connection's table
        verdicts, cost = bytearray(len(publish)), 0
        fresh: list[tuple[Message, str, bytes]] = []
        too_large: list[tuple[Message, str, bytes]] = []
        for index, wired in enumerate(publish):
            if cost >= MAX_RPC_COST:
                # the rest stays "not checked": signatures that are slow to check must not buy our time
                counters["messages_over_cost"] += len(publish) - index
                state.score.penalize(self._options.over_limit_penalty)
                break
            topic = self._topic_of(state, wired)
            if topic is None or topic not in joined:
                counters["unknown_topic"] += 1
                continue
            message = named(wired, topic)
            cost += id_cost(message)
            key = gossip_id(message)
            data = message.SerializeToString()
            can_relay = self._options.rpc_limits.accept(len(data), len(message.data))
            if not can_relay:
                counters["message_too_large"] += 1
                state.score.penalize()
            known = seen.get(key)
            if known is not None and mark(data, known & 7) == known:
                verdicts[index] = known & 7
                counters["own_message" if getattr(message, "from") in self._own else "duplicate"] += 1
                continue
            judgement = self._verify(message)
            verdicts[index] = verdict = judgement.verdict
            cost += judgement.cost
            if verdict not in _ACCEPTED:
                self._refuse(state, judgement)
                if state.score.value < self._options.score.graylist_threshold:
                    # the rest stays "not checked": garbage must not buy our time
                    counters["graylisted"] += 1
                    break
                continue
            if known is not None:
                counters["duplicate"] += 1  # the same message in other bytes
                continue
            if not can_relay and verdict == Verdict.UNSIGNED:
                # anybody can pad an unsigned message, whose id is that of its data: the copy that fits is still wanted
                delivered.append(Deliver(message, topic, state.peer))
                continue
            seen.add(key, mark(data, verdict), now)
            if getattr(message, "from") in self._own:
                counters["own_message"] += 1  # from before a restart
                continue
            self._promises.keep(key)
            counters["delivered"] += 1
            delivered.append(Deliver(message, topic, state.peer))
            if not can_relay:
                too_large.append((message, topic, key))
                continue
            self._cache.put(key, topic, data)
            state.score.deliver()
            fresh.append((message, topic, key))
        if too_large:
            self._dont_want(state, too_large, sends)  # who has it, too, need not pay for sending it
        if fresh:
            self._dont_want(state, fresh, sends)
            self._forward(state, fresh, sends)
        return bytes(verdicts)

    def _refuse(self, state: PeerState, judgement: Judgement) -> None:
        if judgement.verdict == Verdict.NOT_CHECKED:
            self._counters["not_checked"] += 1
            return
        self._counters["bad_signature" if judgement.verdict == Verdict.BAD else "against_policy"] += 1
        state.score.reject()
        if judgement.reason == KEY_ALGORITHM:
            self._counters[KEY_ALGORITHM] += 1
            state.score.penalize(self._options.key_algorithm_penalty)

    def _dont_want(self, source: PeerState, fresh: list[tuple[Message, str, bytes]], sends: list[Send]) -> None:
        wanted_not: dict[PeerID, list[bytes]] = {}
        for message, topic, key in fresh:
            if len(message.data) < self._options.idontwant_threshold:
                continue
            for peer, state in self._mesh[topic].items():
                if state is not source and state.version >= IDONTWANT_VERSION:
                    wanted_not.setdefault(peer, []).append(state.spell(key) if state.spell else key)
        for peer, keys in wanted_not.items():
            rpc = RPC()
            rpc.control.idontwant.add(messageIDs=keys)
            self._send(sends, self._peers[peer], rpc, priority=True)
            self._counters["idontwant_sent"] += len(keys)

    def _forward(self, source: PeerState, fresh: list[tuple[Message, str, bytes]], sends: list[Send]) -> None:
        if len(fresh) == 1:  # nearly always
            message, topic, key = fresh[0]
            author = getattr(message, "from")
            rpc = RPC()
            rpc.publish.append(message)
            for peer, state in self._mesh_and_floodsub(topic).items():
                if state is source or peer == author:
                    continue
                if key in state.dont:
                    self._counters["idontwant_honoured"] += 1
                    continue
                sends.append(Send(peer, self._for_peer(state, rpc), False))
                self._counters["forwarded"] += 1
            return
        chosen: dict[PeerID, list[int]] = {}
        for index, (message, topic, key) in enumerate(fresh):
            author = getattr(message, "from")
            for peer, state in self._mesh_and_floodsub(topic).items():
                if state is source or peer == author:
                    continue
                if key in state.dont:
                    self._counters["idontwant_honoured"] += 1
                    continue
                chosen.setdefault(peer, []).append(index)
        made: dict[tuple[int, ...], list[RPC]] = {}
        for peer, indexes in chosen.items():
            parts = made.get(tuple(indexes))
            if parts is None:
                rpc = RPC()
                rpc.publish.extend([fresh[index][0] for index in indexes])
                parts = made[tuple(indexes)] = self._split(rpc)
            state = self._peers[peer]
            sends.extend([Send(peer, self._for_peer(state, part), False) for part in parts])
            self._counters["forwarded"] += len(indexes)

    def _mesh_and_floodsub(self, topic: str) -> dict[PeerID, PeerState]:
        mesh = self._mesh[topic]
        return mesh | self._floodsub_on(topic) if self._floodsub else mesh

    def _floodsub_on(self, topic: str) -> dict[PeerID, PeerState]:
        threshold = self._options.score.publish_threshold
        return {
            peer: state
            for peer, state in self._subscribers.get(topic, {}).items()
            if not state.version and state.score.value >= threshold
        }

    def _own_targets(self, topic: str, now: float) -> list[PeerState]:
        options = self._options
        threshold = options.score.publish_threshold
        pool = [state for state in self._subscribers.get(topic, {}).values() if state.score.value >= threshold]
        mesh = self._mesh.get(topic)
        if mesh is None:
            # kept when flooding, too: its peers are the ones that are told by IHAVE
            fanout = self._fanout.setdefault(topic, Fanout({}, now))
            fanout.published = now
            self._keep_fanout(topic, fanout)
            mesh = fanout.peers
        if options.flood_publish:
            return list(mesh.values()) + [state for state in pool if state.peer not in mesh]
        targets = list(mesh.values()) + [state for state in pool if not state.version and state.peer not in mesh]
        others = [state for state in pool if state.version and state.peer not in mesh]
        return targets + self._sample(others, options.D - len(mesh))

    # ---------------------------------------------------------------- control messages

    def _take_control(self, state: PeerState, control: ControlMessage, sends: list[Send], now: float) -> None:
        state.looks = self._options.max_ids_per_rpc
        if control.ihave:
            self._take_ihave(state, control, sends, now)
        if control.iwant:
            self._take_iwant(state, control, sends)
        if control.graft:
            self._take_graft(state, control, sends, now)
        if control.prune:
            self._take_prune(state, control, now)
        if control.idontwant:
            self._take_idontwant(state, control)

    def _over_control_limit(self, state: PeerState, count: int) -> int:
        limit = self._options.max_control_per_rpc
        if count > limit:
            self._counters["control_over_limit"] += count - limit
            state.score.penalize(self._options.over_limit_penalty)
        return limit

    def _ids(self, state: PeerState, raws: Iterable[bytes]) -> Iterable[tuple[bytes, bytes]]:
        """(id as sent, id as we call it); overlong ones are left out."""
        for raw in raws:
            if state.looks < 0:
                return
            if len(raw) > self._options.max_id_bytes:
                self._counters["id_too_long"] += 1
                continue
            if is_key_form(raw):
                state.spell = key_form
            elif is_text_form(raw):
                state.spell, state.looks = text_form, state.looks - _TEXT_LOOKS
            yield raw, canonical_id(raw)

    def _take_ihave(self, state: PeerState, control: ControlMessage, sends: list[Send], now: float) -> None:
        options = self._options
        if state.score.value < options.score.gossip_threshold:
            self._counters["ihave_low_score"] += 1
            return
        state.ihaves += 1
        if state.ihaves > options.max_ihave_messages:
            self._counters["ihave_flood"] += 1
            return
        wanted: dict[bytes, bytes] = {}
        room = options.max_ihave_length - state.asked
        for item in control.ihave[: self._over_control_limit(state, len(control.ihave))]:
            topic = self._topic_of(state, item)
            if topic is None or topic not in self._mesh:
                self._counters["ihave_unknown_topic"] += 1
                continue
            ids: Sequence[bytes] = item.messageIDs
            most = min(options.max_ihave_length, state.looks)
            if len(ids) > most:
                self._counters["ihave_over_limit"] += len(ids) - most
                ids = ids[:most]
            state.looks -= len(ids)
            for raw, key in self._ids(state, ids):
                if key in self._seen or key in wanted or self._promises.holds(key, state.peer):
                    continue
                if len(wanted) >= room:
                    self._counters["ihave_over_limit"] += 1
                    continue
                wanted[key] = raw
        if not wanted:
            return
        state.asked += len(wanted)
        self._counters["iwant_sent"] += len(wanted)
        until = now + options.iwant_followup
        for key in wanted:
            self._promises.add(key, state.peer, until)
        rpc = RPC()
        rpc.control.iwant.add(messageIDs=wanted.values())
        self._send(sends, state, rpc, priority=False)

    def _take_iwant(self, state: PeerState, control: ControlMessage, sends: list[Send]) -> None:
        options = self._options
        if state.score.value < options.score.gossip_threshold:
            self._counters["iwant_low_score"] += 1
            return
        answer = RPC()
        for item in control.iwant[: self._over_control_limit(state, len(control.iwant))]:
            ids = item.messageIDs[: state.looks]
            state.looks -= len(ids)
            self._counters["iwant_over_limit"] += len(item.messageIDs) - len(ids)
            for _, key in self._ids(state, ids):
                if state.iwants >= options.max_iwant_length or state.iwant_bytes >= options.max_iwant_bytes:
                    self._counters["iwant_over_limit"] += 1
                    continue
                state.iwants += 1
                cached = self._cache.get(key)
                if cached is None:
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

    def _take_graft(self, state: PeerState, control: ControlMessage, sends: list[Send], now: float) -> None:
        options = self._options
        refused: dict[str, None] = {}
        for item in control.graft[: self._over_control_limit(state, len(control.graft))]:
            topic = self._topic_of(state, item)
            mesh = None if topic is None else self._mesh.get(topic)
            if topic is None or mesh is None:
                self._counters["graft_unknown_topic"] += 1  # no PRUNE back: that would be an echo for spammers
                continue
            if state.peer in mesh:
                continue
            until, since = self._backoffs.get(topic, state.peer)
            if now < until:
                self._counters["graft_backoff"] += 1
                self._penalize_graft(state, 2 if now < since + options.graft_flood else 1)
            elif state.score.value < 0:
                self._counters["graft_low_score"] += 1
            elif len(mesh) >= options.D_high and not state.outbound:
                self._counters["graft_mesh_full"] += 1  # else anybody could take over our mesh by dialling
            elif not self._half_discovered([state], mesh):
                self._counters["graft_discovered_full"] += 1
            else:
                self._subscribed(state, topic)  # who grafts us is on the topic
                self._enter(mesh, state)
                continue
            refused[topic] = None
        if refused:
            rpc = RPC()
            for topic in refused:
                self._add_prune(rpc.control, state, topic, options.prune_backoff, now)
            self._send(sends, state, rpc, priority=True)

    def _penalize_graft(self, state: PeerState, count: int) -> None:
        count = min(count, self._options.max_graft_penalties - state.graft_penalties)
        if count > 0:
            state.graft_penalties += count
            state.score.penalize(count)

    def _take_prune(self, state: PeerState, control: ControlMessage, now: float) -> None:
        options = self._options
        for item in control.prune[: self._over_control_limit(state, len(control.prune))]:
            topic = self._topic_of(state, item)
            mesh = None if topic is None else self._mesh.get(topic)
            if topic is None or mesh is None:
                self._counters["prune_unknown_topic"] += 1
                continue
            self._counters["pruned_by_peer"] += 1
            if mesh.pop(state.peer, None) is not None:
                state.meshes -= 1
            seconds = float(item.backoff) or options.prune_backoff
            self._backoffs.add(topic, state.peer, min(seconds, options.max_backoff), now)
            if item.peers:
                self._counters["px_ignored"] += 1

    def _take_idontwant(self, state: PeerState, control: ControlMessage) -> None:
        options = self._options
        if state.version < IDONTWANT_VERSION:
            self._counters["idontwant_wrong_version"] += 1
            return
        until = self._ticks + options.idontwant_ttl
        for item in control.idontwant[: self._over_control_limit(state, len(control.idontwant))]:
            ids = item.messageIDs[: state.looks]
            state.looks -= len(ids)
            self._counters["idontwant_over_limit"] += len(item.messageIDs) - len(ids)
            for _, key in self._ids(state, ids):
                if state.donts >= options.max_idontwant_length:
                    self._counters["idontwant_over_limit"] += 1
                    continue
                state.donts += 1
                state.dont[key] = until

    # ---------------------------------------------------------------- upkeep

    def _keep_mesh(
        self, topic: str, mesh: dict[PeerID, PeerState], out: dict[PeerID, ControlMessage], now: float
    ) -> None:
        options = self._options
        for state in [state for state in mesh.values() if state.score.value < 0]:
            self._prune(topic, mesh, state, out, now)
        if len(mesh) < options.D_low:
            pool = self._graftable(topic, mesh, now)
            self._graft(topic, mesh, self._sample(pool, options.D - len(mesh)), out)
        if len(mesh) > options.D_high:
            keep = worth_keeping(mesh, options, self._rng)
            for state in [state for peer, state in mesh.items() if peer not in keep]:
                self._prune(topic, mesh, state, out, now)
        if len(mesh) >= options.D_low:
            missing = options.D_out - sum(state.outbound for state in mesh.values())
            if missing > 0:
                pool = [state for state in self._graftable(topic, mesh, now) if state.outbound]
                self._graft(topic, mesh, self._sample(pool, missing), out)
        if self._ticks % options.opportunistic_ticks == 0 and len(mesh) > 1:
            median = sorted(state.score.value for state in mesh.values())[len(mesh) // 2]
            if median < options.score.opportunistic_threshold:
                pool = [state for state in self._graftable(topic, mesh, now) if state.score.value > median]
                chosen = self._sample(pool, options.opportunistic_peers)
                self._counters["opportunistic_graft"] += len(chosen)
                self._graft(topic, mesh, chosen, out)

    def _keep_fanout(self, topic: str, fanout: Fanout) -> None:
        threshold = self._options.score.publish_threshold
        for peer in [peer for peer, state in fanout.peers.items() if state.score.value < threshold]:
            del fanout.peers[peer]
        pool = [
            state
            for peer, state in self._subscribers.get(topic, {}).items()
            if state.version and peer not in fanout.peers and state.score.value >= threshold
        ]
        for state in self._sample(pool, self._options.D - len(fanout.peers)):
            fanout.peers[state.peer] = state

    def _gossip(self, topic: str, exclude: Mapping[PeerID, PeerState], out: dict[PeerID, ControlMessage]) -> None:
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
            told = self._rng.sample(keys, min(len(keys), options.max_ihave_length))
            if state.spell:
                told = [state.spell(key) for key in told]
            out.setdefault(state.peer, ControlMessage()).ihave.add(topicID=topic, messageIDs=told)
            self._counters["ihave_sent"] += len(told)

    def _may_graft(self, topic: str, state: PeerState, mesh: Mapping[PeerID, PeerState], now: float) -> bool:
        # an entry is held a little longer than the back-off, see heartbeat: mere presence counts here
        return (
            state.version > 0
            and state.peer not in mesh
            and state.score.value >= 0
            and (topic, state.peer) not in self._backoffs
        )

    def _graftable(self, topic: str, mesh: Mapping[PeerID, PeerState], now: float) -> list[PeerState]:
        subscribers = self._subscribers.get(topic, {})
        pool = [state for state in subscribers.values() if self._may_graft(topic, state, mesh, now)]
        return self._half_discovered(pool, mesh)

    def _half_discovered(self, pool: list[PeerState], mesh: Mapping[PeerID, PeerState]) -> list[PeerState]:
        """The pool without those discovered peers for which a mesh has no room: they could all be one attacker's."""
        discovered = [state for state in pool if state.discovered]
        if not discovered:
            return pool
        room = self._options.D // 2 - sum(state.discovered for state in mesh.values())
        return [state for state in pool if not state.discovered] + self._sample(discovered, room)

    def _enter(self, mesh: dict[PeerID, PeerState], state: PeerState) -> None:
        mesh[state.peer] = state
        state.meshes += 1

    def _graft(
        self, topic: str, mesh: dict[PeerID, PeerState], chosen: list[PeerState], out: dict[PeerID, ControlMessage]
    ) -> None:
        for state in chosen:
            self._enter(mesh, state)
            out.setdefault(state.peer, ControlMessage()).graft.add(topicID=topic)

    def _prune(
        self, topic: str, mesh: dict[PeerID, PeerState], state: PeerState, out: dict[PeerID, ControlMessage], now: float
    ) -> None:
        del mesh[state.peer]
        state.meshes -= 1
        control = out.setdefault(state.peer, ControlMessage())
        self._add_prune(control, state, topic, self._options.prune_backoff, now)

    def _add_prune(self, control: ControlMessage, state: PeerState, topic: str, seconds: float, now: float) -> None:
        """A PRUNE with its seconds, where the peer's version has them; the back-off holds for us just as well."""
        self._counters["prune_sent"] += 1
        self._backoffs.add(topic, state.peer, seconds, now)
        prune = control.prune.add(topicID=topic)
        if state.version >= BACKOFF_VERSION:
            prune.backoff = math.ceil(seconds)

    def _unlist(self, topic: str, peer: PeerID) -> None:
        subscribers = self._subscribers[topic]
        del subscribers[peer]
        if not subscribers:
            del self._subscribers[topic]

    def _sample(self, pool: list[PeerState], count: int) -> list[PeerState]:
        return self._rng.sample(pool, min(len(pool), count)) if count > 0 else []

    def _send(self, sends: list[Send], state: PeerState, rpc: RPC, priority: bool) -> None:
        sends.extend([Send(state.peer, self._for_peer(state, part), priority) for part in self._split(rpc)])

    def _split(self, rpc: RPC) -> list[RPC]:
        parts = split(rpc, self._options.rpc_limits)
        self._counters["left_out"] += parts.left_out
        return parts.rpcs
