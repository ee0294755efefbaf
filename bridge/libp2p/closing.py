"""Closing connections and streams, also those in which writes are stuck."""

from __future__ import annotations

import trio
from libp2p.abc import INetConn, INetStream
from libp2p.stream_muxer.yamux.yamux import Yamux


async def close_connection(conn: INetConn) -> None:
    """Close a connection, also one in which writes are stuck."""
    muxed = conn.muxed_conn
    if isinstance(muxed, Yamux):
        with trio.move_on_after(1, shield=True):
            # the socket first, because yamux sends its GO_AWAY under the lock that a stuck write holds
            await muxed.secured_conn.close()
    with trio.move_on_after(1, shield=True):
        await conn.close()


async def reset_stream(stream: INetStream) -> None:
    with trio.move_on_after(1, shield=True):
        await stream.reset()
