"""The libp2p Kademlia DHT without I/O: keys, addresses, the nearest servers, provider records, answers.

Source: libp2p specs, kad-dht/README.md. This module uses py-libp2p's messages, but not its KadDHT (0.8.1), which has
these faults:

* A node that announces a key finds only itself as a provider, because its own record ends the lookup.
* It dials every address that it receives, including DNS names.
* It queries any connected peer, even one that is not a DHT server.
* It ignores the protocol prefix that it is given.
* It stores up to 50,000 values of 1 MiB for others, and keys and counters without a limit.
* It answers ADD_PROVIDER. go-libp2p expects no answer, and takes it for the answer to its next query on the stream.

Times are in seconds of the caller's clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Final, NamedTuple

from libp2p.kad_dht.pb.kademlia_pb2 import Message
from multiformats import multihash

K: Final = 20  # servers that store a record, and also peers in an answer
MAX_KEY: Final = 128  # bytes; go-libp2p-kad-dht accepts no longer keys
MAX_MESSAGE: Final = 256 * 1024
MAX_ADDRESSES: Final = 8  # of a peer
MAX_PROVIDERS: Final = 100  # in an answer, sent or received

_SHA2_256: Final = b"\x12\x20"
_IP4, _IP6, _TCP, _P2P = b"\x04", b"\x29", b"\x06", b"\xa5\x03"
_NAT64: Final = IPv6Network("64:ff9b::/96")
_MAX_PEER_ID: Final = 42  # bytes; peer ids of longer keys are hashes


def topic_key(topic: str) -> bytes:
    """Return the DHT key of a topic: the sha2-256 multihash of its name in UTF-8 (CIP-120, Peer discovery).

    The routing discovery of go-libp2p and js-libp2p uses the same key.
    """
    key: bytes = multihash.digest(topic.encode(), "sha2-256")
    return key


def key_position(key: bytes) -> int:
    """Return the position of a key or a peer id in the key space. The distance of two is the XOR of their positions."""
    return int.from_bytes(hashlib.sha256(key).digest(), "big")


def is_peer_id(raw: bytes) -> bool:
    """Return true if the bytes are a peer id: a sha2-256 multihash, or an identity multihash of the public key."""
    if raw[:2] == _SHA2_256:
        return len(raw) == 34
    return 2 < len(raw) <= _MAX_PEER_ID and raw[0] == 0 and raw[1] == len(raw) - 2


# ---------------------------------------------------------------- addresses


class AddressScope(IntEnum):
    """The nodes from which an address can be reached."""

    HOST = 0  # those on the same machine
    SITE = 1  # those in the same private network
    WORLD = 2  # all


def address_scope(host: str) -> AddressScope | None:
    """Return the scope of an IP address, or `None` if it should never be dialled."""
    ip: IPv4Address | IPv6Address = ip_address(host)
    if isinstance(ip, IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip.sixtofour is not None or ip.teredo is not None or ip in _NAT64:
            return None  # it embeds an IPv4 address, which may have any scope
    if ip.is_loopback:
        return AddressScope.HOST
    if ip.is_unspecified or ip.is_multicast or ip.is_reserved or ip.is_link_local:
        # connect() to an unspecified address reaches this machine; clouds serve secrets at link-local addresses
        return None
    return AddressScope.WORLD if ip.is_global else AddressScope.SITE


class TcpAddress(NamedTuple):
    """An IP address and a TCP port."""

    host: str
    port: int

    # without the multiaddr package, which is slow: one answer has up to 800 addresses
    @property
    def text(self) -> str:
        """The multiaddr as text."""
        return f"/{'ip6' if ':' in self.host else 'ip4'}/{self.host}/tcp/{self.port}"

    @property
    def bytes(self) -> bytes:
        """The multiaddr as bytes."""
        ip = ip_address(self.host)
        return (_IP6 if ip.version == 6 else _IP4) + ip.packed + _TCP + self.port.to_bytes(2, "big")


def read_address(raw: bytes, peer: bytes) -> TcpAddress | None:
    """Read a multiaddr of an IP address and a TCP port, with or without /p2p/ of the peer; `None` for any other."""
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
    """A peer, and the addresses that were reported for it."""

    peer: bytes
    addresses: tuple[TcpAddress, ...]


def trusted_contact(peer: bytes, addresses: Iterable[bytes], speaker_scope: AddressScope) -> DhtContact:
    """Return a peer with the reported addresses that the node may dial.

    An address on this machine counts only if it is reported from this machine, and a private address only if it is
    reported from a private network or this machine. Otherwise strangers could make the node scan its own network.

    Args:
        speaker_scope: Scope of the address of the node that reported the addresses.
    """
    believed: dict[TcpAddress, None] = {}
    for raw in addresses:
        address = read_address(raw, peer)
        if address is not None:
            scope = address_scope(address.host)
            if scope is not None and scope >= speaker_scope:
                believed[address] = None
        if len(believed) == MAX_ADDRESSES:
            break
    return DhtContact(peer, tuple(believed))


def merge_contacts(one: DhtContact, other: DhtContact) -> DhtContact:
    """Merge the addresses of two contacts of a peer, those of `one` first, up to MAX_ADDRESSES."""
    return DhtContact(one.peer, tuple(dict.fromkeys((*one.addresses, *other.addresses)))[:MAX_ADDRESSES])


def shareable_addresses(addresses: Iterable[TcpAddress], listener_scope: AddressScope) -> list[bytes]:
    """Return the multiaddrs of the addresses that a node with an address of `listener_scope` can reach."""
    shared = []
    for address in addresses:
        scope = address_scope(address.host)
        if scope is not None and scope >= listener_scope:
            shared.append(address.bytes)
    return shared


# ---------------------------------------------------------------- memory


class KademliaTable:
    """DHT servers that have answered, in buckets of up to K by their distance from the node.

    A full bucket takes no new server, because a server that has been up for long is likely to stay.
    """

    def __init__(self, own: bytes) -> None:
        self._own = key_position(own)
        self._buckets: dict[int, dict[bytes, DhtContact]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def _bucket(self, peer: bytes) -> dict[bytes, DhtContact]:
        return self._buckets.setdefault((self._own ^ key_position(peer)).bit_length(), {})

    def add(self, contact: DhtContact) -> None:
        """Add a server that has answered, if its bucket has room, or update its addresses."""
        bucket = self._bucket(contact.peer)
        if contact.peer in bucket or len(bucket) < K:
            bucket[contact.peer] = contact

    def remove(self, peer: bytes) -> None:
        """Remove a server that did not answer."""
        self._bucket(peer).pop(peer, None)

    def contacts(self) -> list[DhtContact]:
        """Return all servers."""
        return [contact for bucket in self._buckets.values() for contact in bucket.values()]


def nearest_contacts(contacts: Iterable[DhtContact], key: bytes) -> list[DhtContact]:
    """Return the K contacts nearest to a key, nearest first."""
    target = key_position(key)
    return sorted(contacts, key=lambda contact: key_position(contact.peer) ^ target)[:K]


@dataclass(frozen=True)
class DhtLimits:
    """Limits of the provider records that are stored for other peers."""

    records: int = 10_000
    of_a_key: int = MAX_PROVIDERS
    of_a_peer: int = 1_000
    age: float = 24 * 3600.0  # seconds; go-libp2p drops the addresses of providers after a day, too


class ProviderRecords:
    """Provider records of other peers: which peer provides which key. At a limit, the record renewed longest ago
    is dropped."""

    def __init__(self, limits: DhtLimits) -> None:
        self._limits = limits
        self._records: dict[tuple[bytes, bytes], tuple[DhtContact, float]] = {}  # (key, peer); the oldest first
        self._by_key: dict[bytes, dict[bytes, None]] = {}
        self._by_peer: dict[bytes, dict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def add(self, key: bytes, contact: DhtContact, now: float) -> None:
        """Record that a peer provides a key, or renew the record."""
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

    def get_providers(self, key: bytes, now: float) -> list[DhtContact]:
        """Return the providers of a key whose records have not expired."""
        self._expire(now)
        return [self._records[key, peer][0] for peer in self._by_key.get(key, ())]

    def _expire(self, now: float) -> None:
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


def build_announcement(key: bytes, own: bytes, addresses: Iterable[bytes]) -> Message:
    """Build an ADD_PROVIDER message, by which the node announces that it provides a key."""
    provider = Message.Peer(id=own, addrs=addresses)
    return Message(type=Message.ADD_PROVIDER, key=key, providerPeers=[provider])


def read_peers(peers: Sequence[Message.Peer], most: int, speaker_scope: AddressScope) -> list[DhtContact]:
    """Read at most `most` peers of an answer, with those of their addresses that the node may dial."""
    return [trusted_contact(peer.id, peer.addrs, speaker_scope) for peer in peers[:most] if is_peer_id(peer.id)]


def write_peers(contacts: Iterable[DhtContact], listener_scope: AddressScope) -> list[Message.Peer]:
    """Write peers for an answer, with the addresses that its receiver can reach. Peers without any are left out."""
    messages = []
    for contact in contacts:
        addresses = shareable_addresses(contact.addresses, listener_scope)
        if addresses:
            messages.append(Message.Peer(id=contact.peer, addrs=addresses))
    return messages


class DhtServer:
    """Answers DHT queries for servers and providers. It stores no values."""

    def __init__(self, own: bytes, limits: DhtLimits) -> None:
        self._own = own
        self.providers = ProviderRecords(limits)
        self.provided: set[bytes] = set()
        """Keys of the topics that the node itself provides."""
        self.blocks: Container[bytes] = ()
        """Multihashes of the blocks that the node itself provides."""

    def answer(
        self,
        query: Message,
        sender: DhtContact,
        sender_scope: AddressScope,
        known: Iterable[DhtContact],
        own_contact: DhtContact,
        now: float,
    ) -> Message | None:
        """Answer a query.

        Args:
            sender: The peer that sent the query.
            sender_scope: Scope of the sender's address.
            known: The servers from which the nearest are selected.
            own_contact: The node itself, with its addresses.

        Returns:
            The answer. It is empty if nothing is to be sent, and `None` if the query is invalid.
        """
        kind, key = query.type, query.key
        if kind == Message.PING:
            return Message(type=kind)
        if not 0 < len(key) <= MAX_KEY:
            return None
        if kind == Message.ADD_PROVIDER:
            for provider in query.providerPeers[:K]:
                # a peer may announce only its own addresses
                if (
                    provider.id == sender.peer
                    and (contact := trusted_contact(provider.id, provider.addrs, sender_scope)).addresses
                ):
                    self.providers.add(key, contact, now)
            return Message()
        if kind not in (Message.FIND_NODE, Message.GET_PROVIDERS, Message.GET_VALUE):
            return None
        closest = nearest_contacts((contact for contact in known if contact.peer != sender.peer), key)
        answer = Message(type=kind, key=key, closerPeers=write_peers(closest, sender_scope))
        if kind == Message.GET_PROVIDERS:
            is_own = key in self.provided or key in self.blocks
            provided = self.providers.get_providers(key, now) + ([own_contact] if is_own else [])
            answer.providerPeers.extend(write_peers(provided[-MAX_PROVIDERS:], sender_scope))
        elif kind == Message.FIND_NODE and key == self._own:
            answer.closerPeers.extend(write_peers([own_contact], sender_scope))
        return answer
