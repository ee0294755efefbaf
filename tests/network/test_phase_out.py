"""The end of the phase-out (CIP-120, Force an upgrade): the node is on the topics of separators alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiln.schemas.wire.topics import Separator, encode_separator_value, format_separator, format_topic
from kit.bridge_alone import BridgeAlone

pytestmark = [pytest.mark.network, pytest.mark.timeout(300)]

NETWORK = "local-test"
SEPARATOR = Separator("model", encode_separator_value(b"\x01"))
LONG_AGO = "2020-01-01T00:00:00Z"


@pytest.mark.parametrize("phase_out", ["1s", "0s"])
def test_after_the_phase_out_the_node_is_not_on_the_topic_of_the_network(phase_out: str, tmp_path: Path) -> None:
    settings = {
        "KILN_TRANSITION__AT": LONG_AGO,
        "KILN_TRANSITION__PHASE_OUT": phase_out,
        "KILN_BRIDGE__INTERESTS": format_separator(SEPARATOR),
    }
    bridge = BridgeAlone(tmp_path, **settings)
    try:
        joined = bridge.until(lambda status: bool(status.topics), "it is on a topic").topics
    finally:
        bridge.kill()
    expected = {format_topic(NETWORK, SEPARATOR)} | ({format_topic(NETWORK, None)} if phase_out == "0s" else set())
    assert set(joined) == expected
