"""The demo network as a process: what it says, what it hears, and that nothing of it outlives whoever started it."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import trio

from conftest import ROOT
from kiln.bridge.ipfs.bitswap.exchange import BlockExchange
from kiln.bridge.ipfs.folder import FolderBlockStore
from kiln.bridge.libp2p.host import Node
from kiln.bridge.libp2p.options import NodeOptions
from kiln.bridge.libp2p.seqno import Seqno
from kiln.deploy.demo.traffic.messages import list_topics
from kiln.deploy.demo.traffic.options import TrafficOptions
from kiln.schemas.kafka.frames import read_rpc
from kiln.schemas.proto.gossipsub.rpc_pb2 import Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.identity import check, peer_text
from kiln.schemas.wire.pubsub import PubsubMessage, read_message, write_batch_update
from kiln.schemas.wire.topics import parse_topic
from kit.awaiting import PATIENCE, until, wait_until
from kit.bitswap_sides import make_blocks
from kit.chance import new_key

WORLD = TrafficOptions(seed=5, network="local-demo-test", separators=6, streams=60)
TRAFFIC = {"KILN_TRAFFIC__SEED": "5", "KILN_TRAFFIC__SEPARATORS": "6", "KILN_TRAFFIC__STREAMS": "60"}
MODULE = ["-m", "kiln.deploy.demo.network"]
WITHOUT_KUBO = """
from kiln.deploy.demo import kubo_node, network
from kiln.deploy.demo.kubo_peer import KuboError

def find_library():
    raise KuboError("Kubo is not installed")

kubo_node.find_library = find_library
network.main()
"""
# Kubo hears 4,000 of its own messages; prints by how many bytes C's heap grew with each of the last 3,000.
HEARING = """
import os, sys
from pathlib import Path
from kiln.deploy.demo.kubo_peer import KuboNode

def heap():
    areas = Path("/proc/self/smaps").read_text().split("VmFlags")
    return sum(int(area.split("Rss:")[1].split()[0]) * 1024 for area in areas if "[heap]" in area)

out = os.dup(1)
os.dup2(2, 1)  # the library prints, too
node = KuboNode(Path("ipfs").resolve())
node.subscribe("topic")
node.peer = ""  # else the node leaves out its own
heard = 0
for number in range(4_000):
    assert node.publish("topic", b"x" * 300)
    heard += len(list(node.receive()))
    if number == 1_000:
        before = heap(), heard
