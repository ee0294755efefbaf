"""A gossipsub router with scripted peers, without a network: functions to build its input and to read its output."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from kiln.bridge.gossipsub.effects import PeerID, Send
from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.router import Router
from kiln.bridge.gossipsub.table_agreements import TableAgreements
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.wire.identity import Judgement, Verdict
from kiln.schemas.wire.message_id import MessageIdRule

T = "/ceramic/mainnet"
OWN = b"\x00\x24own"
MESHSUB = "/meshsub/1.2.0"


def check(message: Message) -> Judgement:
    """Judge a message without cryptography: the only valid signature is `good`."""
    if not message.HasField("signature"):
        return Judgement(Verdict.UNSIGNED)
    return Judgement(Verdict.VALID if message.signature == b"good" else Verdict.INVALID)


def message(
    number: int, topic: str = T, author: bytes = b"\x00\x24author", size: int = 20, sig: bytes = b"good"
) -> Message:
    made = Message(data=b"%d" % number + bytes(size), seqno=number.to_bytes(8, "big"), topic=topic, signature=sig)
    setattr(made, "from", author)
    return made


def gossip_id(message: Message) -> bytes:
    """Compute a message's id by gossipsub's default rule."""
    return MessageIdRule().compute(message, message.topic)


def rpc_of(*messages: Message) -> RPC:
    return RPC(publish=messages)


def graft(*topics: str) -> RPC:
    rpc = RPC()
    for topic in topics:
        rpc.control.graft.add(topicID=topic)
    return rpc


def prune(topic: str, backoff: int | None = None) -> RPC:
    rpc = RPC()
    rpc.control.prune.add(topicID=topic, backoff=backoff)
    return rpc


def ihave(ids: Iterable[bytes], topic: str = T) -> RPC:
    rpc = RPC()
    rpc.control.ihave.add(topicID=topic, messageIDs=ids)
    return rpc


def iwant(*ids: bytes) -> RPC:
    rpc = RPC()
    rpc.control.iwant.add(messageIDs=ids)
    return rpc


def subscribe(*topics: str, subscribed: bool = True) -> RPC:
    return RPC(subscriptions=[RPC.SubOpts(subscribe=subscribed, topicid=topic) for topic in topics])


def peer(number: int) -> PeerID:
    return b"\x00\x24peer%03d" % number


def node(
    options: RouterOptions | None = None, table: TableAgreements | None = None, topics: Iterable[str] = (T,)
) -> Router:
    router = Router(OWN, options or RouterOptions(), Random(1), check, table)
    for topic in topics:
        router.join(topic)
    return router


def with_peers(
    router: Router, count: int, protocol: str = MESHSUB, *, outbound: bool = True, first: int = 0, topic: str = T
) -> Router:
    for number in range(first, first + count):
        router.add_peer(peer(number), protocol, outbound, 0.0)
        router.receive(peer(number), subscribe(topic), 0.0)
    return router


def grafts(sends: Iterable[Send]) -> list[tuple[PeerID, str]]:
    return [(send.peer, each.topicID) for send in sends for each in send.rpc.control.graft]


def prunes(sends: Iterable[Send]) -> list[tuple[PeerID, str, int]]:
    return [(send.peer, each.topicID, each.backoff) for send in sends for each in send.rpc.control.prune]


def receivers(sends: Iterable[Send]) -> set[PeerID]:
    got = [send.peer for send in sends if send.rpc.publish]
    assert len(got) == len(set(got))
    return set(got)


def asked(sends: Iterable[Send]) -> list[bytes]:
    return [key for send in sends for item in send.rpc.control.iwant for key in item.messageIDs]


def idontwant(*keys: bytes) -> RPC:
    rpc = RPC()
    rpc.control.idontwant.add(messageIDs=keys)
    return rpc
