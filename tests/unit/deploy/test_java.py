"""Finding Java, and the words where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiln.deploy.stack.java import Java, JavaError, find_java, install_command, parse_java_version

DEBIAN = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\n'
MINT = 'NAME="Linux Mint"\nID=linuxmint\nID_LIKE="ubuntu debian"\n'
FEDORA = "ID=fedora\nVERSION_ID=43\n"


@pytest.mark.parametrize(
    ("output", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment (build 17.0.15+6-Debian-1deb12u1)', 17),
        ('openjdk version "21" 2023-09-19 LTS', 21),
        ('java version "1.8.0_392"\nJava(TM) SE Runtime Environment (build 1.8.0_392-b08)', 8),
        ('Picked up JAVA_TOOL_OPTIONS: -Dversion=9\nopenjdk version "11.0.21" 2023-10-17', 11),
        ('openjdk version "25-ea" 2025-09-16', 25),
        ("The operation couldn’t be completed. Unable to locate a Java Runtime.", None),
        ("", None),
    ],
)
def test_version_out_of_what_java_prints(output: str, version: int | None) -> None:
    assert parse_java_version(output) == version


def test_what_to_type() -> None:
    assert "sudo apt-get install -y openjdk-17-jre-headless" in install_command("Linux", DEBIAN)
    assert "apt-get install" in install_command("Linux", MINT)
    assert "sudo" not in install_command("Linux", DEBIAN, root=True)
    assert "dnf install" in install_command("Linux", FEDORA)
    assert "brew install openjdk@17" in install_command("Darwin")
    assert "JAVA_HOME" in install_command("Linux", "ID=something-else\n")


def fake_java(folder: Path, says: str, status: int = 0) -> Path:
    (folder / "bin").mkdir(parents=True)
    java = folder / "bin" / "java"
    java.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{says}\nEND\nexit {status}\n")
    java.chmod(0o755)
    return java


def path_of(java: Path) -> str:
    return f"{java.parent}:/usr/bin:/bin"


def test_java_on_path(tmp_path: Path) -> None:
    java = fake_java(tmp_path / "jre", 'openjdk version "21.0.1"')
    assert find_java({"PATH": path_of(java)}) == Java(java, 21)


def test_java_home_goes_before_path(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "home", 'openjdk version "17.0.1"')
    path = fake_java(tmp_path / "path", 'openjdk version "21.0.1"')
    assert find_java({"PATH": path_of(path), "JAVA_HOME": str(tmp_path / "home")}) == Java(home, 17)


def test_no_java(tmp_path: Path) -> None:
    with pytest.raises(JavaError, match=r"(?s)Java 17 or later is needed, but there is no java.*To install it:"):
        find_java({"PATH": str(tmp_path)})


def test_too_old_java(tmp_path: Path) -> None:
    java = fake_java(tmp_path / "jre", 'openjdk version "11.0.21" 2023-10-17')
    with pytest.raises(JavaError, match=r"is Java 11, but 17 or later is needed"):
        find_java({"PATH": path_of(java)})


def test_bad_java_home_is_not_passed_over(tmp_path: Path) -> None:
    """Spark would take it all the same."""
    good = fake_java(tmp_path / "path", 'openjdk version "21.0.1"')
    fake_java(tmp_path / "home", 'java version "1.8.0_392"')
    for home in (tmp_path / "home", tmp_path / "nothing-here"):
        with pytest.raises(JavaError, match=r"(?s)JAVA_HOME=.*unset it"):
            find_java({"PATH": path_of(good), "JAVA_HOME": str(home)})


def test_stub_that_is_no_java(tmp_path: Path) -> None:
    """What macOS has in place of Java."""
    java = fake_java(tmp_path / "jre", "Unable to locate a Java Runtime.", status=1)
    with pytest.raises(JavaError, match=r"not a working Java \(Unable to locate a Java Runtime\.\)"):
        find_java({"PATH": path_of(java)})
