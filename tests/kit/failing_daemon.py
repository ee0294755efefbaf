"""Spark's daemon for Python workers, whose workers fail at marked records, to test that other records are processed.

Spark starts this daemon if `spark.python.daemon.module` is set to this module.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from pyspark.daemon import manager

import kiln.pipelines.app.worker_daemon  # noqa: F401 - imported for the workers
from kiln.pipelines.archive import transform as archive
from kiln.pipelines.batch import offset_range as stretch
from kiln.pipelines.decode import decoder as decode
from kiln.pipelines.sink import rows as sink
from kiln.pipelines.updates import row_builder as updates
from kiln.schemas.wire.cid import compute_cid
from kiln.schemas.wire.streamid import StreamID

STAGES: Final = ("decode", "archive", "updates", "batch", "sink")
MARKED: Final = {stage: StreamID(3, compute_cid(b"fails in %b" % stage.encode())).text for stage in STAGES}
"""Stream at which a stage fails, by stage."""


class MarkedError(ArithmeticError):
    """Stands for an error that a bug in Kiln would raise."""


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _failing(stage: str, function: Callable[_P, _R]) -> Callable[_P, _R]:
    def fails(*arguments: _P.args, **named: _P.kwargs) -> _R:
        if MARKED[stage] in repr(arguments):
            raise MarkedError(f"a fault put into {stage}")
        return function(*arguments, **named)

    return fails


def put_in_faults() -> None:
    """Patch a function of each stage so that it fails at the stage's marked stream."""
    for stage, module, name in (
        ("decode", decode, "read_message"),
        ("archive", archive, "build_message_row"),
        ("updates", updates, "resolve_separator"),
        ("batch", stretch, "decode_update"),
    ):
        setattr(module, name, _failing(stage, getattr(module, name)))
    sink._READERS["updates"] = _failing("sink", sink._READERS["updates"])


if __name__ == "__main__":
    # a worker imports this module by its name
    sys.modules.setdefault("kit.failing_daemon", sys.modules["__main__"])
    put_in_faults()
    gc.freeze()
    manager()
