"""The interface of a sink for captured frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Sink(Protocol):
    """A sink for captured frames: kiln.bridge.capture.spool.FrameSink, or another in tests."""

    def put(self, connection: bytes, frame: bytes) -> None: ...
    @property
    def full(self) -> bool: ...
    def subscribe(self, callback: Callable[[], None]) -> object:
        """`callback` is called, from any thread, when the sink is no longer full."""
