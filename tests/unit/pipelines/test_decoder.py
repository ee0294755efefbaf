"""kiln.pipelines.decode.decoder.FrameDecoder: what it knows of messages that came before changes nothing in what it
finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from kiln.pipelines.decode.decoder import DecodeConfig, DecodedMessage, FrameDecoder, RejectedMessage, decode
from kiln.schemas.kafka.frames import MAX_MESSAGES, RPC_TOO_MANY
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.identity import compute_peer_id, sign
from kiln.schemas.wire.pubsub import write_keepalive, write_update
from kiln.schemas.wire.streamid import StreamID
from kiln.schemas.wire.topic_table import BundleSet, write_hello

ANNA = Ed25519PrivateKey.from_private_bytes(b"a" * 32)
TOPICS = ("/ceramic/testnet-clay", "/ceramic/mainnet", "elsewhere")
BUNDLES = BundleSet({"clay": ["/ceramic/testnet-clay"], "main": ["/ceramic/mainnet"]})
STREAM = StreamID(3, compute_cid(b"genesis")).text
DATA = (write_update(STREAM, cid_text(compute_cid(b"tip"))), write_keepalive(1), b"garbage", b"\xff", bytes(3000))


def _message(data: bytes, topic: str, signed: bool, forged: bool) -> Message:
    message = Message(data=data, topic=topic)
    if signed:
        message.seqno = b"\0\1"
        sign(message, ANNA)
        if forged:
            message.signature = bytes(64)
    return message


MESSAGES = [
    *(_message(*kind) for kind in product(DATA, TOPICS, (False, True), (False, True))),
    *(Message(data=data, topicIndex=index) for data, index in product(DATA, (1, 2, 9))),
    Message(),
]

frames = st.builds(
    lambda messages, verdicts, agreed, **fields: Frame(
        connection=bytes(16),
        direction=Frame.IN,
        protocol="/meshsub/1.2.0",
        payload=RPC(publish=messages).SerializeToString(),
        verdicts=bytes(verdicts),
        hello_in=write_hello(BUNDLES) if agreed else b"",
        hello_out=write_hello(BUNDLES) if agreed else b"",
        **fields,
    ),
    st.lists(st.sampled_from(MESSAGES), max_size=4),
    st.lists(st.integers(0, 5), max_size=4),
    st.booleans(),
    network=st.sampled_from(("mainnet", "testnet-clay")),
    origin=st.sampled_from((Frame.LIVE, Frame.REPLAY)),
    local_peer=st.sampled_from((b"", compute_peer_id(ANNA))),
    remote_peer=st.sampled_from((b"one", b"two")),
    observed_at=st.integers(0, 3).map(lambda n: 1_700_000_000_000_000_000 + n * 1_000_000),
    sequence=st.integers(1, 9),
)
ways = st.sampled_from(
    [DecodeConfig(default_policy=policy, bundles=BUNDLES) for policy in ("strict", "none", "either")]
)


def _plain(items: Sequence[DecodedMessage | RejectedMessage]) -> list[object]:
    """Without the one field that has no equality worth the name."""
    return [
        (item._replace(envelope=Message()), item.envelope.SerializeToString())
        if isinstance(item, DecodedMessage)
        else item
        for item in items
    ]


@given(st.lists(frames, max_size=12), ways)
def test_a_decoder_finds_what_one_that_has_seen_nothing_finds(made: list[Frame], how: DecodeConfig) -> None:
    decoder = FrameDecoder(how)
    for offset, frame in enumerate(made):
        value = frame.SerializeToString()
        found = list(decoder.decode(value, 1, offset, 5))
        assert _plain(found) == _plain(list(decode(value, 1, offset, 5, how)))


@pytest.mark.parametrize(("count", "faults"), [(MAX_MESSAGES, 0), (MAX_MESSAGES + 1, 1)])
def test_an_rpc_is_too_long_from_one_message_over_the_limit(count: int, faults: int) -> None:
    frame = Frame(connection=bytes(16), network="mainnet", sequence=1, observed_at=1_700_000_000_000_000_000)
    frame.protocol, frame.payload = "/meshsub/1.2.0", b"\x12\x00" * count
    items = decode(frame.SerializeToString(), 1, 0, 5, DecodeConfig())
    reasons = Counter(item.reason for item in items if isinstance(item, RejectedMessage))
    assert (reasons["topic_missing"], reasons[RPC_TOO_MANY]) == (MAX_MESSAGES, faults)
