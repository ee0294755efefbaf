"""The node on the network: a peer in Rust (tests/network/rust) sends as fast as the node takes, nothing goes to Kafka.

What a frame costs is parted by leaving things out: each side does less than the one before it.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.report import Finding, Ratio, Series, number
from bench.runs import BenchError, Extent, Say
from bridge.gossip.router import Deliver, Options, PeerID, Router, Send, Verify, verifier
from bridge.node.host import Node, NodeOptions, _Link, _Session
from bridge.node.seqno import Seqno
from schemas.identity import Verdict, peer_bytes, peer_of
from schemas.proto.gossipsub.rpc_pb2 import RPC

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # where the peers that others wrote are

from foreign_peer import ForeignPeer, ForeignPeerError, build_rust, rust_peer  # noqa: E402  - found only now

TOPIC = "/ceramic/local-bench"
FRAMES = 20_000
UNIQUE = 5_000
WARM = 1_000
SIZE = 300  # bytes
MESH = 4
# The Rust peer refuses what is over 5,000 in its queue to us: it is told in portions, and never so far ahead.
PORTION = 1_000
AHEAD = 2_500


class _Unjudged(Exception):
    """A message came that was to be left out."""


class _Counting:
    """The sink: counts, and reads the clocks at two of the frames."""

    full = False

    def __init__(self, first: int, last: int) -> None:
        self.count = 0
        self.first, self.last = first, last
        self.marks: list[tuple[float, float]] = []
        self.done = trio.Event()

    def put(self, connection: bytes, frame: bytes) -> None:
        self.tick()

    def tick(self) -> None:
        self.count += 1
        if self.count == self.first or self.count == self.last:
            self.marks.append((time.perf_counter(), time.process_time()))
            if self.count == self.last:
                self.done.set()

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Never full."""

    def figures(self) -> Figures:
        (began, busy), (ended, busier) = self.marks
        frames = self.last - self.first
        return Figures(frames / (ended - began), (busier - busy) / frames * 1e6)


@dataclass(frozen=True)
class Figures:
    """One run: per second of the clock, and µs of CPU for each."""

    rate: float
    cpu: float


class _Mute(Router):
    """Takes in no RPC."""

    def receive(self, peer: PeerID, rpc: RPC, now: float) -> tuple[list[Send], list[Deliver], bytes]:
        if rpc.publish:
            return [], [], b""
        return super().receive(peer, rpc, now)


class _Blind(Node):
    """Counts frames as they come, unread."""

    def _incoming(self, link: _Link, session: _Session, payload: bytes, declared: int) -> None:
        if session.frames_in < 3:  # subscriptions and GRAFT: else nobody would send it anything
            super()._incoming(link, session, payload, declared)
        else:
            self._sink.put(session.id, payload)


SIDES: Mapping[str, tuple[type[Node], type[Router], bool]] = {
    "whole": (Node, Router, True),
    "signatures not verified": (Node, Router, False),
    "and no router": (Node, _Mute, False),
    "and not parsed or framed": (_Blind, _Mute, False),
}


def measure(extent: Extent, say: Say) -> Finding:
    """Frames/s and CPU per frame of the node from one peer, and unique messages/s with MESH peers in the mesh.

    BenchError without cargo, or when a peer fails.
    """
    frames, unique = extent.of(FRAMES, least=500), extent.of(UNIQUE, least=200)
    rates: dict[str, list[float]] = {}
    costs: dict[str, list[float]] = {}
    copies: list[float] = []
    try:
        binary = build_rust()
        for run in range(1, extent.runs + 1):
            for name, side in SIDES.items():
                figures = _one(binary, 1, partial(_from_one, side, frames))
                rates.setdefault(name, []).append(figures.rate)
                costs.setdefault(name, []).append(figures.cpu)
                say(f"run {run} of {extent.runs}: {name}: {number(figures.rate)}/s, {number(figures.cpu)} µs")
            mesh = f"{MESH} peers in the mesh"
            figures, each = _one(binary, MESH, partial(_from_mesh, unique))
            rates.setdefault(mesh, []).append(figures.rate)
            costs.setdefault(mesh, []).append(figures.cpu)
            copies.append(each)
            say(f"run {run} of {extent.runs}: {mesh}: {number(figures.rate)} unique/s, {number(figures.cpu)} µs")
    except ForeignPeerError as error:
        raise BenchError(f"the peer in Rust: {error}") from error
    cost = {name: Series(f"{name}, CPU", "µs/frame", tuple(found)) for name, found in costs.items()}
    whole = cost["whole"]
    return Finding(
        "network",
        f"the node, from a peer in Rust: signed messages of {SIZE} bytes, one in a frame; its frames go nowhere",
        (
            Series("frames, whole", "frames/s", tuple(rates["whole"])),
            *[cost[name] for name in SIDES],
            Series(f"unique messages, {mesh}", "messages/s", tuple(rates[mesh])),
            Series(f"{mesh}, CPU", "µs/unique", tuple(costs[mesh])),
            Series("copies of each", "copies", tuple(copies)),
        ),
        tuple(Ratio(f"{name}, of the whole", cost[name], whole) for name in SIDES if name != "whole"),
        {"frames": frames, "unique messages": unique},
    )


def _one[T](binary: Path, peers: int, play: Callable[[Path, Sequence[ForeignPeer]], T]) -> T:
    with TemporaryDirectory(prefix="kiln-bench-") as folder, ExitStack() as stack:
        started = [stack.enter_context(rust_peer(binary, Path(folder, f"rust{i}"))) for i in range(peers)]
        return play(Path(folder), started)
