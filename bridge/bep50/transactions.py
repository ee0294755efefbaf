"""Queries that wait for a response.

Each topic has its own transactions (BEP 50: "its own routing table and transaction state"), and so has the plain DHT. A
response matches a query at most once, and only with the address, the transaction id and the topic of the query.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from kiln.bridge.bep50.core import OverlayCore
from kiln.schemas.dht.bencode import Value
from kiln.schemas.dht.krpc import DhtAddress, KrpcError, KrpcQuery, KrpcResponse

Answer: TypeAlias = KrpcResponse | KrpcError | None
"""A response, an error, or `None` after a timeout."""


class Transactions:
    """The unanswered queries of one topic, or of the plain DHT if ``topic`` is `None`."""

    def __init__(self, core: OverlayCore, topic: bytes | None) -> None:
        self._core = core
        self._topic = topic
        self._pending: dict[tuple[DhtAddress, bytes], Callable[[Answer], None]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def send_query(
        self,
        address: DhtAddress,
        method: bytes,
        arguments: dict[bytes, Value],
        on_answer: Callable[[Answer], None],
        node: bytes = b"",
        target: bytes | None = None,
    ) -> None:
        """Send a query.

        Args:
            on_answer: Called once, with the response or the error, or with `None` after the timeout.
            node: The receiver's id, if known.
            target: As in `OverlayCore.send`.
        """
        core = self._core
        # Four random bytes: the crate mainline answers no other size, and a node off the path cannot guess them.
        transaction = core.random.randbytes(4)
        while (address, transaction) in self._pending:
            transaction = core.random.randbytes(4)
        key = (address, transaction)
        self._pending[key] = on_answer
        core.schedule(core.settings.timeout, lambda: self._expire(key, on_answer))
        core.send(KrpcQuery(transaction, method, core.id, arguments, self._topic), address, node, target)

    def handle_response(self, message: KrpcResponse | KrpcError, source: DhtAddress) -> bool:
        """Pass a response or an error to the callback of its query. Return false if it matches no pending query."""
        on_answer = self._pending.pop((source, message.transaction), None)
        if on_answer is not None:
            on_answer(message)
        return on_answer is not None

    def clear(self) -> None:
        """Drop all pending queries without calling their callbacks."""
        self._pending.clear()

    def _expire(self, key: tuple[DhtAddress, bytes], on_answer: Callable[[Answer], None]) -> None:
        if self._pending.get(key) is on_answer:
            del self._pending[key]
            on_answer(None)
