"""A real Prometheus (Debian: prometheus) on loopback that scrapes a `/metrics` and evaluates Kiln's rules."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Self

import httpx
import pytest
from ruamel.yaml import YAML

from kit.awaiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy/packaging/prometheus/kiln.rules.yml"
DASHBOARDS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "deploy/packaging/grafana/json").iterdir())
}

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="the `prometheus` program (Debian: prometheus) is not there"
)


def dashboard_questions() -> list[str]:
    """Return the expressions of all dashboards, with values in place of Grafana's variables."""
    each = dict.fromkeys(
        target["expr"]
        for dashboard in DASHBOARDS.values()
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    )
    return [text.replace("$instance", ".*").replace("$__rate_interval", "1m") for text in each]


def rule_questions() -> list[str]:
    """Return the expressions of all rules, changed by `question` so that they return series even if no alert fires."""
    rules = YAML(typ="safe").load(RULES)["groups"][0]["rules"]
    return [question(rule["expr"]) for rule in rules]


def question(expression: str) -> str:
    """Change an alert's expression so that it always returns series: comparisons return 0 or 1, and `unless` becomes
    `and`."""
    parts = re.split(r"(\{[^}]*\})", expression)  # between braces, = and != are of labels
    asked = [part if part.startswith("{") else re.sub(r"([=!]=|[<>]=?)", r"\1 bool", part) for part in parts]
    return re.sub(r"\bunless\b", "and", "".join(asked))


class Sample(NamedTuple):
    """The newest value of a series."""

    labels: dict[str, str]
    value: float


class Prometheus:
    """A Prometheus that runs for the duration of the context.

    Args:
        target: HOST:PORT that serves `/metrics`.
        every: Scrape interval in Prometheus' format, such as `1s`.
    """

    def __init__(self, folder: Path, port: int, target: str, every: str = "1s") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._listen = f"127.0.0.1:{port}"
        self._http = httpx.Client(
            base_url=f"http://{self._listen}", timeout=60
        )  # a new one for each request costs more
        config = {
            "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "kiln", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML

    def __enter__(self) -> Self:
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={self._listen}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(self._answers, "Prometheus answers")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._http.close()

    def _answers(self) -> bool:
        assert self._process.poll() is None, (self._folder / "prometheus.log").read_text()
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, expression: str, at: float | None = None) -> list[Sample]:
        """Evaluate an expression now, or at a time in Unix seconds, and return its series.

        Raises:
            AssertionError: Prometheus rejects the expression.
        """
        asked = {"query": expression} | ({} if at is None else {"time": str(at)})
        answer = self._http.get("/api/v1/query", params=asked).json()
        assert answer["status"] == "success", (expression, answer["error"])
        return [Sample(each["metric"], float(each["value"][1])) for each in answer["data"]["result"]]

    def silent(self, questions: Iterable[str]) -> list[str]:
        """Return the expressions without data at the last successful scrape; all of them before the first scrape."""
        newest = self.ask("max_over_time(timestamp(kiln_uptime_seconds)[1h:1s])")
        return [text for text in questions if not newest or not self.ask(text, newest[0].value)]

    def fired(self) -> set[str]:
        """Return the names of the alerts that have fired so far."""
        return {each.labels["alertname"] for each in self.ask('last_over_time(ALERTS{alertstate="firing"}[1d])')}

    def faults_of_rules(self) -> list[str]:
        """Return the errors of rules that Prometheus could not evaluate."""
        groups = self._http.get("/api/v1/rules").json()["data"]["groups"]
        return [
            f"{rule['name']}: {rule['lastError']}"
            for group in groups
            for rule in group["rules"]
            if rule.get("lastError")
        ]
