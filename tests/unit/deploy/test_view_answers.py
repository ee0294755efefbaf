"""What the views say of a lake with odd rows (kit.small_lake), held to the same worked out by hand or in Python."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime, timedelta

import orjson
import pytest

from kiln.deploy.query.ask import query_lake
from kiln.pipelines.delta.lake import Lake
from kit.small_lake import AT, small_lake

Row = dict[str, object]


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return small_lake(str(tmp_path_factory.mktemp("lake")), 1_000)


def rows_of(lake: Lake, sql: str) -> list[Row]:
    answer = query_lake(lake, sql)
    return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows()]


def after(seconds: float) -> datetime:
    return AT + timedelta(seconds=seconds)


def test_an_update_is_in_the_first_batch_that_closed_after_it_was_heard(lake: Lake) -> None:
    found = {
        row["message_id"]: row["batch_cid"]
        for row in rows_of(lake, "SELECT * FROM batched_updates WHERE stream = 'kodd'")
    }
    # c0 closed before, c2 after c1; odd4 has no separator
    assert found == {"odd1": "c1", "odd3": "c3", "odd5": None, "odd6": None}
    (whole,) = rows_of(lake, "SELECT count(*) AS n, count(DISTINCT message_id) AS messages FROM batched_updates")
    (updates,) = rows_of(lake, "SELECT count(*) AS n FROM updates WHERE separator_key IS NOT NULL")
    assert whole == {"n": updates["n"], "messages": updates["n"]}


def test_a_tip_that_a_batch_holds_again_knows_when_the_batch_before_closed(lake: Lake) -> None:
    found = rows_of(lake, "SELECT batch_cid, origin, tip, earlier_closed_at FROM held_again ORDER BY batch_cid")
    common = {"origin": "LIVE", "tip": "b1"}
    # c0 is the first of LIVE, and c1 the first of REPLAY
    assert found == [
        {"batch_cid": "c1", **common, "earlier_closed_at": after(-8)},
        {"batch_cid": "c2", **common, "earlier_closed_at": after(1)},
    ]


def test_delays_end_with_the_first_announcement_that_did_not_fail(lake: Lake) -> None:
    (row,) = rows_of(lake, "SELECT * FROM update_delays WHERE message_id = 'odd1'")
    assert (row["heard_at"], row["published_at"]) == (AT, after(2.5))
    assert [row[f"seconds_to_{end}"] for end in ("close", "batch", "publication")] == [1.0, 1.333333, 2.5]


def test_a_query_is_unanswered_where_no_response_came_after_it(lake: Lake) -> None:
    found = rows_of(lake, "SELECT message_id, answered_at FROM unanswered_queries WHERE query_id = 'q'")
    assert found == [{"message_id": "ask2", "answered_at": None}]


def test_responses_conflict_by_stream_and_minute(lake: Lake) -> None:
    found = rows_of(lake, "SELECT minute, stream, tips, nodes, which FROM conflicting_responses WHERE stream = 'kodd'")
    minute = datetime(2026, 1, 1, tzinfo=UTC)
    assert found == [{"minute": minute, "stream": "kodd", "tips": 2, "nodes": 2, "which": ["b1", "b2"]}]


def test_copies_are_counted_and_the_first_relay_is_told(lake: Lake) -> None:
    (copies,) = rows_of(lake, "SELECT * FROM message_copies WHERE message_id = 'odd1'")
    assert copies == {
        "network": "clay",
        "message_id": "odd1",
        "copies": 4,
        "first_peer": "a",  # at once with b
        "first_at": AT,
        "spread_seconds": 61.000001,
    }
    relays = rows_of(lake, "SELECT * EXCLUDE (network) FROM relays WHERE length(remote_peer) = 1 ORDER BY remote_peer")
    assert [tuple(row.values()) for row in relays] == [
        ("a", 2, 1, 0.0, 0.25),
        ("b", 1, 1, 0.0, 0.0),
        ("c", 1, 0, 61.000001, 61.000001),
    ]


def test_gaps_are_the_numbers_that_are_missing(lake: Lake) -> None:
    sql = "SELECT first_lost, last_lost, lost, last_seen, seen_again FROM sequence_gaps WHERE connection LIKE 'ee%'"
    found = sorted(tuple(row.values()) for row in rows_of(lake, sql))
    assert found == [(1, 1, 1, None, after(-1)), (4, 6, 3, after(0), after(1))]


def test_a_message_is_missed_by_the_vantage_points_that_were_there_and_did_not_hear_it(lake: Lake) -> None:
    frames = rows_of(lake, "SELECT kafka_partition, kafka_offset, local_peer, observed_at FROM frames")
    place = {(row["kafka_partition"], row["kafka_offset"]): row["local_peer"] for row in frames}
    there: dict[object, list[datetime]] = defaultdict(list)
    for row in frames:
        assert isinstance(row["observed_at"], datetime)
        there[row["local_peer"]].append(row["observed_at"])
    heard: dict[object, list[tuple[datetime, object]]] = defaultdict(list)
    for row in rows_of(lake, "SELECT message_id, observed_at, kafka_partition, kafka_offset FROM copies"):
        assert isinstance(row["observed_at"], datetime)
        by = place.get((row["kafka_partition"], row["kafka_offset"]))
        heard[row["message_id"]].append((row["observed_at"], by))
    expected = {
        (message, point)
        for message, copies in heard.items()
        for point, times in there.items()
        if min(times) <= min(at for at, _ in copies) <= max(times) and point not in {by for _, by in copies}
    }
    assert expected
    found = [(row["message_id"], row["missed_by"]) for row in rows_of(lake, "SELECT * FROM missed_messages")]
    assert sorted(found, key=str) == sorted(expected, key=str)


def test_a_node_has_the_versions_of_its_newest_word(lake: Lake) -> None:
    found = rows_of(lake, "SELECT ver, ipfs_ver, heard_at FROM node_versions WHERE from_peer = 'p'")
    assert found == [{"ver": "1", "ipfs_ver": None, "heard_at": AT}]


def test_traffic_is_all_messages_once(lake: Lake) -> None:
    traffic = rows_of(lake, "SELECT sum(messages) AS messages, sum(bytes) AS bytes FROM traffic")
    assert traffic == rows_of(lake, "SELECT count(*) AS messages, sum(octet_length(data)) AS bytes FROM messages")


def test_an_index_saves_the_name_of_the_topic(lake: Lake) -> None:
    (row,) = rows_of(lake, "SELECT * FROM topic_savings WHERE topic LIKE '%ключ%' AND topic NOT LIKE '%' || chr(10)")
    field = len(str(row["topic"]).encode()) + 2
    assert (row["messages"], row["by_index"], row["as_names"], row["as_indices"]) == (10, 1, field, 2)


def test_the_announcement_of_a_batch_is_as_long_as_its_json(lake: Lake) -> None:
    found = rows_of(lake, "SELECT separator_key, separator_value, batch_cid, message_bytes FROM batch_times")
    assert {row["separator_key"] for row in found} >= {"model", 'a/"ключ"\n\\'}
    for row in found:
        sep = f"{row['separator_key']}/{row['separator_value']}"
        assert row["message_bytes"] == len(orjson.dumps({"typ": 3, "sep": sep, "batch": row["batch_cid"]}))
