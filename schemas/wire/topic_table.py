"""Topic tables of gossipsub (Topic Table Extension, working draft r0, 2025-11-11; below "the draft").

A *bundle* is a set of topics that peers know in advance. Each peer's hello (first RPC) lists the hashes of its bundles.
Both peers compute the same table from the two lists, and may then send a topic's index in place of its name. The rules,
in the order of the draft's section "Protocol", and their functions here:

* "a bundle hash [is] the last 4 bytes of the sha256 digest of the concatenation of all its topic strings, ordered
  lexicographically": ``bundle_hash``.
* "a hello packet which includes an ord[e]rd list of bundle ha[s]hes is sent … with higher-priority bundles listed
  first": ``BundleSet`` keeps the order of the settings; ``write_hello`` writes it, ``parse_hello`` reads it.
* "we use the Intersect function … This function is symmetric": ``intersect``. Both peers get the same result, because
  the common prefix is the same for both, and the rest is sorted by bytes.
* "the topic table is constructed by expanding each agreed bundle to its constituent topic list, concatenating all
  expanded topics into a single sequence, and assigning 1-based indices": ``TopicTable``. The first topic is 1.
* "If we receive a message with a topic name instead of a topic index, we leave it as it is": ``resolve_topic``.

The draft leaves some points open. Here, a bundle expands to its topics in bytewise order of UTF-8, as in the only
existing implementation. A topic in two agreed bundles has two indices: the lower one is written, and both are read. A
hello that repeats a hash is rejected, because Intersect would not be symmetric. So is a hello with a hash that is not 4
bytes long.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from google.protobuf.message import DecodeError

from kiln.schemas.kafka.frames import read_topic_name
from kiln.schemas.kafka.topics import MAX_TOPIC
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, ControlExtensions, ExtTopicTable, Message
from kiln.schemas.reject import Rejected

HASH_LENGTH: Final = 4
MAX_BUNDLES: Final = 256

INDEX_OUT_OF_RANGE: Final = "index_out_of_range"
NO_TABLE: Final = "no_table_agreed"
UNKNOWN_BUNDLE: Final = "unknown_bundle_hash"
TOPIC_MISSING: Final = "topic_missing"

REASONS = (
    "hello_malformed",  # not a protobuf message
    "hello_too_many_bundles",  # more than MAX_BUNDLES hashes
    "hello_hash_length",  # a hash that is not 4 bytes long
    "hello_repeats",  # a repeated hash, with which the two peers would build different tables
)
"""Reasons for which ``parse_hello`` rejects a hello (docs/design/contracts.md, Frame.hello_in)."""

INDEX_REASONS = (
    INDEX_OUT_OF_RANGE,  # 0, or beyond the end of the table
    NO_TABLE,  # the hellos have no common bundle, or a hello is invalid or missing
    UNKNOWN_BUNDLE,  # in or after an agreed bundle whose topics are not known
)
"""Reasons for which ``TopicTable.resolve`` rejects an index."""

TopicSource = Literal["name", "index"]
"""Form of the topic on the wire: its name, or an index."""

_MAX_AGREEMENTS: Final = 1024  # maximum number of cached pairs of hellos
_MAX_CACHED: Final = 4096  # maximum bytes of a cached hello; MAX_BUNDLES hashes take 1,536
_SHOWN: Final = 8  # maximum number of hashes that a `detail` lists
_MISSING: Final = Rejected(TOPIC_MISSING, "neither a topic nor an index")


class BundleError(ValueError):
    """A bundle is invalid, or conflicts with another one. The message names the bundle and the remedy."""


# ---------------------------------------------------------------- bundles


def bundle_hash(topics: Iterable[str]) -> bytes:
    """Compute the hash of a bundle: the last 4 bytes of the sha256 of its concatenated topics.

    The topics are sorted bytewise by their UTF-8 bytes, and a repeated topic counts once.
    """
    names = sorted({topic.encode() for topic in topics})
    return hashlib.sha256(b"".join(names)).digest()[-HASH_LENGTH:]


class BundleSet(Mapping[bytes, tuple[str, ...]]):
    """Known topic bundles: a mapping from hash to topics, ordered by preference. Topics are in the order of the table.

    The set is immutable. Hashing and comparing are fast, and depend only on the content, so the set can be part of a
    cache key even after pickling.
    """

    __slots__ = ("_names", "_topics", "digest")

    def __init__(self, named: Mapping[str, Iterable[str]] | None = None) -> None:
        """Create the set.

        Args:
            named: Topics of each bundle by its name, most preferred bundle first.

        Raises:
            BundleError: A bundle has no topics; a topic is empty, longer than MAX_TOPIC or not UTF-8; or two bundles
                have the same hash.
        """
        names: dict[bytes, str] = {}
        topics: dict[bytes, tuple[str, ...]] = {}
        for name, given in (named or {}).items():
            ordered = _expand_bundles(name, given)
            known = bundle_hash(ordered)
            if known in names:
                same = "the same topics" if topics[known] == ordered else f"the same hash, {known.hex()},"
                raise BundleError(
                    f"bundles {names[known]!r} and {name!r} both have {same} and a table can hold only one of them. "
                    "Remove one"
                )
            names[known], topics[known] = name, ordered
        self._names, self._topics = names, topics
        self.digest: Final = hashlib.sha256(repr(topics).encode()).digest()
        """digest of hashes and topics in order; sets with equal digests are equal"""

    def __getitem__(self, known: bytes) -> tuple[str, ...]:
        return self._topics[known]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._topics)

    def __len__(self) -> int:
        return len(self._topics)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, BundleSet) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Bundles({', '.join(f'{name!r} {known.hex()}' for known, name in self._names.items())})"

    def name(self, known: bytes) -> str:
        """Return the name of the bundle with a hash.

        Raises:
            KeyError: No bundle has this hash.
        """
        return self._names[known]

    def merge(self, others: BundleSet) -> BundleSet:
        """Append those bundles of ``others`` whose hash is new. If a name is taken, the bundle's hash becomes its name.

        Raises:
            BundleError: Two bundles have the same hash but different topics.
        """
        merged = {self._names[known]: topics for known, topics in self._topics.items()}
        for known, topics in others._topics.items():
            if known not in self._topics:
                name = others._names[known]
                merged[known.hex() if name in merged else name] = topics
            elif self._topics[known] != topics:
                other = others._names[known]
                raise BundleError(
                    f"bundles {self._names[known]!r} and {other!r} have the same hash, {known.hex()}, but different "
                    "topics. Add a topic to one of them, or remove one"
                )
        return BundleSet(merged)


def _expand_bundles(name: str, topics: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct topics of a bundle, sorted bytewise by their UTF-8 bytes."""
    distinct = set(topics)
    if not distinct or "" in distinct:
        raise BundleError(f"bundle {name!r} needs at least one topic, and no topic may be empty")
    if (longest := max(map(len, distinct))) > MAX_TOPIC:
        raise BundleError(f"bundle {name!r} has a topic of {longest} characters: shorten it to at most {MAX_TOPIC}")
    try:
        return tuple(sorted(distinct, key=str.encode))
    except UnicodeEncodeError as error:
        raise BundleError(f"bundle {name!r} has a topic with a lone surrogate, which has no UTF-8 form") from error


