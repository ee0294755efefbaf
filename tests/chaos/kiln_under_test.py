"""The command `kiln` with handles for faults that no signal can cause: `python -m chaos.kiln_under_test run …`.

CHAOS_CONTROL names a folder. A file `cut` in it, "TABLE before|after fail|kill", is taken once: the next commit to the
table fails, or the whole Kiln is killed, before or after the commit. A file `clock` holds by how many seconds the
clock of the queries is wrong. CHAOS_CLOCK is what to preload so that the file `bridge_clock` moves the bridge's clock.
CHAOS_PROXY is the port of a proxy before the embedded broker, which the broker then names as its own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from chaos import wrong_clock
from kiln.conf.settings.model import Settings
from kiln.deploy.cli.app import main
from kiln.deploy.stack import child_process as bridge
from kiln.deploy.stack import kafka_broker as broker
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.deploy.stack.ports import HOST
from kiln.pipelines.app import launch
from kiln.pipelines.delta.commits import BatchProgress, WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import DataFile
from kiln.pipelines.runtime import query_context

CONTROL = Path(os.environ["CHAOS_CONTROL"])


class CutError(RuntimeError):
    """The fault."""


class CutCommits(DeltaRsCommits):
    """Commits that end where the file `cut` says."""

    def commit(
        self, table: str, files: Sequence[DataFile], write: WriteId, progress: BatchProgress | None = None
    ) -> bool:
        self._cut(table, "before")
        done = super().commit(table, files, write, progress)
        self._cut(table, "after")
        return done

    def _cut(self, table: str, when: str) -> None:
        path = CONTROL / "cut"
        try:
            wanted, moment, how = path.read_text().split()
        except (FileNotFoundError, ValueError):
            return
        if (wanted, moment) == (table, when):
            path.unlink()
            if how == "kill":
                os.killpg(0, signal.SIGKILL)
            raise CutError(f"cut {when} the commit to {table}")


class WrongClock:
    """`time`, as far as a plan asks it."""

    CLOCK_BOOTTIME = time.CLOCK_BOOTTIME
    clock_gettime_ns = staticmethod(time.clock_gettime_ns)

    @staticmethod
    def time_ns() -> int:
        try:
            wrong = float((CONTROL / "clock").read_text())
        except (FileNotFoundError, ValueError):
            wrong = 0.0
        return time.time_ns() + int(wrong * 1e9)


def wrong_environment(settings: Settings) -> Mapping[str, str]:
    """The bridge's environment, with a clock that the file `bridge_clock` moves."""
    environment = _environment(settings)
    preload, moved_by = os.environ["CHAOS_CLOCK"], CONTROL / "bridge_clock"
    return {**environment, **wrong_clock.environment(preload, moved_by)}


class ProxiedBroker(EmbeddedBroker):
    """A broker that tells clients the proxy's port as its own."""

    def _properties(self, password: str) -> str:
        # of a key given twice, Java takes the last
        return f"{super()._properties(password)}advertised.listeners=KILN://{HOST}:{os.environ['CHAOS_PROXY']}\n"


_environment = bridge.child_environment

if __name__ == "__main__":
    vars(query_context).update(DeltaRsCommits=CutCommits)
    vars(launch).update(time=WrongClock)
    if os.environ.get("CHAOS_CLOCK"):
        vars(bridge).update(child_environment=wrong_environment)
    if os.environ.get("CHAOS_PROXY"):
        vars(broker).update(EmbeddedBroker=ProxiedBroker)
    main()
