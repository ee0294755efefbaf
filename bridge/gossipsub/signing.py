"""Inference from the messages of peers: which peers accept messages with a signature, and which without.

Gossipsub has no message for a rejection. Most peers either sign all messages and reject unsigned ones, or sign none
and reject signed ones (libp2p specs, pubsub/README.md, Signature policy options). They disconnect a peer that sends
messages which they reject. So a signed message is withheld from a peer that has sent only unsigned messages on a topic,
and an unsigned message from a peer that has sent only signed messages. On a topic that accepts both kinds, a PRUNE
counts as a rejection of signed messages, because a signed message may be its cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kiln.bridge.gossipsub.effects import PolicyConflict
from kiln.schemas.wire.identity import MISSING_SIGNATURE, UNEXPECTED_AUTH, Judgement
from kiln.schemas.wire.signing_policy import Policy

_USUAL: Final[Mapping[Policy, bool | None]] = {"strict": True, "none": False, "either": None}
_SIGNED: Final = 1
_UNSIGNED: Final = 2
_PRUNED: Final = 4


@dataclass(slots=True, eq=False)
class PeerSigning:
    """Kinds of messages that one peer sent.

    Attributes:
        sent: Kinds of messages as bits, by topic; a topic is missing if all messages on it follow the policy.
    """

    sent: dict[str, int] = field(default_factory=dict)
    refused: dict[str, None] = field(default_factory=dict)  # topics on which the peer sent messages against the policy
    is_kiln: bool = False  # true for a Kiln, which captures messages against its policy and lowers no score for them

    def record_graft(self, topic: str) -> None:
        """Record that the peer wants the node's messages."""
        if topic in self.sent:
            self.sent[topic] &= ~_PRUNED

    def accepts(self, topic: str, signed: bool) -> bool:
        """Return whether the peer seems to accept messages with a signature, or without one, on a topic."""
        return self.is_kiln or not _rejects(self.sent.get(topic, 0), signed)


class TopicSigning:
    """The policies of the joined topics."""

    def __init__(self, policy_of: Callable[[str], Policy]) -> None:
        self._policy_of = policy_of
        self._usual: dict[str, bool | None] = {}  # True: all messages are signed, False: none, None: some

    def join(self, topic: str) -> None:
        self._usual[topic] = _USUAL[self._policy_of(topic)]

    def leave(self, topic: str, peers: Iterable[PeerSigning]) -> None:
        del self._usual[topic]
        for peer in peers:
            peer.sent.pop(topic, None)
            peer.refused.pop(topic, None)

    def record_message(self, peer: PeerSigning, topic: str, signed: bool) -> None:
        """Record a message on a joined topic, good or not."""
        if signed is not self._usual[topic] or (peer.sent and topic in peer.sent):
            peer.sent[topic] = peer.sent.get(topic, 0) | (_SIGNED if signed else _UNSIGNED)

    def record_prune(self, peer: PeerSigning, topic: str) -> None:
        """Record that a peer in the mesh pruned the node."""
        if self._usual[topic] is None:
            peer.sent[topic] = peer.sent.get(topic, 0) | _PRUNED

    def is_other_policy(self, peer: PeerSigning, topic: str, judgement: Judgement) -> bool:
        """Return whether a message is rejected only because the peer has another policy. That is no attack."""
        if judgement.reason not in (MISSING_SIGNATURE, UNEXPECTED_AUTH):
            return False
        peer.refused[topic] = None
        return True

    def list_conflicts(self, peers: Iterable[PeerSigning]) -> list[PolicyConflict]:
        """List the conflicts of signature policies between the node and connected peers."""
        conflicts: set[PolicyConflict] = set()
        for peer in peers:
            conflicts.update(PolicyConflict(topic, self._usual[topic] is False, False) for topic in peer.refused)
            for topic, sent in peer.sent.items():
                if self._usual[topic] is None and not peer.is_kiln:
                    conflicts.update(
                        PolicyConflict(topic, is_signed, True)
                        for is_signed in (True, False)
                        if _rejects(sent, is_signed)
                    )
        return sorted(conflicts)


def _rejects(sent: int, signed: bool) -> bool:
    if signed:
        return bool(sent & (_UNSIGNED | _PRUNED)) and not sent & _SIGNED
    return sent & (_SIGNED | _UNSIGNED) == _SIGNED
