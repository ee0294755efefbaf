"""Patches of py-libp2p 0.8.1, for faults that neither a subclass nor an option can correct. The version is pinned.

| patch | fault of 0.8.1 | can go when py-libp2p |
| --- | --- | --- |
| RSA keys (`_read_rsa_key`) | a peer's key can cost minutes of CPU | tries only the loader of public keys |
| ECDSA keys (`_EcdsaPublicKey`) | refuses the handshake of a peer with such a key | reads ECDSA keys |
| identify (`_update_from_identify`) | drops the agent version; lists have no limit | keeps the version, limits lists |
| `identify.AGENT_VERSION` | a constant of the module | takes it as an option of the host |
| `keep_own_key` | forgets the node's own key among more than 1,000 peers | never prunes it |
| `change_class` of streams, sessions and the swarm | constructs its own classes | takes factories |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeVar, cast

from Crypto.PublicKey.RSA import construct as rsa_from_numbers
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from libp2p.abc import IPeerStore
from libp2p.crypto.keys import KeyType, PublicKey
from libp2p.crypto.rsa import RSAPublicKey
from libp2p.crypto.serialization import key_type_to_public_key_deserializer
from libp2p.host import basic_host
from libp2p.host.basic_host import BasicHost
from libp2p.identity.identify import identify
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.identity.identify_push import identify_push
from libp2p.identity.update import update_peerstore_from_identify
from libp2p.peer.id import ID
from libp2p.peer.peerdata import PeerData
from libp2p.peer.peerstore import PeerStore

from kiln.schemas.reject import Rejected
from kiln.schemas.wire.identity import verify_signature
from kiln.schemas.wire.public_key import fits_signature_length, read_public_key, read_rsa

AGENT_KEY: Final = "kiln_agent"  # peerstore key of a peer's agent version

# the type in py-libp2p allows only the key types that py-libp2p supports
_DESERIALIZERS: Final = cast(dict[int, Callable[[bytes], PublicKey]], key_type_to_public_key_deserializer)
_AGENT_CHARS: Final = 128
_IDENTIFY_ITEMS: Final = 256  # maximum number of addresses, and also of protocols
_IDENTIFY_ITEM: Final = 512  # maximum bytes of an address or a protocol

_Ours = TypeVar("_Ours")


def patch_process(agent: str) -> None:
    """Apply the patches that affect all hosts in the process: keys of peers, identify, and the agent version."""
    identify.AGENT_VERSION = agent
    _DESERIALIZERS[KeyType.RSA.value] = _read_rsa_key
    _DESERIALIZERS[KeyType.ECDSA.value] = _EcdsaPublicKey.from_bytes
    setattr(RSAPublicKey, RSAPublicKey.from_bytes.__name__, staticmethod(_read_rsa_key))
    for module in (basic_host, identify_push):
        setattr(module, update_peerstore_from_identify.__name__, _update_from_identify)


def keep_own_key(host: BasicHost) -> None:
    """Keep py-libp2p from deleting the host's own key from its peerstore. Without the key, identify stops the host."""
    own_id, store = host.get_id(), host.get_peerstore()
    assert isinstance(store, PeerStore)
    store.peer_data_map = _PeerData(own_id, store.peer_data_map)


def change_class(stock: object, ours: type[_Ours]) -> _Ours:
    """Change an object that py-libp2p has constructed into one of a subclass, which may only override methods."""
    assert issubclass(ours, type(stock))
    stock.__class__ = ours
    assert isinstance(stock, ours)
    return stock


def _read_rsa_key(data: bytes) -> RSAPublicKey:
    """Read the RSA public key of a peer from a noise handshake, a peer id or an envelope.

    py-libp2p tries loaders for every kind of key. Those for private keys and Diffie-Hellman groups check primes, which
    can take minutes for one key.

    Raises:
        ValueError: The bytes are not an RSA public key.
    """
    numbers = read_rsa(data)
    if isinstance(numbers, Rejected):
        raise ValueError(numbers.detail)
    return RSAPublicKey(rsa_from_numbers((numbers.n, numbers.e)))


class _EcdsaPublicKey(PublicKey):
    """An ECDSA public key of a peer. py-libp2p cannot read such keys, and refuses the handshakes of these peers."""

    def __init__(self, key: EllipticCurvePublicKey, encoded: bytes) -> None:
        self._key = key
        self._encoded = encoded

    @classmethod
    def from_bytes(cls, data: bytes) -> _EcdsaPublicKey:
        key = read_public_key(KeyType.ECDSA.value, data)
        if not isinstance(key, EllipticCurvePublicKey):
            raise ValueError(key.detail if isinstance(key, Rejected) else "not an ECDSA key")
        return cls(key, data)

    def to_bytes(self) -> bytes:
        return self._encoded

    def get_type(self) -> KeyType:
        return KeyType.ECDSA

    def verify(self, data: bytes, signature: bytes) -> bool:
        return fits_signature_length(self._key, signature) and verify_signature(self._key, signature, data)


async def _update_from_identify(peerstore: IPeerStore, peer_id: ID, message: Identify) -> None:
    """Store the identify message of a peer in the peerstore.

    py-libp2p drops the agent version, and accepts any number of addresses and protocols of any length. Here the agent
    version is stored, and addresses and protocols are limited. The key and the signed peer record are ignored: the
    noise handshake has proved the key, and `listen_addrs` has the addresses.
    """
    message.ClearField("public_key")
    message.ClearField("signedPeerRecord")
    addresses = [address for address in message.listen_addrs[:_IDENTIFY_ITEMS] if len(address) <= _IDENTIFY_ITEM]
    protocols = [protocol for protocol in message.protocols[:_IDENTIFY_ITEMS] if len(protocol) <= _IDENTIFY_ITEM]
    message.ClearField("listen_addrs")
    message.ClearField("protocols")
    message.listen_addrs.extend(addresses)
    message.protocols.extend(protocols)
    await update_peerstore_from_identify(peerstore, peer_id, message)
    peerstore.put(peer_id, AGENT_KEY, message.agent_version[:_AGENT_CHARS])


class _PeerData(dict[ID, PeerData]):
    """The peerstore's data by peer, from which the data of the host itself cannot be deleted."""

    def __init__(self, own: ID, data: Mapping[ID, PeerData]) -> None:
        super().__init__(data)
        self._own = own

    def __delitem__(self, peer: ID) -> None:
        if peer != self._own:
            super().__delitem__(peer)
