"""Decoder of the records of `kiln.frames`, into messages, valid or rejected. It does no I/O.

Bytes that a peer sent never raise an error (decision 6). Invalid bytes become a `RejectedMessage` with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS, PROCESSING_FAILED, describe
from kiln.schemas.dht.announcement import read_datagram
from kiln.schemas.kafka.frames import (
    BEP50,
    HISTORY,
    MAX_MESSAGES,
    METADATA_ONLY,
    RPC_TOO_COSTLY,
    RPC_TOO_MANY,
    TOO_MANY_VERDICTS,
    list_messages,
    read_frame,
)
from kiln.schemas.kafka.records import Origin
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.cid import cid_text
from kiln.schemas.wire.identity import (
    MAX_RPC_COST,
    UNVERIFIED,
    VERDICT_NAMES,
    Judgement,
    Verdict,
    build_ed25519_peer_id,
    check,
    compute_unverified_id,
    estimate_id_cost,
    peer_text,
)
from kiln.schemas.wire.message_id import MessageIdRule
from kiln.schemas.wire.pubsub import PubsubMessage, read_message
from kiln.schemas.wire.signing_policy import Policy, match_policy
from kiln.schemas.wire.topic_table import BundleSet, TopicSource, TopicTable, negotiate_table, resolve_topic
from kiln.schemas.wire.topics import Separator, TopicError, format_separator, format_topic, parse_topic

_ORIGINS: tuple[Origin, ...] = ("LIVE", "REPLAY")
_BRIDGE_JUDGEMENTS: Mapping[int, Judgement] = {
    Verdict.VALID: Judgement(Verdict.VALID),
    Verdict.UNSIGNED: Judgement(Verdict.UNSIGNED),
    Verdict.INVALID: Judgement(Verdict.INVALID, "bad_signature"),
    Verdict.AGAINST_POLICY: Judgement(Verdict.AGAINST_POLICY, "against_policy"),
}
"""Judgement of a signature, by the bridge's verdict in the frame. If it has a reason, the message is rejected."""


_DATA = PubsubMessage("DATA")

_WHOLE_MESSAGE_REASONS = (METADATA_ONLY, PROCESSING_FAILED)
"""Reasons for which quarantine stores the whole message. For other reasons it stores the field `data`."""


class MessageRef(NamedTuple):
    """Position of a message in `kiln.frames`. `position`: index of the message in the frame's RPC; None for the whole
    frame."""

    partition: int
    offset: int
    position: int | None

    @property
    def text(self) -> str:
        """Text form, unique for each position."""
        text = f"{self.partition}/{self.offset}"
        return text if self.position is None else f"{text}/{self.position}"


class MessageCopy(NamedTuple):
    """Columns of `copies` for a copy of a gossip message, valid or not. `verdict`: name of the bridge's verdict."""

    network: str
    message_id: str
    verdict: str


class RejectedMessage(NamedTuple):
    """A message or a whole frame that goes to quarantine. `observed_at`: µs.

    `frame`: identity of the frame (`build_frame_key`), empty if the record is not a Frame. `author`: signer of the
    message if the signature is valid, else "". `copy`: set only for a gossip message.
    """

    ref: MessageRef
    stage: str
    reason: str
    detail: str
    data: bytes
    observed_at: int
    frame: bytes = b""
    author: str = ""
    copy: MessageCopy | None = None


class DecodedMessage(NamedTuple):
    """A valid message of a frame, or an announcement in the BitTorrent DHT. Times are µs."""

    ref: MessageRef
    message_id: str
    network: str
    origin: Origin
    topic: str
    topic_source: TopicSource
    separator: Separator | None
    verdict: Verdict
    remote_peer: str
    observed_at: int
    envelope: Message
    content: PubsubMessage
    copy: MessageCopy | None = None  # None for an announcement in the DHT, and for a message that our node published
    own: bool = False  # written by the node that received or sent it
    previous: tuple[str, ...] = ()  # of an announcement in the DHT: CIDs of earlier batches, newest first


