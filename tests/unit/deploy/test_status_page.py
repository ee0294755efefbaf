"""kiln.deploy.ops.run_monitor in a real browser: readable on a wide window and on a phone, with nothing cut off."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from test_monitor import SNAPSHOT

from kiln.deploy.ops.metric_families import MonitorInputs
from kiln.deploy.ops.run_monitor import RunHistory, render_page
from kiln.deploy.ops.snapshot import QualityInRun
from kiln.deploy.ops.status import read_lake_status
from kiln.pipelines.delta.lake import Lake

pytestmark = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="the `chromium` browser (Debian: chromium) is not there"
)

# A frame of a given width holds the page, and the script outside measures what is in the frame.
_FRAME = """<!doctype html><title>not measured</title><iframe width={width} height=900 srcdoc="{page}"></iframe>
<script>onload = () => {{
  const page = document.querySelector("iframe").contentDocument;
  const cut = [...page.querySelectorAll("h1, h2, .tile, svg, section")].filter(
    each => each.getBoundingClientRect().right > {width} || each.getBoundingClientRect().left < 0);
  cut.push(...[...page.querySelectorAll(".scroll")].filter(each => each.scrollWidth > each.clientWidth));
  const names = cut.map(each => each.querySelector("h2")?.textContent ?? each.tagName).join(", ");
  document.title = [page.documentElement.scrollWidth, `"${{names}}"`, page.querySelectorAll("polyline").length,
    getComputedStyle(page.querySelector(".row:not(.wide)")).gridTemplateColumns.split(" ").length].join(" ");
}};</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    lake = Lake(str(tmp_path_factory.mktemp("lake")))
    lake.create(["messages", "batches"])
    history = RunHistory()
    for number in range(50):
        entries = {"IHAVE": number * number}
        seen = replace(SNAPSHOT, batches=number, frames_rate=float(number % 7), control_entries=entries)
        history.see(replace(seen, messages={"UPDATE": 40 * number}, copies=(90 + number) * number), number * 5.0)
    now = time.time()
    seen = replace(SNAPSHOT, errors=["x" * 300], quality=QualityInRun(now - 70, {("messages", "passed"): 9}))
    return render_page(MonitorInputs(seen, now, now, "1.2.3", read_lake_status(lake)), history.plots())


def test_a_network_without_batches_has_none_on_its_page(tmp_path: Path) -> None:
    history, now = RunHistory(), time.time()
    other = replace(SNAPSHOT, is_ceramic=False, messages={"DATA": 7})
    history.see(other, 0.0)
    text = render_page(MonitorInputs(other, now, now, "1.2.3", ()), history.plots())
    assert "messages<b>7" in text
    assert not re.search("open windows|batches<b>|atch delay|Batches|published", text)
    assert re.search("open windows", render_page(MonitorInputs(SNAPSHOT, now, now, "1.2.3", ()), history.plots()))


@pytest.mark.parametrize(("width", "columns"), [(1200, range(5, 9)), (375, range(1, 4))])
def test_the_page_fits_and_its_plots_are_drawn(page: str, tmp_path: Path, width: int, columns: range) -> None:
    file = tmp_path / "frame.html"
    file.write_text(_FRAME.format(width=width, page=html.escape(page)), encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000", "--dump-dom"]
    done = subprocess.run(
        [*command, f"--user-data-dir={tmp_path / 'profile'}", file.as_uri()], capture_output=True, text=True, check=True
    )
    found = re.search(r'<title>(\d+) "(.*)" (\d+) (\d+)</title>', done.stdout)
    assert found is not None, done.stderr
    needed, cut_off, lines, beside = found.groups()
    assert int(needed) <= width
    assert cut_off == ""
    assert int(lines) == 7
    assert int(beside) in columns
