"""Inference of a peer's signature policy from its messages.

A peer does not announce its policy. Most peers either sign all messages and reject unsigned ones, or sign none and
reject signed ones (libp2p specs, pubsub/README.md, Signature policy options). They disconnect a sender of messages that
they reject. So the node sends no signed message to a peer that has sent only unsigned messages on the topic, and no
unsigned message to a peer that has sent only signed ones. If the node's own policy for the topic is `either`, a PRUNE
also counts as a rejection of signed messages, because a signed message may be its cause.
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
    """Kinds of messages (signed or unsigned) that one peer has sent.

    Attributes:
        sent: Kinds as bits, by topic. A topic is missing if the peer has sent nothing on it, or only messages of the
            kind that the node's policy requires.
    """

    sent: dict[str, int] = field(default_factory=dict)
    refused: dict[str, None] = field(default_factory=dict)  # topics on which the node rejected messages of the peer
    is_kiln: bool = False  # true for a Kiln node, which does not penalize messages that its policy rejects

    def record_graft(self, topic: str) -> None:
        """Clear a recorded PRUNE: a peer that grafts the node wants its messages."""
        if topic in self.sent:
            self.sent[topic] &= ~_PRUNED

    def accepts(self, topic: str, signed: bool) -> bool:
        """Return true if the peer seems to accept signed messages on a topic, or unsigned ones if `signed` is false."""
        return self.is_kiln or not _rejects(self.sent.get(topic, 0), signed)


class TopicSigning:
    """Signature policies of the joined topics, to compare with the messages of peers."""

    def __init__(self, policy_of: Callable[[str], Policy]) -> None:
        self._policy_of = policy_of
        # True: the policy requires a signature, False: forbids it, None: allows both
        self._usual: dict[str, bool | None] = {}

    def join(self, topic: str) -> None:
        self._usual[topic] = _USUAL[self._policy_of(topic)]

    def leave(self, topic: str, peers: Iterable[PeerSigning]) -> None:
        del self._usual[topic]
        for peer in peers:
            peer.sent.pop(topic, None)
            peer.refused.pop(topic, None)

    def record_message(self, peer: PeerSigning, topic: str, signed: bool) -> None:
        """Record the kind of a received message on a joined topic, before the message is verified."""
        if signed is not self._usual[topic] or (peer.sent and topic in peer.sent):
            peer.sent[topic] = peer.sent.get(topic, 0) | (_SIGNED if signed else _UNSIGNED)

    def record_prune(self, peer: PeerSigning, topic: str) -> None:
        """Record a PRUNE of a peer in the mesh. It counts only under the policy `either`."""
        if self._usual[topic] is None:
            peer.sent[topic] = peer.sent.get(topic, 0) | _PRUNED

    def is_other_policy(self, peer: PeerSigning, topic: str, judgement: Judgement) -> bool:
        """Return true if a message is rejected only because the peer has another policy, and record the topic.

        Such a peer is no attacker and is not penalized.
        """
        if judgement.reason not in (MISSING_SIGNATURE, UNEXPECTED_AUTH):
            return False
        peer.refused[topic] = None
        return True

    def list_conflicts(self, peers: Iterable[PeerSigning]) -> list[PolicyConflict]:
        """List the topics on which the node and one of these peers have different signature policies."""
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
