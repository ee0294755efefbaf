"""Input files of a backfill run: named files, files in folders, and saved copies of pipes."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, Final, cast

import msgspec

from kiln.conf.process.errors import KilnError
from kiln.schemas.captures import kiln_capture
from kiln.schemas.captures.compression import DamagedError, name_compression
from kiln.schemas.captures.formats import FORMATS, READABLE, SNIFF_BYTES, describe_file, detect_format
from kiln.schemas.captures.lines import FileRange, read_blocks
from kiln.schemas.times import clamp_nanos

STDIN: Final = Path("-")

_PART_BYTES: Final = 64 << 20
_BEGIN: Final = 2 * SNIFF_BYTES
"""bytes of a stream that decide on its format; the stream may be compressed"""
_SAVED_BLOCK: Final = 16 << 20
_FREE_BYTES: Final = 1 << 30
"""bytes of the disk that stay free when a pipe is saved, because a full disk stops the broker and the queries"""
_REPORT_EVERY: Final = 2_000
_DESCRIBED: Final = 20
_MAX_STEP_PARTS: Final = 1_000


class InputError(KilnError):
    """An input of a backfill run cannot be read, or a pipe cannot be saved."""


class FilePart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of an input file, which one task reads."""

    path: str
    format: str
    digest: bytes
    """SHA-256 of the file"""
    network: str
    """network of messages whose topic does not name a network"""
    heard_at: int
    """modification time of the file, ns: the capture time of frames that have none"""
    part: FileRange
    size: int
    """approximate bytes of the part"""

    @property
    def name(self) -> str:
        """Name of the file for the column `detail` of `quarantine`."""
        return Path(self.path).name

    @property
    def partition(self) -> int:
        """Value of the column `kafka_partition` for frames of the file: a negative number from the file's digest."""
        return -1 - (int.from_bytes(self.digest[:4], "big") >> 2)


@dataclass(frozen=True)
class CaptureFile:
    """An input file and its capture format."""

    path: str
    format: str
    """empty if the file has no known format"""
    description: str = ""
    """kind of the file in words, if it has no known format"""


def find_captures(
    files: Sequence[str], report: Callable[[str], None] = lambda _: None
) -> tuple[list[CaptureFile], list[str]]:
    """Find the input files of a backfill run: the named files, and all files in the named folders.

    Args:
        files: Paths of files and folders.
        report: Receives a message about the progress, after every 2,000 files.

    Returns:
        The files with a known format, in the order of the named paths and then by name; and descriptions, at
            most 20 per path, of files in folders that are skipped because they have no known format.

    Raises:
        InputError: A named file cannot be read or has no known format, or a folder contains no file of a known format.
    """
    captures: list[CaptureFile] = []
    skipped: list[str] = []
    for file in files:
        count, others = len(captures), list[CaptureFile]()
        for seen, path in enumerate(_list_files(Path(file)), 1):
            capture = _identify(str(path))
            (captures if capture.format else others).append(capture)
            if seen % _REPORT_EVERY == 0:
                report(f"{file}: {seen:,} files found, {len(captures) - count:,} of them have a known format")
        if len(captures) == count:
            if not Path(file).is_dir():
                reason = others[0].description
            elif others:
                reason = f"none of its {len(others):,} files has a known format. For example, {others[0].path}: "
                reason += others[0].description
            else:
                reason = "it contains no files"
            raise InputError(f"cannot read {file}: {reason}. {READABLE}")
        skipped += [f"skipping {other.path}: {other.description}" for other in others[:_DESCRIBED]]
        if len(others) > _DESCRIBED:
            skipped.append(f"skipping {len(others) - _DESCRIBED:,} other files of {file}, which have no known format")
    return captures, skipped


