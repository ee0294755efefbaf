"""The block of a CIP-123 batch ("Batch format"; docs/design, decision 2).

DAG-CBOR::

    {"tips": {<StreamID as base36 text>: [<link>, …], …}}        link = tag 42 over 00 ‖ CID bytes

CIP-123 writes the StreamID as bytes, which DAG-CBOR forbids as a map key and every IPLD library refuses; text keys are
what RESPONSE messages of the same protocol use. Written canonically: keys by length, then bytewise; tips without
repeats, in order of their CID bytes. So equal contents are equal bytes, with one CID, whoever writes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

from kiln.schemas.wire.cid import CBOR, DAG_CBOR, RAW, SHA2_256, CidError, compute_cid, parse_cid, cid_text, is_cid
from kiln.schemas.wire.streamid import MAX_TEXT, StreamID, StreamIdError, stream_text

MAX_BLOCK = 256_000
"""Largest block written, in bytes: js-ceramic's IPFS_MAX_COMMIT_SIZE, which it applies to every block it loads."""

_MOST_BAD = 1_000  # entries of one block that are told one by one

_FRAME = b"\xa1\x64tips"  # what comes before the map of streams
_FRAME_SIZE = len(_FRAME)
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
    """Bytes that are no batch block, or tips that cannot be put into one."""


class BatchBlock(NamedTuple):
    """A written block: its CID (v1, dag-cbor, sha2-256, base32 text) and its bytes."""

    cid: str
    data: bytes


class InvalidEntry(NamedTuple):
    """An entry of somebody else's block that cannot be used: its bytes, and why."""

    data: bytes
    why: str


class ForeignBlock(NamedTuple):
    """Somebody else's block: canonical StreamID text -> CID text of its tips, and the entries that cannot be used."""

    tips: dict[str, list[str]]
    bad: list[InvalidEntry]


def is_block_cid(cid: bytes) -> bool:
    """Tell whether a CID can name a batch block: v1, sha2-256 of 32 bytes, codec dag-cbor, cbor or raw.

    CIP-123 names none of them. Only sha2-256 is checked (kiln.schemas.wire.cid.check_block), and only CBOR is read: a writer
    of the literal byte keys, which DAG-CBOR forbids, may honestly say cbor or raw. Any other codec names something
    else; so does version 0, which is dag-pb. Raises CidError if ``cid`` is not one CID.
    """
    parts = parse_cid(cid)
    return parts.codec in (DAG_CBOR, CBOR, RAW) and parts.hash == SHA2_256 and len(parts.digest) == 32


