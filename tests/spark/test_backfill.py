"""Backfill runs on a real Spark and real tables (decision 21): out of a file against a model, out of `frames` against
the tables that are there, at edges, with what became known later, and beside a run of the same name."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, TypedDict, Unpack, cast

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyspark.sql import SparkSession

from kiln.conf.settings.model import Backfill, Network, Settings, Spark
from kiln.deploy.demo.traffic import Traffic, TrafficOptions, write_traffic
from kiln.deploy.demo.traffic.ledger import Ledger, MessageEntry
from kiln.pipelines.app.backfill_run import Engine, backfill, build_terms
from kiln.pipelines.backfill.run import RunError, RunOutcome, StoppedError
from kiln.pipelines.backfill.run_log import RUN_TABLES, find_run
from kiln.pipelines.backfill.swap import FileSwap
from kiln.pipelines.backfill.swap_runs import swap_run
from kiln.pipelines.backfill.terms import Source
from kiln.pipelines.decode.user_decoder import load_decoder
from kiln.pipelines.delta.arrow_rows import build_arrow_schema
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.quality.check import check_lake
from kiln.pipelines.quality.expectations import RowValidator
from kiln.pipelines.quality.suites import FOLDER as SUITES
from kiln.pipelines.quality.suites import read_suites
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.faults import FAULTS
from kiln.schemas.wire.identity import peer_bytes
from kit.decoder_package import install_decoders
from kit.history import LINE_LAYERS, PACKINGS, ceramic_line, kubo_line
from kit.local_spark import open_session
from kit.log_model import Announced, Update, block_of, cid_of, updates_among, windows_of

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

START = 1_750_000_000_000_000  # µs
END = START + 12_000_000
WINDOW = 1_000_000
OPTIONS = TrafficOptions(
    seed=3, network="local-history", separators=6, streams=40, reannounced=0.15, forged=0.05, peers=3, copies=2
).for_capture()
FILES = Path(__file__).resolve().parents[1] / "unit" / "schemas" / "history_files"
Rows = list[tuple[object, ...]]


class TermOptions(TypedDict, total=False):
    """Arguments of `build_terms`."""

    source: Source
    files: tuple[Path, ...]
    window: timedelta
    as_of: int
    engine: Engine


@dataclass
class World:
    """A lake that holds what a run out of a capture file gave, as if it had been live."""

    spark: SparkSession
    settings: Settings
    file: Path
    ledger: Ledger
    lake: Lake

    def run(
        self,
        name: str,
        low: int = START,
        high: int = END,
        stopped: Callable[[], bool] = lambda: False,
        chunk: int = 1_000_000,
        **more: Unpack[TermOptions],
    ) -> RunOutcome:
        settings = self.settings.model_copy(update={"backfill": Backfill(frames_per_chunk=chunk)})
        return backfill(self.spark, settings, build_terms(settings, name, low, high, **more), stopped, lambda _: None)

    def rows(self, run: str | None, table: str) -> Rows:
        lake = self.lake if run is None else self.lake.locate_run(run)
        found = lake.open(table).to_pyarrow_table()
        for number, field in enumerate(found.schema):
            if pa.types.is_timestamp(field.type):
                found = found.set_column(number, field.name, found[field.name].cast(pa.int64()))
        return sorted((tuple(map(_plain, row.values())) for row in found.to_pylist()), key=repr)

    def swap(self, name: str) -> None:
        run = find_run(self.lake, name)
        assert run is not None
        assert swap_run(self.lake, run, FileSwap(self.lake, durable=False), lambda: time.time_ns() // 1000, print)

    def check(self) -> dict[str, list[str]]:
        """Hints of the expectations that fail, by table."""
        later = datetime.now(UTC) + timedelta(hours=1)
        failed: dict[str, list[str]] = {}
        for each in check_lake(self.settings, self.lake, read_suites([SUITES]), RowValidator(), later):
            if not each.success:
                failed.setdefault(each.check.table, []).append(each.hint)
        return failed


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


@pytest.fixture(scope="module")
def world(broker_classpath: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("history")
    traffic = Traffic(OPTIONS, START * 1000, 30)
    file = folder / "traffic.rpc.gz"
    with gzip.open(file, "wb") as packed:
        write_traffic(cast(BinaryIO, packed), traffic.frames(duration_ns=10_000_000_000))
    assert traffic.ledger is not None
    settings = Settings(state=folder / "state", network=Network(name=OPTIONS.network), spark=Spark(master="local[2]"))
    with open_session(settings, "backfill") as spark:
        lake = Lake.from_location(settings.lake_root)
        world = World(spark, settings, file, traffic.ledger, lake)
        world.run("heard", source="files", files=(file,), chunk=400)
        for table in RUN_TABLES:
            shutil.rmtree(lake.table(table), ignore_errors=True)
            shutil.copytree(lake.locate_run("heard").table(table), lake.table(table))
        yield world


def updates_of(ledger: Ledger) -> list[MessageEntry]:
    """UPDATEs that are updates, in the order of event time."""
    said = [entry for entry in ledger.messages.values() if entry.type == "UPDATE" and entry.outcome == "message"]
    said.sort(key=lambda entry: entry.first_good_at or 0)
    by_stream: dict[tuple[str, str | None], list[MessageEntry]] = {}
    for entry in said:
        by_stream.setdefault((entry.network, entry.stream), []).append(entry)
    new: list[MessageEntry] = []
    for entries in by_stream.values():
        log = [
            Announced(
                entry.author if entry.seqno else None,
                entry.tip or "",
                f"{entry.separator.key}/{entry.separator.value}" if entry.separator else None,
                (entry.first_good_at or 0) // 1000,
                entry.message_id,
            )
            for entry in entries
        ]
        new += [entries[number] for number in updates_among(log, 86_400_000_000)]
    return sorted(new, key=lambda entry: entry.first_good_at or 0)


def test_a_capture_file_gives_the_messages_and_the_batches_of_event_time(world: World) -> None:
    """The ideal: windows over what was heard, when it was heard, by another program."""
    good = {each for each, entry in world.ledger.messages.items() if entry.outcome == "message" and entry.good_copies}
    assert {(row[1], row[0]) for row in world.rows("heard", "messages")} == good
    updates = updates_of(world.ledger)
    assert Counter(row[2] for row in world.rows("heard", "updates")) == Counter(each.message_id for each in updates)
    tips = Counter((each.network, each.separator, each.stream, each.tip) for each in updates)
    assert len(updates) > len(tips) > 60, "some authors return to a tip"
    log = [
        (heard, Update((e.network, "REPLAY", e.separator.key, e.separator.value), e.stream or "", e.tip or "", heard))
        for e in updates
        if e.separator is not None and (heard := (e.first_good_at or 0) // 1000)
    ]
    ideal = windows_of([*log, (END + 10 * WINDOW, None)], WINDOW)
    expected = {(*window.owner, window.opened_at, cid_of(block_of(window.tips))) for window in ideal}
    assert len(expected) > 10
    made = {(*row[1:5], row[5], row[0]) for row in world.rows("heard", "batches")}
    assert made == expected


def test_the_frames_of_a_lake_give_its_tables_again_in_python_and_in_chunks_that_were_stopped(world: World) -> None:
    """Other runs decode with the native core."""
    calls: list[int] = []

    def stop_at_third() -> bool:
        calls.append(1)
        return len(calls) == 3

    with pytest.raises(StoppedError, match=r"^backfill run again was stopped\. .* to continue$"):
        world.run("again", stopped=stop_at_third, chunk=400, engine="python")
    found = find_run(world.lake, "again")
    assert found is not None
    assert not found.is_done
    assert world.run("again", chunk=400, engine="python").rows_written > 0
    for table in RUN_TABLES[1:-1]:
        assert world.rows("again", table) == world.rows(None, table), table
        assert world.rows("again", table), table
    assert world.rows("again", "frames") == []


def test_what_is_done_stays_as_it_is_and_other_terms_are_refused(world: World) -> None:
    lake = world.lake.locate_run("heard")
    before = {table: lake.open(table).version() for table in lake.tables()}
    done = world.run("heard", source="files", files=(world.file,))
    assert done.rows_written == 0
    assert done.rows["messages"] == len(world.rows(None, "messages"))
    assert before == {table: lake.open(table).version() for table in before}
    with pytest.raises(
        RunError,
        match="a backfill run heard with other options: its window length in µs is 1000000, not 5000000",
    ):
        world.run("heard", source="files", files=(world.file,), window=timedelta(seconds=5))
    with pytest.raises(RunError, match="it has another time range"):
        world.run("heard", high=END + 1, source="files", files=(world.file,))


def test_two_runs_that_meet_give_what_one_run_gives(world: World) -> None:
    """Also where messages, repeats and windows lie across the edge."""
    middle = START + 5_300_000
    world.run("early", high=middle)
    world.run("late", low=middle)
    for table in ("copies", "subscriptions", "controls", "messages", "updates", "batches"):
        early, late = world.rows("early", table), world.rows("late", table)
        assert early
        assert late
        assert sorted(early + late, key=repr) == world.rows(None, table), table


def _ceramic_log(world: World) -> bytes:
    """A service log with updates of this time, three a second."""
    messages = world.lake.open("messages").to_pyarrow_table().to_pylist()
    updates = [row for row in messages if row["type"] == "UPDATE" and row["model"] and row["from_peer"]][:24]
    assert len(updates) == 24
    lines = []
    for number, row in enumerate(updates):
        pairs = {"peer": row["from_peer"], "event": "received", "topic": f"/ceramic/{OPTIONS.network}"}
        pairs |= {"message.from": row["from_peer"], "message.seqno": f"{number + 1:016x}", "message.typ": "0"}
        pairs |= {f"message.{name}": row[name] for name in ("stream", "tip", "model")}
        lines.append(ceramic_line(START // 1_000_000 + 2 + number // 3, pairs.items()))
    return b"\n".join(lines) + b"\n"


def test_history_of_every_form_is_swapped_in_without_a_fault(world: World, tmp_path: Path) -> None:
    """A folder of all forms of a log, a capture, lines of Kubo and traces, of which the range has a part."""
    folder, log = tmp_path / "history", _ceramic_log(world)
    folder.mkdir()
    wrappings = {"plain": lambda raw: raw, **LINE_LAYERS, **PACKINGS}
    for number, wrap in enumerate(wrappings.values()):
        (folder / f"{number}.log").write_bytes(wrap(log))
    shutil.copy(world.file, folder / "traffic.rpc.gz")
    for trace in (FILES / "go_pubsub.trace.json.gz", FILES / "go_pubsub.trace.pb.gz"):
        shutil.copy(trace, folder)
    author = peer_bytes("QmQotCKxiMWt935TyCBFTN23jaivxwrZ3uD58wNxeg5npi")
    kubo = folder / "kubo.ndjson"
    kubo.write_bytes(kubo_line(author, b'{"typ":3,"ts":1}', b"\x07", f"/ceramic/{OPTIONS.network}"))
    os.utime(kubo, ns=((START + 5_000_000) * 1000,) * 2)
    (folder / "README").write_text("logs of our nodes")

    here = replace(world, settings=world.settings.model_copy(update={"state": tmp_path / "state"}))
    here.lake = Lake.from_location(here.settings.lake_root)
    low = START + 3_300_000
    outcome = here.run("old", low=low, source="files", files=(folder,))
    assert outcome.outside.frames > 24
    assert outcome.outside.last_at > END, "the traces"
    messages = here.lake.locate_run("old").open("messages").to_pyarrow_table().to_pylist()
    of_log = [row for row in messages if str(row["message_id"]).startswith("unverified/") and row["type"] == "UPDATE"]
    assert len(of_log) == 18, "two of eight seconds are before the range"
    copies = here.lake.locate_run("old").open("copies").to_pyarrow_table().to_pylist()
    per_message = Counter(row["message_id"] for row in copies)
    assert {per_message[row["message_id"]] for row in of_log} == {len(wrappings)}

    here.swap("old")
    assert here.check() == {}


def test_a_published_line_is_a_copy_of_the_received_line_that_is_nearest(world: World, tmp_path: Path) -> None:
    """Logs of three nodes, in chunks whose edges part the lines of a message."""
    stored = world.lake.open("messages").to_pyarrow_table().to_pylist()
    first, second, third = sorted({row["from_peer"] for row in stored if row["from_peer"]})[:3]
    updates = [row for row in stored if row["type"] == "UPDATE" and row["model"]][:4]

    def line(node: str, second_of_range: int, update: int, seqno: int | None = None, author: str = first) -> bytes:
        pairs = {"peer": node, "event": "received" if seqno else "published", "topic": f"/ceramic/{OPTIONS.network}"}
        if seqno:
            pairs |= {"message.from": author, "message.seqno": f"{seqno:016x}"}
        pairs |= {"message.typ": "0", "message.stream": updates[update]["stream"]}
        pairs |= {"message.tip": updates[update]["tip"]}
        if seqno:  # a node may log the model of what it receives alone
            pairs["message.model"] = updates[update]["model"]
        return ceramic_line(START // 1_000_000 + second_of_range, pairs.items())

    received = [(3, 0, 1), (2, 1, 2), (9, 1, 3), (9, 3, 4)]
    logs = {
        first: [line(first, *each) for each in [(2, 0), (2, 1), (4, 2), (3, 3), (9, 1)]],
        second: [*(line(second, *each) for each in received), line(second, 4, 2, 5, author=third)],
        third: [line(third, 4, 1, 2)],
    }
    for node, lines in logs.items():
        (tmp_path / f"{node}.log").write_bytes(b"\n".join(lines) + b"\n")
    here = replace(world, settings=world.settings.model_copy(update={"state": tmp_path / "state"}))
    here.lake = Lake.from_location(here.settings.lake_root)
    files = tuple(tmp_path.glob("*.log"))
    here.run("nodes", source="files", files=files, chunk=4)
    lake = here.lake.locate_run("nodes")
    copies = Counter(row["message_id"] for row in lake.open("copies").to_pyarrow_table().to_pylist())
    messages = lake.open("messages").to_pyarrow_table().to_pylist()
    ids = [row["message_id"] for row in messages]
    found = Counter(("" if "sha256" in each else each, copies[each]) for each in ids)
    # "": the line that no node has received, and the one that the second node has after 6 s
    expected = Counter({("", 1): 2})
    for author, seqno, count in ((first, 1, 2), (first, 2, 3), (first, 3, 2), (first, 4, 1), (third, 5, 1)):
        expected[f"unverified/{author}/{seqno:016x}", count] = 1
    assert found == expected


LACKS = {
    "archive": ("copies", "messages"),
    "updates": ("updates", "batches"),
    "batch": ("batches",),
    "sink": ("updates", "batches"),
    "decoder": (),  # `decoded` of a run: the test of another network
}
"""Tables that lack a row after a fault at a stage, if the remedy is a backfill."""


def test_the_backfill_that_the_catalogue_suggests_brings_the_rows_back(world: World, tmp_path: Path) -> None:
    remedies = {each.stage: each.what_to_do for each in FAULTS if "`kiln backfill run`" in each.what_to_do}
    assert remedies.keys() == LACKS.keys()
    assert all("`kiln backfill swap`" in each for each in remedies.values())
    here = replace(world, settings=world.settings.model_copy(update={"state": tmp_path / "state"}))
    here.lake = Lake.from_location(here.settings.lake_root)
    shutil.copytree(world.lake.path, here.lake.path)
    keys = {"copies": "message_id", "messages": "message_id", "updates": "message_id", "batches": "batch_cid"}
    for number, tables in enumerate(LACKS.values()):
        for table in tables:
            key = keys[table]
            rows = here.lake.open(table).to_pyarrow_table(columns=[key])[key].to_pylist()
            here.lake.open(table).delete(f"{key} = '{rows[5 * number]}'")
    assert all(len(here.rows(None, table)) < len(world.rows(None, table)) for table in keys)
    here.run("remedy")
    here.swap("remedy")
    for table in keys:
        assert here.rows(None, table) == world.rows(None, table), table


def test_the_frames_of_another_network_give_data_that_the_users_decoder_reads(world: World, tmp_path: Path) -> None:
    """The same lake, read as one of any gossip: by its frames, and by its capture."""
    install_decoders(tmp_path / "site", "history_decoders")
    archive = shutil.make_archive(str(tmp_path / "history_decoders"), "zip", tmp_path / "site")
    world.spark.sparkContext.addPyFile(archive)
    load_decoder.cache_clear()
    network = Network(name=OPTIONS.network, kind="gossip", message_id="sha256_data", decoder="history_decoders.parse")
    other = replace(world, settings=world.settings.model_copy(update={"network": network}))
    other.run("data")
    other.run("captured", source="files", files=(world.file,))
    lake = world.lake.locate_run("data")
    rows = lake.open("messages").to_pyarrow_table().to_pylist()
    copies = lake.open("copies").to_pyarrow_table().to_pylist()
    assert {row["type"] for row in rows} == {"DATA"}
    assert {row["message_id"] for row in rows} == {f"sha256/{sha256(row['data']).hexdigest()}" for row in rows}
    assert {row["message_id"] for row in rows} <= {row["message_id"] for row in copies}
    good = {row["data"]: row["decoded"] for row in rows if row["decoded"] is not None}
    assert len(good) > 60
    expected = {data: json.loads(data, parse_constant=lambda _: None) for data in good}
    assert {data: json.loads(decoded) for data, decoded in good.items()} == expected
    faults = [row for row in lake.open("quarantine").to_pyarrow_table().to_pylist() if row["stage"] == "decoder"]
    assert Counter(row["data"] for row in faults) == Counter(row["data"] for row in rows if row["decoded"] is None)
    assert faults
    assert not world.rows("data", "updates")
    assert not world.rows("data", "batches")
    captured = world.lake.locate_run("captured").open("messages").to_pyarrow_table().to_pylist()
    assert Counter(row["decoded"] for row in captured) == Counter(row["decoded"] for row in rows)


def test_later_truth_moves_an_update_and_as_of_takes_what_was_known_then(world: World) -> None:
    now = max(path.stat().st_mtime_ns for path in Path(world.lake.table("streams")).glob("_delta_log/*")) // 1000
    claimed = [row for row in world.rows(None, "updates") if row[4] == "model" and row[6] == "topic"]
    network, value, stream = claimed[0][0], claimed[0][5], claimed[0][7]
    other = next(row[5] for row in world.rows(None, "updates") if row[4] == "model" and row[5] != value)
    schema = build_arrow_schema(TABLES["streams"].columns)
    told = pa.table([[network], [stream], ["model"], [other], ["genesis"]], schema=schema)
    write_deltalake(world.lake.table("streams"), told, mode="append")
    world.run("today")
    moved = [row for row in world.rows("today", "updates") if row[7] == stream]
    assert moved
    assert {row[4:7] for row in moved} == {("model", other, "genesis")}
    tips = {row[8] for row in moved}
    of_other = {row[0] for row in world.rows("today", "batches") if row[3:5] == ("model", other)}
    assert tips <= {row[2] for row in world.rows("today", "batch_tips") if row[0] in of_other and row[1] == stream}
    assert any(row[5] == "contradicts_genesis" for row in world.rows("today", "quarantine"))
    world.run("then", as_of=now)
    for table in ("updates", "batches", "messages"):
        assert world.rows("then", table) == world.rows(None, table), table