@dataclass(frozen=True)
class DecodeConfig:
    """Settings that decoding depends on."""

    default_policy: Policy = "strict"
    policies: Mapping[str, Policy] = field(default_factory=dict)
    batch_typ: int = 3
    unsigned_horizon: int = 120_000_000  # µs
    bundles: BundleSet = field(default_factory=BundleSet)  # to resolve topic indices
    topic_policies: Mapping[str, Policy] = field(default_factory=dict)  # by pattern
    ceramic: bool = True  # false: every message is DATA, whatever its bytes and its topic
    message_ids: MessageIdRule = field(default_factory=MessageIdRule)
    decoder: str = ""  # entry point of the user's decoder
    native_core: bool = True  # false: Python decodes all records, even if there is a native core

    def policy(self, network: str, origin: str, topic: str) -> Policy:
        """Return the signature policy of a topic. Messages from a replayed capture have the policy `either` (decision
        5)."""
        if origin == "REPLAY":
            return "either"
        return match_policy(topic, self.topic_policies) or self.policies.get(network, self.default_policy)

    def find_network(self, topic: str | None, network: str) -> str:
        """Return the network in the name of a Ceramic topic. For any other topic, return the frame's `network`."""
        parsed = parse_topic(topic) if self.ceramic and topic is not None else None
        return network if parsed is None else parsed.network


def decode(
    value: bytes | None, partition: int, offset: int, stamp: int, config: DecodeConfig
) -> list[DecodedMessage | RejectedMessage]:
    """Decode one record of `kiln.frames` into its messages, valid or rejected, in their order. An error of the frame
    itself is a `RejectedMessage` too.

    A received frame yields all its messages; a datagram of the BitTorrent DHT has one. A frame that Kiln sent yields
    the BATCH_UPDATEs that Kiln publishes in it. `stamp`: the broker's timestamp, µs, which is the time of a record that
    is not a Frame.
    """
    return FrameDecoder(config).decode(value, partition, offset, stamp)


def reject_unreadable(why: Rejected, value: bytes | None, partition: int, offset: int, stamp: int) -> RejectedMessage:
    """Reject a record that is not a Frame."""
    return RejectedMessage(MessageRef(partition, offset, None), "frame", why.reason, why.detail, value or b"", stamp)


def reject_failed(
    stage: str, error: Exception, ref: MessageRef, data: bytes, at: int, frame: bytes = b""
) -> RejectedMessage:
    """Reject a record, or a message in it, for which Kiln's own code raised an error. `at`: capture time, µs;
    `frame`: as in `RejectedMessage`."""
    return RejectedMessage(ref, stage, PROCESSING_FAILED, describe(error), data, at, frame)


def _reject_frame(
    frame: Frame, partition: int, offset: int, stage: str, reason: str, detail: str, data: bytes = b""
) -> RejectedMessage:
    ref, observed_at = MessageRef(partition, offset, None), frame.observed_at // 1000
    return RejectedMessage(ref, stage, reason, detail, data, observed_at, build_frame_key(frame))


