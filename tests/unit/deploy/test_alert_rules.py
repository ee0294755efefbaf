"""deploy/packaging/prometheus: rules ask for metrics that there are, and the runbook has a line for each; promtool
tests them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from kiln.schemas.metrics import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy/packaging/prometheus"
RULES = YAML(typ="safe").load(FOLDER / "kiln.rules.yml")["groups"][0]["rules"]
SUFFIX = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
NAMES = {f"{family.name}{suffix}" for family in FAMILIES.values() for suffix in SUFFIX[family.type]}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_a_rule_asks_for_metrics_that_kiln_shows_and_the_runbook_has_a_line(rule: dict[str, str]) -> None:
    asked = set(re.findall(r"\bkiln_\w+", rule["expr"]))
    assert asked <= NAMES
    assert asked or rule["expr"] == 'up{job="kiln"} == 0'
    runbook = (ROOT / "docs/RUNBOOK.md").read_text(encoding="utf-8")
    assert f"\n| `{rule['alert']}` | " in runbook


def test_the_runbook_url_of_each_rule_is_a_link_in_its_line_of_the_runbook() -> None:
    """The links of the runbook have targets, as `tests/unit/test_docs.py` checks."""
    runbook = (ROOT / "docs/RUNBOOK.md").read_text(encoding="utf-8")
    lines = dict(re.findall(r"^\| `(Kiln\w+)` \| (.*)$", runbook, re.MULTILINE))
    for rule in RULES:
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page == "docs/RUNBOOK.md"
        assert f"](#{anchor})" in lines[rule["alert"]], rule["alert"]


def test_each_rule_has_a_test_in_which_it_fires_and_one_in_which_it_is_silent() -> None:
    tests = YAML(typ="safe").load(FOLDER / "kiln.test.yml")["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in cases if case.get("exp_alerts")}
    silent = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    assert fires == silent == {rule["alert"] for rule in RULES}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not there")
def test_promtool_runs_the_tests_of_the_rules() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", str(FOLDER / "kiln.test.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
