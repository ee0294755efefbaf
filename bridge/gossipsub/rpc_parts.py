"""Splitting of RPCs that are larger than peers accept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, ControlIHave

MAX_MESSAGES: Final = 2000
"""Maximum number of messages in an RPC that is sent. A receiving Kiln verifies at most this many Ed25519 signatures of
one RPC (`MAX_RPC_COST`)."""

_FIELD: Final = 6  # bytes; tag and length of a field of up to 4 GiB


class MessageTooLargeError(ValueError):
    """A message to publish is too large for any RPC. The error text names the setting to raise."""


@dataclass(frozen=True, slots=True)
class RpcLimits:
    """Limits that peers have for one RPC, in bytes. go-libp2p-pubsub resets the stream of an RPC that exceeds one.

    Attributes:
        size: The whole RPC without its length prefix (`DefaultMaxMessageSize`, comm.go).
        overhead: Everything except the data of messages: control messages, subscriptions, and the topic, author,
            signature and unknown fields of each message (`DefaultMaxControlMessageSize`, pb/validator.go; since 0.17).
    """

    size: int = 1 << 20
    overhead: int = 512 << 10

    def accept(self, message: int, data: int) -> bool:
        """Return true if an RPC that contains only this message is within the limits.

        Args:
            message: Size of the encoded message in bytes.
            data: Size of the message's data in bytes.
        """
        rpc = 1 + max(1, (message.bit_length() + 6) // 7) + message
        return rpc <= self.size and rpc - data <= self.overhead


def split(rpc: RPC, limits: RpcLimits) -> tuple[list[RPC], int]:
    """Split an RPC into RPCs within the limits, with at most MAX_MESSAGES messages each.

    An RPC within these limits is returned unchanged. The extensions are in the first part, because gossipsub allows
    them only in the first RPC of a stream.

    Returns:
        The parts in order, and the number of messages, subscriptions, control items and ids that are too large for any
        RPC and are therefore missing.
    """
    size = rpc.ByteSize()
    if len(rpc.publish) <= MAX_MESSAGES and (
        size <= limits.overhead
        or (size <= limits.size and size - sum(len(message.data) for message in rpc.publish) <= limits.overhead)
    ):
        return [rpc], 0
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
    return packer.rpcs, packer.left_out


class _Packer:
    """Fills one RPC after another. It adds up upper bounds of the sizes, so no RPC exceeds the limits."""

    def __init__(self, limits: RpcLimits) -> None:
        self.overhead = min(limits.overhead, limits.size) - 2 * _FIELD  # for the control message and an item in it
        self.rpcs: list[RPC] = []
        self.left_out = 0
        self._limits = limits
        self._size = self._overhead = self._messages = 0

    def make_room(self, size: int, items: int = 1) -> RPC | None:
        """Return the RPC that has room for an item of this size, or `None` if the item is too large for any RPC."""
        if size > self.overhead:
            self.left_out += items
            return None
        return self._next(size, 0, 0)

    def make_room_for_message(self, size: int, data: int) -> RPC | None:
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
    """Split ids into lists of at most `limit` / 2 bytes, so that parts fill well. No ids give one empty list."""
    chunk: list[bytes] = []
    size = 0
    for message_id in ids:
        if chunk and size + len(message_id) + _FIELD > limit // 2:
            yield chunk
            chunk, size = [], 0
        chunk.append(message_id)
        size += len(message_id) + _FIELD
    yield chunk
