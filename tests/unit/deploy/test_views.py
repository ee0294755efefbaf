"""The views of `kiln sql`, and `kiln estimate`: over tables with rows, tables with none, and no tables at all."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given
from hypothesis import strategies as st
from kit.log_model import Update, block_of, windows_of

from deploy.cli.app import run_command
from deploy.sql.ask import SqlError, ask
from deploy.sql.estimate import LoggedUpdate, estimate, parse_windows, read_log
from deploy.sql.views import LATEST_WITHIN, VIEWS
from pipelines.lake.lake import Lake
from pipelines.logic.batching import LogRecord, batch_partition
from pipelines.logic.windows import PartitionWindows
from schemas.batch import read_block
from schemas.cid import block_cid, cid_bytes, cid_text
from schemas.pubsub import write_batch_update, write_update
from schemas.records import Coordinates, Epoch, SeparatorRecord, SeparatorSource, UpdateRecord, decode_batch, encode
from schemas.streamid import StreamID
from schemas.tables import TABLES
from schemas.topics import MAX_KEY, Separator, separator_value, topic_name

AT = datetime(2025, 3, 1, 12, tzinfo=UTC)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SECOND = 1_000_000

MODEL = Separator("model", separator_value(b"one"))
OTHER = Separator('a/"ключ"', separator_value(b"two"))

Row = Mapping[str, object]

_DEFAULTS: dict[str, object] = {
    "string": "",
    "binary": b"",
    "timestamp": AT,
    "int": 0,
    "bigint": 0,
    "boolean": False,
    "array<string>": [],
}


def stream(number: int) -> str:
    return StreamID(3, block_cid(b"stream%d" % number)).text


def tip(number: int) -> str:
    return cid_text(block_cid(b"tip%d" % number, 0x85))


def after(seconds: float) -> datetime:
    return AT + timedelta(seconds=seconds)


def fill(lake: Path, name: str, rows: Iterable[Row]) -> None:
    """Append rows to a table; columns that are not given have a value of no interest, or null where they may."""
    Lake(str(lake)).create((name,))
    whole = [
        {
            **{column.name: None if column.nullable else _DEFAULTS[column.type] for column in TABLES[name].columns},
            "network": "clay",
            "origin": "LIVE",
            **row,
        }
        for row in rows
    ]
    names = [column.name for column in TABLES[name].columns]
    schema = DeltaTable(str(lake / name)).to_pyarrow_dataset().schema
    table = pa.Table.from_pylist([{column: row[column] for column in names} for row in whole], schema=schema)
    write_deltalake(str(lake / name), table, mode="append")


def rows_of(lake: Path, sql: str) -> list[dict[str, object]]:
    answer = ask(Lake(str(lake)), sql)
    return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows()]


# ---------------------------------------------------------------- any lake


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_over_no_tables_has_no_rows(view: str, tmp_path: Path) -> None:
    assert rows_of(tmp_path / "lake", f"SELECT * FROM {view}") == []


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_over_empty_tables_has_the_same_columns(view: str, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    missing = ask(Lake(str(lake)), f"SELECT * FROM {view}")
    Lake(str(lake)).create(TABLES)
    empty = ask(Lake(str(lake)), f"SELECT * FROM {view}")
    assert empty.columns == missing.columns
    assert list(empty.rows()) == list(missing.rows()) == []


@pytest.mark.parametrize("view", VIEWS.values(), ids=list(VIEWS))
def test_a_view_over_some_of_its_tables(view: object, tmp_path: Path) -> None:
    name, tables = next((each.name, each.tables) for each in VIEWS.values() if each is view)
    for number, table in enumerate(tables):
        lake = tmp_path / str(number)
        Lake(str(lake)).create((table,))
        assert rows_of(lake, f"SELECT count(*) AS n FROM {name}") == [{"n": 0}]


def test_views_are_listed_and_join_with_tables(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    fill(lake, "tips", [{"stream": stream(1), "tip": tip(1), "source": "update"}])
    assert {row["name"] for row in rows_of(lake, "SHOW TABLES")} == {"tips", *VIEWS}
    assert rows_of(lake, "SELECT count(*) AS n FROM LATEST_TIPS JOIN tips USING (network, stream, tip)") == [{"n": 1}]
    with pytest.raises(SqlError, match="there are: tips, latest_tips, misplaced, batch_savings"):
        ask(Lake(str(lake)), "SELECT * FROM latest")


# ---------------------------------------------------------------- latest_tips


def heard(number: int, seconds: float, source: str = "update", of: int = 1, network: str = "clay") -> Row:
    return {
        "network": network,
        "stream": stream(of),
        "tip": tip(number),
        "source": source,
        "cid": "b" if source == "batch" else None,
        "observed_at": after(seconds),
    }


def said(author: str | None, number: int, seconds: float) -> Row:
    return {
        "message": f"{author}/{number}/{seconds}",
        "from_peer": author,
        "stream": stream(1),
        "tip": tip(number),
        "observed_at": after(seconds),
    }


def latest(lake: Path, of: int = 1) -> list[int]:
    """The numbers of the latest tips of a stream."""
    found = {row["tip"] for row in rows_of(lake, f"SELECT * FROM latest_tips WHERE stream = '{stream(of)}'")}
    return [number for number in range(10) if tip(number) in found]


def test_latest_tips_are_the_newest_of_each_stream_and_network(tmp_path: Path) -> None:
    fill(
        tmp_path,
        "tips",
        [heard(1, 0), heard(2, 60), heard(3, 5, of=2), heard(4, 1, network="mainnet"), heard(2, 900)],
    )
    found = rows_of(tmp_path, "SELECT network, stream, tip, first_heard, sources, tips FROM latest_tips ORDER BY ALL")
    assert sorted((row["network"], row["stream"], row["tip"], row["first_heard"]) for row in found) == sorted(
        [
            ("clay", stream(1), tip(2), after(60)),
            ("clay", stream(2), tip(3), after(5)),
            ("mainnet", stream(1), tip(4), after(1)),
        ]
    )
    assert all((row["sources"], row["tips"]) == (["update"], 1) for row in found)


def test_tips_that_conflict_are_all_kept(tmp_path: Path) -> None:
    fill(
        tmp_path,
        "tips",
        [heard(1, 0), heard(2, 100), heard(3, 100), heard(4, 100 + LATEST_WITHIN, "batch"), heard(2, 101, "batch")],
    )
    fill(tmp_path, "updates", [said("a", 1, 0), said("a", 2, 100), said("b", 3, 100)])
    assert latest(tmp_path) == [2, 3, 4]
    found = rows_of(tmp_path, f"SELECT sources, tips FROM latest_tips WHERE tip = '{tip(2)}'")
    assert found == [{"sources": ["batch", "update"], "tips": 3}]


def test_a_later_word_of_the_same_author_takes_an_earlier_back(tmp_path: Path) -> None:
    fill(tmp_path, "tips", [heard(1, 0), heard(2, 1), heard(3, 2), heard(4, 3, "batch"), heard(5, 2)])
    fill(
        tmp_path,
        "updates",
        [said("a", 1, 0), said("a", 2, 1), said("b", 2, 1.5), said("a", 3, 2), said(None, 5, 2), said("a", 4, 1)],
    )
    # 1: taken back; 2: b still says so; 3: the last word of a; 4: also out of a batch; 5: nobody knows whose word
    assert latest(tmp_path) == [2, 3, 4, 5]


def test_an_author_may_go_back_to_an_older_tip(tmp_path: Path) -> None:
    fill(tmp_path, "tips", [heard(1, 0), heard(2, 100)])
    fill(tmp_path, "updates", [said("a", 1, 0), said("a", 2, 100), said("a", 1, 200)])
    assert latest(tmp_path) == [1]


# ---------------------------------------------------------------- misplaced


def on(topic: str, kind: str, message: str, **columns: object) -> Row:
    return {"message": message, "topic": topic, "type": kind, "observed_at": AT, **columns}


def test_misplaced_are_messages_on_the_topic_of_another_separator(tmp_path: Path) -> None:
    model, other = topic_name("clay", MODEL), topic_name("clay", OTHER)
    fill(
        tmp_path,
        "streams",
        [
            {"stream": stream(1), "separator_key": MODEL.key, "separator_value": MODEL.value, "source": "genesis"},
            {"stream": stream(2), "separator_key": OTHER.key, "separator_value": OTHER.value, "source": "genesis"},
            {"stream": stream(3), "source": "genesis"},
            {"stream": stream(4), "separator_key": MODEL.key, "separator_value": MODEL.value, "source": "model"},
            {
                "network": "mainnet",
                "stream": stream(5),
                "separator_key": "a",
                "separator_value": "k1",
                "source": "genesis",
            },
        ],
    )
    fill(
        tmp_path,
        "messages",
        [
            on(model, "UPDATE", "right", stream=stream(1)),
            on(other, "UPDATE", "wrong", stream=stream(1), from_peer="p"),
            on(model, "QUERY", "asked", stream=stream(2)),
            on(model, "RESPONSE", "answered", tips={stream(1): tip(1), stream(2): tip(2), stream(3): tip(3)}),
            on("/ceramic/clay", "UPDATE", "network topic", stream=stream(1)),
            on("/ceramic/clay/", "QUERY", "with its slash", stream=stream(1)),
            on(f"/ceramic/clay/{MODEL.value}", "UPDATE", "no topic of a separator", stream=stream(2)),
            on(model.upper(), "UPDATE", "nor this", stream=stream(2)),
            on(f"/ceramic/clay/sep/{'a' * (MAX_KEY + 1)}/k1", "UPDATE", "nor this", stream=stream(2)),
            on(other, "UPDATE", "no separator", stream=stream(3)),
            on(other, "UPDATE", "only claimed", stream=stream(4)),
            on(other, "UPDATE", "known elsewhere", stream=stream(5)),
            on(other, "UPDATE", "unknown", stream=stream(6)),
            on(other, "KEEPALIVE", "of no stream"),
            on(other, "BATCH_UPDATE", "of many", sep="model/k1"),
            on("", "UPDATE", "no topic", stream=stream(1)),
        ],
    )
    found = rows_of(tmp_path, "SELECT * EXCLUDE (observed_at, network, origin) FROM misplaced ORDER BY message")
    assert found == [
        {
            "message": message,
            "type": kind,
            "topic": topic,
            "topic_key": place.key,
            "topic_value": place.value,
            "stream": of,
            "separator_key": known.key,
            "separator_value": known.value,
            "from_peer": author,
        }
        for message, kind, topic, place, of, known, author in [
            ("answered", "RESPONSE", model, MODEL, stream(2), OTHER, None),
            ("asked", "QUERY", model, MODEL, stream(2), OTHER, None),
            ("wrong", "UPDATE", other, OTHER, stream(1), MODEL, "p"),
        ]
    ]


# ---------------------------------------------------------------- savings

Logged = tuple[int, Separator | None, int, int]
"""time in µs, separator, stream and tip"""


def model_log(records: Sequence[Logged]) -> list[tuple[int, Update | None]]:
    return [
        (at, Update(("clay", "LIVE", *separator), stream(of), tip(number)) if separator else None)
        for at, separator, of, number in records
    ]


def logged(records: Sequence[Logged], partition: int = 0) -> list[LoggedUpdate]:
    clock = 0
    out = []
    for at, separator, of, number in records:
        clock = max(clock, at)
        size = len(write_update(stream(of), tip(number)))
        out.append(LoggedUpdate(partition, clock, "clay", "LIVE", separator, stream(of), cid_bytes(tip(number)), size))
    return out


def expected_batches(records: Sequence[Logged], window: int) -> dict[Separator, list[bytes]]:
    """By separator, the blocks that the model of the log makes."""
    log = [*model_log(records), (10**12, None)]
    blocks: dict[Separator, list[bytes]] = {}
    for made in windows_of(log, window):
        blocks.setdefault(Separator(*made.owner[2:]), []).append(block_of(made.tips))
    return blocks


logs = st.lists(
    st.tuples(st.integers(0, 8 * SECOND), st.sampled_from([MODEL, OTHER, None]), st.integers(0, 3), st.integers(0, 3)),
    max_size=25,
)


@given(logs, st.sampled_from([1, SECOND // 2, SECOND, 3 * SECOND]))
def test_an_estimate_is_what_the_model_of_the_log_makes(records: list[Logged], window: int) -> None:
    found = {saving.separator: saving for saving in estimate(logged(records), [window])}
    assert found.keys() == {separator for _, separator, _, _ in records}
    blocks = expected_batches(records, window)
    for separator, saving in found.items():
        of = [record for record in records if record[1] == separator]
        made = blocks[separator] if separator else []
        size = len(write_batch_update(separator, cid_text(block_cid(b"")))) if separator else 0
        before = len(of), sum(len(write_update(stream(each), tip(number))) for _, _, each, number in of)
        assert (saving.updates, saving.update_bytes) == before
        assert saving.batches == len(made)
        assert saving.block_bytes == sum(map(len, made))
        assert saving.batch_bytes == len(made) * size
        assert saving.if_kept == (before[0] + len(made), before[1] + len(made) * size)
        assert saving.if_stopped == ((len(made), len(made) * size) if separator else before)


def test_every_window_and_partition_has_its_own_estimate() -> None:
    one = [(0, MODEL, 1, 1), (SECOND, MODEL, 1, 2), (5 * SECOND, MODEL, 1, 3)]
    two = [(2 * SECOND, OTHER, 2, 1), (2 * SECOND, None, 3, 1)]
    found = estimate([*logged(one), *logged(two, 1)], [SECOND, 5 * SECOND, 60 * SECOND])
    assert {(each.separator, each.window // SECOND): each.batches for each in found} == {
        (MODEL, 1): 3,
        (MODEL, 5): 2,
        (MODEL, 60): 1,
        (OTHER, 1): 1,
        (OTHER, 5): 1,
        (OTHER, 60): 1,
        (None, 1): 0,
        (None, 5): 0,
        (None, 60): 0,
    }


def test_blocks_that_are_cut_are_messages_each() -> None:
    records: list[Logged] = [(0, MODEL, number, number) for number in range(40)]
    (whole,) = estimate(logged(records), [SECOND])
    (cut,) = estimate(logged(records), [SECOND], limit=1_000)
    assert whole.batches == 1
    assert cut.batches >= whole.block_bytes // 1_000
    assert cut.batch_bytes == cut.batches * whole.batch_bytes


def run_of(records: Sequence[Logged], window: int) -> tuple[list[Row], list[Row], list[Row]]:
    """Rows of updates, messages and batches as the queries would write them, the last windows being open still."""
    log: list[LogRecord] = []
    updates: list[Row] = []
    messages: list[Row] = []
    batches: list[Row] = []
    for offset, (at, separator, of, number) in enumerate(records):
        named = SeparatorRecord(*separator) if separator else None
        source: SeparatorSource | None = "topic" if separator else None
        message = f"m{offset}"
        log.append(
            LogRecord(
                0,
                offset,
                at,
                encode(
                    UpdateRecord(
                        network="clay",
                        origin="LIVE",
                        separator=named,
                        separator_source=source,
                        stream=stream(of),
                        tip=tip(number),
                        from_=None,
                        message=message,
                        epoch=Epoch("q", 1),
                        frame=Coordinates(0, offset, 0),
                        observed_at=at,
                    )
                ),
            )
        )
        row = {"message": message, "stream": stream(of), "tip": tip(number)}
        place = {"separator_key": named and named.key, "separator_value": named and named.value}
        stamp = EPOCH + timedelta(microseconds=max(each.stamp for each in log))
        updates.append({**row, **place, "updated_at": stamp, "log_offset": offset})
        messages.append({**row, "type": "UPDATE", "data": write_update(stream(of), tip(number))})
    for output in batch_partition(PartitionWindows(window), iter(log), 256_000):
        made = decode_batch(output.value)
        tips = read_block(made.block)
        batches.append(
            {
                "cid": made.cid,
                "separator_key": made.separator.key,
                "separator_value": made.separator.value,
                "opened_at": EPOCH + timedelta(microseconds=made.opened_at),
                "closed_at": EPOCH + timedelta(microseconds=made.closed_at),
                "streams": len(tips),
                "bytes": len(made.block),
            }
        )
    return updates, messages, batches


def by_separator(rows: Iterable[Mapping[str, object]]) -> dict[tuple[object, object], Mapping[str, object]]:
    return {(row["separator_key"], row["window_seconds"]): row for row in rows}


def test_savings_of_the_batches_that_were_made_are_those_of_the_estimate(tmp_path: Path) -> None:
    choose = random.Random(7)
    records = [
        (choose.randrange(30 * SECOND), choose.choice([MODEL, OTHER, None]), choose.randrange(9), choose.randrange(99))
        for _ in range(300)
    ]
    records.sort(key=lambda record: record[0])
    end: list[Logged] = [(90 * SECOND, Separator("end", "k1"), 1, 1)]  # whose window stays open
    updates, messages, batches = run_of([*records, *end], 2 * SECOND)
    fill(tmp_path, "updates", updates)
    fill(tmp_path, "messages", messages)
    fill(tmp_path, "batches", batches)
    found = by_separator(rows_of(tmp_path, "SELECT * FROM batch_savings"))
    savings = estimate(read_log(Lake(str(tmp_path))), [2 * SECOND])
    assert savings == [*estimate(logged(records), [2 * SECOND]), *estimate(logged(end), [2 * SECOND])]
    for saving in savings[:-1]:
        row = found.pop((saving.separator and saving.separator.key, 2.0 if saving.separator else None))
        assert (row["messages_before"], row["bytes_before"]) == (saving.updates, saving.update_bytes)
        assert (row["batches"], row["block_bytes"]) == (saving.batches, saving.block_bytes)
        assert (row["messages_if_stopped"], row["bytes_if_stopped"]) == saving.if_stopped
        assert (row["messages_if_kept"], row["bytes_if_kept"]) == saving.if_kept
    assert found == {}


def test_savings_are_told_apart_by_the_window_that_was_in_force(tmp_path: Path) -> None:
    # the third, when the first window has just ended, is in one that stays open
    early: list[Logged] = [(0, MODEL, 1, 1), (SECOND - 1, MODEL, 2, 2), (SECOND, MODEL, 1, 1)]
    late: list[Logged] = [(100 * SECOND, MODEL, 1, 3), (104 * SECOND, MODEL, 1, 4), (200 * SECOND, MODEL, 9, 9)]
    for records, window, name in ((early, SECOND, "a"), (late, 5 * SECOND, "b")):
        updates, _, batches = run_of(records, window)
        fill(tmp_path, "updates", [{**row, "message": f"{name}{row['message']}"} for row in updates])
        fill(tmp_path, "batches", batches)
    found = by_separator(rows_of(tmp_path, "SELECT * FROM batch_savings"))
    assert {place: (row["messages_before"], row["messages_if_stopped"]) for place, row in found.items()} == {
        ("model", 1.0): (2, 1),
        ("model", 5.0): (2, 1),
    }


def test_an_update_whose_message_is_not_there_yet_counts_by_its_newest_form(tmp_path: Path) -> None:
    updates, _, batches = run_of([(0, MODEL, 1, 1), (5 * SECOND, MODEL, 1, 2)], SECOND)
    fill(tmp_path, "updates", updates)
    fill(tmp_path, "batches", batches)
    size = len(write_update(stream(1), tip(1)))
    assert rows_of(tmp_path, "SELECT bytes_before FROM batch_savings") == [{"bytes_before": size}]
    assert [each.size for each in read_log(Lake(str(tmp_path)))] == [size, size]


def test_windows_of_the_command_line() -> None:
    assert parse_windows("1s,5s, 30s,1000ms") == (SECOND, 5 * SECOND, 30 * SECOND)
    for text in ("", "1", "1s,", "0s", "1s,0ms", "1s;5s"):
        with pytest.raises(ValueError, match=r"duration|nothing"):
            parse_windows(text)


def test_estimate_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILN_STATE", str(tmp_path))
    assert run_command(["estimate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"totals": [], "separators": []}
    records: list[Logged] = [(0, MODEL, 1, 1), (SECOND, MODEL, 1, 2), (2 * SECOND, None, 2, 2)]
    fill(tmp_path / "lake", "updates", run_of(records, SECOND)[0])
    assert Lake(str(tmp_path / "lake")).tables() == ("updates",)
    assert run_command(["estimate", "--json", "--window", "1s,5s"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["window_seconds"], row["separators"], row["messages_if_stopped"]) for row in found["totals"]] == [
        (1.0, 1, 3),
        (5.0, 1, 2),
    ]
    assert {(row["separator_value"], row["window_seconds"], row["batches"]) for row in found["separators"]} == {
        (MODEL.value, 1.0, 2),
        (MODEL.value, 5.0, 1),
        (None, 1.0, 0),
        (None, 5.0, 0),
    }
    assert run_command(["estimate", "--window", "5s", "--rows", "1"]) == 0
    text = capsys.readouterr().out
    assert "first 1 rows; --json prints all" in text
    assert run_command(["estimate", "--window", "soon"]) == 2
    assert "--window soon: expected a duration" in capsys.readouterr().err
