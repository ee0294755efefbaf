"""Escape text from the network before it is printed on a terminal.

Peers choose texts such as agent versions and topic names. Characters that control the terminal, reorder text or are
invisible become JSON escapes. Output of `--json` needs no escaping, because its strings are ASCII.
"""

from __future__ import annotations

import re
from typing import Final

_INVISIBLE: Final = (
    r"\x00-\x1f\x7f-\x9f"  # C0, DEL and C1: control characters of terminals
    r"\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff"  # zero width, joiners, marks that reorder text
    r"\u2028\u2029"  # separators of lines and paragraphs
    r"\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\ufff9-\ufffb"  # the other format characters of Unicode (Cf)
    r"\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    r"\U000e0000-\U000e0fff"  # tags and variation selectors, which can hide a text
    r"\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\uffa0"  # letters and marks with no shape
    r"\ud800-\udfff"  # lone surrogates, which UTF-8 cannot encode
)
_UNSAFE: Final = re.compile(f"[{_INVISIBLE}]")
_UNSAFE_IN_LINES: Final = re.compile(f"(?!\n)[{_INVISIBLE}]")
_SHORT: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def printable(text: str) -> str:
    """Return the text on one line, with invisible and control characters as escapes: `\\u001b`, `\\n`, `\\u202e`."""
    return _UNSAFE.sub(_escape, text)


def printable_lines(text: str) -> str:
    """Escape invisible and control characters except newlines. Use it for text whose newlines Kiln itself wrote."""
    return _UNSAFE_IN_LINES.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    short = _SHORT.get(character)
    if short is not None:
        return short
    number = ord(character)
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
