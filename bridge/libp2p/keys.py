"""The node's identity: an Ed25519 key in a file that only its owner may read.

The file is a marshalled libp2p PrivateKey (libp2p specs, peer-ids/peer-ids.md, Keys), as other libp2p software writes
it: Type Ed25519, Data = the 32-byte seed and the 32-byte public key.
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
    """The file of the identity key cannot be used. The error text names the file, the cause and a remedy."""


def load_or_create_key(path: Path) -> Ed25519PrivateKey:
    """Load the key from a file. If the file does not exist, create a key and write it there with mode 0600.

    A file that other users can read is refused: its mode is not corrected, because they may already know the key. A
    file that cannot be used is not replaced, because the node would lose its identity.

    Raises:
        KeyFileError: The file cannot be read or written, other users may read or write it, or it contains no Ed25519
            key.
    """
    try:
        return _load(path)
    except FileNotFoundError:
        pass
    try:
        return _create(path)
    except FileExistsError:
        return load_or_create_key(path)  # another process was faster
    except OSError as error:
        raise KeyFileError(
            f"cannot write the identity key {path} ({error.strerror}). Check the folder's permissions and the disk."
        ) from error


def derive_author_keys(identity: Ed25519PrivateKey, count: int) -> tuple[Ed25519PrivateKey, ...]:
    """Return the keys that sign a node's own messages: its identity, and `count - 1` keys derived from it.

    The keys are the same at each start, because peers remember the last sequence number of each author.
    Source: HKDF, RFC 5869.
    """
    seed = identity.private_bytes_raw()
    derived = (HKDF(SHA256(), 32, None, b"kiln author %d" % index).derive(seed) for index in range(1, count))
    return (identity, *map(Ed25519PrivateKey.from_private_bytes, derived))


def _load(path: Path) -> Ed25519PrivateKey:
    try:
        # non-blocking, because opening a FIFO of that name would wait for a writer
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise KeyFileError(
                    f"cannot read the identity key {path}: it is not a regular file. Move it away to get a new "
                    "identity."
                )
            mode = stat.S_IMODE(status.st_mode)
            if mode & 0o077:
                raise KeyFileError(
                    f"cannot use the identity key {path}: it has mode {mode:04o}, so other users may have read it. If "
                    f"none did, run chmod 600 {path}. Otherwise move the file away to get a new identity."
                )
            raw = file.read(_FILE_BYTES + 1)
    except FileNotFoundError:
        if path.is_symlink():
            raise KeyFileError(
                f"cannot read the identity key {path}: it links to a file that does not exist. Restore that file, or "
                "remove the link to get a new identity."
            ) from None
        raise
    except OSError as error:
        raise KeyFileError(
            f"cannot read the identity key {path} ({error.strerror}). Check the file's owner and permissions."
        ) from error
    if len(raw) != _FILE_BYTES or not raw.startswith(_HEADER):
        raise KeyFileError(
            f"cannot read the identity key {path}: it is not a libp2p Ed25519 private key. Restore the right file, or "
            "move this one away to get a new identity."
        )
    seed, public = raw[len(_HEADER) : len(_HEADER) + 32], raw[len(_HEADER) + 32 :]
    key = Ed25519PrivateKey.from_private_bytes(seed)
    if key.public_key().public_bytes_raw() != public:
        raise KeyFileError(
            f"cannot use the identity key {path}: it is damaged: private and public key do not match. Restore "
            "the file, or move it away to get a new identity."
        )
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
        os.link(new, path)  # unlike a rename, this never replaces a key created in between
    finally:
        new.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return key
