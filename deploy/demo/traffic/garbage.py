"""Bad input outside of message data: malformed or oversized RPCs, rejected hellos, records that are not frames.

Each is bad by construction, so its reason is known without parsing.
"""

from __future__ import annotations

from random import Random
from typing import Final, NamedTuple

from kiln.deploy.demo.traffic.messages import field
from kiln.schemas.kafka.frames import CUT_PAYLOAD, MAX_RPC, RPC_MALFORMED, RPC_OVERSIZED
from kiln.schemas.wire.topic_table import HASH_LENGTH, MAX_BUNDLES

RPC_STAGE: Final = "rpc"
HELLO_STAGE: Final = "hello"


class BadRpc(NamedTuple):
    """A payload, and its length on the wire if it was cut, else 0."""

    payload: bytes
    declared_length: int
    reason: str


class BadHello(NamedTuple):
    """Rejected ExtTopicTable bytes; `parses` is true if they are protobuf."""

    hello: bytes
    reason: str
    parses: bool


def build_random_rpc(random: Random) -> BadRpc:
    """Build random bytes whose first one has the invalid wire type 6 or 7."""
    return BadRpc(build_malformed_protobuf(random, 400), 0, RPC_MALFORMED)


def build_truncated_rpc(random: Random, rpc: bytes) -> BadRpc:
    """Cut an RPC of one field, which is thus incomplete."""
    return BadRpc(rpc[: random.randrange(1, len(rpc))], 0, RPC_MALFORMED)


def build_oversized_rpc(random: Random, publish: bytes) -> BadRpc:
    """Build an RPC over 4 MiB, of a message and a field of zeros, and cut it as the tap does; `write_traffic` restores
    it."""
    declared = MAX_RPC + random.randrange(1, 1 << 20)
    filler = declared - len(publish)
    head = publish + b"\x12" + _varint4(filler - 5)
    return BadRpc(head.ljust(CUT_PAYLOAD, b"\0"), declared, RPC_OVERSIZED)


def build_bad_hello(random: Random) -> BadHello:
    """Build a topic table that is rejected, for a random reason of `kiln.schemas.wire.topic_table`."""
    hashes = [random.randbytes(HASH_LENGTH) for _ in range(random.randrange(1, 6))]
    match random.randrange(4):
        case 0:
            return BadHello(build_malformed_protobuf(random, 40), "hello_malformed", False)
        case 1:
            hashes.insert(random.randrange(len(hashes)), random.randbytes(random.choice((0, 3, 5, 32))))
            return BadHello(_bundles(hashes), "hello_hash_length", True)
        case 2:
            hashes.append(random.choice(hashes))
            return BadHello(_bundles(hashes), "hello_repeats", True)
        case _:
            first = random.getrandbits(24)
            many = [(first + number).to_bytes(HASH_LENGTH) for number in range(MAX_BUNDLES + 1)]
            return BadHello(_bundles(many), "hello_too_many_bundles", True)


def build_malformed_protobuf(random: Random, most: int) -> bytes:
    """Build up to `most` random bytes whose first one has the invalid wire type 6 or 7."""
    data = random.randbytes(random.randrange(1, most))
    return bytes([data[0] | 0b110]) + data[1:]


def _bundles(hashes: list[bytes]) -> bytes:
    return b"".join(field(1, known) for known in hashes)


def _varint4(value: int) -> bytes:
    """Encode a varint of 4 bytes, for lengths from 2 MiB to 256 MiB."""
    return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14 & 0x7F | 0x80, value >> 21))
