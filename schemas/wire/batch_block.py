"""Reader and writer of the block of a batch (CIP-123, Batch format; decision 2).

The block is DAG-CBOR::

    {"tips": {<StreamID as base36 text>: [<link>, …], …}}        link = tag 42 over 00 ‖ CID bytes

CIP-123 specifies StreamIDs as bytes, but DAG-CBOR and all IPLD libraries only allow text as map keys. Kiln writes
blocks canonically: keys are sorted by length, then bytewise; the tips of a stream are distinct, and sorted by their CID
bytes. So equal tips give equal bytes with the same CID.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Final, NamedTuple

import cbor2
from cbor2 import CBORTag
from libipld import encode_dag_cbor

from kiln.schemas.wire.cid import CBOR, DAG_CBOR, RAW, SHA2_256, CidError, cid_text, compute_cid, parse_cid
from kiln.schemas.wire.streamid import StreamID, StreamIdError, stream_text

MAX_BLOCK = 256_000
"""Maximum size in bytes of a block that Kiln writes: js-ceramic's IPFS_MAX_COMMIT_SIZE, its limit for loaded blocks."""

_MAX_INVALID = 1_000  # maximum number of invalid entries that are returned for a block
_ITEMS_OF_ANY_BLOCK = 16_000  # a block may have this many CBOR items, and one more for each _BYTES_PER_ITEM
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
    """The bytes are not a batch block, or the tips cannot be written as one."""


class BatchBlock(NamedTuple):
    """A block of a batch, with its CID as base32 text (v1, dag-cbor, sha2-256)."""

    cid: str
    data: bytes


class InvalidEntry(NamedTuple):
    """Bytes of an invalid entry in a block that another program wrote, and the reason."""

    data: bytes
    why: str


class ForeignBlock(NamedTuple):
    """Content of a block that another program wrote."""

    tips: dict[str, list[str]]
    """CIDs of the tips as text, by the canonical text of the StreamID"""
    invalid: list[InvalidEntry]


def is_block_cid(cid: bytes) -> bool:
    """Return true if a CID can belong to a batch block: v1, sha2-256 of 32 bytes, codec dag-cbor, cbor or raw.

    CIP-123 does not specify the CID. Kiln can verify only sha2-256, and read only CBOR. A program that follows CIP-123
    literally writes map keys as bytes, which DAG-CBOR forbids, so it may use the codec cbor or raw.

    Raises:
        CidError: The bytes are not a CID.
    """
    parts = parse_cid(cid)
    return parts.codec in (DAG_CBOR, CBOR, RAW) and parts.hash == SHA2_256 and len(parts.digest) == 32


def encode_stream_key(stream: str) -> bytes:
    """Encode a StreamID as the start of the leaves (`write_leaves`) of its stream."""
    return stream.encode() + _KEY_END


def write_leaves(leaves: Collection[bytes], limit: int = MAX_BLOCK) -> list[BatchBlock]:
    """Write the tips of a batch as one or more blocks.

    A new block begins when the next stream would exceed the limit. The tips of a stream that does not fit into a block
    are split into parts, each as large as fits. No tips give no block.

    Args:
        leaves: Distinct tips in any order, each as ``encode_stream_key(stream)``, then the bytes of its CID. StreamIDs
            must be canonical and CIDs valid, which is not checked.
        limit: Maximum size of a block in bytes.

    Raises:
        BlockError: A block with a single tip exceeds the limit.
    """
    if not leaves:
        return []
    tips: dict[str, list[bytes]] = {}
    for leaf in leaves:
        key, _, tip = leaf.partition(_KEY_END)
        stream = key.decode()
        if stream in tips:
            tips[stream].append(tip)
        else:
            tips[stream] = [tip]
    for links in tips.values():
        if len(links) > 1:
            links.sort()
    is_larger = sum(map(len, tips)) > limit  # the StreamIDs alone exceed the limit
    blocks = [] if is_larger else [_encode(tips)]
    if is_larger or len(blocks[0]) > limit:
        blocks = [_encode(part) for part in _split(tips, limit)]
    return [BatchBlock(cid_text(compute_cid(block)), block) for block in blocks]


def _encode(tips: Mapping[str, list[bytes]]) -> bytes:
    """Encode a block. libipld sorts the keys canonically, and writes bytes that are a CID as a link."""
    if max(map(len, chain.from_iterable(tips.values())), default=0) <= _MAX_LIBIPLD_CID:
        data: bytes = encode_dag_cbor({"tips": tips})
        return data
    links = {stream: [CBORTag(42, b"\0" + tip) for tip in tips[stream]] for stream in _sort_streams(tips)}
    return cbor2.dumps({"tips": links})


