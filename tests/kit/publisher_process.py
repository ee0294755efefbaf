"""A publisher in its own process, which a test can kill.

`python -m kit.publisher_process ADDRESS PREFIX INSTANCE FILE LONELY` appends a line to FILE for each stored block (`k`
and the CID) and for each sent message (`s` and the data). Topics that end with LONELY have no peer.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import cast

from kiln.bridge.ipfs import BlockStore
from kiln.bridge.kafka.session_thread import KafkaConfig
from kiln.bridge.publisher.batches import PublishingOptions
from kiln.bridge.publisher.publisher import Publisher
from kit.broker_access import client


class _Node:
    def __init__(self, path: str, lonely: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._lonely = lonely

    def _write(self, kind: str, text: str) -> None:
        os.write(self._file, f"{kind} {text}\n".encode())

    def publish(self, topic: str, data: bytes) -> int:
        if topic.endswith(self._lonely):
            return 0
        self._write("s", data.decode())
        return 1

    def put(self, cid: str, data: bytes) -> None:
        self._write("k", cid)

    def remove_older(self, before: int) -> bool:
        return False


def main() -> None:
    address, prefix, instance, path, lonely = sys.argv[1:]
    node = _Node(path, lonely)
    options = PublishingOptions("local-test", publish_timeout=1_000_000, retry_every=200_000)
    kafka = KafkaConfig(client(address), prefix)
    publisher = Publisher(kafka, options, node.publish, lambda: None, cast(BlockStore, node), instance=instance)
    publisher.start()
    signal.sigwait({signal.SIGTERM})
    publisher.stop()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main()
