"""Splitting of RPCs that are larger than peers accept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, ControlIDontWant, ControlIHave, ControlIWant, ControlMessage

MAX_MESSAGES: Final = 2000
"""Maximum number of messages in an RPC that is sent. A receiving Kiln verifies at most this many Ed25519 signatures of
one RPC (`MAX_RPC_COST`)."""


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
    size, overhead = _measure(rpc)
    if len(rpc.publish) <= MAX_MESSAGES and size <= limits.size and overhead <= limits.overhead:
        return [rpc], 0
    parts: list[RPC] = []
    part_size = part_overhead = left_out = 0
    for item in _list_items(rpc, min(limits.size, limits.overhead) // 2):
        size, overhead = _measure(item)
        if size > limits.size or overhead > limits.overhead:
            left_out += 1
            continue
        # the sum of the sizes is an upper bound for the size of the merged RPC
        part_size += size
        part_overhead += overhead
        if (
            not parts
            or part_size > limits.size
            or part_overhead > limits.overhead
            or len(parts[-1].publish) == MAX_MESSAGES
        ):
            parts.append(RPC())
            part_size, part_overhead = size, overhead
        parts[-1].MergeFrom(item)
    return parts, left_out


def _measure(rpc: RPC) -> tuple[int, int]:
    """Return the size of an RPC, and its overhead (`RpcLimits`)."""
    size = rpc.ByteSize()
    return size, size - sum(len(message.data) for message in rpc.publish)


def _list_items(rpc: RPC, ids_size: int) -> Iterator[RPC]:
    """Yield an RPC for each item. Lists of ids are split at about `ids_size` bytes, so that parts fill well."""
    control = rpc.control
    if control.HasField("extensions"):
        yield RPC(control=ControlMessage(extensions=control.extensions))
    yield from (RPC(subscriptions=[subscription]) for subscription in rpc.subscriptions)
    yield from (RPC(publish=[message]) for message in rpc.publish)
    yield from (RPC(control=ControlMessage(graft=[graft])) for graft in control.graft)
    yield from (RPC(control=ControlMessage(prune=[prune])) for prune in control.prune)
    for ihave in control.ihave:
        for ids in _split_ids(ihave.messageIDs, ids_size):
            yield RPC(control=ControlMessage(ihave=[ControlIHave(topicID=ihave.topicID, messageIDs=ids)]))
    for iwant in control.iwant:
        for ids in _split_ids(iwant.messageIDs, ids_size):
            yield RPC(control=ControlMessage(iwant=[ControlIWant(messageIDs=ids)]))
    for idontwant in control.idontwant:
        for ids in _split_ids(idontwant.messageIDs, ids_size):
            yield RPC(control=ControlMessage(idontwant=[ControlIDontWant(messageIDs=ids)]))


def _split_ids(ids: Iterable[bytes], limit: int) -> Iterator[list[bytes]]:
    """Split ids into lists of about `limit` bytes at most. No ids give one empty list."""
    chunk: list[bytes] = []
    size = 0
    for message_id in ids:
        size += len(message_id) + 3  # tag and length of a field of 128 to 16,383 bytes
        if chunk and size > limit:
            yield chunk
            chunk, size = [], len(message_id) + 3
        chunk.append(message_id)
    yield chunk
