"""Which peers of a mesh stay in it."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from kiln.bridge.gossipsub.effects import PeerID
from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.peers import PeerState


def worth_keeping(mesh: Mapping[PeerID, PeerState], options: RouterOptions, rng: Random) -> dict[PeerID, None]:
    """D peers of an overfull mesh: the D_score best, the rest by chance, at least D_out of them outbound."""
    order = list(mesh.values())
    rng.shuffle(order)
    order.sort(key=lambda state: -state.score.value)
    rest = order[options.D_score :]
    rng.shuffle(rest)
    order[options.D_score :] = rest
    kept, others = order[: options.D], order[options.D :]
    missing = options.D_out - sum(state.outbound for state in kept)
    spare = [state for state in others if state.outbound][: max(0, missing)]
    for state in spare:
        # from the end: the best come first
        worst = next(place for place in reversed(range(len(kept))) if not kept[place].outbound)
        kept[worst] = state
    return dict.fromkeys(state.peer for state in kept)
