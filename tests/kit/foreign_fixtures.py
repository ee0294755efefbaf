"""Fixtures of foreign gossipsub peers; a test module takes them with `pytest_plugins = ["kit.foreign_fixtures"]`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from kit import foreign_peer
from kit.foreign_peer import ForeignPeer, NewPeer


@pytest.fixture(scope="session")
def js_installed() -> Path:
    """Where the js peer is, with its packages."""
    return foreign_peer.install_js()


@pytest.fixture(scope="session")
def helia_installed() -> Path:
    """The folder of the Helia peer and its packages."""
    return foreign_peer.install_helia()


@pytest.fixture(scope="session")
def rust_built() -> Path:
    """The rust peer's binary; skips without cargo."""
    if shutil.which("cargo") is None:
        pytest.skip("no cargo to build the rust peer with")
    return foreign_peer.build_rust()


@pytest.fixture(scope="session")
def go_kad_built() -> Path:
    """The go DHT node's binary; skips without go."""
    if shutil.which("go") is None:
        pytest.skip("no go toolchain to build the go DHT node with")
    return foreign_peer.build_go_kad()


@pytest.fixture(scope="session")
def go_pubsub_built() -> Path:
    """The go pubsub peer's binary; skips without go."""
    if shutil.which("go") is None:
        pytest.skip("no go toolchain to build the go pubsub peer with")
    return foreign_peer.build_go_pubsub()


@pytest.fixture
def peers() -> Iterator[ExitStack]:
    """Peers started in a test are ended with it."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def go_peer(peers: ExitStack, tmp_path: Path) -> NewPeer:
    """`go_peer(port=…, folder=…)`: a running Kubo."""
    numbers = count(1)

    def start(folder: Path | None = None, *, port: int = 0) -> ForeignPeer:
        return peers.enter_context(foreign_peer.go_peer(folder or tmp_path / f"go{next(numbers)}", port=port))

    return start


@pytest.fixture
def js_peer(peers: ExitStack, tmp_path: Path, js_installed: Path) -> NewPeer:
    """`js_peer(signing=…, protocol=…, …)`: a running peer in JavaScript."""
    numbers = count(1)

    def start(*, port: int = 0, **options: str) -> ForeignPeer:
        folder = tmp_path / f"js{next(numbers)}"
        return peers.enter_context(foreign_peer.js_peer(js_installed, folder, port=port, **options))

    return start


@pytest.fixture
def helia_peer(peers: ExitStack, tmp_path: Path, helia_installed: Path) -> NewPeer:
    """`helia_peer(folder=…, port=…)`: a running Helia."""
    numbers = count(1)

    def start(folder: Path | None = None, *, port: int = 0) -> ForeignPeer:
        folder = folder or tmp_path / f"helia{next(numbers)}"
        return peers.enter_context(foreign_peer.helia_peer(helia_installed, folder, port=port))

    return start


@pytest.fixture
def rust_peer(peers: ExitStack, tmp_path: Path, rust_built: Path) -> NewPeer:
    """`rust_peer(signing=…, protocol=…, …)`: a running peer in Rust."""
    numbers = count(1)

    def start(*, port: int = 0, **options: str) -> ForeignPeer:
        folder = tmp_path / f"rust{next(numbers)}"
        return peers.enter_context(foreign_peer.rust_peer(rust_built, folder, port=port, **options))

    return start


@pytest.fixture
def go_pubsub_peer(peers: ExitStack, tmp_path: Path, go_pubsub_built: Path) -> NewPeer:
    """`go_pubsub_peer(network=…, trace=…, degree=…)`: a running peer of go-libp2p-pubsub."""
    numbers = count(1)

    def start(*, port: int = 0, **options: str) -> ForeignPeer:
        folder = tmp_path / f"go_pubsub{next(numbers)}"
        return peers.enter_context(foreign_peer.go_pubsub_peer(go_pubsub_built, folder, port=port, **options))

    return start


@pytest.fixture
def go_kad_peer(peers: ExitStack, tmp_path: Path, go_kad_built: Path) -> NewPeer:
    """`go_kad_peer(mode=…, prefix=…)`: a running node of go's DHT."""
    numbers = count(1)

    def start(*, port: int = 0, **options: str) -> ForeignPeer:
        folder = tmp_path / f"go_kad{next(numbers)}"
        return peers.enter_context(foreign_peer.go_kad_peer(go_kad_built, folder, port=port, **options))

    return start
