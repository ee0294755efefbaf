"""Selection of the gossip peers that speak bitswap, so that the IPFS node stays connected to them."""

from __future__ import annotations

from collections.abc import Mapping

from kiln.bridge.gossipsub.effects import PeerView
from kiln.bridge.ipfs.neighbours import BITSWAP, BitswapPeer
from kiln.bridge.libp2p.host import Node
from kiln.bridge.libp2p.kademlia import AddressScope, address_scope, trusted_contact
from kiln.schemas.wire.identity import peer_text


def select_bitswap_peers(node: Node, peers: Mapping[bytes, PeerView]) -> list[BitswapPeer]:
    """Select the peers that speak bitswap and have a score of at least 0, with their trustworthy TCP addresses.

    Args:
        peers: All gossip peers, the oldest first.

    Returns:
        First the peers that the node dialled, then the others, each in the order of `peers`.
    """
    peers_speaking = dict(node.peers_speaking(*BITSWAP))
    selected: list[BitswapPeer] = []
    for peer, view in sorted(peers.items(), key=lambda entry: not entry[1].outbound):
        if peer not in peers_speaking or view.score < 0:
            continue
        remote = node.remote_address(peer)
        scope = address_scope(remote[0]) if remote is not None else None
        contact = trusted_contact(peer, peers_speaking[peer], AddressScope.WORLD if scope is None else scope)
        if contact.addresses:
            selected.append(BitswapPeer(peer_text(peer), tuple(address.text for address in contact.addresses)))
    return selected
