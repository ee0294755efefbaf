"""The bridge as a process, and a Kubo that is its gossip peer alone: it fetches the bridge's blocks over bitswap."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kiln.bridge.ipfs.folder import FolderBlockStore
from kit.bitswap_sides import make_blocks
from kit.bridge_alone import BridgeAlone
from kit.foreign_peer import NewPeer

pytest_plugins = ["kit.foreign_fixtures"]
pytestmark = [pytest.mark.network, pytest.mark.timeout(180)]

BLOCKS = make_blocks(3, "of the bridge")


@pytest.fixture
def bridge(tmp_path: Path) -> Iterator[BridgeAlone]:
    folder = FolderBlockStore(tmp_path / "state" / "blocks")
    for block in BLOCKS:
        folder.put(*block)
    alone = BridgeAlone(tmp_path / "state")
    yield alone
    alone.kill()


def test_a_gossip_peer_that_speaks_bitswap_fetches_the_blocks_of_the_bridge(
    bridge: BridgeAlone, go_peer: NewPeer, js_peer: NewPeer
) -> None:
    told = bridge.until(lambda told: bool(told.addresses), "an address")
    assert told.ipfs.startswith("the bridge itself: connected to 0 peers that speak bitswap")
    assert told.publisher.state == "off: set publish.enabled = true to announce batches"
    js_peer().connect(told.addresses[0])  # which speaks gossipsub alone
    bridge.until(lambda told: len(told.peers) == 1, "the peer without bitswap")
    kubo = go_peer()
    kubo.connect(told.addresses[0])
    told = bridge.until(
        lambda told: (told.ipfs_node.connections, told.ipfs_node.gossip_peers) == (1, 1), "the peer with bitswap"
    )
    assert len(told.peers) == 2
    for block in BLOCKS:
        assert kubo.command("fetch", cid=block.cid)["size"] == len(block.data)
    told = bridge.until(lambda told: told.ipfs_node.blocks_sent == len(BLOCKS), "the count of blocks")
    assert told.ipfs_node.bytes_sent == sum(len(block.data) for block in BLOCKS)
    kubo.stop()
    bridge.until(lambda told: (told.ipfs_node.connections, told.ipfs_node.gossip_peers) == (0, 0), "its end")
