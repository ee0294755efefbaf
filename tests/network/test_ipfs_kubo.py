"""A real Kubo on loopback, through its RPC. Needs `ipfs` on the PATH, or named by KILN_TEST_KUBO; skips where there is
none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kiln.bridge.ipfs import BlockStoreUnavailableError, BlockUnavailableError
from kiln.bridge.ipfs.folder import FolderBlockStore
from kiln.bridge.ipfs.node import KuboBlockStore
from kiln.schemas.wire.cid import cid_text, compute_cid
from kit.awaiting import wait_until
from kit.batch_blocks import write_blocks
from kit.kubo_daemon import Daemon, program

pytestmark = [pytest.mark.network, pytest.mark.timeout(300)]

STREAM = "kjzl6kcym7w8y7i5ugaq9a3vlm771v8s5m7f1zcsvrkzgjbwe2gh1vh6ab2m2ts"
ABSENT = cid_text(compute_cid(b"nobody has this"))
(BATCH,) = write_blocks({STREAM: [compute_cid(b"a tip that is nowhere"), compute_cid(b"another")]})


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(program(), tmp_path / "kubo")
    yield daemon
    daemon.stop()


def test_what_kubo_says(daemon: Daemon) -> None:
    kubo = daemon.start()
    assert kubo.identity().name.startswith("kubo")
    kubo.put(BATCH.cid, BATCH.data)
    kubo.put(BATCH.cid, BATCH.data)
    assert kubo.get(BATCH.cid, 5.0) == BATCH.data
    kubo.pin(BATCH.cid)  # without its links, which nobody has
    kubo.pin(BATCH.cid)
    listed = httpx.post(f"{daemon.url}/api/v0/pin/ls?arg={BATCH.cid}", timeout=60).json()
    assert [pin["Type"] for pin in listed["Keys"].values()] == ["direct"]
    kubo.unpin(BATCH.cid)
    kubo.unpin(BATCH.cid)
    for codec in (0x55, 0x85):
        cid = cid_text(compute_cid(b"of another codec", codec))
        kubo.put(cid, b"of another codec")
        assert kubo.get(cid, 5.0) == b"of another codec"
    with pytest.raises(BlockUnavailableError):
        kubo.get(ABSENT, 2.0)
    daemon.stop()
    with pytest.raises(BlockStoreUnavailableError):
        kubo.get(BATCH.cid, 2.0)
    kubo.close()


def test_a_kubo_that_routes_tells_others_who_has_a_block(daemon: Daemon, tmp_path: Path) -> None:
    other = Daemon(program(), tmp_path / "other")
    daemon.route()
    other.route()
    node = None
    try:
        kubo = daemon.start()
        other.start().close()
        other.connect(daemon.address)
        node = KuboBlockStore(kubo, FolderBlockStore(tmp_path / "marks"), every=0.5)
        wait_until(lambda: "not checked yet" not in node.describe(), node.describe)
        assert "without content routing" not in node.describe()
        node.put(BATCH.cid, BATCH.data)
        wait_until(lambda: node.status().provided == 1, lambda: str(node.status()))
        asked = {"arg": BATCH.cid, "num-providers": "1"}
        found = httpx.post(f"{other.url}/api/v0/routing/findprovs", params=asked, timeout=60).text
        assert kubo.identity().peer in found
    finally:
        if node is not None:
            node.close()
        other.stop()
