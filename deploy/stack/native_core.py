"""Build the native core, or explain how to get the compiler that it needs.

`make setup` calls `python -m kiln.deploy.stack.native_core`, which builds the core if rustc is installed, and else
prints how to build it. `make native` adds `--install`: as root on Debian, this installs rustc. With `--install`, the
exit code is 1 if the core cannot be built.

`--wheel WHEEL` writes a copy of a wheel with the core. The tag of the copy contains the glibc version with which the
core was built, so that pip does not install the copy on a system with an older glibc. Source: PEP 600.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path
from typing import Final
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from kiln.conf.process.errors import PrerequisiteError
from kiln.pipelines.native.library import BUILD_COMMAND, LIBRARY, build_library, find_engine, find_rustc

_SIZE = "80 MB of packages, 400 MB on the disk"


def install_rustc() -> None:
    """Install rustc with apt-get, as root on Debian and its derivatives.

    Raises:
        PrerequisiteError: The user is not root, or apt-get is missing or fails.
    """
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        raise PrerequisiteError(
            "the native core needs rustc 1.63 or later, and there is none on PATH. Install it (Debian, Ubuntu: "
            f"sudo apt-get install rustc) or set RUSTC to its path, and run {BUILD_COMMAND}"
        )
    print(f"installing rustc ({_SIZE})", flush=True)
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # an old package list may name versions that the repository no longer has
    subprocess.run([apt, "update", "-q"], env=environ, stdin=subprocess.DEVNULL, check=False)
    command = [apt, "install", "-y", "-q", "--no-install-recommends", "rustc"]
    if subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise PrerequisiteError(
            f"apt-get cannot install rustc; see its output above. Install rustc yourself, and run {BUILD_COMMAND}"
        )


_PURE: Final = "py3-none-any"
_INSIDE: Final = f"kiln/pipelines/native/{LIBRARY.name}"


def find_tag() -> str | None:
    """Return the wheel tag for machines with this version of glibc or a later one; `None` without glibc."""
    name, version = platform.libc_ver()
    return f"py3-none-manylinux_{version.replace('.', '_')}_{platform.machine()}" if name == "glibc" else None


def add_core(wheel: Path, library: Path, tag: str) -> Path:
    """Write a copy of a wheel with the native core next to the wheel, and return the path of the copy."""
    path = wheel.with_name(wheel.name.replace(_PURE, tag))
    with ZipFile(wheel) as pure, ZipFile(path, "w", ZIP_DEFLATED) as out:
        record: list[str] = []

        def write(info: ZipInfo, content: bytes) -> None:
            out.writestr(info, content, ZIP_DEFLATED)
            digest = urlsafe_b64encode(sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{info.filename},sha256={digest},{len(content)}")

        for info in pure.infolist():
            content = pure.read(info)
            if info.filename.endswith(".dist-info/RECORD"):  # the last file
                core = ZipInfo(_INSIDE, info.date_time)
                core.external_attr = info.external_attr
                write(core, library.read_bytes())
                record.append(f"{info.filename},,")
                out.writestr(info, "\n".join((*record, "")), ZIP_DEFLATED)
                continue
            if info.filename.endswith(".dist-info/WHEEL"):
                content = content.replace(f"Tag: {_PURE}".encode(), f"Tag: {tag}".encode())
                content = content.replace(b"Root-Is-Purelib: true", b"Root-Is-Purelib: false")
            write(info, content)
    return path


def main(arguments: list[str]) -> int:
    """Build the core, or add it to a wheel, with the arguments that the module's docstring describes."""
    if arguments[:1] == ["--wheel"]:
        engine, tag = find_engine(), find_tag()
        if engine.is_native and tag is not None:
            add_core(Path(arguments[1]), LIBRARY, tag)
        else:
            print(
                f"no wheel with the native core was written: {engine.reason or 'the C library is not glibc'}",
                file=sys.stderr,
            )
        return 0
    must_build = "--install" in arguments
    try:
        if must_build and find_rustc() is None:
            install_rustc()
        rustc = find_rustc()
        if rustc is None:
            print(
                "rustc is not installed, so Python decodes all frames, more slowly. To get the native core: "
                f"{BUILD_COMMAND}"
            )
            return 0
        build_library(rustc)
    except PrerequisiteError as error:
        print(error, file=sys.stderr)
        return 1 if must_build else 0
    print(f"native core: {LIBRARY}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
