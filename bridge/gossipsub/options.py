"""The router's parameters, by their names in the gossipsub specifications."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kiln.bridge.gossipsub.protocols import VERSIONS
from kiln.bridge.gossipsub.rpc_parts import RpcLimits
from kiln.bridge.gossipsub.score import ScoreOptions
from kiln.schemas.kafka.frames import MAX_MESSAGES
from kiln.schemas.wire.message_id import MessageIdRule
from kiln.schemas.wire.signing_policy import Policy, match_policy
from kiln.schemas.wire.topics import MAX_NAME


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Parameters of the router.

    Times are in seconds and sizes in bytes. A limit "per heartbeat" applies to each peer separately.
    """

    D: int = 6
    D_low: int = 5
    D_high: int = 12
    D_lazy: int = 6
    D_out: int = 2
    D_score: int = 4
    heartbeat: float = 1.0  # interval of the caller's calls of heartbeat()
    prune_backoff: float = 60.0
    unsubscribe_backoff: float = 10.0
    max_backoff: float = 86_400.0  # maximum back-off accepted from a peer's PRUNE
    max_backoffs: int = 100_000  # pairs of peer and topic in back-off; the oldest are evicted first
    graft_flood: float = 10.0  # a GRAFT within this time after the PRUNE is penalised twice
    max_graft_penalties: int = 10  # per heartbeat, so that one burst of GRAFTs does not graylist a peer
    opportunistic_ticks: int = 60  # heartbeats
    opportunistic_peers: int = 2

    mcache_len: int = 5  # heartbeats
    mcache_gossip: int = 3  # heartbeats
    mcache_bytes: int = 64 << 20
    gossip_factor: float = 0.25
    seen_horizon: float = 120.0
    seen_cap: int = 400_000  # ids

    max_ihave_messages: int = 10  # RPCs with IHAVE per heartbeat
    max_ihave_length: int = 5000  # ids in one IHAVE
    # ids requested per heartbeat: some peers answer in one RPC, and no more are verified of an RPC (MAX_RPC_COST)
    max_requested_ids: int = 2000
    iwant_followup: float = 3.0  # if a requested message has not arrived after this time, the peer has broken a promise
    gossip_retransmission: int = 3  # times that a message is sent to a peer that requests it by IWANT
    max_iwant_length: int = 5000  # ids answered per heartbeat
    max_iwant_bytes: int = 8 << 20  # of messages sent as answers per heartbeat
    idontwant_threshold: int = 1024  # minimum size of a message's data for IDONTWANT
    max_idontwant_length: int = 5000  # ids accepted per heartbeat
    idontwant_ttl: int = 3  # heartbeats
    max_id_bytes: int = 1024

    max_topics_per_peer: int = 2500  # in addition to the topics that the node has joined
    max_topic_length: int = MAX_NAME
    max_subscriptions_per_rpc: int = 5000
    subscriptions: int = 2500  # subscriptions and unsubscriptions that a peer may send at once
    subscriptions_per_heartbeat: int = 10  # that a peer may send in addition
    subscription_penalty: float = 0.005  # P7, for each subscription above these limits
    max_control_per_rpc: int = 5000  # items of one kind
    max_messages_per_rpc: int = MAX_MESSAGES
    max_ids_per_rpc: int = 20_000  # ids that are processed
    over_limit_penalty: float = 10.0  # P7, for an RPC over the limits of messages, CPU cost or control items
    # P7, for a key whose algorithm differs from its declared type. One such key graylists the peer, because it was made
    # to cost CPU.
    key_algorithm_penalty: float = 25.0
    rpc_limits: RpcLimits = field(default_factory=RpcLimits)  # for the RPCs that the router sends
    max_retained_scores: int = 10_000  # negative scores of disconnected peers
    retain_score: float = 3600.0

    policy: Policy = "strict"  # for topics that `topic_policies` does not match
    topic_policies: Mapping[str, Policy] = field(default_factory=dict)  # by pattern
    # ids of pubsub protocols, the preferred first, with their versions (`select_versions`)
    protocols: Mapping[str, int] = field(default_factory=lambda: VERSIONS)
    message_id: MessageIdRule = field(default_factory=MessageIdRule)
    max_message_bytes: int = 0  # largest data of a message that is forwarded; 0 for no limit
    authors: frozenset[bytes] = frozenset()  # peer ids that sign the node's own messages, besides the node's peer id
    score: ScoreOptions = field(default_factory=ScoreOptions)

    def policy_of(self, topic: str) -> Policy:
        """Return the signature policy of a topic: that of the matching pattern, else the default."""
        return match_policy(topic, self.topic_policies) or self.policy
