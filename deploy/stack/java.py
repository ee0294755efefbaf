"""Find a Java that Spark and Kafka run on, and say what to type where there is none.

Java is a system package: the JREs that Python wheels bring lack `jdk.incubator.vector`, which Spark insists on
(docs/design, Versions that work together). `python -m kiln.deploy.stack.java [--install]` is what `make setup` calls;
this module needs the standard library only, since it runs before anything is installed.
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
    """No Java that will do; the text says what was found and what to type."""


class Java(NamedTuple):
    """A usable Java: its executable, and the number of its version (17, 21 …)."""

    executable: Path
    version: int


def parse_java_version(output: str) -> int | None:
    """The number of the version out of what `java -version` prints; `1.8.0_392` is 8. None if it says none."""
    found = _VERSION.search(output)
    if found is None:
        return None
    first, second = int(found[1]), found[2]
    return int(second) if first == 1 and second is not None else first


def install_command(system: str, os_release: str = "", root: bool = False) -> str:
    """How to install Java: `system` as `platform.system()` names it, `os_release` the text of /etc/os-release."""
    names = set(re.findall(r'^(?:ID|ID_LIKE)="?([^"\n]*)', os_release, re.MULTILINE))
    likes = {word for name in names for word in name.split()}
    sudo = "" if root else "sudo "
    if system == "Darwin":
        return "brew install openjdk@17   (then follow what brew says about the symlink, or set JAVA_HOME)"
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
    return (
        "install a Java runtime (JRE) of version 17 or 21 with the package tool of your system, or set JAVA_HOME to one"
    )


def _find_install_command() -> str:
    release = Path("/etc/os-release")
    # uname and not platform.system(), which runs programs on some systems
    system = os.uname().sysname
    text = release.read_text(encoding="utf-8", errors="replace") if release.is_file() else ""
    return install_command(system, text, root=os.geteuid() == 0)


def find_java(environ: Mapping[str, str] | None = None) -> Java:
    """The Java of JAVA_HOME if that is set, else the first on PATH. JavaError: none, too old, or it does not run.

    A JAVA_HOME that will not do is an error even with a good Java on PATH: Spark would take JAVA_HOME all the same.
    """
    environ = os.environ if environ is None else environ
    home = environ.get("JAVA_HOME")
    if home:
        place, remedy = f"JAVA_HOME={home}", "set JAVA_HOME to a Java of version 17 or 21, or unset it"
        found: str | None = str(Path(home) / "bin" / "java")
    else:
        place, remedy = "the java on PATH", _find_install_command()
        found = shutil.which("java", path=environ.get("PATH", ""))
    if found is None:
        raise JavaError(
            f"Java {OLDEST_VERSION} or later is needed and there is no java on PATH. To install it:\n    {remedy}"
        )
    executable = Path(found)
    try:
        run = subprocess.run(
            [found, "-version"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaError(f"{place} does not run ({error}). What to do:\n    {remedy}") from None
    version = parse_java_version(run.stderr + run.stdout)
    if run.returncode != 0 or version is None:
        first = next(iter((run.stderr + run.stdout).strip().splitlines()), "it printed nothing")
        raise JavaError(f"{executable} is no working Java ({first}). What to do:\n    {remedy}")
    if version < OLDEST_VERSION:
        raise JavaError(
            f"{place} is Java {version}, and {OLDEST_VERSION} or later is needed. What to do:\n    {remedy}"
        )
    return Java(executable, version)


def install() -> None:
    """Install Java with apt-get where that needs no asking: as root, on Debian and its kin. Else JavaError."""
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        raise JavaError(f"Java {OLDEST_VERSION} or later is needed. To install it:\n    {_find_install_command()}")
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # an old list of packages names versions that are gone, hence update first
    subprocess.run([apt, "update", "-q"], env=environ, stdin=subprocess.DEVNULL, check=False)
    for package in _DEBIAN_PACKAGES:
        command = [apt, "install", "-y", "-q", "--no-install-recommends", package]
        if subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, check=False).returncode == 0:
            return
    raise JavaError(f"apt-get could not install Java; what it said is above. By hand:\n    {_find_install_command()}")


def main(arguments: list[str]) -> int:
    """Print the Java in use, installing one with `--install` where there is none; 1 with the words why not."""
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
    untried = (
        ""
        if java.version in TESTED_VERSIONS
        else f" (not tried with Kiln; {TESTED_VERSIONS[0]} and {TESTED_VERSIONS[1]} are)"
    )
    print(f"Java {java.version}{untried}: {java.executable}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