# ---------------------------------------------------------------- hellos


def intersect(ours: Sequence[bytes], theirs: Sequence[bytes]) -> list[bytes]:
    """Return the bundle hashes that two hellos have in common, in the order of the topic table.

    The order is the common prefix of both lists, then the other common hashes in bytewise order. If no list repeats a
    hash, which ``parse_hello`` ensures, both peers get the same result. Source: the Go function in the draft's section
    "Bundle intersection".
    """
    prefix = 0
    for first, second in zip(ours, theirs, strict=False):
        if first != second:
            break
        prefix += 1
    rest = set(ours[prefix:])
    return [*ours[:prefix], *sorted(known for known in theirs[prefix:] if known in rest)]


def parse_hello(ext: bytes) -> list[bytes] | Rejected:
    """Parse the topic table in a hello (ExtTopicTable bytes). Return its bundle hashes, or a rejection from REASONS.

    Unknown fields are ignored. Empty bytes are a hello without bundles.
    """
    try:
        return _read_hashes(ExtTopicTable.FromString(ext))
    except DecodeError as error:
        return Rejected("hello_malformed", str(error))


def read_hello(extensions: ControlExtensions) -> list[bytes] | Rejected | None:
    """Read the topic table (field 4820938) in the extensions of a peer's first RPC, as ``parse_hello`` does. Return
    `None` if there is none."""
    if not extensions.HasField("topicTableExtension"):
        return None
    return _read_hashes(extensions.topicTableExtension)


