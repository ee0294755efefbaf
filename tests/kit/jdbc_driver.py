"""DuckDB's JDBC driver (80 MB), which `make tools` fetches once a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kiln.deploy.stack.jars import JarsError, ensure_jars, is_complete
from kit.foreign_peer import CACHE, ForeignPeerError

ROOT: Final = CACHE / "jdbc"
IVY: Final = Path(__file__).with_name("jdbc") / "ivy.xml"


def fetch() -> None:
    """Fetch the driver, if it is not there yet."""
    try:
        ensure_jars(ROOT, ivy_xml=IVY)
    except JarsError as error:
        raise ForeignPeerError(str(error)) from error


def is_fetched() -> bool:
    return is_complete(ROOT, IVY)


def jar() -> Path:
    """The driver's jar, once it is fetched."""
    (path,) = (ROOT / "jdbc").iterdir()
    return path
