"""Audit, from files alone, of what Kiln installs: `make audit`.

It reads the lock files, the lists of jars and `conf/kiln.vex.json`, and needs no network. Advisories change every day:
`.github/workflows/audit.yml` scans the bill of materials for them, where there is a network.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from packageurl import PackageURL
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from kiln.conf.process.extras import DISTRIBUTION
from kiln.deploy.stack.jars import IVY_S3, IVY_XML, PROJECT, JarsError, checksums_path, read_pinned_jars

LOCKS: Final = ("requirements.lock", "conf/runtime.lock", "conf/uv.lock")
VEX: Final = PROJECT / "conf" / "kiln.vex.json"
_HASH: Final = re.compile(r"\s+--hash=sha256:[0-9a-f]{64}(?: \\)?")


class LockedPackage(NamedTuple):
    """An entry of a lock file."""

    name: str
    version: Version
    marker: str


class Vulnerability(msgspec.Struct):
    """A vulnerability, by the name that scanners print."""

    name: str


class VexComponent(msgspec.Struct):
    """A component, by its purl, with those inside it that the statement is about."""

    id: str = msgspec.field(name="@id")
    subcomponents: list[VexComponent] = []


class VexStatement(msgspec.Struct):
    """A statement about a vulnerability of pinned components (OpenVEX 0.2.0)."""

    vulnerability: Vulnerability
    products: list[VexComponent]
    status: str
    justification: str = ""
    impact_statement: str = ""


class VexDocument(msgspec.Struct):
    """An OpenVEX document."""

    context: str = msgspec.field(name="@context")
    id: str = msgspec.field(name="@id")
    author: str
    timestamp: str
    version: int
    statements: list[VexStatement]


def find_lock_faults(name: str, text: str) -> Iterator[str]:
    """Find entries of a lock file that are not pinned with checksums, and addresses.

    Args:
        name: Name of the file, for the messages.
        text: Content of the file.
    """
    if "://" in text or "--index" in text or "--find-links" in text:
        yield f"{name}: names an address of packages"
    for entry in re.split(r"^(?=\S)", text, flags=re.MULTILINE)[1:]:
        first, *hashes = entry.splitlines()
        if first.startswith("#"):
            continue
        requirement = first.rstrip("\\ ")
        if _read_entry(requirement) is None:
            yield f"{name}: {requirement} is not pinned to one version"
        if not hashes or not all(map(_HASH.fullmatch, hashes)):
            yield f"{name}: {requirement} has no checksums"


def read_lock(text: str) -> list[LockedPackage]:
    """Read the pinned packages of a lock file."""
    lines = (line.rstrip("\\ ") for line in text.splitlines() if line[:1].isalnum())
    return [package for line in lines if (package := _read_entry(line)) is not None]


def find_unmet_requirements(project: Mapping[str, object], locked: Sequence[LockedPackage]) -> Iterator[str]:
    """Find requirements of pyproject.toml that a lock file lacks or does not satisfy.

    Args:
        project: The table `project` of pyproject.toml, with the extras that the lock file covers.
        locked: The lock file.
    """
    extras = project["optional-dependencies"]
    lists = [project["dependencies"], *(extras.values() if isinstance(extras, Mapping) else ())]
    for text in (text for texts in lists if isinstance(texts, list) for text in texts):
        requirement = Requirement(text)
        if requirement.name == DISTRIBUTION:
            continue
        versions = [each.version for each in locked if each.name == canonicalize_name(requirement.name)]
        if not versions:
            yield f"{requirement.name} is not locked"
        for version in versions:
            if not requirement.specifier.contains(version, prereleases=True):
                yield f"{requirement.name} is locked at {version}, and pyproject.toml wants {requirement.specifier}"


def find_jar_faults(ivy_xml: Path) -> Iterator[str]:
    """Find jars without a checksum, and checksums without a jar."""
    try:
        pinned = {f"{conf}/{jar}" for conf, jars in read_pinned_jars(ivy_xml.read_bytes()).items() for jar in jars}
    except JarsError as error:
        yield str(error)
        return
    sums = checksums_path(ivy_xml)
    listed = {line.split()[1] for line in sums.read_text(encoding="ascii").splitlines()}
    yield from (f"{sums.name}: {jar} has no checksum" for jar in sorted(pinned - listed))
    yield from (f"{sums.name}: {jar} is not in {ivy_xml.name}" for jar in sorted(listed - pinned))


def find_vex_faults(document: bytes, purls: frozenset[str]) -> Iterator[str]:
    """Find incomplete statements, and statements about components that Kiln no longer installs.

    Args:
        document: OpenVEX 0.2.0 as JSON.
        purls: The components of the bill of materials.
    """
    try:
        vex = msgspec.json.decode(document, type=VexDocument)
    except msgspec.DecodeError as error:
        yield f"{VEX.name}: {error}"
        return
    for each in vex.statements:
        about = f"{VEX.name}: {each.vulnerability.name}"
        if each.status not in ("not_affected", "affected", "fixed", "under_investigation"):
            yield f"{about}: status {each.status} is not a status of OpenVEX"
        if each.status == "not_affected" and not (each.justification and each.impact_statement):
            yield f"{about}: not_affected needs a justification and an impact_statement"
        for product in each.products:
            if product.id not in purls:
                yield f"{about}: {product.id} is not in the bill of materials"
            for inner in product.subcomponents:
                if PackageURL.from_string(inner.id).version is None:
                    yield f"{about}: {inner.id} has no version"


def find_yanked(lock: Path) -> list[str]:
    """Query the package index of pip's and uv's settings for yanked versions in a lock file."""
    uv = str(Path(sys.executable).with_name("uv"))
    command = [uv, "pip", "install", "--dry-run", "--reinstall", "--no-deps", "--require-hashes", "-r", str(lock)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return [f"{lock.name}: {done.stderr.strip()}"]
    return [f"{lock.name}: {line.strip()}" for line in done.stderr.splitlines() if "yanked" in line]


def _read_entry(line: str) -> LockedPackage | None:
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        return None
    pins = list(requirement.specifier)
    if len(pins) != 1 or pins[0].operator != "==" or "*" in pins[0].version:
        return None
    return LockedPackage(canonicalize_name(requirement.name), Version(pins[0].version), str(requirement.marker or ""))


def audit() -> list[str]:
    """Audit the files of the checkout, and return the faults."""
    from kiln.deploy.packaging.sbom import build_bill

    texts = {name: (PROJECT / name).read_text(encoding="utf-8") for name in LOCKS}
    faults = [fault for name, text in texts.items() for fault in find_lock_faults(name, text)]
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    developed = {extra: texts for extra, texts in project["optional-dependencies"].items() if extra != "fuzz"}
    released = {extra: texts for extra, texts in developed.items() if extra != "dev"}
    for name, covered in (("requirements.lock", developed), ("conf/runtime.lock", released)):
        unmet = find_unmet_requirements({**project, "optional-dependencies": covered}, read_lock(texts[name]))
        faults += [f"{name}: {fault}. Run make lock" for fault in unmet]
    faults += [fault for ivy_xml in (IVY_XML, IVY_S3) for fault in find_jar_faults(ivy_xml)]
    purls = frozenset(str(each["purl"]) for each in json.loads(build_bill())["components"])
    return faults + list(find_vex_faults(VEX.read_bytes(), purls))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the faults, and return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="make audit", description="Audit lock files, jars and the VEX document.")
    parser.add_argument("--yanked", action="store_true", help="also ask the package index for yanked versions")
    options = parser.parse_args(arguments)
    faults = audit()
    if options.yanked:
        faults += [fault for name in LOCKS for fault in find_yanked(PROJECT / name)]
    for fault in faults:
        print(fault, file=sys.stderr)
    if not faults:
        packages = sum(len(read_lock((PROJECT / name).read_text(encoding="utf-8"))) for name in LOCKS)
        jars = sum(len(each) for xml in (IVY_XML, IVY_S3) for each in read_pinned_jars(xml.read_bytes()).values())
        print(f"{packages} entries of {len(LOCKS)} lock files and {jars} jars are pinned, with checksums")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
