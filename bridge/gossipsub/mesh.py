"""Selection of the peers that stay in an overfull mesh."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from kiln.bridge.gossipsub.effects import PeerID
from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.peers import PeerState


def select_mesh_peers(mesh: Mapping[PeerID, PeerState], options: RouterOptions, rng: Random) -> dict[PeerID, None]:
    """Select D peers of an overfull mesh: the D_score best, the rest at random, at least D_out of them outbound."""
    order = list(mesh.values())
    rng.shuffle(order)
    order.sort(key=lambda state: -state.score.value)
    rest = order[options.D_score :]
    rng.shuffle(rest)
    order[options.D_score :] = rest
    chosen, others = order[: options.D], order[options.D :]
    missing = options.D_out - sum(state.outbound for state in chosen)
    outbound = [state for state in others if state.outbound][: max(0, missing)]
    for state in outbound:
        # from the end, because the best come first
        worst = next(index for index in reversed(range(len(chosen))) if not chosen[index].outbound)
        chosen[worst] = state
    return dict.fromkeys(state.peer for state in chosen)
