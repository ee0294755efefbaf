"""chaos.wrong_clock: the time of day is wrong, and nothing else is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaos import wrong_clock

PROGRAM = """
import datetime, json, subprocess, sys, time
from confluent_kafka import Producer
began = time.monotonic(), time.time()
time.sleep(0.2)  # what is measured
slept = time.monotonic() - began[0], time.time() - began[1]
child = float(subprocess.check_output([sys.executable, "-c", "import time; print(time.time())"]))
told = []
producer = Producer({"bootstrap.servers": "127.0.0.1:1", "message.timeout.ms": 300, "log_level": 0})
producer.produce("a", b"", on_delivery=lambda error, _: told.append(error.name()))
producer.flush(60)
print(json.dumps({"slept": slept, "wrong": [time.time() - child, datetime.datetime.now().timestamp() - child],
                  "told": told}))
"""


@pytest.mark.skipif(bool(wrong_clock.absent()), reason=wrong_clock.absent())
@pytest.mark.parametrize("wrong", [-172_800, 0, 172_800])
def test_only_the_time_of_day_of_one_process_is_wrong(tmp_path: Path, wrong: int) -> None:
    (tmp_path / "wrong_by").write_text(f"{wrong:+d}\n")
    environment = wrong_clock.environment(wrong_clock.build(tmp_path), tmp_path / "wrong_by")
    said = subprocess.check_output([sys.executable, "-c", PROGRAM], env={**os.environ, **environment}, timeout=60)
    found = json.loads(said)
    assert all(0.2 <= seconds < 60 for seconds in found["slept"])
    assert all(0 <= seconds - wrong < 60 for seconds in found["wrong"])  # the child ran before
    assert found["told"] == ["_MSG_TIMED_OUT"]
