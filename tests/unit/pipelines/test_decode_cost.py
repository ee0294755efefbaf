"""kiln.pipelines.decode.decoder: the CPU that one RPC may cost, the same whenever and however often it is decoded."""

from __future__ import annotations

from collections import Counter

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kiln.pipelines.decode.decoder import DecodeConfig, DecodedMessage, FrameDecoder, RejectedMessage, decode
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import Verdict, sign
from kiln.schemas.wire.pubsub import write_keepalive

TOPIC = "/ceramic/testnet-clay"
SLOW = ec.derive_private_key(0xC0FFEE, ec.SECP384R1())
QUICK = Ed25519PrivateKey.from_private_bytes(bytes(32))
FORGED = 1000


def forged() -> list[Message]:
    """Messages of a key that is slow to check, each with the signature of another."""
    template = Message(data=write_keepalive(1), seqno=b"\0", topic=TOPIC)
    sign(template, SLOW)
    messages = []
    for number in range(FORGED):
        message = Message.FromString(template.SerializeToString())
        message.seqno = number.to_bytes(8)
        messages.append(message)
    return messages


def good(number: int) -> Message:
    message = Message(data=write_keepalive(1), seqno=number.to_bytes(8), topic=TOPIC)
    sign(message, QUICK)
    return message


def frame(messages: list[Message], verdicts: bytes = b"") -> bytes:
    payload = RPC(publish=messages).SerializeToString()
    return Frame(
        connection=bytes(16),
        sequence=1,
        observed_at=1_700_000_000_000_000_000,
        network="testnet-clay",
        protocol="/meshsub/1.2.0",
        payload=payload,
        verdicts=verdicts,
    ).SerializeToString()


def test_of_an_rpc_that_is_expensive_to_check_the_rest_is_one_row() -> None:
    record = frame([*forged(), good(1)])
    items = list(decode(record, 0, 7, 0, DecodeConfig()))
    reasons = Counter(item.reason for item in items if isinstance(item, RejectedMessage))
    assert reasons.keys() == {"bad_signature", "rpc_too_costly"}
    checked = reasons["bad_signature"]
    assert 100 < checked < 300
    rest = items[-1]
    assert isinstance(rest, RejectedMessage)
    assert rest.ref.position is None
    assert rest.detail.startswith(f"{FORGED + 1 - checked} of {FORGED + 1} messages")


def test_what_the_bridge_has_checked_is_read_however_expensive_the_rest_is() -> None:
    record = frame([*forged(), good(1)], bytes(FORGED) + bytes([Verdict.VALID]))
    items = list(decode(record, 0, 7, 0, DecodeConfig()))
    assert [item.ref.position for item in items if isinstance(item, DecodedMessage)] == [FORGED]


def test_a_decoder_that_knows_the_messages_stops_at_the_same_one() -> None:
    messages = forged()
    decoder = FrameDecoder(DecodeConfig())
    for message in messages:
        assert len(list(decoder.decode(frame([message]), 0, 6, 0))) == 1
    record = frame(messages)
    assert list(decoder.decode(record, 0, 7, 0)) == list(decode(record, 0, 7, 0, DecodeConfig()))


def test_as_many_ordinary_messages_as_the_bridge_checks_of_an_rpc_are_decoded() -> None:
    messages = []
    for number in range(2000):
        message = Message(data=write_keepalive(1).ljust(250), seqno=number.to_bytes(8), topic=TOPIC)
        sign(message, QUICK)
        messages.append(message)
    record = frame(messages)
    items = list(decode(record, 0, 0, 0, DecodeConfig()))
    assert Counter(type(item) for item in items) == {DecodedMessage: 2000}
