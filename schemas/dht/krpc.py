"""KRPC, the messages of the BitTorrent DHT (BEP 5, KRPC Protocol), with BEP 50's key ``c`` for the topic.

A message is a bencoded dictionary in a UDP datagram::

    t   transaction id, chosen by the requester, repeated in the response
    y   q: a query, r: a response, e: an error
    q   method      a   its arguments, among them "id": the requester's node id, 20 bytes   (queries)
    r   values, among them "id": the responder's node id                                    (responses)
    e   [code, text]                                                                        (errors)
    c   the topic, 20 bytes: the target of its item         (BEP 50: in *every* message of a topic's overlay)
    ro  1: the requester responds to no queries (BEP 43)

``c`` is a top-level key like ``t`` and ``y``, not an argument, as in the source text of BEP 50; the published examples
lack the lines ``"a": {`` and ``"r": {``. Errors have ``c`` too, because BEP 50 says "all messages".

Addresses are compact, as on the wire (BEP 5, Contact Encoding; BEP 32 for IPv6): 4 or 16 bytes of IP, 2 of port.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple, TypeAlias

from msgspec import Struct

from kiln.schemas.dht import bencode
from kiln.schemas.dht.bencode import BencodeError, Value

ID_SIZE: Final = 20
MAX_TRANSACTION: Final = 20
"""Maximum number of bytes of a transaction id; common clients use 2 or 4."""
MAX_DATAGRAM: Final = 2048
"""Maximum number of bytes of a datagram that is read. Datagrams of this protocol fit into an Ethernet frame."""

Family = Literal[4, 6]

# Prefixes of IPv4-mapped addresses, by which a node would have two addresses, and of the unspecified address.
_NOT_IPV6: Final = (bytes(10) + b"\xff\xff", bytes(15) + b"\x00")


class KrpcRefusal(NamedTuple):
    """Code and text of a KRPC error (BEP 5 and BEP 44, Errors)."""

    code: int
    text: bytes


MALFORMED: Final = KrpcRefusal(203, b"malformed message")
BAD_ARGUMENTS: Final = KrpcRefusal(203, b"invalid arguments")
BAD_TOKEN: Final = KrpcRefusal(203, b"bad token")
UNKNOWN_TOPIC: Final = KrpcRefusal(203, b"unknown topic")
OTHER_ITEM: Final = KrpcRefusal(203, b"only the item of the topic")
BAD_SEQUENCE: Final = KrpcRefusal(203, b"invalid sequence number")
PROHIBITED: Final = KrpcRefusal(204, b"prohibited on a topic")
UNKNOWN_METHOD: Final = KrpcRefusal(204, b"method unknown")
VALUE_TOO_BIG: Final = KrpcRefusal(205, b"value too big")
BAD_SIGNATURE: Final = KrpcRefusal(206, b"invalid signature")
SALT_TOO_BIG: Final = KrpcRefusal(207, b"salt too big")
CAS_MISMATCH: Final = KrpcRefusal(301, b"cas mismatch")
OLD_SEQUENCE: Final = KrpcRefusal(302, b"sequence number less than current")


class DhtAddress(NamedTuple):
    """Address of a DHT node: packed IP (4 or 16 bytes) and UDP port."""

    ip: bytes
    port: int

    @classmethod
    def parse(cls, host: str, port: int) -> DhtAddress:
        """Parse an IP address; host names are refused. An IPv4-mapped address becomes IPv4.

        Raises:
            ValueError: The address or port is invalid.
        """
        ip = ipaddress.ip_address(host)
        if not 0 <= port <= 65535:
            raise ValueError(f"port {port} of {host} must be between 0 and 65535")
        mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
        return cls((mapped or ip).packed, port)

    @classmethod
    def from_text(cls, text: str) -> DhtAddress:
        """Parse ``host:port``, with an IPv6 address in brackets.

        Raises:
            ValueError: The text has another form.
        """
        return cls.parse(*parse_host_and_port(text))

    @property
    def host(self) -> str:
        """The IP address as text."""
        return str(ipaddress.ip_address(self.ip))

    @property
    def text(self) -> str:
        """The address as ``host:port``, with an IPv6 address in brackets."""
        return f"{self.host}:{self.port}" if self.family == 4 else f"[{self.host}]:{self.port}"

    @property
    def family(self) -> Family:
        return 4 if len(self.ip) == 4 else 6

    @property
    def compact(self) -> bytes:
        return self.ip + self.port.to_bytes(2, "big")

    @property
    def usable(self) -> bool:
        """True if a datagram can be sent to this address and reach a single node: the port is not 0, and the IP is not
        multicast, broadcast, unspecified or IPv4-mapped."""
        if self.family == 4:
            return self.port > 0 and 0 < self.ip[0] < 224
        return self.port > 0 and self.ip[0] != 0xFF and not self.ip.startswith(_NOT_IPV6)


def parse_host_and_port(text: str) -> tuple[str, int]:
    """Parse ``host:port``, with an IPv6 address in brackets. The host may be a name.

    Raises:
        ValueError: The text has another form.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r} is not HOST:PORT: write an IPv6 address in brackets, such as [::1]:4813")
    if not host or not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT: write for example 127.0.0.1:4813")
    return host, int(port)


