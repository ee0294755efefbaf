"""The short way in takes every yamux frame as py-libp2p's own loop takes it, however TCP and noise cut the bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, cast

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p.crypto import ed25519
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.security.secure_session import SecureSession
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from libp2p.stream_muxer.yamux.yamux import DEFAULT_WINDOW_SIZE, YAMUX_HEADER_FORMAT

from kiln.bridge.libp2p.inflow import BufferedTCP, InflowNoise, InflowSession
from kiln.bridge.libp2p.streams import GossipStream, GossipYamux
from kit.chance import new_key

DATA, WINDOW, PING = 0, 1, 2
SYN, ACK, FIN, RST = 1, 2, 4, 8
LAST = 4_000_000_000  # of the ping that says that all before it was taken


class Yamux(NamedTuple):
    """A yamux frame. `value`: of a window update or a ping."""

    kind: int
    flags: int
    stream: int
    body: bytes = b""
    value: int = 0

    def encoded(self) -> bytes:
        length = len(self.body) if self.kind == DATA else self.value
        return struct.pack(YAMUX_HEADER_FORMAT, 0, self.kind, self.flags, self.stream, length) + self.body


class Taken(NamedTuple):
    """What a connection holds when all frames were taken: of each stream what can be read and how it stands."""

    unread: dict[int, bytes]
    ends: dict[int, tuple[bool, bool, bool, int, int]]
    answers: bytes


class Socket:
    """A stream in memory that gives bytes, as a socket does; trio's gives bytearrays."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self.send_all = stream.send_all
        self.aclose = stream.aclose

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return bytes(await self._stream.receive_some(max_bytes))


def raw_pair() -> tuple[RawConnection, RawConnection, Socket]:
    """Our end, the peer's, and the peer's socket."""
    near, far = map(Socket, trio.testing.memory_stream_pair())
    ours = RawConnection(BufferedTCP(cast(trio.SocketStream, near)), False)
    return ours, RawConnection(BufferedTCP(cast(trio.SocketStream, far)), True), far


def transport(kind: type[NoiseTransport]) -> NoiseTransport:
    private = ed25519.Ed25519PrivateKey.from_bytes(new_key().private_bytes_raw())
    return kind(KeyPair(private, private.get_public_key()), noise_privkey=create_new_key_pair().private_key)


