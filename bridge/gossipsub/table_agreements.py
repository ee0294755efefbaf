"""The topic tables negotiated with peers (Topic Table Extension of gossipsub).

Each peer lists hashes of its bundles of topics in a hello: the extension field of its first RPC. From two hellos, both
peers compute the same table, and may then send a topic's index in the table instead of its name. An index has a meaning
only on one connection, so topics are names inside the router. This module replaces the indices in received RPCs by
names, and names by indices in the RPCs to send. The rules of tables are in kiln.schemas.wire.topic_table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

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
    build_hello_extensions,
    negotiate_table,
    read_hello,
    write_hello,
)

SendMode = Literal["cautious", "eager", "off"]
Item = Message | RPC.SubOpts | ControlIHave | ControlGraft | ControlPrune

PROTOCOL: Final = "/meshsub/1.3.0"
AGENT: Final = "kiln/"

# Counters in addition to REASONS (of a refused hello) and INDEX_REASONS (of an index that does not resolve) in
# kiln.schemas.wire.topic_table.
HELLO_ACCEPTED: Final = "hello_accepted"
HELLO_REPEATED: Final = "hello_repeated"
HELLO_LATE: Final = "hello_late"
HELLO_UNEXPECTED: Final = "hello_unexpected"
INDEX_RESOLVED: Final = "index_resolved"
INDEX_WRITTEN: Final = "index_written"
NAME_AND_INDEX: Final = "name_and_index"
NAME_NOT_UTF8: Final = "topic_not_utf8"
NOT_NAMED: Final = "topic_missing"


class PeerTable:
    """The topic table agreed with one peer, valid while the peer's stream is open."""

    __slots__ = ("has_extensions", "is_kiln", "received_hello", "table", "writes_indices")

    def __init__(self, has_extensions: bool) -> None:
        self.has_extensions = has_extensions
        self.is_kiln = False
        """true for a Kiln node, which can read every index that we write"""
        self.received_hello = False
        self.table: TopicTable | None = None
        """the table, which may be empty; `None` if the peer sent no hello, or one that was refused"""
        self.writes_indices = False
        """true once the peer has sent an index that resolved"""


