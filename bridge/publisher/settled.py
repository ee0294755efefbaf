"""The batches after the committed offset that already have their receipts. The metadata of the commit lists them.

A batch without a peer waits for `publish_timeout` and holds the offset back meanwhile. After a restart the settled
batches after the committed offset are not published again.
"""

from __future__ import annotations

import zlib
from base64 import b85decode, b85encode
from collections.abc import Collection
from typing import Final

_MAX_TEXT: Final = 3_500  # of the 4,096 bytes of metadata that brokers allow by default
_MAX_BITMAP: Final = 1 << 20  # bytes


def encode_settled(first: int, end: int, unsettled: Collection[int]) -> str:
    """Encode which offsets from `first` to `end` are settled; if they do not all fit, cover only the first ones.

    Returns:
        base85 of a bitmap, compressed by zlib: bit i % 8, lowest first, of byte i // 8 is set if first + i is settled.
    """
    size = end - first
    while size > 0:
        bits = bytearray(b"\xff" * (size // 8) + bytes([(1 << size % 8) - 1]))
        for offset in unsettled:
            if 0 <= (number := offset - first) < size:
                bits[number // 8] &= ~(1 << number % 8)
        text = b85encode(zlib.compress(bytes(bits))).decode()
        if len(text) <= _MAX_TEXT:
            return text
        size //= 2
    return ""


def decode_settled(first: int, text: str) -> frozenset[int]:
    """Return the offsets that are settled; none if `encode_settled` did not write the text."""
    try:
        bits = zlib.decompressobj().decompress(b85decode(text), _MAX_BITMAP)
    except (ValueError, zlib.error):
        return frozenset()
    return frozenset(first + number for number in range(8 * len(bits)) if bits[number // 8] >> number % 8 & 1)
