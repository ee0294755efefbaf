"""Find a Java for Spark and Kafka, or explain how to install one.

Java is a system package: the JREs in Python wheels lack `jdk.incubator.vector`, which Spark needs (docs/design,
Versions that work together). `make setup` calls `python -m kiln.deploy.stack.java [--install]`. This module needs the
standard library only, since it runs before anything is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kiln.conf.process.errors import PrerequisiteError

OLDEST_VERSION = 17
TESTED_VERSIONS = (17, 21)
_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')
_DEBIAN_PACKAGES = ("openjdk-17-jre-headless", "openjdk-21-jre-headless")


class JavaError(PrerequisiteError):
    """There is no usable Java. The message says why, and how to install one."""


class Java(NamedTuple):
    """A usable Java: its executable and its major version (17, 21 …)."""

    executable: Path
    version: int


def parse_java_version(output: str) -> int | None:
    """Parse the major version in the output of `java -version`, such as 8 for `1.8.0_392`; `None` if the output has no
    version."""
    match = _VERSION.search(output)
    if match is None:
        return None
    first, second = int(match[1]), match[2]
    return int(second) if first == 1 and second is not None else first


def install_command(system: str, os_release: str = "", root: bool = False) -> str:
    """Choose the command that installs Java.

    Args:
        system: Name of the system, as `platform.system()` returns it.
        os_release: Text of /etc/os-release.
        root: True if the user is root.
    """
    names = set(re.findall(r'^(?:ID|ID_LIKE)="?([^"\n]*)', os_release, re.MULTILINE))
    likes = {word for name in names for word in name.split()}
    sudo = "" if root else "sudo "
    if system == "Darwin":
        return "brew install openjdk@17   (then follow brew's advice on the symlink, or set JAVA_HOME)"
    if likes & {"debian", "ubuntu"}:
        return f"{sudo}apt-get update && {sudo}apt-get install -y {_DEBIAN_PACKAGES[0]}   (or {_DEBIAN_PACKAGES[1]})"
    if likes & {"fedora", "rhel", "centos"}:
        return f"{sudo}dnf install java-21-openjdk-headless   (or java-17-openjdk-headless)"
    if likes & {"suse", "opensuse"}:
        return f"{sudo}zypper install java-21-openjdk-headless"
    if "arch" in likes:
        return f"{sudo}pacman -S jre21-openjdk-headless"
    if "alpine" in likes:
        return f"{sudo}apk add openjdk17-jre-headless"
    return "install a Java runtime (JRE) of version 17 or 21 with your package manager, or set JAVA_HOME to one"


def _find_install_command() -> str:
    release = Path("/etc/os-release")
    # uname and not platform.system(), which runs programs on some systems
    system = os.uname().sysname
    text = release.read_text(encoding="utf-8", errors="replace") if release.is_file() else ""
    return install_command(system, text, root=os.geteuid() == 0)


def find_java(environ: Mapping[str, str] | None = None) -> Java:
    """Find the Java of JAVA_HOME if that is set, else the first on PATH.

    An unusable JAVA_HOME is an error even with a good Java on PATH, because Spark uses JAVA_HOME in any case.

    Raises:
        JavaError: Java is not installed, is too old, or does not run.
    """
    environ = os.environ if environ is None else environ
    home = environ.get("JAVA_HOME")
    if home:
        source, remedy = f"JAVA_HOME={home}", "set JAVA_HOME to a Java of version 17 or 21, or unset it"
        program: str | None = str(Path(home) / "bin" / "java")
    else:
        source, remedy = "the java on PATH", _find_install_command()
        program = shutil.which("java", path=environ.get("PATH", ""))
    if program is None:
        raise JavaError(
            f"Java {OLDEST_VERSION} or later is needed, but there is no java on PATH. To install it:\n    {remedy}"
        )
    executable = Path(program)
    try:
        run = subprocess.run(
            [program, "-version"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaError(f"{source} does not run ({error}). What to do:\n    {remedy}") from None
    version = parse_java_version(run.stderr + run.stdout)
    if run.returncode != 0 or version is None:
        first = next(iter((run.stderr + run.stdout).strip().splitlines()), "it printed nothing")
        raise JavaError(f"{executable} is not a working Java ({first}). What to do:\n    {remedy}")
    if version < OLDEST_VERSION:
        raise JavaError(
            f"{source} is Java {version}, but {OLDEST_VERSION} or later is needed. What to do:\n    {remedy}"
        )
    return Java(executable, version)


def install() -> None:
    """Install Java with apt-get, as root on Debian and its derivatives.

    Raises:
        JavaError: The user is not root, or apt-get is missing or fails.
    """
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        raise JavaError(f"Java {OLDEST_VERSION} or later is needed. To install it:\n    {_find_install_command()}")
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # an old package list may name versions that the repository no longer has
    subprocess.run([apt, "update", "-q"], env=environ, stdin=subprocess.DEVNULL, check=False)
    for package in _DEBIAN_PACKAGES:
        command = [apt, "install", "-y", "-q", "--no-install-recommends", package]
        if subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, check=False).returncode == 0:
            return
    raise JavaError(
        f"apt-get cannot install Java; see its output above. Run it yourself:\n    {_find_install_command()}"
    )


def main(arguments: list[str]) -> int:
    """Print the Java in use, and with `--install` install a missing one. Return 1 if there is no usable Java."""
    try:
        try:
            java = find_java()
        except JavaError:
            if "--install" not in arguments or os.environ.get("JAVA_HOME"):
                raise
            install()
            java = find_java()
    except JavaError as error:
        print(error, file=sys.stderr)
        return 1
    tested = " and ".join(map(str, TESTED_VERSIONS))
    note = "" if java.version in TESTED_VERSIONS else f" (Kiln is tested with {tested} only)"
    print(f"Java {java.version}{note}: {java.executable}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
