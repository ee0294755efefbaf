"""Items that readers of files yield: Frames and unreadable items. `LogFrames` builds Frames of logged messages."""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple, TypeAlias

from kiln.schemas.kafka.frames import CONNECTION_BYTES, MAX_NETWORK, MAX_RPC, METADATA_ONLY
from kiln.schemas.kafka.frames import MAX_PEER as MAX_FRAME_PEER
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected
from kiln.schemas.times import MAX_NANOS, MIN_NANOS
from kiln.schemas.wire.identity import MAX_SEQNO, Verdict
from kiln.schemas.wire.topics import parse_topic

LINE_MALFORMED: Final = "line_malformed"
LINE_TOO_LONG: Final = "line_too_long"
NO_MESSAGE: Final = "no_message"
FILE_ENDS_EARLY: Final = "file_ends_early"
FILE_DAMAGED: Final = "file_damaged"
REASONS: Final = (LINE_MALFORMED, LINE_TOO_LONG, NO_MESSAGE, METADATA_ONLY, FILE_ENDS_EARLY, FILE_DAMAGED)

MAX_PEER: Final = 2048  # bytes of an author's peer id; the limit of kiln.schemas.wire.identity


class UnreadableItem(NamedTuple):
    """A line or record of a file that gives no Frame. It goes to quarantine with its number and the file's name."""

    line: int
    """number of the line, or of the record in a binary file, from 1"""
    data: bytes
    """the line without its line end; only the beginning if the line is over 16 MiB or the data is damaged"""
    reason: str
    """one of REASONS"""
    detail: str


Item: TypeAlias = Frame | UnreadableItem


class FileSource(NamedTuple):
    """Facts about a file that a reader cannot read from the file itself."""

    digest: bytes
    """sha256 of the file as stored, from which connection ids are computed, so that reading twice gives equal Frames"""
    network: str
    """network of messages whose topic does not name a Ceramic network; 1 to 256 characters"""
    default_time: int
    """capture time of messages for which the file has no time, in ns since the epoch"""


class LoggedMessage(NamedTuple):
    """A message in the log of another node. Peer ids are multihash bytes, empty if the log does not have them."""

    topic: str
    data: bytes | None
    """`None` if the log does not have the data"""
    author: bytes
    seqno: bytes
    """empty if the log does not have it"""
    node: bytes
    """peer id of the node that wrote the log"""
    sender: bytes
    """peer id of the peer from which the node received the message"""
    at: int | None
    """time in ns since the epoch, or `None` if the log has no time"""


class LogFrames:
    """Builds the Frames of one log: one per message, with the line's number as `sequence`."""

    def __init__(self, format_name: str, source: FileSource) -> None:
        self._format = format_name
        self._source = source
        digest = hashlib.sha256(format_name.encode() + b"\0" + source.digest).digest()
        self._connection = digest[:CONNECTION_BYTES]

    def build_frame(self, line: int, raw: bytes, logged: LoggedMessage) -> Item:
        """Build the Frame of a logged message, or an unreadable item if a field of the message is invalid.

        The Frame's payload is an RPC with this message. The message has no signature, so its verdict in the Frame is
        UNVERIFIABLE.

        Args:
            line: Number of the line, from 1.
            raw: Bytes of the line, for quarantine.
        """
        at = self._source.default_time if logged.at is None else logged.at
        fault = _find_fault(logged, at)
        if fault is not None:
            return UnreadableItem(line, raw, fault.reason, fault.detail)
        message = Message(topic=logged.topic)
        if logged.data is not None:
            message.data = logged.data
        if logged.author:
            setattr(message, "from", logged.author)  # a keyword in Python
        if logged.seqno:
            message.seqno = logged.seqno
        payload = RPC(publish=[message]).SerializeToString()
        if len(payload) > MAX_RPC:
            return UnreadableItem(
                line, raw, LINE_TOO_LONG, f"a message of {len(payload)} bytes; at most {MAX_RPC} are read"
            )
        topic = parse_topic(logged.topic)
        return Frame(
            # a Frame cannot have a longer network name, so the topic is not Ceramic's
            network=topic.network if topic and len(topic.network) <= MAX_NETWORK else self._source.network,
            connection=self._connection,
            direction=Frame.IN,
            local_peer=logged.node,
            remote_peer=logged.sender,
            protocol=self._format,
            observed_at=at,
            payload=payload,
            sequence=line,
            verdicts=bytes([Verdict.UNVERIFIABLE]),
            origin=Frame.REPLAY,
        )


def _find_fault(logged: LoggedMessage, at: int) -> Rejected | None:
    if not MIN_NANOS <= at <= MAX_NANOS:
        return Rejected(LINE_MALFORMED, f"time {at} ns is not in the years 2000 to 2099")
    if len(logged.author) > MAX_PEER:
        return Rejected(LINE_MALFORMED, f"the author's peer id has {len(logged.author)} bytes; at most {MAX_PEER}")
    if (longest := max(len(logged.node), len(logged.sender))) > MAX_FRAME_PEER:
        return Rejected(LINE_MALFORMED, f"a node's peer id has {longest} bytes; at most {MAX_FRAME_PEER} are read")
    if len(logged.seqno) > MAX_SEQNO:
        return Rejected(LINE_MALFORMED, f"a seqno of {len(logged.seqno)} bytes; at most {MAX_SEQNO} are read")
    try:
        logged.topic.encode()
    except UnicodeEncodeError:
        return Rejected(LINE_MALFORMED, "the topic holds half of a surrogate pair")
    return None
