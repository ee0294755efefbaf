"""What a driver of one query says of itself over HTTP."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kiln.conf.process.exporter import Exporter
from kiln.conf.process.state_folder import lock_state
from kiln.pipelines.app import submit
from kiln.pipelines.app.submit import SubmittedQuery
from kiln.pipelines.runtime.progress import QueryProgress
from kiln.pipelines.runtime.query_status import QueryWatch
from kiln.schemas.metrics import FAMILIES

READ = {"kiln.frames": {0: 60, 1: 30}}
ENDS = {"kiln.frames": {0: 70, 1: 35}, "kiln.updates": {0: 9}}


def test_a_driver_serves_how_its_query_stands() -> None:
    job, watch = SubmittedQuery("archive", "local-test"), QueryWatch("archive", ["kiln.frames"])
    with Exporter(("127.0.0.1", 0), job) as exporter:
        url = f"http://{exporter.address}"
        assert httpx.get(f"{url}/ready").json()["reasons"] == ["the query archive is starting"]
        assert httpx.get(f"{url}/health").status_code == 200
        progress = QueryProgress("archive", READ, batch_id=7, input_rate=3.0, records=90)
        for now in (100.0, 104.0):
            job.observe(watch.build_state(now, ENDS, progress, restarts=2, error="", tripped=False), [])
        assert httpx.get(f"{url}/ready").json() == {"ok": True, "reasons": []}
        found = {each.name: each for each in text_string_to_metric_families(httpx.get(f"{url}/metrics").text)}
        assert found.keys() <= FAMILIES.keys()
        values = {name: each.samples[0].value for name, each in found.items() if each.samples}
        assert values["kiln_query_lag_records"] == 15
        assert values["kiln_query_lag_seconds"] == 4
        assert values["kiln_query_restarts"] == 2
        assert values["kiln_query_up"] == 1
        job.observe(watch.build_state(105.0, ENDS, progress, restarts=3, error="no room", tripped=False), ["no room"])
        assert httpx.get(f"{url}/ready").json()["reasons"] == ["the query archive is restarting", "no room"]
        assert httpx.get(url).status_code == 404


def test_a_second_driver_of_a_state_folder_is_refused_before_spark_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `kiln job` and `kiln recover` are: with the embedded broker nothing else keeps two drivers apart."""
    monkeypatch.setenv("KILN_STATE", str(tmp_path))
    monkeypatch.setattr(submit, "_LOCK_PATIENCE", 0.0)
    monkeypatch.setattr(submit, "create_submitted_session", lambda *_: pytest.fail("Spark was started"))
    with lock_state(tmp_path, "archive"):
        assert submit.main("archive") == 1
    assert f"holds this lock of the state folder {tmp_path}." in capsys.readouterr().err
