"""Prints `expected.json`: what the code before made of the kept folder, and of the same captures without any stop.

python tests/kafka/kept/expect.py GONE_ON UNDISTURBED     with PYTHONPATH=CHECKOUT:tests:tests/kafka
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from test_upgrade import COMPARED, REPLAYED, is_long, long_windows, rows, status, summary, unpack

from conftest import free_ports
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.deploy.stack.jars import list_broker_jars
from kit.log_model import read_log


def expected(gone_on: Path, undisturbed: Path) -> dict[str, object]:
    """`gone_on`: the kept folder after the code before ran on it. `undisturbed`: a folder that never stopped."""
    with tempfile.TemporaryDirectory() as folder:
        kept = unpack(Path(folder))
        port, controller_port = free_ports(2)
        with EmbeddedBroker(kept, port, controller_port, list_broker_jars(), die_with_parent=True) as broker:
            log = read_log(broker.address, "kiln.updates")
    lake = gone_on / "lake"
    long_from = min(row["opened_at"] for row in rows(lake, "batches") if is_long(row))
    return {
        "tables": {table: summary(lake, table) for table in COMPARED},
        "replayed": {table: summary(undisturbed / "lake", table, "REPLAY") for table in REPLAYED},
        "long_windows": long_windows(lake),
        "long_from": round(long_from.timestamp() * 1e6),
        "gone_on_from": max(stamp for records in log for stamp, _ in records) + 1,
        "spooled_frames": status(gone_on)["spool"]["acknowledged"],
    }


if __name__ == "__main__":
    print(json.dumps(expected(*map(Path, sys.argv[1:])), indent=1))
