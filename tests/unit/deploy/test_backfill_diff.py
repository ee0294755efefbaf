"""A run compared with live: what is equal, each kind of difference, and any rows against sets in Python."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any  # columns of any type

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln.deploy.cli.backfill import describe_difference, encode_diffs
from kiln.pipelines.backfill.range_comparison import open_comparison
from kiln.pipelines.backfill.run_diff import TableDiff, compare_table, diff_run
from kiln.pipelines.backfill.run_log import BackfillRun
from kiln.pipelines.backfill.swap import FileSwap
from kiln.pipelines.backfill.swap_runs import swap_run
from kiln.pipelines.delta.lake import Lake
from kit.run_tables import (
    FROM,
    RUN_TABLES,
    TO,
    Row,
    append,
    batch,
    begin,
    control,
    copy,
    fill,
    history,
    message,
    row,
    subscription,
    tip,
    update,
)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


def compared(lake: Lake, run: BackfillRun) -> dict[str, TableDiff]:
    return {each.table: each for each in diff_run(lake, run, lambda words: None)}


def counts(found: TableDiff) -> tuple[int, int, int, int]:
    return found.same, found.only_live, found.only_run, found.differ


def test_a_run_with_live_s_rows_is_equal(lake: Lake) -> None:
    run = begin(lake)
    for each in (lake, lake.locate_run("r")):
        fill(each, history(range(30)))
    found = compared(lake, run)
    assert tuple(found) == RUN_TABLES
    assert all(each.is_equal and each.same for each in found.values())
    assert json.loads(encode_diffs(list(found.values())))["batches"] == {
        "same": 3,
        "only_live": 0,
        "only_run": 0,
        "differ": 0,
        "places": [],
        "first": [],
    }


def test_an_empty_live_lacks_all_of_the_run(lake: Lake) -> None:
    run = begin(lake)
    fill(lake.locate_run("r"), history(range(30)))
    assert counts(compared(lake, run)["messages"]) == (0, 0, 30, 0)


def test_rows_outside_the_range_do_not_count(lake: Lake) -> None:
    run = begin(lake)
    fill(lake, history(range(30)))
    fill(lake, history(range(100, 120), at=TO - 100_000_000))  # from the first µs after the range on
    fill(lake, history(range(200, 220), at=FROM - 300_000_000, name="old"))
    # heard by the bridge's clock after the range, and by the log's within it
    append(lake, "updates", [update(300, TO + 5, log_time=TO - 1), update(301, TO, log_time=TO)])
    fill(lake.locate_run("r"), history(range(30)))
    append(lake.locate_run("r"), "updates", [update(300, TO + 5, log_time=TO - 1)])
    assert all(each.is_equal for each in compared(lake, run).values())


COPY_KEPT: Mapping[str, object] = {
    "origin": "REPLAY",
    "topic_source": "index",
    "verdict": "valid",
    "remote_peer": "other",
    "kafka_partition": 3,
    "kafka_offset": 77,
    "message_index": 2,
}


def test_which_copy_of_a_message_was_kept_does_not_matter(lake: Lake) -> None:
    run = begin(lake)
    append(lake, "messages", [message(1, FROM)])
    append(lake.locate_run("r"), "messages", [message(1, FROM + 5, **COPY_KEPT)])
    assert counts(compared(lake, run)["messages"]) == (1, 0, 0, 0)


def test_the_topic_of_an_unsigned_message_is_that_of_its_copy(lake: Lake) -> None:
    run = begin(lake)
    append(lake, "messages", [message(1, FROM, from_peer=None), message(2, FROM)])
    append(
        lake.locate_run("r"),
        "messages",
        [message(number, FROM, from_peer=who, topic="/t") for number, who in ((1, None), (2, "p"))],
    )
    assert counts(compared(lake, run)["messages"]) == (1, 1, 1, 1)


KINDS: list[tuple[str, Row, Row, str]] = [
    ("messages", message(1, FROM), message(1, FROM, data=b"z"), "data: live 31, run 7a"),
    ("messages", message(1, FROM), message(1, FROM, tips=[("a", "b")]), 'tips: live -, run {"a": "b"}'),
    ("updates", update(1, FROM), update(1, FROM, separator="model/k2"), "separator_value: live k1, run k2"),
    ("updates", update(1, FROM), update(1, FROM, log_offset=9), "log_offset: live 1, run 9"),
    (
        "updates",
        update(1, FROM),
        update(1, FROM, separator_source="genesis"),
        "separator_source: live topic, run genesis",
    ),
    (
        "batches",
        batch("c1", FROM, [1])["batches"][0],
        batch("c2", FROM, [1])["batches"][0],
        "batch_cid: live c1, run c2; block: live 6331, run 6332",
    ),
    ("copies", copy(1, FROM), copy(1, FROM, verdict="invalid"), "verdict: live a, run invalid"),
    ("copies", copy(1, FROM), copy(1, FROM, kafka_offset=5), "kafka_offset: live 1, run 5"),
    (
        "subscriptions",
        subscription(1, FROM),
        subscription(1, FROM, subscribe=False),
        "subscribe: live true, run false",
    ),
    (
        "controls",
        control(1, FROM),
        control(1, FROM, message_ids=["m2"]),
        'message_ids: live ["m1"], run ["m2"]',
    ),
]


@pytest.mark.parametrize(("table", "live", "run_s", "words"), KINDS, ids=[f"{each[0]}-{each[3]}" for each in KINDS])
def test_a_row_that_differs_is_named_with_both_values(
    lake: Lake, table: str, live: Row, run_s: Row, words: str
) -> None:
    run = begin(lake)
    append(lake, table, [live])
    append(lake.locate_run("r"), table, [run_s])
    found = compared(lake, run)[table]
    assert counts(found) == (0, 1, 1, 1)
    (first,) = found.examples
    assert describe_difference(first).endswith(words)


def test_a_table_that_an_earlier_run_lacks_is_neither_compared_nor_swapped(lake: Lake) -> None:
    run = begin(lake)
    append(lake, "controls", [control(1, FROM)])
    shutil.rmtree(lake.locate_run("r").table("controls"))
    assert "controls" not in compared(lake, run)
    lake.create(["frames"])
    swap_run(lake, run, FileSwap(lake, durable=False), lambda: TO, print)
    assert lake.open("controls").count() == 1


def test_a_batch_that_lacks_a_tip_differs_in_its_tips(lake: Lake) -> None:
    run = begin(lake)
    fill(lake, batch("c", FROM, [1, 2]))
    fill(lake.locate_run("r"), {**batch("c", FROM, [1, 2]), "batch_tips": batch("c", FROM, [1])["batch_tips"]})
    found = compared(lake, run)
    assert counts(found["batches"]) == (1, 0, 0, 0)
    assert counts(found["batch_tips"]) == (1, 1, 0, 0)
    assert found["batch_tips"].groups[0][:2] == (found["batch_tips"].groups[0].day, "model/k1")
    assert (
        describe_difference(found["batch_tips"].examples[0])
        == "batch_cid c stream s2 tip t2: only the live table has it"
    )


def test_a_row_that_is_there_twice_is_found(lake: Lake) -> None:
    run = begin(lake)
    append(lake, "messages", [message(1, FROM)])
    append(lake.locate_run("r"), "messages", [message(1, FROM), message(1, FROM)])
    found = compared(lake, run)["messages"]
    assert counts(found) == (1, 0, 1, 0)
    assert len(found.examples) == 1


def test_others_rows_of_tips_and_quarantine_do_not_count(lake: Lake) -> None:
    run = begin(lake)
    append(lake, "tips", [tip(1, FROM), tip(2, FROM, source="batch", batch_cid="c")])
    append(lake.locate_run("r"), "tips", [tip(1, FROM)])
    stages = ("message", "fetch", "publisher", "receive", "separator", "frame")
    append(lake, "quarantine", [row("quarantine", stage=stage, reason="bad_tip", data=b"d") for stage in stages])
    append(lake.locate_run("r"), "quarantine", [row("quarantine", stage="message", reason="bad_tip", data=b"d")])
    found = compared(lake, run)
    assert (counts(found["tips"]), counts(found["quarantine"])) == ((1, 0, 0, 0), (1, 0, 0, 0))


def test_a_run_of_one_network_is_compared_with_that_network(lake: Lake) -> None:
    run = begin(lake, network="n")
    lake.locate_run("r").create(["frames"])
    append(lake, "messages", [message(1, FROM), message(2, FROM, network="m")])
    append(lake, "frames", [row("frames", network=name, kafka_offset=number) for number, name in enumerate("nm")])
    faults = [
        row("quarantine", stage="rpc", reason="rpc_malformed", kafka_partition=0, kafka_offset=number, data=b"d")
        for number in (0, 1)
    ]
    append(lake, "quarantine", faults)
    append(lake.locate_run("r"), "messages", [message(1, FROM)])
    append(lake.locate_run("r"), "quarantine", faults[:1])
    assert all(each.is_equal for each in compared(lake, run).values())


def test_days_and_separators_are_told_apart(lake: Lake) -> None:
    run = begin(lake)
    append(lake, "updates", [update(number, FROM + number, separator=f"model/k{number % 3}") for number in range(9)])
    append(
        lake.locate_run("r"),
        "updates",
        [update(number, FROM + number, separator=f"model/k{number % 3}") for number in range(8)],
    )
    (place,) = compared(lake, run)["updates"].groups
    assert (str(place.day), place.separator, place.same, place.only_live, place.only_run) == (
        "2026-01-01",
        "model/k2",
        2,
        1,
        0,
    )


# ---------------------------------------------------------------- any rows

Drawn = tuple[int, int, str]

some = st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 2), st.sampled_from(("", "a", "b"))), max_size=12)


def drawn_update(drawn: Drawn) -> Row:
    number, at, tip_ = drawn
    return update(number, FROM + at, tip=tip_, log_time=FROM + at, log_offset=0)


def drawn_message(drawn: Drawn) -> Row:
    number, at, data = drawn
    return message(number, FROM + at, tip=data or None, data=data.encode(), kafka_offset=0)


@pytest.mark.parametrize("table", ["updates", "messages"])
@settings(max_examples=10)
@given(live=some, run_s=some)
def test_the_counts_are_those_of_multisets(
    table: str, live: list[Drawn], run_s: list[Drawn], tmp_path_factory: pytest.TempPathFactory
) -> None:
    lake = Lake(str(tmp_path_factory.mktemp("lake")))
    run = BackfillRun("r", FROM, TO, {"source": "frames"})
    made = drawn_update if table == "updates" else drawn_message
    for each, drawn in ((lake, live), (lake.locate_run("r"), run_s)):
        each.create([table])
        for rows in filter(None, (drawn[::2], drawn[1::2])):  # files of their own
            append(each, table, map(made, rows))

    def compared_as(drawn: Drawn) -> tuple[Any, ...]:
        number, at, text = drawn
        return (number, at, text) if table == "updates" else (number, text)

    ours, theirs = (Counter(compared_as(each) for each in drawn if each[1] >= 0) for drawn in (live, run_s))
    only_live, only_run = ours - theirs, theirs - ours
    per_key = [Counter(key[0] for key in each.elements()) for each in (only_live, only_run)]
    with open_comparison(lake, run) as sides:
        found = compare_table(sides, sides.extents[table])
    assert counts(found) == (
        (ours & theirs).total(),
        only_live.total(),
        only_run.total(),
        (per_key[0] & per_key[1]).total(),
    )
    # all differences fit among the first, and each is told once
    told = Counter(
        each.key["message_id"] for each in found.examples for side in (each.live, each.run) if side is not None
    )
    if (only_live + only_run).total() <= 10:
        assert told == Counter({f"m{number}": count for number, count in (per_key[0] + per_key[1]).items()})
