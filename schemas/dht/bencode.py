"""Strict bencoding (BEP 3, Bencoding): each value has one encoding, and any other is rejected.

The codec is the library ``bencode2``: it refuses keys out of order or repeated, leading zeros, ``-0``, and bytes after
the value. So ``encode(decode(data)) == data`` for all data that is read, and a signature made over a bencoded value can
be checked after decoding it. This module adds one error for all refusals, and `fields`, which reads a message that is
*not* canonical, so that its sender can get an error.
"""

from __future__ import annotations

from typing import TypeAlias

import bencode2

Value: TypeAlias = "int | bytes | list[Value] | dict[bytes, Value]"


class BencodeError(ValueError):
    """Bytes that are not one canonically bencoded value."""


def decode(data: bytes) -> Value:
    """Read exactly one canonical value.

    Only the size of ``data``, which the caller limits, bounds how deeply values are nested. Compare decoded values by
    their encoding, because Python's ``==`` is recursive.

    Raises:
        BencodeError: The bytes are not one canonical value.
    """
    try:
        value: Value = bencode2.bdecode(data)
    except (ValueError, RecursionError) as error:  # ValueError is also raised for an integer of over 4,300 digits
        raise BencodeError(str(error)) from error
    return value


def encode(value: Value) -> bytes:
    """Write a value, keys of dictionaries in bytewise order."""
    return bencode2.bencode(value)


def fields(data: bytes) -> dict[bytes, bytes]:
    """Return the entries of a dictionary, each value as its bytes. Keys may be unsorted. The first of equal keys wins.

    Only the structure of the dictionary is checked, not the values.

    Raises:
        BencodeError: The bytes are not a dictionary.
    """
    if data[:1] != b"d":
        raise BencodeError("not a dictionary")
    encoded_fields: dict[bytes, bytes] = {}
    at = 1
    while data[at : at + 1] != b"e":
        start, after_key = at, _find_end(data, at)
        at = _find_end(data, after_key)
        encoded_fields.setdefault(data[start:after_key].partition(b":")[2], data[after_key:at])
    return encoded_fields


def _find_end(data: bytes, at: int) -> int:
    """Find the index after the value that starts at ``at``."""
    depth = 0
    while True:
        kind = data[at : at + 1]
        if kind in (b"l", b"d"):
            depth, at = depth + 1, at + 1
        elif kind == b"e" and depth:
            depth, at = depth - 1, at + 1
        elif kind == b"i":
            at = data.find(b"e", at) + 1
        elif kind.isdigit() and (colon := data.find(b":", at, at + 6)) > 0 and data[at:colon].isdigit():
            at = colon + 1 + int(data[at:colon])
        else:
            raise BencodeError(f"no value at byte {at}")
        if not 0 < at <= len(data):
            raise BencodeError("cut short")
        if not depth:
            return at
