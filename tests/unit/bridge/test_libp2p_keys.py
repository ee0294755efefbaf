"""Keys of strangers within py-libp2p: read by Kiln's rules, whatever protocol they come in."""

from __future__ import annotations

import hashlib

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from libp2p.crypto.serialization import deserialize_public_key
from libp2p.peer.envelope import pub_key_from_protobuf
from libp2p.peer.id import ID
from libp2p.peer.pb.crypto_pb2 import PublicKey as Libp2pKey
from libp2p.security.noise.messages import NoiseHandshakePayload
from libp2p.security.noise.pb.noise_pb2 import NoiseHandshakePayload as HandshakeBytes
from multiaddr import Multiaddr

from kiln.bridge.libp2p.slots import InboundSlots
from kiln.bridge.libp2p.streams import make_host
from kiln.schemas.proto.gossipsub.rpc_pb2 import PublicKey
from kit.chance import new_key
from kit.cpu_time import measure_cpu
from kit.key_bytes import KEY_ATTACKS, public_key

MOST_STEPS = 1e6  # of CPU; what is measured is a hundred times less
PRIVATE = rsa.generate_private_key(65537, 2048)


@pytest.fixture(scope="module", autouse=True)
def _host() -> None:
    make_host(new_key(), "kiln/test", InboundSlots(1))


def strange_keys() -> dict[str, bytes]:
    keys = {name: data for name, kind, data in KEY_ATTACKS if kind == PublicKey.RSA}
    # a loader of private keys would prove the primes
    keys["a private key"] = PRIVATE.private_bytes(Encoding.DER, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    return keys


@pytest.mark.parametrize(("name", "data"), strange_keys().items(), ids=strange_keys().keys())
def test_a_key_that_is_not_rsa_is_refused_and_costs_nothing(name: str, data: bytes) -> None:
    encoded = public_key(PublicKey.RSA, data)
    with measure_cpu() as cost:
        with pytest.raises(ValueError, match=r"RSA|SubjectPublicKeyInfo"):
            deserialize_public_key(encoded)
        with pytest.raises(ValueError, match=r"RSA|SubjectPublicKeyInfo"):
            pub_key_from_protobuf(Libp2pKey.FromString(encoded))
        with pytest.raises(ValueError, match=r"RSA|SubjectPublicKeyInfo"):
            NoiseHandshakePayload.deserialize(
                HandshakeBytes(identity_key=encoded, identity_sig=bytes(256)).SerializeToString()
            )
    assert cost.steps < MOST_STEPS


def test_an_rsa_peer_is_known_by_the_same_id() -> None:
    data = PRIVATE.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    encoded = public_key(PublicKey.RSA, data)
    peer = ID.from_pubkey(deserialize_public_key(encoded))
    assert peer.to_bytes() == b"\x12\x20" + hashlib.sha256(encoded).digest()


def test_a_host_keeps_its_own_key_however_many_peers_come() -> None:
    """Without it, the next identify ends the host, and with it the bridge."""
    host = make_host(new_key(), "kiln/test", InboundSlots(1))
    key, store = host.get_public_key(), host.get_peerstore()
    for number in range(1_200):
        store.add_addrs(ID(b"peer %d" % number), [Multiaddr("/ip4/127.0.0.1/tcp/1")], 60)
    assert host.get_public_key() == key
    assert len(store.peer_ids()) <= 1_001
