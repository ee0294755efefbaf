"""Fixtures of foreign gossipsub peers. A test module enables them with `pytest_plugins = ["kit.foreign_fixtures"]`."""

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
    """The folder of the js peer and its packages."""
    return foreign_peer.install_js()


@pytest.fixture(scope="session")
def helia_installed() -> Path:
    """The folder of the Helia peer and its packages."""
    return foreign_peer.install_helia()


@pytest.fixture(scope="session")
def rust_built() -> Path:
    """The rust peer's binary. Skips the test if cargo is missing."""
    if shutil.which("cargo") is None:
        pytest.skip("no cargo to build the rust peer with")
    return foreign_peer.build_rust()


@pytest.fixture(scope="session")
def go_kad_built() -> Path:
    """The go DHT node's binary. Skips the test if go is missing."""
    if shutil.which("go") is None:
        pytest.skip("no go toolchain to build the go DHT node with")
    return foreign_peer.build_go_kad()


@pytest.fixture(scope="session")
def go_pubsub_built() -> Path:
    """The go pubsub peer's binary. Skips the test if go is missing."""
    if shutil.which("go") is None:
        pytest.skip("no go toolchain to build the go pubsub peer with")
    return foreign_peer.build_go_pubsub()


@pytest.fixture
def peers() -> Iterator[ExitStack]:
    """A stack that stops the peers of a test when the test ends."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def go_peer(peers: ExitStack, tmp_path: Path) -> NewPeer:
    """Function that starts a Kubo: `go_peer(port=…, folder=…)`."""
    numbers = count(1)

    def start(folder: Path | None = None, *, port: int = 0) -> ForeignPeer:
        return peers.enter_context(foreign_peer.go_peer(folder or tmp_path / f"go{next(numbers)}", port=port))

    return start


@pytest.fixture
def js_peer(peers: ExitStack, tmp_path: Path, js_installed: Path) -> NewPeer:
    """Function that starts a peer in JavaScript: `js_peer(signing=…, protocol=…, …)`."""
    numbers = count(1)

    def start(*, port: int = 0, **options: str) -> ForeignPeer:
        folder = tmp_path / f"js{next(numbers)}"
        return peers.enter_context(foreign_peer.js_peer(js_installed, folder, port=port, **options))

    return start


@pytest.fixture
def helia_peer(peers: ExitStack, tmp_path: Path, helia_installed: Path) -> NewPeer:
    """Function that starts a Helia: `helia_peer(folder=…, port=…)`."""
    numbers = count(1)

    def start(folder: Path | None = None, *, port: int = 0) -> ForeignPeer:
        folder = folder or tmp_path / f"helia{next(numbers)}"
        return peers.enter_context(foreign_peer.helia_peer(helia_installed, folder, port=port))

    return start


@pytest.fixture
def rust_peer(peers: ExitStack, tmp_path: Path, rust_built: Path) -> NewPeer:
    """Function that starts a peer in Rust: `rust_peer(signing=…, protocol=…, …)`."""
    numbers = count(1)

    def start(*, port: int = 0, **options: str) -> ForeignPeer:
        folder = tmp_path / f"rust{next(numbers)}"
        return peers.enter_context(foreign_peer.rust_peer(rust_built, folder, port=port, **options))

    return start


@pytest.fixture
def go_pubsub_peer(peers: ExitStack, tmp_path: Path, go_pubsub_built: Path) -> NewPeer:
    """Function that starts a peer of go-libp2p-pubsub: `go_pubsub_peer(network=…, trace=…, degree=…)`."""
    numbers = count(1)

    def start(*, port: int = 0, **options: str) -> ForeignPeer:
        folder = tmp_path / f"go_pubsub{next(numbers)}"
        return peers.enter_context(foreign_peer.go_pubsub_peer(go_pubsub_built, folder, port=port, **options))

    return start


@pytest.fixture
def go_kad_peer(peers: ExitStack, tmp_path: Path, go_kad_built: Path) -> NewPeer:
    """Function that starts a node of go's DHT: `go_kad_peer(mode=…, prefix=…)`."""
    numbers = count(1)

    def start(*, port: int = 0, **options: str) -> ForeignPeer:
        folder = tmp_path / f"go_kad{next(numbers)}"
        return peers.enter_context(foreign_peer.go_kad_peer(go_kad_built, folder, port=port, **options))

    return start
