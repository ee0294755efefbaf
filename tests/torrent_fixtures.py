"""Nodes of libtorrent's DHT; a test module takes them with `pytest_plugins = ["torrent_fixtures"]`."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from torrent_nodes import PATIENCE, Torrent


@pytest.fixture
def torrents() -> Iterator[list[Torrent]]:
    """Four plain nodes that know each other."""
    nodes = [Torrent() for _ in range(4)]
    for node in nodes:
        node.know(*[other for other in nodes if other is not node])
    deadline = time.monotonic() + PATIENCE
    while not all(node.nodes() >= 3 for node in nodes):
        assert time.monotonic() < deadline, [node.nodes() for node in nodes]
        time.sleep(0.01)
    yield nodes
    for node in nodes:
        node.session.pause()
