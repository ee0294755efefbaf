"""The kinds of faults, each with what Kiln must make of it. A kind is a function that does the fault; the harness then
waits until every part works again, unless the function already saw Kiln refuse in words."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

from kafka.admin import ConfigResource, ConfigResourceType

from chaos import proxy, wrong_clock
from chaos.check import REMOVED, REPEATED, UNHEARD, Log
from chaos.proxy import Proxy
from chaos.whole_kiln import DISKS, PATIENCE, ROOM, ChaosError, Stack, files_below
from kafka import KafkaAdminClient, KafkaProducer, TopicPartition
from kiln.deploy.ops.status import read_checkpoint
from kiln.schemas.kafka.records import TICK
from kiln.schemas.queries import QUERIES
from kit.awaiting import awaited
from kit.descriptors import descriptors

NOTHING = "nothing is lost"
AIR = "lost: only what peers said in the 2 s before, or while no bridge was there"
REFUSED = "refused in words, or repaired; lost as by kill-bridge"
TOO_OLD = "nothing is lost; a batch heard before the first start is said to be too old"
UNREAD = "lost as by kill-bridge; a batch that the broker removed before the publisher read it is counted and named"
STATED = {
    AIR: (UNHEARD,),
    REFUSED: (UNHEARD,),
    TOO_OLD: ("batch not published: too old",),
    UNREAD: (UNHEARD, REMOVED),
}
"""What a kind may cause, by what it expects."""
_WORST_PAUSE = 4.0
_OUTAGE = 40.0
_MORE = 4  # descriptors, of connections that are just being made
T = TypeVar("T")


@dataclass
class Scene:
    """What a fault may use. `log`: to be read before a fault takes records from it. `turn`: how many faults of its kind
    were before. `seed`: of the run."""

    stack: Stack
    log: Log
    random: Random
    turn: int
    seed: int

    def next_of(self, options: Sequence[T]) -> T:
        """One of these. Faults of one kind take all of them, in a seeded order, before one comes again."""
        order = Random(f"{self.seed}/{options}").sample(options, len(options))
        return order[self.turn % len(order)]


_NOTHING_ENDS = frozenset(("term", "second-process", "slow-part", "clock-log", "clock-driver"))
"""Kinds after which no batch is announced again: nothing is killed, and nothing loses Kafka."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `does` returns what it did, in words. `needs`: "" or why this machine cannot have it."""

    name: str
    expects: str
    does: Callable[[Scene], str]
    needs: Callable[[Stack], str] = lambda stack: ""

    def states(self, what: str) -> bool:
        """Whether a problem is one that the kind may cause."""
        repeats = () if self.name in _NOTHING_ENDS else (REPEATED,)
        return any(what.startswith(each) for each in (*STATED.get(self.expects, ()), *repeats))


KINDS: dict[str, Kind] = {}


def kind(
    name: str, expects: str, needs: Callable[[Stack], str] = lambda stack: ""
) -> Callable[[Callable[[Scene], str]], Callable[[Scene], str]]:
    """Puts a function into the registry."""

    def put(does: Callable[[Scene], str]) -> Callable[[Scene], str]:
        KINDS[name] = Kind(name, expects, does, needs)
        return does

    return put


def _namespaces(stack: Stack) -> str:
    return "" if stack.isolated else "namespaces of mounts and network are not permitted"


def _no_proxy(stack: Stack) -> str:
    return "" if stack.proxy else proxy.absent() or "the proxy is not built"


def _pid(stack: Stack, part: str) -> int:
    stack.until(lambda: stack.pid(part) != 0, f"a {part} runs")
    return stack.pid(part)


# ---------------------------------------------------------------- killed


def _told(stack: Stack, part: str, what: signal.Signals) -> int:
    """The process of a part that got a signal. Workers come and go."""
    while True:
        pid = _pid(stack, part)
        with suppress(ProcessLookupError):
            os.kill(pid, what)
            return pid


def _kill(scene: Scene, part: str) -> str:
    pid = _told(scene.stack, part, signal.SIGKILL)
    scene.stack.until_gone([pid])
    return f"{part} {pid}"


@kind("kill-bridge", AIR)
def kill_bridge(scene: Scene) -> str:
    return _kill(scene, "bridge")


