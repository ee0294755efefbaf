"""Faults at seeded moments, and a table of what came of them: `make chaos ARGS="--seed 1 --faults 20"`.

One Kiln runs under traffic of two peers. A fault comes, every part works again, the next fault comes. After each
`--every` faults the peers fall silent, and log, tables and ledger are compared (`chaos.check`). What is wrong counts
for the fault in whose time it was. Exit code 0: all held. 1: something did not. 2: the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from kafka.errors import KafkaError

from chaos import proxy, wrong_clock
from chaos.check import Log, Problem, check, quiet, told, unheard
from chaos.faults import KINDS, Kind, Scene
from chaos.whole_kiln import ChaosError, Stack

_ISOLATED = "CHAOS_ISOLATED"
_BROKEN = (ChaosError, proxy.ProxyError, subprocess.SubprocessError, OSError, KafkaError)
"""What ends a fault, and not the run."""
_BEFORE = 2_000_000  # µs: what a killed bridge may have in memory alone (docs/design/bridge.md)
_AFTER = 5_000_000  # µs: until peers that are back have their subscriptions, and batches of the time are made


@dataclass
class Fault:
    """One fault, and what came of it. Times in unix µs."""

    kind: Kind
    number: int
    turn: int = 0
    """faults of its kind before it"""
    began: int = 0
    ended: int = 0
    did: str = ""
    wrong: list[str] = field(default_factory=list)
    lost: int = 0
    """how much of the stated loss"""
    checked: bool = False
    """whether log, tables and ledger were compared since"""


class Run:
    """Faults on one stack."""

    def __init__(self, stack: Stack, seed: int, every: int, say: bool, kept: Path | None = None) -> None:
        """`kept`: a file that has, as JSON, all that is checked so far."""
        self._kept = kept
        self._stack = stack
        self._seed = seed
        self._every = every
        self._say = say
        self._log = Log(stack)
        self._known: set[tuple[str, object]] = set()
        self.done: list[Fault] = []
        self.began = time.time()
        self.unplaced: list[str] = []
        """what is wrong and belongs to no fault"""

    def all(self, faults: Sequence[Fault], until: float) -> None:
        """Every fault in turn; ends early when the time is up."""
        stack = self._stack
        stack.build()
        stack.start()
        stack.speak("go")
        stack.until_well()
        self._tell(f"Kiln runs, {len(faults)} faults to come")
        for place, fault in enumerate(faults):
            if time.monotonic() > until:
                self._tell(f"the time is up: {len(faults) - place} faults left out, from number {fault.number} on")
                break
            self._one(fault)
            if (place + 1) % self._every == 0 and place + 1 < len(faults):
                self._check()
        self._check()
        if stack.terminate() != 0:
            self.unplaced.append(f"SIGTERM at the end: {stack.words()}")
        self._keep()

    def _one(self, fault: Fault) -> None:
        stack, random = self._stack, Random(f"{self._seed}/{fault.number}/{fault.kind.name}")
        self.done.append(fault)
        time.sleep(random.uniform(0, 1.5))  # at any moment, seeded
        fault.began = time.time_ns() // 1000
        try:
            fault.did = fault.kind.does(Scene(stack, self._log, random, fault.turn, self._seed))
            stack.until_well()
        except _BROKEN as error:
            fault.wrong.append(f"{error}" if isinstance(error, ChaosError) else f"{error!r}")
            fault.ended = time.time_ns() // 1000
            self._begin_again(fault)
        fault.ended = time.time_ns() // 1000
        self._keep()
        self._tell(
            f"{fault.number} {fault.kind.name} ({(fault.ended - fault.began) / 1e6:.1f} s): {fault.did}"
            + "".join(f"\n    FAILED: {each}" for each in fault.wrong)
        )

    def _begin_again(self, fault: Fault) -> None:
        """So that the faults after one that failed have a Kiln."""
        self._stack.kill_all()
        self._stack.start()
        try:
            self._stack.until_well()
        except ChaosError as error:
            raise ChaosError(f"{fault.kind.name}: does not come back: {error}; before: {fault.wrong[0]}") from None

    def _check(self) -> None:
        stack = self._stack
        stack.speak("hush")
        waits = quiet(stack, self._log)
        if waits:
            status = stack.status()
            bridge = "no bridge" if status is None else f"publisher: {status.publisher.state}; {status.errors}"
            self.done[-1].wrong.append(f"never done: {waits}; {bridge}")
        for problem in (*check(stack, self._log), *unheard(stack)):
            if (problem.what, problem.about) not in self._known:
                self._known.add((problem.what, problem.about))
                self._place(problem)
        wrong = sum(bool(fault.wrong) for fault in self.done) + len(self.unplaced)
        frames, batches = (sum(1 for _ in self._log.of(name)) for name in ("frames", "batches"))
        self._tell(f"checked {frames} frames, {batches} batches: {wrong} wrong")
        for fault in self.done:
            fault.checked = True
        self._keep()
        stack.speak("go")

    def _keep(self) -> None:
        if self._kept is not None:
            self._kept.write_text(as_json(self, {}, self._seed))

    def _place(self, problem: Problem) -> None:
        """With a fault that may cause it, or else with the last one that had begun."""
        for fault in self.done:
            if fault.began - _BEFORE <= problem.at <= fault.ended + _AFTER and fault.kind.states(problem.what):
                fault.lost += 1
                return
        before = [fault for fault in self.done if fault.began - _BEFORE <= problem.at]
        if before:
            before[-1].wrong.append(told(problem))
        elif self.done and not problem.at:
            self.done[-1].wrong.append(f"{told(problem)} (of this fault or one of the {self._every - 1} before)")
        else:
            self.unplaced.append(told(problem))

    def _tell(self, words: str) -> None:
        if self._say:
            print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)


def plan(seed: int, faults: int, names: Sequence[str], each: int) -> list[Fault]:
    """The faults in a seeded order: `each` of each kind, or so many over all kinds. Kinds come in rounds."""
    random = Random(seed)
    count = each * len(names) or faults
    rounds = [random.sample(names, len(names)) for _ in range(-(-count // len(names)))] if names else []
    return [
        Fault(KINDS[name], turn * len(names) + place, turn)
        for turn, chosen in enumerate(rounds)
        for place, name in enumerate(chosen)
    ][:count]


def table(run: Run, absent: dict[str, str]) -> str:
    """Kinds × outcomes."""
    by_kind: dict[str, list[Fault]] = defaultdict(list)
    for fault in run.done:
        by_kind[fault.kind.name].append(fault)
    lines = ["kind             faults  held  failed  lost  longest  must be"]
    for name, faults in sorted(by_kind.items()):
        failed = sum(bool(fault.wrong) for fault in faults)
        longest = max((fault.ended - fault.began) / 1e6 for fault in faults)
        lost = sum(fault.lost for fault in faults)
        lines.append(
            f"{name:<16} {len(faults):>6} {len(faults) - failed:>5} {failed:>7} {lost:>5} {longest:>6.1f} s"
            f"  {faults[0].kind.expects}"
        )
    lines += [f"{name:<16} not here: {why}" for name, why in sorted(absent.items())]
    for fault in run.done:
        counts = Counter(each.split(":")[0] for each in fault.wrong)
        for words in fault.wrong[:3]:
            lines.append(f"FAILED {fault.number} {fault.kind.name} ({fault.did}): {words}")
        if len(fault.wrong) > 3:
            lines.append(
                f"       {fault.number} in all: " + ", ".join(f"{count} × {what}" for what, count in counts.items())
            )
    lines += [f"FAILED with no fault near: {words}" for words in run.unplaced[:10]]
    return "\n".join(lines)


def as_json(run: Run, absent: dict[str, str], seed: int) -> str:
    """The same for a program."""
    faults = [
        {
            "number": fault.number,
            "kind": fault.kind.name,
            "expects": fault.kind.expects,
            "did": fault.did,
            "seconds": round((fault.ended - fault.began) / 1e6, 1),
            "lost": fault.lost,
            "checked": fault.checked,
            "wrong": fault.wrong,
        }
        for fault in run.done
    ]
    told = {
        "seed": seed,
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(run.began)),
        "seconds": round(time.time() - run.began),
        "faults": faults,
        "unplaced": run.unplaced,
        "absent": absent,
    }
    return json.dumps(told, indent=1)


def isolate(arguments: Sequence[str]) -> None:
    """Becomes the same command in namespaces of its own, if this user may: its mounts and processes end with it."""
    command = ["unshare", *(["-r"] if os.getuid() else []), "-nmpf", "--kill-child", "--mount-proc"]
    try:
        may = subprocess.run([*command, "mount", "-t", "tmpfs", "x", "/mnt"], check=False, capture_output=True)
    except OSError:
        return
    if may.returncode == 0:
        again = [sys.executable, "-m", "chaos", *arguments]
        os.execvpe("unshare", [*command, *again], {**os.environ, _ISOLATED: "1"})


def main() -> None:
    parser = argparse.ArgumentParser(prog="make chaos", description="Faults at seeded moments in a whole running Kiln.")
    parser.add_argument("--seed", type=int, default=1, help="of kinds, moments and traffic (%(default)s)")
    parser.add_argument("--faults", type=int, default=20, help="how many, over all kinds (%(default)s)")
    parser.add_argument("--each", type=int, default=0, help="instead: so many of each kind")
    parser.add_argument("--from", dest="first", type=int, default=0, help="number of the first fault (%(default)s)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas (all)")
    parser.add_argument("--every", type=int, default=10, help="faults between two checks (%(default)s)")
    parser.add_argument(
        "--for", dest="seconds", type=float, default=3600, help="s, no fault begins later (%(default)s)"
    )
    parser.add_argument("--rate", type=float, default=30.0, help="messages a second (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where all is kept (a new one, removed if all held)")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing meanwhile")
    parser.add_argument("--keep", type=Path, help="a file for what is checked, as JSON (chaos.outcomes adds up)")
    given = parser.parse_args()
    names = given.kinds.split(",")
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        parser.error(f"no such kind: {', '.join(unknown)}. There are {', '.join(KINDS)}")
    # first, as there are no registries in a network of its own
    program = proxy.build() if any(name.startswith("proxy-") for name in names) and not proxy.absent() else None
    isolated = os.environ.get(_ISOLATED) == "1"
    if not isolated:
        isolate(sys.argv[1:])
    else:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    # the first process of a namespace gets no signal that the process does not ask for
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    until = time.monotonic() + given.seconds
    folder = given.folder or Path(tempfile.mkdtemp(prefix="kiln-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    clocks = wrong_clock.build() if "clock-bridge" in names and not wrong_clock.absent() else ""
    stack = Stack(
        folder,
        given.seed,
        isolated=isolated,
        rate=given.rate,
        wrong_clocks=clocks,
        proxy=program,
    )
    absent = {name: why for name in names if (why := KINDS[name].needs(stack))}
    here = [name for name in names if name not in absent]
    run = Run(stack, given.seed, given.every, not given.json, given.keep)
    try:
        run.all(plan(given.seed, given.faults, here, given.each)[given.first :], until)
    except _BROKEN as error:
        run.unplaced.append(f"{error}" if isinstance(error, ChaosError) else f"{error!r}")
    finally:
        stack.stop()
    print(as_json(run, absent, given.seed) if given.json else table(run, absent))
    failed = bool(run.unplaced) or any(fault.wrong for fault in run.done)
    if not failed and given.folder is None:
        subprocess.run(["rm", "-rf", str(folder)], check=False)
    elif failed:
        print(f'again: make chaos ARGS="{" ".join(sys.argv[1:])}"; files: {folder}', file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
