"""The Python API in forked processes, and with little memory."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

import kiln
from kiln.deploy.query import ask
from kiln.deploy.query.ask import SqlError

_HANG = 90
"""seconds after which a pool is killed; a refusal takes a second"""

_POOL = """
import multiprocessing
import kiln

def count(_):
    return kiln.sample().sql("SELECT count(*) FROM messages").rows()

def count_again(_):
    return RESULT.rows()

if __name__ == "__main__":
    RESULT = kiln.sample().sql("SELECT count(*) FROM messages")
    rows = RESULT.rows()
    with multiprocessing.get_context("METHOD").Pool(1) as pool:
        try:
            assert pool.map(count if "QUERY" == "new" else count_again, [0]) == [rows]
            print("same rows")
        except kiln.KilnError as error:
            print(type(error).__name__, error)
"""


def run_pool(folder: Path, method: str, query: str) -> str:
    script = folder / "pool.py"
    script.write_text(_POOL.replace("METHOD", method).replace("QUERY", query))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        return process.communicate(timeout=_HANG)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("query", ["new", "old"])
def test_a_process_that_was_forked_after_a_query_is_told_to_use_spawn(query: str, tmp_path: Path) -> None:
    out = run_pool(tmp_path, "fork", query)
    assert out.startswith("ForkedProcessError cannot read Delta tables in process ")
    assert 'multiprocessing.get_context("spawn")' in out


def test_a_spawned_process_queries(tmp_path: Path) -> None:
    assert run_pool(tmp_path, "spawn", "new") == "same rows\n"


def test_a_query_that_runs_out_of_memory_is_one_sentence_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = duckdb.connect
    monkeypatch.setattr(duckdb, "connect", lambda: connect(config={"memory_limit": "20MiB"}))
    result = kiln.sample().sql("SELECT length(string_agg(md5(range::VARCHAR), ',')) FROM range(3000000)")
    with pytest.raises(SqlError, match=r"ran out of memory: DuckDB may use 5\.0 MiB .* 8GB of temp.*memory$") as caught:
        result.rows()
    assert "\n" not in str(caught.value)


def test_duckdb_is_given_the_memory_that_the_process_leaves() -> None:
    with duckdb.connect() as connection:
        connection.execute("SET memory_limit = '4GiB'")
        ask.limit_memory(connection)
        ((left,),) = connection.execute("SELECT current_setting('memory_limit')").fetchall()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    assert left.endswith(" GiB")
    assert float(left.split()[0]) == pytest.approx(4 - used, abs=0.2)
