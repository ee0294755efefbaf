"""Faults put into a real lake, one at a time: the right expectation fails and names the fault, no other error does, and
after the repair nothing fails. `FAULTS` is also the table in docs/quality.md."""

from __future__ import annotations

import gzip
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from deltalake import DeltaTable, write_deltalake

from conftest import VECTORS
from kiln.conf.settings.durations import micros
from kiln.deploy.demo.traffic import Traffic, TrafficOptions
from kiln.deploy.demo.traffic.capture_files import replay
from kiln.deploy.query.ask import query_lake
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.delta.bundles import save_bundles
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.quality.expectations import RowValidator
from kiln.pipelines.quality.results import CheckResult
from kiln.pipelines.quality.suite_run import SuiteRun
from kiln.pipelines.quality.suites import FOLDER, SuiteCheck, read_suites
from kiln.pipelines.quality.windows import CheckContext
from kiln.schemas.captures.formats import FORMATS
from kiln.schemas.captures.items import Item
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.delta.views import views
from kiln.schemas.kafka.frames import read_rpc
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.identity import peer_bytes
from kiln.schemas.wire.topic_table import BundleSet
from kit.history import ceramic_line, items, kubo_line
from kit.log_model import Owner
from kit.quality_lake import START, WINDOW, Row, add_batch, append, at, made_up_rows, rows_of, rows_of_file, write_rows

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
LATER = timedelta(hours=1)
"""By then everything has settled."""


