"""The targets: each takes any bytes, and raises only where Kiln would be at fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BytesIO
from itertools import islice
from random import Random
from typing import Final

from kiln.bridge.bep50.store import decode_topic
from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.router import Router
from kiln.bridge.gossipsub.table_agreements import TableAgreements
from kiln.bridge.gossipsub.wire import OversizedRpc, RpcSplitter, WireError, encode
from kiln.bridge.ipfs.bitswap.engine import BitswapEngine, EngineLimits
from kiln.bridge.ipfs.bitswap.messages import PROTOCOLS, MessageError, write_message
from kiln.bridge.ipfs.bitswap.messages import read_message as read_message_of_bitswap
from kiln.bridge.libp2p.kademlia import read_address
from kiln.bridge.publisher.transition import HeightError, read_height
from kiln.pipelines.batch.windows import PartitionWindows
from kiln.pipelines.decode.decoder import DecodeConfig, FrameDecoder
from kiln.schemas.captures.compression import DamagedError
from kiln.schemas.captures.formats import FORMATS, describe_file, detect_format
from kiln.schemas.captures.items import REASONS as HISTORY_REASONS
from kiln.schemas.captures.items import FileSource, UnreadableItem
from kiln.schemas.captures.kiln_capture import CaptureError, read_capture
from kiln.schemas.captures.lines import WHOLE
from kiln.schemas.dht import bencode, krpc
from kiln.schemas.dht.announcement import read_datagram
from kiln.schemas.kafka import records
from kiln.schemas.kafka.frames import read_frame, read_rpc
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.batch_block import BlockError, read_block, read_foreign_block
from kiln.schemas.wire.cid import CidError, cid_bytes, cid_text, compute_cid
from kiln.schemas.wire.genesis import NeedsBlock, read_genesis
from kiln.schemas.wire.pubsub import read_message
from kiln.schemas.wire.streamid import StreamID, StreamIdError
from kiln.schemas.wire.topic_table import BundleSet, negotiate_table, parse_hello
from kiln.schemas.wire.topics import TopicError, format_topic, parse_interest, parse_separator, parse_topic
from kit.control_truth import check_control_part
from kit.plain_batcher import LogRecord, batch_partition, plainly
from kit.scripted_peers import MESHSUB, T, check, message, peer

BUNDLES: Final = BundleSet({"one": [T], "two": ["/ceramic/testnet-clay", "/ceramic/inmemory"]})
NETWORK: Final = "local-fuzz"

Target = Callable[[bytes], None]
TARGETS: Final[dict[str, Target]] = {}


STEPS: Final = frozenset({"router", "batcher"})
"""Targets that read bytes as steps: what a byte costs says nothing of them."""


def target(function: Target) -> Target:
    """Puts a function into the list, under its name."""
    TARGETS[function.__name__] = function
    return function


# ---------------------------------------------------------------- from peers


@target
def wire(data: bytes) -> None:
    """RPCs out of a stream: the same however the bytes come."""
    assert _split([data]) == _split([data[:1], data[1 : len(data) // 2 or 1], data[len(data) // 2 or 1 :]])
    assert _split([encode(data)]) == ([data] if len(data) <= 1000 else [OversizedRpc(data[:100], len(data))])


def _split(chunks: list[bytes]) -> list[bytes | OversizedRpc | str]:
    splitter, found = RpcSplitter(1000, 100), list[bytes | OversizedRpc | str]()
    try:
        for chunk in chunks:
            found += splitter.feed(chunk)  # what was whole before an error counts
    except WireError:
        found = [each for each in found if isinstance(each, OversizedRpc)]
    return found


@target
def rpc(data: bytes) -> None:
    """An RPC."""
    read_rpc(data)


@target
def control(data: bytes) -> None:
    """The control part of an RPC: what protobuf has of it."""
    check_control_part(data, 400)  # entry by entry, it costs more than what is measured


@target
def frame(data: bytes) -> None:
    """A record of `kiln.frames`, through all of decoding."""
    for _ in FrameDecoder(DecodeConfig(bundles=BUNDLES)).decode(data, 0, 0, 0):
        pass
    read_frame(data)


@target
def payload(data: bytes) -> None:
    """What a peer sent, in a good frame, through all of decoding."""
    made = Frame(network=NETWORK, connection=bytes(16), sequence=1, protocol=MESHSUB, payload=data)
    for _ in FrameDecoder(DecodeConfig(bundles=BUNDLES)).decode_frame(made, 0, 0):
        pass


@target
def pubsub(data: bytes) -> None:
    """The data of a message."""
    read_message(data)


@target
def hello(data: bytes) -> None:
    """The topic table of a peer's first RPC."""
    parse_hello(data)
    negotiate_table(data, data[::-1], BUNDLES)