def _split(tips: Mapping[str, list[bytes]], limit: int) -> Iterator[dict[str, list[bytes]]]:
    """Divide the tips of a batch into the blocks that ``write_leaves`` describes."""
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
    """Split the tips of a stream into parts, each as large as fits into ``room`` bytes of a block.

    Returns:
        Each part, and the size in bytes of the StreamID with this part in a block.
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
    """Sort StreamIDs in the canonical order of map keys: by length, then bytewise."""
    return sorted(sorted(streams), key=len)


def _compute_stream_size(stream: str, tips: list[bytes]) -> int:
    """Compute the size in bytes of a StreamID and its tips in a block."""
    links = sum(map(_compute_link_size, map(len, tips)))
    return _compute_head_size(len(stream)) + len(stream) + _compute_head_size(len(tips)) + links


@cache
def _compute_link_size(size: int) -> int:
    """Compute the size in bytes of a link to a CID of ``size`` bytes: tag 42, head of the byte string, 00 ‖ CID."""
    return 3 + _compute_head_size(size + 1) + size


def _compute_head_size(count: int) -> int:
    """Compute the size in bytes of a CBOR head with the argument ``count``."""
    return 1 if count < 24 else 2 if count < 1 << 8 else 3 if count < 1 << 16 else 5


_FRAME_SIZE: Final = len(_encode({})) - 1
"""Size in bytes of the part of a block before the map of its streams."""


def read_block(data: bytes) -> dict[str, list[str]]:
    """Read a block that Kiln wrote. A fault in any part makes the whole block invalid.

    Return CIDs of tips by StreamID, both as canonical text in the block's order.

    ``tips`` may have any form that CIP-123 permits: a map with text keys, a map with StreamID bytes as keys, or an
    array of pairs, ``[[key, [link, …]], …]``. Apart from these keys and their order, the block must be DAG-CBOR. A tip
    that a stream repeats is returned once. Blocks of any size are read, but a block with far more CBOR items than its
    size justifies is refused, because reading them would take seconds.

    Raises:
        BlockError: The block is invalid. The message names the position of the invalid byte.
    """
    reader = _Reader(data)
    if reader.head(_MAP, "the block") != 1:
        raise reader.error("a block of Kiln's own must be a map of one key, tips")
    if reader.take(reader.head(_TEXT, "the key of the block")) != b"tips":
        raise reader.error("the only key of a block of Kiln's own must be tips")
    batch: dict[str, list[str]] = {}
    pairs, count = reader.tips_head()
    for _ in range(count):
        reader.entry(pairs, batch)
    reader.end()
    return batch


def read_foreign_block(data: bytes) -> ForeignBlock:
    """Read a block that another program wrote, and keep all valid tips.

    This is more tolerant than ``read_block``: keys other than ``tips`` are ignored, and an invalid entry (no StreamID,
    no link, a repeated stream) does not affect other entries if its end can be found.

    Raises:
        BlockError: The block is not CBOR with definite lengths in their shortest form, or it has no ``tips``. The
            message names the position of the invalid byte.
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
        raise reader.error('the block has no key "tips"')
    return ForeignBlock(batch, invalid)


class _Reader:
    """Reader of the CBOR items in a batch block.

    A general decoder such as cbor2 would merge equal keys silently, build any tagged object that a peer sends, and
    recurse as deeply as a peer wishes.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.item = 0  # start of the item that was read last, for errors
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
        """Raise an error if ``count`` more items would exceed the limit on the items of the block."""
        if count > self.items_left:
            raise self.error(f"more items than the streams and tips of a block of {len(self.data)} bytes have")

    def count_items(self, count: int) -> None:
        self.require_items(count)
        self.items_left -= count

    def any_head(self) -> tuple[int, int]:
        """Read the head of a CBOR item. Return its major type and its argument: a length, count or tag number."""
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
        """Read the head of a CBOR item of the type ``major``, and return its argument. `name` is its name in errors."""
        actual, count = self.any_head()
        if actual != major:
            raise self.error(f"{name} must be {_MAJOR[major]}, not {_MAJOR[actual]}")
        return count

    def skip(self) -> None:
        """Skip a CBOR item of any type, with the items inside."""
        left = 1
        while left:
            self.require_items(left)
            left -= 1
            if self.at < len(self.data) and self.data[self.at] >> 5 == _SIMPLE:  # its argument may be a float
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
        """Raise an error if bytes follow the block."""
        if self.at != len(self.data):
            raise self.error(f"{len(self.data) - self.at} bytes follow the block")

    def tips_head(self) -> tuple[bool, int]:
        """Read the head of ``tips``. Return true if it is an array of pairs, and the number of entries."""
        major, count = self.any_head()
        if major not in (_MAP, _ARRAY):
            raise self.error(f"tips must be a map or an array of pairs, not {_MAJOR[major]}")
        self.require_items(2 * count)
        return major == _ARRAY, count

    def entry(self, pairs: bool, batch: dict[str, list[str]]) -> None:
        """Read a StreamID and its tips, and add them to ``batch``."""
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
