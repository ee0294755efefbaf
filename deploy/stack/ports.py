"""Free ports of 127.0.0.1, and the processes that use ports, as far as Linux shows them (proc(5), /proc/net/tcp)."""

from __future__ import annotations

import os
import shlex
import socket
from pathlib import Path
from typing import Final, NamedTuple

HOST: Final = "127.0.0.1"

_LISTENS: Final = "0A"  # a state of include/net/tcp_states.h
_SHOWN: Final = 60  # characters of a command line


class PortHolder(NamedTuple):
    """The process that listens on a port."""

    pid: int
    command: str
    """command line, shortened"""
    state: Path | None
    """state folder, if the process is an embedded broker"""

    @property
    def description(self) -> str:
        if self.state is not None:
            return f"the embedded broker of the state folder {self.state} (process {self.pid})"
        return f"process {self.pid} ({self.command})"


def find_free_ports() -> tuple[int, int]:
    """Find two ports on which no process listens now."""
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind((HOST, 0))
        return int(first.getsockname()[1]), int(second.getsockname()[1])


def is_listening(server: str, patience: float = 2.0) -> bool:
    """Return true if `host:port` accepts connections within `patience` s."""
    host, _, port = server.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=patience):
            return True
    except (OSError, ValueError):
        return False


def check_port_free(port: int, host: str = HOST, *, udp: bool = False) -> OSError | None:
    """Return why no process can listen on this port of an address now; `None` if one can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM if udp else socket.SOCK_STREAM) as probe:
        if not udp:  # SO_REUSEADDR, as Java sets it: an earlier broker's TIME_WAIT does not block the port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def find_port_holder(port: int, proc: Path = Path("/proc")) -> PortHolder | None:
    """Find the process that listens on a port; `None` if unknown, as for other users' processes."""
    sockets: set[str] = set()
    for table in ("tcp", "tcp6"):  # Java listens over IPv6, also on 127.0.0.1
        try:
            sockets |= find_listening_sockets((proc / "net" / table).read_text(encoding="ascii"), port)
        except OSError:
            continue
    wanted = {f"socket:[{inode}]" for inode in sockets}
    if not wanted:
        return None
    for process in proc.iterdir():
        if process.name.isdigit() and _has_open(process, wanted):
            return _read_holder(process)
    return None


def find_listening_sockets(table: str, port: int) -> set[str]:
    """Find the inodes of the sockets that listen on a port.

    Args:
        table: Text of /proc/net/tcp or tcp6, with the columns number, local address:port in hex, remote address:port,
            state, three more, uid, timeout, inode.
        port: The port.
    """
    inodes: set[str] = set()
    for line in table.splitlines()[1:]:
        columns = line.split()
        if len(columns) > 9 and columns[3] == _LISTENS and int(columns[1].rpartition(":")[2], 16) == port:
            inodes.add(columns[9])
    return inodes


def _has_open(process: Path, wanted: set[str]) -> bool:
    try:
        return any(_read_link(descriptor) in wanted for descriptor in (process / "fd").iterdir())
    except OSError:  # another user's process, or one that has just ended
        return False


def _read_link(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return ""


def _read_holder(process: Path) -> PortHolder | None:
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        folder = Path(os.readlink(process / "cwd"))
    except OSError:
        return None
    # the embedded broker runs in STATE/broker (deploy/stack/embedded_broker.py)
    is_broker = "kafka.Kafka" in words and (folder / "address.json").is_file()
    command = shlex.join([Path(words[0]).name, *words[1:]]) if words else "?"
    shown = command if len(command) <= _SHOWN else f"{command[:_SHOWN]}…"
    return PortHolder(int(process.name), shown, folder.parent if is_broker else None)
