"""Sets of numbers as text, for the metadata of a committed offset.

"" is the empty set. Other sets are base85 of a bitmap ("b…": the number base + i is bit i % 8, lowest first, of byte
i // 8) or of varints ("g…": the step from the base to the first number, then from each to the next), whichever is
shorter.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable
from typing import Final

from kiln.schemas.wire.cid import read_varint, write_varint

MAX_METADATA: Final = 3_500
"""Longest metadata written, in bytes: brokers refuse more than 4,096 (`offset.metadata.max.bytes`)."""


def encode_steps(numbers: Iterable[int], base: int) -> bytes:
    out = bytearray()
    for number in numbers:
        out += write_varint(number - base)
        base = number
    return bytes(out)


def encode_numbers(numbers: Collection[int], base: int) -> str:
    """Encode a set of numbers given in their order."""
    if not numbers:
        return ""
    steps = encode_steps(numbers, base)
    width = (max(numbers) - base) // 8 + 1
    if len(steps) < width:
        return "g" + base64.b85encode(steps).decode()
    bits = bytearray(width)
    for number in numbers:
        bits[(number - base) // 8] |= 1 << (number - base) % 8
    return "b" + base64.b85encode(bits).decode()


def decode_numbers(text: str, base: int) -> list[int]:
    """Decode what `encode_numbers` wrote.

    Raises:
        ValueError: the text is malformed.
    """
    raw = base64.b85decode(text[1:])
    if text.startswith("b"):
        return [base + 8 * index + bit for index, byte in enumerate(raw) for bit in range(8) if byte >> bit & 1]
    numbers, position = list[int](), 0
    while position < len(raw):
        step, position = read_varint(raw, position)
        base += step
        numbers.append(base)
    return numbers
