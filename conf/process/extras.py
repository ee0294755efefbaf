"""Extras of Kiln's distribution: optional packages, grouped by task.

pyproject.toml lists the packages of each extra. This module reads them from the metadata of the installed distribution.
It imports `importlib.metadata` only when needed, because the import is slow.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import unquote, urlsplit

from kiln.conf.process.errors import PrerequisiteError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION: Final = "kiln-gossip"
"""Name of the distribution. The import package and the command are `kiln`."""

Extra = Literal["lake", "quality", "bridge", "spark", "demo", "all"]


def read_version() -> str:
    """Return Kiln's version; `unknown` for a copy of the code that is not installed."""
    from importlib import metadata

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def require_extras(*extras: Extra) -> None:
    """Check that the packages of extras are installed.

    Raises:
        PrerequisiteError: A package is missing.
    """
    missing = {
        extra: names
        for extra in extras
        if (names := [needed.name for needed in list_requirements(extra) if not _is_installed(needed.name)])
    }
    if missing:
        names = sorted({name for names_of_module in missing.values() for name in names_of_module})
        several = len(missing) > 1
        raise PrerequisiteError(
            f"cannot run without the extra{'s' if several else ''} {' and '.join(missing)} of {DISTRIBUTION} "
            f"({', '.join(names[:3])}{', …' if len(names) > 3 else ''} {'are' if len(names) > 1 else 'is'} not "
            f"installed). Install {'them' if several else 'it'} with: {format_install_command(*missing)}"
        )


def list_requirements(extra: Extra | None = None) -> list[Requirement]:
    """List the requirements of an extra, including those of the extras that it contains.

    Args:
        extra: The extra; `None` for the requirements of Kiln without extras.

    Returns:
        The requirements that apply to this Python and system; none if Kiln is not installed.
    """
    return list({requirement.name: requirement for requirement in _expand(extra or "")}.values())


def format_install_command(*extras: Extra | None) -> str:
    """Format the command that installs Kiln with extras, from the source that this Kiln was installed from."""
    wanted = f"[{','.join(names)}]" if (names := [extra for extra in extras if extra]) else ""
    source = _find_source()
    if source is not None and source.is_dir():  # a checkout
        return "make setup"
    return f"pip install {shlex.quote(f'{source or DISTRIBUTION}{wanted}')}"


def _expand(extra: str) -> Iterator[Requirement]:
    for requirement in _read_requirements():
        if not _applies(requirement, extra) or (extra and _applies(requirement, "")):
            continue
        if requirement.name == DISTRIBUTION:
            for included in sorted(requirement.extras):
                yield from _expand(included)
        else:
            yield requirement


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


@cache
def _read_requirements() -> tuple[Requirement, ...]:
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        return tuple(Requirement(line) for line in metadata.requires(DISTRIBUTION) or ())
    except metadata.PackageNotFoundError:
        return ()


def _is_installed(package: str) -> bool:
    from importlib import metadata

    return any(metadata.distributions(name=package))


def _find_source() -> Path | None:
    """Find the wheel or the checkout that this Kiln was installed from (PEP 610).

    Returns:
        `None` if Kiln was installed from a package index, or if the wheel or checkout no longer exists.
    """
    from importlib import metadata

    # metadata that a build leaves in the checkout names no source, but may be found first
    sources = (distribution.read_text("direct_url.json") for distribution in metadata.distributions(name=DISTRIBUTION))
    text = next(filter(None, sources), None)
    url = urlsplit(json.loads(text)["url"]) if text else None
    path = Path(unquote(url.path)) if url is not None and url.scheme == "file" else None
    return path if path is not None and path.exists() else None
