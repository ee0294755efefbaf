"""The views of `kiln sql`, and `kiln estimate`: over tables with rows, tables with none, and no tables at all."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kiln.deploy.cli.app import run_command
from kiln.deploy.query.ask import SqlError, query_lake
from kiln.deploy.query.estimate import ReceivedUpdate, estimate_savings, parse_windows, read_received_updates
from kiln.pipelines.batch.windows import PartitionWindows
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.delta.views import views
from kiln.schemas.kafka.records import (
    BatchRecord,
    Coordinates,
    Epoch,
    Origin,
    SeparatorRecord,
    UpdateRecord,
    decode_batch,
    encode,
)
from kiln.schemas.wire.batch_block import read_block
from kiln.schemas.wire.cid import cid_bytes, cid_text, compute_cid
from kiln.schemas.wire.pubsub import write_batch_update, write_update
from kiln.schemas.wire.streamid import StreamID
from kiln.schemas.wire.topics import MAX_KEY, Separator, encode_separator_value, format_separator, format_topic
from kit.log_model import block_of
from kit.plain_batcher import LogRecord, batch_partition
from kit.small_lake import append

AT = datetime(2025, 3, 1, 12, tzinfo=UTC)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SECOND = 1_000_000
VIEWS = views()
LATEST_WITHIN = 10
"""s, as in latest_tips.sql"""
SQL_PAGE = Path(__file__).resolve().parents[3] / "docs" / "SQL.md"

MODEL = Separator("model", encode_separator_value(b"one"))
OTHER = Separator('a/"ключ"', encode_separator_value(b"two"))

Row = Mapping[str, object]


def stream(number: int) -> str:
    return StreamID(3, compute_cid(b"stream%d" % number)).text


def tip(number: int) -> str:
    return cid_text(compute_cid(b"tip%d" % number, 0x85))


def after(seconds: float) -> datetime:
    return AT + timedelta(seconds=seconds)


def fill(lake: Path, name: str, rows: Iterable[Row]) -> None:
    """Append rows to a table; columns that are not given have a value of no interest, or null where they may."""
    Lake(str(lake)).create((name,))
    append(Lake(str(lake)), name, rows)


def rows_of(lake: Path, sql: str) -> list[dict[str, object]]:
    answer = query_lake(Lake(str(lake)), sql)
    return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows()]


# ---------------------------------------------------------------- any lake


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_over_no_tables_has_no_rows(view: str, tmp_path: Path) -> None:
    assert rows_of(tmp_path / "lake", f"SELECT * FROM {view}") == []


@pytest.fixture(scope="module")
def empty_lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """All tables, without rows."""
    lake = Lake(str(tmp_path_factory.mktemp("empty") / "lake"))
    lake.create(TABLES)
    return lake


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_over_empty_tables_has_the_same_columns(view: str, empty_lake: Lake, tmp_path: Path) -> None:
    missing = query_lake(Lake(str(tmp_path)), f"SELECT * FROM {view}")
    empty = query_lake(empty_lake, f"SELECT * FROM {view}")
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
    with pytest.raises(SqlError, match=f"Tables and views: tips, {', '.join(VIEWS)}"):
        query_lake(Lake(str(lake)), "SELECT * FROM latest")


# ---------------------------------------------------------------- latest_tips


def heard(number: int, seconds: float, source: str = "update", of: int = 1, network: str = "clay") -> Row:
    return {
        "network": network,
        "stream": stream(of),
        "tip": tip(number),
        "source": source,
        "batch_cid": "b" if source == "batch" else None,
        "observed_at": after(seconds),
    }


def said(author: str | None, number: int, seconds: float) -> Row:
    return {
        "message_id": f"{author}/{number}/{seconds}",
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


def test_the_tip_to_which_its_author_returns_is_the_latest(tmp_path: Path) -> None:
    """Also if another author still stands by a tip that was observed in between."""
    fill(tmp_path, "tips", [heard(1, 0), heard(2, 100), heard(1, 200)])
    fill(tmp_path, "updates", [said("a", 1, 0), said("a", 2, 100), said("a", 1, 200)])
    assert latest(tmp_path) == [1]
    fill(tmp_path / "two", "tips", [heard(1, 0), heard(2, 50), heard(3, 100), heard(1, 200)])
    fill(
        tmp_path / "two",
        "updates",
        [said("a", 1, 0), said("a", 2, 50), said("b", 3, 100), said("a", 1, 200)],
    )
    assert latest(tmp_path / "two") == [1]
    repeated = tmp_path / "repeated a day later by another, who never had another tip"
    fill(repeated, "tips", [heard(1, 0), heard(2, 100), heard(1, 90_000)])
    fill(repeated, "updates", [said("a", 1, 0), said("a", 2, 100), said("b", 1, 90_000)])
    assert latest(repeated) == [2]


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


def test_a_tip_that_is_heard_again_is_as_old_as_at_first(tmp_path: Path) -> None:
    fill(tmp_path, "tips", [heard(1, 0), heard(2, 100), heard(1, 101, "batch")])
    fill(tmp_path, "updates", [said("a", 1, 0), said("b", 2, 100)])
    assert latest(tmp_path) == [2]


# ---------------------------------------------------------------- batched_updates


def test_an_update_is_in_the_first_batch_that_closed_after_it_was_heard(tmp_path: Path) -> None:
    separator = {"separator_key": MODEL.key, "separator_value": MODEL.value}
    made = [("first", 0), ("second", 5), ("same", 10), ("same", 20)]
    fill(
        tmp_path,
        "batches",
        [
            {
                **separator,
                "batch_cid": cid,
                "opened_at": after(at),
                "closed_at": after(at + 1),
                "emitted_at": after(at + 2),
            }
            for cid, at in made
        ],
    )
    held = [("first", 1), ("second", 1), ("same", 2)]
    fill(tmp_path, "batch_tips", [{"batch_cid": cid, "stream": stream(of), "tip": tip(of)} for cid, of in held])
    heard_at = [(1, 0.5), (1, 5.5), (1, 6), (2, 10.5), (2, 20.5), (2, 30)]
    fill(
        tmp_path,
        "updates",
        [
            {
                **separator,
                "message_id": f"{at}",
                "stream": stream(of),
                "tip": tip(of),
                "observed_at": after(at),
                "log_time": after(at + 1),
            }
            for of, at in heard_at
        ],
    )
    found = rows_of(tmp_path, "SELECT batch_cid, opened_at FROM batched_updates ORDER BY heard_at")
    expected = [*made[:2], None, *made[2:], None]
    assert [(row["batch_cid"], row["opened_at"]) for row in found] == [
        (None, None) if each is None else (each[0], after(each[1])) for each in expected
    ]


def test_a_tip_is_held_by_its_first_batch_also_where_the_batch_was_made_again_days_later(tmp_path: Path) -> None:
    """`sink` forgets after `dedupe.signed_ttl` that the rows of `batch_tips` are there."""
    separator = {"separator_key": MODEL.key, "separator_value": MODEL.value}
    times = [
        {"opened_at": after(at), "closed_at": after(at + 1), "emitted_at": after(at + 2)} for at in (0, 3 * 86_400)
    ]
    fill(tmp_path, "batches", [{**separator, "batch_cid": "same", **each} for each in times])
    fill(tmp_path, "batch_tips", 2 * [{"batch_cid": "same", "stream": stream(1), "tip": tip(1)}])
    found = rows_of(tmp_path, "SELECT opened_at, earlier_closed_at FROM held_again")
    assert [tuple(row.values()) for row in found] == [(after(3 * 86_400), after(1))]


# ---------------------------------------------------------------- misplaced


def on(topic: str, kind: str, message: str, **columns: object) -> Row:
    return {"message_id": message, "topic": topic, "type": kind, "observed_at": AT, **columns}


def test_misplaced_are_messages_on_the_topic_of_another_separator(tmp_path: Path) -> None:
    model, other = format_topic("clay", MODEL), format_topic("clay", OTHER)
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
            on(other, "BATCH_UPDATE", "of another", sep="model/k1", from_peer="q"),
            on(other, "BATCH_UPDATE", "of this one", sep=format_separator(OTHER)),
            on("/ceramic/clay", "BATCH_UPDATE", "of any", sep="model/k1"),
            on(other.replace(OTHER.value, OTHER.value[1:]), "UPDATE", "short", stream=stream(1)),
            on(model.replace(MODEL.value, MODEL.value[1:]), "UPDATE", "right, if short", stream=stream(1)),
            on("", "UPDATE", "no topic", stream=stream(1)),
        ],
    )
    found = rows_of(tmp_path, "SELECT * EXCLUDE (observed_at, network, origin) FROM misplaced ORDER BY message_id")
    assert found == [
        {
            "message_id": message,
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
            ("of another", "BATCH_UPDATE", other, OTHER, None, Separator("model", "k1"), "q"),
            ("short", "UPDATE", other.replace(OTHER.value, OTHER.value[1:]), OTHER, stream(1), MODEL, None),
            ("wrong", "UPDATE", other, OTHER, stream(1), MODEL, "p"),
        ]
    ]


# ---------------------------------------------------------------- false claims


def test_false_claims_are_tips_in_batches_of_another_separator_than_the_genesis_names(tmp_path: Path) -> None:
    def batch(cid: str, separator: Separator, network: str = "clay") -> Row:
        named = {"separator_key": separator.key, "separator_value": separator.value}
        return {"batch_cid": cid, "network": network, "closed_at": after(1), "opened_at": AT, **named}

    def known(of: int, separator: Separator | None, source: str = "genesis") -> Row:
        named = {} if separator is None else {"separator_key": separator.key, "separator_value": separator.value}
        return {"stream": stream(of), "source": source, **named}

    one_cid = [batch("both", MODEL), batch("both", OTHER)]  # the same tips under two separators are the same block
    fill(tmp_path, "batches", [batch("mixed", MODEL), *one_cid, batch("elsewhere", OTHER, "mainnet")])
    held = [("mixed", 1), ("mixed", 2), ("mixed", 3), ("mixed", 4), ("mixed", 5), ("both", 1), ("elsewhere", 1)]
    fill(tmp_path, "batch_tips", [{"batch_cid": cid, "stream": stream(of), "tip": tip(of)} for cid, of in held])
    # 3: no separator; 4: claimed alone; 5: not known
    fill(tmp_path, "streams", [known(1, MODEL), known(2, OTHER), known(3, None), known(4, OTHER, "model")])
    heard = [(1, "topic", 5), (1, "genesis", 9), (1, "genesis", 7), (2, "topic", 3)]
    fill(
        tmp_path,
        "updates",
        [
            {"message_id": f"{at}", "stream": stream(of), "separator_source": source, "log_time": after(at)}
            for of, source, at in heard
        ],
    )
    found = rows_of(
        tmp_path,
        "SELECT network, separator_value, batch_cid, stream, tip, true_key, true_value, known_since FROM false_claims "
        "ORDER BY batch_cid",
    )
    assert [tuple(row.values()) for row in found] == [
        ("clay", OTHER.value, "both", stream(1), tip(1), *MODEL, after(7)),
        ("clay", MODEL.value, "mixed", stream(2), tip(2), *OTHER, None),
    ]


# ---------------------------------------------------------------- savings


class Logged(NamedTuple):
    """An UPDATE: when it was heard and its stamp in µs, and what it says. `again`: it is in `messages` alone."""

    heard: int
    stamp: int
    separator: Separator | None
    of: int
    number: int
    again: bool = False

    @property
    def size(self) -> int:
        return len(write_update(stream(self.of), tip(self.number)))


def said_at(heard: float, separator: Separator | None, of: int, number: int, again: bool = False) -> Logged:
    """Heard at s, in the log at once."""
    return Logged(round(heard * SECOND), round(heard * SECOND), separator, of, number, again)


def as_heard(records: Iterable[Logged]) -> list[ReceivedUpdate]:
    """Return rows in the form of `read_received_updates`."""
    ordered = sorted(records, key=lambda each: (each.separator or ("~", ""), each.heard, each.again))
    return [
        ReceivedUpdate(
            "clay",
            "LIVE",
            each.separator,
            each.heard,
            each.size,
            None if each.again else (stream(each.of), cid_bytes(tip(each.number))),
        )
        for each in ordered
    ]


Made = tuple[list[set[tuple[str, str]]], list[Logged]]
"""the (stream, tip) of each window; what was heard in none"""


def ideal(records: Iterable[Logged], window: int) -> Made:
    """The windows of one separator in event time alone."""
    tips: list[set[tuple[str, str]]] = []
    outside: list[Logged] = []
    opened = -window
    for each in sorted(records, key=lambda each: (each.heard, each.again)):
        inside = each.heard < opened + window and each.separator is not None
        if each.again or each.separator is None:
            outside += [] if inside else [each]
            continue
        if not inside:
            opened = each.heard
            tips.append(set())
        tips[-1].add((stream(each.of), tip(each.number)))
    return tips, outside


def announced(separator: Separator | None) -> int:
    """Bytes of the BATCH_UPDATE of a batch."""
    return len(write_batch_update(separator, cid_text(compute_cid(b"")))) if separator else 0


separators = st.sampled_from([MODEL, OTHER, None])
small = st.integers(0, 3)
heard_updates = st.lists(
    st.builds(Logged, st.integers(0, 8 * SECOND), st.just(0), separators, small, small, st.booleans()), max_size=25
)


@given(heard_updates, st.sampled_from([1, SECOND // 2, SECOND, 3 * SECOND]))
def test_an_estimate_is_what_windows_in_event_time_make(records: list[Logged], window: int) -> None:
    found = {saving.separator: saving for saving in estimate_savings(as_heard(records), [window])}
    assert found.keys() == {each.separator for each in records}
    for separator, saving in found.items():
        of = [each for each in records if each.separator == separator]
        tips, outside = ideal(of, window)
        before = len(of), sum(each.size for each in of)
        batches = len(tips), len(tips) * announced(separator)
        assert (saving.updates, saving.update_bytes) == before
        assert (saving.batches, saving.batch_bytes) == batches
        assert saving.block_bytes == sum(len(block_of(each)) for each in tips)
        assert saving.both == (before[0] + batches[0], before[1] + batches[1])
        assert saving.batched == (batches[0] + len(outside), batches[1] + sum(each.size for each in outside))


def test_every_window_has_its_own_estimate() -> None:
    records = [said_at(at, MODEL, 1, number) for number, at in enumerate((0, 1, 5))]
    records += [said_at(2, OTHER, 2, 1), said_at(2, None, 3, 1)]
    found = estimate_savings(as_heard(records), [SECOND, 5 * SECOND, 60 * SECOND])
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
    records = [said_at(0, MODEL, number, number) for number in range(40)]
    (whole,) = estimate_savings(as_heard(records), [SECOND])
    (cut,) = estimate_savings(as_heard(records), [SECOND], limit=1_000)
    assert whole.batches == 1
    assert cut.batches >= whole.block_bytes // 1_000
    assert cut.batch_bytes == cut.batches * whole.batch_bytes


def log_of(records: Iterable[Logged], origin: Origin = "LIVE") -> list[LogRecord]:
    """The new updates as records of one partition, in the order given."""
    return [
        LogRecord(
            0,
            offset,
            each.stamp,
            encode(
                UpdateRecord(
                    network="clay",
                    origin=origin,
                    separator=SeparatorRecord(*each.separator) if each.separator else None,
                    separator_source="topic" if each.separator else None,
                    stream=stream(each.of),
                    tip=tip(each.number),
                    from_=None,
                    message_id=f"m{offset}",
                    epoch=Epoch("q", 1),
                    frame=Coordinates(0, offset, 0),
                    observed_at=ORIGIN + each.heard,
                )
            ),
        )
        for offset, each in enumerate(records)
        if not each.again
    ]


def batches_of(log: Iterable[LogRecord], window: int) -> list[BatchRecord]:
    records = (record._replace(stamp=ORIGIN + record.stamp) for record in log)
    made = batch_partition(PartitionWindows(window), records, 256_000)
    batches = (decode_batch(output.value) for output in made if output.topic == "batches")
    return [
        structs.replace(each, opened_at=each.opened_at - ORIGIN, closed_at=each.closed_at - ORIGIN) for each in batches
    ]


ORIGIN = 1_700_000_000 * SECOND
"""added to times in the log, which count from 0 in these tests"""


END = LogRecord(0, 10**6, 10**12, None)
"""a tick that ends all windows"""


@st.composite
def live_logs(draw: st.DrawFn) -> list[Logged]:
    """Updates in the order in which they were heard, each in the log up to 1 s later."""
    at, out = 10 * SECOND, []
    for number in range(draw(st.integers(0, 20))):
        at += draw(st.integers(0, SECOND))
        late = draw(st.one_of(st.just(0), st.integers(0, SECOND)))
        out.append(Logged(at, at + late, draw(st.sampled_from([MODEL, OTHER])), draw(small), number))
    return out


@given(live_logs(), st.sampled_from([SECOND // 2, SECOND, 3 * SECOND]))
def test_batches_are_those_of_the_estimate_unless_the_clock_of_the_log_ends_a_window(
    records: list[Logged], window: int
) -> None:
    clocks = dict(zip(records, accumulate((each.stamp for each in records), max), strict=True))
    made = batches_of([*log_of(records), END], window)
    for saving in estimate_savings(as_heard(records), [window]):
        blocks = [len(each.block) for each in made if each.separator.value == (saving.separator or MODEL).value]
        opened = ended = -window
        in_time = True
        for each in (each for each in records if each.separator == saving.separator):
            if each.heard >= opened + window:
                opened, ended = each.heard, clocks[each] + window
            in_time &= clocks[each] < ended
        assert len(blocks) >= saving.batches
        if in_time:
            assert (len(blocks), sum(blocks)) == (saving.batches, saving.block_bytes)


def time_of(micros: int) -> datetime:
    return EPOCH + timedelta(microseconds=micros)


def run_of(
    records: Sequence[Logged], window: int, origin: Origin = "LIVE", name: str = "m"
) -> dict[str, list[dict[str, object]]]:
    """Rows by table as the queries would write them, the last windows being open still."""
    rows: dict[str, list[dict[str, object]]] = {name: [] for name in ("updates", "messages", "batches", "batch_tips")}
    clock = 0
    for offset, each in enumerate(records):
        key, value = each.separator or (None, None)
        said: dict[str, object] = {"message_id": f"{name}{offset}", "stream": stream(each.of), "tip": tip(each.number)}
        said |= {"origin": origin, "observed_at": time_of(each.heard)}
        data = write_update(stream(each.of), tip(each.number))
        rows["messages"].append({**said, "type": "UPDATE", "data": data})
        if not each.again:
            clock = max(clock, each.stamp)
            place = {"separator_key": key, "separator_value": value, "log_offset": offset}
            rows["updates"].append({**said, **place, "log_time": time_of(clock)})
    for made in batches_of(log_of(records, origin), window):
        tips = read_block(made.block)
        rows["batches"].append(
            {
                "batch_cid": made.batch_cid,
                "origin": made.origin,
                "separator_key": made.separator.key,
                "separator_value": made.separator.value,
                "opened_at": time_of(made.opened_at),
                "closed_at": time_of(made.closed_at),
                "stream_count": len(tips),
                "block_bytes": len(made.block),
            }
        )
        rows["batch_tips"] += [
            {"batch_cid": made.batch_cid, "stream": of, "tip": each} for of, links in tips.items() for each in links
        ]
    return rows


def fill_all(lake: Path, rows: Mapping[str, Sequence[Row]]) -> None:
    for name, of in rows.items():
        fill(lake, name, [{column: row[column] for column in row if column in columns_of(name)} for row in of])


def columns_of(name: str) -> set[str]:
    return {column.name for column in TABLES[name].columns}


def by_separator(rows: Iterable[Mapping[str, object]]) -> dict[tuple[object, object], Mapping[str, object]]:
    return {(row["separator_key"], row["window_seconds"]): row for row in rows}


def random_run(seed: int, late: int) -> list[Logged]:
    """30 s of updates, each new once, in the log at times up to `late` µs later, with some announced again."""
    choose = random.Random(seed)
    times = sorted(choose.randrange(10 * SECOND, 40 * SECOND) for _ in range(300))
    records: list[Logged] = []
    for number, at in enumerate(times):
        separator = choose.choice([MODEL, OTHER, None])
        records.append(Logged(at, at + choose.randrange(late + 1), separator, choose.randrange(9), number))
        if choose.random() < 0.3:
            earlier = choose.choice(records)
            records.append(earlier._replace(heard=at, stamp=at, again=True))
    return records


def test_savings_of_the_batches_that_were_made_are_those_of_the_estimate(tmp_path: Path) -> None:
    records = random_run(7, 0)
    end = said_at(90, Separator("end", "k1"), 1, 999)  # whose window stays open
    fill_all(tmp_path, run_of([*records, end], SECOND // 2))
    found = by_separator(rows_of(tmp_path, "SELECT * FROM batch_savings"))
    savings = estimate_savings(read_received_updates(Lake(str(tmp_path))), [SECOND // 2])
    expected = estimate_savings(as_heard([*records, end]), [SECOND // 2])
    assert {each.separator: each for each in savings} == {each.separator: each for each in expected}
    for saving in savings:
        if saving.separator == end.separator:
            continue
        row = found.pop((saving.separator and saving.separator.key, 0.5 if saving.separator else None))
        other = found.pop((saving.separator.key, None)) if saving.separator else dict.fromkeys(row, 0)

        def total(name: str, of: tuple[Mapping[str, object], ...] = (row, other)) -> int:
            return sum(number for each in of if isinstance(number := each[name], int))

        assert other["messages_unbatched"] == (saving.others if saving.separator else 0)
        assert (total("messages_unbatched"), total("bytes_unbatched")) == (saving.updates, saving.update_bytes)
        assert (total("batches"), total("block_bytes")) == (saving.batches, saving.block_bytes)
        assert (total("messages_batched"), total("bytes_batched")) == saving.batched
        assert (total("messages_both"), total("bytes_both")) == saving.both
    assert found == {}


@pytest.mark.parametrize("seed", range(3))
def test_savings_count_each_update_of_a_batch_however_late_the_log_had_it(seed: int, tmp_path: Path) -> None:
    records = [each for each in random_run(seed, 3 * SECOND) if not each.again]
    end = said_at(90, Separator("end", "k1"), 1, 999)
    fill_all(tmp_path, run_of([*records, end], SECOND))
    found = by_separator(rows_of(tmp_path, "SELECT * FROM batch_savings"))
    for separator in (MODEL, OTHER):
        made = rows_of(tmp_path, f"SELECT count(*) AS n FROM batches WHERE separator_key = '{separator.key}'")
        row = found[separator.key, 1.0]
        assert row["messages_unbatched"] == sum(each.separator == separator for each in records)
        assert row["batches"] == row["messages_batched"] == made[0]["n"]


def test_savings_are_told_apart_by_the_window_that_was_in_force(tmp_path: Path) -> None:
    # the third, when the first window has just ended, is in one that stays open
    early = [said_at(0, MODEL, 1, 1), said_at(0.9, MODEL, 2, 2), said_at(1, MODEL, 1, 3)]
    late = [said_at(100, MODEL, 1, 4), said_at(104, MODEL, 1, 5), said_at(200, MODEL, 9, 9)]
    for records, window, name in ((early, SECOND, "a"), (late, 5 * SECOND, "b")):
        fill_all(tmp_path, {**run_of(records, window, name=name), "messages": []})
    found = by_separator(rows_of(tmp_path, "SELECT * FROM batch_savings"))
    assert {place: (row["messages_unbatched"], row["messages_batched"]) for place, row in found.items()} == {
        ("model", 1.0): (2, 1),
        ("model", 5.0): (2, 1),
    }


def test_a_capture_of_years_ago_is_estimated_by_when_it_was_heard(tmp_path: Path) -> None:
    # all in the log at once, in 2025; the live updates that were heard between them are another origin
    ago = [Logged(at * SECOND, 10**9 * SECOND, MODEL, 1, at) for at in (1, 2, 3, 60)]
    live = [Logged((10**9 + at) * SECOND, (10**9 + at) * SECOND, MODEL, 1, at) for at in (1, 60)]
    fill_all(tmp_path, run_of([*ago, Logged(0, 2 * 10**9 * SECOND, None, 1, 1)], 5 * SECOND, "REPLAY", "r"))
    fill_all(tmp_path, run_of(live, 5 * SECOND))
    savings = estimate_savings(read_received_updates(Lake(str(tmp_path))), [5 * SECOND])
    assert {(each.origin, each.separator): (each.updates, each.batches) for each in savings} == {
        ("LIVE", MODEL): (2, 2),
        ("REPLAY", MODEL): (4, 2),
        ("REPLAY", None): (1, 0),
    }
    found = rows_of(
        tmp_path, "SELECT messages_unbatched, batches FROM batch_savings WHERE origin = 'REPLAY' ORDER BY ALL"
    )
    assert found == [{"messages_unbatched": 1, "batches": 0}, {"messages_unbatched": 4, "batches": 2}]


def test_an_update_never_counts_as_heard_in_the_future_of_the_broker(tmp_path: Path) -> None:
    fill_all(tmp_path, run_of([Logged(99 * SECOND, SECOND, MODEL, 1, 1), Logged(SECOND, SECOND, MODEL, 1, 2)], SECOND))
    assert [each.event_time for each in read_received_updates(Lake(str(tmp_path)))] == [SECOND, SECOND]


def heard_by_separator(lake: Path) -> list[tuple[str | None, int]]:
    """Separator key and updates, of the LIVE ones."""
    savings = estimate_savings(read_received_updates(Lake(str(lake))), [SECOND])
    return [(each.separator and each.separator.key, each.updates) for each in savings if each.origin == "LIVE"]


def test_what_was_announced_again_was_sent_before_under_the_separator_of_what_it_repeats(tmp_path: Path) -> None:
    first = {"stream": stream(1), "tip": tip(1), "observed_at": AT, "log_time": AT}
    claimed = {"separator_key": OTHER.key, "separator_value": OTHER.value, "separator_source": "topic"}
    verified = {"separator_key": MODEL.key, "separator_value": MODEL.value, "separator_source": "genesis"}
    fill(
        tmp_path,
        "updates",
        [
            {**first, **claimed, "message_id": "false", "log_offset": 1},
            {**first, **verified, "message_id": "true", "log_offset": 2},
            {**first, **verified, "message_id": "true", "origin": "REPLAY", "log_offset": 3},
            {**first, **verified, "message_id": "elsewhere", "network": "mainnet", "log_offset": 4},
            {
                **first,
                **claimed,
                "message_id": "again",
                "origin": "REPLAY",
                "log_offset": 5,
            },  # heard live, and no news there
        ],
    )
    update = {"type": "UPDATE", "stream": stream(1), "tip": tip(1), "observed_at": AT, "data": b"x" * 50}
    fill(
        tmp_path, "messages", [{**update, "message_id": message} for message in ("false", "true", "again", "once more")]
    )
    fill(tmp_path, "messages", [{**update, "message_id": "unknown", "tip": tip(2)}])
    fill(tmp_path, "messages", [{**update, "message_id": "no update", "type": "QUERY"}])
    # each message once, however many separators its tip has; of what nothing is known the separator is not known
    assert heard_by_separator(tmp_path) == [(OTHER.key, 2), (MODEL.key, 2), (None, 1), (MODEL.key, 1)]
    found = rows_of(tmp_path, "SELECT * FROM batch_savings ORDER BY separator_key NULLS LAST")
    assert [(row["network"], row["origin"], row["separator_key"], row["bytes_unbatched"]) for row in found] == [
        ("clay", "LIVE", key, 50) for key in (OTHER.key, MODEL.key, None)
    ]  # those in no window; no window has ended


def test_an_announcement_again_is_replaced_by_the_batch_of_the_window_in_which_it_was_heard(tmp_path: Path) -> None:
    records = [said_at(10, MODEL, 1, 1), said_at(10.5, MODEL, 1, 1, again=True), said_at(12, MODEL, 1, 1, again=True)]
    fill_all(tmp_path, run_of([*records, said_at(13, MODEL, 1, 2)], SECOND))
    found = by_separator(rows_of(tmp_path, "SELECT * FROM batch_savings"))
    assert {place: (row["messages_unbatched"], row["messages_batched"]) for place, row in found.items()} == {
        ("model", 1.0): (2, 1),
        ("model", None): (1, 1),
    }


def test_windows_of_two_lengths_that_overlap_each_count_what_they_hold(tmp_path: Path) -> None:
    def batch(cid: str, separator: Separator, length: float) -> Row:
        named = {"separator_key": separator.key, "separator_value": separator.value}
        return {**named, "batch_cid": cid, "opened_at": AT, "closed_at": after(length), "emitted_at": after(length)}

    def update(message: str, separator: Separator, of: int, at: float) -> Row:
        named = {"separator_key": separator.key, "separator_value": separator.value}
        said = {"message_id": message, "stream": stream(of), "tip": tip(of)}
        return {**named, **said, "observed_at": after(at), "log_time": after(at)}

    fill(tmp_path, "batches", [batch("long", MODEL, 5), batch("short", MODEL, 2), batch("other", OTHER, 1)])
    held = [("long", 1), ("short", 1), ("other", 2)]
    fill(tmp_path, "batch_tips", [{"batch_cid": cid, "stream": stream(of), "tip": tip(of)} for cid, of in held])
    # the tip of OTHER comes once more when its window is over, and no later batch holds the tip
    new = [("a", MODEL, 1, 0.5), ("b", MODEL, 1, 3), ("c", OTHER, 2, 0.5), ("d", OTHER, 2, 9)]
    fill(tmp_path, "updates", [update(*each) for each in new])
    fill(
        tmp_path,
        "messages",
        [
            {"message_id": f"{at}", "type": "UPDATE", "stream": stream(1), "tip": tip(1), "observed_at": after(at)}
            for at in (1, 4, 6)
        ],
    )
    found = by_separator(rows_of(tmp_path, "SELECT * FROM batch_savings"))
    # an announcement again has the longest of the windows that were open
    assert {place: row["messages_unbatched"] for place, row in found.items()} == {
        (MODEL.key, 2.0): 1,
        (MODEL.key, 5.0): 1 + 2,
        (MODEL.key, None): 1,
        (OTHER.key, 1.0): 1,
    }


def question(title: str) -> str:
    """The SQL of docs/SQL.md under a title."""
    found = re.search(
        rf"^\*\*{title}.*?```sh\nkiln sql \"(.+?)\"\n```", SQL_PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    assert found is not None, title
    return found[1]


@pytest.mark.parametrize("late", [0, SECOND // 3, 4 * SECOND])
def test_the_questions_of_the_page_find_each_window_and_update_in_a_batch(late: int, tmp_path: Path) -> None:
    ordered = sorted((each for each in random_run(5, late) if not each.again), key=lambda each: each.stamp)
    end = [said_at(90, separator, 1, 999) for separator in (MODEL, OTHER)]  # whose windows stay open
    rows = run_of([*ordered, *end], SECOND)
    fill_all(tmp_path / "whole", rows)
    windows, updates = question("The windows, recomputed from `updates`"), question("Updates that are in no batch")
    for sql, column in ((windows, "opened_at"), (updates, "observed_at")):
        found = {(row["separator_key"], row[column]) for row in rows_of(tmp_path / "whole", sql)}
        assert found == {(key, time_of(90 * SECOND)) for key in (MODEL.key, OTHER.key)}
    gone = rows["batches"].pop(len(rows["batches"]) // 2)
    fill_all(tmp_path / "less", rows)
    (window,) = (row for row in rows_of(tmp_path / "less", windows) if row["opened_at"] != time_of(90 * SECOND))
    assert (window["separator_key"], window["opened_at"]) == (gone["separator_key"], gone["opened_at"])
    tips = {row["tip"] for row in rows["batch_tips"] if row["batch_cid"] == gone["batch_cid"]}
    assert {row["tip"] for row in rows_of(tmp_path / "less", updates)} == tips | {tip(999)}


def test_an_update_whose_message_is_not_there_yet_counts_by_its_newest_form(tmp_path: Path) -> None:
    rows = run_of([said_at(0, MODEL, 1, 1), said_at(5, MODEL, 1, 2)], SECOND)
    fill_all(tmp_path, {**rows, "messages": []})
    size = len(write_update(stream(1), tip(1)))
    assert rows_of(tmp_path, "SELECT bytes_unbatched FROM batch_savings") == [{"bytes_unbatched": size}]
    assert [each.size for each in read_received_updates(Lake(str(tmp_path)))] == [size, size]


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
    records = [said_at(0, MODEL, 1, 1), said_at(1, MODEL, 1, 2), said_at(2, None, 2, 2)]
    fill(tmp_path / "lake", "updates", run_of(records, SECOND)["updates"])
    assert Lake(str(tmp_path / "lake")).tables() == ("updates",)
    assert run_command(["estimate", "--json", "--window", "1s,5s"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["window_seconds"], row["separators"], row["messages_batched"]) for row in found["totals"]] == [
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
