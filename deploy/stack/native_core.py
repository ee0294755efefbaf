"""Build the native core, or explain how to get the compiler that it needs.

`make setup` calls `python -m kiln.deploy.stack.native_core`, which builds the core if rustc is there and else names the
command. `make native` calls it with `--install`, which installs rustc as root on Debian, and fails without a core.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from kiln.conf.process.errors import PrerequisiteError
from kiln.pipelines.native.library import BUILD_COMMAND, LIBRARY, build_library, find_rustc

_SIZE = "80 MB of packages, 400 MB on the disk"


def install_rustc() -> None:
    """Install rustc with apt-get, as root on Debian and its derivatives.

    Raises:
        PrerequisiteError: The user is not root, there is no apt-get, or it fails.
    """
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        raise PrerequisiteError(
            "the native core needs rustc 1.63 or later, and there is none on PATH. Install it (Debian, Ubuntu: "
            f"sudo apt-get install rustc) or set RUSTC to one, and run {BUILD_COMMAND}"
        )
    print(f"installing rustc ({_SIZE})", flush=True)
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # an old package list may name versions that are gone
    subprocess.run([apt, "update", "-q"], env=environ, stdin=subprocess.DEVNULL, check=False)
    command = [apt, "install", "-y", "-q", "--no-install-recommends", "rustc"]
    if subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise PrerequisiteError(f"apt-get cannot install rustc; see its output above. Then run {BUILD_COMMAND}")


def main(arguments: list[str]) -> int:
    """Build the core. With `--install`, install rustc if it is missing, and return 1 if the core cannot be built."""
    must_build = "--install" in arguments
    try:
        if must_build and find_rustc() is None:
            install_rustc()
        rustc = find_rustc()
        if rustc is None:
            print(f"no rustc, so Python decodes all frames. For the native core: {BUILD_COMMAND}")
            return 0
        build_library(rustc)
    except PrerequisiteError as error:
        print(error, file=sys.stderr)
        return 1 if must_build else 0
    print(f"native core: {LIBRARY}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