class TableAgreements:
    """Negotiates tables with peers, translates between names and indices, and counts the events of all peers."""

    def __init__(self, bundles: BundleSet, send: SendMode = "cautious") -> None:
        """Create the state, without peers.

        Args:
            bundles: The bundles in our hello. If there are none, no index is read or written.
            send: When to write an index instead of a name. `eager`: whenever the peer's table has the topic. `off`:
                never. `cautious`: only to a Kiln node, or to a peer that has sent an index. Another implementation
                may agree to a table that it cannot read, and can always read a name. Indices are read in every mode.

        Raises:
            BundleError: There are more bundles than a hello may have.
        """
        self._bundles = bundles
        self._send = send
        self._hello = write_hello(bundles)
        self._counters: Counter[str] = Counter()
        self._no_table = TopicTable((), bundles)

    # ------------------------------------------------------------ peers

    def open(self, protocol: str = PROTOCOL) -> tuple[PeerTable, ControlExtensions | None]:
        """Create the table of a peer whose stream has opened.

        Returns:
            The table, and the extensions (our hello) for the first RPC to the peer, or `None` if none are to be sent.
        """
        peer = PeerTable(protocol == PROTOCOL)
        return peer, build_hello_extensions(self._bundles) if peer.has_extensions and self._hello else None

    def receive(self, peer: PeerTable, extensions: ControlExtensions, *, is_first: bool) -> None:
        """Process the extensions of an RPC. Call this before the topics of the RPC are resolved.

        Extensions belong in the first RPC of a stream (gossipsub v1.3), so a hello in a later RPC is ignored. The
        first hello is final, even if it is refused: the peer then has no table. Every outcome is counted.
        """
        if not is_first and not peer.received_hello:
            if extensions.HasField("topicTableExtension"):
                self._counters[HELLO_LATE] += 1
            return
        hashes = read_hello(extensions)
        if hashes is None:
            return  # other extensions only
        if not peer.has_extensions:
            self._counters[HELLO_UNEXPECTED] += 1
        elif peer.received_hello:
            self._counters[HELLO_REPEATED] += 1
        else:
            peer.received_hello = True
            if isinstance(hashes, Rejected):
                self._counters[hashes.reason] += 1
                return
            self._counters[HELLO_ACCEPTED] += 1
            # re-encoded, so that only the hashes are used
            peer.table = negotiate_table(write_hello(hashes), self._hello, self._bundles).table

    # ------------------------------------------------------------ in

    def resolve_topic(self, peer: PeerTable, item: Item) -> str | None:
        """Resolve the topic of a received item.

        A name takes precedence over an index, because SubOpts has another meaning for the field of the index: it is
        `requestsPartial` in the partial-messages extension, which is sent together with a name.

        Returns:
            The topic's name. `None` if the item has neither a name nor an index, its index does not resolve, or its
            name is empty or not UTF-8.
        """
        name: str | bytes | None
        if isinstance(item, Message):
            name = item.topic if item.HasField("topic") else None
        elif isinstance(item, RPC.SubOpts):
            name = item.topicid if item.HasField("topicid") else None
        else:
            name = item.topicID if item.HasField("topicID") else None
        if name is not None:
            if isinstance(name, bytes):  # upb returns bytes for a string that is not UTF-8
                self._counters[NAME_NOT_UTF8] += 1
                return None
            if item.HasField("topicIndex") and not isinstance(item, RPC.SubOpts):
                self._counters[NAME_AND_INDEX] += 1
            return name or None
        if not item.HasField("topicIndex"):
            self._counters[NOT_NAMED] += 1
            return None
        topic = (self._no_table if peer.table is None else peer.table).resolve(item.topicIndex)
        if isinstance(topic, Rejected):
            self._counters[topic.reason] += 1
            return None
        peer.writes_indices = True
        self._counters[INDEX_RESOLVED] += 1
        return topic

    def with_topic_name(self, message: Message, topic: str) -> Message:
        """Copy a message, with its topic's name instead of an index. Only this form is verified, cached and relayed."""
        copy = Message()
        copy.CopyFrom(message)
        copy.ClearField("topicIndex")
        copy.topic = topic
        return copy

    # ------------------------------------------------------------ out

    def encode_for_peer(self, peer: PeerTable, rpc: RPC) -> RPC:
        """Return the RPC in the form for one peer, with indices of the peer's table instead of names where allowed.

        `rpc`, whose topics are all names, is not changed, because it may also go to other peers. The result is a copy,
        or `rpc` itself if no index is allowed. Subscriptions keep their names, because most peers read the field of the
        index as something else.
        """
        table = peer.table
        if not table or self._send == "off" or (self._send == "cautious" and not (peer.writes_indices or peer.is_kiln)):
            return rpc
        copy = RPC()
        copy.CopyFrom(rpc)
        for message in copy.publish:
            if index := self._find_index(table, message.topic):
                message.ClearField("topic")
                message.topicIndex = index
        for kind in (copy.control.ihave, copy.control.graft, copy.control.prune):
            for item in kind:
                if index := self._find_index(table, item.topicID):
                    item.ClearField("topicID")
                    item.topicIndex = index
        return copy

    def _find_index(self, table: TopicTable, topic: str) -> int | None:
        index = table.find_index(topic)
        if index is None or index >> 7 * (len(topic) + 1):
            return None  # a longer index than name could make the RPC grow over the peer's limit
        self._counters[INDEX_WRITTEN] += 1
        return index

    # ------------------------------------------------------------ status

    @property
    def counters(self) -> Mapping[str, int]:
        """Number of events by kind, such as accepted hellos, refused hellos by reason, and indices read or written."""
        return MappingProxyType(self._counters)
