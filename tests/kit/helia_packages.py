"""The packages of Helia, installed once into `.peers`: an install takes npm's registry, and seconds."""

from __future__ import annotations

from pathlib import Path

from kiln.bridge.ipfs.helia import Helia, is_installed
from kit.foreign_peer import BUILT


def installed(built: Path = BUILT) -> Path:
    """Their folder, for `STATE/helia/app` to lead to. HeliaError: they cannot be installed."""
    folder = built / "helia"
    place = folder / "app"
    if not is_installed(place):
        helia = Helia(place, folder / "repo", folder / "log", "")
        try:
            helia.start()
        finally:
            helia.stop()
    return place
