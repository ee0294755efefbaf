"""Giant fields: RPCs that hold them, and a program that writes records with them into the log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, cycle
from random import Random
from typing import TYPE_CHECKING, Final

from kafka import KafkaProducer
from kiln.schemas.kafka.frames import MAX_MESSAGES
from kiln.schemas.kafka.topics import MAX_RECORD
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kit.node_town import TOPIC

if TYPE_CHECKING:
    from chaos.whole_kiln import Stack

_PAUSE: Final = 0.5  # s between two records
SIZE: Final = 300_000
"""Bytes of a giant field. Larger ones are a flood of bytes, which `flood` and `batches` are about."""
EVERY: Final = 1.0
"""Seconds between two RPCs of a peer."""


def giant_author(rng: Random) -> bytes:
    """A message with a giant author and seqno, which make its id."""
    message = Message(data=rng.randbytes(20), seqno=bytes(SIZE), signature=b"s", topic=TOPIC)
    setattr(message, "from", bytes(SIZE))
    return RPC(publish=[message]).SerializeToString()


def giant_key(rng: Random) -> bytes:
    """A message with a giant key and signature."""
    message = Message(data=rng.randbytes(20), seqno=bytes(8), signature=bytes(SIZE), key=bytes(SIZE), topic=TOPIC)
    setattr(message, "from", rng.randbytes(34))
    return RPC(publish=[message]).SerializeToString()


def giant_topics(rng: Random) -> bytes:
    """A message on a giant topic, a subscription to one, and many messages on long topics."""
    giant = f"/ceramic/{rng.getrandbits(64):x}/".ljust(SIZE, "t")
    long = (f"/ceramic/{rng.getrandbits(64):x}{number}/".ljust(4096, "t") for number in range(SIZE // 4096))
    rpc = RPC(publish=[Message(data=b"1", topic=topic) for topic in (giant, *long)])
    rpc.subscriptions.add(subscribe=True, topicid=giant)
    return rpc.SerializeToString()


def giant_ids(rng: Random) -> bytes:
    """IHAVE and IWANT with giant ids, and a PRUNE that names a giant peer."""
    rpc = RPC()
    rpc.control.ihave.add(topicID=TOPIC, messageIDs=[rng.randbytes(8) + bytes(SIZE)])
    rpc.control.iwant.add(messageIDs=[rng.randbytes(8) + bytes(SIZE)])
    rpc.control.prune.add(topicID=TOPIC).peers.add(peerID=bytes(SIZE), signedPeerRecord=bytes(SIZE))
    return rpc.SerializeToString()


def giant_json(rng: Random) -> bytes:
    """A QUERY with a giant id."""
    data = b'{"typ":1,"stream":"%d","id":"%b"}' % (rng.getrandbits(64), b"i" * SIZE)
    return RPC(publish=[Message(data=data, topic=TOPIC)]).SerializeToString()


GIANTS: Final = (giant_author, giant_key, giant_topics, giant_ids, giant_json)

EMPTY_MESSAGES: Final = b"\x12\x00" * MAX_MESSAGES
FRAME_FIELDS: Final[dict[str, bytes | str | int]] = {
    "remote_peer": b"\xff" * SIZE,
    "local_peer": b"x" * SIZE,
    "protocol": "bep50" + "x" * SIZE,
    "remote_address": b"x" * SIZE,
    "hello_in": b"x" * SIZE,
    "hello_out": b"x" * SIZE,
    "verdicts": b"\1" * SIZE,
    "observed_at": -(2**63),
}
"""By field of a Frame, a value far beyond its bound."""


def giant_frame(number: int, name: str) -> Frame:
    """A frame of 5,000 messages, in whose rows the value would stand."""
    made = Frame(
        network="local-test",
        connection=b"giant" + number.to_bytes(11),
        local_peer=b"local",
        remote_peer=b"remote",
        protocol="/meshsub/1.2.0",
        observed_at=1_700_000_000_000_000_000,
        sequence=1,
        payload=EMPTY_MESSAGES,
    )
    setattr(made, name, FRAME_FIELDS[name])
    return made


GIANT_RECORDS: Final[tuple[tuple[str, bytes, bytes], ...]] = (
    ("updates", b"key", b"{" * (7 << 20)),
    ("quarantine", b"k" * 1_000_000, b'{"detail": 1}'),
    (
        "quarantine",
        b"k" * 1_000_000,
        b'{"stage":"s","reason":"r","detail":"d","data":"","observed_at":1700000000000000}',
    ),
    ("publications", b"key", b'{"batch_cid":"c","transport":"t","published_at":9223372036854775807,"peer_count":1}'),
    ("batches", b"key", b'{"batch_cid":"%b"}' % (b"c" * 1_000_000)),
)
"""Topic, key and value of records that are long in other ways. The first three come to the tables as they are."""


@contextmanager
def giants_in_the_log(stack: Stack) -> Iterator[Callable[[], int]]:
    """While this lasts, a program writes such records. Gives a function that counts them."""
    done, ended = count(), threading.Event()
    producer = KafkaProducer(**stack.client_options(), max_request_size=MAX_RECORD)
    # what checks a whole Kiln reads updates, batches and receipts itself, and strictly
    others = cycle(record for record in GIANT_RECORDS if record[0] == "quarantine")
    names = cycle(FRAME_FIELDS)
    written = 0

    def write() -> None:
        nonlocal written
        while not ended.wait(_PAUSE):  # the pace of the attack
            frame = giant_frame(next(done), next(names))
            producer.send(stack.settings.broker.topic("frames"), key=frame.connection, value=frame.SerializeToString())
            topic, key, value = next(others)
            producer.send(stack.settings.broker.topic(topic), key=key, value=value)
            written += 2

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield lambda: written
    finally:
        ended.set()
        writer.join()
        producer.close()
