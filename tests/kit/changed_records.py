"""Records of `kiln.frames` that are changed at random: fields, structures, JSON, ids, topic tables and bytes. Most are
still Frames. Two decoders must read each of them in the same way."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import orjson
from google.protobuf.message import DecodeError
from libipld import encode_multibase

from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.topic_table import BundleSet, write_hello

BUNDLES = BundleSet({"three": {"/ceramic/local-bench", "/ceramic/x/sep/model/k2", "plain"}, "one": {"t"}})
_HASHES = list(BUNDLES)
_HELLOS = (
    b"",
    b"",
    write_hello(_HASHES),
    write_hello(_HASHES[:1]),
    write_hello(_HASHES[::-1]),
    b"\x0a\x04abcd",  # an unknown bundle
    b"\x0a\x03abc",  # refused
    b"\xff",
    write_hello(_HASHES) + b"\x10\x01",
)

_DIGEST = bytes(range(32))
_DAG_CBOR, _DAG_JOSE, _RAW = b"\x01\x71\x12\x20", b"\x01\x85\x01\x12\x20", b"\x01\x55\x12\x20"
_CIDS = (
    *(prefix + _DIGEST for prefix in (_DAG_CBOR, _DAG_JOSE, _RAW, b"\x12\x20", b"\x02\x71\x12\x20")),
    *(b"\x01\x71\x12\x1f" + _DIGEST[1:], b"\x01\x71\x00\x01x", b"\x01\x71\x00\x00", _DAG_CBOR + _DIGEST + b"x"),
)
_STREAM_TEXTS = [
    encode_multibase("k", b"\xce\x01" + kind + cid + rest)
    for kind in (b"\0", b"\3", b"\5", b"\6", b"\x80\1", b"\x83\0")
    for cid in _CIDS
    for rest in (b"", b"\0", _DAG_CBOR + _DIGEST)
]
_CID_TEXTS = [encode_multibase(base, cid) for base in "kzbfuBFKm" for cid in _CIDS]
_CID_TEXTS.append(encode_multibase("z", b"\x12\x20" + _DIGEST)[1:])
_KEYS = ("typ", "stream", "doc", "tip", "model", "id", "tips", "sep", "batch", "ts", "ver", "ipfsVer", "doctype", "cid")
_VALUES: tuple[object, ...] = (
    *(None, True, "", 0, 1, 2, 3, 4, 1.0, 1e300, -1, 2**63, 2**64 - 1, [], {}, "k0", "\ud7ff é😀", "a/k2", "x/y/z9"),
    *("/k1", "model/", "tile", "caip10-link", "\n", 8_640_000_000_000_000, 8_640_000_000_000_001),
)
_TOPICS = (
    *("", "/ceramic", "/ceramic/", "/ceramic/x", "/ceramic/x/sep/model/k2", "/ceramic/x/sep//k2", "/ceramic//y"),
    *("/ceramic/x/sep/k2", "/ceramic/é/sep/a/b/2z", "/ceramic/x/sep/a/bafy", "x" * 4096, "x" * 4097, "é" * 4096),
    *("/ceramic/x/sep/" + "a" * 1025 + "/k2", "plain"),
)
_PEER = bytes.fromhex("002408011220") + bytes(32)
_IDS = (
    *(_PEER + bytes(8), _PEER[2:] + bytes(8), b"\x12\x20" + bytes(40), b"12D3KooW" + b"A" * 44 + b"123", _PEER),
    *(_PEER[2:], _PEER + bytes(65), _PEER + bytes(64), b"\x08\x02\x12\x21" + bytes(33) + b"1"),
    *(bytes(size) for size in (0, 1, 20, 31, 32, 33, 36, 37, 38, 46, 47, 64, 65, 120)),
)


_TAILS = (
    *(b"\x1a\x00", b"\x0a\x00", b"\x12\x00", b"\x22\x01x", b"\x1a\x04\x1a\x02\x18\x01", b"\x0a\x02\x10\x00"),
    *(b"\x0a\x06\x08\x01\x12\x00\x20\x01", b"\x12\x04\x22\x02\xff\xfe", b"\x0a\x05\x12\x01t\x08\x01"),
)
"""Fields after an RPC"""


class RecordChanger:
    """Changes records at random. Equal seeds give equal changes."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def change(self, records: Sequence[bytes], count: int) -> list[bytes | None]:
        """Return `count` of the records in random order, most of them changed and some twice, and a `None`."""
        changed: list[bytes | None] = []
        for record in self._random.sample(records, count):
            value = self._change(record)
            changed.append(value)
            if self._random.random() < 0.02:
                changed.append(value)
        changed.insert(self._random.randrange(count), None)
        return changed

    def _change(self, record: bytes) -> bytes:
        choice = self._random.random()
        if choice > 0.9:
            return record
        frame = Frame.FromString(record)
        if choice < 0.5 and len(frame.payload) < 20_000:
            self._change_payload(frame)
        if 0.3 < choice < 0.8:
            for _ in range(self._random.choice((1, 1, 2))):
                self._random.choice(_FRAME_CHANGES)(self, frame)
        value = frame.SerializeToString()
        if self._random.random() < 0.05:
            value = self._pad_varints(value, 0)
        return self._flip(value) if choice > 0.75 else value

    def _flip(self, raw: bytes) -> bytes:
        changed = bytearray(raw)
        for _ in range(self._random.choice((1, 1, 2, 4))):
            choice, at = self._random.random(), self._random.randrange(len(changed) + 1)
            if choice < 0.5 and at < len(changed):
                changed[at] = self._random.choice((0, 1, 127, 128, 255, self._random.randrange(256)))
            elif choice < 0.75:
                del changed[at : at + self._random.randrange(1, 4)]
            else:
                changed[at:at] = self._random.randbytes(self._random.randrange(1, 4))
        return bytes(changed)

    def _change_payload(self, frame: Frame) -> None:
        try:
            rpc = RPC.FromString(frame.payload)
        except DecodeError:
            return
        choice = self._random.random()
        if rpc.publish and choice < 0.45:
            message = self._random.choice(rpc.publish)
            message.data = self._change_json(message.data)
        elif rpc.publish and choice < 0.65:
            self._change_envelope(self._random.choice(rpc.publish))
        elif choice < 0.75:
            self._use_topic_table(frame, rpc)
        elif choice < 0.95:
            self._add_entries(rpc)
        frame.payload = rpc.SerializeToString()
        if self._random.random() < 0.1:
            frame.payload = self._pad_varints(frame.payload, 2)
        if self._random.random() < 0.1:  # unknown, empty, repeated and reordered fields
            frame.payload += self._random.choice(_TAILS)

    def _change_json(self, data: bytes) -> bytes:
        try:
            message = orjson.loads(data)
        except orjson.JSONDecodeError:
            return self._flip(data)
        if not isinstance(message, dict):
            return data
        for _ in range(self._random.choice((1, 1, 2))):
            message = self._change_member(message)
        text = orjson.dumps(message)
        choice = self._random.random()
        if choice < 0.1:  # a key twice
            text = text[:-1] + b',"typ":%d}' % self._random.randrange(5)
        elif choice < 0.2:
            text = text.replace(b'"k', b'"\\u006b').replace(b":", b" :\t")
        elif choice < 0.25:
            text = b"\xef\xbb\xbf" + text
        return text

    def _change_member(self, message: dict[str, object]) -> dict[str, object]:
        key, choice = self._random.choice(_KEYS), self._random.random()
        stream, cid = self._random.choice(_STREAM_TEXTS), self._random.choice(_CID_TEXTS)
        if choice < 0.2:
            message.pop(key, None)
        elif choice < 0.5:
            message[key] = self._random.choice(_VALUES)
        elif choice < 0.6:
            message[key] = self._random.choice((stream, cid))
        elif choice < 0.65:
            return {"typ": 2, "id": "x", "tips": self._choose_tips()}
        elif choice < 0.7:
            return {"typ": 0, "stream": stream, "tip": cid}
        elif choice < 0.75:
            separator = self._random.choice(("model/k2", "a/b/2z", "/k2", "x", "m/bafy", "m/K2", "m/k"))
            return {"typ": self._random.choice((3, 4, 7)), "sep": separator, "batch": cid}
        elif isinstance(text := message.get(key), str):
            spellings = (
                text + "a",
                text[:-1],
                text.upper(),
                f"/ceramic/{text}",
                f"ceramic://{text}",
                text[:3] + text[4:],
            )
            message[key] = self._random.choice(spellings)
        return message

    def _choose_tips(self) -> dict[str, object]:
        """Choose tips by stream. Some streams occur in two spellings."""
        tips: dict[str, object] = {}
        for _ in range(self._random.randrange(3)):
            stream, tip = self._random.choice(_STREAM_TEXTS), self._random.choice(_CID_TEXTS)
            tips[stream] = tip
            if self._random.random() < 0.5:
                other = self._random.choice(_CID_TEXTS)
                tips[self._random.choice(("ceramic://", "/ceramic/")) + stream] = self._random.choice((tip, other))
        return tips

    def _change_envelope(self, message: Message) -> None:
        choice = self._random.randrange(7)
        if choice == 0:
            message.ClearField("signature")
        elif choice == 1:
            setattr(message, "from", self._random.choice((b"", b"x", _PEER, bytes(65), bytes(64), bytes(1025))))
        elif choice == 2:
            message.seqno = bytes(self._random.choice((0, 1, 64, 65)))
        elif choice == 3:
            message.ClearField("topic")
            if self._random.random() < 0.7:
                message.topicIndex = self._random.choice((0, 1, 2, 3, 4, 100, 2**32 - 1))
        elif choice == 4:
            message.topicIndex = self._random.choice((0, 1, 3))  # next to the name
        elif choice == 5:
            message.topic = self._random.choice(_TOPICS)
        else:
            message.ClearField("data")

    def _use_topic_table(self, frame: Frame, rpc: RPC) -> None:
        """Replace topic names by indices into the topic table on which the hellos agree."""
        frame.hello_in = frame.hello_out = write_hello(_HASHES)
        for message in rpc.publish:
            message.ClearField("topic")
            message.topicIndex = self._random.randrange(1, 5)
        for _ in range(self._random.randrange(3)):
            rpc.control.graft.add(topicIndex=self._random.randrange(1, 5))
            rpc.subscriptions.add(subscribe=True, topicIndex=self._random.randrange(1, 5))

    def _add_entries(self, rpc: RPC) -> None:
        control, topic = rpc.control, self._random.choice(_TOPICS)
        for _ in range(self._random.randrange(1, 4)):
            ids = [self._random.choice(_IDS) for _ in range(self._random.randrange(4))]
            choice = self._random.randrange(9)
            if choice == 0:
                control.ihave.add(messageIDs=ids, topicID=topic)
            elif choice == 1:
                control.iwant.add(messageIDs=ids)
            elif choice == 2:
                control.idontwant.add(messageIDs=ids)
            elif choice == 3:
                control.graft.add(topicID=topic, topicIndex=self._random.choice((None, None, 0)))
            elif choice == 4:
                prune = control.prune.add(topicID=topic, backoff=self._random.choice((0, 60, 2**63 - 1, 2**64 - 1)))
                prune.peers.add(peerID=b"x", signedPeerRecord=b"y" * 200)
            elif choice == 5:
                index = self._random.choice((None, None, 0, 1))
                rpc.subscriptions.add(subscribe=self._random.random() < 0.5, topicid=topic, topicIndex=index)
            elif choice == 6:
                rpc.subscriptions.add(subscribe=True, topicIndex=self._random.randrange(5))
            elif choice == 7:
                control.ihave.add(topicIndex=self._random.randrange(5))
            else:
                control.extensions.testExtension.SetInParent()

    def _pad_varints(self, raw: bytes, depth: int) -> bytes:
        """Encode the same fields, some with a varint that is longer than needed."""
        out, at = b"", 0

        def read() -> int:
            nonlocal at
            value = shift = 0
            while True:
                byte = raw[at]
                at += 1
                value |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    return value

        def write(value: int) -> bytes:
            written = bytearray()
            while value > 127:
                written.append(value & 127 | 128)
                value >>= 7
            written.append(value)
            if self._random.random() < 0.2:
                written[-1] |= 128
                written += bytes([128] * self._random.randrange(2)) + b"\0"
            return bytes(written)

        try:
            while at < len(raw):
                tag = read()
                out += write(tag)
                if tag & 7 == 0:
                    out += write(read())
                elif tag & 7 == 2:
                    size = read()
                    content = raw[at : at + size]
                    at += size
                    if depth and tag >> 3 in (1, 3):
                        content = self._pad_varints(content, depth - 1)
                    out += write(len(content)) + content
                else:
                    return raw
        except IndexError:
            return raw
        return out

    def _set(self, frame: Frame, name: str, *values: object) -> None:
        setattr(frame, name, self._random.choice(values))

    def _set_hellos(self, frame: Frame) -> None:
        frame.hello_in, frame.hello_out = self._random.choice(_HELLOS), self._random.choice(_HELLOS)

    def _set_verdicts(self, frame: Frame) -> None:
        frame.verdicts = bytes(self._random.randrange(7) for _ in range(self._random.randrange(4)))

    def _close(self, frame: Frame) -> None:
        frame.payload, frame.dialled = b"", self._random.random() < 0.5
        self._set(frame, "agent", "", "kubo", "é" * 200)
        self._set(frame, "end_reason", "", "bye")


