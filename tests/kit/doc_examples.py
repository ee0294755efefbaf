"""The examples in the documents: blocks of shell and of Python, each with the output that the page shows after it.

`PYTHONPATH=tests .venv/bin/python -m kit.doc_examples` runs the examples on the sample lake, and updates their outputs.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import chdir, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from kiln.deploy.query.sample import copy_sample

ROOT = Path(__file__).resolve().parents[2]
PYTHON_PAGE, README, TUTORIAL = ROOT / "docs/python.md", ROOT / "README.md", ROOT / "docs/tutorial.md"
OF_SPARK = ("Spark",)
"""Headings of the page of Python whose examples need Spark: tests/spark runs them."""

_OF_A_RUN = ("kiln run", "kiln backfill run", "kiln backfill drop", "kiln quality")
"""Commands of the tutorial that need Java or write to tables. tests/network/test_default_run.py runs their examples."""
_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_LEFT_OUT = "…\n"
"""A line that stands for omitted lines of an output."""


class Example(NamedTuple):
    """A block of a page."""

    page: Path
    heading: str
    """the heading above it"""
    language: str
    code: str
    output: str | None
    """the output that the page shows; `None` if it shows none"""

    def run(self, folder: Path, environment: Mapping[str, str] | None = None) -> str:
        """Run the block in a folder, with `kiln` and the Python of the tests on the PATH, and return its output.

        A program runs in this process, because the imports take longer than the rest.
        """
        if self.language == "python":
            printed = io.StringIO()
            with chdir(folder), redirect_stdout(printed):
                exec(self.code, {"__name__": "__main__"})
            return printed.getvalue()
        bin_ = Path(sys.executable).parent
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KILN_")}
        path = f"{bin_}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.code],
            cwd=folder,
            env={**inherited, "PATH": path, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{self.code}\nended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def shows(self, printed: str) -> bool:
        """Return true if the page shows the printed output, apart from lines that the page leaves out."""
        parts = [re.escape(part) for part in (self.output or "").split(_LEFT_OUT)]
        return re.fullmatch(r"(?:.*\n)*?".join(parts), printed) is not None


def examples(page: Path) -> Iterator[Example]:
    """Yield the blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    for block in _BLOCK.finditer(text):
        heading = _HEADING.findall(text[: block.start()])[-1]
        yield Example(page, heading, block[1], block[2], block[3])


def sample_examples() -> Iterator[Example]:
    """Yield the examples on the sample lake that do not need Spark."""
    for each in examples(PYTHON_PAGE):
        if each.heading not in OF_SPARK:
            yield each
    for each in examples(README):
        if "sample" in each.code:
            yield each
    for each in examples(TUTORIAL):
        if not any(command in each.code for command in _OF_A_RUN):
            yield each


def prepare(folder: Path) -> None:
    """Create the virtual environment and the state folder that commands of the README and of the tutorial use."""
    (folder / "env").symlink_to(sys.prefix)
    copy_sample(folder / "state")


def write_outputs() -> None:
    """Write the outputs of the examples on the sample lake into their pages. Omitted lines stay omitted."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for each in list(sample_examples()):
            printed = each.run(folder)
            if each.output is None:
                continue
            head, left_out, tail = each.output.partition(_LEFT_OUT)
            if left_out:
                lines = printed.splitlines(keepends=True)
                last = lines[len(lines) - tail.count("\n") :]
                printed = "".join([*lines[: head.count("\n")], _LEFT_OUT, *last])
            text = each.page.read_text(encoding="utf-8")
            block = f"```{each.language}\n{each.code}```\n\n```text\n"
            each.page.write_text(text.replace(f"{block}{each.output}```", f"{block}{printed}```"), encoding="utf-8")


if __name__ == "__main__":
    write_outputs()
