"""Fuzzes the targets, one after another: `python -m fuzz [--for 60] [TARGET…]`, in the folder `tests`.

With atheris (`pip install atheris`, Linux), inputs grow towards code that none has reached. Without it they are random
changes of the corpus. `.fuzz/targets/TARGET` keeps what is worth keeping from run to run. Prints, by target,
executions, how many blocks of memory Python holds more at the end than after a tenth of the time, and, measured apart,
the worst CPU time per byte. Exit code 1: an exception, a hang of 100 ms, more than 2 µs per byte, or growth.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[2]
FOUND = ROOT / ".fuzz" / "targets"
_GROWTH = 150_000  # blocks: bounded caches fill


class Counted:
    """A target that counts, and tells a file each second, as libFuzzer never returns."""

    def __init__(self, function: Callable[[bytes], None], seconds: float, told: Path) -> None:
        self._function = function
        self._told = told
        self._began = self._at = time.monotonic()
        self._settled = self._began + seconds / 10
        self._executions = 0
        self._blocks: int | None = None

    def __call__(self, data: bytes) -> None:
        self._function(data)
        self._executions += 1
        if self._executions & 63 == 0 and time.monotonic() > self._at + 1:
            self.tell()

    def tell(self) -> None:
        """How many executions, and what grew."""
        self._at = time.monotonic()
        growth = 0
        if self._at > self._settled:
            gc.collect()
            blocks = sys.getallocatedblocks()
            self._blocks = blocks if self._blocks is None else self._blocks
            growth = blocks - self._blocks
        self._told.write_text(json.dumps({"executions": self._executions, "growth": growth}))


def fuzz_here(name: str, seconds: float, told: Path) -> None:
    """In a process of its own. Whatever the target raises ends it."""
    folder = FOUND / name
    folder.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("atheris") is not None:
        import atheris

        with atheris.instrument_imports(include=["schemas", "bridge", "pipelines"]):
            from fuzz.measuring import KEPT, LONGEST
            from fuzz.targets import TARGETS
        options = [f"-max_total_time={int(seconds)}", f"-max_len={LONGEST}", "-timeout=10", "-rss_limit_mb=2048"]
        options += [f"-artifact_prefix={FOUND}/{name}-", "-print_final_stats=0", "-verbosity=0"]
        arguments = [sys.argv[0], *options, str(folder), *([str(KEPT / name)] if (KEPT / name).is_dir() else [])]
        atheris.Setup(arguments, Counted(TARGETS[name], seconds, told))
        atheris.Fuzz()
        return
    from fuzz.measuring import KEPT, LONGEST, corpus
    from fuzz.targets import TARGETS

    counted, random = Counted(TARGETS[name], seconds, told), Random()
    inputs = [*corpus(KEPT / name, folder), b""]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        data = changed(random.choice(inputs), random.choice(inputs), random)[:LONGEST]
        try:
            counted(data)
        except Exception:  # whatever it is: raised again
            (FOUND / f"{name}-crash-{hashlib.sha1(data).hexdigest()}").write_bytes(data)
            raise
    counted.tell()


def changed(data: bytes, other: bytes, random: Random) -> bytes:
    """One input changed in a few places."""
    made = bytearray(data)
    for _ in range(random.randint(1, 5)):
        at = random.randint(0, len(made))
        match random.randrange(5):
            case 0:
                made[at : at + 1] = random.randbytes(1)
            case 1:
                made[at:at] = random.randbytes(random.randint(1, 8))
            case 2:
                del made[at : at + random.randint(1, 16)]
            case 3:
                made[at:at] = made[at : at + random.randint(1, 64)] * random.randint(1, 20)
            case 4:
                made[at:] = other[random.randint(0, len(other)) :]
    return bytes(made)


def fuzz(name: str, seconds: float) -> tuple[str, bool]:
    """Fuzzes and measures one target: a line for people, and whether all was well."""
    from fuzz.measuring import KEPT, MOST, MOST_PER_BYTE, corpus, cost
    from fuzz.targets import STEPS, TARGETS
    from kit.cpu_time import measure_step

    FOUND.mkdir(parents=True, exist_ok=True)
    told = FOUND / f"{name}.json"
    told.unlink(missing_ok=True)
    command = [sys.executable, "-m", "fuzz", "--here", str(told), "--for", str(seconds), name]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=False)
    found = json.loads(told.read_text()) if told.exists() else {"executions": 0, "growth": 0}
    faults = []
    if done.returncode:
        faults.append(f"ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    if found["growth"] > _GROWTH:
        faults.append(f"{found['growth']} blocks more")
    step = measure_step()
    spent = cost(TARGETS[name], corpus(KEPT / name, FOUND / name), 12)
    step = max(step, measure_step())
    if (spent.per_byte > MOST_PER_BYTE * step and name not in STEPS) or spent.longest > MOST * step:
        slow = FOUND / f"{name}-slow-{hashlib.sha1(spent.worst).hexdigest()}"
        slow.write_bytes(spent.worst)
        faults.append(f"too slow: {slow}")
    line = (
        f"{name:<14} {found['executions']:>11,} {spent.per_byte * 1e6:>8.2f} µs/byte {spent.longest * 1e3:>7.1f} ms"
        f" {found['growth']:>+8} blocks  {'; '.join(faults)}"
    )
    return line, not faults


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--for", dest="seconds", type=float, default=60, help="s for each target (%(default)s)")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.chdir(ROOT / "tests")
    if given.here is not None:
        fuzz_here(given.targets[0], given.seconds, given.here)
        return
    from fuzz.targets import TARGETS

    unknown = set(given.targets) - TARGETS.keys()
    if unknown:
        parser.error(f"no such target: {', '.join(sorted(unknown))}. There are {', '.join(TARGETS)}")
    with_atheris = importlib.util.find_spec("atheris") is not None
    print(f"{'with atheris' if with_atheris else 'random changes (no atheris)'}, {given.seconds:g} s each", flush=True)
    well = True
    for name in given.targets or TARGETS:
        line, good = fuzz(name, given.seconds)
        print(line, flush=True)
        well = well and good
    sys.exit(not well)


if __name__ == "__main__":
    main()
