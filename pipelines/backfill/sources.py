"""Input files of a backfill run: named files, files in folders and archives, and saved copies of pipes."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, Final, cast

import msgspec

from kiln.conf.process.errors import KilnError
from kiln.schemas.captures import kiln_capture
from kiln.schemas.captures.compression import (
    ArchiveError,
    DamagedError,
    Member,
    describe_damage,
    is_archive,
    is_hidden,
    name_compression,
    read_begin,
    read_members,
)
from kiln.schemas.captures.formats import FORMATS, READABLE, SNIFF_BYTES, describe_file, detect_format
from kiln.schemas.captures.lines import WHOLE, FileRange, read_blocks
from kiln.schemas.times import clamp_nanos

STDIN: Final = Path("-")

_PART_BYTES: Final = 64 << 20
_DIGEST_BLOCK: Final = 1 << 20
_BEGIN: Final = 2 * SNIFF_BYTES
"""bytes of a file in an archive that decide on its format; the file may be compressed"""
_SAVED_BLOCK: Final = 16 << 20
_FREE_BYTES: Final = 1 << 30
"""bytes of the disk that stay free when a pipe is saved, because a full disk stops the broker and the queries"""
_REPORT_EVERY: Final = 2_000
_DESCRIBED: Final = 20
_MAX_STEP_PARTS: Final = 1_000


class InputError(KilnError):
    """An input of a backfill run cannot be read, or a pipe cannot be saved."""


class FilePart(msgspec.Struct, frozen=True, array_like=True):
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
    member: int | None = None
    """number of the file in an archive"""
    member_name: str = ""
    size: int = 0
    """approximate bytes of the part; 0 in runs of an older Kiln, which did not store it"""

    @property
    def name(self) -> str:
        """Name of the file for the column `detail` of `quarantine`."""
        name = Path(self.path).name
        return name if self.member is None else f"{self.member_name} in {name}"

    @property
    def partition(self) -> int:
        """Value of the column `kafka_partition` for frames of the file: a negative number from the file's digest."""
        return -1 - (int.from_bytes(self.digest[:4], "big") >> 2)


@dataclass(frozen=True)
class CaptureFile:
    """An input file, or a file in an archive (`member`), and its capture format."""

    path: str
    format: str
    """empty if the file has no known format"""
    member: Member | None = None
    description: str = ""
    """kind of the file in words, if it has no known format"""

    @property
    def name(self) -> str:
        return self.path if self.member is None else f"{self.member.name} in {self.path}"


def find_captures(
    files: Sequence[str], report: Callable[[str], None] = lambda _: None
) -> tuple[list[CaptureFile], list[str]]:
    """Find the input files of a backfill run: the named files, and all files in the named folders and archives.

    Args:
        files: Paths of files, folders and archives.
        report: Receives a message about the progress, after every 2,000 files.

    Returns:
        The files with a known format, in the order of the named paths and then by name; and descriptions, at
            most 20 per path, of files in folders and archives that are skipped because they have no known format.

    Raises:
        InputError: A named file cannot be read or has no known format, or a folder or an archive contains no file of a
            known format.
    """
    captures: list[CaptureFile] = []
    skipped: list[str] = []
    for file in files:
        count, others = len(captures), list[CaptureFile]()
        is_several, seen = Path(file).is_dir(), 0
        for path in _list_files(Path(file)):
            for found in _identify(str(path)):
                is_several = is_several or found.member is not None
                (captures if found.format else others).append(found)
                seen += 1
                if seen % _REPORT_EVERY == 0:
                    report(f"{file}: {seen:,} files found, {len(captures) - count:,} of them have a known format")
        if len(captures) == count:
            if not is_several:
                reason = others[0].description
            elif others:
                reason = f"none of its {len(others):,} files has a known format. For example, {others[0].name}: "
                reason += others[0].description
            else:
                reason = "it contains no files"
            raise InputError(f"cannot read {file}: {reason}. {READABLE}")
        skipped += [f"skipping {other.name}: {other.description}" for other in others[:_DESCRIBED]]
        if len(others) > _DESCRIBED:
            skipped.append(f"skipping {len(others) - _DESCRIBED:,} other files of {file}, which have no known format")
    return captures, skipped


def split_captures(
    captures: Sequence[CaptureFile], network: str, report: Callable[[int], None] = lambda _: None
) -> list[FilePart]:
    """Split input files into parts that tasks can read in parallel, and compute the files' digests.

    Args:
        captures: The files. Files of one archive are in the archive's order.
        network: Network of messages whose topic does not name a network.
        report: Receives the number of files that are done, after each file.

    Raises:
        InputError: A file cannot be read.
    """
    parts: list[FilePart] = []
    done = 0
    for path, group in groupby(captures, key=lambda capture: capture.path):
        formats = {_number(capture.member): capture.format for capture in group}
        with _open(path) as raw, _translate_archive_errors(path):
            for member, content in _read_contents(raw, formats):
                parts += _split_content(path, raw, member, content, formats[_number(member)], network)
                done += 1
                report(done)
    return parts


