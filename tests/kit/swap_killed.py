"""`python swap_killed.py LAKE RUN N` swaps a backfill run, and kills itself right before (N even) or right after
(N odd) commit number N // 2, counted from 0."""

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


if __name__ == "__main__":
    lake = Lake(sys.argv[1])
    run = find_run(lake, sys.argv[2])
    assert run is not None
    then = run.events[-1].happened_at + 1
    swap_run(lake, run, Killing(lake, int(sys.argv[3])), lambda: then, lambda words: None)
