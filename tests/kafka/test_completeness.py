"""All RPCs of a peer are in `kiln.frames`; after a killed bridge, all but those in the air.

Outages of the broker are in `test_spool_broker.py`, and with all of Kiln in `tests/faults/test_chaos.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import ROOT, free_ports
from kiln.conf.process.bridge_status import BridgeStatus
from kiln.conf.settings.model import Bridge, Kafka, Network, Settings
from kiln.deploy.stack.child_process import BridgeProcess
from kiln.deploy.stack.embedded_broker import find_running_broker
from kiln.deploy.stack.kafka_broker import start_broker
from kiln.schemas.kafka.frames import read_frame, read_rpc
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import message_id
from kit.awaiting import wait_until
from kit.log_model import read_records

pytestmark = [pytest.mark.kafka, pytest.mark.network, pytest.mark.timeout(1_200)]

RATE = int(os.environ.get("KILN_TEST_FRAMES_RATE", "500"))
SECONDS = float(os.environ.get("KILN_TEST_FRAMES_FOR", "6"))
NETWORK = "local-complete"
TOPIC = f"/ceramic/{NETWORK}"
LOST_AFTER = 2.0
"""s: more than what a killed bridge may have in memory alone, the spool's delays (1 s and 0.1 s) and what it reads"""
IN_THE_AIR = 3_000
"""messages: what buffers between sender and bridge hold, 256 KiB of yamux window and the kernel's"""


def cpu_of(process: int) -> float:
    """Seconds that a process was busy."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Said:
    """The sender's own list: ids in order, [first, end) of each stream, and how long it took."""

    ids: list[str]
    streams: list[tuple[int, int]]
    seconds: float


