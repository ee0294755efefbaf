"""Nodes of libtorrent's DHT. A test module enables the fixture with `pytest_plugins = ["kit.torrent_fixtures"]`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kit.awaiting import wait_until
from kit.torrent_nodes import PATIENCE, Torrent


@pytest.fixture
def torrents() -> Iterator[list[Torrent]]:
    """Four plain nodes that know each other."""
    nodes = [Torrent() for _ in range(4)]
    for node in nodes:
        node.know(*[other for other in nodes if other is not node])
    wait_until(
        lambda: all(node.nodes() >= 3 for node in nodes),
        lambda: f"three others each, not {[node.nodes() for node in nodes]}",
        PATIENCE,
    )
    yield nodes
    for node in nodes:
        node.session.pause()
