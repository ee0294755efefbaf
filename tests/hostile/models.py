"""Valid updates of one author, each of a new stream with a new model, so that each becomes a batch of its own."""

from __future__ import annotations

import time
from random import Random
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.wire.cid import cid_text
from kiln.schemas.wire.identity import sign
from kiln.schemas.wire.pubsub import write_update
from kiln.schemas.wire.streamid import MODEL, MODEL_INSTANCE, StreamID
from kiln.schemas.wire.topics import Separator, format_topic
from kit.node_town import TOPIC

EVERY: Final = 0.01  # s between two RPCs
_MESSAGES: Final = 4  # of an RPC
_DAG_JOSE: Final = b"\x01\x85\x01\x12\x20"
_DAG_CBOR: Final = b"\x01\x71\x12\x20"


def updates_of_new_models(rng: Random, author: Ed25519PrivateKey, *, subscribe: bool) -> bytes:
    """An RPC. `subscribe`: to the topics of the models, too."""
    rpc = RPC()
    for _ in range(_MESSAGES):
        model = StreamID(MODEL, _DAG_JOSE + rng.randbytes(32)).text
        stream = StreamID(MODEL_INSTANCE, _DAG_CBOR + rng.randbytes(32)).text
        tip = cid_text(_DAG_JOSE + rng.randbytes(32))
        message = Message(topic=TOPIC, data=write_update(stream, tip, model), seqno=time.time_ns().to_bytes(8))
        sign(message, author)
        rpc.publish.append(message)
        if subscribe:
            topic = format_topic(TOPIC.removeprefix("/ceramic/"), Separator("model", model))
            rpc.subscriptions.add(subscribe=True, topicid=topic)
    return rpc.SerializeToString()
