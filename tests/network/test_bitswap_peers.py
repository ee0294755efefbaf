"""A bridge with a Helia of its own, and a Kubo that is its gossip peer alone: Helia is connected to that Kubo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.bridge_alone import BridgeAlone
from kit.foreign_peer import BUILT, NewPeer

pytest_plugins = ["kit.foreign_fixtures"]
pytestmark = [pytest.mark.network, pytest.mark.timeout(180)]


@pytest.fixture
def bridge(tmp_path: Path) -> Iterator[BridgeAlone]:
    (BUILT / "helia").mkdir(parents=True, exist_ok=True)  # the first start installs the packages
    (tmp_path / "state" / "helia").mkdir(parents=True)
    (tmp_path / "state" / "helia" / "app").symlink_to(BUILT / "helia")
    alone = BridgeAlone(tmp_path / "state", KILN_IPFS__API="helia", KILN_IPFS__LISTEN="/ip4/127.0.0.1/tcp/0")
    yield alone
    alone.kill()


def test_helia_is_connected_to_a_gossip_peer_that_speaks_bitswap_for_as_long_as_it_is_one(
    bridge: BridgeAlone, go_peer: NewPeer, js_peer: NewPeer
) -> None:
    told = bridge.until(lambda told: " at /ip4/127" in told.ipfs, "Helia")
    assert any("batches are held back: no node could fetch" in error for error in told.errors)
    js_peer().connect(told.addresses[0])  # which speaks gossipsub alone
    told = bridge.until(lambda told: len(told.peers) == 1, "the peer without bitswap")
    kubo = go_peer()
    kubo.connect(told.addresses[0])
    told = bridge.until(lambda told: told.ipfs_node.gossip_connected == 1, "the peer with bitswap")
    assert len(told.peers) == 2
    assert (told.ipfs_node.gossip_peers, told.ipfs_node.connections) == (1, 1)
    assert "1 of 1 gossip peers connected" in told.ipfs
    assert not any("held back" in error for error in told.errors)
    kubo.stop()
    told = bridge.until(lambda told: told.ipfs_node.connections == 0, "its end")
    assert told.ipfs_node.gossip_peers == 0
    bridge.until(lambda told: any("held back" in error for error in told.errors), "nobody to fetch")
