"""The kinds of faults, each with what Kiln must make of it. A kind is a function that does the fault; the harness then
waits until every part works again, unless the function already saw Kiln refuse in words."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from kafka import KafkaAdminClient, TopicPartition
from kit.awaiting import awaited

from chaos import proxy
from chaos.check import UNHEARD, Log
from chaos.proxy import Proxy
from chaos.whole_kiln import DISKS, FAKETIME, ROOM, ChaosError, Stack, files_below
from deploy.observe.status import read_checkpoint
from schemas.queries import QUERIES

NOTHING = "nothing is lost"
AIR = "lost: only what peers said in the 2 s before, or while no bridge was there"
REFUSED = "refused in words, or repaired; lost as by kill-bridge"
TOO_OLD = "nothing is lost; a batch heard before the first start is said to be too old"
STATED = {AIR: (UNHEARD,), REFUSED: (UNHEARD,), TOO_OLD: ("batch not published: too old",)}
"""What a kind may cause, by what it expects."""
_WORST_PAUSE = 4.0


@dataclass
class Scene:
    """What a fault may use. `log`: to be read before a fault takes records from it."""

    stack: Stack
    log: Log
    random: Random


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `does` returns what it did, in words. `needs`: "" or why this machine cannot have it."""

    name: str
    expects: str
    does: Callable[[Scene], str]
    needs: Callable[[Stack], str] = lambda stack: ""

    def states(self, what: str) -> bool:
        """Whether a problem is one that the kind may cause."""
        return any(what.startswith(each) for each in STATED.get(self.expects, ()))


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


def _no_helia(stack: Stack) -> str:
    return "" if stack.helia else "Helia is not installed"


def _no_proxy(stack: Stack) -> str:
    return "" if stack.proxy else proxy.absent() or "the proxy is not built"


def _pid(stack: Stack, part: str) -> int:
    stack.until(lambda: stack.pid(part) != 0, f"a {part} runs")
    return stack.pid(part)


# ---------------------------------------------------------------- killed


def _kill(scene: Scene, part: str) -> str:
    pid = _pid(scene.stack, part)
    os.kill(pid, signal.SIGKILL)
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


@kind("kill-ipfs", NOTHING, _no_helia)
def kill_ipfs(scene: Scene) -> str:
    """The bridge starts its IPFS node again, and publishes what waited."""
    told = _kill(scene, "ipfs")
    scene.stack.until(lambda: scene.stack.pid("ipfs") != 0, "the IPFS node is started again")
    return told


@kind("kill-driver", AIR)
def kill_driver(scene: Scene) -> str:
    """`kiln run`, its JVM and its workers."""
    scene.stack.kill()
    scene.stack.start()
    return "driver with its JVM"


@kind("kill-jvm", AIR)
def kill_jvm(scene: Scene) -> str:
    """The JVM alone: `kiln run` cannot go on, and must say so and end."""
    told = _kill(scene, "jvm")
    _must_end(scene.stack, "its JVM was killed")
    if "JVM" not in scene.stack.words():
        raise ChaosError(f"does not say that its JVM ended: {scene.stack.words()}")
    scene.stack.start()
    return told


@kind("kill-all", AIR)
def kill_all(scene: Scene) -> str:
    """Every process at once, the broker too. What was written is on the disk: this is no power cut."""
    scene.stack.kill_all()
    scene.stack.start()
    return "every process"


# ---------------------------------------------------------------- between commits


def _cut(scene: Scene, tables: tuple[str, ...]) -> str:
    stack, how = scene.stack, scene.random.choice(("fail", "fail", "kill"))
    words = f"{scene.random.choice(tables)} {scene.random.choice(('before', 'after'))} {how}"
    path = stack.control / "cut"
    fresh = path.with_suffix(".new")
    fresh.write_text(words)
    fresh.replace(path)
    if not awaited(lambda: not path.exists(), 60):
        path.unlink(missing_ok=True)
        raise ChaosError(f"no commit came to be cut: {words}; {stack.words()}")
    if how == "kill":
        stack.started().wait(timeout=20)
        stack.start()
    return words


@kind("cut-archive", AIR)
def cut_archive(scene: Scene) -> str:
    return _cut(scene, ("messages", "frames", "copies"))


@kind("cut-sink", AIR)
def cut_sink(scene: Scene) -> str:
    return _cut(scene, ("updates", "tips", "batches", "batch_tips", "publications"))


