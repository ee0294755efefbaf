"""kiln.deploy.stack.ports: who has a port that is taken."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kiln.deploy.stack.ports import HOST, check_port_free, find_free_ports, find_port_holder


def test_where_nobody_listens_nobody_is_named() -> None:
    assert find_port_holder(find_free_ports()[0]) is None


_LISTENS = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("is_broker", [True, False])
def test_a_broker_is_named_by_its_state_folder(tmp_path: Path, is_broker: bool) -> None:
    folder = tmp_path / "my state" / "broker"
    folder.mkdir(parents=True)
    (folder / "address.json").write_text("{}", encoding="ascii")
    command = [sys.executable, "-c", _LISTENS, *(["kafka.Kafka"] if is_broker else [])]
    with subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = find_port_holder(int(process.stdout.readline()))
        assert process.stdin is not None
        process.stdin.close()
    assert found is not None
    if is_broker:
        assert found.description == f"the embedded broker of the state folder {folder.parent} (process {process.pid})"
    else:
        assert found.description.startswith(f"process {process.pid} ({Path(sys.executable).name} -c ")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_listener_of_this_process_is_found() -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert check_port_free(port) is not None
        found = find_port_holder(port)
    assert found is not None
    assert found.pid == os.getpid()
    assert found.state is None
    assert check_port_free(port) is None
