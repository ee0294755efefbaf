"""Framing of a pubsub stream: each RPC follows its length, which is an unsigned varint.

Source: libp2p specs, pubsub/README.md. Of an RPC over the size limit, the first bytes are kept and the rest is
skipped (docs/design/contracts.md, `Frame.declared_length`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from kiln.schemas.kafka.frames import CUT_PAYLOAD, MAX_RPC
from kiln.schemas.wire.cid import write_varint

MAX_VARINT: Final = 9  # bytes; multiformats unsigned-varint, "practical maximum"


class WireError(ValueError):
    """A stream breaks its protocol, for example by a bad length prefix, and cannot be read any further."""


class OversizedRpc(NamedTuple):
    """The first bytes of an RPC over the size limit, and the length that its prefix declares."""

    head: bytes
    declared_length: int


def encode(payload: bytes) -> bytes:
    """Prefix an RPC with its length as an unsigned varint."""
    return write_varint(len(payload)) + payload


class RpcSplitter:
    """Splits a byte stream into RPCs. It takes chunks of any size, and buffers at most one unfinished RPC.

    Args:
        limit: Maximum size in bytes of an RPC that is returned whole. A longer RPC is returned as an `OversizedRpc`
            once its first `head` bytes have arrived, and its other bytes are skipped.
        head: Number of bytes in `OversizedRpc.head`.
    """

    __slots__ = ("_error", "_head", "_length", "_limit", "_partial", "_shift", "_skip", "_varint")

    def __init__(self, limit: int = MAX_RPC, head: int = CUT_PAYLOAD) -> None:
        if not 0 < head <= limit:
            raise ValueError(f"head is {head} bytes, but must be between 1 and limit ({limit} bytes)")
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
        """Greater than 0 while an RPC or its length prefix is incomplete, else 0."""
        return self._shift // 7 + (self._length >= 0) + len(self._partial) + self._skip

    @property
    def buffered(self) -> int:
        """Number of buffered bytes of an unfinished RPC."""
        return len(self._partial)

    def feed(self, chunk: bytes | bytearray | memoryview) -> Iterator[bytes | OversizedRpc]:
        """Yield the RPCs that this chunk completes, in order. An empty RPC, which is legal, is yielded as b"".

        Consume the iterator before you feed the next chunk, and do not change the chunk until then.

        Raises:
            WireError: A length prefix is longer than 9 bytes, or not the shortest form of its varint. The RPCs before
                it are yielded first. Every later call raises the same error.
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