class FrameDecoder:
    """Decoder of frames with a cache, so that the copies of a message are decoded only once.

    The result for a message depends only on the key of the cache: its bytes and some properties of its frame.
    """

    _MAX_CACHED = 20_000  # messages
    _MAX_CACHED_BYTES = 16 << 20  # of these messages
    _MAX_MESSAGE_SIZE = 2048  # bytes of one

    def __init__(self, config: DecodeConfig) -> None:
        self.config = config
        self._cache: dict[_Key, _Verified] = {}
        self._cached_bytes = 0

    def decode(
        self, value: bytes | None, partition: int, offset: int, stamp: int
    ) -> list[DecodedMessage | RejectedMessage]:
        """Decode one record of `kiln.frames`, as the function `decode` does."""
        frame = read_frame(value)
        if isinstance(frame, Rejected):
            return [reject_unreadable(frame, value, partition, offset, stamp)]
        return self.decode_frame(frame, partition, offset)

    def decode_frame(
        self, frame: Frame, partition: int, offset: int, rpc: RPC | None = None
    ) -> list[DecodedMessage | RejectedMessage]:
        """Decode one frame. If Kiln's own code raises an error, the message or the frame is rejected.

        `rpc`: the RPC in the frame's payload, if the caller has parsed it.
        """
        items: list[DecodedMessage | RejectedMessage] = []
        try:
            if frame.direction == Frame.IN:
                self._decode_messages(items, frame, partition, offset, rpc)
            elif any(verdicts := frame.verdicts):  # most OUT frames cost no more than this check
                items += self._decode_published(verdicts, frame, partition, offset, rpc)
        except PROCESSING_ERRORS as error:  # decoding is pure: the bytes alone have caused this
            ref = MessageRef(partition, offset, None)
            key = build_frame_key(frame)
            items.append(reject_failed("decode", error, ref, frame.payload, frame.observed_at // 1000, key))
        return items

    def _decode_messages(
        self,
        items: list[DecodedMessage | RejectedMessage],
        frame: Frame,
        partition: int,
        offset: int,
        rpc: RPC | None,
    ) -> None:
        """Add the messages of a received frame to `items`, and a `RejectedMessage` for each error of the frame itself.
        If this raises an error, `items` keeps what was added before."""
        if frame.protocol == BEP50:
            if frame.payload:
                items.append(_decode_announcement(frame, MessageRef(partition, offset, 0), self.config))
            return
        agreed = negotiate_table(frame.hello_in, frame.hello_out, self.config.bundles)
        for side, refused in agreed.refused:
            hello = frame.hello_in if side == "hello_in" else frame.hello_out
            detail = f"{side}: {refused.detail}"
            items.append(_reject_frame(frame, partition, offset, "hello", refused.reason, detail, hello))
        messages = list_messages(frame, rpc)
        if isinstance(messages, Rejected):
            reason, detail = messages.reason, messages.detail
            items.append(_reject_frame(frame, partition, offset, "rpc", reason, detail, frame.payload))
            return
        if not messages:
            return
        # each access to a protobuf field makes a copy: read once for all messages
        network, local_peer, verdicts = frame.network, frame.local_peer, frame.verdicts
        remote, origin, observed_at = peer_text(frame.remote_peer), _ORIGINS[frame.origin], frame.observed_at // 1000
        count = len(messages)
        if len(verdicts) > count:
            detail = f"the frame has {len(verdicts)} verdicts, but {count} messages"
            items.append(_reject_frame(frame, partition, offset, "rpc", TOO_MANY_VERDICTS, detail, verdicts))
            verdicts = b""  # the verdicts cannot be assigned to messages
        cost = unread = 0
        for index, message in enumerate(islice(messages, MAX_MESSAGES)):
            bridge_verdict = verdicts[index] if index < len(verdicts) else 0
            if cost >= MAX_RPC_COST and bridge_verdict not in _BRIDGE_JUDGEMENTS:
                unread += 1
                continue
            ref = MessageRef(partition, offset, index)
            try:
                item, item_cost = self._verify_cached(message, bridge_verdict, network, origin, agreed.table)
            except PROCESSING_ERRORS as error:  # decoding is pure: the bytes alone have caused this
                data, key = message.SerializeToString(), build_frame_key(frame)
                items.append(reject_failed("decode", error, ref, data, observed_at, key))
                continue
            cost += item_cost
            if isinstance(item, RejectedMessage):
                data = message.SerializeToString() if item.reason in _WHOLE_MESSAGE_REASONS else message.data
                key = build_frame_key(frame)
                items.append(item._replace(ref=ref, data=data, observed_at=observed_at, frame=key))
                continue
            is_own = getattr(message, "from") == local_peer != b""
            items.append(
                item._replace(ref=ref, remote_peer=remote, observed_at=observed_at, envelope=message, own=is_own)
            )
        if unread:
            detail = f"{unread} of {count} messages are not read: the others used up the CPU budget of one RPC"
            items.append(_reject_frame(frame, partition, offset, "rpc", RPC_TOO_COSTLY, detail))
        if count > MAX_MESSAGES:
            detail = f"{count} messages, of which the first {MAX_MESSAGES} are read"
            items.append(_reject_frame(frame, partition, offset, "rpc", RPC_TOO_MANY, detail))

    def _decode_published(
        self, verdicts: bytes, frame: Frame, partition: int, offset: int, rpc: RPC | None
    ) -> list[DecodedMessage]:
        """Decode the BATCH_UPDATEs that our node publishes in a sent frame. In a sent frame, the bridge gives a verdict
        only to our own messages.

        A message that cannot be decoded is not rejected, because no peer is the cause, and the table `frames` has the
        bytes.
        """
        messages = list_messages(frame, rpc)
        if isinstance(messages, Rejected) or len(verdicts) > len(messages):
            return []
        table = negotiate_table(frame.hello_in, frame.hello_out, self.config.bundles).table
        network, origin, publisher = frame.network, _ORIGINS[frame.origin], peer_text(frame.local_peer)
        observed_at = frame.observed_at // 1000
        published: list[DecodedMessage] = []
        for index, (message, verdict) in enumerate(zip(messages, verdicts, strict=False)):
            if verdict not in (Verdict.VALID, Verdict.UNSIGNED):
                continue
            item, _ = self._verify_cached(message, verdict, network, origin, table)
            if isinstance(item, RejectedMessage) or item.content.type != "BATCH_UPDATE":
                continue
            ref = MessageRef(partition, offset, index)
            sent = item._replace(ref=ref, remote_peer=publisher, observed_at=observed_at, envelope=message)
            published.append(sent._replace(copy=None, own=True))
        return published

    def _verify_cached(
        self, message: Message, bridge_verdict: int, network: str, origin: Origin, table: TopicTable
    ) -> _Verified:
        data = message.SerializeToString()
        if len(data) > self._MAX_MESSAGE_SIZE:
            return _verify(message, bridge_verdict, network, origin, table, self.config)
        key = (data, bridge_verdict, network, origin, table)
        verified = self._cache.get(key)
        if verified is None:
            self._cached_bytes += len(data)
            if len(self._cache) >= self._MAX_CACHED or self._cached_bytes > self._MAX_CACHED_BYTES:
                self._cache.clear()
                self._cached_bytes = len(data)
            verified = self._cache[key] = _verify(message, bridge_verdict, network, origin, table, self.config)
        return verified


_Key = tuple[bytes, int, str, Origin, TopicTable]


class _Verified(NamedTuple):
    """A decoded message without the values in which its copies differ: position, peer, time and bytes. `cost`: CPU
    time of one copy, in nominal µs (kiln.schemas.wire.identity.MAX_RPC_COST)."""

    item: DecodedMessage | RejectedMessage
    cost: int


_NO_REF: Final = MessageRef(0, 0, None)
_NO_ENVELOPE: Final = Message()  # the envelope in a frame would keep the whole frame in memory


def _verify(
    message: Message, bridge_verdict: int, network: str, origin: Origin, table: TopicTable, config: DecodeConfig
) -> _Verified:
    """Check the signature of a message, and decode its content. `network`: network of the frame."""
    name = resolve_topic(message, table)
    # only in a replay: batches of LIVE messages are published, and must not contain unverifiable ones
    unverifiable = bridge_verdict == Verdict.UNVERIFIABLE and origin == "REPLAY" and not message.HasField("signature")
    if unverifiable and not config.message_ids.by_content:
        message_id = compute_unverified_id(message)
    else:
        message_id = config.message_ids.describe(message, "" if isinstance(name, Rejected) else name)
        message_id = UNVERIFIED + message_id if unverifiable else message_id
    cost = estimate_id_cost(message)
    if isinstance(name, Rejected):
        unknown = MessageCopy(network, message_id, VERDICT_NAMES[bridge_verdict])
        return _Verified(_reject_copy(unknown, "topic", name), cost)
    topic = parse_topic(name) if config.ceramic else None
    copy = MessageCopy(network if topic is None else topic.network, message_id, VERDICT_NAMES[bridge_verdict])
    verdict, reason = Verdict.UNVERIFIABLE, ""
    if not unverifiable:
        policy = config.policy(copy.network, origin, name)
        verdict, reason, signature_cost = check_signature(message, name, bridge_verdict, policy)
        cost += signature_cost
    if reason:
        return _Verified(_reject_copy(copy, "signature", Rejected(reason, "")), cost)
    if unverifiable and not message.HasField("data"):
        missing = Rejected(METADATA_ONLY, "the log has only metadata of this copy, without the data of the message")
        return _Verified(_reject_copy(copy, HISTORY, missing), cost)
    try:
        content = read_message(message.data, config.batch_typ) if config.ceramic else _DATA
    except PROCESSING_ERRORS as error:  # pure; caught here too, because the breaker counts failures by author
        author, failed = get_signer(message, verdict) or "", Rejected(PROCESSING_FAILED, describe(error))
        return _Verified(_reject_copy(copy, "decode", failed, author), cost)
    if isinstance(content, Rejected):
        return _Verified(_reject_copy(copy, "message", content, get_signer(message, verdict) or ""), cost)
    decoded = DecodedMessage(
        ref=_NO_REF,
        message_id=message_id,
        network=copy.network,
        origin=origin,
        topic=name,
        topic_source="name" if message.HasField("topic") else "index",
        separator=topic.separator if topic is not None else None,
        verdict=verdict,
        remote_peer="",
        observed_at=0,
        envelope=_NO_ENVELOPE,
        content=content,
        copy=copy,
    )
    return _Verified(decoded, cost)


def _reject_copy(copy: MessageCopy, stage: str, why: Rejected, author: str = "") -> RejectedMessage:
    return RejectedMessage(_NO_REF, stage, why.reason, why.detail, b"", 0, author=author, copy=copy)


def _decode_announcement(frame: Frame, ref: MessageRef, config: DecodeConfig) -> DecodedMessage | RejectedMessage:
    """Decode a datagram of the BitTorrent DHT into a BATCH_UPDATE.

    The author is the peer id of the publisher's key, and the seqno is the sequence number of the DHT item.
    """
    observed_at = frame.observed_at // 1000
    try:
        datagram = read_datagram(frame.payload, frame.network, config.batch_typ)
    except TopicError as error:
        datagram = Rejected("bad_network", str(error))
    if isinstance(datagram, Rejected):
        return RejectedMessage(
            ref, "bep50", datagram.reason, datagram.detail, frame.payload, observed_at, build_frame_key(frame)
        )
    item, announcement = datagram
    publisher = build_ed25519_peer_id(item.key)
    sequence = item.sequence.to_bytes(8, signed=True)
    topic = format_topic(frame.network, announcement.separator)
    content = PubsubMessage(
        type="BATCH_UPDATE", sep=format_separator(announcement.separator), batch=cid_text(announcement.batch)
    )
    envelope = Message(data=item.value, seqno=sequence, topic=topic)
    setattr(envelope, "from", publisher)
    return DecodedMessage(
        ref=ref,
        message_id=f"bep50/{item.target.hex()}/{sequence.hex()}",
        network=frame.network,
        origin=_ORIGINS[frame.origin],
        topic=topic,
        topic_source="name",
        separator=announcement.separator,
        verdict=Verdict.VALID,
        remote_peer=frame.remote_peer.hex(),
        observed_at=observed_at,
        envelope=envelope,
        content=content,
        previous=tuple(map(cid_text, announcement.previous)),
    )


def check_signature(message: Message, topic: str, bridge_verdict: int, policy: Policy) -> Judgement:
    """Return the bridge's judgement of a signature if it has checked the signature, else check it here.

    The signature covers the topic's name. If the sender has replaced the name by an index, `topic` is used in its
    place. The reason of the judgement is empty if the message is accepted.
    """
    judgement = _BRIDGE_JUDGEMENTS.get(bridge_verdict)
    if judgement is not None:
        return judgement
    if not message.HasField("topicIndex"):
        return check(message, policy)
    judgement = check(message, policy, topic)
    if judgement.verdict is Verdict.INVALID and message.HasField("topic"):
        # the message also has a name, so its author may have set the index, and signed it like the other fields
        again = check(message, policy)
        return again._replace(cost=judgement.cost + again.cost)
    return judgement


def get_signer(message: Message, verdict: Verdict) -> str | None:
    """Return the peer id of the signer, or None if the message is not signed. The field `from` alone proves nothing."""
    return peer_text(getattr(message, "from")) if verdict is Verdict.VALID else None


def build_frame_key(frame: Frame) -> bytes:
    """Build the identity of a frame: its connection, direction and sequence number."""
    return b"%b%d/%d" % (frame.connection, frame.direction, frame.sequence)
