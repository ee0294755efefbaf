"""Takes what `make.sh` made as the new fixture: copies the state folder here, and writes `expected.json`.

PYTHONPATH=$PWD:tests:tests/kafka .venv/bin/python tests/kafka/kept/expect.py FOLDER

Run it with the code that made the folder. It waits until the windows of 5 minutes have ended by log time, then runs
that code on the kept folder, as the test does.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from test_upgrade import COMPARED, KEPT, LONG_WINDOW, REPLAYED, STATE, go_on, long_windows, summary, unpack

from conftest import free_ports
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.deploy.stack.jars import list_jars
from kit.log_model import read_log


def expect(made: Path) -> dict[str, object]:
    """Return what the present code makes of the kept folder, and of the same captures without a stop."""
    with tempfile.TemporaryDirectory() as folder:
        port, controller_port = free_ports(2)
        with EmbeddedBroker(unpack(Path(folder)), port, controller_port, list_jars("broker")) as broker:
            log = read_log(broker.address, "kiln.updates")
    gone_on_from = max(stamp for records in log for stamp, _ in records) + 1
    time.sleep(max(0.0, (gone_on_from + LONG_WINDOW) / 1e6 + 1 - time.time()))  # log time is the broker's clock
    with tempfile.TemporaryDirectory() as folder:
        upgraded = go_on(unpack(Path(folder)))
        lake = upgraded.kiln.lake
        return {
            "tables": {table: summary(lake, table) for table in COMPARED},
            "replayed": {table: summary(made / "undisturbed" / "lake", table, "REPLAY") for table in REPLAYED},
            "long_windows": long_windows(lake),
            "long_from": int((made / "long_from").read_text()),
            "gone_on_from": gone_on_from,
            "spooled_frames": upgraded.status["spool"]["acknowledged"],
        }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    shutil.copy(folder / "state.tar.xz", STATE)
    (KEPT / "expected.json").write_text(json.dumps(expect(folder), indent=1) + "\n")