_FRAME_CHANGES: tuple[Callable[[RecordChanger, Frame], None], ...] = (
    lambda changer, frame: changer._set(frame, "origin", 0, 1),
    lambda changer, frame: changer._set(frame, "direction", 0, 1),
    RecordChanger._set_verdicts,
    RecordChanger._set_hellos,
    RecordChanger._close,
    lambda changer, frame: changer._set(frame, "protocol", "bep50", "", "x" * 256, "x" * 257, "é" * 200),
    lambda changer, frame: changer._set(frame, "declared_length", 0, 1, 2**63),
    lambda changer, frame: changer._set(frame, "sequence", 0, 1, 2, 3, 4, 5, 2**63 - 1, 2**63),
    lambda changer, frame: changer._set(
        frame, "observed_at", 0, -1, 946_684_800_000_000_000, 4_102_444_799_999_999_999, 4_102_444_800_000_000_000
    ),
    lambda changer, frame: changer._set(frame, "remote_peer", b"", b"\0", bytes(64), bytes(65), b"\0\0x"),
    lambda changer, frame: changer._set(frame, "network", "", "é" * 128, "é" * 129, "x" * 256, "x" * 257, "a\nb"),
    lambda changer, frame: changer._set(frame, "connection", b"c" * 16, b"d" * 16, b"e" * 15),
    lambda changer, frame: changer._set(frame, "remote_address", bytes(8), bytes(1024), bytes(1025)),
    lambda changer, frame: changer._set(frame, "local_peer", b"", frame.remote_peer, _PEER),
)