@kind("kill-broker", NOTHING)
def kill_broker(scene: Scene) -> str:
    return _kill(scene, "broker")


@kind("kill-worker", NOTHING)
def kill_worker(scene: Scene) -> str:
    return _kill(scene, "worker")


@kind("kill-planner", NOTHING)
def kill_planner(scene: Scene) -> str:
    """The process that plans the micro-batches of one query."""
    return _kill(scene, "planner")


@kind("kill-driver", AIR)
def kill_driver(scene: Scene) -> str:
    """`kiln run`, its JVM and its workers. Now and then once more while Kiln starts."""
    scene.stack.kill()
    scene.stack.start()
    if scene.random.random() < 0.7:
        return "driver with its JVM"
    return f"driver with its JVM, and again {_some_time_on(scene)} s after the start"


def _some_time_on(scene: Scene) -> str:
    """Kills what starts at a seeded moment of the start, and starts it again."""
    seconds = scene.random.uniform(0.5, 15)
    time.sleep(seconds)  # the moment
    scene.stack.kill()
    scene.stack.start()
    return f"{seconds:.1f}"


@kind("kill-jvm", NOTHING)
def kill_jvm(scene: Scene) -> str:
    """The JVM alone: `kiln run` starts another, and says so."""
    words = "Kiln starts the JVM again"
    before = scene.stack.said().count(words)
    told = _kill(scene, "jvm")
    scene.stack.until(lambda: scene.stack.said().count(words) > before, "said that its JVM starts again")
    return told


@kind("kill-all", AIR)
def kill_all(scene: Scene) -> str:
    """Every process at once, the broker too. What was written is on the disk: this is no power cut."""
    scene.stack.kill_all()
    scene.stack.start()
    return "every process"


# ---------------------------------------------------------------- between commits


def _cut(scene: Scene, tables: tuple[str, ...]) -> str:
    """`tables`: in the order of their commits. Every place between two commits gets its turn, both ways."""
    stack = scene.stack
    places = [f"{table} before" for table in tables] + [f"{tables[-1]} after"]
    words = scene.next_of([f"{place} {how}" for place in places for how in ("fail", "kill")])
    path = stack.control / "cut"
    fresh = path.with_suffix(".new")
    fresh.write_text(words)
    fresh.replace(path)
    if not awaited(lambda: not path.exists(), PATIENCE):
        path.unlink(missing_ok=True)
        raise ChaosError(f"no commit came to be cut: {words}; {stack.words()}")
    if words.endswith("kill"):
        stack.until_ended("it was killed in a commit")
        stack.start()
    return words


@kind("cut-archive", AIR)
def cut_archive(scene: Scene) -> str:
    return _cut(scene, ("frames", "copies", "messages"))


@kind("cut-sink", AIR)
def cut_sink(scene: Scene) -> str:
    return _cut(scene, ("updates", "tips", "batch_tips", "batches", "publications", "quarantine"))


@kind("cut-checkpoint", AIR)
def cut_checkpoint(scene: Scene) -> str:
    """Killed after a micro-batch was planned and before it was committed."""
    stack, query = scene.stack, scene.next_of(list(QUERIES))
    delay = scene.random.uniform(0, 0.4)

    def planned() -> bool:
        offsets, commits = stack.newest(query, "offsets"), stack.newest(query)
        return offsets is not None and commits is not None and int(offsets.name) > int(commits.name)

    stack.until(planned, f"{query} plans a micro-batch")
    time.sleep(delay)  # seeded: files written, records sent, commits
    stack.kill()
    stack.start()
    return f"{query} {delay:.2f} s after its plan"


# ---------------------------------------------------------------- paused, cut off


