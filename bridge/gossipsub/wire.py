"""Framing of a pubsub stream: each RPC after its length as an unsigned varint (libp2p specs, pubsub/README.md).

Oversized RPCs are cut, not refused: docs/design/contracts.md, `Frame.declared_length`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from kiln.schemas.kafka.frames import CUT_PAYLOAD, MAX_RPC

MAX_VARINT: Final = 9  # bytes; multiformats unsigned-varint, "practical maximum"


class WireError(ValueError):
    """A length prefix is no varint, so the rest of the stream cannot be read."""


class OversizedRpc(NamedTuple):
    """First bytes and declared length of an RPC over the limit. The rest is skipped as it is received."""

    head: bytes
    declared_length: int


def encode(payload: bytes) -> bytes:
    """Prefix an RPC with its length, as on the wire."""
    size = len(payload)
    if size < 0x80:
        return bytes((size,)) + payload
    prefix = bytearray()
    while size >= 0x80:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    return bytes(prefix) + payload


class RpcSplitter:
    """Splits a byte stream, in chunks of any size, into RPCs. It buffers at most one unfinished RPC.

    Args:
        limit: Maximum size of an RPC that is returned whole, in bytes. A longer RPC yields an `OversizedRpc` as soon as
            its first `head` bytes are there, and the rest is skipped.
        head: Number of bytes that an `OversizedRpc` has.
    """

    __slots__ = ("_error", "_head", "_length", "_limit", "_partial", "_shift", "_skip", "_varint")

    def __init__(self, limit: int = MAX_RPC, head: int = CUT_PAYLOAD) -> None:
        if not 0 < head <= limit:
            raise ValueError(f"the head of a cut RPC must be 1 to {limit} bytes long, not {head}")
        self._limit = limit
        self._head = head
        self._partial = bytearray()  # the unfinished RPC, or the head of an oversized one
        self._length = -1  # of the RPC being read; -1 until its varint is complete
        self._varint = 0
        self._shift = 0
        self._skip = 0  # bytes of an oversized RPC not yet received
        self._error = ""

    @property
    def pending(self) -> int:
        """Number of bytes read of an unfinished RPC and its length prefix, or still to be read of an oversized RPC.

        If this is not 0 at the end of a stream, the stream ended inside an RPC.
        """
        return self._shift // 7 + (self._length >= 0) + len(self._partial) + self._skip

    @property
    def buffered(self) -> int:
        """Buffered bytes of an unfinished RPC."""
        return len(self._partial)

    def feed(self, chunk: bytes | bytearray | memoryview) -> Iterator[bytes | OversizedRpc]:
        """Yield the RPCs that end, or are cut, in this chunk, in order; b"" for an empty RPC, which is legal.

        Consume the iterator before feeding the next chunk, and do not change the buffer meanwhile.

        Raises:
            WireError: A length is no varint (over 9 bytes, or not the shortest form). The RPCs before it are yielded
                first; every later call raises too.
        """
        if self._error:
            raise WireError(self._error)
        view = memoryview(chunk)
        position, end = 0, len(view)
        while position < end:
            if self._skip:
                step = min(self._skip, end - position)
                self._skip -= step
                position += step
                continue
            if self._length < 0:
                byte = view[position]
                position += 1
                if byte >= 0x80:
                    self._varint |= (byte & 0x7F) << self._shift
                    self._shift += 7
                    if self._shift >= 7 * MAX_VARINT:
                        self._fail(f"the length prefix of an RPC is longer than {MAX_VARINT} bytes")
                    continue
                if byte == 0 and self._shift:
                    self._fail("the length prefix of an RPC is not a varint of the shortest form")
                self._length = self._varint | byte << self._shift
                if self._length == 0:
                    self._reset_length()
                    yield b""
                    continue
            size = self._length if self._length <= self._limit else self._head
            missing = size - len(self._partial)
            if end - position < missing:
                self._partial += view[position:]
                return
            if self._partial:
                self._partial += view[position : position + missing]
                payload = bytes(self._partial)
                self._partial = bytearray()  # not clear(), which would retain the memory of the longest RPC so far
            else:
                payload = bytes(view[position : position + missing])
            position += missing
            declared = self._length
            self._reset_length()
            if declared > self._limit:
                self._skip = declared - size
                yield OversizedRpc(payload, declared)
            else:
                yield payload

    def _reset_length(self) -> None:
        self._length = -1
        self._varint = self._shift = 0

    def _fail(self, text: str) -> None:
        self._error = text
        raise WireError(text)
