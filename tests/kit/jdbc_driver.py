"""DuckDB's JDBC driver (80 MB), which `make tools` fetches once per machine."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kiln.deploy.stack.jars import JarsError, ensure_jars, is_complete
from kit.foreign_peer import CACHE, ForeignPeerError

ROOT: Final = CACHE / "jdbc"
IVY: Final = Path(__file__).with_name("jdbc") / "ivy.xml"


def fetch() -> None:
    """Fetch the driver unless it is already there."""
    try:
        ensure_jars(ROOT, ivy_xml=IVY)
    except JarsError as error:
        raise ForeignPeerError(str(error)) from error


def is_fetched() -> bool:
    return is_complete(ROOT, IVY)


def jar() -> Path:
    """Return the path of the driver's jar, which exists once the driver is fetched."""
    (path,) = (ROOT / "jdbc").iterdir()
    return path
