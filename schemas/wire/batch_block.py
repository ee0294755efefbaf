"""The block of a CIP-123 batch ("Batch format"; docs/design, decision 2).

DAG-CBOR::

    {"tips": {<StreamID as base36 text>: [<link>, …], …}}        link = tag 42 over 00 ‖ CID bytes

CIP-123 writes the StreamID as bytes, which DAG-CBOR forbids as a map key and every IPLD library refuses; RESPONSE
messages of the same protocol use text keys. A block is written canonically: keys by length, then bytewise; tips without
repeats, in order of their CID bytes. So equal contents are equal bytes with one CID, for every writer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Final, NamedTuple

import cbor2
from cbor2 import CBORTag
from libipld import encode_dag_cbor

from kiln.schemas.wire.cid import CBOR, DAG_CBOR, RAW, SHA2_256, CidError, cid_text, compute_cid, is_cid, parse_cid
from kiln.schemas.wire.streamid import StreamID, StreamIdError, stream_text

MAX_BLOCK = 256_000
"""Largest block written, in bytes: js-ceramic's IPFS_MAX_COMMIT_SIZE, which it applies to every block it loads."""

_MAX_INVALID = 1_000  # invalid entries of one block that are listed
_ITEMS_OF_ANY_BLOCK = 16_000  # CBOR items that a block of any size may have, and one more for each _BYTES_PER_ITEM
_BYTES_PER_ITEM = 8  # a stream with one tip has four items in over 100 bytes, and each further tip two in 41
_KEY_END = b"\n"  # occurs in no StreamID text
_MAX_LIBIPLD_CID = 64  # bytes; libipld does not write a CID with a longer digest as a link
_ITEMS_PER_INVALID = 8  # an invalid entry costs as much time as this many items, in addition to its own items

_TEXT, _BYTES, _ARRAY, _MAP, _TAG, _SIMPLE = 3, 2, 4, 5, 6, 7
_MAJOR = {
    0: "an integer",
    1: "a negative integer",
    2: "bytes",
    3: "text",
    4: "an array",
    5: "a map",
    6: "a tag",
    7: "a simple value",
}


class BlockError(ValueError):
    """The bytes are no batch block, or the tips do not fit into one."""


class BatchBlock(NamedTuple):
    """A written block: its CID (v1, dag-cbor, sha2-256, base32 text) and its bytes."""

    cid: str
    data: bytes


class InvalidEntry(NamedTuple):
    """An invalid entry of another writer's block: its bytes, and the reason."""

    data: bytes
    why: str


class ForeignBlock(NamedTuple):
    """Another writer's block."""

    tips: dict[str, list[str]]
    """CID texts of the tips, by canonical StreamID text"""
    invalid: list[InvalidEntry]


def is_block_cid(cid: bytes) -> bool:
    """Return true if a CID can name a batch block: v1, sha2-256 of 32 bytes, codec dag-cbor, cbor or raw.

    CIP-123 specifies none of these. Only sha2-256 is checked (`kiln.schemas.wire.cid.check_block`), and only CBOR is
    read. A writer that follows CIP-123 literally has byte keys, which DAG-CBOR forbids, and may write the codec cbor or
    raw.

    Raises:
        CidError: ``cid`` is not one CID.
    """
    parts = parse_cid(cid)
    return parts.codec in (DAG_CBOR, CBOR, RAW) and parts.hash == SHA2_256 and len(parts.digest) == 32


def write_blocks(tips: Mapping[str, Iterable[bytes]], limit: int = MAX_BLOCK) -> list[BatchBlock]:
    """Write the tips of a batch (StreamID text -> CID bytes of its tips) as blocks of at most ``limit`` bytes each.

    A new block begins when the next stream would exceed the limit. If a stream does not fit into one block, its sorted
    tips are split into parts, each as large as fits. The block with the last part may hold further streams. The order
    of ``tips`` does not matter. A stream without tips is left out, and no tips at all give no block.

    Raises:
        BlockError: A key is not a canonical StreamID, a tip is not a CID, or a tip does not fit into the limit.
    """
    leaves: set[bytes] = set()
    for stream, links in tips.items():
        _require_canonical(stream)
        key = encode_stream_key(stream)
        for tip in links:
            if not is_cid(tip):
                raise BlockError(f"tip {tip[:40].hex()} of stream {stream} is not a CID")
            leaves.add(key + tip)
    return write_leaves(leaves, limit)


