"""`python swap_killed.py LAKE RUN` reads numbers from stdin. For each number N, a process swaps a backfill run, and
kills itself right before (N even) or right after (N odd) commit number N // 2, counted from 0. The program prints the
exit code of each process, which is negative for a signal.

The processes are forked, because the imports take longer than a swap.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Sequence

from deltalake import DeltaTable, Transaction

from kiln.pipelines.backfill.run_log import find_run
from kiln.pipelines.backfill.swap import FileSwap
from kiln.pipelines.backfill.swap_runs import swap_run
from kiln.pipelines.delta.files import DataFile
from kiln.pipelines.delta.lake import Lake


class Killing(FileSwap):
    """Commits of a swap. The process kills itself before or after one of them."""

    def __init__(self, lake: Lake, moment: int) -> None:
        super().__init__(lake)
        self.left = moment

    def commit(
        self, table: str, read: DeltaTable, gone: Collection[str], files: Sequence[DataFile], mark: Transaction
    ) -> bool:
        self._die()
        is_committed = super().commit(table, read, gone, files, mark)
        self._die()
        return is_committed

    def _die(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def swap(lake: Lake, name: str, moment: int) -> None:
    run = find_run(lake, name)
    assert run is not None
    then = run.events[-1].happened_at + 1
    swap_run(lake, run, Killing(lake, moment), lambda: then, lambda words: None)


if __name__ == "__main__":
    for line in sys.stdin:
        child = os.fork()
        if not child:
            swap(Lake(sys.argv[1]), sys.argv[2], int(line))
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
