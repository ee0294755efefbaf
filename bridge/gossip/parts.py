"""An RPC in parts that are small enough to send."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from schemas.frames import MAX_MESSAGES
from schemas.proto.gossipsub.rpc_pb2 import RPC, ControlIHave

_OVERHEAD: Final = 6  # bytes; tag and length of a field of up to 4 GiB


def split(rpc: RPC, limit: int) -> list[RPC]:
    """The RPC in parts of at most `limit` bytes and MAX_MESSAGES messages each, in order; itself where it is small
    enough: who gets more takes that for a flood.

    Only a part with a single item larger than that is longer. The first part holds the extensions, whose place is the
    first RPC of a stream.
    """
    if rpc.ByteSize() <= limit and len(rpc.publish) <= MAX_MESSAGES:
        return [rpc]
    parts = _Parts(limit)
    control = rpc.control
    if control.HasField("extensions"):
        parts.room(control.extensions.ByteSize()).control.extensions.CopyFrom(control.extensions)
    for subscription in rpc.subscriptions:
        parts.room(subscription.ByteSize()).subscriptions.append(subscription)
    for message in rpc.publish:
        parts.room(message.ByteSize(), 1).publish.append(message)
    for graft in control.graft:
        parts.room(graft.ByteSize()).control.graft.append(graft)
    for prune in control.prune:
        parts.room(prune.ByteSize()).control.prune.append(prune)
    for ihave in control.ihave:
        named = len(ihave.topicID) * 4 + _OVERHEAD
        for ids in _slices(ihave.messageIDs, limit - named):
            part = ControlIHave(messageIDs=ids)
            if ihave.HasField("topicID"):
                part.topicID = ihave.topicID
            if ihave.HasField("topicIndex"):
                part.topicIndex = ihave.topicIndex
            parts.room(part.ByteSize()).control.ihave.append(part)
    for iwant in control.iwant:
        for ids in _slices(iwant.messageIDs, limit):
            parts.room(_ids_size(ids)).control.iwant.add(messageIDs=ids)
    for idontwant in control.idontwant:
        for ids in _slices(idontwant.messageIDs, limit):
            parts.room(_ids_size(ids)).control.idontwant.add(messageIDs=ids)
    return parts.done


class _Parts:
    """RPCs filled one after the other."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = limit
        self._messages = 0
        self.done: list[RPC] = []

    def room(self, size: int, messages: int = 0) -> RPC:
        """The RPC to put an item of this size into."""
        size += _OVERHEAD
        self._messages += messages
        # 10: the lengths of the control message, which grow as it does
        if not self.done or self._size + size + 10 > self._limit or self._messages > MAX_MESSAGES:
            self.done.append(RPC())
            self._size, self._messages = 0, messages
        self._size += size
        return self.done[-1]


def _ids_size(ids: Iterable[bytes]) -> int:
    return sum(len(each) + _OVERHEAD for each in ids)


def _slices(ids: Iterable[bytes], limit: int) -> Iterator[list[bytes]]:
    """Ids in lists that fit in half a part, so that parts fill well; one list at least."""
    taken: list[bytes] = []
    size = 0
    for each in ids:
        if taken and size + len(each) + _OVERHEAD > limit // 2:
            yield taken
            taken, size = [], 0
        taken.append(each)
        size += len(each) + _OVERHEAD
    yield taken
