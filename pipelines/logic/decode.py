"""Decodes records of `kiln.frames`: into messages, or into what goes to quarantine and why. Bytes in, tuples out.

Nothing here raises on what a peer sent (decision 6): bad bytes become a `Faulty` with a reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

from pipelines.logic.processing import PROCESSING_ERRORS, PROCESSING_FAILED, describe
from schemas.cid import cid_text
from schemas.dht.announcement import read_datagram
from schemas.frames import (
    BEP50,
    HISTORY,
    MAX_MESSAGES,
    METADATA_ONLY,
    RPC_TOO_COSTLY,
    RPC_TOO_MANY,
    TOO_MANY_VERDICTS,
    gossip_messages,
    read_frame,
)
from schemas.identity import (
    MAX_RPC_COST,
    UNVERIFIED,
    Judgement,
    Policy,
    Verdict,
    check,
    id_cost,
    message_id,
    peer_of_ed25519,
    peer_text,
    unverified_id,
)
from schemas.proto.gossipsub.rpc_pb2 import Message
from schemas.proto.kiln.frame_pb2 import Frame
from schemas.pubsub import PubsubMessage, read_message
from schemas.records import Origin
from schemas.reject import Rejected
from schemas.topic_table import Bundles, TopicSource, TopicTable, agreement, message_topic
from schemas.topics import Separator, TopicError, parse_topic, separator_text, topic_name

_ORIGINS: tuple[Origin, ...] = ("LIVE", "REPLAY")
_GIVEN: Mapping[int, Judgement] = {
    Verdict.GOOD: Judgement(Verdict.GOOD),
    Verdict.UNSIGNED: Judgement(Verdict.UNSIGNED),
    Verdict.BAD: Judgement(Verdict.BAD, "bad_signature"),
    Verdict.AGAINST_POLICY: Judgement(Verdict.AGAINST_POLICY, "against_policy"),
}
"""What a verdict of the bridge means, and why a message may not pass."""


_WHOLE = (METADATA_ONLY, PROCESSING_FAILED)
"""Reasons with which quarantine has the message, and not its data alone."""


class Place(NamedTuple):
    """Where in `kiln.frames`; `position` of the message in its RPC, None for the frame as a whole."""

    partition: int
    offset: int
    position: int | None

    @property
    def text(self) -> str:
        """Of this place, and of no other."""
        whole = f"{self.partition}/{self.offset}"
        return whole if self.position is None else f"{whole}/{self.position}"


class Copy(NamedTuple):
    """A copy of a gossip message, good or not. `verdict`: the bridge's, as the frame has it."""

    network: str
    message: str
    verdict: int


class Faulty(NamedTuple):
    """What goes to quarantine.

    `frame`: what the frame is known by, empty where the record is no Frame. `author`: the peer whose good signature the
    message bears, else "". `copy`: of a message, None of all else.
    """

    place: Place
    stage: str
    reason: str
    detail: str
    data: bytes
    observed_at: int
    frame: bytes = b""
    author: str = ""
    copy: Copy | None = None


class Decoded(NamedTuple):
    """A good message. Times are µs."""

    place: Place
    message: str
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
    copy: Copy | None = None  # None: of an announcement in the DHT
    own: bool = False  # written by the node that heard it
    previous: tuple[str, ...] = ()  # of an announcement in the DHT: the CIDs of batches before, newest first


@dataclass(frozen=True)
class Decoding:
    """What decoding depends on beside the bytes."""

    default_policy: Policy = "strict"
    policies: Mapping[str, Policy] = field(default_factory=dict)
    batch_typ: int = 3
    unsigned_horizon: int = 120_000_000  # µs
    bundles: Bundles = field(default_factory=Bundles)  # by which topic indices resolve

    def policy(self, network: str, origin: str) -> Policy:
        """A replayed capture is always judged `either` (decision 5)."""
        return "either" if origin == "REPLAY" else self.policies.get(network, self.default_policy)


def decode(value: bytes | None, partition: int, offset: int, stamp: int, how: Decoding) -> Iterator[Decoded | Faulty]:
    """Everything in one record of `kiln.frames`: its messages in order, each good or faulty, and faults of the frame.

    A datagram of the BitTorrent DHT holds one message. A frame that Kiln sent (OUT) gives nothing. `stamp`: the
    broker's, µs; the time of a record that is no Frame.
    """
    return Decoder(how).decode(value, partition, offset, stamp)


