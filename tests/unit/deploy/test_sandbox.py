"""Programs within limits, and what the kernel answers them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kiln.deploy.query.serve.sandbox import SYSTEM, Limits, build_confined_command, read_landlock_version

pytestmark = pytest.mark.skipif(not read_landlock_version(), reason="this kernel has no Landlock")

TRY = """
import json, os, pathlib, signal, socket, sys

def outcome(act):
    try:
        act()
    except OSError as error:
        return type(error).__name__
    return "done"

folder, parent, open_port, other_port = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
read, write, secret = folder / "read", folder / "write", folder / "secret"
print(json.dumps({
    "read": outcome((read / "file").read_bytes),
    "list": outcome(lambda: list(read.iterdir())),
    "write where only reading is": outcome(lambda: (read / "file").write_text("x")),
    "create where only reading is": outcome(lambda: (read / "new").touch()),
    "write": outcome(lambda: (write / "new").write_text("x")),
    "remove": outcome((write / "new").unlink),
    "read the secret": outcome(secret.read_bytes),
    "read it by a link": outcome((write / "link").read_bytes),
    "list beside": outcome(lambda: list(folder.iterdir())),
    "link the secret in": outcome(lambda: os.link(secret, write / "hard")),
    "read the parent's environment": outcome(lambda: pathlib.Path(f"/proc/{parent}/environ").read_bytes()),
    "run a program": outcome(lambda: os.execv("/bin/sh", ["sh"])),
    "signal the parent": outcome(lambda: os.kill(parent, 0)),
    "connect": outcome(lambda: socket.create_connection(("127.0.0.1", open_port))),
    "connect elsewhere": outcome(lambda: socket.create_connection(("127.0.0.1", other_port))),
}))
"""


def test_a_program_opens_what_its_limits_name_and_nothing_else(tmp_path: Path) -> None:
    for name in ("read", "write"):
        (tmp_path / name).mkdir()
    (tmp_path / "read" / "file").write_text("x")
    (tmp_path / "secret").write_text("hunter2")
    (tmp_path / "write" / "link").symlink_to(tmp_path / "secret")
    python = [sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve())]
    with socket.create_server(("127.0.0.1", 0)) as named, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [each.getsockname()[1] for each in (named, other)]
        limits = Limits([*SYSTEM, *python, str(tmp_path / "read")], [str(tmp_path / "write")], ports[:1])
        arguments = [str(tmp_path), str(os.getpid()), *map(str, ports)]
        command = build_confined_command([sys.executable, "-I", "-c", TRY, *arguments], limits)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    allowed = {"read", "list", "write", "remove", "connect"}
    version = read_landlock_version()
    later = {"connect elsewhere": 4, "signal the parent": 6}  # what older kernels cannot refuse
    outcomes = json.loads(done.stdout)
    assert allowed < outcomes.keys()
    for act, outcome in outcomes.items():
        if version >= later.get(act, 1):
            assert (outcome == "done") == (act in allowed), (act, outcome)


def test_the_system_is_read_without_places_of_secrets() -> None:
    assert not {"/", "/etc", "/proc", "/root", "/home", "/tmp", "/var", "/run", "/usr"} & set(SYSTEM)
    assert not [path for path in SYSTEM if "shadow" in path or "ssl/private" in path]
