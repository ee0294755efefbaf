"""The bill of materials is valid CycloneDX and names everything that is pinned."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from kiln.deploy.packaging.sbom import build_bill
from kiln.deploy.stack.jars import IVY_S3, IVY_XML, PROJECT, read_pinned_jars


def test_the_bill_is_valid_and_names_all_that_is_installed() -> None:
    text = build_bill()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    found = json.loads(text)["components"]
    purls = [each["purl"] for each in found]
    assert len(set(purls)) == len(purls)
    packages = re.findall(r"^([a-z0-9-]+)==([^ ]+)", (PROJECT / "requirements.lock").read_text(), re.MULTILINE)
    assert len(packages) > 140
    assert {purl for purl in purls if purl.startswith("pkg:pypi/")} == {f"pkg:pypi/{n}@{quote(v)}" for n, v in packages}
    jars = {f"{each['name']}-{each['version']}.jar": each for each in found if each["purl"].startswith("pkg:maven/")}
    lists = [read_pinned_jars(path.read_bytes()) for path in (IVY_XML, IVY_S3)]
    assert set(jars) == {name for each in lists for names in each.values() for name in names}
    assert "pkg:maven/org.apache.kafka/kafka_2.13@4.4.0" in purls
    assert all(len(jar["hashes"][0]["content"]) == 64 for jar in jars.values())


def test_a_bill_with_a_fault_is_not_valid() -> None:
    broken = json.loads(build_bill())
    broken["components"][0]["hashes"] = [{"alg": "SHA-256", "content": "none"}]
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(broken)) is not None
