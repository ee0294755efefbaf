"""The sample lake: its rows, the queries of the documents on it, and that it names nothing of its maker."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

import kiln
from kiln.deploy.cli.app import run_command
from kiln.deploy.query.ask import query_lake
from kiln.deploy.query.sample import SAMPLE_LAKE
from kiln.deploy.query.sample_recording import MAX_BYTES, RUN, measure_folder, pack_lake
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.delta.views import views
from kit.questions import QUESTIONS, Question
from kit.traced_lake import make_lake

Capture = pytest.CaptureFixture[str]
SAMPLE = Lake(str(SAMPLE_LAKE))
FULL = {*TABLES} - {"bundles", "quarantine_dropped", "streams"}
"""Tables that a run of the demo network fills."""
EMPTY = (
    *("Batches with a false claim", "Updates that are in no batch"),
    *("The windows, recomputed from `updates`", "What one vantage point received and another did not"),
)
"""Queries that find nothing in a healthy minute: of faults, and of several bridges."""


def count(lake: Lake, table: str) -> object:
    return next(query_lake(lake, f"SELECT count(*) FROM {table}").rows())[0]


def test_the_sample_has_each_table_with_its_columns_in_one_small_file() -> None:
    assert set(SAMPLE.tables()) == set(TABLES)
    for name in TABLES:
        table = SAMPLE.open(name)
        missing = {column.name for column in TABLES[name].columns} - {field.name for field in table.schema().fields}
        assert not missing, f"the table {name} has other columns now: make sample"
        assert len(table.file_uris()) <= 1
    assert {name for name in TABLES if count(SAMPLE, name)} >= FULL
    assert measure_folder(SAMPLE_LAKE) <= MAX_BYTES


def test_the_sample_has_a_backfill_run_with_other_batches() -> None:
    run = SAMPLE.locate_run(RUN)
    assert count(run, "batches")
    assert query_lake(SAMPLE, "SELECT DISTINCT run FROM backfill_runs").rows().__next__() == (RUN,)
    assert count(SAMPLE, "quality_results WHERE NOT success") == 0


def test_the_sample_names_neither_the_machine_nor_a_peer_beyond_loopback() -> None:
    texts = [path.read_text(encoding="utf-8") for path in SAMPLE_LAKE.rglob("*.json")]
    for table in ("backfill_runs", "quality_results", "quarantine"):
        texts += [str(row) for row in query_lake(SAMPLE, f"SELECT * FROM {table}").rows()]
    said = "\n".join(texts)
    assert not re.search(r"/(tmp|root|home|work|Users)/", said)
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", said)
    addresses = {
        address
        for (address,) in query_lake(SAMPLE, "SELECT DISTINCT remote_address FROM frames").rows()
        if isinstance(address, bytes)
    }
    assert addresses
    # a multiaddr begins with its protocol, ip4; a node of the DHT is packed as in BEP 5
    assert not [each for each in addresses if each.removeprefix(b"\x04")[:4] != socket.inet_aton("127.0.0.1")]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda each: f"{each.page.name}: {each.title}")
def test_every_query_of_the_documents_runs_on_the_sample(question: Question) -> None:
    rows = list(query_lake(SAMPLE, question.sql).rows())
    assert rows or question.page.name != "SQL.md" or question.title in EMPTY


@pytest.mark.parametrize("view", views())
def test_every_view_can_be_read_in_the_sample(view: str) -> None:
    list(query_lake(SAMPLE, f"SELECT * FROM {view}").rows())


def test_commands_that_read_a_lake_take_the_sample(capsys: Capture, tmp_path: Path) -> None:
    def answer(*arguments: str) -> object:
        assert run_command([*arguments, "--sample", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    ((newest,),) = kiln.sample().sql("SELECT batch_cid FROM batches ORDER BY closed_at DESC LIMIT 1").rows()
    assert answer("sql", "SELECT batch_cid FROM batches ORDER BY closed_at DESC LIMIT 1") == [{"batch_cid": newest}]
    trace = answer("trace", str(newest))
    assert isinstance(trace, dict)
    assert trace["kind"] == "batch"
    savings = answer("estimate")
    assert isinstance(savings, dict)
    assert savings["totals"]
    assert run_command(["sql", "SELECT 1", "--sample", "--state", str(tmp_path)]) == 2
    assert "--sample and --state" in capsys.readouterr().err


def test_the_sample_is_copied_into_a_new_state_folder(capsys: Capture, tmp_path: Path) -> None:
    state = tmp_path / "new"
    assert run_command(["sample", str(state)]) == 0
    assert capsys.readouterr().out == f"{state}/lake\n"
    for arguments in (["backfill", "list"], ["quality", "--table", "batches"], ["sql", "SELECT 1 FROM batches"]):
        assert run_command([*arguments, "--state", str(state)]) == 0
    assert run_command(["backfill", "swap", RUN, "--state", str(state)]) == 0
    assert run_command(["backfill", "diff", RUN, "--state", str(state)]) == 0
    (state / "lake/more").touch()
    assert run_command(["sample", str(state)]) == 1
    assert "is not empty. Pass a new folder" in capsys.readouterr().err


def test_packing_keeps_every_row_and_drops_paths(tmp_path: Path) -> None:
    source, packed = make_lake(tmp_path / "source"), Lake(str(tmp_path / "packed"))
    Path(packed.path).mkdir()
    pack_lake(source, packed)
    for name in TABLES:
        assert count(packed, name) == count(source, name)
        assert len(packed.open(name).file_uris()) <= 1
    assert not [each for each in Path(packed.path).rglob("*.json") if str(tmp_path) in each.read_text("utf-8")]
