"""`kiln status`: which queries it names."""

from __future__ import annotations

from pathlib import Path

from conftest import free_ports
from kiln.conf.settings.model import Settings
from kiln.deploy.ops.status import read_status


def test_status_names_the_queries_that_the_network_has_and_those_that_ran(tmp_path: Path) -> None:
    port = {"embedded_port": free_ports(1)[0]}
    ceramic = Settings.model_validate({"state": tmp_path, "kafka": port})
    other = Settings.model_validate({"state": tmp_path, "kafka": port, "network": {"kind": "gossip"}})
    assert [query.name for query in read_status(ceramic).queries] == ["archive", "updates", "batch", "sink"]
    assert [query.name for query in read_status(other).queries] == ["archive", "sink"]
    (tmp_path / "checkpoints" / "updates").mkdir(parents=True)
    assert [query.name for query in read_status(other).queries] == ["archive", "sink", "updates"]
