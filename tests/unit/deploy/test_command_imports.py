"""What each command imports: no more than it uses, since imports are most of the time that a short command takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from conftest import free_ports
from kit.kiln_table import append_rows

HEAVY = {
    *("cryptography", "deltalake", "duckdb", "google", "httpx", "kafka", "libp2p", "multiformats", "numpy", "pandas"),
    *("py4j", "pyarrow", "pydantic", "pyspark", "rich", "trio"),
}
SETTINGS = {"pydantic"}  # also imported by typer, for any command with parameters
TABLE = {"rich"}

_RUN = """
import json, sys
from kiln.deploy.cli.app import run_command
code = run_command(json.loads(sys.argv[1]))
print(json.dumps([code, sorted({name.split(".")[0] for name in sys.modules})]), file=sys.stderr)
"""


def imported(tmp_path: Path, *arguments: str) -> set[str]:
    """The heavy packages that a command has imported by its end."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KILN_")}
    environment["KILN_STATE"] = str(tmp_path)
    environment["KILN_KAFKA__EMBEDDED_PORT"] = str(free_ports(1)[0])  # where no broker answers
    done = subprocess.run(
        [sys.executable, "-c", _RUN, json.dumps(arguments)], capture_output=True, text=True, env=environment, check=True
    )
    code, modules = json.loads(done.stderr.splitlines()[-1])
    assert code == 0, done.stderr
    return HEAVY & set(modules)


@pytest.mark.parametrize(
    ("arguments", "needs"),
    [
        (("--help",), set()),
        (("sql", "--help"), SETTINGS),
        (("broker", "stop", "--help"), SETTINGS),
        (("maintain", "--help"), SETTINGS),
        (("backfill", "run", "--help"), SETTINGS),
        (("config", "show"), SETTINGS),
        (("config", "check"), SETTINGS | {"duckdb"}),  # whose parser reads checks of whole tables
        (("interests",), SETTINGS),
        (("broker", "stop"), SETTINGS),
        (("status",), SETTINGS | TABLE | {"deltalake"}),
        (("sql", "SELECT 1"), SETTINGS | TABLE | {"duckdb"}),
        (("sql", "SELECT * FROM tips"), SETTINGS | TABLE | {"deltalake", "duckdb"}),
        (("sql", "--json", "SELECT * FROM tips"), SETTINGS | {"deltalake", "duckdb"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_command_imports_only_what_it_uses(arguments: tuple[str, ...], needs: set[str], tmp_path: Path) -> None:
    append_rows(tmp_path / "lake" / "tips", pa.table({"stream": ["s1"]}))
    assert imported(tmp_path, *arguments) <= needs
