"""Raw libp2p peers that send any bytes on bitswap streams, and behaviours of hostile peers."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count, cycle

import trio
from libp2p.abc import INetStream
from libp2p.bitswap.pb.bitswap_pb2 import Message
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

from kiln.bridge.gossipsub.wire import RpcSplitter, encode
from kiln.bridge.ipfs.bitswap.messages import PROTOCOLS, V1_1, V1_2, WantEntry, write_message
from kiln.bridge.libp2p.slots import InboundSlots
from kiln.bridge.libp2p.streams import make_host
from kiln.schemas.wire.cid import cid_bytes, compute_cid
from kit.bitswap_sides import make_blocks
from kit.chance import new_key
from kit.node_town import ENDS

SERVED = make_blocks(200, "served")
"""Blocks that the node under attack has, four of them of 2 MiB."""


class RawPeer:
    """A peer that sends any bytes on bitswap streams, and records blocks, wants and presences that it receives."""

    def __init__(self, host: BasicHost, address: str, notify: Callable[[], None]) -> None:
        self._host = host
        self._address = address
        self._notify = notify
        self.blocks: list[bytes] = []
        self.haves: list[bytes] = []
        self.dont_haves: list[bytes] = []
        self.wants: list[bytes] = []
        self.reads = True
        self.refusals = 0

    async def open(self, protocol: str = V1_2) -> INetStream:
        info = info_from_p2p_addr(Multiaddr(self._address))
        await self._host.connect(info)
        return await self._host.new_stream(info.peer_id, [TProtocol(protocol)])

    async def send(self, *wants: WantEntry, protocol: str = V1_2) -> None:
        stream = await self.open(protocol)
        await stream.write(encode(write_message(protocol, wants)))
        await stream.close()

    async def handle(self, stream: INetStream) -> None:
        if self.refusals:
            self.refusals -= 1
            await stream.reset()
            return
        if not self.reads:
            await trio.sleep_forever()
        splitter = RpcSplitter(4 << 20, 1)
        with suppress(*ENDS):
            while True:
                data = await stream.read(65536)
                if not data:
                    return
                for body in splitter.feed(data):
                    assert isinstance(body, bytes)
                    message = Message.FromString(body)
                    self.blocks += [*(block.data for block in message.payload), *message.blocks]
                    for each in message.blockPresences:
                        (self.haves if each.type == Message.Have else self.dont_haves).append(each.cid)
                    self.wants += [entry.block for entry in message.wantlist.entries if not entry.cancel]
                    self._notify()


@asynccontextmanager
async def raw_bitswap_peer(
    address: str, *protocols: str, notify: Callable[[], None] = lambda: None
) -> AsyncIterator[RawPeer]:
    """Run a raw peer for the node at `address`. It offers these bitswap protocols, all three by default."""
    host = make_host(new_key(), "odd/1", InboundSlots(10))
    peer = RawPeer(host, address, notify)
    for protocol in protocols or PROTOCOLS:
        host.set_stream_handler(TProtocol(protocol), peer.handle)
    async with host.run([]):
        yield peer


async def storm(peer: RawPeer) -> None:
    """Send messages with a thousand want-haves each, for blocks that no peer has."""
    stream = await peer.open()
    for number in count():
        absent = [compute_cid(b"%d/%d" % (number, each)) for each in range(1000)]
        await stream.write(
            encode(write_message(V1_2, [WantEntry(cid, have=True, send_dont_have=True) for cid in absent]))
        )


async def want_much(peer: RawPeer) -> None:
    """Send want-blocks that request no DONT_HAVE, each for another block that no peer has."""
    stream = await peer.open()
    for number in count():
        absent = [compute_cid(b"%d|%d" % (number, each)) for each in range(2000)]
        await stream.write(encode(write_message(V1_2, map(WantEntry, absent))))


async def send_unasked(peer: RawPeer) -> None:
    """Send blocks of 200 kB that the node does not want."""
    for _ in count():
        data = os.urandom(200_000)
        stream = await peer.open()
        await stream.write(encode(write_message(V1_1, blocks=[(compute_cid(data), data)])))
        await stream.close()


async def send_malformed(peer: RawPeer) -> None:
    """Send bytes that are no bitswap message."""
    for raw in cycle([encode(b"\xff" * 500), b"\xff" * 20, b"\x80\x80\x80\x01" + bytes(400_000)]):
        with suppress(*ENDS):
            await (await peer.open()).write(raw)


async def send_tiny(peer: RawPeer) -> None:
    """Send empty messages, thousands in each write."""
    stream = await peer.open()
    while True:
        await stream.write(bytes(60_000))


async def read_nothing(peer: RawPeer) -> None:
    """Request the largest blocks of SERVED, and read no responses."""
    peer.reads = False
    large = [block for block in SERVED if len(block.data) > 1 << 20]
    while True:
        await peer.send(*(WantEntry(cid_bytes(block.cid)) for block in large))
        await trio.sleep(0.5)  # the pace at which a peer may send wantlists


HOSTILE = {
    hostile.__name__: hostile for hostile in (storm, want_much, send_unasked, send_malformed, send_tiny, read_nothing)
}
"""Behaviours of hostile peers, by name. Each lasts as long as the connection."""
