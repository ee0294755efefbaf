"""Decoder of WakuMessage: the entry point `waku` in the group `kiln.decoders`."""

from waku_decoder.waku_message_pb2 import WakuMessage


def decode(data: bytes) -> dict[str, object]:
    """Decode the data of a pubsub message. An error of any kind puts the message into quarantine."""
    message = WakuMessage.FromString(data)
    if not message.content_topic:
        raise ValueError("not a WakuMessage: it has no content topic")
    return {
        "content_topic": message.content_topic,
        "version": message.version,
        "timestamp": message.timestamp,
        "ephemeral": message.ephemeral,
        "payload": message.payload.hex(),
        "meta": message.meta.hex(),
    }
