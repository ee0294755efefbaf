"""A few faults of the harness (`make chaos`), on one Kiln: nothing lost, nothing twice, and said in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.network, pytest.mark.crash, pytest.mark.timeout(1800)]

FEW = ("kill-bridge", "kill-broker", "kill-worker", "kill-jvm", "kill-all", "cut-sink")
"""`test_recover.py` kills `archive` between its commits; in `tests/kafka/test_spool_broker.py` the broker pauses."""
SEED = os.environ.get("KILN_TEST_SEED", "1")


def test_a_few_faults_lose_and_double_nothing(broker_classpath: list[Path], root: Path) -> None:
    options = f"--seed {SEED} --kinds {','.join(FEW)} --faults {len(FEW)} --every 100 --rate 15 --json".split()
    done = subprocess.run(
        [sys.executable, "-m", "chaos", *options],
        env={**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout)
    wrong = {fault["kind"]: fault["wrong"] for fault in found["faults"] if fault["wrong"]}
    assert (wrong, found["unplaced"], done.returncode) == ({}, [], 0), done.stderr[-3000:]
    assert {fault["kind"] for fault in found["faults"]} == set(FEW)
