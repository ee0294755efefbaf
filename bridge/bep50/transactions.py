"""Queries that wait for their answer.

Each topic has its own (BEP 50: "its own routing table and transaction state"), and the plain DHT has. An answer is
taken from the address that was asked, for the transaction that was asked, in the topic that was asked, and once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from kiln.bridge.bep50.core import OverlayCore
from kiln.schemas.dht.bencode import Value
from kiln.schemas.dht.krpc import DhtAddress, KrpcError, KrpcQuery, KrpcResponse

Answer: TypeAlias = KrpcResponse | KrpcError | None
"""None: nothing came in time."""


class Transactions:
    """The unanswered queries of one topic; ``topic`` None: of the plain DHT."""

    def __init__(self, core: OverlayCore, topic: bytes | None) -> None:
        self._core = core
        self._topic = topic
        self._waiting: dict[tuple[DhtAddress, bytes], Callable[[Answer], None]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def send_query(
        self,
        address: DhtAddress,
        method: bytes,
        arguments: dict[bytes, Value],
        done: Callable[[Answer], None],
        node: bytes = b"",
        target: bytes | None = None,
    ) -> None:
        """Send a query; ``done`` is called once, with the answer or with None after the timeout. ``node`` and
        ``target``: see `Machine.send`."""
        core = self._core
        # Four bytes, of chance: the crate mainline answers no others, and nobody off the path shall guess them.
        transaction = core.random.randbytes(4)
        while (address, transaction) in self._waiting:
            transaction = core.random.randbytes(4)
        waiting = (address, transaction)
        self._waiting[waiting] = done
        core.schedule(core.settings.timeout, lambda: self._expire(waiting, done))
        core.send(KrpcQuery(transaction, method, core.id, arguments, self._topic), address, node, target)

    def pop(self, message: KrpcResponse | KrpcError, source: DhtAddress) -> Callable[[Answer], None] | None:
        """Whoever waits for this answer, or None if nobody asked."""
        return self._waiting.pop((source, message.transaction), None)

    def forget(self) -> None:
        """Wait for nothing any more."""
        self._waiting.clear()

    def _expire(self, waiting: tuple[DhtAddress, bytes], done: Callable[[Answer], None]) -> None:
        if self._waiting.get(waiting) is done:
            del self._waiting[waiting]
            done(None)
