"""The wheel: all that Kiln opens comes along, and the command runs where nothing else of the checkout is.

With KILN_TEST_WHEEL set, the wheel is also installed into an empty environment, which runs Kiln for a minute.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

from conftest import free_ports
from kiln.deploy.packaging import dist
from kiln.deploy.packaging.dist import build_wheel, install
from kiln.deploy.stack.embedded_broker import stop_running
from kiln.deploy.stack.jars import IVY_S3, IVY_XML, read_pinned_jars

PACKAGES = ("schemas", "pipelines", "bridge", "conf", "deploy")
OF_THE_CHECKOUT = re.compile(
    r"schemas/proto/generate\.sh|deploy/packaging/(compose|grafana|helm|images|prometheus|site)/.*(?<!\.py)"
)
"""Files beside the code that no code opens."""
MADE = {"__pycache__", "node_modules"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


def test_the_wheel_has_every_file_of_its_packages(wheel: Path, root: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        inside = {name for name in file.namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(["git", "ls-files", *PACKAGES], cwd=root, capture_output=True, text=True, check=True)
    packaged = {f"kiln/{name}" for name in tracked.stdout.split("\n")[:-1] if not OF_THE_CHECKOUT.fullmatch(name)}
    assert inside == packaged | {"kiln/__init__.py", "kiln/py.typed"}


def test_wheel_and_source_name_version_and_commit(wheel: Path, root: Path) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True).stdout
    found = re.fullmatch(r"kiln_gossip-(\d+\.\d+\.\d+)\+g([0-9a-f]{12})(\.dirty)?-py3-none-any\.whl", wheel.name)
    assert found is not None, wheel.name
    assert commit.startswith(found[2])
    (source,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(source) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {
        "pyproject.toml",
        "kiln/conf/kiln.toml",
        "kiln/deploy/query/spark/ReadOnly.scala",
    } <= names


def test_the_metadata_of_the_wheel_is_valid(unpacked: Path) -> None:
    (file,) = unpacked.glob("*.dist-info/METADATA")
    metadata = Metadata.from_email(file.read_bytes(), validate=True)
    assert (metadata.name, metadata.license_expression, metadata.license_files) == (
        "kiln-gossip",
        "Apache-2.0",
        ["LICENSE"],
    )
    assert str(metadata.requires_python) == "<3.14,>=3.11"
    assert {"lake", "quality", "bridge", "spark", "demo", "all"} <= set(metadata.provides_extra or ())
    assert not any(each.marker is None and each.name in ("pyarrow", "pyspark") for each in metadata.requires_dist or ())
    assert all(url.startswith("https://github.com/ceramicnetwork/") for url in (metadata.project_urls or {}).values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--version",), r"kiln \d+\.\d+\.\d+\+g[0-9a-f]{12}(\.dirty)?\n"),
        (("--help",), r"(?s).*quarantine.*"),
        (("config", "show"), r"(?s)# settings file: .*/conf/kiln\.toml;.*\[kafka\].*"),
        (("config", "check"), r".*kiln\.toml: fine\n"),
    ],
)
def test_the_command_runs_from_the_wheel_alone(
    unpacked: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    # -S: the link from .venv to the checkout is not followed; other packages come from .venv all the same
    start = "import sys; sys.path[:0] = sys.argv[1:3]; del sys.argv[1:3]; from kiln.deploy.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", start, str(unpacked), sysconfig.get_path("purelib"), *arguments],
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(said, done.stdout), done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("part", "ivy_xml"), [("jars", IVY_XML), ("jars-s3", IVY_S3)])
def test_jars_come_with_their_checksums_and_those_of_a_store_apart(
    part: str, ivy_xml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = read_pinned_jars(ivy_xml.read_bytes())["spark"]
    fetched, sums = tmp_path / "fetched", tmp_path / "sums"
    (fetched / "spark").mkdir(parents=True)
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
    for name in names:
        (fetched / "spark" / name).write_text(name)
    sums.write_text("".join(f"{digest}  spark/{name}\n" for name, digest in digests.items()))

    def ensure_jars(root: Path | None = None, ivy_xml: Path = IVY_XML) -> Path:
        assert (root is None) == (ivy_xml == IVY_XML)
        return fetched

    def checksums_path(asked: Path) -> Path:
        assert asked == ivy_xml
        return sums

    monkeypatch.setattr(dist, "ensure_jars", ensure_jars)
    monkeypatch.setattr(dist, "checksums_path", checksums_path)
    into = tmp_path / "dist"
    assert dist.main([part, "--into", str(into)]) == 0
    assert {path.name for path in into.iterdir()} == {part, f"{part}.txt"}
    assert {path.name: path.read_text() for path in (into / part).iterdir()} == {name: name for name in names}
    listed = "".join(f"{digests[name]}  {part}/{name}\n" for name in names)
    assert (into / f"{part}.txt").read_text() == listed


@pytest.mark.timeout(900)
def test_the_wheel_runs_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    if "KILN_TEST_WHEEL" not in os.environ:
        pytest.skip("KILN_TEST_WHEEL is not set: minutes, and 1.3 GB")
    environment, place = tmp_path / "environment", tmp_path / "place"
    place.mkdir()
    install(wheel, environment)
    port, controller_port, monitor = free_ports(3)
    variables = {
        **{name: os.environ[name] for name in ("JAVA_HOME", "JAVA_TOOL_OPTIONS") if name in os.environ},
        "HOME": str(place),
        "PATH": os.environ["PATH"],
        "KILN_KAFKA__EMBEDDED_PORT": str(port),
        "KILN_KAFKA__EMBEDDED_CONTROLLER_PORT": str(controller_port),
        "KILN_MONITOR__LISTEN": f"127.0.0.1:{monitor}",
        "KILN_BRIDGE__LISTEN": "/ip4/127.0.0.1/tcp/0",
    }

    def kiln(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(environment / "bin" / "kiln"), *arguments]
        return subprocess.run(command, cwd=place, env=variables, capture_output=True, text=True, check=False)

    try:
        run = kiln("run", "--for", "60s")
        print(run.stdout)
        assert run.returncode == 0, run.stdout + run.stderr
        doctor = kiln("doctor")
        print(doctor.stdout)
        assert doctor.returncode == 0, doctor.stdout + doctor.stderr
        # On a busy machine a minute may end before the first batch is in its table.
        counted = kiln("sql", "--json", "select count(*) as updates from updates")
        assert json.loads(counted.stdout)[0]["updates"] > 0, run.stdout
    finally:
        stop_running(place / "state")