class Town:
    """A lake, and checks of it one after another with one state.

    Args:
        folder: Folder of the lake and the state.
        rows: Rows of the lake, by table.
        checks: The checks.
        validator: Great Expectations.
        clean: Versions of the tables at which every check has passed. As long as no bridge runs, only a check that
            reads a table which has changed since then can fail.
    """

    def __init__(
        self,
        folder: Path,
        rows: dict[str, list[Row]],
        checks: Sequence[SuiteCheck],
        validator: RowValidator,
        clean: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.lake = Lake(str(folder / "lake"))
        self.rows = rows
        self._checks, self._validator, self._clean = checks, validator, clean
        self.state_file = folder / "positions.json"

    def check(
        self,
        now: datetime | None = None,
        *,
        running: bool = False,
        retention: Mapping[str, timedelta] = MappingProxyType({}),
        limits: Mapping[str, int] = MappingProxyType({}),
        recent: bool = False,
    ) -> list[CheckResult]:
        context = CheckContext(now or datetime.now(UTC) + LATER, running=running, retention=retention)
        checking = SuiteRun(self.lake, context, self._validator, self.state_file, limits=limits, recent=recent)
        try:
            results = checking.run_checks(self._checks if running else self._select_checks())
            checking.save(self._checks)
            return results
        finally:
            checking.close()

    def failed(
        self,
        *,
        running: bool = False,
        now: datetime | None = None,
        retention: Mapping[str, timedelta] = MappingProxyType({}),
        limits: Mapping[str, int] = MappingProxyType({}),
        recent: bool = False,
    ) -> list[CheckResult]:
        results = self.check(now, running=running, retention=retention, limits=limits, recent=recent)
        return [each for each in results if not each.success]

    def only(self, *checks: SuiteCheck) -> Town:
        """The lake with checks of its own, and their state."""
        return Town(Path(self.lake.path).parent, self.rows, checks, self._validator, self._clean)

    def _select_checks(self) -> Sequence[SuiteCheck]:
        """Select the checks that read a table which has changed; all if none has."""
        changed = {name for name, version in self.versions().items() if self._clean.get(name) != version}
        return [each for each in self._checks if changed & {each.table, *each.tables}] or self._checks

    def versions(self) -> dict[str, int]:
        """Read the versions from the names of the commits, because opening a table takes longer."""
        return {name: _find_version(Path(self.lake.table(name))) for name in self.lake.tables()}

    def delete(self, table: str, where: str) -> None:
        deleted = DeltaTable(self.lake.table(table)).delete(where)["num_deleted_rows"]
        assert deleted, where

    def append(self, table: str, *rows: Row) -> None:
        append(self.lake, table, rows)

    def restore(self, table: str, version: int) -> None:
        DeltaTable(self.lake.table(table)).restore(version)

    def row(self, table: str, which: Callable[[Row], object] = lambda _: True) -> Row:
        return next(row for row in self.rows[table][len(self.rows[table]) // 3 :] if which(row))


def _find_version(table: Path) -> int:
    return max(int(commit.stem) for commit in (table / "_delta_log").glob("*.json"))


class Fault(NamedTuple):
    """A fault as docs/quality.md tells it. `put` puts the fault in, and returns a text that the result names."""

    words: str
    table: str
    expectation: str
    level: str
    put: Callable[[Town], str]
    also: tuple[str, ...] = ()
    """tables whose references to the lost rows fail too"""


def _gap(town: Town) -> str:
    """A frame with a message, in the middle of a connection."""
    offsets = {row["kafka_offset"] for row in town.rows["copies"]}
    row = town.row("frames", lambda row: row["kafka_offset"] in offsets and row["sequence"] == 7)
    town.delete("frames", f"kafka_offset = {row['kafka_offset']}")
    return "frame 7 is missing"


def _frame_twice(town: Town) -> str:
    row = town.row("frames")
    town.append("frames", row)
    connection = row["connection"]
    assert isinstance(connection, bytes)
    return connection.hex()


def _batch_twice(town: Town) -> str:
    row = town.row("batches")
    town.append("batches", row)
    return str(row["batch_cid"])


def _block_changed(town: Town) -> str:
    row = town.row("batches")
    town.delete("batches", f"batch_cid = '{row['batch_cid']}'")
    block = row["block"]
    assert isinstance(block, bytes)
    town.append("batches", row | {"block": block[:-1] + bytes([block[-1] ^ 1])})
    return str(row["batch_cid"])


def _own_window(town: Town) -> str:
    """A batch of true tips that no window of the updates has: all tips of a separator, from many windows."""
    owners = Counter(_owner(row) for row in town.rows["updates"] if row["separator_key"])
    ((owner, _),) = owners.most_common(1)
    tips = {(str(row["stream"]), str(row["tip"])) for row in town.rows["updates"] if _owner(row) == owner}
    opened = town.row("batches", lambda row: _owner(row) == owner)["opened_at"]
    assert isinstance(opened, int)
    made: dict[str, list[Row]] = {name: [] for name in TABLES}
    add_batch(made, owner, opened + WINDOW // 2, tips)
    for name, each in made.items():
        if each:
            town.append(name, *each)
    return str(made["batches"][0]["batch_cid"])


def _owner(row: Row) -> Owner:
    return str(row["network"]), str(row["origin"]), str(row["separator_key"]), str(row["separator_value"])


def _update_lost(town: Town) -> str:
    models = {row["message_id"] for row in town.rows["messages"] if row["model"]}
    row = town.row("updates", lambda row: row["separator_key"] and row["message_id"] in models)
    town.delete("updates", f"message_id = '{row['message_id']}'")
    return str(row["tip"])


def _messages_lost(town: Town) -> str:
    row = town.row("updates")
    town.delete("messages", f"message_id = '{row['message_id']}'")
    return str(row["message_id"])


def _answer_lost(town: Town) -> str:
    row = town.row("messages", lambda row: row["type"] == "QUERY")
    town.delete("messages", f"message_id = '{row['message_id']}'")
    return str(row["message_id"])


def _copies_lost(town: Town) -> str:
    row = town.row("messages")
    town.delete("copies", f"message_id = '{row['message_id']}'")
    return str(row["message_id"])


def _tips_lost(town: Town) -> str:
    row = town.row("batches")
    town.delete("batch_tips", f"batch_cid = '{row['batch_cid']}'")
    return str(row["batch_cid"])


def _tip_lost(town: Town) -> str:
    row = town.row("updates")
    town.delete("tips", f"tip = '{row['tip']}'")
    return str(row["tip"])


def _tip_of_nobody(town: Town) -> str:
    batch, other = town.row("batch_tips"), town.row("messages", lambda row: row["type"] == "BATCH_UPDATE")
    town.append("batch_tips", batch | {"tip": other["batch_cid"]})
    return str(other["batch_cid"])


def _batch_lost(town: Town) -> str:
    row = town.row("publications")
    missing = town.row("messages", lambda row: row["type"] == "BATCH_UPDATE")
    town.append("publications", row | {"batch_cid": missing["batch_cid"]})
    return str(missing["batch_cid"])


def _not_fresh(town: Town) -> str:
    late = at(3600)
    new = [row | {"observed_at": late + timedelta(seconds=n)} for n, row in enumerate(town.rows["frames"][-3:])]
    for n, row in enumerate(new):
        town.append("frames", row | {"connection": bytes([n]) * 16, "sequence": 1, "kafka_offset": _next(town) + n})
    update = town.rows["updates"][-1] | {"separator_key": None, "separator_value": None, "separator_source": None}
    query = town.row("messages", lambda row: row["type"] == "QUERY")
    times = {"observed_at": late, "log_time": late, "log_offset": 10_000_000}
    town.append("updates", update | times | {"message_id": query["message_id"]})
    return "the newest row is of 2026-05-04 12:00"


def _clock_off(town: Town) -> str:
    """A bridge that hears again an hour later, with a clock that is behind the broker's."""
    heard = [row for row in town.rows["frames"] if row["payload"]][-5:]
    for number, row in enumerate(heard):
        stamped = at(3600 + number)
        town.append(
            "frames",
            row
            | {"connection": b"c" * 16, "sequence": number + 1, "kafka_offset": _next(town) + number}
            | {"observed_at": stamped - timedelta(minutes=10), "kafka_timestamp": stamped},
        )
    return "600 s behind"


def _next(town: Town) -> int:
    return max(int(str(row["kafka_offset"])) for row in town.rows["frames"]) + 1


def _false_claim(town: Town) -> str:
    row = town.row("updates", lambda row: row["separator_source"] in ("topic", "model"))
    other = town.row("updates", lambda other: other["separator_value"] not in (None, row["separator_value"]))
    told = {name: row[name] for name in ("network", "stream")}
    town.append(
        "streams",
        told
        | {"separator_key": row["separator_key"], "separator_value": other["separator_value"], "source": "genesis"},
    )
    return str(row["from_peer"])


def _flood(town: Town) -> str:
    row = town.row("copies")
    late = int(START.timestamp() * 1e6) + 400_000_000
    town.append("copies", *(row | {"observed_at": late + n, "message_index": 1_000 + n} for n in range(150)))
    return str(row["message_id"])


def _garbage(town: Town) -> str:
    row: Row = {
        "kafka_partition": 0,
        "message_index": 0,
        "cid": None,
        "stage": "message",
        "reason": "not_json",
        "detail": "",
        "data": b"x",
        "observed_at": START,
    }
    town.append("quarantine", *(row | {"kafka_offset": n} for n in range(200)))
    return "not_json"


def _graft_of_a_stranger(town: Town) -> str:
    row = town.row("controls", lambda row: row["kind"] == "GRAFT")
    town.append("controls", row | {"topic": "/ceramic/elsewhere", "entry_index": 1_000})
    return "/ceramic/elsewhere"


def _announced_in_vain(town: Town) -> str:
    row = town.row("controls", lambda row: row["kind"] == "GRAFT") | {"kind": "IHAVE", "direction": "IN"}
    ids = [f"never{number}" for number in range(500)]
    town.append("controls", row | {"message_ids": ids, "message_id_count": 500, "entry_index": 1_000})
    return "announced messages never came"


FAULTS = (
    Fault("a gap in frames", "frames", "expect_sequences_without_gaps", "error", _gap, ("copies",)),
    Fault("a frame twice", "frames", "expect_keys_to_be_unique", "error", _frame_twice),
    Fault("a batch twice", "batches", "expect_keys_to_be_unique", "error", _batch_twice),
    Fault(
        "a block whose CID does not match", "batches", "expect_column_pair_cid_to_be_of_block", "error", _block_changed
    ),
    Fault(
        "a batch that does not follow from the updates",
        "batches",
        "expect_batches_to_follow_from_updates",
        "error",
        _own_window,
    ),
    Fault("an update lost from `updates`", "messages", "expect_rows_in_tables", "error", _update_lost),
    Fault("a message lost from `messages`", "copies", "expect_rows_in_tables", "error", _answer_lost),
    Fault(
        "the message of an update lost from `messages`",
        "updates",
        "expect_rows_in_tables",
        "error",
        _messages_lost,
        ("copies",),
    ),
    Fault("copies lost from `copies`", "messages", "expect_rows_in_tables", "error", _copies_lost),
    Fault("the tips of a batch lost from `batch_tips`", "batches", "expect_rows_in_tables", "error", _tips_lost),
    Fault("a tip lost from `tips`", "updates", "expect_rows_in_tables", "error", _tip_lost),
    Fault("a tip, in a batch, that nobody announced", "batch_tips", "expect_rows_in_tables", "error", _tip_of_nobody),
    Fault("a receipt for a missing batch", "publications", "expect_rows_in_tables", "error", _batch_lost),
    Fault("a table that is not fresh", "messages", "expect_table_to_keep_up", "error", _not_fresh),
    Fault("a clock 10 minutes off", "frames", "expect_clocks_to_agree", "warn", _clock_off),
    Fault("a false claim", "updates", "expect_claims_to_agree_with_geneses", "warn", _false_claim),
    Fault("a flood of one old message", "copies", "expect_old_messages_not_to_flood", "warn", _flood),
    Fault("a GRAFT without a SUBSCRIBE", "controls", "expect_rows_in_tables", "warn", _graft_of_a_stranger),
    Fault(
        "messages that are announced and never come",
        "controls",
        "expect_announced_messages_to_come",
        "warn",
        _announced_in_vain,
    ),
    Fault("much garbage", "quarantine", "expect_quarantine_share_to_be_at_most", "warn", _garbage),
)


@pytest.fixture(scope="module")
def validator() -> RowValidator:
    return RowValidator()


@pytest.fixture(scope="module")
def checks() -> list[SuiteCheck]:
    return read_suites([FOLDER])


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, checks: list[SuiteCheck], validator: RowValidator) -> Town:
    """A lake that was checked once, and found clean."""
    folder = tmp_path_factory.mktemp("clean")
    rows = made_up_rows(400)
    write_rows(Lake(str(folder / "lake")), rows)
    town = Town(folder, rows, checks, validator)
    results = town.check()
    assert len(results) == len(checks)
    assert [each.as_json() for each in results if not each.success] == []
    return town


@pytest.fixture
def town(clean: Town, tmp_path: Path, checks: list[SuiteCheck], validator: RowValidator) -> Town:
    shutil.copytree(Path(clean.lake.path).parent, tmp_path / "town")
    return Town(tmp_path / "town", clean.rows, checks, validator, clean.versions())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.words)
def test_a_fault_is_found_and_named_and_clears_after_the_repair(fault: Fault, town: Town) -> None:
    before = town.versions()
    named = fault.put(town)
    failed = town.failed()
    found = [each for each in failed if (each.check.table, each.check.expectation) == (fault.table, fault.expectation)]
    assert [(each.check.level, each.success) for each in found] == [(fault.level, False)], [e.as_json() for e in failed]
    assert named in str(found[0].as_json())
    errors = [each.check for each in failed if each.is_error and each not in found]
    assert {(each.table, each.expectation) for each in errors} == {
        (name, "expect_rows_in_tables") for name in fault.also
    }
    assert found[0].sql
    list(query_lake(town.lake, found[0].sql).rows())  # the SQL can be asked

    for name, version in before.items():
        if DeltaTable(town.lake.table(name)).version() != version:
            town.restore(name, version)
    assert [each.as_json() for each in town.only(*(each.check for each in failed)).failed()] == []


def test_a_fault_stays_until_the_repair(town: Town) -> None:
    """Faults of rows and of what spans rows, which later checks do not read again."""
    before = {name: town.versions()[name] for name in ("batches", "frames")}
    _block_changed(town)
    _frame_twice(town)
    failed = [each.check.id for each in town.failed()]
    assert len(failed) > 1
    assert [each.check.id for each in town.failed()] == failed
    for name, version in before.items():
        town.restore(name, version)
    assert [each.as_json() for each in town.failed()] == []


def test_frames_are_not_fresh_only_while_a_bridge_runs(town: Town) -> None:
    assert town.failed(running=False) == []
    failed = town.failed(running=True)
    assert [(each.check.table, each.check.expectation) for each in failed] == [("frames", "expect_table_to_be_fresh")]
    assert town.failed(running=True, now=at(60)) == []


def test_a_clock_that_is_ahead_is_named_too_and_frames_that_waited_are_no_fault(town: Town) -> None:
    row = town.row("frames", lambda row: row["payload"]) | {"connection": b"c" * 16, "sequence": 1}
    late = row | {"kafka_offset": _next(town), "observed_at": at(3000), "kafka_timestamp": at(3600)}
    town.append("frames", late, late | {"kafka_offset": _next(town) + 1, "sequence": 2, "observed_at": at(3599)})
    assert town.failed() == []
    early = {"kafka_offset": _next(town) + 2, "sequence": 3, "observed_at": at(4200)}
    town.append("frames", late | early)
    (failed,) = town.failed()
    assert (failed.check.expectation, failed.words[0]) == (
        "expect_clocks_to_agree",
        "the clock of the bridge is 600 s ahead of the clock of the broker",
    )


@pytest.mark.parametrize(("minutes", "fails"), [(5, False), (6, True)])
def test_late_batches_are_a_fault_when_they_keep_coming(minutes: int, fails: bool, town: Town) -> None:
    """A cold start makes the batches of a minute or two late."""
    town.delete("batches", "true")
    came = [at(60 * (number % minutes)) for number in range(120)]
    row = town.row("batches")
    town.append("batches", *(row | {"closed_at": each - timedelta(seconds=11), "emitted_at": each} for each in came))
    late = [each for each in town.failed() if each.check.expectation == "expect_lateness_to_be_at_most"]
    assert [each.observed for each in late] == ["p99 11.0 s late, in 6 minutes"] * fails


def test_a_tip_is_there_again_only_where_its_batch_is(town: Town) -> None:
    assert town.failed() == []
    batch = town.row("batches")
    town.append("batch_tips", next(row for row in town.rows["batch_tips"] if row["batch_cid"] == batch["batch_cid"]))
    both = {name: value + timedelta(days=2) for name, value in batch.items() if isinstance(value, datetime)}
    (failed,) = town.failed()
    assert (failed.check.table, failed.check.expectation) == ("batch_tips", "expect_keys_to_be_unique")
    town.append("batches", batch | both)
    assert "batch_tips" not in {each.check.table for each in town.failed()}


def test_the_same_bytes_are_another_message_after_a_minute(town: Town) -> None:
    """Ids by content expire after a minute, and those of author and seqno are unique for a day."""
    row = town.row("messages", lambda row: row["type"] == "KEEPALIVE") | {"type": "DATA", "ts": None, "ver": None}
    content = row | {"message_id": f"sha256/{'0f' * 32}"}
    at, minute = row["observed_at"], 60_000_000
    assert isinstance(at, int)
    town.append("messages", content, content | {"observed_at": at + 3 * minute})
    assert town.failed() == []
    town.append("messages", content | {"observed_at": at + 3 * minute + minute // 2})
    (failed,) = town.failed()
    assert (failed.check.table, failed.check.name) == ("messages", "expect_keys_to_be_unique(by_content)")
    assert "dedupe.unsigned_ttl" in failed.hint
    town.append("messages", row | {"observed_at": at + 3 * minute})
    assert [each.check.name for each in town.failed()] == [
        "expect_keys_to_be_unique(by_author)",
        "expect_keys_to_be_unique(by_content)",
    ]


DAY = int(START.timestamp()) + 86_400
"""A time of history, s."""


def _traffic(count: int) -> list[Frame]:
    """Frames of a capture."""
    options = TrafficOptions(seed=5, reconnects=0.002, garbage=0, forged=0, impostors=0)
    traffic = Traffic(options, DAY * 1_000_000_000, 50.0, keep_ledger=False)
    frames = [generated.frame for generated in traffic.frames(messages=count)]
    for frame in frames:
        frame.origin = Frame.REPLAY
    return frames


def _ceramic_log() -> bytes:
    """Three updates a second, as js-ceramic has them: in whole seconds, and between lines of other services."""
    updates = [row for row in made_up_rows(300)["messages"] if row["type"] == "UPDATE" and row["model"]][:60]
    lines = [b"[Thu, 15 Jul 2021 13:24:33 GMT] service=http request=1"]
    for number, row in enumerate(updates):
        pairs = {"peer": NODE, "event": "received", "topic": "/ceramic/testnet-clay", "message.from": row["from_peer"]}
        message = {
            "seqno": f"{number:016x}",
            "typ": 0,
            "stream": row["stream"],
            "tip": row["tip"],
            "model": row["model"],
        }
        pairs |= {f"message.{name}": value for name, value in message.items()}
        lines.append(ceramic_line(DAY + number // 3, [(name, str(value)) for name, value in pairs.items()]))
        lines.append(b"[Thu, 15 Jul 2021 13:24:33 GMT] service=http request=1")
    return b"\n".join(lines)


def _kubo_lines() -> bytes:
    updates = [row["data"] for row in made_up_rows(300)["messages"] if row["type"] == "UPDATE"][:60]
    return b"\n".join(
        kubo_line(peer_bytes(NODE), data, number.to_bytes(8), "/ceramic/testnet-clay")
        for number, data in enumerate(updates, 1)
        if isinstance(data, bytes)
    )


NODE = "QmW4V8TbfaeSWYsbBdtqpydyid2bXkM8RFiEcCw8rHb7k2"
HISTORY_FILES = Path(__file__).resolve().parents[1] / "schemas" / "history_files"
HISTORY: dict[str, Callable[[], list[Item]]] = {
    "kiln-capture": lambda: list(_traffic(300)),
    "ceramic-log": lambda: items("ceramic-log", _ceramic_log()),
    "kubo-sub": lambda: items("kubo-sub", _kubo_lines()),
    "pubsub-trace-json": lambda: items(
        "pubsub-trace-json", gzip.decompress((HISTORY_FILES / "go_pubsub.trace.json.gz").read_bytes())
    ),
    "pubsub-trace-pb": lambda: items(
        "pubsub-trace-pb", gzip.decompress((HISTORY_FILES / "go_pubsub.trace.pb.gz").read_bytes())
    ),
}


def _in_range(table: str, row: Row, low: datetime) -> bool:
    name = {"updates": "log_time", "batches": "opened_at", "batch_tips": "", "publications": ""}.get(
        table, "observed_at"
    )
    value = row.get(name)
    at_time = datetime.fromtimestamp(value / 1e6, UTC) if isinstance(value, int) else value
    return not isinstance(at_time, datetime) or at_time >= low


def test_history_that_was_swapped_in_is_no_fault(town: Town) -> None:
    """Files of each format. The range of the swap begins in the middle of the connections and windows of a capture."""
    assert FORMATS.keys() == HISTORY.keys()
    low = datetime.fromtimestamp(DAY + 2.53, UTC)
    for number, name in enumerate(HISTORY):
        rows = rows_of_file(HISTORY[name](), -7 - number, has_lines=FORMATS[name].has_lines)
        if name == "kiln-capture":
            rows = {table: [row for row in each if _in_range(table, row, low)] for table, each in rows.items()}
            stored = {row["batch_cid"] for row in rows["batches"]}
            rows["batch_tips"] = [row for row in rows["batch_tips"] if row["batch_cid"] in stored]
        assert len(rows["copies"]) >= 20
        assert len(rows["batches"]) >= 3 or name.startswith("pubsub-trace")
        for table, each in (rows | {"publications": []}).items():
            if each:
                town.append(table, *each)
    event = {"run": "old", "event": "swapped", "happened_at": START, "range_from": low, "range_to": START, "rows": None}
    town.append("backfill_runs", event | {"details": "{}"})
    assert [each.as_json() for each in town.failed()] == []
    town.state_file.unlink()  # from scratch
    assert [each.as_json() for each in town.failed()] == []
    for view in views():
        list(query_lake(town.lake, f"SELECT * FROM {view}").rows())
    assert list(query_lake(town.lake, "SELECT * FROM sequence_gaps").rows()) == []
    assert list(query_lake(town.lake, "SELECT * FROM relays WHERE remote_peer = ''").rows()) == []


def test_batches_that_a_swap_replaced_leave_their_tips_and_receipts(town: Town) -> None:
    batch = town.row("batches")
    town.delete("batches", f"batch_cid = '{batch['batch_cid']}'")
    lost = {"batches": "expect_batches_to_follow_from_updates", "batch_tips": "expect_rows_in_tables"}
    assert {each.check.table: each.check.expectation for each in town.failed()} == lost
    event = {"run": "five", "event": "swapped", "happened_at": START, "range_from": START, "range_to": at(3600)}
    town.append("backfill_runs", event | {"rows": None, "details": "{}"})
    del lost["batch_tips"]
    assert {each.check.table: each.check.expectation for each in town.failed()} == lost


def test_rows_that_retention_removed_are_no_fault(town: Town) -> None:
    """Half of the rows of some tables are older than their retention. Any other deletion is a fault."""
    times = sorted(row["observed_at"] for row in town.rows["updates"])  # type: ignore[type-var]  # of one type
    edge = datetime.fromtimestamp(int(str(times[len(times) // 2])) / 1e6, UTC)
    tables = {"messages": "observed_at", "updates": "observed_at", "frames": "observed_at", "batches": "closed_at"}
    for table, column in tables.items():
        town.delete(table, f"{column} < '{edge.isoformat()}'")
    assert {each.check.table for each in town.failed()} >= {"frames", "copies", "batch_tips"}
    town.state_file.unlink()
    kept = dict.fromkeys(tables, datetime.now(UTC) + LATER - edge)
    assert [each.as_json() for each in town.failed(retention=kept)] == []


def test_messages_that_are_gone_are_a_fault_at_once(town: Town) -> None:
    """The query that writes `messages` has committed past their positions, so no such row may still come."""
    ids = [str(row["message_id"]) for row in town.rows["updates"]]
    gone = ", ".join(f"'{each}'" for each in ids[: len(ids) // 3])
    town.delete("messages", f"message_id IN ({gone})")
    failed = town.failed(now=datetime.now(UTC))
    assert "error" in {each.check.level for each in failed if each.check.table == "updates"}


@pytest.mark.parametrize("age", [timedelta(), timedelta(days=1_200)])
@pytest.mark.parametrize("name", ["go4nosign", "go4tt"])
def test_captures_of_other_peoples_software_give_no_failure(
    name: str, age: timedelta, tmp_path: Path, checks: list[SuiteCheck], validator: RowValidator
) -> None:
    """Replayed while a bridge runs, captures that were made long ago are neither late nor a clock's fault."""
    frames: list[Frame] = []
    replay(VECTORS / "captures" / f"{name}.rpc.gz", frames.append, now=lambda: 0.0, sleep=lambda _: None)
    for frame in frames:
        frame.observed_at -= micros(age) * 1_000
    topics = {
        option.topicid
        for frame in frames
        if not isinstance(rpc := read_rpc(frame.payload), Rejected)
        for option in rpc.subscriptions
    }
    how = DecodeConfig(bundles=BundleSet({"all": sorted(topics)}))
    rows = rows_of((frame.SerializeToString() for frame in frames), how, micros(age) + 20_000)
    lake = Lake(str(tmp_path / "lake"))
    write_rows(lake, rows)
    save_bundles(lake, how.bundles, START)  # as the query `archive` does before it reads frames
    town = Town(tmp_path, rows, checks, validator)
    assert len(rows["messages"]) > 100
    assert [each.as_json() for each in town.failed(running=True)] == []


def test_a_late_row_fills_a_gap(town: Town) -> None:
    row = town.row("frames", lambda row: row["payload"] and row["sequence"] == 5)
    town.delete("frames", f"kafka_offset = {row['kafka_offset']}")
    assert {each.check.table for each in town.failed()} == {"frames"}
    town.append("frames", row)
    assert town.failed() == []


def test_what_has_just_come_may_still_be_awaited(town: Town) -> None:
    """A receipt whose batch is in a micro-batch that not all queries have passed."""
    passed = town.versions()
    _batch_lost(town)
    results = town.check(limits=passed)
    assert [each.as_json() for each in results if not each.success] == []
    of_receipts = [each for each in results if each.check.table == "publications" and each.check.sql]
    assert {each.as_json()["not_judged"] for each in of_receipts} == {1}
    assert [each.check.table for each in town.failed()] == ["publications"]


def test_rows_that_are_gone_are_a_fault_at_once_and_stay_one_while_new_rows_wait(town: Town) -> None:
    """Most updates: the windows of the others overlap with windows that cannot be judged."""
    now = datetime.now(UTC)
    passed = town.versions()
    ids = ", ".join(f"'{row['message_id']}'" for number, row in enumerate(town.rows["updates"]) if number % 8)
    town.append("messages", town.row("messages") | {"message_id": "new"})
    town.delete("updates", f"message_id IN ({ids})")
    limits = passed | {"updates": passed["updates"] + 1}
    found = set[str]()
    for later in (timedelta(), timedelta(days=9)):
        results = town.check(now + later, limits=limits)
        errors = {each.check.id for each in results if each.is_error}
        assert errors >= found, "a fault has cleared itself"
        found |= errors
        assert {each.pending for each in results if each.check.table == "messages" and each.check.sql} == {1}
    assert found


def _select_follow(checks: Sequence[SuiteCheck]) -> SuiteCheck:
    return next(check for check in checks if check.expectation == "expect_batches_to_follow_from_updates")


def test_a_batch_without_its_window_is_one_until_it_is_gone(town: Town, checks: list[SuiteCheck]) -> None:
    here = town.only(_select_follow(checks))
    assert here.failed() == []
    before = here.versions()["batches"]
    cid = _own_window(here)
    for later in (timedelta(), timedelta(days=1), timedelta(days=9)):
        (failed,) = here.failed(now=datetime.now(UTC) + later)
        assert cid in {key["batch_cid"] for key in failed.keys}
        here.append("updates", here.row("updates") | {"separator_key": None, "separator_value": None})
    here.restore("batches", before)
    assert here.failed() == []


def test_a_check_that_goes_on_finds_the_windows_again(
    tmp_path: Path, checks: list[SuiteCheck], validator: RowValidator
) -> None:
    """The tables grow by half a minute at a time, and at last a batch is missing. An update is in the log 50 ms after
    it was heard, so by then all of a window is there."""
    rows = made_up_rows(480, rate=4.0)
    town = Town(tmp_path, rows, [_select_follow(checks)], validator)
    town.lake.create(TABLES)
    logged = [(int(str(row["log_time"])), row) for row in rows["updates"]]
    ended = [(int(str(row["closed_at"])) + 50_000, row) for row in rows["batches"]]
    last = {_owner(row): time for time, row in logged}
    low = 0
    for cut in [logged[len(logged) * quarter // 4 - 1][0] for quarter in (1, 2, 3)]:
        town.append("updates", *(row for time, row in logged if low < time <= cut))
        town.append("batches", *(row for time, row in ended if low < time <= cut))
        low = cut
        assert [each.as_json() for each in town.failed()] == []
    town.append("updates", *(row for time, row in logged if time > low))
    lost = next(row for time, row in ended if low < time <= last[_owner(row)])
    town.append("batches", *(row for time, row in ended if time > low and row is not lost))
    (failed,) = town.failed()
    assert [key["batch_cid"] for key in failed.keys] == [lost["batch_cid"]]
    town.append("batches", lost)
    assert town.failed() == []


def _own_check(folder: Path, header: str, sql: str) -> SuiteCheck:
    file = folder / "messages.own_rule.sql"
    file.write_text(f"-- A rule.\n-- grain: a message\n-- level: error\n-- hint: look\n{header}{sql}\n")
    (check,) = read_suites([file])
    return check


@pytest.mark.parametrize(("header", "is_found"), [("", False), ("-- history: 9d\n", True)])
def test_a_run_compares_new_rows_with_those_of_the_time_that_a_check_names(
    header: str, is_found: bool, town: Town, tmp_path: Path
) -> None:
    """One day, without a name."""
    count = len(town.rows["messages"])
    here = town.only(_own_check(tmp_path, header, f"SELECT 1 AS n FROM messages HAVING count(*) > {count}"))
    later = datetime.now(UTC) + timedelta(days=3)
    assert here.failed(now=later, recent=True) == []
    here.append("messages", here.row("messages"))
    assert bool(here.failed(now=later, recent=True)) == is_found
    assert here.failed(now=later)


def test_a_commit_is_judged_at_the_age_that_a_check_names(town: Town, tmp_path: Path) -> None:
    sql = "SELECT message_id FROM new_messages WHERE message_id = 'new'"
    here = town.only(_own_check(tmp_path, "-- after: 10m\n", sql))
    assert here.failed() == []
    here.append("messages", here.row("messages") | {"message_id": "new"})
    now = datetime.now(UTC)
    for minutes in (0, 9, 11):
        (result,) = here.check(now=now + timedelta(minutes=minutes))
        assert result.success == bool(result.pending) == (minutes < 10)


def test_what_is_passed_may_fall_behind_what_was_checked(town: Town, tmp_path: Path) -> None:
    """A run has noted all, and the next one begins: nothing is read again, and nothing is left out."""
    here = town.only(_own_check(tmp_path, "", "SELECT message_id FROM new_messages WHERE message_id LIKE 'new%'"))
    assert here.failed() == []
    before = here.versions()
    for name in ("messages", "updates"):
        here.append(name, here.row(name))
    assert here.failed() == []
    assert here.failed(limits=before) == []
    here.append("messages", here.row("messages") | {"message_id": "new"})
    (result,) = here.check(limits=before)
    assert (result.success, result.pending) == (True, 2)
    assert [each.count for each in here.failed()] == [1]


def test_the_faults_are_in_the_documentation() -> None:
    page = (ROOT / "docs" / "quality.md").read_text()
    rows = re.findall(r"^\| (.+) \| `(\w+)` \| `(\w+)` \| (\w+) \|$", page, re.MULTILINE)
    assert rows == [fault[:4] for fault in FAULTS]


DELETED = (
    *("frames", "copies", "subscriptions", "controls", "messages", "updates", "batches", "batch_tips", "tips"),
    "publications",
)


@pytest.mark.parametrize("table", DELETED)
def test_a_third_of_the_rows_of_a_table_lost_is_an_error_at_once(table: str, town: Town) -> None:
    rows = DeltaTable(town.lake.table(table)).to_pyarrow_table()
    kept = [number for number in range(rows.num_rows) if number % 3]
    write_deltalake(town.lake.table(table), rows.take(kept), mode="overwrite")
    failed = town.failed(now=datetime.now(UTC))
    assert any(each.is_error for each in failed), [each.as_json() for each in failed]


def test_a_lost_genesis_bundle_or_rejected_copy_is_an_error(town: Town) -> None:
    """Tables of which synthetic traffic has no row."""
    update = town.row("updates", lambda row: row["separator_key"]) | {"separator_source": "genesis"}
    town.append("updates", update | {"message_id": town.row("messages")["message_id"], "log_offset": 10_000_000})
    entry = town.row("subscriptions") | {"topic_source": "index", "topic_index": 7, "topic": "/of/a/bundle"}
    town.append("subscriptions", entry | {"entry_index": 1_000})
    names = {each.check.name for each in town.failed() if each.is_error}
    assert {"expect_rows_in_tables(streams)", "expect_rows_in_tables(bundles)"} <= names


def test_an_index_that_nothing_resolves_is_no_fault_of_the_bundles(town: Town) -> None:
    entry = town.row("controls") | {"topic_source": "index", "topic_index": 7, "topic": None}
    town.append("controls", entry | {"entry_index": 1_000})
    assert "expect_rows_in_tables(bundles)" not in {each.check.name for each in town.failed()}
