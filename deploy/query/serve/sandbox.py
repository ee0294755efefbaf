"""Restrict a program to listed files and ports with Linux's Landlock (docs.kernel.org, Landlock).

The kernel enforces the limits, for root too, until the program and its children end. They cannot open other files,
connect to other TCP ports, or signal or trace other processes. This file runs as a script with the standard library
only, because the limits apply to the process that sets them.
"""

from __future__ import annotations

import ctypes
import json
import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAPBSET_DROP: Final = 24
_CAPABILITIES: Final = 64
_ROOTS_READING: Final = (1, 2)  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: the lake may be another user's

# access rights to files: <linux/landlock.h>
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_OF_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_READ: Final = _EXECUTE | _READ_FILE | _READ_DIR
_RIGHTS_BY_ABI: Final = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_CONNECT_TCP: Final = 1 << 1
_SCOPES: Final = 0b11  # abstract Unix sockets, signals


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))


class _PortRule(ctypes.Structure):
    _fields_ = (("rights", ctypes.c_uint64), ("port", ctypes.c_uint64))


@dataclass(frozen=True)
class Limits:
    """Files and folders that a program may read and execute, or also write, and TCP ports that it may connect to.

    Missing paths are ignored.
    """

    read: Sequence[str]
    write: Sequence[str]
    connect: Sequence[int]


def read_landlock_version() -> int:
    """Read the version of this kernel's Landlock interface; 0 if it has none or it is disabled."""
    if sys.platform != "linux":
        return 0
    return max(0, int(_libc().syscall(_CREATE_RULESET, None, 0, 1)))


def build_confined_command(command: Sequence[str], limits: Limits) -> list[str]:
    """Build the command that runs `command` within `limits`."""
    return [sys.executable, "-I", __file__, json.dumps(asdict(limits)), *command]


def _confine(limits: Limits) -> None:
    """Apply the limits to this process.

    Raises:
        OSError: The kernel rejects a rule.
    """
    version = read_landlock_version()
    rights = (1 << _RIGHTS_BY_ABI[min(version, 5)]) - 1
    ruleset = _Ruleset(rights, _CONNECT_TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    libc = _libc()
    rules = _check_result(libc.syscall(_CREATE_RULESET, ctypes.byref(ruleset), size, 0))
    for paths, allowed in ((limits.read, _READ), (limits.write, rights)):
        for path in filter(os.path.exists, paths):
            _allow_path(rules, path, allowed & rights)
    if version >= 4:
        for port in limits.connect:
            rule = _PortRule(_CONNECT_TCP, port)
            _check_result(libc.syscall(_ADD_RULE, rules, 2, ctypes.byref(rule), 0))
    for capability in range(_CAPABILITIES):  # fails for those that the kernel does not know, and for users but root
        if capability not in _ROOTS_READING:
            libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    _check_result(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check_result(libc.syscall(_RESTRICT_SELF, rules, 0))
    os.close(rules)


def _allow_path(rules: int, path: str, rights: int) -> None:
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(opened).st_mode):
            rights &= _OF_FILES
        rule = _PathRule(rights, opened)
        _check_result(_libc().syscall(_ADD_RULE, rules, 1, ctypes.byref(rule), 0))
    finally:
        os.close(opened)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check_result(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock: {os.strerror(number)}")
    return result


SYSTEM: Final = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/dev/random", "/dev/urandom", "/proc/self", "/sys/fs/cgroup"),
    *("/proc/meminfo", "/proc/cpuinfo", "/proc/stat", "/proc/filesystems", "/sys/devices/system/cpu"),
    *("/etc/ld.so.cache", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/hosts", "/etc/host.conf"),
    *("/etc/resolv.conf", "/etc/localtime", "/etc/ssl/certs", "/etc/pki/ca-trust", "/usr/share/zoneinfo"),
    *("/bin/rm", "/usr/bin/rm"),
)
"""Paths of a Linux system that a JVM with Spark needs, without secrets. Spark deletes temporary files with `rm`."""


def list_system_paths(executable: Path) -> list[str]:
    """List SYSTEM, the installation of an executable (`/usr/lib/jvm/x` for its `bin/java`), and its Debian settings."""
    home = executable.resolve().parent.parent
    settings = {str(path.resolve().parent) for path in (home / "conf").glob("**/*") if path.is_symlink()}
    return [*SYSTEM, str(home), *sorted(settings)]


if __name__ == "__main__":
    _confine(Limits(**json.loads(sys.argv[1])))
    os.execv(sys.argv[2], sys.argv[2:])
