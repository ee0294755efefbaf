"""The choice of the connection that gives up its slot to a new one."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from libp2p.io.abc import ReadWriteCloser

from kiln.bridge.libp2p.slots import InboundSlots, PeerValue

LIMIT = 40


class Connection(ReadWriteCloser):
    """A connection that is never used."""

    async def read(self, n: int | None = None) -> bytes:
        return b""

    async def write(self, data: bytes) -> None: ...

    async def close(self) -> None: ...

    def get_remote_address(self) -> tuple[str, int] | None:
        return None


class Crowd:
    """Connections and the values of their peers."""

    def __init__(self) -> None:
        self.values: dict[bytes, PeerValue] = {}
        self.slots = InboundSlots(LIMIT, lambda peer: self.values[peer])
        self.addresses: dict[ReadWriteCloser, str] = {}

    def come(self, address: str, value: PeerValue | None = None) -> str | None:
        """Connect, and return the address of the connection that was closed for it."""
        stream = Connection()
        self.addresses[stream] = address
        closed = self.slots.take(stream, address)
        if value is not None:
            peer = b"%d" % len(self.addresses)
            self.values[peer] = value
            self.slots.identify(stream, peer)
        if closed is None:
            return None
        return self.addresses.pop(closed.stream)

    def fill(self, addresses: Iterable[str], value: PeerValue | None = None) -> None:
        for address in addresses:
            assert self.come(address, value) is None


@pytest.mark.parametrize("identified", [True, False], ids=["peers", "handshakes"])
def test_silent_connections_of_one_address_keep_nobody_out_and_only_they_go(identified: bool) -> None:
    crowd = Crowd()
    crowd.fill([f"8.{number}.0.1" for number in range(10)], PeerValue.UNKNOWN)
    crowd.fill(["9.9.9.9"] * (LIMIT - 10), PeerValue.UNKNOWN if identified else None)
    for number in range(10):
        assert crowd.come(f"11.{number}.0.1") == "9.9.9.9"
    for _ in range(100):
        assert crowd.come("9.9.9.9") == "9.9.9.9"
    assert len(crowd.slots) == LIMIT
    assert crowd.slots.counters == {"connections_evicted": 110, "connections_refused": 0, "handshakes_failed": 0}


def test_many_addresses_of_one_network_are_one_crowd() -> None:
    crowd = Crowd()
    crowd.fill(["8.8.8.8"] * 5, PeerValue.UNKNOWN)
    crowd.fill([f"2001:db8:{number:x}::1" for number in range(LIMIT - 5)], PeerValue.UNKNOWN)
    for number in range(10):
        assert str(crowd.come(f"11.{number}.0.1")).startswith("2001:db8:")


def test_who_brings_messages_stays_and_a_bootstrap_peer_always() -> None:
    crowd = Crowd()
    crowd.fill([f"8.{number}.0.1" for number in range(LIMIT - 2)], PeerValue.USEFUL)
    crowd.fill(["9.9.9.9"], PeerValue.RESERVED)
    crowd.fill(["7.7.7.7"], PeerValue.UNKNOWN)
    assert crowd.come("11.1.0.1", PeerValue.USEFUL) == "7.7.7.7"
    assert crowd.come("11.2.0.1") == "11.2.0.1"  # nobody has to go for it
    assert crowd.slots.counters == {"connections_evicted": 1, "connections_refused": 1, "handshakes_failed": 0}


def test_an_attacker_does_not_keep_its_slots_by_bringing_messages() -> None:
    crowd = Crowd()
    crowd.fill(["9.9.9.9"] * LIMIT, PeerValue.USEFUL)
    for number in range(10):
        assert crowd.come(f"11.{number}.0.1", PeerValue.USEFUL) == "9.9.9.9"


def test_useful_peers_of_a_private_network_may_have_all_slots() -> None:
    crowd = Crowd()
    crowd.fill(["::ffff:10.0.0.1"] * (LIMIT - 1), PeerValue.USEFUL)
    crowd.fill(["10.0.0.2"])
    assert crowd.come("10.0.0.3", PeerValue.USEFUL) == "10.0.0.2"
    assert crowd.come("8.8.8.8") == "8.8.8.8"


def test_a_slot_is_free_again_when_its_connection_ends() -> None:
    crowd = Crowd()
    crowd.fill(["9.9.9.9"] * LIMIT)
    crowd.slots.release(next(iter(crowd.addresses)))
    assert crowd.come("8.8.8.8") is None


def test_a_node_without_slots_refuses_everybody() -> None:
    slots = InboundSlots(0)
    stream = Connection()
    refused = slots.take(stream, "not an address")
    assert refused is not None
    assert refused.stream is stream
