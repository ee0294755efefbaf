"""Valid messages that go peers reject as too large: signed, as RPCs, on the topic of the tests' network."""

from __future__ import annotations

from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kiln.bridge.gossipsub.wire import encode
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.wire.identity import sign
from kit.node_town import TOPIC

_AUTHOR: Final = Ed25519PrivateKey.from_private_bytes(b"large".ljust(32))


def large_message(number: int) -> bytes:
    """Build a message of 1.1 MB. go accepts up to 1 MiB."""
    return _signed(Message(data=number.to_bytes(8, "big") + bytes(1_100_000)), number)


def message_of_overhead(number: int) -> bytes:
    """Build a message with 600 kB in addition to its data. go accepts up to 512 KiB."""
    message = Message.FromString(b"\xa2\x06" + encode(bytes(600_000)))  # field 100
    message.data = number.to_bytes(8, "big")
    return _signed(message, number)


def _signed(message: Message, number: int) -> bytes:
    message.topic, message.seqno = TOPIC, number.to_bytes(8, "big")
    sign(message, _AUTHOR)
    return RPC(publish=[message]).SerializeToString()
