"""Logging: one line for what is worth reading, as text (logfmt) or as JSON, and not too many of a kind.

Every room may import this file. A part of Kiln logs under the name of its package (`kiln.bridge.libp2p`), by `log_event`.
Values may come from strangers: both forms write them as JSON does, in ASCII, so that a terminal obeys nothing in them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final, Literal

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error", "critical"]
Value = str | int | float | bool | None

_AT_ONCE: Final = 20  # lines of a kind
_SPAN: Final = 60.0  # s in which no more come
_KINDS: Final = 1_000  # remembered
_FILE_BYTES: Final = 20_000_000


def log_event(log: logging.Logger, event: str, level: int = logging.INFO, **fields: Value) -> None:
    """Logs an event, in words that are always the same, with what differs as fields."""
    log.log(level, event, extra={"fields": fields})


class ProblemLog:
    """Current problems, each logged once when it appears and once when it is over."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._known: dict[str, None] = {}

    def see(self, problems: Iterable[str]) -> None:
        """`problems`: all there are, in words."""
        now = dict.fromkeys(problems)
        for error in now.keys() - self._known.keys():
            log_event(self._log, "problem", logging.WARNING, error=error)
        for error in self._known.keys() - now.keys():
            log_event(self._log, "problem resolved", error=error)
        self._known = now


def configure_logs(
    form: Format,
    level: Level,
    levels: Mapping[str, Level],
    handler: logging.Handler | None = None,
    others: int = logging.ERROR,
) -> None:
    """Logs of this process go to a handler, stderr by default, unless logging is set up already.

    `level`: of Kiln's parts; `levels`: by name of a logger; `others`: the level of libraries.
    """
    handler = handler or logging.StreamHandler()
    handler.setFormatter(_JsonLine() if form == "json" else _TextLine())
    handler.addFilter(RateLimitFilter())
    logging.basicConfig(level=others, handlers=[handler])
    for name, of_name in {"kiln": level, **levels}.items():
        logging.getLogger(name).setLevel(of_name.upper())


class LogFile(RotatingFileHandler):
    """A file, and two older ones. Lines that cannot be written, as on a full disk, are counted: the next line that can
    be written tells how many are missing."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=_FILE_BYTES, backupCount=2, delay=True)
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        lost = self._lost
        if lost:
            _add_fields(record, lines_lost=lost)
        super().emit(record)
        if self._lost == lost:
            self._lost = 0

    def handleError(self, record: logging.LogRecord) -> None:
        self._lost += 1


class RateLimitFilter:
    """A filter: at most 20 lines of a kind a minute. The last of them says that more are left out, and the first of a
    later minute how many were. A kind is the words of an event, of one part."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], list[float]] = {}  # when the span began, and how many came in it

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.name, str(record.msg)
        if len(self._kinds) >= _KINDS and kind not in self._kinds:
            self._kinds.clear()
        began, came = self._kinds.get(kind, (record.created, 0))
        if record.created - began >= _SPAN:
            if came > _AT_ONCE:
                _add_fields(record, left_out=int(came) - _AT_ONCE)
            began, came = record.created, 0
        came += 1
        self._kinds[kind] = [began, came]
        if came == _AT_ONCE:
            _add_fields(record, more_of_it="left out for a minute")
        return came <= _AT_ONCE


def is_news(line: str) -> bool:
    """Return true if a line of a log says what went well."""
    return any(sign in line for sign in (" level=info ", " level=debug ", '"level": "info"', '"level": "debug"'))


class _TextLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        return " ".join(f"{name}={value if name in _BARE else _encode(value)}" for name, value in fields.items())


class _JsonLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return _encode(_fields(record))


_BARE: Final = ("at", "level", "part")


def _fields(record: logging.LogRecord) -> dict[str, Value]:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    found: dict[str, Value] = {
        "at": f"{at}.{int(record.msecs):03}Z",
        "level": record.levelname.lower(),
        "part": record.name,
        "event": record.getMessage(),
        **getattr(record, "fields", {}),
    }
    if record.exc_info:
        found["trace"] = logging.Formatter().formatException(record.exc_info)
    return found


def _add_fields(record: logging.LogRecord, **fields: Value) -> None:
    record.__dict__["fields"] = {**getattr(record, "fields", {}), **fields}


def _encode(value: object) -> str:
    return json.dumps(value).replace("\x7f", "\\u007f")
