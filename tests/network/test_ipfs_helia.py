"""Real IPFS nodes (Helia on Node.js) on loopback, through the client of Kubo's RPC: blocks go over bitswap."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dag_cbor
import httpx
import pytest
from multiformats import CID

from kiln.bridge.ipfs import BlockRefusedError, BlockStoreUnavailableError, BlockUnavailableError, open_blocks
from kiln.bridge.ipfs.helia import Helia
from kiln.bridge.ipfs.kubo import Kubo, KuboError
from kiln.bridge.ipfs.node import NodeBlockStore
from kiln.schemas.wire.batch_block import write_blocks
from kiln.schemas.wire.cid import cid_text, compute_cid
from kit.awaiting import wait_until
from kit.foreign_peer import BUILT

pytestmark = pytest.mark.network

STREAM = "kjzl6kcym7w8y7i5ugaq9a3vlm771v8s5m7f1zcsvrkzgjbwe2gh1vh6ab2m2ts"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
PATIENCE = 120.0  # s; the first start installs the packages
ABSENT = cid_text(compute_cid(b"nobody has this"))


def batch(number: int) -> tuple[str, bytes]:
    """A block of a batch, with links to tips that are nowhere."""
    (block,) = write_blocks({STREAM: [compute_cid(b"tip %d" % number), compute_cid(b"other tip %d" % number)]})
    return block.cid, block.data


class Town:
    """Nodes of one test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: list[NodeBlockStore] = []

    def node(self, name: str, *peers: str, options: tuple[str, ...] = ()) -> NodeBlockStore:
        return self.with_kubo(name, *peers, options=options)[0]

    def with_kubo(self, name: str, *peers: str, options: tuple[str, ...] = ()) -> tuple[NodeBlockStore, Kubo]:
        """A node that keeps its things in a folder of this name, and its client below."""
        log = self._folder / f"{name}.log"
        kubo = Kubo("http://127.0.0.1:0")
        node = NodeBlockStore(
            kubo, peers, Helia(BUILT / "helia", self._folder / name, log, LOOPBACK, options), every=0.5
        )
        self._open.append(node)
        assert node.wait_for_check(PATIENCE)
        assert re.search(r"^kiln-helia [\d.]+ at /ip4/127", node.describe()), (node.describe(), log.read_text())
        return node, kubo

    def end(self) -> None:
        for node in self._open:
            node.close()


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    town = Town(tmp_path)
    yield town
    town.end()


def address(node: NodeBlockStore) -> str:
    """Where its peers find it, as it says itself."""
    return node.describe().split(" at ")[1].split(",")[0]


def rpc(kubo: Kubo, command: str, method: str = "POST", headers: Mapping[str, str] | None = None) -> httpx.Response:
    token = {"Authorization": kubo._client.headers["Authorization"]}
    return httpx.request(method, f"{kubo.url}/api/v0/{command}", headers={**token, **(headers or {})}, timeout=30)


def is_here(kubo: Kubo, cid: str) -> bool:
    """Whether a node has a block itself."""
    return rpc(kubo, f"block/get?arg={cid}&offline=true").status_code == 200


# ---------------------------------------------------------------- blocks between nodes


def test_a_block_goes_from_node_to_node_over_bitswap(town: Town) -> None:
    cid, data = batch(1)
    publisher = town.node("a")
    publisher.put(cid, data)
    publisher.pin(cid)
    receiver, kubo = town.with_kubo("b", address(publisher))
    assert receiver.describe().endswith("1 of 1 peers connected")
    assert not is_here(kubo, cid)
    assert receiver.get(cid, 20.0) == data
    assert is_here(kubo, cid)
    links = [
        CID("base32", 1, "dag-cbor", ("sha2-256", compute_cid(b"%s 1" % name)[4:])) for name in (b"tip", b"other tip")
    ]
    assert dag_cbor.decode(data) == {"tips": {STREAM: sorted(links, key=bytes)}}


def test_a_large_block_goes_whole_and_one_over_the_limit_not_at_all(town: Town) -> None:
    data = random.randbytes(2 << 20)
    cid = cid_text(compute_cid(data, 0x55))
    a = town.node("a")
    a.put(cid, data)
    b = town.node("b", address(a))
    with pytest.raises(BlockRefusedError) as refused:
        b.get(cid, 30.0)
    assert refused.value.reason == "block_too_large"
    assert b.get(cid, 30.0, limit=2 << 20) == data
    more = data + b"\0"
    with pytest.raises(BlockRefusedError) as refused:
        a.put(cid_text(compute_cid(more, 0x55)), more)
    assert refused.value.reason == "block_too_large"