class DhtNode(NamedTuple):
    """Id and address of a DHT node."""

    id: bytes
    address: DhtAddress


class KrpcQuery(Struct, frozen=True):
    """A KRPC query. `arguments` is its dictionary ``a``, and `sender` the node id in it."""

    transaction: bytes
    method: bytes
    sender: bytes
    arguments: dict[bytes, Value]
    topic: bytes | None = None
    read_only: bool = False


class KrpcResponse(Struct, frozen=True):
    """A KRPC response. `values` is its dictionary ``r``, and `sender` the node id in it."""

    transaction: bytes
    sender: bytes
    values: dict[bytes, Value]
    topic: bytes | None = None


class KrpcError(Struct, frozen=True):
    """A KRPC error."""

    transaction: bytes
    refusal: KrpcRefusal
    topic: bytes | None = None


class MalformedDatagram(Struct, frozen=True):
    """A datagram that is not a valid KRPC message."""

    reason: str
    """one of REASONS"""
    transaction: bytes | None = None
    """transaction id, if the datagram is a query whose sender can get an error (BEP 5, code 203)"""
    topic: bytes | None = None
    """topic of such a query, if the topic is valid"""


REASONS: Final = (
    "too_big",  # more than MAX_DATAGRAM bytes
    "not_bencoded",  # not one canonical dictionary
    "bad_transaction",  # `t` absent, not a string, or longer than MAX_TRANSACTION
    "bad_topic",  # `c` present and not 20 bytes
    "bad_message",  # unknown `y`, or the part that `y` announces is absent
    "bad_id",  # no node id of 20 bytes
)

Message: TypeAlias = KrpcQuery | KrpcResponse | KrpcError


def read_message(data: bytes) -> Message | MalformedDatagram:
    """Parse a datagram. No bytes make this function raise."""
    if len(data) > MAX_DATAGRAM:
        return MalformedDatagram("too_big")
    try:
        message = bencode.decode(data)
    except BencodeError:
        return _read_malformed(data)
    if not isinstance(message, dict):
        return MalformedDatagram("not_bencoded")
    transaction, topic, kind = message.get(b"t"), message.get(b"c"), message.get(b"y")
    if not isinstance(transaction, bytes) or len(transaction) > MAX_TRANSACTION:
        return MalformedDatagram("bad_transaction")
    answerable = transaction if kind == b"q" else None  # only queries get an error
    if topic is not None and (not isinstance(topic, bytes) or len(topic) != ID_SIZE):
        return MalformedDatagram("bad_topic", answerable)
    if kind == b"q":
        method, arguments = message.get(b"q"), message.get(b"a")
        if not isinstance(method, bytes) or not isinstance(arguments, dict):
            return MalformedDatagram("bad_message", answerable, topic)
        sender = arguments.get(b"id")
        if isinstance(sender, bytes) and len(sender) == ID_SIZE:
            return KrpcQuery(transaction, method, sender, arguments, topic, message.get(b"ro") == 1)
        return MalformedDatagram("bad_id", answerable, topic)
    if kind == b"r":
        values = message.get(b"r")
        if not isinstance(values, dict):
            return MalformedDatagram("bad_message")
        sender = values.get(b"id")
        if isinstance(sender, bytes) and len(sender) == ID_SIZE:
            return KrpcResponse(transaction, sender, values, topic)
        return MalformedDatagram("bad_id")
    if kind == b"e":
        match message.get(b"e"):
            case [int(code), bytes(text), *_]:
                return KrpcError(transaction, KrpcRefusal(code, text), topic)
    return MalformedDatagram("bad_message")


