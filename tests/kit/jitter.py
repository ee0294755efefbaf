"""A node on which messages overtake each other."""

from __future__ import annotations

import random
from collections.abc import Iterable

import trio

from kiln.bridge.gossipsub.effects import Send
from kiln.bridge.libp2p.host import Node

JITTER = 0.3  # s


class JitteryNode(Node):
    """A node that hands each message on after a time of its own, up to `JITTER`."""

    def _dispatch(self, sends: Iterable[Send]) -> int:
        at_once = []
        for send in sends:
            if send.rpc.publish:
                self._nursery.start_soon(self._later, send)
            else:
                at_once.append(send)
        return super()._dispatch(at_once)

    async def _later(self, send: Send) -> None:
        await trio.sleep(random.uniform(0, JITTER))  # the injected jitter
        super()._dispatch([send])