def find_hello(rpc: RPC) -> bytes:
    """Return the topic table in the first RPC of a direction, as bytes for Frame.hello_in and Frame.hello_out.

    The bytes are empty if the RPC has no topic table, or an invalid one. Unknown fields are left out, because each
    frame of the connection repeats the bytes. The bridge and the reader of captures both use this function.
    """
    if not rpc.HasField("control") or not rpc.control.HasField("extensions"):
        return b""
    hashes = read_hello(rpc.control.extensions)
    return write_hello(hashes) if isinstance(hashes, list) else b""


def _read_hashes(table: ExtTopicTable) -> list[bytes] | Rejected:
    count = len(table.topicBundleHashes)
    if count > MAX_BUNDLES:
        return Rejected("hello_too_many_bundles", f"{count} bundle hashes; at most {MAX_BUNDLES} are accepted")
    hashes = list(table.topicBundleHashes)
    for index, known in enumerate(hashes):
        if len(known) != HASH_LENGTH:
            return Rejected("hello_hash_length", f"bundle hash {index} has {len(known)} bytes, not {HASH_LENGTH}")
    if len(set(hashes)) != len(hashes):
        repeated = next(known for index, known in enumerate(hashes) if known in hashes[:index])
        return Rejected("hello_repeats", f"bundle hash {repeated.hex()} occurs more than once")
    return hashes


def write_hello(hashes: Iterable[bytes]) -> bytes:
    """Encode bundle hashes as ExtTopicTable bytes, as in Frame.hello_in and Frame.hello_out. No hashes give no bytes.

    Raises:
        BundleError: There are too many hashes, or a hash is repeated or not 4 bytes long.
    """
    table = ExtTopicTable(topicBundleHashes=hashes)
    result = _read_hashes(table)
    if isinstance(result, Rejected):
        raise BundleError(f"peers would refuse these bundles: {result.detail}")
    return table.SerializeToString()


def build_hello_extensions(hashes: Iterable[bytes]) -> ControlExtensions:
    """Build the extensions, with the topic table, of the first RPC to a peer. Errors are those of ``write_hello``."""
    return ControlExtensions(topicTableExtension=ExtTopicTable.FromString(write_hello(hashes)))


# ---------------------------------------------------------------- tables