def write_blocks(tips: Mapping[str, Iterable[bytes]], limit: int = MAX_BLOCK) -> list[BatchBlock]:
    """Write the tips of a batch (StreamID text -> CID bytes of its tips) as blocks of at most ``limit`` bytes each.

    A new block begins when the next stream would pass the limit. A stream that fits no block alone is cut, along its
    sorted tips, into parts as large as a block can hold, and these are placed like streams: others may follow the last.
    The order in which ``tips`` comes does not matter. A stream with no tips is left out; no tips at all give no block.

    Raises BlockError for a key that is not a canonical StreamID, a tip that is not a CID, or a limit that not even one
    tip fits into.
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
    """The key of a stream in a block, its StreamID as CBOR text. The canonical order is that of keys as bytes."""
    return _TEXT_HEADS[len(stream)] + stream.encode()


def list_tips(leaves: Iterable[bytes]) -> dict[str, set[bytes]]:
    """The tips that leaves stand for: StreamID text -> CID bytes."""
    tips: dict[bytes, set[bytes]] = {}
    for leaf in leaves:
        end = _key_end(leaf)
        key, tip = leaf[:end], leaf[end:]
        if key in tips:
            tips[key].add(tip)
        else:
            tips[key] = {tip}
    return {_key_text(key): found for key, found in tips.items()}


def write_leaves(leaves: Collection[bytes], limit: int = MAX_BLOCK) -> list[BatchBlock]:
    """Write tips as ``write_blocks`` does, out of leaves.

    A leaf is one tip of one stream, ``stream_key(stream)`` ‖ CID bytes; leaves in their order as bytes stand as in a
    block. None comes twice. Nothing is checked: the StreamIDs are canonical, and the CIDs are CIDs.

    Raises BlockError for a limit that not even one tip fits into.
    """
    blocks: list[BatchBlock] = []
    entries: list[bytes] = []
    size = 0  # of the entries
    for entry in _entries(sorted(leaves), limit - _FRAME_SIZE - _head_size(1)):
        if entries and _FRAME_SIZE + _head_size(len(entries) + 1) + size + len(entry) > limit:
            blocks.append(_write_block(entries))
            entries, size = [], 0
        entries.append(entry)
        size += len(entry)
    if entries:
        blocks.append(_write_block(entries))
    return blocks


def _entries(leaves: Iterable[bytes], room: int) -> Iterator[bytes]:
    """The streams of sorted leaves, each with its tips, as they stand in a block; parts of streams that do not fit in
    ``room``, which is what a stream has that is alone in its block."""
    links: dict[bytes, list[bytes]] = {}  # by key
    for leaf in leaves:
        end = _key_end(leaf)
        key, link = leaf[:end], _link_head(len(leaf) - end) + leaf[end:]
        if key in links:
            links[key].append(link)
        else:
            links[key] = [link]
    for key, found in links.items():
        entry = key + _ONE + found[0] if len(found) == 1 else b"".join((key, _head(_ARRAY, len(found)), *found))
        if len(entry) <= room:
            yield entry
        else:
            yield from _cut(key, found, room)


def _cut(key: bytes, links: list[bytes], room: int) -> Iterator[bytes]:
    part: list[bytes] = []
    size = 0  # of the links
    for link in links:
        if len(key) + _head_size(len(part) + 1) + size + len(link) > room:
            if not part:
                raise _no_room(key, room)
            yield b"".join((key, _head(_ARRAY, len(part)), *part))
            part, size = [], 0
        part.append(link)
        size += len(link)
    yield b"".join((key, _head(_ARRAY, len(part)), *part))


def _no_room(key: bytes, room: int) -> BlockError:
    stream = _key_text(key)
    limit = room + _FRAME_SIZE + _head_size(1)
    return BlockError(f"a tip of stream {stream} does not fit into a block of {limit} bytes")


def _write_block(entries: list[bytes]) -> BatchBlock:
    data = b"".join((_FRAME, _head(_MAP, len(entries)), *entries))
    return BatchBlock(cid_text(compute_cid(data)), data)


def _require_canonical(stream: str) -> None:
    try:
        canonical = stream_text(stream)
    except StreamIdError as error:
        raise BlockError(f"cannot write a batch of {stream[:80]!r}: {error}") from error
    if canonical != stream:
        raise BlockError(f"cannot write a batch of {stream[:80]!r}: write it as {canonical}")


def _head_size(count: int) -> int:
    """Size in bytes of a CBOR head that says ``count``."""
    return 1 if count < 24 else 2 if count < 1 << 8 else 3 if count < 1 << 16 else 5


def _head(major: int, count: int) -> bytes:
    """The CBOR head of a major type that says ``count``, in its shortest form."""
    if count < 24:
        return bytes((major << 5 | count,))
    size = _head_size(count) - 1
    return bytes((major << 5 | 23 + size.bit_length(),)) + count.to_bytes(size, "big")


# By the first byte of a key: how long its head is. A StreamID has at most MAX_TEXT characters, which two bytes count.
_KEY_HEAD = {_TEXT << 5 | low: 1 for low in range(24)} | {_TEXT << 5 | 24: 2, _TEXT << 5 | 25: 3}
_ONE = _head(_ARRAY, 1)
_TEXT_HEADS = [_head(_TEXT, size) for size in range(MAX_TEXT + 1)]


def _key_end(leaf: bytes) -> int:
    first = leaf[0]
    if first == _TEXT << 5 | 24:  # all but the metamodel
        return 2 + leaf[1]
    head = _KEY_HEAD[first]
    return head + (first & 0x1F if head == 1 else int.from_bytes(leaf[1:head], "big"))


def _key_text(key: bytes) -> str:
    return key[_KEY_HEAD[key[0]] :].decode()


@cache
def _link_head(size: int) -> bytes:
    """What stands before a CID of so many bytes in a link: tag 42, and the head of 00 ‖ CID."""
    return _head(_TAG, 42) + _head(_BYTES, size + 1) + b"\x00"


def read_block(data: bytes) -> dict[str, list[str]]:
    """Read a batch block: canonical StreamID text -> CID text of its tips, both in the block's order.

    Taken are the three ways to write ``tips`` that writers of CIP-123 may choose: a map with text keys, the literal map
    with byte keys (StreamID bytes), and the list-pairs form of an IPLD map, ``[[key, [link, …]], …]``. Within these the
    block must be what DAG-CBOR allows, but for key order: definite lengths, shortest heads, tag 42 and no other,
    nothing after the end. A tip that a stream repeats is given once. There is no size limit: MAX_BLOCK binds writers.

    Raises BlockError, which names the byte.
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
    """Read a block of another writer, as ``read_block`` does, and lose no good tip to what else is in the block.

    Other keys beside ``tips`` are passed over. An entry that cannot be used (no StreamID, no link, a stream that came
    before) costs itself alone, as long as its end can be told.

    Raises BlockError, which names the byte: no DAG-CBOR, or nothing that is a batch.
    """
    reader = _Reader(data)
    batch: dict[str, list[str]] = {}
    bad: list[InvalidEntry] = []
    found, more = False, 0
    for _ in range(reader.head(_MAP, "the block")):
        key = reader.take(reader.head(_TEXT, "a key of the block"))
        if key != b"tips" or found:
            reader.skip()
            continue
        found = True
        pairs, count = reader.tips_head()
        for _ in range(count):
            begin = reader.at
            try:
                reader.entry(pairs, batch)
            except BlockError as error:
                reader.at = begin
                for _ in range(1 if pairs else 2):
                    reader.skip()
                if len(bad) < _MOST_BAD:
                    bad.append(InvalidEntry(data[begin : reader.at], str(error)))
                else:
                    more += 1
    reader.end()
    if more:
        bad.append(InvalidEntry(b"", f"{more} more entries cannot be used"))
    if not found:
        raise reader.error("the block must have the key tips")
    return ForeignBlock(batch, bad)


