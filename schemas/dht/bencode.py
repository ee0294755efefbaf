"""Strict bencoding (BEP 3, Bencoding): only the canonical encoding of a value is accepted.

The library ``bencode2`` refuses unsorted and repeated keys, leading zeros, ``-0``, and bytes after the value. So
``encode(decode(data)) == data``, and a signature over a bencoded value can be checked after decoding. This module adds
one error class for all refusals, and `fields`, which reads a message that is *not* canonical, so that a node can send
an error to the message's sender.
"""

from __future__ import annotations

from typing import TypeAlias

import bencode2

Value: TypeAlias = "int | bytes | list[Value] | dict[bytes, Value]"


class BencodeError(ValueError):
    """The bytes are not one canonically bencoded value."""


def decode(data: bytes) -> Value:
    """Decode bytes that are exactly one canonical value.

    The caller must limit the size of ``data``, because nothing else limits how deeply values are nested. Compare
    decoded values by their encoding: Python's ``==`` is recursive, and fails for deep nesting.

    Raises:
        BencodeError: The bytes are not one canonical value.
    """
    try:
        value: Value = bencode2.bdecode(data)
    except (ValueError, RecursionError) as error:  # ValueError is also raised for an integer of over 4,300 digits
        raise BencodeError(str(error)) from error
    return value


def encode(value: Value) -> bytes:
    """Encode a value. The keys of dictionaries are sorted bytewise."""
    return bencode2.bencode(value)


def fields(data: bytes) -> dict[bytes, bytes]:
    """Return the entries of a dictionary, with each value still encoded. Values are not checked.

    Keys may be unsorted. If a key repeats, its first value counts.

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
    """Return the index after the value that starts at ``at``."""
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