@contextmanager
def _paused(stack: Stack, part: str) -> Iterator[None]:
    pid = _told(stack, part, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _pause(scene: Scene, part: str) -> str:
    seconds = scene.random.uniform(1, _WORST_PAUSE)
    with _paused(scene.stack, part):
        time.sleep(seconds)  # the outage itself
    return f"{part} for {seconds:.1f} s"


@kind("pause-bridge", NOTHING)
def pause_bridge(scene: Scene) -> str:
    return _pause(scene, "bridge")


@kind("pause-broker", NOTHING)
def pause_broker(scene: Scene) -> str:
    return _pause(scene, "broker")


@kind("pause-worker", NOTHING)
def pause_worker(scene: Scene) -> str:
    return _pause(scene, "worker")


@kind("pause-jvm", NOTHING)
def pause_jvm(scene: Scene) -> str:
    return _pause(scene, "jvm")


@kind("slow-part", NOTHING)
def slow_part(scene: Scene) -> str:
    """It runs for a tenth of the time."""
    stack = scene.stack
    part = scene.next_of(["broker", "bridge", "jvm", "worker"])
    for _ in range(15):
        with _paused(stack, part):
            time.sleep(0.18)  # the fault itself
        time.sleep(0.02)  # the part runs for a tenth of the time
    return f"{part} for 3 s"


@kind("cut-network", NOTHING, _namespaces)
def cut_network(scene: Scene) -> str:
    """Every packet between bridge and peers is dropped, for less than the time after which either hangs up."""
    seconds = scene.random.uniform(1, _WORST_PAUSE)
    subprocess.run(["ip", "link", "set", "chaos0", "down"], check=True)
    time.sleep(seconds)  # the outage itself
    subprocess.run(["ip", "link", "set", "chaos0", "up"], check=True)
    return f"for {seconds:.1f} s"


def _no_thin_network(stack: Stack) -> str:
    if not stack.isolated:
        return _namespaces(stack)
    done = subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", *_THIN, "1mbit"], check=False)
    if done.returncode:
        return "the kernel has no token bucket (tc qdisc tbf)"
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=True)
    return ""


_THIN = ("tbf", "burst", "4kb", "latency", "2s", "rate")


@kind("thin-network", NOTHING, _no_thin_network)
def thin_network(scene: Scene) -> str:
    """Few bytes a second between bridge and peers, and packets are dropped that wait for 2 s."""
    seconds, rate = scene.random.uniform(1, _WORST_PAUSE), scene.random.randint(64, 512)
    ends: tuple[tuple[list[str], str], ...] = ([], "chaos0"), (scene.stack.enter, "chaos1")
    try:
        for enter, end in ends:
            subprocess.run([*enter, "tc", "qdisc", "add", "dev", end, "root", *_THIN, f"{rate}kbit"], check=True)
        time.sleep(seconds)  # the fault itself
    finally:
        for enter, end in ends:
            subprocess.run([*enter, "tc", "qdisc", "del", "dev", end, "root"], check=False)
    return f"{rate} kbit/s for {seconds:.1f} s"


# ---------------------------------------------------------------- a proxy before the broker


def _for_seconds(scene: Scene, fault: AbstractContextManager[None]) -> str:
    seconds = scene.random.uniform(1, _WORST_PAUSE)
    with fault:
        time.sleep(seconds)  # the fault itself
    return f"for {seconds:.1f} s"


def _proxy(scene: Scene) -> Proxy:
    assert scene.stack.proxy is not None
    return scene.stack.proxy