class _Reader:
    """Walks the few CBOR shapes a batch block consists of.

    Not cbor2: a general decoder merges equal keys without a word, builds any tagged object a peer asks for, and
    recurses.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.item = 0  # where the item last read begins

    def error(self, what: str) -> BlockError:
        return BlockError(f"no batch block, at byte {self.item}: {what}")

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise self.error(f"the block is cut short: {end - len(self.data)} bytes are missing")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def any_head(self) -> tuple[int, int]:
        """Read a head; return its major type and its count (length, tag number)."""
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

    def head(self, major: int, what: str) -> int:
        """Read a head of the major type ``major``; return its count."""
        found, count = self.any_head()
        if found != major:
            raise self.error(f"{what} must be {_MAJOR[major]}, not {_MAJOR[found]}")
        return count

    def skip(self) -> None:
        """Pass over one item, whatever it is, with all that is in it."""
        left = 1
        while left:
            left -= 1
            if self.at < len(self.data) and self.data[self.at] >> 5 == _SIMPLE:  # its count may be a float
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
        """Read the head of ``tips``: whether it is an array of pairs, and how many entries follow."""
        major, count = self.any_head()
        if major not in (_MAP, _ARRAY):
            raise self.error(f"tips must be a map or an array of pairs, not {_MAJOR[major]}")
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
