"""BEP 50 on the demo network: two nodes that receive the batches that Kiln announces.

For a few separators the first node announces these batches again, under a key of its own that Kiln follows. So Kiln
receives announcements, and the block of each exists.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import trio
from nacl.signing import SigningKey
from trio_typing import TaskStatus

from kiln.bridge.bep50.carrier import Carrier, CarrierOptions, publisher_key
from kiln.bridge.capture.tap import Sink
from kiln.bridge.publisher.batches import PublishError
from kiln.schemas.dht.announcement import PublisherKey, compute_salt, read_announcement
from kiln.schemas.dht.items import Item
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.cid import cid_text
from kiln.schemas.wire.pubsub import write_batch_update
from kiln.schemas.wire.topics import Separator, format_separator, format_topic

NODES: Final = ("one", "two")
REANNOUNCED: Final = 3
"""Number of separators whose batches the first node announces again with its own key."""


class Listeners:
    """Both nodes, on free ports of 127.0.0.1, with their identities in `folder`."""

    def __init__(
        self,
        folder: Path,
        network: str,
        publisher: bytes,
        separators: Sequence[Separator],
        sink: Sink,
        error: Callable[[str], None],
    ) -> None:
        """Create the nodes, which follow the key `publisher` for these separators and pass errors to `error`."""
        self._folder = folder
        self._network = network
        self._follow = tuple(PublisherKey(publisher, separator) for separator in separators)
        self._reannounced = {compute_salt(network, separator): separator for separator in separators[:REANNOUNCED]}
        self._sink = sink
        self._error = error
        self._key = publisher_key(folder)
        self._to_announce, self._received_by_one = trio.open_memory_channel[Item](math.inf)
        self.addresses: list[str] = []
        """addresses of the nodes, once they listen"""
        self.received: Counter[str] = Counter()
        """number of items that each node has received"""

    @property
    def sources(self) -> list[str]:
        """Sources that the first node announces, in the form of the setting `bep50.follow`."""
        key = self._key.verify_key.encode().hex()
        return [f"{key}/{format_separator(separator)}" for separator in self._reannounced.values()]

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled. `task_status.started()` is called once both nodes listen.

        Raises:
            CarrierError: A node cannot listen.
        """
        async with trio.open_nursery() as nursery:
            for name in NODES:
                carrier = Carrier(
                    CarrierOptions(
                        self._network, ("127.0.0.1:0",), contacts=tuple(self.addresses), follow=self._follow
                    ),
                    self._key if name == NODES[0] else SigningKey.generate(),
                    self._folder / f"{name}.bep50",
                    self._sink,
                    on_item=partial(self._record_item, name),
                )
                await nursery.start(carrier.run)
                self.addresses += [address.text for address in carrier.addresses]
                if name == NODES[0]:
                    nursery.start_soon(self._reannounce, carrier)
            task_status.started()

    def _record_item(self, name: str, item: Item) -> None:
        self.received[name] += 1
        if name == NODES[0] and item.salt in self._reannounced:
            self._to_announce.send_nowait(item)

    async def _reannounce(self, carrier: Carrier) -> None:
        async for item in self._received_by_one:
            separator = self._reannounced[item.salt]
            found = read_announcement(item.value, self._network, item.salt)
            if isinstance(found, Rejected):
                continue
            try:
                topic = format_topic(self._network, separator)
                await carrier.announce(topic, write_batch_update(separator, cid_text(found.batch)))
            except PublishError as error:
                self._error(str(error))
