"""A real Kubo on loopback, through its RPC, and a Helia beside it. Needs `ipfs` on the PATH, or named by
KILN_TEST_KUBO; skips where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from conftest import free_ports
from kit.awaiting import wait_until
from kit.foreign_peer import BUILT

from bridge.ipfs import BlocksAwayError, BlockUnavailableError
from bridge.ipfs.helia import Helia
from bridge.ipfs.kubo import Kubo
from bridge.ipfs.node import NodeBlocks
from schemas.batch import write_blocks
from schemas.cid import block_cid, cid_text

pytestmark = [pytest.mark.network, pytest.mark.timeout(300)]

STREAM = "kjzl6kcym7w8y7i5ugaq9a3vlm771v8s5m7f1zcsvrkzgjbwe2gh1vh6ab2m2ts"
ABSENT = cid_text(block_cid(b"nobody has this"))
(BATCH,) = write_blocks({STREAM: [block_cid(b"a tip that is nowhere"), block_cid(b"another")]})
PATIENCE = 60.0  # s


class Daemon:
    """`ipfs daemon` with a repository of its own; nobody to bootstrap from, no routing, no mDNS."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self._environment = {**os.environ, "IPFS_PATH": str(folder), "IPFS_TELEMETRY": "off"}
        rpc, gateway, swarm = free_ports(3)
        self.url = f"http://127.0.0.1:{rpc}"
        self.swarm = f"/ip4/127.0.0.1/tcp/{swarm}"
        self._ipfs("init", "--profile=test")
        for key, value in {
            "Bootstrap": "[]",
            "AutoConf.Enabled": "false",
            "Discovery.MDNS.Enabled": "false",
            "Routing": '{"Type": "none"}',
            "DNS.Resolvers": "{}",
            "Ipns.DelegatedPublishers": "[]",
            "Addresses.API": f'"/ip4/127.0.0.1/tcp/{rpc}"',
            "Addresses.Gateway": f'"/ip4/127.0.0.1/tcp/{gateway}"',
            "Addresses.Swarm": f'["{self.swarm}"]',
        }.items():
            self._ipfs("config", "--json", key, value)
        self._child: subprocess.Popen[bytes] | None = None

    def _ipfs(self, *arguments: str) -> None:
        done = subprocess.run(
            [self._program, *arguments], env=self._environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, (arguments, done.stderr)

    def start(self) -> Kubo:
        with (self._folder / "daemon.log").open("ab") as log:
            self._child = subprocess.Popen([self._program, "daemon"], env=self._environment, stdout=log, stderr=log)
        kubo = Kubo(self.url)

        def answers() -> bool:
            try:
                kubo.identity(1.0)
            except BlocksAwayError:
                return False
            return True

        wait_until(answers, lambda: f"Kubo answers\n{(self._folder / 'daemon.log').read_text()}")
        return kubo

    def stop(self) -> None:
        if self._child is not None:
            self._child.terminate()
            self._child.wait(PATIENCE)
            self._child = None


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    program = os.environ.get("KILN_TEST_KUBO") or shutil.which("ipfs")
    if program is None:
        pytest.skip("no `ipfs` program (Kubo) on the PATH")
    daemon = Daemon(program, tmp_path / "kubo")
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
    listed = httpx.post(f"{daemon.url}/api/v0/pin/ls?arg={BATCH.cid}", timeout=10).json()
    assert [pin["Type"] for pin in listed["Keys"].values()] == ["direct"]
    kubo.unpin(BATCH.cid)
    kubo.unpin(BATCH.cid)
    for codec in (0x55, 0x85):
        cid = cid_text(block_cid(b"of another codec", codec))
        kubo.put(cid, b"of another codec")
        assert kubo.get(cid, 5.0) == b"of another codec"
    began = time.monotonic()
    with pytest.raises(BlockUnavailableError):
        kubo.get(ABSENT, 2.0)
    assert time.monotonic() - began < 10
    daemon.stop()
    with pytest.raises(BlocksAwayError):
        kubo.get(BATCH.cid, 2.0)
    kubo.close()


def test_blocks_go_between_kubo_and_helia(daemon: Daemon, tmp_path: Path) -> None:
    kubo = daemon.start()
    kubo.put(BATCH.cid, BATCH.data)
    theirs = cid_text(block_cid(b"of Helia", 0x55))
    address = f"{daemon.swarm}/p2p/{kubo.identity().peer}"
    helia = Helia(BUILT / "helia", tmp_path / "helia", tmp_path / "helia.log", "/ip4/127.0.0.1/tcp/0")
    node = NodeBlocks(Kubo("http://127.0.0.1:0"), (address,), helia, every=0.5)
    try:
        assert node.wait_for_a_look(120), node.about()
        assert "1 of 1 peers connected" in node.about()
        assert node.get(BATCH.cid, 20.0) == BATCH.data
        node.put(theirs, b"of Helia")
        assert kubo.get(theirs, 20.0) == b"of Helia"
    finally:
        node.close()
        kubo.close()
