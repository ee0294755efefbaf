"""The lock files of packages: a checksum for each file, and pip refuses another file."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kiln.deploy.stack.jars import PROJECT
from kit.import_closure import list_loaded_packages

LOCKS = ("requirements.lock", "conf/runtime.lock", "conf/uv.lock", "bench/peers/quix.lock")


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_has_checksums_and_no_host_is_named(name: str) -> None:
    text = (PROJECT / name).read_text()
    assert "://" not in text
    assert "index" not in text
    packages = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    assert packages
    for package in packages:
        first, *hashes = package.replace("\\\n", "\n").splitlines()
        assert re.fullmatch(r"[a-z0-9.-]+==[^ ]+( ; .+)? *", first), first
        assert hashes, first
        assert all(re.fullmatch(r" +--hash=sha256:[0-9a-f]{64} *", line) for line in hashes), first


def test_what_kiln_runs_with_is_what_it_is_tested_with() -> None:
    def pins(name: str) -> set[str]:
        # a marker may differ: what one place needs on another system, development needs everywhere
        return {
            line.partition(" ;")[0].rstrip(" \\")
            for line in (PROJECT / name).read_text().splitlines()
            if line[:1].isalnum()
        }

    assert pins("conf/runtime.lock") < pins("requirements.lock"), "make lock"


@pytest.mark.parametrize(
    ("name", "left_out"), [("requirements.lock", {"fuzz"}), ("conf/runtime.lock", {"dev", "fuzz"})]
)
def test_a_lock_has_what_the_project_requires(name: str, left_out: set[str]) -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    extras = [texts for extra, texts in project["optional-dependencies"].items() if extra not in left_out]
    pins = re.findall(r"^([a-z0-9-]+)==([^ ]+)", (PROJECT / name).read_text(), re.MULTILINE)
    for requirement in map(Requirement, [*project["dependencies"], *(text for texts in extras for text in texts)]):
        if requirement.name != project["name"]:
            versions = [version for package, version in pins if package == canonicalize_name(requirement.name)]
            assert versions, f"{requirement}: make lock"
            assert all(requirement.specifier.contains(each, prereleases=True) for each in versions), requirement


def test_the_lock_of_quixstreams_has_the_packages_that_the_bench_imports_there() -> None:
    lock = (PROJECT / "bench/peers/quix.lock").read_text()
    files = [(PROJECT / f"bench/peers/{name}.py").read_text() for name in ("quix", "append", "by_hand")]
    modules = [name for text in files for name in re.findall(r"^(?:from|import) (\w[\w.]*)", text, re.MULTILINE)]
    loaded = set(list_loaded_packages(modules)) - {"__future__", "bench"}
    distributions = packages_distributions()
    needed = {distributions.get(each, [each])[0].lower().replace("_", "-") for each in loaded}
    assert {"pynacl", "pyarrow"} < needed
    assert [each for each in sorted(needed) if not re.search(rf"^{each}==", lock, re.MULTILINE)] == []


def test_setup_installs_nothing_without_a_checksum() -> None:
    installs = [line for line in (PROJECT / "Makefile").read_text().splitlines() if "pip install " in line]
    assert len(installs) == 5
    for line in installs:
        assert "--require-hashes" in line or line.endswith(
            (" --editable .", " --no-index --find-links dist kiln-gossip")
        ), line


def test_a_package_that_differs_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("thing.py", "")
        file.writestr("thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        file.writestr("thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("thing-1.0.dist-info/RECORD", "thing.py,,\n")
    good = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for digest, works in ((good, True), ("0" * 64, False)):
        lock = tmp_path / "lock"
        lock.write_text(f"thing==1.0 \\\n    --hash=sha256:{digest}\n")
        command = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--no-index", "--no-cache", "--no-deps"]
        command += [
            "--find-links",
            str(tmp_path),
            "--require-hashes",
            "--target",
            str(tmp_path / digest),
            "-r",
            str(lock),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode == 0) is works, done.stderr
        if not works:
            assert "Hash mismatch" in done.stderr
