"""Framing of a pubsub stream: each RPC behind its length as an unsigned varint (libp2p specs, pubsub/README.md).

Over-long RPCs are cut, not refused: docs/design/contracts.md, `Frame.declared_length`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from kiln.schemas.kafka.frames import CUT_PAYLOAD, MAX_RPC

MAX_VARINT: Final = 9  # bytes; multiformats unsigned-varint, "practical maximum"


class WireError(ValueError):
    """A length that is no varint: nothing after it on this stream can be read."""


class OversizedRpc(NamedTuple):
    """An RPC over the limit: its first bytes and the length it was declared with. The rest is skipped as it comes."""

    head: bytes
    declared_length: int


def encode(payload: bytes) -> bytes:
    """An RPC with its length before it, as it goes on the wire."""
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
    """Cuts a stream of bytes, in chunks of any size, into the RPCs in it.

    `limit`: bytes of the longest RPC given out whole; of a longer one there is a Cut with its first `head` bytes as
    soon as they are there, and the rest is skipped. Held at any time: at most one unfinished RPC (`pending` bytes).
    """

    __slots__ = ("_error", "_head", "_length", "_limit", "_partial", "_shift", "_skip", "_varint")

    def __init__(self, limit: int = MAX_RPC, head: int = CUT_PAYLOAD) -> None:
        if not 0 < head <= limit:
            raise ValueError(f"the head of a cut RPC must be 1 to {limit} bytes long, not {head}")
        self._limit = limit
        self._head = head
        self._partial = bytearray()  # the unfinished RPC, or the head of one that will be cut
        self._length = -1  # of the RPC being read; -1: its varint is not complete
        self._varint = 0
        self._shift = 0
        self._skip = 0  # bytes of a cut RPC still to come
        self._error = ""

    @property
    def pending(self) -> int:
        """Bytes read of an unfinished RPC, its length prefix included, or still to come of a cut one.

        Not 0 at the end of a stream: it broke off inside an RPC.
        """
        return self._shift // 7 + (self._length >= 0) + len(self._partial) + self._skip

    @property
    def held(self) -> int:
        """Bytes that are held of an unfinished RPC."""
        return len(self._partial)

    def feed(self, chunk: bytes | bytearray | memoryview) -> Iterator[bytes | OversizedRpc]:
        """The RPCs that end, or are cut, in this chunk, in order; b"" for an RPC of no bytes, which is legal.

        Take all of them before feeding the next chunk; do not change a buffer that is being read. WireError at a
        length that is no varint (over 9 bytes, or not the shortest form), after what was whole before it; from then on
        at every call.
        """
        if self._error:
            raise WireError(self._error)
        view = memoryview(chunk)
        at, end = 0, len(view)
        while at < end:
            if self._skip:
                step = min(self._skip, end - at)
                self._skip -= step
                at += step
                continue
            if self._length < 0:
                byte = view[at]
                at += 1
                if byte >= 0x80:
                    self._varint |= (byte & 0x7F) << self._shift
                    self._shift += 7
                    if self._shift >= 7 * MAX_VARINT:
                        self._fail(f"the length of an RPC is longer than {MAX_VARINT} bytes")
                    continue
                if byte == 0 and self._shift:
                    self._fail("the length of an RPC is not a varint of the shortest form")
                self._length = self._varint | byte << self._shift
                if self._length == 0:
                    self._next()
                    yield b""
                    continue
            wanted = self._length if self._length <= self._limit else self._head
            missing = wanted - len(self._partial)
            if end - at < missing:
                self._partial += view[at:]
                return
            if self._partial:
                self._partial += view[at : at + missing]
                payload = bytes(self._partial)
                self._partial = bytearray()  # not clear(): that would keep the room of the longest RPC so far
            else:
                payload = bytes(view[at : at + missing])
            at += missing
            declared = self._length
            self._next()
            if declared > self._limit:
                self._skip = declared - wanted
                yield OversizedRpc(payload, declared)
            else:
                yield payload

    def _next(self) -> None:
        self._length = -1
        self._varint = self._shift = 0

    def _fail(self, text: str) -> None:
        self._error = text
        raise WireError(text)
