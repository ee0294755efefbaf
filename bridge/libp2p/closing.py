"""Close connections and streams, even while a write in them is stuck."""

from __future__ import annotations

from typing import Final

import trio
from libp2p.abc import INetConn, INetStream
from libp2p.exceptions import BaseLibp2pError
from libp2p.stream_muxer.yamux.yamux import Yamux

# Errors of a stream or a connection that has ended or does not work any more.
BROKEN: Final = (
    BaseLibp2pError,
    OSError,
    EOFError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.TooSlowError,
)


async def close_connection(conn: INetConn) -> None:
    """Close a connection within about 2 s, even if a write in it is stuck."""
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
    """Return a cancel scope for cleanup. Cancellation from outside does not reach it, and it ends after `seconds`.

    `trio.move_on_after(seconds, shield=True)` does the same, but the type stubs that libp2p installs do not know it.
    """
    return trio.CancelScope(deadline=trio.current_time() + seconds, shield=True)
