"""Gossip peers that speak bitswap: the IPFS node stays connected to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kiln.bridge.gossipsub.effects import PeerView
from kiln.bridge.ipfs.neighbours import BITSWAP, BitswapPeer
from kiln.bridge.libp2p.kademlia import AddressScope, address_scope, trusted_contact
from kiln.schemas.wire.identity import peer_text


class PeerConnector(Protocol):
    """The used part of the node."""

    def peers_speaking(self, *protocols: str) -> list[tuple[bytes, list[bytes]]]: ...
    def remote_address(self, peer: bytes) -> tuple[str, int] | None: ...


def bitswap_peers(node: PeerConnector, peers: Mapping[bytes, PeerView]) -> list[BitswapPeer]:
    """Those in good standing, with the addresses of TCP that they name and that one may believe from where they are.

    First those that the node dialled, then by age. `peers`: all gossip peers.
    """
    peers_speaking = dict(node.peers_speaking(*BITSWAP))
    found: list[BitswapPeer] = []
    for peer, view in sorted(peers.items(), key=lambda each: not each[1].outbound):
        if peer not in peers_speaking or view.score < 0:
            continue
        remote = node.remote_address(peer)
        away = address_scope(remote[0]) if remote is not None else None
        contact = trusted_contact(peer, peers_speaking[peer], AddressScope.WORLD if away is None else away)
        if contact.addresses:
            found.append(BitswapPeer(peer_text(peer), tuple(address.text for address in contact.addresses)))
    return found
