"""`make audit`: this checkout passes, and each kind of fault is found."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from kiln.deploy.packaging.audit import (
    LOCKS,
    VEX,
    audit,
    find_jar_faults,
    find_lock_faults,
    find_unmet_requirements,
    find_vex_faults,
    main,
    read_lock,
)
from kiln.deploy.stack.jars import PROJECT

HASH = f"    --hash=sha256:{'0' * 64}"
GOOD = f"one==1.0 \\\n{HASH} \\\n{HASH}\ntwo==2.0 ; python_version < '3.12' \\\n{HASH}\n"
PRODUCT = "pkg:pypi/one@1.0"
INNER = "pkg:maven/a/b@2"


def statement(**changes: object) -> dict[str, object]:
    return {
        "vulnerability": {"name": "GHSA-0000-0000-0000"},
        "products": [{"@id": PRODUCT, "subcomponents": [{"@id": INNER}]}],
        "status": "not_affected",
        "justification": "vulnerable_code_not_in_execute_path",
        "impact_statement": "nothing calls it",
        **changes,
    }


def vex(*statements: dict[str, object]) -> bytes:
    document = {"@context": "c", "@id": "i", "author": "a", "timestamp": "2026-11-27T00:00:00Z", "version": 1}
    return json.dumps({**document, "statements": statements}).encode()


def test_this_checkout_has_no_faults(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit() == []
    assert main([]) == 0
    assert "are pinned, with checksums" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("one==1.0", "one>=1.0", "one>=1.0 is not pinned to one version"),
        ("one==1.0", "one==1.*", "one==1.* is not pinned to one version"),
        ("one==1.0", "one @ file:///one", "names an address of packages"),
        ("one==1.0", "--index-url=here\none==1.0", "names an address of packages"),
        (f" \\\n{HASH}\n", "\n", "two==2.0 ; python_version < '3.12' has no checksums"),
        ("sha256", "md5", "one==1.0 has no checksums"),
    ],
)
def test_a_lock_that_leaves_a_choice_is_found(old: str, new: str, fault: str) -> None:
    assert list(find_lock_faults("lock", GOOD)) == []
    assert old in GOOD
    assert f"lock: {fault}" in list(find_lock_faults("lock", GOOD.replace(old, new)))


def test_a_lock_that_is_older_than_the_project_is_found() -> None:
    locked = read_lock(GOOD)
    assert [(each.name, str(each.version)) for each in locked] == [("one", "1.0"), ("two", "2.0")]
    extras = {"more": ["two"], "all": ["kiln-gossip[more]"]}
    assert list(find_unmet_requirements({"dependencies": ["one>=1"], "optional-dependencies": extras}, locked)) == []
    project = {"dependencies": ["one>=2"], "optional-dependencies": {"more": ["three"]}}
    assert list(find_unmet_requirements(project, locked)) == [
        "one is locked at 1.0, and pyproject.toml wants >=2",
        "three is not locked",
    ]


def test_a_jar_without_its_checksum_is_found(tmp_path: Path) -> None:
    ivy_xml = tmp_path / "ivy.xml"
    jar = '<dependency org="o" name="{}" rev="1" conf="spark-&gt;master"/>'
    ivy_xml.write_text(
        f'<m><configurations><conf name="spark"/></configurations>{jar.format("a")}{jar.format("b")}</m>'
    )
    (tmp_path / "jars.sha256").write_text(f"{'0' * 64}  spark/a-1.jar\n{'0' * 64}  spark/c-1.jar\n")
    assert list(find_jar_faults(ivy_xml)) == [
        "jars.sha256: spark/b-1.jar has no checksum",
        "jars.sha256: spark/c-1.jar is not in ivy.xml",
    ]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"status": "fine"}, "status fine is not a status of OpenVEX"),
        ({"justification": ""}, "not_affected needs a justification and an impact_statement"),
        ({"products": [{"@id": "pkg:pypi/one@0.9"}]}, "pkg:pypi/one@0.9 is not in the bill of materials"),
        ({"products": [{"@id": PRODUCT, "subcomponents": [{"@id": "pkg:maven/a/b"}]}]}, "pkg:maven/a/b has no version"),
    ],
)
def test_a_vex_statement_about_nothing_is_found(changes: dict[str, object], fault: str) -> None:
    assert list(find_vex_faults(vex(statement()), frozenset({PRODUCT}))) == []
    assert list(find_vex_faults(vex(statement(**changes)), frozenset({PRODUCT}))) == [
        f"{VEX.name}: GHSA-0000-0000-0000: {fault}"
    ]


def test_a_vex_document_that_is_none_is_found() -> None:
    (fault,) = find_vex_faults(b"{}", frozenset())
    assert "missing required field" in fault


def test_the_workflow_audits_what_the_files_name() -> None:
    workflow = YAML(typ="safe").load(PROJECT / ".github/workflows/audit.yml")
    steps = workflow["jobs"]["advisories"]["steps"]
    scan = next(step["with"] for step in steps if "scan-action" in step.get("uses", ""))
    assert scan["vex"] == str(VEX.relative_to(PROJECT))
    assert f"make sbom ARGS={scan['sbom']}" in [step.get("run") for step in steps]
    assert "make audit ARGS=--yanked" in [step.get("run") for step in steps]


def test_wheel_metadata_names_licence_and_no_registry() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["license"] == "Apache-2.0"
    assert not any(each.startswith("License ::") for each in project["classifiers"])  # PEP 639
    versions = {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)}
    assert versions <= set(project["classifiers"])
    assert not any("pypi" in url or "pythonhosted" in url for url in project.get("urls", {}).values())
    assert all((PROJECT / name).is_file() for name in LOCKS)