def pieces(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Cut into pieces of these sizes, over and over."""
    found: list[bytes] = []
    while data:
        size = sizes[len(found) % len(sizes)]
        found.append(data[:size])
        data = data[size:]
    return found


async def take(
    kind: type[NoiseTransport], frames: Sequence[Yamux], messages: Sequence[int], segments: Sequence[int]
) -> Taken | None:
    """Say these frames in noise messages and TCP segments of these sizes to a connection of ours. None: it ended before
    it had taken all."""
    ours, theirs, there = raw_pair()
    receiver, sender = transport(kind), transport(NoiseTransport)
    sessions: list[SecureSession] = []

    async def secure(inbound: bool) -> None:
        session = await (
            receiver.secure_inbound(ours)
            if inbound
            else sender.secure_outbound(theirs, ID.from_pubkey(receiver.libp2p_privkey.get_public_key()))
        )
        assert isinstance(session, SecureSession)
        sessions.append(session)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(secure, True)
        nursery.start_soon(secure, False)
    peer, session = sorted(sessions, key=lambda each: not each.is_initiator)
    assert isinstance(session, InflowSession) == (kind is InflowNoise)

    said: list[bytes] = []

    async def keep(data: bytes) -> None:
        said.append(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs, "write", keep)  # the bytes of noise, to be cut anew
        whole = b"".join(frame.encoded() for frame in [*frames, Yamux(PING, SYN, 0, value=LAST)])
        for message in pieces(whole, messages):
            await peer.conn.write_msg(message)

    yamux = GossipYamux(session, ID(b"peer"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(yamux.handle_incoming)

        async def accept() -> None:
            with suppress(MuxedConnUnavailable):
                while True:
                    await yamux.accept_stream()

        nursery.start_soon(accept)
        answers = b""
        for segment in pieces(b"".join(said), segments):
            await there.send_all(segment)
            await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(60):
            while struct.pack(">HII", ACK, 0, LAST) not in answers:
                if yamux.event_shutting_down.is_set():
                    nursery.cancel_scope.cancel()
                    return None
                answers += await peer.conn.read_msg()
        taken = Taken(
            {number: bytes(buffer) for number, buffer in yamux.stream_buffers.items()},
            {
                number: (each.closed, each.recv_closed, each.reset_received, each.send_window, each.recv_window)
                for number, each in yamux.streams.items()
            },
            answers,
        )
        nursery.cancel_scope.cancel()
    return taken


STREAMS = st.sampled_from([1, 3, 5])
BODY = st.binary(max_size=60)
FRAME = st.one_of(
    st.builds(partial(Yamux, DATA, 0), STREAMS, BODY),
    st.builds(partial(Yamux, DATA), st.sampled_from([0, SYN, FIN, RST, ACK, SYN | FIN]), STREAMS, BODY),
    st.builds(
        partial(Yamux, WINDOW),
        st.sampled_from([0, SYN, FIN, RST, ACK]),
        STREAMS,
        value=st.integers(min_value=0, max_value=1000),
    ),
    st.builds(partial(Yamux, PING, SYN, 0), value=st.integers(min_value=0, max_value=1000)),
)
SIZES = st.lists(st.integers(min_value=1, max_value=300), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(frames=st.lists(FRAME, max_size=20), messages=SIZES, segments=SIZES)
def test_the_short_way_is_the_stock_way(frames: list[Yamux], messages: list[int], segments: list[int]) -> None:
    opened = [Yamux(WINDOW, SYN, 1), Yamux(WINDOW, SYN, 3), *frames]
    short = trio.run(take, InflowNoise, opened, messages, segments)
    assert short is not None
    assert short == trio.run(take, NoiseTransport, opened, messages, segments)


def test_a_burst_arrives_whole_and_in_order() -> None:
    bodies = [f"{number:05}".encode() * 20 for number in range(1000)]
    frames = [Yamux(WINDOW, SYN, 1), *(Yamux(DATA, 0, 1, body) for body in bodies)]
    taken = trio.run(take, InflowNoise, frames, [112], [65536])
    assert taken is not None
    assert taken.unread[1] == b"".join(bodies)


def test_a_peer_that_overruns_its_window_is_cut_off() -> None:
    body = bytes(DEFAULT_WINDOW_SIZE // 2)
    fits = [Yamux(WINDOW, SYN, 1), Yamux(DATA, 0, 1, body), Yamux(DATA, 0, 1, body)]
    taken = trio.run(take, InflowNoise, fits, [60000], [65536])
    assert taken is not None
    assert len(taken.unread[1]) == DEFAULT_WINDOW_SIZE
    assert trio.run(take, InflowNoise, [*fits, Yamux(DATA, 0, 1, b"!")], [60000], [65536]) is None


def test_what_came_before_the_end_can_be_read_after_it() -> None:
    async def test() -> None:
        ours, theirs, there = raw_pair()
        receiver, sender = transport(InflowNoise), transport(NoiseTransport)
        got: list[SecureSession] = []

        async def inbound() -> None:
            got.append(cast(SecureSession, await receiver.secure_inbound(ours)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(inbound)
            peer = await sender.secure_outbound(theirs, ID.from_pubkey(receiver.libp2p_privkey.get_public_key()))
        yamux = GossipYamux(got[0], ID(b"peer"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(yamux.handle_incoming)
            await peer.write(Yamux(WINDOW, SYN, 1).encoded())
            stream = await yamux.accept_stream()
            assert isinstance(stream, GossipStream)
            # the last frame is cut off by the end
            await peer.write(Yamux(DATA, 0, 1, b"said").encoded() + Yamux(DATA, 0, 1, b"broken").encoded()[:-1])
            await there.aclose()
        assert stream.take_unread() == b"said"

    trio.run(test)
