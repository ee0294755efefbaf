"""The libp2p Kademlia DHT without its network: keys, addresses, the nearest servers, provider records, answers.

Source: libp2p specs, kad-dht/README.md. Written anew over py-libp2p's messages. py-libp2p's KadDHT (0.8.1) cannot be
used here:

* A node that announces a key finds only itself under that key: its own record ends the look-up.
* It dials every address that it is told, names to be resolved included.
* It asks any connected peer, whether or not that peer is in the DHT.
* It takes the prefix of the protocol, and ignores the prefix.
* It keeps keys, values (50,000 of 1 MiB) and counts by peer for strangers with no useful bound.
* It echoes ADD_PROVIDER. go asks again on the same stream, and would take the echo for the answer to its next question.

Everything here is plain data; times are seconds of the caller's clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Final, NamedTuple

from libp2p.kad_dht.pb.kademlia_pb2 import Message
from multiformats import multihash

K: Final = 20  # servers that keep a record, and names in an answer
MAX_KEY: Final = 128  # bytes; go-libp2p-kad-dht asks for no longer ones
MAX_MESSAGE: Final = 256 * 1024
MAX_ADDRESSES: Final = 8  # of a peer
MAX_PROVIDERS: Final = 100  # in an answer, ours or another's

_SHA2_256: Final = b"\x12\x20"
_IP4, _IP6, _TCP, _P2P = b"\x04", b"\x29", b"\x06", b"\xa5\x03"
_NAT64: Final = IPv6Network("64:ff9b::/96")
_MAX_PEER_ID: Final = 42  # bytes; longer keys are hashed


def topic_key(topic: str) -> bytes:
    """The DHT key of a topic: the sha2-256 multihash of its UTF-8 (CIP-120, Peer discovery).

    The routing discovery of go and js asks for the same key: theirs is a CID of that multihash, and the DHT sees only
    the multihash.
    """
    key: bytes = multihash.digest(topic.encode(), "sha2-256")
    return key


def place(key: bytes) -> int:
    """Where a key or a peer id lies in the key space: distance is the XOR of two places."""
    return int.from_bytes(hashlib.sha256(key).digest(), "big")


def is_peer_id(raw: bytes) -> bool:
    """Whether the bytes are a multihash as peer ids are: of sha2-256, or the key itself."""
    if raw[:2] == _SHA2_256:
        return len(raw) == 34
    return 2 < len(raw) <= _MAX_PEER_ID and raw[0] == 0 and raw[1] == len(raw) - 2


# ---------------------------------------------------------------- addresses


class AddressScope(IntEnum):
    """From where an address can be reached."""

    HOST = 0  # this machine alone
    SITE = 1  # a private network
    WORLD = 2


def reach(host: str) -> AddressScope | None:
    """From where an IP address can be reached; None for an address that nobody should dial."""
    ip: IPv4Address | IPv6Address = ip_address(host)
    if isinstance(ip, IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip.sixtofour is not None or ip.teredo is not None or ip in _NAT64:
            return None  # an IPv4 address in disguise
    if ip.is_loopback:
        return AddressScope.HOST
    if ip.is_unspecified or ip.is_multicast or ip.is_reserved or ip.is_link_local:
        # connect() takes "unspecified" for this machine; clouds serve their secrets at link-local addresses
        return None
    return AddressScope.WORLD if ip.is_global else AddressScope.SITE


class TcpAddress(NamedTuple):
    """A TCP address by its numbers."""

    host: str
    port: int

    # by hand, not by a library: one question of a stranger is answered with up to 800 addresses
    @property
    def text(self) -> str:
        """As a multiaddr."""
        return f"/{'ip6' if ':' in self.host else 'ip4'}/{self.host}/tcp/{self.port}"

    @property
    def bytes(self) -> bytes:
        """As a multiaddr."""
        ip = ip_address(self.host)
        return (_IP6 if ip.version == 6 else _IP4) + ip.packed + _TCP + self.port.to_bytes(2, "big")


def read_address(raw: bytes, peer: bytes) -> TcpAddress | None:
    """A multiaddr of TCP over IP, with or without /p2p/ of that peer. None for any other: a name would be resolved."""
    if raw[:1] == _IP4:
        size = 4
    elif raw[:1] == _IP6:
        size = 16
    else:
        return None
    packed, rest = raw[1 : 1 + size], raw[1 + size :]
    if len(rest) < 3 or rest[:1] != _TCP or rest[3:] not in (b"", _P2P + bytes((len(peer),)) + peer):
        return None
    port = int.from_bytes(rest[1:3], "big")
    return TcpAddress(str(ip_address(packed)), port) if port else None


class DhtContact(NamedTuple):
    """A peer, and the addresses that it is said to have."""

    peer: bytes
    addresses: tuple[TcpAddress, ...]


def heard(peer: bytes, addresses: Iterable[bytes], speaker: AddressScope) -> DhtContact:
    """The addresses of a peer that may be believed, if a speaker from so far away names them.

    A speaker outside cannot know what is on this machine or in its network. Addresses in there, named from outside,
    would only have the node knock on doors inside.
    """
    believed: dict[TcpAddress, None] = {}
    for raw in addresses:
        address = read_address(raw, peer)
        if address is not None:
            how_far = reach(address.host)
            if how_far is not None and how_far >= speaker:
                believed[address] = None
        if len(believed) == MAX_ADDRESSES:
            break
    return DhtContact(peer, tuple(believed))


def merged(one: DhtContact, other: DhtContact) -> DhtContact:
    """The addresses of both, those of the first first."""
    return DhtContact(one.peer, tuple(dict.fromkeys((*one.addresses, *other.addresses)))[:MAX_ADDRESSES])


def told(addresses: Iterable[TcpAddress], listener: AddressScope) -> list[bytes]:
    """The addresses that mean something to a listener who is so far away."""
    found = []
    for address in addresses:
        how_far = reach(address.host)
        if how_far is not None and how_far >= listener:
            found.append(address.bytes)
    return found


# ---------------------------------------------------------------- memory


class KademliaTable:
    """Servers that have answered, up to K for each number of leading bits that they share with the node's own place.

    A full bucket takes no more: a server that has been there for long is likely to stay.
    """

    def __init__(self, own: bytes) -> None:
        self._own = place(own)
        self._buckets: dict[int, dict[bytes, DhtContact]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def _bucket(self, peer: bytes) -> dict[bytes, DhtContact]:
        return self._buckets.setdefault((self._own ^ place(peer)).bit_length(), {})

    def add(self, contact: DhtContact) -> None:
        """A server has answered at these addresses."""
        bucket = self._bucket(contact.peer)
        if contact.peer in bucket or len(bucket) < K:
            bucket[contact.peer] = contact

    def remove(self, peer: bytes) -> None:
        """It did not answer."""
        self._bucket(peer).pop(peer, None)

    def contacts(self) -> list[DhtContact]:
        """All of them."""
        return [contact for bucket in self._buckets.values() for contact in bucket.values()]


def nearest(contacts: Iterable[DhtContact], key: bytes, count: int = K) -> list[DhtContact]:
    """Those that are nearest to a key, the nearest first."""
    target = place(key)
    return sorted(contacts, key=lambda contact: place(contact.peer) ^ target)[:count]


@dataclass(frozen=True)
class DhtLimits:
    """What is kept for others, and how long (seconds)."""

    records: int = 10_000
    of_a_key: int = MAX_PROVIDERS
    of_a_peer: int = 1_000
    age: float = 24 * 3600.0  # go forgets addresses of providers after a day, and the record after two


class ProviderRecords:
    """Which peers provide which keys, as these peers told. When there is no room, the record renewed longest ago
    goes."""

    def __init__(self, limits: DhtLimits) -> None:
        self._limits = limits
        self._records: dict[tuple[bytes, bytes], tuple[DhtContact, float]] = {}  # (key, peer); the oldest first
        self._by_key: dict[bytes, dict[bytes, None]] = {}
        self._by_peer: dict[bytes, dict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def add(self, key: bytes, contact: DhtContact, now: float) -> None:
        """A peer provides a key; again, if it does already."""
        self._remove(key, contact.peer)
        limits = self._limits
        peers, keys = self._by_key.get(key, {}), self._by_peer.get(contact.peer, {})
        if len(peers) >= limits.of_a_key:
            self._remove(key, next(iter(peers)))
        if len(keys) >= limits.of_a_peer:
            self._remove(next(iter(keys)), contact.peer)
        if len(self._records) >= limits.records:
            self._remove(*next(iter(self._records)))
        self._records[key, contact.peer] = (contact, now)
        self._by_key.setdefault(key, {})[contact.peer] = None
        self._by_peer.setdefault(contact.peer, {})[key] = None

    def of(self, key: bytes, now: float) -> list[DhtContact]:
        """Who provides a key."""
        self._forget(now)
        return [self._records[key, peer][0] for peer in self._by_key.get(key, ())]

    def _forget(self, now: float) -> None:
        while self._records:
            entry, (_, since) = next(iter(self._records.items()))
            if now - since < self._limits.age:
                return
            self._remove(*entry)

    def _remove(self, key: bytes, peer: bytes) -> None:
        if self._records.pop((key, peer), None) is None:
            return
        for index, one, other in ((self._by_key, key, peer), (self._by_peer, peer, key)):
            del index[one][other]
            if not index[one]:
                del index[one]


# ---------------------------------------------------------------- messages


def question(kind: Message.MessageType, key: bytes) -> Message:
    """A FIND_NODE or GET_PROVIDERS."""
    return Message(type=kind, key=key)


def announcement(key: bytes, own: bytes, addresses: Iterable[bytes]) -> Message:
    """An ADD_PROVIDER of our own."""
    provider = Message.Peer(id=own, addrs=addresses)
    return Message(type=Message.ADD_PROVIDER, key=key, providerPeers=[provider])


def read_peers(peers: Sequence[Message.Peer], most: int, speaker: AddressScope) -> list[DhtContact]:
    """The peers in an answer, up to so many, with those of their addresses that may be believed."""
    return [heard(each.id, each.addrs, speaker) for each in peers[:most] if is_peer_id(each.id)]


def write_peers(contacts: Iterable[DhtContact], listener: AddressScope) -> list[Message.Peer]:
    """Peers for an answer, without those of which there is nothing to tell."""
    written = []
    for contact in contacts:
        addresses = told(contact.addresses, listener)
        if addresses:
            written.append(Message.Peer(id=contact.peer, addrs=addresses))
    return written


class DhtServer:
    """Answers to others: servers and providers that the node knows. The node neither keeps nor gives values."""

    def __init__(self, own: bytes, limits: DhtLimits) -> None:
        self._own = own
        self.providers = ProviderRecords(limits)
        self.provided: set[bytes] = set()
        """Keys that we provide ourselves."""

    def answer(
        self,
        asked: Message,
        asker: DhtContact,
        away: AddressScope,
        known: Iterable[DhtContact],
        ours: DhtContact,
        now: float,
    ) -> Message | None:
        """The answer; an empty message where there is none, None where the stream is to be reset.

        `asker`: who asks, `away` how far; `known`: the servers to choose from; `ours`: where we are.
        """
        kind, key = asked.type, asked.key
        if kind == Message.PING:
            return Message(type=kind)
        if not 0 < len(key) <= MAX_KEY:
            return None
        if kind == Message.ADD_PROVIDER:
            for each in asked.providerPeers[:K]:
                # a peer may say where it is itself, and not where another is
                if each.id == asker.peer and (contact := heard(each.id, each.addrs, away)).addresses:
                    self.providers.add(key, contact, now)
            return Message()
        if kind not in (Message.FIND_NODE, Message.GET_PROVIDERS, Message.GET_VALUE):
            return None
        near = nearest((each for each in known if each.peer != asker.peer), key)
        answer = Message(type=kind, key=key, closerPeers=write_peers(near, away))
        if kind == Message.GET_PROVIDERS:
            provided = self.providers.of(key, now) + ([ours] if key in self.provided else [])
            answer.providerPeers.extend(write_peers(provided[-MAX_PROVIDERS:], away))
        elif kind == Message.FIND_NODE and key == self._own:
            answer.closerPeers.extend(write_peers([ours], away))
        return answer
