"""Topic tables of gossipsub (Topic Table Extension, working draft r0, 2025-11-11).

Each peer's hello lists the hashes of its topic bundles; both compute the same table from the two lists.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from google.protobuf.message import DecodeError

from schemas.proto.gossipsub.rpc_pb2 import ExtTopicTable
from schemas.reject import Rejected

HASH_LENGTH = 4
MAX_BUNDLES = 256

REASONS = (
    "hello_malformed",  # not a protobuf message
    "hello_too_many_bundles",  # more than MAX_BUNDLES hashes
    "hello_hash_length",  # a hash that is not 4 bytes long
    "hello_repeats",  # a hash twice: Intersect is then not symmetric, and the two peers would build different tables
)
"""Every reason that ``parse_hello`` rejects with (docs/DESIGN.md, Contracts, Frame.hello_in)."""


def bundle_hash(topics: Iterable[str]) -> bytes:
    """Hash a bundle: the last 4 bytes of sha256 of its topics, in order and with nothing between (section "Protocol").

    A bundle is a set, so a topic given twice counts once; the lexicographic order is that of the UTF-8 bytes.
    """
    names = sorted({topic.encode() for topic in topics})
    return hashlib.sha256(b"".join(names)).digest()[-HASH_LENGTH:]


def intersect(ours: Sequence[bytes], theirs: Sequence[bytes]) -> list[bytes]:
    """Give the bundles both sides have: the common prefix, then the other common ones in bytewise order (section
    "Bundle intersection", the Go function).

    Symmetric, as long as neither list repeats a hash; ``parse_hello`` refuses those that do.
    """
    prefix = 0
    for first, second in zip(ours, theirs, strict=False):
        if first != second:
            break
        prefix += 1
    rest = set(ours[prefix:])
    return [*ours[:prefix], *sorted(known for known in theirs[prefix:] if known in rest)]


def parse_hello(ext: bytes) -> list[bytes] | Rejected:
    """Read ExtTopicTable bytes, the topic table part of a peer's hello, into its bundle hashes in the peer's order.

    Unknown fields are tolerated; empty bytes are a hello with no bundle. For the reasons see REASONS.
    """
    try:
        hashes = list(ExtTopicTable.FromString(ext).topicBundleHashes)
    except DecodeError as error:
        return Rejected("hello_malformed", str(error))
    if len(hashes) > MAX_BUNDLES:
        return Rejected("hello_too_many_bundles", f"{len(hashes)} bundle hashes; at most {MAX_BUNDLES} are taken")
    for index, known in enumerate(hashes):
        if len(known) != HASH_LENGTH:
            return Rejected("hello_hash_length", f"bundle hash {index} has {len(known)} bytes, not {HASH_LENGTH}")
    if len(set(hashes)) != len(hashes):
        repeated = next(known for index, known in enumerate(hashes) if known in hashes[:index])
        return Rejected("hello_repeats", f"bundle hash {repeated.hex()} occurs more than once")
    return hashes
