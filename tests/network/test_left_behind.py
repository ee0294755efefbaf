"""A Kiln that is killed leaves nothing behind: the bridge and its Helia end by themselves, and their ports are free."""

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
from kit import helia_packages
from kit.awaiting import wait_until
from kit.bridge_alone import NOWHERE

pytestmark = [pytest.mark.network, pytest.mark.timeout(300)]

START = """
import sys, time
from kiln.conf.settings.reading import load_settings
from kiln.deploy.stack.bridge_process import BridgeProcess
BridgeProcess(load_settings()).start()
print("started", flush=True)
time.sleep(3600)
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


@pytest.mark.parametrize("stuck", ["none", "helia"])
def test_a_killed_kiln_leaves_no_process_and_no_port_taken(tmp_path: Path, stuck: str) -> None:
    ports = free_ports(2)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("KILN_")},
        "KILN_STATE": str(tmp_path),
        "KILN_NETWORK": "local-test",
        "KILN_KAFKA__BOOTSTRAP": NOWHERE,
        "KILN_BRIDGE__LISTEN": f"/ip4/127.0.0.1/tcp/{ports[0]}",
        "KILN_IPFS__API": "helia",
        "KILN_IPFS__LISTEN": f"/ip4/127.0.0.1/tcp/{ports[1]}",
        "KILN_DISCOVERY__ENABLED": "false",
    }
    (tmp_path / "helia").mkdir()
    (tmp_path / "helia" / "app").symlink_to(helia_packages.installed())
    parent = subprocess.Popen([sys.executable, "-c", START], env=environment, stdout=subprocess.PIPE, text=True)
    left: dict[int, str] = {}
    try:

        def up() -> bool:
            status = read_status(tmp_path / "bridge" / "status.json")
            return status is not None and " at /ip4/" in status.ipfs

        wait_until(up, "the bridge and its Helia run", 120)
        left = children(parent.pid)
        assert sum("kiln.bridge.app.main" in each for each in left.values()) == 1
        assert sum("server.mjs" in each for each in left.values()) == 1
        for pid, command in left.items():
            if stuck == "helia" and "server.mjs" in command:
                os.kill(pid, signal.SIGSTOP)
        parent.kill()
        parent.wait()
        wait_until(lambda: not any(map(lives, left)), lambda: f"{[left[pid] for pid in left if lives(pid)]} end", 40)
        for port in ports:
            with socket.create_server(("127.0.0.1", port)):
                pass
    finally:
        parent.kill()
        parent.wait()
        for pid in left:
            if lives(pid):
                os.kill(pid, signal.SIGKILL)