@kind("proxy-slow", NOTHING, _no_proxy)
def proxy_slow(scene: Scene) -> str:
    """Each byte comes later, in both directions."""
    late = scene.random.randint(50, 1000)
    return f"{late} ms late " + _for_seconds(scene, _proxy(scene).toxic("latency", latency=late, jitter=late // 2))


@kind("proxy-thin", NOTHING, _no_proxy)
def proxy_thin(scene: Scene) -> str:
    """Few bytes a second on each connection."""
    rate = scene.random.randint(2, 100)
    return f"{rate} kB/s " + _for_seconds(scene, _proxy(scene).toxic("bandwidth", rate=rate))


@kind("proxy-silent", NOTHING, _no_proxy)
def proxy_silent(scene: Scene) -> str:
    """Connections stay open and carry nothing. At the end they are cut, and what was sent on them is lost."""
    return _for_seconds(scene, _proxy(scene).toxic("timeout", timeout=0))


@kind("proxy-cut", NOTHING, _no_proxy)
def proxy_cut(scene: Scene) -> str:
    """Connections are cut and refused: the broker lives and does not know of it."""
    return _for_seconds(scene, _proxy(scene).closed())


@kind("proxy-away", NOTHING, _no_proxy)
def proxy_away(scene: Scene) -> str:
    """Connections are refused for long: bridge and driver try again and again, and must not open more and more."""
    pids = {part: _pid(scene.stack, part) for part in ("bridge", "driver")}
    with _proxy(scene).closed():
        _most_open(pids, _OUTAGE / 4)
        first = _most_open(pids, _OUTAGE / 4)
        _most_open(pids, _OUTAGE / 4)
        last = _most_open(pids, _OUTAGE / 4)
    words = ", ".join(f"{part} {first[part]} then {last[part]}" for part in pids)
    if any(last[part] > first[part] + _MORE for part in pids):
        raise ChaosError(f"descriptors leak: {words}")
    return f"for {_OUTAGE:.0f} s; descriptors: {words}"


def _most_open(pids: Mapping[str, int], seconds: float) -> dict[str, int]:
    """The most descriptors that each part has open within some seconds."""
    most = dict.fromkeys(pids, 0)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        most = {part: max(most[part], descriptors(pid)) for part, pid in pids.items()}
        time.sleep(0.2)  # the fault itself goes on
    return most


@kind("proxy-torn", NOTHING, _no_proxy)
def proxy_torn(scene: Scene) -> str:
    """Each connection is cut after so many bytes, in the middle of a request or an answer."""
    most = scene.random.randint(1, 65536)
    return f"{most} bytes " + _for_seconds(scene, _proxy(scene).toxic("limit_data", bytes=most))


# ---------------------------------------------------------------- full disks


def _full(scene: Scene, disk: str) -> str:
    stack, seconds = scene.stack, scene.random.uniform(2, 5)
    path = str(stack.state / DISKS[disk])
    _until_full(path)
    ended = None
    try:
        if disk == "spool":  # it is written only while Kafka does not take frames
            with _paused(stack, "broker"):
                time.sleep(seconds)  # the outage itself
        else:
            time.sleep(seconds)  # the outage itself
        ended = stack.started().poll()
    finally:
        _room_again(path)
    if ended is None and stack.exit_code() is None:
        return f"{disk} for {seconds:.1f} s"
    words = _refusal(stack)
    stack.start()
    return f"{disk}: {words}"


def _room_again(path: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={ROOM}", path], check=True)


def _until_full(path: str) -> None:
    for _ in range(20):
        room = os.statvfs(path)
        used = (room.f_blocks - room.f_bfree) * room.f_frsize
        size = max(used, room.f_frsize)  # a disk of size 0 has no bound
        done = subprocess.run(["mount", "-o", f"remount,size={size}", path], check=False, capture_output=True)
        if done.returncode == 0:
            return  # else somebody wrote in between
    raise ChaosError(f"{path} cannot be filled")


@kind("full-state", AIR, _namespaces)
def full_state(scene: Scene) -> str:
    """The disk of logs and of the bridge's own files. Now and then Kiln is asked to end meanwhile: it ends in peace."""
    stack = scene.stack
    if scene.random.random() < 0.5:
        return _full(scene, "state")
    path = str(stack.state / DISKS["state"])
    _until_full(path)
    try:
        code = stack.terminate()
    finally:
        _room_again(path)
    if code not in (0, 130) or "Traceback" in stack.said():
        raise ChaosError(f"SIGTERM while the disk is full: ended with {code}: {stack.words()}")
    stack.start()
    return "state, with SIGTERM"


@kind("full-lake", AIR, _namespaces)
def full_lake(scene: Scene) -> str:
    return _full(scene, "lake")


@kind("full-checkpoint", AIR, _namespaces)
def full_checkpoint(scene: Scene) -> str:
    return _full(scene, "checkpoint")


@kind("full-spool", NOTHING, _namespaces)
def full_spool(scene: Scene) -> str:
    """The bridge must go on, and stop reading until there is room."""
    bridge = _pid(scene.stack, "bridge")
    told = _full(scene, "spool")
    if scene.stack.pid("bridge") != bridge:
        raise ChaosError("the bridge ended when its spool's disk was full")
    return told


@kind("full-broker", AIR, _namespaces)
def full_broker(scene: Scene) -> str:
    return _full(scene, "broker")


# ---------------------------------------------------------------- torn and restored files


def _emptied(data: bytes, random: Random) -> bytes:
    return b""


def _torn(
    scene: Scene,
    choose: Callable[[Scene], Path | None],
    tear: Callable[[bytes, Random], bytes] = _emptied,
) -> str:
    """Kills everything, tears a file as a power cut may, starts. Kiln repairs it, or refuses it in words."""
    stack = scene.stack
    stack.kill_all()
    path = choose(scene)
    if path is None:
        stack.start()
        return "there was no such file"
    place = str(path.relative_to(stack.state))
    kept, written = path.read_bytes(), path.stat()
    path.write_bytes(tear(kept, scene.random))
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))  # a power cut leaves the time of the write
    stack.start()
    if stack.exit_code() is None:
        return f"{place}: repaired"
    return f"{place}: {_recovered(stack, lambda: path.write_bytes(kept))}"


def _recovered(stack: Stack, put_back: Callable[[], object]) -> str:
    """After a refusal: by `kiln recover`, or else by a file or folder put back."""
    try:
        words = f"refused: {_refusal(stack)}"
    except ChaosError:
        put_back()  # so that the faults after this one have a Kiln
        raise
    command = [sys.executable, "-m", "kiln.deploy.cli", "recover", "--yes"]
    done = subprocess.run(
        command, env=stack.kiln.environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    if done.returncode != 0:  # it says what it cannot do
        put_back()
        stack.start()
        return f"{words}; put back"
    stack.start()
    if stack.exit_code() is None:
        return f"{words}; kiln recover"
    put_back()
    raise ChaosError(f"{words}; kiln recover finds nothing more to do, and Kiln ends: {stack.words()}")


def _refusal(stack: Stack) -> str:
    """Why Kiln ended, in words; ChaosError where it gave none."""
    said, code = stack.said(), stack.started().poll()
    if "Traceback (most recent call last)" in said:
        raise ChaosError(f"a stack trace instead of words: {said.strip().splitlines()[-1][:300]}")
    if not code:
        raise ChaosError(f"ended with {code}: {stack.words()}")
    return stack.words()


def _checkpoint_file(folder: str) -> Callable[[Scene], Path | None]:
    return lambda scene: scene.stack.newest(scene.next_of(list(QUERIES)), folder)


def _last_of(folder: str, pattern: str) -> Callable[[Scene], Path | None]:
    """The newest file, of a folder that is drawn among those that have such a file."""

    def choose(scene: Scene) -> Path | None:
        found = [
            path for path in files_below(scene.stack.state / folder) if path.match(pattern) and path.stat().st_size
        ]
        places = sorted({path.parent for path in found})
        if not places:
            return None
        place = scene.random.choice(places)
        return [path for path in found if path.parent == place][-1]

    return choose


@kind("torn-offsets", REFUSED)
def torn_offsets(scene: Scene) -> str:
    return _torn(scene, _checkpoint_file("offsets"))


@kind("torn-commits", REFUSED)
def torn_commits(scene: Scene) -> str:
    return _torn(scene, _checkpoint_file("commits"))


@kind("torn-state", REFUSED)
def torn_state(scene: Scene) -> str:
    """A file of a query's state store."""
    return _torn(scene, _last_of("checkpoints", "*.changelog"))


@kind("torn-table", REFUSED)
def torn_table(scene: Scene) -> str:
    """The last entry of a table's log."""
    return _torn(scene, _last_of("lake", "_delta_log/*.json"))


@kind("torn-parquet", REFUSED)
def torn_parquet(scene: Scene) -> str:
    """The last file of a table's rows."""
    return _torn(scene, _last_of("lake", "*.parquet"))


@kind("torn-spool", REFUSED)
def torn_spool(scene: Scene) -> str:
    """The last file of the spool, where the broker was away when the power went."""
    stack = scene.stack
    _told(stack, "broker", signal.SIGSTOP)  # killed below
    awaited(lambda: any(path.stat().st_size for path in files_below(stack.state / DISKS["spool"])), PATIENCE)
    return _torn(scene, _last_of(DISKS["spool"], "*"))


@kind("torn-log", REFUSED)
def torn_log(scene: Scene) -> str:
    """The last file of a topic's partition: records that nobody was promised were half written, or not at all."""

    def half_written(data: bytes, random: Random) -> bytes:
        size = random.randint(1, 4096)
        return data + random.choice((data[-2 * size : -size], bytes(size), random.randbytes(size)))

    return _torn(scene, _last_of(DISKS["broker"], "kiln.*/*.log"), half_written)


@kind("old-checkpoint", REFUSED)
def old_checkpoint(scene: Scene) -> str:
    """The checkpoint of a query, restored from before beside newer tables."""
    stack, query = scene.stack, scene.next_of(list(QUERIES))
    folder, kept = stack.settings.state / "checkpoints" / query, stack.folder / "kept"
    stack.kill_all()
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(folder, kept / "old")
    stack.start()
    stack.until_well()
    stack.kill_all()
    shutil.copytree(folder, kept / "new")
    _replace(folder, kept / "old")
    stack.start()
    if stack.exit_code() is None:
        return f"{query}: taken"
    return f"{query}: {_recovered(stack, lambda: _replace(folder, kept / 'new'))}"


def _replace(folder: Path, by: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(by, folder)


# ---------------------------------------------------------------- clocks


def _no_clock(stack: Stack) -> str:
    return "" if stack.wrong_clocks else wrong_clock.absent() or "what moves a clock is not built"


@kind("clock-bridge", TOO_OLD, _no_clock)
def clock_bridge(scene: Scene) -> str:
    """Wrong by up to two days, and put right."""
    wrong = scene.next_of((-172_800, -3_600, -30, 30, 3_600, 172_800))
    path = scene.stack.control / "bridge_clock"
    path.write_text(f"{wrong:+d}\n")
    time.sleep(4)  # the fault itself: the bridge looks at the file once a second
    path.write_text("+0\n")
    return f"{wrong:+d} s"


@kind("clock-driver", NOTHING)
def clock_driver(scene: Scene) -> str:
    """The clock by which the queries forget is wrong, and put right."""
    wrong = scene.next_of((-172_800, -3_600, 3_600, 172_800))
    path = scene.stack.control / "clock"
    path.write_text(str(wrong))
    scene.stack.until_well()
    path.unlink()
    return f"{wrong:+d} s"


@kind("clock-log", NOTHING)
def clock_log(scene: Scene) -> str:
    """A record with a wrong stamp: the broker's clock was wrong, and put right. Stamps that are ahead hold windows open
    until the clock is there, or until their separator's next update."""
    wrong, topic = scene.next_of([(wrong, topic) for wrong in (-172_800, 10, 40) for topic in ("updates", "frames")])
    part, value = TopicPartition(f"kiln.{topic}", 0), TICK
    if topic == "frames":  # one that is there already
        scene.log.read()
        part, value = next(
            (TopicPartition(part.topic, number), records[-1].value)
            for number, records in scene.log.records[topic].items()
            if records
        )
    options = scene.stack.client_options()
    with KafkaAdminClient(**options) as admin, KafkaProducer(**options) as producer:
        try:
            _stamps(admin, part.topic, "CreateTime")
            stamp = int((time.time() + wrong) * 1000)

            def stamped() -> bool:  # brokers take on settings a moment later
                sent = producer.send(part.topic, value=value, partition=part.partition, timestamp_ms=stamp)
                return int(sent.get(timeout=PATIENCE).timestamp) == stamp

            scene.stack.until(stamped, f"the stamp of a record of {part.topic} is set")
        finally:
            _stamps(admin, part.topic, "LogAppendTime")
    return f"{topic} {wrong:+d} s"


def _stamps(admin: KafkaAdminClient, topic: str, of: str) -> None:
    admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, {"message.timestamp.type": of})])


