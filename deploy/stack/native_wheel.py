"""Build the wheel with the native core from the wheel without it: `python -m kiln.deploy.stack.native_wheel WHEEL`.

The wheel is tagged for the C library that the core was built on, so that no older system installs it. Source: PEP 600.
"""

from __future__ import annotations

import platform
import sys
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path
from typing import Final
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from kiln.pipelines.native.library import LIBRARY, find_engine

_PURE: Final = "py3-none-any"
_INSIDE: Final = f"kiln/pipelines/native/{LIBRARY.name}"


def find_tag() -> str | None:
    """Return the tag of wheels for machines with this C library or a later one; `None` without glibc."""
    name, version = platform.libc_ver()
    return f"py3-none-manylinux_{version.replace('.', '_')}_{platform.machine()}" if name == "glibc" else None


def add_core(wheel: Path, library: Path, tag: str) -> Path:
    """Write a copy of a wheel that has the native core, next to it, and return its path."""
    path = wheel.with_name(wheel.name.replace(_PURE, tag))
    with ZipFile(wheel) as pure, ZipFile(path, "w", ZIP_DEFLATED) as out:
        record: list[str] = []

        def write(info: ZipInfo, content: bytes) -> None:
            out.writestr(info, content, ZIP_DEFLATED)
            digest = urlsafe_b64encode(sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{info.filename},sha256={digest},{len(content)}")

        for info in pure.infolist():
            content = pure.read(info)
            if info.filename.endswith(".dist-info/RECORD"):  # the last file
                core = ZipInfo(_INSIDE, info.date_time)
                core.external_attr = info.external_attr
                write(core, library.read_bytes())
                record.append(f"{info.filename},,")
                out.writestr(info, "\n".join((*record, "")), ZIP_DEFLATED)
                continue
            if info.filename.endswith(".dist-info/WHEEL"):
                content = content.replace(f"Tag: {_PURE}".encode(), f"Tag: {tag}".encode())
                content = content.replace(b"Root-Is-Purelib: true", b"Root-Is-Purelib: false")
            write(info, content)
    return path


def main(wheel: Path) -> None:
    """Build the wheel, if there is a native core for this checkout."""
    engine, tag = find_engine(), find_tag()
    if engine.is_native and tag is not None:
        add_core(wheel, LIBRARY, tag)
    else:
        print(f"no wheel with the native core: {engine.reason or 'the C library is not glibc'}", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
