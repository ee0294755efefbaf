"""Logging of events as text (logfmt) or JSON lines, with a rate limit per event.

Components log with `log_event` under the name of their package, such as `kiln.bridge.libp2p`. Values may come from
peers, so both formats write them as ASCII JSON, which contains no control sequences for a terminal.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterable, Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final, Literal

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error", "critical"]
Value = str | int | float | bool | None

_MAX_LINES: Final = 20  # per event and span
_SPAN: Final = 60.0  # s
_MAX_EVENTS: Final = 1_000  # whose counts are in memory
_FILE_BYTES: Final = 20_000_000


def log_event(log: logging.Logger, event: str, level: int = logging.INFO, **fields: Value) -> None:
    """Log an event with a constant text and variable fields."""
    log.log(level, event, extra={"fields": fields})


def identify_problem(text: str) -> str:
    """Return the part of a problem's text that does not change while the problem lasts: the subject, without numbers.

    A problem reads `SUBJECT: reason`, such as `frames wait for Kafka, topic kiln.frames: no acknowledgement for 5 s`.
    The reason may change, for example when the next attempt fails in another way.
    """
    return _NUMBER.sub("N", text.partition(": ")[0])


_NUMBER: Final = re.compile(r"(?<![\w./:-])\d[\d,.]*(?![\w./:-])")
"""A number that is a word of its own, not part of an address or a name."""


class ProblemLog:
    """Log of problems: each is logged once when it appears and once when it is resolved.

    The wording of a problem may change meanwhile (`identify_problem`).
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._known: dict[str, str] = {}
        """the first text of each problem, by `identify_problem`"""

    def see(self, problems: Iterable[str]) -> None:
        """Log the problems that are new or resolved.

        Args:
            problems: Texts of all current problems.
        """
        now: dict[str, str] = {}
        for text in problems:
            now.setdefault(identify_problem(text), text)
        for problem in now.keys() - self._known.keys():
            log_event(self._log, "problem", logging.WARNING, error=now[problem])
        for problem in self._known.keys() - now.keys():
            log_event(self._log, "problem resolved", error=self._known[problem])
        self._known = {problem: self._known.get(problem, text) for problem, text in now.items()}


def configure_logs(
    form: Format,
    level: Level,
    levels: Mapping[str, Level],
    handler: logging.Handler | None = None,
    others: int = logging.ERROR,
) -> None:
    """Configure the logging of this process. If it is already configured, only set the levels of loggers.

    Args:
        form: Format of the lines.
        level: Level of Kiln's loggers.
        levels: Levels by name of the logger.
        handler: Handler of the records, by default to stderr.
        others: Level of libraries.
    """
    handler = handler or logging.StreamHandler()
    handler.setFormatter(_JsonLine() if form == "json" else _TextLine())
    handler.addFilter(RateLimitFilter())
    logging.basicConfig(level=others, handlers=[handler])
    for name, of_name in {"kiln": level, **levels}.items():
        logging.getLogger(name).setLevel(of_name.upper())


class LogFile(RotatingFileHandler):
    """A rotated log file.

    Lines that cannot be written, for example because the disk is full, are counted. The next line that can be written
    has the count in its field `lines_lost`.
    """

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
    """A filter that passes at most 20 lines per minute for each event, that is, for each logger and text.

    The 20th line has the field `more_of_it`. The first line of a later minute has the number of dropped lines in the
    field `left_out`.
    """

    def __init__(self) -> None:
        self._spans: dict[tuple[str, str], tuple[float, int]] = {}
        """start of the span and number of lines, by logger and text"""

    def filter(self, record: logging.LogRecord) -> bool:
        event = record.name, str(record.msg)
        if len(self._spans) >= _MAX_EVENTS and event not in self._spans:
            self._spans.clear()
        start, count = self._spans.get(event, (record.created, 0))
        if record.created - start >= _SPAN:
            if count > _MAX_LINES:
                _add_fields(record, left_out=count - _MAX_LINES)
            start, count = record.created, 0
        count += 1
        self._spans[event] = (start, count)
        if count == _MAX_LINES:
            _add_fields(record, more_of_it="further lines of this event are left out for a minute")
        return count <= _MAX_LINES


def is_news(line: str) -> bool:
    """Return true if a line of a log has the level info or debug."""
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
