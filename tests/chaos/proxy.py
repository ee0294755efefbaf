"""A proxy between Kafka's clients and the embedded broker, which can be slow, thin, cut, silent or torn: toxiproxy.

The broker names the proxy's port as its own address (`chaos.kiln_under_test`), so that every client, the bridge's, the
queries' and the check's, comes through it. go builds toxiproxy from what `toxiproxy/go.mod` pins.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kit.awaiting import awaited
from kit.foreign_peer import BUILT, built_with_go

_PACKAGE = "github.com/Shopify/toxiproxy/v2/cmd/server"
_NAME = "broker"


class ProxyError(RuntimeError):
    """The proxy does not do what it is told."""


def absent() -> str:
    """Why this machine cannot build the proxy; "": it can."""
    return "" if shutil.which("go") else "no go toolchain to build toxiproxy with"


def build(built: Path = BUILT) -> Path:
    """The program, in `.peers`: built when its pins changed since (half a minute, the first time)."""
    return built_with_go(Path(__file__).with_name("toxiproxy"), "toxiproxy", _PACKAGE, built)


class Proxy:
    """`start()`, faults, `stop()`. Listens on `port`, and is told what to do on `api`, both of 127.0.0.1."""

    def __init__(self, program: Path, api: int, port: int, upstream: int) -> None:
        self._program = program
        self._api = api
        self._port = port
        self._upstream = upstream
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """ProxyError."""
        self._process = subprocess.Popen(
            [self._program, "-host", "127.0.0.1", "-port", str(self._api)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if not awaited(self._answers, 60):
            raise ProxyError("toxiproxy does not start")
        listen, upstream = f"127.0.0.1:{self._port}", f"127.0.0.1:{self._upstream}"
        self._tell("POST", "/proxies", {"name": _NAME, "listen": listen, "upstream": upstream, "enabled": True})

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Every connection is cut, and none can be made."""
        self._tell("POST", f"/proxies/{_NAME}", {"enabled": False})
        try:
            yield
        finally:
            self._tell("POST", f"/proxies/{_NAME}", {"enabled": True})

    @contextmanager
    def toxic(self, kind: str, **attributes: int) -> Iterator[None]:
        """With a toxic of toxiproxy's on both directions of each connection."""
        names = [f"{kind}-{stream}" for stream in ("upstream", "downstream")]
        for name in names:
            told = {"name": name, "type": kind, "stream": name.rpartition("-")[2], "attributes": attributes}
            self._tell("POST", f"/proxies/{_NAME}/toxics", told)
        try:
            yield
        finally:
            for name in names:
                self._tell("DELETE", f"/proxies/{_NAME}/toxics/{name}")

    def _answers(self) -> bool:
        try:
            self._tell("GET", "/version")
        except ProxyError:
            return False
        return True

    def _tell(self, method: str, path: str, body: Mapping[str, object] | None = None) -> None:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self._api}{path}", data, method=method)
        try:
            urllib.request.urlopen(request, timeout=60).close()
        except urllib.error.HTTPError as error:
            raise ProxyError(f"{method} {path}: {error.read().decode(errors='replace')}") from None
        except OSError as error:
            raise ProxyError(f"{method} {path}: {error}") from None
