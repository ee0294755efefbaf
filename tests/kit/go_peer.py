"""The foreign peer `go` of tests: Kubo, as `kiln.deploy.demo.kubo_peer` runs it, with more commands and events.

    python tests/kit/go_peer.py FOLDER [--port N]

Commands are lines of JSON on stdin, and answers lines of JSON on stdout. If a command has an "id", the answer has the
same one:

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
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import json
import os
import queue
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TextIO

from kiln.deploy.demo.kubo_peer import FETCH_THREADS, KuboError, KuboNode, locate_block, run_peer
from kiln.schemas.wire.cid import CidError

_POLL_MESSAGES = 0.01  # s
_POLL_PEERS = 0.1  # s
# Go drops messages of a burst beyond 32, so a publisher behind its rate catches up with at most this many at once.
_CATCH_UP = 16

_FUNCTIONS: dict[str, tuple[type, list[type]]] = {
    "ConnectToPeer": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_char_p]),
    "ListPeersIDs": (ctypes.c_void_p, [ctypes.c_char_p]),
    "PubSubPeers": (ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]),
    "PubSubUnsubscribe": (ctypes.c_int, [ctypes.c_longlong]),
}


class _Node(KuboNode):
    def __init__(self, repo: Path, port: int) -> None:
        super().__init__(repo, port)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments

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

    def unsubscribe(self, topic: str) -> None:
        number = self._subscriptions.pop(topic, None)
        if number is None or self._library.PubSubUnsubscribe(number) != 0:
            raise KuboError(f"could not unsubscribe from {topic}")

    def fetch_size(self, cid: str) -> int:
        """Fetch a block from peers, and return its size in bytes."""
        self.fetch(cid)
        return locate_block(Path(os.fsdecode(self._repo)), cid).stat().st_size


def build_payload(tag: str, number: int, size: int) -> bytes:
    """Build message `number` of `publish`: tag and number, then dots up to `size` bytes."""
    return f"{tag} {number} ".encode().ljust(size, b".")


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
        """Move the schedule forward if the node is too far behind."""
        if self.rate > 0:
            self.started += max(0.0, now - self.due() - _CATCH_UP / self.rate)

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

    node: _Node
    out: TextIO
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
            due = min((publication.due() for publication in self._publications), default=now + _POLL_MESSAGES)
            try:
                line = self.commands.get(timeout=min(max(due - now, 0.0), _POLL_MESSAGES))
            except queue.Empty:
                pass
            else:
                if line is None or not self.execute_line(line):
                    return
            self.publish_due()
            self.report_messages()
            self.report_fetched()
            if monotonic() >= report_peers_at:
                self.report_peers()
                report_peers_at = monotonic() + _POLL_PEERS

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
            until = (now := monotonic()) + _POLL_MESSAGES
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
        if items := list(self.node.receive()):
            self.emit({"event": "messages", "items": items})

    def start_fetch(self, cid: str, number: object) -> None:
        """Fetch a block in a thread."""
        self._fetching[self._threads.submit(self.node.fetch_size, cid)] = cid, number

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


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a Kubo node as a gossipsub peer, controlled by lines of JSON.")
    parser.add_argument("folder", type=Path, help="folder for repository and log")
    parser.add_argument("--port", type=int, default=0, help="TCP port on 127.0.0.1; 0 for a free one")
    arguments = parser.parse_args()
    run_peer(arguments.folder, lambda repo: _Node(repo, arguments.port), _Driver)


if __name__ == "__main__":
    main()