def _split_content(
    path: str, raw: BinaryIO, member: Member | None, content: BinaryIO, capture_format: str, network: str
) -> Iterator[FilePart]:
    digest, size = hashlib.sha256(), 0
    with describe_damage() as damage:
        while block := content.read(_DIGEST_BLOCK):
            digest.update(block)
            size += len(block)
    _check_intact(CaptureFile(path, capture_format, member).name, capture_format, content, is_damaged=bool(damage))
    modified_at = None if member is None else member.modified_at
    default_time = clamp_nanos(os.fstat(raw.fileno()).st_mtime_ns if modified_at is None else modified_at)
    # members are not divided, because a task would have to decompress everything that precedes its part
    ranges = [WHOLE] if member is not None else list(FORMATS[capture_format].split(content, _PART_BYTES))
    number, name = _number(member), "" if member is None else member.name
    part_size = -(-size // max(1, len(ranges)))
    for part in ranges:
        yield FilePart(path, capture_format, digest.digest(), network, default_time, part, number, name, part_size)


def _number(member: Member | None) -> int | None:
    return None if member is None else member.number


def _check_intact(name: str, capture_format: str, file: BinaryIO, *, is_damaged: bool = False) -> None:
    """Check that a compressed file can be decompressed to its end.

    Kiln's own capture files are not checked, because their reader returns the records before the damage.

    Args:
        name: Name of the file for the error.
        file: The file, compressed or not.
        is_damaged: True if the file is in an archive that could not be read to the file's end.

    Raises:
        InputError: The file cannot be decompressed to its end.
    """
    if capture_format == kiln_capture.NAME or not (is_damaged or name_compression(file)):
        return
    try:
        for _ in read_blocks(file):
            pass
    except DamagedError as error:
        raise InputError(
            f"cannot read {name}: {error}. Decompress the intact part into a file, and pass that file instead"
        ) from error


def _read_contents(raw: BinaryIO, wanted: Collection[int | None]) -> Iterator[tuple[Member | None, BinaryIO]]:
    """Open a file (if `wanted` contains None), or files of an archive by their numbers.

    Files in a compressed tar are copied first, because seeking in them would decompress the archive again.
    """
    if None in wanted:
        yield None, raw
        return
    is_stream = bool(name_compression(raw))
    for member, content in read_members(raw, {number for number in wanted if number is not None}):
        if not is_stream:
            yield member, content
            continue
        with tempfile.SpooledTemporaryFile(_PART_BYTES) as copy:
            shutil.copyfileobj(content, copy)
            copy.seek(0)
            yield member, cast(BinaryIO, copy)


def open_parts(parts: Sequence[FilePart]) -> Iterator[tuple[FilePart, BinaryIO]]:
    """Open the files of parts one after another, in an order in which each archive is read only once.

    Raises:
        OSError: A file cannot be read.
        ArchiveError: An archive cannot be read, although it could when the run began.
    """
    for path, group in groupby(sorted(parts, key=_locate), key=lambda part: part.path):
        by_member = {number: list(of_member) for number, of_member in groupby(group, key=lambda part: part.member)}
        with Path(path).open("rb") as raw:
            for member, content in _read_contents(raw, by_member):
                yield from ((part, content) for part in by_member[_number(member)])


def _locate(part: FilePart) -> tuple[str, int, int]:
    return part.path, -1 if part.member is None else part.member, part.part.start


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
            begin, _ = read_begin(cast(BinaryIO, stream), _BEGIN)
            if not is_archive(BytesIO(begin)) and detect_format(BytesIO(begin)) is None:
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
    """List the files in a folder and its subfolders, sorted by name, without hidden ones; or the file itself."""
    if not path.is_dir():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        for name in sorted(names):
            if not is_hidden(name) and (Path(folder) / name).is_file():
                yield Path(folder) / name


def _identify(path: str) -> Iterator[CaptureFile]:
    with _open(path) as raw, _translate_archive_errors(path):
        if not is_archive(raw):
            capture_format = detect_format(raw)
            yield (
                CaptureFile(path, capture_format.name)
                if capture_format
                else CaptureFile(path, "", None, describe_file(raw))
            )
            return
        for member, content in read_members(raw):
            begin, damage = read_begin(content, _BEGIN)
            if begin and (capture_format := detect_format(BytesIO(begin))):
                yield CaptureFile(path, capture_format.name, member)
            else:
                description = describe_file(BytesIO(begin)) if begin else f"it {damage or 'is empty'}"
                yield CaptureFile(path, "", member, description)


@contextmanager
def _translate_archive_errors(path: str) -> Iterator[None]:
    try:
        yield
    except ArchiveError as error:
        raise InputError(f"cannot read {path}: {error}") from error


@contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    try:
        with Path(path).open("rb") as file:
            yield file
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
