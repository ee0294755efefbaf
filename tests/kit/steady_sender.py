"""A peer in its own process that sends signed messages at a steady rate, and reports their ids.

    cd tests && python -m kit.steady_sender BRIDGE --topic TOPIC --rate N --count N --resend N --report FILE

The peer signs COUNT messages of 300 bytes, prints "ready", and starts to send at the first line on stdin. Each message
is an RPC and a write of its own. If the connection breaks, the peer dials again, and first repeats the last RESEND
messages, as a peer's message cache would. If the bridge delays the peer, it sends later, but leaves no message out.
After the last message, it closes the stream, writes {"ids": [all ids in order], "streams": [[first, end), …],
"seconds"} to FILE, prints "done", and waits for another line or the end of stdin.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import NamedTuple

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.basic_host import BasicHost
from libp2p.peer.peerinfo import PeerInfo, info_from_p2p_addr
from multiaddr import Multiaddr

from kiln.bridge.gossipsub.wire import encode
from kiln.bridge.libp2p.slots import InboundSlots
from kiln.bridge.libp2p.streams import get_swarm, make_host
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.wire.identity import message_id, sign
from kit.chance import new_key

PROTOCOL = TProtocol("/meshsub/1.2.0")
BYTES = 300
_BROKEN = (BaseLibp2pError, OSError, EOFError, trio.BrokenResourceError, trio.ClosedResourceError)


class Signed(NamedTuple):
    """RPCs as bytes on the wire, and the ids of their messages."""

    frames: list[bytes]
    ids: list[str]


def signed(topic: str, count: int) -> Signed:
    """Build `count` signed messages of one author."""
    key = new_key()
    first = time.time_ns()
    frames, ids = [], []
    for number in range(count):
        message = Message(topic=topic, data=random.randbytes(BYTES), seqno=(first + number).to_bytes(8))
        sign(message, key)
        ids.append(message_id(message))
        frames.append(encode(RPC(publish=[message]).SerializeToString()))
    return Signed(frames, ids)


class Sender:
    def __init__(self, host: BasicHost, bridge: PeerInfo, topic: str, messages: Signed, rate: float) -> None:
        self._host = host
        self._bridge = bridge
        self._topic = topic
        self._messages = messages
        self._rate = rate
        self.streams: list[tuple[int, int]] = []
        """range [first, end) of the messages that were written to each stream"""

    async def say_all(self, resend: int) -> float:
        """Send all messages, and repeat `resend` after each broken connection. Return the duration in seconds."""
        count, started = len(self._messages.frames), trio.current_time()
        begin = 0
        while True:
            stream = await self._stream()
            end, whole = await self._say(stream, begin, started)
            self.streams.append((begin, end))
            if whole:
                return trio.current_time() - started
            begin = max(0, min(end, count) - resend)

    async def _stream(self) -> INetStream:
        while True:
            try:
                with trio.fail_after(60):
                    # not host.connect: after a failure it leaves the peer alone for a minute
                    await get_swarm(self._host).dial_addr(self._bridge.addrs[0], self._bridge.peer_id)
                    return await self._host.new_stream(self._bridge.peer_id, [PROTOCOL])
            except (*_BROKEN, trio.TooSlowError):
                await trio.sleep(0.05)  # nobody tells when the bridge listens again

    async def _say(self, stream: INetStream, begin: int, started: float) -> tuple[int, bool]:
        """Write the messages from `begin` on to a stream.

        Returns:
            The number after the last message whose write was started, and true if all messages were written.
        """
        frames, at = self._messages.frames, begin
        subscription = RPC.SubOpts(subscribe=True, topicid=self._topic)
        try:
            await stream.write(encode(RPC(subscriptions=[subscription]).SerializeToString()))
            while at < len(frames):
                await trio.sleep_until(started + at / self._rate + 0.01)  # what 10 ms make due goes together
                due = int((trio.current_time() - started) * self._rate)
                while at < min(due, len(frames)):
                    at += 1
                    await stream.write(frames[at - 1])
            await stream.close()
        except _BROKEN:
            await self._host.disconnect(self._bridge.peer_id)
            return at, False
        return at, True


async def _swallow(stream: INetStream) -> None:
    try:
        while await stream.read(1 << 16):
            pass
    except _BROKEN:
        return


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bridge", type=Multiaddr)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--resend", type=int, default=0)
    parser.add_argument("--report", type=Path, required=True)
    arguments = parser.parse_args()
    random.seed(arguments.topic)
    messages = signed(arguments.topic, arguments.count)
    host = make_host(new_key(), "steady-sender", InboundSlots(10))
    host.set_stream_handler(PROTOCOL, _swallow)
    print("ready", flush=True)
    sys.stdin.readline()
    sender = Sender(host, info_from_p2p_addr(arguments.bridge), arguments.topic, messages, arguments.rate)
    async with host.run([]):
        seconds = await sender.say_all(arguments.resend)
        arguments.report.write_text(json.dumps({"ids": messages.ids, "streams": sender.streams, "seconds": seconds}))
        print("done", flush=True)
        await trio.to_thread.run_sync(sys.stdin.readline)


if __name__ == "__main__":
    trio.run(main)
