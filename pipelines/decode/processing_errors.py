"""Errors of Kiln's own code on a single record. Such a record goes to quarantine, and the query continues."""

from __future__ import annotations

from traceback import extract_tb
from typing import Final

import msgspec
from google.protobuf.message import Error as ProtobufError

PROCESSING_FAILED: Final = "processing_failed"

PROCESSING_ERRORS: Final = (
    ValueError,  # also UnicodeError, and what codecs, base58 and cryptography raise on values
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,  # OverflowError: a number that a column cannot hold
    AssertionError,
    NotImplementedError,  # a library does not support what the bytes name
    RecursionError,  # the one RuntimeError that depends on the record alone
    msgspec.MsgspecError,
    ProtobufError,
)
"""Errors that a pure function raises because of its record, so that another try would fail again.

Catch them only around pure functions: I/O may raise some of them for other causes. Any other error fails the task, and
Spark tries it again. OSError, sqlite3.Error, KafkaError and KilnError are faults of a disk, a store or a broker;
MemoryError and RuntimeError do not depend on the record.
"""

_MAX_TEXT: Final = 300  # characters of an error's text


def describe(error: BaseException) -> str:
    """Describe an error, and the line of code that raised it, for the column `detail` of `quarantine`."""
    frames = extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}: {str(error)[:_MAX_TEXT]}"
