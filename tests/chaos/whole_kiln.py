"""One Kiln with all its parts, two peers that feed it, and what a fault needs to know of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from chaos.feeding_peers import Entry, read_ledger
from chaos.proxy import Proxy
from conftest import free_ports
from kiln.conf.process.bridge_status import BridgeStatus, read_status
from kiln.conf.settings.model import Kafka, Network, Settings
from kiln.deploy.stack.embedded_broker import find_running_broker
from kiln.schemas.queries import QUERIES
from kit.awaiting import awaited
from kit.kiln_process import Kiln

ROOT = Path(__file__).resolve().parents[2]
NETWORK = "local-chaos"
ROOM = 2 << 30  # bytes of each small disk
DISKS = {
    "state": ".",  # what is on no other: the bridge's files, the IPFS node's, logs
    "lake": "lake",
    "checkpoint": "checkpoints",
    "spool": "bridge/spool",
    "broker": "broker",
}
OURS, THEIRS = "10.99.0.1", "10.99.0.2"
PATIENCE = 240.0
"""s until what is awaited counts as never. All of it takes a tenth of that on 2 cores, and more beside other work."""


class ChaosError(AssertionError):
    """Kiln did not do what the kind of fault says that Kiln does."""


class Found(NamedTuple):
    """A process."""

    pid: int
    parent: int
    command: str


def processes() -> list[Found]:
    """All there are."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        found.append(Found(int(folder.name), parent, command))
    return found


def below(pid: int) -> list[Found]:
    """The children of a process, their children, and so on."""
    all_, found, parents = processes(), [], {pid}
    while parents:
        children = [each for each in all_ if each.parent in parents]
        found += children
        parents = {each.pid for each in children}
    return found


