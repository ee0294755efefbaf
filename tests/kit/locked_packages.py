"""Packages in the lock file: the dependencies of requirements, and the entries of packages."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kiln.deploy.stack.jars import PROJECT

_ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==.*(?:\n .*)*\n", re.MULTILINE)


def list_dependencies(requirements: Iterable[Requirement]) -> frozenset[str]:
    """List the normalized names of the required packages and all their dependencies that are in the lock file."""
    locked = set(_read_entries())
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


def select_locked(names: Collection[str]) -> str:
    """Return the entries of these packages in `requirements.lock`."""
    return "".join(text for name, text in _read_entries().items() if name in names)


def _read_dependencies(name: str, extras: Iterable[str]) -> Iterator[Requirement]:
    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def _read_entries() -> dict[str, str]:
    """Read the entries by normalized name. A package may have an entry for each range of Python versions."""
    found: dict[str, str] = {}
    for entry in _ENTRY.finditer((PROJECT / "requirements.lock").read_text(encoding="utf-8")):
        name = canonicalize_name(entry["name"])
        found[name] = found.get(name, "") + entry[0]
    return found
