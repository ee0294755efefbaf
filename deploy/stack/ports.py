"""Checks of ports: whether they are free or answer, and which processes listen on them."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path
from typing import Final, NamedTuple

HOST: Final = "127.0.0.1"

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
    """Check that a process can listen on a port of an address now.

    Returns:
        The operating system's error, or `None` if the port is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM if udp else socket.SOCK_STREAM) as probe:
        if not udp:  # SO_REUSEADDR, as Java sets it: an earlier broker's TIME_WAIT does not block the port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def find_port_holder(port: int) -> PortHolder | None:
    """Find the process that listens on a port. Returns `None` if it is unknown, as for processes of other users."""
    import psutil

    try:
        listeners = (one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
        process = psutil.Process(next(one.pid for one in listeners if one.pid and one.laddr and one.laddr.port == port))
        words, folder = process.cmdline(), Path(process.cwd())
    except (StopIteration, OSError, psutil.Error):
        return None
    # the embedded broker runs in STATE/broker (deploy/stack/embedded_broker.py)
    is_broker = "kafka.Kafka" in words and (folder / "address.json").is_file()
    command = shlex.join([Path(words[0]).name, *words[1:]]) if words else "?"
    shown = command if len(command) <= _SHOWN else f"{command[:_SHOWN]}…"
    return PortHolder(process.pid, shown, folder.parent if is_broker else None)