def unreadable(why: Rejected, value: bytes | None, partition: int, offset: int, stamp: int) -> Faulty:
    """The fault of a record that is no Frame."""
    return Faulty(Place(partition, offset, None), "frame", why.reason, why.detail, value or b"", stamp)


def failed(stage: str, error: Exception, place: Place, data: bytes, at: int, frame: bytes = b"") -> Faulty:
    """The fault of a record, or of a message in it, at which Kiln itself failed. `at`: µs; `frame`: as in `Faulty`."""
    return Faulty(place, stage, PROCESSING_FAILED, describe(error), data, at, frame)


class Decoder:
    """Decodes frames one after another, and each message once, however many copies of it come.

    What is found of a message depends on its bytes and on a few things of its frame, which are the key; so a Decoder
    finds the same as one that has seen nothing.
    """

    _MOST = 20_000  # messages that are known
    _MOST_BYTES = 16 << 20  # of these messages
    _LARGEST = 2048  # bytes of one

    def __init__(self, how: Decoding) -> None:
        self._how = how
        self._known: dict[_Key, _Judged] = {}
        self._known_bytes = 0

    def decode(self, value: bytes | None, partition: int, offset: int, stamp: int) -> Iterator[Decoded | Faulty]:
        """Everything in one record, as the function `decode` says."""
        frame = read_frame(value)
        if isinstance(frame, Rejected):
            yield unreadable(frame, value, partition, offset, stamp)
        else:
            yield from self.decode_frame(frame, partition, offset)

    def decode_frame(self, frame: Frame, partition: int, offset: int) -> Iterator[Decoded | Faulty]:
        """Everything in one frame. Where decoding itself fails, the fault is of that message, or of the frame."""
        if frame.direction != Frame.IN:
            return
        try:
            yield from self._items(frame, partition, offset)
        except PROCESSING_ERRORS as error:  # decoding is pure: the bytes alone have caused this
            place = Place(partition, offset, None)
            yield failed("decode", error, place, frame.payload, frame.observed_at // 1000, _known_by(frame))

    def _items(self, frame: Frame, partition: int, offset: int) -> Iterator[Decoded | Faulty]:
        if frame.protocol == BEP50:
            if frame.payload:
                yield _announced(frame, Place(partition, offset, 0), self._how)
            return
        observed_at = frame.observed_at // 1000
        agreed = agreement(frame.hello_in, frame.hello_out, self._how.bundles)
        for side, refused in agreed.refused:
            hello = frame.hello_in if side == "hello_in" else frame.hello_out
            detail = f"{side}: {refused.detail}"
            whole = Place(partition, offset, None)
            yield Faulty(whole, "hello", refused.reason, detail, hello, observed_at, _known_by(frame))
        messages = gossip_messages(frame)
        if isinstance(messages, Rejected):
            whole = Place(partition, offset, None)
            yield Faulty(whole, "rpc", messages.reason, messages.detail, frame.payload, observed_at, _known_by(frame))
            return
        if not messages:
            return
        # each access to a protobuf makes a copy: read once for all messages
        network, local_peer, verdicts = frame.network, frame.local_peer, frame.verdicts
        remote, origin = peer_text(frame.remote_peer), _ORIGINS[frame.origin]
        if len(verdicts) > len(messages):
            whole, detail = Place(partition, offset, None), f"{len(verdicts)} verdicts on {len(messages)} messages"
            yield Faulty(whole, "rpc", TOO_MANY_VERDICTS, detail, verdicts, observed_at, _known_by(frame))
            verdicts = b""  # nobody knows which verdict is of which message
        cost = unread = 0
        for index, message in enumerate(islice(messages, MAX_MESSAGES)):
            given = verdicts[index] if index < len(verdicts) else 0
            if cost >= MAX_RPC_COST and given not in _GIVEN:
                unread += 1
                continue
            place = Place(partition, offset, index)
            try:
                judged = self._judged(message, given, network, origin, agreed.table)
            except PROCESSING_ERRORS as error:  # decoding is pure: the bytes alone have caused this
                yield failed("decode", error, place, message.SerializeToString(), observed_at, _known_by(frame))
                continue
            cost += judged.cost
            if judged.stage:
                stage, reason, detail, author, copy = judged[:5]
                data = message.SerializeToString() if reason in _WHOLE else message.data
                yield Faulty(place, stage, reason, detail, data, observed_at, _known_by(frame), author, copy)
            else:
                yield Decoded(
                    place,
                    judged.copy.message,
                    judged.copy.network,
                    origin,
                    judged.topic,
                    judged.topic_source,
                    judged.separator,
                    judged.verdict,
                    remote,
                    observed_at,
                    message,
                    judged.content,
                    judged.copy,
                    getattr(message, "from") == local_peer != b"",
                )
        if unread:
            detail = f"{unread} of {len(messages)} messages are not read: checking the others cost all that one RPC may"
            yield Faulty(
                Place(partition, offset, None), "rpc", RPC_TOO_COSTLY, detail, b"", observed_at, _known_by(frame)
            )
        if len(messages) > MAX_MESSAGES:
            detail = f"{len(messages)} messages, of which the first {MAX_MESSAGES} are read"
            yield Faulty(
                Place(partition, offset, None), "rpc", RPC_TOO_MANY, detail, b"", observed_at, _known_by(frame)
            )

    def _judged(self, message: Message, given: int, network: str, origin: Origin, table: TopicTable) -> _Judged:
        if message.ByteSize() > self._LARGEST:
            return _judge(message, given, network, origin, table, self._how)
        key = (message.SerializeToString(), given, network, origin, table)
        judged = self._known.get(key)
        if judged is None:
            self._known_bytes += len(key[0])
            if len(self._known) >= self._MOST or self._known_bytes > self._MOST_BYTES:
                self._known.clear()
                self._known_bytes = len(key[0])
            judged = self._known[key] = _judge(message, given, network, origin, table, self._how)
        return judged


_Key = tuple[bytes, int, str, Origin, TopicTable]


class _Judged(NamedTuple):
    """What is found of a message, wherever it stands. A fault has a stage."""

    stage: str
    reason: str
    detail: str
    author: str
    copy: Copy
    topic: str = ""
    topic_source: TopicSource = "name"
    separator: Separator | None = None
    verdict: Verdict = Verdict.NOT_CHECKED
    content: PubsubMessage = PubsubMessage("UPDATE")
    cost: int = 0  # nominal µs (schemas.identity.MAX_RPC_COST)


def _judge(message: Message, given: int, network: str, origin: Origin, table: TopicTable, how: Decoding) -> _Judged:
    """`given`: the bridge's verdict; `network`: the frame's."""
    name = message_topic(message, table)
    # a bridge never says so, and a window whose batches are published must not hold what nobody could check
    unverifiable = given == Verdict.UNVERIFIABLE and origin == "REPLAY" and not message.HasField("signature")
    known_as = unverified_id(message) if unverifiable else message_id(message)
    cost = id_cost(message)
    if isinstance(name, Rejected):
        return _Judged("topic", name.reason, name.detail, "", Copy(network, known_as, given), cost=cost)
    topic = parse_topic(name)
    if topic is not None:
        network = topic.network
    copy = Copy(network, known_as, given)
    if unverifiable:
        verdict, reason = Verdict.UNVERIFIABLE, ""
    else:
        verdict, reason, signature_cost = _verdict(message, name, given, how.policy(network, origin))
        cost += signature_cost
    if reason:
        return _Judged("signature", reason, "", "", copy, cost=cost)
    if unverifiable and not message.HasField("data"):
        detail = "a copy of a message, of which the log has no data"
        return _Judged(HISTORY, METADATA_ONLY, detail, "", copy, cost=cost)
    try:
        content = read_message(message.data, how.batch_typ)
    except PROCESSING_ERRORS as error:  # pure; caught here too, as the breaker counts the author's messages that fail
        author = _author(message, verdict) or ""
        return _Judged("decode", PROCESSING_FAILED, describe(error), author, copy, cost=cost)
    if isinstance(content, Rejected):
        author = _author(message, verdict) or ""
        return _Judged("message", content.reason, content.detail, author, copy, cost=cost)
    source: TopicSource = "name" if message.HasField("topic") else "index"
    return _Judged("", "", "", "", copy, name, source, topic.separator if topic else None, verdict, content, cost)


def _announced(frame: Frame, place: Place, how: Decoding) -> Decoded | Faulty:
    """What a datagram of the BitTorrent DHT announces, as the BATCH_UPDATE that it stands for.

    Its author is the publisher's key, as the peer id that this key would have; its seqno the item's.
    """
    observed_at = frame.observed_at // 1000
    try:
        found = read_datagram(frame.payload, frame.network, how.batch_typ)
    except TopicError as error:
        found = Rejected("bad_network", str(error))
    if isinstance(found, Rejected):
        return Faulty(place, "bep50", found.reason, found.detail, frame.payload, observed_at, _known_by(frame))
    item, announcement = found
    publisher = peer_of_ed25519(item.key)
    sequence = item.sequence.to_bytes(8, signed=True)
    topic = topic_name(frame.network, announcement.separator)
    content = PubsubMessage(
        type="BATCH_UPDATE", sep=separator_text(announcement.separator), batch=cid_text(announcement.batch)
    )
    envelope = Message(data=item.value, seqno=sequence, topic=topic)
    setattr(envelope, "from", publisher)
    return Decoded(
        place,
        f"bep50/{item.target.hex()}/{sequence.hex()}",
        frame.network,
        _ORIGINS[frame.origin],
        topic,
        "name",
        announcement.separator,
        Verdict.GOOD,
        frame.remote_peer.hex(),
        observed_at,
        envelope,
        content,
        previous=tuple(map(cid_text, announcement.previous)),
    )


def _verdict(message: Message, topic: str, given: int, policy: Policy) -> Judgement:
    """The bridge's verdict where it has checked, else our own; the reason is empty if the message may pass.

    A signature is over the topic's name: the index that was on the wire in its place is not part of what was signed.
    """
    found = _GIVEN.get(given)
    if found is not None:
        return found
    if not message.HasField("topicIndex"):
        return check(message, policy)
    found = check(message, policy, topic)
    if found.verdict is Verdict.BAD and message.HasField("topic"):
        # beside a name the index may be the author's own, a field like any other, and signed with the rest
        again = check(message, policy)
        return again._replace(cost=found.cost + again.cost)
    return found


def author(decoded: Decoded) -> str | None:
    """The peer id of the signer. None where nobody signed the message, whatever `from` claims."""
    return _author(decoded.envelope, decoded.verdict)


def _author(message: Message, verdict: Verdict) -> str | None:
    return peer_text(getattr(message, "from")) if verdict is Verdict.GOOD else None


def identities(decoded: Decoded, scope: str, horizon: int) -> tuple[bytes, bytes]:
    """Two digests by which copies of a message are known; copies agree in at least one of them.

    A signed message is one for as long as the digests are remembered; so is an unverifiable one with author and seqno.
    An unsigned one is its bytes, which may rightly
    come again (an unsigned QUERY is always the same): it counts as the same within its horizon (µs) only. That time is
    cut into spans of one horizon, in two ways, the second half a span later: copies less than half a span apart share
    a span in one way or the other; a repeat after a whole horizon shares none. `scope` keeps apart what must not meet.
    """
    signed = decoded.verdict is Verdict.GOOD
    return identities_of(decoded.network, decoded.message, signed, decoded.observed_at, scope, horizon)


def identities_of(
    network: str, message: str, signed: bool, observed_at: int, scope: str, horizon: int
) -> tuple[bytes, bytes]:
    """As `identities`, from columns of the table `messages`; `observed_at` in µs."""
    start = f"{scope}\n{network}\n{message}"
    if is_lasting(message, signed):
        digest = blake2b(start.encode(), digest_size=16).digest()
        return digest, digest
    early = observed_at // horizon
    late = (observed_at + horizon // 2) // horizon
    return (
        blake2b(f"{start}\n{early}".encode(), digest_size=16).digest(),
        blake2b(f"{start}\n{late}".encode(), digest_size=16).digest(),
    )


def is_lasting(message: str, signed: bool) -> bool:
    """Whether copies of a message are one for as long as it is remembered; else within a horizon only."""
    return signed or message.startswith(UNVERIFIED)


def own_identity(fault: Faulty) -> bytes:
    """The digest of what is the copy of nothing: a fault is kept each time it comes, but once for a frame that was
    written twice (docs/design/contracts.md, Frame)."""
    where = (fault.frame, fault.place.position) if fault.frame else fault.place
    return blake2b(repr((where, fault.stage, fault.detail)).encode(), digest_size=16).digest()


def _known_by(frame: Frame) -> bytes:
    return b"%b%d/%d" % (frame.connection, frame.direction, frame.sequence)