def encode_stream_key(stream: str) -> bytes:
    """Encode a StreamID as the start of its leaves."""
    return stream.encode() + _KEY_END


def list_tips(leaves: Iterable[bytes]) -> dict[str, list[bytes]]:
    """Group leaves by stream: StreamID text -> CID bytes."""
    tips: dict[str, list[bytes]] = {}
    for leaf in leaves:
        key, _, tip = leaf.partition(_KEY_END)
        stream = key.decode()
        if stream in tips:
            tips[stream].append(tip)
        else:
            tips[stream] = [tip]
    return tips


def write_leaves(leaves: Collection[bytes], limit: int = MAX_BLOCK) -> list[BatchBlock]:
    """Write tips as ``write_blocks`` does, from leaves.

    A leaf is one tip of one stream: ``encode_stream_key(stream)``, then the bytes of the CID. The leaves are distinct,
    with canonical StreamIDs and valid CIDs; this is not checked.

    Raises:
        BlockError: The limit is too small even for one tip.
    """
    if not leaves:
        return []
    tips = list_tips(leaves)
    for links in tips.values():
        if len(links) > 1:
            links.sort()
    is_larger = sum(map(len, tips)) > limit  # its keys alone
    blocks = [] if is_larger else [_encode(tips)]
    if is_larger or len(blocks[0]) > limit:
        blocks = [_encode(part) for part in _split(tips, limit)]
    return [BatchBlock(cid_text(compute_cid(block)), block) for block in blocks]


def _encode(tips: Mapping[str, list[bytes]]) -> bytes:
    """Encode a block. libipld writes keys in canonical order, and bytes that are a CID as a link."""
    if max(map(len, chain.from_iterable(tips.values())), default=0) <= _MAX_LIBIPLD_CID:
        data: bytes = encode_dag_cbor({"tips": tips})
        return data
    links = {stream: [CBORTag(42, b"\0" + tip) for tip in tips[stream]] for stream in _sort_streams(tips)}
    return cbor2.dumps({"tips": links})


def _split(tips: Mapping[str, list[bytes]], limit: int) -> Iterator[dict[str, list[bytes]]]:
    """Split the tips of a batch among blocks, as ``write_blocks`` does."""
    room = limit - _FRAME_SIZE
    block: dict[str, list[bytes]] = {}
    size = 0  # bytes of the streams in the block
    for stream in _sort_streams(tips):
        for part, added in _split_stream(stream, tips[stream], room - 1):
            if block and _compute_head_size(len(block) + 1) + size + added > room:
                yield block
                block, size = {}, 0
            block[stream] = part
            size += added
    yield block


def _split_stream(stream: str, tips: list[bytes], room: int) -> Iterable[tuple[list[bytes], int]]:
    """Split the tips of a stream, if they do not fit into ``room`` bytes, into parts, each as large as fits.

    Returns:
        Each part, and the size in bytes of the stream with this part in a block.
    """
    size = _compute_stream_size(stream, tips)
    if size <= room:
        return ((tips, size),)
    empty = _compute_stream_size(stream, []) - 1  # without the head of the tips
    parts: list[list[bytes]] = [[]]
    size = empty
    for tip in tips:
        added = _compute_link_size(len(tip))
        if size + _compute_head_size(len(parts[-1]) + 1) + added > room:
            if not parts[-1]:
                limit = _FRAME_SIZE + 1 + room
                raise BlockError(f"a tip of stream {stream} does not fit into a block of {limit} bytes")
            parts.append([])
            size = empty
        parts[-1].append(tip)
        size += added
    return ((part, _compute_stream_size(stream, part)) for part in parts)


def _sort_streams(streams: Iterable[str]) -> list[str]:
    """Sort keys in canonical order: by length, then bytewise."""
    return sorted(sorted(streams), key=len)