os.write(out, b"%d" % ((heap() - before[0]) / (heard - before[1])))
os._exit(0)
"""

Event = dict[str, object]


class DemoNetwork:
    """A running demo network and what it has told so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.events: list[Event] = []
        self._changed = threading.Condition()
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def all(self, name: str) -> list[Event]:
        return [event for event in tuple(self.events) if event["event"] == name]

    def wait_for(self, name: str, true: Callable[[Event], bool] = lambda event: True) -> Event:
        """The first event of a name of which it is true."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or any(map(true, self.all(name))), PATIENCE)
        for event in self.all(name):
            if true(event):
                return event
        raise AssertionError(f"no such {name}; the last events were {self.events[-3:]}")


def environment(state: Path, rate: int = 20) -> dict[str, str]:
    own = {"KILN_STATE": str(state), "KILN_NETWORK": WORLD.network, "KILN_TRAFFIC__RATE": str(rate)}
    return {**os.environ, **TRAFFIC, **own}


@contextmanager
def demo_network(state: Path, rate: int = 20, program: list[str] = MODULE) -> Iterator[DemoNetwork]:
    with subprocess.Popen(
        [sys.executable, *program],
        env=environment(state, rate),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield DemoNetwork(process)
        finally:
            if process.poll() is None:
                process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()


class Tape:
    """A sink that keeps the messages of the frames that came in."""

    full = False

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def put(self, connection: bytes, frame: bytes) -> None:
        read = Frame.FromString(frame)
        if read.direction == Frame.IN and read.payload:
            rpc = read_rpc(read.payload)
            assert not isinstance(rpc, Rejected)
            self.messages.extend(rpc.publish)

    def subscribe(self, callback: Callable[[], None]) -> None: ...


def author(message: Message) -> str:
    return peer_text(getattr(message, "from"))


def texts(value: object) -> list[str]:
    assert isinstance(value, list)
    return [str(each) for each in value]


def counts(value: object) -> dict[str, int]:
    assert isinstance(value, dict)
    return {str(name): int(number) for name, number in value.items()}


def is_alive(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody has waited for does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


def wait_gone(pids: list[int], seconds: float = 10) -> None:
    wait_until(
        lambda: not any(map(is_alive, pids)),
        lambda: f"the end of {[pid for pid in pids if is_alive(pid)]}",
        seconds,
    )


def test_all_three_speak_and_a_batch_of_ours_is_heard_byte_for_byte_and_fetched(tmp_path: Path) -> None:
    network_topic, *separator_topics = list_topics(WORLD)
    on = parse_topic(separator_topics[0])
    assert on is not None
    assert on.separator is not None
    blocks = make_blocks(4, "batches", codecs=[0x71])
    batches = [write_batch_update(on.separator, block.cid) for block in blocks]
    assert all(isinstance(read_message(data), PubsubMessage) for data in batches)

    async def listen_in(demo: DemoNetwork) -> None:
        ready = demo.wait_for("ready")
        assert isinstance(ready["peers"], dict)
        peers = {str(name): str(peer) for name, peer in ready["peers"].items()}
        assert list(peers) == ["kubo", "one", "two"]
        addresses = texts(ready["addresses"])
        assert [address.rpartition("/p2p/")[2] for address in addresses] == list(peers.values())
        tape = Tape()
        key = new_key()
        options = NodeOptions(network=WORLD.network, bootstrap=addresses, redial_first=0.05)
        with Seqno(tmp_path / "seqno", time.time_ns) as seqno:
            node = Node(options, key, seqno, tape)
            folder = FolderBlockStore(tmp_path / "blocks")
            for block in blocks:
                folder.put(*block)
            exchange = BlockExchange(node, folder)
            async with trio.open_nursery() as nursery:
                await nursery.start(node.run)
                await nursery.start(exchange.run)
                for topic in (network_topic, *separator_topics):
                    node.join(topic)

                def met() -> bool:
                    views = node.router.peers.values()
                    return len(views) == 3 and all(separator_topics[0] in view.topics for view in views)

                await until(met, "three peers on a separator topic")
                # before "go" nobody says a thing
                demo.wait_for("status")
                assert tape.messages == []

                for topic, data in zip((network_topic, *separator_topics), batches, strict=False):
                    assert node.publish(topic, data) == 3
                await until(lambda: len(demo.all("batch")) >= len(batches), "a batch event for each batch")
                told = {(str(e["topic"]), base64.b64decode(str(e["data"]))) for e in demo.all("batch")}
                assert told == set(zip((network_topic, *separator_topics), batches, strict=False))
                for event in demo.all("batch"):
                    assert (event["node"], event["from"]) == ("kubo", peer_text(node.peer))
                    message = read_message(base64.b64decode(str(event["data"])))
                    assert isinstance(message, PubsubMessage)
                    assert event["cid"] == message.batch

                everyone = dict.fromkeys(peers, len(batches))
                await until(
                    lambda: counts(demo.all("status")[-1]["fetched"]) == everyone, "each node fetches each block"
                )
                demo.say("go")

                def heard_all() -> bool:
                    authors = {author(m) for m in tape.messages}
                    kinds = {
                        read.type for m in tape.messages if isinstance(read := read_message(m.data), PubsubMessage)
                    }
                    places = {m.topic for m in tape.messages}
                    return (
                        authors >= set(peers.values())  # ours have further authors
                        and kinds == {"UPDATE", "QUERY", "RESPONSE", "KEEPALIVE"}
                        and len(places) >= 4
                        and network_topic in places
                    )

                await until(heard_all, "messages of all kinds from all three, on several topics")
                assert all(check(m, "strict").reason == "" for m in tape.messages)
                nursery.cancel_scope.cancel()

    with demo_network(tmp_path / "state", 60) as demo:
        trio.run(listen_in, demo)
        expected = dict.fromkeys(("kubo", "one", "two"), len(batches))
        status = demo.wait_for("status", lambda e: counts(e["heard_batches"]) == expected)
        assert status["errors"] == []
        speaking = demo.wait_for("status", lambda e: min(counts(e["published"]).values()) > 0)
        assert speaking["failed"] == 0
        assert demo.process.stdin is not None
        kubo = children(demo.process.pid)
        assert len(kubo) == 1
        demo.process.stdin.close()
        assert demo.process.wait(60) == 0
        wait_gone(kubo)


def test_what_kubo_hears_leaves_no_memory_behind(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", HEARING],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert int(run.stdout) < 250, run.stdout  # bytes a message, the text of which has more than 500


def test_the_rate_is_kept_and_shared(tmp_path: Path) -> None:
    with demo_network(tmp_path / "state", 40) as demo:
        demo.wait_for("ready")
        demo.say("go")
        began = time.monotonic()
        status = demo.wait_for("status", lambda e: sum(counts(e["published"]).values()) >= 120)
        took = time.monotonic() - began
        published = counts(status["published"])
        # not faster than told; how much slower is the machine's matter
        assert sum(published.values()) <= 40 * (took + 1) + 3 * 16
        assert 0.2 < published["kubo"] / sum(published.values()) < 0.4
        assert abs(published["one"] - published["two"]) <= 20


def test_a_network_that_is_killed_leaves_no_kubo_behind_and_has_the_same_peers_again(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    with demo_network(folder) as demo:
        before = demo.wait_for("ready")["peers"]
        kubo = children(demo.process.pid)
        assert len(kubo) == 1
        demo.process.kill()
        demo.process.wait()
        wait_gone(kubo)
    with demo_network(folder) as demo:
        assert demo.wait_for("ready")["peers"] == before
        kubo = children(demo.process.pid)
        demo.process.send_signal(signal.SIGTERM)
        assert demo.process.wait(60) == 0
        wait_gone(kubo)


def test_kubo_that_dies_is_told_and_the_others_say_its_share(tmp_path: Path) -> None:
    with demo_network(tmp_path / "state", 60) as demo:
        demo.wait_for("ready")
        demo.say("go")
        demo.wait_for("status", lambda e: counts(e["published"])["kubo"] > 0)
        (kubo,) = children(demo.process.pid)
        os.kill(kubo, signal.SIGKILL)
        status = demo.wait_for("status", lambda e: "Kubo has ended" in " ".join(texts(e["errors"])))
        then = counts(status["published"])
        later = counts(
            demo.wait_for("status", lambda e: counts(e["published"])["one"] >= then["one"] + 60)["published"]
        )
        assert later["kubo"] <= then["kubo"] + 1
        assert later["two"] > then["two"]


def test_without_kubo_two_go_on_and_say_so(tmp_path: Path) -> None:
    with demo_network(tmp_path / "state", 60, program=["-c", WITHOUT_KUBO]) as demo:
        peers = demo.wait_for("ready")["peers"]
        assert isinstance(peers, dict)
        assert list(peers) == ["one", "two"]
        demo.say("go")
        status = demo.wait_for("status", lambda e: counts(e["published"])["one"] > 0)
        assert "the demo network runs without Kubo: Kubo is not installed" in texts(status["errors"])
        assert demo.process.stdin is not None
        demo.process.stdin.close()
        assert demo.process.wait(60) == 0


def test_two_of_one_folder_are_refused(tmp_path: Path) -> None:
    program = ["-c", WITHOUT_KUBO]
    with demo_network(tmp_path, program=program) as demo:
        demo.wait_for("ready")
        done = subprocess.run(
            [sys.executable, *program],
            env=environment(tmp_path),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 1
        assert str(demo.process.pid) in done.stderr
        assert "Traceback" not in done.stderr