def test_a_block_of_any_codec_is_kept_under_its_own_cid(town: Town) -> None:
    a = town.node("a")
    for codec in (0x55, 0x70, 0x71, 0x85, 0x0129):
        cid = cid_text(compute_cid(b"not valid in most of them", codec))
        a.put(cid, b"not valid in most of them")
        a.pin(cid)
        assert a.get(cid, 5.0) == b"not valid in most of them"
        a.unpin(cid)


def test_a_block_that_nobody_has_is_given_up_in_time_and_can_be_had_later(town: Town) -> None:
    cid, data = batch(2)
    a = town.node("a")
    b = town.node("b", address(a))
    begun = time.monotonic()
    with pytest.raises(BlockUnavailableError, match="context deadline exceeded"):
        b.get(cid, 1.0)
    assert time.monotonic() - begun < 4
    a.put(cid, data)
    assert b.get(cid, 20.0) == data


def test_one_who_gives_up_does_not_take_the_block_from_another(town: Town) -> None:
    cid, data = batch(3)
    a = town.node("a")
    b = town.node("b", address(a))
    with ThreadPoolExecutor(2) as threads:
        patient = threads.submit(b.get, cid, 60.0)
        with pytest.raises(BlockUnavailableError):
            b.get(cid, 1.0)
        a.put(cid, data)
        assert patient.result(30) == data


def test_many_at_once(town: Town) -> None:
    blocks = dict(batch(number) for number in range(100))
    a = town.node("a")
    b = town.node("b", address(a))
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(a.put, blocks, blocks.values()))
        assert list(threads.map(lambda cid: b.get(cid, 30.0), blocks)) == list(blocks.values())


def test_a_peer_that_is_not_there_is_named_and_connected_once_it_is(town: Town) -> None:
    a = town.node("a")
    where = address(a)
    a.close()
    b = town.node("b", where)
    assert "0 of 1 peers connected; connect" in b.describe()
    port = where.split("/")[4]
    again = Helia(BUILT / "helia", Path(str(town._folder), "a"), town._folder / "a2.log", f"/ip4/127.0.0.1/tcp/{port}")
    node = NodeBlockStore(Kubo("http://127.0.0.1:0"), helia=again)
    try:
        wait_until(lambda: "1 of 1 peers connected" in b.describe(), lambda: f"its peer, not {b.describe()}")
    finally:
        node.close()


# ---------------------------------------------------------------- pins


def test_a_pin_keeps_the_block_alone_until_it_is_taken_away(town: Town) -> None:
    node, kubo = town.with_kubo("a", options=("--keep", "0"))
    (pinned, data), (loose, other) = batch(4), batch(5)
    node.put(pinned, data)
    node.put(loose, other)
    begun = time.monotonic()
    node.pin(pinned)
    node.pin(pinned)
    assert time.monotonic() - begun < 5, "the tips it links to are nowhere, and are not looked for"
    assert len(rpc(kubo, "repo/gc").text.splitlines()) == 1
    assert is_here(kubo, pinned)
    assert not is_here(kubo, loose)
    node.unpin(pinned)
    node.unpin(pinned)
    rpc(kubo, "repo/gc")
    assert not is_here(kubo, pinned)


def test_what_was_put_just_now_is_not_collected(town: Town) -> None:
    node, kubo = town.with_kubo("a")
    cid, data = batch(6)
    node.put(cid, data)
    assert rpc(kubo, "repo/gc").text == ""
    assert is_here(kubo, cid)


