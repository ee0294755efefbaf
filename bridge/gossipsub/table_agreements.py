"""The node's side of the topic tables that it shares with peers (Topic Table Extension; rules in
kiln.schemas.wire.topic_table).

Pure state: no socket, no clock. The router asks here for the topic of what came in, and for the form in which an RPC
goes out to a peer. Inside the router a topic is always a name; an index exists on one connection's wire only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Literal

from kiln.conf.process.bridge_status import SavingDirection, SavingStatus
from kiln.schemas.proto.gossipsub.rpc_pb2 import (
    RPC,
    ControlExtensions,
    ControlGraft,
    ControlIHave,
    ControlPrune,
    Message,
)
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.topic_table import (
    BundleSet,
    TopicTable,
    hello_bytes,
    hello_extensions,
    negotiate_table,
    read_hello,
)

SendMode = Literal["cautious", "eager", "off"]
Item = Message | RPC.SubOpts | ControlIHave | ControlGraft | ControlPrune

PROTOCOL: Final = "/meshsub/1.3.0"
AGENT: Final = "kiln/"

# Counters beside the reasons of a refused hello (kiln.schemas.wire.topic_table.REASONS) and of an index that does not
# resolve (INDEX_REASONS).
HELLO_TAKEN: Final = "hello_taken"
HELLO_AGAIN: Final = "hello_again"
HELLO_LATE: Final = "hello_late"
HELLO_UNEXPECTED: Final = "hello_unexpected"
INDEX_RESOLVED: Final = "index_resolved"
INDEX_WRITTEN: Final = "index_written"
NAME_AND_INDEX: Final = "name_and_index"
NAME_NOT_UTF8: Final = "topic_not_utf8"
NOT_NAMED: Final = "topic_missing"
INDEX_LEFT_OUT: Final = "index_left_out"


Savings = dict[tuple[SavingDirection, str], SavingStatus]
"""By direction and topic. Only topics of agreed bundles occur, so a peer cannot make it grow."""


class _PeerTable:
    __slots__ = ("greeted", "heard", "hello", "is_kiln", "savings", "speaks", "table", "writes_indices")

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks  # the protocol has extensions
        self.is_kiln = False
        self.heard = False
        self.greeted = False
        self.hello = b""
        self.table: TopicTable | None = None
        self.writes_indices = False  # it has sent one that resolved
        self.savings: Savings = {}


class TableAgreements:
    """The tables with all peers, each from its stream's opening to its end."""

    def __init__(self, bundles: BundleSet, send: SendMode = "cautious") -> None:
        """`send`: when the node writes an index. cautious: to a peer that has itself sent an index, or is a Kiln. Names
        are always right (the draft, section "Protocol"), and one implementation agrees to a table of several bundles
        and then cannot read the table. eager: wherever a table has the topic. off: never. The node reads indices in
        every mode; without bundles it reads none.

        BundleError for more bundles than a hello may have.
        """
        self._bundles = bundles
        self._send = send
        self._hello = hello_bytes(bundles)
        self._peers: dict[bytes, _PeerTable] = {}
        self._counters: Counter[str] = Counter()
        self._gone: Savings = {}
        self._no_table = TopicTable((), bundles)

    # ------------------------------------------------------------ peers

    def add(self, peer: bytes, protocol: str = PROTOCOL) -> ControlExtensions | None:
        """A stream to a peer has opened: what the first RPC must carry as control.extensions, or None for nothing.

        A peer that comes again begins anew, with no table.
        """
        self.remove(peer)
        state = self._peers[peer] = _PeerTable(protocol == PROTOCOL)
        return hello_extensions(self._bundles) if state.speaks and self._hello else None

    def remove(self, peer: bytes) -> None:
        """The stream has ended."""
        state = self._peers.pop(peer, None)
        if state is not None:
            _add_savings(self._gone, state.savings)

    def set_agent(self, peer: bytes, version: str) -> None:
        """What identify said the peer is; one whose agent version begins `kiln/` reads what we write."""
        state = self._peers.get(peer)
        if state is not None:
            state.is_kiln = version.startswith(AGENT)

    def receive(self, peer: bytes, rpc: RPC) -> None:
        """Each RPC of a peer's, before anything in it is asked for: the first one is its hello (gossipsub v1.3:
        extensions in the first message of the stream, and at most once). A topic table in a later one is ignored."""
        state = self._peers.get(peer)
        first = state is not None and not state.heard
        if state is not None:
            state.heard = True
        if not rpc.HasField("control") or not rpc.control.HasField("extensions"):
            return
        if first or state is None or state.greeted:
            self.hello(peer, rpc.control.extensions)
        elif rpc.control.extensions.HasField("topicTableExtension"):
            self._counters[HELLO_LATE] += 1

    def hello(self, peer: bytes, extensions: ControlExtensions) -> None:
        """The extensions in a peer's hello. The first topic table counts, be it refused; another one is ignored.

        A refused one is counted by its reason, and there is no table then; nothing else changes for the peer.
        """
        hashes = read_hello(extensions)
        if hashes is None:
            return  # other extensions only
        state = self._peers.get(peer)
        if state is None or not state.speaks:
            self._counters[HELLO_UNEXPECTED] += 1
        elif state.greeted:
            self._counters[HELLO_AGAIN] += 1
        else:
            state.greeted = True
            if isinstance(hashes, Rejected):
                self._counters[hashes.reason] += 1
                return
            self._counters[HELLO_TAKEN] += 1
            # written anew: what else a stranger put beside the hashes is not kept
            state.hello = hello_bytes(hashes)
            state.table = negotiate_table(state.hello, self._hello, self._bundles).table

    def get_hellos(self, peer: bytes) -> tuple[bytes, bytes]:
        """(theirs, ours) as Frame.hello_in and Frame.hello_out hold them: empty if none, refused, or not sent."""
        state = self._peers.get(peer)
        return (b"", b"") if state is None else (state.hello, self._hello if state.speaks else b"")

    # ------------------------------------------------------------ in

    def topic_of(self, peer: bytes, item: Item) -> str | None:
        """The topic of something that came from a peer; None, and counted, if it does not say or cannot be told.

        A name on the wire wins over an index: SubOpts field 3 is `requestsPartial` in merged partial-messages, and
        comes beside the name.
        """
        name: str | bytes | None = _read_name(item)
        if name is not None:
            if isinstance(name, bytes):  # upb hands out bytes where a string is not UTF-8
                self._counters[NAME_NOT_UTF8] += 1
                return None
            if item.HasField("topicIndex") and not isinstance(item, RPC.SubOpts):
                self._counters[NAME_AND_INDEX] += 1
            return name
        if not item.HasField("topicIndex"):
            self._counters[NOT_NAMED] += 1
            return None
        state, index = self._peers.get(peer), item.topicIndex
        table = state.table if state is not None else None
        found = (self._no_table if table is None else table).resolve(index)
        if isinstance(found, Rejected):
            self._counters[found.reason] += 1
            return None
        if state is not None:
            state.writes_indices = True
            _count_savings(state, "received", found, index)
        self._counters[INDEX_RESOLVED] += 1
        return found

    def with_topic_name(self, message: Message, topic: str) -> Message:
        """The message with its topic's name and no index: the form that is verified, kept and passed on.

        `message` itself if it is that already, else a copy.
        """
        if not message.HasField("topicIndex"):
            return message
        copy = Message()
        copy.CopyFrom(message)
        copy.ClearField("topicIndex")
        copy.topic = topic
        return copy

    # ------------------------------------------------------------ out

    def encode_for_peer(self, peer: bytes, rpc: RPC) -> RPC:
        """The RPC in the form in which it goes to one peer: indices where they may be written, else names.

        `rpc` itself stays as it is, since it may be on its way to others too: what comes back is a copy, or `rpc` where
        the peer gets just that. Subscriptions go by name (field 3 means something else to most peers). An index in
        `rpc` is never passed on: it is of no table of this peer's. What has an index and no name is left out, and
        counted: the router is to name what it takes in (`named`).
        """
        state = self._peers.get(peer)
        table = self._table_for(state)
        controls = rpc.HasField("control")
        if table is None or not (rpc.publish or controls):
            if not _holds_index(rpc):
                return rpc
            table = None
        copy = RPC()
        copy.CopyFrom(rpc)
        self._remove_unnamed(copy)
        for message in copy.publish:
            index = self._index(table, state, message.topic)
            if index:
                message.ClearField("topic")
                message.topicIndex = index
            else:
                message.ClearField("topicIndex")
        if controls:
            control = copy.control
            for kind in (control.ihave, control.graft, control.prune):
                for item in kind:
                    index = self._index(table, state, item.topicID)
                    if index:
                        item.ClearField("topicID")
                        item.topicIndex = index
                    else:
                        item.ClearField("topicIndex")
        return copy

    def _table_for(self, state: _PeerTable | None) -> TopicTable | None:
        """The table to write to a peer by; None: names."""
        if state is None or state.table is None or not len(state.table):
            return None
        eager = self._send == "eager" or (self._send == "cautious" and (state.writes_indices or state.is_kiln))
        return state.table if eager else None

    def _index(self, table: TopicTable | None, state: _PeerTable | None, topic: str) -> int | None:
        if table is None or state is None:
            return None
        index = table.index_of(topic)
        if index is None or _index_field(index) > _name_field(topic):  # no RPC grows over what a peer accepts
            return None
        self._counters[INDEX_WRITTEN] += 1
        _count_savings(state, "sent", topic, index)
        return index

    def _remove_unnamed(self, rpc: RPC) -> None:
        if not _holds_index(rpc):
            return
        control = rpc.control
        for kind in (rpc.publish, rpc.subscriptions, control.ihave, control.graft, control.prune):
            for at in range(len(kind) - 1, -1, -1):
                if kind[at].HasField("topicIndex") and _read_name(kind[at]) is None:
                    del kind[at]
                    self._counters[INDEX_LEFT_OUT] += 1

    # ------------------------------------------------------------ what happened

    def table(self, peer: bytes) -> TopicTable | None:
        """The table shared with a peer; None before its hello, or if that was refused. It may hold nothing."""
        state = self._peers.get(peer)
        return state.table if state is not None else None

    def writes_indices_to(self, peer: bytes) -> bool:
        """Whether `for_peer` gives this peer indices, as things are."""
        return self._table_for(self._peers.get(peer)) is not None

    @property
    def counters(self) -> Mapping[str, int]:
        """By kind: hellos taken, refused (by reason), ignored; indices read, written, not resolved (by reason)."""
        return MappingProxyType(self._counters)

    def savings(self) -> Savings:
        """By direction and topic, over all peers there were."""
        total: Savings = {}
        _add_savings(total, self._gone)
        for state in self._peers.values():
            _add_savings(total, state.savings)
        return total

    def peer_savings(self, peer: bytes) -> Mapping[tuple[SavingDirection, str], SavingStatus]:
        """The same of one peer, since its stream opened; empty for one that is not there."""
        state = self._peers.get(peer)
        return MappingProxyType(state.savings if state is not None else {})


