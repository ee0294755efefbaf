"""The user's own decoder of messages (setting `network.decoder`): a function from the bytes of a message to a dict.

The dict becomes JSON in the column `decoded` of the table `messages`. A decoder that fails on one message affects only
that message.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from types import FrameType
from typing import Final

import orjson

from kiln.conf.process.errors import KilnError
from kiln.pipelines.decode.processing_errors import describe
from kiln.schemas.reject import Rejected

GROUP: Final = "kiln.decoders"
"""Group of the Python entry points that name decoders"""

STAGE: Final = "decoder"
DECODER_FAILED: Final = "decoder_failed"
DECODER_TOO_SLOW: Final = "decoder_too_slow"
DECODER_OUTPUT: Final = "decoder_output"
REASONS: Final = (DECODER_FAILED, DECODER_TOO_SLOW, DECODER_OUTPUT)

MAX_DECODED: Final = 1 << 20
"""Maximum size of the JSON of one message, in bytes"""

_TIME_LIMIT: Final = 1.0  # s for one message
_MAX_TIMEOUTS: Final = 5
"""number of messages in one task on which the decoder may exceed the time limit; after these, the task does not call
it"""


class DecoderError(KilnError):
    """The decoder in the settings cannot be loaded."""


class _TimeLimitExceededError(BaseException):
    """The decoder exceeds its time limit. It is a BaseException, which `except Exception` in the decoder does not
    catch."""


@cache
def load_decoder(name: str) -> Callable[[bytes], object]:
    """Load a decoder.

    Args:
        name: Name of an entry point in the group `kiln.decoders`.

    Raises:
        DecoderError: There is no such entry point, it cannot be imported, or it is not a function.
    """
    points = entry_points(group=GROUP)
    if name not in points.names:
        known = ", ".join(sorted(points.names)) or "none"
        raise DecoderError(
            f'network.decoder = "{name}": no installed package has this entry point in the group {GROUP} (installed: '
            f"{known}). Install the package of the decoder into Kiln's Python environment"
        )
    try:
        function = points[name].load()
    except Exception as error:  # the module is the user's, and importing it runs its code
        raise DecoderError(
            f'network.decoder = "{name}": cannot import {points[name].value} ({describe(error)}). Fix the package of '
            "the decoder"
        ) from error
    if not callable(function):
        raise DecoderError(
            f'network.decoder = "{name}": {points[name].value} is not a function. Name a function that takes the bytes '
            "of a message and returns a dict"
        )
    checked: Callable[[bytes], object] = function
    return checked


class MessageDecoder:
    """The user's decoder, with a time limit, for the messages of one task."""

    def __init__(self, name: str, time_limit: float = _TIME_LIMIT) -> None:
        """Load the decoder.

        Args:
            name: Name of its entry point.
            time_limit: Seconds for one message. After these, Python code is interrupted, but native code is not.

        Raises:
            DecoderError: The decoder cannot be loaded.
        """
        self._decode = load_decoder(name)
        # Python delivers signals to the main thread alone, in which Spark's workers run tasks.
        self._time_limit = time_limit if threading.current_thread() is threading.main_thread() else None
        self._timeouts = 0

    def decode(self, data: bytes) -> str | Rejected:
        """Decode the data of a message to JSON, or return the reason of the failure. It raises nothing."""
        if self._timeouts >= _MAX_TIMEOUTS:
            return Rejected(
                DECODER_TOO_SLOW,
                f"the decoder was not called: it was too slow on {_MAX_TIMEOUTS} messages of this task",
            )
        try:
            with _limit_time(self._time_limit):
                value = self._decode(data)
        except _TimeLimitExceededError:
            self._timeouts += 1
            return Rejected(DECODER_TOO_SLOW, f"the decoder was stopped after {self._time_limit} s")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code, of which no error may stop the query
            return Rejected(DECODER_FAILED, _describe_safely(error))
        if not isinstance(value, dict):
            return Rejected(DECODER_OUTPUT, f"the decoder returned {type(value).__name__}, not a dict")
        try:
            text = orjson.dumps(value)
        except orjson.JSONEncodeError as error:
            return Rejected(DECODER_OUTPUT, f"the dict cannot be written as JSON: {error}")
        if len(text) > MAX_DECODED:
            return Rejected(
                DECODER_OUTPUT, f"the dict has {len(text):,} bytes as JSON; at most {MAX_DECODED:,} are stored"
            )
        return text.decode()


def _describe_safely(error: BaseException) -> str:
    """Describe an error of the user's code. Its text may raise another error, or contain characters that no table can
    store."""
    try:
        text = describe(error)
    except Exception:  # noqa: BLE001 - the text of the error is the user's code too
        text = type(error).__name__
    return text.encode("utf-8", "backslashreplace").decode()


@contextmanager
def _limit_time(seconds: float | None) -> Iterator[None]:
    """Raise `_TimeLimitExceededError` in the main thread after some seconds, unless the body ends before. None: no
    limit."""
    if seconds is None:
        yield
        return
    is_running = True

    def interrupt(number: int, frame: FrameType | None) -> None:
        if is_running:  # the signal may arrive after the body has ended
            raise _TimeLimitExceededError

    previous = signal.signal(signal.SIGALRM, interrupt)
    # The timer fires again after each interval, because the body may drop the error, as in a finalizer.
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        is_running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