def test_what_is_nowhere_cannot_be_pinned(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kiln.bridge.ipfs.kubo._CALL", 1.0)
    with pytest.raises(BlockUnavailableError):
        town.node("a").pin(ABSENT)


# ---------------------------------------------------------------- starts and ends


def child_of(process: int, folder: Path) -> int | None:
    """The process id of the node that keeps its things there."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if str(folder).encode() in words and b"server.mjs" in words and process in (0, parent):
            return int(entry.name)
    return None


def test_blocks_pins_and_peer_id_are_there_after_a_restart(town: Town) -> None:
    cid, data = batch(7)
    first = town.node("a")
    first.put(cid, data)
    first.pin(cid)
    peer = address(first).rpartition("/")[2]
    first.close()
    with pytest.raises(BlockStoreUnavailableError):
        first.get(cid, 1.0)
    second, kubo = town.with_kubo("a", options=("--keep", "0"))
    assert address(second).rpartition("/")[2] == peer
    rpc(kubo, "repo/gc")
    assert second.get(cid, 5.0) == data


def test_a_node_that_dies_is_started_again(town: Town, tmp_path: Path) -> None:
    cid, data = batch(8)
    node = town.node("a")
    node.put(cid, data)
    child = child_of(os.getpid(), tmp_path / "a")
    assert child is not None
    os.kill(child, signal.SIGKILL)

    def is_back() -> bool:
        try:
            return node.get(cid, 5.0) == data
        except (BlockStoreUnavailableError, BlockUnavailableError):
            return False

    wait_until(is_back, "the block from the node that was started again")
    assert child_of(os.getpid(), tmp_path / "a") not in (None, child)


OPENER = """
import signal, sys
from pathlib import Path
from kiln.bridge.ipfs.helia import Helia
helia = Helia(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[2] + ".log"), "")
print(helia.start(), flush=True)
signal.pause()
"""


def test_a_node_ends_with_whoever_started_it_also_when_that_one_is_killed(town: Town, tmp_path: Path) -> None:
    town.node("first").close()  # so that all is installed
    folder = tmp_path / "a"
    command = [sys.executable, "-c", OPENER, str(BUILT / "helia"), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as opener:
        assert opener.stdout is not None
        assert opener.stdout.readline().startswith("http://127.0.0.1:")
        assert child_of(opener.pid, folder) is not None
        opener.kill()
    wait_until(lambda: child_of(0, folder) is None, "the end of the node")


def test_a_first_start_installs_into_the_state_folder(tmp_path: Path) -> None:
    blocks = open_blocks("helia", tmp_path, listen=LOOPBACK)
    try:
        cid, data = batch(9)
        with pytest.raises(BlockStoreUnavailableError, match="starting"):
            blocks.put(cid, data)
        wait_until(
            lambda: " at /ip4/127.0.0.1/" in blocks.describe(), lambda: f"an address, not {blocks.describe()}", 300
        )
        blocks.put(cid, data)
        assert blocks.get(cid, 5.0) == data
        assert sorted(path.name for path in (tmp_path / "helia").iterdir()) == ["app", "repo"]
        assert (tmp_path / "helia" / "repo" / "key").stat().st_mode & 0o777 == 0o600
    finally:
        blocks.close()


def test_without_a_registry_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:1")
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "cache"))
    monkeypatch.setenv("npm_config_fetch_retries", "0")
    blocks = open_blocks("helia", tmp_path, listen=LOOPBACK)
    try:
        wait_until(lambda: "starting" not in blocks.describe(), "the end of its start")
        assert "npm ci" in blocks.describe()
        assert "helia.log" in blocks.describe()
        with pytest.raises(BlockStoreUnavailableError, match="needs a registry"):
            blocks.get(ABSENT, 1.0)
    finally:
        blocks.close()


def test_a_taken_port_is_named(town: Town, tmp_path: Path) -> None:
    taken = address(town.node("a")).rpartition("/p2p/")[0]
    log = tmp_path / "b.log"
    node = NodeBlockStore(Kubo("http://127.0.0.1:0"), helia=Helia(BUILT / "helia", tmp_path / "b", log, taken))
    try:
        assert node.wait_for_check(PATIENCE)
        assert "address already in use" in node.describe()
        assert str(log) in node.describe()
    finally:
        node.close()


def test_a_stop_in_the_middle_of_an_install_does_not_wait_for_it(tmp_path: Path) -> None:
    blocks = open_blocks("helia", tmp_path, listen=LOOPBACK)
    wait_until((tmp_path / "helia" / "app" / "package.json").exists, "the install has begun")
    begun = time.monotonic()
    blocks.close()
    assert time.monotonic() - begun < 10
    assert not [thread for thread in threading.enumerate() if thread.name == "ipfs"]


# ---------------------------------------------------------------- the RPC


def test_the_rpc_answers_as_kubos_does(town: Town) -> None:
    node, kubo = town.with_kubo("a")
    cid, data = batch(10)
    node.put(cid, data)
    assert rpc(kubo, "id", "GET").status_code == 405
    assert rpc(kubo, "no/such").status_code == 404
    for header in ("Origin", "Referer"):
        refused = rpc(kubo, f"block/get?arg={cid}", headers={header: "http://localhost:3000"})
        assert (refused.status_code, refused.text) == (403, "403 - Forbidden\n")
    for command, status, code, words in (
        ("block/get", 400, 1, 'argument "cid" is required'),
        ("block/get?arg=bogus", 500, 0, 'invalid path "bogus": invalid CID'),
        (f"block/get?arg={ABSENT}&timeout=1", 400, 1, "invalid duration"),
        (f"block/get?arg={ABSENT}&timeout=100ms", 500, 0, "context deadline exceeded"),
        (f"pin/rm?arg={cid}", 500, 0, "not pinned or pinned indirectly"),
        (f"pin/add?arg={cid}", 500, 0, "not to be had here"),  # with all it links to, as is Kubo's default
        ("swarm/connect?arg=bogus", 400, 1, "failed to parse multiaddr"),
    ):
        answer = rpc(kubo, command)
        assert answer.status_code == status, command
        said = answer.json()
        assert (said["Code"], said["Type"]) == (code, "error")
        assert words in said["Message"]
    with pytest.raises(KuboError, match="failure"):
        kubo.connect("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWM68GyFKBT9JsuTRB6CYkF61PtMuSkynUauSQEGBX51JW", timeout=5.0)


def test_who_has_no_token_is_refused_and_no_command_line_shows_the_token(town: Town, tmp_path: Path) -> None:
    node, kubo = town.with_kubo("a")
    cid, data = batch(11)
    node.put(cid, data)
    token = kubo._client.headers["Authorization"].removeprefix("Bearer ")
    assert len(token) >= 40
    for headers in ({}, {"Authorization": "Bearer guessed"}, {"Authorization": token}, {"Authorization": "Bearer"}):
        for command in ("id", "repo/gc", f"pin/rm?arg={cid}", "no/such"):
            refused = httpx.post(f"{kubo.url}/api/v0/{command}", headers=headers, timeout=30)
            assert (refused.status_code, "Access Denied" in refused.text) == (403, True), command
    child = child_of(os.getpid(), tmp_path / "a")
    assert token not in Path(f"/proc/{child}/cmdline").read_text()
    assert token in Path(f"/proc/{child}/environ").read_text()
    _, theirs = town.with_kubo("b")
    assert theirs._client.headers["Authorization"] != kubo._client.headers["Authorization"]


def test_the_packages_of_helia_are_given_none_of_kilns_settings(
    town: Town, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILN_KAFKA__SASL_PASSWORD", "hunter2")
    town.node("a")
    child = child_of(os.getpid(), tmp_path / "a")
    assert "hunter2" not in Path(f"/proc/{child}/environ").read_text()


def test_it_listens_on_loopback_alone_and_speaks_bitswap_and_identify_alone(town: Town, tmp_path: Path) -> None:
    node, kubo = town.with_kubo("a")
    said = rpc(kubo, "id").json()
    assert set(said["Protocols"]) == {"/ipfs/bitswap/1.2.0", "/ipfs/id/1.0.0"}
    assert [each for each in said["Addresses"] if not each.startswith("/ip4/127.0.0.1/tcp/")] == []
    assert node.describe().endswith(f"{said['Addresses'][0]}, without routing")
    child = child_of(os.getpid(), tmp_path / "a")
    inodes = {os.readlink(path) for path in Path(f"/proc/{child}/fd").iterdir()}
    rows = [line.split() for table in ("tcp", "tcp6", "udp", "udp6") for line in _sockets(child, table)]
    theirs = [row for row in rows if f"socket:[{row[9]}]" in inodes]
    listening = [row[1] for row in theirs if row[3] == "0A"]
    assert len(listening) == 2
    assert all(row[1].startswith("0100007F:") for row in theirs), theirs  # 127.0.0.1, little-endian


def _sockets(process: int | None, table: str) -> list[str]:
    path = Path(f"/proc/{process}/net/{table}")
    return path.read_text().splitlines()[1:] if path.exists() else []
