"""Run a command in a network namespace that has only loopback, and count its packets to other addresses.

    unshare -rn python tests/kit/loopback.py COMMAND…

The last line on stderr is the number of packets without a route, including DNS queries. The kernel counts them for the
whole namespace, so packets of libraries and of ended processes also count. The exit status is the command's.
"""

from __future__ import annotations

import fcntl
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

TESTS: Final = {
    "bep50": "tests/network/test_bep50_bridge.py",
    "libtorrent": "tests/network/test_bep50_peers.py",
    "demo network": "tests/network/test_demo_network.py",
}
"""Test modules that tests/network/test_loopback_only.py runs with loopback only."""
INSTALLED: Final = "npm"
"""Part of the names of tests that it skips, because their programs may have to be installed first."""

_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_TOLD = re.compile(r"^(\d+) packets had no way out$", re.MULTILINE)


def available() -> bool:
    """Return true if this user may create a network namespace."""
    try:
        done = subprocess.run(["unshare", "-rn", "true"], check=False, capture_output=True)
    except OSError:
        return False
    return done.returncode == 0


def command(*arguments: str) -> list[str]:
    """Return the command line that runs a command with loopback only."""
    return ["unshare", "-rn", sys.executable, str(Path(__file__)), *arguments]


def run(arguments: Sequence[str], env: Mapping[str, str] | None = None) -> tuple[int, int, str]:
    """Run a command with loopback only. Return exit status, number of packets without a route, and output."""
    done = subprocess.run(command(*arguments), env=env, check=False, capture_output=True, text=True)
    return done.returncode, told(done.stderr), done.stdout + done.stderr


def told(text: str) -> int:
    """Parse the number of packets without a route from the output on stderr."""
    found = _TOLD.findall(text)
    assert found, text
    return int(found[-1])


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def _no_way_out() -> int:
    names, numbers = (
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Ip:")
    )
    found = int(numbers[names.index("OutNoRoutes")])
    six = Path("/proc/net/snmp6")
    if six.exists():
        found += sum(int(line.split()[1]) for line in six.read_text().splitlines() if line.startswith("Ip6OutNoRoutes"))
    return found


if __name__ == "__main__":
    _loopback_up()
    status = subprocess.run(sys.argv[1:], check=False).returncode
    print(f"\n{_no_way_out()} packets had no way out", file=sys.stderr)
    sys.exit(status)
