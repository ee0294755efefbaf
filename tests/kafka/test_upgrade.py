"""State that an earlier commit wrote goes on: tables, checkpoints, the broker's log, files of the bridge. State of
another version is refused.

`kept/README.md` describes the state folder and how it was made. `kept/expected.json` has what the same code made of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # columns of any type
from unittest import mock

import pytest
from deltalake import DeltaTable

from conftest import free_ports
from kiln.conf.process.state_folder import STATE_VERSION
from kiln.deploy.cli.app import run_command
from kiln.deploy.stack.kafka_broker import start_broker
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.tables import TABLES, TABLES_VERSION
from kit.awaiting import wait_until
from kit.kiln_process import Kiln, end
from kit.log_model import Emitted, Update, expected_batches, read_batches, read_log

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.timeout(900)]

KEPT = Path(__file__).with_name("kept")
STATE = KEPT / f"state_of_version_{STATE_VERSION}.tar.xz"
QUERIES = {"archive", "updates", "batch", "sink"}
WINDOW, LONG_WINDOW = 1_000_000, 300_000_000  # µs: by default, and of the windows that were open

ENVIRONMENT = {
    # what is in there grows old: the records, and what the queries remember
    "KILN_KAFKA__RETENTION": "36500d",
    "KILN_DEDUPE__SIGNED_TTL": "3650d",
    "KILN_BRIDGE__LISTEN": '["/ip4/127.0.0.1/tcp/0"]',
    # each batch that has no receipt is tried, and no peer is there
    "KILN_PUBLISH__ENABLED": "true",
    "KILN_PUBLISH__TIMEOUT": "1s",
    "KILN_IPFS__FETCH": "false",  # no peer has the geneses of synthetic streams
    "KILN_BEP50__ENABLED": "true",
    "KILN_BEP50__PUBLISH": "true",
    "KILN_BEP50__LISTEN": '["127.0.0.1:0"]',
}

COMPARED = {
    "frames": "network connection direction local_peer remote_peer protocol observed_at sequence payload hello_in "
    "hello_out verdicts origin remote_address declared_length",
    "copies": "network message_id remote_peer observed_at verdict message_index",
    "messages": "message_id network origin topic type from_peer seqno stream tip model sep batch_cid "
    "query_id ts ver ipfs_ver data",
    "updates": "network origin separator_key separator_value separator_source stream tip",
    "tips": "network stream tip source batch_cid",
    "publications": "batch_cid transport topic target",
    "quarantine": "message_index stage reason data observed_at",
    "streams": "network stream separator_key separator_value source",
    "bundles": "hash topics",
}
"""Columns that do not depend on when records were processed, nor on which good copy of a message was kept, nor on which
of two messages that announce an update came first."""

REPLAYED = ("frames", "messages", "updates")
"""Tables that say which rows are of a capture."""

Row = dict[str, Any]  # columns of any type


def rows(lake: Path, table: str, columns: Iterable[str] | None = None) -> list[Row]:
    wanted = None if columns is None else list(columns)
    found: list[Row] = DeltaTable(str(lake / table)).to_pyarrow_table(columns=wanted).to_pylist()
    return found


def texts(found: Iterable[Row]) -> Counter[str]:
    """Rows that can be counted. Nulls are left out, as in a column that was added later."""
    values = ({name: value for name, value in row.items() if value is not None} for row in found)
    return Counter(json.dumps(row, sort_keys=True, default=_text) for row in values)


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def summary(lake: Path, table: str, origin: str = "") -> dict[str, object]:
    """How many rows a table has (of an origin), and a digest of them whatever their order."""
    wanted = (row for row in rows(lake, table, COMPARED[table].split()) if not origin or row["origin"] == origin)
    found = sorted(texts(wanted).elements())
    return {"rows": len(found), "sha256": hashlib.sha256("\n".join(found).encode()).hexdigest()}


def long_windows(lake: Path) -> list[str]:
    """The CIDs of the batches whose windows were open."""
    columns = ("batch_cid", "opened_at", "closed_at")
    return sorted(row["batch_cid"] for row in rows(lake, "batches", columns) if is_long(row))


def is_long(batch: Row) -> bool:
    return bool((batch["closed_at"] - batch["opened_at"]).total_seconds() * 1e6 == LONG_WINDOW)


# ---------------------------------------------------------------- the folder


def unpack(folder: Path) -> Path:
    """The state folder, in a place of its own.

    Spark keeps the whole path of the schema of the state of `batch` in its checkpoint and looks for it there, so that
    a state folder cannot be moved. Here it is: the path is written anew.
    """
    with tarfile.open(STATE) as packed:
        packed.extractall(folder, filter="data")
    for path in (folder / "state" / "checkpoints" / "batch").glob("state/*/_metadata/v2/[0-9]*"):
        text = path.read_text()
        assert "file:/kept/" in text
        path.write_text(text.replace("file:/kept/", f"file:{folder}/"))
    return folder / "state"


@dataclass
class Checkpoint:
    """What a checkpoint says of itself."""

    query_id: str
    newest: int
    """newest micro-batch that is committed"""


def checkpoints(state: Path) -> dict[str, Checkpoint]:
    return {
        folder.name: Checkpoint(
            json.loads((folder / "metadata").read_text())["id"],
            max(int(path.name) for path in (folder / "commits").glob("[0-9]*")),
        )
        for folder in (state / "checkpoints").iterdir()
        if folder.is_dir()  # beside them is what a catch-up noted
    }


def status(state: Path) -> Row:
    found: Row = json.loads((state / "bridge" / "status.json").read_bytes())
    return found


@dataclass
class Before:
    """The folder as it was unpacked."""

    checkpoints: dict[str, Checkpoint]
    tables: dict[str, Counter[str]]
    batches: list[Row]
    status: Row
    seqno: int
    bep50: tuple[str, str]
    """public key of the publisher, and node id: hex"""
    spooled: int
    """bytes of frames that wait on disk"""


def spooled(state: Path) -> int:
    return sum(path.stat().st_size for path in (state / "bridge" / "spool").iterdir())


@dataclass
class Upgraded:
    """The folder after the code of today ran on it."""

    kiln: Kiln
    before: Before
    status: Row
    interests: list[str]
    log: list[list[tuple[int, Update | None]]]
    emitted: list[Emitted]


def run_bridge(kiln: Kiln) -> Row:
    """The bridge alone, until Kafka has what was on disk and each batch has its receipts. Its last status."""
    process = kiln.start("bridge")

    def settled() -> bool:
        assert process.poll() is None, (kiln.state / "started.out").read_text()
        now = status(kiln.state)
        if now["at"] <= began or now["spool"]["disk_bytes"]:
            return False
        publishers = (now["publisher"], now["bep50"]["publisher"])
        return all(each["failed"] and each["state"] == "waiting for batches" for each in publishers)

    began = time.time()
    try:
        wait_until(settled, lambda: f"the bridge settled; it says {status(kiln.state)}")
    finally:
        end(process)
    return status(kiln.state)


@pytest.fixture(scope="module")
def expected() -> Row:
    found: Row = json.loads((KEPT / "expected.json").read_text())
    return found


def go_on(state: Path) -> Upgraded:
    """Run the bridge on the folder for a moment, then the queries."""
    lake = state / "lake"
    before = Before(
        checkpoints=checkpoints(state),
        tables={table: texts(rows(lake, table)) if Lake(str(lake)).has(table) else Counter() for table in TABLES},
        batches=rows(lake, "batches"),
        status=status(state),
        seqno=int((state / "bridge" / "seqno").read_text()),
        bep50=(
            (state / "bridge" / "bep50.key").read_bytes()[-32:].hex(),
            (state / "bridge" / "bep50" / "node.id").read_bytes().hex(),
        ),
        spooled=spooled(state),
    )
    kiln = Kiln(state, free_ports(2), ENVIRONMENT)
    interests = json.loads(kiln.run_kept("interests", "--json").stdout)
    with start_broker(kiln.settings(), lambda words: None) as address:  # once for all commands
        after = run_bridge(kiln)
        kiln.run_kept("run", "--catch-up")
        log = read_log(address, "kiln.updates")
        emitted = read_batches(address, "kiln.batches")
    return Upgraded(kiln, before, after, interests, log, emitted)


@pytest.fixture(scope="module")
def upgraded(broker_classpath: list[Path], tmp_path_factory: pytest.TempPathFactory, expected: Row) -> Upgraded:
    due = (expected["gone_on_from"] + LONG_WINDOW) / 1e6
    assert time.time() > due, f"the clock of this machine is behind that of the kept log, which ends at {due} s"
    return go_on(unpack(tmp_path_factory.mktemp("upgraded")))


# ---------------------------------------------------------------- another version


def contents(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(path): (path.stat().st_mode, path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in (folder, *folder.rglob("*"))
    }


@pytest.mark.parametrize(("version", "found"), [("2\n", "version 2"), (None, "no version")])
def test_state_of_an_older_version_is_refused_and_left_alone(
    tmp_path: Path, version: str | None, found: str, capfd: pytest.CaptureFixture[str]
) -> None:
    state = unpack(tmp_path)
    (state / "version").unlink()
    if version is not None:
        (state / "version").write_text(version)
    before = contents(state)
    kiln = Kiln(state, free_ports(2), ENVIRONMENT)
    for command in (["run", "--catch-up"], ["bridge"], ["sql", "select count(*) from messages"]):
        with mock.patch.dict(os.environ, kiln.environment, clear=True):
            assert run_command(command) == 1
        out, error = capfd.readouterr()
        assert (out, error.count("\n")) == ("", 1), error
        assert f"the state folder {state} has {found}, and this Kiln reads version {STATE_VERSION}. Keep" in error
        assert contents(state) == before


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize("table", COMPARED)
def test_a_table_holds_what_the_code_before_made_of_the_same_folder(
    upgraded: Upgraded, expected: Row, table: str
) -> None:
    assert summary(upgraded.kiln.lake, table) == expected["tables"][table]


@pytest.mark.parametrize("table", REPLAYED)
def test_a_table_holds_of_the_captures_what_it_holds_without_a_stop(
    upgraded: Upgraded, expected: Row, table: str
) -> None:
    assert summary(upgraded.kiln.lake, table, "REPLAY") == expected["replayed"][table]


@pytest.mark.parametrize("table", TABLES)
def test_no_row_that_was_there_is_lost_or_changed(upgraded: Upgraded, table: str) -> None:
    lost = upgraded.before.tables[table] - texts(rows(upgraded.kiln.lake, table))
    assert not lost


def test_the_tables_grew(upgraded: Upgraded) -> None:
    for table in ("frames", "copies", "messages", "updates", "tips", "batches", "batch_tips", "quarantine"):
        assert upgraded.before.tables[table], table
        assert upgraded.kiln.count(table) > upgraded.before.tables[table].total(), table


@pytest.mark.parametrize("table", [name for name, table in TABLES.items() if table.key])
def test_no_row_is_there_twice(upgraded: Upgraded, table: str) -> None:
    key = ", ".join(TABLES[table].key)
    twice = upgraded.kiln.sql(f"select {key}, count(*) as n from {table} group by all having n > 1 limit 3")
    assert twice == []


def test_no_frame_is_missing_between_those_of_before_and_those_of_today(upgraded: Upgraded) -> None:
    gaps = upgraded.kiln.sql(
        "select connection, direction, count(*) as n, max(sequence) as last from frames group by all having n <> last"
    )
    assert gaps == []


# ---------------------------------------------------------------- queries


def test_each_query_goes_on_from_its_checkpoint(upgraded: Upgraded) -> None:
    before, now = upgraded.before.checkpoints, checkpoints(upgraded.kiln.state)
    assert now.keys() == before.keys() == QUERIES
    for name in QUERIES:
        assert now[name].query_id == before[name].query_id, name
        assert now[name].newest > before[name].newest, name


def test_state_folder_and_tables_keep_their_version(upgraded: Upgraded) -> None:
    assert (upgraded.kiln.state / "version").read_text() == f"{STATE_VERSION}\n"
    for name, table in TABLES.items():
        opened = DeltaTable(str(upgraded.kiln.lake / name))
        assert {field.name for field in opened.schema().fields} == {column.name for column in table.columns}
        assert opened.metadata().configuration["kiln.version"] == str(TABLES_VERSION)
        assert (opened.protocol().min_reader_version, opened.protocol().min_writer_version) == (1, 2)


def test_no_query_had_to_be_started_again_for_what_is_in_its_checkpoint(upgraded: Upgraded) -> None:
    log = (upgraded.kiln.state / "logs" / "spark.log").read_text(errors="replace")
    ended = re.findall(r"terminated with error\s+(.*)", log)
    # on a busy machine a worker of Python may come too late to be heard; the query is started again, and well
    assert [line for line in ended if "Python worker failed to connect back" not in line] == []


# ---------------------------------------------------------------- batches


def test_a_window_that_was_open_closes_with_the_length_and_the_tips_it_had(upgraded: Upgraded, expected: Row) -> None:
    assert not any(map(is_long, upgraded.before.batches))
    assert expected["long_windows"]
    assert long_windows(upgraded.kiln.lake) == expected["long_windows"]


def test_the_batches_are_those_of_the_model_over_the_log(upgraded: Upgraded, expected: Row) -> None:
    """One log, before and after; in between windows were long. None was open when that changed."""
    lines = (0, expected["long_from"], expected["gone_on_from"], 1 << 62)
    model: set[Emitted] = set()
    for since, until, length in zip(lines, lines[1:], (WINDOW, LONG_WINDOW, WINDOW), strict=False):
        parts = []
        for records in upgraded.log:
            part: list[tuple[int, Update | None]] = [
                (stamp, update) for stamp, update in records if since <= stamp < until
            ]
            parts.append([*part, *[(stamp, None) for stamp, _ in records if stamp >= until][:1]])
        model |= expected_batches(parts, length)
    assert len(upgraded.emitted) == len(set(upgraded.emitted))
    assert set(upgraded.emitted) == model
    batches = upgraded.kiln.sql("select network, origin, separator_key, separator_value, batch_cid from batches")
    assert Counter(tuple(row.values()) for row in batches) == Counter((*each.owner, each.cid) for each in model)


def test_every_update_with_a_separator_is_in_a_batch(upgraded: Upgraded) -> None:
    missed = "select stream, tip from updates where separator_key is not null except select stream, tip from batch_tips"
    assert upgraded.kiln.sql(missed) == []


# ---------------------------------------------------------------- the bridge


def test_the_bridge_is_who_it_was(upgraded: Upgraded) -> None:
    before, now = upgraded.before.status, upgraded.status
    assert now["pid"] != before["pid"]
    assert now["peer"] == before["peer"]
    assert (now["bep50"]["key"], now["bep50"]["node"]) == upgraded.before.bep50
    assert now["interests"] == before["interests"] == upgraded.interests != ["*"]
    assert int((upgraded.kiln.state / "bridge" / "seqno").read_text()) >= upgraded.before.seqno > 0


def test_frames_that_waited_on_disk_came_to_kafka(upgraded: Upgraded, expected: Row) -> None:
    assert upgraded.before.spooled > 0
    assert spooled(upgraded.kiln.state) == 0
    assert upgraded.status["spool"]["acknowledged"] == expected["spooled_frames"]


def test_publishing_goes_on_at_the_batch_where_it_was(upgraded: Upgraded) -> None:
    receipts = rows(upgraded.kiln.lake, "publications", ("batch_cid", "transport", "error"))
    live = [row["batch_cid"] for row in upgraded.before.batches if row["origin"] == "LIVE"]
    wanted = Counter((cid, transport) for cid in live for transport in ("gossipsub", "bep50"))
    assert Counter((row["batch_cid"], row["transport"]) for row in receipts) == wanted
    # a bridge that had lost its place would call them so
    assert not [row for row in receipts if row["error"] == "too old"]
    made_today = [row for row in receipts if row["error"] is not None]
    assert {row["transport"] for row in made_today} == {"gossipsub", "bep50"}