# ---------------------------------------------------------------- two of each


@kind("second-process", NOTHING)
def second_process(scene: Scene) -> str:
    """A second one on the same state folder must be refused in words, and the first one go on."""
    stack = scene.stack
    second = scene.next_of([["run"], ["bridge"], *(["job", name] for name in QUERIES)])
    command = [sys.executable, "-m", "kiln.deploy.cli", *second]
    try:
        done = subprocess.run(
            command, env=stack.kiln.environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        raise ChaosError(f"a second kiln {' '.join(second)} runs beside the first") from None
    said = (done.stdout + done.stderr).strip()
    if done.returncode == 0 or "Traceback" in said or "holds this lock of the state folder" not in said:
        raise ChaosError(f"a second kiln {' '.join(second)}: {done.returncode}: {said[-300:]}")
    return f"kiln {' '.join(second)}: {said.splitlines()[-1][:150]}"


# ---------------------------------------------------------------- the log's own


@kind("places-gone", AIR)
def places_gone(scene: Scene) -> str:
    """The consumer groups' offsets are deleted while the bridge is away, as a broker does when they expire."""
    stack = scene.stack
    admin = KafkaAdminClient(**stack.client_options())
    try:
        bridge = _pid(stack, "bridge")
        deadline = time.monotonic() + PATIENCE
        os.kill(bridge, signal.SIGKILL)
        stack.until_gone([bridge])
        groups = _groups(admin)
        while groups and time.monotonic() < deadline:  # a group with a live member is refused
            admin.delete_groups(groups)
            groups = _groups(admin)
            if stack.pid("bridge"):
                break
    finally:
        admin.close()
    return "deleted" if not groups else f"{', '.join(groups)} stayed"


def _groups(admin: KafkaAdminClient) -> list[str]:
    found = []
    for each in admin.list_groups():
        name = each["group_id"] if isinstance(each, dict) else each[0]
        if str(name).startswith("kiln."):
            found.append(str(name))
    return found


@kind("retention", NOTHING)
def retention(scene: Scene) -> str:
    """The broker removes what every query and the publisher have read."""
    stack = scene.stack
    scene.log.read()
    ends: dict[TopicPartition, int] = {}
    for query in QUERIES.values():
        for topic, offsets in read_checkpoint(stack.settings.checkpoints_root / query.name).offsets.items():
            for partition, offset in offsets.items():
                part = TopicPartition(topic, partition)
                ends[part] = min(offset, ends.get(part, offset))
    frames = {part: end for part, end in ends.items() if part.topic == "kiln.frames" and end}
    admin = KafkaAdminClient(**stack.client_options())
    try:
        admin.delete_records(frames)
    finally:
        admin.close()
    return f"{sum(frames.values())} records of frames"


@kind("retention-unread", UNREAD)
def retention_unread(scene: Scene) -> str:
    """The broker removes batches that `sink` has read and the publisher, which stands still, has not."""
    stack, topic = scene.stack, "kiln.batches"
    part = TopicPartition(topic, 0)

    def read_by_sink() -> int:
        return int(read_checkpoint(stack.settings.checkpoints_root / "sink").offsets.get(topic, {}).get(0, 0))

    before = stack.status()
    lost = before.publisher.lost if before and before.publisher else 0
    with KafkaAdminClient(**stack.client_options()) as admin:
        with _paused(stack, "bridge"):
            stood = read_by_sink()
            awaited(lambda: read_by_sink() > stood, _WORST_PAUSE)
            scene.log.read()
            end = read_by_sink()
            unread = scene.log.without_receipt(part.partition, end) - scene.log.removed
            scene.log.removed |= unread
            admin.delete_records({part: end})
        if scene.turn % 2:
            bridge = _told(stack, "bridge", signal.SIGKILL)
            stack.until_gone([bridge])
            lost = 0
    if unread:

        def said() -> bool:
            scene.log.read()  # what the publisher had in its memory goes out
            if not unread - scene.log.receipted():
                return True
            status = stack.status()
            return status is not None and status.publisher is not None and status.publisher.lost > lost

        stack.until(said, f"the publisher counts {len(unread)} batches that were removed unread")
    return f"{len(unread)} batches" + (", and the bridge killed" if scene.turn % 2 else "")


# ---------------------------------------------------------------- asked to end


@kind("term", AIR)
def term(scene: Scene) -> str:
    """SIGTERM in any phase, also while Kiln starts: Kiln ends in peace."""
    stack, after = scene.stack, ""
    if scene.random.random() < 0.4:
        stack.kill()
        stack.start()
        seconds = scene.random.uniform(0.5, 15)
        time.sleep(seconds)  # the phase
        after = f" {seconds:.1f} s after the start"
    code = stack.terminate()
    if code not in (0, 130) or "Traceback" in stack.said():
        raise ChaosError(f"SIGTERM{after}: ended with {code}: {stack.words()}")
    stack.start()
    return f"SIGTERM{after}"
