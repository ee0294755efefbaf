"""Dialling of peers, negotiation of streams, and error texts that name the reason of a failure and a remedy."""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Iterable, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Final

import trio
from libp2p.abc import INetConn, IPeerStore
from libp2p.custom_types import TProtocol
from libp2p.network.stream.net_stream import NetStream
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.transport.exceptions import MuxerUpgradeFailure, SecurityUpgradeFailure
from multiaddr import Multiaddr

from kiln.bridge.libp2p.closing import BROKEN, reset_stream

_FAMILIES: Final = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}


async def dial(swarm: Swarm, address: Multiaddr, peer: ID, seconds: float) -> str:
    """Connect to a peer at an address. Return "", or an error text with the address and the reason of the failure."""
    reason = ""
    try:
        with trio.fail_after(seconds):
            for resolved in await _resolve(address):
                try:
                    # not dial_peer: it dials one address from identify, and blocks a peer for 60 s after a failure
                    await swarm.dial_addr(resolved, peer)
                except BROKEN as failure:
                    reason = _describe_failure(failure, swarm.get_peer_id())
                else:
                    return ""
    except trio.TooSlowError:
        reason = f"no answer in {seconds:g} s. Check the address, the network and its firewalls."
    except OSError as failure:
        reason = _describe_failure(failure, swarm.get_peer_id())
    return f"{address}: {reason}"


async def negotiate(conn: INetConn, client: MultiselectClient, protocols: Iterable[str], seconds: float) -> NetStream:
    """Open a stream on a connection with the first of the protocols that the peer supports."""
    stream = await conn.new_stream()
    assert isinstance(stream, NetStream)
    async with AsyncExitStack() as half_open:  # reset on failure: a half-open stream takes memory of the peer, too
        half_open.push_async_callback(reset_stream, stream)
        protocol = await client.select_one_of(
            [TProtocol(name) for name in protocols], MultiselectCommunicator(stream), int(seconds)
        )
        half_open.pop_all()
    stream.set_protocol(protocol)
    return stream


def describe_missing_pubsub(store: IPeerStore, peer: ID, offered: Collection[str]) -> str:
    """Return the reason why a connected peer has no pubsub stream, and a remedy.

    Args:
        offered: The pubsub protocols that the node supports.
    """
    protocols: list[str] = []
    with suppress(PeerStoreError):  # identify has not completed
        protocols = store.get_protocols(peer)
    if not set(protocols).isdisjoint(offered):
        return "connected, but the peer accepts no pubsub stream, although it announces pubsub. See the peer's log."
    return (
        f"connected, but the peer does not speak pubsub: none of its {len(protocols)} protocols is "
        f"{' or '.join(offered)}. Enable pubsub on the peer (in Kubo: Pubsub.Enabled), or choose another peer."
    )


async def _resolve(address: Multiaddr) -> list[Multiaddr]:
    """Resolve the host name in a TCP multiaddr with the system's resolver, which also reads /etc/hosts.

    An address without a host name is returned unchanged.

    Raises:
        OSError: The host name cannot be resolved.
    """
    (kind, name), *rest = ((protocol.name, value) for protocol, value in address.items())
    if kind not in _FAMILIES:
        return [address]
    tail = "".join(f"/{protocol}/{value}" for protocol, value in rest)
    found = await trio.socket.getaddrinfo(name, None, _FAMILIES[kind], socket.SOCK_STREAM)
    ips = dict.fromkeys(str(info[4][0]) for info in found)
    return [Multiaddr(f"/{'ip6' if ':' in ip else 'ip4'}/{ip}{tail}") for ip in ips]


def _describe_failure(failure: BaseException, own: ID) -> str:
    causes = list(_walk_causes(failure))
    for cause in causes:
        if isinstance(cause, PeerIDMismatchesPubkey):
            found = re.search(r"remote_peer_id_from_pubkey=(\w+)", str(cause))
            peer = found[1] if found else "another peer"
            if peer == str(own):
                return "it is an address of this bridge itself. Choose another peer."
            return f"{peer} answers at this address. Correct the peer id or the address."
    for cause in causes:
        if isinstance(cause, socket.gaierror):
            return f"the host name has no address ({cause.strerror}). Correct the name, or add it to DNS or /etc/hosts."
        if isinstance(cause, ConnectionRefusedError):
            return "no program listens there (connection refused). Start the peer, or correct the address."
        if isinstance(cause, OSError) and cause.errno:
            return f"{cause.strerror}. Check the address and the network."
    for cause in causes:
        if isinstance(cause, SecurityUpgradeFailure | MuxerUpgradeFailure):
            return (
                "the program that listens there does not speak libp2p with noise and yamux, or rejects this bridge. "
                "Check the address, and the log of the peer."
            )
    return str(failure.__cause__ or failure)


def _walk_causes(failure: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its causes, and the members of exception groups among them."""
    pending, seen = [failure], set[int]()
    while pending:
        error = pending.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        if isinstance(error, BaseExceptionGroup):
            pending += error.exceptions
        pending += [other for other in (error.__context__, error.__cause__) if other is not None]
