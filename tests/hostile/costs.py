"""CPU that one RPC costs the router and the queries' decoder: `make hostile ARGS="keys --seconds 0"`.

The RPCs are as large as the bridge reads, and made to be expensive: keys of every type and size, with signatures that
are good and bad, in each field that may hold a key; long ids, long fields, and as many items as fit.
"""

from __future__ import annotations

import gc
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final

from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.router import Router
from kiln.pipelines.decode.decoder import DecodeConfig, FrameDecoder
from kiln.schemas.kafka.frames import MAX_MESSAGES, MAX_RPC, read_rpc
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message, PublicKey
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import MAX_RPC_COST, PrivateKey, Verdict, build_ed25519_peer_id, check, peer_text, sign
from kit.key_bytes import KEY_ATTACKS, public_key

TOPIC: Final = "/ceramic/local-test"
MOST_OF_MESSAGE: Final = 0.050
MOST_OF_RPC: Final = 0.200
"""Seconds of CPU, with nothing else to do."""
_USUAL_CHECK: Final = 67e-6  # s of CPU for an ed25519 signature, with nothing else to do (docs/performance.md)
_PEER: Final = b"\x00\x24\x08\x01\x12\x20" + bytes(32)


@dataclass(frozen=True)
class Cost:
    """Seconds of CPU for one RPC."""

    what: str
    messages: int
    size: int
    router: float
    decoder: float
    most_of_message: float
    """of checking one message, its key not cached"""

    def __str__(self) -> str:
        return (
            f"| {self.what} | {self.messages:,} | {self.size / 1024:,.0f} | {self.most_of_message * 1e3:.2f} "
            f"| {self.router * 1e3:.0f} | {self.decoder * 1e3:.0f} |"
        )


_HEADER: Final = """| an RPC of | messages | KiB | ms of one message | ms in the router | ms in the decoder |
| --- | ---: | ---: | ---: | ---: | ---: |"""


def private_keys() -> Iterator[tuple[str, PrivateKey]]:
    """A key of every type, curve and size that peers may have."""
    yield "ed25519", Ed25519PrivateKey.generate()
    for curve in (ec.SECP256K1(), ec.SECP224R1(), ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()):
        yield curve.name, ec.generate_private_key(curve)
    for bits, exponent in ((2048, 3), (2048, 65537), (3072, 65537), (4096, 65537)):
        yield f"RSA {bits}, e = {exponent}", rsa.generate_private_key(exponent, bits)


