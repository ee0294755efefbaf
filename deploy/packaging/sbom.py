"""The bill of materials of Kiln as CycloneDX: `make sbom`.

It lists what Kiln installs: the packages of `requirements.lock` (those for development too), the jars of
`conf/ivy.xml` and `conf/ivy-s3.xml`. Each is named by its purl, which scanners of advisories read. An image has a bill
of its own, of what is in the image.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from xml.etree import ElementTree

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kiln.conf.process.extras import DISTRIBUTION, read_version
from kiln.deploy.stack.jars import IVY_S3, IVY_XML, PROJECT, checksums_path


def build_bill(packages: Collection[str] | None = None, *, jars: bool = True) -> str:
    """Build the bill as JSON of CycloneDX 1.6.

    Args:
        packages: Normalized names of an image's packages; `None` for those of a checkout.
        jars: True to include the jars.
    """
    parts = [part for part in _list_packages() if packages is None or canonicalize_name(part.name) in packages]
    parts += [*_list_jars(IVY_XML), *_list_jars(IVY_S3)] if jars else ()
    kiln = Component(type=ComponentType.APPLICATION, name=DISTRIBUTION, version=read_version())
    bom = Bom(components=parts)
    bom.metadata.component = kiln
    bom.register_dependency(kiln, bom.components)
    return JsonV1Dot6(bom).output_as_string(indent=1)


def _list_packages() -> Iterator[Component]:
    for line in (PROJECT / "requirements.lock").read_text(encoding="utf-8").splitlines():
        if line.startswith((" ", "#")):  # hashes of all files of a package, of which one is installed
            continue
        requirement = Requirement(line.rstrip("\\ "))
        (pin,) = requirement.specifier
        yield _build_component("pypi", "", requirement.name, pin.version)


def _list_jars(ivy_xml: Path) -> Iterator[Component]:
    lines = (line.split() for line in checksums_path(ivy_xml).read_text(encoding="ascii").splitlines())
    checksums = {name: digest for digest, name in lines}
    for jar in ElementTree.parse(ivy_xml).iter("dependency"):
        group, name, version = jar.attrib["org"], jar.attrib["name"], jar.attrib["rev"]
        digest = checksums[f"{jar.attrib['conf'].partition('->')[0]}/{name}-{version}.jar"]
        yield _build_component("maven", group, name, version, HashType(alg=HashAlgorithm.SHA_256, content=digest))


def _build_component(kind: str, group: str, name: str, version: str, *hashes: HashType) -> Component:
    purl = PackageURL(kind, group or None, name, version)
    return Component(name=name, group=group or None, version=version, purl=purl, bom_ref=str(purl), hashes=hashes)


def main() -> int:
    """Write the bill to the file of the command line."""
    file = Path(sys.argv[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(build_bill(), encoding="utf-8")
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
