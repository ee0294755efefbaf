"""Break Kiln at random places, one at a time, and count the breaks that `make test` notices.

`make mutants ARGS="--seed 1 --places 60"`. Each break goes into a copy of the checkout, in which the tests of
`make test` run that load the changed module, those that import it by name first, until one fails. What no test
notices is printed: someone has to judge if it changes behaviour. Exit status 1 if a break was not noticed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from kiln.pipelines.native.library import LIBRARY
from mutants.loading import list_imports, list_loaded_files
from mutants.places import Change, list_changes

ROOT: Final = Path(__file__).resolve().parents[2]
ROOMS: Final = ("schemas/wire", "bridge/gossipsub", "pipelines/batch", "pipelines/decode", "pipelines/updates")
_HANG: Final = 1_800  # s for the tests of one break


class Break(NamedTuple):
    """A change of a file."""

    file: Path
    change: Change

    @property
    def place(self) -> str:
        return f"{self.file}:{self.change.line}"


def choose_breaks(root: Path, rooms: Sequence[str], count: int, seed: int) -> list[Break]:
    """Choose places at random, each as likely as every other, and at most one a line."""
    rng, found = Random(seed), dict[tuple[Path, int], Break]()
    for file in sorted(file for room in rooms for file in (root / room).rglob("*.py")):
        changes = list_changes(file.read_text("utf-8"))
        rng.shuffle(changes)
        found |= {(file, change.line): Break(file.relative_to(root), change) for change in changes}
    return rng.sample(list(found.values()), min(count, len(found)))


def find_tests(root: Path, file: Path) -> list[str]:
    """Find the test modules that load a module of Kiln, the likeliest to notice a break of it first."""
    changed = root / file
    found = []
    for path in (root / "tests").rglob("test_*.py"):
        folder = path.relative_to(root).parts[1]
        if folder not in ("unit", "fuzz") and "mark.main_path" not in path.read_text("utf-8"):
            continue
        if changed in list_loaded_files(root, path):
            is_indirect = changed not in list_imports(root, path)
            is_of_another = file.stem not in path.stem
            found.append((folder != "unit", is_indirect, is_of_another, str(path.relative_to(root))))
    return [path for *_, path in sorted(found)]


def run_tests(copy: Path, tests: Sequence[str]) -> str:
    """Run tests until one fails.

    Returns:
        The first failure; empty if all pass.
    """
    for group in ([*tests[:3]], [*tests[3:]]):  # those of the module itself are a few seconds, the others minutes
        if not group:
            continue
        command = [
            str(copy / ".venv/bin/python"),
            "-m",
            "pytest",
            "-q",
            "-x",
            "-m",
            "not slow",
            "-p",
            "no:cacheprovider",
        ]
        options = ["--color=no", "-n", "2", "--dist", "loadscope"] if len(group) > 3 else ["--color=no", "-n", "0"]
        environment = {**os.environ, "PYTHONPATH": f"{copy}:{copy}/tests", "PYTHONHASHSEED": "0"}
        try:
            done = subprocess.run(
                [*command, *options, *group], cwd=copy, env=environment, capture_output=True, text=True, timeout=_HANG
            )
        except subprocess.TimeoutExpired:
            return "the tests hang"
        if done.returncode not in (0, 5):  # 5: no test was selected
            lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            return lines[0].removeprefix("FAILED ").removeprefix("ERROR ").split(" - ")[0] if lines else "no report"
    return ""


def _copy_checkout(copy: Path) -> None:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    for name in (".venv", ".jars", str(LIBRARY.relative_to(ROOT))):
        (copy / name).symlink_to(ROOT / name)


def _judge(copy: Path, breaks: Sequence[Break]) -> Iterator[tuple[Break, str]]:
    for number, each in enumerate(breaks, 1):
        path = copy / each.file
        source = path.read_text("utf-8")
        path.write_text(each.change.apply(source), "utf-8")
        began = time.monotonic()
        try:
            failure = run_tests(copy, find_tests(copy, each.file))
        finally:
            path.write_text(source, "utf-8")
        if "::" in failure and run_tests(copy, [failure]):
            sys.exit(f"{each.place}: {failure} fails without the break, too")
        said = failure or "NOT NOTICED"
        print(
            f"{number:3} {each.place}: {each.change.before!r} -> {each.change.after!r}: {said}"
            f" ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
        yield each, failure


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--places", type=int, default=60)
    parser.add_argument("--rooms", nargs="*", default=ROOMS, help="folders, by default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome of each break here, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kiln-mutants-") as folder:
        copy = Path(folder)
        _copy_checkout(copy)
        outcome = list(_judge(copy, choose_breaks(copy, options.rooms, options.places, options.seed)))
    if options.json:
        rows = [{"place": each.place, **each.change.__dict__, "noticed_by": failure} for each, failure in outcome]
        options.json.write_text(json.dumps(rows, indent=1))
    missed = [each for each, failure in outcome if not failure]
    print(f"{len(outcome) - len(missed)} of {len(outcome)} noticed")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