def _read_malformed(data: bytes) -> MalformedDatagram:
    """Parse only the parts of a non-canonical query that an error response needs. BEP 44 requires this response."""
    try:
        fields = bencode.fields(data)
        transaction = bencode.decode(fields.get(b"t", b""))
        topic = bencode.decode(fields[b"c"]) if b"c" in fields else None
    except BencodeError:
        return MalformedDatagram("not_bencoded")
    if fields.get(b"y") != b"1:q" or not isinstance(transaction, bytes) or len(transaction) > MAX_TRANSACTION:
        return MalformedDatagram("not_bencoded")
    valid_topic = topic if isinstance(topic, bytes) and len(topic) == ID_SIZE else None
    return MalformedDatagram("not_bencoded", transaction, valid_topic)


def write_message(message: Message) -> bytes:
    """Encode a message as a datagram. `sender` becomes ``id`` in the arguments or values."""
    out: dict[bytes, Value] = {b"t": message.transaction}
    if message.topic is not None:
        out[b"c"] = message.topic
    match message:
        case KrpcQuery():
            out |= {b"y": b"q", b"q": message.method, b"a": {**message.arguments, b"id": message.sender}}
            if message.read_only:
                out[b"ro"] = 1
        case KrpcResponse():
            out |= {b"y": b"r", b"r": {**message.values, b"id": message.sender}}
        case KrpcError():
            out |= {b"y": b"e", b"e": [message.refusal.code, message.refusal.text]}
    return bencode.encode(out)


def read_address(compact: bytes) -> DhtAddress | None:
    """Parse a compact address, IPv4 or IPv6. Return `None` if it is invalid or not `usable`."""
    if len(compact) not in (6, 18):
        return None
    address = DhtAddress(compact[:-2], int.from_bytes(compact[-2:], "big"))
    return address if address.usable else None


def read_addresses(values: Value | None) -> list[DhtAddress]:
    """Parse ``values`` of a get_peers response, a list of compact addresses. Invalid entries are skipped."""
    entries = values if isinstance(values, list) else []
    return [address for entry in entries if isinstance(entry, bytes) and (address := read_address(entry))]


def read_nodes(values: dict[bytes, Value]) -> list[DhtNode]:
    """Parse the nodes in ``nodes`` (IPv4) and ``nodes6`` (IPv6) of a response.

    A string of a wrong length, and nodes whose address is not `usable`, are skipped.
    """
    nodes = []
    for key, size in ((b"nodes", 26), (b"nodes6", 38)):
        compact = values.get(key)
        if isinstance(compact, bytes) and len(compact) % size == 0:
            for at in range(0, len(compact), size):
                address = read_address(compact[at + ID_SIZE : at + size])
                if address is not None:
                    nodes.append(DhtNode(compact[at : at + ID_SIZE], address))
    return nodes


def write_nodes(nodes: Iterable[DhtNode]) -> dict[bytes, Value]:
    """Build ``nodes`` (IPv4) and ``nodes6`` (IPv6) of a response. A key without nodes is left out."""
    out: dict[bytes, Value] = {}
    for key, family in ((b"nodes", 4), (b"nodes6", 6)):
        compact = b"".join(node.id + node.address.compact for node in nodes if node.address.family == family)
        if compact:
            out[key] = compact
    return out
