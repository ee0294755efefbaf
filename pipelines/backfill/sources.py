"""Files that a run reads: named files, those in folders and archives, and streams saved to the state folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import msgspec

from kiln.conf.process.errors import KilnError
from kiln.schemas.captures.compression import (
    ArchiveError,
    Member,
    describe_damage,
    is_hidden,
    list_members,
    open_member,
)
from kiln.schemas.captures.formats import FORMATS, describe_file, detect_format
from kiln.schemas.captures.lines import WHOLE, FileRange
from kiln.schemas.times import clamp_nanos

STDIN: Final = Path("-")

_PART_BYTES: Final = 64 << 20
_DIGEST_BLOCK: Final = 1 << 20


class InputError(KilnError):
    """An input of a run cannot be read."""


class FilePart(msgspec.Struct, frozen=True, array_like=True):
    """A part of a file, which one task reads."""

    path: str
    format: str
    digest: bytes
    network: str
    heard_at: int
    part: FileRange
    member: int | None = None
    """number of the file in an archive"""
    member_name: str = ""

    @property
    def name(self) -> str:
        """Name of the file in the details of quarantine."""
        name = Path(self.path).name
        return name if self.member is None else f"{self.member_name} in {name}"

    @property
    def partition(self) -> int:
        """Value of the column `kafka_partition`: negative, and a function of the file's digest."""
        return -1 - (int.from_bytes(self.digest[:4], "big") >> 2)


@dataclass(frozen=True)
class CaptureFile:
    """A file of a known format, or a member of an archive."""

    path: str
    format: str
    member: Member | None = None


class _OtherFile(NamedTuple):
    """A file of no known format."""

    name: str
    description: str


def find_captures(files: Sequence[str]) -> tuple[list[CaptureFile], list[str]]:
    """Find the files to read: those named, and all in the named folders and archives.

    Returns:
        The files, in the order of the named paths and then by name, and descriptions of the files that are skipped in
        folders and archives because they have no known format.

    Raises:
        InputError: A named file cannot be read or has no known format, or a folder or an archive contains no file that
            has one.
    """
    captures: list[CaptureFile] = []
    skipped: list[str] = []
    for file in files:
        count, others = len(captures), list[_OtherFile]()
        is_several = Path(file).is_dir()
        for path in _list_files(Path(file)):
            is_several = _add_captures(str(path), captures, others) or is_several
        if len(captures) == count:
            if not is_several:
                reason = others[0].description
            elif others:
                reason = f"none of its {len(others):,} files is of a known format. Of {others[0].name}, "
                reason += others[0].description
            else:
                reason = "there are no files in it"
            raise InputError(f"cannot read {file}: {reason}. The formats are {', '.join(FORMATS)}")
        skipped += [f"{other.name} is not read: {other.description}" for other in others]
    return captures, skipped


def split_capture(capture: CaptureFile, network: str) -> list[FilePart]:
    """Split a file into parts that tasks can read in parallel.

    Args:
        capture: The file.
        network: Network of messages whose topic names none.

    Raises:
        InputError: The file cannot be read.
    """
    with _open(capture.path) as raw:
        file = raw if capture.member is None else open_member(raw, capture.member.number)
        digest = hashlib.sha256()
        with describe_damage():  # of a member; its reader comes to the damage
            while block := file.read(_DIGEST_BLOCK):
                digest.update(block)
        modified_at = None if capture.member is None else capture.member.modified_at
        default_time = clamp_nanos(os.fstat(raw.fileno()).st_mtime_ns if modified_at is None else modified_at)
        if capture.member is not None:  # to divide it, each task would decompress all that is before its part
            number, name = capture.member.number, capture.member.name
            return [FilePart(capture.path, capture.format, digest.digest(), network, default_time, WHOLE, number, name)]
        ranges = list(FORMATS[capture.format].split(file, _PART_BYTES))
        return [FilePart(capture.path, capture.format, digest.digest(), network, default_time, part) for part in ranges]


def save_streams(files: Sequence[Path], folder: Path) -> tuple[Path, ...]:
    """Save standard input (`-`) and pipes as files, so that all tasks, and a resumed run, can read them.

    Args:
        files: Paths of a request.
        folder: Folder of the run's files. A file is named after its content, so the same content is the same file.

    Returns:
        The paths with those of the saved files.

    Raises:
        InputError: Standard input is a terminal, or the folder cannot be written.
    """
    return tuple(_save_stream(path, folder) if path == STDIN or _is_stream(path) else path for path in files)


def delete_streams(folder: Path) -> None:
    """Delete the saved files of a run that no longer needs them."""
    shutil.rmtree(folder, ignore_errors=True)


def _save_stream(path: Path, folder: Path) -> Path:
    if path == STDIN and sys.stdin.isatty():
        raise InputError("-: standard input is a terminal. Pipe a file into the command, or name the file")
    partial = folder / "partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with nullcontext(sys.stdin.buffer) if path == STDIN else path.open("rb") as stream, partial.open("wb") as out:
            shutil.copyfileobj(stream, out)
        with partial.open("rb") as saved:
            digest = hashlib.file_digest(saved, "sha256").hexdigest()
        return partial.replace(folder / digest[:16])
    except OSError as error:
        raise InputError(f"cannot save {path} to {folder}: {error.strerror}") from error


def _is_stream(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)


def _list_files(path: Path) -> Iterator[Path]:
    """List a file, or the files in a folder and its folders by name, without hidden ones."""
    if not path.is_dir():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        for name in sorted(names):
            if not is_hidden(name) and (Path(folder) / name).is_file():
                yield Path(folder) / name


def _add_captures(path: str, captures: list[CaptureFile], others: list[_OtherFile]) -> bool:
    """Add a file, or the members of an archive, to the files of a known format or to descriptions of others.

    Returns:
        True if the file is an archive.
    """
    with _open(path) as raw:
        try:
            members = list_members(raw)
            for member in [None] if members is None else members:
                file = raw if member is None else open_member(raw, member.number)
                capture_format = detect_format(file)
                if capture_format is None:
                    others.append(_OtherFile(_name(path, member), describe_file(file)))
                else:
                    captures.append(CaptureFile(path, capture_format.name, member))
        except ArchiveError as error:
            raise InputError(f"cannot read {path}: {error}") from error
        return members is not None


@contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    try:
        with Path(path).open("rb") as file:
            yield file
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def _name(path: str, member: Member | None) -> str:
    return path if member is None else f"{member.name} in {path}"
