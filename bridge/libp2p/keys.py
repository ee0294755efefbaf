"""The node's identity: an Ed25519 key in a file that only its owner may read.

The file holds a marshalled libp2p PrivateKey (libp2p specs, peer-ids/peer-ids.md, Keys), as other libp2p software
writes it: Type Ed25519, Data = the 32-byte seed and the 32-byte public key.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

# Type = 1 (Ed25519) and the tag and length (64) of Data
_HEADER: Final = b"\x08\x01\x12\x40"
_FILE_BYTES: Final = len(_HEADER) + 64


class KeyFileError(Exception):
    """The identity key cannot be used as it is: says which file, why, and what to do."""


def load_or_create(path: Path) -> Ed25519PrivateKey:
    """The key in `path`; a new one, written there with mode 0600, where there is no file.

    KeyFileError: it cannot be read or written, others may read or write it, or it holds no such key. The file is never
    repaired or replaced: a key that others could read may be known to them, and a lost key is a lost identity.
    """
    try:
        return _load(path)
    except FileNotFoundError:
        pass
    try:
        return _create(path)
    except FileExistsError:
        return load_or_create(path)  # another process was faster
    except OSError as error:
        raise KeyFileError(f"{path}: the identity key cannot be written: {error.strerror}") from error


def author_keys(identity: Ed25519PrivateKey, count: int) -> tuple[Ed25519PrivateKey, ...]:
    """The keys that sign a node's own messages: its identity, and `count - 1` keys made from it (HKDF, RFC 5869).

    The same identity has the same authors after each start, so that peers know the sequence numbers of all of them.
    """
    seed = identity.private_bytes_raw()
    made = (HKDF(SHA256(), 32, None, b"kiln author %d" % index).derive(seed) for index in range(1, count))
    return (identity, *map(Ed25519PrivateKey.from_private_bytes, made))


def _load(path: Path) -> Ed25519PrivateKey:
    try:
        # not blocking: a FIFO in its place would wait for a writer
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise KeyFileError(f"{path}: not a file, so it cannot hold the identity key")
            mode = stat.S_IMODE(status.st_mode)
            if mode & 0o077:
                raise KeyFileError(
                    f"{path}: the identity key has mode {mode:04o}, so others than its owner may use it; if nobody "
                    f"did: chmod 600 {path}"
                )
            raw = file.read(_FILE_BYTES + 1)
    except FileNotFoundError:
        if path.is_symlink():
            raise KeyFileError(f"{path}: a symbolic link to a file that is not there") from None
        raise
    except OSError as error:
        raise KeyFileError(f"{path}: the identity key cannot be read: {error.strerror}") from error
    if len(raw) != _FILE_BYTES or not raw.startswith(_HEADER):
        raise KeyFileError(
            f"{path}: not a libp2p Ed25519 private key; put the right one back, or move this away for a new identity"
        )
    seed, public = raw[len(_HEADER) : len(_HEADER) + 32], raw[len(_HEADER) + 32 :]
    key = Ed25519PrivateKey.from_private_bytes(seed)
    if key.public_key().public_bytes_raw() != public:
        raise KeyFileError(f"{path}: damaged: its private and public halves are not of one key")
    return key


def _create(path: Path) -> Ed25519PrivateKey:
    key = Ed25519PrivateKey.generate()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.unlink(missing_ok=True)
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(_HEADER + key.private_bytes_raw() + key.public_key().public_bytes_raw())
            file.flush()
            os.fsync(file.fileno())
        os.link(new, path)  # unlike a rename, this never replaces a key that came in between
    finally:
        new.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return key