def _compute_stream_size(stream: str, tips: list[bytes]) -> int:
    """Compute the size of a stream with its tips in a block, in bytes."""
    links = sum(map(_compute_link_size, map(len, tips)))
    return _compute_head_size(len(stream)) + len(stream) + _compute_head_size(len(tips)) + links


@cache
def _compute_link_size(size: int) -> int:
    """Compute the size of a link to a CID of ``size`` bytes: tag 42, the head of the byte string, 00 ‖ CID."""
    return 3 + _compute_head_size(size + 1) + size


def _compute_head_size(count: int) -> int:
    """Compute the size of a CBOR head with the argument ``count`` in bytes."""
    return 1 if count < 24 else 2 if count < 1 << 8 else 3 if count < 1 << 16 else 5


_FRAME_SIZE: Final = len(_encode({})) - 1
"""bytes of a block before the map of its streams"""


def _require_canonical(stream: str) -> None:
    try:
        canonical = stream_text(stream)
    except StreamIdError as error:
        raise BlockError(f"cannot write a batch of {stream[:80]!r}: {error}") from error
    if canonical != stream:
        raise BlockError(f"cannot write a batch of {stream[:80]!r}: write it as {canonical}")


def read_block(data: bytes) -> dict[str, list[str]]:
    """Read a batch block: canonical StreamID text -> CID text of its tips, both in the block's order.

    Accepts the three forms of ``tips`` that CIP-123 permits: a map with text keys, the literal map with byte keys
    (StreamID bytes), and the list-pairs form of an IPLD map, ``[[key, [link, …]], …]``. Otherwise the block must be
    DAG-CBOR, except for key order: definite lengths, shortest heads, only tag 42, nothing after the end. A repeated tip
    of a stream is returned once. There is no size limit: MAX_BLOCK applies to writers. A block with many more items
    than the streams and tips of a block of its size can have is refused early, since reading the items would take
    seconds.

    Raises:
        BlockError: The block is invalid. The message names the byte.
    """
    reader = _Reader(data)
    if reader.head(_MAP, "the block") != 1:
        raise reader.error("the block must be a map of one key, tips")
    if reader.take(reader.head(_TEXT, "the key of the block")) != b"tips":
        raise reader.error("the only key of the block must be tips")
    batch: dict[str, list[str]] = {}
    pairs, count = reader.tips_head()
    for _ in range(count):
        reader.entry(pairs, batch)
    reader.end()
    return batch


def read_foreign_block(data: bytes) -> ForeignBlock:
    """Read a block of another writer, as ``read_block`` does, and keep all valid tips.

    Keys other than ``tips`` are ignored. An invalid entry (no StreamID, no link, a repeated stream) does not affect
    other entries if its end can be found.

    Raises:
        BlockError: The block is not CBOR of definite, shortest lengths, or no batch. The message names the byte.
    """
    reader = _Reader(data)
    batch: dict[str, list[str]] = {}
    invalid: list[InvalidEntry] = []
    has_tips, more = False, 0
    for _ in range(reader.head(_MAP, "the block")):
        key = reader.take(reader.head(_TEXT, "a key of the block"))
        if key != b"tips" or has_tips:
            reader.skip()
            continue
        has_tips = True
        pairs, count = reader.tips_head()
        for _ in range(count):
            begin = reader.at
            try:
                reader.entry(pairs, batch)
            except BlockError as error:
                reader.at = begin
                reader.count_items(_ITEMS_PER_INVALID)
                for _ in range(1 if pairs else 2):
                    reader.skip()
                if len(invalid) < _MAX_INVALID:
                    invalid.append(InvalidEntry(data[begin : reader.at], str(error)))
                else:
                    more += 1
    reader.end()
    if more:
        invalid.append(InvalidEntry(b"", f"{more} more entries are invalid"))
    if not has_tips:
        raise reader.error("the block must have the key tips")
    return ForeignBlock(batch, invalid)