class Sender:
    """The peer in its own process; it has signed all when this is made."""

    def __init__(self, address: str, report: Path, resend: int = 0) -> None:
        self._report = report
        arguments = {
            "--topic": TOPIC,
            "--rate": RATE,
            "--count": int(RATE * SECONDS),
            "--resend": resend,
            "--report": report,
        }
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "kit.steady_sender",
                address,
                *(str(part) for pair in arguments.items() for part in pair),
            ],
            cwd=ROOT / "tests",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._await("ready")

    def _await(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == word

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def said(self) -> Said:
        """Waits until it has said all."""
        self._await("done")
        told = json.loads(self._report.read_text())
        return Said(told["ids"], [(first, end) for first, end in told["streams"]], told["seconds"])

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class Place:
    """A bridge with the broker it writes to, and a sender of their own."""

    def __init__(self, settings: Settings, servers: str, folder: Path) -> None:
        self.settings = settings
        self.servers = servers
        self._folder = folder
        self.bridge = BridgeProcess(settings)
        self.used = ""
        """what bridge and broker had used when all was settled, in words"""

    def status(self) -> BridgeStatus | None:
        return self.bridge.status(time.time())

    @contextmanager
    def sender(self, resend: int = 0) -> Iterator[Sender]:
        self.bridge.start()
        wait_until(lambda: self.status() is not None, "the bridge says how it is", 60)
        status = self.status()
        assert status is not None
        sender = Sender(status.addresses[0], self._folder / "said.json", resend)
        try:
            yield sender
        finally:
            sender.stop()

    @property
    def broker(self) -> int:
        """The broker's process; 0 while there is none."""
        told = self.settings.state / "broker" / "address.json"
        if find_running_broker(self.settings.state) is None or not told.exists():
            return 0
        return int(json.loads(told.read_bytes())["pid"])

    def _cpu(self) -> str:
        status = self.status()
        used = {"bridge": cpu_of(status.pid) if status is not None else 0.0, "broker": cpu_of(self.broker)}
        return ", ".join(f"{name} {seconds:.1f} s of CPU" for name, seconds in used.items())

    def wait_heard(self, share: float) -> None:
        """Until the bridge says, as it does each second, that so much of what is said has come."""
        wanted = share * RATE * SECONDS

        def heard() -> bool:
            status = self.status()
            return status is not None and status.frames_in > wanted  # the subscription came first

        wait_until(heard, f"{wanted:.0f} messages heard", 30 + SECONDS)

    def settled(self, heard: int) -> float:
        """Waits until the bridge has heard so many messages and Kafka has all its frames. How many seconds."""
        began = time.monotonic()

        def all_there() -> bool:
            status = self.status()
            if status is None or status.frames_in < heard + 1:  # the subscription came first
                return False
            return not status.spool.waiting and not status.spool.disk_bytes

        wait_until(all_there, f"{heard} messages heard and written", 120 + 3 * SECONDS)
        self.used = self._cpu()
        return time.monotonic() - began

    def log(self) -> dict[bytes, dict[int, Frame]]:
        """Frames that came IN, by connection and sequence, first copies in the order of the log."""
        found: dict[bytes, dict[int, Frame]] = defaultdict(dict)
        for records in read_records(self.servers, self.settings.kafka.topic("frames")).values():
            for _, _, value in records:
                frame = read_frame(value)
                assert isinstance(frame, Frame)
                if frame.direction == Frame.IN:
                    found[frame.connection].setdefault(frame.sequence, frame)
        return found


@pytest.fixture
def place(broker_classpath: list[Path], tmp_path: Path) -> Iterator[Place]:
    port, controller_port, bridge_port = free_ports(3)
    settings = Settings(
        state=tmp_path / "state",
        network=Network(name=NETWORK),
        kafka=Kafka(embedded_port=port, embedded_controller_port=controller_port),
        bridge=Bridge(listen=(f"/ip4/127.0.0.1/tcp/{bridge_port}",)),
    )
    with start_broker(settings, lambda words: None) as servers:
        made = Place(settings, servers, tmp_path)
        try:
            yield made
        finally:
            made.bridge.stop()


def ids_of(frames: dict[int, Frame]) -> list[str]:
    ids = []
    for frame in frames.values():
        rpc = read_rpc(frame.payload)
        assert isinstance(rpc, RPC)
        ids += [message_id(message) for message in rpc.publish]
    return ids


def whole(frames: dict[int, Frame]) -> bool:
    """Whether a connection has its closing frame and no gap before it; asserts the order of the log."""
    assert list(frames) == sorted(frames)
    assert list(frames) == list(range(1, len(frames) + 1))
    return not frames[len(frames)].payload


def assert_all_there(place: Place, said: Said) -> None:
    place.bridge.stop()
    connections = place.log()
    heard = {connection: ids_of(frames) for connection, frames in connections.items()}
    assert all(whole(frames) for frames in connections.values())
    assert said.streams == [(0, len(said.ids))]
    assert [ids for ids in heard.values() if ids] == [said.ids]


def tell(case: str, place: Place, said: Said, settled: float, more: str = "") -> None:
    more = f"; {place.used}{more}"
    many, rate = len(said.ids), len(said.ids) / said.seconds
    print(f"\n{case}: {many} messages in {said.seconds:.1f} s, {rate:.0f}/s; written {settled:.1f} s later{more}")


def test_all_that_a_peer_says_is_in_the_log(place: Place) -> None:
    with place.sender() as sender:
        sender.go()
        said = sender.said()
        settled = place.settled(len(said.ids))
        tell("plain", place, said, settled)
        assert_all_there(place, said)


def test_a_killed_bridge_loses_no_more_than_what_is_not_said_again(place: Place) -> None:
    with place.sender(resend=RATE) as sender:
        sender.go()
        place.wait_heard(1 / 3)
        status = place.status()
        assert status is not None
        os.kill(status.pid, signal.SIGKILL)

        def runs_again() -> bool:
            place.bridge.check()
            now = place.status()
            return now is not None and now.pid != status.pid

        wait_until(runs_again, "the bridge runs again", 60)
        said = sender.said()
        assert len(said.streams) == 2
        (_, broke_off), (again, end) = said.streams
        assert end == len(said.ids)
        settled = place.settled(end - again)
        place.bridge.stop()

        connections = [frames for frames in place.log().values() if ids_of(frames)]
        assert len(connections) == 2
        first, second = sorted(connections, key=lambda frames: frames[1].observed_at)
        # the gap shows: the first connection has no closing frame, and a new one begins at 1
        assert not whole(first)
        assert whole(second)
        heard = ids_of(first)
        assert heard == said.ids[: len(heard)]
        assert ids_of(second) == said.ids[again:]
        lost = max(0, again - len(heard))
        assert broke_off - len(heard) <= LOST_AFTER * RATE + IN_THE_AIR
        assert set(said.ids) - set(heard) - set(ids_of(second)) == set(said.ids[len(heard) : again])
        tell(
            "bridge killed",
            place,
            said,
            settled,
            f"; {broke_off - len(heard)} were under way, {broke_off - again} said again, {lost} lost",
        )
