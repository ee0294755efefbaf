"""deploy/packaging/grafana: panels have a place each, and every expression gives data out of what Kiln shows."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from test_alert_rules import NAMES
from test_monitor import SNAPSHOT

from conftest import free_ports
from kiln.deploy.ops.run_monitor import Monitor
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.metrics import FAMILIES
from kit.awaiting import wait_until
from kit.prometheus import DASHBOARDS, Prometheus, dashboard_questions, needs_prometheus, question, rule_questions

ASKED = {name for text in dashboard_questions() for name in re.findall(r"\bkiln_\w+", text)}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_each_panel_has_a_place_a_sentence_and_queries_of_the_selected_instances(name: str) -> None:
    dashboard = DASHBOARDS[name]
    assert (dashboard["title"], dashboard["uid"]) == (f"Kiln: {name}", f"kiln-{name}")
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = set(product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            for target in panel["targets"]:
                selectors = re.findall(r"\bkiln_\w+(.{0,22})", target["expr"])
                assert all(each.startswith('{instance=~"$instance"') for each in selectors), target["expr"]
    assert max(x for x, _ in taken) == 23  # a dashboard has 24 columns


def test_dashboards_ask_for_each_family_that_kiln_shows_and_for_no_other() -> None:
    assert ASKED <= NAMES
    shown = {name for name, family in FAMILIES.items() if any(asked.startswith(name) for asked in ASKED)}
    assert shown == set(FAMILIES)


def test_a_rule_is_made_into_a_question_that_always_has_an_answer() -> None:
    assert question('up{job!="k"} == 0') == 'up{job!="k"} == bool 0'
    assert question("a >= 2 unless b > 0.25 * c") == "a >= bool 2 and b > bool 0.25 * c"


@needs_prometheus
@pytest.mark.slow
def test_every_expression_gives_data_in_a_real_prometheus(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "lake"))
    lake.create(["frames", "messages"])
    with Monitor(("127.0.0.1", 0), lake, "1.2.3") as monitor:
        monitor.see(replace(SNAPSHOT, batches=4, tips=20))
        with Prometheus(tmp_path, free_ports(1)[0], monitor.address, every="500ms") as prometheus:
            wait_until(lambda: len(prometheus.ask("kiln_table_commit_age_seconds")) == 2, "the lake is scraped")
            monitor.see(replace(SNAPSHOT, frames=2_000, copies=300, batches=9, tips=40))
            wait_until(lambda: bool(prometheus.ask("rate(kiln_frames_total[1m]) > 0")), "frames are seen to come")
            questions = dashboard_questions() + rule_questions()
            # a rate needs two scrapes that came through, which a busy machine may lack at first
            wait_until(lambda: prometheus.silent(questions) == [], lambda: f"data for {prometheus.silent(questions)}")
            assert prometheus.faults_of_rules() == []
