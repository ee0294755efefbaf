"""CPU and memory of a running Kiln, by kind of process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil

_KINDS = {
    "kiln.deploy.demo.network": "demo network",
    "kiln.bridge.app.main": "bridge",
    "kiln.pipelines.app.worker_daemon": "Python workers",
    "python_streaming_source_runner": "Python planners",
    "kiln.deploy.ops.maintenance": "maintenance",
    "quality": "quality",
    "kafka.Kafka": "broker",
    "org.apache.spark": "Spark's JVM",
}
"""Kind of a process by a word in its command line. A process without such a word has the kind of its parent."""

DEMO = "demo network"
ROOT = "kiln run"


def kind_of(command: str, parents: str) -> str:
    """Return the kind of a process with this command line. `parents` is the kind of its parent process."""
    return next((kind for word, kind in _KINDS.items() if word in command), parents)


class _Known(NamedTuple):
    kind: str
    seconds: float


@dataclass
class Usage:
    """CPU time and memory of a process and its descendants. A process that lives only between two calls is missed."""

    root: psutil.Process
    _known: dict[psutil.Process, _Known] = field(default_factory=dict)

    def look(self) -> Mapping[str, float]:
        """Return the CPU time in s by kind of process. Processes that have ended since an earlier call are included."""
        for process, kind in self._tree():
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            self._known[process] = _Known(kind, times.user + times.system)
        seconds: defaultdict[str, float] = defaultdict(float)
        for known in self._known.values():
            seconds[known.kind] += known.seconds
        return seconds

    def memory(self) -> Mapping[str, float]:
        """Return the memory in MB by kind of process. A page that several processes share counts once (PSS)."""
        megabytes: defaultdict[str, float] = defaultdict(float)
        for process, kind in self._tree():
            try:
                megabytes[kind] += process.memory_full_info().pss / 1e6
            except psutil.Error:
                continue
        return megabytes

    def _tree(self) -> list[tuple[psutil.Process, str]]:
        kinds, tree = {self.root.pid: ROOT}, [(self.root, ROOT)]
        for process in self.root.children(recursive=True):  # parents come before their children
            try:
                kind = kind_of(" ".join(process.cmdline()), kinds.get(process.ppid(), ROOT))
            except psutil.Error:
                continue
            kinds[process.pid] = kind
            tree.append((process, kind))
        return tree
