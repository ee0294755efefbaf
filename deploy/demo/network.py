"""A network to try Kiln with, on 127.0.0.1: one Kubo node and two of ours, which talk made-up Ceramic traffic.

    python -m deploy.demo.network --folder DIR --network NAME --rate N --seed N --separators N --streams N
        --publisher HEX

All three are on the topic of the network and on those of its 500 most popular separators; ours dial Kubo and each
other. DIR keeps their identities, so that they last. Kubo sends 30 % of the messages, and no more than 100 a second;
ours share the rest. Nobody here publishes a BATCH_UPDATE: each that is heard is Kiln's. Where Kubo cannot run, the two
of ours go on alone, and the status says why. With a publisher, the public key under which Kiln announces batches over
BEP 50, there are also the two nodes of `deploy.demo.overlay`, and `overlay` is in the events.

Driven by lines of JSON on stdin: {"cmd": "go"} starts the traffic, hush ends it, and stop the network, as do the end of
stdin, SIGTERM and Ctrl-C. It tells, in lines of JSON on stdout:

    {"event": "ready", "addresses": [MULTIADDR with /p2p/], "peers": {NODE: PEER ID},
     "overlay": {"contacts": [HOST:PORT], "follow": [SOURCE]}}                            once, when all listen
    {"event": "status", "published": {NODE: COUNT}, "failed": COUNT, "heard_batches": {NODE: COUNT}, "errors": [TEXT],
     "overlay": {NODE: ITEMS HEARD}}
    {"event": "batch", "node": "kubo", "topic", "from": PEER ID, "cid", "data": BASE64}

NODE is kubo, one or two. A status comes once a second. `failed`: messages that no peer was there for, or that Kubo
refused. `batch`: a BATCH_UPDATE that Kubo heard, with its exact bytes; to a reader who lags, only the last 50.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import trio

from bridge.bep50.carrier import CarrierError
from bridge.gossip.outcomes import Deliver
from bridge.node.addresses import NodeError
from bridge.node.host import Node
from bridge.node.keys import KeyFileError, load_or_create
from bridge.node.options import NodeOptions
from bridge.node.seqno import Seqno, SeqnoError
from conf.locks import StateInUseError, locked
from deploy.children.spawn import tied_to_parent
from deploy.demo.kubo_peer import CATCH_UP, KuboError, library_path
from deploy.demo.overlay import NODES, Listeners
from deploy.traffic.content import TopicData, contents, topics
from deploy.traffic.options import TrafficOptions
from schemas.identity import peer_text
from schemas.pubsub import read_message
from schemas.reject import Rejected
from schemas.topics import parse_topic

KUBO: Final = "kubo"
OURS: Final = ("one", "two")
BATCHES_KEPT: Final = 50
MOST_SEPARATORS: Final = 500  # with a topic: Kubo has to be asked for the messages of each, again and again

_KUBO_SHARE: Final = 0.3
_KUBO_MOST: Final = 100.0  # messages a second: it takes one command at a time
_KUBO_PATIENCE: Final = 40.0  # s until it listens; the first time it makes an RSA key
_IN_FLIGHT: Final = 32  # commands that Kubo has not answered
_LINE: Final = 32 << 20  # bytes; Kubo tells all it heard since in one line
_READ: Final = 1 << 16
_ERRORS: Final = 20
_FAREWELL: Final = 2.0  # s that a process gets to end by itself


_T = TypeVar("_T")


class NetworkError(Exception):
    """The demo network cannot run as it was told to."""


class _Nowhere:
    """A sink for nodes whose frames nobody wants."""

    full = False

    def put(self, connection: bytes, frame: bytes) -> None: ...
    def subscribe(self, callback: Callable[[], None]) -> None: ...


class _Out:
    """Lines for stdout. Writing them never holds up the network: of what the reader is late for, the oldest goes."""

    def __init__(self) -> None:
        self._batches: deque[bytes] = deque(maxlen=BATCHES_KEPT)
        self._state: dict[str, bytes] = {}  # the last of each other event
        self._filled = trio.Event()

    def batch(self, event: Mapping[str, object]) -> None:
        self._batches.append(_line(event))
        self._filled.set()

    def state(self, event: Mapping[str, object]) -> None:
        self._state[str(event["event"])] = _line(event)
        self._filled.set()

    async def write(self, fd: int) -> None:
        """Until the reader is gone."""
        while True:
            await self._filled.wait()
            self._filled = trio.Event()
            lines = b"".join([*self._state.values(), *self._batches])
            self._state.clear()
            self._batches.clear()
            try:
                await _in_thread(_write_all, fd, lines)
            except OSError:
                return


@dataclass
class _Tally:
    """What happened so far."""

    published: Counter[str] = field(default_factory=Counter)
    batches: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=_ERRORS))

    def error(self, text: str) -> None:
        if text not in self.errors:
            self.errors.append(text)

    def heard(self, node: str, data: bytes) -> str | None:
        """The CID, if it is a BATCH_UPDATE that this node heard."""
        message = read_message(data)
        if isinstance(message, Rejected) or message.type != "BATCH_UPDATE":
            return None
        self.batches[node] += 1
        return message.batch


class _Kubo:
    """The Kubo process. `running` from when it listens to when it ends."""

    def __init__(self, folder: Path, tally: _Tally, out: _Out) -> None:
        self._folder = folder
        self._tally = tally
        self._out = out
        self._process: subprocess.Popen[bytes] | None = None
        self._unanswered: set[int] = set()
        self._commands = 0
        self._answered = trio.Event()
        self._told = trio.Event()  # ready, or ended
        self.peer = ""
        self.addresses: list[str] = []
        self.running = False

    def start(self) -> None:
        """KuboError: it is not to be had here."""
        library_path()
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "deploy.demo.kubo_peer", str(self._folder), "--no-peers"]
        commands, self._to = os.pipe()
        self._from, events = os.pipe()
        try:
            with (self._folder / "stderr.log").open("wb") as log:
                # here, not in a thread as trio does: the process is tied to the thread that starts it
                self._process = subprocess.Popen(
                    tied_to_parent(command),
                    stdin=commands,
                    stdout=events,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for us: we end it
                )
        finally:
            os.close(commands)
            os.close(events)
        self._stdin = trio.lowlevel.FdStream(self._to)
        self._stdout = trio.lowlevel.FdStream(self._from)

    async def listen(self) -> None:
        """Reads what it tells, until it ends."""
        pending = bytearray()
        try:
            async for some in self._stdout:
                pending += some
                *lines, rest = pending.split(b"\n") if b"\n" in some else [pending]
                pending = bytearray(rest)
                if len(pending) > _LINE:
                    raise KuboError("Kubo told a line without end")
                for line in lines:
                    self._note(json.loads(line))
        except (OSError, ValueError, KuboError) as error:
            self._tally.error(f"Kubo told what cannot be read: {error}")
            if self._process is not None:
                self._process.kill()
        self._tally.error(f"Kubo has ended{self._last_words()}; the network goes on without it")
        self.running = False
        self._told.set()
        self._answered.set()

    async def ready(self) -> bool:
        """Waits until it listens; False if it will not."""
        with trio.move_on_after(_KUBO_PATIENCE):
            await self._told.wait()
            return self.running
        self._tally.error(f"Kubo did not listen within {_KUBO_PATIENCE:g} s{self._last_words()}")
        return False

    async def join(self, names: tuple[str, ...]) -> None:
        """Subscribes it; returns when it is."""
        for name in names:
            await self._tell({"cmd": "subscribe", "topic": name})
        while self._unanswered and self.running:
            await self._answer()

    async def publish(self, message: TopicData) -> None:
        data = base64.b64encode(message.data).decode()
        await self._tell({"cmd": "publish_raw", "topic": message.topic, "data": data})

    async def _tell(self, command: Mapping[str, object]) -> None:
        while len(self._unanswered) >= _IN_FLIGHT and self.running:
            await self._answer()
        if not self.running:
            return
        self._commands += 1
        self._unanswered.add(self._commands)
        try:
            await self._stdin.send_all(_line({**command, "id": self._commands}))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.running = False

    async def _answer(self) -> None:
        self._answered = trio.Event()
        await self._answered.wait()

    def _note(self, event: dict[str, object]) -> None:
        match event:
            case {"event": "messages", "items": list(items)}:
                for item in items:
                    self._hear(item)
            case {"event": "ready", "peer": str(peer), "addrs": list(addresses)}:
                self.peer, self.addresses = peer, [str(each) for each in addresses]
                self.running = True
                self._told.set()
            case {"event": "published", "sent": int(sent), "failed": int(failed)}:
                self._tally.published[KUBO] += sent
                self._tally.failed += failed
            case {"event": "error", "text": str(text)}:
                self._tally.error(f"Kubo: {text}")
        number = event.get("id")
        if isinstance(number, int):
            self._unanswered.discard(number)
            self._answered.set()

    def _hear(self, item: Mapping[str, str]) -> None:
        data = base64.b64decode(item["data"])
        cid = self._tally.heard(KUBO, data)
        if cid is not None:
            self._out.batch(
                {
                    "event": "batch",
                    "node": KUBO,
                    "topic": item["topic"],
                    "from": item["from"],
                    "cid": cid,
                    "data": item["data"],
                }
            )

    def _last_words(self) -> str:
        log = self._folder / "stderr.log"
        with suppress(OSError):
            lines = log.read_text(errors="replace").split("\n")
            words = " ".join(line.strip() for line in lines[-6:] if line.strip())
            if words:
                return f": {words[-500:]} ({log})"
        return f" (nothing is in {log})"

    async def stop(self) -> None:
        """Ends the process: the end of its stdin, and SIGKILL if that takes long."""
        process = self._process
        if process is None:
            return
        await self._stdin.aclose()
        with trio.move_on_after(_FAREWELL):
            while process.poll() is None:
                await trio.sleep(0.02)
        if process.poll() is None:
            process.kill()
        process.wait()
        await self._stdout.aclose()


class _Network:
    """The three nodes and what they say."""

    def __init__(self, folder: Path, world: TrafficOptions, rate: float, publisher: bytes | None, fd: int) -> None:
        self._folder = folder
        self._publisher = publisher
        self._overlay: Listeners | None = None
        self._world = world
        self._rate = rate
        self._fd = fd
        self._topics = topics(world, MOST_SEPARATORS)
        self._contents: Iterator[TopicData] = contents(world, time.time_ns, self._topics)
        self._tally = _Tally()
        self._out = _Out()
        self._kubo = _Kubo(folder / KUBO, self._tally, self._out)
        self._nodes: dict[str, Node] = {}
        self._names: dict[str, str] = {}  # peer id: node
        self._go = trio.Event()
        self._speaking = trio.CancelScope()

    async def run(self) -> None:
        """Until told to end."""
        with ExitStack() as seqnos:
            try:
                async with trio.open_nursery() as nursery:
                    for ends in (self._await_signal, self._obey, self._write):
                        nursery.start_soon(_until, ends, nursery.cancel_scope)
                    await self._start(nursery, seqnos)
                    nursery.start_soon(self._tell_status)
                    await self._go.wait()
                    await self._listeners()
                    with self._speaking:
                        async with trio.open_nursery() as speakers:
                            speakers.start_soon(self._kubo_speaks)
                            for name in OURS:
                                speakers.start_soon(self._node_speaks, name)
                    await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await self._kubo.stop()

    # ---------------------------------------------------------------- beginning and end

    async def _start(self, nursery: trio.Nursery, seqnos: ExitStack) -> None:
        known: list[str] = []
        peers: dict[str, str] = {}
        try:
            self._kubo.start()
        except (KuboError, OSError) as error:
            self._tally.error(f"there is no Kubo in this network: {error}")
        else:
            nursery.start_soon(self._kubo.listen)
            if await self._kubo.ready():
                await self._kubo.join(self._topics)
                known += self._kubo.addresses
                peers[KUBO] = self._kubo.peer
        for name in OURS:
            key = load_or_create(self._folder / f"{name}.key")
            seqno = seqnos.enter_context(Seqno(self._folder / f"{name}.seqno", time.time_ns))
            options = NodeOptions(
                network=self._world.network,
                listen=("/ip4/127.0.0.1/tcp/0",),
                bootstrap=tuple(known),
                agent="kiln-demo",
                redial_most=5.0,
            )
            node = self._nodes[name] = Node(options, key, seqno, _Nowhere(), self._ear(name))
            await nursery.start(node.run)
            for topic in self._topics:
                node.join(topic)
            known += node.addresses
            peers[name] = peer_text(node.peer)
        self._names = {peer: name for name, peer in peers.items()}
        ready: dict[str, object] = {"event": "ready", "addresses": known, "peers": peers}
        if self._publisher is not None:
            found = [topic.separator for topic in map(parse_topic, self._topics) if topic and topic.separator]
            tell = self._tally.error
            overlay = Listeners(self._folder, self._world.network, self._publisher, found, _Nowhere(), tell)
            await nursery.start(overlay.run)
            self._overlay = overlay
            ready["overlay"] = {"contacts": overlay.addresses, "follow": overlay.sources}
        self._out.state(ready)

    def _ear(self, name: str) -> Callable[[Deliver], None]:
        def hear(deliver: Deliver) -> None:
            self._tally.heard(name, deliver.message.data)

        return hear

    async def _await_signal(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                return

    async def _write(self) -> None:
        await self._out.write(self._fd)

    async def _obey(self) -> None:
        """Commands, until one to stop or the end of stdin."""
        pending = b""
        # os.read in a thread: stdin may be a terminal, which is not ours to make non-blocking, and Python's own buffer
        # has a lock that would outlive us
        while some := await _in_thread(os.read, 0, _READ):
            *lines, pending = (pending + some).split(b"\n")
            pending = pending[-_READ:]
            for line in lines:
                if not line.strip():
                    continue
                try:
                    command = json.loads(line)
                except ValueError:
                    command = None
                match command:
                    case {"cmd": "go"}:
                        self._go.set()
                    case {"cmd": "hush"}:
                        self._speaking.cancel()
                    case {"cmd": "stop"}:
                        return
                    case _:
                        shown = line[:80].decode(errors="replace")
                        self._tally.error(f'no command {shown!r}: there are {{"cmd": "go"}}, hush and stop')

    # ---------------------------------------------------------------- speaking

    def _kubo_rate(self) -> float:
        return min(self._rate * _KUBO_SHARE, _KUBO_MOST) if self._kubo.running else 0.0

    def _node_rate(self) -> float:
        # what Kubo does not say, ours do
        return (self._rate - self._kubo_rate()) / len(OURS)

    async def _listeners(self) -> None:
        """Waits until each of ours knows of another that is there to be spoken to."""
        topic = self._topics[0]
        for node in self._nodes.values():
            while not any(topic in peer.topics for peer in node.router.peers.values()):
                await trio.sleep(0.05)

    async def _kubo_speaks(self) -> None:
        pace = _Pace(self._kubo_rate)
        while True:
            await pace.next()
            await self._kubo.publish(next(self._contents))

    async def _node_speaks(self, name: str) -> None:
        node = self._nodes[name]
        pace = _Pace(self._node_rate)
        while True:
            await pace.next()
            topic, data = next(self._contents)
            try:
                reached = node.publish(topic, data)
            except SeqnoError as error:
                self._tally.error(f"{name} cannot publish: {error}")
                reached = 0
            if reached:
                self._tally.published[name] += 1
            else:
                self._tally.failed += 1

    # ---------------------------------------------------------------- telling

    async def _tell_status(self) -> None:
        while True:
            tally = self._tally
            self._out.state(
                {
                    "event": "status",
                    "published": {name: tally.published[name] for name in (KUBO, *OURS)},
                    "failed": tally.failed,
                    "heard_batches": {name: tally.batches[name] for name in (KUBO, *OURS)},
                    "errors": [*tally.errors, *self._apart()],
                    **({"overlay": {name: self._overlay.heard[name] for name in NODES}} if self._overlay else {}),
                }
            )
            await trio.sleep(1)

    def _apart(self) -> Iterator[str]:
        """Who of us could not be connected to whom."""
        for name, node in self._nodes.items():
            for target in node.view().bootstrap:
                if target.error and not target.connected:
                    yield f"{name} is not connected to {self._names.get(target.peer, target.peer)}: {target.error}"


async def _until(ends: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
    await ends()
    scope.cancel()


class _Pace:
    """When to say the next thing, at so many a second, evenly; `rate` may change, and 0 is silence.

    Who fell behind makes up for a little only: a burst is what peers drop.
    """

    def __init__(self, rate: Callable[[], float]) -> None:
        self._rate = rate
        self._due = trio.current_time()

    async def next(self) -> None:
        while (rate := self._rate()) <= 0:
            await trio.sleep(1)
        self._due = max(self._due + 1 / rate, trio.current_time() - CATCH_UP / rate)
        await trio.sleep_until(self._due)


async def _in_thread(call: Callable[..., _T], *arguments: object) -> _T:
    """What blocks and cannot be interrupted; left to itself when cancelled."""
    return await trio.to_thread.run_sync(call, *arguments, abandon_on_cancel=True)  # type: ignore[call-arg]  # stubs older than trio


def _line(event: Mapping[str, object]) -> bytes:
    return json.dumps(event).encode() + b"\n"


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def main() -> None:
    default = TrafficOptions()
    parser = argparse.ArgumentParser(description="A demo network: Kubo and two nodes of ours, with made-up traffic.")
    parser.add_argument("--folder", type=Path, required=True, help="where the nodes keep what they are")
    parser.add_argument("--network", default=default.network, help="name of the network (%(default)s)")
    parser.add_argument("--rate", type=float, default=20.0, help="messages a second, of all together (%(default)s)")
    parser.add_argument("--seed", type=int, default=default.seed, help="of the made-up world (%(default)s)")
    parser.add_argument("--separators", type=int, default=default.separators, help="how many (%(default)s)")
    parser.add_argument("--streams", type=int, default=default.streams, help="how many (%(default)s)")
    parser.add_argument("--publisher", type=bytes.fromhex, help="of batches over BEP 50: its public key (none)")
    arguments = parser.parse_args()
    try:
        if not (math.isfinite(arguments.rate) and arguments.rate >= 0):
            raise NetworkError(f"rate: {arguments.rate} is no number of messages a second")
        world = TrafficOptions(
            seed=arguments.seed,
            network=arguments.network,
            separators=arguments.separators,
            streams=arguments.streams,
            batch_update=0.0,
        )
        folder: Path = arguments.folder.resolve()
        # what libraries print is not for who reads our events
        fd = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        with locked(folder, "network"):
            try:
                trio.run(_run, folder, world, arguments.rate, arguments.publisher, fd)
            except* (NodeError, KeyFileError, SeqnoError, CarrierError) as group:
                raise NetworkError(str(_first(group))) from group
    except (NetworkError, StateInUseError, ValueError, OSError) as error:
        sys.exit(f"the demo network cannot run: {error}")


async def _run(folder: Path, world: TrafficOptions, rate: float, publisher: bytes | None, fd: int) -> None:
    await _Network(folder, world, rate, publisher, fd).run()


if __name__ == "__main__":
    main()
