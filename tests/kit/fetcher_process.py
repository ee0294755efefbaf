"""A fetcher in a process of its own, which a test may kill.

`python -m kit.fetcher_process ADDRESS PREFIX INSTANCE BLOCKS`: BLOCKS is a folder with blocks, named by their CIDs.
Other blocks never come. Each answer takes up to 50 ms, so that records finish out of order.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from pathlib import Path

from kiln.bridge.fetcher.fetcher import Fetcher
from kiln.bridge.fetcher.pending import FetchingOptions
from kiln.bridge.ipfs import BlockUnavailableError
from kiln.bridge.ipfs.folder import FolderBlockStore
from kiln.bridge.kafka.session_thread import KafkaConfig
from kit.broker_access import security


class _Blocks(FolderBlockStore):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def get(self, cid: str, timeout: float, limit: int = 256_000) -> bytes:
        time.sleep(random.uniform(0, 0.05))
        try:
            return (self._folder / cid).read_bytes()
        except FileNotFoundError:
            raise BlockUnavailableError(f"{cid}: no peer has it") from None


def main() -> None:
    address, prefix, instance, folder = sys.argv[1:]
    options = FetchingOptions("local-test", max_concurrent=4, give_up_after=3_600_000_000)
    fetcher = Fetcher(
        KafkaConfig([address], security(address), prefix), options, _Blocks(Path(folder)), tuple, instance=instance
    )
    fetcher.start()
    signal.sigwait({signal.SIGTERM})
    fetcher.stop()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main()
