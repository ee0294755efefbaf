"""Removal of the wrappers that log drivers and terminals put around the lines of a program.

Known are the JSON objects of Docker and PM2; the prefixes of CRI, `docker logs -t`, `kubectl logs --timestamps
--prefix`, Docker Compose, PM2 and `ts`; ANSI colors, blanks and byte order marks of UTF-8. They nest: Compose prefixes
lines that may begin with a time. A prefix is only removed at the start of a line, because peers may have chosen the
rest of the line.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

_MAX_LAYERS: Final = 6
_DOCKER_PIECE: Final = 16 * 1024
"""Docker and CRI runtimes split lines longer than this into pieces of this size."""

_BARE: Final = re.compile(rb'\[[A-Z][a-z]{2}, |\{"(?:from|data|type|peerID)"')
"""Start of most lines that have no layer."""
_COLOR: Final = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_BLANK: Final = re.compile(rb"(?:[ \t]|\xef\xbb\xbf)+")  # also a byte order mark

_ISO: Final = (
    rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d{1,9})?)?(?:\ ?(?:Z|UTC|[+-]\d\d:?\d\d))?"  # docker, kubectl, PM2
)
_PREFIX: Final = re.compile(
    rb"""
    (?: (?P<time>"""
    + _ISO
    + rb""")
      | \[(?P<bracketed>"""
    + _ISO
    + rb""")\]
      | (?P<unix>\d{10}(?:\d{3}|\.\d{1,9})?)
    ):?[ ]
    (?:(?P<stream>stdout|stderr)\ (?P<tag>[FP])(?::\S{0,16})?(?:\ |$))?                # CRI
  | \[pod/[^\]\s]{1,300}\]\                                     # kubectl --prefix
  | [^\s|\[\]{}"]{1,100}(?:\|[^\s|\[\]{}"]{1,100})?\ *\|\ (?=\S)   # Compose: name |, PM2: id|name |
    """,
    re.VERBOSE,
)
_TEXT_KEYS: Final = ("log", "message")
"""Keys of the line in a JSON object: `log` of Docker, `message` of PM2."""
_TIME_KEYS: Final = ("time", "timestamp")
_OBJECT: Final = msgspec.json.Decoder(dict[str, object])
_NS_OF_DIGITS: Final = {10: 1_000_000_000, 13: 1_000_000}
"""ns of the unit of a unix time, by the number of digits of the time"""


class UnwrappedLine(NamedTuple):
    """A line without its layers."""

    content: bytes
    time: str = ""
    """the outermost time that a layer has, as text; empty if none"""
    stream: str = ""
    """stdout or stderr, where a runtime cuts long lines into pieces"""
    is_piece: bool = False
    """true if the next line of the same stream continues this one"""
    is_wrapped: bool = False
    """true if a layer was removed"""


def unwrap(line: bytes) -> UnwrappedLine:
    """Remove the layers around a line."""
    if _BARE.match(line) and b"\x1b" not in line:
        return UnwrappedLine(line)
    content, time, stream, is_piece, is_wrapped = line, "", "", False, False
    for _ in range(_MAX_LAYERS):
        if b"\x1b" in content:
            content = _COLOR.sub(b"", content)
        if blank := _BLANK.match(content):
            content = content[blank.end() :]
        if content.startswith(b"{"):
            inner = _unwrap_object(content)
            if inner is None:
                break
        else:
            match = _PREFIX.match(content)
            if match is None:
                break
            at = match["time"] or match["bracketed"] or match["unix"] or b""
            inner = UnwrappedLine(
                content[match.end() :], at.decode(), (match["stream"] or b"").decode(), match["tag"] == b"P"
            )
        content, is_wrapped, is_piece = inner.content, True, is_piece or inner.is_piece
        time, stream = time or inner.time, stream or inner.stream
    return UnwrappedLine(content, time, stream, is_piece, is_wrapped)


def _unwrap_object(line: bytes) -> UnwrappedLine | None:
    try:
        found = _OBJECT.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    text = next((found[key] for key in _TEXT_KEYS if key in found), None)
    if not isinstance(text, str):
        return None
    content = text.encode(errors="replace")
    time = next((at for key in _TIME_KEYS if isinstance(at := found.get(key), str)), "")
    stream = str(found["stream"]) if found.get("stream") in ("stdout", "stderr") else ""
    is_piece = bool(stream) and not content.endswith(b"\n") and len(content) >= _DOCKER_PIECE
    return UnwrappedLine(content.removesuffix(b"\n").removesuffix(b"\r"), time, stream, is_piece)


@lru_cache(maxsize=1024)
def parse_time(text: str) -> int | None:
    """Parse the time of a layer: ISO 8601, in UTC if it has no zone, or a unix time in s or ms.

    Returns:
        Unix ns, or `None` if the text is no such time.
    """
    whole, _, fraction = text.partition(".")
    if whole.isdecimal() and (not fraction or fraction.isdecimal()):
        unit = _NS_OF_DIGITS.get(len(whole))
        return None if unit is None else int(whole) * unit + int(fraction.ljust(9, "0")[:9] or 0) * (unit // 10**9)
    text = text.replace(",", ".").replace(" UTC", "Z").replace("UTC", "Z")
    match = re.fullmatch(r"([^.]+?)(?:\.(\d{1,9}))? ?(Z|[+-]\d\d:?\d\d)?", text)
    if match is None:
        return None
    try:
        at = datetime.fromisoformat(f"{match[1]}{match[3] or 'Z'}".strip()).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return int(at.timestamp()) * 1_000_000_000 + int((match[2] or "").ljust(9, "0"))