@target
def topic(data: bytes) -> None:
    """The name of a topic, a separator's text, an interest's."""
    text = data.decode(errors="replace")
    parsed = parse_topic(text)
    if parsed is not None and parsed.separator is not None:
        assert parse_topic(format_topic(parsed.network, parsed.separator)) == parsed
    with suppress(TopicError):
        parse_separator(text)
    with suppress(TopicError):
        parse_interest(text)


@target
def cid(data: bytes) -> None:
    """A CID, as bytes and as text."""
    with suppress(CidError):
        assert cid_bytes(cid_text(data)) == data
    with suppress(CidError):
        cid_bytes(data.decode("latin-1"))


@target
def streamid(data: bytes) -> None:
    """A StreamID, as bytes and as text."""
    with suppress(StreamIdError):
        assert StreamID.from_bytes(data).bytes == data
    with suppress(StreamIdError):
        StreamID.parse(data.decode("latin-1"))


@target
def dht_address(data: bytes) -> None:
    """A multiaddr that a stranger named."""
    read_address(data, data[-38:])


@target
def bitswap(data: bytes) -> None:
    """A message of bitswap, from a peer that was asked for a block. What waits for the peer stays within its bounds."""
    who, protocol = b"peer", PROTOCOLS[len(data) % len(PROTOCOLS)]
    engine = BitswapEngine(_FEW)
    engine.set_peers({who}, 0.0)
    engine.want(compute_cid(b"wanted"), compute_cid(b"wanted")[-32:], [who], 0.0)
    try:
        received = engine.receive(who, read_message_of_bitswap(data, protocol), 1.0)
    except MessageError:
        return
    engine.resolve(who, {cid: len(cid) << cid[-1] % 12 if cid[-1] & 1 else None for cid in received.lookups})
    sizes = engine.sizes
    assert sizes["wants"] <= _FEW.wants, sizes
    assert max(sizes["blocks"], sizes["presences"]) <= _FEW.replies, sizes
    while (output := engine.next_output(who)) is not None:
        blocks = [(cid, b"") for cid, _ in output.blocks]
        read_message_of_bitswap(
            write_message(protocol, output.wants, output.haves, output.dont_haves, blocks), protocol
        )


_FEW: Final = EngineLimits(wants=20, replies=10, message_bytes=1000)


# ---------------------------------------------------------------- blocks


@target
def block(data: bytes) -> None:
    """The block of a batch: strictly, and as another writer's, of which all valid tips are kept."""
    strict = None
    with suppress(BlockError):
        strict = read_block(data)
    with suppress(BlockError):
        found = read_foreign_block(data)
        assert strict is None or (found.tips, found.invalid) == (strict, [])
        strict = None
    assert strict is None


