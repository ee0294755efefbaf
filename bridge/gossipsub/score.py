"""Peer scores (libp2p specs, pubsub/gossipsub/gossipsub-v1.1.md, Peer Scoring).

A peer has one score for all topics, because the topics that it serves say nothing about its conduct. P3 (message
delivery rate) and P5 (application score) are not used. P3 would penalize honest peers, because most topics are silent
most of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field


def decay_for_half_life(seconds: float) -> float:
    """Return the factor per second by which a counter decays to a half in `seconds` seconds."""
    factor: float = 0.5 ** (1 / seconds)
    return factor


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """Weights, thresholds, and decays (factors per second). The weights of the penalties P4, P6 and P7 are negative."""

    mesh_weight: float = 1 / 3600  # P1, per second in at least one mesh
    mesh_cap: float = 3600.0  # seconds
    first_weight: float = 0.5  # P2, per message that this peer delivered first
    first_cap: float = 100.0
    first_decay: float = decay_for_half_life(90)
    invalid_weight: float = -10.0  # P4, times the square of the number of invalid messages
    invalid_decay: float = decay_for_half_life(540)
    colocation_weight: float = -100.0  # P6, times the square of the excess of peers at one address over the threshold
    colocation_threshold: int = 10
    behaviour_weight: float = -10.0  # P7, times the square of the excess of penalties over the threshold
    behaviour_threshold: float = 6.0
    behaviour_decay: float = decay_for_half_life(540)
    decay_to_zero: float = 0.01  # a counter below this becomes 0

    gossip_threshold: float = -500.0  # below: no IHAVE to the peer, and its IHAVE and IWANT are ignored
    publish_threshold: float = -1000.0  # below: our own messages are not flooded to the peer
    graylist_threshold: float = -2500.0  # below: messages and control messages of the peer are ignored
    opportunistic_threshold: float = 1.0  # of the median score in a mesh; below: better peers are grafted


@dataclass(slots=True)
class Score:
    """Score of one peer (`value`) and the counters from which it is computed."""

    options: ScoreOptions
    mesh_seconds: float = 0.0
    first: float = 0.0
    invalid: float = 0.0
    behaviour: float = 0.0
    colocated: int = 0  # peers on the same address, this one included
    value: float = field(default=0.0, init=False)

    def deliver(self) -> None:
        """Count a valid message that the peer delivered first (P2). `value` includes it after the next `tick`."""
        if self.first < self.options.first_cap:
            self.first += 1.0

    def reject(self) -> None:
        """Count an invalid message (P4)."""
        self.invalid += 1.0
        self.compute()

    def penalize(self, count: float = 1.0) -> None:
        """Count one or more breaches of the protocol (P7)."""
        self.behaviour += count
        self.compute()

    def colocate(self, count: int) -> None:
        """Set the number of connected peers at the peer's address, this one included (P6)."""
        self.colocated = count
        self.compute()

    def tick(self, seconds: float, in_mesh: bool) -> None:
        """Let the counters decay over the last `seconds` seconds, and update the time that the peer has been in a mesh.

        Args:
            in_mesh: True if the peer is in at least one mesh. If false, its time in a mesh restarts at 0.
        """
        options = self.options
        self.mesh_seconds = min(self.mesh_seconds + seconds, options.mesh_cap) if in_mesh else 0.0
        self.first = self._decay(self.first, options.first_decay, seconds)
        self.invalid = self._decay(self.invalid, options.invalid_decay, seconds)
        self.behaviour = self._decay(self.behaviour, options.behaviour_decay, seconds)
        self.compute()

    def compute(self) -> float:
        """Update `value` from the counters, and return it."""
        options = self.options
        value = self.mesh_seconds * options.mesh_weight + self.first * options.first_weight
        if self.invalid:
            value += self.invalid * self.invalid * options.invalid_weight
        excess = self.behaviour - options.behaviour_threshold
        if excess > 0:
            value += excess * excess * options.behaviour_weight
        surplus = self.colocated - options.colocation_threshold
        if surplus > 0:
            value += surplus * surplus * options.colocation_weight
        self.value = value
        return value

    @property
    def value_without_colocation(self) -> float:
        """The score without P6 (IP colocation), since a peer is not responsible for other peers at its address."""
        surplus = self.colocated - self.options.colocation_threshold
        return self.value - (surplus * surplus * self.options.colocation_weight if surplus > 0 else 0.0)

    def _decay(self, counter: float, decay: float, seconds: float) -> float:
        if not counter:
            return 0.0
        decayed: float = counter * decay**seconds
        return decayed if decayed >= self.options.decay_to_zero else 0.0
