"""A bridge of its own among peers that mean harm: what honest peers say is captured, and memory and disk are bounded.

For longer, with more peers, and with figures: `make hostile`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hostile.scene import MIB, flood, names, wrong
from kit.bridge_alone import BridgeAlone

pytestmark = pytest.mark.network

PEER_BYTES, ALL_BYTES = 32 * MIB, 1024 * MIB
STRANGERS, TOPICS, MOST = 6, 600, 300


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., BridgeAlone]]:
    """A bridge with these settings."""
    started: list[BridgeAlone] = []

    def run(**bridge: object) -> BridgeAlone:
        settings = {f"KILN_BRIDGE__{name.upper()}": str(value) for name, value in bridge.items()}
        started.append(BridgeAlone(tmp_path / "state", **settings))
        return started[0]

    yield run
    for each in started:
        each.kill()


def test_what_honest_peers_say_is_captured_whatever_others_do(
    start: Callable[..., BridgeAlone], tmp_path: Path
) -> None:
    came = flood(
        start(max_peer_bytes_per_hour=PEER_BYTES, max_bytes_per_hour=ALL_BYTES),
        tmp_path,
        quiet=0.5,
        seconds=4,
        crowd=10,
        seed=1,
    )
    print(came)
    assert wrong(came, PEER_BYTES, ALL_BYTES) == []
    assert came.said == 2 * 90


def test_peers_that_are_on_thousands_of_topics_do_not_crowd_out_one_that_is_on_five(
    start: Callable[..., BridgeAlone], tmp_path: Path
) -> None:
    """The real loop that joins: 6 peers, each alone on 600 topics, and then one that is on 5."""
    bridge = start(max_topics=MOST, max_topics_per_peer=80, ban="0s")
    came = names(bridge, tmp_path, quiet=0.5, seconds=1, peers=STRANGERS, topics=TOPICS, at_once=TOPICS)
    print(came)
    assert came.few_kept
    assert came.machine.topics == len(came.status.topics) == MOST + 1
    assert came.status.topics_refused == STRANGERS * TOPICS + 5 - MOST
    assert any("bridge.max_topics" in error for error in came.status.errors)
