"""Packages with message decoders, as a user installs them: a module and its entry points."""

from __future__ import annotations

from pathlib import Path

DECODERS = """
import json, sys, time


def parse(data: bytes) -> object:
    return json.loads(data)


def fail(data: bytes) -> object:
    raise RuntimeError(f"cannot read {len(data)} bytes")


class SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def fail_silently(data: bytes) -> object:
    raise SilentError


def fail_strangely(data: bytes) -> object:
    raise ValueError(data.decode("utf-8", "surrogateescape"))


def leave(data: bytes) -> object:
    sys.exit(3)


def hang(data: bytes) -> object:
    while data.startswith(b"slow"):
        try:
            time.sleep(30)  # hangs
        except Exception:  # as a careless decoder does
            pass
    return {"size": len(data)}


def grow(data: bytes) -> object:
    return {"text": "x" * (1 << 20)}


def give_bytes(data: bytes) -> object:
    return {"data": data}


number = 7
"""
NAMES = ("parse", "fail", "fail_silently", "fail_strangely", "leave", "hang", "grow", "give_bytes", "number", "missing")


def install_decoders(folder: Path, module: str = "some_decoders") -> None:
    """Write the module and the metadata of its package into a folder. Put the folder on `sys.path`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{module}.py").write_text(DECODERS, encoding="utf-8")
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n", encoding="utf-8")
    points = "\n".join(f"{module}.{name} = {module}:{name}" for name in NAMES)
    (metadata / "entry_points.txt").write_text(f"[kiln.decoders]\n{points}\n", encoding="utf-8")
