"""A Kiln that is killed leaves nothing behind: the bridge ends by itself, and its port is free."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import free_ports
from kiln.conf.process.bridge_status import read_status
from kit.awaiting import wait_until
from kit.bridge_alone import NOWHERE

pytestmark = [pytest.mark.network, pytest.mark.timeout(300)]

START = """
import sys, time
from kiln.conf.settings.reading import load_settings
from kiln.deploy.stack.child_process import BridgeProcess
BridgeProcess(load_settings()).start()
print("started", flush=True)
time.sleep(3600)  # until it is killed
"""
"""A `kiln run` as far as the bridge is concerned."""


def children(pid: int) -> dict[int, str]:
    """All processes below one, with their command lines."""
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    for child in list(found):
        found |= children(child)
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_kiln_leaves_no_process_and_no_port_taken(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("KILN_")},
        "KILN_STATE": str(tmp_path),
        "KILN_NETWORK": "local-test",
        "KILN_KAFKA__BOOTSTRAP": NOWHERE,
        "KILN_BRIDGE__LISTEN": f"/ip4/127.0.0.1/tcp/{port}",
        "KILN_DISCOVERY__ENABLED": "false",
    }
    parent = subprocess.Popen([sys.executable, "-c", START], env=environment, stdout=subprocess.PIPE, text=True)
    left: dict[int, str] = {}
    try:
        wait_until(lambda: read_status(tmp_path / "bridge" / "status.json") is not None, "the bridge runs", 120)
        left = children(parent.pid)
        assert sum("kiln.bridge.app.main" in each for each in left.values()) == 1
        parent.kill()
        parent.wait()
        wait_until(lambda: not any(map(lives, left)), lambda: f"{[left[pid] for pid in left if lives(pid)]} end", 60)
        with socket.create_server(("127.0.0.1", port)):
            pass
    finally:
        parent.kill()
        parent.wait()
        for pid in left:
            if lives(pid):
                os.kill(pid, signal.SIGKILL)