def public_rsa() -> Iterator[tuple[str, bytes]]:
    """RSA keys of which nobody has the private half: only bad signatures exist."""
    for bits, exponent in ((2048, 2**31 - 1), (4096, 2**31 - 1), (8192, 65537), (8192, 2**31 - 1)):
        modulus = int.from_bytes(os.urandom(bits // 8)) | 1 | 1 << (bits - 1)
        key = rsa.RSAPublicNumbers(exponent, modulus).public_key()
        yield f"RSA {bits}, e = {exponent}", key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def fill(message: Callable[[int], Message], most: int = MAX_MESSAGES) -> RPC:
    """As many messages as an RPC may have, or as many as use up what it may cost, and some more."""
    rpc = RPC()
    size = cost = 0
    for number in range(most):
        made = message(number)
        size += made.ByteSize() + 5
        cost += 12 + check(made, "strict").cost
        if size > MAX_RPC or cost > MAX_RPC_COST * 1.2:
            break
        rpc.publish.append(made)
    return rpc


def rpcs() -> Iterator[tuple[str, RPC]]:
    """What is measured, by name."""
    yield from _signed()
    yield from _strange_keys()
    yield from _large_fields()
    yield from _many_items()


def _signed() -> Iterator[tuple[str, RPC]]:
    for name, key in private_keys():

        def good(number: int, key: PrivateKey = key) -> Message:
            made = Message(data=b'{"typ":1,"id":"%d"}' % number, seqno=number.to_bytes(8), topic=TOPIC)
            sign(made, key)
            return made

        yield f"{name}, good", fill(good)
        yield f"{name}, bad", fill(partial(_renumbered, good(0)))
    for name, data in public_rsa():
        bits = rsa_bits(data)
        encoded = public_key(PublicKey.RSA, data)
        for field in ("key", "from"):
            yield f"{name}, bad, key in {field}", fill(_with_key(encoded, field, bytes(1) + os.urandom(bits // 8 - 1)))


def _renumbered(template: Message, number: int) -> Message:
    made = Message()
    made.CopyFrom(template)
    made.seqno = (number + 1).to_bytes(8)
    return made


def rsa_bits(data: bytes) -> int:
    """Bits of the modulus, from the length of the DER: for keys of whole bytes."""
    return next(bits for bits in (8192, 4096, 2048) if len(data) > bits // 8)


def _strange_keys() -> Iterator[tuple[str, RPC]]:
    for name, kind, data in KEY_ATTACKS:
        for field in ("key", "from"):
            yield f"{name}, key in {field}", fill(_with_key(public_key(kind, data), field, bytes(64)))


def _with_key(encoded: bytes, field: str, signature: bytes) -> Callable[[int], Message]:
    def made(number: int) -> Message:
        message = Message(data=b"x", seqno=number.to_bytes(8), topic=TOPIC, signature=signature)
        if field == "key":
            message.key = encoded
            author = b"\x12\x20" + hashlib.sha256(encoded).digest()
        else:
            author = b"\x00" + _varint(len(encoded)) + encoded
        setattr(message, "from", author)
        return message

    return made


def _varint(value: int) -> bytes:
    return bytes((value,)) if value < 0x80 else bytes((value & 0x7F | 0x80, value >> 7))


def _large_fields() -> Iterator[tuple[str, RPC]]:
    key = Ed25519PrivateKey.generate()
    room = MAX_RPC - 400
    whole = Message(data=bytes(room), seqno=bytes(8), topic=TOPIC)
    sign(whole, key)
    yield "one message of 4 MiB, good", RPC(publish=[whole])
    bad = Message()
    bad.CopyFrom(whole)
    bad.seqno = bytes(7) + b"\x01"
    yield "one message of 4 MiB, bad", RPC(publish=[bad])
    unknown = Message(data=b"x", seqno=bytes(8), topic=TOPIC)
    unknown.MergeFromString(b"\xa2\x06" + b"\x80\x80\xf0\x01" + bytes(0x3C0000))
    sign(unknown, key)
    yield "unknown fields of 4 MiB, good", RPC(publish=[unknown])
    fields = Message(data=b"x", seqno=bytes(8), topic=TOPIC)
    fields.MergeFromString(b"\xa0\x06\x01" * (room // 3))
    sign(fields, key)
    yield "1.4 million unknown fields, good", RPC(publish=[fields])
    for name, size in (("from", 1024), ("from", room)):
        rng = Random(size)

        def author(number: int, size: int = size, rng: Random = rng) -> Message:
            made = Message(data=b"x", seqno=number.to_bytes(8), topic=TOPIC, signature=bytes(64))
            setattr(made, "from", b"\xff" + rng.randbytes(size - 1))
            return made

        yield f"`{name}` of {size:,} bytes", fill(author)
    for name, data in (
        ("nested arrays", b"[" * room),
        ("an object of many keys", b'{"typ":0,' + b",".join(b'"%d":0' % n for n in range(300_000)) + b"}"),
        ("a number of 4 MiB", b'{"typ":' + b"9" * room + b"}"),
        ("a float of 4 MiB", b'{"typ":0.' + b"9" * (room - 20) + b"}"),
        ("escapes", b'{"typ":0,"stream":"' + b"\\u0041" * (room // 6 - 10) + b'"}'),
        ("tips", b'{"typ":1,"id":"a","tips":{' + b",".join(b'"%d":"a"' % n for n in range(250_000)) + b"}}"),
    ):
        made = Message(data=data, seqno=bytes(8), topic=TOPIC)
        sign(made, key)
        yield f"JSON: {name}", RPC(publish=[made])


def _many_items() -> Iterator[tuple[str, RPC]]:
    rng = Random(1)
    yield "2 million empty messages", RPC.FromString(b"\x12\x00" * (MAX_RPC // 2))
    yield "unsigned messages", fill(lambda number: Message(data=b"%d" % number, topic=TOPIC))
    names = RPC()
    for number in range(100_000):
        names.subscriptions.add(subscribe=True, topicid=f"{TOPIC}/sep/model/k{number}")
    yield "100,000 subscriptions", names
    yield "a million empty subscriptions", RPC.FromString(b"\x0a\x00" * (MAX_RPC // 2))
    forms: dict[str, Callable[[], bytes]] = {
        "ids of nothing": lambda: rng.randbytes(46),
        "ids as text": lambda: _text_id(rng),
        "ids with keys": lambda: b"\x08\x01\x12\x20" + rng.randbytes(40),
        "ids of a byte": lambda: rng.randbytes(1),
    }
    for name, form in forms.items():
        ids = RPC()
        drawn = [form() for _ in range(16_000)]
        ids.control.ihave.add(topicID=TOPIC, messageIDs=drawn)
        ids.control.iwant.add(messageIDs=drawn)
        ids.control.idontwant.add(messageIDs=drawn)
        yield f"48,000 {name}", ids
    ids = RPC()
    for number in range(5000):
        ids.control.ihave.add(topicID=TOPIC, messageIDs=[rng.randbytes(46)])
        ids.control.graft.add(topicID=f"{TOPIC}{number}")
        ids.control.prune.add(topicID=TOPIC, backoff=number).peers.add(peerID=bytes(34), signedPeerRecord=bytes(200))
    yield "5,000 items of control of each kind", ids
    yield "a million empty GRAFT", RPC.FromString(b"\x1a" + b"\xfe\xff\xff\x01"[:4] + b"\x1a\x00" * 0x1FFFFF)


def _text_id(rng: Random) -> bytes:
    return peer_text(build_ed25519_peer_id(rng.randbytes(32))).encode() + b"%d" % rng.getrandbits(60)


def measure(what: str, rpc: RPC) -> Cost:
    """Once, with nothing cached."""
    payload = rpc.SerializeToString()
    gc.collect()  # what made the RPC is not to be collected while the RPC is measured
    router = Router(b"\x00\x24own", RouterOptions(), Random(1), partial(check, policy="strict"))
    router.join(TOPIC)
    peers = [_PEER[:-1] + bytes([number]) for number in range(12)]
    for peer in peers:
        router.add_peer(peer, "/meshsub/1.2.0", True, 0.0)
        hello = RPC()
        hello.subscriptions.add(subscribe=True, topicid=TOPIC)
        hello.control.graft.add(topicID=TOPIC)
        router.receive(peer, hello, 0.0)
    began = time.thread_time()
    received = read_rpc(payload)
    if isinstance(received, RPC):
        router.receive(peers[0], received, 1.0)
    in_router = time.thread_time() - began
    at = 1_700_000_000_000_000_000
    value = Frame(
        connection=bytes(16), sequence=1, network="local-test", observed_at=at, payload=payload
    ).SerializeToString()
    decoder = FrameDecoder(DecodeConfig())
    began = time.thread_time()
    for _ in decoder.decode(value, 0, 0, 0):
        pass
    in_decoder = time.thread_time() - began
    most = 0.0
    for message in rpc.publish[:1]:
        began = time.thread_time()
        judgement = check(message, "strict")
        most = max(most, time.thread_time() - began)
        assert judgement.verdict is not Verdict.NOT_CHECKED
    return Cost(what, len(rpc.publish), len(payload), in_router, in_decoder, most)


def table(costs: list[Cost]) -> str:
    """In Markdown, a row for each."""
    return "\n".join((_HEADER, *map(str, costs)))


def slowness() -> float:
    """Return how many times longer a check takes now than with nothing else to do; 1 at least."""
    message = Message(data=bytes(300), seqno=bytes(8), topic=TOPIC)
    sign(message, Ed25519PrivateKey.generate())
    began = time.thread_time()
    for _ in range(2000):
        check(message, "strict")
    return max(1.0, (time.thread_time() - began) / 2000 / _USUAL_CHECK)


def dear(costs: list[Cost], slow: float) -> list[str]:
    """Return a sentence for each requirement that was not met, if a busy machine took `slow` times longer than idle."""
    return [
        f"{cost.what}: {seconds * 1e3:.0f} ms"
        for cost in costs
        for seconds, most in (
            (cost.router, MOST_OF_RPC),
            (cost.decoder, MOST_OF_RPC),
            (cost.most_of_message, MOST_OF_MESSAGE),
        )
        if seconds > most * slow
    ]
