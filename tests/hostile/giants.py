"""Giant fields: RPCs that hold them, and a program that writes records with them into the log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, cycle
from random import Random
from typing import TYPE_CHECKING, Final

from kafka import KafkaProducer
from kiln.schemas.kafka.frames import MAX_MESSAGES, MAX_RPC
from kiln.schemas.kafka.topics import MAX_RECORD
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kit.node_town import TOPIC

if TYPE_CHECKING:
    from chaos.whole_kiln import Stack

_PAUSE: Final = 0.5  # s between two records
_MIB: Final = 1 << 20


def giant_author(rng: Random) -> bytes:
    """A message whose author and seqno fill an RPC, so that its id would be twice as long."""
    message = Message(data=rng.randbytes(20), seqno=bytes(_MIB), signature=b"s", topic=TOPIC)
    setattr(message, "from", bytes(2 * _MIB))
    return RPC(publish=[message]).SerializeToString()


def giant_key(rng: Random) -> bytes:
    """A message with a key and a signature of a megabyte each."""
    message = Message(data=rng.randbytes(20), seqno=bytes(8), signature=bytes(_MIB), key=bytes(_MIB), topic=TOPIC)
    setattr(message, "from", rng.randbytes(34))
    return RPC(publish=[message]).SerializeToString()


def giant_topics(rng: Random) -> bytes:
    """As many messages as are read, each on a topic of its own as long as fits."""
    length = MAX_RPC // MAX_MESSAGES - 40
    topics = (f"/ceramic/{rng.getrandbits(64):x}{number}/".ljust(length, "t") for number in range(MAX_MESSAGES))
    return RPC(publish=[Message(data=b"1", topic=topic) for topic in topics]).SerializeToString()


def giant_ids(rng: Random) -> bytes:
    """IHAVE and IWANT with ids of a megabyte."""
    rpc = RPC()
    rpc.control.ihave.add(topicID=TOPIC, messageIDs=[rng.randbytes(8) + bytes(_MIB)])
    rpc.control.iwant.add(messageIDs=[rng.randbytes(8) + bytes(_MIB)])
    return rpc.SerializeToString()


def giant_json(rng: Random) -> bytes:
    """A QUERY with an id of three megabytes."""
    data = b'{"typ":1,"stream":"%d","id":"%b"}' % (rng.getrandbits(64), b"i" * 3 * _MIB)
    return RPC(publish=[Message(data=data, topic=TOPIC)]).SerializeToString()


GIANTS: Final = (giant_author, giant_key, giant_topics, giant_ids, giant_json)

EMPTY_MESSAGES: Final = b"\x12\x00" * MAX_MESSAGES
FRAME_FIELDS: Final[dict[str, bytes | str | int]] = {
    "remote_peer": b"\xff" * 300_000,
    "local_peer": b"x" * 300_000,
    "protocol": "bep50" + "x" * 300_000,
    "remote_address": b"x" * 300_000,
    "hello_in": b"x" * 300_000,
    "hello_out": b"x" * 300_000,
    "verdicts": b"\1" * 300_000,
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
    ("updates", b"key", b"{" * (7 * _MIB)),
    ("quarantine", b"k" * 1_000_000, b'{"detail": 1}'),
    ("quarantine", b"k" * 1_000_000, b'{"stage":"s","reason":"r","detail":"d","data":"","observed_at":1}'),
    ("publications", b"key", b'{"cid":"c","transport":"t","published_at":9223372036854775807,"peers":1}'),
    ("batches", b"key", b'{"cid":"%b"}' % (b"c" * 1_000_000)),
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