@kind("cut-checkpoint", AIR)
def cut_checkpoint(scene: Scene) -> str:
    """Killed after a micro-batch was planned and before it was committed."""
    stack, query = scene.stack, scene.random.choice(list(QUERIES))
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
def _paused(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _pause(scene: Scene, part: str) -> str:
    seconds = scene.random.uniform(1, _WORST_PAUSE)
    with _paused(_pid(scene.stack, part)):
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


@kind("pause-ipfs", NOTHING, _no_helia)
def pause_ipfs(scene: Scene) -> str:
    return _pause(scene, "ipfs")


@kind("slow-broker", NOTHING)
def slow_broker(scene: Scene) -> str:
    """It runs for a tenth of the time."""
    pid = _pid(scene.stack, "broker")
    for _ in range(15):
        with _paused(pid):
            time.sleep(0.18)  # the fault itself
        time.sleep(0.02)
    return "broker for 3 s"


@kind("cut-network", NOTHING, _namespaces)
def cut_network(scene: Scene) -> str:
    """Every packet between bridge and peers is dropped, for less than the time after which either hangs up."""
    seconds = scene.random.uniform(1, _WORST_PAUSE)
    subprocess.run(["ip", "link", "set", "chaos0", "down"], check=True)
    time.sleep(seconds)  # the outage itself
    subprocess.run(["ip", "link", "set", "chaos0", "up"], check=True)
    return f"for {seconds:.1f} s"


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
            with _paused(_pid(stack, "broker")):
                time.sleep(seconds)
        else:
            time.sleep(seconds)
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


def _torn(scene: Scene, choose: Callable[[Stack, Random], Path | None]) -> str:
    """Kills everything, empties a file as a power cut may, starts. Kiln repairs it, or refuses it in words."""
    stack = scene.stack
    stack.kill_all()
    path = choose(stack, scene.random)
    if path is None:
        stack.start()
        return "there was no such file"
    place = str(path.relative_to(stack.state))
    kept = path.read_bytes()
    path.write_bytes(b"")
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
    command = [sys.executable, "-m", "deploy.cli", "recover", "--yes"]
    done = subprocess.run(command, env=stack.kiln.environment, capture_output=True, text=True, timeout=120, check=False)
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


def _must_end(stack: Stack, why: str) -> None:
    try:
        stack.started().wait(timeout=90)
    except subprocess.TimeoutExpired:
        raise ChaosError(f"goes on although {why}") from None
    _refusal(stack)


def _checkpoint_file(folder: str) -> Callable[[Stack, Random], Path | None]:
    return lambda stack, random: stack.newest(random.choice(list(QUERIES)), folder)


def _last_of(folder: str, pattern: str) -> Callable[[Stack, Random], Path | None]:
    """The newest file, of a folder that is drawn among those that have such a file."""

    def choose(stack: Stack, random: Random) -> Path | None:
        found = [path for path in files_below(stack.state / folder) if path.match(pattern) and path.stat().st_size]
        places = sorted({path.parent for path in found})
        if not places:
            return None
        place = random.choice(places)
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
    os.kill(_pid(stack, "broker"), signal.SIGSTOP)  # killed below
    awaited(lambda: any(path.stat().st_size for path in files_below(stack.state / DISKS["spool"])), 10)
    return _torn(scene, _last_of(DISKS["spool"], "*"))


@kind("old-checkpoint", REFUSED)
def old_checkpoint(scene: Scene) -> str:
    """The checkpoint of a query, restored from before beside newer tables."""
    stack, query = scene.stack, scene.random.choice([name for name, each in QUERIES.items() if each.tables])
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


def _no_faketime(stack: Stack) -> str:
    return "" if FAKETIME.exists() else "libfaketime is not installed"


@kind("clock-bridge", TOO_OLD, _no_faketime)
def clock_bridge(scene: Scene) -> str:
    """Wrong by up to two days, and put right."""
    wrong = scene.random.choice((-172_800, -3_600, -30, 30, 3_600, 172_800))
    path = scene.stack.control / "faketime"
    path.write_text(f"{wrong:+d}\n")
    time.sleep(3)  # the fault itself
    path.write_text("+0\n")
    return f"{wrong:+d} s"


@kind("clock-driver", NOTHING)
def clock_driver(scene: Scene) -> str:
    """The clock by which the queries forget is wrong, and put right."""
    wrong = scene.random.choice((-172_800, -3_600, 3_600, 172_800))
    path = scene.stack.control / "clock"
    path.write_text(str(wrong))
    scene.stack.until_well()
    path.unlink()
    return f"{wrong:+d} s"


# ---------------------------------------------------------------- two of each


@kind("second-process", NOTHING)
def second_process(scene: Scene) -> str:
    """A second one on the same state folder must be refused in words, and the first one go on."""
    stack = scene.stack
    second = scene.random.choice((["run"], ["bridge"], ["job", "archive"], ["job", "batch"]))
    command = [sys.executable, "-m", "deploy.cli", *second]
    try:
        done = subprocess.run(
            command, env=stack.kiln.environment, capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        raise ChaosError(f"a second kiln {' '.join(second)} runs beside the first") from None
    said = (done.stdout + done.stderr).strip()
    if done.returncode == 0 or "Traceback" in said or "another Kiln" not in said:
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
        deadline = time.monotonic() + 30
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