class TopicTable:
    """Topic table that two peers have agreed on: topic names by index, from 1.

    If the topics of an agreed bundle are not known, its indices and those of later bundles cannot be resolved. Source:
    the draft, section "Protocol" ("assigning 1-based indices").
    """

    __slots__ = ("_indices", "_names", "_why", "agreed")

    def __init__(self, agreed: Sequence[bytes], bundles: BundleSet, why: str = "the hellos share no bundle") -> None:
        """Build the table.

        Args:
            agreed: Bundle hashes that ``intersect`` returned.
            bundles: Known bundles.
            why: Reason why there is no table, if `agreed` is empty.
        """
        self.agreed = tuple(agreed)
        self._why = why
        names: list[str] = []
        for known in self.agreed:
            topics = bundles.get(known)
            if topics is None:
                unknown = [bundle.hex() for bundle in self.agreed if bundle not in bundles]
                more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
                self._why = f"the topics of agreed bundles {', '.join(unknown[:_SHOWN])}{more} are not known"
                break
            names += topics
        else:
            if self.agreed:
                self._why = ""
        self._names = tuple(names)
        self._indices: dict[str, int] | None = None

    def __len__(self) -> int:
        """Return the number of indices that can be resolved."""
        return len(self._names)

    def resolve(self, index: int) -> str | Rejected:
        """Return the topic at an index, or a rejection with one of INDEX_REASONS."""
        if 0 < index <= len(self._names):
            return self._names[index - 1]
        if not self.agreed:
            return Rejected(NO_TABLE, f"topic index {index}, and {self._why}")
        if self._why and index > 0:
            return Rejected(UNKNOWN_BUNDLE, f"topic index {index}: {self._why}")
        return Rejected(INDEX_OUT_OF_RANGE, f"topic index {index} in a table of 1 to {len(self._names)}")

    def find_index(self, topic: str) -> int | None:
        """Return the lowest index of a topic, or `None` if the topic has no index and must be sent by name."""
        indices = self._indices
        if indices is None:  # built on demand, because only writers need it
            names = self._names
            indices = self._indices = {names[at]: at + 1 for at in range(len(names) - 1, -1, -1)}
        return indices.get(topic)


class Agreement(NamedTuple):
    """Result of two hellos. If the peers did not agree on a table, `table` resolves no index."""

    table: TopicTable
    refused: tuple[tuple[Literal["hello_in", "hello_out"], Rejected], ...]
    """invalid hellos, each with its field in the Frame"""


def negotiate_table(hello_in: bytes, hello_out: bytes, bundles: BundleSet) -> Agreement:
    """Compute the topic table of a connection from both hellos, as they are in a Frame. Results are cached."""
    key = hello_in, hello_out, bundles.digest
    agreement = _agreements.get(key)
    if agreement is None:
        agreement = _negotiate(hello_in, hello_out, bundles)
        if len(hello_in) <= _MAX_CACHED and len(hello_out) <= _MAX_CACHED:  # a peer must not fill the cache
            if len(_agreements) >= _MAX_AGREEMENTS:
                _agreements.clear()
            _agreements[key] = agreement
    return agreement


# Not an lru_cache, which would hash the bundles for each frame.
_agreements: dict[tuple[bytes, bytes, bytes], Agreement] = {}


def _negotiate(hello_in: bytes, hello_out: bytes, bundles: BundleSet) -> Agreement:
    theirs, ours = parse_hello(hello_in), parse_hello(hello_out)
    if isinstance(theirs, list) and isinstance(ours, list):
        return Agreement(_build_table(tuple(intersect(ours, theirs)), bundles), ())
    sides: tuple[tuple[Literal["hello_in", "hello_out"], list[bytes] | Rejected], ...]
    sides = (("hello_in", theirs), ("hello_out", ours))
    refused = tuple((side, answer) for side, answer in sides if isinstance(answer, Rejected))
    return Agreement(TopicTable((), bundles, "a hello was refused"), refused)


@lru_cache(maxsize=256)
def _build_table(agreed: tuple[bytes, ...], bundles: BundleSet) -> TopicTable:
    """Build a table, once for all pairs of hellos with the same agreed bundles."""
    return TopicTable(agreed, bundles)


def resolve_topic(message: Message, table: TopicTable) -> str | Rejected:
    """Return the name of a message's topic. If the message has both a name and an index, the name counts.

    Returns:
        The name, or a rejection: topic_missing, one of INDEX_REASONS, or a rejection of ``read_topic_name``.
    """
    name = read_topic_name(message)
    if name is None:
        if not message.HasField("topicIndex"):
            return _MISSING
        return table.resolve(message.topicIndex)
    return name
