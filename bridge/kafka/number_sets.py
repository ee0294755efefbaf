"""Encode sets of numbers as text, for the metadata of a committed offset.

The numbers are encoded relative to a base, which is at most the smallest of them. The text of an empty set is "". Other
sets have the shorter one of two forms, a letter and then bytes in base85:

- "b": a bitmap. The number base + i is in the set if bit i % 8 of byte i // 8 is 1, where bit 0 is the lowest.
- "g": varints of differences, from the base to the first number, and then from each number to the next.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable
from typing import Final

from kiln.schemas.wire.cid import read_varint, write_varint

MAX_METADATA: Final = 3_500
"""Maximum size of the metadata of an offset, in bytes. Brokers refuse more than 4,096 (`offset.metadata.max.bytes`)."""


def encode_steps(numbers: Iterable[int], base: int) -> bytes:
    out = bytearray()
    for number in numbers:
        out += write_varint(number - base)
        base = number
    return bytes(out)


def encode_numbers(numbers: Collection[int], base: int) -> str:
    """Encode a set of numbers, which must be in ascending order."""
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
    """Decode a text of `encode_numbers` into numbers in ascending order.

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
