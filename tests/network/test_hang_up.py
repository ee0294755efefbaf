"""A peer that says much and is gone: what has come of it by then is captured."""

from __future__ import annotations

from pathlib import Path

import pytest
from libp2p.peer.id import ID

from kiln.bridge.gossipsub.wire import encode
from kiln.bridge.libp2p.streams import get_swarm
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import compute_peer_id, peer_text
from kit.chance import new_key
from kit.node_town import TOPIC, Town, call, check_sequences, in_town, message, raw_peer, subscription

pytestmark = pytest.mark.network

# a broken connection is seen by whoever looks first
REASONS = {
    "stream": {"stream closed by the peer"},
    "connection": {"stream closed by the peer", "connection closed", "stream reset by the peer"},
    "socket": {"stream closed by the peer", "connection closed", "stream reset by the peer"},
}
MESSAGES = 100
"""45 kB, for which the receive window of a socket has room: a close with unread bytes drops what is not sent yet."""


@pytest.mark.parametrize("farewell", ["stream", "connection", "socket"])
def test_all_that_was_said_before_a_peer_hung_up_is_captured(
    tmp_path: Path, farewell: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kiln.bridge.libp2p")
    key = new_key()
    said = [subscription(), *(message(number, key) for number in range(1, MESSAGES + 1))]

    async def test(town: Town) -> None:
        node = await town.node()
        node.node.join(TOPIC)
        async with raw_peer(key=key) as host:
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
                    for conn in get_swarm(host).get_connections(peer):
                        await conn.muxed_conn.secured_conn.close()  # type: ignore[attr-defined]  # as yamux has it
            await town.bell.until(lambda: len(node.tape.payloads(Frame.IN)) == len(said), 60)
            assert node.tape.payloads(Frame.IN) == said
        await town.bell.until(lambda: not node.node.view().peers)
        check_sequences(node.tape, closed=True)
        (record,) = (frame for frame in node.tape.frames if frame.end_reason)
        assert record.end_reason in REASONS[farewell]
        assert (record.payload, record.direction, record.dialled) == (b"", Frame.IN, False)

    in_town(tmp_path, test)
    came, went = (
        [vars(each)["fields"] for each in caplog.records if each.message == event]
        for event in ("peer connected", "peer disconnected")
    )
    assert came[0]["peer"] == went[0]["peer"] == peer_text(compute_peer_id(key))
    assert went[0]["reason"] in REASONS[farewell]
    assert went[0]["frames_in"] == len(said)
