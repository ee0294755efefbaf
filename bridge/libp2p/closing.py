"""Close connections and streams, even while a write is stuck. `BROKEN` lists the errors they raise when broken."""

from __future__ import annotations

from typing import Final

import trio
from libp2p.abc import INetConn, INetStream
from libp2p.exceptions import BaseLibp2pError
from libp2p.stream_muxer.yamux.yamux import Yamux

# Errors of a stream or a connection that the peer or the network broke.
BROKEN: Final = (
    BaseLibp2pError,
    OSError,
    EOFError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.TooSlowError,
)


async def close_connection(conn: INetConn) -> None:
    """Close a connection, even if writes in it are stuck."""
    muxed = conn.muxed_conn
    if isinstance(muxed, Yamux):
        with shielded(1):
            # the socket first, because yamux sends its GO_AWAY under the lock that a stuck write holds
            await muxed.secured_conn.close()
    with shielded(1):
        await conn.close()


async def reset_stream(stream: INetStream) -> None:
    with shielded(1):
        await stream.reset()


def shielded(seconds: float) -> trio.CancelScope:
    """Return a scope for cleanup that outside cancellation does not reach, and that ends after `seconds`.

    `trio.move_on_after(seconds, shield=True)` is the same, but the stubs of trio that libp2p brings along lack it.
    """
    return trio.CancelScope(deadline=trio.current_time() + seconds, shield=True)
