"""A fetcher in its own process, which a test can kill.

`python -m kit.fetcher_process ADDRESS PREFIX INSTANCE BLOCKS [suspended]`: BLOCKS is a folder with blocks, named by
their CIDs. Other blocks are never found. Each response takes up to 50 ms, so that records finish out of order. With
`suspended`, the process stops itself (SIGSTOP) when it has committed the first updates, and has written none.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kiln.bridge.fetcher.fetcher import Fetcher
from kiln.bridge.fetcher.pending import FetchingOptions, FetchOutput
from kiln.bridge.ipfs import Announcer, BlockUnavailableError
from kiln.bridge.ipfs.folder import FolderBlockStore
from kiln.bridge.kafka.session_thread import KafkaConfig
from kit.broker_access import client


class _Blocks(FolderBlockStore):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def get(self, cid: str, timeout: float, limit: int = 256_000, announcers: Sequence[Announcer] = ()) -> bytes:
        time.sleep(random.uniform(0, 0.05))  # the time that a peer takes to send a block
        try:
            return (self._folder / cid).read_bytes()
        except FileNotFoundError:
            raise BlockUnavailableError(f"{cid}: no peer has it") from None


class _Suspended(Fetcher):
    _suspends = True

    def _write(self, outputs: Sequence[FetchOutput]) -> bool:
        if self._suspends and any(output.topic == "updates" for output in outputs):
            self._suspends = False
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # before this thread does anything more
        return super()._write(outputs)


def main() -> None:
    address, prefix, instance, folder, *suspended = sys.argv[1:]
    options = FetchingOptions("local-test", max_concurrent=4, give_up_after=3_600_000_000)
    fetcher = (_Suspended if suspended else Fetcher)(
        KafkaConfig(client(address), prefix), options, _Blocks(Path(folder)), tuple, instance=instance
    )
    fetcher.start()
    signal.sigwait({signal.SIGTERM})
    fetcher.stop()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main()
