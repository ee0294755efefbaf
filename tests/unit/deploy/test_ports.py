"""kiln.deploy.stack.ports: who has a port that is taken."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from kiln.deploy.stack.ports import (
    HOST,
    PortHolder,
    check_port_free,
    find_free_ports,
    find_listening_sockets,
    find_port_holder,
)

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:71A4 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 1 0000 100 0 0 10 0
   1: 0100007F:71A4 0100007F:C350 01 00000000:00000000 00:00000000 00000000  1000        0 4712 1 0000 20 4 30 10 -1
   2: 0100007F:71A5 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4713 1 0000 100 0 0 10 0
"""
TABLE6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when
   0: 0000000000000000FFFF00000100007F:71A4 00000000000000000000000000000000:0000 0A 0:0 00:0 0 1000 0 4714 1 0 100
"""


def test_only_sockets_that_listen_on_the_port_count() -> None:
    assert find_listening_sockets(TABLE, 29092) == {"4711"}
    assert find_listening_sockets(TABLE6, 29092) == {"4714"}
    assert find_listening_sockets(TABLE, 80) == set()


def process(proc: Path, number: int, inode: int, command: list[str], folder: Path) -> None:
    place = proc / str(number)
    (place / "fd").mkdir(parents=True)
    (place / "fd" / "3").symlink_to(f"socket:[{inode}]")
    (place / "cwd").symlink_to(folder)
    (place / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in command))


def test_a_broker_is_named_by_its_state_folder(tmp_path: Path) -> None:
    proc, folder = tmp_path / "proc", tmp_path / "my state" / "broker"
    folder.mkdir(parents=True)
    (folder / "address.json").write_text("{}", encoding="ascii")
    (proc / "net").mkdir(parents=True)
    (proc / "net" / "tcp").write_text(TABLE, encoding="ascii")
    process(proc, 10, 4713, ["python3", "-m", "http.server"], tmp_path)
    process(proc, 11, 4711, ["/usr/bin/java", "-Xmx384m", "kafka.Kafka", "server.properties"], folder)
    assert find_port_holder(29093, proc) == PortHolder(10, "python3 -m http.server", None)
    found = find_port_holder(29092, proc)
    assert found is not None
    assert found.description == f"the embedded broker of the state folder {tmp_path / 'my state'} (process 11)"


def test_where_the_system_does_not_say_nobody_is_named(tmp_path: Path) -> None:
    assert find_port_holder(29092, tmp_path) is None
    assert find_port_holder(find_free_ports()[0]) is None


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
