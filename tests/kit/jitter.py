"""A node that delays messages at random, so that they overtake each other."""

from __future__ import annotations

import random
from collections.abc import Iterable

import trio
from trio_typing import TaskStatus

from kiln.bridge.gossipsub.effects import Send
from kiln.bridge.libp2p.host import Node
from kiln.bridge.libp2p.patches import change_class
from kiln.bridge.libp2p.traffic import Traffic

JITTER = 0.3  # s


class JitteryNode(Node):
    """A node that sends each message after its own random delay of up to `JITTER`."""

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            change_class(self._traffic, _JitteryTraffic).nursery = nursery
            await super().run(task_status=task_status)
            nursery.cancel_scope.cancel()


class _JitteryTraffic(Traffic):
    nursery: trio.Nursery

    def dispatch(self, sends: Iterable[Send]) -> int:
        at_once = []
        for send in sends:
            if send.rpc.publish:
                self.nursery.start_soon(self._dispatch_later, send)
            else:
                at_once.append(send)
        return super().dispatch(at_once)

    async def _dispatch_later(self, send: Send) -> None:
        await trio.sleep(random.uniform(0, JITTER))  # the injected jitter
        super().dispatch([send])
