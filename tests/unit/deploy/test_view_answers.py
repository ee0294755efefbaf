"""What the views say of a lake with odd rows (kit.small_lake), held to the same worked out by hand or in Python."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import orjson
import pytest

from kiln.deploy.query.ask import query_lake
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.views import views
from kit.small_lake import AT, append, small_lake

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


def test_a_stream_that_advanced_between_two_responses_has_no_conflict(tmp_path: Path) -> None:
    """An UPDATE between them names the later tip; a late node that still names the earlier one conflicts."""

    def say(node: str, late: float, stream: str, tip: str) -> dict[str, object]:
        common = {"message_id": f"{node}{late}{stream}", "from_peer": node, "observed_at": after(late)}
        return {**common, "type": "RESPONSE", "query_id": stream, "tips": {stream: tip}}

    def announce(late: float, stream: str, tip: str) -> dict[str, object]:
        common = {"message_id": f"{late}{stream}", "type": "UPDATE", "observed_at": after(late)}
        return {**common, "stream": stream, "tip": tip, "from_peer": "a"}

    rows = [
        *(say("a", 1, "advanced", "t1"), announce(2, "advanced", "t2"), say("b", 3, "advanced", "t2")),
        *(announce(4, "advanced", "t3"), say("c", 5, "advanced", "t3")),
        *(say("a", 1, "late", "t1"), announce(2, "late", "t2"), say("b", 3, "late", "t2"), say("c", 4, "late", "t1")),
        *(announce(0, "old", "t2"), say("a", 1, "old", "t1"), say("b", 3, "old", "t2"), announce(4, "old", "t2")),
        *(say("a", 1, "alone", "t1"), say("a", 2, "alone", "t2")),
    ]
    lake = Lake(str(tmp_path))
    lake.create(("messages",))
    append(lake, "messages", rows)
    found = rows_of(lake, "SELECT stream, tips, nodes, which FROM conflicting_responses ORDER BY stream")
    assert found == [
        {"stream": "late", "tips": 2, "nodes": 3, "which": ["t1", "t2"]},
        {"stream": "old", "tips": 2, "nodes": 2, "which": ["t1", "t2"]},
    ]


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


# ---------------------------------------------------------------- control entries

A_CONNECTION, B_CONNECTION = "e0" * 16, "ee" * 16


def test_a_stay_in_the_mesh_ends_with_a_prune_or_with_its_connection(lake: Lake) -> None:
    found = rows_of(lake, "SELECT * FROM mesh_members WHERE topic = 'odd' ORDER BY remote_peer, since")
    assert [
        tuple(row[name] for name in ("connection", "since", "until", "grafted_by", "ended_by")) for row in found
    ] == [
        (A_CONNECTION, after(0), after(2), "IN", "OUT"),  # a second GRAFT is no second stay
        (A_CONNECTION, after(3), None, "OUT", None),
        (B_CONNECTION, after(0), after(2), "IN", "CLOSED"),
    ]


def test_churn_counts_each_graft_and_prune(lake: Lake) -> None:
    found = rows_of(lake, "SELECT * EXCLUDE (minute, network) FROM mesh_churn WHERE topic = 'odd' OR topic IS NULL")
    assert sorted((tuple(row.values()) for row in found), key=str) == [("odd", 3, 1, 0, 1, 2), (None, 1, 0, 0, 0, 1)]


def test_a_subscriber_has_said_so_last_and_is_connected(lake: Lake) -> None:
    found = rows_of(lake, "SELECT local_peer, remote_peer, since FROM subscribers WHERE topic = 'odd'")
    assert found == [{"local_peer": "us0", "remote_peer": "a", "since": after(0)}]  # b's connection has ended


def test_an_announced_message_is_requested_and_delivered(lake: Lake) -> None:
    sql = "SELECT * EXCLUDE (local_peer) FROM gossip_efficiency WHERE remote_peer IN ('a', 'b') ORDER BY remote_peer"
    assert [tuple(row.values()) for row in rows_of(lake, sql)] == [("a", 3, 2, 1, 0, 0), ("b", 0, 0, 0, 0, 1)]


def test_duplicates_are_told_by_whether_an_idontwant_came_before(lake: Lake) -> None:
    sql = "SELECT * FROM duplicate_savings WHERE length(remote_peer) = 1 ORDER BY remote_peer"
    assert [tuple(row.values()) for row in rows_of(lake, sql)] == [
        ("a", 2, 1, 0, 1, 1, 0),  # the IDONTWANT came after its copies
        ("b", 1, 0, 0, 0, 2, 1),  # odd9 never came
        ("c", 1, 1, 0, 1, 0, 0),
    ]
    (whole,) = rows_of(lake, "SELECT sum(copies) AS copies, sum(duplicates) AS more FROM duplicate_savings")
    (copies,) = rows_of(lake, "SELECT count(*) AS copies FROM copies")
    (late,) = rows_of(
        lake,
        """SELECT count(*) AS more FROM copies JOIN message_copies USING (network, message_id)
           WHERE observed_at > first_at""",
    )
    assert whole == copies | late


def test_the_share_of_control_is_that_of_the_bytes(lake: Lake) -> None:
    sql = "SELECT sum(bytes) AS bytes, sum(control_bytes) AS control FROM control_share WHERE remote_peer <> 'b'"
    (whole,) = rows_of(lake, sql)
    (bytes_,) = rows_of(lake, "SELECT sum(octet_length(payload)) AS n FROM frames WHERE remote_peer <> 'b'")
    (control,) = rows_of(
        lake,
        """SELECT sum(wire_bytes) AS n
           FROM (SELECT connection, direction, wire_bytes FROM controls
                 UNION ALL SELECT connection, direction, wire_bytes FROM subscriptions)
           WHERE (connection, direction) IN (SELECT (connection, direction) FROM frames WHERE remote_peer <> 'b')""",
    )
    assert whole == {"bytes": bytes_["n"], "control": control["n"]}


def test_a_connection_has_its_frames_and_ends_with_empty_ones(lake: Lake) -> None:
    sql = f"""SELECT local_peer, opened_at, closed_at, last_at, frames_in, frames_out, bytes_in, control_bytes_in,
                     control_bytes_out, agent, end_reason, dialled
              FROM connections WHERE connection = '{B_CONNECTION}' ORDER BY local_peer"""
    assert [tuple(row.values()) for row in rows_of(lake, sql)] == [
        ("us0", after(-1), None, after(1), 2, 0, 4, 40, 10, None, None, None),
        ("us1", after(0), after(2), after(2), 1, 0, 2, 40, 10, "kubo/1", "gone", False),
    ]


def test_relays_of_all_topics_are_the_relays_of_messages(lake: Lake) -> None:
    sql = "SELECT sum(copies) AS copies, sum(first) AS first FROM"
    (by_topic,) = rows_of(lake, f"{sql} topic_relays")
    known = "copies SEMI JOIN messages USING (network, message_id)"
    (copies,) = rows_of(lake, f"SELECT count(*) AS n FROM {known}")
    assert by_topic["copies"] == copies["n"]
    (row,) = rows_of(lake, "SELECT * FROM topic_relays WHERE remote_peer = 'a' AND topic LIKE '%ключ%'")
    assert (row["copies"], row["first"], row["behind_p99_seconds"]) == (2, 1, 0.25)


def test_relays_of_messages_without_a_topic_count() -> None:
    with duckdb.connect() as tables:
        tables.execute("CREATE TABLE messages AS SELECT 'clay' AS network, 'm' AS message_id, NULL::VARCHAR AS topic")
        tables.execute(
            "CREATE TABLE copies AS SELECT 'clay' AS network, 'm' AS message_id, unnest(['a', 'b']) AS remote_peer, "
            "unnest([TIMESTAMPTZ '2026-01-01 00:00:00Z', TIMESTAMPTZ '2026-01-01 00:00:01Z']) AS observed_at"
        )
        rows = tables.execute(f"{views()['topic_relays'].duckdb} ORDER BY remote_peer").fetchall()
    assert rows == [("clay", None, "a", 1, 1, 0.0, 0.0), ("clay", None, "b", 1, 0, 1.0, 1.0)]


def test_forms_of_topics_are_compared_by_kind(lake: Lake) -> None:
    names = ("entries", "by_index", "as_sent", "as_names", "as_indices", "with_topic_streams")
    forms = {
        (row["kind"], row["direction"]): tuple(row[name] for name in names) for row in rows_of(lake, "FROM topic_forms")
    }
    assert {kind for kind, _ in forms} == {"PUBLISH", "SUBSCRIBE", "IHAVE", "GRAFT", "PRUNE"}
    own = "controls WHERE kind = 'PRUNE' AND direction = 'OUT' AND topic"
    (others,) = rows_of(
        lake, f"SELECT count(*) AS n, sum(octet_length(encode(topic)) + 2) AS bytes FROM {own} <> 'odd'"
    )
    entries, _, as_sent, as_names, as_indices, rival = forms["PRUNE", "OUT"]
    count, size = int(str(others["n"])), int(str(others["bytes"]))
    assert (entries, as_names, as_indices, rival) == (count + 1, size + 5, 2 * count + 3, 0)
    assert int(str(as_sent)) < size + 5
    entries, by_index, as_sent, as_names, _, rival = forms["SUBSCRIBE", "IN"]
    assert (by_index, as_sent, rival) == (0, as_names, as_names)
    (copies,) = rows_of(
        lake,
        """SELECT count(*) AS n
           FROM copies SEMI JOIN (FROM messages WHERE topic IS NOT NULL) USING (network, message_id)""",
    )
    assert forms["PUBLISH", "IN"][0] == copies["n"]