class Stack:
    """`start()`, faults, `stop()`."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        isolated: bool,
        rate: float = 30.0,
        wrong_clocks: str = "",
        proxy: Path | None = None,
        network: str = NETWORK,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """`isolated`: in namespaces of mounts and network of its own. `wrong_clocks`: what to preload into the bridge,
        so that its clock can be moved. `proxy`: the program of a proxy before the broker. `settings`: others
        (KILN_…)."""
        self.folder = folder
        self.isolated = isolated
        self.control = folder / "control"
        self.control.mkdir(parents=True)
        self._seed = seed
        self._rate = rate
        ports = free_ports(6)
        self.proxy = Proxy(proxy, ports[4], ports[5], ports[0]) if proxy else None
        self.wrong_clocks = wrong_clocks
        self.kiln = Kiln(
            folder / "state",
            ports,
            {
                "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
                "CHAOS_CONTROL": str(self.control),
                **({"CHAOS_CLOCK": wrong_clocks} if wrong_clocks else {}),
                **({"CHAOS_PROXY": str(ports[5])} if proxy else {}),
                "KILN_NETWORK": network,
                "KILN_DURABILITY": "power",  # as by default
                "KILN_BRIDGE__LISTEN": "/ip4/127.0.0.1/tcp/0",
                "KILN_DISCOVERY__ENABLED": "false",
                "KILN_PUBLISH__ENABLED": "true",
                "KILN_IPFS__FETCH": "false",  # no peer has the geneses of synthetic streams
                "KILN_JOBS__ARCHIVE__TRIGGER": "2s",
                "KILN_JOBS__SINK__TRIGGER": "2s",
                **(settings or {}),
            },
        )
        self.state = self.kiln.state
        kafka = Kafka(embedded_port=ports[0], embedded_controller_port=ports[1])
        self.settings = Settings(state=self.state, kafka=kafka, network=Network(name=network))
        self.servers = kafka.servers
        self._peer_ports = ports[2:4]
        self._peers: subprocess.Popen[str] | None = None
        self._holder: subprocess.Popen[bytes] | None = None
        self._mounted: list[Path] = []
        self.enter: list[str] = []
        """what runs a command in the peers' network"""
        self._addresses: list[str] = []
        self.process: subprocess.Popen[str] | None = None
        self._said_from = 0
        (self.control / "bridge_clock").write_text("+0\n")

    # ---------------------------------------------------------------- life

    def build(self) -> None:
        """Disks, network, peers. Nothing of Kiln runs yet."""
        self.state.mkdir()
        host = "127.0.0.1"
        if self.isolated:
            for place in DISKS.values():
                path = self.state / place
                path.mkdir(parents=True, exist_ok=True)
                _do("mount", "-t", "tmpfs", "-o", f"size={ROOM},mode=0700", "chaos", str(path))
                self._mounted.append(path)
            self._holder = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
            there = str(self._holder.pid)
            self.enter, host = ["nsenter", "-t", there, "-n"], THEIRS
            if not awaited(lambda: os.readlink(f"/proc/{there}/ns/net") != os.readlink("/proc/self/ns/net"), 60):
                raise ChaosError("the peers have no network of their own")
            _do("ip", "link", "add", "chaos0", "type", "veth", "peer", "name", "chaos1", "netns", there)
            _do("ip", "addr", "add", f"{OURS}/24", "dev", "chaos0")
            _do("ip", "link", "set", "chaos0", "up")
            _do(*self.enter, "ip", "addr", "add", f"{THEIRS}/24", "dev", "chaos1")
            _do(*self.enter, "ip", "link", "set", "chaos1", "up")
            _do(*self.enter, "ip", "link", "set", "lo", "up")
        if self.proxy is not None:
            self.proxy.start()
        options = {
            "folder": self.folder / "peers",
            "network": self.settings.network.name,
            "host": host,
            "ports": ",".join(map(str, self._peer_ports)),
            "rate": self._rate,
            "seed": self._seed,
        }
        with (self.folder / "peers.log").open("wb") as log:
            self._peers = subprocess.Popen(
                [*self.enter, sys.executable, "-m", "chaos.feeding_peers", *_options(options)],
                cwd=ROOT / "tests",
                env=self.kiln.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._peers.stdout is not None
        self._addresses = self._peers.stdout.readline().split()
        if not self._addresses:
            raise ChaosError(f"no peers: {(self.folder / 'peers.log').read_text()}")

    def start(self) -> None:
        """Starts Kiln; returns at once."""
        self._said_from = self._out.stat().st_size if self._out.exists() else 0
        with self._out.open("ab") as to:
            bootstrap = [word for address in self._addresses for word in ("--bootstrap", address)]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "chaos.kiln_under_test", "run", *bootstrap],
                cwd=self.folder,
                env=self.kiln.environment,
                stdin=subprocess.DEVNULL,
                stdout=to,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def started(self) -> subprocess.Popen[str]:
        """The process of `kiln run`."""
        assert self.process is not None
        return self.process

    def speak(self, word: str) -> None:
        """ "go" or "hush" to the peers."""
        assert self._peers is not None
        assert self._peers.stdin is not None
        self._peers.stdin.write(f"{word}\n")
        self._peers.stdin.flush()

    def kill(self) -> None:
        """SIGKILL to `kiln run`, its JVM and its workers. Bridge and broker hear of it, and end."""
        process = self.started()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill_all(self) -> None:
        """SIGKILL to everything of Kiln at once, as in a power cut."""
        pids = [each.pid for each in below(self.started().pid)] + [self.pid("broker"), self.pid("bridge")]
        pids = [pid for pid in pids if pid]
        self.kill()
        for pid in pids:
            _kill(pid)
        self.until_gone(pids)

    def terminate(self, patience: float = PATIENCE) -> int:
        """SIGTERM to `kiln run`, and its exit code."""
        process = self.started()
        process.terminate()
        try:
            return process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            raise ChaosError(f"does not end within {patience:g} s of SIGTERM") from None

    def stop(self) -> None:
        """Ends everything; leaves the files."""
        if self.process is not None:
            self.kill_all()
        for each in (self._peers, self._holder):
            if each is not None:
                each.kill()
                each.wait()
        if self.proxy is not None:
            self.proxy.stop()
        if self.isolated:
            subprocess.run(["ip", "link", "del", "chaos0"], check=False, capture_output=True)
        if self._mounted and (self.state / "logs").exists():  # files of a small disk go with the disk
            shutil.copytree(self.state / "logs", self.folder / "logs", dirs_exist_ok=True)
        while self._mounted:
            subprocess.run(["umount", "-l", str(self._mounted.pop())], check=False, capture_output=True)

    # ---------------------------------------------------------------- what is

    @property
    def _out(self) -> Path:
        return self.folder / "started.out"

    def said(self) -> str:
        """What `kiln run` printed since its last start."""
        with self._out.open("rb") as out:
            out.seek(self._said_from)
            return out.read().decode(errors="replace")

    def words(self) -> str:
        """Its last words in one line, without figures."""
        lines = [line.strip() for line in self.said().splitlines() if line.strip() and " | frames " not in line]
        named = [line for line in lines if "rror" in line or "stopped:" in line or "is locked by" in line]
        return " / ".join((named or lines)[-2:])[:400]

    def status(self) -> BridgeStatus | None:
        """Of a bridge that lives; by the time of the file, as the bridge's own clock may be wrong."""
        path = self.state / "bridge" / "status.json"
        try:
            fresh = time.time() - path.stat().st_mtime < 3
        except OSError:
            return None
        return read_status(path) if fresh else None

    def pid(self, part: str) -> int:
        """Return the process id of "driver", "jvm", "planner", "worker", "bridge" or "broker", or 0 if it does not
        run."""
        if part == "broker":
            told = self.state / "broker" / "address.json"
            return int(json.loads(told.read_bytes())["pid"]) if find_running_broker(self.state) and told.exists() else 0
        driver = self.started()
        if part == "driver":
            return 0 if driver.poll() is not None else driver.pid
        children = below(driver.pid)
        if part == "bridge":
            return next((each.pid for each in children if "kiln.bridge.app.main" in each.command), 0)
        if part == "jvm":
            return next((each.pid for each in children if "SparkSubmit" in each.command), 0)
        if part == "planner":
            return next((each.pid for each in children if "python_streaming_source_runner" in each.command), 0)
        daemons = {each.pid for each in children if "worker_daemon" in each.command}
        leaves = [each.pid for each in children if each.pid in daemons and each.parent in daemons]
        return leaves[0] if leaves else 0

    def newest(self, query: str, folder: str = "commits") -> Path | None:
        """The newest file of a query's checkpoint."""
        files = (self.settings.state / "checkpoints" / query / folder).glob("[0-9]*")
        return max(files, key=lambda path: int(path.name), default=None)

    def _committed_since(self, moment: float) -> bool:
        for query in QUERIES:
            newest = self.newest(query)
            try:
                if newest is None or newest.stat().st_mtime < moment:
                    return False
            except OSError:
                return False  # Spark has just removed it: there is a newer one
        return True

    def client_options(self) -> dict[str, str | list[str]]:
        """Of any Kafka client."""
        return self.settings.broker.client_options()

    def ledger(self) -> list[Entry]:
        """What the peers said and heard."""
        return read_ledger(self.folder / "peers")

    # ---------------------------------------------------------------- waiting

    def until(self, true: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
        """ChaosError: Kiln ended, or something did not come in time."""

        def holds() -> bool:
            if true():
                return True
            ended = self.started().poll()
            if ended is not None:
                raise ChaosError(f"ended with {ended}: {self.words()}")
            return False

        if not awaited(holds, patience):
            raise ChaosError(f"not within {patience:g} s: {what}; {self.words()}")

    def until_gone(self, pids: list[int]) -> None:
        """Until none of the processes lives."""
        if not awaited(lambda: not any(Path(f"/proc/{pid}/stat").exists() and _lives(pid) for pid in pids), PATIENCE):
            raise ChaosError("killed processes live on")

    def until_well(self, patience: float = PATIENCE) -> None:
        """Until every part works again: peers, spool, and a micro-batch of each query that was done after this call."""
        since = time.time()

        def well() -> bool:
            status = self.status()
            if status is None or len(status.peers) < 2 or status.spool.waiting > 200:
                return False
            return self._committed_since(since)

        self.until(well, "all parts work", patience)

    def until_ended(self, why: str) -> int:
        """Waits until `kiln run` has ended by itself, and its exit code. ChaosError: it goes on although `why`."""
        try:
            return self.started().wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            raise ChaosError(f"goes on although {why}") from None

    def exit_code(self, patience: float = PATIENCE) -> int | None:
        """Waits until Kiln is well (None), or has ended (its exit code)."""
        try:
            self.until_well(patience)
        except ChaosError:
            code = self.started().poll()
            if code is None:
                raise
            return code
        return None


def _options(named: Mapping[str, object]) -> list[str]:
    return [word for name, value in named.items() for word in (f"--{name}", str(value))]


def _do(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ChaosError(f"{' '.join(command)}: {done.stderr.strip()}")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _lives(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def files_below(folder: Path) -> Iterator[Path]:
    """All files, oldest first."""
    yield from sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_mtime)
