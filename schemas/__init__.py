"""Formats of bytes and rows, as pure functions and data classes: nothing here uses Spark, a socket or a clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kiln.schemas.wire.topic_table import bundle_hash, intersect

__all__ = ["bundle_hash", "intersect"]


def __getattr__(name: str) -> object:
    # lazy, so that `kiln --help` imports no protobuf
    if name in __all__:
        from kiln.schemas.wire import topic_table

        return getattr(topic_table, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
