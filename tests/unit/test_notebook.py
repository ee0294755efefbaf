"""The notebook of the docs runs from top to bottom, draws a plot for each question, and is kept without its outputs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = "docs/notebooks/first-look.ipynb"


def cells(path: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(path.read_text("utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


def test_the_notebook_is_kept_without_outputs(root: Path) -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells(root / NOTEBOOK))


@pytest.mark.slow
def test_every_cell_of_the_notebook_runs_on_the_sample_and_draws(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    copy = tmp_path / "first-look.ipynb"
    shutil.copy(root / NOTEBOOK, copy)
    environment = {**os.environ, "PYTHONPATH": str(root), "MPLBACKEND": "agg"}
    run = "from nbclient.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", run, "--inplace", str(copy)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    drawing = [cell for cell in cells(copy) if "plt.show()" in str(cell["source"])]
    assert len(drawing) >= 6
    assert all("image/png" in str(cell["outputs"]) for cell in drawing)