@target
def genesis(data: bytes) -> None:
    """A genesis, unsigned or signed; the second half of the bytes is there as a block, too. Blocks fit their CIDs."""
    root = compute_cid(data, 0x85 if len(data) & 1 else 0x71)
    rest = data[len(data) // 2 :]
    blocks = {root: data, compute_cid(rest): rest}
    found = read_genesis(root, blocks, "model")
    assert not (isinstance(found, NeedsBlock) and found.cid in blocks)


# ---------------------------------------------------------------- BitTorrent


@target
def bencoded(data: bytes) -> None:
    """Bencoding: what is read is written back as it was."""
    with suppress(bencode.BencodeError):
        assert bencode.encode(bencode.decode(data)) == data


@target
def datagram(data: bytes) -> None:
    """A datagram of the DHT, and the announcement in it."""
    krpc.read_message(data)
    read_datagram(data, NETWORK)


@target
def stored(data: bytes) -> None:
    """The file of a topic of BEP 50."""
    with suppress(ValueError):
        decode_topic(data)


# ---------------------------------------------------------------- files and the log


@target
def capture(data: bytes) -> None:
    """A capture file, not compressed."""
    with suppress(CaptureError):
        for _ in read_capture(BytesIO(data)):
            pass


@target
def kubo_sub(data: bytes) -> None:
    """What Kubo's pubsub/sub answered."""
    _history("kubo-sub", data)


@target
def ceramic_log(data: bytes) -> None:
    """A service log of js-ceramic."""
    _history("ceramic-log", data)


@target
def trace_json(data: bytes) -> None:
    """A trace of go-libp2p-pubsub, in JSON."""
    _history("pubsub-trace-json", data)


@target
def trace_pb(data: bytes) -> None:
    """A trace of go-libp2p-pubsub, in protobuf."""
    _history("pubsub-trace-pb", data)


@target
def history_format(data: bytes) -> None:
    """The beginning of a file of which nobody has said the format."""
    detect_format(BytesIO(data))
    describe_file(BytesIO(data))


def _history(name: str, data: bytes) -> None:
    """Every item is a Frame that the decoder takes, or has a reason."""
    with suppress(DamagedError):
        for item in FORMATS[name].read(BytesIO(data), FileSource(bytes(32), NETWORK, 0), WHOLE):
            if isinstance(item, UnreadableItem):
                assert item.reason in HISTORY_REASONS
            else:
                assert isinstance(read_frame(item.SerializeToString()), Frame)


@target
def record(data: bytes) -> None:
    """The records of every topic in JSON, and a key of `kiln.quarantine`."""
    for decode in _DECODERS:
        with suppress(*records.UNREADABLE):
            decode(data)
    with suppress(ValueError):
        records.parse_quarantine_key(data)


_DECODERS: Final[tuple[Callable[[bytes], object], ...]] = (
    records.decode_update,
    records.decode_batch,
    records.decode_publication,
    records.decode_stream,
    records.decode_quarantine,
    records.decode_wanted,
    records.decode_block,
)


@target
def height(data: bytes) -> None:
    """The answer of an Ethereum node."""
    with suppress(HeightError):
        read_height(data)


# ---------------------------------------------------------------- with state


@target
def router(data: bytes) -> None:
    """A router between six peers: RPCs, comings, goings, heartbeats. Its memories stay within their bounds."""
    made = Router(b"\x00\x24own", _NARROW, Random(1), check, TableAgreements(BUNDLES))
    made.join(T)
    now, rest = 0.0, BytesIO(data)
    for step in islice(_steps(rest), 200):
        who = peer(step % 6)
        now += (step >> 3 & 7) * 0.3
        match step >> 6, step & 7:
            case 0, 6:
                made.heartbeat(now)
            case 0, 7:
                made.publish(message(step), now)
            case 1, _ if who in made.peers:
                made.remove_peer(who, now)
            case _:
                if who not in made.peers:
                    made.add_peer(who, MESHSUB if step % 3 else "/floodsub/1.0.0", bool(step & 1), now)
                sent = _rpc(rest, step)
                if sent is not None:
                    _, _, verdicts = made.receive(who, sent, now)
                    assert len(verdicts) in (0, len(sent.publish))
    sizes = made.sizes
    assert sizes["seen"] <= _NARROW.seen_cap, sizes
    assert sizes["backoff"] <= _NARROW.max_backoffs, sizes
    assert sizes["topics"] <= 6 * (_NARROW.max_topics_per_peer + 1), sizes


_NARROW: Final = RouterOptions(seen_cap=50, max_backoffs=20, max_topics_per_peer=8, max_retained_scores=4)


def _steps(rest: BytesIO) -> Iterator[int]:
    while byte := rest.read(1):
        yield byte[0]


def _rpc(rest: BytesIO, step: int) -> RPC | None:
    """The next length and bytes as an RPC; a good message of the topic where they are none."""
    size = rest.read(1)
    found = read_rpc(rest.read(size[0])) if size else None
    return found if isinstance(found, RPC) else RPC(publish=[message(step)])


@target
def batcher(data: bytes) -> None:
    """A partition in several micro-batches, its state kept between them: the same as record by record, said plainly."""
    log: list[list[LogRecord]] = [[]]
    stamp = 1_700_000_001_000_000
    for offset, step in enumerate(islice(data, 300)):
        stamp += (step & 3) * 400_000 - 200_000 * (step & 4)
        if step & 0x80 and step & 0x40:
            log.append([])
        value = b"" if step & 0x80 else _update(step >> 3 & 15, stamp - 300_000 * (step >> 5 & 3))
        log[-1].append(LogRecord(0, offset, stamp, value))
    quick, plain = b"", PartitionWindows(1_000_000)
    for part in log:
        windows = PartitionWindows(1_000_000, quick)
        assert list(batch_partition(windows, part, 400)) == list(plainly(plain, part, 400))
        quick = windows.dump()


@target
def batcher_state(data: bytes) -> None:
    """A value of `kiln.updates` of any bytes, alone in the batcher."""
    outputs = list(
        batch_partition(PartitionWindows(1_000_000), [LogRecord(0, 0, 1, data), LogRecord(0, 1, 2, b"")], 400)
    )
    assert len(outputs) <= 1


_TIPS: Final = tuple(cid_text(compute_cid(b"%d" % number)) for number in range(4))
_STREAMS: Final = tuple(StreamID(3, compute_cid(b"stream %d" % number)).text for number in range(4))


def _update(number: int, heard: int) -> bytes:
    return records.encode(
        records.UpdateRecord(
            network=NETWORK,
            origin="LIVE",
            separator=records.SeparatorRecord("model", "k2t6") if number & 8 else None,
            separator_source="topic" if number & 8 else None,
            stream=_STREAMS[number & 3],
            tip=_TIPS[number >> 1 & 3],
            from_="author",
            message_id=f"m{number}",
            epoch=records.Epoch("query", number & 1),
            frame=records.Coordinates(0, 0, 0),
            observed_at=heard,
        )
    )
