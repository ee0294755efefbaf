"""Nothing of Kiln, of its tests or of what they start goes to a network that nobody named: shown without one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import free_ports
from kiln.conf.process.bridge_status import BridgeStatus, read_status
from kiln.conf.settings.model import Settings
from kit import loopback
from kit.awaiting import PATIENCE, wait_until
from kit.torrent_nodes import LOOPBACK

pytestmark = pytest.mark.skipif(not loopback.available(), reason="no network namespace for this user")

# Where DHT and IPFS software goes if it is not told otherwise.
ROUTERS = (
    "router.bittorrent.com",
    "router.utorrent.com",
    "dht.transmissionbt.com",
    "dht.libtorrent.org",
    "bootstrap.libp2p.io",
)


def kiln_environment(state: Path, **settings: str) -> dict[str, str]:
    kafka, controller = free_ports(2)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("KILN_")},
        "KILN_STATE": str(state),
        "KILN_KAFKA__EMBEDDED_PORT": str(kafka),
        "KILN_KAFKA__EMBEDDED_CONTROLLER_PORT": str(controller),
        "KILN_BRIDGE__LISTEN": "/ip4/127.0.0.1/tcp/0",
        "KILN_BEP50__LISTEN": "127.0.0.1:0",
        **settings,
    }


@pytest.mark.parametrize(
    "attempt",
    [
        'socket.create_connection(("192.0.2.1", 80))',
        'socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 53))',
    ],
)
def test_an_attempt_would_be_noticed(attempt: str) -> None:
    status, packets, said = loopback.run([sys.executable, "-c", f"import socket\n{attempt}"])
    assert status == 1
    assert "unreachable" in said
    assert packets == 1


@pytest.mark.parametrize("module", loopback.TESTS.values(), ids=loopback.TESTS)
def test_tests_need_no_other_network(module: str, root: Path) -> None:
    """The run leaves these tests out elsewhere (tests/conftest.py)."""
    options = ["-q", "-rs", "--no-unexpected-skips", "-p", "no:cacheprovider", "-k", f"not {loopback.INSTALLED}"]
    status, packets, said = loopback.run([sys.executable, "-m", "pytest", *options, module])
    assert status == 0, said
    assert packets == 0, said
    assert root == Path.cwd()


def test_the_bridge_needs_no_other_network(tmp_path: Path) -> None:
    """With BEP 50, and with what is there by default; the broker is away."""
    environment = kiln_environment(tmp_path, KILN_BEP50__ENABLED="true", KILN_PUBLISH__ENABLED="true")
    ended, said = run_bridge(environment, tmp_path, lambda status: status.bep50 is not None)
    assert loopback.told(said) == 0, said
    assert ended == 0, said


def run_bridge(environment: dict[str, str], state: Path, true: Callable[[BridgeStatus], bool]) -> tuple[int, str]:
    """Run a bridge until something is true of its status, and two seconds more; its exit status, and what it said."""
    command = loopback.command(sys.executable, "-m", "kiln.bridge.app.main")
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:

        def holds() -> bool:
            status = read_status(state / "bridge" / "status.json")
            if status is not None and true(status):
                return True
            assert process.poll() is None, process.communicate()[1]
            return False

        wait_until(holds, "the bridge says how it is")
        time.sleep(2.0)  # for what it might do only then
        status = read_status(state / "bridge" / "status.json")
        assert status is not None
        os.kill(status.pid, signal.SIGTERM)
        said = process.communicate(timeout=PATIENCE)[1]
        return process.returncode, said


def test_nobody_is_known_by_default() -> None:
    settings = Settings()
    assert not settings.bep50.enabled
    assert settings.bep50.bootstrap == settings.bep50.contacts == settings.bridge.bootstrap == ()
    assert LOOPBACK["dht_bootstrap_nodes"] == ""


def test_no_public_router_is_named_in_the_code(root: Path) -> None:
    for folder in ("bridge", "conf", "deploy", "pipelines", "schemas", "bench"):
        for path in (root / folder).rglob("*"):
            if path.suffix in (".py", ".toml", ".mjs", ".json", ".go") and "node_modules" not in path.parts:
                text = path.read_text(encoding="utf-8")
                assert not [name for name in ROUTERS if name in text], path
    for path in (root / "tests").rglob("*.py"):
        if path.name != "torrent_nodes.py":  # which makes them all, each with no router
            assert "lt." + "session(" not in path.read_text(encoding="utf-8"), path
