"""Bitswap with software of others: Kubo 0.43 and 0.22, and Helia, which are connected with the bridge's node alone.

Small by default; KILN_TEST_FULL=1 fetches 1,000 blocks of 100 B to 2 MiB each way.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest
import trio

from kiln.bridge.ipfs.kubo import KuboError
from kiln.bridge.libp2p.discovery import DiscoveryOptions
from kiln.deploy.demo.kubo_peer import FETCH_THREADS
from kiln.schemas.wire.cid import cid_text, compute_cid
from kit.awaiting import wait_until
from kit.bitswap_sides import COUNT, FULL, Block, Side, batches_of, make_blocks, open_side
from kit.foreign_peer import ForeignPeer, NewPeer
from kit.kubo_daemon import Daemon, program
from kit.node_town import Town, in_town

pytest_plugins = ["kit.foreign_fixtures"]
pytestmark = [pytest.mark.network, pytest.mark.timeout(1800 if FULL else 240)]

Fetch = Callable[[str, int], Awaitable[None]]
"""Has a foreign peer fetch a block of a size."""
_CODEC_NAMES = {0x55: "raw", 0x71: "dag-cbor", 0x85: "dag-jose"}


async def fetch_all(fetch: Fetch, side: Side, blocks: list[Block], at_once: int = 50) -> None:
    """Have a peer fetch blocks: a tenth one by one, the rest 50 at a time, a part of them before they exist.

    `at_once`: that the peer itself fetches at a time.
    """
    first, rest = blocks[: len(blocks) // 10], blocks[len(blocks) // 10 :]
    times = []
    for block in first:
        side.put(block)
        began = time.monotonic()
        await fetch(block.cid, len(block.data))
        times.append(time.monotonic() - began)
    for group in batches_of(rest, 50):
        early, late = group[::2], group[1::2]
        for block in early:
            side.put(block)
        async with trio.open_nursery() as nursery:
            for block in group:
                nursery.start_soon(fetch, block.cid, len(block.data))
            await side.until_wanted(late, at_once)
            for block in late:
                side.put(block)
    print(f"one by one p50 {sorted(times)[len(times) // 2] * 1e3:.0f} ms; {side.counts()}")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(program(), tmp_path / "kubo")
    yield daemon
    daemon.stop()


def kubo_fetch(daemon: Daemon, client: httpx.AsyncClient) -> Fetch:
    async def fetch(cid: str, size: int) -> None:
        answer = await client.post(f"{daemon.url}/api/v0/block/get", params={"arg": cid, "timeout": "60s"}, timeout=90)
        assert (answer.status_code, len(answer.content)) == (200, size), answer.text[:200]

    return fetch


async def connect_kubo(daemon: Daemon, address: str) -> None:
    await trio.to_thread.run_sync(daemon.connect, address)


def test_kubo_fetches_every_block_over_restarts_of_either_side(daemon: Daemon, tmp_path: Path) -> None:
    blocks = make_blocks(COUNT, "kubo")
    middle = len(blocks) // 2
    daemon.start().close()

    async def first(town: Town) -> None:
        side = await open_side(town, "one")
        await connect_kubo(daemon, side.address)
        async with httpx.AsyncClient() as client:
            await fetch_all(kubo_fetch(daemon, client), side, blocks[:middle])
        await trio.to_thread.run_sync(daemon.stop)

    async def second(town: Town) -> None:
        side = await open_side(town, "one")
        await connect_kubo(daemon, side.address)
        async with httpx.AsyncClient() as client:
            await fetch_all(kubo_fetch(daemon, client), side, blocks[middle:])

    in_town(tmp_path, first, 900)
    daemon.start().close()
    in_town(tmp_path, second, 900)


def test_the_node_fetches_from_kubo(daemon: Daemon, tmp_path: Path) -> None:
    blocks = make_blocks(COUNT, "of kubo")
    kubo = daemon.start()
    for block in blocks:
        kubo.put(*block)
    v0 = httpx.post(
        f"{daemon.url}/api/v0/block/put?format=v0", files={"data": ("block", b"\x0a\x02\x08\x01")}, timeout=60
    ).json()["Key"]
    assert v0.startswith("Qm")

    async def test(town: Town) -> None:
        side = await open_side(town, "one")
        await connect_kubo(daemon, side.address)
        await town.bell.until(lambda: len(side.exchange.peers) == 1)
        assert await side.fetch(v0) == b"\x0a\x02\x08\x01"
        limit = trio.CapacityLimiter(16)

        async def fetch(block: Block) -> None:
            async with limit:
                assert await side.fetch(block.cid, 60) == block.data

        async with trio.open_nursery() as nursery:
            for block in blocks:
                nursery.start_soon(fetch, block)

    in_town(tmp_path, test, 900)
    kubo.close()


def peer_fetch(peer: ForeignPeer) -> Fetch:
    async def fetch(cid: str, size: int) -> None:
        answer = await trio.to_thread.run_sync(lambda: peer.command("fetch", timeout=90, cid=cid, timeout_ms=60_000))
        assert answer["size"] == size

    return fetch


def test_helia_fetches_every_block_and_the_node_fetches_those_of_helia(helia_peer: NewPeer, tmp_path: Path) -> None:
    helia = helia_peer()

    async def test(town: Town) -> None:
        side = await open_side(town, "one")
        await trio.to_thread.run_sync(helia.connect, side.address)
        await fetch_all(peer_fetch(helia), side, make_blocks(COUNT, "helia"))
        for block in make_blocks(COUNT // 4, "of helia", codecs=[0x71]):
            data = base64.b64encode(block.data).decode()
            answer = await trio.to_thread.run_sync(lambda data=data: helia.command("put", codec=0x71, data=data))
            assert answer["cid"] == block.cid
            assert await side.fetch(block.cid) == block.data

    in_town(tmp_path, test, 900)


def test_kubo_of_the_wheel_fetches_every_block(go_peer: NewPeer, tmp_path: Path) -> None:
    kubo = go_peer()

    async def test(town: Town) -> None:
        side = await open_side(town, "one")
        await trio.to_thread.run_sync(kubo.connect, side.address)
        await fetch_all(peer_fetch(kubo), side, make_blocks(COUNT, "wheel"), FETCH_THREADS)

    in_town(tmp_path, test, 900)


def test_a_kubo_that_knows_neither_side_finds_a_block_through_a_third_dht_server(
    daemon: Daemon, go_kad_peer: NewPeer, tmp_path: Path
) -> None:
    """And a node of ours finds one of Kubo's in the same way."""
    server = go_kad_peer(mode="server", prefix="/ipfs/lan")  # as Kubo among private addresses
    daemon.route()
    kubo = daemon.start()
    daemon.connect(server.address)
    (block,), (theirs,) = make_blocks(1, "dht"), make_blocks(1, "of kubo in the dht")
    small = Block(cid_text(compute_cid(b"small")), b"small")
    kubo.put(*theirs)

    def is_provided() -> bool:
        try:
            kubo.provide(theirs.cid)
        except KuboError:  # it does not know yet that the server is one
            return False
        return True

    wait_until(is_provided, "Kubo announces its block")

    async def test(town: Town) -> None:
        side = await open_side(town, "one", server.address, dht=DiscoveryOptions(prefix="/ipfs/lan"))
        assert side.discovery is not None
        for each in (block, small):
            side.put(each)
            side.discovery.provide_block(b"\x12\x20" + compute_cid(each.data)[-32:])
        await town.bell.until(lambda: side.node.counters["discovery_blocks_provided"] == 2, 60)
        async with httpx.AsyncClient() as client:
            for each in (block, small):
                await kubo_fetch(daemon, client)(each.cid, len(each.data))
        # a second node, which knows the DHT server alone
        other = await open_side(town, "other", server.address, dht=DiscoveryOptions(prefix="/ipfs/lan"))
        await town.bell.until(lambda: other.node.is_connected(other.node.bootstrap_peers[0].id.to_bytes()))
        assert await other.fetch(theirs.cid, 60) == theirs.data
        assert await other.fetch(block.cid, 60) == block.data
        assert side.discovery.sizes["blocks"] == 2
        side.discovery.withdraw_block(b"\x12\x20" + compute_cid(b"small")[-32:])
        assert side.discovery.sizes["blocks"] == 1

    in_town(tmp_path, test, 200)
    kubo.close()
