"""Splitting of RPCs to the size that peers accept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, ControlIHave

MAX_MESSAGES: Final = 2000
"""Maximum number of messages in one RPC. Kiln verifies no more ed25519 signatures than this in one RPC
(`MAX_RPC_COST`)."""

_FIELD: Final = 6  # bytes; tag and length of a field of up to 4 GiB


class MessageTooLargeError(ValueError):
    """A message to publish fits in no RPC. The message names the setting."""


@dataclass(frozen=True, slots=True)
class RpcLimits:
    """Bytes that a peer accepts in one RPC, the length prefix not included.

    go-libp2p-pubsub resets the stream of a longer RPC (`DefaultMaxMessageSize`, comm.go). Since 0.17 it also does so if
    everything except the data of the messages is over `overhead` (`DefaultMaxControlMessageSize`, pb/validator.go):
    control messages, subscriptions, and the topic, author, signature and unknown fields of each message.
    """

    size: int = 1 << 20
    overhead: int = 512 << 10

    def accept(self, message: int, data: int) -> bool:
        """True if an RPC of one message is within the limits.

        Args:
            message: Size of the encoded message in bytes.
            data: Size of the message's data in bytes.
        """
        rpc = 1 + max(1, (message.bit_length() + 6) // 7) + message
        return rpc <= self.size and rpc - data <= self.overhead


class RpcParts(NamedTuple):
    """The RPCs that an RPC was split into, and the number of its items that fit in no RPC."""

    rpcs: list[RPC]
    left_out: int


def split(rpc: RPC, limits: RpcLimits) -> RpcParts:
    """Split an RPC into RPCs within the limits, of at most MAX_MESSAGES messages each, in order.

    An RPC that is small enough is not split, because a peer may treat many small RPCs as a flood. The extensions are in
    the first part, since they belong in the first RPC of a stream.
    """
    size = rpc.ByteSize()
    if len(rpc.publish) <= MAX_MESSAGES and (
        size <= limits.overhead
        or (size <= limits.size and size - sum(len(message.data) for message in rpc.publish) <= limits.overhead)
    ):
        return RpcParts([rpc], 0)
    packer = _Packer(limits)
    control = rpc.control
    if control.HasField("extensions") and (part := packer.make_room(control.extensions.ByteSize())) is not None:
        part.control.extensions.CopyFrom(control.extensions)
    for subscription in rpc.subscriptions:
        if (part := packer.make_room(subscription.ByteSize())) is not None:
            part.subscriptions.append(subscription)
    for message in rpc.publish:
        if (part := packer.make_room_for_message(message.ByteSize(), len(message.data))) is not None:
            part.publish.append(message)
    for graft in control.graft:
        if (part := packer.make_room(graft.ByteSize())) is not None:
            part.control.graft.append(graft)
    for prune in control.prune:
        if (part := packer.make_room(prune.ByteSize())) is not None:
            part.control.prune.append(prune)
    for ihave in control.ihave:
        topic = ControlIHave()
        topic.CopyFrom(ihave)
        topic.ClearField("messageIDs")
        for ids in _split_ids(ihave.messageIDs, packer.overhead - topic.ByteSize()):
            if (part := packer.make_room(topic.ByteSize() + _ids_size(ids), len(ids))) is not None:
                item = part.control.ihave.add()
                item.CopyFrom(topic)
                item.messageIDs.extend(ids)
    for iwant in control.iwant:
        for ids in _split_ids(iwant.messageIDs, packer.overhead):
            if (part := packer.make_room(_ids_size(ids), len(ids))) is not None:
                part.control.iwant.add(messageIDs=ids)
    for idontwant in control.idontwant:
        for ids in _split_ids(idontwant.messageIDs, packer.overhead):
            if (part := packer.make_room(_ids_size(ids), len(ids))) is not None:
                part.control.idontwant.add(messageIDs=ids)
    return RpcParts(packer.rpcs, packer.left_out)


class _Packer:
    """RPCs filled one after the other. The sizes that the packer adds up are upper bounds."""

    def __init__(self, limits: RpcLimits) -> None:
        self.overhead = min(limits.overhead, limits.size) - 2 * _FIELD  # of an RPC's control message and of an item
        self.rpcs: list[RPC] = []
        self.left_out = 0
        self._limits = limits
        self._size = self._overhead = self._messages = 0

    def make_room(self, size: int, items: int = 1) -> RPC | None:
        """Return the RPC to which to add a control item of this size, or `None` if the item fits in no RPC."""
        if size > self.overhead:
            self.left_out += items
            return None
        return self._next(size, 0, 0)

    def make_room_for_message(self, size: int, data: int) -> RPC | None:
        """Return the RPC to which to add a message, or `None` if the message fits in no RPC."""
        if not self._limits.accept(size, data):
            self.left_out += 1
            return None
        return self._next(size, data, 1)

    def _next(self, size: int, data: int, messages: int) -> RPC:
        size += _FIELD
        full = (
            self._size + size > self._limits.size - _FIELD
            or self._overhead + size - data > self._limits.overhead - _FIELD
            or self._messages + messages > MAX_MESSAGES
        )
        if full or not self.rpcs:
            self.rpcs.append(RPC())
            self._size = self._overhead = self._messages = 0
        self._size += size
        self._overhead += size - data
        self._messages += messages
        return self.rpcs[-1]


def _ids_size(ids: Iterable[bytes]) -> int:
    return sum(len(message_id) + _FIELD for message_id in ids)


def _split_ids(ids: Iterable[bytes], limit: int) -> Iterator[list[bytes]]:
    """Split ids into lists that fit in half a part, so that parts fill well; yields at least one list."""
    chunk: list[bytes] = []
    size = 0
    for message_id in ids:
        if chunk and size + len(message_id) + _FIELD > limit // 2:
            yield chunk
            chunk, size = [], 0
        chunk.append(message_id)
        size += len(message_id) + _FIELD
    yield chunk
