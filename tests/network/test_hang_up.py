"""A peer that says much and is gone: what has come of it by then is captured."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.chance import new_key
from kit.node_town import TOPIC, Town, call, check_sequences, in_town, message, raw_peer, subscription
from libp2p.peer.id import ID

from bridge.gossip.wire import encode
from bridge.node.streams import swarm_of
from schemas.proto.kiln.frame_pb2 import Frame

pytestmark = pytest.mark.network

MESSAGES = 500  # less than a window of yamux: the peer need not wait for us


@pytest.mark.parametrize("farewell", ["stream", "connection", "socket"])
def test_all_that_was_said_before_a_peer_hung_up_is_captured(tmp_path: Path, farewell: str) -> None:
    key = new_key()
    said = [subscription(), *(message(number, key) for number in range(1, MESSAGES + 1))]

    async def test(town: Town) -> None:
        node = await town.node()
        node.node.join(TOPIC)
        async with raw_peer() as host:
            stream = await call(host, node)
            await town.bell.until(lambda: len(node.node.view().peers) == 1)
            await stream.write(b"".join(map(encode, said)))
            peer = ID(node.node.peer)
            match farewell:
                case "stream":
                    await stream.close()
                case "connection":
                    await host.disconnect(peer)
                case "socket":
                    for conn in swarm_of(host).get_connections(peer):
                        await conn.muxed_conn.secured_conn.close()  # type: ignore[attr-defined]  # as yamux has it
            await town.bell.until(lambda: len(node.tape.payloads(Frame.IN)) == len(said), 10)
            assert node.tape.payloads(Frame.IN) == said
        await town.bell.until(lambda: not node.node.view().peers)
        check_sequences(node.tape, closed=True)

    in_town(tmp_path, test)
