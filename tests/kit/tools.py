"""`make tools`: install or build programs that some tests need and a checkout lacks, once per machine.

All programs but chromium are kept in `~/.cache/kiln-tests`, where tests find them. A step that fails prints its error,
and the tests that need the step's program are skipped.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from kit import api_server, jdbc_driver, validators
from kit.foreign_peer import CACHE, ForeignPeerError, run_tool

BIN = CACHE / "bin"


def fetch_prometheus() -> None:
    """Unpack prometheus and promtool from Debian's package. An installed package would start a server."""
    programs = ("prometheus", "promtool")
    if all(map(_find, programs)):
        return
    BIN.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=BIN) as name:
        folder = Path(name)
        _run_apt(["download", "prometheus"], folder)
        (package,) = folder.glob("*.deb")
        run_tool(["dpkg-deb", "--extract", package, folder], folder, {})
        for program in programs:
            (folder / "usr" / "bin" / program).replace(BIN / program)


def install_chromium() -> None:
    """Install Debian's chromium, as root."""
    if _find("chromium"):
        return
    if os.getuid() != 0:
        raise ForeignPeerError("you are not root. On Debian: sudo apt-get install chromium")
    _run_apt(["install", "--yes", "--no-install-recommends", "chromium"], CACHE)


def _find(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path=str(BIN))


def _run_apt(arguments: list[str], folder: Path) -> None:
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        run_tool(["apt-get", *arguments], folder, environment)
    except ForeignPeerError:
        run_tool(["apt-get", "update"], folder, environment)  # lists of packages are missing, or too old
        run_tool(["apt-get", *arguments], folder, environment)


STEPS: dict[str, Callable[[], None]] = {
    "prometheus": fetch_prometheus,
    "chromium": install_chromium,
    "helm": validators.fetch_helm,
    "compose": validators.build_compose,
    "kubeconform": validators.build_kubeconform,
    "jdbc": jdbc_driver.fetch,
}
SLOW: dict[str, Callable[[], None]] = {"api-server": api_server.build}


def main(names: list[str]) -> int:
    """Run the steps of these names, or all but the slow ones.

    Returns:
        Exit status: 0, also if a step failed, because the step's tests are then skipped.
    """
    steps = {**STEPS, **SLOW}
    if unknown := sorted(set(names) - set(steps)):
        print(f"there is no step {', '.join(unknown)}. Steps: {', '.join(steps)}", file=sys.stderr)
        return 2
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "tools.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another checkout may install the same
        for name in names or STEPS:
            began = time.monotonic()
            try:
                steps[name]()
            except (ForeignPeerError, OSError, subprocess.CalledProcessError) as error:
                print(f"{name}: left out, so its tests skip: {_find_cause(str(error))}", flush=True)
            else:
                print(f"{name}: ready, in {time.monotonic() - began:.0f} s", flush=True)
    return 0


def _find_cause(text: str) -> str:
    lines = text.strip().splitlines()
    return next((line for line in lines if line.startswith("E: ")), lines[-1])  # apt-get warns after its errors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