class _Reader:
    """Reader of the few CBOR items in a batch block.

    A general decoder such as cbor2 silently merges equal keys, builds any tagged object that a peer sends, and
    recurses.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.item = 0  # start of the item that was read last
        self.items_left = _ITEMS_OF_ANY_BLOCK + len(data) // _BYTES_PER_ITEM

    def error(self, description: str) -> BlockError:
        return BlockError(f"not a batch block, at byte {self.item}: {description}")

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise self.error(f"the block is cut short: {end - len(self.data)} bytes are missing")
        data = self.data[self.at : end]
        self.at = end
        return data

    def require_items(self, count: int) -> None:
        """Require that the limit of items allows ``count`` more."""
        if count > self.items_left:
            raise self.error(f"more items than the streams and tips of a block of {len(self.data)} bytes have")

    def count_items(self, count: int) -> None:
        self.require_items(count)
        self.items_left -= count

    def any_head(self) -> tuple[int, int]:
        """Read a head; return its major type and its count (length, tag number)."""
        self.count_items(1)
        self.item = self.at
        initial = self.take(1)[0]
        major, short = initial >> 5, initial & 0x1F
        if short < 24:
            return major, short
        if short > 27:
            raise self.error("an indefinite length, which DAG-CBOR does not have")
        width = 1 << (short - 24)
        count = int.from_bytes(self.take(width), "big")
        if count < (24 if width == 1 else 1 << (width * 4)):
            raise self.error("a length that is not in its shortest form")
        return major, count

    def head(self, major: int, name: str) -> int:
        """Read a head of the major type ``major``; return its count."""
        actual, count = self.any_head()
        if actual != major:
            raise self.error(f"{name} must be {_MAJOR[major]}, not {_MAJOR[actual]}")
        return count

    def skip(self) -> None:
        """Skip one item of any type, with all that it contains."""
        left = 1
        while left:
            self.require_items(left)
            left -= 1
            if self.at < len(self.data) and self.data[self.at] >> 5 == _SIMPLE:  # its count may be a float
                self.count_items(1)
                self.item = self.at
                short = self.take(1)[0] & 0x1F
                if short > 27:
                    raise self.error("an indefinite length, which DAG-CBOR does not have")
                self.take(1 << (short - 24) if short >= 24 else 0)
                continue
            major, count = self.any_head()
            if major in (_TEXT, _BYTES):
                self.take(count)
            else:
                left += {_ARRAY: count, _MAP: 2 * count, _TAG: 1}.get(major, 0)

    def end(self) -> None:
        """Require the end of the block."""
        if self.at != len(self.data):
            raise self.error(f"{len(self.data) - self.at} bytes follow the block")

    def tips_head(self) -> tuple[bool, int]:
        """Read the head of ``tips``; return true for an array of pairs, and the number of entries."""
        major, count = self.any_head()
        if major not in (_MAP, _ARRAY):
            raise self.error(f"tips must be a map or an array of pairs, not {_MAJOR[major]}")
        self.require_items(2 * count)
        return major == _ARRAY, count

    def entry(self, pairs: bool, batch: dict[str, list[str]]) -> None:
        """Read a stream and its tips into ``batch``."""
        if pairs and self.head(_ARRAY, "an entry of tips") != 2:
            raise self.error("an entry of tips must be a pair: a StreamID and its tips")
        stream = self.stream()
        if stream in batch:
            raise self.error(f"stream {stream} occurs twice")
        links = [self.link() for _ in range(self.head(_ARRAY, f"the tips of {stream}"))]
        batch[stream] = list(dict.fromkeys(links))

    def stream(self) -> str:
        major, length = self.any_head()
        if major not in (_TEXT, _BYTES):
            raise self.error(f"a StreamID must be text or bytes, not {_MAJOR[major]}")
        raw = self.take(length)
        try:
            return stream_text(raw.decode()) if major == _TEXT else StreamID.from_bytes(raw).text
        except (StreamIdError, UnicodeDecodeError) as error:
            raise self.error(f"not a StreamID: {error}") from error

    def link(self) -> str:
        if self.head(_TAG, "a tip") != 42:
            raise self.error("a tip must be a link, tag 42")
        raw = self.take(self.head(_BYTES, "a link"))
        if not raw.startswith(b"\x00"):
            raise self.error("a link must begin with a zero byte")
        try:
            return cid_text(raw[1:])
        except CidError as error:
            raise self.error(f"not a CID: {error}") from error
