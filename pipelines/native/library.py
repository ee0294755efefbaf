"""Shared library of the native core: its path, its build, and the decision whether this process uses it.

Python defines how a record is decoded, and the library must give the same rows. So the library is used only if it was
built from the sources and for the columns of this checkout. A worker that finds a difference stops using the library.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

from kiln.conf.process.errors import PrerequisiteError
from kiln.conf.process.logs import log_event
from kiln.schemas.delta.tables import TABLES

LIBRARY: Final = Path(__file__).resolve().with_name("libkiln_core.so")
SOURCES: Final = Path(__file__).resolve().parents[2] / "native" / "src"
BUILD_COMMAND: Final = "make native"
TABLES_OF_CORE: Final = ("frames", "copies", "messages", "subscriptions", "controls")
"""Tables whose rows the native core builds, in the order in which it returns them"""

_ABI: Final = 3
_DIGEST_TEXT: Final = 64
_log = logging.getLogger("kiln.pipelines.native")


class Engine(NamedTuple):
    """Decoder of frames in this process: the native core, or Python and the reason why there is no core."""

    is_native: bool
    reason: str = ""

    def describe(self) -> str:
        return "native core" if self.is_native else f"Python: {self.reason}"


def compute_sources_digest(sources: Path | None = None) -> str:
    """Compute the digest of the native core's sources and of the table columns that it fills. Where there are no
    sources, as in a wheel, compute the digest of the columns."""
    digest = sha256()
    for path in sorted((sources or SOURCES).glob("*.rs")):
        digest.update(f"{path.name}\n".encode())
        digest.update(path.read_bytes())
    for name in TABLES_OF_CORE:
        digest.update(repr([(column.name, column.type) for column in TABLES[name].columns]).encode())
    return digest.hexdigest()


def find_engine() -> Engine:
    """Return the decoder that this process uses."""
    if _turned_off:
        return Engine(False, _turned_off[0])
    return _open_library(LIBRARY)[1]


def load_library() -> ctypes.CDLL | None:
    """Load the library. Returns None if this process decodes in Python."""
    return None if _turned_off else _open_library(LIBRARY)[0]


def turn_off(reason: str, partition: int, offset: int) -> None:
    """Stop using the library in this process, and log the Kafka record at which it was wrong."""
    _turned_off.append(reason)
    log_event(_log, "native_core_off", logging.ERROR, reason=reason, partition=partition, offset=offset)


def log_panic(partition: int, offset: int) -> None:
    """Log the Kafka record at which the native core panicked. Python then decodes this record."""
    log_event(_log, "native_core_panicked", logging.WARNING, partition=partition, offset=offset)


_turned_off: list[str] = []
"""The reason why this process no longer uses the library; empty while it does"""


@lru_cache
def _open_library(path: Path) -> tuple[ctypes.CDLL | None, Engine]:
    if not path.exists() and not SOURCES.is_dir():
        return None, Engine(False, "this installation has no native core")
    if not path.exists():
        return None, Engine(False, f"the native core is not built. Run {BUILD_COMMAND}")
    try:
        library = ctypes.CDLL(str(path))
        abi = library.kiln_abi()
    except (OSError, AttributeError) as error:
        return None, Engine(False, f"{path.name} cannot be loaded ({error}). Run {BUILD_COMMAND}")
    if abi != _ABI:
        return None, Engine(False, f"the native core was built from other sources. Run {BUILD_COMMAND}")
    _declare_functions(library)
    digest = ctypes.create_string_buffer(_DIGEST_TEXT)
    library.kiln_sources(digest)
    if SOURCES.is_dir() and digest.raw.decode("ascii", "replace") != compute_sources_digest():
        return None, Engine(False, f"the native core was built from other sources. Run {BUILD_COMMAND}")
    return library, Engine(True)


def _declare_functions(library: ctypes.CDLL) -> None:
    pointer, size, chars, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_int64
    library.kiln_new.restype = pointer
    library.kiln_new.argtypes = [number, number, ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint64]
    library.kiln_free.argtypes = [pointer]
    library.kiln_free.restype = None
    library.kiln_learn.argtypes = [pointer, chars, size, chars, size, chars, pointer, number]
    library.kiln_learn.restype = None
    library.kiln_learn_signature.argtypes = [pointer, chars, size, ctypes.c_int32]
    library.kiln_learn_signature.restype = None
    for function in (library.kiln_archive, library.kiln_updates, library.kiln_batch, library.kiln_unchecked):
        function.argtypes = [pointer, pointer, number, pointer, pointer]
        function.restype = number
    library.kiln_unknown_tables.argtypes = [pointer, pointer, number, pointer, size]
    library.kiln_unknown_tables.restype = number
    for function in (library.kiln_sha256, library.kiln_blake2b):
        function.argtypes = [chars, size, pointer]
        function.restype = None
    library.kiln_sources.argtypes = [pointer]
    library.kiln_sources.restype = None


def find_rustc() -> str | None:
    """Find the Rust compiler: the one that the environment variable RUSTC names, or the first on PATH."""
    return shutil.which(os.environ.get("RUSTC") or "rustc")


def build_library(
    rustc: str, library: Path | None = None, sources: Path | None = None, more: Sequence[str] = ()
) -> None:
    """Build the library with rustc.

    Args:
        rustc: The compiler, version 1.63 or later.
        library: File to write; by default the one that Kiln loads.
        sources: Folder of the sources.
        more: More options for the compiler.

    Raises:
        PrerequisiteError: The compiler fails.
    """
    library, sources = library or LIBRARY, sources or SOURCES
    unfinished = library.with_suffix(f".{os.getpid()}.tmp")
    options = ["--edition", "2021", "--crate-name", "kiln_core", "--crate-type", "cdylib", "-C", "opt-level=3"]
    options += ["-C", "codegen-units=1", "-C", "overflow-checks=on", "-C", "strip=symbols", *more]
    environment = {**os.environ, "KILN_CORE_SOURCES": compute_sources_digest()}
    try:
        run = subprocess.run(
            [rustc, *options, str(sources / "lib.rs"), "-o", str(unfinished)],
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if run.returncode != 0:
            raise PrerequisiteError(
                f"{rustc} cannot build the native core. Install rustc 1.63 or later if this one is older. Its output:\n"
                f"{run.stderr.strip()[-2000:]}"
            )
        unfinished.replace(library)  # a process that has loaded the old file keeps it
    finally:
        unfinished.unlink(missing_ok=True)
