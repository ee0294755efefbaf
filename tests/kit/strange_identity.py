"""A libp2p host that sends any bytes as its public key in noise handshakes."""

from __future__ import annotations

from libp2p.crypto.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from libp2p.crypto.keys import PublicKey
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.security.noise.transport import PROTOCOL_ID
from libp2p.security.noise.transport import Transport as NoiseTransport

from kiln.bridge.libp2p.streams import get_swarm


class _ShownKey(Ed25519PublicKey):
    shown = b""

    def serialize(self) -> bytes:
        return self.shown


class _DisguisedKey(Ed25519PrivateKey):
    shown = b""

    def get_public_key(self) -> PublicKey:
        key = _ShownKey.from_bytes(super().get_public_key().to_bytes())
        assert isinstance(key, _ShownKey)
        key.shown = self.shown
        return key


def disguise(host: BasicHost, shown: bytes) -> None:
    """Make a host send these bytes as its public key in handshakes. They need not be a PublicKey protobuf."""
    noise = get_swarm(host).upgrader.security_multistream.transports[TProtocol(PROTOCOL_ID)]
    assert isinstance(noise, NoiseTransport)
    assert isinstance(noise.libp2p_privkey, Ed25519PrivateKey)
    key = _DisguisedKey(noise.libp2p_privkey.impl)
    key.shown = shown
    noise.libp2p_privkey = key