def split_captures(
    captures: Sequence[CaptureFile], network: str, report: Callable[[int], None] = lambda _: None
) -> list[FilePart]:
    """Split input files into parts that tasks can read in parallel, and compute the files' digests.

    Args:
        network: Network of messages whose topic does not name a network.
        report: Receives the number of files that are done, after each file.

    Raises:
        InputError: A file cannot be read.
    """
    parts: list[FilePart] = []
    for done, capture in enumerate(captures, 1):
        with _open(capture.path) as file:
            digest, status = hashlib.file_digest(file, "sha256").digest(), os.fstat(file.fileno())
            _check_intact(capture, file)
            ranges = list(FORMATS[capture.format].split(file, _PART_BYTES))
        default_time, size = clamp_nanos(status.st_mtime_ns), -(-status.st_size // max(1, len(ranges)))
        parts += [FilePart(capture.path, capture.format, digest, network, default_time, part, size) for part in ranges]
        report(done)
    return parts


def _check_intact(capture: CaptureFile, file: BinaryIO) -> None:
    """Check that a compressed file can be decompressed to its end.

    Kiln's own capture files are not checked, because their reader returns the records before the damage.

    Raises:
        InputError: The file cannot be decompressed to its end.
    """
    if capture.format == kiln_capture.NAME or not name_compression(file):
        return
    try:
        for _ in read_blocks(file):
            pass
    except DamagedError as error:
        raise InputError(
            f"cannot read {capture.path}: {error}. Decompress the intact part into a file, and pass that file instead"
        ) from error


def open_parts(parts: Sequence[FilePart]) -> Iterator[tuple[FilePart, BinaryIO]]:
    """Open the files of parts one after another.

    Raises:
        OSError: A file cannot be read.
    """
    for path, group in groupby(parts, key=lambda part: part.path):
        with Path(path).open("rb") as file:
            yield from ((part, file) for part in group)


def count_parts_per_step(parts: Sequence[FilePart], at_least: int) -> int:
    """Compute how many parts of files one chunk of a run reads: `at_least`, or more if all parts are small.

    Large chunks save commits.
    """
    largest = max((part.size for part in parts), default=0)
    return max(at_least, min(_MAX_STEP_PARTS, at_least * _PART_BYTES // max(1, largest)))


def save_streams(files: Sequence[Path], folder: Path) -> tuple[Path, ...]:
    """Save standard input (`-`) and pipes as files, so that all tasks, and a resumed run, can read them.

    Args:
        files: Paths from the command line.
        folder: Folder for the saved files. A saved file is named after its content, so that a resumed run finds it.

    Returns:
        The paths, in which those of saved files replace `-` and pipes.

    Raises:
        InputError: Standard input is a terminal, the data has no known format, or the folder cannot be written or has
            too little space.
    """
    return tuple(_save_stream(path, folder) if path == STDIN or _is_stream(path) else path for path in files)


def delete_streams(folder: Path) -> None:
    """Delete the saved standard input and pipes of a run that no longer needs them. `folder`: as in `save_streams`."""
    shutil.rmtree(folder, ignore_errors=True)


def _save_stream(path: Path, folder: Path) -> Path:
    if path == STDIN and sys.stdin.isatty():
        raise InputError("cannot read -: standard input is a terminal. Pipe a file into the command, or name the file")
    partial = folder / "partial"
    try:
        with nullcontext(sys.stdin.buffer) if path == STDIN else path.open("rb") as stream:
            begin = stream.read(_BEGIN)
            if detect_format(BytesIO(begin)) is None:
                description = describe_file(BytesIO(begin))
                raise InputError(f"cannot read {path}: {description}. {READABLE}")
            folder.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as out:
                _copy_bounded(path, begin, cast(BinaryIO, stream), out, folder)
        with partial.open("rb") as saved:
            digest = hashlib.file_digest(saved, "sha256").hexdigest()
        return partial.replace(folder / digest[:16])
    except OSError as error:
        raise InputError(
            f"cannot save {path} to {folder}: {error.strerror}. Fix the cause, or save the stream to a file yourself, "
            "and name that file"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
        with suppress(OSError):  # it is missing, or holds another saved file
            folder.rmdir()


def _copy_bounded(path: Path, begin: bytes, stream: BinaryIO, out: BinaryIO, folder: Path) -> None:
    size, block = 0, begin
    while block:
        if shutil.disk_usage(folder).free < len(block) + _FREE_BYTES:
            raise InputError(
                f"cannot save {path} to {folder}: after {size:,} bytes, less than {_FREE_BYTES >> 20} MiB of the disk "
                "are free. Free some space, or save the stream to a file on another disk, and name that file"
            )
        out.write(block)
        size += len(block)
        block = stream.read(_SAVED_BLOCK)


def _is_stream(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)


def _list_files(path: Path) -> Iterator[Path]:
    """List the visible files in a folder and its subfolders, sorted by name. If `path` is a file, list only it."""
    if not path.is_dir():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and (Path(folder) / name).is_file():
                yield Path(folder) / name


def _identify(path: str) -> CaptureFile:
    with _open(path) as file:
        if capture_format := detect_format(file):
            return CaptureFile(path, capture_format.name)
        return CaptureFile(path, "", describe_file(file))


@contextmanager
def _open(path: str) -> Iterator[BufferedReader]:
    try:
        with Path(path).open("rb") as file:
            yield file
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