def _count_savings(state: _PeerTable, direction: SavingDirection, topic: str, index: int) -> None:
    key = (direction, topic)
    saving = state.savings.get(key)
    if saving is None:
        saving = state.savings[key] = SavingStatus(topic, direction)
    saving.references += 1
    saving.as_names += _name_field(topic)
    saving.as_indices += _index_field(index)


def _add_savings(total: Savings, more: Savings) -> None:
    for key, saving in more.items():
        total.setdefault(key, SavingStatus(saving.topic, saving.direction)).add(saving)


def _read_name(item: Item) -> str | bytes | None:
    """The topic's name as upb gives it; None where there is none on the wire. An empty name is one."""
    if isinstance(item, Message):
        return item.topic if item.HasField("topic") else None
    if isinstance(item, RPC.SubOpts):
        return item.topicid if item.HasField("topicid") else None
    return item.topicID if item.HasField("topicID") else None


def _holds_index(rpc: RPC) -> bool:
    """Whether anything has an index that must not go out: any but one beside a subscription's name."""
    for message in rpc.publish:
        if message.HasField("topicIndex"):
            return True
    for option in rpc.subscriptions:
        if option.HasField("topicIndex") and not option.HasField("topicid"):
            return True
    if not rpc.HasField("control"):
        return False
    control = rpc.control
    return any(item.HasField("topicIndex") for kind in (control.ihave, control.graft, control.prune) for item in kind)


@lru_cache(maxsize=4096)
def _name_field(topic: str) -> int:
    length = len(topic.encode())
    return 1 + _varint(length) + length


def _index_field(index: int) -> int:
    return 1 + _varint(index)


def _varint(value: int) -> int:
    """Bytes that a number takes; every tag here is one byte."""
    return max(1, (value.bit_length() + 6) // 7)
